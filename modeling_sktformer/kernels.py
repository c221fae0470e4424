"""
The seam between what the model says and how it is computed: faster kernels for single operations, and which form.

The plain code runs on every device and is what compilers and exporters see. A kernel computes one operation of it to
the same end in less time, where it applies. That is decided by devices, types, sizes and hooks alone, so that a call
takes the same way in the first pass and in one that gradient checkpointing repeats. `config.kernels`, which
`model.set_kernels` changes, is `"auto"`, or `"eager"` for the plain code alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils import logging

from .cpu_dropout import drop_values


logger = logging.get_logger(__name__)


def saves_multiply_adds(config, device: torch.device) -> bool:
    """
    Whether a batch is computed in fewer multiply-adds by more operators: on processors, for which the meta device
    stands, but not with `config.kernels="eager"`. GPUs wait for operators and for memory.
    """
    return config.kernels != "eager" and device.type in ("cpu", "meta")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """
    Whether a module does nothing but what its class says, so that its weights can stand in a product of another form.

    Not so an adapter in its place, a module with a hook (pruning and weight norm compute the weight in one), one whose
    weight accelerate brings in when it is called, one without bias, or a convolution with strides, gaps, groups or
    another padding; nor quantised and sharded weights, which know few operations. `kind` is its class, and no base.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = module.__dict__.get("forward")  # the class's own once accelerate has taken its hook off again
    if type(module) is not kind or any(hooks) or (own and getattr(own, "__func__", None) is not kind.forward):
        return False
    if isinstance(module, nn.Conv1d):
        form = (module.stride, module.dilation, module.groups, module.padding_mode, module.padding)
        if form != ((1,), (1,), 1, "zeros", (module.kernel_size[0] // 2,)):
            return False
    # The last two are what exporters put in the place of parameters.
    plain = ("Parameter", "FakeTensor", "FunctionalTensor")
    return all(each is not None and type(each).__name__ in plain for each in module._parameters.values())


class Kernel(NamedTuple):
    """A function and when it applies; both take what the operation takes."""

    name: str
    applies: Callable[..., bool]
    function: Callable[..., Any]


# The first one that applies is taken.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "dropout": (Kernel("cpu_dropout", lambda inputs, probability: inputs.device.type == "cpu", drop_values),),
}


def choose_kernel(operation: str, mode: str, *inputs: Any) -> Callable[..., Any] | None:
    """
    Choose what computes an operation, a key of `KERNELS`, in the configuration's mode, `"auto"` or `"eager"`.

    Returns a function of `inputs`, or `None` for the plain code, which is what compilers and exporters always get.
    """
    if mode == "eager" or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    for kernel in KERNELS[operation]:
        if kernel.applies(*inputs):
            logger.info_once(f'SKTformer: "{kernel.name}" computes {operation}; set_kernels("eager") for plain code.')
            return kernel.function
    return None


class Dropout(nn.Dropout):
    """Dropout as PyTorch's, computed by a kernel where there is one."""

    def __init__(self, probability: float, config):
        super().__init__(probability)
        self.config = config

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map a tensor of any shape to one of that shape; see `nn.Dropout`."""
        drops = self.training and 0 < self.p < 1 and not self.inplace
        kernel = choose_kernel("dropout", self.config.kernels, input, self.p) if drops else None
        return super().forward(input) if kernel is None else kernel(input, self.p)


class LayerNorm(nn.LayerNorm):
    """As PyTorch's, with sums in float32, but under autocast it reads states as they stand and makes no such copy."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        # Of float64 autocast casts nothing.
        if device == "meta" or input.dtype == torch.float64 or not torch.is_autocast_enabled(device):
            return super().forward(input)
        with torch.autocast(device, enabled=False):
            # GPUs know one type for all. Processors know two, and would sum the weights' gradients in a half one.
            weight, bias = (each if device == "cpu" else each.to(input.dtype) for each in (self.weight, self.bias))
            normalized = nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return normalized.to(torch.get_autocast_dtype(device))
