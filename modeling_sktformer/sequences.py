"""
Which tokens of a batch are real, where they stand, and which of them are a layer's landmarks.

Letters in shapes: B batch, S tokens, N positions of the model, d hidden size, k landmark tokens of a sequence.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils.import_utils import is_tracing


class Sequences(NamedTuple):
    """The sequences of a batch, which all layers read. Real tokens stand before the padding; if all are, no masks."""

    length: int  # tokens S, padding included
    token_mask: torch.Tensor | None = None  # True at real tokens, (B, S)
    num_tokens: torch.Tensor | None = None  # real tokens n of each sequence, (B,)
    column_scale: torch.Tensor | None = None  # 1 / sqrt(n) at real tokens and 0 at padding, (B, 1, S)

    @classmethod
    def from_mask(cls, length: int, token_mask: torch.Tensor | None, dtype: torch.dtype) -> "Sequences":
        """Of a mask `(B, S)` whose real tokens stand in front, for states of a type."""
        if token_mask is None:
            return cls(length)
        num_tokens = token_mask.sum(dim=-1)
        # In float32 rounded as Python's is, which a batch gets whose mask is read and found to keep every token.
        wide = torch.float64 if can_be_read(token_mask) else torch.promote_types(dtype, torch.float32)
        scale = num_tokens.clamp(min=1).to(wide).rsqrt().to(dtype)
        return cls(length, token_mask, num_tokens, (token_mask * scale.unsqueeze(1)).unsqueeze(1))

    def scale_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Columns `(B, ., S)` times 1 / sqrt(n), zero at padding."""
        # Before sums over the tokens, which would overflow float16 on long inputs.
        return columns * (self.length**-0.5 if self.column_scale is None else self.column_scale)

    def zero_padding(self, states: torch.Tensor) -> torch.Tensor:
        """States `(B, S, d)` with zeros in the place of padding."""
        return states if self.token_mask is None else states * self.token_mask.unsqueeze(-1)


class Landmarks(NamedTuple):
    """The landmark tokens of each sequence in one layer; the same for all sequences without a mask."""

    positions: torch.Tensor  # where they stand, in sampled order, (k,), or (B or 1, k) with a mask
    mask: torch.Tensor | None  # False where a short sequence has no further landmark, (B or 1, k)

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """The states of the landmarks: `(B, S, d)` to `(B, k, d)`."""
        positions = self.positions.expand(states.shape[0], -1)
        return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def select_landmarks(order: torch.Tensor, num_landmarks: int, sequences: Sequences) -> Landmarks:
    """
    Select the landmarks of a layer: each sequence's first `num_landmarks` real tokens in the layer's sampled order.

    A sequence of N tokens gets the paper's uniform sample (Algorithm 1); a shorter one a uniform sample of its own
    tokens, never of padding. `order`, `(N,)`, is a permutation of the positions; k = min(`num_landmarks`, S),
    in graphs `num_landmarks`.
    """
    length, num_positions, mask = sequences.length, len(order), sequences.token_mask
    ranks = torch.full_like(order, num_positions).scatter(0, order, torch.arange(num_positions, device=order.device))
    if not is_tracing():
        ranks = ranks[:length] if mask is None else torch.where(mask, ranks[:length], num_positions)
        landmark_ranks, positions = ranks.topk(min(num_landmarks, length), largest=False, sorted=True)
        return Landmarks(positions, None if mask is None else landmark_ranks < num_positions)
    # No slice, which is contiguous if it is the whole: to ask that binds an exported graph to one of the two.
    ranks = ranks.index_select(0, torch.arange(length, device=ranks.device))
    ranks = ranks.unsqueeze(0) if mask is None else torch.where(mask, ranks, num_positions)
    # A graph serves inputs of fewer tokens than landmarks, of one as well, with masked landmarks.
    ranks = nn.functional.pad(ranks, (0, num_landmarks), value=num_positions)
    landmark_ranks, positions = ranks.topk(num_landmarks, largest=False, sorted=True)
    return Landmarks(positions.clamp(max=length - 1), landmark_ranks < num_positions)


def draw_permutation(size: int, seed: int, layer_idx: int, name: str) -> torch.Tensor:
    """
    Draw the order in which a layer samples its landmarks: a permutation of `size` elements, on the CPU.

    The draw depends on nothing but the model's `landmark_seed`, the layer and the name of what is drawn, which make
    draws independent: no global generator is read or moved, so every process, rank and run makes the same model.
    """
    digest = hashlib.sha256(f"{seed}/{layer_idx}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(size, generator=generator, device="cpu")


def can_be_read(values: torch.Tensor) -> bool:
    """Whether a decision may rest on values: on processors, but not in graphs and below `torch.func.vmap`."""
    is_elsewhere = values.device.type != "cpu" or is_tracing(values)
    return not (is_elsewhere or torch._C._functorch.is_functorch_wrapped_tensor(values))


class TokenPlaces:
    """Where each sequence's real tokens stand, and how to bring them to the front and back."""

    def __init__(self, mask: torch.Tensor):
        num_tokens = mask.sum(dim=-1, keepdim=True)
        positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        # Real tokens keep their order, and so does the padding behind them.
        self.ranks = torch.where(mask, mask.cumsum(dim=-1) - 1, num_tokens + (~mask).cumsum(dim=-1) - 1)
        self.places = torch.empty_like(self.ranks).scatter(1, self.ranks, positions)
        self.token_mask = positions < num_tokens

    @classmethod
    def from_mask(cls, attention_mask: torch.Tensor | None) -> "TokenPlaces | None":
        """Read a mask; `None` if it keeps every token and that can be known without waiting for a device."""
        if attention_mask is None:
            return None
        mask = attention_mask.bool()
        return None if can_be_read(mask) and bool(mask.all()) else cls(mask)

    def to_front(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Bring `(B or 1, S, ...)` into the order of the ranks."""
        rows = self.places.shape[0]
        return None if values is None else _gather(values.expand(rows, *values.shape[1:]), self.places, 1)

    def restore(self, values: torch.Tensor | None, dim: int = 1) -> torch.Tensor | None:
        """Bring values whose axis `dim` is in the order of the ranks back to the input's order."""
        return None if values is None else _gather(values, self.ranks, dim)

    def in_place(self) -> bool:
        """Whether all padding is on the right, so that nothing moves; unknown in graphs. Waits for the device."""
        is_known = not is_tracing(self.ranks) and self.ranks.device.type != "meta"
        return is_known and torch.equal(self.token_mask, self.token_mask.gather(1, self.ranks))


def _gather(values: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """Select along `dim` with an index `(B, S)` that is the same for all other axes."""
    shape = [1] * values.dim()
    shape[0], shape[dim] = index.shape
    return values.gather(dim, index.to(values.device).view(shape).expand_as(values))


class SequencePooling(nn.Module):
    """
    What heads of sequences read: hidden states pooled by `config.classifier_pooling`, then standardised.

    `"cls"` is the first real token, `"mean"` the mean of all, `"mean_std"` mean and standard deviation, the statistics
    pooling of "Deep Neural Network Embeddings for Text-Independent Speaker Verification", `"layers"` these of the
    embeddings and of every layer. Pooled over many tokens, texts differ little beside what all have in common, on
    which a new head would spend a short training: `center` and `scale`, 0 and 1 until [`calibrate`] measures them,
    take that out.
    """

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(self, config):
        super().__init__()
        self.pooling = config.classifier_pooling
        num_states = config.num_hidden_layers + 1 if self.pooling == "layers" else 1
        self.width = config.hidden_size * num_states * (1 if self.pooling in ("cls", "mean") else 2)
        for name, start in (("center", 0.0), ("scale", 1.0)):  # not in half precision, in which models may be made
            self.register_buffer(name, torch.full((self.width,), start, dtype=torch.float32))

    def forward(self, states: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Pool states `(..., S, d)`, of `"layers"` L + 1 and else one, where a mask `(..., S)` is 1."""
        last = states[-1]
        # In half precision the sum of a long sequence is beyond the largest number.
        dtype = torch.promote_types(last.dtype, torch.float32)
        mask = (last.new_ones(last.shape[:-1]) if attention_mask is None else attention_mask).bool().unsqueeze(-1)
        if self.pooling == "cls":
            first = mask.int().argmax(dim=-2, keepdim=True)
            pooled = [last.gather(-2, first.expand_as(last[..., :1, :])).squeeze(-2)]
        else:
            num_tokens = mask.sum(dim=-2).clamp(min=1)
            pooled = [(layer * mask).sum(dim=-2, dtype=dtype) / num_tokens for layer in states]
        if self.pooling in ("mean_std", "layers"):
            for layer, mean in zip(states, tuple(pooled), strict=True):
                variance = ((layer - mean.unsqueeze(-2)).square() * mask).sum(dim=-2) / num_tokens
                pooled.append((variance + 1e-12).sqrt())  # at 0 the root is too steep
        return ((torch.cat(pooled, dim=-1) - self.center) / self.scale).to(last.dtype)

    @torch.no_grad()
    def calibrate(self, pooled: torch.Tensor) -> None:
        """
        Standardise what `forward` gives for some examples, `(num_examples, width)`; what is constant stays so.

        Raises:
            ValueError: if there is no example.
        """
        if not len(pooled):
            raise ValueError("There is no example to calibrate the head with; give at least one.")
        std, mean = torch.std_mean(pooled.to(self.center.dtype), dim=0, correction=0)
        self.center.add_(mean * self.scale)
        self.scale.mul_(torch.where(std > 1e-6, std, 1.0))
