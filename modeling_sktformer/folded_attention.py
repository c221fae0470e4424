r"""
Skeleton attention from few numbers for each token, exact and without its wide matrices.

Both branches are linear in something small: a token's attended values are p^T C, with the weights p that the token
gives to the landmarks and the landmarks' values C. Whatever is linear behind them can be multiplied into C once for a
sequence, and whatever stands before them into the landmarks. So neither queries nor branches nor their layer norms are
ever computed over the full width: only the weights of the token branch and the sampled columns of keys and values,
H (k + 2 s2) numbers for each token, lie between the input and the output (Section 3.1, Algorithm 1).

The small matrices are held with the tokens last, `(B, m, S)`, so that a softmax or a sum over their few rows runs
along memory.

Letters in shapes: B batch, S tokens, d hidden size, H heads, h width of a head, k landmark tokens of a sequence, s2
landmark features of a head, m coefficients of a token: H k or H s2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """
    Whether a module is its weight and bias and nothing else, so that these can be used without calling it.

    Not so an adapter or a quantised layer in its place, a layer with a hook (pruning and weight norm compute the
    weight in one), nor a layer whose weight accelerate brings in when it is called.
    """
    has_hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return type(module) is kind and not has_hooks and "forward" not in vars(module)


# Multiply-adds that folding has to spare before it is worth its many small operations.
FOLDING_OVERHEAD = 1 << 22


def is_folding_cheaper(
    hidden_size: int,
    num_heads: int,
    num_landmark_tokens: int,
    num_landmark_features: int,
    batch_size: int,
    length: int,
) -> bool:
    """
    Whether a batch takes fewer multiply-adds folded than with queries and branches of the full width.

    Args:
        hidden_size (`int`): Width d.
        num_heads (`int`): Heads H.
        num_landmark_tokens (`int`): Landmarks k of the token branch, 0 if it is off.
        num_landmark_features (`int`): Landmarks s2 of the feature branch, 0 if it is off.
        batch_size (`int`): Sequences B.
        length (`int`): Tokens S of each.

    Returns:
        `bool`
    """
    coefficients = (num_heads * num_landmark_tokens, num_heads * num_landmark_features)
    once = hidden_size**2 * (num_landmark_tokens + num_landmark_features + sum(coefficients))
    folded = once + length * sum(2 * hidden_size * count + count**2 for count in coefficients)
    direct = length * 2 * hidden_size * (hidden_size + num_landmark_tokens + num_landmark_features)
    return batch_size * (direct - folded) > FOLDING_OVERHEAD


def fold_queries(
    landmark_keys: torch.Tensor, query_weight: torch.Tensor, query_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Take the projection of the queries into the landmarks' keys: Q K_I^T = X (W_q^T K_I^T) + b_q K_I^T.

    Args:
        landmark_keys (`torch.Tensor` of shape `(batch_size, num_landmarks, num_heads, head_dim)`):
            Keys K_I of the landmark tokens.
        query_weight (`torch.Tensor` of shape `(num_heads, head_dim, hidden_size)`),
        query_bias (`torch.Tensor` of shape `(num_heads, head_dim)`):
            The projection of the queries.

    Returns:
        `tuple`: weight `(batch_size, num_heads * num_landmarks, hidden_size)` and bias
        `(batch_size, num_heads * num_landmarks)` of a linear map from tokens to their scaled scores.
    """
    landmark_keys = landmark_keys * landmark_keys.shape[-1] ** -0.5
    # Sums over what all sequences share run head by head, without a copy of it for each sequence.
    weight = torch.einsum("bkhe,hed->bhkd", landmark_keys, query_weight)
    bias = torch.einsum("bkhe,he->bhk", landmark_keys, query_bias)
    return weight.flatten(1, 2), bias.flatten(1)


def folded_feature_probabilities(
    hidden_states: torch.Tensor,
    query_weight: torch.Tensor,
    query_bias: torch.Tensor,
    key_columns: torch.Tensor,
    token_mask: torch.Tensor | None,
) -> torch.Tensor:
    r"""
    The feature branch's softmax(Q^T K_J / sqrt(n)) from Q^T K_J = W_q (X^T K_J) + b_q (1^T K_J), transposed.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`):
            What the queries would be read from.
        query_weight, query_bias: As in [`fold_queries`].
        key_columns (`torch.Tensor` of shape `(batch_size, sequence_length, num_heads * s2)`):
            The sampled columns of keys, head after head.
        token_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*):
            True at real tokens. By default every token is real.

    Returns:
        `torch.Tensor` of shape `(batch_size, num_heads, s2, head_dim)`.
    """
    num_heads = query_weight.shape[0]
    # A copy, which also lets go of what the columns were cut from.
    if token_mask is None:
        key_columns = key_columns * hidden_states.shape[1] ** -0.5
    else:
        num_tokens = token_mask.sum(dim=-1, keepdim=True).clamp(min=1)
        scale = token_mask * num_tokens.to(key_columns.dtype).rsqrt()  # (B, S)
        key_columns = key_columns * scale.unsqueeze(-1)
    products = (key_columns.mT @ hidden_states).unflatten(1, (num_heads, -1))  # (B, H, s2, d)
    sums = key_columns.sum(dim=1).unflatten(-1, (num_heads, -1, 1))  # (B, H, s2, 1)
    scores = torch.einsum("bhsd,hed->bhse", products, query_weight) + sums * query_bias.unsqueeze(1)
    return scores.softmax(dim=2)


def project_normalized_combinations(
    combinations: Sequence[tuple[torch.Tensor, torch.Tensor, nn.LayerNorm]], projection: nn.Linear
) -> torch.Tensor:
    r"""
    Apply layer norms to linear combinations of a few vectors each and project their mean, all at once.

    With p^T C the combination of a token, C centred over its columns, its layer norm is (p^T C) gamma / sigma + beta
    with sigma^2 = |C^T p|^2 / d + eps. So the projected norm is (p / sigma)^T (C gamma W^T), where the second bracket
    is one small matrix for a sequence, and with C^T = Q R the length |C^T p| is that of R p, which has m entries
    instead of d. (A Gram matrix in R's place would lose half of the digits where a combination nearly cancels.)

    Args:
        combinations (sequence of `tuple`): For each norm the coefficients p `(batch_size, m, sequence_length)`, the
            vectors C `(batch_size, num_heads, m / num_heads, head_dim)` that a head's coefficients combine into the
            head's columns, and the norm.
        projection (`nn.Linear`): The projection W from the norms' width d.

    Returns:
        `torch.Tensor` of shape `(batch_size, sequence_length, d)`.
    """
    share = 1 / len(combinations)
    shift = sum((norm.bias for _, _, norm in combinations), torch.zeros_like(projection.bias)) * share
    bias = nn.functional.linear(shift, projection.weight, projection.bias)
    coefficients = combinations[0][0]
    output = bias.expand(coefficients.shape[0], coefficients.shape[-1], -1)
    for coefficients, blocks, norm in combinations:
        vectors = _block_diagonal(blocks)  # (B, m, d)
        vectors = vectors - vectors.mean(dim=-1, keepdim=True)
        weight = (vectors * (norm.weight * share)) @ projection.weight.mT
        with torch.no_grad():
            directions, root = torch.linalg.qr(vectors.mT)
        output = _NormalizedProduct.apply(output, coefficients, vectors, weight, directions, root, norm.eps)
    return output


def _block_diagonal(blocks: torch.Tensor) -> torch.Tensor:
    """The matrices of `(B, H, m, h)` as one block diagonal matrix for each sequence: `(B, H m, H h)`."""
    num_heads = blocks.shape[1]
    diagonal = torch.eye(num_heads, dtype=blocks.dtype, device=blocks.device)[:, None, :, None]  # (H, 1, H, 1)
    return (blocks.unsqueeze(3) * diagonal).flatten(3).flatten(1, 2)


def _inverse_deviation(images: torch.Tensor, width: int, eps: float) -> torch.Tensor:
    """1 / sigma from vectors `(B, ., S)` whose squares sum to those of the combinations; `(B, 1, S)`."""
    return (images.square().sum(dim=1, keepdim=True) / width + eps).rsqrt()


class _NormalizedProduct(torch.autograd.Function):
    """
    addend + (p / sigma)^T W with sigma^2 = |C^T p|^2 / d + eps and C^T = Q R.

    Its gradients are written by hand because Q and R have none where C's rows depend on one another, while those of
    |C^T p| always exist: with y = R p, they are R^T y and p y^T Q^T.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        addend: torch.Tensor,
        coefficients: torch.Tensor,
        vectors: torch.Tensor,
        weight: torch.Tensor,
        directions: torch.Tensor,
        root: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        inverse = _inverse_deviation(root @ coefficients, vectors.shape[-1], eps)
        return torch.baddbmm(addend, (coefficients * inverse).mT, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        coefficients, vectors, weight, directions, root = ctx.saved_tensors
        width = vectors.shape[-1]
        if torch.is_grad_enabled():
            # Gradients of these gradients are wanted, which must not take Q and R for constants: d entries will do.
            root = vectors.mT
        images = root @ coefficients  # y, (B, m', S)
        inverse = _inverse_deviation(images, width, ctx.eps)
        weight_gradient = (coefficients * inverse) @ gradient
        normalized_gradient = weight @ gradient.mT  # (B, m, S)
        # How the loss changes with |C^T p|^2 / 2.
        slopes = (normalized_gradient * coefficients).sum(dim=1, keepdim=True) * inverse.pow(3) / -width
        images = images * slopes
        coefficient_gradient = torch.baddbmm(normalized_gradient * inverse, root.mT, images)
        vector_gradient = coefficients @ images.mT
        if not torch.is_grad_enabled():
            vector_gradient = vector_gradient @ directions.mT
        return gradient, coefficient_gradient, vector_gradient, weight_gradient, None, None, None
