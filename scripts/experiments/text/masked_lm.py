"""Masked language modelling on the Trainer: masking, and an evaluation that weighs tokens equally."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset, IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from experiments.text.packing import tokenizer_rules
from experiments.text.source import digest
from experiments.trainer import ExperimentTrainer
from modeling_sktformer.losses import IGNORE_INDEX


# Part of the name of masked blocks: a change of the rules below must not meet blocks that older rules have masked.
MASKING_VERSION = 1
_MASKED_ROWS = 1000  # evaluation blocks that share a seed
# Architectures whose loss is divided by the number of items that a Trainer gives them.
_COUNT_ITEMS = ("sktformer", "modernbert")


@dataclass
class MaskingCollator(DataCollatorForLanguageModeling):
    """
    Pads examples and masks those that come without labels: 15 % of the tokens by default, of these 80 % become [MASK],
    10 % a random token, 10 % stay.

    The masks of a batch depend on `seed` and on the number of the batch in the run alone, counted over all processes,
    each of which gets every `num_processes`-th ([`MaskNumbering`] says where an epoch begins). So a run that is cut
    short sees the masks that it would have seen, and two processes those of one that accumulates two batches.

    Examples that carry labels, as evaluation blocks do ([`mask_once`]), are only padded. A mask that keeps every token
    is left out, so that architectures that take inputs of one length alone can be trained too. A batch of so few
    tokens that none was chosen gets one masked: a mean over none is no loss.
    """

    process_index: int = 0
    num_processes: int = 1
    _first: int = 0
    _drawn: int = 0

    def start_at(self, batch_number: int) -> None:
        """Say how many batches of this process come before the next one."""
        self._first, self._drawn = batch_number, 0

    def create_rng(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: every batch has a generator of its own, in place of the library's for every process."""

    def torch_call(self, examples: list[Any]) -> dict[str, torch.Tensor]:
        if "labels" in examples[0]:
            batch = dict(DataCollatorForTokenClassification(self.tokenizer).torch_call(examples))
        else:
            self.generator = torch.Generator().manual_seed(self._next_seed())
            batch = dict(super().torch_call(examples))
            if not bool((batch["labels"] != IGNORE_INDEX).any()):
                self._mask_one(batch)
        mask = batch.get("attention_mask")  # which some architectures' tokenizers do not make
        if mask is not None and bool(mask.all()):
            del batch["attention_mask"]
        return batch

    def _mask_one(self, batch: dict[str, torch.Tensor]) -> None:
        special = torch.tensor(self.tokenizer.all_special_ids)
        places = torch.isin(batch["input_ids"], special, invert=True).nonzero()
        if len(places):
            row, column = places[int(torch.randint(len(places), (), generator=self.generator))]
            batch["labels"][row, column] = batch["input_ids"][row, column]
            batch["input_ids"][row, column] = self.tokenizer.mask_token_id

    def _next_seed(self) -> int:
        # Workers of a data loader take batches in turn and count their own.
        worker = torch.utils.data.get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        number = (self._first + self._drawn * workers + index) * self.num_processes + self.process_index
        self._drawn += 1
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{number}".encode()).digest()[:7], "big")


class MaskNumbering(TrainerCallback):
    """Tells a [`MaskingCollator`] where in the run an epoch begins, or goes on after an interruption."""

    def __init__(self, collator: MaskingCollator):
        self.collator = collator
        self._begins = True

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        text = getattr(kwargs.get("train_dataloader"), "dataset", None)
        is_stream = isinstance(text, (IterableDataset, torch.utils.data.IterableDataset))
        # The batches of a stream that a resumed run skips are collated once more, and count.
        steps = 0 if is_stream and self._begins else state.global_step
        self.collator.start_at(steps * args.gradient_accumulation_steps)
        self._begins = False


def mask_once(blocks: Dataset, tokenizer: PreTrainedTokenizerBase, mlm_probability: float, seed: int) -> Dataset:
    """Mask evaluation blocks once, with `labels`, and cache that: all models predict the same tokens at any batch."""
    special = [tokenizer.mask_token_id, tokenizer.all_special_ids, tokenizer.padding_side]
    rules = [MASKING_VERSION, transformers.__version__, tokenizer_rules(tokenizer), special, mlm_probability, seed]
    return blocks.map(
        _mask_rows,
        with_indices=True,
        batched=True,
        batch_size=_MASKED_ROWS,
        remove_columns=blocks.column_names,
        new_fingerprint=digest(blocks._fingerprint, json.dumps(rules)),  # the library knows a function by its name
        fn_kwargs={"tokenizer": tokenizer, "mlm_probability": mlm_probability, "seed": seed},
        desc="Masking evaluation",
    )


def _mask_rows(rows: Mapping[str, list], indices: list[int], **options: Any) -> dict[str, list[list[int]]]:
    collator = MaskingCollator(**options)
    collator.start_at(indices[0] // _MASKED_ROWS)
    batch = collator([{"input_ids": ids} for ids in rows["input_ids"]])
    is_left = collator.tokenizer.padding_side == "left"
    return {
        name: [
            row[-len(ids) :] if is_left else row[: len(ids)]
            for row, ids in zip(batch[name].tolist(), rows["input_ids"], strict=True)
        ]
        for name in ("input_ids", "labels")
    }


def sum_token_losses(logits: torch.Tensor | tuple, labels: torch.Tensor) -> torch.Tensor:
    """
    Reduce a batch's [`predicted_logits`] to what the metrics need, so that no logits are ever gathered: the summed
    loss in nats, correct predictions and number of predicted tokens of each sequence, of shape `(batch_size, 3)`.
    """
    rows = predicted_logits(logits, labels)
    predicted = labels != IGNORE_INDEX
    targets = labels[predicted]
    losses = torch.nn.functional.cross_entropy(rows, targets, reduction="none")
    sums = rows.new_zeros(labels.shape[0], 3)
    values = torch.stack([losses, (rows.argmax(dim=-1) == targets).float(), torch.ones_like(losses)], dim=-1)
    return sums.index_add_(0, predicted.nonzero()[:, 0], values)


def predicted_logits(logits: torch.Tensor | tuple, labels: torch.Tensor) -> torch.Tensor:
    """
    The logits at the labelled places, as float32 of shape `(num_labelled, vocab_size)`, for labels of shape
    `(batch_size, sequence_length)`. Some heads give these places alone, and some a tuple that begins with the logits.
    """
    scores = logits[0] if isinstance(logits, tuple) else logits
    return (scores if scores.dim() == 2 else scores[labels != IGNORE_INDEX]).float()


def token_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Loss (nats), perplexity and accuracy over all predicted tokens, from [`sum_token_losses`]."""
    loss, correct, count = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    loss /= max(count, 1)
    return {
        "loss": float(loss),  # in place of the Trainer's own
        "perplexity": float(np.exp(min(loss, 700.0))),
        "accuracy": float(correct / max(count, 1)),
        "predicted_tokens": int(count),
    }


class MaskedLMTrainer(ExperimentTrainer):
    """A Trainer whose `eval_loss` is the mean over all predicted tokens, and not over batches of their means."""

    def __init__(self, **kwargs: Any):
        super().__init__(compute_metrics=token_metrics, preprocess_logits_for_metrics=sum_token_losses, **kwargs)
        # Others take the number of items of a whole step too, and do not divide by it: of n batches on m devices their
        # loss and gradients would be n m times too large.
        model = self.accelerator.unwrap_model(self.model)
        counts_items = model.config.model_type in _COUNT_ITEMS
        self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs and counts_items
        if hasattr(model, "evaluates_sparsely"):
            # Of a batch the logits of all tokens would take more memory than its training.
            model.evaluates_sparsely = True
