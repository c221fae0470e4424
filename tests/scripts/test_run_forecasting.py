"""run_forecasting.py from the command line to the files it leaves."""

import csv
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoConfig

import run_forecasting
from experiments.arguments import UserError, load_recipe, parse_args, parse_command, recipes_behind
from experiments.forecasting import jobs, report
from experiments.forecasting.baselines import LAST, NAMES, Baselines
from experiments.forecasting.benchmarks import BENCHMARKS
from experiments.forecasting.forecasters import (
    ForecasterArguments,
    ForecastingArguments,
    ForecastingTrainer,
    build_forecaster,
    forecast,
    load_best,
)
from experiments.forecasting.report import draw_windows, write_report
from experiments.forecasting.series import make_synthetic, read_file
from experiments.forecasting.windows import Scaler, SeriesArguments, make_windows
from experiments.plots import plot_task_curves
from experiments.results import describe_environment, write_json
from experiments.run_folder import METRICS_FILE
from experiments.runs import read_runs


RECIPES = run_forecasting.RECIPES
SIZES = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    **{"num_landmark_features": 4, "initializer_range": 0.1, "scaling_epsilon": 0.001, "channel_independence": True},
}
FLAGS = {
    **{"model_config": json.dumps(SIZES), "context_length": 24, "prediction_length": 6, "learning_rate": 1e-2},
    **{"num_train_epochs": 1, "synthetic_steps": 400, "per_device_train_batch_size": 32, "logging_steps": 5},
    **{"per_device_eval_batch_size": 64, "max_train_samples": 128, "num_plots": 1, "save_strategy": "no"},
    **{"eval_strategy": "no", "load_best_model_at_end": False, "report_to": "none"},
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the script in this process, small; a flag that is None is left out."""
    (tmp_path / "recipe.yaml").write_text(json.dumps(FLAGS))

    def call(*flags: str, name: str = "run") -> None:
        words = ["--recipe", str(tmp_path / "recipe.yaml"), "--use_cpu", "--output_dir", str(tmp_path / name), *flags]
        monkeypatch.setattr(sys, "argv", ["run_forecasting.py", *words])
        run_forecasting.main()

    return call


def write_series(path, num_rows=400, columns=("north", "south"), **changes):
    hours = np.arange(num_rows)
    table = {"when": pd.date_range("2024-01-01", periods=num_rows, freq="h").astype(str)}
    table |= {name: 5 * number + np.sin(2 * np.pi * hours / 12 + number) for number, name in enumerate(columns)}
    pd.DataFrame(table | changes).to_csv(path, index=False)
    return str(path)


def metrics_of(folder, horizon=6):
    return json.loads((folder / f"horizon-{horizon}" / METRICS_FILE).read_text())


def future_of(folder):
    """What `forecast.csv` of a run at a horizon of 6 says, without the timestamps."""
    return pd.read_csv(folder / "horizon-6" / "forecast.csv").to_numpy()[:, 1:].astype(float)


@pytest.mark.parametrize("shares_weights", [False, True])
def test_a_checkpoint_s_weights_of_a_channel_meet_no_other_one(run, tmp_path, shares_weights):
    fields = json.dumps(SIZES | {"channel_independence": shares_weights})
    kind = ["--timestamp_column", "when", "--do_train"]
    run("--model_config", fields, "--data_file", write_series(tmp_path / "s.csv"), *kind)
    swapped = ["--data_file", write_series(tmp_path / "swapped.csv", columns=("south", "north")), *kind]
    checkpoint = ["--model_name_or_path", str(tmp_path / "run" / "horizon-6"), "--model_config", "{}"]
    with pytest.raises(UserError, match=r"synthetic hours .* has no column when, which .* the checkpoint asks for"):
        run(*checkpoint, "--synthetic_steps", "200", "--do_predict", name="made")
    if shares_weights:
        run(*checkpoint, *swapped, name="on")
        assert metrics_of(tmp_path / "on")["columns"] == ["south", "north"]
        return
    with pytest.raises(UserError, match=r"has south in the place of north.*; give --target_columns north south"):
        run(*checkpoint, *swapped, name="on")
    run(*checkpoint, *swapped, "--target_columns", "north", "south", name="on")


def test_a_run_leaves_tables_forecasts_and_pictures(run, tmp_path, capsys, monkeypatch):
    drawn: list = []

    def note(histories, path, title, measure):
        drawn.append(measure[0])
        plot_task_curves(histories, path, title, measure)

    monkeypatch.setattr("experiments.fine_tuning.plot_task_curves", note)
    file = write_series(tmp_path / "s.csv")
    flags = ["--data_file", file, "--timestamp_column", "when", "--do_train", "--do_eval", "--do_predict"]
    run(*flags, "--prediction_length", "6", "9")
    printed = capsys.readouterr().out
    for row in ("this model", "last value", "seasonal naive", "linear"):
        assert f"| {row}" in printed
    assert "6, MSE" in printed
    assert "9, MAE" in printed
    assert drawn == ["eval_mse", "eval_mse"]
    for horizon in (6, 9):
        folder = tmp_path / "run" / f"horizon-{horizon}"
        metrics = metrics_of(tmp_path / "run", horizon)
        assert metrics["score"] == pytest.approx(1 - metrics["eval_mse"])
        assert metrics["columns"] == ["north", "south"]
        assert {"config.json", "model.safetensors", "series.json", "README.md", "forecasting.py"} <= {
            path.name for path in folder.iterdir()
        }
        rows = list(csv.reader((folder / "forecast.csv").open()))
        assert rows[0] == ["when", "north", "south"]
        assert len(rows) == horizon + 1
        assert rows[1][0] == "2024-01-17 16:00:00"
        # In the units of the file: both channels are about where they were.
        assert abs(np.array(rows[1:])[:, 1:].astype(float).mean(axis=0) - [0, 5]).max() < 1.5
        for picture in ("forecast.png", "window-1.png", "curve.png"):
            assert (folder / picture).read_bytes()[:4] == b"\x89PNG"
    card = (folder / "README.md").read_text()
    assert "AutoModelForTimeSeriesPrediction.from_pretrained" in card
    assert "language:" not in card
    for pair in metrics["baselines"]["test"].values():
        assert f"| {pair['mse']:.4f} | {pair['mae']:.4f} |" in card

    # A finished run is left alone, and its forecaster forecasts another file as it is.
    before = (folder / "model.safetensors").stat().st_mtime_ns
    (folder / METRICS_FILE).write_text(
        json.dumps(metrics | {"environment": {**metrics["environment"], "device": "elsewhere", "is_gpu": True}})
    )
    run(*flags, "--prediction_length", "6", "9")
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    here = metrics["environment"]["device"]
    assert f"{here} and elsewhere" in (folder.parent / "forecasting.md").read_text()
    new = write_series(tmp_path / "new.csv", num_rows=60, columns=("other", "south", "north"))
    checkpoint = ["--model_name_or_path", str(tmp_path / "run" / "horizon-6")]
    lengths = ["--context_length", "24", "--prediction_length", "6"]
    run(*checkpoint, *lengths, "--data_file", new, "--do_predict", name="new")
    rows = list(csv.reader((tmp_path / "new" / "horizon-6" / "forecast.csv").open()))
    assert rows[0] == ["when", "north", "south"]
    assert rows[1][0] == "2024-01-03 12:00:00"
    # In the scale that it was trained in, whatever the scale of the file is.
    tenfold = pd.read_csv(new)
    tenfold[["north", "south"]] *= 10
    tenfold.to_csv(tmp_path / "tenfold.csv", index=False)
    run(*checkpoint, *lengths, "--data_file", str(tmp_path / "tenfold.csv"), "--do_predict", name="tenfold")
    scaler = Scaler.from_pretrained(tmp_path / "run" / "horizon-6")
    past = scaler.apply(read_file(str(tmp_path / "tenfold.csv"), "when", ["north", "south"]))[-24:]
    model = load_best(tmp_path / "run" / "horizon-6", ForecasterArguments())
    expected = scaler.restore(forecast(model, {"past_values": torch.tensor(past, dtype=torch.float32)[None]})[0])
    np.testing.assert_allclose(future_of(tmp_path / "tenfold"), expected, rtol=1e-5)
    (tmp_path / "seeds" / "horizon-6" / "seed-0").mkdir(parents=True)
    (tmp_path / "seeds" / "horizon-6" / "seed-0" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"seeds holds a model in each of horizon-6/seed-0; give one"):
        run("--model_name_or_path", str(tmp_path / "seeds"), "--data_file", new, "--do_predict", name="wrong")
    with pytest.raises(UserError, match=r"run holds a model in each of horizon-6, horizon-9; give one"):
        run("--model_name_or_path", str(tmp_path / "run"), "--data_file", new, "--do_predict", name="wrong")
    for targets, message in (
        (("south", "north"), "south in the place of north and north in the place of south; .* north south"),
        (("south", "other"), "has south in the place of north; give .* with the names that it knows in their places"),
        (("other", "north"), "has north in the place of south; give .* with the names that it knows in their places"),
    ):
        swapped = ["--data_file", new, "--do_predict", "--target_columns", *targets]
        with pytest.raises(UserError, match=message):
            run(*checkpoint, *swapped, name="wrong")
    blind = write_series(tmp_path / "blind.csv", num_rows=60, north=[1.0] * 30 + [np.nan] * 30)
    capsys.readouterr()
    (tmp_path / "new" / "horizon-6" / "window-9.png").write_bytes(b"of the series before")
    run(*checkpoint, *lengths, "--data_file", blind, "--mask_missing", "--do_predict", "--overwrite", name="new")
    assert "No value of north was observed in the last 24 steps" in capsys.readouterr().out
    assert not (tmp_path / "new" / "horizon-6" / "window-9.png").exists()
    with pytest.raises(UserError, match=r"forecast.csv holds a forecast; choose another --output_dir"):
        run(*checkpoint, *lengths, "--data_file", new, "--do_predict", name="new")
    run(*checkpoint, *lengths, "--data_file", file, "--do_eval", name="again")
    again, first = metrics_of(tmp_path / "again"), metrics_of(tmp_path / "run")
    assert again["eval_test_mse"] == pytest.approx(first["eval_test_mse"], rel=1e-6)

    (tmp_path / "recipe.yaml").write_text(json.dumps({n: v for n, v in FLAGS.items() if n != "synthetic_steps"}))
    with pytest.raises(UserError, match=r"Which series is .* to continue\? Give --task_name, --data_file or"):
        run(*checkpoint[:2], *lengths, "--do_predict", name="wrong")
    with pytest.raises(
        UserError, match=r"Which series is a forecaster to learn\? .* --synthetic_steps 3000 makes one"
    ):
        run(*lengths, name="wrong")

    for overrides, message in (
        (["--config_overrides", "hidden_size=8"], r"hidden_size of the model .* cannot be changed; leave it out"),
        (["--config_overrides", "no_such_field=3"], "`no_such_field=3` is not field=value"),
        (["--model_type", "patchtst"], r"--model_type patchtst: the checkpoint .* is a sktformer"),
    ):
        with pytest.raises(UserError, match=message):
            run(*checkpoint, *lengths, "--data_file", file, "--do_train", *overrides, name="wrong")
    run(*checkpoint, *lengths, "--data_file", file, "--timestamp_column", "when", "--do_train",
        "--config_overrides", "hidden_dropout_prob=0.3", name="tuned")  # fmt: skip
    assert json.loads((tmp_path / "tuned" / "horizon-6" / "config.json").read_text())["hidden_dropout_prob"] == 0.3

    with pytest.raises(UserError, match=r"made for num_input_channels 2, and 1 is asked for"):
        run(*checkpoint, "--data_file", file, "--target_columns", "north", "--do_train", name="wrong")
    back = tmp_path / "back.csv"
    pd.read_csv(new)[::-1].to_csv(back, index=False)
    with pytest.raises(UserError, match=r"back.csv: the timestamp of row 2, .*, is before that of the row above"):
        run(*checkpoint, *lengths, "--data_file", str(back), "--do_predict", name="wrong")

    one = write_series(tmp_path / "one.csv", columns=("north",))
    for data, more, message in (
        (one, [], "one.csv has no column south, which --target_columns or the checkpoint asks for"),
        (file, ["--target_columns", "north"], "made for 2 channels .*, and --target_columns names 1"),
        (file, ["--prediction_length", "7"], "reads 24 steps and forecasts 6"),
        (
            write_series(tmp_path / "short.csv", num_rows=20),
            [],
            "has 20 time steps, and a forecast reads the last 24; give a longer series\\.",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(*checkpoint, *lengths, "--data_file", data, "--do_predict", *more, name="wrong")


@pytest.mark.parametrize("model_type", ["sktformer", "patchtst", "patchtsmixer"])
def test_metrics_do_not_depend_on_the_batch(run, tmp_path, model_type):
    run("--model_type", model_type, "--max_steps", "2", "--do_train")
    checkpoint = str(tmp_path / "run" / "horizon-6")
    if model_type == "patchtst":  # of the published patches, which the decoder reads one by one
        config = AutoConfig.from_pretrained(checkpoint)
        assert (config.patch_length, config.patch_stride, config.pooling_type) == (16, 8, None)
    measured = []
    for batch in (1, 7, 32, 1000):
        flags = ["--per_device_eval_batch_size", str(batch), "--max_eval_samples", "5", "--max_predict_samples", "45"]
        flags += ["--dataloader_drop_last", "true"]  # which is for training
        run("--model_name_or_path", checkpoint, "--do_eval", *flags, name=f"batch-{batch}")
        metrics = metrics_of(tmp_path / f"batch-{batch}")
        assert metrics["eval_test_samples"] == 45
        measured.append([metrics[f"eval_test_{name}"] for name in ("mse", "mae", "legacy_mse", "legacy_mae")])
    np.testing.assert_allclose(measured, [measured[0]] * 4, rtol=1e-6)
    some, every = ((tmp_path / name / "forecasting.md").read_text() for name in ("batch-7", "run"))
    assert "over some of the windows" in some
    assert report.LEGACY not in some  # the last of these are not those that batches drop
    assert "over all windows" in every  # trained on some
    assert report.LEGACY in every


def test_a_series_of_one_s_own_is_continued_unless_a_stage_is_named(run, tmp_path):
    file = write_series(tmp_path / "s.csv")
    flags = ["--data_file", file, "--timestamp_column", "when", "--target_columns", "north", "--max_steps", "2"]
    run(*flags)
    made = {path.name for path in (tmp_path / "run" / "horizon-6").iterdir()}
    assert {"metrics.json", "forecast.csv", "forecast.png", "window-1.png"} <= made
    run(*flags, "--do_train", name="trained")
    run("--max_steps", "2", name="synthetic")
    for name in ("trained", "synthetic"):
        assert metrics_of(tmp_path / name)["eval_test_samples"] > 0
        assert not (tmp_path / name / "horizon-6" / "forecast.csv").exists()


def test_what_is_not_beaten_is_said_where(tmp_path):
    pair = {"mse": 2.0, "mae": 1.0}
    better, worse, equal = ({"mse": mse, "mae": 9.0} for mse in (1.0, 3.0, 2.0))
    finished = {
        horizon: {
            **{"eval_mse": 2.0, "eval_mae": 1.0, "eval_test_mse": 2.0, "eval_test_mae": 1.0},
            **{"eval_test_legacy_mse": 1.5, "eval_test_legacy_mae": 0.5},
            "baselines": {"validation": dict.fromkeys(NAMES, pair), "test": dict(zip(NAMES, test, strict=True))},
            "published": {"another": {"mse": 0.25}},
            **{"model_type": "sktformer", "parameters": 1, "context_length": 24, "is_partial": False},
            "environment": describe_environment("cpu"),
        }
        for horizon, test in ((6, (worse, worse, equal)), (9, (better, worse, worse)))
    }
    text = write_report(tmp_path, "a series", finished, ("It was put in order.",))
    assert "over all windows; one seed." in text
    verdicts = [line for line in text.splitlines() if line.startswith("- ")]
    last, _, linear = NAMES
    assert verdicts == [
        f"- Not better than the baseline `{name}` at: {at} (MSE)." for name, at in ((last, 9), (linear, 6))
    ] + ["- It was put in order."]
    rows = [line for line in text.splitlines() if line.startswith(("| this model", "| another"))]
    figures = [[float(cell) for cell in line.split("|")[2:-1] if cell.strip()] for line in rows]
    assert figures == [[2, 1, 2, 1], [1.5, 0.5, 1.5, 0.5], [0.25, 0.25], [2, 1, 2, 1]]


@pytest.mark.parametrize("model_type", ["sktformer", "patchtst", "patchtsmixer"])
def test_gaps_are_trained_and_forecast_with_a_mask(run, tmp_path, model_type):
    values = np.sin(np.arange(400) / 2)
    values[[30, 31, 200, 395]] = np.nan
    file = write_series(tmp_path / "s.csv", north=values, south=[4.0] * 400)
    flags = ["--data_file", file, "--timestamp_column", "when", "--model_type", model_type, "--max_steps", "3"]
    with pytest.raises(UserError, match="lacks 4 values, the first one of north in time step 31"):
        run(*flags, "--do_train")
    assert not (tmp_path / "run").exists()
    run(*flags, "--do_train", "--do_predict", "--mask_missing")
    metrics = metrics_of(tmp_path / "run")
    assert np.isfinite([metrics["eval_test_mse"], metrics["eval_loss"]]).all()
    folder = tmp_path / "run" / "horizon-6"
    scaler, model = Scaler.from_pretrained(folder), load_best(folder, ForecasterArguments())
    past = torch.tensor(scaler.apply(read_file(file, "when", None))[None, -24:], dtype=torch.float32)
    window = {"past_values": past.nan_to_num(), "past_observed_mask": ~past.isnan()}
    blind = {"past_values": window["past_values"]}
    read, filled = (scaler.restore(forecast(model, inputs)[0]) for inputs in (window, blind))
    np.testing.assert_allclose(future_of(tmp_path / "run"), read, rtol=1e-5, atol=1e-6)
    assert not np.allclose(read, filled, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("kind", "power"), [("mse", 2), ("mae", 1)])
def test_losses_and_errors_are_those_of_what_was_observed(tmp_path, kind, power):
    arguments = ForecasterArguments(model_config=json.dumps(SIZES), config_overrides=f"loss={kind}")
    model = build_forecaster(arguments, 24, 6, 2).eval()
    training = ForecastingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    window = {"past_values": torch.randn(3, 24, 2), "past_observed_mask": torch.ones(3, 24, 2, dtype=torch.bool)}
    window |= {"future_values": torch.randn(3, 6, 2), "future_observed_mask": torch.rand(3, 6, 2) < 0.6}
    loss, sums, counts = ForecastingTrainer(model=model, args=training).prediction_step(model, window, False)
    errors = forecast(model, window) - window["future_values"].numpy()
    kept = [e[known] for e, known in zip(errors, window["future_observed_mask"].numpy(), strict=True)]
    assert counts.tolist() == list(map(len, kept))
    np.testing.assert_allclose(sums, [[(e**2).sum(), abs(e).sum()] for e in kept], rtol=1e-5)
    assert loss.item() == pytest.approx((abs(np.concatenate(kept)) ** power).mean(), rel=1e-5)


@pytest.mark.parametrize("best", ["seed-42", "seed-43"])
def test_the_best_seed_forecasts(tmp_path, monkeypatch, best):
    def load(folder, arguments):
        raise InterruptedError(folder.name)

    names = ("seed-42", "seed-43")
    for name in names:
        write_json(tmp_path / "horizon-6" / name / METRICS_FILE, {"score": 0.9 if name == best else 0.1})
    write_json(tmp_path / "horizon-6" / METRICS_FILE, {"trials": [{"folder": name} for name in names]})
    monkeypatch.setattr(jobs, "load_best", load)
    command: Any = SimpleNamespace(groups=(None, None, SimpleNamespace(output_dir=tmp_path, do_train=True)))
    nothing: Any = None
    with pytest.raises(InterruptedError, match=best):
        jobs.predict_future(command, nothing, nothing, nothing, 6)


def test_windows_are_drawn_in_the_units_of_the_series(tmp_path, monkeypatch):
    drawn: list[Any] = []
    monkeypatch.setattr(report, "plot_forecasts", lambda *arguments: drawn.append(arguments))
    series = make_synthetic(200, 0)
    scaler = Scaler.fit(series, 140)
    windows = make_windows(series, scaler, SeriesArguments(), 24, 6)
    model = build_forecaster(ForecasterArguments(model_config=json.dumps(SIZES)), 24, 6, len(series.columns))
    draw_windows(tmp_path, series, scaler, model, windows["test"], Baselines(windows, 1, True), [LAST], 2)
    for place, (columns, past, truth, lines, *_) in zip((0, -1), drawn, strict=True):
        origin = 160 if place == 0 else 194
        assert columns == series.columns
        np.testing.assert_array_equal(past, series.values[origin - 24 : origin])
        np.testing.assert_array_equal(truth, series.values[origin : origin + 6])
        np.testing.assert_allclose(lines[LAST], np.tile(past[-1], (6, 1)), rtol=1e-4, atol=1e-4)
        window = {"past_values": torch.tensor(scaler.apply(series)[None, origin - 24 : origin], dtype=torch.float32)}
        np.testing.assert_allclose(lines["forecast"], scaler.restore(forecast(model, window)[0]), rtol=1e-5, atol=1e-6)


def test_it_learns_and_halves_its_rate(run, tmp_path):
    flags = ["--num_train_epochs", "3", "--max_train_samples", "256", "--learning_rate_decay", "0.5", "--seeds", "2"]
    run("--do_train", *flags)
    summary = metrics_of(tmp_path / "run")
    assert [trial["folder"] for trial in summary["trials"]] == ["seed-42", "seed-43"]
    trial = json.loads((tmp_path / "run" / "horizon-6" / "seed-42" / METRICS_FILE).read_text())
    rates = [entry["learning_rate"] for entry in trial["history"] if "learning_rate" in entry]
    np.testing.assert_allclose([rates[0], rates[-1]], [1e-2, 2.5e-3])
    assert trial["eval_test_mse"] < 0.7 * summary["baselines"]["test"]["last value"]["mse"]
    seeds = [
        json.loads((path / "config.json").read_text()) for path in (tmp_path / "run" / "horizon-6").glob("seed-*")
    ]
    assert sorted(config["landmark_seed"] for config in seeds) == [42, 43]
    report = (tmp_path / "run" / "forecasting.md").read_text()
    assert "over all windows; mean and standard deviation of 2 seeds." in report
    assert " ± " in report


@pytest.mark.parametrize("flags", [["--lr_scheduler_type", "cosine"], ["--warmup_steps", "5"]])
def test_a_schedule_takes_the_place_of_a_recipe_s_decay(flags):
    training = parse_command(run_forecasting.ARGUMENTS, default_recipe=RECIPES / "base.yaml", argv=flags).groups[-1]
    assert training.learning_rate_decay is None
    assert training.lr_scheduler_type == (flags[1] if flags[1] == "cosine" else "linear")


def test_the_best_of_a_search_is_reported_and_not_their_mean(run, tmp_path):
    rates = ["--search_epochs", "1", "--search_learning_rates", "1e-5", "3e-2", "--search_batch_sizes", "64"]
    run("--do_train", "--search", "--prediction_length", "6", "9", *rates)
    results = json.loads((tmp_path / "run" / "forecasting.json").read_text())
    for horizon in (6, 9):
        best = max(metrics_of(tmp_path / "run", horizon)["trials"], key=lambda trial: trial["score"])
        assert results["test"]["this model"][str(horizon)]["mse"] == [best["eval_test_mse"]]
    with pytest.raises(UserError, match=r"holds a model in each of epochs-1-rate-0\.03-batch-64; give one of"):
        run(
            "--do_predict",
            "--model_name_or_path",
            str(tmp_path / "run" / "horizon-6"),
            "--model_config",
            "{}",
            name="x",
        )
    report = (tmp_path / "run" / "forecasting.md").read_text()
    assert "one seed, the best on validation of 2 trials (seed 42, epochs 1, rate 0.03, batch 64)" in report
    assert " ± " not in report


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--do_eval"], "Nothing is trained: add --do_train, or name a forecaster"),
        (["--prediction_length", "0"], "--prediction_length is 0; it must be at least 1"),
        (
            ["--prediction_length", "100"],
            "the validation part has .* time steps, .* other --split_fractions, or train",
        ),
        (["--model_config", "[]"], "--model_config must be a mapping"),
        (["--model_config", '{"hidden_size": 7}'], "No sktformer can be made of these fields"),
        (["--config_overrides", "num_harmonix=3"], "`num_harmonix=3` is not field=value with a field"),
        (["--config_overrides", "prediction_length=3"], "has a flag of its own"),
        (["--prediction_length", "6", "9", "--resume_from_checkpoint", "x"], "names one horizon's; give one"),
        # A checkpoint has one horizon, whatever its series is told at.
        (["--prediction_length", "6", "9", "--push_to_hub", "--model_name_or_path", "x"], "cannot reach the Hub as a"),
        (["--prediction_length", "6", "9", "--push_to_hub"], "--push_to_hub pushes one model; give one --prediction"),
        (["--learning_rate_decay", "2"], "--learning_rate_decay is 2; it must lie between 0 and 1"),
        (["--num_plots", "-3"], "--num_plots is -3; it must be at least 0"),
        (
            ["--calibrate_head", "true", "--head_learning_rate", "1"],
            "--calibrate_head and --head_learning_rate mean no",
        ),
        (["--layer_decay", "0.5"], "--layer_decay mean nothing to a forecaster; leave them out"),
        (["--fit_head"], "--fit_head mean nothing to a forecaster; leave them out"),
        (["--label_smoothing_factor", "0.5"], "--label_smoothing_factor mean nothing to a forecaster; leave them out"),
        (["--train_sampling_strategy", "group_by_length"], "--train_sampling_strategy mean nothing to a forecaster"),
        (["--data_file", "none.csv"], "none.csv: no such file"),
        (["--model_name_or_path", "nowhere"], "The checkpoint nowhere cannot be loaded"),
    ],
)
def test_mistakes_are_found_before_a_folder_is_touched(run, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run(*([] if "--do_eval" in flags else ["--do_train"]), *flags)
    assert not (tmp_path / "run").exists()


def test_baselines_of_a_finished_run_keep_their_season(run, tmp_path):
    run("--do_train", "--seasonal_period", "2")
    with pytest.raises(UserError, match="holds this run with --seasonal_period 2, not 9; choose another --output_dir"):
        run("--do_train", "--seasonal_period", "9")
    before = metrics_of(tmp_path / "run")
    run("--do_train", "--seasonal_period", "9", "--overwrite")
    after = metrics_of(tmp_path / "run")
    assert (before["seasonal_period"], after["seasonal_period"]) == (2, 9)
    assert before["baselines"]["test"]["seasonal naive"] != after["baselines"]["test"]["seasonal naive"]


def test_a_report_gives_way_to_no_other_one(run, tmp_path):
    run("--do_train")
    before = (tmp_path / "run" / "forecasting.md").read_text()
    file = write_series(tmp_path / "other.csv")
    with pytest.raises(
        UserError, match=r"holds forecasts of synthetic hours .seed 0., not of other\.csv; choose another"
    ):
        run("--do_train", "--data_file", file, "--timestamp_column", "when", "--prediction_length", "5")
    with pytest.raises(UserError, match="holds results of --prediction_length 6; name them, too, choose another"):
        run("--do_train", "--prediction_length", "9")
    assert not (tmp_path / "run" / "horizon-9").exists()
    assert (tmp_path / "run" / "forecasting.md").read_text() == before
    run("--do_train", "--prediction_length", "6", "9")
    assert set(json.loads((tmp_path / "run" / "forecasting.json").read_text())["test"]["this model"]) == {"6", "9"}


def test_a_forecast_that_cannot_be_written_is_refused_beforehand(run, tmp_path):
    run("--do_train", "--timestamp_column", "when", "--data_file", file := write_series(tmp_path / "s.csv"))
    checkpoint = str(tmp_path / "run" / "horizon-6")
    with pytest.raises(UserError, match=r"--output_dir .*s\.csv cannot be written"):
        run(
            "--model_name_or_path",
            checkpoint,
            "--model_config",
            "{}",
            "--do_predict",
            "--data_file",
            file,
            name="s.csv",
        )


@pytest.mark.parametrize("name", ["mse", "eval_mae"])
def test_the_lowest_error_is_the_best(run, tmp_path, name):
    every = [
        "--eval_strategy",
        "epoch",
        "--save_strategy",
        "epoch",
        "--num_train_epochs",
        "3",
        "--learning_rate",
        "1e-3",
    ]
    run("--do_train", *every, "--load_best_model_at_end", "true", "--metric_for_best_model", name)
    metrics = metrics_of(tmp_path / "run")
    key = f"eval_{name.removeprefix('eval_')}"
    errors = {entry["step"]: entry[key] for entry in metrics["history"] if key in entry}
    assert metrics["best_step"] == min(errors, key=errors.__getitem__) != next(iter(errors))


def test_a_series_too_short_for_any_forecast_is_said_to_be(run, tmp_path):
    file = write_series(tmp_path / "short.csv", num_rows=20, when=range(20))
    with pytest.raises(UserError, match="the last 24; give a longer series, or a smaller --context_length"):
        run("--data_file", file)
    one = write_series(tmp_path / "one.csv", num_rows=1, when=[0])
    with pytest.raises(UserError, match=r"one\.csv has 1 time steps, none of them in the part for training"):
        run("--data_file", one, "--context_length", "1", "--prediction_length", "1")


@pytest.mark.parametrize("model_type", ["sktformer", "patchtst"])
def test_a_checkpoint_in_half_precision_is_trained_in_whole(model_type, tmp_path):
    sizes = json.dumps(dict(list(SIZES.items())[:4]))
    made = ForecasterArguments(model_config=sizes, model_type=model_type)
    build_forecaster(made, 24, 6, 2).bfloat16().save_pretrained(tmp_path)
    model = build_forecaster(ForecasterArguments(model_name_or_path=str(tmp_path)), 24, 6, 2)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


# Recipes


def test_recipes_parse_and_make_models():
    for path in sorted(RECIPES.rglob("*.yaml")):
        base = [] if path.name in ("base.yaml", "quickstart.yaml") else [str(RECIPES / "best" / "base.yaml")]
        forecaster, arguments, _ = parse_args(run_forecasting.ARGUMENTS, ["--recipe", *base, str(path), "--use_cpu"])
        build_forecaster(forecaster, arguments.context_length or 96, 96, 3)
        given = parse_command(run_forecasting.ARGUMENTS, argv=["--recipe", str(path)]).given
        assert given.keys() == {key for behind in recipes_behind(str(path)) for key in load_recipe(behind)}
        if base:
            shared = load_recipe(base[0])
            assert not {key for key, value in load_recipe(path).items() if shared.get(key) == value}


def test_the_default_recipe_is_the_paper_s():
    forecaster, _, training = parse_args(
        run_forecasting.ARGUMENTS, ["--recipe", str(RECIPES / "base.yaml"), "--use_cpu"]
    )
    config = build_forecaster(forecaster, 96, 96, 7).config
    assert (config.num_harmonics, config.scaling_epsilon, config.scaling_location) == (8, 1.0, "mean")
    assert not any((config.channel_independence, config.use_mlp, config.embed_level))
    assert (config.num_segments, config.num_landmark_tokens, config.num_landmark_features) == (8, 8, 8)
    assert (training.learning_rate, training.learning_rate_decay, training.num_train_epochs) == (1e-4, 0.5, 10)
    assert (training.early_stopping_patience, training.per_device_train_batch_size) == (3, 32)


def test_runs_are_the_paper_s_24_cells():
    cells = []
    for arguments in read_runs(RECIPES.parent / "runs" / "forecasting.txt").values():
        _, series, _ = parse_args(run_forecasting.ARGUMENTS, [*arguments, "--use_cpu"])
        cells += [(series.task_name, horizon) for horizon in series.horizons()]
    paper = ("ettm2", "electricity", "exchange", "traffic", "weather", "ili")
    assert cells == [(name, horizon) for name in paper for horizon in BENCHMARKS[name].horizons]


@pytest.mark.parametrize(
    ("argv", "recipe"),
    [
        ([], "quickstart.yaml"),
        (["--task_name", "ili"], "base.yaml"),
        (["--data_file", "x.csv"], "best/base.yaml"),
        (["--data_file=x.csv"], "best/base.yaml"),
        (["--seed", "3"], "base.yaml"),
    ],
)
def test_which_recipe_a_command_gets(monkeypatch, argv, recipe):
    def prepare(training, given):
        raise InterruptedError

    read = []
    parse = run_forecasting.parse_command

    def parse_command(*args):
        read.append(parse(*args))
        return read[0]

    monkeypatch.setattr(run_forecasting, "parse_command", parse_command)
    monkeypatch.setattr(run_forecasting, "prepare", prepare)
    monkeypatch.setattr(sys, "argv", ["run_forecasting.py", *argv])
    with pytest.raises(InterruptedError):
        run_forecasting.main()
    assert read[0].recipes == [str(RECIPES / recipe)]


def test_recipes_that_change_their_rate_by_the_epoch_take_steps():
    """The last source wins, also over the fall of the rate that counts epochs."""
    for recipe in ("base.yaml", "best/base.yaml"):
        argv = ["--max_steps", "5", "--output_dir", "x", "--use_cpu"]
        training = parse_command(run_forecasting.ARGUMENTS, default_recipe=RECIPES / recipe, argv=argv).groups[-1]
        assert (training.max_steps, training.learning_rate_decay) == (5, None)


def test_what_decides_a_forecaster_makes_another_run(run):
    run("--do_train", "--learning_rate_decay", "0.5")
    for changed, message in (
        (["--learning_rate_decay", "0.9"], r"learning_rate_decay: 0\.5 there, 0\.9 here"),
        (["--learning_rate_decay", "0.5", "--max_eval_samples", "5"], r"windows\.validation"),
    ):
        with pytest.raises(UserError, match=message):
            run("--do_train", *changed)


def test_a_checkpoint_in_another_scale_makes_another_evaluation(run, tmp_path):
    run("--do_train", "--max_steps", "2")
    folder = tmp_path / "run" / "horizon-6"
    flags = ["--model_name_or_path", str(folder), "--model_config", "{}", "--do_eval"]
    run(*flags, name="measured")
    scaler = json.loads((folder / "series.json").read_text())
    (folder / "series.json").write_text(json.dumps(scaler | {"mean": [0.0] * 3}))
    with pytest.raises(UserError, match="scaler: "):
        run(*flags, name="measured")


def test_what_a_forecaster_was_trained_on_is_not_what_it_is_measured_by(run, tmp_path, caplog):
    caplog.set_level("INFO")
    series = ["--data_file", write_series(tmp_path / "s.csv"), "--timestamp_column", "when"]
    run(*series, "--do_train", "--max_steps", "2", "--split_fractions", "0.8", "0.1", "0.1")
    again = [*series, "--model_name_or_path", str(tmp_path / "run" / "horizon-6"), "--model_config", "{}", "--do_eval"]
    run(*again, name="measured")
    for name in ("eval_samples", "eval_test_samples", "eval_test_mse"):
        assert metrics_of(tmp_path / "measured")[name] == pytest.approx(metrics_of(tmp_path / "run")[name])
    assert "has learnt" not in caplog.text
    assert "as that of the checkpoint was, --split_fractions 0.8 0.1 0.1." in caplog.text
    run(*again, "--split_fractions", "0.5", "0.2", "0.3", name="other")
    assert "was trained with --split_fractions 0.8 0.1 0.1; of the series that it has learnt" in caplog.text
    assert metrics_of(tmp_path / "other")["eval_test_samples"] > metrics_of(tmp_path / "run")["eval_test_samples"]
    # Nor does it go on with what it will be measured by, unless that is asked for, the default as well.
    on = [*again[:-1], "--do_train", "--max_steps", "1"]
    run(*on, name="on")
    assert metrics_of(tmp_path / "on")["eval_test_samples"] == metrics_of(tmp_path / "run")["eval_test_samples"]
    caplog.clear()
    run(*on, "--split_fractions", "0.7", "0.1", "0.2", name="seen")
    assert "was trained with --split_fractions 0.8 0.1 0.1; of the series that it has learnt" in caplog.text
    assert metrics_of(tmp_path / "seen")["eval_test_samples"] > metrics_of(tmp_path / "run")["eval_test_samples"]


def test_published_errors_are_of_the_whole_series(run, tmp_path, capsys):
    (tmp_path / "series").mkdir()
    flags = [
        "--task_name",
        "exchange",
        "--data_dir",
        str(tmp_path / "series"),
        "--timestamp_column",
        "when",
        "--do_train",
    ]
    lengths = ["--context_length", "96", "--prediction_length", "96", "--max_steps", "1"]
    only = ["--target_columns", "north"]
    for name, num_rows, targets in (("all", 7588, []), ("one", 7588, only), ("cut", 1200, [])):
        write_series(tmp_path / "series" / "exchange_rate.csv", num_rows=num_rows)
        run(*flags, *lengths, *targets, name=name)
        assert bool(metrics_of(tmp_path / name, 96)["published"]) == (name == "all")
        note = "It has 1,200 time steps, and the public series 7,588"
        for text in (capsys.readouterr().out, (tmp_path / name / "forecasting.md").read_text()):
            assert (note in text) == (name == "cut")


def test_a_run_is_uploaded_again_with_its_report(run, tmp_path, monkeypatch):
    seen: list = []
    monkeypatch.setattr(
        run_forecasting, "upload_run", lambda *_: seen.append((tmp_path / "run" / "forecasting.md").is_file())
    )
    run("--do_train", "--max_steps", "2")
    assert seen == [True]
