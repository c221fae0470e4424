"""The feed-forward part of narrow models: a chunk of tokens at a time, which stays in the processor's cache."""

from functools import partial
from typing import Any

import torch
from torch import nn

from .folded_attention import is_plain


# Values of the wide layer in a chunk: 2 MiB in float32, as much as a core's share of the caches.
CHUNK_VALUES = 1 << 19
# Measured on CPUs, chunks save time from so many of them on and up to this width. Wider models have products that take
# longer to compute again than their results take to come from memory.
MIN_CHUNKS = 4
MAX_HIDDEN_SIZE = 128


def chunked_mlp(inputs: torch.Tensor, first: nn.Linear, activation: nn.Module, second: nn.Linear) -> torch.Tensor:
    """
    Compute `second(activation(first(inputs)))`, in chunks where that is faster.

    Nothing of the wide layer is then kept for the backward pass, which computes it again, chunk by chunk. With few
    tokens, wide models, autocast, other devices than CPUs, or an adapter in a map's place, the modules are simply
    called.

    Args:
        inputs (`torch.Tensor` of shape `(..., hidden_size)`): Hidden states.
        first, second (`nn.Linear`): The maps to the wide layer and back.
        activation (`nn.Module`): A function of the single value.

    Returns:
        `torch.Tensor` of shape `(..., hidden_size)`.
    """
    rows_per_chunk = max(1, CHUNK_VALUES // first.out_features)
    if (
        inputs.device.type != "cpu"
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or inputs.shape[-1] > MAX_HIDDEN_SIZE
        or inputs.numel() // inputs.shape[-1] < MIN_CHUNKS * rows_per_chunk
        or not is_plain(first, nn.Linear)
        or not is_plain(second, nn.Linear)
        or next(activation.parameters(), None) is not None
    ):
        return second(activation(first(inputs)))
    rows = inputs.flatten(0, -2)
    parameters = (first.weight, first.bias, second.weight, second.bias)
    return _ChunkedMLP.apply(rows, *parameters, activation, rows_per_chunk).view_as(inputs)


def _compute(
    rows: torch.Tensor,
    first_weight: torch.Tensor,
    first_bias: torch.Tensor,
    second_weight: torch.Tensor,
    second_bias: torch.Tensor,
    activation: nn.Module,
    rows_per_chunk: int,
) -> torch.Tensor:
    outputs = [
        torch.addmm(second_bias, activation(torch.addmm(first_bias, chunk, first_weight.mT)), second_weight.mT)
        for chunk in rows.split(rows_per_chunk)
    ]
    return torch.cat(outputs)


class _ChunkedMLP(torch.autograd.Function):
    """`activation(x W_1^T + b_1) W_2^T + b_2`, whose backward pass keeps x alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> torch.Tensor:
        return _compute(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        *tensors, ctx.activation, ctx.rows_per_chunk = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        rows, first_weight, first_bias, second_weight, _ = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of these gradients are wanted
            compute = partial(_compute, activation=ctx.activation, rows_per_chunk=ctx.rows_per_chunk)
            pull_back = torch.func.vjp(compute, *ctx.saved_tensors)[1]
            return (*pull_back(gradient), None, None)
        row_gradient = torch.empty_like(gradient)
        first_weight_gradient, first_bias_gradient = torch.zeros_like(first_weight), torch.zeros_like(first_bias)
        second_weight_gradient = torch.zeros_like(second_weight)
        size = ctx.rows_per_chunk
        for chunk, chunk_gradient, target in zip(
            rows.split(size), gradient.split(size), row_gradient.split(size), strict=True
        ):
            wide = torch.addmm(first_bias, chunk, first_weight.mT)
            with torch.enable_grad():
                wide.requires_grad_()
                activated = ctx.activation(wide)
            second_weight_gradient = torch.addmm(second_weight_gradient, chunk_gradient.mT, activated.detach())
            (wide_gradient,) = torch.autograd.grad(activated, wide, chunk_gradient @ second_weight)
            first_weight_gradient = torch.addmm(first_weight_gradient, wide_gradient.mT, chunk)
            first_bias_gradient = first_bias_gradient + wide_gradient.sum(dim=0)
            target.copy_(wide_gradient @ first_weight)
        second_bias_gradient = gradient.sum(dim=0)
        return (
            row_gradient,
            first_weight_gradient,
            first_bias_gradient,
            second_weight_gradient,
            second_bias_gradient,
            None,
            None,
        )
