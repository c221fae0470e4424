"""Batch norm over positions, the paper's normalisation in the convolution stem (Algorithm 2)."""

import torch
from torch import nn

from .lengthening import extend_positions
from .sequences import Sequences


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

    def forward(self, inputs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """
        Args:
            inputs (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
                Hidden states; what stands at padding has no influence.
            sequences ([`Sequences`]): Which tokens are real.

        Returns:
            `torch.Tensor` of the shape and dtype of `inputs`.
        """
        length, token_mask = inputs.shape[1], sequences.token_mask
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


def _is_recomputing() -> bool:
    """Whether this forward pass is gradient checkpointing's second one, which must not count in the statistics."""
    # Recomputation happens inside a backward pass, the only time that a graph task is active. A compiled model traces
    # the forward pass once and leaves buffer updates out of what it recomputes.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
