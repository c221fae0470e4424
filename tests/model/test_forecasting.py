"""The forecasting head against its listing, written out here one series at a time, and the laws of its mask."""

import math
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForTimeSeriesPrediction, Trainer, TrainingArguments

from modeling_sktformer import SKTformerConfig, SKTformerForPrediction
from modeling_sktformer.forecasting import fourier_extrapolation, measure_series
from modeling_sktformer.sequences import draw_permutation
from support.builders import assert_equal
from support.processes import run_without_package
from support.reference import naive_layer, naive_linear, under


CONTEXT, HORIZON, CHANNELS = 13, 17, 3


def make_forecaster(seed: int = 0, **overrides) -> SKTformerForPrediction:
    """A float64 forecaster in evaluation mode whose every parameter and statistic is random."""
    fields: dict = {
        **{"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20},
        **{"num_segments": 3, "num_landmark_tokens": 5, "num_landmark_features": 4, "use_mlp": False},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "smoother_dropout_prob": 0.0},
        **{"context_length": CONTEXT, "prediction_length": HORIZON, "num_input_channels": CHANNELS},
    }
    torch.manual_seed(seed)
    model = SKTformerForPrediction(SKTformerConfig(**{**fields, **overrides})).double().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                noise = torch.randn_like(tensor)
                tensor.copy_(noise.exp() if "running_var" in name else 0.4 * noise + ("norm.weight" in name))
    return model


def make_series(batch_size: int = 4, length: int = CONTEXT, channels: int = CHANNELS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    steps = torch.randn(batch_size, length, channels, generator=generator, dtype=torch.double)
    return 5 + steps.cumsum(dim=1)


def naive_extrapolation(series: list[float], num_harmonics: int, times: range) -> list[float]:
    """Algorithm 4 for one channel, with pi: all frequencies, sorted, the lowest kept, a cosine for each."""
    length = len(series)
    transform = torch.fft.fft(torch.tensor(series, dtype=torch.double)).tolist()
    frequencies = torch.fft.fftfreq(length, dtype=torch.double).tolist()
    kept = sorted(range(length), key=lambda i: abs(frequencies[i]))[: 1 + 2 * num_harmonics]
    values = []
    for t in times:
        waves = [
            abs(transform[i]) / length * math.cos(2 * math.pi * frequencies[i] * t + math.atan2(*_parts(transform[i])))
            for i in kept
        ]
        values.append(sum(waves))
    return values


def _parts(number: complex) -> tuple[float, float]:
    return number.imag, number.real


def naive_forecast(model: SKTformerForPrediction, past: torch.Tensor) -> torch.Tensor:
    """Algorithm 3 for one series `(context_length, channels)` in evaluation mode."""
    config, weights = model.config, model.state_dict()
    layer_config = SKTformerConfig(**{**config.to_diff_dict(), "max_position_embeddings": config.context_length})
    if config.channel_independence:
        columns = past.unbind(dim=1)
        groups = [column[:, None] for column in columns]
    else:
        groups = [past]
    forecasts = []
    for group in groups:
        mean = group.sum(0) / len(group)
        deviation = torch.sqrt(((group - mean) ** 2).sum(0) / (len(group) - 1) + config.scaling_epsilon)
        origin = mean if config.scaling_location == "mean" else group[-1]
        states = naive_linear(under(weights, "value_embedding"), (group - origin) / deviation)
        if config.embed_level:
            states = states + group[-1] @ weights["level_embedding.weight"].T
        for number in range(config.num_hidden_layers):
            layer = under(weights, f"encoder.layers.{number}")
            (states,) = naive_layer(layer, layer_config, [states], training=False)
        decoded = naive_linear(under(weights, "decoder"), states)
        times = range(config.context_length, config.context_length + config.prediction_length)
        waves = [naive_extrapolation(column.tolist(), config.num_harmonics, times) for column in decoded.unbind(1)]
        forecasts.append(torch.tensor(waves, dtype=torch.double).T * deviation + origin)
    return torch.cat(forecasts, dim=1)


# Fourier extrapolation


@pytest.mark.parametrize("length", [1, 2, 3, 12, 13, 96])
@pytest.mark.parametrize("num_harmonics", [0, 1, 5, 6, 48, 1000])
def test_extrapolation_is_the_listing_s(length, num_harmonics):
    series = make_series(2, length, 2)
    extrapolated = fourier_extrapolation(series, num_harmonics, 31)
    for row in range(2):
        for channel in range(2):
            expected = naive_extrapolation(series[row, :, channel].tolist(), num_harmonics, range(length, length + 31))
            actual = extrapolated[row, :, channel]
            torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.double), rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 7, 96])
def test_all_harmonics_repeat_the_context(length):
    series = make_series(2, length, 2)
    repeated = fourier_extrapolation(series, length // 2, 2 * length)
    torch.testing.assert_close(repeated, torch.cat([series, series], dim=1), rtol=0, atol=1e-10)


def test_extrapolation_keeps_the_data_type_and_is_exact_in_float32():
    series = make_series(2, 720, 1)
    expected = fourier_extrapolation(series, 100, 720)
    error = (fourier_extrapolation(series.float(), 100, 720) - expected).abs().max() / series.abs().max()
    assert error < 1e-5
    assert fourier_extrapolation(series.bfloat16(), 3, 5).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        repeated = fourier_extrapolation(series.float(), 360, 720)
    assert (repeated - series).abs().max() / series.abs().max() < 1e-5
    assert fourier_extrapolation(series.to("meta"), 360, 720).shape == (2, 720, 1)


# The forecaster


@pytest.mark.parametrize("channel_independence", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_harmonics": 2, "scaling_location": "last", "scaling_epsilon": 1e-5},
        {"num_harmonics": 1000, "use_mlp": True},
        {"num_harmonics": 0, "scaling_location": "last", "embed_level": True},
    ],
    ids=["paper", "other", "best", "best for Exchange"],
)
def test_forecasts_are_the_listing_s(channel_independence, overrides):
    model = make_forecaster(channel_independence=channel_independence, **overrides)
    past = make_series()
    outputs = model(past_values=past)
    assert outputs.prediction_outputs.shape == (4, HORIZON, CHANNELS)
    assert outputs.loc.shape == outputs.scale.shape == (4, 1, CHANNELS)
    assert_equal(outputs.prediction_outputs, torch.stack([naive_forecast(model, series) for series in past]))


@pytest.mark.parametrize("location", ["mean", "last"])
def test_a_decoder_of_zero_forecasts_the_location(location):
    config = make_forecaster(scaling_location=location, decoder_initializer_scale=0).config
    past = make_series().float()
    expected = past.mean(dim=1) if location == "mean" else past[:, -1]
    forecast = SKTformerForPrediction(config).eval()(past_values=past).prediction_outputs
    torch.testing.assert_close(forecast, expected[:, None].expand(-1, HORIZON, -1))


@pytest.mark.parametrize("loss", ["mse", "mae"])
def test_the_loss_is_the_mean_over_what_was_observed(loss):
    model = make_forecaster(loss=loss)
    past, future = make_series(), make_series(length=HORIZON)
    outputs = model(past_values=past, future_values=future)
    errors = outputs.prediction_outputs - future
    errors = errors**2 if loss == "mse" else errors.abs()
    assert_equal(outputs.loss, errors.mean())
    mask = torch.rand(future.shape) < 0.7
    future[~mask] = torch.nan
    masked = model(past_values=past, future_values=future, future_observed_mask=mask).loss
    assert_equal(masked, errors[mask].mean())
    masked.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)
    weighed = model(past_values=past, future_values=future, future_observed_mask=0.5 * mask.to(torch.bfloat16)).loss
    assert_equal(weighed, masked)
    nothing = model(past_values=past, future_values=future, future_observed_mask=torch.zeros_like(mask)).loss
    assert nothing == 0


@pytest.mark.parametrize(
    "options", [{}, {"channel_independence": True, "scaling_location": "last", "embed_level": True}]
)
def test_what_stands_in_a_gap_has_no_influence_and_the_gap_itself_has(options):
    model = make_forecaster(**options)
    past, mask = make_series(), torch.rand(4, CONTEXT, CHANNELS) < 0.7
    mask[1] = False  # a series of which nothing was observed
    mask[2, :, 0] = False
    past[~mask] = torch.nan
    forecast = model(past_values=past, past_observed_mask=mask).prediction_outputs
    assert forecast.isfinite().all()
    other = past.masked_fill(~mask, 1e6)
    assert torch.equal(forecast, model(past_values=other, past_observed_mask=mask.long()).prediction_outputs)
    # A gap is not the same as having observed the very value that its place is filled with where the scale stays.
    mean, last, _ = measure_series(past.masked_fill(~mask, 0), ~mask, 1.0)
    observed = last if options else mean
    filled = torch.where(mask, past, observed)
    assert (model(past_values=filled).prediction_outputs - forecast)[1].abs().max() > 1e-3
    loss = model.train()(past_values=past, past_observed_mask=mask, future_values=forecast.detach() + 1).loss
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(grads) == len(list(model.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


def test_a_loss_function_that_is_set_is_taken():
    model, past = make_forecaster(), make_series()
    future = torch.ones(len(past), HORIZON, CHANNELS)
    model.loss_function = lambda forecast, future, mask, kind: forecast.sum() + future.sum()
    output = model(past_values=past, future_values=future)
    assert_equal(output.loss, output.prediction_outputs.sum() + future.sum())


def test_predicting_leaves_every_module_in_its_mode():
    model, past = make_forecaster(smoother_norm="batch_norm").train(), make_series()
    model.encoder.eval()
    before = [module.training for module in model.modules()]
    model.predict(past)
    assert [module.training for module in model.modules()] == before
    past[0, 3, 1] = torch.inf
    with pytest.raises(ValueError, match="`past_values` has an infinite value; give NaN where a value is missing"):
        model.predict(past)


def test_a_forecaster_has_no_position_embeddings():
    with pytest.raises(NotImplementedError, match="has no position embeddings"):
        make_forecaster().get_position_embeddings()


def test_statistics_count_observed_values_only():
    values = torch.tensor([1.0, 9.0, 3.0, 5.0, 7.0])[None, :, None]
    mask = torch.tensor([1, 0, 1, 1, 0]).bool()[None, :, None]
    mean, last, scale = measure_series(values.masked_fill(~mask, 0), ~mask, 0.0)
    assert (mean.item(), last.item(), scale.item()) == (3.0, 5.0, 2.0)
    assert measure_series(values, None, 0.0)[1].item() == 7.0


def test_a_mask_of_ones_is_no_mask():
    model, past = make_forecaster(), make_series()
    outputs = model(past_values=past, past_observed_mask=torch.ones_like(past))
    assert_equal(outputs.prediction_outputs, model(past_values=past).prediction_outputs)


def test_nan_without_a_mask_is_refused():
    past = make_series()
    for value, what in ((torch.nan, "NaN"), (torch.inf, "an infinite value")):
        past[0, 3, 1] = value
        with pytest.raises(ValueError, match=f"`past_values` has {what}; name .* by `past_observed_mask=past_values."):
            make_forecaster()(past_values=past)


@pytest.mark.parametrize(("name", "length"), [("past", CONTEXT), ("future", HORIZON)])
def test_nan_that_a_mask_counts_as_observed_is_refused(name, length):
    inputs = {"past_values": make_series(), "future_values": make_series(length=HORIZON)}
    inputs[f"{name}_values"][0, 3, 1] = torch.nan
    mask = torch.ones(4, length, CHANNELS)
    model = make_forecaster()
    for masks, what in (({}, "NaN; name"), ({f"{name}_observed_mask": mask}, "NaN that its mask counts as observed")):
        with pytest.raises(
            ValueError, match=rf"`{name}_values` has {what}.*`{name}_observed_mask={name}_values.isfinite"
        ):
            model(**inputs, **masks)
    mask[0, 3, 1] = 0
    assert model(**inputs, **{f"{name}_observed_mask": mask}).loss.isfinite()


@pytest.mark.parametrize("epsilon", [0.0, 1e-5, 1.0])
def test_constant_channels_are_forecast(epsilon):
    model = make_forecaster(scaling_epsilon=epsilon)
    past = make_series()
    past[..., 1] = 4.0
    past.requires_grad_()
    forecast = model(past_values=past).prediction_outputs
    forecast.sum().backward()
    assert forecast.isfinite().all()
    assert past.grad is not None
    assert past.grad.isfinite().all()


def test_independent_channels_do_not_see_each_other():
    past = make_series()
    other = past.clone()
    other[..., 1] += torch.randn(4, CONTEXT, dtype=torch.double)
    model = make_forecaster(channel_independence=True)
    before, after = (model(past_values=values).prediction_outputs for values in (past, other))
    assert_equal(before[..., [0, 2]], after[..., [0, 2]])
    assert (before[..., 1] - after[..., 1]).abs().max() > 1e-3
    # Any number of channels in any order.
    assert_equal(model(past_values=past[..., [2, 0]]).prediction_outputs, before[..., [2, 0]])
    mixed = make_forecaster()
    assert not torch.equal(*(mixed(past_values=values).prediction_outputs[..., 0] for values in (past, other)))


def test_a_forecast_does_not_depend_on_the_batch():
    model, past = make_forecaster(), make_series()
    together = model(past_values=past).prediction_outputs
    assert_equal(torch.cat([model(past_values=row[None]).prediction_outputs for row in past]), together)


def test_the_loss_comes_first_whatever_else_is_returned():
    model, past = make_forecaster(), make_series()
    everything = {"output_hidden_states": True, "output_attentions": True, "output_feature_attentions": True}
    future = torch.zeros(len(past), model.config.prediction_length, past.shape[-1])
    output = model(past_values=past, future_values=future, **everything)
    assert list(output)[:4] == ["loss", "prediction_outputs", "loc", "scale"]
    assert list(output)[-1] == "feature_attentions"
    assert torch.equal(model(past_values=past, return_dict=False, **everything)[0], output.prediction_outputs)


def test_every_weight_has_a_gradient_with_gaps_or_without():
    """Processes that share a model wait for all of them."""
    past = make_series()
    for mask in (None, torch.ones_like(past)):
        model = make_forecaster().train()
        model(past_values=past, past_observed_mask=mask).prediction_outputs.sum().backward()
        assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("offset", [0, 1e9])
def test_predict_loses_nothing_of_a_series_in_double_precision(offset):
    model, series = make_forecaster().float().eval(), 3 * make_series(2, CONTEXT)
    assert series.dtype == torch.float64
    forecast = model.predict(series + offset)
    assert torch.equal(forecast, model(past_values=series + offset).prediction_outputs)
    assert (forecast - offset - model.predict(series)).abs().max() < 1e-4


def test_predict_reads_the_last_steps_and_gaps():
    model = make_forecaster().train()
    series = make_series(2, 20)
    series[1, -2, 0] = torch.nan
    forecast = model.predict(series)
    assert model.training
    context = series[:, -CONTEXT:]
    expected = model.eval()(past_values=context, past_observed_mask=~context.isnan()).prediction_outputs
    assert torch.equal(forecast, expected)
    assert_equal(model.predict(series[1]), expected[1])
    for wrong in (series[0, :, 0], series[:, : CONTEXT - 1]):
        with pytest.raises(ValueError, match="with at least context_length=13 time steps"):
            model.predict(wrong)
    model.train()
    with pytest.raises(ValueError, match="channels"):
        model.predict(series[..., :1])
    assert model.training


@pytest.mark.parametrize("use_mlp", [False, True])
def test_forecasters_are_saved_and_loaded(use_mlp, tmp_path):
    model = make_forecaster(use_mlp=use_mlp, num_harmonics=3).float()
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForTimeSeriesPrediction.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is SKTformerForPrediction
    assert not any(info.values()), info
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    past = make_series().float()
    assert torch.equal(loaded(past_values=past)[0], model(past_values=past)[0])


def test_the_embedding_of_values_can_be_replaced():
    model, past = make_forecaster(), make_series()
    other = torch.nn.Linear(model.value_embedding.in_features, model.config.hidden_size, dtype=torch.float64)
    before = model(past_values=past)[0]
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is other
    assert not torch.equal(model(past_values=past)[0], before)


def test_landmarks_are_the_same_however_a_forecaster_is_made():
    config = make_forecaster(landmark_seed=5).config
    torch.manual_seed(1)
    made = AutoModelForTimeSeriesPrediction.from_config(config)
    with torch.device("meta"):
        emptied = SKTformerForPrediction(config)
    emptied.to_empty(device="cpu")
    emptied.init_weights()
    for model in (made, emptied):
        for number, layer in enumerate(model.encoder.layers):
            for name, size in (("landmark_order", CONTEXT), ("landmark_features", config.head_dim)):
                assert torch.equal(getattr(layer.attention, name), draw_permutation(size, 5, number, name))


def test_replicas_without_parameters_forecast():
    """As `DataParallel` makes them: plain tensors in the place of parameters."""
    model, replica = make_forecaster(), make_forecaster()
    for module in replica.modules():
        vars(module).update(module._parameters)
        module._parameters = {}
    assert torch.equal(replica(make_series()).prediction_outputs, model(make_series()).prediction_outputs)


def test_quantised_and_offloaded_forecasters_predict(tmp_path):
    model, series = make_forecaster().float(), make_series(2, 20).float()
    expected = model.predict(series)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert (quantised.predict(series) - expected).abs().mean() < 0.2 * expected.std()
    model.save_pretrained(tmp_path)
    offloaded = AutoModelForTimeSeriesPrediction.from_pretrained(
        tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offloaded"
    )
    torch.testing.assert_close(offloaded.predict(series), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_spares_the_filters(dtype, tmp_path):
    make_forecaster().float().save_pretrained(tmp_path)
    model = AutoModelForTimeSeriesPrediction.from_pretrained(tmp_path, dtype=dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith("filter") else dtype)
    forecast = model.predict(make_series().float())
    assert forecast.dtype == torch.float32
    assert forecast.isfinite().all()


def test_autocast_keeps_what_layers_add_to_in_float32():
    model = make_forecaster().float()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(past_values=make_series().float(), output_hidden_states=True)
    assert {states.dtype for states in outputs.hidden_states} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_measures_series_in_float32(dtype):
    model = make_forecaster(context_length=720, scaling_location="last", embed_level=True).to(dtype)
    days = torch.arange(720).remainder(24)[None, :, None].expand(1, -1, CHANNELS)
    outputs = model(past_values=days.to(dtype))
    assert (outputs.loc == 23).all()
    assert outputs.prediction_outputs.isfinite().all()
    model = make_forecaster()
    series = make_series()
    expected = model(past_values=400 * series)
    outputs = model.to(dtype)(past_values=(400 * series).to(dtype))
    torch.testing.assert_close(outputs.scale.double(), expected.scale, rtol=0.02, atol=0)
    # An offset that half precision rounds by more than the series varies.
    expected = model.double().predict(4000 + series)
    assert (model.to(dtype).predict(4000 + series) - expected).abs().max() < 0.5


@pytest.mark.parametrize("channel_independence", [False, True])
def test_one_exported_graph_serves_every_batch(channel_independence):
    model, past = make_forecaster(channel_independence=channel_independence, num_hidden_layers=1), make_series(3)
    example = {"past_values": past, "past_observed_mask": torch.rand(past.shape) < 0.7}
    dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in example}
    graph = torch.export.export(model, (), example, dynamic_shapes=dynamic).module()
    for batch_size in (1, 3, 7):
        past = make_series(batch_size)
        inputs = {"past_values": past, "past_observed_mask": torch.rand(past.shape) < 0.7}
        assert_equal(graph(**inputs).prediction_outputs, model(**inputs).prediction_outputs)


def test_the_checkpoint_s_code_works_without_the_package(tmp_path):
    model, past = make_forecaster().float(), make_series().float()
    model.save_pretrained(tmp_path / "saved")
    torch.save(past, tmp_path / "past.pt")
    program = """
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForTimeSeriesPrediction
model = AutoModelForTimeSeriesPrediction.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save(model.predict(torch.load(sys.argv[2])), sys.argv[3])
model.save_pretrained(sys.argv[4])
"""
    for source, copy in (("saved", "again"), ("again", "twice")):  # what was saved without the package loads so too
        paths = [tmp_path / name for name in (source, "past.pt", "forecast.pt", copy)]
        run_without_package(program, *paths, folder=tmp_path / f"{source} elsewhere")
        torch.testing.assert_close(torch.load(tmp_path / "forecast.pt"), model.predict(past))


def test_outputs_and_gradients_under_checkpointing():
    model, past, future = make_forecaster().train(), make_series(), make_series(length=HORIZON)
    outputs = model(past_values=past, future_values=future, output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == 3
    assert outputs.hidden_states[0].shape == (4, CONTEXT, 12)
    assert len(outputs.attentions) == 2
    assert outputs.attentions[0].shape == (4, 2, CONTEXT, 5)
    outputs.loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if "gap" not in name}
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(past_values=past, future_values=future).loss.backward()
    assert_equal({name: parameter.grad for name, parameter in model.named_parameters() if "gap" not in name}, expected)
    assert isinstance(model(past_values=past, return_dict=False), tuple)


def test_a_configuration_without_return_dict_gives_tuples(tmp_path):
    model, past = make_forecaster().float(), make_series().float()
    model.save_pretrained(tmp_path)
    loaded = SKTformerForPrediction.from_pretrained(tmp_path, return_dict=False)
    assert_equal(loaded(past)[0], model(past).prediction_outputs)
    assert_equal(loaded.predict(past), model.predict(past))


def test_time_steps_that_are_landmarks_are_named():
    model = make_forecaster()
    positions = model(make_series(), output_attentions=True).landmark_positions
    layers: Any = model.encoder.layers
    orders = [layer.attention.landmark_order for layer in layers]
    assert_equal(positions, [order[order < CONTEXT][:5].expand(4, -1) for order in orders])


@pytest.mark.parametrize("channel_independence", [False, True])
def test_it_compiles_without_a_break(channel_independence):
    layers = 1 if channel_independence else 2
    model, past = make_forecaster(channel_independence=channel_independence, num_hidden_layers=layers), make_series()
    mask = torch.rand(past.shape) < 0.7
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for options in ({}, {"past_observed_mask": mask}):
        expected = model(past_values=past, **options).prediction_outputs
        assert_equal(compiled(past_values=past, **options).prediction_outputs, expected)


def test_it_learns_with_the_trainer(tmp_path):
    model = make_forecaster(channel_independence=True, num_harmonics=6, hidden_size=24, num_segments=4).float()
    time = torch.arange(300)[:, None] * 2 * torch.pi / 13 + torch.tensor([0.0, 1.0, 2.0])
    windows = time.sin().unfold(0, CONTEXT + HORIZON, 1).mT
    rows = [{"past_values": w[:CONTEXT], "future_values": w[CONTEXT:]} for w in windows]
    options: dict = {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 10,
    }
    arguments = TrainingArguments(str(tmp_path), max_steps=60, learning_rate=1e-2, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"past_values": torch.zeros(2, 12, 3)}, r"context_length=13, num_input_channels=3"),
        ({"past_values": torch.zeros(2, 13, 4)}, r"has shape \(2, 13, 4\)"),
        ({"past_values": torch.zeros(13, 3)}, r"has shape \(13, 3\)"),
        ({"past_values": torch.zeros(0, 13, 3)}, r"has shape \(0, 13, 3\).*with at least one series"),
        ({"past_observed_mask": torch.ones(2, 13, 1)}, r"`past_observed_mask` has shape \(2, 13, 1\), expected"),
        ({"future_values": torch.zeros(2, 16, 3)}, r"`future_values` has shape \(2, 16, 3\), expected \(2, 17, 3\)"),
    ],
)
def test_inputs_of_another_shape_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_forecaster().float()(**{"past_values": torch.zeros(2, 13, 3), **inputs})


@pytest.mark.parametrize("name", ["context_length", "prediction_length", "num_input_channels"])
def test_sizes_are_positive(name):
    with pytest.raises(StrictDataclassError, match=f"`{name}` must be at least 1, got 0"):
        make_forecaster(**{name: 0})


def test_more_landmarks_than_time_steps_are_refused():
    with pytest.raises(ValueError, match=r"`num_landmark_tokens` \(14\) is larger than `context_length` \(13\)"):
        make_forecaster(num_landmark_tokens=14)
    with pytest.raises(NotImplementedError, match="context_length=13"):
        make_forecaster().resize_position_embeddings(20)


def test_another_context_on_loading_is_refused_without_a_remedy_that_is_none(tmp_path):
    make_forecaster().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="keeps the lengths and channels that it was made for") as refused:
        SKTformerForPrediction.from_pretrained(tmp_path, context_length=26)
    assert "resize_position_embeddings" not in str(refused.value)
