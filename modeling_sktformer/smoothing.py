"""
The smoother: a whole-sequence Fourier convolution and a short convolution before the attention.

Section 3.2 and Algorithm 2 of "SKTformer: A Skeleton Transformer for Long Sequence Data".

Letters in shapes: B batch, S tokens, N positions of the model, F = N // 2 + 1 frequencies, d hidden size, r segments.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN


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
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    segments = inputs.unflatten(-1, (num_segments, -1)).mean(dim=-1).mT  # (B, r, S)
    spectrum = torch.fft.rfft(segments.to(dtype), n=num_positions)  # (B, r, F)
    gains = torch.view_as_complex(filter.to(dtype).contiguous())  # (d, F)
    filtered = spectrum.unsqueeze(2) * gains.unflatten(0, (num_segments, -1))  # (B, r, d / r, F)
    convolved = torch.fft.irfft(filtered.flatten(1, 2), n=num_positions)  # (B, d, N)
    return convolved[..., : inputs.shape[1]].to(inputs.dtype)


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
    kernel = torch.fft.irfft(torch.view_as_complex(filter.double().contiguous()), n=num_positions)  # (d, N)
    half, new_half = num_positions // 2, new_num_positions // 2
    lags = torch.arange(-half, half + 1, device=filter.device)
    values = kernel[:, lags % num_positions]
    if num_positions % 2 == 0:
        values[:, [0, -1]] /= 2
    kept = lags.abs() <= new_half
    new_kernel = kernel.new_zeros(kernel.shape[0], new_num_positions)
    new_kernel.index_add_(1, lags[kept] % new_num_positions, values[:, kept])
    return torch.view_as_real(torch.fft.rfft(new_kernel)).to(filter.dtype)


class FourierConvolution(nn.Module):
    """
    A learned filter over the whole sequence for each column (Equations 5 and 6), see [`fourier_convolution`].

    Args:
        config ([`SKTformerConfig`]): Sizes.
    """

    def __init__(self, config):
        super().__init__()
        self.num_segments = config.num_segments
        self.num_positions = config.max_position_embeddings
        self.filter = nn.Parameter(torch.empty(config.hidden_size, self.num_positions // 2 + 1, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map `(batch_size, sequence_length, hidden_size)` to `(batch_size, hidden_size, sequence_length)`."""
        return fourier_convolution(inputs, self.filter, self.num_segments, self.num_positions)

    @torch.no_grad()
    def resize(self, new_num_positions: int) -> None:
        """Change the length of the transform, keeping the filter's lags, see [`resize_filter`]."""
        resized = resize_filter(self.filter, self.num_positions, new_num_positions)
        self.filter = nn.Parameter(resized, requires_grad=self.filter.requires_grad)
        self.num_positions = new_num_positions


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
        if self.training:
            mean, variance, count = self._batch_statistics(states, token_mask)
            if not _is_recomputing():
                self._update_running_statistics(mean.detach(), variance.detach(), count)
        else:
            mean, variance = self.running_mean[:length].to(dtype), self.running_var[:length].to(dtype)
        scale = self.weight[:length].to(dtype) * torch.rsqrt(variance + self.eps)
        shift = self.bias[:length].to(dtype) - mean * scale
        return torch.addcmul(shift[:, None], states, scale[:, None]).to(inputs.dtype)

    @staticmethod
    def _batch_statistics(
        states: torch.Tensor, token_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and (biased) variance at each position, and how many values they come from; all of shape `(S,)`."""
        batch_size, length, width = states.shape
        if token_mask is None:
            variance, mean = torch.var_mean(states, dim=(0, 2), correction=0)
            return mean, variance, mean.new_full((length,), batch_size * width)
        weights = token_mask.to(states.dtype).unsqueeze(-1)  # (B, S, 1)
        count = weights.sum(dim=(0, 2)) * width
        divisor = count.clamp(min=1)
        mean = (states * weights).sum(dim=(0, 2)) / divisor
        centered = (states - mean[:, None]) * weights
        return mean, centered.square().sum(dim=(0, 2)) / divisor, count

    @torch.no_grad()
    def _update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        unbiased = variance * count / (count - 1).clamp(min=1)
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
        self.dropout = nn.Dropout(config.smoother_dropout_prob)

    def forward(self, columns: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            columns (`torch.Tensor` of shape `(batch_size, num_inputs * hidden_size, sequence_length)`):
                The columns to mix, zero at padding.
            token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
                True at real tokens. By default every token is real.

        Returns:
            `torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`.
        """
        hidden_states = self.convolution(columns).mT
        if isinstance(self.norm, PositionBatchNorm):
            hidden_states = self.norm(hidden_states, token_mask)
        else:
            hidden_states = self.norm(hidden_states)
        return self.dropout(self.activation(hidden_states))


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
        if self.fourier_convolution is not None:
            smoothed = self.fourier_convolution(hidden_states)  # (B, d, S)
            if token_mask is not None:
                smoothed = smoothed * token_mask.unsqueeze(1)
        if self.convolution_stem is None:
            return hidden_states if self.fourier_convolution is None else smoothed.mT + hidden_states
        columns = hidden_states.mT
        if self.fourier_convolution is not None:
            columns = torch.cat([smoothed, columns], dim=1)  # (B, 2 d, S)
        return _zero_padding(self.convolution_stem(columns, token_mask), token_mask)


def _zero_padding(hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    return hidden_states if token_mask is None else hidden_states * token_mask.unsqueeze(-1)
