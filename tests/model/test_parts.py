"""What parts of the model do by themselves, where outputs as a whole would not show another choice."""

import re
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from modeling_sktformer import (
    SKTformerForMaskedLM,
    SKTformerForMultipleChoice,
    SKTformerForPrediction,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForTokenClassification,
    SKTformerModel,
)
from support.builders import call, make_batch, make_config, make_model


@pytest.mark.parametrize(
    ("model_class", "place"),
    [
        (SKTformerModel, "embeddings.dropout"),
        (SKTformerModel, "encoder.layers.0.dropout"),
        (SKTformerModel, "encoder.layers.0.attention.dropout"),
        (SKTformerModel, "encoder.layers.0.smoother.convolution_stem.dropout"),
        (SKTformerForSequenceClassification, "classifier.dropout"),
        (SKTformerForTokenClassification, "dropout"),
        (SKTformerForQuestionAnswering, "dropout"),
        (SKTformerForMultipleChoice, "classifier.dropout"),
    ],
)
def test_every_dropout_is_called(model_class, place):
    model = make_model(model_class)
    calls: list[Any] = []
    model.get_submodule(place).register_forward_hook(lambda *given: calls.append(given))
    call(model, make_batch([12, 5] * 2 if model_class is SKTformerForMultipleChoice else [12, 5]).inputs())
    expected = 2 if place == "encoder.layers.0.dropout" or place.endswith("attention.dropout") else 1
    assert len(calls) == expected


@pytest.mark.parametrize("model_class", [SKTformerForTokenClassification, SKTformerForQuestionAnswering])
def test_heads_of_tokens_have_the_dropout_of_classifiers(model_class):
    model = model_class(make_config(hidden_dropout_prob=0.1, classifier_dropout=0.4))
    assert model.dropout.p == 0.4


def test_initial_weights_have_the_documented_spread():
    config = make_config(
        hidden_size=64,
        num_attention_heads=4,
        num_segments=4,
        max_position_embeddings=256,
        fourier_initializer_scale=3.0,
        initializer_range=0.05,
    )
    layer: Any = SKTformerModel(config).encoder.layers[0]
    assert layer.smoother.fourier_convolution.filter.std().item() == pytest.approx(3 / 8, rel=0.05)
    assert layer.attention.query.weight.std().item() == pytest.approx(0.05, rel=0.1)


def test_a_forecaster_embeds_values_with_pytorchs_initialisation():
    model = SKTformerForPrediction(make_config(hidden_size=768, num_segments=3, num_input_channels=4))
    for values in (model.value_embedding.weight, model.value_embedding.bias):
        assert 0.49 < values.abs().max() <= 0.5
        assert values.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.1)


def test_chunks_of_the_feed_forward_part_are_of_tokens():
    inputs = make_batch([12, 9, 4]).inputs()
    whole, chunked = (make_model(SKTformerModel, chunk_size_feed_forward=size) for size in (0, 4))
    seen = []
    chunked.encoder.layers[0].mlp.up_proj.register_forward_hook(lambda m, args, out: seen.append(args[0].shape))
    torch.testing.assert_close(chunked(**inputs)[0], whole(**inputs)[0])
    assert seen == [(3, 4, 12)] * 3
    inputs = make_batch([10, 9, 4]).inputs()  # of a length that is no multiple
    torch.testing.assert_close(chunked(**inputs)[0], whole(**inputs)[0])
    assert seen[3:] == [(3, 4, 12), (3, 4, 12), (3, 2, 12)]


def test_a_forecaster_s_layers_take_the_attention_that_is_set():
    model: Any = SKTformerForPrediction(make_config(context_length=13))
    model.set_attn_implementation("sdpa")
    assert all(layer.attention.is_fused() for layer in model.encoder.layers)


def test_embeddings_and_layers_stay_on_one_device():
    assert {"SKTformerEmbeddings", "SKTformerLayer"} <= set(make_model(SKTformerForMaskedLM)._no_split_modules)


def test_the_level_is_the_last_value_wherever_a_series_is_measured_from():
    config = make_config(context_length=13, prediction_length=4, embed_level=True, scaling_location="mean")
    model = SKTformerForPrediction(config).double().eval()
    seen = []
    model.level_embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    past = torch.randn(2, 13, 1, dtype=torch.double)
    model(past_values=past)
    torch.testing.assert_close(seen[0], past[:, -1:])


def test_padding_is_one_of_the_tokens():
    with pytest.raises(StrictDataclassError, match="is not one of 30 tokens"):
        make_config(pad_token_id=30)


def test_checkpointing_counts_full_batches_once():
    statistics = []
    for checkpointing in (False, True):
        model = make_model(SKTformerForMaskedLM).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = make_batch([12, 12])
        inputs = batch.inputs()
        del inputs["attention_mask"]
        model(**inputs, **batch.labels(SKTformerForMaskedLM)).loss.backward()
        statistics.append({k: v.clone() for k, v in model.state_dict().items() if "running" in k})
    torch.testing.assert_close(*statistics)


@pytest.mark.parametrize(("extension", "source"), [("tile", 0), ("last", 15)])
def test_all_that_is_stored_by_position_is_extended_alike(extension, source):
    model = make_model(SKTformerModel)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    model.resize_position_embeddings(17, extension)
    names = [n for n in before if "position_embeddings" in n or "convolution_stem.norm" in n]
    assert len(names) == 1 + 2 * 4
    for name in names:
        torch.testing.assert_close(model.state_dict()[name][16], before[name][source])


def test_calibration_with_half_precision_is_in_float32():
    model = SKTformerForSequenceClassification(make_config(classifier_pooling="mean"))
    pooling = model.classifier.pooling
    pooled = (5 + 0.1 * torch.randn(500, 12)).bfloat16()
    pooling.calibrate(pooled)
    torch.testing.assert_close(pooling.center, pooled.float().mean(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_the_feed_forward_part_has_the_configured_activation(activation):
    mlp: Any = make_model(SKTformerModel, hidden_act=activation).encoder.layers[0].mlp
    states = torch.randn(2, 3, 12, dtype=torch.double)
    expected = mlp.down_proj(getattr(nn.functional, activation)(mlp.up_proj(states)))
    torch.testing.assert_close(mlp(states), expected)


def test_tokens_are_of_the_first_type_by_default():
    model, inputs = make_model(SKTformerModel), make_batch([12, 5]).inputs()
    inputs["token_type_ids"] = torch.zeros_like(inputs["token_type_ids"])
    expected = model(**inputs)[0]
    del inputs["token_type_ids"]
    torch.testing.assert_close(model(**inputs)[0], expected)


def test_a_forecaster_leaves_the_configuration_it_is_made_of_alone():
    config = make_config(context_length=13)
    SKTformerForPrediction(config)
    assert config.max_position_embeddings == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_landmark_tokens", 3),
        ("num_landmark_features", 1),
        ("use_token_attention", False),
        ("use_feature_attention", False),
        ("max_position_embeddings", 12),
        ("conv_kernel_size", 5),
    ],
)
def test_models_stay_as_they_are_when_another_is_made_from_their_configuration_changed(field, value):
    config, inputs = make_config(), make_batch([12, 7]).inputs()
    assert getattr(config, field) != value
    model = SKTformerModel(config).double().eval()
    expected = call(model, inputs).last_hidden_state
    setattr(config, field, value)
    SKTformerModel(config)
    assert torch.equal(call(model, inputs).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("name", "shape"), [("position_ids", (12,)), ("position_ids", (2, 11)), ("token_type_ids", (2, 1))]
)
@pytest.mark.parametrize("lengths", [[12, 12], [12, 7]])
def test_shapes_of_what_stands_beside_tokens_are_named(name, shape, lengths):
    inputs = make_batch(lengths).inputs() | {name: torch.zeros(shape, dtype=torch.long)}
    message = re.escape(f"`{name}` has shape {shape}, expected (2, 12).")
    with pytest.raises(ValueError, match=message):
        make_model(SKTformerModel)(**inputs)


@pytest.mark.parametrize("smoother_norm", ["layer_norm", "batch_norm"])
def test_an_optimizer_trains_a_lengthened_model_on(smoother_norm):
    model = make_model(SKTformerForMaskedLM, smoother_norm=smoother_norm).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = torch.randint(5, model.config.vocab_size, (2, 12))
    model(ids, labels=ids).loss.backward()
    model.resize_position_embeddings(24)
    before = {name: values.clone() for name, values in model.named_parameters()}
    longer = ids.repeat(1, 2)
    model(longer, labels=longer).loss.backward()
    optimizer.step()
    moved = {name for name, values in model.named_parameters() if not torch.equal(values, before[name])}
    resized = ("position_embeddings.weight", "filter", *["stem.norm.weight"] * (smoother_norm == "batch_norm"))
    assert all(any(name.endswith(end) for name in moved) for end in resized), moved


def test_a_model_of_which_a_part_cannot_be_lengthened_stays_as_it_was():
    for spoil in ("filter on meta", "adapter of a filter"):
        model = make_model(SKTformerModel)
        convolution = model.encoder.layers[1].smoother.fourier_convolution
        if spoil == "filter on meta":
            convolution.filter = nn.Parameter(convolution.filter.to("meta"))
        else:
            nn.utils.parametrize.register_parametrization(convolution, "filter", nn.Identity())
        with pytest.raises(ValueError, match="merge adapters of positions and filters, before resizing"):
            model.resize_position_embeddings(32)
        assert model.config.max_position_embeddings == len(model.get_position_embeddings().weight) == 16


@pytest.mark.parametrize("option", ["is_decoder", "add_cross_attention", "is_encoder_decoder"])
def test_options_of_decoders_are_refused(option):
    with pytest.raises(ValueError, match=f"`{option}=True` cannot be had"):
        make_config(**{option: True})
