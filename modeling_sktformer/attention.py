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

Both branches are linear in what few coefficients a token has: its weights of the landmarks and its sampled values. So
they are computed from these coefficients, which are held with the tokens last, `(B, ., S)`: sums and softmaxes over
their few rows run along memory.

Letters in shapes: B batch, S tokens, d hidden size, H heads, h width of a head, k landmark tokens of a sequence, s2
landmark features of a head.
"""

from typing import TypedDict

import torch
from torch import nn

from .kernels import Dropout, computes_as_written, is_plain
from .sequences import Landmarks, Sequences, draw_permutation


class Coefficients(TypedDict, total=False):
    """What Equations 3 and 4 need of a batch; nothing of a branch that is off."""

    token_scores: torch.Tensor  # K_I Q^T / sqrt(h), (B, H, k, S)
    landmark_values: torch.Tensor  # V_I, (B, H, k, h)
    feature_scores: torch.Tensor  # K_J^T Q / sqrt(n), (B, H, s2, h)
    value_columns: torch.Tensor  # V_J^T, (B, H, s2, S)
    tokens: torch.Tensor  # Equation 3 itself, (B, S, d), where a fused kernel computes it


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
    if vectors.shape[2] > vectors.shape[3]:
        return (coefficients.mT @ vectors).transpose(1, 2).flatten(2)
    # Of few vectors as one product with a block diagonal matrix, which writes the heads where they belong.
    diagonal = torch.diag_embed(vectors.permute(0, 2, 3, 1), dim1=1, dim2=3).flatten(3).flatten(1, 2)
    return coefficients.flatten(1, 2).mT @ diagonal


class SkeletonAttention(nn.Module):
    """
    Skeleton attention with its projections (Section 3.1, Algorithm 1).

    The paper draws both samples once, when the model is made. They are part of the model, saved with the weights: a
    permutation of the positions, which the encoder holds for all layers, and `landmark_features`, a permutation of a
    head's columns. The configured numbers of landmarks are taken from their front. Each layer draws its own.
    """

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
            self.token_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.use_feature_attention:
            self.feature_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            # Drawn on the CPU and copied to wherever the model is being built, the meta device included.
            order = torch.empty(config.head_dim, dtype=torch.long)
            self.register_buffer("landmark_features", order.copy_(self.draw_landmark_features()))

    def draw_landmark_features(self) -> torch.Tensor:
        """Draw the permutation of a head's columns that a new model has."""
        return draw_permutation(self.head_dim, self.config.landmark_seed, self.layer_idx, "landmark_features")

    def forward(
        self, hidden_states: torch.Tensor, sequences: Sequences, landmarks: Landmarks | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        Attend from `(B, S, d)`; there are no landmarks if the token branch is off.

        Returns the output of that shape, and the attention matrices of both branches, of tokens `(B, H, S, k)` and of
        features `(B, H, h, s2)`: `None` for a branch that is off and for what a fused kernel computes.
        """
        # Few landmarks give a token fewer coefficients than it has columns: to read them takes less than to project.
        few = not self.config.use_token_attention or self.config.num_landmark_tokens < self.head_dim
        plain = all(is_plain(projection, nn.Linear) for projection in (self.query, self.key, self.value))
        as_written = computes_as_written(self.config, hidden_states.shape[0], hidden_states.device) or self.is_fused()
        read = self._read_weights if few and plain and not as_written else self._project
        coefficients = read(hidden_states, sequences, landmarks)
        contexts = []
        # Transposed as they are returned and back, so that what is returned is what the outputs are computed from.
        token_attentions = feature_attentions = None
        if "tokens" in coefficients:
            contexts.append(self.token_norm(coefficients["tokens"]))
        elif landmarks is not None:  # Equation 3
            token_attentions = self.dropout(token_weights(coefficients["token_scores"], landmarks.mask)).mT
            contexts.append(self.token_norm(weigh_vectors(token_attentions.mT, coefficients["landmark_values"])))
        if self.config.use_feature_attention:  # Equation 4
            feature_attentions = self.dropout(coefficients["feature_scores"].softmax(dim=2)).mT
            contexts.append(self.feature_norm(weigh_vectors(coefficients["value_columns"], feature_attentions.mT)))
        # Equation 2 with the listing's half; with one branch switched off it is the other's layer norm alone.
        output = self.out_proj(contexts[0] if len(contexts) == 1 else (contexts[0] + contexts[1]) / 2)
        return output, token_attentions, feature_attentions

    def is_fused(self) -> bool:
        """Whether PyTorch's fused kernel computes the token branch."""
        return self.config.use_token_attention and self.config._attn_implementation == "sdpa"

    def _project(self, hidden_states: torch.Tensor, sequences: Sequences, landmarks: Landmarks | None) -> Coefficients:
        """Scores and values of Equations 3 and 4, from queries, keys and values of all tokens, each called once."""
        queries = self._split_heads(self.query(hidden_states))  # (B, H, S, h)
        key, value = self.key(hidden_states), self.value(hidden_states)
        found: Coefficients = {}
        if landmarks is not None:
            keys, values = (self._split_heads(landmarks.gather(states)) for states in (key, value))  # (B, H, k, h)
            if self.is_fused():
                mask = None if landmarks.mask is None else landmarks.mask[:, None, None]
                dropout = self.dropout.p if self.training else 0.0
                tokens = nn.functional.scaled_dot_product_attention(queries, keys, values, mask, dropout)
                found["tokens"] = tokens.transpose(1, 2).flatten(2)
            else:
                found["token_scores"] = (keys * self.head_dim**-0.5) @ queries.mT  # of Equation 3
                found["landmark_values"] = values
        if self.config.use_feature_attention:
            sampled = self._sampled_columns().expand(*key.shape[:2], self.num_heads, -1)
            # `gather`, because the compiled gradient of indexing the last axis is wrong on CPUs (PyTorch 2.13).
            key_columns, value_columns = (
                states.unflatten(-1, (self.num_heads, -1)).gather(-1, sampled).flatten(2).mT for states in (key, value)
            )
            key_columns = sequences.scale_columns(key_columns).unflatten(1, (self.num_heads, -1))
            found["feature_scores"] = key_columns @ queries  # of Equation 4
            found["value_columns"] = value_columns.unflatten(1, (self.num_heads, -1))
        return found

    def _read_weights(
        self, hidden_states: torch.Tensor, sequences: Sequences, landmarks: Landmarks | None
    ) -> Coefficients:
        """
        As [`_project`], of Equations 3 and 4, with the products in an order that computes nothing of the full width.

        Q K_I^T = X (W_q^T K_I^T) + b_q K_I^T and Q^T K_J = W_q (X^T K_J) + b_q (1^T K_J): no query is needed, and all
        that is read from a token is one product with H (k + 2 s2) rows.
        """
        batch_size, num_heads = hidden_states.shape[0], self.num_heads
        query_weight, query_bias = self.query.weight.unflatten(0, (num_heads, -1)), self.query.bias.view(num_heads, -1)
        weight, bias = torch.cat([self.value.weight, self.key.weight]), torch.cat([self.value.bias, self.key.bias])
        found: Coefficients = {}
        maps, biases, num_columns = [], [], 0  # of what is read from a token: scores, sampled values, sampled keys
        if landmarks is not None:
            states = landmarks.gather(hidden_states)
            if self.value.weight.requires_grad == self.key.weight.requires_grad:
                projected = nn.functional.linear(states, weight, bias).chunk(2, dim=-1)
            else:  # apart, because the gradient of a joint weight is computed as a whole
                projected = self.value(states), self.key(states)
            values, keys = map(self._split_heads, projected)  # (B, H, k, h)
            keys = keys * self.head_dim**-0.5
            maps.append(torch.einsum("bhki,hid->bhkd", keys, query_weight).flatten(1, 2))
            biases.append(torch.einsum("bhki,hi->bhk", keys, query_bias).flatten(1))
            found["landmark_values"] = values
        if self.config.use_feature_attention:
            sampled_weight, sampled_bias = (
                states.unflatten(0, (2 * num_heads, -1)).index_select(1, self._sampled_columns()).flatten(0, 1)
                for states in (weight, bias)
            )
            maps.append(sampled_weight.expand(batch_size, -1, -1))
            biases.append(sampled_bias.expand(batch_size, -1))
            num_columns = sampled_bias.shape[0] // 2  # H s2
        products = torch.baddbmm(torch.cat(biases, dim=1).unsqueeze(2), torch.cat(maps, dim=1), hidden_states.mT)
        sizes = [products.shape[1] - 2 * num_columns, num_columns, num_columns]
        scores, value_columns, key_columns = products.split(sizes, dim=1)  # at once: each cut has a whole gradient
        if landmarks is not None:
            found["token_scores"] = scores.unflatten(1, (num_heads, -1))  # of Equation 3
        if self.config.use_feature_attention:
            key_columns = sequences.scale_columns(key_columns)
            sums = (key_columns @ hidden_states).unflatten(1, (num_heads, -1))
            counts = key_columns.sum(dim=-1).unflatten(1, (num_heads, -1)).unsqueeze(-1)
            products = torch.einsum("bhsd,hid->bhsi", sums, query_weight)
            found["feature_scores"] = products + counts * query_bias.unsqueeze(1)  # of Equation 4
            found["value_columns"] = value_columns.unflatten(1, (num_heads, -1))
        return found

    def _sampled_columns(self) -> torch.Tensor:
        return self.landmark_features[: self.config.num_landmark_features]

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, S, h)
