"""What is written about forecasters: tables, model cards, forecasts of the future and pictures of windows."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from experiments.arguments import UserError
from experiments.forecasting.baselines import NAMES, Baselines
from experiments.forecasting.forecasters import forecast
from experiments.forecasting.plots import plot_forecasts
from experiments.forecasting.series import Series
from experiments.forecasting.windows import Scaler, Windows
from experiments.model_card import CardFacts, write_card
from experiments.results import command_line, format_origin, format_table, read_json, write_atomically, write_results
from experiments.trials import counted_trials, describe_trials


THIS = "this model"
LEGACY = "this model, last windows dropped as the paper's code does"
WINDOW_PICTURE = "window-{}.png"
_MEASURES = ("mse", "mae")
_REPORT = "forecasting"


def summarise(metrics: Mapping[str, Any], prefix: str) -> dict[str, list[float]]:
    """Mean and, of several seeds, standard deviation of a finished job's MSE and MAE; empty if not measured."""
    trials = counted_trials(metrics)
    keys = {name: f"{prefix}{name}" for name in _MEASURES}
    values = {name: [trial[key] for trial in trials] for name, key in keys.items() if key in trials[0]}
    return {n: [statistics.mean(v), *([statistics.stdev(v)] if len(v) > 1 else [])] for n, v in values.items()}


def check_report(folder: Path, title: str, horizons: Sequence[int]) -> None:
    """A `UserError` if the report in a folder is of another series, or of horizons that a new one would leave out."""
    file = folder / f"{_REPORT}.json"
    if not file.is_file():
        return
    there = read_json(file)
    lost = [horizon for horizon in there.get("test", {}).get(THIS, {}) if int(horizon) not in horizons]
    if there.get("series") != title:
        what = f"--output_dir {folder} holds forecasts of {there.get('series')}, not of {title}"
        raise UserError(f"{what}; choose another --output_dir, or pass --overwrite.")
    if lost:
        remedy = "name them, too, choose another --output_dir, or pass --overwrite"
        raise UserError(f"--output_dir {folder} holds results of --prediction_length {' '.join(lost)}; {remedy}.")


def write_report(
    folder: Path, title: str, finished: Mapping[int, Mapping[str, Any]], notes: Sequence[str] = ()
) -> str:
    """
    Write `forecasting.md` and `forecasting.json`: a row for each forecaster, columns for each horizon.

    Args:
        folder (`Path`): Where to.
        title (`str`): Of the series.
        finished (mapping): `metrics.json` of each horizon.
        notes (sequence of `str`): What was done to the series.

    Returns:
        `str`: the Markdown.
    """
    tables, results = [], {}
    for part in ("test", "validation"):
        rows: dict[str, dict[str, str]] = {}
        values: dict[str, dict[str, Any]] = {}
        for horizon, metrics in finished.items():
            known = {name: {key: [v] for key, v in pair.items()} for name, pair in metrics["baselines"][part].items()}
            known = {THIS: summarise(metrics, "eval_test_" if part == "test" else "eval_"), **known}
            if part == "test":
                # Of windows spread over the part the last ones are not those that batches drop.
                if not metrics.get("is_sampled"):
                    known |= {LEGACY: summarise(metrics, "eval_test_legacy_")}
                known |= {n: {k: [v] for k, v in pair.items()} for n, pair in metrics["published"].items()}
            for name, pair in known.items():
                for key, of_key in pair.items():
                    cell = " ± ".join(f"{value:.4f}" for value in of_key)
                    rows.setdefault(name, {})[f"{horizon}, {key.upper()}"] = cell
                values.setdefault(name, {})[str(horizon)] = pair
        header = [f"{horizon}, {key.upper()}" for horizon in finished for key in _MEASURES]
        cells = [[name, *(row.get(column, "") for column in header)] for name, row in rows.items()]
        tables += [f"## {part.capitalize()} windows", "\n".join(format_table(["", *header], cells))]
        results[part] = values
    first = next(iter(finished.values()))
    said: dict[str, str] = {}  # of a search the best is another one at every horizon
    for horizon, metrics in finished.items():
        runs = describe_trials(metrics)
        said[runs] = f"{said[runs]} and {horizon}" if runs in said else str(horizon)
    paragraphs = [
        f"# Forecasts of {title}",
        f"{first['model_type']}, {first['parameters']:,} parameters at a horizon of {next(iter(finished))}; contexts "
        f"of {first['context_length']} steps. Errors on scaled values, over "
        + ("some of the windows, spread evenly over each part" if first.get("is_sampled") else "all windows")
        + f"; {', '.join(f'{runs} at a horizon of {at}' if len(said) > 1 else runs for runs, at in said.items())}.",
        *tables,
        "\n".join([*_verdicts(results["test"]), *(f"- {note}" for note in notes)]),
        format_origin([metrics["environment"] for metrics in finished.values()], command_line()),
    ]
    return write_results(folder / _REPORT, {"series": title, "command": command_line(), **results}, paragraphs)


def _verdicts(values: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> list[str]:
    """Which baselines are not beaten, and where: a forecaster that repeats less well than that has learned nothing."""
    lines = []
    for name in NAMES:
        lost = [h for h, pair in values[THIS].items() if pair["mse"][0] >= values[name][h]["mse"][0]]
        if lost:
            lines.append(f"- Not better than the baseline `{name}` at: {', '.join(lost)} (MSE).")
    return lines or ["- Better than every baseline at every horizon (MSE)."]


def write_forecaster_card(title: str, folder: Path, metrics: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Write the model card of a trial."""
    scores = {name: metrics[f"eval_test_{name}"] for name in _MEASURES}
    rows = {THIS: scores, **metrics["baselines"]["test"], **metrics["published"]}
    auto = "AutoModelForTimeSeriesPrediction" if metrics["model_type"] == "sktformer" else metrics["class"]
    facts = CardFacts(
        script="run_forecasting.py",
        pipeline_tag="time-series-forecasting",
        description=f"A forecaster of type `{metrics['model_type']}` with {metrics['parameters']:,} parameters, "
        f"trained on {title} with seed {metrics['seed']}: it reads {metrics['context_length']} time steps of "
        f"{len(metrics['columns'])} channels and forecasts {metrics['prediction_length']}.",
        example=f"from transformers import {auto}\n\n"
        f'model = {auto}.from_pretrained("{{title}}"{{remote}}).eval()\n'
        "# The last context_length steps of the series, scaled by the means and deviations in series.json.\n"
        "forecast = model(past_values=past_values).prediction_outputs",
        scores=scores,
        results="\n".join(
            format_table(
                ["", "MSE", "MAE"],
                [[name, *(f"{row[m]:.4f}" if m in row else "" for m in _MEASURES)] for name, row in rows.items()],
            )
        ),
        evaluated_on=f"{metrics['eval_test_samples']:,} windows of the test part of {title}",
        tags=("time-series",),
    )
    write_card(folder, facts, metrics, arguments)


def write_future(file: Path, series: Series, scaler: Scaler, model: PreTrainedModel) -> list[str]:
    """
    Write a CSV with a row for each step after the last one, and draw it in a PNG of the same name; gives the channels
    of which nothing was observed in the context.
    """
    length, horizon = model.config.context_length, model.config.prediction_length
    values = scaler.apply(series)[-length:]
    observed = torch.tensor(~np.isnan(values))
    window = {"past_values": torch.tensor(np.nan_to_num(values), dtype=torch.float32)[None]}
    if not observed.all():
        window["past_observed_mask"] = observed[None]
    future = scaler.restore(forecast(model, window)[0])
    table = pd.DataFrame(future, columns=series.columns)
    known = series.timestamp_column if series.timestamps is not None else None
    name = known or ("time" if "time" not in series.columns else "step")
    table.insert(0, name, series.following_timestamps(horizon), allow_duplicates=True)
    write_atomically(file, table.to_csv(index=False, float_format="%.10g"))
    lines = {"forecast": future}
    plot_forecasts(
        series.columns, series.values[-length:], None, lines, file.with_suffix(".png"), f"{series.source}, next steps"
    )
    return [name for name, known in zip(series.columns, observed.any(dim=0).tolist(), strict=True) if not known]


def draw_windows(
    folder: Path,
    series: Series,
    scaler: Scaler,
    model: PreTrainedModel,
    windows: Windows,
    baselines: Baselines,
    names: Sequence[str],
    number: int,
) -> None:
    """Draw some windows, spread evenly over a part, with the forecast and baselines: `window-1.png` and so on."""
    places = np.unique(np.linspace(0, len(windows) - 1, number).round().astype(int))
    for count, place in enumerate(places, start=1):
        window = {name: values[None] for name, values in windows[int(place)].items()}
        origin = windows.origins[place : place + 1]
        lines = {"forecast": forecast(model, window)[0]}
        lines |= {name: baselines.forecast(name, origin)[0].numpy() for name in names}
        past = series.values[origin[0] - windows.context_length : origin[0]]
        truth = series.values[origin[0] : origin[0] + windows.prediction_length]
        when = origin[0] if series.timestamps is None else series.timestamps[origin[0]]
        plot_forecasts(
            series.columns,
            past,
            truth,
            {name: scaler.restore(values) for name, values in lines.items()},
            folder / WINDOW_PICTURE.format(count),
            f"{series.source}, forecast from {when}",
        )
