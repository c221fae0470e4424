"""
A classifier on an encoder as it is: its head is computed from what the encoder gives for the training examples.

Excerpts of one book are more alike than books of one author. A training by gradients tells the excerpts that it learns
from apart by whatever does, and bends the encoder to it. What is computed here weighs every direction by how much it
varies within a label, as linear discriminants do, and leaves the encoder alone. That a training bends an encoder, and
is behind a linear classifier on texts of another kind, is shown in "Fine-Tuning can Distort Pretrained Features and
Underperform Out-of-Distribution" (Kumar et al., 2022), where a training that begins with such a head beats both.
"""

import logging
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
from experiments.heads import Collator, HeadArguments, encoder_of
from modeling_sktformer.modeling_sktformer import SKTformerClassificationHead, SKTformerMatchingHead


logger = logging.getLogger(__name__)
# Share of the identity in the covariance within labels, so that directions that hardly vary there are not believed.
_SHRINKAGE = 0.1
_SMALLEST_VARIANCE = 1e-6  # of a label's examples, of features of variance 1
# Standard deviation of what a head's tanh reads, which is nearly linear there.
_LINEAR_RANGE = 0.03


@dataclass(frozen=True)
class LinearClassifier:
    """Scores of labels, `features @ weight.T + bias`: `(num_labels, width)` and `(num_labels,)`."""

    weight: np.ndarray
    bias: np.ndarray


def check_finite(features: np.ndarray) -> None:
    """A `UserError` if one of an encoder's features is not finite."""
    if not np.isfinite(features).all():
        raise UserError(
            "What the encoder gives is not finite everywhere: its training has diverged; take another one."
        )


def fit_classifier(features: np.ndarray, labels: np.ndarray, num_labels: int) -> LinearClassifier:
    """
    Fit a linear classifier: logistic regression, with all labels of one weight, on features that are whitened by their
    covariance within labels.

    Args:
        features (`np.ndarray` of shape `(num_examples, width)`): Standardised.
        labels (`np.ndarray` of shape `(num_examples,)`): Numbers of the labels, of which some may have no example.
        num_labels (`int`): How many labels there are; the scores of those without an example are the lowest.

    Raises:
        UserError: if there is a single label, or a feature that is not finite.
    """
    width, present = features.shape[1], np.unique(labels)
    if len(present) < 2:
        raise UserError("The training examples have a single label; leave out --fit_head and --baseline frozen.")
    check_finite(features)
    logger.info("Fitting a linear classifier of %s features to %s examples.", f"{width:,}", f"{len(features):,}")
    # Fewer examples than features say nothing of what is at right angles to them all, and have no weight there.
    span = np.linalg.svd(features, full_matrices=False)[2] if len(features) < width else None
    features = features if span is None else features @ span.T
    means = np.stack([features[labels == label].mean(axis=0) for label in present])
    residuals = features - means[np.searchsorted(present, labels)]
    covariance = residuals.T @ residuals / len(features)
    # A label whose examples are all alike would be believed without bound.
    variance = max(np.trace(covariance) / width, _SMALLEST_VARIANCE)
    shrunk = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * variance * np.eye(len(covariance))
    scales, directions = np.linalg.eigh(shrunk)
    whitening = directions / np.sqrt(scales)
    fitted = LogisticRegression(class_weight="balanced", max_iter=1000).fit(features @ whitening, labels)
    weight, bias = fitted.coef_ @ whitening.T, fitted.intercept_
    weight = weight if span is None else weight @ span
    if len(present) == 2:  # of which one row says how far the second is above the first
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    classifier = LinearClassifier(np.zeros((num_labels, width)), np.full(num_labels, bias.min() - 10))
    classifier.weight[present], classifier.bias[present] = weight, bias
    return classifier


def fit_head(model: PreTrainedModel, examples: Dataset, collator: Collator, args: HeadArguments) -> None:
    """
    Compute the head of a sequence classifier from all examples; the encoder stays as it is. Of SKTformer's it is all
    of the head, of others the last linear layer, behind what their heads make of the encoder.

    Raises:
        UserError: if the labels are not single ones, the model reads pairs, or it ends in no linear layer with a bias.
    """
    check_single("--fit_head", model.config.problem_type)
    num_labels = cast(int, model.config.num_labels)
    head: Any = getattr(model, "classifier", None)
    if isinstance(head, SKTformerMatchingHead):
        raise UserError("--fit_head computes heads that read one sequence, and this one reads two; leave it out.")
    is_ours = isinstance(head, SKTformerClassificationHead)
    last = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == num_labels][-1:]
    if not last or last[0].bias is None:
        kind = type(model).__name__
        raise UserError(f"--fit_head computes a linear layer with a bias, and {kind} ends in none; leave it out.")
    read: list[torch.Tensor] = []
    hook = (head.dense if is_ours else last[0]).register_forward_pre_hook(
        lambda module, inputs: read.append(inputs[0].cpu().double().flatten(0, -2))
    )
    labels = torch.cat([batch["labels"] for batch, _ in _outputs(model, model, examples, collator, args)])
    hook.remove()
    features = torch.cat(read)
    read.clear()  # of which there is a copy now
    standardise = Standardised.of(features)
    standardised = standardise(features)
    classifier = fit_classifier(standardised.numpy(), labels.numpy(), num_labels)
    if is_ours:
        head.pooling.calibrate(features.to(head.pooling.center))  # which standardises likewise
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

    Raises:
        UserError: if the encoder has states of fewer tokens than its inputs, or what [`fit_classifier`] raises.
    """
    encoder = encoder_of(model)
    known = getattr(model.config, "pad_token_id", None)
    padding = -1 if known is None else known  # where a tokenizer makes no mask, as FNet's
    features, labels = {}, []
    for name, examples in splits.items():
        pooled = []
        for batch, outputs in _outputs(model, encoder, examples, collator, args, output_hidden_states=True):
            mask = batch.get("attention_mask", batch["input_ids"] != padding)
            statistics = [mean_and_deviation(states, mask) for states in outputs.hidden_states]
            pooled.append(torch.cat([part for parts in zip(*statistics, strict=True) for part in parts], dim=1))
            if name == "train":
                labels.append(batch["labels"])
        features[name] = torch.cat(pooled)
    standardise = Standardised.of(features["train"])
    known = torch.cat(labels).numpy()
    classifier = fit_classifier(standardise(features["train"]).numpy(), known, cast(int, model.config.num_labels))
    others = {name: standardise(values).numpy() for name, values in features.items() if name != "train"}
    for values in others.values():
        check_finite(values)
    return {name: softmax(values @ classifier.weight.T + classifier.bias, axis=1) for name, values in others.items()}


def mean_and_deviation(states: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Of states `(B, S, d)` over the tokens where a mask `(B, S)` is 1, in float64 on the CPU: `(B, d)` each.

    What an encoder has added at the end, to fill its blocks, is left out; one that shortens its input is an error.
    """
    length = mask.shape[1]
    if states.shape[1] < length:
        shorter = f"has states of {states.shape[1]} tokens for inputs of {length}"
        raise UserError(f"--baseline frozen weighs tokens by the mask, and this encoder {shorter}; leave it out.")
    states = states.cpu() if states.device.type == "mps" else states  # which knows no float64
    values, mask = states[:, :length].double(), mask.to(states.device).double()
    weights = (mask / mask.sum(dim=1, keepdim=True)).unsqueeze(-1)
    mean = (values * weights).sum(dim=1)
    return mean.cpu(), ((values - mean.unsqueeze(1)).square() * weights).sum(dim=1).sqrt().cpu()


def check_single(flag: str, problem: str | None) -> None:
    """Refuse a flag for what is no problem of single labels with a `UserError`."""
    if problem not in (None, "single_label_classification"):
        raise UserError(f"{flag} is for single labels, not {problem}; leave it out.")


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
    deviations = (features @ directions[:kept].T).square().mean(dim=0).sqrt()  # the means are 0
    directions = directions[:kept] * (_LINEAR_RANGE / deviations).unsqueeze(1)
    output = torch.zeros(head.output.weight.shape, dtype=weight.dtype)
    output[:, :kept] = weight @ torch.linalg.pinv(directions)
    head.dense.weight[:kept] = directions.to(head.dense.weight)
    # The others no larger: of a matrix with one scale, as it is when quantised, little would be left.
    if kept:
        head.dense.weight[kept:] *= directions.abs().max().item() / head.dense.weight.abs().max()
    head.dense.bias.zero_()
    head.output.weight.copy_(output)
    head.output.bias.copy_(torch.from_numpy(classifier.bias))
