"""Batch norm over positions, the paper's normalisation in the convolution stem (Algorithm 2)."""

import torch
from torch import nn

from .lengthening import extend_positions
from .sequences import Sequences


class PositionBatchNorm(nn.Module):
    """
    Batch norm over positions: one mean, variance, scale and shift for each of `max_position_embeddings`.

    The listing's `BatchNorm1d(seq_len)`, without padding: the statistics of a position run over the columns of the
    batch's real tokens there, and a position without a token in the batch keeps its running statistics. Statistics
    are computed in float32 at least. Across devices each normalises by its own part of the batch, as PyTorch's batch
    norm does.
    """

    eps = 1e-5
    momentum = 0.1
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, config):
        super().__init__()
        size, dtype = config.max_position_embeddings, torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("running_mean", torch.zeros(size, dtype=dtype))
        self.register_buffer("running_var", torch.ones(size, dtype=dtype))

    def forward(self, inputs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """Normalise `(batch_size, sequence_length, hidden_size)`; what stands at padding has no influence."""
        length, token_mask = inputs.shape[1], sequences.token_mask
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        states = inputs if token_mask is None and self.training and inputs.device.type != "mps" else inputs.to(dtype)
        weight, bias, mean, variance = (
            values[:length].to(dtype) for values in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        if self.training and token_mask is None:
            # PyTorch's batch norm with a position for a channel, of mixed types but on MPS; it moves the statistics.
            momentum = 0.0 if _is_recomputing() else self.momentum
            mean, variance = mean.clone(), variance.clone()  # which are kept for the backward pass
            outputs = nn.functional.batch_norm(states, mean, variance, weight, bias, True, momentum, self.eps)
            self.running_mean[:length].copy_(mean)
            self.running_var[:length].copy_(variance)
            return outputs.to(inputs.dtype)
        if self.training and token_mask is not None:
            mean, variance = self._measure(states, token_mask)
        scale = weight * torch.rsqrt(variance + self.eps)
        shift = bias - mean * scale
        return torch.addcmul(shift[:, None], states, scale[:, None]).to(inputs.dtype)

    def _measure(self, states: torch.Tensor, token_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and (biased) variance at each position, `(S,)`, which move the running statistics."""
        weights = token_mask.to(states.dtype)  # (B, S)
        num_tokens = weights.sum(dim=0)
        divisor = num_tokens.clamp(min=1)
        # The variance of a position is the mean of its tokens' variances plus the variance of their means.
        variances, means = torch.var_mean(states, dim=-1, correction=0)  # (B, S)
        mean = (means * weights).sum(dim=0) / divisor
        variance = ((variances + (means - mean).square()) * weights).sum(dim=0) / divisor
        if not _is_recomputing():
            count = num_tokens * states.shape[-1]
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            step = (count > 0).to(count.dtype) * self.momentum
            for running, new in ((self.running_mean, mean.detach()), (self.running_var, unbiased)):
                head = running[: mean.shape[0]]
                head.add_(step.to(running.dtype) * (new.to(running.dtype) - head))
        return mean, variance

    @torch.no_grad()
    def resize(self, new_num_positions: int, extension: str) -> None:
        """Change the number of positions, see [`extend_positions`]."""
        for values in (*self.parameters(), *self.buffers()):
            values.data = extend_positions(values, new_num_positions, extension)


def _is_recomputing() -> bool:
    """Whether this forward pass is gradient checkpointing's second one, which must not count in the statistics."""
    # Recomputation happens inside a backward pass, the only time that a graph task is active. A compiled model traces
    # the forward pass once and leaves buffer updates out of what it recomputes.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
