"""
A convolution with three taps, in half of the products: Winograd's minimal filtering F(4, 3).

Four results next to each other are sums of 12 products of a weight and a value. Minimal filtering makes them from 6,
y = A^T ((G w) * (B^T x)), where the three matrices hold small numbers ("Fast Algorithms for Convolutional Neural
Networks", Lavin and Gray, 2016, Section 4.1). Here x is a tile: the six tokens that four results are made of. The
products over its columns become 6 matrix products with a quarter of the tokens in place of 3 with all of them.

Letters in shapes: B batch, S tokens, T = ceil(S / 4) tiles of a sequence, c columns of the input, d of the output.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


NUM_TAPS = 3
_RESULTS = 4  # of a tile, which starts at the token before them and ends at the one behind
# Measured on CPUs: narrower products, and those with fewer tokens, gain less than the sums around them cost.
MIN_COLUMNS = 640
MIN_TOKENS = 512
# Tiles in a chunk, which goes through all steps before the next one.
CHUNK_TILES = 384

# Values of the tile's polynomial at 0, 1, -1, 2, -2 and infinity; of the weights' there; and back to four results.
_TILE_MATRIX = [
    [4, 0, -5, 0, 1, 0],
    [0, -4, -4, 1, 1, 0],
    [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0],
    [0, 2, -1, -2, 1, 0],
    [0, 4, 0, -5, 0, 1],
]
_WEIGHT_MATRIX = [
    [1 / 4, 0, 0],
    [-1 / 6, -1 / 6, -1 / 6],
    [-1 / 6, 1 / 6, -1 / 6],
    [1 / 24, 1 / 12, 1 / 6],
    [1 / 24, -1 / 12, 1 / 6],
    [0, 0, 1],
]
_RESULT_MATRIX = [
    [1, 1, 1, 1, 1, 0],
    [0, 1, -1, 2, -2, 0],
    [0, 1, 1, 4, 4, 0],
    [0, 1, -1, 8, -8, 1],
]
_POINTS = len(_TILE_MATRIX)


def is_minimal_filtering_faster(num_columns: int, num_tokens: int, num_taps: int) -> bool:
    """
    Whether [`filter_minimally`] is faster than the convolution.

    Args:
        num_columns (`int`): Columns c that the convolution reads.
        num_tokens (`int`): Tokens B S of the batch.
        num_taps (`int`): Width of the convolution, which has to be three.

    Returns:
        `bool`
    """
    return num_taps == NUM_TAPS and num_columns >= MIN_COLUMNS and num_tokens >= MIN_TOKENS


def filter_minimally(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """
    Convolve along the tokens, with zeros around every sequence: `conv1d(inputs.mT, weight, bias, padding=1).mT`.

    Rounding errors are a few times as large as those of the direct sums. Gradients have gradients, too.

    Args:
        inputs (`torch.Tensor` of shape `(batch_size, sequence_length, num_columns)`): Sequences.
        weight (`torch.Tensor` of shape `(hidden_size, num_columns, 3)`): Of the convolution.
        bias (`torch.Tensor` of shape `(hidden_size,)`): Of the convolution.

    Returns:
        `torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`.
    """
    return _MinimalFiltering.apply(inputs, weight, bias)


class _MinimalFiltering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        (batch_size, length, _), width = inputs.shape, weight.shape[0]
        weights = _transform_weight(weight)
        result_matrix = inputs.new_tensor(_RESULT_MATRIX)
        outputs = inputs.new_empty(batch_size, length, width)
        for rows, first, stop in _chunks(batch_size, length):
            tiles = _transform_tiles(inputs[rows], first, stop)
            products = torch.bmm(tiles.flatten(1, 2), weights.mT)  # (6, b t, d)
            results = (result_matrix @ products.flatten(1)).view(_RESULTS, -1, stop - first, width)
            target = outputs[rows, _RESULTS * first : _RESULTS * stop]
            torch.add(results.permute(1, 2, 0, 3).flatten(1, 2)[:, : target.shape[1]], bias, out=target)
        ctx.save_for_backward(inputs, weight, bias)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        inputs, weight, bias = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            if torch.is_grad_enabled():  # gradients of these gradients are wanted: PyTorch's own rules give them
                pull_back = torch.func.vjp(_convolve, inputs, weight, bias)[1]
                return pull_back(gradient)
            return _compute_gradients(inputs, weight, gradient, ctx.needs_input_grad)


def _convolve(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.conv1d(inputs.mT, weight, bias, padding=NUM_TAPS // 2).mT


def _compute_gradients(
    inputs: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Every step of the forward pass transposed, chunk by chunk."""
    (batch_size, length, num_columns), width = inputs.shape, weight.shape[0]
    inputs_needed, weight_needed, bias_needed = needed
    num_tiles = -(-length // _RESULTS)
    weights = _transform_weight(weight)
    tile_matrix, result_matrix = inputs.new_tensor(_TILE_MATRIX), inputs.new_tensor(_RESULT_MATRIX)
    weights_gradient = torch.zeros_like(weights)
    input_gradient = inputs.new_empty(batch_size, num_tiles, _RESULTS, num_columns)
    spilled: torch.Tensor | float = 0.0  # what the last tile of a chunk gives to the token behind it
    for rows, first, stop in _chunks(batch_size, length) if inputs_needed or weight_needed else ():
        count = stop - first
        results = _read_tokens(gradient[rows], _RESULTS * first, _RESULTS * stop).unflatten(1, (count, _RESULTS))
        products = result_matrix.mT @ results.permute(2, 0, 1, 3).reshape(_RESULTS, -1)
        products = products.view(_POINTS, -1, width)
        if weight_needed:
            tiles = _transform_tiles(inputs[rows], first, stop)
            weights_gradient.baddbmm_(products.mT, tiles.flatten(1, 2))
        if inputs_needed:
            tiles = tile_matrix.mT @ torch.bmm(products, weights).flatten(1)
            before, *own, behind = tiles.view(_POINTS, -1, count, num_columns)
            target = input_gradient[rows]
            torch.stack(own, dim=2, out=target[:, first:stop])
            target[:, first, 0] += spilled
            target[:, first + 1 : stop, 0] += behind[:, :-1]
            spilled = behind[:, -1] if stop < num_tiles else 0.0
            skipped = int(first == 0)  # before the first tile there is no token
            target[:, first - 1 + skipped : stop - 1, -1] += before[:, skipped:]
    weight_gradient = weights_gradient.flatten(1).mT @ inputs.new_tensor(_WEIGHT_MATRIX)
    return (
        input_gradient.flatten(1, 2)[:, :length] if inputs_needed else None,
        weight_gradient.view_as(weight) if weight_needed else None,
        gradient.sum(dim=(0, 1)) if bias_needed else None,
    )


def _chunks(batch_size: int, length: int) -> Iterator[tuple[slice, int, int]]:
    """Rows of the batch with the first of their tiles and the one after the last: a chunk, tiles in their order."""
    num_tiles = -(-length // _RESULTS)
    num_rows = max(1, CHUNK_TILES // num_tiles)
    for row in range(0, batch_size, num_rows):
        for first in range(0, num_tiles, CHUNK_TILES):
            yield slice(row, row + num_rows), first, min(first + CHUNK_TILES, num_tiles)


def _transform_weight(weight: torch.Tensor) -> torch.Tensor:
    """G w for weights `(d, c, 3)`; `(6, d, c)`."""
    matrix = weight.new_tensor(_WEIGHT_MATRIX)
    return (matrix @ weight.flatten(0, 1).mT).unflatten(1, weight.shape[:2])


def _transform_tiles(inputs: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """B^T x for some tiles x of sequences `(B, S, c)`; `(6, B, T, c)`."""
    tokens = _read_tokens(inputs, _RESULTS * first - 1, _RESULTS * stop + 1)
    tiles = tokens.unfold(1, _POINTS, _RESULTS).permute(3, 0, 1, 2)
    return (inputs.new_tensor(_TILE_MATRIX) @ tiles.reshape(_POINTS, -1)).view(tiles.shape)


def _read_tokens(states: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Tokens of sequences `(B, S, c)`, zeros outside; `(B, stop - first, c)`."""
    length = states.shape[1]
    inside = states[:, max(first, 0) : min(stop, length)]
    before, behind = max(-first, 0), max(stop - length, 0)
    return nn.functional.pad(inside, (0, 0, before, behind)) if before or behind else inside
