"""
How many multiply-adds a forward pass takes, by part: what measured times can be held against.

Counted are matrix products, convolutions, products of attention and Fourier transforms, with the sizes of what the
implementations compute (windows, blocks, buckets), and nothing that is only a pass over memory. A real transform of
length n is 2.5 n log2 n real operations (half of the 5 n log2 n of the complex one), a complex product four
multiply-adds; two real operations are one multiply-add.

Letters: B batch, S tokens, N positions of the model, d hidden size, H heads, h width of a head, r segments, k
landmark tokens, s2 landmark features.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from modeling_sktformer.folded_attention import is_folding_cheaper
from modeling_sktformer.folded_stem import is_stem_folding_faster
from modeling_sktformer.minimal_filtering import is_minimal_filtering_faster


# Parts that are no matrix products.
TRANSFORMS = "transforms"
FILTER_PRODUCTS = "filter products"


def count_operations(name: str, config: Any, batch_size: int, length: int) -> dict[str, float]:
    """
    Count the multiply-adds of a forward pass, SKTformer's as its size makes it compute its equations.

    Args:
        name (`str`): One of [`~models.MODELS`].
        config (`PreTrainedConfig`): The model's, with a sequence classification head.
        batch_size (`int`): Inputs B.
        length (`int`): Tokens S of each.

    Returns:
        `dict`: part to multiply-adds.
    """
    num_tokens = batch_size * length
    width, num_layers = config.hidden_size, config.num_hidden_layers
    parts = _LAYERS[name](config, batch_size, length)
    num_matrices = 3 if name == "modernbert" else 2
    inner = config.feed_forward_size if name == "reformer" else config.intermediate_size
    parts = {part: num_layers * count for part, count in parts.items()}
    parts["feed-forward"] = num_layers * num_matrices * num_tokens * width * inner
    if name == "longformer":
        parts["feed-forward"] *= _padded(length, _window(config)) / length
    if name == "fnet":
        parts["embeddings"] = num_tokens * width**2
    head_input = 2 * width if name == "reformer" else width
    parts["head"] = batch_size * width * (head_input + config.num_labels)
    return parts


def count_step(parts: Mapping[str, float], name: str, mode: str) -> float:
    """
    Multiply-adds of a whole step: a backward pass is two forward passes, one for each factor of a product.

    Reformer computes its layers once more on the way back.
    """
    forward = sum(parts.values())
    return forward if mode == "inference" else forward * (4 if name == "reformer" else 3)


def count_real_transform(length: int) -> float:
    """Multiply-adds of a Fourier transform of `length` real values, or back to them."""
    return 2.5 * length * math.log2(length) / 2


def _count_sktformer(config: Any, batch_size: int, length: int) -> dict[str, float]:
    """One layer, from `smoothing.py` and `attention.py`, on inputs as long as the model's positions."""
    width, num_heads = config.hidden_size, config.num_attention_heads
    num_tokens = batch_size * length
    num_landmarks = config.use_token_attention * min(config.num_landmark_tokens, length)
    num_columns = config.use_feature_attention * config.num_landmark_features  # of a head
    parts = _count_smoother(config, batch_size, length) if config.use_smoother else {}
    num_samples = num_landmarks + num_columns
    parts["landmark keys and values"] = 2 * batch_size * num_landmarks * width**2
    if is_folding_cheaper(width, num_heads, num_landmarks, num_columns, batch_size, length):
        # Queries into the keys, features' scores, the projection of each head's values and the heads' norms.
        once = width**2 * num_samples * (1 + num_heads)
        parts["folding the projections"] = batch_size * once
        products = 2 * (num_samples + num_columns)  # to and from the samples, columns of values, features' scores
        lengths = num_heads * (num_landmarks**2 + num_columns**2)
        parts["attention"] = num_tokens * num_heads * (width * products + lengths)
    else:
        parts["sampled columns"] = 2 * num_tokens * width * num_heads * num_columns
        parts["queries"] = num_tokens * width**2
        parts["attention"] = 2 * num_tokens * width * num_samples
        parts["output projection"] = num_tokens * width**2
    return parts


def _count_smoother(config: Any, batch_size: int, length: int) -> dict[str, float]:
    width, num_segments = config.hidden_size, config.num_segments
    num_positions = config.max_position_embeddings
    num_frequencies = num_positions // 2 + 1
    parts: dict[str, float] = {}
    num_inputs = 0
    if config.use_fourier_convolution:
        parts[TRANSFORMS] = batch_size * (num_segments + width) * count_real_transform(num_positions)
        parts[FILTER_PRODUCTS] = 4 * batch_size * width * num_frequencies
        num_inputs += 1
    if config.use_convolution_stem:
        fold_stem = is_stem_folding_faster(width, batch_size, length, num_positions, num_segments)
        if fold_stem and config.use_fourier_convolution:
            # r columns are filtered into d of them at each frequency.
            parts[FILTER_PRODUCTS] = 4 * batch_size * num_segments * width * num_frequencies
            # Once a step: products of the d x d weights with real and imaginary parts of the filters.
            parts["folding the stem"] = 2 * config.conv_kernel_size * width**2 * num_frequencies
            num_inputs -= 1
        num_inputs += 1
        num_columns = (1 + config.use_fourier_convolution) * width
        filter_minimally = is_minimal_filtering_faster(num_columns, batch_size * length, config.conv_kernel_size)
        # Of a token and a pair of columns; four results take 6 products with the weights and not 12.
        num_products = 6 / 4 if filter_minimally else config.conv_kernel_size
        parts["stem"] = batch_size * length * num_inputs * width**2 * num_products
    return parts


def _count_full_attention(config: Any, batch_size: int, length: int) -> dict[str, float]:
    """BERT and ModernBERT, whose windows are a mask over all pairs of tokens."""
    return _parts(config, batch_size * length, 4, 2 * batch_size * length**2 * config.hidden_size)


def _count_nystromformer(config: Any, batch_size: int, length: int) -> dict[str, float]:
    width, num_heads, num_landmarks = config.hidden_size, config.num_attention_heads, config.num_landmarks
    inverse = 6 * 4 * num_heads * num_landmarks**3  # 6 steps of 4 products
    kernels = 4 * length * num_landmarks * width + num_landmarks**2 * width
    convolution = length * width * config.conv_kernel_size
    products = kernels + length * num_landmarks**2 * num_heads + inverse + convolution
    return _parts(config, batch_size * length, 4, batch_size * products)


def _count_fnet(config: Any, batch_size: int, length: int) -> dict[str, float]:
    """A transform over tokens and columns at once, of S d real values."""
    return {TRANSFORMS: batch_size * count_real_transform(length * config.hidden_size)}


def _count_bigbird(config: Any, batch_size: int, length: int) -> dict[str, float]:
    block, num_random = config.block_size, config.num_random_blocks
    if length <= (5 + 2 * num_random) * block:
        return _count_full_attention(config, batch_size, length)
    num_blocks = _padded(length, block) // block
    # First and last block read everything, their neighbours 4 blocks and the random ones, the others 5 and these.
    pairs = 2 * num_blocks + 2 * (4 + num_random) + (num_blocks - 4) * (5 + num_random)
    products = 2 * batch_size * pairs * block**2 * config.hidden_size
    return _parts(config, batch_size * num_blocks * block, 4, products)


def _count_longformer(config: Any, batch_size: int, length: int) -> dict[str, float]:
    window = _window(config)
    padded = _padded(length, window)
    num_halves = 2 * padded // window
    scores = (num_halves - 1) * window**2
    contexts = num_halves * (window // 2) * (3 * window // 2)
    products = batch_size * (scores + contexts + 4 * padded) * config.hidden_size
    # Global attention has projections of its own: keys and values of all tokens, the query of one.
    return _parts(config, batch_size * padded, 6, products)


def _count_reformer(config: Any, batch_size: int, length: int) -> dict[str, float]:
    """The mean layer of a stack of local and LSH layers."""
    share = {kind: config.attn_layers.count(kind) / len(config.attn_layers) for kind in ("local", "lsh")}
    keys = {  # that a query sees
        "local": config.local_attn_chunk_length * (1 + config.local_num_chunks_before + config.local_num_chunks_after),
        "lsh": config.lsh_attn_chunk_length * (1 + config.lsh_num_chunks_before + config.lsh_num_chunks_after),
    }
    keys["lsh"] *= config.num_hashes
    if length > config.lsh_attn_chunk_length:
        num_buckets = 2 ** ((2 * (length // config.lsh_attn_chunk_length)).bit_length() - 1)
    else:
        num_buckets, keys = 0, dict.fromkeys(keys, length)
    attention = sum(share[kind] * 2 * keys[kind] for kind in keys)
    hashing = share["lsh"] * config.num_hashes * num_buckets / 2
    num_tokens = batch_size * length
    # LSH layers have one projection for queries and keys.
    return _parts(config, num_tokens, 4 - share["lsh"], num_tokens * config.hidden_size * (attention + hashing))


def _count_low_rank(config: Any, batch_size: int, length: int) -> dict[str, float]:
    """Linformer and Performer: two products that make keys smaller, two of attention to them."""
    rank = getattr(config, "projected_length", None) or config.num_random_features
    return _parts(config, batch_size * length, 4, 4 * batch_size * length * rank * config.hidden_size)


def _parts(config: Any, num_tokens: int, num_projections: float, products: float) -> dict[str, float]:
    return {"projections": num_projections * num_tokens * config.hidden_size**2, "attention": products}


def _window(config: Any) -> int:
    """Longformer's, which a model writes into its configuration as a list over the layers."""
    window = config.attention_window
    return window if isinstance(window, int) else max(window)


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


_LAYERS: dict[str, Callable[[Any, int, int], dict[str, float]]] = {
    "sktformer": _count_sktformer,
    "bert-eager": _count_full_attention,
    "bert-sdpa": _count_full_attention,
    "modernbert": _count_full_attention,
    "nystromformer": _count_nystromformer,
    "fnet": _count_fnet,
    "bigbird": _count_bigbird,
    "longformer": _count_longformer,
    "reformer": _count_reformer,
    "linformer": _count_low_rank,
    "performer": _count_low_rank,
}
