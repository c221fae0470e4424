"""
A classifier on an encoder as it is: its head is computed from what the encoder gives for the training examples.

Excerpts of one book are more alike than books of one author. A training by gradients tells the excerpts that it learns
from apart by whatever does, and bends the encoder to it. What is computed here weighs every direction by how much it
varies within a label, as linear discriminants do, and leaves the encoder alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.linear_model import LogisticRegression
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel

from experiments.arguments import UserError
from experiments.heads import Collator, HeadArguments
from modeling_sktformer.modeling_sktformer import SKTformerClassificationHead
from modeling_sktformer.sequences import SequencePooling


# Share of the identity in the covariance within labels, so that directions that hardly vary there are not believed.
_SHRINKAGE = 0.1
# Standard deviation of what a head's tanh reads, which is nearly linear there.
_LINEAR_RANGE = 0.03


@dataclass(frozen=True)
class LinearClassifier:
    """Scores of labels, `features @ weight.T + bias`: `(num_labels, width)` and `(num_labels,)`."""

    weight: np.ndarray
    bias: np.ndarray


def fit_classifier(features: np.ndarray, labels: np.ndarray, num_labels: int) -> LinearClassifier:
    """
    Fit a linear classifier: logistic regression, with all labels of one weight, on features that are whitened by their
    covariance within labels.

    Args:
        features (`np.ndarray` of shape `(num_examples, width)`): Standardised.
        labels (`np.ndarray` of shape `(num_examples,)`): Numbers of the labels, of which some may have no example.
        num_labels (`int`): How many labels there are; the scores of those without an example are the lowest.

    Raises:
        UserError: if there is a single label.
    """
    present = np.unique(labels)
    if len(present) < 2:
        raise UserError("--fit_head finds a single label in the training examples; leave it out.")
    means = np.stack([features[labels == label].mean(axis=0) for label in present])
    residuals = features - means[np.searchsorted(present, labels)]
    covariance = residuals.T @ residuals / len(features)
    variance = max(np.trace(covariance) / len(covariance), np.finfo(float).tiny)
    shrunk = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * variance * np.eye(len(covariance))
    scales, directions = np.linalg.eigh(shrunk)
    whitening = directions / np.sqrt(scales)
    fitted = LogisticRegression(class_weight="balanced", max_iter=1000).fit(features @ whitening, labels)
    weight, bias = fitted.coef_ @ whitening.T, fitted.intercept_
    if len(present) == 2:  # of which one row says how far the second is above the first
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    classifier = LinearClassifier(np.zeros((num_labels, features.shape[1])), np.full(num_labels, bias.min() - 10))
    classifier.weight[present], classifier.bias[present] = weight, bias
    return classifier


def fit_head(model: PreTrainedModel, examples: Dataset, collator: Collator, args: HeadArguments) -> None:
    """
    Compute the head of a sequence classifier from all examples; the encoder stays as it is.

    Raises:
        UserError: if the model has another head than SKTformer's, or its labels are not single ones.
    """
    head: Any = getattr(model, "classifier", None)
    if type(head) is not SKTformerClassificationHead:
        kind = type(model).__name__
        raise UserError(f"--fit_head computes the head of an SKTformer for sequences, not of {kind}; leave it out.")
    if model.config.problem_type not in (None, "single_label_classification"):
        raise UserError(f"--fit_head is for single labels, not {model.config.problem_type}; leave it out.")
    features, labels = _pool(model, head.pooling, examples, collator, args)
    std, mean = torch.std_mean(features, dim=0, correction=0)
    head.pooling.calibrate(features.to(args.device))
    standardised = (features - mean) / torch.where(std > 1e-6, std, 1.0)  # as the head reads them from now on
    classifier = fit_classifier(standardised.numpy(), labels.numpy(), head.output.out_features)
    write_classifier(head, classifier, standardised)


def _pool(
    model: PreTrainedModel, pooling: SequencePooling, examples: Dataset, collator: Collator, args: HeadArguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a head reads of all examples, `(num_examples, width)`, and their labels."""
    features, labels = [], []
    hook = pooling.register_forward_hook(lambda module, inputs, output: features.append(output.double().cpu()))
    batches = DataLoader(examples, batch_size=args.per_device_eval_batch_size, collate_fn=collator)  # type: ignore[arg-type]
    model.to(args.device).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for batch in tqdm(batches, "Fitting the head", disable=bool(args.disable_tqdm) or not args.should_log):
            labels.append(batch.pop("labels"))
            model(**{name: value.to(args.device) for name, value in batch.items()})
    hook.remove()
    return torch.cat(features), torch.cat(labels)


@torch.no_grad()
def write_classifier(head: SKTformerClassificationHead, classifier: LinearClassifier, features: torch.Tensor) -> None:
    """
    Make a head, linear, tanh, linear, a linear classifier: its first layer reads the directions that scores of labels
    differ in, the strongest ones if it has too few outputs, and so little of each that the tanh is nearly linear.

    Args:
        head ([`SKTformerClassificationHead`]): Written to, but for outputs of its first layer that are not needed.
        classifier ([`LinearClassifier`]): Of what that layer reads.
        features (`torch.Tensor` of shape `(num_examples, width)`): Examples of that, standardised.
    """
    weight = torch.from_numpy(classifier.weight - classifier.weight.mean(axis=0))  # which no softmax sees
    _, sizes, directions = torch.linalg.svd(weight, full_matrices=False)
    kept = min(int((sizes > 1e-9 * sizes[0]).sum()), head.dense.out_features)
    directions = directions[:kept] * (_LINEAR_RANGE / (features @ directions[:kept].T).std(dim=0)).unsqueeze(1)
    output = torch.zeros(head.output.weight.shape, dtype=weight.dtype)
    output[:, :kept] = weight @ torch.linalg.pinv(directions)
    head.dense.weight[:kept] = directions.to(head.dense.weight)
    head.dense.bias[:kept] = 0.0
    head.output.weight.copy_(output)
    head.output.bias.copy_(torch.from_numpy(classifier.bias))
