r"""
Skeleton attention: every token attends to a few sampled tokens, every feature to a few sampled features.

"Skeleton" is the CUR (skeleton) decomposition of a matrix, which rebuilds it from some of its rows and columns. Here
the *token branch* reads sampled rows of keys and values, the *feature branch* sampled columns (Section 3.1,
Algorithm 1 of "SKTformer: A Skeleton Transformer for Long Sequence Data"). For a head of width h with queries, keys
and values Q, K, V, sampled tokens I and sampled columns J, of a sequence of n tokens:

    Equation 1 (replaced)    softmax(Q K^T / sqrt(h)) V, which Equation 3 is where every token is a landmark
    Equation 3 (tokens)      softmax(Q K_I^T / sqrt(h)) V_I
    Equation 4 (features)    V_J softmax(Q^T K_J / sqrt(n))^T
    Equation 2 (both)        (LN_t(tokens) + LN_f(features)) / 2, the listing's half of the equation's plain sum

Keys and values are computed only where they are sampled. Both branches are linear in few coefficients of a token: its
weights of the landmarks and its sampled values. These are held with the tokens last, `(B, ., S)`, so that sums and
softmaxes over their few rows run along memory.

Letters in shapes: B batch, S tokens, d hidden size, H heads, h width of a head, k landmark tokens of a sequence, s2
landmark features of a head.
"""

from typing import Any

import torch
from torch import nn

from .kernels import Dropout, LayerNorm, is_plain, saves_multiply_adds
from .lengthening import resize_order
from .sequences import Landmarks, Sequences, draw_permutation, select_landmarks


def token_weights(scores: torch.Tensor, landmark_mask: torch.Tensor | None) -> torch.Tensor:
    r"""
    Weigh the landmark tokens for every token: softmax(Q K_I^T / sqrt(h)) of Equation 3.

    The text's column attention, the listing's row attention. The scores K_I Q^T / sqrt(h) and the result are of shape
    `(B, H, k, S)`, the mask `(B, k)` is False where a sequence has no landmark. The softmax over none at all is zero.
    """
    if landmark_mask is None:
        return scores.softmax(dim=2)
    mask = landmark_mask[:, None, :, None]
    # A sequence without any token would spread its weight evenly over masked landmarks.
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=2) * mask


def weigh_vectors(coefficients: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    r"""
    Combine a few vectors in every head with each token's coefficients: the last product of Equations 3 and 4.

    For tokens these are V_I and the columns of softmax(Q K_I^T / sqrt(h))^T, for features the rows of
    softmax(Q^T K_J / sqrt(n))^T and the columns of V_J^T. Coefficients `(B, H, m, S)` and vectors `(B, H, m, h)` give
    `(B, S, d)`, head beside head.
    """
    if joins_heads(vectors.shape[2], vectors.shape[3]):
        return coefficients.flatten(1, 2).mT @ block_diagonal(vectors)
    return (coefficients.mT @ vectors).transpose(1, 2).flatten(2)


def joins_heads(number: int, width: int) -> bool:
    """Whether products of so few vectors are computed for all heads at once, which leaves tokens as they stand."""
    return 4 * number <= width  # with the zeros between heads at most a quarter of what a projection takes


def block_diagonal(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors of every head, `(B, H, m, h)`, at their head's columns and with zeros at the others': `(B, H m, d)`."""
    return torch.diag_embed(vectors.permute(0, 2, 3, 1), dim1=1, dim2=3).flatten(3).flatten(1, 2)


class SkeletonAttention(nn.Module):
    """
    Skeleton attention with its projections (Section 3.1, Algorithm 1).

    The paper draws both samples once, when the model is made. They are part of the model, saved with the weights:
    `landmark_order`, a permutation of the positions, and `landmark_features`, one of a head's columns. The configured
    numbers of landmarks are taken from their front. Each layer draws its own.
    """

    landmark_order: torch.Tensor
    landmark_features: torch.Tensor

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.attention_probs_dropout_prob, config)
        if config.use_token_attention:
            self.token_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.use_feature_attention:
            self.feature_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        for name, drawn in self.draw_samples().items():
            # Drawn on the CPU and copied to wherever the model is being built, the meta device included.
            self.register_buffer(name, torch.empty(drawn.shape, dtype=torch.long).copy_(drawn))

    def draw_samples(self) -> dict[str, torch.Tensor]:
        """Draw the permutations that a new model has: none for a branch that is off."""
        config = self.config
        sizes = {"landmark_order": config.max_position_embeddings * config.use_token_attention}
        sizes["landmark_features"] = self.head_dim * config.use_feature_attention
        return {name: self._draw(size, name) for name, size in sizes.items() if size}

    def _draw(self, size: int, name: str) -> torch.Tensor:
        return draw_permutation(size, self.config.landmark_seed, self.layer_idx, name)

    def select_landmarks(self, sequences: Sequences) -> Landmarks:
        """The landmark tokens of a batch, see [`~sequences.select_landmarks`], where its mask lies."""
        order, mask = self.landmark_order, sequences.token_mask
        order = order if mask is None else order.to(mask.device)  # asked from outside of the layer it may be elsewhere
        return select_landmarks(order, self.config.num_landmark_tokens, sequences)

    def resize(self, new_num_positions: int) -> None:
        """Change the number of positions that landmarks are drawn from, see [`~lengthening.resize_order`]."""
        if self.config.use_token_attention:
            # A name of its own: a draw that begins like the one that is resized would not be independent of it.
            drawn = self._draw(new_num_positions, f"landmark_order/{len(self.landmark_order)}")
            self.landmark_order = resize_order(self.landmark_order, drawn)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in (f"{prefix}{name}" for name in self._buffers):
            if key in state_dict:  # averaged along with weights, 7 may be 6.9999995, which a cast would make 6
                state_dict[key] = state_dict[key].round().to(torch.long)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self, hidden_states: torch.Tensor, sequences: Sequences
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        Attend from `(B, S, d)`.

        Returns the output of that shape, and the attention matrices of both branches, of tokens `(B, H, S, k)` and of
        features `(B, H, h, s2)`: `None` for a branch that is off and for what a fused kernel computes.
        """
        is_known = is_plain(self.key, nn.Linear) and is_plain(self.value, nn.Linear)
        # The weights of an adapter, say, are not: it is called once, with all tokens; both, to be sampled alike.
        key_and_value = None if is_known else (self.key(hidden_states), self.value(hidden_states))
        queries = None if self._reads_query_weight(hidden_states.device) else self.query(hidden_states)
        contexts = []
        # Transposed as they are returned and back, so that what is returned is what the outputs are computed from.
        token_attentions = feature_attentions = None
        if self.config.use_token_attention:  # Equation 3
            landmarks = self.select_landmarks(sequences)
            keys, values = map(self._split_heads, self._sample_tokens(hidden_states, landmarks, key_and_value))
            if queries is not None and self.is_fused():
                mask = None if landmarks.mask is None else landmarks.mask[:, None, None]
                parts = self._split_heads(queries), keys, values
                # Of the module itself, which may have been replaced, or put into another mode than this one.
                rate = getattr(self.dropout, "p", 0.0) if self.dropout.training else 0.0
                tokens = nn.functional.scaled_dot_product_attention(*parts, mask, rate).transpose(1, 2).flatten(2)
            else:
                scores = self._score_tokens(keys * self.head_dim**-0.5, hidden_states, queries)
                token_attentions = self.dropout(token_weights(scores, landmarks.mask)).mT
                tokens = weigh_vectors(token_attentions.mT, values)
            contexts.append(self.token_norm(tokens))
        if self.config.use_feature_attention:  # Equation 4
            key_columns, value_columns = self._sample_columns(hidden_states, key_and_value)
            scores = self._score_columns(sequences.scale_columns(key_columns), hidden_states, queries)
            feature_attentions = self.dropout(scores.softmax(dim=2)).mT
            value_columns = value_columns.unflatten(1, (self.num_heads, -1))
            contexts.append(self.feature_norm(weigh_vectors(value_columns, feature_attentions.mT)))
        # Equation 2 with the listing's half; with one branch switched off it is the other's layer norm alone.
        output = self.out_proj(contexts[0] if len(contexts) == 1 else (contexts[0] + contexts[1]) / 2)
        return output, token_attentions, feature_attentions

    def _reads_query_weight(self, device: torch.device) -> bool:
        """Whether W_q is multiplied with what is sampled and not with every token, which takes less if that is few."""
        config = self.config
        number = config.num_landmark_tokens * config.use_token_attention
        number += config.num_landmark_features * config.use_feature_attention
        saves = number < self.head_dim and not self.is_fused() and saves_multiply_adds(config, device)
        return saves and is_plain(self.query, nn.Linear)

    def is_fused(self) -> bool:
        """Whether PyTorch's fused kernel computes the token branch."""
        return self.config.use_token_attention and self.config._attn_implementation == "sdpa"

    def _sample_tokens(
        self, hidden_states: torch.Tensor, landmarks: Landmarks, key_and_value: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, ...]:
        """K_I and V_I, `(B, k, d)`, out of all keys and values where these are computed."""
        if key_and_value is not None:
            return tuple(map(landmarks.gather, key_and_value))
        states = landmarks.gather(hidden_states)
        return self.key(states), self.value(states)

    def _sample_columns(
        self, hidden_states: torch.Tensor, key_and_value: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, ...]:
        """K_J^T and V_J^T, `(B, H s2, S)`, out of all keys and values where these are computed."""
        sampled = self.landmark_features[: self.config.num_landmark_features]
        if key_and_value is not None:
            # `gather`, because the compiled gradient of indexing the last axis is wrong on CPUs (PyTorch 2.13).
            places = sampled.expand(*hidden_states.shape[:2], self.num_heads, -1)
            states = (each.unflatten(-1, (self.num_heads, -1)) for each in key_and_value)
            return tuple(each.gather(-1, places).flatten(2).mT for each in states)

        def project(*projections: nn.Linear) -> tuple[torch.Tensor, ...]:
            weight, bias = (
                torch.cat(each).unflatten(0, (-1, self.head_dim)).index_select(1, sampled).flatten(0, 1)
                for each in zip(*((projection.weight, projection.bias) for projection in projections), strict=True)
            )
            return nn.functional.linear(hidden_states, weight, bias).mT.chunk(len(projections), dim=1)

        if self.key.weight.requires_grad == self.value.weight.requires_grad:
            return project(self.key, self.value)
        # Apart, because the gradient of a joint weight is computed as a whole.
        return project(self.key) + project(self.value)

    def _score_tokens(
        self, keys: torch.Tensor, hidden_states: torch.Tensor, queries: torch.Tensor | None
    ) -> torch.Tensor:
        """K_I Q^T of Equation 3, of `(B, H, k, h)`: `(B, H, k, S)`. Without queries (K_I W_q) X^T + K_I b_q."""
        heads = (self.num_heads, -1)
        if queries is None:
            weight, bias = self.query.weight.unflatten(0, heads), self.query.bias.unflatten(0, heads)
            maps = torch.einsum("bhki,hid->bhkd", keys, weight).flatten(1, 2)
            offsets = torch.einsum("bhki,hi->bhk", keys, bias).flatten(1).unsqueeze(2)
            return torch.baddbmm(offsets, maps, hidden_states.mT).unflatten(1, heads)
        if joins_heads(keys.shape[2], self.head_dim):
            return (block_diagonal(keys) @ queries.mT).unflatten(1, heads)
        return keys @ self._split_heads(queries).mT

    def _score_columns(
        self, key_columns: torch.Tensor, hidden_states: torch.Tensor, queries: torch.Tensor | None
    ) -> torch.Tensor:
        """K_J^T Q of Equation 4, of `(B, H s2, S)`: `(B, H, s2, h)`. Without queries (K_J^T X) W_q^T + K_J^T 1 b_q."""
        heads = (self.num_heads, -1)
        if queries is None:
            weight, bias = self.query.weight.unflatten(0, heads), self.query.bias.unflatten(0, heads)
            sums = (key_columns @ hidden_states).unflatten(1, heads)
            counts = key_columns.sum(dim=-1).unflatten(1, heads)
            return torch.einsum("bhsd,hid->bhsi", sums, weight) + counts.unsqueeze(-1) * bias.unsqueeze(1)
        if joins_heads(self.config.num_landmark_features, self.head_dim):
            # Of the products with the queries of all heads, side by side, each head's own are the diagonal.
            products = (key_columns @ queries).unflatten(2, heads).unflatten(1, heads)
            return products.diagonal(dim1=1, dim2=3).movedim(-1, 1)
        return key_columns.unflatten(1, heads) @ self._split_heads(queries)

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, S, h)
