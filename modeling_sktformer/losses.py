"""
Losses of the heads, which keep float64 and, but for spans, average once over all accumulated batches.

`PreTrainedModel.loss_function` does not: it casts to float32, and divides all but cross entropy by the batch it sees.
"""

import torch
from torch import nn


IGNORE_INDEX = -100
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """
    Mean cross entropy over the labels that are not -100, in float32 at least; zero if there are none.

    `logits` `(num_items, num_classes)` are scores before the softmax, `labels` `(num_items,)` classes. The sum is
    divided by `num_items_in_batch`, as `Trainer` gives it with gradient accumulation, or else by the number of labels
    here.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits.device)
    total = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return _mean(total, (labels != IGNORE_INDEX).sum(), num_items_in_batch)


def find_problem_type(logits: torch.Tensor, labels: torch.Tensor) -> str:
    """Regression for one label, single-label for integer labels, multi-label for others."""
    several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    return "regression" if logits.shape[-1] == 1 else several


def classification_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    problem_type: str,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """
    Loss of a sequence classifier with `logits` `(batch_size, num_labels)`; the divisor is as in [`cross_entropy`].

    The `problem_type` is `"regression"` (mean squared error), `"single_label_classification"` (cross entropy) or
    `"multi_label_classification"` (binary cross entropy). `labels` are classes `(batch_size,)` or targets in the shape
    of `logits` (one column may be left out); a `ValueError` if their shape does not fit, or the problem is another.
    """
    if problem_type not in PROBLEM_TYPES:
        raise ValueError(f"`problem_type` is {problem_type!r}; it must be one of {', '.join(PROBLEM_TYPES)}.")
    is_single = problem_type == "single_label_classification"
    shape = logits.shape[: 1 if is_single or logits.shape[-1] == 1 else 2]
    misfits = labels.numel() != shape.numel() or (labels.dim() and labels.shape not in (shape, (*shape, 1)))
    if misfits or (is_single and labels.is_floating_point()):
        hint = "give one class index, an integer, for each row of logits"
        if logits.shape[-1] == 1:
            hint = "give one number for each row of logits"
            hint += ', and set `config.problem_type="regression"`' * is_single
        elif not is_single:
            hint = 'set `config.problem_type="single_label_classification"` for class indices, which are integers'
        elif labels.shape == logits.shape:
            hint += ', or set `config.problem_type="multi_label_classification"`'
        what = f"labels of shape {tuple(labels.shape)} and type {labels.dtype} do not fit logits of shape"
        raise ValueError(f"{what} {tuple(logits.shape)} in a {problem_type} problem; {hint}.")
    if is_single:
        return cross_entropy(logits, labels.view(-1), num_items_in_batch)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = labels.to(logits.device, logits.dtype).view_as(logits)
    if problem_type == "regression":
        return _mean(nn.functional.mse_loss(logits, targets, reduction="sum"), logits.numel(), num_items_in_batch)
    known = (targets != IGNORE_INDEX).to(logits.dtype)
    total = nn.functional.binary_cross_entropy_with_logits(logits, targets, known, reduction="sum")
    return _mean(total, known.sum(), num_items_in_batch)


def span_loss(
    start_logits: torch.Tensor, end_logits: torch.Tensor, start_positions: torch.Tensor, end_positions: torch.Tensor
) -> torch.Tensor:
    """
    Mean cross entropy of where answers `(B,)` start and end, by logits `(B, S)`; places outside of the input, and at
    padding, whose logits are the lowest finite value, are not counted.
    """
    positions = torch.stack([start_positions.flatten(), end_positions.flatten()]).to(start_logits.device)
    inside = positions.clamp(0, start_logits.shape[1] - 1)
    scores = torch.stack([start_logits, end_logits]).gather(2, inside.unsqueeze(2)).squeeze(2)
    is_outside = (positions != inside) | (scores == torch.finfo(scores.dtype).min)
    positions = positions.masked_fill(is_outside, IGNORE_INDEX)
    return (cross_entropy(start_logits, positions[0]) + cross_entropy(end_logits, positions[1])) / 2


def _mean(total: torch.Tensor, num_here: torch.Tensor | int, num_items: torch.Tensor | int | None) -> torch.Tensor:
    divisor = num_here if num_items is None else num_items
    # A number is no tensor, which would have to be brought to the device.
    return total / (divisor.to(total.device).clamp(min=1) if torch.is_tensor(divisor) else max(divisor, 1))
