"""
Skeleton attention: every token attends to a few sampled tokens, every feature to a few sampled features.

"Skeleton" is the CUR (skeleton) decomposition of a matrix, which rebuilds it from some of its rows and columns. Here
the *token branch* reads sampled rows of keys and values, the *feature branch* sampled columns (Section 3.1,
Algorithm 1 of "SKTformer: A Skeleton Transformer for Long Sequence Data").

Letters in shapes: B batch, S tokens, N positions of the model, d hidden size, H heads, h width of a head, k landmark
tokens of a sequence, s2 landmark features of a head.
"""

import hashlib

import torch
from torch import nn

from .dropout import Dropout
from .folded_attention import (
    FoldedInputs,
    FoldedOptions,
    folded_attention,
    gather_tokens,
    is_folding_cheaper,
    softmax_over_landmarks,
)
from .plain_modules import has_plain_weights, is_plain, needs_plain_operations


def draw_permutation(size: int, seed: int, layer_idx: int, name: str) -> torch.Tensor:
    """
    Draw the order in which a layer samples its landmarks.

    The draw depends on nothing but the arguments: no global generator is read or moved, so every process, rank and
    run makes the same model.

    Args:
        size (`int`): Number of elements to permute.
        seed (`int`): The model's `landmark_seed`.
        layer_idx (`int`): The layer, each has a sample of its own.
        name (`str`): What is drawn, so that two draws of a layer are independent.

    Returns:
        `torch.LongTensor` of shape `(size,)`, on the CPU.
    """
    digest = hashlib.sha256(f"{seed}/{layer_idx}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(size, generator=generator, device="cpu")


def resize_order(order: torch.Tensor, new_size: int, fresh_order: torch.Tensor) -> torch.Tensor:
    """
    Resize a permutation so that it stays uniform and the elements that remain keep their relative order.

    Landmarks are a sequence's first real tokens in this order and new positions lie behind the end of every sequence
    that fits the old size, so these sequences keep their landmarks.

    Args:
        order (`torch.LongTensor` of shape `(size,)`): A permutation of `0 .. size - 1`.
        new_size (`int`): The size wanted.
        fresh_order (`torch.LongTensor` of shape `(new_size,)`):
            A uniform permutation of `0 .. new_size - 1`. It decides which ranks the new elements take.

    Returns:
        `torch.LongTensor` of shape `(new_size,)`.
    """
    kept = order[order < new_size]
    resized = fresh_order.to(order.device, copy=True)
    resized[resized < order.numel()] = kept
    return resized


def select_landmarks(
    landmark_order: torch.Tensor, num_landmarks: int, sequence_length: int, token_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Select each sequence's landmarks: its first `num_landmarks` real tokens in the sampled order.

    A sequence of N tokens gets the paper's uniform sample; a shorter one a uniform sample of its own tokens, never of
    padding.

    Args:
        landmark_order (`torch.LongTensor` of shape `(max_position_embeddings,)`):
            A permutation of the positions.
        num_landmarks (`int`):
            Landmarks of a sequence that has that many tokens.
        sequence_length (`int`):
            Tokens S in the batch's sequences, padding included.
        token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
            True at real tokens, which stand before the padding. By default every token is real.

    Returns:
        `tuple`: the positions, a `torch.LongTensor` of shape `(num_landmarks,)` without a mask and of shape
        `(batch_size, num_landmarks)` with one (`sequence_length` landmarks where that is smaller), and with a mask a
        `torch.BoolTensor` of the same shape that is False where a short sequence has no further landmark.
    """
    num_landmarks = min(num_landmarks, sequence_length)
    num_positions = landmark_order.shape[0]
    ranks = torch.empty_like(landmark_order)
    ranks = ranks.scatter(0, landmark_order, torch.arange(num_positions, device=landmark_order.device))
    ranks = ranks[:sequence_length]
    if token_mask is None:
        return ranks.topk(num_landmarks, largest=False, sorted=True).indices, None
    ranks = torch.where(token_mask, ranks, num_positions)
    landmark_ranks, positions = ranks.topk(num_landmarks, dim=-1, largest=False, sorted=True)
    return positions, landmark_ranks < num_positions


def token_attention(
    query: torch.Tensor,
    landmark_keys: torch.Tensor,
    landmark_values: torch.Tensor,
    landmark_mask: torch.Tensor | None,
    dropout: nn.Module,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Attend from every token to the landmark tokens.

    Computes softmax(Q K_I^T / sqrt(h)) V_I of Algorithm 1 (the text's column attention, the listing's row attention).
    The softmax over no landmark at all is zero. Time and memory O(S k h) per head.

    Args:
        query (`torch.Tensor` of shape `(batch_size, num_heads, sequence_length, head_dim)`):
            Queries, unscaled.
        landmark_keys, landmark_values (`torch.Tensor` of shape `(batch_size, num_heads, num_landmarks, head_dim)`):
            Keys and values of the landmark tokens.
        landmark_mask (`torch.BoolTensor` of shape `(batch_size, num_landmarks)`, *optional*):
            False where a sequence has no landmark.
        dropout (`nn.Module`):
            Applied to the attention matrix.

    Returns:
        `tuple`: the attended values of `query`'s shape, and the attention matrix
        `(batch_size, num_heads, sequence_length, num_landmarks)`.
    """
    scores = query @ landmark_keys.mT * query.shape[-1] ** -0.5  # (B, H, S, k)
    probabilities = dropout(softmax_over_landmarks(scores, landmark_mask, dim=3))
    return probabilities @ landmark_values, probabilities


def feature_attention(
    query: torch.Tensor,
    key_columns: torch.Tensor,
    value_columns: torch.Tensor,
    token_mask: torch.Tensor | None,
    dropout: nn.Module,
) -> torch.Tensor:
    r"""
    Attend from every feature to the landmark features.

    Computes V_J softmax(Q^T K_J / sqrt(n))^T of Algorithm 1, where n is the number of real tokens of the sequence and
    Q^T K_J sums over these alone, so that a sequence without padding gives the paper's value. Time and memory
    O(S h s2) per head.

    Args:
        query (`torch.Tensor` of shape `(batch_size, num_heads, sequence_length, head_dim)`):
            Queries, unscaled.
        key_columns, value_columns (`torch.Tensor` of shape `(batch_size, num_heads, sequence_length, s2)`):
            The sampled columns of keys and values.
        token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
            True at real tokens. By default every token is real.
        dropout (`nn.Module`):
            Applied to the attention matrix of each head, `(head_dim, s2)`.

    Returns:
        `torch.Tensor` of `query`'s shape.
    """
    if token_mask is None:
        scale = query.shape[-2] ** -0.5
    else:
        key_columns = key_columns * token_mask[:, None, :, None]
        num_tokens = token_mask.sum(dim=-1).clamp(min=1)
        scale = num_tokens.to(query.dtype)[:, None, None, None].rsqrt()
    # Scaled before the sum over the tokens, which would overflow float16 on long inputs.
    scores = query.mT @ (key_columns * scale)  # (B, H, h, s2)
    probabilities = dropout(scores.softmax(dim=-1))
    return value_columns @ probabilities.mT


class SkeletonAttention(nn.Module):
    """
    Skeleton attention with its samples and projections (Section 3.1, Algorithm 1).

    The output is (LN_t(tokens) + LN_f(features)) / 2 over the full width, projected: the listing's half, where
    Equation 2 has the plain sum. With one branch switched off it is the other's layer norm alone.

    The paper draws both samples once, when the model is made. They are part of the model: `landmark_order`, a
    permutation of the positions, and `landmark_features`, a permutation of a head's columns, are saved with the
    weights, and the configured number of landmarks is taken from their front.

    Args:
        config ([`SKTformerConfig`]): Sizes, switches and the seed.
        layer_idx (`int`): Index of the layer, each draws its own samples.
    """

    landmark_order: torch.Tensor
    landmark_features: torch.Tensor

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.num_landmark_tokens = config.num_landmark_tokens
        self.num_landmark_features = config.num_landmark_features
        self.use_token_attention = config.use_token_attention
        self.use_feature_attention = config.use_feature_attention
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.attention_probs_dropout_prob)
        if self.use_token_attention:
            self.token_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            self._register_permutation("landmark_order", config.max_position_embeddings, config.landmark_seed)
        if self.use_feature_attention:
            self.feature_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            self._register_permutation("landmark_features", config.head_dim, config.landmark_seed)

    def forward(
        self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
                What queries, keys and values are read from.
            token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
                True at real tokens, which stand before the padding. By default every token is real.

        Returns:
            `tuple`: the output of `hidden_states`' shape, and the token branch's attention matrix
            `(batch_size, num_heads, sequence_length, num_landmarks)`, `None` if that branch is off.
        """
        landmarks = landmark_mask = None
        if self.use_token_attention:
            landmarks, landmark_mask = select_landmarks(
                self.landmark_order, self.num_landmark_tokens, hidden_states.shape[1], token_mask
            )
        attend = self._attend_folded if self.is_folded(hidden_states) else self._attend
        return attend(hidden_states, token_mask, landmarks, landmark_mask)

    def is_folded(self, hidden_states: torch.Tensor) -> bool:
        """Whether the output is computed without anything of the full width between it and the input."""
        # Layer norms that are not computed as such need the digits of float32. Devices other than CPUs have fused
        # kernels for them and slow ones for QR.
        if (
            hidden_states.device.type != "cpu"
            or hidden_states.dtype not in (torch.float32, torch.float64)
            or needs_plain_operations()
        ):
            return False
        # Who collects the attention matrix may want the output's gradient with respect to it, but folded it is made
        # beside the output.
        if self._forward_hooks and torch.is_grad_enabled():
            return False
        projections = (self.query, self.key, self.value, self.output)
        norms = [self.token_norm] if self.use_token_attention else []
        norms += [self.feature_norm] if self.use_feature_attention else []
        return (
            all(has_plain_weights(projection, nn.Linear) for projection in projections)
            and all(has_plain_weights(norm, nn.LayerNorm) for norm in norms)
            and is_plain(self.dropout, Dropout)
            and is_folding_cheaper(
                self.num_heads * self.head_dim,
                self.num_heads,
                self.num_landmark_tokens if self.use_token_attention else 0,
                self.num_landmark_features if self.use_feature_attention else 0,
                *hidden_states.shape[:2],
            )
        )

    def _attend(
        self,
        hidden_states: torch.Tensor,
        token_mask: torch.Tensor | None,
        landmarks: torch.Tensor | None,
        landmark_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the token branch's matrix, from the positions of the landmarks if that branch is on."""
        query = self._split_heads(self.query(hidden_states))
        probabilities, contexts = None, []
        if landmarks is not None:
            # Only the sampled rows of keys and values are ever read, so only they are computed.
            states = gather_tokens(hidden_states, landmarks)  # (B, k, d)
            keys, values = self._split_heads(self.key(states)), self._split_heads(self.value(states))
            tokens, probabilities = token_attention(query, keys, values, landmark_mask, self.dropout)
            contexts.append(self.token_norm(self._merge_heads(tokens)))
        if self.use_feature_attention:
            key_columns, value_columns = (
                columns.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for columns in self._project_landmark_features(hidden_states)
            )
            features = feature_attention(query, key_columns, value_columns, token_mask, self.dropout)
            contexts.append(self.feature_norm(self._merge_heads(features)))
        context = contexts[0] if len(contexts) == 1 else (contexts[0] + contexts[1]) / 2
        return self.output(context), probabilities

    def _attend_folded(
        self,
        hidden_states: torch.Tensor,
        token_mask: torch.Tensor | None,
        landmarks: torch.Tensor | None,
        landmark_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As [`_attend`], without queries and branches, see `folded_attention.py`."""
        batch_size, length, _ = hidden_states.shape
        token_norm = self.token_norm if self.use_token_attention else None
        feature_norm = self.feature_norm if self.use_feature_attention else None
        token_dropout = feature_dropout = None
        if self.dropout.training and self.dropout.p > 0:
            if landmarks is not None:
                shape = (batch_size, self.num_heads, landmarks.shape[-1], length)
                token_dropout = self.dropout(hidden_states.new_ones(shape))
            if feature_norm is not None:
                shape = (batch_size, self.num_heads, self.num_landmark_features, self.head_dim)
                feature_dropout = self.dropout(hidden_states.new_ones(shape))
        inputs = FoldedInputs(
            hidden_states=hidden_states,
            query_weight=self.query.weight,
            query_bias=self.query.bias,
            key_weight=self.key.weight,
            key_bias=self.key.bias,
            value_weight=self.value.weight,
            value_bias=self.value.bias,
            output_weight=self.output.weight,
            output_bias=self.output.bias,
            token_gain=None if token_norm is None else token_norm.weight,
            token_shift=None if token_norm is None else token_norm.bias,
            feature_gain=None if feature_norm is None else feature_norm.weight,
            feature_shift=None if feature_norm is None else feature_norm.bias,
            landmarks=landmarks,
            landmark_mask=landmark_mask,
            token_mask=token_mask,
            feature_rows=None if feature_norm is None else self._landmark_rows(),
            token_dropout=token_dropout,
            feature_dropout=feature_dropout,
        )
        options = FoldedOptions(
            num_heads=self.num_heads,
            token_eps=0.0 if token_norm is None else token_norm.eps,
            feature_eps=0.0 if feature_norm is None else feature_norm.eps,
        )
        output, probabilities = folded_attention(inputs, options)
        return output, None if probabilities is None else probabilities.mT

    def _register_permutation(self, name: str, size: int, seed: int) -> None:
        # Drawn on the CPU and copied to wherever the model is being built, the meta device included.
        order = torch.empty(size, dtype=torch.long)
        self.register_buffer(name, order.copy_(draw_permutation(size, seed, self.layer_idx, name)))

    def _project_landmark_features(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sampled columns of keys and values, the same ones in each head, head after head: `(B, S, H s2)`."""
        if has_plain_weights(self.key, nn.Linear) and has_plain_weights(self.value, nn.Linear):
            rows = self._landmark_rows()
            weight = torch.cat([self.key.weight[rows], self.value.weight[rows]])
            bias = torch.cat([self.key.bias[rows], self.value.bias[rows]])
            keys, values = nn.functional.linear(hidden_states, weight, bias).chunk(2, dim=-1)
            return keys, values
        columns = self.landmark_features[: self.num_landmark_features]
        keys, values = (
            # `gather`, because the compiled gradient of indexing the last axis is wrong on CPUs (PyTorch 2.13).
            projected.gather(-1, columns.expand(*projected.shape[:-1], -1)).flatten(2)
            for projected in (
                projection(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
                for projection in (self.key, self.value)
            )
        )
        return keys, values

    def _landmark_rows(self) -> torch.Tensor:
        """The rows of a projection's weight that give the sampled columns, head after head."""
        columns = self.landmark_features[: self.num_landmark_features]
        heads = torch.arange(self.num_heads, device=columns.device)
        return (heads[:, None] * self.head_dim + columns).flatten()

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, S, h)

    def _merge_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.transpose(1, 2).flatten(2)  # (B, S, d)
