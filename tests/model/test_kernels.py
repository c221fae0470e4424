"""The seam for kernels: when one is taken, that it changes nothing but time, and what is plain enough to be read."""

import copy
import logging
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils.logging import info_once

from modeling_sktformer import SKTformerForSequenceClassification, SKTformerModel, circle, kernels, load_preset
from modeling_sktformer.attention import SkeletonAttention
from modeling_sktformer.kernels import Dropout, LayerNorm, choose_kernel, is_plain
from modeling_sktformer.position_batch_norm import PositionBatchNorm
from modeling_sktformer.sequences import Sequences
from support.builders import assert_equal, gradients, make_batch, make_config, make_model


# Fewer than a head has columns, so that the query's weight is read.
FEW_SAMPLES = {"num_landmark_tokens": 2, "num_landmark_features": 1}
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "smoother_dropout_prob": 0.2}
BRANCHES: list[dict[str, Any]] = [{}, {"use_token_attention": False}, {"use_feature_attention": False}]
each_branch = pytest.mark.parametrize("branch", BRANCHES, ids=["both", "features", "tokens"])


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """The names of the kernels that are run from here on."""
    names: list[str] = []

    def recorded(kernel):
        def function(*inputs):
            names.append(kernel.name)
            return kernel.function(*inputs)

        return kernel._replace(function=function)

    for operation, candidates in kernels.KERNELS.items():
        monkeypatch.setitem(kernels.KERNELS, operation, tuple(map(recorded, candidates)))
    return names


def make_attention(**overrides) -> SkeletonAttention:
    layer = SkeletonAttention(make_config(**FEW_SAMPLES | overrides), 0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def attend(layer: SkeletonAttention, states: torch.Tensor) -> torch.Tensor:
    """The output for sequences without padding."""
    return layer(states, Sequences(states.shape[1]))[0]


def make_states(dtype: torch.dtype = torch.float64, **options) -> torch.Tensor:
    return torch.randn(2, 16, 12, dtype=dtype, **options)


def look(*call: Any) -> None:
    """A hook that changes nothing."""


def make_classifier(**overrides) -> SKTformerForSequenceClassification:
    return make_model(SKTformerForSequenceClassification, **FEW_SAMPLES | overrides).train()


def training_step(model, **options) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the same batch, with the same random numbers."""
    batch = make_batch([16, 9])
    inputs = batch.inputs()
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**inputs, inputs_embeds=embeddings, **batch.labels(type(model)), **options).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_identical(actual, expected) -> None:
    """Bit by bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Which kernel is taken


def test_looking_on_changes_no_bit_of_a_training_step(taken):
    model = make_classifier(**DROPOUT)
    expected = training_step(model)
    assert set(taken) == {"cpu_dropout"}
    assert_identical(training_step(model, output_attentions=True), expected)
    assert_identical(training_step(model, output_hidden_states=True, output_feature_attentions=True), expected)
    layer = model.get_submodule("sktformer.encoder.layers.0")
    for name in ("", "attention", "mlp", "dropout"):
        handle = layer.get_submodule(name).register_forward_hook(look)
        assert_identical(training_step(model), expected)
        handle.remove()
    assert taken == taken[: len(taken) // 7] * 7


@pytest.mark.parametrize(
    "name",
    [
        *["attention.query", "attention.key", "attention.value"],
        *["smoother.convolution_stem", "smoother.convolution_stem.convolution", "smoother.fourier_convolution"],
    ],
)
def test_looking_on_where_weights_are_read_changes_roundings_alone(name, taken, monkeypatch):
    monkeypatch.setattr(circle, "count_multiply_adds", lambda *sizes: (1, 0))  # stems are folded
    model, seen = make_classifier(**DROPOUT), []
    expected = training_step(model)
    module = model.get_submodule(f"sktformer.encoder.layers.0.{name}")
    module.register_forward_hook(lambda *call: seen.append(call))
    assert_equal(training_step(model), expected)
    assert len(seen) == 1
    assert taken == taken[: len(taken) // 2] * 2


def test_outputs_are_the_same_without_gradients(taken):
    model, inputs = make_classifier(**DROPOUT), make_batch([16, 9]).inputs()
    outputs = []
    for enabled in (True, False):
        torch.manual_seed(0)
        with torch.set_grad_enabled(enabled):
            outputs.append(model(**inputs).logits.detach())
    assert_identical(*outputs)
    assert taken == taken[: len(taken) // 2] * 2


@pytest.mark.parametrize("collected_before", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant, collected_before, taken):
    model = make_classifier(**DROPOUT)
    expected, num_taken = training_step(model), len(taken)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if collected_before:
        model(**make_batch([16, 9]).inputs(), output_attentions=True)
    taken.clear()
    assert_equal(training_step(model), expected)
    # The embeddings' dropout is outside of the layers, which are run twice.
    assert len(taken) == 2 * (num_taken - 1) + 1
    model.get_submodule("sktformer.encoder.layers.0.attention").register_forward_hook(look)
    assert_equal(training_step(model), expected)


def test_eager_takes_no_kernel(taken):
    model = make_classifier(**DROPOUT, kernels="eager")
    training_step(model)
    assert not taken
    model.set_kernels("auto")
    training_step(model)
    assert set(taken) == {"cpu_dropout"}


def test_kernels_are_set_in_the_whole_model(taken):
    model = make_classifier(**DROPOUT)
    for resized in (False, True):
        if resized:
            model.resize_position_embeddings(32)
        for of_model in (model, model.sktformer):
            model.set_kernels("auto")
            of_model.set_kernels("eager")
            taken.clear()
            training_step(model)
            assert not taken
    with pytest.raises(StrictDataclassFieldValidationError, match="kernels"):
        model.set_kernels("fast")  # type: ignore[arg-type]
    assert model.config.kernels == "eager"


def test_one_line_says_which_kernel_is_taken(caplog):
    info_once.cache_clear()
    with caplog.at_level(logging.INFO, "modeling_sktformer"):
        training_step(make_classifier(**DROPOUT, kernels="eager"))
        assert not caplog.records
        for _ in range(2):
            training_step(make_classifier(**DROPOUT))
    lines = [record.getMessage() for record in caplog.records]
    (line,) = lines
    assert '"cpu_dropout" computes dropout' in line
    assert 'set_kernels("eager")' in line


def test_compilers_see_plain_code(taken):
    layer, states = make_attention(attention_probs_dropout_prob=0.2).train(), make_states()
    torch.compile(attend, fullgraph=True, backend="eager")(layer, states)
    assert not taken


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
def test_traces_and_exports_see_plain_code(taken):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = make_attention(attention_probs_dropout_prob=0.2)

        def forward(self, states):
            return attend(self.attention, states)

    torch.export.export(Model(), (make_states(),))
    torch.jit.trace(Model(), (make_states(),), check_trace=False)
    assert not taken


# Batches


def alone_and_in_batches(sizes: list[int], kernels: str) -> list[torch.Tensor]:
    """A sequence's outputs in batches of other sequences, padded to the same length, at different places."""
    model = make_model(SKTformerModel, kernels=kernels, **FEW_SAMPLES).float()
    outputs = []
    for seed, size in enumerate(sizes):
        batch, place = make_batch([13, *range(1, size - 1), 16], seed=5 + seed), seed % size
        (batch.sequences[0], batch.token_types[0]) = ([*range(1, 14)], [0] * 13)
        for rows in (batch.sequences, batch.token_types):
            rows[0], rows[place] = rows[place], rows[0]
        with torch.no_grad():
            outputs.append(model(**batch.inputs(seed=seed)).last_hidden_state[place, :13])
    return outputs


@pytest.mark.parametrize("kernels", ["auto", "eager"])
def test_what_stands_beside_a_sequence_changes_no_bit_of_it(kernels):
    for size in (2, 3, 8):
        first, *others = alone_and_in_batches([size] * 4, kernels)
        for other in others:
            assert torch.equal(other, first)


@pytest.mark.parametrize("kernels", ["auto", "eager"])
def test_padding_beside_a_whole_sequence_changes_no_bit_of_it(kernels):
    model = make_model(SKTformerModel, kernels=kernels, max_position_embeddings=40, **FEW_SAMPLES).float()
    for length in range(2, 41):
        tokens, mask = torch.randint(1, 20, (2, length)), torch.ones(2, length, dtype=torch.long)
        with torch.no_grad():
            beside_whole = model(tokens, attention_mask=mask.clone()).last_hidden_state[0]
            mask[1, length // 2 :] = 0
            assert torch.equal(model(tokens, attention_mask=mask).last_hidden_state[0], beside_whole)


@pytest.mark.parametrize("kernels", ["auto", "eager"])
def test_how_many_stand_beside_a_sequence_changes_roundings_alone(kernels):
    first, *others = alone_and_in_batches([2, 3, 4, 8, 13], kernels)
    for other in others:
        assert (other - first).abs().max() < 1e-5


@pytest.mark.parametrize("preset", ["sktformer-tiny", "sktformer-mini"])
def test_plain_code_computes_a_sequence_alone_as_in_every_batch(preset):
    torch.manual_seed(0)
    model = SKTformerModel(load_preset(preset, vocab_size=30, num_hidden_layers=2, kernels="eager")).eval()
    tokens, mask = torch.randint(30, (16, 512)), (torch.arange(512) < torch.arange(500, 340, -10)[:, None]).long()
    with torch.no_grad():
        first, *others = (
            model(tokens[:size], attention_mask=mask[:size]).last_hidden_state[0, :500] for size in (1, 2, 16)
        )
        narrower = model(tokens[:1, :500]).last_hidden_state[0]
    for other in others:
        assert torch.equal(other, first)
    assert (narrower - first).abs().max() < 1e-5


# Modules whose weights are read


@pytest.fixture(params=[2, 6, 7], ids=lambda number: f"{number}_landmarks")
def attention(request) -> SkeletonAttention:
    """With fewer, as many and more landmark tokens than a head has columns."""
    return make_attention(num_landmark_tokens=request.param)


def test_keys_and_values_are_computed_where_they_are_sampled_alone(attention):
    states = make_states()
    with FlopCounterMode(display=False) as sampled:
        attend(attention, states)
    attention.key.register_forward_hook(look)
    with FlopCounterMode(display=False) as whole:
        attend(attention, states)
    width, num_tokens = states.shape[-1], states.shape[:2].numel()
    num_landmarks = 2 * attention.config.num_landmark_tokens
    num_columns = attention.num_heads * attention.config.num_landmark_features
    # Keys and values, two operations in a multiply-add.
    spared = 4 * (num_tokens * (width - num_columns) - num_landmarks * width) * width
    assert whole.get_total_flops() - sampled.get_total_flops() == spared


@each_branch
@pytest.mark.parametrize(("num_tokens", "num_features"), [(1, 1), (3, 3), (6, 6), (7, 2)])
def test_queries_are_spared_where_few_are_sampled_in_all(num_tokens, num_features, branch):
    states = torch.randn(2, 64, 12, dtype=torch.float64, requires_grad=True)
    samples = {"num_landmark_tokens": num_tokens, "num_landmark_features": num_features}
    layer = make_attention(max_position_embeddings=64, **samples, **branch)
    flops = {}
    for layer.config.kernels in ("auto", "eager"):
        with FlopCounterMode(display=False) as counter:
            attend(layer, states).sum().backward()
        flops[layer.config.kernels] = counter.get_total_flops()
    number = num_tokens * layer.config.use_token_attention + num_features * layer.config.use_feature_attention
    assert (flops["auto"] < flops["eager"]) == (number < layer.head_dim)
    assert flops["auto"] <= flops["eager"]


def test_the_fused_kernel_reads_queries_of_all_tokens(monkeypatch):
    layer, states = make_attention(num_landmark_tokens=1), make_states()
    monkeypatch.setattr(SkeletonAttention, "is_fused", lambda self: True)
    fused = Mock(wraps=nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", fused)
    attend(layer, states)
    assert_equal(fused.call_args.args[0].transpose(1, 2).flatten(2), layer.query(states))


@pytest.mark.parametrize(("number", "joined"), [(1, True), (2, False)])
def test_heads_are_joined_for_few_vectors_of_each(number, joined):
    layer, states = (
        make_attention(num_landmark_features=number, use_token_attention=False, kernels="eager"),
        make_states(),
    )
    with FlopCounterMode(display=False) as counter:
        attend(layer, states)
    width, num_vectors = states.shape[-1], layer.num_heads * number
    # Queries and outputs, sampled keys and values, then scores and what they weigh.
    columns = 2 * width + 2 * num_vectors + 2 * (num_vectors if joined else number)
    assert counter.get_total_flops() == 2 * states.numel() * columns


@each_branch
@pytest.mark.parametrize("masked", [False, True])
def test_samples_of_all_keys_and_values_are_those_of_their_weights(branch, masked):
    layer, states = make_attention(**branch), make_states(requires_grad=True)
    mask = torch.arange(16) < torch.tensor([[16], [1]]) if masked else None
    sequences = Sequences.from_mask(16, mask, states.dtype)
    results = []
    for _ in range(2):
        outputs, *weights = layer(states, sequences)
        outputs = sequences.zero_padding(outputs)
        loss = outputs.sin().sum()
        for matrix in filter(torch.is_tensor, weights):  # as interpretability methods do
            loss = loss + matrix.square().sum()
        results.append((outputs, weights, torch.autograd.grad(loss, [states, *layer.parameters()])))
        layer.key.register_forward_hook(look)
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("name", ["query", "key", "value", "out_proj", "token_norm", "feature_norm"])
def test_each_part_of_the_attention_is_called_once(name, attention):
    states, calls = make_states(), []
    expected = attend(attention, states)
    handle = attention.get_submodule(name).register_forward_hook(lambda *call: calls.append(call))
    assert_equal(attend(attention, states), expected)
    assert len(calls) == 1
    handle.remove()
    setattr(attention, name, nn.Sequential(attention.get_submodule(name)))
    attention.get_submodule(name).register_forward_hook(lambda *call: calls.append(call))
    assert_equal(attend(attention, states), expected)
    assert len(calls) == 2
    if name in ("query", "key", "value"):
        assert calls[1][1][0].shape == states.shape  # all tokens at once


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_projections_without_bias_are_called(name, attention):
    part, states = attention.get_submodule(name), make_states()
    nn.init.zeros_(part.get_parameter("bias"))
    expected = attend(attention, states)
    part.register_parameter("bias", None)
    assert_equal(attend(attention, states), expected)


@pytest.mark.parametrize(
    "frozen",
    [["query"], ["key"], ["value"], ["key", "value"], ["out_proj"], ["query", "key", "value", "out_proj"]],
    ids="-".join,
)
def test_frozen_weights_get_no_gradient_and_cost_none(frozen, attention):
    states = make_states(requires_grad=True)

    def count_flops() -> int:
        outputs = attend(attention, states)
        with FlopCounterMode(display=False) as counter:
            outputs.sum().backward()
        return counter.get_total_flops()

    trained = count_flops()
    attention.zero_grad()
    for name in frozen:
        attention.get_submodule(name).requires_grad_(False)
    spared = trained - count_flops()
    sampled = {"key", "value"} & {*frozen}
    if sampled == {*frozen}:  # what their weights' gradients take: of sampled columns, and of landmarks
        num_columns = attention.num_heads * attention.config.num_landmark_features
        rows = states.shape[:2].numel() * num_columns + 2 * attention.config.num_landmark_tokens * 12
        assert spared == len(frozen) * 2 * rows * 12
    assert spared > 0
    for name, parameter in attention.named_parameters():
        assert (parameter.grad is None) == (name.partition(".")[0] in frozen)


def test_changed_dropouts_see_the_attention_matrix():
    layer, seen = make_attention(), []
    layer.dropout.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    _, tokens, features = layer(make_states(), Sequences(16))
    assert_equal([matrix.mT for matrix in seen], [tokens, features])


def test_outputs_have_gradients_with_respect_to_attentions_that_are_asked_for():
    model = make_classifier()
    outputs = model(**make_batch([16, 9]).inputs(), output_attentions=True)
    grads = torch.autograd.grad(outputs.logits.sum(), outputs.attentions)
    assert all(gradient.abs().max() > 0 for gradient in grads)


def make_linear() -> nn.Linear:
    return nn.Linear(4, 4)


def make_quantized() -> nn.Linear:
    linear = make_linear()
    linear.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    return linear


class Derived(nn.Linear):
    """Could do anything."""


CHANGED = {
    "wrapped": lambda: nn.Sequential(make_linear()),
    "another class": lambda: nn.LayerNorm(4),
    "derived": lambda: Derived(4, 4),
    "no bias": lambda: nn.Linear(4, 4, bias=False),
    "pruned": lambda: prune.l1_unstructured(make_linear(), "weight", 0.5),
    "weight norm": lambda: parametrizations.weight_norm(make_linear()),
    "spectral norm in a hook": lambda: nn.utils.spectral_norm(make_linear()),
    "tensor subclass": make_quantized,
    "accelerate's forward": lambda: add_hook_to_module(make_linear(), ModelHook()),
}


@pytest.mark.parametrize("make", CHANGED.values(), ids=CHANGED)
def test_changed_modules_are_not_plain(make):
    assert not is_plain(make(), nn.Linear)


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Conv1d(4, 4, 3, padding=1)], ids=["linear", "convolution"])
def test_what_torch_makes_is_plain(module):
    kind = type(module)
    assert is_plain(module, kind)
    assert is_plain(copy.deepcopy(module).requires_grad_(False).half().eval(), kind)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_modules_are_plain_without_their_hooks(register):
    """The hooks stand in attributes private to torch: every kind of them has to show there."""
    linear = make_linear()
    handle = getattr(linear, register)(look)
    assert not is_plain(linear, nn.Linear)
    handle.remove()
    assert is_plain(linear, nn.Linear)


def test_modules_are_plain_again_without_accelerate():
    assert is_plain(remove_hook_from_module(add_hook_to_module(make_linear(), ModelHook())), nn.Linear)


def test_torch_says_when_it_recomputes():
    """The number of the graph task, private to torch, tells batch norm what not to count twice."""
    norm = PositionBatchNorm(make_config(max_position_embeddings=4, num_landmark_tokens=4)).train()
    inputs, sequences = torch.randn(2, 4, 12, requires_grad=True), Sequences(4)
    outputs = norm(inputs, sequences)
    counted = norm.running_mean.clone()
    recomputed: list[torch.Tensor] = []
    outputs.register_hook(lambda gradient: recomputed.append(norm(inputs.detach(), sequences)))
    outputs.sum().backward()
    assert recomputed
    assert counted.any()
    assert torch.equal(norm.running_mean, counted)


@pytest.mark.parametrize("lengths", [None, [16, 9, 16]], ids=["whole", "masked"])
def test_function_transforms_give_the_gradients_of_each_sample(lengths):
    model = make_classifier(smoother_norm="layer_norm")
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    states = torch.randn(3, 16, model.config.hidden_size, dtype=torch.float64)
    masks = () if lengths is None else ((torch.arange(16) < torch.tensor(lengths)[:, None]).long(),)

    def loss(weights, sample, mask=None):
        inputs = {"inputs_embeds": sample[None], "attention_mask": None if mask is None else mask[None]}
        return torch.func.functional_call(model, (weights, buffers), kwargs=inputs).logits.square().sum()

    in_dims = (None, 0) if lengths is None else (None, 0, 0)
    together = torch.func.vmap(torch.func.grad(loss), in_dims=in_dims)(parameters, states, *masks)
    for row, sample in enumerate(states):
        model.zero_grad()
        loss(parameters, sample, *(mask[row] for mask in masks)).backward()
        for name, gradient in gradients(model).items():
            assert_equal(together[name][row], gradient, name)


def test_the_fused_kernel_drops_in_training_alone():
    layer, states = make_attention(attention_probs_dropout_prob=0.5), make_states()
    layer.config._attn_implementation = "sdpa"
    layer.eval()
    assert_identical(attend(layer, states), attend(layer, states))
    layer.train()
    assert not torch.equal(attend(layer, states), attend(layer, states))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_of_the_attention_obeys_its_own_module(attention):
    layer, states = make_attention(attention_probs_dropout_prob=0.5, use_feature_attention=False), make_states()
    layer.config._attn_implementation = attention
    layer.train().dropout.eval()
    expected = attend(layer.eval(), states)
    layer.training = True
    assert_identical(attend(layer, states), expected)
    layer.eval().dropout.train()
    assert not torch.equal(attend(layer, states), attend(layer, states))
    setattr(layer.train(), "dropout", torch.nn.Identity())  # noqa: B010
    assert_identical(attend(layer, states), expected)


# Dropout


def make_dropout(probability: float, kernels: str = "auto") -> Dropout:
    return Dropout(probability, make_config(kernels=kernels))


@pytest.mark.parametrize("kernels", ["auto", "eager"])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_the_mean(probability, kernels, taken):
    dropout = make_dropout(probability, kernels)
    torch.manual_seed(0)
    inputs = torch.ones(1001, 333, requires_grad=True)
    outputs = dropout(inputs)
    assert bool(taken) == (kernels == "auto")
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


def test_dropout_of_nothing_and_of_everything():
    inputs = torch.randn(5, 7)
    for probability in (0.0, 1e-7):
        assert torch.equal(make_dropout(probability)(inputs), inputs)
    assert not make_dropout(1.0)(inputs).any()


def test_dropout_of_nearly_everything_keeps_the_mean():
    outputs = make_dropout(1 - 1e-7)(torch.ones(1 << 20))
    assert outputs.unique().tolist() == [0, 1 << 16]
    assert outputs.mean().item() == pytest.approx(1, abs=5 / 4)  # 16 are kept, and their square root is 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5,), (3, 1, 7), (2, 3, 2, 3)])
def test_dropout_takes_any_shape_and_dtype(shape, dtype, taken):
    inputs = 1 + torch.rand(shape, dtype=dtype)
    outputs = make_dropout(0.5)(inputs)
    assert taken
    assert (outputs.shape, outputs.dtype) == (inputs.shape, inputs.dtype)
    assert ((outputs == 0) | (outputs == 2 * inputs)).all()


def test_dropout_takes_values_that_do_not_stand_in_order():
    inputs = 1 + torch.rand(4, 6).mT
    outputs = make_dropout(0.5)(inputs)
    assert ((outputs == 0) | (outputs == 2 * inputs)).all()


def test_dropout_has_second_gradients():
    def drop(values):
        torch.manual_seed(1)
        return make_dropout(0.5)(values).square()

    inputs = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(drop, (inputs,))
    assert torch.autograd.gradgradcheck(drop, (inputs,))


def test_dropout_in_function_transforms():
    inputs = torch.ones(3, 64)
    different = torch.func.vmap(make_dropout(0.5), randomness="different")(inputs)
    same = torch.func.vmap(make_dropout(0.5), randomness="same")(inputs)
    assert len(different.unique(dim=0)) == 3
    assert len(same.unique(dim=0)) == 1


def test_dropout_in_place_is_torchs(taken):
    dropout, inputs = make_dropout(0.5), torch.ones(8)
    dropout.inplace = True
    assert dropout(inputs) is inputs
    assert not taken


def test_an_unknown_operation_has_no_kernels():
    with pytest.raises(KeyError):
        choose_kernel("convolve", "auto")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_under_autocast_reads_states_as_they_stand(dtype):
    norm = LayerNorm(64)
    nn.init.normal_(norm.weight, 1.0, 0.2)
    nn.init.normal_(norm.bias, 0.0, 0.2)
    states = (100 + 10 * torch.randn(8, 64)).to(dtype).requires_grad_()  # whose sums half precision would not hold
    expected = nn.functional.layer_norm(states.float(), (64,), norm.weight, norm.bias, norm.eps)
    assert_equal(norm(states.float()), expected)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(keep, lambda tensor: tensor):
        got = norm(states)
    assert got.dtype == torch.bfloat16
    assert [tensor.dtype for tensor in kept if tensor.shape == states.shape] == [dtype]
    torch.testing.assert_close(got.float(), expected, rtol=0.01, atol=0.02)
    upstream = torch.randn(8, 64)
    got.backward(upstream.to(torch.bfloat16))
    (gradient,) = torch.autograd.grad(expected, norm.weight, upstream)
    assert norm.weight.grad is not None
    torch.testing.assert_close(norm.weight.grad, gradient, rtol=0.01, atol=0.05)


def test_layer_norm_on_a_gpu_gives_its_operator_one_type(monkeypatch):
    given: list[torch.dtype] = []

    def layer_norm(states, shape, weight, bias, eps):
        given.extend(tensor.dtype for tensor in (states, weight, bias))
        return torch.empty_like(states)

    monkeypatch.setattr(nn.functional, "layer_norm", layer_norm)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    with FakeTensorMode():
        norm = LayerNorm(4, device="cuda").requires_grad_(False)
        for dtype in (torch.float32, torch.bfloat16):
            assert norm(torch.empty(2, 4, device="cuda", dtype=dtype)).dtype == torch.bfloat16
    assert given == [torch.float32] * 3 + [torch.bfloat16] * 3


def test_autocast_leaves_float64_as_it_is():
    model, batch = make_model(SKTformerModel), make_batch([16, 7]).inputs()
    expected = model(**batch).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(model(**batch).last_hidden_state, expected)


def test_a_layer_under_autocast_gives_its_products_what_they_read():
    model = make_model(SKTformerModel).float()
    given: dict[str, torch.dtype] = {}
    for name, module in model.encoder.layers[0].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs, name=name: given.update({name: inputs[0].dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**make_batch([16, 7]).inputs()).last_hidden_state
    assert given
    assert {*given.values()} == {torch.bfloat16}
    assert output.dtype == torch.float32  # what layers add to
