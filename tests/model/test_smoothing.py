"""The Fourier convolution of inputs much shorter than the model: on a shorter circle, to the same result."""

import copy
import pickle

import pytest
import torch
from torch import nn

from modeling_sktformer import SKTformerForMaskedLM, SKTformerForSequenceClassification, SKTformerModel, smoothing
from modeling_sktformer.smoothing import (
    FourierConvolution,
    fourier_convolution,
    resize_filter,
    short_transform_length,
    shorten_filter,
)
from support.builders import assert_equal, call, gradients, make_batch, make_config, make_model, token_outputs
from support.reference import naive_fourier_convolution


WIDTH, NUM_SEGMENTS = 12, 3


def assert_same(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def make_convolution(num_positions: int, dtype: torch.dtype = torch.float64) -> FourierConvolution:
    """A Fourier convolution in evaluation mode with a random filter."""
    config = make_config(hidden_size=WIDTH, num_segments=NUM_SEGMENTS, max_position_embeddings=num_positions)
    convolution = FourierConvolution(config).to(dtype).eval()
    with torch.no_grad():
        convolution.filter.normal_()
    return convolution


def make_inputs(batch_size: int, length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch_size, length, WIDTH, dtype=torch.float64).to(dtype)


def kept_lengths(convolution: FourierConvolution) -> list[int]:
    """The transforms for which a shortened filter is kept."""
    return [] if convolution._shortened is None else sorted(convolution._shortened[1])


def convolutions_of(model: nn.Module) -> list[FourierConvolution]:
    return [module for module in model.modules() if isinstance(module, FourierConvolution)]


def on_the_whole_circle(convolution: FourierConvolution, inputs: torch.Tensor) -> torch.Tensor:
    """What the convolution has to give, without a shorter circle and with nothing kept."""
    return fourier_convolution(inputs, convolution.filter.detach(), NUM_SEGMENTS, convolution.num_positions)


@pytest.fixture
def transforms(monkeypatch) -> list[int]:
    """The length of every transform that is run from here on."""
    lengths = []

    def recorded(inputs, filter, num_segments, num_positions):
        lengths.append(num_positions)
        return fourier_convolution(inputs, filter, num_segments, num_positions)

    monkeypatch.setattr(smoothing, "fourier_convolution", recorded)
    return lengths


@pytest.fixture
def shortenings(monkeypatch) -> list[int]:
    """The length that a filter is brought to, for every time that one is."""
    lengths = []

    def recorded(filter, num_positions, new_num_positions):
        lengths.append(new_num_positions)
        return shorten_filter(filter, num_positions, new_num_positions)

    monkeypatch.setattr(smoothing, "shorten_filter", recorded)
    return lengths


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
    outputs = fourier_convolution(inputs, short, NUM_SEGMENTS, new_num_positions).mT
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
    convolution, inputs = make_convolution(64), make_inputs(1, 9)
    short = shorten_filter(convolution.filter.detach(), 64, 16)
    difference = fourier_convolution(inputs, short, NUM_SEGMENTS, 16) - on_the_whole_circle(convolution, inputs)
    assert difference.abs().max() > 0.01


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


def test_shortening_and_resizing_agree_on_short_inputs():
    convolution, inputs = make_convolution(64), make_inputs(2, 12)
    resized = resize_filter(convolution.filter.detach(), 64, 24)
    short = shorten_filter(convolution.filter.detach(), 64, 24)
    assert_same(
        fourier_convolution(inputs, short, NUM_SEGMENTS, 24), fourier_convolution(inputs, resized, NUM_SEGMENTS, 24)
    )


# Shortening is worth it where batch_size * (64 - n) > 64 + n; keeping what was shortened, where it is > 16.
@pytest.mark.parametrize(
    ("batch_size", "length", "in_training", "in_evaluation"),
    [
        (1, 1, 64, 1),
        (2, 1, 1, 1),
        (2, 8, 16, 16),
        (2, 9, 64, 24),
        (3, 9, 24, 24),
        (3, 16, 64, 32),
        (4, 16, 32, 32),
        (1, 24, 64, 64),
        (2, 24, 64, 48),
        (7, 24, 64, 48),
        (8, 24, 48, 48),
        (8, 25, 64, 64),
        (8, 64, 64, 64),
    ],
)
def test_the_short_transform_is_taken_where_it_costs_less(
    batch_size, length, in_training, in_evaluation, transforms, shortenings
):
    convolution, inputs = make_convolution(64), make_inputs(batch_size, length)
    expected = on_the_whole_circle(convolution, inputs)
    for training, enabled in ((True, True), (True, False), (False, True), (False, False)):
        transforms.clear()
        shortenings.clear()
        with torch.set_grad_enabled(enabled):
            outputs = convolution.train(training)(inputs)
        assert_same(outputs.detach(), expected)
        assert transforms == [in_evaluation if not training and not enabled else in_training]
        assert shortenings == [n for n in transforms if n < 64]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("smoother_norm", ["batch_norm", "layer_norm"])
@pytest.mark.parametrize("side", ["right", "left", "holes"])
@pytest.mark.parametrize("model_class", [SKTformerForMaskedLM, SKTformerForSequenceClassification])
def test_the_model_is_the_same_without_short_transforms(
    model_class, side, smoother_norm, training, transforms, monkeypatch
):
    model = make_model(model_class, smoother_norm=smoother_norm, max_position_embeddings=64).train(training)
    start = copy.deepcopy(model.state_dict())
    batch = make_batch([12, 1, 7, 3])
    inputs, labels = batch.inputs(side, 12), batch.labels(model_class, side, 12)

    def outcome():
        # Batch norm moves its running statistics in training, which the next call must not see.
        model.load_state_dict(start)
        model.zero_grad()
        transforms.clear()
        output = call(model, inputs, **labels)
        output.loss.backward()
        lengths = list(transforms)
        with torch.no_grad():
            unlabelled = call(model, inputs)
        statistics = {name: value.clone() for name, value in model.named_buffers()}
        logits = list(unlabelled.logits)
        if token_outputs(unlabelled):
            logits = [row[place] for row, place in zip(logits, batch.places(side, 12), strict=True)]
        return lengths, (output.loss.detach(), logits, gradients(model), statistics)

    lengths, short = outcome()
    assert lengths == [24, 24]
    monkeypatch.setattr(smoothing, "short_transform_length", lambda length, num_positions: num_positions)
    lengths, full = outcome()
    assert lengths == [64, 64]
    assert len(full[2]) == len(list(model.parameters()))
    assert_same(short, full)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_no_worse_on_a_short_circle(dtype, transforms, monkeypatch):
    batch = make_batch([12, 1, 7, 3])
    inputs, labels = batch.inputs(), batch.labels(SKTformerForMaskedLM)

    def outcome(used_dtype, expected_length):
        model = make_model(SKTformerForMaskedLM, smoother_norm="layer_norm", max_position_embeddings=64).to(used_dtype)
        transforms.clear()
        output = model(**inputs, **labels)
        output.loss.backward()
        with torch.no_grad():
            again = model(**inputs)
        assert transforms == [expected_length] * 4
        assert output.logits.dtype == used_dtype
        filters = torch.cat([grad.flatten().double() for name, grad in gradients(model).items() if "filter" in name])
        kept = inputs["attention_mask"].bool()
        return output.logits[kept].detach().double(), again.logits[kept].double(), filters

    short = outcome(dtype, 24)
    monkeypatch.setattr(smoothing, "short_transform_length", lambda length, num_positions: num_positions)
    exact, full = outcome(torch.float64, 64), outcome(dtype, 64)
    for got, reference, want in zip(short, full, exact, strict=True):
        assert (got - want).norm() <= 2 * (reference - want).norm()


def test_under_autocast():
    convolution, inputs = make_convolution(64, torch.float32).train(), make_inputs(4, 12, torch.float32)
    expected = on_the_whole_circle(convolution, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = convolution(inputs)
    (grad,) = torch.autograd.grad(outputs.sum(), convolution.filter)
    assert (outputs - expected).abs().max() < 1e-5
    assert grad.dtype == torch.float32


# What changes a filter, all of which must show in the next output. Each takes the convolution whose filter it changes.


def step(optimizer_class, **options):
    def change(convolution):
        with torch.enable_grad():
            convolution(make_inputs(4, 9, convolution.filter.dtype)).square().sum().backward()
        optimizer_class(convolution.parameters(), lr=0.1, **options).step()

    return change


def in_place(convolution):
    with torch.no_grad():
        convolution.filter.mul_(2)


def in_place_behind_autograd(convolution):
    convolution.filter.data.mul_(2)


def sign(convolution):
    convolution.filter.data.neg_()


def swap(convolution):
    convolution.filter.data.copy_(convolution.filter.data.roll(1, 0))


def one_value(convolution):
    convolution.filter.data[3, 5, 1] += 1


def other_memory(convolution):
    convolution.filter.data = 2 * convolution.filter.data


def from_vector(convolution):
    vector = nn.utils.parameters_to_vector(convolution.parameters())
    nn.utils.vector_to_parameters(2 * vector.detach(), convolution.parameters())


def other_parameter(convolution):
    convolution.filter = nn.Parameter(2 * convolution.filter.detach())


def load(assign):
    def change(convolution):
        state = {"filter": torch.randn_like(convolution.filter)}
        convolution.load_state_dict(state, assign=assign)

    return change


def resize(convolution):
    convolution.resize(65)


CHANGES = {
    "sgd": step(torch.optim.SGD),
    "adamw": step(torch.optim.AdamW, foreach=False),
    "foreach_adamw": step(torch.optim.AdamW, foreach=True),
    "fused_adamw": step(torch.optim.AdamW, fused=True),
    "in_place": in_place,
    "data": in_place_behind_autograd,
    "sign": sign,
    "swap": swap,
    "one_value": one_value,
    "other_memory": other_memory,
    "vector_to_parameters": from_vector,
    "other_parameter": other_parameter,
    "load_state_dict": load(assign=False),
    "load_state_dict_assign": load(assign=True),
    "resize": resize,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@torch.no_grad()
def test_no_change_of_the_filter_is_missed(dtype, change, transforms):
    convolution, inputs = make_convolution(64, dtype), make_inputs(2, 9, dtype)
    before = convolution(inputs)
    change(convolution)
    transforms.clear()
    after = convolution(inputs)
    assert transforms == [24]
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.01}[dtype]
    torch.testing.assert_close(after, on_the_whole_circle(convolution, inputs), rtol=tolerance, atol=tolerance)
    if change is not resize:
        assert (after - before).abs().max() > 2 * tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_cast_model_uses_its_cast_filter(dtype, transforms):
    convolution, inputs = make_convolution(64), make_inputs(2, 9)
    exact = convolution(inputs)
    # There and back: the filter is in float64 again, but has lost digits.
    for cast in (dtype, torch.float64):
        convolution.to(cast)
        outputs = convolution(inputs)
        tolerance = 1e-10 if cast == torch.float64 else 1e-5
        torch.testing.assert_close(outputs, on_the_whole_circle(convolution, inputs), rtol=tolerance, atol=tolerance)
        assert (outputs - exact).abs().max() > 1e-9
    assert transforms == [24] * 3


@torch.no_grad()
def test_shortened_filters_are_kept_in_evaluation(shortenings):
    convolution = make_convolution(64)
    for length in (9, 12, 16, 9, 16, 1, 12):
        inputs = make_inputs(2, length)
        assert_same(convolution(inputs), on_the_whole_circle(convolution, inputs))
    assert shortenings == [24, 32, 1]
    convolution.eval()
    convolution(make_inputs(2, 9))
    assert len(shortenings) == 3
    in_place_behind_autograd(convolution)
    convolution(make_inputs(2, 9))
    convolution(make_inputs(2, 16))
    assert shortenings == [24, 32, 1, 24, 32]


@torch.no_grad()
def test_what_is_kept_belongs_to_the_copy(monkeypatch):
    convolution, inputs = make_convolution(64), make_inputs(2, 16)
    convolution(make_inputs(2, 9))
    expected = on_the_whole_circle(convolution, inputs)

    def equal_for_a_moment(first, second):
        # Another thread writes to the filter after it was compared, and then takes that back.
        convolution.filter.data.mul_(2)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(smoothing, "_equal_bits", equal_for_a_moment)
        convolution(inputs)
    assert kept_lengths(convolution) == [24, 32]
    convolution.filter.data.mul_(0.5)
    assert_same(convolution(inputs), expected)


@torch.no_grad()
def test_few_filters_are_kept():
    convolution = make_convolution(512)
    for length in range(1, 513):
        convolution(make_inputs(4, length))
    # 1 to 384: two in each octave.
    assert kept_lengths(convolution) == [1, 3, 6, *(m * 2**k for k in range(3, 8) for m in (1, 1.5)), 256, 384]


@torch.no_grad()
def test_training_and_resizing_free_what_was_kept():
    for release in (FourierConvolution.train, lambda convolution: convolution.resize(32)):
        convolution, inputs = make_convolution(64), make_inputs(8, 9)
        convolution(inputs)
        assert convolution._shortened is not None
        release(convolution)
        assert convolution._shortened is None
    model = make_model(SKTformerModel, max_position_embeddings=64)
    model(**make_batch([9, 5]).inputs())
    assert [kept_lengths(convolution) for convolution in convolutions_of(model)] == [[24], [24]]
    model.train()
    model(**make_batch([9, 5]).inputs())
    assert all(convolution._shortened is None for convolution in convolutions_of(model))


@torch.no_grad()
def test_what_was_kept_is_not_copied_or_saved(tmp_path):
    model = make_model(SKTformerModel, max_position_embeddings=64)
    names, inputs = list(model.state_dict()), make_batch([9, 5]).inputs()
    expected = model(**inputs).last_hidden_state
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        SKTformerModel.from_pretrained(tmp_path, dtype=torch.float64),
    ):
        convolution = convolutions_of(other)[0]
        assert convolution._shortened is None
        assert_equal(other(**inputs).last_hidden_state, expected)
        assert convolution._shortened is not None
        convolution.filter.mul_(2)
        assert (other(**inputs).last_hidden_state - expected).abs().max() > 1e-3
        assert_equal(model(**inputs).last_hidden_state, expected)


def test_a_call_without_gradients_leaves_later_ones_as_they_are():
    convolution, inputs = make_convolution(64), make_inputs(4, 9)
    expected = on_the_whole_circle(convolution, inputs)
    with torch.inference_mode():
        convolution(inputs)
    with torch.no_grad():
        outputs = convolution(inputs)
    assert not outputs.is_inference()
    assert_same(outputs, expected)
    outputs = convolution(inputs.requires_grad_())
    assert_same(outputs, expected)
    (grad,) = torch.autograd.grad(outputs.square().sum(), convolution.filter)
    assert grad.any()
    # A frozen filter too, where only inputs have gradients.
    convolution.filter.requires_grad_(False)
    convolution(inputs).square().sum().backward()


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        convolution = make_convolution(64)
        convolution(make_inputs(4, 9))
        in_place_behind_autograd(convolution)
        inputs = make_inputs(4, 9)
        assert_same(convolution(inputs), on_the_whole_circle(convolution, inputs))
    with torch.no_grad():
        assert_same(convolution(inputs.clone()), on_the_whole_circle(convolution, inputs))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@torch.no_grad()
def test_function_transforms(transforms):
    convolution, inputs = make_convolution(64), make_inputs(4, 9)
    direction = torch.randn_like(inputs)
    assert_same(torch.func.jvp(convolution, (inputs,), (direction,)), (convolution(inputs), convolution(direction)))
    # Filters that stand in for the module's own are not mistaken for it.
    for factor in (2, 3):
        outputs = torch.func.functional_call(convolution, {"filter": factor * convolution.filter}, (inputs,))
        assert_same(outputs, factor * on_the_whole_circle(convolution, inputs))
    many = {"filter": torch.stack([convolution.filter, 2 * convolution.filter])}
    outputs = torch.func.vmap(lambda weights: torch.func.functional_call(convolution, weights, (inputs,)))(many)
    assert_same(outputs, torch.stack([convolution(inputs), 2 * convolution(inputs)]))
    assert set(transforms) == {24}


def never(length, num_positions):
    raise AssertionError("a graph is bound to the length of its example")


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_compiled_model_does_not_choose_by_length(training, monkeypatch):
    convolution = make_convolution(64).train(training)
    monkeypatch.setattr(smoothing, "short_transform_length", never)
    compiled = torch.compile(convolution, fullgraph=True, backend="eager", dynamic=True)
    for length in (9, 3, 40, 64):
        inputs = make_inputs(4, length)
        assert_same(compiled(inputs).detach(), on_the_whole_circle(convolution, inputs))
    with pytest.raises(AssertionError, match="bound to the length"):
        convolution(inputs)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["export", "strict_export", "trace"])
@torch.no_grad()
def test_graphs_serve_every_length(how):
    convolution, example = make_convolution(64), make_inputs(4, 9)
    if how == "trace":
        graph = torch.jit.trace(convolution, (example,))
    else:
        lengths = {"inputs": {1: torch.export.Dim("length", min=2, max=63)}}
        graph = torch.export.export(
            convolution, (example,), dynamic_shapes=lengths, strict=how == "strict_export"
        ).module()
    for length in (9, 3, 40, 63):
        inputs = make_inputs(4, length)
        assert_same(graph(inputs), on_the_whole_circle(convolution, inputs))
