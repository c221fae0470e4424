"""What libraries do with models beside training and loading them."""

import copy
import json
from typing import cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import pipeline

from modeling_sktformer import (
    SKTformerConfig,
    SKTformerForMaskedLM,
    SKTformerForPrediction,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForSequenceMatching,
    SKTformerModel,
    load_preset,
)
from support.builders import assert_equal, call, gradients, make_batch, make_config, make_model
from support.texts import make_tokenizer


@pytest.mark.parametrize("model_class", [SKTformerForSequenceClassification, SKTformerForSequenceMatching])
@pytest.mark.parametrize(
    ("num_labels", "labels", "expected"),
    [
        (1, torch.tensor([3.5, 2.0]), "regression"),
        (3, torch.tensor([0, 2]), "single_label_classification"),
        (3, torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), "multi_label_classification"),
    ],
)
def test_the_first_labels_say_what_is_predicted_and_the_configuration_keeps_it(
    model_class, num_labels, labels, expected, tmp_path
):
    model = make_model(model_class, num_labels=num_labels)
    inputs = make_batch([12, 5] * (2 if model_class is SKTformerForSequenceMatching else 1)).inputs()
    with pytest.raises(ValueError, match="do not fit"):
        call(model, inputs, labels=torch.zeros(7))
    assert model.config.problem_type is None
    loss = call(model, inputs, labels=labels).loss
    assert model.config.problem_type == expected
    assert_equal(call(model, inputs, labels=labels).loss, loss)
    model.save_pretrained(tmp_path)
    assert model_class.from_pretrained(tmp_path).config.problem_type == expected


def test_a_pipeline_shows_a_number_as_it_was_learnt(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model = make_model(SKTformerForSequenceClassification, num_labels=1, vocab_size=len(tokenizer))
    inputs = tokenizer("a cat", return_tensors="pt")
    expected = float(model(**inputs, labels=torch.tensor([3.0])).logits)
    model.save_pretrained(tmp_path)
    (answer,) = pipeline("text-classification", model=str(tmp_path), dtype=torch.float64)("a cat")
    assert answer["score"] == pytest.approx(expected)
    assert not 0 <= expected <= 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_answer_at_padding_is_not_counted(side):
    model, batch = make_model(SKTformerForQuestionAnswering), make_batch([12, 7])
    inputs, labels = batch.inputs(side), batch.labels(SKTformerForQuestionAnswering, side)
    expected = model(**{name: rows[:1] for name, rows in inputs.items()}, **{n: v[:1] for n, v in labels.items()}).loss
    place = int(inputs["attention_mask"][1].argmin())
    labels = {name: torch.tensor([int(places[0]), place]) for name, places in labels.items()}
    assert_equal(model(**inputs, **labels).loss, expected)
    one_end = labels | {"end_positions": torch.tensor([int(labels["end_positions"][0]), 12])}
    assert_equal(model(**inputs, **one_end).loss, expected)


def test_what_tokenizers_return_and_libraries_add_is_passed_over():
    model, inputs = make_model(SKTformerModel), make_batch([12, 7]).inputs()
    expected = model(**inputs)[0]
    extra = ("special_tokens_mask", "offset_mapping", "length", "token_embeddings", "sentence_embedding")
    assert_equal(model(**inputs, **dict.fromkeys(extra, torch.ones(2, 12)))[0], expected)
    with pytest.raises(TypeError, match="no keyword `cu_seq_lens_q`"):  # texts would run into one another
        model(**inputs, cu_seq_lens_q=torch.tensor([0, 12]))


def test_averages_that_have_spoilt_the_samples_are_not_saved(tmp_path):
    model = make_model(SKTformerForMaskedLM)
    for use_buffers in (False, True):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
        module = cast(SKTformerForMaskedLM, averaged.module)
        for _ in range(3):
            averaged.update_parameters(model)
        if not use_buffers:
            module.save_pretrained(tmp_path / "whole")
            continue
        with pytest.raises(ValueError, match=r"landmark_order. is no permutation"):
            module.save_pretrained(tmp_path / "spoilt")
        assert not (tmp_path / "spoilt").exists()


def test_an_averaged_state_may_take_the_place_of_the_model_s():
    model, inputs = make_model(SKTformerModel), make_batch([12, 7]).inputs()
    expected = model(**inputs)[0]
    averaged = {name: (value.double() + value.double()) / 2 for name, value in model.state_dict().items()}
    model.load_state_dict(averaged, assign=True)
    assert_equal(model(**inputs)[0], expected)


def test_a_forecaster_has_gradients_for_each_series_and_a_shape_without_values():
    config = make_config(context_length=16, prediction_length=4, num_input_channels=2)
    model, past = SKTformerForPrediction(config).double().eval(), torch.randn(3, 16, 2, dtype=torch.float64)
    each = torch.func.vmap(lambda series: model(series[None]).prediction_outputs[0])(past)
    assert_equal(each, model(past).prediction_outputs)
    with FakeTensorMode():
        fake = SKTformerForPrediction(config)(torch.randn(2, 16, 2), future_values=torch.randn(2, 4, 2))
    assert fake.prediction_outputs.shape == (2, 4, 2)


@pytest.mark.parametrize("part", ["layers", "encoder"])
def test_what_is_compiled_alone_returns_what_is_asked_for_later(part):
    model = make_model(SKTformerModel)
    inputs = make_batch([12, 9]).inputs()
    expected = call(model, inputs, output_attentions=True, output_hidden_states=True)
    torch._dynamo.reset()
    for module in model.encoder.layers if part == "layers" else [model.encoder]:
        module.compile(backend="eager")
    assert_equal(call(model, inputs).last_hidden_state, expected.last_hidden_state)
    outputs = call(model, inputs, output_attentions=True, output_hidden_states=True)
    torch._dynamo.reset()
    assert_equal(outputs.attentions, expected.attentions)
    assert_equal(outputs.hidden_states, expected.hidden_states)


@pytest.mark.parametrize("selected", [True, [0], [0, -1]])
def test_selected_states_keep_their_gradients(selected):
    model = make_model(SKTformerForMaskedLM)
    inputs = make_batch([12, 9]).inputs()
    outputs = call(model, inputs, labels=inputs["input_ids"], output_hidden_states=selected)
    (gradient,) = torch.autograd.grad(outputs.loss, outputs.hidden_states[0])
    assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"inputs_embeds": torch.randn(1, 32)}, r"shape \(1, 32\); it must be \(batch_size, sequence_length, hidden"),
        ({"input_ids": torch.zeros(7, dtype=torch.long)}, r"shape \(7,\); it must be \(batch_size, sequence_length\)"),
        ({"input_ids": torch.zeros(2, 3, 7, dtype=torch.long)}, r"shape \(2, 3, 7\); it must be"),
    ],
)
def test_inputs_with_other_axes_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        SKTformerModel(make_config())(**inputs)


def test_one_number_is_wanted_for_each_row_of_a_single_label():
    model = make_model(SKTformerForSequenceClassification, num_labels=1)
    with pytest.raises(ValueError, match="regression problem; give one number for each row"):
        call(model, make_batch([12, 5, 7]).inputs(), labels=torch.zeros(2))
    # A classifier that has become a regressor says what is left of it.
    model.config.problem_type = "single_label_classification"
    for labels in (torch.zeros(3), torch.zeros(3, 1)):
        with pytest.raises(
            ValueError, match=r'one number for each row .*, and set `config.problem_type="regression"`'
        ):
            call(model, make_batch([12, 5, 7]).inputs(), labels=labels)


def test_a_model_without_data_pools_all_layers_of_padded_inputs():
    config = make_config(classifier_pooling="layers")
    with torch.device("meta"):
        model = SKTformerForSequenceClassification(config)
        ids = torch.ones(3, 7, dtype=torch.long)
        assert model(input_ids=ids, attention_mask=ids).logits.shape == (3, config.num_labels)


def test_an_encoder_that_was_resized_alone_is_not_saved(tmp_path):
    model = make_model(SKTformerForMaskedLM)
    length = model.config.max_position_embeddings
    model.sktformer.resize_position_embeddings(2 * length)
    with pytest.raises(ValueError, match=rf"has {2 * length} positions and the whole model {length}; call"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_head_is_not_calibrated_with_nothing():
    pooling = make_model(SKTformerForSequenceClassification).classifier.pooling
    scale = pooling.scale.clone()
    with pytest.raises(ValueError, match="no example"):
        pooling.calibrate(torch.empty(0, pooling.width))
    assert_equal(pooling.scale, scale)


def test_a_class_in_a_file_of_its_own_is_saved_with_what_is_there(tmp_path, monkeypatch):
    (tmp_path / "my_classifier.py").write_text(
        "from modeling_sktformer import SKTformerForSequenceClassification\n\n\n"
        "class MyClassifier(SKTformerForSequenceClassification):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_classifier  # type: ignore[import-not-found]

    folder = tmp_path / "saved"
    my_classifier.MyClassifier(make_config()).save_pretrained(folder)
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForSequenceClassification"] == "my_classifier.MyClassifier"
    assert all((folder / f"{name.partition('.')[0]}.py").is_file() for name in auto_map.values())


def test_presets_take_what_configurations_take():
    assert load_preset("sktformer-tiny", output_attentions=True).output_attentions


@pytest.mark.parametrize("parts", ["head", "copy"])
def test_a_model_of_parts_with_their_own_configurations_is_lengthened_as_one(parts, tmp_path):
    expected = make_model(SKTformerForSequenceClassification)
    model = copy.deepcopy(expected)
    if parts == "head":
        model.sktformer = make_model(SKTformerModel)
        model.sktformer.load_state_dict(expected.sktformer.state_dict())
    else:
        model.config = copy.deepcopy(model.config)
    for each in (expected, model):
        each.resize_position_embeddings(32)
    inputs = make_batch([20, 14]).inputs()
    torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    assert SKTformerForSequenceClassification.from_pretrained(tmp_path).config.max_position_embeddings == 32


@pytest.mark.parametrize(
    "form",
    [{"dilation": 2, "padding": 2}, {"padding": 1, "padding_mode": "circular"}, {"padding": 1, "groups": 2}],
    ids=["dilation", "circular", "groups"],
)
@pytest.mark.parametrize("kernels", ["auto", "eager"])
def test_another_convolution_in_a_stem_is_what_is_computed(form, kernels):
    model = make_model(SKTformerModel, kernels=kernels)
    stem = model.encoder.layers[0].smoother.convolution_stem
    stem.convolution = nn.Conv1d(24, 12, 3, **form).double()
    inputs = make_batch([16, 16]).inputs()
    outputs = model(**inputs).last_hidden_state
    stem.convolution.register_forward_hook(lambda *_: None)  # with which the module has to be called
    torch.testing.assert_close(model(**inputs).last_hidden_state, outputs)


def test_batches_with_and_without_padding_share_a_backward_pass():
    """Queries are padded and full documents are not: the statistics move between them."""
    model = make_model(SKTformerModel, smoother_norm="batch_norm").train()
    full, padded = make_batch([9, 9]).inputs(), make_batch([9, 5]).inputs()
    together = copy.deepcopy(model)
    sum(together(**inputs).last_hidden_state[:, :5].square().sum() for inputs in (full, padded)).backward()
    for inputs in (full, padded):
        model(**inputs).last_hidden_state[:, :5].square().sum().backward()
    assert_equal(gradients(together), gradients(model))
    assert_equal(dict(together.named_buffers()), dict(model.named_buffers()))


@pytest.mark.parametrize("length", [5, 16])
def test_weights_may_be_pieces_of_one_vector(length):
    """A filter then starts anywhere in it."""
    model = make_model(SKTformerModel)
    inputs = make_batch([length] * 2).inputs()
    expected = model(**inputs).last_hidden_state
    weights = [parameter.data for parameter in model.parameters()]
    for offset in (0, 1):
        vector = torch.cat([weight.flatten() for weight in [torch.zeros(offset).double(), *weights]])
        vector_to_parameters(vector[offset:], model.parameters())
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected)
    model.resize_position_embeddings(32)


def test_a_configuration_of_one_s_own_follows_the_switches():
    class MyConfig(SKTformerConfig):
        model_type = "mine"

    model = SKTformerModel(MyConfig(**{**make_config().to_dict(), "model_type": "mine"}))
    model.set_attn_implementation("sdpa")
    model.set_kernels("eager")
    assert (model.config._attn_implementation, model.config.kernels) == ("sdpa", "eager")


def test_an_activation_with_a_weight_is_initialised(tmp_path):
    SKTformerModel(make_config(hidden_act="prelu")).save_pretrained(tmp_path)
    model = SKTformerForMaskedLM.from_pretrained(tmp_path)
    assert model.head.activation.weight.item() == 0.25
