"""Exported graphs, ONNX files and compiled models: one graph for every batch and length, with the model's numbers."""

from typing import Any

import onnxruntime
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.export import Dim
from torch.testing._internal.two_tensor import TwoTensor

from modeling_sktformer import (
    SKTformerForMaskedLM,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForTokenClassification,
    SKTformerModel,
)
from modeling_sktformer.attention import SkeletonAttention
from modeling_sktformer.smoothing import ConvolutionStem
from support.builders import (
    PAIR_HEADS,
    VOCAB_SIZE,
    assert_equal,
    gradients,
    in_pairs,
    make_batch,
    make_model,
    token_outputs,
)


DYNAMIC = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in ("input_ids", "attention_mask", "token_type_ids")}


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    """The models of other tests share the code that is compiled, and its limit on compilations."""
    torch._dynamo.reset()


def batches_of(num_positions: int) -> list[dict[str, torch.Tensor]]:
    """Inputs of other batches and lengths than the example's, padded on every side; the longest and a short one."""
    return [
        make_batch([num_positions, 1, 7]).inputs("left"),
        make_batch([num_positions]).inputs(),
        make_batch([5, 9]).inputs("holes", 11),
        make_batch([2]).inputs("right", 2),
        make_batch([1, 1]).inputs(),
    ]


def make_traced(model_class, **overrides) -> nn.Module:
    """A model to be traced: what layers share, two classes show; the others have one, which takes half the time."""
    has_two = model_class in (SKTformerModel, SKTformerForSequenceClassification)
    return make_model(model_class, num_hidden_layers=2 if has_two else 1, **overrides)


def results_of(model_class, output) -> list[torch.Tensor]:
    return token_outputs(output) or [output.logits]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("model_class", [SKTformerForMaskedLM, SKTformerForSequenceClassification])
def test_a_trace_of_full_inputs_reads_masks(model_class):
    model = make_model(model_class, return_dict=False)
    example, padded = make_batch([12, 12]).inputs(), make_batch([12, 7])
    names = ("input_ids", "attention_mask")
    graph = torch.jit.trace(model, tuple(example[name] for name in names), check_trace=False)
    for side in ("right", "left", "holes"):
        inputs = padded.inputs(side)
        (actual,), (expected,) = (each(*(inputs[name] for name in names)) for each in (graph, model))
        kept = inputs["attention_mask"].bool() if actual.dim() == 3 else slice(None)
        assert_equal(actual[kept], expected[kept])


# What a file of ONNX shows below of the masked language model is not shown twice.
@pytest.mark.parametrize(
    ("model_class", "smoother_norm", "num_positions"),
    [
        (SKTformerModel, "batch_norm", 15),
        (SKTformerModel, "layer_norm", 16),
        (SKTformerForSequenceClassification, "batch_norm", 15),
        (SKTformerForTokenClassification, "batch_norm", 15),
        (SKTformerForQuestionAnswering, "batch_norm", 15),
    ],
)
def test_one_exported_graph_serves_every_batch_and_length(model_class, smoother_norm, num_positions):
    fields = {"smoother_norm": smoother_norm, "max_position_embeddings": num_positions, "chunk_size_feed_forward": 4}
    model = make_traced(model_class, **fields).eval()
    example = make_batch([12, 7, 3]).inputs("left", 13)
    graph = torch.export.export(model, (), example, dynamic_shapes=DYNAMIC).module()
    for inputs in batches_of(num_positions):
        outputs = zip(results_of(model_class, graph(**inputs)), results_of(model_class, model(**inputs)), strict=True)
        for actual, expected in outputs:
            assert_equal(actual, expected)


def note_samples(monkeypatch) -> list[bool]:
    """For every call of a layer's attention from here on, whether it computes the keys and values of all tokens."""
    sample, noted = SkeletonAttention._sample_columns, []

    def note(attention, hidden_states, key_and_value):
        noted.append(key_and_value is not None)
        return sample(attention, hidden_states, key_and_value)

    monkeypatch.setattr(SkeletonAttention, "_sample_columns", note)
    return noted


def test_keys_and_values_of_all_tokens_are_in_no_graph(monkeypatch):
    model = make_model(SKTformerModel, num_hidden_layers=1).eval()
    example = make_batch([12, 7, 3]).inputs("left", 13)
    expected, noted = model(**example).last_hidden_state, note_samples(monkeypatch)

    def check(actual: torch.Tensor) -> None:
        assert noted == [False] * len(model.encoder.layers)
        assert_equal(actual, expected)
        noted.clear()

    graph = torch.export.export(model, (), example, dynamic_shapes=DYNAMIC).module()
    check(graph(**example).last_hidden_state)
    check(torch.compile(model, backend="aot_eager", fullgraph=True)(**example).last_hidden_state)
    for layer in model.encoder.layers:
        layer.compile(backend="eager", fullgraph=True)
    check(model(**example).last_hidden_state)


def test_exports_call_projections_whose_weights_know_few_operations(monkeypatch):
    """As those of quantised models."""
    model, example = make_model(SKTformerModel).eval(), make_batch([12, 7, 3]).inputs()
    for layer in model.encoder.layers:
        for projection in (layer.attention.query, layer.attention.key, layer.attention.value):
            weight = projection.weight.detach()
            projection.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    noted = note_samples(monkeypatch)
    torch.export.export(model, (), example)
    assert noted
    assert all(noted)


def test_states_that_are_asked_for_compile_with_gradients_and_padding():
    """Whether they were moved, and so have gradients of their own, is not asked in a graph: one serves both sides."""
    model, batch = make_model(SKTformerForMaskedLM), make_batch([12, 7])
    options = {"output_hidden_states": True, "output_attentions": True}
    sides = [batch.inputs(side, 13) for side in ("right", "left")]
    # First the model as it is: transformers' hooks that note states are put on outside of graphs.
    expected = [model(**inputs, **options) for inputs in sides]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    graph = torch.export.export(model, (), {**sides[0], **options}).module()
    for number, (inputs, plain) in enumerate(zip(sides, expected, strict=True)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            output = compiled(**inputs, **options)
        assert output.logits.requires_grad
        assert_equal(output.logits, plain.logits)
        assert_equal(output.hidden_states, plain.hidden_states)
        assert_equal(output.attentions, plain.attentions)
        assert_equal(graph(**inputs, **options).attentions, plain.attentions)


def test_layers_compiled_alone_fold_as_the_plain_code_does(monkeypatch):
    model, folded = make_model(SKTformerModel).eval(), []
    forward_folded = ConvolutionStem.forward_folded

    def note(*args):
        folded.append(args)
        return forward_folded(*args)

    monkeypatch.setattr(ConvolutionStem, "forward_folded", note)
    batch = make_batch([16] * 400).inputs()
    expected = model(**batch).last_hidden_state
    assert len(folded) == model.config.num_hidden_layers
    for layer in model.encoder.layers:
        layer.compile(backend="eager", fullgraph=True)
    assert_equal(model(**batch).last_hidden_state, expected)
    assert len(folded) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize(("model_class", "pooling"), [*zip(PAIR_HEADS, ["mean_std", "layers"], strict=True)])
def test_heads_of_pairs_export(model_class, pooling):
    model = make_traced(model_class, classifier_pooling=pooling).eval()
    pairs = in_pairs(make_batch([12, 7, 3, 5]).inputs("left", 13))
    dynamic = {name: {0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for name in pairs}
    graph = torch.export.export(model, (), pairs, dynamic_shapes=dynamic).module()
    longer = in_pairs(make_batch([9, 1, 16, 2, 4, 5]).inputs())
    assert_equal(graph(**longer).logits, model(**longer).logits)


@pytest.mark.parametrize(
    ("model_class", "smoother_norm", "num_positions"),
    [(SKTformerForMaskedLM, "layer_norm", 16), (SKTformerForSequenceClassification, "batch_norm", 15)],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_has_the_same_numbers(model_class, smoother_norm, num_positions, tmp_path):
    overrides = {"smoother_norm": smoother_norm, "max_position_embeddings": num_positions}
    model = make_traced(model_class, classifier_pooling="layers", **overrides).float().eval()
    example = make_batch([12, 7, 3]).inputs("left", 13)
    path = tmp_path / "model.onnx"
    options: dict[str, Any] = {"dynamic_shapes": DYNAMIC, "output_names": ["logits"], "dynamo": True}
    torch.onnx.export(model, (), str(path), kwargs=example, verbose=False, **options)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert {entry.name for entry in session.get_inputs()} == set(example)
    assert [entry.name for entry in session.get_outputs()] == ["logits"]
    for inputs in batches_of(num_positions):
        (logits,) = session.run(None, {name: values.numpy() for name, values in inputs.items()})
        with torch.no_grad():
            expected = model(**inputs).logits
        if model_class is SKTformerForMaskedLM:
            real = inputs["attention_mask"].bool()
            torch.testing.assert_close(torch.from_numpy(logits)[real], expected[real], rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "model_class",
    [
        SKTformerForMaskedLM,
        SKTformerForSequenceClassification,
        *(pytest.param(head, marks=pytest.mark.slow) for head in PAIR_HEADS),
    ],
)
# The number of labelled positions depends on the data: that it may stay in the graph has to be asked for. Floats of
# modules are no inputs of the graph: PyTorch notices late that they cannot be, and traces all of it a second time.
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, specialize_float=True)
def test_compiles_without_a_graph_break_for_every_length(model_class):
    model = make_traced(model_class, classifier_pooling="layers").train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    # Of pairs there are more than two: PyTorch takes batches of one, and as large as another axis, for other graphs.
    for number, lengths in enumerate(([12, 7, 3, 9, 2, 6], [16, 9, 1, 3, 8, 2, 7, 5], [5, 2, 4, 1, 3, 3])):
        batch = make_batch(lengths)
        results = []
        # First the model as it is: transformers' hooks that note states are put on outside of graphs.
        for forward in (model, compiled):
            model.zero_grad()
            inputs = batch.inputs("left")
            inputs = in_pairs(inputs) if model_class in PAIR_HEADS else inputs
            with torch._dynamo.config.patch(error_on_recompile=number > 0):  # one graph serves all
                output = forward(**inputs, **batch.labels(model_class, "left"))
            output.loss.backward()
            results.append((output.loss, gradients(model)))
        (expected_loss, expected), (loss, actual) = results
        assert_equal(loss, expected_loss)
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_equal(actual[name], expected[name], name)


def test_labelled_positions_leave_no_graph_break_without_sparse_prediction():
    model = make_traced(SKTformerForMaskedLM, sparse_prediction=False).train()
    batch = make_batch([12, 7])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(**batch.inputs(), **batch.labels(SKTformerForMaskedLM))
    assert output.logits.shape == (2, 12, VOCAB_SIZE)
    assert_equal(output.loss, model(**batch.inputs(), **batch.labels(SKTformerForMaskedLM)).loss)
