"""
Train forecasters of time series, measure them beside what needs no training, and forecast what comes next.

    python scripts/run_forecasting.py
    python scripts/run_forecasting.py --task_name exchange --prediction_length 96 192 --seeds 3
    python scripts/run_forecasting.py --task_name etth1 --data_dir series --model_type patchtst \\
        --output_dir runs/etth1-patchtst
    python scripts/run_forecasting.py --data_file sales.csv --timestamp_column day --target_columns north south \\
        --prediction_length 28 --output_dir runs/sales
    python scripts/run_forecasting.py --model_name_or_path runs/sales/horizon-28 --data_file new.csv --do_predict \\
        --output_dir runs/new

Without any flag it trains on a series that it makes itself. Without --recipe a public series (--task_name) gets the
paper's recipe, configuration/forecasting/base.yaml, and one of your own configuration/forecasting/best/base.yaml.
A series of your own is also continued after its last row, if no --do_train, --do_eval or --do_predict says otherwise.
Every horizon is a model in a folder of its own, `horizon-N`, and goes on where it was cut short.
"""

import sys
from pathlib import Path

from accelerate import PartialState

from experiments.arguments import CONFIGURATION, UserError, flag_values, parse_command, run_script
from experiments.fine_tuning import run_job
from experiments.forecasting.forecasters import ForecasterArguments, ForecastingArguments
from experiments.forecasting.jobs import (
    check_channels,
    check_future,
    check_season,
    delete_forecast,
    fit_to_checkpoint,
    make_job,
    predict_future,
)
from experiments.forecasting.report import check_report, write_report
from experiments.forecasting.windows import SPLIT, Scaler, SeriesArguments, read_series, split_borders
from experiments.run_folder import recorded_arguments
from experiments.training import STAGES, announce_run, prepare, upload_run
from experiments.trials import check_job, read_metrics


ARGUMENTS = (ForecasterArguments, SeriesArguments, ForecastingArguments)
RECIPES = CONFIGURATION / "forecasting"


def main() -> None:
    names_file = {"data_file", "dataset_name"} & flag_values(sys.argv[1:]).keys()
    recipe = RECIPES / "best" / "base.yaml" if names_file else RECIPES / "base.yaml"
    command = parse_command(ARGUMENTS, __doc__, recipe, RECIPES / "quickstart.yaml")
    forecaster, arguments, training = command.groups
    makes_several = len(arguments.horizons()) > 1 and not forecaster.model_name_or_path  # which has a horizon
    if training.push_to_hub and makes_several:
        raise UserError("--push_to_hub pushes one model; give one --prediction_length.")
    if training.resume_from_checkpoint and makes_several:
        remedy = "give one --prediction_length, or leave it out for the newest"
        raise UserError(f"--resume_from_checkpoint names one horizon's; {remedy}.")
    names_own = {"data_file", "dataset_name"} & command.given.keys()
    training.do_predict = training.do_predict or bool(names_own and not set(STAGES) & command.given.keys())
    prepare(training, command.given)
    folder = Path(training.output_dir)
    if not (training.do_train or forecaster.model_name_or_path):
        raise UserError("Nothing is trained: add --do_train, or name a forecaster with --model_name_or_path.")
    names_series = {"data_file", "dataset_name", "task_name", "synthetic_steps", "synthetic_seed"}
    if not names_series & command.given.keys():
        what = "a forecaster to learn" if training.do_train else f"{forecaster.model_name_or_path} to continue"
        remedy = "Give --task_name, --data_file or --dataset_name; --synthetic_steps 3000 makes one"
        raise UserError(f"Which series is {what}? {remedy}.")

    # Everything that can be wrong with the arguments is found before a folder is touched.
    arguments, scaler = fit_to_checkpoint(arguments, forecaster, training.do_train)
    series, horizons = read_series(arguments), arguments.horizons()
    check_channels(forecaster, series, training.do_train)
    if scaler is None:
        parts = split_borders(len(series.values), arguments.benchmark, arguments.split_fractions)
        fractions = None if arguments.benchmark else arguments.split_fractions or SPLIT
        scaler = Scaler.fit(series, parts["train"].stop, fractions)
    if training.do_predict:
        check_future(command, arguments, series)
    measures = training.do_train or training.do_eval
    jobs = [make_job(command, arguments, series, scaler, horizon) for horizon in horizons if measures]
    if jobs and not training.overwrite:
        check_report(folder, series.source, horizons)
    finished = {job.name for job, _ in jobs if check_job(folder / job.name, job.identity, training, command.paths())}
    for job, baselines in jobs:
        if job.name in finished:
            check_season(folder / job.name, baselines)
    if arguments.split_fractions and measures and "split_fractions" not in command.given:
        shares = " ".join(map(str, arguments.split_fractions))
        command.notes.append(f"The series is split as that of the checkpoint was, --split_fractions {shares}.")
    command.notes += series.notes
    announce_run(command, series=f"{series.source}, {len(series.values):,} steps of {len(series.columns)} channels")
    for (job, baselines), horizon in zip(jobs, horizons, strict=False):
        if job.name in finished:
            continue
        job.facts["baselines"] = {part: baselines.measure(part) for part in ("test", "validation")}
        job.facts["seasonal_period"] = baselines.season
        started = recorded_arguments(command.given) | {"prediction_length": [horizon]}
        run_job(job, folder / job.name, training, started)
        if training.should_save:
            delete_forecast(folder / job.name)
    if jobs and training.should_save:
        measured = {horizon: read_metrics(folder / job.name) for (job, _), horizon in zip(jobs, horizons, strict=True)}
        print(write_report(folder, series.source, measured, series.notes))
    PartialState().wait_for_everyone()  # until all have looked whether forecasts are there
    if training.do_predict and training.should_save:
        for horizon in horizons:
            predict_future(command, arguments, series, scaler, horizon)
    for job, _ in jobs:  # again, with what has been written since
        upload_run(training, folder / job.name, f"Forecast, {job.title}")


if __name__ == "__main__":
    run_script(main)
