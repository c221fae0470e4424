"""A model that classifies texts and its tokenizer, made for one another."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from experiments.adapters import LoraArguments
from experiments.architectures import fixed_length
from experiments.arguments import UserError
from experiments.checkpoints import CheckpointArguments
from experiments.models import fingerprint_checkpoint, fit_length, load_tokenizer


def load_text_tokenizer(checkpoint: CheckpointArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint, with a token to fill batches with; a `UserError` if it has none."""
    name = checkpoint.tokenizer_name or checkpoint.model_name_or_path
    revision = "main" if checkpoint.tokenizer_name else checkpoint.model_revision
    tokenizer: Any = load_tokenizer(name, checkpoint.trust_remote_code, (), revision)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"The tokenizer {name} has no pad token, which batches need; give another one.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def fit_text_classifier(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """
    Make a model take `max_length` tokens, and its tokenizer give what the model takes; raises as [`fit_length`], and
    a `UserError` for a model that cannot read padded batches.
    """
    if fixed := fixed_length(model.config):
        raise UserError(
            f"This {type(model).__name__} is linear in the length, for inputs of {fixed} tokens each and without "
            f"padding; --config_overrides num_landmarks={fixed} gives it full attention, which takes any text."
        )
    fit_length(model, tokenizer, max_length)
    taken = inspect.signature(model.forward).parameters
    unused = {"token_type_ids"} if getattr(model.config, "type_vocab_size", 2) < 2 else set()
    tokenizer.model_input_names = [n for n in tokenizer.model_input_names if n in taken and n not in unused]
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # by which a decoder finds the last token of a text


def encode_texts(
    rows: Dataset, columns: Sequence[str], collator: DataCollatorWithPadding, workers: int | None = None
) -> Dataset:
    """Tokenize texts, or pairs of them whose longer one is cut first, which a collator pads; other columns stay."""
    tokenizer, max_length = collator.tokenizer, collator.max_length

    def encode(batch: dict[str, list]) -> dict[str, list]:
        return dict(tokenizer(*(batch[column] for column in columns), truncation=True, max_length=max_length))

    return rows.map(encode, batched=True, remove_columns=list(columns), num_proc=workers, desc="Tokenizing")


def describe_lengths(parts: Iterable[Dataset], max_length: int) -> str:
    """Words for the first lines of a run: how many encoded texts are cut, if any may be."""
    lengths = [len(ids) for part in parts for ids in part["input_ids"]]
    full = sum(length >= max_length for length in lengths)
    cut = f"{full:,} of {len(lengths):,} fill {max_length:,} tokens, behind which texts are cut; see --max_seq_length"
    return cut if full else ""


class PaddingCollator(DataCollatorWithPadding):
    """As transformers', without a mask where nothing is padded, which GPUs would not look at to leave out its work."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = dict(super().__call__(features))
        if "attention_mask" in batch and bool(batch["attention_mask"].all()):
            del batch["attention_mask"]
        return batch


def make_collator(tokenizer: Any, max_length: int, pad_to_max_length: bool = False) -> PaddingCollator:
    """What pads a batch to its longest input, or all batches alike."""
    return PaddingCollator(tokenizer, "max_length" if pad_to_max_length else "longest", max_length)


def checkpoint_identity(checkpoint: CheckpointArguments, lora: LoraArguments) -> dict[str, Any]:
    """What decides a result of where training starts and what is trained, for a run's identity."""
    prints = {
        "checkpoint": fingerprint_checkpoint(checkpoint.model_name_or_path, checkpoint.model_revision),
        "tokenizer": checkpoint.tokenizer_name and fingerprint_checkpoint(checkpoint.tokenizer_name, "main"),
    }
    return prints | {"config_overrides": checkpoint.config_overrides, "lora": vars(lora) if lora.lora else None}
