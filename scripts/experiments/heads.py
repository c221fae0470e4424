"""New heads on trained encoders: where they begin, and how fast they and the layers below them learn."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from experiments.arguments import UserError, flag, require_at_least
from experiments.training import RunArguments
from modeling_sktformer.sequences import SequencePooling


Collator: TypeAlias = Callable[[list[Any]], dict[str, Any]]  # makes a batch of examples
# So many of them say how the inputs of a head vary.
_CALIBRATION_EXAMPLES = 256
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")  # the number of a layer, in the name of a parameter


@dataclass
class HeadArguments(RunArguments):
    """The arguments of a run, and how a new head is treated."""

    head_learning_rate: float | None = flag(None, "Rate of what stands behind the encoder, if it has its own.")
    layer_decay: float | None = flag(
        None, "The last layer learns at this share of --learning_rate, each lower one at this share of the one above."
    )
    calibrate_head: bool = flag(False, "Standardise what a new head reads, by some training examples.")
    fit_head: bool = flag(False, "Compute the head from the training examples, and train nothing else.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, self, "head_learning_rate")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise UserError(f"--layer_decay is {self.layer_decay:g}; it must be above 0 and at most 1.")

    def head_identity(self) -> dict[str, Any]:
        """What these decide of a run's result, which knows of a head's treatment only where one is asked for."""
        head = {
            "head_learning_rate": self.head_learning_rate,
            "layer_decay": self.layer_decay,
            "calibrate_head": self.calibrate_head or None,
            "fit_head": self.fit_head or None,
        }
        return {name: value for name, value in head.items() if self.do_train and value is not None}


def calibrate_head(model: PreTrainedModel, examples: Dataset, collator: Collator, device: torch.device) -> None:
    """
    Standardise what a new head reads, to mean 0 and variance 1, each over some of the examples.

    What is pooled over many tokens differs little from one text to the next, so that a head with small weights takes
    most of a short training to begin to tell texts apart. Heads that keep what they standardise by
    ([`SequencePooling`]) get that; of others the first layer's outputs are scaled by its weights, after Section 3 of
    [All you need is a good init](https://arxiv.org/abs/1511.06422), and where it has a bias the mean is taken out too.
    A layer that the checkpoint lends a head, as ModernBERT's, is scaled like a new one, and learns faster for it.
    """
    outputs: dict[Any, list[torch.Tensor]] = {}

    def note(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        if output.dim() == 2 or isinstance(module, SequencePooling):  # not one vector for each token
            outputs.setdefault(module, []).append(output.flatten(0, -2))

    layers: list[Any] = [module for module in model.modules() if isinstance(module, (nn.Linear, SequencePooling))]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    chosen = examples.select(range(0, len(examples), -(-len(examples) // _CALIBRATION_EXAMPLES)))
    model.to(device).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for batch in DataLoader(chosen, batch_size=8, collate_fn=collator):  # type: ignore[arg-type]
            model(**{name: value.to(device) for name, value in batch.items()})
        for hook in hooks:
            hook.remove()
        if not outputs:
            return
        layer, batches = next(iter(outputs.items()))
        if isinstance(layer, SequencePooling):
            layer.calibrate(torch.cat(batches))
            return
        std, mean = torch.std_mean(torch.cat(batches), dim=0, correction=0)
        scale = torch.where(std > 1e-6, std, 1.0).reciprocal()
        layer.weight.mul_(scale.unsqueeze(1))
        if layer.bias is not None:
            layer.bias.sub_(mean).mul_(scale)


def encoder_of(model: Any) -> nn.Module:
    """What stands before a model's head, also where it has adapters."""
    return getattr(model, "get_base_model", lambda: model)().base_model


def set_head_rate(optimizer: torch.optim.Optimizer, model: Any, rate: float) -> None:
    """Give what stands behind the encoder, a pooler included, a learning rate of its own."""
    slow = {parameter for name, parameter in encoder_of(model).named_parameters() if "pooler" not in name}
    for group in optimizer.param_groups[:]:
        fast = [parameter for parameter in group["params"] if parameter not in slow]
        group["params"] = [parameter for parameter in group["params"] if parameter in slow]
        optimizer.add_param_group({**group, "params": fast, "lr": rate})


def set_layer_rates(optimizer: torch.optim.Optimizer, model: Any, decay: float) -> None:
    """
    Give the last layer of the encoder `decay` times the rate that it has, each one below it `decay` times that of the
    one above, and embeddings that of a layer below the first: discriminative fine-tuning, Section 3.2 of
    [ULMFiT](https://arxiv.org/abs/1801.06146). Layers that share weights learn as one; what is of no layer and called
    no embedding keeps its rate, as heads do.
    """
    named = dict(encoder_of(model).named_parameters())
    layers = {name: int(found[1]) for name in named if (found := _LAYER.search(name))}
    count = max(layers.values(), default=-1) + 1
    depths = {parameter: count + 1 for name, parameter in named.items() if "embed" in name}
    depths |= {named[name]: count - number for name, number in layers.items()}
    for group in optimizer.param_groups[:]:
        by_depth: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_depth.setdefault(depths.get(parameter, 0), []).append(parameter)
        group["params"] = by_depth.pop(0, [])
        for depth, parameters in by_depth.items():
            optimizer.add_param_group({**group, "params": parameters, "lr": group["lr"] * decay**depth})
