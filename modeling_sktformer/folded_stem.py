"""
The half of the convolution stem that reads the Fourier convolution, without the columns of the Fourier convolution.

Convolution after an inverse transform is linear, so the short convolution can be applied to the filters. Each
frequency of the r segments is then multiplied with a matrix of r rows and d columns, the folded filter, which serves
all sequences of a batch: the d x d products of the convolution are made once and not for each sequence.

Letters in shapes: B batch, S tokens, N positions of the transform, F = N // 2 + 1 frequencies, d hidden size, r
segments, K width of the convolution, P = K // 2.
"""

import math

import torch
from torch import nn


# Measured on CPUs: in models wider than this and from so many sequences on, folding saves more time than the folded
# filter takes to be made, written and read.
MAX_NARROW_SIZE = 256
MIN_SEQUENCES = 3
# Values that a folded filter may hold for each sequence of the batch: 32 MiB in float32, which are kept for the
# backward pass.
MAX_VALUES_PER_SEQUENCE = 1 << 23
# Complex numbers of the folded filter that are made at once: 8 MiB in float32, less than what the C library asks the
# system for each time anew.
BLOCK_VALUES = 1 << 20


def is_stem_folding_faster(
    hidden_size: int, batch_size: int, length: int, num_positions: int, num_segments: int
) -> bool:
    """
    Whether [`add_folded_stem`] is faster than the convolution, for memory that is in proportion to the batch.

    A folded filter has r d N values, whatever the batch; the columns that it spares have d N for each sequence.

    Args:
        hidden_size (`int`): Width d.
        batch_size (`int`): Sequences B.
        length (`int`): Tokens S of each.
        num_positions (`int`): Length N of the transform, for which filters are folded.
        num_segments (`int`): Segments r.

    Returns:
        `bool`
    """
    num_sequences = batch_size * length / num_positions
    num_values = num_segments * hidden_size * num_positions
    return (
        hidden_size > MAX_NARROW_SIZE
        and num_sequences >= MIN_SEQUENCES
        and num_values <= MAX_VALUES_PER_SEQUENCE * num_sequences
    )


def add_folded_stem(
    sums: torch.Tensor,
    spectrum: torch.Tensor,
    filter: torch.Tensor,
    weight: torch.Tensor,
    num_positions: int,
    token_mask: torch.Tensor | None,
) -> torch.Tensor:
    r"""
    Add the short convolution of the Fourier convolution, zero outside the sequences (Equation 6 and Algorithm 2).

    At frequency f the folded filter is E[f, s, o] = sum over the columns c of segment s and over the taps k of
    W[o, c, k] exp(2 pi i f (k - P) / N) L[c, f]. Its result wraps around the circle of N positions, where the
    convolution reads zeros; what it reads there is taken off again, exactly.

    Args:
        sums (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`): What to add to; overwritten.
        spectrum (`torch.Tensor` of shape `(batch_size, num_segments, num_positions // 2 + 1)`): Of the segments.
        filter (`torch.Tensor` of shape `(hidden_size, num_positions // 2 + 1, 2)`):
            Real and imaginary part of each column's filter at each frequency.
        weight (`torch.Tensor` of shape `(hidden_size, hidden_size, kernel_size)`):
            Of the convolution, for the columns of the Fourier convolution.
        num_positions (`int`): Length N of the transform.
        token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
            True at real tokens, which stand before the padding. By default every token is real.

    Returns:
        `torch.Tensor`: `sums`; what stands at padding is of no use.
    """
    batch_size, length, _ = sums.shape
    sums += _convolve_around_circle(spectrum, filter, weight, num_positions)[..., :length].mT
    if weight.shape[-1] == 1:
        return sums
    if token_mask is None:
        lengths = torch.full((batch_size,), length, device=sums.device)
    else:
        lengths = token_mask.sum(dim=1)
    outside, tokens = _convolve_outside(spectrum, filter, weight, lengths, num_positions)
    # In sequences shorter than the reach some of the tokens are none.
    outside = outside * ((tokens >= 0) & (tokens < length)).unsqueeze(-1)
    tokens = tokens.clamp(0, length - 1).unsqueeze(-1).expand_as(outside)
    return sums.scatter_add_(1, tokens, -outside)


def _convolve_around_circle(
    spectrum: torch.Tensor, filter: torch.Tensor, weight: torch.Tensor, num_positions: int
) -> torch.Tensor:
    """The short convolution of the Fourier convolution, both around the circle; `(B, d, N)`."""
    batch_size, num_segments, _ = spectrum.shape
    taps = weight.unflatten(1, (num_segments, -1)).permute(1, 3, 2, 0).flatten(1, 2)  # (r, K d / r, d)
    offsets = torch.arange(weight.shape[-1], device=filter.device) - weight.shape[-1] // 2
    shifts = _shifts(offsets, num_positions, filter.dtype)  # (K, F)
    # Products of real numbers, of which PyTorch has batches. The real part of x E is that of x times E's real part and
    # minus x's imaginary part times E's; the imaginary part is the same with i x in the place of x.
    conjugate = spectrum.conj().resolve_conj()
    rows = torch.view_as_real(torch.stack([conjugate, 1j * conjugate]))  # (2, B, r, F, 2)
    rows = rows.permute(3, 0, 1, 2, 4).flatten(3, 4).flatten(1, 2)  # (F, 2 B, 2 r)
    size = max(1, BLOCK_VALUES // (num_segments * filter.shape[0]))
    blocks = zip(rows.split(size), filter.split(size, dim=1), shifts.split(size, dim=1), strict=True)
    filtered = torch.cat([torch.bmm(part, _fold(gains, factors, taps)) for part, gains, factors in blocks])
    real, imag = filtered.unflatten(1, (2, batch_size)).unbind(1)  # (F, B, d)
    # As a matrix (F, B d): PyTorch transposes it faster than it transforms along another dimension than the last.
    convolved = torch.fft.irfft(torch.complex(real, imag).flatten(1).mT, n=num_positions)
    return convolved.unflatten(0, (batch_size, -1))


def _fold(filter: torch.Tensor, shifts: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """
    The folded filter E at some frequencies, `(F, 2 r, d)`: for each segment real and imaginary part.

    From filters `(d, F, 2)`, shifts `(K, F)` at these frequencies and taps `(r, K d / r, d)`.
    """
    num_segments, num_frequencies = taps.shape[0], filter.shape[1]
    gains = torch.view_as_complex(filter.contiguous()).unflatten(0, (num_segments, 1, -1))  # (r, 1, d / r, F)
    shifted = torch.view_as_real(gains * shifts.unsqueeze(1))  # (r, K, d / r, F, 2)
    folded = shifted.flatten(1, 2).mT.flatten(-2).mT @ taps  # (r, 2 F, d)
    return folded.unflatten(1, (2, num_frequencies)).flatten(0, 1).transpose(0, 1)


def _convolve_outside(
    spectrum: torch.Tensor, filter: torch.Tensor, weight: torch.Tensor, lengths: torch.Tensor, num_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What the convolution would read next to each sequence: P values of the Fourier convolution at either end.

    Returns what they add to the results at the sequence's first and last P tokens, `(B, 2 P, d)`, and the places of
    these tokens, `(B, 2 P)`.
    """
    batch_size, num_segments, num_frequencies = spectrum.shape
    reach = weight.shape[-1] // 2
    steps = torch.arange(reach, device=spectrum.device)
    before, after = (steps - reach).expand(batch_size, -1), steps + lengths.unsqueeze(1)
    shifts = _shifts(torch.cat([before, after], dim=1), num_positions, filter.dtype)  # (B, 2 P, F)
    # Single values of an inverse transform: the real part of a product with gains, as a product of real vectors.
    shares = torch.full((num_frequencies,), 2 / num_positions, dtype=filter.dtype, device=filter.device)
    shares[0] /= 2  # every other frequency stands for its negative too
    if num_positions % 2 == 0:
        shares[-1] /= 2
    points = ((spectrum * shares).unsqueeze(2) * shifts.unsqueeze(1)).conj().resolve_conj()  # (B, r, 2 P, F)
    points = torch.view_as_real(points).flatten(-2).transpose(0, 1).flatten(1, 2)  # (r, B 2 P, 2 F)
    gains = filter.flatten(1).unflatten(0, (num_segments, -1))  # (r, d / r, 2 F)
    values = (points @ gains.mT).unflatten(1, (batch_size, -1)).permute(1, 0, 3, 2).flatten(1, 2)  # (B, d, 2 P)
    ends = [
        nn.functional.pad(values[..., :reach], (0, 2 * reach)),
        nn.functional.pad(values[..., reach:], (2 * reach, 0)),
    ]
    outside = nn.functional.conv1d(torch.cat(ends), weight)  # (2 B, d, P)
    return torch.cat(outside.chunk(2), dim=-1).mT, torch.cat([before + reach, after - reach], dim=1)


def _shifts(offsets: torch.Tensor, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """exp(2 pi i f offset / N), `(..., F)`: times a spectrum, that of what stands `offset` positions ahead."""
    # The product modulo N is exact, and the angle has all its digits.
    turns = offsets.unsqueeze(-1) * torch.arange(num_positions // 2 + 1, device=offsets.device) % num_positions
    angles = turns.to(dtype) * (2 * math.pi / num_positions)
    return torch.complex(angles.cos(), angles.sin())
