"""
Train forecasters of time series, measure them beside what needs no training, and forecast what comes next.

    python scripts/run_forecasting.py
    python scripts/run_forecasting.py --task_name exchange --prediction_length 96 192 --seeds 3
    python scripts/run_forecasting.py --task_name etth1 --data_dir series --model_type patchtst \\
        --output_dir runs/etth1-patchtst
    python scripts/run_forecasting.py --data_file sales.csv --timestamp_column day --target_columns north south \\
        --prediction_length 28 --do_train --do_eval --do_predict --output_dir runs/sales
    python scripts/run_forecasting.py --model_name_or_path runs/sales/horizon-28 --data_file new.csv --do_predict \\
        --output_dir runs/new

Without any flag it trains on a series that it makes itself. Without --recipe a public series (--task_name) gets the
paper's recipe, configuration/forecasting/base.yaml, and one of your own configuration/forecasting/best/base.yaml.
Every horizon is a model in a folder of its own, `horizon-N`, and goes on where it was cut short.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.arguments import CONFIGURATION, Command, UserError, parse_command, run_script
from experiments.fine_tuning import Job, best_trial, check_job, read_metrics, run_job
from experiments.forecasting.baselines import NAMES, Baselines
from experiments.forecasting.forecasters import (
    ForecasterArguments,
    ForecastingArguments,
    ForecastingTrainer,
    build_forecaster,
    collate,
    compute_metrics,
    describe_config,
    load_best,
    load_config,
)
from experiments.forecasting.report import draw_windows, write_forecaster_card, write_future, write_report
from experiments.forecasting.series import Series
from experiments.forecasting.windows import (
    Scaler,
    SeriesArguments,
    Windows,
    fingerprint_series,
    make_windows,
    read_series,
    split_borders,
)
from experiments.models import fingerprint_checkpoint
from experiments.run_folder import recorded_arguments
from experiments.training import announce, describe_devices, describe_recipe, leave_process_group, prepare, upload_run


ARGUMENTS = (ForecasterArguments, SeriesArguments, ForecastingArguments)
RECIPES = CONFIGURATION / "forecasting"


def main() -> None:
    names_file = any(word.split("=")[0] in ("--data_file", "--dataset_name") for word in sys.argv[1:])
    recipe = RECIPES / "best" / "base.yaml" if names_file else RECIPES / "base.yaml"
    command = parse_command(ARGUMENTS, __doc__, recipe, RECIPES / "quickstart.yaml")
    forecaster, arguments, training = command.groups
    prepare(training, command.given)
    folder = Path(training.output_dir)
    if not (training.do_train or forecaster.model_name_or_path):
        raise UserError("Nothing is trained: add --do_train, or name a forecaster with --model_name_or_path.")

    # Everything that can be wrong with the arguments is found before a folder is touched.
    arguments, scaler = fit_to_checkpoint(arguments, forecaster, training.do_train)
    series = read_series(arguments)
    if scaler is None:
        training_part = split_borders(len(series.values), arguments.benchmark, arguments.split_fractions)["train"]
        scaler = Scaler.fit(series, training_part.stop)
    measures = training.do_train or training.do_eval
    jobs = {h: make_job(command, arguments, series, scaler, h) for h in arguments.horizons()} if measures else {}
    waiting = {
        horizon: job
        for horizon, (job, _) in jobs.items()
        if not check_job(folder / job.name, job.identity, training, command.paths())
    }
    announce(
        recipe=describe_recipe(command.recipes, training),
        series=f"{series.source}, {len(series.values):,} steps of {len(series.columns)} channels",
        devices=describe_devices(training),
        **({"note": " ".join([*command.notes, *series.notes])} if command.notes or series.notes else {}),
    )
    for horizon, (job, baselines) in jobs.items():
        if horizon in waiting:
            job.facts["baselines"] = {part: baselines.measure(part) for part in ("test", "validation")}
            run_job(
                job, folder / job.name, training, recorded_arguments(command.given) | {"prediction_length": [horizon]}
            )
        else:
            upload_run(training, folder / job.name, f"Fine-tuned on {job.title}")
    if jobs and training.should_save:
        print(
            write_report(folder, series.source, {h: read_metrics(folder / job.name) for h, (job, _) in jobs.items()})
        )
    if training.do_predict and training.should_save:
        for horizon in arguments.horizons():
            predict_future(command, arguments, series, scaler, horizon)
    leave_process_group()


def fit_to_checkpoint(
    arguments: SeriesArguments, forecaster: ForecasterArguments, trains: bool
) -> tuple[SeriesArguments, Scaler | None]:
    """Lengths, columns and scale of a checkpoint, where there is one; the scale only where nothing is trained."""
    if not forecaster.model_name_or_path:
        default = arguments.benchmark.context_length if arguments.benchmark else 96
        return replace(arguments, context_length=arguments.context_length or default), None
    config: Any = load_config(forecaster)
    lengths = (arguments.context_length or config.context_length, arguments.horizons())
    if arguments.prediction_length is None:
        lengths = (lengths[0], (config.prediction_length,))
    if lengths != (config.context_length, (config.prediction_length,)):
        raise UserError(
            f"The checkpoint {forecaster.model_name_or_path} reads {config.context_length} steps and forecasts "
            f"{config.prediction_length}; leave out --context_length and --prediction_length."
        )
    arguments = replace(arguments, context_length=lengths[0], prediction_length=list(lengths[1]))
    if trains:
        return arguments, None
    scaler = Scaler.from_pretrained(forecaster.model_name_or_path)
    if arguments.target_columns and len(arguments.target_columns) != len(scaler.columns):
        raise UserError(
            f"The checkpoint {forecaster.model_name_or_path} was made for {len(scaler.columns)} channels "
            f"({', '.join(scaler.columns)}), and --target_columns names {len(arguments.target_columns)}."
        )
    return replace(arguments, target_columns=arguments.target_columns or scaler.columns), scaler


def make_job(
    command: Command, arguments: SeriesArguments, series: Series, scaler: Scaler, horizon: int
) -> tuple[Job, Baselines]:
    """A horizon as the engine takes it, and the baselines on its windows."""
    forecaster, _, training = command.groups
    context = int(arguments.context_length or 0)
    windows = make_windows(series, scaler, arguments, context, horizon)
    build = partial(build_forecaster, forecaster, context, horizon, len(series.columns))
    model = build()  # which shows now whether it can be made
    benchmark = arguments.benchmark
    published = benchmark.published if benchmark and context == benchmark.context_length else {}
    rows = (
        {name: row[benchmark.horizons.index(horizon)] for name, row in published.items()}
        if (benchmark and horizon in benchmark.horizons)
        else {}
    )
    name = forecaster.model_name_or_path
    job = Job(
        name=f"horizon-{horizon}",
        title=f"{series.source}, {horizon} steps",
        build_model=build,
        splits={part: rows for part, rows in windows.items() if training.do_train or part != "train"},  # type: ignore[misc]
        collator=collate,
        processing_class=scaler,
        compute_metrics=compute_metrics,
        shown=("mse", "mae"),
        identity={
            "data": fingerprint_series(series),
            "windows": {
                part: [len(rows), int(rows.origins[0]), int(rows.origins[-1])] for part, rows in windows.items()
            },
            "lengths": [context, horizon],
            "scaler": [*scaler.mean, *scaler.std],
            "checkpoint": fingerprint_checkpoint(name) if name else describe_config(model),
            "learning_rate_decay": training.learning_rate_decay,
        },
        facts={
            "started_from": Path(name).name if name else "scratch",
            "is_partial": any(
                (arguments.max_train_samples, arguments.max_eval_samples, arguments.max_predict_samples)
            ),
            "context_length": context,
            "prediction_length": horizon,
            "columns": series.columns,
            "class": type(model).__name__,
            "published": {name: {"mse": row[0], "mae": row[1]} for name, row in rows.items()},
        },
        write_card=partial(write_forecaster_card, series.source),
        trainer_class=ForecastingTrainer,
    )
    season = arguments.seasonal_period or (benchmark.season if benchmark else series.season())
    return job, Baselines(windows, season, bool(training.disable_tqdm))


def predict_future(command: Command, arguments: SeriesArguments, series: Series, scaler: Scaler, horizon: int) -> None:
    """Write the forecast of what follows the series, and draw it and some windows with known ends."""
    forecaster, _, training = command.groups
    folder = Path(training.output_dir) / f"horizon-{horizon}"
    trained = best_trial(folder) if training.do_train else Path(str(forecaster.model_name_or_path))
    model = load_best(trained, forecaster)
    context = model.config.context_length
    if len(series.values) < context:
        raise UserError(f"{series.source} has {len(series.values):,} steps, and the forecaster reads {context}.")
    folder.mkdir(parents=True, exist_ok=True)
    if training.do_train or training.do_eval:
        windows = make_windows(series, scaler, arguments, context, horizon)
    else:
        everything = Windows(scaler.apply(series), range(len(series.values)), context, horizon)
        windows = dict.fromkeys(("train", "validation", "test"), everything)
    season = arguments.seasonal_period or (arguments.benchmark or series).season  # type: ignore[union-attr]
    baselines = Baselines(windows, season if isinstance(season, int) else season(), silent=True)
    if len(windows["test"]):
        names = NAMES if training.do_train else NAMES[:2]
        draw_windows(folder, series, scaler, model, windows["test"], baselines, names, training.num_plots)
    print(f"The forecast is in {write_future(folder, series, scaler, model)}.")


if __name__ == "__main__":
    run_script(main)
