"""What the equations do not say about the fast paths: when they are taken, and gradients of every kind."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

from modeling_sktformer import (
    SKTformerForSequenceClassification,
    attention,
    chunked_feed_forward,
    folded_stem,
    smoothing,
)
from modeling_sktformer.attention import SkeletonAttention
from modeling_sktformer.dropout import Dropout
from modeling_sktformer.folded_attention import is_folding_cheaper
from modeling_sktformer.folded_stem import is_stem_folding_faster
from modeling_sktformer.modeling_sktformer import SKTformerLayer
from modeling_sktformer.plain_modules import has_plain_weights, is_plain
from modeling_sktformer.smoothing import ConvolutionStem, Smoother
from support.builders import assert_equal, make_config, make_model


@pytest.fixture
def fast(monkeypatch) -> None:
    """All fast paths, although the models here are small."""
    monkeypatch.setattr(attention, "is_folding_cheaper", lambda *sizes: True)
    monkeypatch.setattr(smoothing, "MAX_NARROW_SIZE", 1000)
    monkeypatch.setattr(chunked_feed_forward, "MIN_CHUNKS", 1)
    monkeypatch.setattr(chunked_feed_forward, "CHUNK_VALUES", 100)
    monkeypatch.setattr(chunked_feed_forward, "MIN_CHUNK_TOKENS", 1)


def make_attention(**overrides) -> SkeletonAttention:
    layer = SkeletonAttention(make_config(**overrides), 0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def make_layer(**overrides) -> SKTformerLayer:
    layer = SKTformerLayer(make_config(**overrides), 0).double().train()
    for parameter in layer.mlp.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def plain_feed_forward(layer: SKTformerLayer, states: torch.Tensor) -> torch.Tensor:
    return states + layer.mlp(layer.mlp_norm(states))


def is_chunked(outputs: torch.Tensor) -> bool:
    assert outputs.grad_fn is not None
    return "ChunkedFeedForward" in str(outputs.grad_fn.next_functions)


@pytest.mark.parametrize("length", [8, 64, 512, 16384])
@pytest.mark.parametrize(("hidden_size", "num_heads"), [(64, 2), (256, 4), (768, 12)])
def test_the_form_with_fewer_operations_is_taken(hidden_size, num_heads, length):
    # What only one of the two forms computes, by hand: products with m coefficients, m^2 for their norms, and
    # matrices that are multiplied once for a sequence; against queries, heads' products and the output projection.
    folded = direct = 0
    for samples in (8, 8):
        m = num_heads * samples
        folded += length * (m * hidden_size + m * hidden_size + m * m) + (m + samples) * hidden_size**2
        direct += length * 2 * samples * hidden_size
    direct += length * 2 * hidden_size**2
    for batch_size in (1, 32):
        chosen = is_folding_cheaper(hidden_size, num_heads, 8, 8, batch_size, length)
        assert chosen == (batch_size * (direct - folded) > 1 << 22)
        assert chosen or length < 512 or hidden_size == 64


def test_many_landmarks_are_attended_to_directly():
    assert not is_folding_cheaper(768, 12, 256, 8, 16, 16384)


@pytest.mark.parametrize("branch", [{}, {"use_token_attention": False}, {"use_feature_attention": False}])
def test_folded_attention_has_second_gradients(branch, fast):
    layer = make_attention(**branch)
    states = torch.randn(2, 5, layer.query.in_features, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, None)[0], (states,), atol=1e-6)


@pytest.mark.parametrize("branch", [{}, {"use_token_attention": False}, {"use_feature_attention": False}])
@pytest.mark.parametrize("masked", [False, True])
def test_folded_gradients_are_those_of_the_direct_form(branch, masked, monkeypatch):
    layer = make_attention(num_landmark_tokens=3, num_landmark_features=2, **branch)
    states = torch.randn(3, 7, layer.query.in_features, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(7) < torch.tensor([[7], [2], [1]]) if masked else None
    found = []
    for folded in (False, True):
        monkeypatch.setattr(attention, "is_folding_cheaper", lambda *sizes, folded=folded: folded)
        outputs, weights = layer(states, mask)
        if mask is not None:
            outputs = outputs * mask.unsqueeze(-1)
        loss = outputs.sin().sum()
        if weights is not None:  # as interpretability methods do
            loss = loss + weights.square().sum()
        found.append((outputs, *torch.autograd.grad(loss, [states, *layer.parameters()])))
    for direct, folded_value in zip(*found, strict=True):
        assert_equal(folded_value, direct)


def make_pair_of_opposites(difference: float) -> SkeletonAttention:
    """One head whose two landmark features are nearly the same and are always added with opposite signs."""
    overrides = {"num_attention_heads": 1, "num_landmark_features": 2, "layer_norm_eps": 1e-12}
    layer = make_attention(use_token_attention=False, **overrides)
    first, second = layer.landmark_features[:2]
    with torch.no_grad():
        layer.key.weight[second] = layer.key.weight[first] + difference * torch.randn(layer.key.in_features)
        layer.value.weight[second] = -layer.value.weight[first]
        layer.key.bias[second] = layer.key.bias[first]
        layer.value.bias[second] = -layer.value.bias[first]
    return layer


def test_norms_of_combinations_that_nearly_cancel_keep_their_digits(monkeypatch):
    layer = make_pair_of_opposites(1e-3)
    states = torch.randn(2, 5, layer.query.in_features, dtype=torch.float64)
    monkeypatch.setattr(attention, "is_folding_cheaper", lambda *sizes: False)
    expected = layer(states, None)[0]
    monkeypatch.setattr(attention, "is_folding_cheaper", lambda *sizes: True)
    actual = layer.float()(states.float(), None)[0]
    # The cancellation costs three digits of seven; a Gram matrix would lose all of them.
    torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


def test_combinations_of_dependent_vectors_have_finite_gradients(fast):
    layer = make_pair_of_opposites(0.0)
    states = torch.randn(2, 5, layer.query.in_features, dtype=torch.float64, requires_grad=True)
    outputs = layer(states, None)[0]
    outputs.square().sum().backward()
    assert outputs.isfinite().all()
    assert states.grad is not None
    assert states.grad.isfinite().all()


def test_function_transforms_give_the_gradients_of_each_sample(fast):
    model = make_model(SKTformerForSequenceClassification, smoother_norm="layer_norm").train()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    states = torch.randn(3, 16, model.config.hidden_size, dtype=torch.float64)

    def loss(weights, sample):
        outputs = torch.func.functional_call(model, (weights, buffers), kwargs={"inputs_embeds": sample[None]})
        return outputs.logits.square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, states)
    for row, sample in enumerate(states):
        model.zero_grad()
        loss(parameters, sample).backward()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                assert_equal(together[name][row], parameter.grad, name)


@pytest.mark.parametrize("layer", ["query", "key", "value", "output", "token_norm", "feature_norm"])
def test_a_hook_on_a_part_of_the_attention_is_called(layer, fast):
    attention_layer = make_attention()
    states = torch.randn(2, 5, attention_layer.query.in_features, dtype=torch.float64)
    assert attention_layer.is_folded(states)
    expected = attention_layer(states, None)[0]
    calls = []
    getattr(attention_layer, layer).register_forward_hook(lambda *call: calls.append(call))
    assert not attention_layer.is_folded(states)
    assert_equal(attention_layer(states, None)[0], expected)
    assert calls


@pytest.mark.parametrize("name", ["query", "output", "token_norm", "feature_norm"])
def test_parts_without_bias_are_attended_to_directly(name, fast):
    attention_layer = make_attention()
    part = getattr(attention_layer, name)
    part.bias.data.zero_()
    states = torch.randn(2, 5, attention_layer.query.in_features, dtype=torch.float64)
    expected = attention_layer(states, None)[0]
    part.bias = None
    assert not attention_layer.is_folded(states)
    assert_equal(attention_layer(states, None)[0], expected)


def test_outputs_have_gradients_with_respect_to_attentions_that_are_asked_for(fast):
    model = make_model(SKTformerForSequenceClassification).train()
    states = torch.randn(2, 16, model.config.hidden_size, dtype=torch.float64)
    outputs = model(inputs_embeds=states, output_attentions=True)
    gradients = torch.autograd.grad(outputs.logits.sum(), outputs.attentions)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_goes_through_the_fast_paths(use_reentrant, fast):
    overrides: dict[str, Any] = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    model = make_model(SKTformerForSequenceClassification, smoother_dropout_prob=0.2, **overrides).train()
    states = torch.randn(2, 16, model.config.hidden_size, dtype=torch.float64)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.zero_grad()
        torch.manual_seed(0)
        model(inputs_embeds=states.clone().requires_grad_()).logits.square().sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_equal(found[1], found[0])


def test_a_changed_dropout_sees_the_attention_matrix(fast):
    layer = make_attention()
    states = torch.randn(2, 5, layer.query.in_features, dtype=torch.float64)
    probabilities = layer(states, None)[1]
    seen = []
    layer.dropout.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    layer(states, None)
    assert_equal(seen[0], probabilities)


def test_changed_layers_are_not_plain():
    linear = nn.Linear(4, 4)
    assert is_plain(linear, nn.Linear)
    assert not is_plain(linear, nn.LayerNorm)
    assert not is_plain(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), nn.Linear)
    assert not is_plain(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear)
    vars(linear)["forward"] = lambda inputs: inputs  # as accelerate does
    assert not is_plain(linear, nn.Linear)
    linear = nn.Linear(4, 4)
    linear.register_full_backward_pre_hook(lambda *call: None)
    assert not is_plain(linear, nn.Linear)
    linear = nn.Linear(4, 4)
    handle = nn.modules.module.register_module_forward_hook(lambda *call: None)
    assert not is_plain(linear, nn.Linear)
    handle.remove()
    assert is_plain(linear, nn.Linear)
    assert not has_plain_weights(nn.Linear(4, 4, bias=False), nn.Linear)
    linear.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    assert not has_plain_weights(linear, nn.Linear)


def test_half_precision_is_attended_to_directly(fast):
    layer = make_attention()
    states = torch.randn(2, 5, layer.query.in_features)
    assert layer.is_folded(states)
    assert not layer.is_folded(states.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer.is_folded(states)


@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("fourier", [False, True])
def test_all_ways_through_the_stem_are_the_same_convolution(kernel_size, fourier, monkeypatch):
    config = make_config(conv_kernel_size=kernel_size, use_fourier_convolution=fourier)
    stem = ConvolutionStem(config).double().eval()
    states = torch.randn(3, 7, config.hidden_size, dtype=torch.float64)
    smoothed = torch.randn(3, config.hidden_size, 7, dtype=torch.float64) if fourier else None
    outputs = []
    for size, fast in ((0, False), (1000, False), (0, True)):
        monkeypatch.setattr(smoothing, "MAX_NARROW_SIZE", size)
        monkeypatch.setattr(
            smoothing, "is_minimal_filtering_faster", lambda columns, tokens, taps, fast=fast: fast and taps == 3
        )
        outputs.append(stem(smoothed, states, None))
    for output in outputs[1:]:
        assert_equal(output, outputs[0])


@pytest.fixture
def folding(monkeypatch) -> list[torch.Tensor]:
    """The folded stem although the models here are small; what it returned so far."""
    outputs: list[torch.Tensor] = []

    def record(*arguments):
        outputs.append(folded_stem.add_folded_stem(*arguments))
        return outputs[-1]

    monkeypatch.setattr(smoothing, "MAX_NARROW_SIZE", 0)
    monkeypatch.setattr(smoothing, "is_stem_folding_faster", lambda *sizes: True)
    monkeypatch.setattr(smoothing, "add_folded_stem", record)
    monkeypatch.setattr(folded_stem, "BLOCK_VALUES", 100)
    return outputs


def make_smoother(**overrides) -> Smoother:
    smoother = Smoother(make_config(**overrides)).double().train()
    for parameter in smoother.parameters():
        nn.init.normal_(parameter, std=0.5)
    return smoother


@pytest.mark.parametrize(
    ("sizes", "folds"),
    [
        ({}, True),
        ({"hidden_size": 256}, False),
        ({"batch_size": 2}, False),
        ({"length": 250}, False),
        ({"length": 16384, "num_positions": 16384}, False),
        ({"length": 16384, "num_positions": 16384, "batch_size": 16}, True),
        ({"num_segments": 128}, False),
    ],
    ids=str,
)
def test_the_stem_is_folded_in_wide_models_and_large_batches(sizes, folds):
    base = {"hidden_size": 768, "batch_size": 4, "length": 512, "num_positions": 512, "num_segments": 8}
    assert is_stem_folding_faster(**{**base, **sizes}) == folds


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("length", [1, 5, 16, 17])
@pytest.mark.parametrize("kernel_size", [3, 7])
def test_the_folded_stem_takes_shortened_filters(kernel_size, length, training, folding, monkeypatch):
    smoother = make_smoother(max_position_embeddings=64, conv_kernel_size=kernel_size).train(training)
    states = torch.randn(6, length, 12, dtype=torch.float64, requires_grad=training)
    token_mask = torch.arange(length) < torch.tensor([length, 1, 0, 2, 3, length])[:, None]
    results = []
    for folded in (True, False):
        monkeypatch.setattr(smoothing, "is_stem_folding_faster", lambda *sizes, folded=folded: folded)
        with torch.set_grad_enabled(training):
            outputs = smoother(states, token_mask)
        results.append([outputs])
        if training:
            results[-1] += torch.autograd.grad(outputs.square().sum(), [states, *smoother.parameters()])
    assert len(folding) == 1
    for actual, expected in zip(*results, strict=True):
        assert_equal(actual, expected)


def test_the_folded_stem_has_second_gradients(folding):
    smoother = make_smoother(max_position_embeddings=5, smoother_activation="gelu")
    states = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    token_mask = torch.arange(5) < torch.tensor([5, 3])[:, None]
    assert torch.autograd.gradgradcheck(lambda states: smoother(states, token_mask), (states,))
    assert folding


@pytest.mark.parametrize(
    "name",
    ["fourier_convolution", "convolution_stem", "convolution_stem.convolution", "autocast", "function", "half filter"],
)
def test_the_stem_is_not_folded_where_someone_looks_at_it(name, folding):
    smoother = make_smoother()
    states = torch.randn(4, 16, 12, dtype=torch.float64)
    expected = smoother(states, None)
    assert len(folding) == 1
    calls: list[bool] = []
    if name == "function":
        outputs = torch.func.vmap(lambda states: smoother.eval()(states, None))(states[None])[0]
        expected = smoother(states, None)
        del folding[1:]
    elif name == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            smoother(states, None)
        outputs = expected
    elif name == "half filter":
        assert smoother.fourier_convolution is not None
        smoother.fourier_convolution.filter.data = smoother.fourier_convolution.filter.data.to(torch.bfloat16).double()
        expected = smoother(states, None)
        del folding[1:]
        smoother.fourier_convolution.to(torch.bfloat16)
        outputs = smoother(states, None)
    else:
        smoother.get_submodule(name).register_forward_hook(lambda *call: calls.append(True))
        outputs = smoother(states, None)
        assert calls
    assert_equal(outputs, expected)
    assert len(folding) == 1


@pytest.mark.parametrize("keeps_wide", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_chunks_are_the_whole_feed_forward_part(dropout, keeps_wide, monkeypatch):
    monkeypatch.setattr(chunked_feed_forward, "MAX_NARROW_SIZE", 0 if keeps_wide else 1000)
    layer = make_layer(hidden_dropout_prob=dropout)
    width = layer.mlp.intermediate.out_features
    parameters = [*layer.mlp_norm.parameters(), *layer.mlp.parameters()]
    states = torch.randn(3, 7, layer.mlp.intermediate.in_features, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(chunked_feed_forward, "CHUNK_VALUES", 4 * width)  # 4 of 21 tokens, and one alone at the end
    monkeypatch.setattr(chunked_feed_forward, "MIN_CHUNK_TOKENS", 1)

    def compute(states):
        torch.manual_seed(0)
        return layer._feed_forward(states)

    outputs = compute(states)
    assert is_chunked(outputs)
    update = plain_feed_forward(layer, states) - states
    kept = ((outputs - states) / update).detach()  # 1 or, with dropout, 0 and the scale
    assert len(kept.round(decimals=6).unique()) == (2 if dropout else 1)
    expected = states + kept * update
    assert_equal(outputs, expected)
    weights = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, [states, *parameters], weights)
    gradients = torch.autograd.grad(outputs, [states, *parameters], weights)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert_equal(actual, wanted)
    assert torch.autograd.gradgradcheck(compute, (states,))


REASONS = [
    "few tokens",
    "hook",
    "hook on the whole",
    "autocast",
    "parameters",
    "random activation",
    "activation in place",
    "no bias",
    "frozen",
    "chunk size",
    "other module",
]


@pytest.mark.parametrize("reason", REASONS)
def test_chunks_are_only_made_where_they_may_be(reason, monkeypatch):
    layer = make_layer(chunk_size_feed_forward=3 if reason == "chunk size" else 0)
    width, size = layer.mlp.intermediate.out_features, layer.mlp.intermediate.in_features
    monkeypatch.setattr(chunked_feed_forward, "CHUNK_VALUES", (4 if reason != "few tokens" else 11) * width)
    monkeypatch.setattr(chunked_feed_forward, "MIN_CHUNK_TOKENS", 1)
    states = torch.randn(1, 21, size, dtype=torch.float64, requires_grad=True)
    expected = plain_feed_forward(layer, states)
    if reason == "hook":
        layer.mlp.output.register_forward_hook(lambda *call: None)
    elif reason == "hook on the whole":
        layer.mlp.register_forward_hook(lambda *call: None)
    elif reason == "parameters":
        layer.mlp.activation = nn.PReLU(dtype=torch.float64)
        expected = plain_feed_forward(layer, states)
    elif reason == "random activation":
        layer.mlp.activation = nn.RReLU(lower=0.1, upper=0.1)
        expected = plain_feed_forward(layer, states)
    elif reason == "activation in place":
        layer.mlp.activation = nn.ReLU(inplace=True)
        expected = plain_feed_forward(layer, states)
    elif reason == "no bias":
        layer.mlp_norm = nn.LayerNorm(size, bias=False, dtype=torch.float64)
        expected = plain_feed_forward(layer, states)
    elif reason == "frozen":
        layer.mlp.requires_grad_(False)
    elif reason == "other module":
        layer.set_submodule("mlp", nn.Linear(size, size).double())
        expected = plain_feed_forward(layer, states)
    with torch.autocast("cpu", torch.bfloat16, enabled=reason == "autocast"):
        outputs = layer._feed_forward(states)
    assert not is_chunked(outputs)
    if reason != "autocast":
        assert_equal(outputs, expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_what_a_hook_has_seen_of_the_stem_is_not_overwritten(hooked):
    stem = ConvolutionStem(make_config(use_fourier_convolution=False)).double().train()
    seen = []
    if hooked:
        stem.norm.register_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
    states = torch.randn(3, 7, stem.convolution.out_channels, dtype=torch.float64)
    outputs = stem(None, states, None)
    assert outputs.min() == 0
    for output, copy in seen:
        assert output.min() < 0
        assert_equal(output, copy)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_the_mean(probability):
    dropout = Dropout(probability)
    torch.manual_seed(0)
    inputs = torch.ones(1001, 333, requires_grad=True)
    outputs = dropout(inputs)
    assert "_Dropout" in str(outputs.grad_fn)
    scale = outputs.max().item()
    assert scale == pytest.approx(1 / (1 - probability), rel=1e-3)
    kept = outputs != 0
    deviation = (probability * (1 - probability) / outputs.numel()) ** 0.5
    assert kept.double().mean().item() == pytest.approx(1 - probability, abs=5 * deviation)
    # Four values come from one draw: neighbours are as independent as any others.
    for step in (1, 2, 3, 4):
        both = (kept.flatten()[step:] & kept.flatten()[:-step]).double().mean().item()
        assert both == pytest.approx((1 - probability) ** 2, abs=5 * deviation)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs)
    assert_equal(gradient, torch.where(kept, scale, 0.0))
    torch.manual_seed(0)
    assert torch.equal(dropout(inputs), outputs)
    assert not torch.equal(dropout(inputs), outputs)
    assert dropout.eval()(inputs) is inputs


@pytest.mark.parametrize("probability", [0.0, 1e-7, 1.0])
def test_dropout_of_nothing_and_of_everything(probability):
    inputs = torch.randn(5, 7)
    outputs = Dropout(probability)(inputs)
    torch.testing.assert_close(outputs, inputs * (1 - round(probability)))


def test_dropout_has_second_gradients_and_takes_any_shape():
    inputs = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def drop(values):
        torch.manual_seed(1)
        return Dropout(0.5)(values).square()

    assert torch.autograd.gradcheck(drop, (inputs,))
    assert torch.autograd.gradgradcheck(drop, (inputs,))
    assert Dropout(0.5)(torch.randn(4, 6).mT).shape == (6, 4)
    assert Dropout(0.5)(torch.tensor(1.0)).shape == ()
    assert Dropout(0.5)(torch.empty(0, 3)).shape == (0, 3)
