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
# Tiles times columns in a chunk, which goes through all steps before the next one: 1 MiB in float32, 6 MiB for the
# values that are multiplied.
CHUNK_VALUES = 1 << 18

# G: the values of the three weights' polynomial at 0, 1, -1, 2, -2 and infinity, with the factors that A and B leave
# out so that they are sums of few multiples.
_WEIGHT_MATRIX = [
    [1 / 4, 0, 0],
    [-1 / 6, -1 / 6, -1 / 6],
    [-1 / 6, 1 / 6, -1 / 6],
    [1 / 24, 1 / 12, 1 / 6],
    [1 / 24, -1 / 12, 1 / 6],
    [0, 0, 1],
]
_POINTS = len(_WEIGHT_MATRIX)


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
        num_tiles = -(-length // _RESULTS)
        outputs = inputs.new_empty(batch_size, num_tiles * _RESULTS, width)
        results = outputs.unflatten(1, (num_tiles, _RESULTS))
        for rows, first, stop in _chunks(inputs.shape):
            tiles = _transform_tiles(_read_tokens(inputs[rows], _RESULTS * first - 1, _RESULTS * stop + 1))
            products = torch.bmm(tiles.flatten(1, 2), weights.mT).unflatten(1, tiles.shape[1:3])
            _write_results(products, bias, results[rows, first:stop])
        ctx.save_for_backward(inputs, weight, bias)
        # A result that is a view could not be overwritten.
        return outputs if outputs.shape[1] == length else outputs[:, :length].clone()

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
    batch_size, length, num_columns = inputs.shape
    inputs_needed, weight_needed, bias_needed = needed
    num_tiles = -(-length // _RESULTS)
    weights = _transform_weight(weight)
    weights_gradient = torch.empty_like(weights)
    is_first = True
    input_gradient = inputs.new_empty(batch_size, num_tiles, _RESULTS, num_columns)
    spilled: torch.Tensor | float = 0.0  # what the last tile of a chunk gives to the token behind it
    for rows, first, stop in _chunks(inputs.shape) if inputs_needed or weight_needed else ():
        results = _read_tokens(gradient[rows], _RESULTS * first, _RESULTS * stop)
        products = _pull_back_results(results)
        flat_products = products.flatten(1, 2)
        if weight_needed:
            tiles = _transform_tiles(_read_tokens(inputs[rows], _RESULTS * first - 1, _RESULTS * stop + 1))
            weights_gradient.baddbmm_(flat_products.mT, tiles.flatten(1, 2), beta=0 if is_first else 1)
            is_first = False
        if inputs_needed:
            tiles = torch.bmm(flat_products, weights).unflatten(1, products.shape[1:3])
            target = input_gradient[rows]
            before, behind = _pull_back_tiles(tiles, target[:, first:stop])
            target[:, first, 0] += spilled
            target[:, first + 1 : stop, 0] += behind[:, :-1]
            spilled = behind[:, -1] if stop < num_tiles else 0.0
            skipped = int(first == 0)  # before the first tile there is no token
            target[:, first - 1 + skipped : stop - 1, -1] += before[:, skipped:]
    weight_gradient = None
    if weight_needed:
        weight_gradient = (weights_gradient.flatten(1).mT @ inputs.new_tensor(_WEIGHT_MATRIX)).view_as(weight)
    return (
        input_gradient.flatten(1, 2)[:, :length] if inputs_needed else None,
        weight_gradient,
        gradient.sum(dim=(0, 1)) if bias_needed else None,
    )


def _chunks(shape: torch.Size) -> Iterator[tuple[slice, int, int]]:
    """Rows of a batch `(B, S, c)` with the first of their tiles and the one after the last: a chunk; in order."""
    batch_size, length, num_columns = shape
    num_tiles, size = -(-length // _RESULTS), max(1, CHUNK_VALUES // num_columns)
    num_rows = max(1, size // num_tiles)
    for row in range(0, batch_size, num_rows):
        for first in range(0, num_tiles, size):
            yield slice(row, row + num_rows), first, min(first + size, num_tiles)


def _transform_weight(weight: torch.Tensor) -> torch.Tensor:
    """G w for weights `(d, c, 3)`; `(6, d, c)`."""
    matrix = weight.new_tensor(_WEIGHT_MATRIX)
    return (matrix @ weight.flatten(0, 1).mT).unflatten(1, weight.shape[:2])


def _transform_tiles(tokens: torch.Tensor) -> torch.Tensor:
    """B^T x for the tiles x of tokens `(B, 4 T + 2, c)`; `(6, B, T, c)`."""
    stop = tokens.shape[1] - _POINTS + 1
    x = [tokens[:, place : place + stop : _RESULTS] for place in range(_POINTS)]
    values = tokens.new_empty(_POINTS, *x[0].shape)
    even, odd = x[4] - x[2], x[3] - x[1]
    torch.add(even, x[0] - x[2], alpha=4, out=values[0])
    torch.add(even, odd, alpha=2, out=values[3])
    torch.sub(even, odd, alpha=2, out=values[4])
    torch.sub(x[5] - x[3], odd, alpha=4, out=values[5])
    torch.sub(x[4], x[2], alpha=4, out=even)
    torch.sub(x[3], x[1], alpha=4, out=odd)
    torch.add(even, odd, out=values[1])
    torch.sub(even, odd, out=values[2])
    return values


def _pull_back_tiles(values: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    B z for values z `(6, B, T, c)`: what tiles give to their tokens.

    For the four tokens in the middle it is written to `own`, `(B, T, 4, c)`; for the one before and the one behind,
    which are in the middle of a neighbour, it is returned: `(B, T, c)` each.
    """
    sums, differences = values[1] + values[2], values[1] - values[2]
    far_sums, far_differences = values[3] + values[4], (values[3] - values[4]).mul_(2)
    torch.sub((values[5] - differences).mul_(4), far_differences, out=own[:, :, 0])
    torch.sub(differences.add_(far_differences), values[5], alpha=5, out=own[:, :, 2])
    sums += values[0]
    torch.add(sums, far_sums, out=own[:, :, 3])
    torch.sub(far_sums.add_(values[0]).neg_(), sums, alpha=4, out=own[:, :, 1])
    return values[0].mul_(4), values[5]


def _write_results(values: torch.Tensor, bias: torch.Tensor, results: torch.Tensor) -> None:
    """A^T y plus the bias for values y `(6, B, T, d)`, to `results`, `(B, T, 4, d)`."""
    sums, differences = (values[1] + values[2]).add_(bias), (values[1] - values[2]).add_(bias)
    far_sums, far_differences = values[3] + values[4], values[3] - values[4]
    torch.add(values[0].add_(sums), far_sums, out=results[:, :, 0])
    torch.add(differences, far_differences, alpha=2, out=results[:, :, 1])
    torch.add(sums, far_sums, alpha=4, out=results[:, :, 2])
    torch.add(differences.add_(values[5]), far_differences, alpha=8, out=results[:, :, 3])


def _pull_back_results(gradient: torch.Tensor) -> torch.Tensor:
    """A z for gradients z of results, `(B, 4 T, d)`; `(6, B, T, d)`."""
    z = [gradient[:, place::_RESULTS] for place in range(_RESULTS)]
    values = gradient.new_empty(_POINTS, *z[0].shape)
    values[0], values[5] = z[0], z[3]
    even, odd = z[0] + z[2], z[1] + z[3]
    torch.add(even, odd, out=values[1])
    torch.sub(even, odd, out=values[2])
    torch.add(z[0], z[2], alpha=4, out=even)
    torch.add(z[1], z[3], alpha=4, out=odd)
    torch.add(even, odd, alpha=2, out=values[3])
    torch.sub(even, odd, alpha=2, out=values[4])
    return values


def _read_tokens(states: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Tokens of sequences `(B, S, c)`, zeros outside; `(B, stop - first, c)`."""
    length = states.shape[1]
    inside = states[:, max(first, 0) : min(stop, length)]
    before, behind = max(-first, 0), max(stop - length, 0)
    return nn.functional.pad(inside, (0, 0, before, behind)) if before or behind else inside
