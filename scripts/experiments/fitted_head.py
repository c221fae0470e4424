"""
A classifier on an encoder as it is: its head is computed from what the encoder gives for the training examples.

Excerpts of one book are more alike than books of one author. A training by gradients tells the excerpts that it learns
from apart by whatever does, and bends the encoder to it. What is computed here weighs every direction by how much it
varies within a label, as linear discriminants do, and leaves the encoder alone. That a training bends an encoder, and
is behind a linear classifier on texts of another kind, is shown in "Fine-Tuning can Distort Pretrained Features and
Underperform Out-of-Distribution" (Kumar et al., 2022), where a training that begins with such a head beats both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel

from experiments.arguments import UserError
from experiments.heads import Collator, HeadArguments
from modeling_sktformer.modeling_sktformer import SKTformerClassificationHead


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
        raise UserError("The training examples have a single label; leave out --fit_head and --baseline frozen.")
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
    Compute the head of a sequence classifier from all examples; the encoder stays as it is. Of SKTformer's it is all
    of the head, of others the last linear layer, behind what their heads make of the encoder.

    Raises:
        UserError: if the labels are not single ones, or the model ends in no linear layer with a bias.
    """
    if model.config.problem_type not in (None, "single_label_classification"):
        raise UserError(f"--fit_head is for single labels, not {model.config.problem_type}; leave it out.")
    num_labels = cast(int, model.config.num_labels)
    head: Any = getattr(model, "classifier", None)
    is_ours = type(head) is SKTformerClassificationHead
    last = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == num_labels][-1:]
    if not last or last[0].bias is None:
        kind = type(model).__name__
        raise UserError(f"--fit_head computes a linear layer with a bias, and {kind} ends in none; leave it out.")
    read: list[torch.Tensor] = []
    hook = (head.dense if is_ours else last[0]).register_forward_pre_hook(
        lambda module, inputs: read.append(inputs[0].double().cpu().flatten(0, -2))
    )
    labels = torch.cat([batch["labels"] for batch, _ in _outputs(model, model, examples, collator, args)])
    hook.remove()
    features = torch.cat(read)
    standardise = Standardised.of(features)
    standardised = standardise(features)
    classifier = fit_classifier(standardised.numpy(), labels.numpy(), num_labels)
    if is_ours:
        head.pooling.calibrate(features.to(args.device))  # which standardises likewise
        write_classifier(head, classifier, standardised)
        return
    weight = torch.from_numpy(classifier.weight) / standardise.std
    with torch.no_grad():
        last[0].weight.copy_(weight)
        last[0].bias.copy_(torch.from_numpy(classifier.bias) - weight @ standardise.mean)


def predict_frozen(
    model: PreTrainedModel, splits: Mapping[str, Dataset], collator: Collator, args: HeadArguments
) -> dict[str, np.ndarray]:
    """
    What a linear classifier of mean and standard deviation of all hidden states of any encoder answers, fitted to the
    split "train": probabilities `(num_examples, num_labels)` for each of the others.
    """
    encoder = getattr(model, "get_base_model", lambda: model)().base_model  # also where it has adapters
    features, labels = {}, []
    for name, examples in splits.items():
        pooled = []
        for batch, outputs in _outputs(model, encoder, examples, collator, args, output_hidden_states=True):
            mask = batch.get("attention_mask", torch.ones(batch["input_ids"].shape))
            weights = (mask / mask.sum(dim=1, keepdim=True)).unsqueeze(-1)
            for_states = [states.double().cpu() for states in outputs.hidden_states]
            means = [(states * weights).sum(dim=1) for states in for_states]
            pairs = zip(for_states, means, strict=True)
            variances = [((states - mean.unsqueeze(1)).square() * weights).sum(dim=1) for states, mean in pairs]
            pooled.append(torch.cat([*means, *(variance.sqrt() for variance in variances)], dim=1))
            if name == "train":
                labels.append(batch["labels"])
        features[name] = torch.cat(pooled)
    standardise = Standardised.of(features["train"])
    known = torch.cat(labels).numpy()
    classifier = fit_classifier(standardise(features["train"]).numpy(), known, cast(int, model.config.num_labels))
    others = {name: standardise(values).numpy() for name, values in features.items() if name != "train"}
    return {name: softmax(values @ classifier.weight.T + classifier.bias, axis=1) for name, values in others.items()}


@dataclass(frozen=True)
class Standardised:
    """Features as some of them have mean 0 and variance 1; what is constant in these is moved alone."""

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def of(cls, features: torch.Tensor) -> "Standardised":
        """By examples `(num_examples, width)`."""
        std, mean = torch.std_mean(features, dim=0, correction=0)
        return cls(mean, torch.where(std > 1e-6, std, 1.0))

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return (features - self.mean) / self.std


def _outputs(
    model: PreTrainedModel, part: Any, examples: Dataset, collator: Collator, args: HeadArguments, **options: Any
) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
    """Every batch of the examples, with what a part of the model, on the run's device, gives for it."""
    batches = DataLoader(examples, batch_size=args.per_device_eval_batch_size, collate_fn=collator)  # type: ignore[arg-type]
    model.to(args.device).eval()  # type: ignore[arg-type]
    for batch in tqdm(batches, "Reading the encoder", disable=bool(args.disable_tqdm) or not args.should_log):
        inputs = {name: value.to(args.device) for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            outputs = part(**inputs, **options)
        yield batch, outputs


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
