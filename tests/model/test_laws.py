"""What holds for every model, head and padding; in float64."""

import copy
import itertools
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import BertTokenizer

from modeling_sktformer import (
    SKTformerForMaskedLM,
    SKTformerForMultipleChoice,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForTokenClassification,
    SKTformerModel,
    circle,
)
from modeling_sktformer.circle import Circle
from modeling_sktformer.lengthening import extend_positions, resize_order
from modeling_sktformer.losses import classification_loss, find_problem_type
from modeling_sktformer.position_batch_norm import PositionBatchNorm
from modeling_sktformer.sequences import Landmarks, Sequences, draw_permutation, select_landmarks
from support.builders import (
    HEADS,
    MODELS,
    PAIR_HEADS,
    VOCAB_SIZE,
    Batch,
    assert_equal,
    call,
    gradients,
    in_pairs,
    make_batch,
    make_config,
    make_model,
    token_outputs,
)


all_models = pytest.mark.parametrize("model_class", MODELS, ids=lambda c: c.__name__)
all_heads = pytest.mark.parametrize("model_class", HEADS, ids=lambda c: c.__name__)
both_norms = pytest.mark.parametrize("smoother_norm", ["batch_norm", "layer_norm"])
SMOOTHERS: list[dict[str, Any]] = [
    {"smoother_norm": "batch_norm"},
    {"smoother_norm": "layer_norm"},
    {"smoother_norm": "layer_norm", "use_smoother_residual": True, "smoother_activation": "silu"},
    {"smoother_norm": "layer_norm", "use_smoother_residual": True, "use_residual_gate": True},
]
_NAMES = ["batch_norm", "layer_norm", "residual", "gate"]
all_smoothers = pytest.mark.parametrize("smoother", SMOOTHERS, ids=_NAMES)
both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def with_smoothers(first: type, others: Sequence[type]) -> pytest.MarkDecorator:
    """One class with every smoother, which are the encoder's, the others with that of the paper."""
    cases = [(first, *case) for case in zip(SMOOTHERS, _NAMES, strict=True)]
    cases += [(other, SMOOTHERS[0], _NAMES[0]) for other in others]
    named = [pytest.param(c, smoother, id=f"{c.__name__}-{name}") for c, smoother, name in cases]
    return pytest.mark.parametrize(("model_class", "smoother"), named)


def outcome(model, batch: Batch, side: str, width: int):
    """Loss, gradients and the outputs at real tokens (or of the whole sequence) for one way to pad a batch."""
    model.zero_grad()
    inputs, labels = batch.inputs(side, width), batch.labels(type(model), side, width)
    output = call(model, inputs, **labels)
    places = batch.places(side, width)
    rows = [values[row, place] for values in token_outputs(output) for row, place in enumerate(places)]
    if not rows:
        rows = [output.logits]
    if isinstance(model, SKTformerForMaskedLM) and model.training:
        # The rows of sparse logits follow the places in the tensor, which holes do not reorder.
        rows = [output.logits]
    loss = torch.stack([row.square().sum() for row in rows]).sum() if "loss" not in output else output.loss
    loss.backward()
    return loss.detach(), [row.detach() for row in rows], gradients(model)


@both_modes
@with_smoothers(SKTformerModel, HEADS)
def test_padding_changes_nothing(model_class, smoother, training):
    check_padding(make_model(model_class, **smoother).train(training))


@both_modes
@pytest.mark.parametrize("pooling", ["mean", "mean_std", "layers"])
@pytest.mark.parametrize("model_class", [SKTformerForSequenceClassification, *PAIR_HEADS], ids=lambda c: c.__name__)
def test_padding_is_not_pooled(model_class, pooling, training):
    check_padding(make_model(model_class, classifier_pooling=pooling).train(training))


def check_padding(model):
    batch = make_batch([12, 1, 7, 3])
    loss, rows, grads = outcome(model, batch, "right", 12)
    assert grads
    for side, width in itertools.product(["right", "left", "holes"], [12, 13, 16]):
        other_loss, other_rows, other_grads = outcome(model, batch, side, width)
        assert_equal(other_loss, loss)
        assert_equal(other_rows, rows)
        assert_equal(other_grads, grads)


@all_models
def test_padding_to_full_mask_equals_no_mask(model_class):
    model = make_model(model_class)
    batch = make_batch([9, 9])
    inputs = batch.inputs()
    labels = batch.labels(model_class)
    expected = call(model, {k: v for k, v in inputs.items() if k != "attention_mask"}, **labels)
    for mask in (inputs["attention_mask"], inputs["attention_mask"].bool(), inputs["attention_mask"].double()):
        got = call(model, {**inputs, "attention_mask": mask}, **labels)
        assert_equal(dict(got), dict(expected))


@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_captured_states_come_back_in_the_order_of_the_input(side):
    model = make_model(SKTformerModel)
    batch = make_batch([12, 5])
    alone = [
        model(
            **Batch([batch.sequences[i]], [batch.token_types[i]]).inputs(),
            output_hidden_states=True,
            output_attentions=True,
        )
        for i in range(2)
    ]
    got = model(**batch.inputs(side, 14), output_hidden_states=True, output_attentions=True)
    assert len(got.hidden_states) == 3
    assert len(got.attentions) == 2
    for row, place in enumerate(batch.places(side, 14)):
        for states, expected in zip(got.hidden_states, alone[row].hidden_states, strict=True):
            assert_equal(states[row, place], expected[0])
        for states, expected in zip(got.attentions, alone[row].attentions, strict=True):
            assert_equal(states[row][:, place], expected[0])


@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_landmarks_of_attentions_can_be_found_in_the_input(side):
    model = make_model(SKTformerModel)
    batch = make_batch([16, 9, 3])
    output = model(**batch.inputs(side, 16), output_attentions=True, output_feature_attentions=True)
    places = batch.places(side, 16)
    for layer, positions in enumerate(output.landmark_positions):
        order = model.encoder.layers[layer].attention.landmark_order.tolist()
        for row, tokens in enumerate(places):
            expected = [int(tokens[place]) for place in order if place < len(tokens)][:5]
            assert positions[row].tolist() == expected + [-1] * (5 - len(expected))
        assert output.attentions[layer][2][..., len(places[2]) :].eq(0).all()
        assert output.feature_attentions[layer].shape == (3, 2, 6, 4)
    assert "landmark_positions" not in model(**batch.inputs(side, 16))
    plain = model(batch.inputs("right", 16)["input_ids"], output_attentions=True)
    assert [positions.shape for positions in plain.landmark_positions] == [(3, 5)] * 2


@all_heads
def test_heads_pass_on_what_the_encoder_is_asked_for(model_class):
    model = make_model(model_class)
    inputs = make_batch([16, 9]).inputs("left", 16)
    inputs = in_pairs(inputs) if model_class in PAIR_HEADS else inputs
    output = model(**inputs, output_attentions=True, output_feature_attentions=True)
    assert [matrices.shape for matrices in output.feature_attentions] == [(2, 2, 6, 4)] * 2
    assert [positions.shape for positions in output.landmark_positions] == [(2, 5)] * 2
    assert {"landmark_positions", "feature_attentions"}.isdisjoint(model(**inputs))
    leaves, structure = tree_flatten(output)  # as data parallelism and graphs do
    assert_equal(dict(tree_unflatten(leaves, structure)), dict(output))


@pytest.mark.parametrize("kept", [(0, 1), (0, 3), (2,)])
def test_layers_keep_their_samples_where_others_are_taken_away(kept, tmp_path):
    model, inputs = make_model(SKTformerModel, num_hidden_layers=4), make_batch([16, 7]).inputs()
    sequences = Sequences.from_mask(16, None, torch.float64)
    states = model.embeddings(inputs["input_ids"], None, None, None)
    plain = {"input_ids": inputs["input_ids"]}
    for number in kept:
        states = model.encoder.layers[number](states, sequences, Circle(16))
    expected = model.encoder.final_norm(states)
    model.encoder.layers = torch.nn.ModuleList(model.encoder.layers[number] for number in kept)
    model.config.num_hidden_layers = len(kept)
    torch.testing.assert_close(model(**plain).last_hidden_state, expected, rtol=0, atol=1e-9)
    positions = model(**plain, output_attentions=True).landmark_positions
    orders = [layer.attention.landmark_order[:5] for layer in model.encoder.layers]
    assert_equal(positions, [order.expand(2, -1) for order in orders])
    model.save_pretrained(tmp_path)
    assert_equal(SKTformerModel.from_pretrained(tmp_path)(**inputs)[0], model(**inputs)[0])


def test_the_first_layers_of_a_checkpoint_make_a_model(tmp_path):
    teacher = make_model(SKTformerModel, num_hidden_layers=3)
    teacher.resize_position_embeddings(24)  # whose samples are not those of a new model
    teacher.save_pretrained(tmp_path)
    student = SKTformerModel.from_pretrained(tmp_path, num_hidden_layers=2)
    made = SKTformerModel(copy.deepcopy(student.config)).double().eval()
    made.load_state_dict(teacher.state_dict(), strict=False)
    inputs = make_batch([24, 7]).inputs()
    teacher.encoder.layers = teacher.encoder.layers[:2]
    expected = teacher(**inputs)[0]
    assert_equal([student(**inputs)[0], made(**inputs)[0]], [expected, expected])


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9, 0.9995])
def test_averaged_checkpoints_keep_their_samples(share, tmp_path):
    model = make_model(SKTformerModel)
    weights, inputs = model.state_dict(), make_batch([16, 7]).inputs()
    before = model(**inputs)[0]
    averaged = {name: share * value + (1 - share) * value for name, value in weights.items()}
    order = averaged["encoder.layers.0.attention.landmark_order"]
    assert torch.equal(order, order.round()) == (share == 0.3)
    model.load_state_dict(averaged)
    torch.testing.assert_close(model(**inputs)[0], before, rtol=0, atol=1e-9)
    model.save_pretrained(tmp_path, state_dict={name: value.contiguous() for name, value in averaged.items()})
    refused = pytest.raises(ValueError, match=r"landmark_order. is no permutation: averages")
    with nullcontext() if share == 0.3 else refused:
        assert_equal(SKTformerModel.from_pretrained(tmp_path, dtype=torch.float64)(**inputs)[0], before)


def test_position_ids_and_embeddings_move_with_their_tokens():
    model = make_model(SKTformerModel)
    batch = make_batch([12, 5])
    position_ids = torch.tensor([[15 - p for p in range(12)], [3, 4, 8, 9, 2] + [0] * 7])
    inputs = batch.inputs("right", 12)
    expected = model(**inputs, position_ids=position_ids).last_hidden_state
    left = batch.inputs("left", 12)
    moved = torch.stack([position_ids[0], position_ids[1].roll(7)])
    got = model(**left, position_ids=moved).last_hidden_state
    assert_equal(got[0], expected[0])
    assert_equal(got[1, 7:], expected[1, :5])
    embeds = model.get_input_embeddings()(left.pop("input_ids"))
    got = model(**left, inputs_embeds=embeds, position_ids=moved).last_hidden_state
    assert_equal(got[1, 7:], expected[1, :5])


@pytest.mark.parametrize("side", ["left", "right"])
def test_question_answering_never_points_at_padding(side):
    model = make_model(SKTformerForQuestionAnswering)
    with torch.no_grad():
        model.qa_outputs.bias.fill_(-1e6)
    batch = make_batch([12, 5])
    output = model(**batch.inputs(side, 16))
    for logits in (output.start_logits, output.end_logits):
        for row, place in enumerate(batch.places(side, 16)):
            assert logits[row].argmax() in place


@all_models
@both_norms
def test_a_sequence_does_not_depend_on_the_others_in_evaluation(model_class, smoother_norm):
    model = make_model(model_class, smoother_norm=smoother_norm)
    batch = make_batch([16, 2, 9, 5])
    together = call(model, batch.inputs())
    step = 2 if model_class in PAIR_HEADS else 1
    for first in range(0, 4, step):
        part = slice(first, first + step)
        alone = call(model, Batch(batch.sequences[part], batch.token_types[part]).inputs())
        if tokens := token_outputs(alone):
            length = len(batch.sequences[first])
            for values, expected in zip(token_outputs(together), tokens, strict=True):
                assert_equal(values[first, :length], expected[0])
        else:
            row = first // step
            assert_equal(together.logits[row : row + 1], alone.logits)


@pytest.mark.parametrize(("smoother_norm", "coupled"), [("layer_norm", False), ("batch_norm", True)])
def test_only_batch_norm_couples_sequences_in_training(smoother_norm, coupled):
    model = make_model(SKTformerModel, smoother_norm=smoother_norm).train()
    inputs = make_batch([16, 16]).inputs()
    embeds = torch.randn(2, 16, 12, dtype=torch.float64, requires_grad=True)
    output = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).last_hidden_state
    (gradient,) = torch.autograd.grad(output[0].square().sum(), embeds)
    assert bool(gradient[1].any()) == coupled


@pytest.mark.parametrize("length", [1, 2, 3, 7, 15, 16, 17])
@all_models
def test_any_length_up_to_the_longest(model_class, length):
    model = make_model(model_class)
    batch = make_batch([length, length])
    if length > 16:
        with pytest.raises(ValueError, match=r"17 tokens.*max_position_embeddings=16.*resize_position_embeddings\(17"):
            call(model, batch.inputs())
    else:
        output = call(model, batch.inputs())
        assert all(values.shape[1] == length and values.isfinite().all() for values in token_outputs(output))


@pytest.mark.parametrize("length", [1, 63, 100, 127, 511, 512])
def test_no_length_is_special_at_the_default_size(length):
    torch.manual_seed(0)
    config = make_config(max_position_embeddings=512, num_landmark_tokens=8)
    model = SKTformerModel(config).double().eval()
    tokens = torch.randint(VOCAB_SIZE, (2, length))
    expected = model(tokens).last_hidden_state
    padded = torch.nn.functional.pad(tokens, (512 - length, 0))
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (512 - length, 0))
    got = model(padded, attention_mask=mask).last_hidden_state[:, 512 - length :]
    assert_equal(got, expected)


def landmarks_of(order: torch.Tensor, num_landmarks: int, length: int, mask: torch.Tensor | None) -> Landmarks:
    """The landmarks of a single layer."""
    sequences = Sequences.from_mask(length, mask, torch.float64)
    return select_landmarks(order, num_landmarks, sequences)


def test_full_sample_is_full_attention():
    model = make_model(SKTformerModel, num_landmark_tokens=16, use_feature_attention=False, num_hidden_layers=1)
    attention = model.encoder.layers[0].attention
    states = torch.randn(3, 16, 12, dtype=torch.float64)
    mask = torch.arange(16) < torch.tensor([16, 9, 1])[:, None]
    query, key, value = (
        layer(states).unflatten(-1, (2, 6)).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask[:, None, None])
    expected = attention.out_proj(attention.token_norm(attended.transpose(1, 2).flatten(2)))
    sequences = Sequences.from_mask(16, mask, torch.float64)
    got, probabilities, _ = attention(states, sequences)
    assert_equal(got, expected)
    assert probabilities.shape == (3, 2, 16, 16)


@pytest.mark.parametrize("length", [16, 11])
def test_landmarks_are_a_uniform_sample_of_real_tokens(length):
    counts = torch.zeros(16)
    for seed in range(600):
        order = draw_permutation(16, seed, 0, "landmark_order")
        mask = (torch.arange(16) < length).unsqueeze(0)
        positions, valid = landmarks_of(order, 4, 16, mask)
        assert valid is not None
        assert valid.all()
        assert len(positions.unique()) == 4
        assert positions.max() < length
        counts[positions[0]] += 1
        short, _ = landmarks_of(order, 4, length, None)
        assert short.tolist() == positions[0].tolist()
    # Each token is drawn with probability 4 / length; five standard deviations.
    expected = 600 * 4 / length
    assert (counts[:length] - expected).abs().max() < 5 * math.sqrt(expected)


def test_a_full_sequence_gets_the_front_of_the_permutation():
    order = draw_permutation(100, 3, 1, "landmark_order")
    positions, _ = landmarks_of(order, 8, 100, None)
    assert positions.tolist() == order[:8].tolist()


def test_short_sequences_have_fewer_landmarks():
    order = draw_permutation(16, 0, 0, "landmark_order")
    mask = torch.arange(16) < torch.tensor([0, 3, 16])[:, None]
    positions, valid = landmarks_of(order, 5, 16, mask)
    assert valid is not None
    assert valid.sum(dim=1).tolist() == [0, 3, 5]
    assert sorted(positions[1, :3].tolist()) == [0, 1, 2]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@with_smoothers(HEADS[0], HEADS[1:])
def test_a_fully_padded_row_is_finite(model_class, smoother, attention, training):
    model = make_model(model_class, **smoother).train(training)
    model.set_attn_implementation(attention)
    batch = make_batch([9, 0, 0, 4])
    loss, _, grads = outcome(model, batch, "right", 12)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in grads.values())
    output = call(model, batch.inputs(width=12))
    assert all(values.isfinite().all() for values in output.values())


def test_a_batch_without_any_token_is_finite():
    model = make_model(SKTformerForMaskedLM).train()
    ids = torch.zeros(2, 5, dtype=torch.long)
    output = model(ids, attention_mask=torch.zeros_like(ids), labels=torch.full_like(ids, -100))
    output.loss.backward()
    assert output.loss == 0
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_batch_norm_skips_positions_without_a_token():
    norm = PositionBatchNorm(make_config()).double().train()
    states = torch.randn(2, 6, 12, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([4, 2])[:, None]
    norm(states, Sequences.from_mask(6, mask, torch.float64))
    assert norm.running_mean[:4].all()
    assert not norm.running_mean[4:].any()
    assert (norm.running_var[4:] == 1).all()
    values = states[:, 1].flatten()
    torch.testing.assert_close(norm.running_mean[1], 0.1 * values.mean())
    torch.testing.assert_close(norm.running_var[1], 0.9 + 0.1 * values.var())
    torch.testing.assert_close(norm.running_var[3], 0.9 + 0.1 * states[0, 3].var())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_batch_norm_measures_half_precision_in_float32(dtype, padded):
    norm, exact = PositionBatchNorm(make_config()).train(), PositionBatchNorm(make_config()).double().train()
    states = (8 + torch.randn(3, 6, 12)).to(dtype)
    sequences = Sequences.from_mask(6, torch.ones(3, 6, dtype=torch.bool) if padded else None, dtype)
    outputs, expected = norm(states, sequences), exact(states.double(), sequences)
    assert outputs.dtype == dtype
    torch.testing.assert_close(outputs.double(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    for name, statistic in norm.named_buffers():
        torch.testing.assert_close(statistic.double(), exact.get_buffer(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("model_class", [SKTformerForMaskedLM, SKTformerForSequenceClassification])
def test_gradient_checkpointing_changes_neither_gradients_nor_statistics(model_class, use_reentrant):
    batch = make_batch([12, 7])
    results = []
    for checkpointing in (False, True):
        model = make_model(model_class, classifier_pooling="layers").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        _, _, grads = outcome(model, batch, "left", 14)
        results.append((grads, {k: v for k, v in model.state_dict().items() if "running" in k}))
    (plain_gradients, plain_statistics), (gradients_, statistics) = results
    assert_equal(gradients_, plain_gradients)
    assert plain_statistics
    assert_equal(statistics, plain_statistics)


def test_sparse_prediction_changes_neither_loss_nor_gradients():
    batch = make_batch([12, 7])
    results = []
    for sparse in (True, False):
        model = make_model(SKTformerForMaskedLM, sparse_prediction=sparse).train()
        output = model(**batch.inputs(), **batch.labels(SKTformerForMaskedLM))
        output.loss.backward()
        results.append((output.loss.detach(), gradients(model), output.logits.dim()))
    assert_equal(results[0][:2], results[1][:2])
    assert [result[2] for result in results] == [2, 3]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(2, 7), (1, 12), (12, 2), (24,), (2, 12, 1)])
@pytest.mark.parametrize("model_class", [SKTformerForMaskedLM, SKTformerForTokenClassification])
def test_labels_of_other_tokens_are_refused(model_class, shape, training):
    model = make_model(model_class).train(training)
    with pytest.raises(ValueError, match=re.escape(f"`labels` have shape {shape}, expected (2, 12).")):
        model(**make_batch([12, 7]).inputs(), labels=torch.ones(shape, dtype=torch.long))


def test_rows_of_choices_may_share_positions_and_types():
    model, inputs = make_model(SKTformerForMultipleChoice), in_pairs(make_batch([12, 7, 4, 9]).inputs("left"))
    shared = {"position_ids": torch.arange(12).flip(0)[None], "token_type_ids": torch.ones(1, 12, dtype=torch.long)}
    expected = model(**inputs | {name: values.expand(2, 2, -1) for name, values in shared.items()}).logits
    assert_equal(model(**inputs | shared).logits, expected)
    for wrong in ({"input_ids": torch.ones(2, 9).long()}, {"inputs_embeds": torch.zeros(2, 7, 12).double()}):
        with pytest.raises(ValueError, match=r"reads \(batch_size, num_choices, sequence_length"):
            model(**wrong)
    with pytest.raises(ValueError, match=r"`attention_mask` has shape \(4, 12\), this model reads"):
        model(inputs["input_ids"], attention_mask=inputs["attention_mask"].flatten(0, 1))


def test_labelled_tokens_are_looked_for_once():
    """Every search waits for the device."""
    model = make_model(SKTformerForMaskedLM, sparse_prediction=True).train()
    batch = make_batch([12, 7])
    with profile() as profiler:
        model(**batch.inputs(), **batch.labels(SKTformerForMaskedLM)).loss.backward()
    assert {event.key: event.count for event in profiler.key_averages()}["aten::nonzero"] == 1


@all_heads
def test_a_loss_function_that_is_set_is_taken(model_class):
    model, batch = make_model(model_class).train(), make_batch([12, 7])
    inputs, labels = batch.inputs(), batch.labels(model_class)
    calls = []

    def measure(logits, labels, num_items_in_batch=None, **options):
        calls.append((logits, labels, num_items_in_batch))
        return 7 * logits.sum()

    def measure_span(start_logits, end_logits, start_positions, end_positions):
        return 3.5 * (start_logits + end_logits).sum()

    usual = call(model, inputs, **labels).loss
    model.loss_function = measure_span if model_class is SKTformerForQuestionAnswering else measure
    output = call(model, inputs, **labels, num_items_in_batch=5)
    if model_class is SKTformerForQuestionAnswering:
        assert_equal(output.loss, 3.5 * (output.start_logits + output.end_logits).sum())
    else:
        assert_equal(output.loss, 7 * output.logits.sum())
        assert [num_items for *_, num_items in calls] == [5]
    assert output.loss != usual


@pytest.mark.parametrize("model_class", [h for h in HEADS if h not in PAIR_HEADS], ids=lambda c: c.__name__)
def test_the_loss_function_of_transformers_can_be_set(model_class):
    model, batch = make_model(model_class).train(), make_batch([12, 7])
    inputs, labels = batch.inputs(), batch.labels(model_class)
    own = call(model, inputs, **labels).loss
    model.loss_function = None
    assert_equal(call(model, inputs, **labels).loss, own)
    model.loss_function = model.loss_function
    torch.testing.assert_close(call(model, inputs, **labels).loss.double(), own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "model_class", [h for h in HEADS if h is not SKTformerForQuestionAnswering], ids=lambda c: c.__name__
)
def test_accumulated_losses_add_up_to_the_loss_of_the_whole_batch(model_class):
    model = make_model(model_class, smoother_norm="layer_norm").train()
    batch = make_batch([12, 7, 9, 3])
    inputs, labels = batch.inputs(), batch.labels(model_class)
    whole = call(model, inputs, **labels).loss
    num_items = (labels["labels"] != -100).sum()
    parts = []
    for part in (slice(0, 2), slice(2, 4)):
        rows = slice(part.start // 2, part.stop // 2) if model_class in PAIR_HEADS else part
        parts.append(
            call(
                model,
                {name: values[part] for name, values in inputs.items()},
                labels=labels["labels"][rows],
                num_items_in_batch=num_items,
            ).loss
        )
    assert_equal(sum(parts), whole)


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_accumulated_losses_of_numbers_and_of_several_labels_add_up(problem_type):
    logits, labels = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    whole = classification_loss(logits, labels, problem_type)
    rows = slice(0, 1), slice(1, 4)
    parts = [classification_loss(logits[part], labels[part], problem_type, labels.numel()) for part in rows]
    assert_equal(sum(parts), whole)


def test_labels_that_are_not_known_train_nothing():
    """As the Trainer counts them: -100 is no target."""
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.rand(4, 3, dtype=torch.float64).round()
    unknown = torch.arange(12).view(4, 3) % 3 == 1
    loss = classification_loss(logits, labels.masked_fill(unknown, -100), "multi_label_classification")
    assert_equal(loss, torch.nn.functional.binary_cross_entropy_with_logits(logits[~unknown], labels[~unknown]))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[unknown].any()
    assert gradient[~unknown].all()
    nothing = classification_loss(logits, torch.full((4, 3), -100.0), "multi_label_classification")
    assert nothing.item() == 0


@pytest.mark.parametrize("folded", [False, True], ids=["direct", "folded"])
@all_smoothers
def test_no_tensor_grows_with_the_square_of_the_length(smoother, folded, monkeypatch):
    """Every intermediate result of a forward and backward pass grows no faster than the length."""
    monkeypatch.setattr(circle, "count_multiply_adds", lambda *sizes: (folded, not folded))

    class LargestTensor(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor):
                    self.numel = max(self.numel, value.numel())
            return result

    largest = {}
    for length in (256, 512, 1024, 4096):
        config = make_config(max_position_embeddings=length, num_hidden_layers=1, **smoother)
        model = SKTformerForMaskedLM(config).train()
        ids = torch.randint(VOCAB_SIZE, (2, length))
        mask = torch.ones_like(ids)
        mask[1, length // 2 :] = 0
        with LargestTensor() as watch:
            model(ids, attention_mask=mask, labels=ids).loss.backward()
        largest[length] = watch.numel / length
    if folded:  # short transforms are products with waves, two for each frequency's real and imaginary part
        assert [largest[length] for length in (256, 512)] == [2 * 258, 2 * 514]
        assert largest[4096] <= 1.02 * largest[1024]
    else:
        assert largest[4096] <= 1.02 * largest[256]


class NeverWait(TorchDispatchMode):
    """Refuses what makes a host wait for the meta device, as for any: asking for a value, bringing one there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        devices = {value.device for value in (*args, result) if isinstance(value, torch.Tensor)}
        brought = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and len(devices) > 1
        if brought or func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default):
            raise AssertionError(f"{func} waits for the device")
        return result


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("model_class", "folded"),
    [pytest.param(HEADS[0], False, id="direct"), *(pytest.param(c, True, id=f"{c.__name__}-folded") for c in HEADS)],
)
def test_no_step_waits_for_its_device(model_class, masked, folded, monkeypatch):
    """But where labelled tokens are looked for."""
    monkeypatch.setattr(circle, "count_multiply_adds", lambda *sizes: (folded, not folded))
    model = make_model(model_class, sparse_prediction=False).to("meta").train()
    batch = make_batch([12, 7])
    inputs, labels = (
        {name: values.to("meta") for name, values in fields.items()}
        for fields in (batch.inputs(), batch.labels(model_class))
    )
    if not masked:
        del inputs["attention_mask"]
    num_items = {} if model_class is SKTformerForQuestionAnswering else {"num_items_in_batch": 4}
    monkeypatch.delattr(torch, "tensor")  # which brings values to a device, and on this one shows no mode
    with NeverWait():
        for keywords in ({}, num_items):
            call(model, inputs, **labels, **keywords).loss.backward()
        with torch.no_grad():
            call(model, inputs, output_hidden_states=True, output_attentions=True, output_feature_attentions=True)


@pytest.mark.parametrize("labels", [torch.zeros(2, 3), torch.zeros(2, 1)], ids=["several", "regression"])
def test_losses_of_numbers_do_not_wait_for_their_device(labels):
    logits = torch.zeros_like(labels, device="meta", requires_grad=True)
    labels = labels.to("meta")
    with NeverWait():
        for num_items in (None, 2):
            classification_loss(logits, labels, find_problem_type(logits, labels), num_items).backward()


@pytest.mark.parametrize(
    ("shape", "problem", "others"),
    [
        ((2, 3), "multi_label_classification", [(3, 2), (6,), (2, 1), (2,)]),
        ((2, 1), "regression", [(1, 2), (4,), ()]),
        ((2, 3), "single_label_classification", [(1, 2), (2, 3), (3,), ()]),
    ],
)
def test_labels_of_another_shape_are_refused_where_they_have_as_many_values(shape, problem, others):
    logits = torch.zeros(shape)
    fitting = [shape] if problem.startswith("multi") else [(2,), (2, 1)]
    dtype = torch.long if problem.startswith("single") else torch.float
    for labels in fitting:
        assert classification_loss(logits, torch.zeros(labels, dtype=dtype), problem).isfinite()
    assert classification_loss(logits[:1, :1], torch.tensor(1.0), "regression") == 1
    for labels in others:
        with pytest.raises(ValueError, match=rf"labels of shape {re.escape(str(labels))} and type .* do not fit"):
            classification_loss(logits, torch.zeros(labels, dtype=dtype), problem)


@pytest.mark.parametrize("extension", ["tile", "last"])
@all_smoothers
@pytest.mark.parametrize(("old", "new"), [(16, 32), (16, 17), (15, 32), (16, 12), (15, 11), (13, 64)])
def test_lengthening_keeps_short_inputs(old, new, smoother, extension):
    model = make_model(SKTformerForMaskedLM, max_position_embeddings=old, **smoother)
    check_lengthening(model, new, extension, longest=min(old, new) // 2)


def test_lengthening_without_filters_keeps_all_inputs():
    """There is no circle that was closed behind the last position."""
    model = make_model(SKTformerForMaskedLM, max_position_embeddings=16, use_fourier_convolution=False)
    check_lengthening(model, 33, "tile", longest=16)


def check_lengthening(model, new, extension, longest):
    batch = make_batch([longest, 3, 1])
    inputs = batch.inputs()
    expected = model(**inputs).logits
    model.resize_position_embeddings(new, extension)
    assert model.config.max_position_embeddings == new
    for row, length in enumerate([longest, 3, 1]):
        assert_equal(model(**inputs).logits[row, :length], expected[row, :length])
    assert model(torch.ones(1, new, dtype=torch.long)).logits.isfinite().all()


def test_new_positions_enter_the_order_at_random():
    following = 0
    for seed in range(300):
        model = SKTformerModel(make_config(num_hidden_layers=1, landmark_seed=seed))
        model.resize_position_embeddings(32)
        order = model.state_dict()["encoder.layers.0.attention.landmark_order"].tolist()
        assert sorted(order) == list(range(32))
        following += order[0] >= 16 and order[1] == order[0] - 16
    # By chance in 1 of 62 models; five standard deviations above.
    assert following < 300 / 62 + 5 * math.sqrt(300 / 62)


def test_lengthened_model_trains_and_saves_and_loads(tmp_path):
    model = make_model(SKTformerForMaskedLM)
    model.resize_position_embeddings(40)
    model.save_pretrained(tmp_path)
    loaded = SKTformerForMaskedLM.from_pretrained(tmp_path)
    batch = make_batch([40, 11])
    assert_equal(loaded(**batch.inputs()).logits, model(**batch.inputs()).logits)
    model.train()
    outcome(model, batch, "right", 40)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_lengthening_there_and_back_is_the_same_model():
    model = make_model(SKTformerForMaskedLM)
    inputs = make_batch([16, 9]).inputs()
    before = model(**inputs).logits
    layers: Any = model.sktformer.encoder.layers
    orders = [layer.attention.landmark_order.clone() for layer in layers]
    model.resize_position_embeddings(24)
    model.resize_position_embeddings(16)
    assert_equal([layer.attention.landmark_order for layer in layers], orders)
    assert_equal(model(**inputs).logits, before)


def test_model_and_tokenizer_are_lengthened_together(tmp_path):
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"])}
    tokenizer = BertTokenizer(vocab=vocabulary, model_max_length=16)
    model = make_model(SKTformerForSequenceClassification)
    model.resize_position_embeddings(64, tokenizer=tokenizer)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path)
    loaded = BertTokenizer.from_pretrained(tmp_path)
    inputs = loaded("word " * 50, truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == 52
    model = SKTformerForSequenceClassification.from_pretrained(tmp_path)
    assert model(**inputs).logits.isfinite().all()
    assert model.config.max_position_embeddings == loaded.model_max_length == 64


def test_models_of_one_configuration_are_lengthened_apart(tmp_path):
    config = make_config()
    lengthened, other = SKTformerForMaskedLM(config), SKTformerForMaskedLM(config)
    lengthened.resize_position_embeddings(32)
    assert lengthened.config is lengthened.sktformer.config
    assert (lengthened.config.max_position_embeddings, config.max_position_embeddings) == (32, 16)
    with pytest.raises(ValueError, match="17 tokens"):
        other(torch.ones(1, 17, dtype=torch.long))
    for name, model in (("lengthened", lengthened), ("other", other)):
        model.save_pretrained(tmp_path / name)
        loaded = SKTformerForMaskedLM.from_pretrained(tmp_path / name)
        assert loaded.config.max_position_embeddings == model.config.max_position_embeddings


@pytest.mark.parametrize(("extension", "expected"), [("tile", [0, 1, 2, 0, 1]), ("last", [0, 1, 2, 2, 2])])
def test_new_positions_start_from_trained_ones(extension, expected):
    assert extend_positions(torch.arange(3), 5, extension).tolist() == expected
    assert extend_positions(torch.arange(3), 2, extension).tolist() == [0, 1]


def test_a_frozen_model_stays_frozen_and_knows_how_many_positions_it_has():
    model = make_model(SKTformerModel).requires_grad_(False)
    model.resize_position_embeddings(24)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.get_position_embeddings().num_embeddings == 24


def test_an_unknown_extension_changes_nothing():
    model = make_model(SKTformerForMaskedLM)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with pytest.raises(ValueError, match='must be "tile" or "last", got "copy"'):
        model.resize_position_embeddings(32, "copy")
    assert model.config.max_position_embeddings == 16
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], values) for name, values in before.items())


def test_only_weights_that_are_there_are_lengthened():
    with torch.device("meta"):
        model = SKTformerForMaskedLM(make_config())
    with pytest.raises(ValueError, match="Load the weights, and merge adapters"):
        model.resize_position_embeddings(32)


def test_shortening_below_the_landmarks_is_refused_and_changes_nothing():
    model = make_model(SKTformerForMaskedLM)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Exception, match="num_landmark_tokens"):
        model.resize_position_embeddings(4)
    assert model.config.max_position_embeddings == 16
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_resized_order_is_uniform_and_keeps_relative_order():
    first = torch.zeros(12)
    for seed in range(600):
        order = draw_permutation(5, seed, 0, "old")
        resized = resize_order(order, draw_permutation(12, seed, 0, "new"))
        assert resized.sort().values.tolist() == list(range(12))
        assert [p for p in resized.tolist() if p < 5] == order.tolist()
        first[resized[0]] += 1
    assert (first - 50).abs().max() < 5 * math.sqrt(50)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 1, 9, 9), "3 or 4 dimensions"),
        (torch.ones(2, 8), r"shape \(2, 8\), expected \(2, 9\)"),
        (torch.ones(9), r"expected \(2, 9\)"),
    ],
)
def test_masks_that_mean_nothing_are_refused(mask, message):
    model = make_model(SKTformerModel)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 9, dtype=torch.long), attention_mask=mask)


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
def test_an_input_without_tokens_is_refused(shape):
    with pytest.raises(ValueError, match=r"has no token; give at least 1"):
        make_model(SKTformerModel)(torch.ones(shape, dtype=torch.long))


def test_inputs_are_given_once():
    model = make_model(SKTformerModel)
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="exactly one"):
        model(torch.ones(1, 3, dtype=torch.long), inputs_embeds=torch.ones(1, 3, 12, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@both_norms
def test_half_precision_weights(dtype, smoother_norm):
    model = make_model(SKTformerForMaskedLM, smoother_norm=smoother_norm)
    exact = model.float()
    batch = make_batch([16, 7])
    expected = exact(**batch.inputs(), **batch.labels(SKTformerForMaskedLM))
    half = make_model(SKTformerForMaskedLM, smoother_norm=smoother_norm).to(dtype)
    output = half(**batch.inputs(), **batch.labels(SKTformerForMaskedLM))
    assert output.logits.dtype == dtype
    assert abs(output.loss.item() - expected.loss.item()) < 0.1 * abs(expected.loss.item())
    half.train()
    half(**batch.inputs(), **batch.labels(SKTformerForMaskedLM)).loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(half).values())


def test_autocast():
    model = make_model(SKTformerForMaskedLM).float().train()
    batch = make_batch([16, 7])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch.inputs(), **batch.labels(SKTformerForMaskedLM)).loss
    loss.backward()
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.slow
@pytest.mark.parametrize("folded", [False, True], ids=["direct", "folded"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_layers_compiled_alone_train_without_a_graph_break(checkpointing, folded, monkeypatch):
    monkeypatch.setattr(circle, "count_multiply_adds", lambda *sizes: (folded, not folded))
    dropout: dict[str, Any] = {
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "smoother_dropout_prob": 0.1,
    }
    model = make_model(SKTformerForMaskedLM, **dropout).train()
    batch = make_batch([12, 7])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.sktformer.encoder.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        loss, _, grads = outcome(model, batch, "left", 14)
        assert loss.isfinite()
        assert len(grads) == len(list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in grads.values())
