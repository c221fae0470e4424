r"""
Skeleton attention on linear combinations: the same function in fewer operations, for few landmarks.

Both branches are linear in a few coefficients of each token: the weights p that it gives to the H k landmarks of all
heads, and its H s2 sampled values. A projection or a sum over the columns can therefore be taken into the vectors that
these coefficients combine, once for a sequence, and whatever stands before them into the landmarks. So neither queries
nor branches nor their layer norms are ever computed over the full width: only the weights of the token branch and the
sampled columns of keys and values, H (k + 2 s2) numbers for each token, lie between the input and the output
(Section 3.1, Algorithm 1).

**Queries.** Q K_I^T = X (W_q^T K_I^T) + b_q K_I^T for the landmarks' keys K_I, and
Q^T K_J = W_q (X^T K_J) + b_q (1^T K_J) for the sampled columns K_J.

**Norms and output.** With p^T C the combination of a token, C centred over its columns, its layer norm is
(p^T C) gamma / sigma + beta with sigma^2 = |C^T p|^2 / d + eps. So the projected norm is
(p / sigma)^T (C gamma W_o^T), where the second bracket is one small matrix for a sequence, and with C^T = Q R the
length |C^T p| is that of R p, which has m entries instead of d. (A Gram matrix in R's place would lose half of the
digits where a combination nearly cancels.)

The matrices of coefficients are held with the tokens last, `(B, m, S)`, so that a softmax or a sum over their few rows
runs along memory.

Letters in shapes: B batch, S tokens, d hidden size, H heads, h width of a head, k landmark tokens of a sequence, s2
landmark features of a head, m coefficients of a token: H k or H s2, M all that is read from a token: H k + 2 H s2.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


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


class FoldedInputs(NamedTuple):
    """
    What folded attention is computed from; a branch that is off has `None` in its fields.

    `hidden_states`: `(batch_size, sequence_length, hidden_size)`. `query_weight` ... `output_bias`: the projections'.
    `token_gain`, `token_shift`, `feature_gain`, `feature_shift`: weights and biases of the branches' layer norms.
    `landmarks`: positions of the landmark tokens, `(num_landmarks,)` or `(batch_size, num_landmarks)`.
    `landmark_mask`: False where a sequence has no landmark, `(batch_size, num_landmarks)`, or `None`.
    `token_mask`: True at real tokens, `(batch_size, sequence_length)`, or `None`.
    `feature_rows`: the rows of the key and value projections that give the sampled columns, head after head.
    `token_dropout`, `feature_dropout`: factors of the attention matrices, `(batch_size, num_heads, num_landmarks,
    sequence_length)` and `(batch_size, num_heads, s2, head_dim)`, or `None`.
    """

    hidden_states: torch.Tensor
    query_weight: torch.Tensor
    query_bias: torch.Tensor
    key_weight: torch.Tensor
    key_bias: torch.Tensor
    value_weight: torch.Tensor
    value_bias: torch.Tensor
    output_weight: torch.Tensor
    output_bias: torch.Tensor
    token_gain: torch.Tensor | None
    token_shift: torch.Tensor | None
    feature_gain: torch.Tensor | None
    feature_shift: torch.Tensor | None
    landmarks: torch.Tensor | None
    landmark_mask: torch.Tensor | None
    token_mask: torch.Tensor | None
    feature_rows: torch.Tensor | None
    token_dropout: torch.Tensor | None
    feature_dropout: torch.Tensor | None


_NUM_INPUTS = len(FoldedInputs._fields)
_NUM_DIFFERENTIABLE = FoldedInputs._fields.index("landmarks")


class FoldedOptions(NamedTuple):
    """Number of heads, and what the layer norms of the token and of the feature branch add to the variance."""

    num_heads: int
    token_eps: float
    feature_eps: float


_NO_PARTS = (None, None, None)


class _Kept(NamedTuple):
    """
    What the forward pass leaves for the backward pass; a branch that is off has `None` in its fields.

    `products`: what is read from each token, `(B, M, S)`: weights of the landmarks, sampled values, sampled keys.
    `maps`: how it is read, `(B, M, d + 1)`, biases last. `output_maps`: C gamma W_o^T of both branches, `(B, ., d)`.
    `landmark_states`: `(B, k, d)`. `keys`: K_I / sqrt(h), `(H, B k, h)`. `undropped_weights`: weights of the landmarks
    before dropout, `(B, H, k, S)`, or `None` without. `key_sums`: K_J^T X and, last, K_J^T 1, over the root of n,
    `(H, B s2, d + 1)`. `feature_weights`: weights of the landmark features before dropout, `(B, H, s2, h)`.
    `..._vectors`: C of a branch, centred, `(B, m, d)`. `..._directions`, `..._root`: Q and R of C^T = Q R.
    """

    products: torch.Tensor
    maps: torch.Tensor
    output_maps: torch.Tensor
    landmark_states: torch.Tensor | None
    keys: torch.Tensor | None
    undropped_weights: torch.Tensor | None
    key_sums: torch.Tensor | None
    feature_weights: torch.Tensor | None
    token_vectors: torch.Tensor | None
    token_directions: torch.Tensor | None
    token_root: torch.Tensor | None
    feature_vectors: torch.Tensor | None
    feature_directions: torch.Tensor | None
    feature_root: torch.Tensor | None


class _Branch(NamedTuple):
    """
    One branch of a batch.

    `range`: its coefficients p among the products. `vectors`: C, centred, `(B, m, d)`. `directions`, `root`: Q and R
    of C^T = Q R, `(B, d, .)` and `(B, ., m)`, or `None` and C^T. `gain`, `shift`, `eps`: of its norm.
    """

    name: str
    range: slice
    vectors: torch.Tensor
    directions: torch.Tensor
    root: torch.Tensor
    gain: torch.Tensor
    shift: torch.Tensor
    eps: float

    def inverse_deviation(self, images: torch.Tensor) -> torch.Tensor:
        """1 / sigma, `(B, 1, S)`, from R p."""
        return (images.square().sum(dim=1, keepdim=True) / self.vectors.shape[-1] + self.eps).rsqrt()


def folded_attention(inputs: FoldedInputs, options: FoldedOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Compute skeleton attention with its projections and norms.

    Args:
        inputs ([`FoldedInputs`]): Hidden states, parameters, samples and masks.
        options ([`FoldedOptions`]): Numbers.

    Returns:
        `tuple`: the output of the shape of the hidden states, and the token branch's attention matrix
        `(batch_size, num_heads, num_landmarks, sequence_length)`, `None` if that branch is off.
    """
    return _FoldedAttention.apply(options, *inputs)


class _FoldedAttention(torch.autograd.Function):
    """Folded attention with gradients written by hand: few operations, each large tensor is read once or twice."""

    @staticmethod
    def forward(ctx: Any, options: FoldedOptions, *tensors: Any) -> Any:
        outputs, kept = _compute(FoldedInputs(*tensors), options, with_root=True)
        ctx.options = options
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = ctx.saved_tensors
        inputs, kept = FoldedInputs(*tensors[:_NUM_INPUTS]), _Kept(*tensors[_NUM_INPUTS:])
        output_gradient, weight_gradient = gradients
        if output_gradient is None:
            output_gradient = torch.zeros_like(inputs.hidden_states)
        # If gradients of these gradients are wanted, they must not take Q and R for constants.
        differentiate = _trace_gradients if torch.is_grad_enabled() else _compute_gradients
        with torch.autocast("cpu", enabled=False):
            found = differentiate(inputs, ctx.options, kept, output_gradient, weight_gradient)
        return None, *(found.get(name) for name in FoldedInputs._fields)


def _compute(inputs: FoldedInputs, options: FoldedOptions, with_root: bool) -> tuple[tuple, _Kept]:
    """
    The forward pass: the outputs of [`folded_attention`], and what the backward pass needs.

    With Q and R, which have no gradients where the vectors of C depend on one another, or with operations that have.
    """
    states, num_heads = inputs.hidden_states, options.num_heads
    batch_size = len(states)
    query_map = _query_map(inputs, num_heads)
    weight, bias = _key_value_map(inputs)

    maps = []
    landmark_states = keys = values = None
    if inputs.landmarks is not None:
        landmark_states = gather_tokens(states, inputs.landmarks)
        projected = nn.functional.linear(landmark_states, weight, bias).unflatten(-1, (2, num_heads, -1))
        keys, values = projected.unbind(2)  # (B, k, H, h)
        keys = (keys * keys.shape[-1] ** -0.5).permute(2, 0, 1, 3).flatten(1, 2)
        maps.append(_batch_first(keys @ query_map, batch_size))
    if inputs.feature_rows is not None:
        rows = _key_value_rows(inputs.feature_rows, len(inputs.value_weight))
        maps.append(torch.cat([weight[rows], bias[rows, None]], dim=1).expand(batch_size, -1, -1))
    all_maps = torch.cat(maps, dim=1)
    # Everything that reads the tokens is one product: a second one would read them and write their gradient again.
    products = torch.baddbmm(all_maps[..., -1:], all_maps[..., :-1], states.mT)

    token, feature = _coefficient_ranges(inputs, options)
    token_weights = undropped_weights = key_sums = feature_weights = None
    parts: dict[str, tuple] = {}
    if values is not None:
        scores = products[:, token].unflatten(1, (num_heads, -1))
        token_weights = softmax_over_landmarks(scores, inputs.landmark_mask, dim=2)
        if inputs.token_dropout is not None:
            undropped_weights, token_weights = token_weights, token_weights * inputs.token_dropout
        products[:, token] = token_weights.flatten(1, 2)  # where the scores were
        parts["token"] = _decompose(values.transpose(1, 2), with_root)
    if inputs.feature_rows is not None:
        columns = products[:, feature.stop :]
        if inputs.token_mask is not None:
            columns *= inputs.token_mask.unsqueeze(1)
        sums = torch.cat([columns @ states, columns.sum(dim=-1, keepdim=True)], dim=-1)
        key_sums = _heads_first(sums * _feature_scale(inputs), num_heads)
        scores = (key_sums @ query_map.mT).unflatten(1, (batch_size, -1)).transpose(0, 1)
        feature_weights = scores.softmax(dim=2)
        dropped = feature_weights if inputs.feature_dropout is None else feature_weights * inputs.feature_dropout
        parts["feature"] = _decompose(dropped, with_root)

    branches = _branches(inputs, options, parts)
    output_maps = _scaled_vectors(branches) @ inputs.output_weight.mT
    normalized = []
    for branch in branches:
        coefficients = products[:, branch.range]
        normalized.append(coefficients * branch.inverse_deviation(branch.root @ coefficients))
    bias = nn.functional.linear(_mean_shift(branches), inputs.output_weight, inputs.output_bias)
    output = torch.baddbmm(bias, torch.cat(normalized, dim=1).mT, output_maps)
    kept = _Kept(
        products,
        all_maps,
        output_maps,
        landmark_states,
        keys,
        undropped_weights,
        key_sums,
        feature_weights,
        *parts.get("token", _NO_PARTS),
        *parts.get("feature", _NO_PARTS),
    )
    return (output, token_weights), kept


def _compute_gradients(
    inputs: FoldedInputs,
    options: FoldedOptions,
    kept: _Kept,
    output_gradient: torch.Tensor,
    weight_gradient: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The gradients by the names of the inputs, from those of the output and of the landmarks' weights."""
    parts = {
        "token": (kept.token_vectors, kept.token_directions, kept.token_root),
        "feature": (kept.feature_vectors, kept.feature_directions, kept.feature_root),
    }
    branches = _branches(inputs, options, {name: part for name, part in parts.items() if part[0] is not None})
    coefficients, blocks, found = _go_back_through_norms(inputs, options, kept, branches, output_gradient)
    product_gradients, sums_gradient, query_map_gradient = [], None, None
    if "token" in coefficients:
        product_gradients.append(
            _go_back_through_weights(inputs, options, kept, coefficients["token"], weight_gradient)
        )
    if "feature" in coefficients:
        column_gradient, sums_gradient, query_map_gradient = _go_back_through_sums(
            inputs, options, kept, blocks["feature"]
        )
        product_gradients += [coefficients["feature"], column_gradient]
    product_gradient = torch.cat(product_gradients, dim=1)  # (B, M, S)
    found["hidden_states"] = product_gradient.mT @ kept.maps[..., :-1]
    if sums_gradient is not None:
        columns = kept.products[:, -sums_gradient.shape[1] :]
        found["hidden_states"].baddbmm_(columns.mT, sums_gradient[..., :-1])
    sums = product_gradient.sum(dim=-1, keepdim=True)
    maps_gradient = torch.cat([product_gradient @ inputs.hidden_states, sums], dim=-1)  # (B, M, d + 1)
    return found | _go_back_through_maps(
        inputs, options, kept, maps_gradient, query_map_gradient, blocks.get("token"), found["hidden_states"]
    )


def _go_back_through_norms(
    inputs: FoldedInputs,
    options: FoldedOptions,
    kept: _Kept,
    branches: Sequence[_Branch],
    output_gradient: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """
    From the output to what the branches combine.

    Returns the gradients of the coefficients `(B, m, S)` and of the blocks of C `(B, H, m / H, h)` by branch, and
    those of the output projection and the norms by the names of the inputs.
    """
    num_branches = len(branches)
    normalized, image_products, coefficient_gradients = [], [], {}
    normalized_gradients = kept.output_maps @ output_gradient.mT  # (B, ., S)
    for branch in branches:
        coefficients, gradient = kept.products[:, branch.range], normalized_gradients[:, branch.range]
        images = branch.root @ coefficients  # R p, as long as C^T p
        inverse = branch.inverse_deviation(images)
        normalized.append(coefficients * inverse)
        # How the loss changes with |C^T p|^2 / 2.
        slopes = (gradient * coefficients).sum(dim=1, keepdim=True) * inverse.pow(3) / -branch.vectors.shape[-1]
        images = images * slopes
        coefficient_gradients[branch.name] = torch.baddbmm(gradient * inverse, branch.root.mT, images)
        image_products.append((coefficients @ images.mT) @ branch.directions.mT)

    bias_gradient = output_gradient.sum(dim=(0, 1))
    shift_gradient = bias_gradient @ inputs.output_weight / num_branches
    map_gradient = torch.cat(normalized, dim=1) @ output_gradient  # (B, ., d)
    weight_gradient = map_gradient.flatten(0, 1).mT @ _scaled_vectors(branches).flatten(0, 1)
    found = {
        "output_weight": torch.addr(weight_gradient, bias_gradient, _mean_shift(branches)),
        "output_bias": bias_gradient,
    }
    scaled_gradients = map_gradient @ inputs.output_weight / num_branches  # (B, ., d)
    block_gradients = {}
    for branch, image_product in zip(branches, image_products, strict=True):
        scaled_gradient = scaled_gradients[:, branch.range]
        found[f"{branch.name}_gain"] = (scaled_gradient * branch.vectors).sum(dim=(0, 1))
        found[f"{branch.name}_shift"] = shift_gradient.clone()
        centred_gradient = torch.addcmul(image_product, scaled_gradient, branch.gain)
        vector_gradient = centred_gradient - centred_gradient.mean(dim=-1, keepdim=True)
        block_gradients[branch.name] = _diagonal_blocks(vector_gradient, options.num_heads)
    return coefficient_gradients, block_gradients, found


def _go_back_through_weights(
    inputs: FoldedInputs,
    options: FoldedOptions,
    kept: _Kept,
    coefficient_gradient: torch.Tensor,
    weight_gradient: torch.Tensor | None,
) -> torch.Tensor:
    """From the weights of the landmarks, `(B, H k, S)`, to their scores."""
    token, _ = _coefficient_ranges(inputs, options)
    gradient = coefficient_gradient.unflatten(1, (options.num_heads, -1))
    if weight_gradient is not None:
        gradient = gradient + weight_gradient
    dropped = kept.products[:, token].unflatten(1, (options.num_heads, -1))
    weights = dropped if kept.undropped_weights is None else kept.undropped_weights
    weighted = gradient * dropped
    return (weighted - weights * weighted.sum(dim=2, keepdim=True)).flatten(1, 2)


def _go_back_through_sums(
    inputs: FoldedInputs, options: FoldedOptions, kept: _Kept, block_gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    From the feature branch's weights before dropout, `(B, H, s2, h)`, to what they come from.

    Returns the gradients of the sampled keys `(B, H s2, S)`, of K_J^T X and K_J^T 1 before they are scaled
    `(B, H s2, d + 1)`, and of the projection of the queries `(H, h, d + 1)`.
    """
    weights, key_sums, batch_size = kept.feature_weights, kept.key_sums, len(inputs.hidden_states)
    assert weights is not None
    assert key_sums is not None
    gradient = block_gradient if inputs.feature_dropout is None else block_gradient * inputs.feature_dropout
    score_gradient = weights * (gradient - (gradient * weights).sum(dim=2, keepdim=True))
    score_gradient = score_gradient.transpose(0, 1).flatten(1, 2)  # (H, B s2, h)
    query_map = _query_map(inputs, options.num_heads)
    sums_gradient = _batch_first(score_gradient @ query_map, batch_size) * _feature_scale(inputs)
    column_gradient = torch.baddbmm(sums_gradient[..., -1:], sums_gradient[..., :-1], inputs.hidden_states.mT)
    if inputs.token_mask is not None:
        column_gradient *= inputs.token_mask.unsqueeze(1)
    return column_gradient, sums_gradient, score_gradient.mT @ key_sums


def _go_back_through_maps(
    inputs: FoldedInputs,
    options: FoldedOptions,
    kept: _Kept,
    maps_gradient: torch.Tensor,
    query_map_gradient: torch.Tensor | None,
    value_gradient: torch.Tensor | None,
    states_gradient: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """
    From how products are read, `(B, M, d + 1)`, and the landmarks' values, `(B, H, k, h)`, to the projections.

    Takes what the feature branch has for the projection of the queries, and adds to the gradient of the states what
    they get as landmarks.
    """
    num_heads, hidden_size, batch_size = options.num_heads, states_gradient.shape[-1], len(states_gradient)
    token, feature = _coefficient_ranges(inputs, options)
    query_map = _query_map(inputs, num_heads)
    if query_map_gradient is None:
        query_map_gradient = torch.zeros_like(query_map)
    key_value_gradient = maps_gradient.new_zeros(2 * hidden_size, hidden_size + 1)
    if value_gradient is not None:
        assert inputs.landmarks is not None
        assert kept.keys is not None
        assert kept.landmark_states is not None
        score_map_gradient = _heads_first(maps_gradient[:, token], num_heads)  # (H, B k, d + 1)
        query_map_gradient = torch.baddbmm(query_map_gradient, kept.keys.mT, score_map_gradient)
        key_gradient = score_map_gradient @ query_map.mT * query_map.shape[1] ** -0.5
        key_gradient = key_gradient.unflatten(1, (batch_size, -1)).permute(1, 2, 0, 3)  # (B, k, H, h)
        projected_gradient = torch.stack([key_gradient, value_gradient.transpose(1, 2)], dim=2).flatten(2)
        rows = projected_gradient.flatten(0, 1)  # (B k, 2 d)
        landmark_rows = kept.landmark_states.flatten(0, 1)
        key_value_gradient = torch.cat([rows.mT @ landmark_rows, rows.sum(dim=0).unsqueeze(1)], dim=1)
        _add_to_tokens(states_gradient, inputs.landmarks, projected_gradient @ _key_value_map(inputs)[0])
    if inputs.feature_rows is not None:
        sampled = _key_value_rows(inputs.feature_rows, hidden_size)
        key_value_gradient.index_add_(0, sampled, maps_gradient[:, feature.start :].sum(dim=0))
    found = {}
    found["query_weight"], found["query_bias"] = _split_bias(query_map_gradient.flatten(0, 1))
    for name, gradient in zip(("key", "value"), key_value_gradient.chunk(2), strict=True):
        found[f"{name}_weight"], found[f"{name}_bias"] = _split_bias(gradient)
    return found


def _trace_gradients(
    inputs: FoldedInputs,
    options: FoldedOptions,
    kept: _Kept,
    output_gradient: torch.Tensor,
    weight_gradient: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """As [`_compute_gradients`], from the forward pass by PyTorch's own rules, so that they have gradients again."""
    given = {name: value for name, value in inputs._asdict().items() if value is not None}
    names = [name for name in FoldedInputs._fields[:_NUM_DIFFERENTIABLE] if name in given]

    def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, _ = _compute(inputs._replace(**dict(zip(names, tensors, strict=True))), options, with_root=False)
        return outputs if weight_gradient is not None else outputs[:1]

    pull_back = torch.func.vjp(compute, *(given[name] for name in names))[1]
    cotangents = (output_gradient,) if weight_gradient is None else (output_gradient, weight_gradient)
    return dict(zip(names, pull_back(cotangents), strict=True))


def _branches(inputs: FoldedInputs, options: FoldedOptions, parts: Mapping[str, tuple]) -> list[_Branch]:
    """The branches that are on, from what [`_decompose`] has returned for them."""
    ranges = _coefficient_ranges(inputs, options)
    norms = (
        ("token", inputs.token_gain, inputs.token_shift, options.token_eps),
        ("feature", inputs.feature_gain, inputs.feature_shift, options.feature_eps),
    )
    branches = []
    for (name, gain, shift, eps), coefficients in zip(norms, ranges, strict=True):
        if name in parts:
            assert gain is not None
            assert shift is not None
            vectors, directions, root = parts[name]
            branches.append(_Branch(name, coefficients, vectors, directions, root, gain, shift, eps))
    return branches


def _coefficient_ranges(inputs: FoldedInputs, options: FoldedOptions) -> tuple[slice, slice]:
    """Which of the products are the weights of the landmarks and which the sampled values; keys come last."""
    num_weights = 0 if inputs.landmarks is None else options.num_heads * inputs.landmarks.shape[-1]
    num_values = 0 if inputs.feature_rows is None else len(inputs.feature_rows)
    return slice(num_weights), slice(num_weights, num_weights + num_values)


def _decompose(blocks: torch.Tensor, with_root: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """C, Q and R of a branch from the vectors `(B, H, m / H, h)` that each head combines."""
    vectors = _block_diagonal(blocks)
    vectors = vectors - vectors.mean(dim=-1, keepdim=True)
    if not with_root:
        return vectors, None, vectors.mT
    return vectors, *torch.linalg.qr(vectors.mT)


def _block_diagonal(blocks: torch.Tensor) -> torch.Tensor:
    """The matrices of `(B, H, n, h)` as one block diagonal matrix for each sequence: `(B, H n, H h)`."""
    return torch.diag_embed(blocks.permute(0, 2, 3, 1), dim1=1, dim2=3).flatten(3).flatten(1, 2)


def _diagonal_blocks(matrices: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The blocks `(B, H, n, h)` on the diagonal of `(B, H n, H h)`."""
    blocks = matrices.unflatten(2, (num_heads, -1)).unflatten(1, (num_heads, -1))
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _scaled_vectors(branches: Sequence[_Branch]) -> torch.Tensor:
    """C gamma of all branches, halved if there are two, `(B, ., d)`."""
    return torch.cat([branch.vectors * (branch.gain / len(branches)) for branch in branches], dim=1)


def _mean_shift(branches: Sequence[_Branch]) -> torch.Tensor:
    """What the norms add to the mean of the branches, `(d,)`."""
    first, *others = [branch.shift for branch in branches]
    return sum(others, first) / len(branches)


def _query_map(inputs: FoldedInputs, num_heads: int) -> torch.Tensor:
    """The projection of the queries with its bias last, `(H, h, d + 1)`."""
    return torch.cat([inputs.query_weight, inputs.query_bias.unsqueeze(1)], dim=1).unflatten(0, (num_heads, -1))


def _key_value_map(inputs: FoldedInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The projection of keys, then values: weight `(2 d, d)` and bias `(2 d,)`."""
    weights, biases = (inputs.key_weight, inputs.value_weight), (inputs.key_bias, inputs.value_bias)
    return torch.cat(weights), torch.cat(biases)


def _key_value_rows(feature_rows: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """The rows of that projection that give the sampled values, then the sampled keys."""
    return torch.cat([feature_rows + hidden_size, feature_rows])


def _feature_scale(inputs: FoldedInputs) -> float | torch.Tensor:
    """1 / sqrt(n) for n real tokens, a number or `(B, 1, 1)`."""
    if inputs.token_mask is None:
        return inputs.hidden_states.shape[1] ** -0.5
    num_tokens = inputs.token_mask.sum(dim=-1).clamp(min=1)
    return num_tokens.to(inputs.hidden_states.dtype).rsqrt()[:, None, None]


def _heads_first(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`(B, H n, .)` to `(H, B n, .)`, for products with what all sequences share, without copies of it."""
    return rows.unflatten(1, (num_heads, -1)).transpose(0, 1).flatten(1, 2)


def _batch_first(rows: torch.Tensor, batch_size: int) -> torch.Tensor:
    """`(H, B n, .)` to `(B, H n, .)`."""
    return rows.unflatten(1, (batch_size, -1)).transpose(0, 1).flatten(1, 2)


def _split_bias(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient[:, :-1], gradient[:, -1]


def gather_tokens(hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Some tokens of each sequence: `(B, S, d)` at `(k,)` or `(B, k)` to `(B, k, d)`."""
    if positions.dim() == 1:
        return hidden_states[:, positions]
    return hidden_states.gather(1, positions[..., None].expand(-1, -1, hidden_states.shape[-1]))


def _add_to_tokens(hidden_states: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
    """Add `(B, k, d)` to the tokens that [`gather_tokens`] has read."""
    if positions.dim() == 1:
        hidden_states.index_add_(1, positions, rows)
    else:
        hidden_states.scatter_add_(1, positions[..., None].expand_as(rows), rows)


def softmax_over_landmarks(scores: torch.Tensor, landmark_mask: torch.Tensor | None, dim: int) -> torch.Tensor:
    """
    Softmax over the landmarks, zero where a sequence has none.

    Args:
        scores (`torch.Tensor` of four dimensions, the batch first): Scores of the landmarks.
        landmark_mask (`torch.BoolTensor` of shape `(batch_size, num_landmarks)`, *optional*):
            False where a sequence has no landmark.
        dim (`int`): The axis of the landmarks, 1 to 3.

    Returns:
        `torch.Tensor` of the shape of `scores`.
    """
    if landmark_mask is None:
        return scores.softmax(dim=dim)
    shape = [landmark_mask.shape[0], 1, 1, 1]
    shape[dim] = landmark_mask.shape[1]
    landmark_mask = landmark_mask.view(shape)
    scores = scores.masked_fill(~landmark_mask, torch.finfo(scores.dtype).min)
    # A sequence without any token would spread its weight evenly over masked landmarks.
    return scores.softmax(dim=dim) * landmark_mask
