"""Masked self-pretraining: a task's own training inputs, without their labels, teach the encoder first."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput

from experiments.fine_tuning import FineTuningTrainer
from experiments.lra.examples import PAD, collate
from experiments.text.masked_lm import sum_token_losses
from modeling_sktformer.losses import IGNORE_INDEX


class SelfPretrainingTrainer(FineTuningTrainer):
    """A Trainer that gathers sums over predicted tokens in place of their logits."""

    def __init__(self, **kwargs: Any):
        super().__init__(preprocess_logits_for_metrics=sum_token_losses, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate, always with the same values masked: the best model is chosen by it."""
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)
            return super().evaluation_loop(*args, **kwargs)


class MaskedCollator:
    """
    Pads sequences, of pairs each by itself, and replaces a share of their values by the mask, to be predicted.

    Args:
        mask_token (`int`): The token that stands for a value.
        probability (`float`): Share of the values that are masked.
        takes_mask (`bool`): Whether the model is told where padding is, which FNet cannot be.
    """

    def __init__(self, mask_token: int, probability: float, takes_mask: bool = True):
        self.mask_token, self.probability, self.takes_mask = mask_token, probability, takes_mask

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels` (-100 where nothing is masked) and, with padding, `attention_mask`, `(B, length)`."""
        batch = {name: inputs.flatten(0, -2) for name, inputs in collate(examples).items() if name != "labels"}
        tokens = batch["input_ids"]
        masked = (torch.rand(tokens.shape) < self.probability) & (tokens != PAD)
        masked[:, 0] |= ~masked.any(dim=1)  # something is to be predicted in each
        batch["labels"] = torch.where(masked, tokens, IGNORE_INDEX)
        batch["input_ids"] = torch.where(masked, self.mask_token, tokens)
        if not self.takes_mask:
            batch.pop("attention_mask", None)
        return batch


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy and loss (nats) over all masked values; `score` is the accuracy."""
    loss, right, number = np.asarray(prediction.predictions).reshape(-1, 3).sum(axis=0).tolist()
    return {"score": right / number, "accuracy": right / number, "masked_loss": loss / number}
