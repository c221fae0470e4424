"""
The smoother: a whole-sequence Fourier convolution and a short convolution before the attention.

Section 3.2 and Algorithm 2 of "SKTformer: A Skeleton Transformer for Long Sequence Data".

Letters in shapes: B batch, S tokens, N positions of the model, F = N // 2 + 1 frequencies, d hidden size, r segments.
"""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import nn
from transformers.activations import ACT2FN

from .dropout import Dropout
from .folded_stem import add_folded_stem, is_stem_folding_faster
from .minimal_filtering import filter_minimally, is_minimal_filtering_faster
from .plain_modules import has_plain_weights, is_plain, needs_plain_operations


# Of sequences `(B, S, c)` with weights `(d, c, K)` and a bias `(d,)`, to `(B, S, d)`.
Convolution = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Measured on CPUs: up to this width the stem is faster token by token than column by column, in training from 384
# columns on much slower.
MAX_NARROW_SIZE = 256


def fourier_convolution(inputs: torch.Tensor, filter: torch.Tensor, num_segments: int, num_positions: int):
    r"""
    Convolve every column's segment average with that column's filter, around a circle of `num_positions`.

    Equations 5 and 6: u is the mean of each of the r consecutive blocks of d / r columns, M = irfft(rfft(u) * L) with
    the average of a column's own block. The listing tiles the r averages over the columns where Equation 6 repeats
    each of them d / r times in a row; Equation 6 is followed. Only r forward transforms are needed for d columns.
    Time O(d N log N), memory O(d N) per sequence.

    Transforms run in float32 at least, whatever the precision around them, because neither bfloat16 nor, for most
    lengths, float16 has any.

    Args:
        inputs (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
            The columns to convolve, zero at padding.
        filter (`torch.Tensor` of shape `(hidden_size, num_positions // 2 + 1, 2)`):
            Real and imaginary part of each column's filter at each frequency. Real, because complex parameters are
            cut by casts and refused by optimizers and compilers.
        num_segments (`int`):
            Segments r; divides `hidden_size`.
        num_positions (`int`):
            Length N of the transform, at least `sequence_length`.

    Returns:
        `torch.Tensor` of shape `(batch_size, hidden_size, sequence_length)`, in the dtype of `inputs`. Non-zero at
        padding too.
    """
    spectrum = segment_spectrum(inputs, num_segments, num_positions)  # (B, r, F)
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    if torch.onnx.is_in_onnx_export():
        real, imag = torch.view_as_real(spectrum).unsqueeze(2).unbind(-1)  # (B, r, 1, F)
        gain_real, gain_imag = filter.to(dtype).unflatten(0, (num_segments, -1)).unbind(-1)  # (r, d / r, F)
        parts = (real * gain_real - imag * gain_imag, real * gain_imag + imag * gain_real)
        filtered = torch.view_as_complex(torch.stack(parts, dim=-1).flatten(1, 2))
    else:
        gains = torch.view_as_complex(filter.to(dtype).contiguous())  # (d, F)
        filtered = (spectrum.unsqueeze(2) * gains.unflatten(0, (num_segments, -1))).flatten(1, 2)  # (B, d, F)
    convolved = torch.fft.irfft(filtered, n=num_positions)  # (B, d, N)
    length = inputs.shape[1]
    if torch.compiler.is_compiling():
        # A slice is contiguous if it is the whole, and to ask which it is binds a graph to one of the two.
        kept = convolved.index_select(-1, torch.arange(length, device=inputs.device))
    else:
        kept = convolved[..., :length]
    return kept.to(inputs.dtype)


def segment_spectrum(inputs: torch.Tensor, num_segments: int, num_positions: int) -> torch.Tensor:
    """
    Average the columns of each segment and transform the averages (the inner part of Equation 5).

    Args:
        inputs, num_segments, num_positions: As for [`fourier_convolution`].

    Returns:
        `torch.Tensor` of shape `(batch_size, num_segments, num_positions // 2 + 1)`, complex.
    """
    segments = inputs.unflatten(-1, (num_segments, -1)).mean(dim=-1).mT  # (B, r, S)
    segments = segments.to(torch.promote_types(inputs.dtype, torch.float32))
    # Padded here, because the transform's own padding binds exported graphs to lengths below N.
    return torch.fft.rfft(nn.functional.pad(segments, (0, num_positions - inputs.shape[1])))


def short_transform_length(length: int, num_positions: int) -> int:
    """
    Choose a transform that is long enough for inputs of `length` tokens and shorter than the model's, if there is one.

    Tokens of an input are at most S - 1 apart, so a circle of 2 S - 1 positions holds every lag between them. Lengths
    are 2^k and 3 * 2^k: transforms of such lengths are fast, and there are only two of them in each octave.

    Args:
        length (`int`): Tokens of the input, at least 1.
        num_positions (`int`): Length N of the model's transform.

    Returns:
        `int`: The smallest such length that is at least `2 * length - 1`, or N where that is not below N.
    """
    num_lags = 2 * length - 1
    power = 1 << (num_lags - 1).bit_length()
    between = 3 * power // 4  # the only other candidate above power / 2
    fitting = between if power >= 4 and between >= num_lags else power
    return min(fitting, num_positions)


def shorten_filter(filter: torch.Tensor, num_positions: int, new_num_positions: int) -> torch.Tensor:
    """
    Take Fourier filters to a shorter circle on which short inputs are convolved as before.

    Equation 5 (Section 3.2) is a circular sum, y[t] = sum over s of k[(t - s) mod N] x[s], which reads no lag but
    -(S - 1) .. S - 1 for inputs of S tokens. The lags that fit into N' positions are kept as they are and the others
    left out, so the result is the paper's for every S with 2 S - 1 <= N', and another function for longer inputs.
    Unlike [`resize_filter`], which makes a filter to keep and splits or joins lag N / 2 for that, this is one step of
    a forward pass. Time O(d N log N), whatever the number of sequences.

    Args:
        filter (`torch.Tensor` of shape `(hidden_size, num_positions // 2 + 1, 2)`): The filters.
        num_positions (`int`): Length N of the circle that `filter` belongs to.
        new_num_positions (`int`): Length N' of the circle wanted, at most N.

    Returns:
        `torch.Tensor` of shape `(hidden_size, new_num_positions // 2 + 1, 2)`, in float32 at least.
    """
    kernel = _lag_values(filter.to(torch.promote_types(filter.dtype, torch.float32)), num_positions)  # (d, N)
    num_negative = new_num_positions // 2
    ahead, behind = kernel[:, : new_num_positions - num_negative], kernel[:, num_positions - num_negative :]
    return torch.view_as_real(torch.fft.rfft(torch.cat([ahead, behind], dim=1)))  # (d, N' // 2 + 1, 2)


def resize_filter(filter: torch.Tensor, num_positions: int, new_num_positions: int) -> torch.Tensor:
    """
    Take Fourier filters to another number of positions with their values at every lag kept.

    The filter goes to the lag domain, where lags -N/2 .. N/2 keep their values, new lags are zero and lags that no
    longer fit are cropped, and comes back. For an even N the lag N/2 stands for both directions and is split half and
    half; shrinking adds the two halves again. Inputs of at most min(N, N') / 2 tokens, which do not wrap around
    either circle, are convolved as before.

    Args:
        filter (`torch.Tensor` of shape `(hidden_size, num_positions // 2 + 1, 2)`): The filters.
        num_positions (`int`): Length N of the circle that `filter` belongs to.
        new_num_positions (`int`): Length N' of the circle wanted.

    Returns:
        `torch.Tensor` of shape `(hidden_size, new_num_positions // 2 + 1, 2)`, in the dtype of `filter`.
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
    """The filters' values at lags 0 .. N - 1, where N - l stands for -l; `(hidden_size, num_positions)`."""
    return torch.fft.irfft(torch.view_as_complex(filter.contiguous()), n=num_positions)


class FourierConvolution(nn.Module):
    """
    A learned filter over the whole sequence for each column (Equations 5 and 6), see [`fourier_convolution`].

    Inputs much shorter than the model's N are convolved around a shorter circle, to the same result up to rounding,
    so that they cost about what they cost in a model made for their length, see [`shorten_filter`].

    Args:
        config ([`SKTformerConfig`]): Sizes.
    """

    # A copy of the filter and what it was shortened to, for each length of the transform.
    _shortened: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None

    def __init__(self, config):
        super().__init__()
        self.num_segments = config.num_segments
        self.num_positions = config.max_position_embeddings
        self.filter = nn.Parameter(torch.empty(config.hidden_size, self.num_positions // 2 + 1, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map `(batch_size, sequence_length, hidden_size)` to `(batch_size, hidden_size, sequence_length)`."""
        filter, num_positions = self.fitting_filter(inputs.shape[0], inputs.shape[1])
        return fourier_convolution(inputs, filter, self.num_segments, num_positions)

    def fitting_filter(self, batch_size: int, length: int) -> tuple[torch.Tensor, int]:
        """The filter for the transform that costs least for inputs of this size, and the transform's length."""
        num_positions = self.fitting_length(batch_size, length)
        if num_positions == self.num_positions:
            return self.filter, num_positions
        if self._can_keep_shortened():
            return self._kept_filter(num_positions), num_positions
        return shorten_filter(self.filter, self.num_positions, num_positions), num_positions

    def fitting_length(self, batch_size: int, length: int) -> int:
        """The length of the transform that costs least for inputs of this size."""
        # A compiled, exported or traced graph serves many lengths. It keeps the transform that serves them all, where
        # a choice would bind it to the lengths of its example.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.num_positions
        short = short_transform_length(length, self.num_positions)
        # In transforms of one value of one column: what a shorter circle spares, and what it takes to get there.
        # Comparing filters is measured to cost about N / 4 of them, shortening is a transform of N and one of `short`.
        spared = batch_size * (self.num_positions - short)
        cost = self.num_positions // 4 if self._can_keep_shortened() else self.num_positions + short
        return short if spared > cost else self.num_positions

    def _can_keep_shortened(self) -> bool:
        # While a model trains, each step would need another copy. Accelerators would have to be waited for at each
        # comparison. Tensors of other types (sharded, fake, batched by `torch.func.vmap`) may lack values.
        without_gradients = not self.training and not torch.is_grad_enabled()
        return without_gradients and type(self.filter) is nn.Parameter and self.filter.device.type == "cpu"

    def _kept_filter(self, num_positions: int) -> torch.Tensor:
        """The filter shortened to `num_positions`, from an earlier call if the filter is still the same."""
        # Values are compared because nothing else tells: fused optimizers and writes to `.data`, such as averaged
        # weights being swapped in, leave the version counter and the address of a parameter as they are.
        kept = self._shortened
        if kept is None or not _equal_bits(kept[0], self.filter):
            kept = self._shortened = (self.filter.clone(), {})
        # The copy is what is shortened: another thread may be writing to the filter or have replaced the attribute.
        source, filters = kept
        if num_positions not in filters:
            filters[num_positions] = shorten_filter(source, self.num_positions, num_positions)
        return filters[num_positions]

    def train(self, mode: bool = True) -> Self:
        """Set the mode as `nn.Module.train` does; training frees the shortened filters kept for evaluation."""
        if mode:
            self._shortened = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: everything but the shortened filters, which are made again."""
        return {name: value for name, value in self.__dict__.items() if name != "_shortened"}

    @torch.no_grad()
    def resize(self, new_num_positions: int) -> None:
        """Change the length of the transform, keeping the filter's lags, see [`resize_filter`]."""
        resized = resize_filter(self.filter, self.num_positions, new_num_positions)
        self.filter = nn.Parameter(resized, requires_grad=self.filter.requires_grad)
        self.num_positions = new_num_positions
        self._shortened = None


def _equal_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two filters of shape `(..., 2)` are of one type, shape and device and equal bit by bit."""
    if first.dtype != second.dtype or first.device != second.device:
        return False
    # Both parts of a frequency as one integer, which is compared faster than floating-point numbers are.
    integer = torch.int32 if first.element_size() == 2 else torch.int64
    return torch.equal(first.contiguous().view(integer), second.contiguous().view(integer))


class PositionBatchNorm(nn.Module):
    """
    Batch norm over positions: one mean, variance, scale and shift for each position.

    The listing's `BatchNorm1d(seq_len)`, without padding: the statistics of a position run over the columns of the
    batch's real tokens there, and a position without a token in the batch keeps its running statistics. Statistics
    are computed in float32 at least.

    Across devices each normalises by its own part of the batch, as PyTorch's batch norm does.

    Args:
        config ([`SKTformerConfig`]): `max_position_embeddings` gives the number of positions.
    """

    eps = 1e-5
    momentum = 0.1
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.max_position_embeddings))
        self.bias = nn.Parameter(torch.zeros(config.max_position_embeddings))
        self.register_buffer("running_mean", torch.zeros(config.max_position_embeddings))
        self.register_buffer("running_var", torch.ones(config.max_position_embeddings))

    def forward(self, inputs: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            inputs (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
                Hidden states; what stands at padding has no influence.
            token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
                True at real tokens. By default every token is real.

        Returns:
            `torch.Tensor` of the shape and dtype of `inputs`.
        """
        length = inputs.shape[1]
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        states = inputs.to(dtype)
        weight, bias = self.weight[:length].to(dtype), self.bias[:length].to(dtype)
        if not self.training:
            mean, variance = self.running_mean[:length].to(dtype), self.running_var[:length].to(dtype)
        elif token_mask is None:
            return self._normalize_whole_sequences(states, weight, bias).to(inputs.dtype)
        else:
            mean, variance, count = self._batch_statistics(states, token_mask)
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            self._update_running_statistics(mean.detach(), unbiased, count)
        scale = weight * torch.rsqrt(variance + self.eps)
        shift = bias - mean * scale
        return torch.addcmul(shift[:, None], states, scale[:, None]).to(inputs.dtype)

    def _normalize_whole_sequences(
        self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Without padding this is PyTorch's batch norm with a position for each of its channels."""
        length = states.shape[1]
        momentum = 0.0 if _is_recomputing() else self.momentum
        if self.running_mean.dtype == states.dtype:
            running = (self.running_mean[:length], self.running_var[:length])
            return nn.functional.batch_norm(states, *running, weight, bias, True, momentum, self.eps)
        # Statistics kept in half precision: those after one step with momentum 1 are the batch's own.
        mean, unbiased = states.new_zeros(2, length).unbind()
        outputs = nn.functional.batch_norm(states, mean, unbiased, weight, bias, True, 1.0, self.eps)
        self.running_mean[:length].lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var[:length].lerp_(unbiased.to(self.running_var.dtype), momentum)
        return outputs

    @staticmethod
    def _batch_statistics(
        states: torch.Tensor, token_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and (biased) variance at each position, and how many values they come from; all of shape `(S,)`."""
        weights = token_mask.to(states.dtype)  # (B, S)
        count = weights.sum(dim=0)
        divisor = count.clamp(min=1)
        # The variance of a position is the mean of its tokens' variances plus the variance of their means.
        variances, means = torch.var_mean(states, dim=-1, correction=0)  # (B, S)
        mean = (means * weights).sum(dim=0) / divisor
        squares = variances + (means - mean).square()
        return mean, (squares * weights).sum(dim=0) / divisor, count * states.shape[-1]

    @torch.no_grad()
    def _update_running_statistics(self, mean: torch.Tensor, unbiased: torch.Tensor, count: torch.Tensor) -> None:
        if _is_recomputing():
            return
        step = self.momentum * (count > 0)
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            head = running[: mean.shape[0]]
            head.add_(step.to(running.dtype) * (new.to(running.dtype) - head))

    @torch.no_grad()
    def resize(self, new_num_positions: int, extension: str) -> None:
        """Change the number of positions, see [`extend_positions`]."""
        for name in ("weight", "bias"):
            parameter = getattr(self, name)
            extended = extend_positions(parameter, new_num_positions, extension)
            setattr(self, name, nn.Parameter(extended, requires_grad=parameter.requires_grad))
        self.running_mean = extend_positions(self.running_mean, new_num_positions, extension)
        self.running_var = extend_positions(self.running_var, new_num_positions, extension)


def extend_positions(values: torch.Tensor, new_num_positions: int, extension: str) -> torch.Tensor:
    """
    Fill new positions with what trained ones hold, or crop.

    Args:
        values (`torch.Tensor` of shape `(num_positions, ...)`): What is stored for each position.
        new_num_positions (`int`): Number of positions wanted.
        extension (`str`): `"tile"` repeats all trained positions from the start, `"last"` the last one of them.

    Returns:
        `torch.Tensor` of shape `(new_num_positions, ...)`.

    Raises:
        ValueError: for another `extension`.
    """
    positions, num_positions = torch.arange(new_num_positions, device=values.device), values.shape[0]
    if extension == "tile":
        return values[positions % num_positions].clone()
    if extension == "last":
        return values[positions.clamp(max=num_positions - 1)].clone()
    raise ValueError(f'`extension` must be "tile" or "last", got "{extension}".')


def _is_recomputing() -> bool:
    """Whether this forward pass is gradient checkpointing's second one, which must not count in the statistics."""
    # Recomputation happens inside a backward pass, the only time that a graph task is active. A compiled model traces
    # the forward pass once and leaves buffer updates out of what it recomputes.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class ConvolutionStem(nn.Module):
    """
    Short convolution over the Fourier convolution and its input, normalised and activated (Algorithm 2).

    Conv1d -> batch norm over positions (or layer norm over columns) -> activation -> dropout.

    Args:
        config ([`SKTformerConfig`]): Sizes and switches.
    """

    def __init__(self, config):
        super().__init__()
        num_inputs = 2 if config.use_fourier_convolution else 1
        self.convolution = nn.Conv1d(
            num_inputs * config.hidden_size,
            config.hidden_size,
            config.conv_kernel_size,
            padding=config.conv_kernel_size // 2,
        )
        self.norm: PositionBatchNorm | nn.LayerNorm
        if config.smoother_norm == "batch_norm":
            self.norm = PositionBatchNorm(config)
        else:
            self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.activation = ACT2FN[config.smoother_activation]
        self.dropout = Dropout(config.smoother_dropout_prob)

    def forward(
        self, smoothed: torch.Tensor | None, hidden_states: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """
        Args:
            smoothed (`torch.Tensor` of shape `(batch_size, hidden_size, sequence_length)`, *optional*):
                The Fourier convolution, zero at padding; `None` if it is switched off.
            hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
                Its input, zero at padding.
            token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
                True at real tokens. By default every token is real.

        Returns:
            `torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`.
        """
        convolve = self._fast_convolution(hidden_states)
        if convolve is None:
            columns = hidden_states.mT
            if smoothed is not None:
                columns = torch.cat([smoothed, columns], dim=1)  # (B, 2 d, S)
            return self._finish(self.convolution(columns).mT.contiguous(), token_mask)
        tokens = hidden_states
        if smoothed is not None:
            tokens = torch.cat([smoothed.mT, tokens], dim=-1)  # (B, S, 2 d)
        return self._finish(
            convolve(tokens, self.convolution.weight, cast(torch.Tensor, self.convolution.bias)), token_mask
        )

    def forward_folded(
        self, fourier_convolution: FourierConvolution, hidden_states: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As `forward`, with the module that would compute `smoothed`, see [`~folded_stem.add_folded_stem`]."""
        batch_size, length, width = hidden_states.shape
        filter, num_positions = fourier_convolution.fitting_filter(batch_size, length)
        spectrum = segment_spectrum(hidden_states, fourier_convolution.num_segments, num_positions)
        weight, own_weight = self.convolution.weight.split(width, dim=1)
        convolve = self._fast_convolution(hidden_states) or _convolve_columns
        sums = convolve(hidden_states, own_weight, cast(torch.Tensor, self.convolution.bias))
        sums = add_folded_stem(sums, spectrum, filter, weight, num_positions, token_mask)
        return self._finish(sums, token_mask)

    def _finish(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        """Norm, activation and dropout of what has been convolved."""
        if isinstance(self.norm, PositionBatchNorm):
            hidden_states = self.norm(hidden_states, token_mask)
        else:
            hidden_states = self.norm(hidden_states)
        return self.dropout(self._activate(hidden_states))

    def _activate(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Neither norm needs its output in the backward pass, so unless a hook has seen it, it can be overwritten.
        norm_is_plain = is_plain(self.norm, PositionBatchNorm) or is_plain(self.norm, nn.LayerNorm)
        if norm_is_plain and is_plain(self.activation, nn.ReLU):
            return nn.functional.relu(hidden_states, inplace=True)
        return self.activation(hidden_states)

    def _fast_convolution(self, hidden_states: torch.Tensor) -> Convolution | None:
        """What convolves tokens, columns side by side in memory as they stand around the stem, if that is faster."""
        convolution, width = self.convolution, hidden_states.shape[-1]
        if hidden_states.device.type != "cpu" or not has_plain_weights(convolution, nn.Conv1d):
            return None
        if width <= MAX_NARROW_SIZE:
            return _convolve_tokens
        num_tokens = hidden_states.numel() // width
        if (
            hidden_states.dtype in (torch.float32, torch.float64)
            and convolution.weight.dtype == hidden_states.dtype
            and not needs_plain_operations()
            and is_minimal_filtering_faster(convolution.in_channels, num_tokens, convolution.kernel_size[0])
        ):
            return filter_minimally
        return None


def _convolve_tokens(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Convolve along the tokens of `(B, S, c)` as an image of one row, whose columns (channels) stand last."""
    image = inputs.mT.unsqueeze(2)
    padding = (0, weight.shape[-1] // 2)
    return nn.functional.conv2d(image, weight.unsqueeze(2), bias, padding=padding).squeeze(2).mT


def _convolve_columns(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Convolve along the tokens of `(B, S, c)`, each column's tokens brought side by side and back."""
    return nn.functional.conv1d(inputs.mT, weight, bias, padding=weight.shape[-1] // 2).mT.contiguous()


class Smoother(nn.Module):
    """
    Fourier convolution and convolution stem (Section 3.2, Algorithm 2).

    With the stem switched off it returns the sum of the Fourier convolution and its input.

    Args:
        config ([`SKTformerConfig`]): Sizes and switches.
    """

    def __init__(self, config):
        super().__init__()
        self.fourier_convolution = FourierConvolution(config) if config.use_fourier_convolution else None
        self.convolution_stem = ConvolutionStem(config) if config.use_convolution_stem else None

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
                What to smooth.
            token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
                True at real tokens, which stand before the padding. By default every token is real.

        Returns:
            `torch.Tensor` of `hidden_states`' shape, zero at padding.
        """
        # A filter reaches over the whole sequence: padding is zeroed before each step that mixes positions.
        hidden_states = _zero_padding(hidden_states, token_mask)
        stem, fourier_convolution = self.convolution_stem, self.fourier_convolution
        if stem is not None and fourier_convolution is not None and self.is_stem_folded(hidden_states):
            return _zero_padding(stem.forward_folded(fourier_convolution, hidden_states, token_mask), token_mask)
        smoothed = None
        if fourier_convolution is not None:
            smoothed = fourier_convolution(hidden_states)  # (B, d, S)
            if token_mask is not None:
                smoothed = smoothed * token_mask.unsqueeze(1)
        if stem is None:
            return hidden_states if smoothed is None else smoothed.mT + hidden_states
        return _zero_padding(stem(smoothed, hidden_states, token_mask), token_mask)

    def is_stem_folded(self, hidden_states: torch.Tensor) -> bool:
        """Whether both parts are computed together, see `ConvolutionStem.forward_folded`, and neither is called."""
        stem, fourier_convolution = self.convolution_stem, self.fourier_convolution
        if stem is None or fourier_convolution is None:
            return False
        batch_size, length, width = hidden_states.shape
        return (
            hidden_states.device.type == "cpu"
            and hidden_states.dtype in (torch.float32, torch.float64)
            and not needs_plain_operations()
            and is_plain(stem, ConvolutionStem)
            and has_plain_weights(stem.convolution, nn.Conv1d)
            and is_plain(fourier_convolution, FourierConvolution)
            and type(fourier_convolution.filter) in (nn.Parameter, torch.Tensor)
            and fourier_convolution.filter.dtype == hidden_states.dtype
            and is_stem_folding_faster(
                width,
                batch_size,
                length,
                fourier_convolution.fitting_length(batch_size, length),
                fourier_convolution.num_segments,
            )
        )


def _zero_padding(hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    return hidden_states if token_mask is None else hidden_states * token_mask.unsqueeze(-1)
