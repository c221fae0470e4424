"""Low-rank adapters: trained in place of an encoder's weights, and merged into them."""

import importlib
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from experiments.arguments import UserError, flag, require_at_least
from experiments.heads import HeadArguments
from experiments.model_card import public_name


@dataclass
class LoraArguments:
    """Low-rank adapters, trained in place of the encoder's weights."""

    lora: bool = flag(False, "Train the head, and adapters of all linear layers (peft).")
    lora_rank: int = flag(8, "Rank of the adapters.")
    lora_alpha: float = flag(16.0, "The adapters' products are scaled by alpha / rank.")
    lora_dropout: float = flag(0.0, "Dropout on the adapters' inputs.")

    def __post_init__(self):
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if changed and not self.lora:
            raise UserError(f"--{changed[0]} is for adapters; add --lora, or leave it out.")
        require_at_least(1, self, "lora_rank")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"--lora_dropout is {self.lora_dropout:g}; it must be at least 0 and less than 1.")
        if not 0 < self.lora_alpha < math.inf:
            raise UserError(f"--lora_alpha is {self.lora_alpha:g}; it must be a positive number.")


def check_adapters(arguments: LoraArguments, training: HeadArguments) -> None:
    """Refuse adapters, with a `UserError`, where no step is taken in which they could learn."""
    if arguments.lora and training.fit_head:
        raise UserError("--fit_head takes no step in which the adapters of --lora could learn; leave one of them out.")


def add_lora(model: PreTrainedModel, arguments: LoraArguments, revision: str = "main") -> Any:
    """
    Freeze a sequence-classification model and put low-rank adapters beside all linear layers of its encoder.

    What is new in it is trained and saved whole: the head, and a pooler that a masked language model lacks. Returns a
    `peft.PeftModel`, see [`merge_adapters`].
    """
    if not is_peft_available():
        raise UserError('Low-rank adapters need peft; install it with `pip install -e ".[lora]"`.')
    peft, base = importlib.import_module("peft"), model.base_model
    new = [(name, module) for name, module in model.named_children() if module is not base]
    new += [(f"{model.base_model_prefix}.{n}", module) for n, module in base.named_children() if "pooler" in n]
    for module in model.modules():
        if hasattr(module, "running_mean"):
            # The adapter does not hold running statistics, so they stay as they are.
            module.register_forward_pre_hook(lambda module, _: setattr(module, "training", False))
    config = peft.LoraConfig(
        task_type=peft.TaskType.SEQ_CLS,
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules="all-linear",
        modules_to_save=[name for name, module in new if any(True for _ in module.parameters())],
        revision=revision,
    )
    return peft.get_peft_model(model, config)


def merge_adapters(adapted: Any, folder: Path | None) -> PreTrainedModel:
    """
    The whole model that a `peft.PeftModel` is, with its classes and its length, for transformers alone to load.

    The adapter goes to a folder by itself, if one is given: to be loaded into such a model by peft. A checkpoint that
    it was trained on is named there, and not the place on this machine where it lies.
    """
    if folder is not None:
        for config in adapted.peft_config.values():
            config.base_model_name_or_path = public_name(config.base_model_name_or_path)
        adapted.save_pretrained(folder, save_embedding_layers=False)  # which have not changed
        (folder / "README.md").unlink(missing_ok=True)  # a form to fill in, which names that place
    return adapted.merge_and_unload()
