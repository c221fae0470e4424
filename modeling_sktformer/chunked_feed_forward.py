"""The feed-forward part of narrow models: a chunk of tokens at a time, which stays in the processor's cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN

from .dropout import Dropout, draw_kept, keep_values, round_probability
from .plain_modules import has_plain_weights, is_plain, needs_plain_operations


# Values of the wide layer in a chunk: 2 MiB in float32, as much as a core's share of the caches.
CHUNK_VALUES = 1 << 19
# Measured on CPUs, chunks save time from so many of them on and up to this width. Wider models have products that take
# longer to compute again than their results take to come from memory.
MIN_CHUNKS = 4
MAX_HIDDEN_SIZE = 128
# Functions of the single value, without state and chance, that can be computed again.
ACTIVATIONS = tuple(type(ACT2FN[name]) for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh"))


class FeedForward(NamedTuple):
    """The modules of a feed-forward part: x + dropout(second(activation(first(norm(x)))))."""

    norm: nn.LayerNorm
    first: nn.Linear
    activation: nn.Module
    second: nn.Linear
    dropout: Dropout


def is_chunking_faster(hidden_states: torch.Tensor, modules: FeedForward) -> bool:
    """
    Whether to compute a feed-forward part with [`chunked_feed_forward`].

    Not so with few tokens, in wide models, under autocast, on other devices than CPUs, or with an adapter or a hook in
    a module's place.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`): What comes in.
        modules ([`FeedForward`]): The part.

    Returns:
        `bool`
    """
    num_rows = hidden_states.numel() // hidden_states.shape[-1]
    return (
        hidden_states.device.type == "cpu"
        and not needs_plain_operations()
        and hidden_states.shape[-1] <= MAX_HIDDEN_SIZE
        and num_rows >= MIN_CHUNKS * _rows_per_chunk(modules)
        and has_plain_weights(modules.norm, nn.LayerNorm)
        and has_plain_weights(modules.first, nn.Linear)
        and has_plain_weights(modules.second, nn.Linear)
        and is_plain(modules.dropout, Dropout)
        and round_probability(modules.dropout.p) < 1
        and is_plain(modules.activation, type(modules.activation))
        and type(modules.activation) in ACTIVATIONS
        # With frozen weights there is little to compute backwards but what would be computed again.
        and (modules.first.weight.requires_grad or not torch.is_grad_enabled())
    )


def chunked_feed_forward(hidden_states: torch.Tensor, modules: FeedForward) -> torch.Tensor:
    """
    Compute a feed-forward part with its norm, dropout and the sum with its input, chunk by chunk.

    Nothing of what lies between input and output is kept for the backward pass but where dropout was, and each value
    of them comes from memory and goes there once; the backward pass computes the rest again.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`): What comes in.
        modules ([`FeedForward`]): The part; the activation is a function of the single value.

    Returns:
        `torch.Tensor` of the shape of `hidden_states`.
    """
    norm, first, activation, second, dropout = modules
    parameters = (norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias)
    options = _Options(activation, norm.eps, dropout.p if dropout.training else 0.0, _rows_per_chunk(modules))
    rows = hidden_states.flatten(0, -2)
    return _ChunkedFeedForward.apply(options, rows, *parameters).view_as(hidden_states)


class _Options(NamedTuple):
    activation: nn.Module
    norm_eps: float
    dropout_prob: float
    rows_per_chunk: int


def _rows_per_chunk(modules: FeedForward) -> int:
    return max(1, CHUNK_VALUES // modules.first.out_features)


def _widen(rows: torch.Tensor, parameters: Sequence[torch.Tensor], options: _Options) -> torch.Tensor:
    """The wide layer after its activation, from the weights and biases of the norm and of the first map."""
    norm_weight, norm_bias, first_weight, first_bias = parameters
    normalized = nn.functional.layer_norm(rows, norm_weight.shape, norm_weight, norm_bias, options.norm_eps)
    return options.activation(torch.addmm(first_bias, normalized, first_weight.mT))


_NUM_TENSORS = 7  # the rows, and weight and bias of the norm and both maps


class _ChunkedFeedForward(torch.autograd.Function):
    """x + dropout(activation(LN(x) W_1^T + b_1) W_2^T + b_2), whose backward pass keeps x and where dropout was."""

    @staticmethod
    def forward(ctx: Any, options: _Options, rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        *wide_parameters, second_weight, second_bias = parameters
        size = options.rows_per_chunk
        outputs, masks = torch.empty_like(rows), []
        for chunk, target in zip(rows.split(size), outputs.split(size), strict=True):
            update = torch.addmm(second_bias, _widen(chunk, wide_parameters, options), second_weight.mT)
            if options.dropout_prob > 0:
                masks.append(draw_kept(update, options.dropout_prob))
                update = keep_values(update, masks[-1], options.dropout_prob)
            torch.add(chunk, update, out=target)
        ctx.options = options
        ctx.save_for_backward(rows, *parameters, *masks)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        tensors = ctx.saved_tensors
        rows, parameters, masks = tensors[0], tensors[1:_NUM_TENSORS], tensors[_NUM_TENSORS:]
        # If gradients of these gradients are wanted, PyTorch's own rules give them.
        differentiate = _trace_gradients if torch.is_grad_enabled() else _compute_gradients
        with torch.autocast("cpu", enabled=False):
            return None, *differentiate(ctx.options, rows, parameters, masks, gradient)


def _compute_gradients(
    options: _Options,
    rows: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    masks: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of the rows and the parameters, chunk by chunk."""
    *wide_parameters, second_weight, _ = parameters
    size = options.rows_per_chunk
    row_gradient = torch.empty_like(rows)
    precise = torch.promote_types(rows.dtype, torch.float32)  # many chunks would add up badly in half precision
    sums = [torch.zeros_like(parameter, dtype=precise) for parameter in parameters]
    targets = zip(rows.split(size), gradient.split(size), row_gradient.split(size), strict=True)
    for number, (chunk, chunk_gradient, target) in enumerate(targets):
        update_gradient = chunk_gradient
        if masks:
            update_gradient = keep_values(chunk_gradient, masks[number], options.dropout_prob)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (chunk, *wide_parameters)]
            wide = _widen(leaves[0], leaves[1:], options)
        found = torch.autograd.grad(wide, leaves, update_gradient @ second_weight)
        torch.add(chunk_gradient, found[0], out=target)
        found = (*found[1:], update_gradient.mT @ wide.detach(), update_gradient.sum(dim=0))
        for total, part in zip(sums, found, strict=True):
            total += part
    return [row_gradient, *(total.to(rows.dtype) for total in sums)]


def _trace_gradients(
    options: _Options,
    rows: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    masks: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As [`_compute_gradients`], all at once and with gradients of their own."""

    def compute(rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        *wide_parameters, second_weight, second_bias = parameters
        update = torch.addmm(second_bias, _widen(rows, wide_parameters, options), second_weight.mT)
        return rows + (keep_values(update, torch.cat(masks), options.dropout_prob) if masks else update)

    pull_back = torch.func.vjp(compute, rows, *parameters)[1]
    return pull_back(gradient)
