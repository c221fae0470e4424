r"""
The circle of positions that a batch is convolved around, and the stem's half that reads the Fourier convolution.

The short convolution of Algorithm 2 is linear, and so is the inverse transform of Equation 5 before it: the short
convolution can be applied to the filters instead of the columns. Each frequency of the r segments is then multiplied
with a matrix of r rows and d columns, the *folded filter*, which serves all sequences of a batch,

    E[f, s, o] = sum over the columns c of segment s and the taps k of W[o, c, k] exp(2 pi i f (k - P) / N) L[c, f]

so that the d x d products of the convolution are made once and not for each token. Whether this or the convolution of
the columns takes fewer multiply-adds is counted for every batch, on processors; GPUs and graphs convolve the columns.
Short transforms are products with fixed waves, which read and write tokens as they stand.

Letters in shapes: B batch, S tokens, N positions of the circle, F = N // 2 + 1 frequencies, d hidden size, r segments,
K taps of the short convolution, P = K // 2. In sums: f frequency, p, q, a real or imaginary part, s segment, i column
of it, k tap, o column of the result, t position, e end.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers.utils.import_utils import is_tracing

from .kernels import saves_multiply_adds
from .lengthening import short_transform_length
from .sequences import Sequences


# Up to here transforms are products: N multiply-adds for each value, and no other pass over memory than its own.
MAX_PRODUCT_POSITIONS = 512
# Up to here a GPU transforms a batch's values before it has been given the operators that shorten filters.
LAUNCH_BOUND_VALUES = 1 << 24
# What processors multiply while they read or write a value, in round figures.
MULTIPLY_ADDS_PER_VALUE = 64


class Waves(NamedTuple):
    """What the transforms of all layers are products with; the first two are `None` on long circles."""

    analysis: torch.Tensor | None  # to the spectrum's [[re, -im], [im, re]], over N: (F, 2, 2, S)
    synthesis: torch.Tensor | None  # from [re, im] to positions: (S, F, 2)
    shifts: torch.Tensor  # from [re, im] of a filter to those of its K shifted copies: (F, 2, 2, K)
    # As `-synthesis`, to the P positions before a sequence, 2 P zeros, and the P positions behind: (B or 1, 4 P, F, 2)
    ends: torch.Tensor
    end_tokens: torch.Tensor  # a sequence's first and last P tokens, in short ones padding: (B or 1, 2 P)


class Circle(NamedTuple):
    """What a batch is convolved around."""

    num_positions: int  # N
    waves: Waves | None = None  # where they take fewer multiply-adds than transforms and the short convolution


def choose_circle(config, batch_size: int, sequences: Sequences, dtype: torch.dtype, device: torch.device) -> Circle:
    """
    Choose by counting multiply-adds the length of a batch's circle, and on processors whether stems are folded.

    Inputs much shorter than the model's N are convolved around a shorter circle, to the same result up to rounding, so
    that they cost what they cost in a model of their length ([`~lengthening.shorten_filter`]), but not in graphs, in
    small batches on GPUs or with `config.kernels="eager"`. Waves are of that dtype, on that device.
    """
    length, longest = sequences.length, config.max_position_embeddings
    is_read = config.use_smoother and config.use_fourier_convolution
    saves = saves_multiply_adds(config, device)
    is_small = not saves and batch_size * longest * config.hidden_size <= LAUNCH_BOUND_VALUES
    # A graph serves many lengths: a choice would bind it to those of its example.
    if not is_read or is_tracing() or config.kernels == "eager" or is_small:
        return Circle(longest)
    can_fold = saves and length >= config.conv_kernel_size // 2  # the ends of shorter inputs overlap

    def count(num_positions: int) -> tuple[float, float]:
        direct, folded = count_multiply_adds(config, batch_size, length, num_positions)
        return direct, folded if can_fold else math.inf

    num_positions = min({longest, short_transform_length(length, longest)}, key=lambda number: min(count(number)))
    direct, folded = count(num_positions)
    waves = None if direct <= folded else make_waves(config.conv_kernel_size, sequences, num_positions, dtype, device)
    return Circle(num_positions, waves)


def count_multiply_adds(config, batch_size: int, length: int, num_positions: int) -> tuple[float, float]:
    """
    Count what a layer's Fourier convolution and the stem's half that reads it take, around a circle.

    Multiply-adds with the convolution of the columns, and with products per frequency, where a value that is moved for
    the folded filter counts as many as a device does meanwhile.
    """
    width, taps, num_segments = config.hidden_size, config.conv_kernel_size, config.num_segments

    def count_transforms(number: int, size: int) -> float:
        return number * 1.25 * size * math.log2(max(size, 2))  # 2.5 n log2 n real operations each

    shortened = 0.0
    if num_positions < config.max_position_embeddings:
        shortened = count_transforms(width, config.max_position_embeddings) + count_transforms(width, num_positions)
    if not config.use_convolution_stem:
        return shortened + count_transforms(batch_size * width, num_positions), math.inf
    direct = taps * batch_size * length * width**2 + count_transforms(batch_size * width, num_positions)
    # The folded filter is made, brought into order and read, and the filter shifted by every tap likewise.
    num_moved = (4 * num_segments + 3 * taps) * width * num_positions
    folded = taps * num_positions * width**2 + 2 * batch_size * num_positions * num_segments * width
    if num_positions <= MAX_PRODUCT_POSITIONS:
        transforms = batch_size * length * num_positions * (width + 2 * num_segments)
    else:
        transforms = count_transforms(batch_size * (width + num_segments), num_positions)
    return shortened + direct, shortened + folded + transforms + MULTIPLY_ADDS_PER_VALUE * num_moved


def make_waves(
    num_taps: int, sequences: Sequences, num_positions: int, dtype: torch.dtype, device: torch.device
) -> Waves:
    """Make the waves for a batch, see [`Waves`]."""
    frequencies = torch.arange(num_positions // 2 + 1, device=device)
    reach = num_taps // 2
    steps = torch.arange(reach, device=device)
    num_tokens, whole = sequences.num_tokens, torch.full((1,), sequences.length, device=device)
    after = (whole if num_tokens is None else num_tokens).unsqueeze(1) + steps  # (B or 1, P)
    before = (steps - reach).expand_as(after)

    def turn(positions: torch.Tensor) -> torch.Tensor:
        # The product modulo N is exact, and the angle has all its digits.
        turns = positions.unsqueeze(-1) * frequencies % num_positions
        angles = turns.to(dtype) * (2 * math.pi / num_positions)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([cos, sin, -sin, cos], dim=-1).unflatten(-1, (2, 2))  # (..., F, 2, 2)

    # Every frequency but the first and, for an even N, the last stands for its negative too.
    single = (frequencies == 0) | (2 * frequencies == num_positions)
    share = 2 - single.to(dtype).unsqueeze(-1)
    analysis = synthesis = None
    if num_positions <= MAX_PRODUCT_POSITIONS:
        turned = turn(torch.arange(sequences.length, device=device))
        analysis, synthesis = turned.permute(1, 2, 3, 0).contiguous() / num_positions, turned[..., 0] * share
    ends = turn(torch.cat([before, after], dim=1))[..., 0] * -share
    return Waves(
        analysis=analysis,
        synthesis=synthesis,
        shifts=turn(torch.arange(num_taps, device=device) - reach).permute(1, 2, 3, 0).contiguous(),
        ends=torch.cat([ends[:, :reach], torch.zeros_like(ends), ends[:, reach:]], dim=1),
        # What would be before a sequence of less than P tokens is at the end of the padding behind it.
        end_tokens=torch.cat([before + reach, after - reach], dim=1) % sequences.length,
    )


def add_folded_stem(
    sums: torch.Tensor, averages: torch.Tensor, filter: torch.Tensor, weight: torch.Tensor, circle: Circle
) -> torch.Tensor:
    r"""
    Add the short convolution of the Fourier convolution, zero outside the sequences (Equation 5 and Algorithm 2).

    The product of each frequency wraps around the circle, where the convolution reads zeros; what it reads there is
    taken off again, exactly.

    Adds to `(B, S, d)` what the segments' averages `(B, S, r)`, zero at padding, the filters `(d, F, 2)` and the
    convolution's weight for the columns of the Fourier convolution `(d, d, K)` give around a circle with waves; what
    stands at padding has no meaning.
    """
    waves, num_positions = cast(Waves, circle.waves), circle.num_positions
    batch_size, length, width = sums.shape
    dtype, weight = sums.dtype, weight.to(sums.dtype)
    gains = filter.to(averages.dtype).unflatten(0, (averages.shape[-1], -1))  # (r, d / r, F, 2)
    if waves.analysis is None:
        spectrum = torch.view_as_real(torch.fft.rfft(averages, n=num_positions, dim=1, norm="forward"))  # (B, F, r, 2)
        real, imag = spectrum.permute(3, 1, 0, 2)  # (F, B, r)
        spectrum = torch.stack([torch.stack([real, -imag], dim=2), torch.stack([imag, real], dim=2)], dim=1)
    else:
        spectrum = torch.einsum("faqt,bts->fabqs", waves.analysis, averages)
    filtered = torch.einsum("fabqs,fqso->fabo", spectrum.to(dtype), _fold_filters(gains, weight, waves.shifts))
    if waves.synthesis is None:
        real, imag = filtered.to(averages.dtype).unbind(1)
        # As a matrix (F, B d): PyTorch transposes it faster than it transforms along another dimension than the last.
        columns = torch.fft.irfft(torch.complex(real, imag).flatten(1).mT, n=num_positions, norm="forward")
        sums = sums + columns.unflatten(0, (batch_size, width))[..., :length].mT.to(dtype)
    else:
        synthesis = waves.synthesis.flatten(1).to(dtype).expand(batch_size, -1, -1)
        sums = torch.baddbmm(sums, synthesis, filtered.flatten(0, 1).transpose(0, 1))
    places = waves.end_tokens.unsqueeze(-1).expand(batch_size, -1, width)
    return sums.scatter_add_(1, places, _read_ends(spectrum, gains, weight, waves.ends)) if places.shape[1] else sums


def _fold_filters(gains: torch.Tensor, weight: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """The folded filter E, as real and imaginary part: `(F, 2, r, d)`, in the weight's dtype."""
    taps = weight.unflatten(1, gains.shape[:2])  # (d, r, d / r, K)
    shifted = torch.einsum("sifp,fpqk->sfqik", gains, shifts).to(weight.dtype)
    return torch.einsum("sfqik,osik->fqso", shifted, taps)


def _read_ends(spectrum: torch.Tensor, gains: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """What the first and last P tokens read of the circle outside of the sequence, negative: `(B, 2 P, d)`."""
    points = torch.einsum("befa,fabqs->befqs", ends.expand(spectrum.shape[2], -1, -1, -1), spectrum)
    values = torch.einsum("befqs,sifq->bsie", points, gains).flatten(1, 2)  # (B, d, 4 P)
    return nn.functional.conv1d(values.to(weight.dtype), weight).mT
