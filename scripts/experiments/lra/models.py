"""The model of a task: SKTformer, or another encoder of transformers with the same sizes, pooling and head."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from experiments.architectures import (
    build_comparable_config,
    comparable_dropouts,
    fixed_length,
    length_fields,
    longest_input,
    takes_mask,
)
from experiments.arguments import UserError, explained, flag
from experiments.checkpoints import label_names
from experiments.lra.examples import PAD
from experiments.lra.tasks import Task
from experiments.models import TRAINED_DTYPE, known_overrides, override_fields, override_trained
from experiments.sized_models import SizedModelArguments
from modeling_sktformer import SKTformerConfig, SKTformerForSequenceClassification, SKTformerForSequenceMatching
from modeling_sktformer.losses import classification_loss
from modeling_sktformer.modeling_sktformer import SKTformerClassificationHead, SKTformerMatchingHead


_SKTFORMER = SKTformerConfig.model_type
_DROPOUT = "_dropout_prob"  # how fields of SKTformerConfig end that say how much is dropped


@dataclass
class LraModelArguments(SizedModelArguments):
    """The model."""

    model_name_or_path: str | None = flag(None, "Start from a model of this script: a folder or a name on the Hub.")
    model_type: str = flag(
        _SKTFORMER,
        "Architecture of a new model: an encoder of transformers with a masked LM (bert, fnet, nystromformer, ...).",
    )
    masked_dropout: float | None = flag(
        None, "Masked self-pretraining: every dropout of the model, in place of what the recipe of the task says."
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path and self.model_type != _SKTFORMER:
            raise UserError(f"--model_type {self.model_type}: --model_name_or_path has a type; leave one of them out.")
        if self.masked_dropout is not None and not 0 <= self.masked_dropout < 1:
            raise UserError(f"--masked_dropout is {self.masked_dropout:g}; it must be at least 0 and less than 1.")

    def for_masking(self) -> Self:
        """The model of masked self-pretraining: `masked_dropout` in place of what a recipe of fine-tuning says."""
        if self.masked_dropout is None:
            return self
        names = [name for name in vars(SKTformerConfig()) if name.endswith(_DROPOUT)]
        others = [o for o in (self.config_overrides or "").split(",") if not o.partition("=")[0].endswith(_DROPOUT)]
        overrides = [*filter(None, others), *(f"{name}={self.masked_dropout}" for name in names)]
        return replace(self, config_overrides=",".join(overrides))


class EncoderForSequences(PreTrainedModel):
    """
    Any encoder of transformers below SKTformer's own heads, so that rows of a table differ in the encoder alone.

    Args:
        config (`PreTrainedConfig`): The encoder's. Its fields `head_config` (a mapping, the SKTformer's whose head it
            gets) and `per_example` (sequences in an example) are added by [`build_config`].
    """

    config_class = PreTrainedConfig
    base_model_prefix = "encoder"
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # the encoder knows
    supports_gradient_checkpointing = True  # as well

    def __init__(self, config: PreTrainedConfig):
        encoder = AutoModel.from_config(config)  # first: it chooses an attention that it supports
        super().__init__(config)
        self.encoder = encoder
        head, num_labels = SKTformerConfig(**config.head_config), int(config.num_labels or 0)
        head_class = SKTformerClassificationHead if config.per_example == 1 else SKTformerMatchingHead
        self.classifier = head_class(head, num_labels)
        self._takes_mask = takes_mask(self.encoder)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """
        Classify sequences `(batch_size, length)`, or pairs of them `(batch_size, 2, length)`.

        Returns:
            `SequenceClassifierOutput` with `logits` of shape `(batch_size, num_labels)`.
        """
        length = input_ids.shape[-1]
        flat_mask = None if attention_mask is None else attention_mask.view(-1, length)
        inputs = {"attention_mask": flat_mask} if self._takes_mask and flat_mask is not None else {}
        states = self.encoder(input_ids.view(-1, length), **inputs).last_hidden_state
        logits = self.classifier((states.unflatten(0, input_ids.shape[:-1]),), attention_mask)
        loss = None if labels is None else classification_loss(logits, labels, "single_label_classification", None)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def build_config(
    arguments: LraModelArguments, task: Task, max_length: int, is_padded: bool, seed: int
) -> PreTrainedConfig:
    """
    The configuration of a new model, made for `max_length` tokens of a task.

    Nystromformer is linear in the length where batches have no padding; where they do (`is_padded`) it has full
    attention, because its linear form takes no mask.

    Raises:
        UserError: if there is no such architecture, or none can be made of these fields.
    """
    fields = {"vocab_size": vocab_size(task), "pad_token_id": PAD, **_label_fields(task)}
    own, overrides = {"landmark_seed": seed % 2**31, **arguments.fields()}, arguments.config_overrides
    with explained(f"No {arguments.model_type} can be made of these fields"):
        sizes: PreTrainedConfig = SKTformerConfig(**own, **fields)
        override_fields(sizes, known_overrides(sizes, overrides))
        sizes.validate()
        config = sizes
        if arguments.model_type != _SKTFORMER:
            head = {key: value for key, value in sizes.to_diff_dict().items() if key != "landmark_seed"}
            config = build_comparable_config(arguments.model_type, sizes, **fields)
            config.head_config, config.per_example = head, task.per_example
        length = length_fields(config, max_length)
        if is_padded and "num_landmarks" in length:
            length["num_landmarks"] = length["segment_means_seq_len"]
        config.update(length)
        override_fields(config, known_overrides(config, overrides, taken_by=sizes))
        return config


def build_model(
    arguments: LraModelArguments, task: Task, max_length: int, is_padded: bool, seed: int, is_masked_lm: bool = False
) -> PreTrainedModel:
    """
    Make a model for a task, or load one: of a masked language model, the encoder below a new head.

    With `is_masked_lm` it is a masked language model, for self-pretraining.

    Raises:
        UserError: if it cannot be made or loaded, or was made for other inputs.
    """
    name = arguments.model_name_or_path
    arguments = arguments.for_masking() if is_masked_lm else arguments
    with explained(f"The model {name} cannot be loaded" if name else f"No {arguments.model_type} can be made"):
        if not name:
            config = build_config(arguments, task, max_length, is_padded, seed)
            return AutoModelForMaskedLM.from_config(config) if is_masked_lm else _class_for(config, task)(config)
        model = _load_model(arguments, task, is_masked_lm)
    if (longest := longest_input(model) or max_length) < max_length:
        hint = "take another one"
        if not task.is_picture:
            shorter = f"{hint}, or no longer expressions, which --max_length makes where they are generated"
            hint = f"give --max_seq_length {longest}" if task.can_be_cut else shorter
        raise UserError(f"The model {name} takes {longest} tokens, not {max_length}; {hint}.")
    if (fixed := fixed_length(model.config)) and (is_padded or max_length != fixed):
        raise UserError(
            f"The model {name} was made for inputs of {fixed} values each, and takes neither others nor padding."
        )
    return model


def _load_model(arguments: LraModelArguments, task: Task, is_masked_lm: bool) -> PreTrainedModel:
    """A model of this script, with its weights; `has_new_head` of one that classifies says whether its head is new."""
    name: Any = arguments.model_name_or_path
    config = AutoConfig.from_pretrained(name)
    _check_task(name, config, task)
    has_head = not guesses_values(config)
    if is_masked_lm and has_head:
        raise UserError(f"The model {name} classifies; --mask_probability makes a new model, or goes on with its.")
    _set_dropouts(config, arguments)
    override_trained(name, config, known_overrides(config, arguments.config_overrides, taken_by=SKTformerConfig()))
    if is_masked_lm:
        return AutoModelForMaskedLM.from_pretrained(name, config=config, dtype=TRAINED_DTYPE)
    if has_head or config.model_type == _SKTFORMER:
        model: Any = _class_for(config, task).from_pretrained(name, config=config, dtype=TRAINED_DTYPE)
    else:
        config.per_example = task.per_example
        model = EncoderForSequences(config)
        model.encoder = AutoModel.from_pretrained(name, config=config, dtype=TRAINED_DTYPE)
    model.has_new_head = not has_head
    return model


def _check_task(name: str, config: PreTrainedConfig, task: Task) -> None:
    """Refuse a model that is not one of this script's, or was made for another task."""
    if config.model_type != _SKTFORMER and not hasattr(config, "head_config"):
        raise UserError(f"The model {name} is not one of this script's; leave --model_name_or_path out.")
    if config.vocab_size != vocab_size(task):
        raise UserError(f"The model {name} was not made for {task.title}: it has {config.vocab_size} kinds of tokens.")
    # A model that guesses values has the labels of its task, too: the kinds of tokens are alike in most of them.
    if (labels := label_names(config)) != list(task.labels):
        raise UserError(f"The model {name} was not made for {task.title}: it tells {', '.join(labels)} apart.")


def _set_dropouts(config: PreTrainedConfig, arguments: LraModelArguments) -> None:
    """What the arguments say about dropout holds, in encoder and head, and not what the checkpoint has."""
    is_ours = config.model_type == _SKTFORMER
    sizes = config if is_ours else SKTformerConfig(**config.head_config)
    sizes.update({key: value for key, value in arguments.fields().items() if "dropout" in key})
    if is_ours:
        return
    overrides = known_overrides(sizes, arguments.config_overrides) or ""
    override_fields(sizes, ",".join(o for o in overrides.split(",") if "dropout" in o.partition("=")[0]))
    config.update(comparable_dropouts(config, sizes))
    config.head_config |= {key: value for key, value in vars(sizes).items() if key.endswith(_DROPOUT)}


def guesses_values(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of a checkpoint of masked self-pretraining, which has no head for labels."""
    return str((config.architectures or [""])[0]).endswith("ForMaskedLM")


def _label_fields(task: Task) -> dict[str, Any]:
    names = dict(enumerate(task.labels))
    return {
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        "problem_type": "single_label_classification",
    }


def vocab_size(task: Task) -> int:
    """Tokens of a task: its values, padding in front of them, and behind them the mask of pre-training."""
    return task.num_values + PAD + 2


def _class_for(config: PreTrainedConfig, task: Task) -> Any:
    if config.model_type != _SKTFORMER:
        return EncoderForSequences
    return SKTformerForSequenceClassification if task.per_example == 1 else SKTformerForSequenceMatching
