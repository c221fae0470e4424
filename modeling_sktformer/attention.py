r"""
Skeleton attention: every token attends to a few sampled tokens, every feature to a few sampled features.

"Skeleton" is the CUR (skeleton) decomposition of a matrix, which rebuilds it from some of its rows and columns. Here
the *token branch* reads sampled rows of keys and values, the *feature branch* sampled columns (Section 3.1,
Algorithm 1 of "SKTformer: A Skeleton Transformer for Long Sequence Data"). For a head of width h with queries, keys
and values Q, K, V, sampled tokens I and sampled columns J, of a sequence of n tokens:

    Equation 3 (tokens)      softmax(Q K_I^T / sqrt(h)) V_I
    Equation 4 (features)    V_J softmax(Q^T K_J / sqrt(n))^T
    Equation 2 (both)        (LN_t(tokens) + LN_f(features)) / 2

Both branches are linear in what few coefficients a token has: its weights of the landmarks and its sampled values. So
they are computed from these coefficients, which are held with the tokens last, `(B, ., S)`: sums and softmaxes over
their few rows run along memory.

Letters in shapes: B batch, S tokens, d hidden size, H heads, h width of a head, k landmark tokens of a sequence, s2
landmark features of a head.
"""

from typing import NamedTuple

import torch
from torch import nn

from .kernels import are_plain_linear
from .sequences import Landmarks, Sequences, draw_permutation


class Coefficients(NamedTuple):
    """What Equations 3 and 4 need of a batch; a branch that is off has `None`."""

    token_scores: torch.Tensor | None  # K_I Q^T / sqrt(h), (B, H, k, S)
    landmark_values: torch.Tensor | None  # V_I, (B, H, k, h)
    feature_scores: torch.Tensor | None  # K_J^T Q / sqrt(n), (B, H, s2, h)
    value_columns: torch.Tensor | None  # V_J^T, (B, H, s2, S)


def token_attention(
    scores: torch.Tensor, landmark_values: torch.Tensor, landmark_mask: torch.Tensor | None, dropout: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Attend from every token to the landmark tokens: Equation 3, softmax(Q K_I^T / sqrt(h)) V_I.

    The text's column attention, the listing's row attention. The softmax over no landmark at all is zero. Time and
    memory O(S k h) per head.

    Args:
        scores (`torch.Tensor` of shape `(batch_size, num_heads, num_landmarks, sequence_length)`): K_I Q^T / sqrt(h).
        landmark_values (`torch.Tensor` of shape `(batch_size, num_heads, num_landmarks, head_dim)`): V_I.
        landmark_mask (`torch.BoolTensor` of shape `(batch_size, num_landmarks)`, *optional*):
            False where a sequence has no landmark.
        dropout (`nn.Module`): Applied to the attention matrix.

    Returns:
        `tuple`: the attended values `(batch_size, sequence_length, num_heads * head_dim)`, and the attention matrix
        of the shape of `scores`.
    """
    if landmark_mask is None:
        probabilities = scores.softmax(dim=2)
    else:
        mask = landmark_mask[:, None, :, None]
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        # A sequence without any token would spread its weight evenly over masked landmarks.
        probabilities = scores.softmax(dim=2) * mask
    probabilities = dropout(probabilities)
    return combine_heads(probabilities, landmark_values), probabilities


def feature_attention(scores: torch.Tensor, value_columns: torch.Tensor, dropout: nn.Module) -> torch.Tensor:
    r"""
    Attend from every feature to the landmark features: Equation 4, V_J softmax(Q^T K_J / sqrt(n))^T.

    Time and memory O(S h s2) per head.

    Args:
        scores (`torch.Tensor` of shape `(batch_size, num_heads, s2, head_dim)`):
            K_J^T Q / sqrt(n), where n is the number of real tokens of the sequence and K_J^T Q sums over these alone,
            so that a sequence without padding gives the paper's value.
        value_columns (`torch.Tensor` of shape `(batch_size, num_heads, s2, sequence_length)`): V_J^T.
        dropout (`nn.Module`): Applied to the attention matrix.

    Returns:
        `torch.Tensor` of shape `(batch_size, sequence_length, num_heads * head_dim)`.
    """
    return combine_heads(value_columns, dropout(scores.softmax(dim=2)))


def combine_heads(coefficients: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """
    Combine each head's vectors with the coefficients of every token, head beside head.

    Args:
        coefficients (`torch.Tensor` of shape `(batch_size, num_heads, m, sequence_length)`): Of the tokens.
        vectors (`torch.Tensor` of shape `(batch_size, num_heads, m, head_dim)`): What they combine.

    Returns:
        `torch.Tensor` of shape `(batch_size, sequence_length, num_heads * head_dim)`.
    """
    _, num_heads, num_vectors, head_dim = vectors.shape
    if num_vectors > head_dim:
        return (coefficients.mT @ vectors).transpose(1, 2).flatten(2)
    # As one product with a block diagonal matrix, (B, H m, H h), which writes the heads where they belong.
    blocks = torch.diag_embed(vectors.permute(0, 2, 3, 1), dim1=1, dim2=3)  # (B, H, m, H, h) but for the last axis
    return coefficients.flatten(1, 2).mT @ blocks.flatten(3).flatten(1, 2)


class SkeletonAttention(nn.Module):
    """
    Skeleton attention with its projections (Section 3.1, Algorithm 1).

    The output is (LN_t(tokens) + LN_f(features)) / 2 over the full width, projected: the listing's half, where
    Equation 2 has the plain sum. With one branch switched off it is the other's layer norm alone.

    The paper draws both samples once, when the model is made. They are part of the model, saved with the weights: a
    permutation of the positions, which the encoder holds for all layers, and `landmark_features`, a permutation of a
    head's columns. The configured numbers of landmarks are taken from their front.

    Args:
        config ([`SKTformerConfig`]): Sizes, switches and the seed.
        layer_idx (`int`): Index of the layer, each draws its own samples.
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
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
                What queries, keys and values are read from.
            sequences ([`Sequences`]): Which tokens are real.
            landmarks ([`Landmarks`], *optional*): The landmark tokens, `None` if the token branch is off.

        Returns:
            `tuple`: the output of `hidden_states`' shape, and the token branch's attention matrix
            `(batch_size, num_heads, sequence_length, num_landmarks)`, `None` if that branch is off.
        """
        # Few landmarks give a token fewer coefficients than it has columns: to read them takes less than to project.
        few = not self.config.use_token_attention or self.config.num_landmark_tokens < self.head_dim
        read = self._read_weights if few and are_plain_linear(self.query, self.key, self.value) else self._project
        coefficients = read(hidden_states, sequences, landmarks)
        contexts, probabilities = [], None
        if coefficients.token_scores is not None:
            tokens, probabilities = token_attention(
                coefficients.token_scores, coefficients.landmark_values, landmarks.mask, self.dropout
            )
            contexts.append(self.token_norm(tokens))
        if coefficients.feature_scores is not None:
            features = feature_attention(coefficients.feature_scores, coefficients.value_columns, self.dropout)
            contexts.append(self.feature_norm(features))
        context = contexts[0] if len(contexts) == 1 else (contexts[0] + contexts[1]) / 2  # Equation 2
        return self.out_proj(context), None if probabilities is None else probabilities.mT

    def _project(
        self, hidden_states: torch.Tensor, sequences: Sequences, landmarks: Landmarks | None
    ) -> Coefficients:
        """From queries, keys and values of all tokens, each projection called once."""
        queries = self._split_heads(self.query(hidden_states))  # (B, H, S, h)
        key, value = self.key(hidden_states), self.value(hidden_states)
        token_scores = landmark_values = feature_scores = value_columns = None
        if landmarks is not None:
            landmark_keys = self._split_heads(landmarks.gather(key)) * self.head_dim**-0.5
            token_scores = landmark_keys @ queries.mT
            landmark_values = self._split_heads(landmarks.gather(value))
        if self.config.use_feature_attention:
            sampled = self._sampled_columns().expand(*key.shape[:2], self.num_heads, -1)
            # `gather`, because the compiled gradient of indexing the last axis is wrong on CPUs (PyTorch 2.13).
            key_columns, value_columns = (
                states.unflatten(-1, (self.num_heads, -1)).gather(-1, sampled).permute(0, 2, 3, 1)
                for states in (key, value)
            )
            feature_scores = sequences.scale_columns(key_columns.flatten(1, 2)).unflatten(1, (self.num_heads, -1)) @ queries
        return Coefficients(token_scores, landmark_values, feature_scores, value_columns)

    def _read_weights(
        self, hidden_states: torch.Tensor, sequences: Sequences, landmarks: Landmarks | None
    ) -> Coefficients:
        """
        As [`_project`], with the products in another order, so that nothing of the full width is computed.

        Q K_I^T = X (W_q^T K_I^T) + b_q K_I^T and Q^T K_J = W_q (X^T K_J) + b_q (1^T K_J): no query is needed, and all
        that is read from a token is one product with H (k + 2 s2) rows.
        """
        batch_size, num_heads = hidden_states.shape[0], self.num_heads
        query_weight, query_bias = self.query.weight.unflatten(0, (num_heads, -1)), self.query.bias.view(num_heads, -1)
        weight, bias = torch.cat([self.value.weight, self.key.weight]), torch.cat([self.value.bias, self.key.bias])
        token_scores = landmark_values = feature_scores = value_columns = None
        maps, biases = [], []  # of what is read from a token: scores, sampled values, sampled keys
        if landmarks is not None:
            projected = nn.functional.linear(landmarks.gather(hidden_states), weight, bias)
            landmark_values, keys = map(self._split_heads, projected.chunk(2, dim=-1))
            keys = keys * self.head_dim**-0.5  # (B, H, k, h)
            maps.append(torch.einsum("bhki,hid->bhkd", keys, query_weight).flatten(1, 2))
            biases.append(torch.einsum("bhki,hi->bhk", keys, query_bias).flatten(1))
        if self.config.use_feature_attention:
            weight, bias = (
                states.unflatten(0, (2 * num_heads, -1)).index_select(1, self._sampled_columns()).flatten(0, 1)
                for states in (weight, bias)
            )
            maps.append(weight.expand(batch_size, -1, -1))
            biases.append(bias.expand(batch_size, -1))
        products = torch.baddbmm(torch.cat(biases, dim=1).unsqueeze(2), torch.cat(maps, dim=1), hidden_states.mT)
        if landmarks is not None:
            token_scores = products[:, : maps[0].shape[1]].unflatten(1, (num_heads, -1))
        if self.config.use_feature_attention:
            value_columns, key_columns = products[:, -maps[-1].shape[1] :].chunk(2, dim=1)
            value_columns = value_columns.unflatten(1, (num_heads, -1))
            key_columns = sequences.scale_columns(key_columns)  # (B, H s2, S)
            sums = (key_columns @ hidden_states).unflatten(1, (num_heads, -1))
            counts = key_columns.sum(dim=-1).unflatten(1, (num_heads, -1))
            feature_scores = torch.einsum("bhsd,hid->bhsi", sums, query_weight)
            feature_scores = torch.addcmul(feature_scores, counts.unsqueeze(-1), query_bias.unsqueeze(1))
        return Coefficients(token_scores, landmark_values, feature_scores, value_columns)

    def _sampled_columns(self) -> torch.Tensor:
        return self.landmark_features[: self.config.num_landmark_features]

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, H, S, h)
