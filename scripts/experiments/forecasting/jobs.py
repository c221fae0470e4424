"""A horizon of a series as a job of fine-tuning, and the forecast of what follows."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from experiments.arguments import Command, UserError
from experiments.fine_tuning import Job
from experiments.forecasting.baselines import NAMES, Baselines
from experiments.forecasting.forecasters import (
    ForecasterArguments,
    ForecastingTrainer,
    build_forecaster,
    compute_metrics,
    load_best,
    load_config,
)
from experiments.forecasting.report import WINDOW_PICTURE, draw_windows, write_forecaster_card, write_future
from experiments.forecasting.series import Series
from experiments.forecasting.windows import (
    SCALER_FILE,
    Scaler,
    SeriesArguments,
    Windows,
    fingerprint_series,
    make_windows,
)
from experiments.model_card import public_name
from experiments.models import fingerprint_checkpoint
from experiments.results import check_writable
from experiments.sized_models import describe_config
from experiments.trials import best_trial, read_metrics


logger = logging.getLogger(__name__)
FORECAST_FILE = "forecast.csv"


def folder_name(horizon: int) -> str:
    """The folder of a horizon in that of the run."""
    return f"horizon-{horizon}"


def fit_to_checkpoint(
    arguments: SeriesArguments, forecaster: ForecasterArguments, trains: bool
) -> tuple[SeriesArguments, Scaler | None]:
    """
    The lengths and the split of a checkpoint, where there is one, and its columns and scale where nothing is trained.

    Raises:
        UserError: if other ones are asked for.
    """
    name = forecaster.model_name_or_path
    if not name:
        default = arguments.benchmark.context_length if arguments.benchmark else 96
        return replace(arguments, context_length=arguments.context_length or default), None
    config: Any = load_config(forecaster)
    lengths = (config.context_length, [config.prediction_length])
    asked = (arguments.context_length or lengths[0], arguments.prediction_length or lengths[1])
    if asked != lengths:
        raise UserError(
            f"The checkpoint {name} reads {config.context_length} steps and forecasts {config.prediction_length}; "
            "leave out --context_length and --prediction_length."
        )
    arguments = replace(arguments, context_length=lengths[0], prediction_length=lengths[1])
    if trains and not (Path(name) / SCALER_FILE).is_file():  # of another library, or of the Hub
        return arguments, None
    scaler = Scaler.from_pretrained(name)
    if scaler.split_fractions and not arguments.task_name:
        fractions = arguments.split_fractions or scaler.split_fractions
        if fractions != scaler.split_fractions:
            trained = " ".join(map(str, scaler.split_fractions))
            what = "of the series that it has learnt parts may hold what it has seen"
            logger.warning("%s was trained with --split_fractions %s; %s.", name, trained, what)
        arguments = replace(arguments, split_fractions=fractions)
    if trains:
        return arguments, None
    if arguments.target_columns and len(arguments.target_columns) != len(scaler.columns):
        raise UserError(
            f"The checkpoint {name} was made for {len(scaler.columns)} channels ({', '.join(scaler.columns)}), and "
            f"--target_columns names {len(arguments.target_columns)}."
        )
    arguments = replace(
        arguments,
        target_columns=arguments.target_columns or scaler.columns,
        timestamp_column=arguments.timestamp_column or scaler.timestamp_column,
    )
    return arguments, scaler


def check_channels(forecaster: ForecasterArguments, series: Series, trains: bool) -> None:
    """A `UserError` if a checkpoint's weights or scales of a channel would meet another one, out of order."""
    name = forecaster.model_name_or_path
    if not name or not (Path(name) / SCALER_FILE).is_file():
        return
    columns = Scaler.from_pretrained(name).columns
    # Where nothing is trained each has its scale, and of our architecture its weights, too, unless it shares them.
    is_ordered = not trains or not getattr(load_config(forecaster), "channel_independence", True)
    # New names are those of another series, whose channels take the places of these.
    pairs = zip(series.columns, columns, strict=False)
    moved = [f"{now} in the place of {then}" for now, then in pairs if now in columns and now != then]
    if is_ordered and moved and len(series.columns) == len(columns):
        order = ", ".join(columns)
        is_whole = {*columns} == {*series.columns}
        names = " ".join(columns) if is_whole else "with the names that it knows in their places"
        what = f"was made for the channels {order} in this order, and {series.source} has {' and '.join(moved)}"
        raise UserError(f"The checkpoint {name} {what}; give --target_columns {names}.")


def make_job(
    command: Command, arguments: SeriesArguments, series: Series, scaler: Scaler, horizon: int
) -> tuple[Job, Baselines]:
    """A horizon as the engine takes it, and the baselines on its windows."""
    forecaster, _, training = command.groups
    context, benchmark, name = int(arguments.context_length or 0), arguments.benchmark, forecaster.model_name_or_path
    windows = make_windows(series, scaler, arguments, context, horizon)
    build = partial(build_forecaster, forecaster, context, horizon, len(series.columns))
    model = build()  # which shows now whether it can be made
    parts = {part: rows for part, rows in windows.items() if training.do_train or part != "train"}
    job = Job(
        name=folder_name(horizon),
        title=f"{series.source}, {horizon} steps",
        build_model=build,
        splits=parts,  # type: ignore[arg-type]
        collator=default_collate,
        processing_class=scaler,
        compute_metrics=compute_metrics,
        shown=("mse", "mae"),
        identity={
            "data": fingerprint_series(series),
            "windows": {part: [len(rows), *map(int, rows.origins[[0, -1]])] for part, rows in parts.items()},
            "lengths": [context, horizon],
            "scaler": [*scaler.mean, *scaler.std],
            "checkpoint": fingerprint_checkpoint(name) if name else describe_config(model, forecaster),
            "config": describe_config(model, forecaster) if name else None,
            "learning_rate_decay": training.learning_rate_decay,
        },
        facts={
            "started_from": public_name(name) if name else "scratch",
            "is_partial": arguments.is_partial,
            "is_sampled": any((arguments.max_eval_samples, arguments.max_predict_samples)),
            "context_length": context,
            "prediction_length": horizon,
            "columns": series.columns,
            "class": type(model).__name__,
            # Published errors are means over all channels.
            "published": benchmark.published_at(horizon, context) if benchmark and series.is_whole else {},
        },
        write_card=partial(write_forecaster_card, series.source),
        trainer_class=ForecastingTrainer,
        drawn=("eval_mse", "validation MSE (scaled)", 1.0),
    )
    return job, Baselines(windows, arguments.season(series), bool(training.disable_tqdm))


def check_season(folder: Path, baselines: Baselines) -> None:
    """A `UserError` if the baselines of a finished run were measured with another season."""
    there = read_metrics(folder).get("seasonal_period", baselines.season)
    if there != baselines.season:
        what = f"{folder} holds this run with --seasonal_period {there}, not {baselines.season}"
        raise UserError(f"{what}; choose another --output_dir, or pass --overwrite.")


def check_future(command: Command, arguments: SeriesArguments, series: Series) -> None:
    """
    Find out now what would stop a forecast with a trained checkpoint.

    Raises:
        UserError: if the series is shorter than what is read, another forecast would be lost, or none can be written.
    """
    training = command.groups[-1]
    context = int(arguments.context_length or 0)
    if len(series.values) < context:
        steps = f"{series.source} has {len(series.values):,} time steps, and a forecast reads the last {context:,}"
        remedy = "" if command.groups[0].model_name_or_path else ", or a smaller --context_length"
        raise UserError(f"{steps}; give a longer series{remedy}.")
    if not (training.do_train or training.do_eval):  # whose folders are claimed
        check_writable(training.output_dir, "output_dir")
    for horizon in arguments.horizons():
        file = Path(training.output_dir) / folder_name(horizon) / FORECAST_FILE
        if file.exists() and not (training.do_train or training.do_eval or training.overwrite):
            raise UserError(f"{file} holds a forecast; choose another --output_dir, or pass --overwrite.")


def delete_forecast(folder: Path) -> None:
    """Delete what [`predict_future`] has left of an earlier forecaster, or of another series."""
    forecast = (folder / FORECAST_FILE).with_suffix(".*").name
    for file in (*folder.glob(forecast), *folder.glob(WINDOW_PICTURE.format("*"))):
        file.unlink()


def predict_future(command: Command, arguments: SeriesArguments, series: Series, scaler: Scaler, horizon: int) -> None:
    """Write the forecast of what follows the series, and draw it and some windows with known ends."""
    forecaster, _, training = command.groups
    folder = Path(training.output_dir) / folder_name(horizon)
    trained = best_trial(folder) if training.do_train else Path(forecaster.model_name_or_path)
    model = load_best(trained, forecaster)
    context = int(arguments.context_length or 0)
    folder.mkdir(parents=True, exist_ok=True)
    if training.do_train or training.do_eval:
        windows = make_windows(series, scaler, arguments, context, horizon)
    else:  # no part of the series is known to the forecaster
        everything = Windows(scaler.apply(series), range(len(series.values)), context, horizon)
        windows = dict.fromkeys(("train", "validation", "test"), everything)
    delete_forecast(folder)
    if len(windows["test"]) and training.num_plots:
        baselines = Baselines(windows, arguments.season(series), silent=True)
        names = NAMES if training.do_train else NAMES[:2]  # the linear one is trained
        draw_windows(folder, series, scaler, model, windows["test"], baselines, names, training.num_plots)
    unseen = write_future(folder / FORECAST_FILE, series, scaler, model)
    if unseen:
        print(f"No value of {', '.join(unseen)} was observed in the last {context} steps, from which it is forecast.")
    by = f", by {trained.name}, the best on validation" if trained != folder and training.do_train else ""
    print(f"The forecast is in {folder / FORECAST_FILE}{by}.")
