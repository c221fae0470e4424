"""
SKTformer from its equations, one sequence, one position and one head at a time.

Nothing of the package is used: weights come as a mapping of names to tensors, sizes as an object with attributes.
Sequences are lists of their real tokens, so that there is no padding to get wrong, and every function can be
differentiated. Slow, and the truth that everything else is compared with.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


Weights = Mapping[str, Tensor]


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights below `prefix`, without it."""
    return {name[len(prefix) + 1 :]: value for name, value in weights.items() if name.startswith(prefix + ".")}


def naive_linear(weights: Weights, states: Tensor) -> Tensor:
    return states @ weights["weight"].T + weights["bias"]


def naive_layer_norm(weights: Weights, states: Tensor, eps: float) -> Tensor:
    mean = states.mean(-1, keepdim=True)
    variance = ((states - mean) ** 2).mean(-1, keepdim=True)
    return (states - mean) / torch.sqrt(variance + eps) * weights["weight"] + weights["bias"]


def naive_gelu(states: Tensor) -> Tensor:
    return states * 0.5 * (1 + torch.erf(states / math.sqrt(2)))


def naive_kernel(filter: Tensor, num_positions: int) -> Tensor:
    """Inverse Fourier transform of `(d, N // 2 + 1, 2)` as a sum of waves: the value at each lag, `(d, N)`."""
    lags = torch.arange(num_positions, dtype=filter.dtype)
    kernel = torch.zeros(filter.shape[0], num_positions, dtype=filter.dtype)
    for frequency in range(num_positions // 2 + 1):
        angle = 2 * math.pi * frequency * lags / num_positions
        real, imaginary = filter[:, frequency, 0, None], filter[:, frequency, 1, None]
        wave = real * torch.cos(angle) - imaginary * torch.sin(angle)
        # Every frequency but the first and, for an even length, the last stands for its mirror image too.
        single = frequency == 0 or 2 * frequency == num_positions
        kernel = kernel + (wave if single else 2 * wave)
    return kernel / num_positions


def naive_fourier_convolution(states: Tensor, filter: Tensor, num_segments: int, num_positions: int) -> Tensor:
    """Equations 5 and 6 as a direct circular sum over one sequence `(n, d)`."""
    length, width = states.shape
    segment_width = width // num_segments
    averages = states.reshape(length, num_segments, segment_width).mean(-1).repeat_interleave(segment_width, dim=1)
    kernel, sources = naive_kernel(filter, num_positions), torch.arange(length)
    rows = [averages * kernel[:, (position - sources) % num_positions].T for position in range(length)]
    return torch.stack([row.sum(0) for row in rows])


def naive_convolution(weight: Tensor, bias: Tensor, states: Tensor) -> Tensor:
    """Convolution over the tokens of one sequence `(n, c)`, zero outside; `weight` is `(d, c, kernel)`."""
    kernel_size = weight.shape[-1]
    rows = []
    for position in range(states.shape[0]):
        total = bias
        for tap in range(kernel_size):
            source = position + tap - kernel_size // 2
            if 0 <= source < states.shape[0]:
                total = total + weight[:, :, tap] @ states[source]
        rows.append(total)
    return torch.stack(rows)


def naive_position_batch_norm(weights: Weights, sequences: list[Tensor], training: bool) -> list[Tensor]:
    """Batch norm over positions: statistics over all sequences' columns at a position."""
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for position in range(max(len(sequence) for sequence in sequences)):
        present = [sequence[position] for sequence in sequences if len(sequence) > position]
        if training:
            values = torch.cat(present)
            mean = values.mean()
            variance = ((values - mean) ** 2).mean()
        else:
            mean, variance = weights["running_mean"][position], weights["running_var"][position]
        for output, sequence in zip(outputs, sequences, strict=True):
            if len(sequence) > position:
                normalised = (sequence[position] - mean) / torch.sqrt(variance + 1e-5)
                output.append(normalised * weights["weight"][position] + weights["bias"][position])
    return [torch.stack(output) for output in outputs]


def naive_smoother(weights: Weights, config, sequences: list[Tensor], training: bool) -> list[Tensor]:
    smoothed = None
    if config.use_fourier_convolution:
        filter = weights["fourier_convolution.filter"]
        smoothed = [
            naive_fourier_convolution(sequence, filter, config.num_segments, config.max_position_embeddings)
            for sequence in sequences
        ]
    if not config.use_convolution_stem:
        return sequences if smoothed is None else [m + x for m, x in zip(smoothed, sequences, strict=True)]
    if smoothed is None:
        columns = sequences
    else:
        columns = [torch.cat([m, x], dim=-1) for m, x in zip(smoothed, sequences, strict=True)]
    stem = under(weights, "convolution_stem")
    mixed = [naive_convolution(stem["convolution.weight"], stem["convolution.bias"], states) for states in columns]
    if config.smoother_norm == "batch_norm":
        mixed = naive_position_batch_norm(under(stem, "norm"), mixed, training)
    else:
        mixed = [naive_layer_norm(under(stem, "norm"), states, config.layer_norm_eps) for states in mixed]
    if config.smoother_activation == "silu":
        return [states * torch.sigmoid(states) for states in mixed]
    assert config.smoother_activation == "relu"
    return [states.clamp(min=0) for states in mixed]


def naive_skeleton_attention(weights: Weights, config, states: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Algorithm 1 for one sequence `(n, d)`: the output and each head's token attention `(n, k)`."""
    length, width = states.shape
    query, key, value = (naive_linear(under(weights, name), states) for name in ("query", "key", "value"))
    head_width = width // config.num_attention_heads
    token_heads, feature_heads, attentions = [], [], []
    for head in range(config.num_attention_heads):
        columns = slice(head * head_width, (head + 1) * head_width)
        q, k, v = query[:, columns], key[:, columns], value[:, columns]
        if config.use_token_attention:
            order = weights["landmark_order"].tolist()
            landmarks = [position for position in order if position < length][: config.num_landmark_tokens]
            probabilities = torch.softmax(q @ k[landmarks].T / math.sqrt(head_width), dim=-1)
            token_heads.append(probabilities @ v[landmarks])
            attentions.append(probabilities)
        if config.use_feature_attention:
            sampled = weights["landmark_features"].tolist()[: config.num_landmark_features]
            probabilities = torch.softmax(q.T @ k[:, sampled] / math.sqrt(length), dim=-1)
            feature_heads.append(v[:, sampled] @ probabilities.T)
    contexts = []
    for name, heads in (("token_norm", token_heads), ("feature_norm", feature_heads)):
        if heads:
            contexts.append(naive_layer_norm(under(weights, name), torch.cat(heads, dim=-1), config.layer_norm_eps))
    context = torch.stack(contexts).mean(0)
    return naive_linear(under(weights, "out_proj"), context), attentions


def naive_layer(weights: Weights, config, sequences: list[Tensor], training: bool) -> list[Tensor]:
    eps = config.layer_norm_eps
    normed = [naive_layer_norm(under(weights, "attention_norm"), states, eps) for states in sequences]
    inputs = normed
    if config.use_smoother:
        inputs = naive_smoother(under(weights, "smoother"), config, inputs, training)
    outputs = []
    for states, before, attention_input in zip(sequences, normed, inputs, strict=True):
        attended, _ = naive_skeleton_attention(under(weights, "attention"), config, attention_input)
        states = states + attended
        if config.use_smoother_residual:
            gate = torch.ones_like(before)
            if config.use_residual_gate:
                gate = 2 / (1 + torch.exp(-naive_linear(under(weights, "residual_gate"), before)))
            states = states + gate * attention_input
        if config.use_mlp:
            normalised = naive_layer_norm(under(weights, "mlp_norm"), states, eps)
            hidden = naive_gelu(naive_linear(under(weights, "mlp.up_proj"), normalised))
            states = states + naive_linear(under(weights, "mlp.down_proj"), hidden)
        outputs.append(states)
    return outputs


def naive_encoder(
    weights: Weights, config, sequences: list[list[int]], token_types: list[list[int]], training: bool = False
) -> list[Tensor]:
    """The last hidden states of sequences of real tokens; one `(n, d)` tensor each."""
    return naive_hidden_states(weights, config, sequences, token_types, training)[-1]


def naive_hidden_states(
    weights: Weights, config, sequences: list[list[int]], token_types: list[list[int]], training: bool = False
) -> list[list[Tensor]]:
    """Embeddings, and what comes out of each layer, of the last behind the layer norm: one `(n, d)` a sequence."""
    embeddings = under(weights, "embeddings")
    states = []
    for tokens, types in zip(sequences, token_types, strict=True):
        rows = [
            embeddings["word_embeddings.weight"][token]
            + embeddings["position_embeddings.weight"][position]
            + embeddings["token_type_embeddings.weight"][token_type]
            for position, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        ]
        states.append(naive_layer_norm(under(embeddings, "norm"), torch.stack(rows), config.layer_norm_eps))
    encoder = under(weights, "encoder")
    hidden_states = [states]
    for index in range(config.num_hidden_layers):
        states = naive_layer(under(encoder, f"layers.{index}"), config, states, training)
        hidden_states.append(states)
    last = [naive_layer_norm(under(encoder, "final_norm"), state, config.layer_norm_eps) for state in states]
    return [*hidden_states[:-1], last]


def naive_cross_entropy(logits: list[Tensor], labels: list[int]) -> Tensor:
    """Mean over the labels that are not -100."""
    losses = [
        -torch.log_softmax(row, dim=-1)[label] for row, label in zip(logits, labels, strict=True) if label != -100
    ]
    return sum(losses, torch.zeros((), dtype=logits[0].dtype)) / max(len(losses), 1)


def naive_masked_lm_logits(weights: Weights, config, states: Tensor) -> Tensor:
    hidden = naive_gelu(naive_linear(under(weights, "head.dense"), states))
    hidden = naive_layer_norm(under(weights, "head.norm"), hidden, config.layer_norm_eps)
    return naive_linear(
        {"weight": weights["sktformer.embeddings.word_embeddings.weight"], "bias": weights["decoder.bias"]}, hidden
    )


def naive_pooled_logits(weights: Weights, config, states: Tensor) -> Tensor:
    return naive_classifier(under(weights, "classifier"), naive_pooling(weights, config, states))


def naive_matching_logits(weights: Weights, config, first: Tensor, second: Tensor) -> Tensor:
    a, b = (naive_pooling(weights, config, states) for states in (first, second))
    return naive_classifier(under(weights, "classifier"), torch.cat([a, b, a * b, a - b]))


def naive_pooling(weights: Weights, config, states: Tensor) -> Tensor:
    mean = states.mean(0)
    mean_std = torch.cat([mean, (((states - mean) ** 2).mean(0) + 1e-12).sqrt()])
    pooled = {"cls": states[0], "mean": mean, "mean_std": mean_std, "layers": mean_std}[config.classifier_pooling]
    return (pooled - weights["classifier.pooling.center"]) / weights["classifier.pooling.scale"]


def naive_classifier(weights: Weights, features: Tensor) -> Tensor:
    return naive_linear(under(weights, "output"), torch.tanh(naive_linear(under(weights, "dense"), features)))
