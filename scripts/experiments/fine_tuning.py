"""
Fine-tuning of any task: one seed or many, at fixed values or over a grid, on one device or several.

Nothing here knows a task. A script describes what it trains as a [`Job`] and hands it over:

    identity = {"data": fingerprint_rows(train, validation), "checkpoint": ...}
    finished = check_job(folder, identity, training, inputs)   # before anything is written: raises, or says if done
    metrics = run_job(job, folder, training, started)          # all trials that are not finished; the job's metrics
    best = best_trial(folder)                                  # the folder with the best model, for predictions

A job has one trial in its own folder, or several (`--seeds`, `--search`) in folders in it, `seed-N` for example. Each
is a run of its own, with its identity, its lock and its run in trackers: one that is cut short is resumed, a finished
one is skipped, so `--seeds 3` may grow to `--seeds 5`. It leaves model, card, `metrics.json`, `curve.png`,
`all_results.json` and `trainer_state.json`; several leave `metrics.json` and `curve.png` of all in the job's folder.

`metrics.json` of a trial has the `score` and `eval_*` of the first evaluation part, `eval_PART_*` of every other
(without `validation_`), and the job's facts; that of several the median or best `score`, and all `trials`.
"""

import copy
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from tqdm import tqdm
from transformers import EarlyStoppingCallback, EvalPrediction, PreTrainedModel, set_seed
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

from experiments.adapters import merge_adapters
from experiments.arguments import UserError
from experiments.fitted_head import fit_head
from experiments.heads import Collator, calibrate_head, set_head_rate, set_layer_rates
from experiments.plots import SCORE, plot_task_curves
from experiments.results import describe_environment, write_json
from experiments.run_folder import METRICS_FILE, check_run_folder, find_checkpoint
from experiments.trainer import ExperimentTrainer, StepTimer
from experiments.training import (
    announce,
    describe_model,
    describe_steps,
    finish_trackers,
    global_batch,
    hold_folder,
    refuse_other_checkpoints,
    upload_run,
)
from experiments.trials import (
    SEVERAL_TRIALS,
    FineTuningArguments,
    Trial,
    best_of,
    check_job,
    holds_checkpoint,
    job_identity,
    keep_best_weights,
    lacks_weights,
    plan_trials,
    read_metrics,
    summarise_trials,
)


logger = logging.getLogger(__name__)


class FineTuningTrainer(ExperimentTrainer):
    """A Trainer that scales every architecture's loss alike, and gives head and layers rates of their own."""

    args: FineTuningArguments

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # Heads that take any keyword are believed to divide their loss by the number of examples of a whole step.
        # Most do not, and accumulating gradients over n batches would then multiply their gradients by n.
        self.model_accepts_loss_kwargs = False

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """As the Trainer's; where the last batch was filled up, its loss is without what that was done with."""
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        state, batch = self.accelerator.gradient_state, self.args.eval_batch_size
        is_last = state.end_of_dataloader and state.remainder > 0
        if loss is not None and self.args.world_size > 1 and is_last:
            # Of no example of its own one, which is dropped; an example may have several rows.
            own = min(max(state.remainder - self.args.process_index * batch, 1), batch)
            rows = {name: values[: own * max(1, len(values) // batch)] for name, values in inputs.items()}
            loss, *_ = super().prediction_step(model, rows, True, ignore_keys)
        return loss, logits, labels

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer, model = super().create_optimizer(*args, **kwargs), self.accelerator.unwrap_model(self.model)
        if is_new and self.args.head_learning_rate is not None:
            set_head_rate(optimizer, model, self.args.head_learning_rate)
        if is_new and self.args.layer_decay is not None:
            set_layer_rates(optimizer, model, self.args.layer_decay)
        return optimizer


@dataclass(frozen=True)
class Job:
    """One thing to fine-tune on."""

    name: str  # of its folder, its row and its run in trackers
    title: str  # in pictures and messages
    build_model: Callable[[], PreTrainedModel]  # called once a trial, after the seed is set
    # Encoded examples: "train" if it trains; all others are evaluation parts, the first of which gives the score.
    splits: dict[str, Dataset]
    collator: Collator
    processing_class: Any  # saved with the model: a tokenizer, for example
    compute_metrics: Callable[[EvalPrediction], dict[str, float]]  # with "score", by which trials are compared
    shown: tuple[str, ...]  # metrics to show
    # What decides the result beside the Trainer's arguments: fingerprints of data and checkpoint, length of inputs.
    identity: dict[str, Any]
    facts: dict[str, Any]  # recorded in metrics.json: "started_from" (a name, no path), "is_partial", ...
    write_card: Callable[[Path, dict[str, Any], dict[str, Any]], None]  # folder, metrics, arguments
    trainer_class: Callable[..., FineTuningTrainer] = FineTuningTrainer
    drawn: tuple[str, str, float] = SCORE  # in curves


class BestOnEvaluation(EarlyStoppingCallback):
    """Keeps an eye on the best checkpoint, and goes on with it where a run was cut short."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._begins_at = state.global_step
        vars(self).update(state.stateful_callbacks[type(self).__name__]["attributes"])
        control.should_training_stop = self.early_stopping_patience_counter >= self.early_stopping_patience

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:  # type: ignore[override]
        # Of the first evaluation part; the metrics of the others have other names. What is measured before the first
        # step of a run that goes on has been counted.
        is_new = state.global_step == 0 or state.global_step > self._begins_at
        if is_new and f"eval_{args.metric_for_best_model.removeprefix('eval_')}" in metrics:
            super().on_evaluate(args, state, control, metrics, **kwargs)


def fingerprint_rows(*parts: Dataset) -> str:
    """A short word for all that stands in some data sets, the same wherever they are read from."""
    digest = hashlib.sha256()
    for rows in parts:
        digest.update(f"{rows.column_names} {len(rows)}".encode())
        for batch in rows.iter(batch_size=1000):
            digest.update(repr(batch).encode())
    return digest.hexdigest()[:16]


def run_job(job: Job, folder: Path, training: FineTuningArguments, started: dict[str, Any]) -> dict[str, Any]:
    """
    Run all trials of a job that are not finished in a folder that [`check_job`] has let pass; gives the job's metrics.
    A job that is finished is only pushed, if --push_to_hub says so.

    `started` is recorded: the arguments as a recipe that gives the job again. Raises a `UserError` if another process
    is at work in the folder, or training diverges.
    """
    trials = plan_trials(folder, training, job.identity)
    is_one = trials[0].folder == folder
    refuse_other_checkpoints(training, [trial.folder for trial in trials])
    if check_job(folder, job.identity, training):
        upload_run(training, folder, f"Fine-tuned on {job.title}")
        return read_metrics(folder)
    PartialState().wait_for_everyone()  # until all have looked at what is there
    if not is_one and not training.overwrite and training.should_save:
        (folder / METRICS_FILE).unlink(missing_ok=True)  # a summary of fewer trials
    identity = job_identity(training, job.identity)
    hold = nullcontext() if is_one else hold_folder(training, folder, identity, started)
    is_silent = is_one or bool(training.disable_tqdm) or not training.should_log
    with hold:
        # Of several, those that are still here in spite of --overwrite belong to this very command, cut short, but
        # may be shorter than what is asked for now.
        waiting = [t for t in trials if is_one or check_run_folder(t.folder, t.identity) != "finished"]
        places = {trial.folder: trial for trial in trials}
        for trial in tqdm(trials, f"{job.title}, trials", unit="trial", disable=is_silent):
            if trial in waiting:
                _run_held(job, trial, started, announces=trial is waiting[0])
            if training.search and training.should_save:
                keep_best_weights(places)
        PartialState().wait_for_everyone()
        # Its weights may have given way to a better trial of a larger grid; trained again, it may come out worse.
        while training.search and lacks_weights(best := best_of(places)):
            PartialState().wait_for_everyone()  # until all have read what the next run deletes
            places[best].args.overwrite = True
            _run_held(job, places[best], started, announces=not waiting)
        if training.search and training.should_save:
            keep_best_weights(places)
        if not is_one and training.should_save:
            results = [read_metrics(trial.folder) for trial in trials]
            histories = {result["name"]: result["history"] for result in results}
            plot_task_curves(histories, folder / "curve.png", job.title, job.drawn)
            write_json(folder / METRICS_FILE, summarise_trials(results, training.search, job.facts))
    PartialState().wait_for_everyone()
    return read_metrics(folder)


def _run_held(job: Job, trial: Trial, started: dict[str, Any], announces: bool) -> None:
    """Run a trial in its folder, whose recorded arguments are a recipe that gives it again, alone."""
    arguments = {name: value for name, value in started.items() if name not in SEVERAL_TRIALS} | trial.values
    if "global_batch_size" in trial.values:
        arguments.pop("gradient_accumulation_steps", None)
        arguments["per_device_train_batch_size"] = trial.args.per_device_train_batch_size
    with hold_folder(trial.args, trial.folder, trial.identity, arguments):
        run_trial(job, trial, arguments, announces)


def run_trial(job: Job, trial: Trial, arguments: dict[str, Any], announces: bool = True) -> None:
    """Fine-tune once, evaluate, and leave the model with its metrics, curve and card."""
    start = time.perf_counter()
    args, trains = trial.args, "train" in job.splits
    args.run_name = " ".join(filter(None, (args.run_name, job.name, trial.name)))
    set_seed(args.seed)
    model = job.build_model()
    fits_head, takes_steps = trains and args.fit_head, trains and not args.fit_head
    if takes_steps and args.calibrate_head and getattr(model, "has_new_head", True):
        calibrate_head(model, job.splits["train"], job.collator, args.device)
    if announces:
        counts = ", ".join(f"{name} {len(examples):,}" for name, examples in job.splits.items())
        announce(
            model=describe_model(model, f"from {job.facts['started_from']}"),
            data=f"{job.title}: {counts} examples",
            steps=describe_steps(args, len(job.splits["train"])) if takes_steps else "none" * fits_head,
        )
    if fits_head:
        fit_head(model, job.splits["train"], job.collator, args)
    keeps_best, timer = takes_steps and args.load_best_model_at_end, StepTimer()
    parts = [name for name in job.splits if name != "train"]
    trainer = job.trainer_class(
        model=model,
        args=args,
        train_dataset=job.splits.get("train"),
        eval_dataset=job.splits[parts[0]],
        data_collator=job.collator,
        processing_class=job.processing_class,
        compute_metrics=job.compute_metrics,
        callbacks=[timer, *([BestOnEvaluation(args.early_stopping_patience or 10**9)] if keeps_best else [])],
    )
    trained: dict[str, Any] = {"train_samples": len(job.splits["train"])} if trains else {}
    if takes_steps:
        resumed = args.resume_from_checkpoint if holds_checkpoint(trial) else find_checkpoint(trial.folder)
        trained |= trainer.train(resume_from_checkpoint=resumed).metrics | timer.metrics()
        PartialState().wait_for_everyone()  # until all have loaded the best checkpoint, which the first deletes
        trained["steps"] = trainer.state.global_step
        if keeps_best:
            trained["best_step"] = trainer.state.best_global_step
    # What is measured of the best model, behind the last step, is nothing of that step.
    history = trainer.history() if keeps_best else None
    measured = _evaluate(trainer, job, parts)
    if trains and hasattr(model, "merge_and_unload"):
        trainer.model = model = merge_adapters(model, trial.folder / "adapter" if args.should_save else None)
    if trains:
        trainer.save_finished()
    if trainer.is_world_process_zero():
        values = ("num_train_epochs", "learning_rate") if takes_steps else ()
        result = {
            "name": trial.name,
            "folder": trial.folder.name,
            "job": job.name,
            "score": measured["eval_score"],
            **{name: getattr(args, name) for name in ("seed", *values)},
            "global_batch_size": global_batch(args),
            **job.facts,
            **trained,
            **measured,
            "seconds": time.perf_counter() - start,
            "model_type": model.config.model_type,
            "parameters": get_model_param_count(model),
            "environment": describe_environment(args.device.type),
            "history": history or trainer.history(),
        }
        for name, metrics in (("train", trained), ("eval", measured), ("all", trained | measured)):
            if metrics:
                write_json(trial.folder / f"{name}_results.json", metrics)
        _report_trial(job, trial, result, arguments)
    finish_trackers(args)
    upload_run(args, trial.folder, f"Fine-tuned on {job.title}")
    PartialState().wait_for_everyone()


def predict(
    model: PreTrainedModel, examples: Dataset, collator: Collator, training: FineTuningArguments, folder: Path
) -> np.ndarray:
    """What a model answers to encoded examples, over all devices: logits `(num_examples, num_labels)`."""
    args = copy.copy(training)
    args.output_dir, args.eval_strategy, args.load_best_model_at_end = str(folder), IntervalStrategy.NO, False
    args.push_to_hub, args.report_to = False, []
    trainer = FineTuningTrainer(model=model, args=args, data_collator=collator)
    return finite_logits(trainer.predict(examples).predictions)


def finite_logits(predictions: Any, name: str = "The model") -> np.ndarray:
    """The logits among a model's predictions, in float64; a `UserError` if training has diverged."""
    logits = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions, dtype=np.float64)
    if not np.isfinite(logits).all():
        remedy = "lower --learning_rate, or give a checkpoint whose weights are finite"
        raise UserError(f"{name}'s predictions are not finite, training has diverged; {remedy}.")
    return logits


def _evaluate(trainer: FineTuningTrainer, job: Job, parts: Sequence[str]) -> dict[str, float]:
    """What the model that is left measures on every evaluation part."""
    metrics: dict[str, float] = {}
    for name in parts:
        prefix = "eval" if name == parts[0] else f"eval_{name.removeprefix('validation_')}"
        known = trainer.last_evaluation() if name == parts[0] else None
        metrics |= known or trainer.evaluate(job.splits[name], metric_key_prefix=prefix)
        metrics[f"{prefix}_samples"] = len(job.splits[name])
    return {name: value for name, value in metrics.items() if name.startswith("eval_")}


def _report_trial(job: Job, trial: Trial, result: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Write a finished trial's curve, card and metrics."""
    folder = trial.folder
    if "train" in job.splits:
        if "learning_rate" in result:  # for where no step is taken there is no curve
            plot_task_curves({trial.name: result["history"]}, folder / "curve.png", job.title, job.drawn)
        job.write_card(folder, result, arguments)
    # Last, because a folder with metrics is a finished trial.
    write_json(folder / METRICS_FILE, result)
    for state in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(state)
    shown = ", ".join(f"{name} {result[f'eval_{name}']:.4f}" for name in job.shown)
    logger.info("%s, %s: %s (%.0f s). In %s.", job.title, trial.name, shown, result["seconds"], folder)
