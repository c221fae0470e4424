"""A checkpoint as a model that classifies texts: with the head it was trained with, or with a new one."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import find_adapter_config_file

from experiments.arguments import UserError, explained, flag
from experiments.models import (
    TRAINED_DTYPE,
    OriginArguments,
    check_encoder,
    check_one_model,
    load_checkpoint_config,
)


@dataclass
class CheckpointArguments(OriginArguments):
    """The checkpoint to fine-tune."""

    model_name_or_path: str = flag(MISSING, "Checkpoint: a folder or a name on the Hub.")
    tokenizer_name: str | None = flag(None, "Tokenizer: a folder or a name on the Hub. By default the checkpoint's.")
    ignore_mismatched_sizes: bool = flag(False, "Start with a new head where the labels are others.")


def load_classifier(arguments: CheckpointArguments, labels: Sequence[str], regression_label: str) -> PreTrainedModel:
    """
    Load a fine-tuned checkpoint as the sequence-classification model that it is.

    Without `labels` it is one for regression, and predicts `regression_label`. Raises a `UserError` if it cannot be
    loaded, is of another architecture, has no head, or one for another pooling or other answers.
    """
    loaded = _load_candidate(arguments, labels, regression_label)
    if loaded.is_of_other_pooling:
        raise UserError(f"{loaded.name} {loaded.pooling_difference}; leave the override out.")
    if loaded.resized or not loaded.untrained:
        _check_labels(loaded, labels)
    if loaded.untrained:
        lacking = f"has no classification head ({loaded.untrained[0]} is missing)"
        raise UserError(f"{loaded.name} {lacking}; fine-tune it first.")
    loaded.model.has_new_head = False  # type: ignore[assignment]
    return loaded.model


def start_classifier(arguments: CheckpointArguments, labels: Sequence[str], regression_label: str) -> PreTrainedModel:
    """
    Load a checkpoint as a sequence-classification model to fine-tune: with its head, or with a new one if it has none.

    One that answers with other labels, or was trained on another pooling, is replaced where
    `--ignore_mismatched_sizes` says so. `has_new_head` of the model says whether any of its head is new. Raises a
    `UserError` if it cannot be loaded, is of another architecture, or has a head that does not fit.
    """
    loaded = _load_candidate(arguments, labels, regression_label)
    model, why = loaded.model, None
    if loaded.is_of_other_pooling:
        why = loaded.pooling_difference
    elif labels and not loaded.untrained and _answers_otherwise(loaded.labels, labels):
        why = f"answers with {', '.join(map(str, loaded.labels))}, and these are {', '.join(labels)}"
    is_replaced = why is not None
    if loaded.resized and why is None:  # what is of another size is new already
        why = f"has a classification head for {len(loaded.labels)} labels, and {model.config.num_labels} are needed"
    if why and not arguments.ignore_mismatched_sizes:
        raise UserError(f"{loaded.name} {why}; pass --ignore_mismatched_sizes to start with a new head.")
    if is_replaced:
        # The sizes fit, and rows of the head would be taken for those of other labels or features.
        fresh = type(model)(model.config).state_dict()
        model.load_state_dict({key: fresh[key] for key in loaded.head}, strict=False)
    model.has_new_head = bool(loaded.untrained) or is_replaced  # type: ignore[assignment]
    return model


@dataclass
class _Candidate:
    """A checkpoint loaded as a classifier with the labels that are wanted, and how well its head fits."""

    name: str  # in messages
    model: PreTrainedModel
    labels: list[str]  # that the checkpoint answers with
    poolings: list[str | None]  # `classifier_pooling` of the checkpoint, and the one that is wanted
    head: set[str]  # keys of all weights above the encoder
    missing: list[str]  # keys of weights that the checkpoint lacks
    resized: list[str]  # keys of those that it has in other sizes

    @property
    def is_of_other_pooling(self) -> bool:
        """Whether the checkpoint has a head, which was trained on another pooling."""
        # A masked language model may lend a head some of its own, as ModernBERT does; what answers is lacking then.
        return self.poolings[0] != self.poolings[1] and self.head.isdisjoint(self.missing)

    @property
    def untrained(self) -> list[str]:
        """Keys of all weights that are new."""
        return sorted([*self.resized, *self.missing])

    @property
    def pooling_difference(self) -> str:
        """What a message says of the poolings."""
        return "has a head for classifier_pooling={}, not {}".format(*self.poolings)


def _load_candidate(arguments: CheckpointArguments, labels: Sequence[str], regression_label: str) -> _Candidate:
    name = f"The checkpoint {arguments.model_name_or_path}"
    with explained(f"{name} cannot be loaded as a classification model", quiet=True):
        _refuse_adapter(arguments)
        config = _wanted_config(arguments, labels, regression_label)
        trained = load_trained_config(arguments)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            arguments.model_name_or_path,
            config=config,
            dtype=TRAINED_DTYPE,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **arguments.hub_options,
        )
    resized = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    # A masked language model is saved without the pooler that some architectures count to the encoder.
    missing = [key for key in info["missing_keys"] if "pooler" not in key]
    check_encoder(model, [*resized, *missing], name)
    head = {key for key in model.state_dict() if not key.startswith(f"{model.base_model_prefix}.")}
    poolings = [getattr(each, "classifier_pooling", None) for each in (trained, config)]
    return _Candidate(name, model, label_names(trained), poolings, head, missing, resized)


def _wanted_config(arguments: CheckpointArguments, labels: Sequence[str], regression_label: str) -> PreTrainedConfig:
    """The configuration of a checkpoint, changed by what was asked for and with other labels."""
    architectures = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    config = load_checkpoint_config(
        arguments.model_name_or_path, arguments, architectures, head="sequence-classification"
    )
    config.label2id = {word: number for number, word in enumerate(labels or [regression_label])}
    config.id2label = {number: word for word, number in config.label2id.items()}
    config.problem_type = "single_label_classification" if labels else "regression"
    return config


def label_names(config: PreTrainedConfig) -> list[str]:
    """The names of a checkpoint's labels by their numbers, whatever their order in its file."""
    names: Any = config.id2label or {}
    return [names[number] for number in sorted(names)]


def load_trained_config(arguments: CheckpointArguments) -> PreTrainedConfig:
    """The configuration of a fine-tuned checkpoint; a `UserError` if there is none."""
    with explained(f"The checkpoint {arguments.model_name_or_path} cannot be loaded"):
        _refuse_adapter(arguments)
        check_one_model(arguments.model_name_or_path)
        return AutoConfig.from_pretrained(arguments.model_name_or_path, **arguments.hub_options)


def _refuse_adapter(arguments: CheckpointArguments) -> None:
    name = arguments.model_name_or_path
    if find_adapter_config_file(name, revision=arguments.model_revision) is not None:
        raise UserError(f"The checkpoint {name} is an adapter: merge it into its checkpoint, and give that.")


def _check_labels(loaded: _Candidate, labels: Sequence[str]) -> None:
    """Refuse a head that answers with other words; words that nobody has named say nothing."""
    if len(loaded.labels) != max(1, len(labels)) or (labels and _answers_otherwise(loaded.labels, labels)):
        words = f"{', '.join(map(str, loaded.labels))}, and the task's classes are {', '.join(labels) or 'none'}"
        raise UserError(f"{loaded.name} answers with {words}: it was fine-tuned on another task, or in another order.")


def _answers_otherwise(trained: Sequence[Any], labels: Sequence[str]) -> bool:
    named = not all(str(word).startswith("LABEL_") for word in trained)
    return named and [str(word).lower() for word in trained] != [label.lower() for label in labels]
