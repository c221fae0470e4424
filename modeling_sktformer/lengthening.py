"""
What happens to a trained model when it is made longer or shorter, and to its filters when inputs are short.

Letters in shapes: N positions of the model, N' of the circle or model wanted, F = N // 2 + 1 frequencies, F' likewise,
d hidden size. Filters are of shape `(d, F, 2)`: real and imaginary part of each column's filter at each frequency.
"""

import torch


def short_transform_length(length: int, num_positions: int) -> int:
    """
    Choose a transform that is long enough for inputs of `length` S and shorter than the model's, if there is one.

    Tokens of an input are at most S - 1 apart, so a circle of 2 S - 1 positions holds every lag between them. Lengths
    are 2^k and 3 * 2^k: transforms of such lengths are fast, and there are only two of them in each octave. Returns
    the smallest that is at least 2 S - 1, or N where that is not below N.
    """
    num_lags = 2 * length - 1
    power = 1 << (num_lags - 1).bit_length()
    between = 3 * power // 4  # the only other candidate above power / 2
    fitting = between if power >= 4 and between >= num_lags else power
    return min(fitting, num_positions)


def shorten_filter(filter: torch.Tensor, num_positions: int, new_num_positions: int) -> torch.Tensor:
    """
    Take Fourier filters from N positions to a circle of N' <= N on which short inputs are convolved as before.

    Equation 5 (Section 3.2) is a circular sum, y[t] = sum over s of k[(t - s) mod N] x[s], which reads no lag but
    -(S - 1) .. S - 1 for inputs of S tokens. The lags that fit into N' positions are kept as they are and the others
    left out, so the result is the paper's for every S with 2 S - 1 <= N', and another function for longer inputs.
    This is one step of a forward pass, in time O(d N log N), whatever the number of sequences.

    Returns filters `(d, F', 2)` in float32 at least, or for N' = N those given.
    """
    if new_num_positions == num_positions:
        return filter
    kernel = _lag_values(filter.to(torch.promote_types(filter.dtype, torch.float32)), num_positions)  # (d, N)
    num_negative = new_num_positions // 2
    ahead, behind = kernel[:, : new_num_positions - num_negative], kernel[:, num_positions - num_negative :]
    return torch.view_as_real(torch.fft.rfft(torch.cat([ahead, behind], dim=1)))  # (d, F', 2)


def resize_filter(filter: torch.Tensor, num_positions: int, new_num_positions: int) -> torch.Tensor:
    """
    Take Fourier filters from N to N' positions, `(d, F', 2)` in their dtype, with their values at every lag kept.

    The filter goes to the lag domain, where lags -N/2 .. N/2 keep their values, new lags are zero and lags that no
    longer fit are cropped, and comes back. For an even N the lag N/2 stands for both directions and is split half and
    half; shrinking adds the two halves again. Inputs of at most min(N, N') / 2 tokens, which do not wrap around
    either circle, are convolved as before.
    """
    kernel = _lag_values(filter.double(), num_positions)  # (d, N)
    half, new_half = num_positions // 2, new_num_positions // 2
    lags = torch.arange(-half, half + 1, device=filter.device)
    values = kernel[:, lags % num_positions]
    if num_positions % 2 == 0:
        values[:, [0, -1]] /= 2
    kept = lags.abs() <= new_half
    new_kernel = kernel.new_zeros(kernel.shape[0], new_num_positions)
    new_kernel.index_add_(1, lags[kept] % new_num_positions, values[:, kept])
    return torch.view_as_real(torch.fft.rfft(new_kernel)).to(filter.dtype)


def _lag_values(filter: torch.Tensor, num_positions: int) -> torch.Tensor:
    """The filters' values at lags 0 .. N - 1, where N - l stands for -l; `(d, N)`."""
    parts = filter.clone(memory_format=torch.contiguous_format)  # also where weights are pieces of one vector
    return torch.fft.irfft(torch.view_as_complex(parts), n=num_positions)


def extend_positions(values: torch.Tensor, new_num_positions: int, extension: str) -> torch.Tensor:
    """
    Crop what is stored for N positions, `(N, ...)` to `(N', ...)`, or fill new positions with what trained ones hold.

    The `extension` is `"tile"`, which repeats all trained positions from the start, or `"last"`, the last one of them;
    a `ValueError` for another.
    """
    positions, num_positions = torch.arange(new_num_positions, device=values.device), values.shape[0]
    sources = {"tile": positions % num_positions, "last": positions.clamp(max=num_positions - 1)}
    if extension not in sources:
        raise ValueError(f'`extension` must be "tile" or "last", got "{extension}".')
    return values[sources[extension]]


def resize_order(order: torch.Tensor, fresh_order: torch.Tensor) -> torch.Tensor:
    """
    Resize a permutation so that it stays uniform and the elements that remain keep their relative order.

    Landmarks are a sequence's first real tokens in this order and new positions lie behind the end of every sequence
    that fits the old size, so these sequences keep their landmarks. `order` is a permutation of 0 .. N - 1;
    `fresh_order`, a uniform one of 0 .. N' - 1, decides which ranks the new elements take. Returns one of these.
    """
    kept = order[order < fresh_order.numel()]
    resized = fresh_order.to(order.device, copy=True)
    resized[resized < order.numel()] = kept
    return resized
