"""The model a script trains: a checkpoint, a preset or another architecture; its tokenizer and length."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from experiments.architectures import build_comparable_config, explain_failure, length_fields, longest_input
from experiments.arguments import UserError, explained, flag
from modeling_sktformer import SKTformerConfig, available_presets, load_preset


logger = logging.getLogger(__name__)

TRAINED_DTYPE = torch.float32  # of weights, also of a checkpoint in half precision, which would lose small steps
_CHECKPOINT_FILES = ("config.json", "*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")


@dataclass(kw_only=True)
class OriginArguments:
    """Where a checkpoint comes from, and what is changed in it."""

    model_revision: str = flag("main", "Its branch, tag or commit on the Hub.")
    config_overrides: str | None = flag(None, "Fields to change in the configuration, as field=value,field=value.")
    trust_remote_code: bool = flag(False, "Run the code that a checkpoint from the Hub carries.")

    @property
    def hub_options(self) -> dict[str, Any]:
        """Keywords of `from_pretrained`."""
        return {"revision": self.model_revision, "trust_remote_code": self.trust_remote_code}


@dataclass
class ModelArguments(OriginArguments):
    """The model to train."""

    model_name_or_path: str | None = flag(None, "Checkpoint to go on from: a folder or a name on the Hub.")
    config_name: str = flag("sktformer-tiny", "Size of a new model: a preset, or a configuration's file or Hub name.")
    model_type: str | None = flag(None, "Another masked-LM encoder at the sizes of --config_name: bert, fnet, ...")

    def __post_init__(self):
        if self.model_name_or_path and self.model_type:
            raise UserError("--model_type makes a new model; it cannot be given together with --model_name_or_path.")


def build_config(
    arguments: ModelArguments, vocab_size: int, max_length: int, pad_token_id: int, seed: int
) -> PreTrainedConfig:
    """
    Make the configuration of a new model for inputs of up to `max_length` tokens, unless overridden. `seed` is that of
    an SKTformer's landmarks. Unknown names or fields and sizes that cannot work are a `UserError`.
    """
    config = _named_config(arguments)
    fields = {"vocab_size": vocab_size, "max_position_embeddings": max_length, "pad_token_id": pad_token_id}
    with explained("No model can be made from these sizes"):
        sizes = config
        if arguments.model_type not in (None, config.model_type):
            # Dropout, for example, has other names there: what is set here is taken over as the sizes are.
            override_fields(sizes, known_overrides(sizes, arguments.config_overrides))
            config = build_comparable_config(str(arguments.model_type), sizes, **fields)
        if config.model_type == SKTformerConfig.model_type:
            config.landmark_seed = seed
        config.update(fields)
        config.update(length := length_fields(config, max_length))
        override_fields(config, known_overrides(config, arguments.config_overrides, taken_by=sizes))
        config.validate()
        if config.max_position_embeddings < length["max_position_embeddings"]:
            what = f"max_position_embeddings={config.max_position_embeddings} is too little"
            raise UserError(f"--config_overrides: {what} for --max_seq_length {max_length}; leave it out.")
    return config


def sketch_masked_lm(arguments: ModelArguments, vocab_size: int, max_length: int, seed: int) -> PreTrainedModel:
    """A model that is to be made, without its weights and before its tokenizer; a `UserError` as [`build_config`]."""
    config = build_config(arguments, vocab_size, max_length, 0, seed)
    with explained("No model can be made from these sizes"), torch.device("meta"):
        return AutoModelForMaskedLM.from_config(config)


def build_masked_lm(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, max_length: int, seed: int, trains: bool = True
) -> PreTrainedModel:
    """
    Load or make the masked-LM model that the arguments name, and fit it and its tokenizer to a length in tokens.

    Raises:
        UserError: if the model cannot be found, is of an architecture without such a head, has none and is not to be
            trained, or does not fit the tokenizer or the length.
    """
    name = arguments.model_name_or_path
    if name is None:
        config = build_config(arguments, len(tokenizer), max_length, tokenizer.pad_token_id, seed)
        for token in vars(config):
            if token.endswith("_token_id") and getattr(tokenizer, token, None) is not None:
                setattr(config, token, getattr(tokenizer, token))
        with explained("No model can be made from these sizes"):
            model = AutoModelForMaskedLM.from_config(config)
    else:
        what = f"The checkpoint {name}"
        with explained(f"{what} cannot be loaded as a masked-LM model"):
            config = load_checkpoint_config(name, arguments, MODEL_FOR_MASKED_LM_MAPPING, "masked-LM")
            model, info = AutoModelForMaskedLM.from_pretrained(
                name,
                config=config,
                dtype=TRAINED_DTYPE,
                output_loading_info=True,
                **arguments.hub_options,
            )
        check_encoder(model, info["missing_keys"], what)
        if info["missing_keys"] and not trains:
            lacking = f"has no masked-LM head ({min(info['missing_keys'])} is missing)"
            raise UserError(f"{what} {lacking}; name one that has.")
    fit_length(model, tokenizer, max_length)
    return model


def fit_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """
    Make a model take inputs of a length, for which a shorter SKTformer is lengthened, and its tokenizer say so:
    `model_max_length`, to which pipelines truncate, becomes what the model takes. Raises a `UserError` if the model
    embeds fewer tokens than the tokenizer has, or cannot take that length.
    """
    if len(tokenizer) > model.config.vocab_size:
        what = f"The tokenizer has {len(tokenizer)} tokens, the model embeds {model.config.vocab_size}"
        raise UserError(f"{what}: they do not belong together; give the tokenizer that the model was trained with.")
    kind, longest = model.config.model_type, longest_input(model)
    is_longer = longest is not None and max_length > longest
    if kind != SKTformerConfig.model_type:
        if reason := explain_failure(model, max_length):
            why = f"it takes at most {longest}" if is_longer else reason
            raise UserError(f"A {kind} cannot read --max_seq_length {max_length} tokens: {why}.")
        if is_longer:
            logger.info("The model was made for %d tokens, no limit of its: it reads %d.", longest, max_length)
    elif is_longer:
        with whole_parameters(model):
            model.resize_position_embeddings(max_length)
        has_filters = model.config.use_fourier_convolution
        logger.info(
            "The model is lengthened from %d to %d tokens: new positions repeat the trained ones, %s inputs of "
            "at most %d tokens keep their outputs.",
            *(longest, max_length, "filters keep their lags, and" if has_filters else "and"),
            cast(int, longest) // (2 if has_filters else 1),
        )
    tokenizer.model_max_length = max(max_length, longest or tokenizer.model_max_length)


def whole_parameters(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Parameters that are whole, and may be changed by all processes alike, also where ZeRO-3 splits them."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    # Without a rank whose values are kept, changes would be lost.
    return import_module("deepspeed").zero.GatheredParameters(list(model.parameters()), modifier_rank=0)


def load_tokenizer(
    name: str, trust_remote_code: bool, needed: Sequence[str], revision: str = "main"
) -> PreTrainedTokenizerBase:
    """A fast tokenizer with the special tokens `needed` (mask, pad, cls, sep); a `UserError` if there is none."""
    nothing = UserError(f"The checkpoint {name} holds no tokenizer; save one beside it or give --tokenizer_name.")
    if Path(name).is_dir() and not _find_files(name, _TOKENIZER_FILES):
        check_one_model(name)
        raise nothing
    with explained(f"The tokenizer {name} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, revision=revision)
    # Where there are no files it is made from the model's type, with special tokens alone.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)) + 1:
        raise nothing
    lacking = [token for token in needed if getattr(tokenizer, f"{token}_token") is None]
    if lacking or not tokenizer.is_fast:
        what = f"has no {' and no '.join(lacking)} token" if lacking else "is not a fast one"
        raise UserError(f"The tokenizer {name} {what}, which this needs; give another one.")
    return tokenizer


def check_one_model(name: str) -> None:
    """Raise a `UserError` for a folder that is no model, but holds those of several seeds, tasks or horizons."""
    below = (sorted(Path(name).glob(pattern)) for pattern in ("*/config.json", "*/*/config.json"))
    folders = [file.parent for file in next(filter(None, below), [])]
    # A search keeps the weights of one.
    folders = [folder for folder in folders if _find_files(str(folder), _CHECKPOINT_FILES[1:])] or folders
    if folders and not (Path(name) / "config.json").exists():
        runs = ", ".join(str(folder.relative_to(name)) for folder in folders)
        raise UserError(f"{name} holds a model in each of {runs}; give one of these folders.")


def fingerprint_checkpoint(name: str, revision: str = "main") -> str:
    """What a checkpoint or a tokenizer holds: a digest of a folder's files, or a name on the Hub with its revision."""
    if not Path(name).is_dir():
        return f"{name}@{revision}"
    digest = hashlib.sha256()
    for file in _find_files(name, (*_CHECKPOINT_FILES, *_TOKENIZER_FILES)):
        with file.open("rb") as stream:
            digest.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def fingerprint_config(name: str) -> str:
    """What `--config_name` names, with a digest of what a preset, file or folder says; the Hub's by name alone."""
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if name in available_presets():
        default = SKTformerConfig().to_dict()
        says = {field: value for field, value in load_preset(name).to_dict().items() if value != default[field]}
        content = json.dumps(says, sort_keys=True).encode()
    elif file.is_file():
        content = file.read_bytes()
    else:
        return name
    return f"{path.name}@{hashlib.sha256(content).hexdigest()}"


def _find_files(folder: str, patterns: Sequence[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in Path(folder).glob(pattern)})


def load_checkpoint_config(name: str, arguments: OriginArguments, architectures: Any, head: str) -> PreTrainedConfig:
    """The configuration of a checkpoint of one stack, for whose architecture there is a class with the head."""
    config = AutoConfig.from_pretrained(name, **arguments.hub_options)
    what = f"The checkpoint {name} is of the architecture {config.model_type}"
    if config.is_encoder_decoder:
        raise UserError(f"{what}, an encoder and a decoder; only models of one stack are trained here.")
    if type(config) not in architectures and not getattr(config, "auto_map", None):
        raise UserError(f"{what}, for which transformers has no {head} model.")
    decided = {
        "max_position_embeddings": "the length of a checkpoint is changed with --max_seq_length",
        "num_labels": "the number of labels is the task's",
    }
    for field, why in decided.items():
        if field in (arguments.config_overrides or ""):
            raise UserError(f"--config_overrides: {why}; leave {field} out.")
    known = known_overrides(config, arguments.config_overrides, taken_by=SKTformerConfig())
    if left := {*(arguments.config_overrides or "").split(",")} - {*(known or "").split(",")}:
        logger.info("A %s has no field for %s, which is left out.", config.model_type, ", ".join(sorted(left)))
    override_fields(config, known)
    return config


def check_encoder(model: PreTrainedModel, untrained: Iterable[str], what: str) -> None:
    """Refuse a model some of whose encoder was not in its checkpoint."""
    keys = sorted(key for key in untrained if key.startswith(f"{model.base_model_prefix}."))
    if keys:
        lacking = f"{len(keys)} weights of a {type(model).__name__} encoder (the first is {keys[0]})"
        raise UserError(f"{what} lacks {lacking}: it is of another architecture or size.")


def _named_config(arguments: ModelArguments) -> PreTrainedConfig:
    if arguments.config_name in available_presets():
        return load_preset(arguments.config_name)
    try:
        return AutoConfig.from_pretrained(arguments.config_name, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        known = f"neither a preset ({', '.join(available_presets())}) nor a configuration that can be reached"
        raise UserError(f"--config_name {arguments.config_name} is {known}.") from error


def known_overrides(
    config: PreTrainedConfig, overrides: str | None, taken_by: PreTrainedConfig | None = None
) -> str | None:
    """Those of `--config_overrides` that a configuration has a field for; and, given another, that it has none for."""
    names = {override: override.partition("=")[0] for override in (overrides or "").split(",") if override}
    known = [o for o, name in names.items() if hasattr(config, name) or (taken_by and not hasattr(taken_by, name))]
    return ",".join(known) or None


def override_trained(name: str, config: PreTrainedConfig, overrides: str | None) -> None:
    """[`override_fields`] of a checkpoint; a `UserError` also if weights depend on one, as on all but dropout."""
    trained = config.to_dict()
    override_fields(config, overrides)
    if changed := [key for key, value in config.to_dict().items() if value != trained[key] and "dropout" not in key]:
        raise UserError(
            f"--config_overrides: {', '.join(changed)} of the model {name} cannot be changed; leave it out."
        )


def override_fields(config: PreTrainedConfig, overrides: str | None) -> None:
    """Set what `--config_overrides` names; a `UserError` for what is no field, or cannot be set."""
    for override in overrides.split(",") if overrides else ():
        name = override.partition("=")[0]
        if "=" not in override or not hasattr(config, name):
            kind = type(config).__name__
            raise UserError(f"--config_overrides: `{override}` is not field=value with a field of {kind}.")
        if isinstance(getattr(config, name), int) and "float" in str(type(config).__annotations__.get(name)):
            setattr(config, name, float(getattr(config, name)))  # by which the text is read
        with explained(f"--config_overrides: `{override}` cannot be set"):
            config.update_from_string(override)
