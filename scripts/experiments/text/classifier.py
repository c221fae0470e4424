"""A model that classifies texts and its tokenizer, made for one another."""

import inspect
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments.arguments import UserError
from experiments.models import CheckpointArguments, fit_length, load_tokenizer


def load_text_tokenizer(checkpoint: CheckpointArguments) -> PreTrainedTokenizerBase:
    """
    Load the tokenizer of a checkpoint, with a token to fill batches with.

    Raises:
        UserError: if it cannot be loaded, or has no token that can fill batches.
    """
    name = checkpoint.tokenizer_name or checkpoint.model_name_or_path
    tokenizer: Any = load_tokenizer(name, checkpoint.trust_remote_code, (), checkpoint.model_revision)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"The tokenizer {name} has no pad token, which batches need; give another one.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def fit_text_classifier(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """
    Make a model and a tokenizer fit one another: the model takes inputs of `max_length` tokens, and the tokenizer
    gives the inputs that the model takes and no others.

    Raises:
        UserError: as `fit_length`.
    """
    fit_length(model, tokenizer, max_length)
    taken = inspect.signature(model.forward).parameters
    unused = {"token_type_ids"} if getattr(model.config, "type_vocab_size", 2) < 2 else set()
    tokenizer.model_input_names = [n for n in tokenizer.model_input_names if n in taken and n not in unused]
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # by which a decoder finds the last token of a text
