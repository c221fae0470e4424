"""What the fast paths ask before they compute a module's result without calling it."""

import torch
from torch import nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """
    Whether a module is its weight and bias and nothing else, so that these can be used without calling it.

    Not so an adapter or a quantised layer in its place, a layer with a hook (pruning and weight norm compute the
    weight in one), nor a layer whose weight accelerate brings in when it is called.

    Args:
        module (`nn.Module`): The module.
        kind (`type`): The class that it has to be of, and not of a class derived from it.

    Returns:
        `bool`
    """
    has_hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return type(module) is kind and not has_hooks and "forward" not in vars(module)


def needs_plain_operations() -> bool:
    """
    Whether someone looks at the single operations: a compiler, autocast, or a transform of functions (`torch.func`).

    They choose types, fuse and batch operations that they know; gradients written by hand would be in their way.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
    )
