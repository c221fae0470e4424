r"""
The smoother: a whole-sequence Fourier convolution and a short convolution before the attention.

Section 3.2 and Algorithm 2 of "SKTformer: A Skeleton Transformer for Long Sequence Data". For columns x of a sequence,
r segments and a learned filter L for each column:

    Equation 6    u = the mean of each of the r consecutive blocks of d / r columns
    Equation 5    M = irfft(rfft(u) * L), each column with the average of its own segment
    Algorithm 2   dropout(relu(norm(conv1d([M, x]))))

Letters in shapes: B batch, S tokens, N positions of the transform, F = N // 2 + 1 frequencies, d hidden size, r
segments.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_tracing

from .circle import Circle, add_folded_stem
from .kernels import Dropout, LayerNorm, is_plain
from .lengthening import resize_filter, shorten_filter
from .position_batch_norm import PositionBatchNorm
from .sequences import Sequences


def average_segments(inputs: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Equation 6: the mean of each segment's columns, `(B, S, d)` to `(B, S, r)`, in float32 at least."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)  # no `mean`, whose gradient is divided at full size
    return inputs.unflatten(-1, (num_segments, -1)).sum(dim=-1, dtype=dtype) * (num_segments / inputs.shape[-1])


def fourier_convolution(
    inputs: torch.Tensor, filter: torch.Tensor, num_segments: int, num_positions: int
) -> torch.Tensor:
    r"""
    Convolve every column's segment average with that column's filter, around a circle of N >= S positions.

    Equations 5 and 6, not the listing, which tiles the r averages where Equation 6 repeats each of them d / r times in
    a row. Only r forward transforms are needed for d columns. Time O(d N log N), memory O(d N) per sequence.

    Columns `(B, S, d)`, zero at padding, and filters `(d, F, 2)`, the real and imaginary part of each column's at each
    frequency, give `(B, S, d)` in the columns' dtype, non-zero at padding too. Filters are real, because complex ones
    are cut by casts and refused by optimizers and compilers; transforms run in float32 at least, whatever is around
    them, because neither bfloat16 nor, for most lengths, float16 has any.
    """
    length = inputs.shape[1]
    averages = average_segments(inputs, num_segments)
    # Padded here, because the transform's own padding binds exported graphs to lengths below N.
    averages = nn.functional.pad(averages.mT, (0, num_positions - length))
    # Divided by N here, where there are r columns, and not in the inverse transform, where there are d.
    spectrum = torch.fft.rfft(averages, norm="forward")  # (B, r, F)
    gains = filter.to(averages.dtype).unflatten(0, (num_segments, -1))  # (r, d / r, F, 2)
    filtered = multiply_spectra(spectrum, gains)
    convolved = torch.fft.irfft(filtered, n=num_positions, norm="forward")  # (B, d, N)
    if torch.compiler.is_compiling():
        # A slice is contiguous if it is the whole, and to ask which it is binds a graph to one of the two.
        return convolved.index_select(-1, torch.arange(length, device=inputs.device)).mT.to(inputs.dtype)
    return convolved[..., :length].mT.to(inputs.dtype)


def multiply_spectra(spectrum: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """The product of Equation 5: `(B, r, F)`, complex, with parts `(r, d / r, F, 2)` to `(B, d, F)`, complex."""
    if not torch.compiler.is_compiling():
        gains = gains.clone() if gains.storage_offset() % 2 else gains  # where weights are pieces of one vector
        return (spectrum.unsqueeze(2) * torch.view_as_complex(gains)).flatten(1, 2)
    # In real numbers for compilers and exporters, which fuse or know no others.
    real, imag = torch.view_as_real(spectrum).unsqueeze(2).unbind(-1)
    gain_real, gain_imag = gains.unbind(-1)
    parts = (real * gain_real - imag * gain_imag, real * gain_imag + imag * gain_real)
    return torch.view_as_complex(torch.stack(parts, dim=-1).flatten(1, 2))


class FourierConvolution(nn.Module):
    """A learned filter over the whole sequence for each column (Equations 5 and 6), see [`fourier_convolution`]."""

    def __init__(self, config):
        super().__init__()
        self.num_segments, self.num_positions = config.num_segments, config.max_position_embeddings
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # of a model made in half precision, too
        self.filter = nn.Parameter(torch.empty(config.hidden_size, self.num_positions // 2 + 1, 2, dtype=dtype))

    def forward(self, inputs: torch.Tensor, circle: Circle | None = None) -> torch.Tensor:
        """Map `(B, S, d)`, zero at padding, to the same shape; without a circle, around the model's positions."""
        circle = circle or Circle(self.num_positions)
        return fourier_convolution(inputs, self.fitting_filter(circle), self.num_segments, circle.num_positions)

    def fitting_filter(self, circle: Circle) -> torch.Tensor:
        """The filter on the circle that the batch is convolved around."""
        return shorten_filter(self.filter, self.num_positions, circle.num_positions)

    @torch.no_grad()
    def resize(self, new_num_positions: int) -> None:
        """Change the length of the transform, keeping the filter's lags, see [`resize_filter`]."""
        self.filter.data = resize_filter(self.filter, self.num_positions, new_num_positions)
        self.num_positions = new_num_positions


def convolve_tokens(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """
    Convolve `(B, S, d or 2 d)`, zero at padding, along the tokens to `(B, S, d)`, as `nn.Conv1d` does with its weight:
    an image of one row whose columns (channels) stand last, which is how they stand around it.
    """
    length, margin, piece = inputs.shape[1], weight.shape[-1] // 2, 128
    # In long rows oneDNN's AVX2 code takes long for the gradients of weights, but not in pieces of such a row.
    cut = not is_tracing() and length > 2048 and inputs.is_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if cut:
        padded = nn.functional.pad(inputs, (0, 0, margin, margin + -length % piece))
        inputs, margin = padded.unfold(1, piece + 2 * margin, piece).mT.flatten(0, 1).contiguous(), 0
    sums = nn.functional.conv2d(inputs.mT.unsqueeze(2), weight.unsqueeze(2), bias, padding=(0, margin)).squeeze(2).mT
    return sums.unflatten(0, (-1, -(-length // piece))).flatten(1, 2)[:, :length] if cut else sums


class ConvolutionStem(nn.Module):
    """Short convolution over the Fourier convolution and its input, norm, activation and dropout (Algorithm 2)."""

    def __init__(self, config):
        super().__init__()
        width, kernel_size = config.hidden_size, config.conv_kernel_size
        num_columns = 2 * width if config.use_fourier_convolution else width
        self.convolution = nn.Conv1d(num_columns, width, kernel_size, padding=kernel_size // 2)
        self.has_batch_norm = config.smoother_norm == "batch_norm"
        self.norm = PositionBatchNorm(config) if self.has_batch_norm else LayerNorm(width, eps=config.layer_norm_eps)
        self.activation = nn.ELU() if config.smoother_activation == "elu" else ACT2FN[config.smoother_activation]
        self.dropout = Dropout(config.smoother_dropout_prob, config)

    def forward(self, columns: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """Map the Fourier convolution, if it is on, beside its input, `(B, S, d or 2 d)`, zero at padding."""
        convolution, plain = self.convolution, is_plain(self.convolution, nn.Conv1d)
        sums = convolve_tokens(columns, convolution.weight, convolution.bias) if plain else convolution(columns.mT).mT
        return self._finish(sums, sequences)

    def forward_folded(
        self,
        hidden_states: torch.Tensor,
        fourier_convolution: FourierConvolution,
        sequences: Sequences,
        circle: Circle,
    ) -> torch.Tensor:
        """As `forward`, with the module that would compute the Fourier convolution, see [`add_folded_stem`]."""
        smoothed_weight, own_weight = self.convolution.weight.chunk(2, dim=1)
        sums = convolve_tokens(hidden_states, own_weight, self.convolution.bias)
        averages = average_segments(hidden_states, fourier_convolution.num_segments)
        filter = fourier_convolution.fitting_filter(circle)
        # The spectrum is computed in float32 at least, also where others are cast around it.
        with maybe_autocast(hidden_states.device.type, enabled=False):
            sums = add_folded_stem(sums, averages, filter, smoothed_weight, circle)
        return self._finish(sums, sequences)

    def _finish(self, sums: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """Norm, activation and dropout of what has been convolved."""
        normalized = self.norm(sums, sequences) if self.has_batch_norm else self.norm(sums)
        return self.dropout(self.activation(normalized))


class Smoother(nn.Module):
    """Fourier convolution and convolution stem (Section 3.2, Algorithm 2); the sum with its input without a stem."""

    def __init__(self, config):
        super().__init__()
        self.fourier_convolution = FourierConvolution(config) if config.use_fourier_convolution else None
        self.convolution_stem = ConvolutionStem(config) if config.use_convolution_stem else None

    def forward(self, hidden_states: torch.Tensor, sequences: Sequences, circle: Circle) -> torch.Tensor:
        """Smooth `(B, S, d)`; what stands at padding, if finite, has no influence before and no meaning after it."""
        # A filter reaches over the whole sequence: padding is zeroed before each step that mixes positions.
        hidden_states = sequences.zero_padding(hidden_states)
        stem, fourier_convolution = self.convolution_stem, self.fourier_convolution
        if fourier_convolution is None:
            return hidden_states if stem is None else stem(hidden_states, sequences)
        in_full = torch.promote_types(hidden_states.dtype, torch.float32)  # where FSDP has not cast the waves
        if stem is not None and circle.waves is not None and circle.waves.shifts.dtype == in_full:
            parts = {stem: ConvolutionStem, stem.convolution: nn.Conv1d, fourier_convolution: FourierConvolution}
            if all(map(is_plain, parts, parts.values())):
                return stem.forward_folded(hidden_states, fourier_convolution, sequences, circle)
        smoothed = fourier_convolution(hidden_states, circle=circle)
        if stem is None:
            return smoothed + hidden_states
        return stem(torch.cat([sequences.zero_padding(smoothed), hidden_states], dim=-1), sequences)
