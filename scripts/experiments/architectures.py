"""Other architectures of transformers, at the sizes of an SKTformer, so that they can be compared."""

import copy
import inspect
from contextlib import suppress
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from experiments.arguments import UserError, one_line


# What a comparison keeps, by the names that configurations give or translate, and what others call it.
_SIZES: dict[str, tuple[str, ...]] = {
    "hidden_size": (),
    "num_hidden_layers": (),
    "num_attention_heads": ("num_key_value_heads",),
    "intermediate_size": ("hidden_dim", "feed_forward_size"),
}
# Gates, relative positions and second projections stay below; what has sizes of its own does not.
_LARGEST_RATIO = 2.0


def resize_config(model_type: str, sizes: PreTrainedConfig) -> PreTrainedConfig:
    """Another architecture with the sizes and dropouts of `sizes`, if it has them; a `ValueError` if it refuses."""
    default = AutoConfig.for_model(model_type)
    values = {other: getattr(sizes, name) for name, others in _SIZES.items() for other in (name, *others)}
    values["head_dim"] = sizes.hidden_size // sizes.num_attention_heads
    values |= dict.fromkeys(
        # Of factorised embeddings, bottlenecks and poolers.
        (name for name in vars(default) if name.endswith(("embedding_size", "hidden_size"))),
        sizes.hidden_size,
    )
    values |= comparable_dropouts(default, sizes)
    taken = {name: value for name, value in values.items() if _takes(default, name, value)}
    # Made anew and not changed, because some fields follow from others, such as the kinds of all layers.
    config = AutoConfig.for_model(model_type, **taken)
    for name in list(vars(config)):
        if name.endswith("_token_id"):
            _takes(config, name, None)  # it points into the vocabulary of the published checkpoint
    return config


def comparable_dropouts(config: PreTrainedConfig, sizes: PreTrainedConfig) -> dict[str, float]:
    """The dropouts of `sizes` by the names that another architecture's configuration has for its own."""
    dropout = getattr(sizes, "hidden_dropout_prob", 0.1)
    in_attention = getattr(sizes, "attention_probs_dropout_prob", dropout)
    return {
        name: in_attention if "attention" in name else dropout
        for name, value in vars(config).items()
        if "dropout" in name and "classifier" not in name and isinstance(value, float)
    }


def _takes(config: PreTrainedConfig, name: str, value: Any) -> bool:
    """Whether a configuration has a field that can be set to a value, which this does."""
    # Fields refuse in many ways: a depth that follows from other fields, as Funnel's, is not implemented to be set.
    try:
        if hasattr(config, name):
            setattr(config, name, value)
    except (ValueError, TypeError, AttributeError, NotImplementedError, StrictDataclassError):
        return False
    return hasattr(config, name) and getattr(config, name) == value


def build_comparable_config(model_type: str, sizes: PreTrainedConfig, **fields: Any) -> PreTrainedConfig:
    """
    The configuration of another architecture's encoder with exactly the sizes of `sizes`, and other fields. Raises a
    `UserError` if transformers has no masked-LM encoder of that name, if these sizes cannot be set in it, or if parts
    that have sizes of their own make it far larger than BERT.
    """
    what = f"--model_type {model_type}"
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_MASKED_LM_MAPPING:
        raise UserError(f"{what}: transformers has no masked-LM model of that name.")
    config = resize_config(model_type, sizes)
    if config.is_encoder_decoder:
        raise UserError(f"{what} is an encoder and a decoder; only encoders can be compared.")
    kept = {name: getattr(sizes, name) for name in _SIZES}
    lacking = [n for n in kept if all(getattr(config, other, None) != kept[n] for other in (n, *_SIZES[n]))]
    # Where there are no heads there is no size to keep either: their number changes no matrix.
    if lacking and (lacking != ["num_attention_heads"] or hasattr(config, "num_attention_heads")):
        raise UserError(f"{what} cannot have these sizes: it does not take {', '.join(lacking)}.")
    config.update(fields)
    bert, alike = BertConfig(**kept, **fields), copy.deepcopy(config)
    alike.update(length_fields(alike, bert.max_position_embeddings))
    with torch.device("meta"):
        number, reference = (AutoModelForMaskedLM.from_config(each).num_parameters() for each in (alike, bert))
    if number > _LARGEST_RATIO * reference:
        sizes_of = f"{number / 1e6:.1f}M parameters, where BERT of these sizes has {reference / 1e6:.1f}M"
        raise UserError(f"{what} would have {sizes_of}: parts of it have sizes of their own.")
    return config


def length_fields(config: PreTrainedConfig, max_length: int) -> dict[str, int]:
    """What an architecture needs to take inputs of `max_length` tokens."""
    fields = {"max_position_embeddings": max_length}
    if hasattr(config, "segment_means_seq_len"):
        # Nyströmformer is linear only where the landmarks are fewer than the tokens, whose number is then fixed, and
        # divide it.
        most = min(64, max_length // 2)
        divisors = (number for number in range(most, 0, -1) if max_length % number == 0)
        fields |= {"segment_means_seq_len": max_length, "num_landmarks": next(divisors, most)}
    config = copy.deepcopy(config)
    config.update(fields)
    with suppress(Exception), torch.device("meta"):  # what cannot be built is explained where it is
        # RoBERTa and its relatives count positions from behind the padding token's id.
        fields["max_position_embeddings"] += max_length - cast(int, longest_input(AutoModel.from_config(config)))
    return fields


def fixed_length(config: PreTrainedConfig) -> int | None:
    """The one length that a model takes, without padding: of a Nyströmformer that is linear in it. None of others."""
    length = getattr(config, "segment_means_seq_len", None)
    return length if length and config.num_landmarks < length else None


def takes_mask(model: PreTrainedModel) -> bool:
    """Whether a model can be told where padding is."""
    return "attention_mask" in inspect.signature(model.forward).parameters


def longest_input(model: PreTrainedModel) -> int | None:
    """The longest input that a model was made for, in tokens; None if it has no such limit."""
    positions = getattr(model.config, "max_position_embeddings", None)
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    padding = next((p for p in (getattr(table, "padding_idx", None) for table in tables) if p is not None), -1)
    return positions - padding - 1 if positions and positions > 0 else None


@torch.no_grad()
def explain_failure(model: PreTrainedModel, length: int) -> str | None:
    """
    Try a model on two inputs that end alike; why it cannot take `length` tokens, in one line, or None if it can. Some
    architectures have attention on GPUs alone, and elsewhere zeros in its place, without a word.
    """
    training = model.training
    ids = torch.full((2, length), model.config.vocab_size - 1, device=model.device)
    ids[1, :-1] -= 1
    try:
        model.eval()
        last, other = (model.base_model(input_ids=row[None])[0][:, -1] for row in ids)
    except Exception as error:  # of any architecture
        return f"{type(error).__name__}: {one_line(error)}".rstrip(".")
    finally:
        model.train(training)
    is_blind = length > 1 and torch.equal(last, other)
    return f"on {model.device.type} its tokens do not see each other" if is_blind else None
