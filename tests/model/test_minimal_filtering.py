"""Minimal filtering: the same convolution, for every length, chunk and kind of gradient, and where it is used."""

import pytest
import torch
from torch import nn

from modeling_sktformer import minimal_filtering, smoothing
from modeling_sktformer.minimal_filtering import filter_minimally, is_minimal_filtering_faster
from modeling_sktformer.smoothing import ConvolutionStem
from support.builders import assert_equal, make_config


def convolve(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.conv1d(inputs.mT, weight, bias, padding=1).mT


def make_tensors(batch_size=2, length=11, num_columns=6, width=5, dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(length)
    shapes = ((batch_size, length, num_columns), (width, num_columns, 3), (width,))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("chunk_tiles", [1, 3, 100])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13, 24, 27])
def test_it_is_the_convolution(length, chunk_tiles, monkeypatch):
    monkeypatch.setattr(minimal_filtering, "CHUNK_VALUES", 6 * chunk_tiles)
    tensors = make_tensors(3, length)
    weights = torch.randn(3, length, 5, dtype=torch.float64)
    outputs, expected = filter_minimally(*tensors), convolve(*tensors)
    assert_equal(outputs, expected)
    gradients = torch.autograd.grad(outputs, tensors, weights)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected, tensors, weights), strict=True):
        assert_equal(actual, wanted)


def test_gradients_have_gradients():
    assert torch.autograd.gradgradcheck(filter_minimally, make_tensors(2, 6, 2, 3))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_tensors_get_no_gradient(frozen):
    tensors = make_tensors()
    tensors[frozen].requires_grad_(False)
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    found = torch.autograd.grad(filter_minimally(*tensors).square().sum(), trained)
    for actual, expected in zip(found, torch.autograd.grad(convolve(*tensors).square().sum(), trained), strict=True):
        assert_equal(actual, expected)


def test_rounding_errors_stay_small():
    tensors = make_tensors(2, 512, 256, 256, torch.float32)
    exact = convolve(*(tensor.double() for tensor in tensors))
    errors = [(function(*tensors) - exact).abs().max() for function in (convolve, filter_minimally)]
    assert errors[1] < 10 * errors[0]
    assert errors[1] < 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    ("sizes", "faster"),
    [((1536, 2048, 3), True), ((512, 2048, 3), False), ((1536, 100, 3), False), ((1536, 2048, 5), False)],
)
def test_wide_batches_of_many_tokens_are_filtered(sizes, faster):
    assert is_minimal_filtering_faster(*sizes) == faster


@pytest.mark.parametrize("reason", [None, "hook", "autocast", "function", "half weight", "compiler"])
def test_it_is_not_used_where_someone_looks_at_the_convolution(reason, monkeypatch):
    stem = ConvolutionStem(make_config(use_fourier_convolution=False)).double().eval()
    states = torch.randn(2, 8, stem.convolution.in_channels, dtype=torch.float64)
    expected = stem(None, states, None)
    calls: list[torch.Tensor] = []

    def record(*arguments):
        calls.append(filter_minimally(*arguments))
        return calls[-1]

    monkeypatch.setattr(smoothing, "MAX_NARROW_SIZE", 0)
    monkeypatch.setattr(smoothing, "filter_minimally", record)
    monkeypatch.setattr(smoothing, "is_minimal_filtering_faster", lambda *sizes: True)
    if reason == "hook":
        stem.convolution.register_forward_hook(lambda *call: None)
    elif reason == "compiler":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if reason == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            stem.float()(None, states.float(), None)
    elif reason == "half weight":
        stem.bfloat16()(None, states.bfloat16(), None)
    elif reason == "function":
        assert_equal(torch.func.vmap(lambda states: stem(None, states, None))(states[None])[0], expected)
    else:
        assert_equal(stem(None, states, None), expected)
    assert bool(calls) == (reason is None)
