"""What the equations do not say about the fast paths: when they are taken, and gradients of every kind."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from builders import assert_equal, make_config, make_model
from modeling_sktformer import SKTformerForSequenceClassification, attention, chunked_mlp, smoothing
from modeling_sktformer.attention import SkeletonAttention
from modeling_sktformer.folded_attention import is_folding_cheaper, is_plain, project_normalized_combinations
from modeling_sktformer.smoothing import ConvolutionStem


@pytest.fixture
def fast(monkeypatch) -> None:
    """All fast paths, although the models here are small."""
    monkeypatch.setattr(attention, "is_folding_cheaper", lambda *sizes: True)
    monkeypatch.setattr(smoothing, "MAX_NARROW_SIZE", 1000)
    monkeypatch.setattr(chunked_mlp, "MIN_CHUNKS", 1)
    monkeypatch.setattr(chunked_mlp, "CHUNK_VALUES", 100)


def make_attention(**overrides) -> SkeletonAttention:
    layer = SkeletonAttention(make_config(**overrides), 0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def make_mlp() -> tuple[nn.Linear, nn.Module, nn.Linear]:
    return nn.Linear(6, 10).double(), nn.GELU(), nn.Linear(10, 6).double()


def is_chunked(outputs: torch.Tensor) -> bool:
    assert outputs.grad_fn is not None
    return "ChunkedMLP" in str(outputs.grad_fn.next_functions)


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


def test_norms_of_combinations_that_nearly_cancel_keep_their_digits():
    vectors = torch.randn(1, 1, 2, 8)
    vectors[:, :, 1] = vectors[:, :, 0] + 1e-3 * vectors[:, :, 1]
    coefficients = torch.tensor([[[1.0], [-1.0]]])
    norm, projection = nn.LayerNorm(8, eps=1e-12), nn.Linear(8, 8)
    combined = coefficients.mT.double() @ vectors.flatten(1, 2).double()
    expected = projection.double()(norm.double()(combined)).float()
    actual = project_normalized_combinations([(coefficients, vectors, norm.float())], projection.float())
    # The cancellation costs three digits of seven; a Gram matrix would lose all of them.
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


def test_combinations_of_dependent_vectors_have_finite_gradients():
    blocks = torch.ones(2, 1, 3, 4, dtype=torch.float64, requires_grad=True)  # centred they are zero
    coefficients = torch.rand(2, 3, 5, dtype=torch.float64, requires_grad=True)
    norm, projection = nn.LayerNorm(4).double(), nn.Linear(4, 4).double()
    project_normalized_combinations([(coefficients, blocks, norm)], projection).square().sum().backward()
    for value in (blocks, coefficients):
        assert value.grad is not None
        assert value.grad.isfinite().all()


def test_function_transforms_go_through_the_fast_paths(fast):
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


def test_changed_layers_are_not_plain():
    linear = nn.Linear(4, 4)
    assert is_plain(linear, nn.Linear)
    assert not is_plain(linear, nn.LayerNorm)
    assert not is_plain(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), nn.Linear)
    assert not is_plain(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear)
    vars(linear)["forward"] = lambda inputs: inputs  # as accelerate does
    assert not is_plain(linear, nn.Linear)


def test_half_precision_is_attended_to_directly(fast):
    layer = make_attention()
    states = torch.randn(2, 5, layer.query.in_features)
    assert layer.is_folded(states)
    assert not layer.is_folded(states.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer.is_folded(states)


@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize("fourier", [False, True])
def test_both_layouts_of_the_stem_are_the_same_convolution(kernel_size, fourier, monkeypatch):
    config = make_config(conv_kernel_size=kernel_size, use_fourier_convolution=fourier)
    stem = ConvolutionStem(config).double().eval()
    states = torch.randn(3, 7, config.hidden_size, dtype=torch.float64)
    smoothed = torch.randn(3, config.hidden_size, 7, dtype=torch.float64) if fourier else None
    outputs = []
    for size in (0, 1000):
        monkeypatch.setattr(smoothing, "MAX_NARROW_SIZE", size)
        outputs.append(stem(smoothed, states, None))
    assert_equal(*outputs)


def test_chunks_are_the_whole_feed_forward_part(monkeypatch):
    first, activation, second = make_mlp()
    parameters = [*first.parameters(), *second.parameters()]
    inputs = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    expected = second(activation(first(inputs)))
    weights = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, [inputs, *parameters], weights)
    monkeypatch.setattr(chunked_mlp, "CHUNK_VALUES", 40)  # 4 of 21 tokens, and one alone at the end
    outputs = chunked_mlp.chunked_mlp(inputs, first, activation, second)
    assert is_chunked(outputs)
    assert_equal(outputs, expected)
    gradients = torch.autograd.grad(outputs, [inputs, *parameters], weights)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert_equal(actual, wanted)
    assert torch.autograd.gradgradcheck(lambda x: chunked_mlp.chunked_mlp(x, first, activation, second), (inputs,))


@pytest.mark.parametrize("reason", ["few tokens", "wide", "hook", "autocast", "parameters"])
def test_chunks_are_only_made_where_they_may_be(reason, monkeypatch):
    first, activation, second = make_mlp()
    monkeypatch.setattr(chunked_mlp, "CHUNK_VALUES", 40 if reason != "few tokens" else 60)
    if reason == "wide":
        monkeypatch.setattr(chunked_mlp, "MAX_HIDDEN_SIZE", 5)
    elif reason == "hook":
        second.register_forward_hook(lambda *call: None)
    elif reason == "parameters":
        activation = nn.PReLU(dtype=torch.float64)
    inputs = torch.randn(21, 6, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=reason == "autocast"):
        outputs = chunked_mlp.chunked_mlp(inputs, first, activation, second)
    assert not is_chunked(outputs)
