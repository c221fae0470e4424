"""The model a script trains: a checkpoint, a preset, or any architecture of transformers at its size."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from experiments.arguments import UserError, one_line
from modeling_sktformer import SKTformerConfig, available_presets, load_preset


@dataclass
class ModelArguments:
    """The model to train."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint to go on from: a folder or a name on the Hub."}
    )
    config_name: str = field(
        default="sktformer-tiny",
        metadata={"help": "Size of a new model: a preset's name, or a configuration file, folder or name on the Hub."},
    )
    model_type: str | None = field(
        default=None,
        metadata={
            "help": "Another architecture of transformers for the new model (bert, fnet, nystromformer, ...), with "
            "the sizes of --config_name."
        },
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Fields to change in the configuration, as field=value,field=value."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code that a checkpoint from the Hub carries."}
    )

    def __post_init__(self):
        if self.model_name_or_path and self.model_type:
            raise ValueError("--model_type makes a new model; it cannot be given together with --model_name_or_path.")


@dataclass
class CheckpointArguments:
    """The checkpoint to fine-tune."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint to start from: a folder or a name on the Hub."})
    model_revision: str = field(default="main", metadata={"help": "Its branch, tag or commit on the Hub."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer: a folder or a name on the Hub. By default the checkpoint's."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Fields to change in the configuration, as field=value,field=value."}
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Start with a new head where the checkpoint's has another number of labels."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code that a checkpoint from the Hub carries."}
    )


def build_config(arguments: ModelArguments, vocab_size: int, max_length: int, pad_token_id: int, seed: int):
    """
    Make the configuration of a new model.

    Args:
        arguments ([`ModelArguments`]): Names and overrides.
        vocab_size (`int`): Tokens in the tokenizer.
        max_length (`int`): Longest input in tokens; the model is made for this length unless overridden.
        pad_token_id (`int`): The tokenizer's padding token.
        seed (`int`): Seed of an SKTformer's landmarks.

    Returns:
        `PreTrainedConfig`: checked and complete.

    Raises:
        UserError: for unknown names, unknown fields and sizes that cannot work.
    """
    required = {"vocab_size": vocab_size, "max_position_embeddings": max_length, "pad_token_id": pad_token_id}
    try:
        config = _named_config(arguments)
        if arguments.model_type not in (None, config.model_type):
            config = resize_config(arguments.model_type, config)
        if config.model_type == SKTformerConfig.model_type:
            required["landmark_seed"] = seed
        _set_fields(config, required | length_fields(config, max_length))
        _override_fields(config, arguments.config_overrides)
        config.validate()
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, OSError, StrictDataclassError) as error:
        raise UserError(f"No model can be made from these sizes: {one_line(error)}") from error
    return config


def build_masked_lm(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, max_length: int, seed: int
) -> PreTrainedModel:
    """
    Load or make the masked-LM model that the arguments name.

    Args:
        arguments ([`ModelArguments`]): Names and overrides.
        tokenizer (`PreTrainedTokenizerBase`): Gives the vocabulary of a new model, and must fit that of a loaded one.
        max_length (`int`): Longest input in tokens.
        seed (`int`): Seed of an SKTformer's landmarks.

    Returns:
        `PreTrainedModel`: with a masked-LM head.

    Raises:
        UserError: if the model cannot be found, has no such head, does not fit the tokenizer or the length.
    """
    if arguments.model_name_or_path is None:
        config = build_config(arguments, len(tokenizer), max_length, tokenizer.pad_token_id, seed)
        try:
            model = AutoModelForMaskedLM.from_config(config)
        except (ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise UserError(f"No model can be made from these sizes: {one_line(error)}") from error
    else:
        model = _load_masked_lm(arguments.model_name_or_path, arguments)
    check_fit(model.config, tokenizer, max_length)
    return model


def check_fit(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """
    Check that a model can read a tokenizer's tokens at a length.

    Raises:
        UserError: if the vocabulary is too small or the inputs are too long.
    """
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer)} tokens, the model embeds {config.vocab_size}: they do not belong "
            "together. Give the tokenizer that the model was trained with, or train a new model."
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_length > longest:
        raise UserError(
            f"--max_seq_length {max_length} is more than the model's max_position_embeddings={longest}; shorten the "
            "input, or lengthen the model with `resize_position_embeddings`."
        )


def load_tokenizer(
    name: str, trust_remote_code: bool, needed: Sequence[str], revision: str = "main"
) -> PreTrainedTokenizerBase:
    """
    Load a fast tokenizer that has the special tokens that a task needs.

    Args:
        name (`str`): A folder or a name on the Hub.
        trust_remote_code (`bool`): Whether to run code that comes with it.
        needed (sequence of `str`): Special tokens: `mask`, `pad`, `cls`, `sep`.
        revision (`str`): Branch, tag or commit on the Hub.

    Raises:
        UserError: if it cannot be found, is no fast tokenizer or lacks a special token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"The tokenizer {name} cannot be loaded: {one_line(error)}") from error
    lacking = [token for token in needed if getattr(tokenizer, f"{token}_token") is None]
    if lacking or not tokenizer.is_fast:
        what = f"has no {' and no '.join(lacking)} token" if lacking else "is not a fast one"
        raise UserError(f"The tokenizer {name} {what}, which this needs; give another one.")
    return tokenizer


def load_classifier(
    arguments: CheckpointArguments, labels: Sequence[str], regression_label: str, new_head: bool
) -> PreTrainedModel:
    """
    Load a checkpoint as a sequence-classification model.

    Args:
        arguments ([`CheckpointArguments`]): The checkpoint and overrides.
        labels (sequence of `str`): The classes; none for regression.
        regression_label (`str`): The name of the number that is predicted, for regression.
        new_head (`bool`): Whether the checkpoint may lack a head that fits.

    Returns:
        `PreTrainedModel`: with the classes in its configuration.

    Raises:
        UserError: if it cannot be loaded, is of another architecture, or has no head that fits and needs one.
    """
    name = arguments.model_name_or_path
    what = f"The checkpoint {name}"
    options: dict[str, Any] = {
        "trust_remote_code": arguments.trust_remote_code,
        "revision": arguments.model_revision,
    }
    try:
        config = AutoConfig.from_pretrained(name, **options)
        trained_labels, trained_words = config.num_labels, list((config.id2label or {}).values())
        config.label2id = {word: number for number, word in enumerate(labels or [regression_label])}
        config.id2label = {number: word for word, number in config.label2id.items()}
        config.problem_type = "single_label_classification" if labels else "regression"
        _override_fields(config, arguments.config_overrides)
        if config.num_labels != max(1, len(labels)):
            raise UserError("--config_overrides: the number of labels is the task's; leave it out.")
        with _without_load_report():
            model, info = AutoModelForSequenceClassification.from_pretrained(
                name, config=config, ignore_mismatched_sizes=True, output_loading_info=True, **options
            )
    except UserError:
        raise
    except (ValueError, OSError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"{what} cannot be loaded as a classification model: {one_line(error)}") from error
    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    base = f"{model.base_model_prefix}."
    # A masked language model is saved without the pooler that some architectures count to the encoder.
    _check_encoder(model, [key for key in info["missing_keys"] if "pooler" not in key], what)
    _check_encoder(model, mismatched, what)
    lost = [key for key in [*mismatched, *info["missing_keys"]] if not key.startswith(base) and "pooler" not in key]
    if lost and not new_head:
        raise UserError(f"{what} has no classification head ({lost[0]} is missing); fine-tune it first.")
    named = labels and not all(str(word).startswith("LABEL_") for word in trained_words)
    if named and not new_head and [str(word).lower() for word in trained_words] != list(labels):
        raise UserError(
            f"{what} answers with {', '.join(map(str, trained_words))}, and the task's classes are "
            f"{', '.join(labels)}: it was fine-tuned on another task, or numbers the classes otherwise."
        )
    if mismatched and not arguments.ignore_mismatched_sizes:
        raise UserError(
            f"{what} has a classification head for {trained_labels} labels, and {model.config.num_labels} are needed; "
            "pass --ignore_mismatched_sizes to start with a new head."
        )
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep the library from listing the weights of heads that are dropped or new; what is missing is checked here."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _load_masked_lm(name: str, arguments: ModelArguments) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=arguments.trust_remote_code)
        _override_fields(config, arguments.config_overrides)
        model, info = AutoModelForMaskedLM.from_pretrained(
            name, config=config, trust_remote_code=arguments.trust_remote_code, output_loading_info=True
        )
    except UserError:
        raise
    except (ValueError, OSError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"The checkpoint {name} cannot be loaded as a masked-LM model: {one_line(error)}") from error
    _check_encoder(model, info["missing_keys"], f"The checkpoint {name}")
    return model


def _check_encoder(model: PreTrainedModel, untrained: Iterable[str], what: str) -> None:
    """Refuse a model some of whose encoder was not in its checkpoint."""
    keys = sorted(key for key in untrained if key.startswith(f"{model.base_model_prefix}."))
    if keys:
        raise UserError(
            f"{what} lacks {len(keys)} weights of a {type(model).__name__} encoder (the first is {keys[0]}): it is of "
            "another architecture or size."
        )


def _named_config(arguments: ModelArguments) -> PreTrainedConfig:
    if arguments.config_name in available_presets():
        return load_preset(arguments.config_name)
    try:
        return AutoConfig.from_pretrained(arguments.config_name, trust_remote_code=arguments.trust_remote_code)
    except OSError as error:
        raise UserError(
            f"--config_name {arguments.config_name} is neither a preset ({', '.join(available_presets())}) nor a "
            "configuration file, folder or name on the Hub that can be reached."
        ) from error


# Sizes that mean the same in every BERT-like encoder; those that a configuration lacks are left out.
_SHARED_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)


def resize_config(model_type: str, sizes: PreTrainedConfig) -> PreTrainedConfig:
    """Another architecture's configuration with the sizes of `sizes`."""
    config = AutoConfig.for_model(model_type)
    values = {name: getattr(sizes, name) for name in _SHARED_SIZES if hasattr(sizes, name) and hasattr(config, name)}
    _set_fields(config, values)
    other_names = {"num_key_value_heads": sizes.num_attention_heads, "hidden_dim": sizes.intermediate_size}
    _set_fields(config, {name: value for name, value in other_names.items() if hasattr(config, name)})
    dropouts = ("attention_dropout", "embedding_dropout", "mlp_dropout")  # the names of ModernBERT and its relatives
    dropout = getattr(sizes, "hidden_dropout_prob", 0.1)
    _set_fields(config, dict.fromkeys((name for name in dropouts if hasattr(config, name)), dropout))
    if config.model_type == "modernbert":
        # Its kinds of layer are a list, made for the default depth.
        config.layer_types = [
            "sliding_attention" if i % 3 else "full_attention" for i in range(sizes.num_hidden_layers)
        ]
    if hasattr(config, "embedding_size"):
        config.embedding_size = sizes.hidden_size
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        if hasattr(config, name):
            setattr(config, name, None)  # they point into the vocabulary of the published checkpoint
    return config


def length_fields(config: PreTrainedConfig, max_length: int) -> dict[str, int]:
    """What an architecture needs besides `max_position_embeddings` to take inputs of `max_length` tokens."""
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet"):
        return {"max_position_embeddings": max_length + 2}  # they count positions from behind the padding token's id
    if config.model_type == "nystromformer":
        # Its attention is linear only where the landmarks are fewer than the tokens, whose number is then fixed.
        return {"segment_means_seq_len": max_length, "num_landmarks": min(64, max_length // 2)}
    return {}


def _set_fields(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)


def _override_fields(config: PreTrainedConfig, overrides: str | None) -> None:
    if not overrides:
        return
    for override in overrides.split(","):
        name = override.split("=")[0]
        if "=" not in override or not hasattr(config, name):
            raise UserError(
                f"--config_overrides: `{override}` is not field=value with a field of {type(config).__name__}."
            )
    config.update_from_string(overrides)
