"""The feed-forward part a chunk of tokens at a time, which stays in the processor's cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN

from .dropout import Dropout, draw_kept, keep_values, round_probability
from .plain_modules import has_plain_weights, is_plain, needs_plain_operations


# Measured on CPUs. Values of the wide layer in a chunk: 2 MiB in float32, as much as a core's share of the caches.
# Wide models take more, because every chunk goes through all weights, which is worth it from so many tokens on.
CHUNK_VALUES = 1 << 19
MIN_CHUNK_TOKENS = 768
# Up to this width products are computed again as fast as their results come from memory.
MAX_NARROW_SIZE = 128
# How many chunks there have to be for a gain.
MIN_CHUNKS = 2
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

    Not so with few tokens, under autocast, on other devices than CPUs, or with an adapter or a hook in a module's
    place.

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
        and num_rows >= MIN_CHUNKS * _rows_per_chunk(modules)
        and has_plain_weights(modules.norm, nn.LayerNorm)
        and has_plain_weights(modules.first, nn.Linear)
        and has_plain_weights(modules.second, nn.Linear)
        and is_plain(modules.dropout, Dropout)
        and round_probability(modules.dropout.p) < 1
        and is_plain(modules.activation, type(modules.activation))
        and type(modules.activation) in ACTIVATIONS
        and not getattr(modules.activation, "inplace", False)
        # The gradients of frozen weights would be computed for nothing.
        and (modules.first.weight.requires_grad or not torch.is_grad_enabled())
    )


def chunked_feed_forward(hidden_states: torch.Tensor, modules: FeedForward) -> torch.Tensor:
    """
    Compute a feed-forward part with its norm, dropout and the sum with its input, chunk by chunk.

    Of what lies between input and output, narrow models keep nothing for the backward pass but where dropout was;
    wider ones keep the first map's results, too. The backward pass computes the rest again.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`): What comes in.
        modules ([`FeedForward`]): The part; the activation is a function of the single value.

    Returns:
        `torch.Tensor` of the shape of `hidden_states`.
    """
    norm, first, activation, second, dropout = modules
    parameters = (norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias)
    options = _Options(
        activation,
        norm.eps,
        dropout.p if dropout.training else 0.0,
        _rows_per_chunk(modules),
        keeps_wide=torch.is_grad_enabled() and hidden_states.shape[-1] > MAX_NARROW_SIZE,
    )
    rows = hidden_states.flatten(0, -2)
    return _ChunkedFeedForward.apply(options, rows, *parameters).view_as(hidden_states)


class _Options(NamedTuple):
    activation: nn.Module
    norm_eps: float
    dropout_prob: float
    rows_per_chunk: int
    keeps_wide: bool


def _rows_per_chunk(modules: FeedForward) -> int:
    return max(MIN_CHUNK_TOKENS, CHUNK_VALUES // modules.first.out_features)


def _normalize(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, options: _Options) -> torch.Tensor:
    return nn.functional.layer_norm(rows, weight.shape, weight, bias, options.norm_eps)


_NUM_TENSORS = 7  # the rows, and weight and bias of the norm and both maps


class _ChunkedFeedForward(torch.autograd.Function):
    """x + dropout(activation(LN(x) W_1^T + b_1) W_2^T + b_2); backwards from x and, if kept, LN(x) W_1^T + b_1."""

    @staticmethod
    def forward(ctx: Any, options: _Options, rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        norm_weight, norm_bias, first_weight, first_bias, second_weight, second_bias = parameters
        size = options.rows_per_chunk
        # In pieces, because the C library asks the system for a large tensor each time anew.
        wide: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        outputs = torch.empty_like(rows)
        for chunk, target in zip(rows.split(size), outputs.split(size), strict=True):
            normalized = _normalize(chunk, norm_weight, norm_bias, options)
            before = torch.addmm(first_bias, normalized, first_weight.mT)
            if options.keeps_wide:
                wide.append(before)
            update = torch.addmm(second_bias, options.activation(before), second_weight.mT)
            if options.dropout_prob > 0:
                masks.append(draw_kept(update, options.dropout_prob))
                update = keep_values(update, masks[-1], options.dropout_prob)
            torch.add(chunk, update, out=target)
        ctx.options = options
        ctx.num_wide = len(wide)
        ctx.save_for_backward(rows, *parameters, *wide, *masks)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        tensors = ctx.saved_tensors
        rows, parameters = tensors[0], tensors[1:_NUM_TENSORS]
        chunks = tensors[_NUM_TENSORS:]
        wide, masks = chunks[: ctx.num_wide], chunks[ctx.num_wide :]
        with torch.autocast("cpu", enabled=False):
            if torch.is_grad_enabled():  # gradients of these gradients are wanted: PyTorch's own rules give them
                return None, *_trace_gradients(ctx.options, rows, parameters, masks, gradient)
            return None, *_compute_gradients(ctx.options, rows, parameters, wide, masks, gradient)


def _compute_gradients(
    options: _Options,
    rows: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    wide: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    gradient: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of the rows and the parameters, chunk by chunk."""
    norm_weight, norm_bias, first_weight, first_bias, second_weight, _ = parameters
    size = options.rows_per_chunk
    row_gradient = torch.empty_like(rows)
    precise = torch.promote_types(rows.dtype, torch.float32)  # many chunks would add up badly in half precision
    sums = [torch.zeros_like(parameter, dtype=precise) for parameter in parameters]
    norm_weight_sum, norm_bias_sum, first_weight_sum, first_bias_sum, second_weight_sum, second_bias_sum = sums
    targets = zip(rows.split(size), gradient.split(size), row_gradient.split(size), strict=True)
    for number, (chunk, chunk_gradient, target) in enumerate(targets):
        update_gradient = chunk_gradient
        if masks:
            update_gradient = keep_values(chunk_gradient, masks[number], options.dropout_prob)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (chunk, norm_weight, norm_bias)]
            normalized = _normalize(leaves[0], leaves[1], leaves[2], options)
        if wide:
            before = wide[number].detach()
        else:
            before = torch.addmm(first_bias, normalized.detach(), first_weight.mT)
        with torch.enable_grad():
            after = options.activation(before.requires_grad_())
        (before_gradient,) = torch.autograd.grad(after, before, update_gradient @ second_weight)
        _add_product(second_weight_sum, update_gradient.mT, after.detach())
        second_bias_sum += update_gradient.sum(dim=0)
        _add_product(first_weight_sum, before_gradient.mT, normalized.detach())
        first_bias_sum += before_gradient.sum(dim=0)
        found = torch.autograd.grad(normalized, leaves, before_gradient @ first_weight)
        torch.add(chunk_gradient, found[0], out=target)
        norm_weight_sum += found[1]
        norm_bias_sum += found[2]
    return [row_gradient, *(total.to(rows.dtype) for total in sums)]


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _trace_gradients(
    options: _Options,
    rows: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    masks: Sequence[torch.Tensor],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As [`_compute_gradients`], all at once and with gradients of their own."""

    def compute(rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        norm_weight, norm_bias, first_weight, first_bias, second_weight, second_bias = parameters
        normalized = _normalize(rows, norm_weight, norm_bias, options)
        wide = options.activation(torch.addmm(first_bias, normalized, first_weight.mT))
        update = torch.addmm(second_bias, wide, second_weight.mT)
        return rows + (keep_values(update, torch.cat(list(masks)), options.dropout_prob) if masks else update)

    pull_back = torch.func.vjp(compute, rows, *parameters)[1]
    return pull_back(gradient)
