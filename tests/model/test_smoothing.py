"""The smoother: on short circles, folded, in low precision and in graphs, always to the same result."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_sktformer import (
    SKTformerForMaskedLM,
    SKTformerForSequenceClassification,
    circle,
    modeling_sktformer,
    smoothing,
)
from modeling_sktformer.circle import Circle, add_folded_stem, choose_circle, count_multiply_adds, make_waves
from modeling_sktformer.lengthening import resize_filter, short_transform_length, shorten_filter
from modeling_sktformer.sequences import Sequences
from modeling_sktformer.smoothing import (
    FourierConvolution,
    Smoother,
    average_segments,
    convolve_tokens,
    fourier_convolution,
)
from support.builders import call, gradients, make_batch, make_config, make_model, token_outputs
from support.reference import naive_fourier_convolution


WIDTH, NUM_SEGMENTS = 12, 3


def assert_same(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def circle_for(config, inputs: torch.Tensor, token_mask: torch.Tensor | None = None) -> tuple[Sequences, Circle]:
    """The sequences of a batch, and what the encoder convolves them around."""
    sequences = Sequences.from_mask(inputs.shape[1], token_mask, inputs.dtype)
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    return sequences, choose_circle(config, inputs.shape[0], sequences, dtype, inputs.device)


class Convolution(nn.Module):
    """A Fourier convolution with a random filter, called as the encoder does it where there is no stem."""

    def __init__(self, num_positions: int, dtype: torch.dtype = torch.float64):
        super().__init__()
        sizes = {"hidden_size": WIDTH, "num_segments": NUM_SEGMENTS, "max_position_embeddings": num_positions}
        self.config = make_config(use_convolution_stem=False, **sizes)
        self.convolution = FourierConvolution(self.config).to(dtype)
        nn.init.normal_(self.convolution.filter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.convolution(inputs, circle_for(self.config, inputs)[1])

    def on_the_whole_circle(self, inputs: torch.Tensor) -> torch.Tensor:
        """What it has to give."""
        num_positions = self.config.max_position_embeddings
        return fourier_convolution(inputs, self.convolution.filter.detach(), NUM_SEGMENTS, num_positions)


def make_inputs(batch_size: int, length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch_size, length, WIDTH, dtype=torch.float64).to(dtype)


def test_a_fourier_convolution_alone_has_the_whole_circle():
    """As those call it that hand on tensors alone."""
    convolution, inputs = Convolution(32), make_inputs(2, 9)
    torch.testing.assert_close(convolution.convolution(inputs), convolution.on_the_whole_circle(inputs))


@pytest.fixture
def force(monkeypatch):
    """A function that makes all batches take one form, whatever it costs."""

    def take(folded: bool, short: bool) -> None:
        def count(config, batch_size, length, num_positions):
            cost = num_positions if short else -num_positions
            return cost + folded, cost + (not folded)

        monkeypatch.setattr(circle, "count_multiply_adds", count)

    return take


def test_the_length_is_the_smallest_fast_one_that_fits():
    fast = sorted([2**k for k in range(12)] + [3 * 2**k for k in range(11)])
    for num_positions in [*range(1, 40), 63, 64, 65, 96, 100, 512, 1000, 1024]:
        for length in range(1, num_positions + 1):
            fitting = [n for n in fast if 2 * length - 1 <= n < num_positions]
            assert short_transform_length(length, num_positions) == (fitting[0] if fitting else num_positions)


def check_against_the_circular_sum(length: int, num_positions: int, new_num_positions: int) -> None:
    inputs = make_inputs(2, length).requires_grad_()
    filter = torch.randn(WIDTH, num_positions // 2 + 1, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, length, WIDTH, dtype=torch.float64)
    short = shorten_filter(filter, num_positions, new_num_positions)
    assert short.shape == (WIDTH, new_num_positions // 2 + 1, 2)
    outputs = fourier_convolution(inputs, short, NUM_SEGMENTS, new_num_positions)
    expected = torch.stack([naive_fourier_convolution(row, filter, NUM_SEGMENTS, num_positions) for row in inputs])
    assert_same(outputs, expected)
    assert_same(
        torch.autograd.grad((outputs * weight).sum(), (inputs, filter)),
        torch.autograd.grad((expected * weight).sum(), (inputs, filter)),
    )


@pytest.mark.parametrize("num_positions", [1, 2, 3, 7, 8, 12])
def test_every_circle_that_holds_all_lags_gives_the_circular_sum(num_positions):
    for length in range(1, num_positions + 1):
        lengths = {*range(2 * length - 1, num_positions + 1), short_transform_length(length, num_positions)}
        for new_num_positions in lengths:
            check_against_the_circular_sum(length, num_positions, new_num_positions)


@pytest.mark.parametrize(
    ("length", "num_positions"),
    [(1, 64), (2, 63), (9, 64), (12, 63), (16, 64), (17, 64), (24, 100), (25, 100), (25, 127), (32, 127), (32, 64)],
)
def test_the_chosen_circle_gives_the_circular_sum(length, num_positions):
    check_against_the_circular_sum(length, num_positions, short_transform_length(length, num_positions))


def test_a_circle_that_is_too_short_would_not_do():
    model, inputs = Convolution(64), make_inputs(1, 9)
    short = shorten_filter(model.convolution.filter.detach(), 64, 16)
    difference = fourier_convolution(inputs, short, NUM_SEGMENTS, 16) - model.on_the_whole_circle(inputs)
    assert difference.abs().max() > 0.01


def test_a_filter_on_its_own_circle_is_taken_as_it_is():
    filter = torch.randn(WIDTH, 33, 2)
    assert shorten_filter(filter, 64, 64) is filter


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_filters_are_shortened_in_float32_at_least(dtype, expected):
    filter = torch.randn(WIDTH, 33, 2).to(dtype)
    short = shorten_filter(filter, 64, 24)
    assert short.dtype == expected
    exact = shorten_filter(filter.double(), 64, 24)
    assert (short.double() - exact).abs().max() < (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_segments_are_averaged_in_float32(dtype):
    inputs = make_inputs(2, 9, dtype)
    averages = average_segments(inputs, NUM_SEGMENTS)
    assert averages.dtype == torch.float32
    expected = inputs.double().unflatten(-1, (NUM_SEGMENTS, -1)).mean(dim=-1)
    torch.testing.assert_close(averages.double(), expected, rtol=0, atol=1e-6)


def test_shortening_and_resizing_agree_on_short_inputs():
    filter, inputs = Convolution(64).convolution.filter.detach(), make_inputs(2, 12)
    short, resized = shorten_filter(filter, 64, 24), resize_filter(filter, 64, 24)
    assert_same(
        fourier_convolution(inputs, short, NUM_SEGMENTS, 24), fourier_convolution(inputs, resized, NUM_SEGMENTS, 24)
    )


def test_multiply_adds_are_counted_as_by_hand():
    config = make_config(hidden_size=12, num_segments=3, conv_kernel_size=3, max_position_embeddings=64)
    # Two sequences of 5 tokens, 12 columns; 1.25 N log2 N for each transform, of which shortening takes 12 and 12.
    shortening = 12 * 1.25 * (64 * 6 + 16 * 4)
    direct = 3 * (2 * 5) * 12 * 12 + (2 * 12) * 1.25 * 16 * 4
    # 9 frequencies of 2 parts count as 16: the folded filter, its products, and transforms as products with waves.
    folded = 3 * 16 * 12 * 12 + 2 * (2 * 16) * 3 * 12
    waves = 2 * (5 * 16) * (12 + 2 * 3)
    moved = 64 * (4 * 3 + 3 * 3) * 12 * 16
    assert count_multiply_adds(config, 2, 5, 16) == (shortening + direct, shortening + folded + waves + moved)
    config.max_position_embeddings = 16  # nothing to shorten
    assert count_multiply_adds(config, 2, 5, 16) == (direct, folded + waves + moved)
    config.use_convolution_stem = False  # nothing to fold
    assert count_multiply_adds(config, 2, 5, 16) == ((2 * 12) * 1.25 * 16 * 4, math.inf)


def test_long_circles_are_counted_with_fast_transforms():
    config = make_config(hidden_size=12, num_segments=3, conv_kernel_size=3, max_position_embeddings=1024)
    products = 3 * 1024 * 12 * 12 + 2 * (2 * 1024) * 3 * 12 + 64 * (4 * 3 + 3 * 3) * 12 * 1024
    transforms = 2 * (12 + 3) * 1.25 * 1024 * 10
    assert count_multiply_adds(config, 2, 700, 1024)[1] == products + transforms


# Without a stem shortening is worth it where B 64 log2 64 > (B + 1) n log2 n + 64 log2 64.
@pytest.mark.parametrize(
    ("batch_size", "length", "num_positions"),
    [
        *[(1, 1, 64), (2, 1, 1), (1, 8, 64), (2, 8, 16), (1, 9, 64), (2, 9, 24)],
        *[(2, 16, 64), (3, 16, 32), (5, 24, 64), (6, 24, 48), (8, 25, 64), (8, 64, 64)],
    ],
)
def test_the_short_circle_is_taken_where_it_costs_less(batch_size, length, num_positions):
    model, inputs = Convolution(64), make_inputs(batch_size, length)
    assert circle_for(model.config, inputs)[1] == Circle(num_positions)
    assert_same(model(inputs).detach(), model.on_the_whole_circle(inputs))


@pytest.mark.parametrize(
    ("sizes", "folds"),
    [
        ({}, True),
        ({"hidden_size": 96}, False),
        ({"batch_size": 1}, False),
        ({"num_segments": 256}, False),
        ({"conv_kernel_size": 1}, False),
        ({"use_convolution_stem": False}, False),
    ],
    ids=str,
)
def test_stems_are_folded_in_wide_models_and_large_batches(sizes, folds):
    fields = {"hidden_size": 768, "num_segments": 8, "max_position_embeddings": 512, "batch_size": 8, **sizes}
    batch_size = fields.pop("batch_size")
    config = make_config(**fields)
    inputs = torch.empty(batch_size, 512, config.hidden_size, device="meta")
    assert (circle_for(config, inputs)[1].waves is not None) == folds


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_plain_code_convolves_every_batch_alike(batch_size):
    config = make_config(hidden_size=768, num_segments=8, max_position_embeddings=512, kernels="eager")
    for length in (9, 512):
        assert circle_for(config, torch.empty(batch_size, length, 768, device="meta"))[1] == Circle(512)


def make_smoother(**overrides) -> Smoother:
    smoother = Smoother(make_config(**overrides)).double().train()
    for parameter in smoother.parameters():
        nn.init.normal_(parameter, std=0.5)
    return smoother


def smooth(smoother: Smoother, config, states: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    sequences, around = circle_for(config, states, token_mask)
    return sequences.zero_padding(smoother(states, sequences, around))


def test_waves_that_were_cast_on_the_way_fold_nothing(force):
    """As FSDP casts all that is given to a layer: products of frequencies want more digits than that leaves."""
    force(folded=True, short=False)
    smoother, states = make_smoother(), make_inputs(4, 12)
    sequences, around = circle_for(make_config(), states)
    waves = around.waves
    assert waves is not None
    cast = waves._replace(analysis=None, synthesis=None, shifts=waves.shifts.bfloat16(), ends=waves.ends.bfloat16())
    expected = smoother(states, sequences, Circle(around.num_positions))
    assert torch.equal(smoother(states, sequences, Circle(around.num_positions, cast)), expected)


# Lengths of one token, fewer than taps, all of a short circle, as many as fit without one, and the model's.
@pytest.mark.parametrize(
    ("num_positions", "length"), [(1, 1), (33, 1), (33, 2), (33, 12), (33, 18), (33, 33), (32, 3), (32, 8), (32, 32)]
)
@pytest.mark.parametrize("products", [False, True], ids=["transforms", "products"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_folded_stems_are_the_direct_ones(kernel_size, masked, products, num_positions, length, force, monkeypatch):
    monkeypatch.setattr(circle, "MAX_PRODUCT_POSITIONS", 64 if products else 0)
    fields = {"max_position_embeddings": num_positions, "num_landmark_tokens": 1, "conv_kernel_size": kernel_size}
    smoother, config = make_smoother(smoother_activation="gelu", **fields), make_config(**fields)
    states = torch.randn(4, length, WIDTH, dtype=torch.float64, requires_grad=True)
    num_tokens = torch.tensor([length, 1, 0, (length + 1) // 2])
    token_mask = torch.arange(length) < num_tokens[:, None] if masked else None
    weights = torch.randn_like(states)
    results = []
    for folded in (False, True):
        for short in (False, True):
            force(folded, short)
            around = circle_for(config, states)[1]
            assert (around.waves is not None) == (folded and length >= kernel_size // 2)
            assert around.num_positions == (short_transform_length(length, num_positions) if short else num_positions)
            outputs = smooth(smoother, config, states, token_mask)
            grads = torch.autograd.grad((outputs * weights).sum(), [states, *smoother.parameters()])
            results.append((outputs, *grads))
    for result in results[1:]:
        assert_same(result, results[0])


def test_the_folded_stem_has_second_gradients(force):
    force(folded=True, short=False)
    fields = {"max_position_embeddings": 5, "smoother_activation": "gelu"}
    smoother, config = make_smoother(**fields), make_config(**fields)
    states = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    token_mask = torch.arange(5) < torch.tensor([5, 3])[:, None]

    def smoothed(states):
        return smooth(smoother, config, states, token_mask)

    assert torch.autograd.gradgradcheck(smoothed, (states,), fast_mode=True)


@pytest.mark.parametrize("name", ["convolution_stem", "convolution_stem.convolution", "fourier_convolution"])
def test_a_hook_on_a_part_of_the_stem_is_called(name, force):
    force(folded=True, short=False)
    smoother, states, calls = make_smoother(), torch.randn(4, 16, WIDTH, dtype=torch.float64), []
    expected = smooth(smoother, make_config(), states, None)
    smoother.get_submodule(name).register_forward_hook(lambda *call: calls.append(call))
    assert_same(smooth(smoother, make_config(), states, None), expected)
    assert len(calls) == 1


def test_a_wrapped_short_convolution_is_called(force):
    smoother, states = make_smoother(), torch.randn(4, 16, WIDTH, dtype=torch.float64)
    force(folded=True, short=False)
    expected = smooth(smoother, make_config(), states, None)
    name = "convolution_stem.convolution"
    smoother.set_submodule(name, nn.Sequential(smoother.get_submodule(name)))
    assert_same(smooth(smoother, make_config(), states, None), expected)


class WrittenValues(TorchDispatchMode):
    """Counts the values that operators write."""

    num_values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        written = results if isinstance(results, (tuple, list)) else (results,)
        self.num_values += sum(value.numel() for value in written if isinstance(value, torch.Tensor))
        return results


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("frozen", ["fourier_convolution", "convolution_stem.convolution", "convolution_stem.norm"])
def test_frozen_parts_of_the_smoother_get_no_gradient_and_cost_none(frozen, folded, force):
    force(folded, short=False)
    smoother, config = make_smoother(smoother_norm="layer_norm"), make_config(smoother_norm="layer_norm")
    states = torch.randn(4, 16, WIDTH, dtype=torch.float64, requires_grad=True)

    def count_values() -> int:
        outputs = smooth(smoother, config, states, None)
        with WrittenValues() as counter:
            outputs.sum().backward()
        return counter.num_values

    trained = count_values()
    smoother.zero_grad()
    smoother.get_submodule(frozen).requires_grad_(False)
    assert count_values() < trained
    for name, parameter in smoother.named_parameters():
        assert (parameter.grad is None) == name.startswith(frozen)


def test_the_activation_may_be_that_of_the_authors_later_code():
    states = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    normed: list = []
    smoother = make_smoother(smoother_activation="elu")
    smoother.get_submodule("convolution_stem.norm").register_forward_hook(lambda *call: normed.append(call[-1]))
    smoothed = smooth(smoother, make_config(), states, None)
    assert_same([smoothed], [torch.nn.functional.elu(normed[0])])
    with pytest.raises(ValueError, match="`hidden_act` is 'elu', which transformers does not have; try gelu"):
        SKTformerForMaskedLM(make_config(hidden_act="elu"))


def test_hooks_see_what_they_saw(force):
    """The activation and the dropout do not write into what came out of the norm."""
    smoother, seen = make_smoother(), []

    def look(module, inputs, output):
        seen.append((output, output.clone()))

    smoother.get_submodule("convolution_stem.norm").register_forward_hook(look)
    smooth(smoother, make_config(), torch.randn(3, 7, WIDTH, dtype=torch.float64), None)
    ((output, as_it_was),) = seen
    assert output.min() < 0
    assert torch.equal(output, as_it_was)


@pytest.mark.parametrize("products", [False, True], ids=["transforms", "products"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folded_stems_lose_no_more_under_autocast(dtype, products, force, monkeypatch):
    monkeypatch.setattr(circle, "MAX_PRODUCT_POSITIONS", 64 if products else 0)
    smoother, config = make_smoother(hidden_size=48).eval(), make_config(hidden_size=48)
    states = torch.randn(4, 16, 48)
    exact = smooth(smoother, config, states.double(), None)
    smoother.float()
    errors = []
    for folded in (False, True):
        force(folded, short=False)
        with torch.autocast("cpu", dtype):
            errors.append((smooth(smoother, config, states, None) - exact).norm())
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.005), (torch.float16, 0.0007), (torch.float32, 1e-6)])
def test_products_with_waves_round_like_products(dtype, most):
    """What the stem reads of the Fourier convolution of 512 positions, in types smaller than its own."""
    width, length = 96, 512
    states, filter = torch.randn(2, length, width).to(dtype), torch.randn(width, length // 2 + 1, 2)
    weight = (0.1 * torch.randn(width, width, 3)).to(dtype)
    smoothed = fourier_convolution(states.double(), filter.double(), NUM_SEGMENTS, length)
    exact = convolve_tokens(smoothed, weight.double(), None)
    waves = make_waves(3, Sequences(length), length, torch.float32, states.device)
    assert waves.synthesis is not None
    averages = average_segments(states, NUM_SEGMENTS)
    found = add_folded_stem(torch.zeros_like(states), averages, filter, weight, Circle(length, waves))
    assert found.dtype == dtype
    assert (found - exact).norm() < most * exact.norm()


@pytest.mark.parametrize("folded", [False, True])
def test_transforms_run_in_float32_under_autocast(folded, force, monkeypatch):
    monkeypatch.setattr(circle, "MAX_PRODUCT_POSITIONS", 0)
    force(folded, short=True)
    dtypes: list[torch.dtype] = []

    def recorded(transform):
        def run(inputs, **options):
            dtypes.append(inputs.dtype)
            return transform(inputs, **options)

        return run

    for name in ("rfft", "irfft"):
        monkeypatch.setattr(torch.fft, name, recorded(getattr(torch.fft, name)))

    def add(*inputs):
        assert inputs[1].dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")  # which would cast the products with waves
        return add_folded_stem(*inputs)

    monkeypatch.setattr(smoothing, "add_folded_stem", add)
    smoother, states = make_smoother().float(), torch.randn(2, 5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = smooth(smoother, make_config(), states, None)
    assert outputs.isfinite().all()
    # The filter's two to the short circle, and the columns'.
    assert dtypes == [torch.complex64, torch.float32, torch.float32, torch.complex64]


def test_filters_keep_float32_under_autocast():
    model, inputs = Convolution(64, torch.float32), make_inputs(4, 12, torch.float32)
    expected = model.on_the_whole_circle(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs)
    (grad,) = torch.autograd.grad(outputs.sum(), model.convolution.filter)
    assert (outputs - expected).abs().max() < 1e-5
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("part", ["use_smoother", "use_fourier_convolution"])
def test_no_waves_are_made_where_nothing_reads_them(part, force):
    force(True, False)
    config = make_config(max_position_embeddings=64)
    assert circle_for(config, torch.zeros(3, 12, config.hidden_size))[1].waves is not None
    config = make_config(max_position_embeddings=64, **{part: False})
    assert circle_for(config, torch.zeros(3, 12, config.hidden_size))[1] == Circle(64)


@pytest.mark.parametrize(("device", "is_folded"), [("cpu", True), ("meta", True), ("cuda", False), ("mps", False)])
def test_stems_are_folded_on_processors_and_short_inputs_have_short_circles_but_in_small_batches_on_gpus(
    device, is_folded, force, monkeypatch
):
    force(True, True)
    monkeypatch.setattr(circle, "make_waves", lambda *arguments: "waves")
    config, arguments = make_config(max_position_embeddings=64), (Sequences(12), torch.float32, torch.device(device))
    num_small = circle.LAUNCH_BOUND_VALUES // (64 * config.hidden_size)
    assert choose_circle(config, num_small, *arguments) == ((24, "waves") if is_folded else (64, None))
    assert choose_circle(config, num_small + 1, *arguments) == (24, "waves" if is_folded else None)
    config.kernels = "eager"
    assert choose_circle(config, num_small + 1, *arguments) == (64, None)


@pytest.fixture
def circles(monkeypatch) -> list[Circle]:
    """What the batches of a model are convolved around from here on."""
    chosen = []

    def record(*arguments):
        chosen.append(choose_circle(*arguments))
        return chosen[-1]

    monkeypatch.setattr(modeling_sktformer, "choose_circle", record)
    return chosen


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("smoother_norm", ["batch_norm", "layer_norm"])
@pytest.mark.parametrize("side", ["right", "left", "holes"])
@pytest.mark.parametrize("model_class", [SKTformerForMaskedLM, SKTformerForSequenceClassification])
def test_the_model_is_the_same_in_every_form(model_class, side, smoother_norm, training, circles, force):
    model = make_model(model_class, smoother_norm=smoother_norm, max_position_embeddings=64).train(training)
    start = copy.deepcopy(model.state_dict())
    batch = make_batch([12, 1, 7, 3])
    inputs, labels = batch.inputs(side, 12), batch.labels(model_class, side, 12)

    def outcome(folded, short):
        # Batch norm moves its running statistics in training, which the next call must not see.
        model.load_state_dict(start)
        model.zero_grad()
        force(folded, short)
        output = call(model, inputs, **labels)
        output.loss.backward()
        assert circles[-1].num_positions == (24 if short else 64)
        assert (circles[-1].waves is not None) == folded
        with torch.no_grad():
            unlabelled = call(model, inputs)
        statistics = {name: value.clone() for name, value in model.named_buffers()}
        logits = list(unlabelled.logits)
        if token_outputs(unlabelled):
            logits = [row[place] for row, place in zip(logits, batch.places(side, 12), strict=True)]
        return output.loss.detach(), logits, gradients(model), statistics

    expected = outcome(folded=False, short=False)
    assert len(expected[2]) == len(list(model.parameters()))
    assert_same(outcome(folded=False, short=True), expected)
    assert_same(outcome(folded=True, short=True), expected)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_no_worse_in_other_forms(dtype, folded, circles, force):
    batch = make_batch([12, 1, 7, 3])
    inputs, labels = batch.inputs(), batch.labels(SKTformerForMaskedLM)

    def outcome(used_dtype, folded, short):
        model = make_model(SKTformerForMaskedLM, smoother_norm="layer_norm", max_position_embeddings=64).to(used_dtype)
        force(folded, short)
        output = model(**inputs, **labels)
        output.loss.backward()
        with torch.no_grad():
            again = model(**inputs)
        assert [around.num_positions for around in circles[-2:]] == [24 if short else 64] * 2
        assert output.logits.dtype == used_dtype
        filters = torch.cat([grad.flatten().double() for name, grad in gradients(model).items() if "filter" in name])
        kept = inputs["attention_mask"].bool()
        return output.logits[kept].detach().double(), again.logits[kept].double(), filters

    found, plain = outcome(dtype, folded, short=True), outcome(dtype, folded=False, short=False)
    exact = outcome(torch.float64, folded=False, short=False)
    for got, reference, want in zip(found, plain, exact, strict=True):
        assert (got - want).norm() <= 2 * (reference - want).norm()


def test_a_call_without_gradients_leaves_later_ones_as_they_are():
    model, inputs = Convolution(64), make_inputs(4, 9)
    expected = model.on_the_whole_circle(inputs)
    with torch.inference_mode():
        model(inputs)
    with torch.no_grad():
        outputs = model(inputs)
    assert not outputs.is_inference()
    assert_same(outputs, expected)
    outputs = model(inputs.requires_grad_())
    (grad,) = torch.autograd.grad(outputs.square().sum(), model.convolution.filter)
    assert grad.any()


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model, inputs = Convolution(64), make_inputs(4, 9)
        assert_same(model(inputs), model.on_the_whole_circle(inputs))
    with torch.no_grad():
        assert_same(model(inputs.clone()), model.on_the_whole_circle(inputs))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@torch.no_grad()
def test_function_transforms():
    model, inputs = Convolution(64), make_inputs(4, 9)
    direction, filter = torch.randn_like(inputs), model.convolution.filter
    assert_same(torch.func.jvp(model, (inputs,), (direction,)), (model(inputs), model(direction)))
    for factor in (2, 3):
        outputs = torch.func.functional_call(model, {"convolution.filter": factor * filter}, (inputs,))
        assert_same(outputs, factor * model.on_the_whole_circle(inputs))
    many = {"convolution.filter": torch.stack([filter, 2 * filter])}
    outputs = torch.func.vmap(lambda weights: torch.func.functional_call(model, weights, (inputs,)))(many)
    assert_same(outputs, torch.stack([model(inputs), 2 * model(inputs)]))


def test_function_transforms_of_folded_stems(force):
    force(folded=True, short=True)
    smoother, config = make_smoother().eval(), make_config()
    states, weights = torch.randn(3, 2, 5, WIDTH, dtype=torch.float64), dict(smoother.named_parameters())

    def loss(weights, states):
        sequences, around = circle_for(config, states)
        return torch.func.functional_call(smoother, weights, (states, sequences, around)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, states)
    for name, gradient in together.items():
        alone = [torch.func.grad(loss)(weights, batch)[name] for batch in states]
        assert_same(gradient, torch.stack(alone))


def never(*arguments):
    raise AssertionError("a graph is bound to the length of its example")


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_compiled_model_does_not_choose_by_length(training, monkeypatch):
    model = Convolution(64).train(training)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    with monkeypatch.context() as patch:
        patch.setattr(circle, "count_multiply_adds", never)
        patch.setattr(circle, "make_waves", never)
        results = [(inputs, compiled(inputs)) for inputs in map(make_inputs, [4] * 4, [9, 3, 40, 64])]
        with pytest.raises(AssertionError, match="bound to the length"):
            model(make_inputs(4, 9))
    for inputs, outputs in results:
        assert_same(outputs.detach(), model.on_the_whole_circle(inputs))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["compile", "export", "strict_export", "trace"])
@torch.no_grad()
def test_graphs_have_no_waves_and_serve_every_length(how, force, monkeypatch):
    force(folded=True, short=True)
    fields = {"max_position_embeddings": 64}
    smoother, config = make_smoother(**fields).eval(), make_config(**fields)
    monkeypatch.setattr(circle, "make_waves", never)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.smoother = smoother

        def forward(self, inputs):
            return smooth(smoother, config, inputs, None)

    example = make_inputs(4, 9)
    if how == "compile":
        graph = torch.compile(Model(), fullgraph=True, backend="eager", dynamic=True)
    elif how == "trace":
        graph = torch.jit.trace(Model(), (example,), check_trace=False)
    else:
        lengths = {"inputs": {1: torch.export.Dim("length", min=2, max=63)}}
        strict = how == "strict_export"
        graph = torch.export.export(Model(), (example,), dynamic_shapes=lengths, strict=strict).module()
    for length in (9, 3, 40, 63):
        inputs = make_inputs(4, length)
        sequences = Sequences(length)
        assert_same(graph(inputs), smoother(inputs, sequences, Circle(64)))


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_rows_of_any_length_are_convolved_alike(capability, monkeypatch):
    """Whether in pieces, decides the processor, from 2,049 tokens on."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 12, 5), (2, 2049, 12))
    )
    expected = torch.nn.functional.conv1d(inputs.mT, weight, padding=2).mT
    num_rows: list[int] = []
    convolve = torch.nn.functional.conv2d

    def note(image: torch.Tensor, *args, **options) -> torch.Tensor:
        num_rows.append(len(image))
        return convolve(image, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "conv2d", note)
    convolved = convolve_tokens(inputs, weight, None)
    convolve_tokens(inputs[:, 1:], weight, None)
    with torch.no_grad():
        torch.testing.assert_close(convolve_tokens(inputs, weight, None), convolved)
    long = 2 * 17 if capability == "AVX2" else 2
    assert num_rows == [long, 2, long]
    torch.testing.assert_close(convolved, expected)
    gradients = [torch.autograd.grad(result.square().sum(), (weight, inputs)) for result in (convolved, expected)]
    torch.testing.assert_close(*gradients)
    for length in (2176, 2177):  # 17 pieces of 128 tokens, and a token more
        for taps in (1, 7):
            weight, rows = weight.new_ones(6, 12, taps), inputs.new_ones(1, length, 12).cumsum(dim=1)
            expected = torch.nn.functional.conv1d(rows.mT, weight, padding=taps // 2).mT
            torch.testing.assert_close(convolve_tokens(rows, weight, None), expected)
            assert convolve_tokens(rows[:0], weight, None).shape == (0, length, 6)
