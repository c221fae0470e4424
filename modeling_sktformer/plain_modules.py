"""What the fast paths ask before they compute a module's result without calling it."""

import torch
from torch import nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """
    Whether to call a module does nothing but what its class says, so that the call can be left out.

    Not so an adapter in its place, a module with a hook (pruning and weight norm compute the weight in one) or while
    there are hooks on all modules, nor a module whose weight accelerate brings in when it is called.

    Args:
        module (`nn.Module`): The module.
        kind (`type`): The class that it has to be of, and not of a class derived from it.

    Returns:
        `bool`
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return (
        type(module) is kind
        and not any(hooks)
        and not nn.modules.module._has_any_global_hook()
        and "forward" not in vars(module)
    )


def has_plain_weights(module: nn.Module, kind: type[nn.Module]) -> bool:
    """
    Whether a module [`is_plain`] and has a weight and a bias that are tensors like others.

    Quantised and sharded weights are not: they know a few operations of their own.
    """
    return is_plain(module, kind) and all(
        type(getattr(module, name)) in (nn.Parameter, torch.Tensor) for name in ("weight", "bias")
    )


def needs_plain_operations() -> bool:
    """
    Whether someone looks at the single operations: a compiler, autocast, forward-mode differentiation or `torch.func`.

    They choose types, fuse, batch and differentiate operations that they know; gradients written by hand would be in
    their way.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )
