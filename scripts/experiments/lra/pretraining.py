"""Masked self-pretraining: a task's own training inputs, without their labels, teach the encoder first."""

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput

from experiments.fine_tuning import FineTuningTrainer
from experiments.lra.examples import PAD, collate
from experiments.text.masked_lm import sum_token_losses, token_metrics
from modeling_sktformer.losses import IGNORE_INDEX


class SelfPretrainingTrainer(FineTuningTrainer):
    """A Trainer with a [`MaskedCollator`] that gathers sums over predicted tokens in place of their logits."""

    def __init__(self, per_example: int, **kwargs: Any):
        def sum_losses(logits: Any, labels: torch.Tensor) -> torch.Tensor:
            # A row for each example and not for each of its sequences: the last batch is cut to so many.
            return sum_token_losses(logits, labels).unflatten(0, (-1, per_example)).sum(dim=1)

        super().__init__(preprocess_logits_for_metrics=sum_losses, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate, always with the same values masked: the best model is chosen by it."""
        collator = cast(MaskedCollator, self.data_collator)
        collator.is_training = False
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            collator.is_training = True


class MaskedCollator:
    """
    Pads sequences, of pairs each by itself, and replaces a share of their values by the mask, to be predicted.

    Which values these are depends on what is collated alone, so that a run that is cut short goes on with the masks
    that it would have seen: in training on all of the batch and its place there, because a sequence gets other masks
    in other company; in evaluation (`is_training` is false) on each sequence alone, whatever the size of the batch.

    Args:
        mask_token (`int`): The token that stands for a value.
        probability (`float`): Share of the values that are masked.
        takes_mask (`bool`): Whether the model is told where padding is, which FNet cannot be.
    """

    def __init__(self, mask_token: int, probability: float, takes_mask: bool = True):
        self.mask_token, self.probability, self.takes_mask = mask_token, probability, takes_mask
        self.is_training = True

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels` (-100 where nothing is masked) and, with padding, `attention_mask`, `(B, length)`."""
        batch = {name: inputs.flatten(0, -2) for name, inputs in collate(examples).items() if name != "labels"}
        tokens = batch["input_ids"]
        company = hashlib.sha256(tokens.numpy().tobytes()).digest() if self.is_training else b""
        masked = torch.zeros_like(tokens, dtype=torch.bool)
        for place, (row, is_masked) in enumerate(zip(tokens.numpy(), masked.numpy(), strict=True)):
            values = row[row != PAD]
            origin = company + place.to_bytes(8) if self.is_training else b""
            seed = hashlib.sha256(origin + values.tobytes()).digest()
            is_masked[: len(values)] = np.random.default_rng(list(seed)).random(len(values)) < self.probability
        masked[:, 0] |= ~masked.any(dim=1)  # something is to be predicted in each
        batch["labels"] = torch.where(masked, tokens, IGNORE_INDEX)
        batch["input_ids"] = torch.where(masked, self.mask_token, tokens)
        if not self.takes_mask:
            batch.pop("attention_mask", None)
        return batch


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy and loss (nats) over all masked values; `score` is the accuracy."""
    found = token_metrics(prediction)
    return {"score": found["accuracy"], "accuracy": found["accuracy"], "masked_loss": found["loss"]}
