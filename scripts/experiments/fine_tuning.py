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
import itertools
import logging
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from tqdm import tqdm
from transformers import EarlyStoppingCallback, EvalPrediction, PreTrainedModel, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

from experiments import training as progress
from experiments.adapters import merge_adapters
from experiments.arguments import UserError, flag, require_at_least
from experiments.heads import Collator, HeadArguments, HeadTrainer, calibrate_head
from experiments.plots import plot_task_curves
from experiments.results import describe_environment, read_json, write_json
from experiments.run_folder import METRICS_FILE, RunIdentity, check_run_folder, find_checkpoint


logger = logging.getLogger(__name__)
# What makes several trials of one job, and does not belong to any of them.
_SEVERAL_TRIALS = ("seeds", "search", "search_epochs", "search_learning_rates", "search_batch_sizes")
# What a trial may have of its own, and what it is called in the trial's name.
_SHORT_NAMES = {"seed": "seed", "num_train_epochs": "epochs", "learning_rate": "rate", "global_batch_size": "batch"}
_WEIGHTS = "*.safetensors*"  # of one file, or of several with an index


@dataclass
class FineTuningArguments(HeadArguments):
    """The arguments of the Trainer, what is run more than once, and what is kept of it."""

    seeds: int = flag(1, "Train with so many seeds from --seed on, and say how they spread.")
    search: bool = flag(False, "Try all of the --search_* values, and keep the best.")
    search_epochs: list[float] = flag([4, 10, 20], "Epochs.")
    search_learning_rates: list[float] = flag([5e-5, 1e-4], "Rates.")
    search_batch_sizes: list[int] = flag([16, 32], "Global batches.")
    early_stopping_patience: int | None = flag(None, "Stop after so many evaluations without a new best; keep that.")

    def __post_init__(self) -> None:
        several, patience = self.search or self.seeds > 1, self.early_stopping_patience
        grid = (self.search_epochs, self.search_learning_rates, self.search_batch_sizes)
        self.load_best_model_at_end = self.load_best_model_at_end or patience is not None
        if self.load_best_model_at_end:
            self.metric_for_best_model = self.metric_for_best_model or "score"
        if patience is not None and IntervalStrategy(self.eval_strategy) == IntervalStrategy.NO:
            raise UserError("--early_stopping_patience needs evaluations while training; add --eval_strategy.")
        if self.greater_is_better is None and str(self.metric_for_best_model).endswith(("mse", "mae")):
            self.greater_is_better = False  # the Trainer takes what is not called a loss for a score
        super().__post_init__()
        require_at_least(1, self, "seeds", "early_stopping_patience")
        for is_wrong, message in (
            (self.search and self.seeds > 1, "--search tries values with one seed; use --seeds after it."),
            (self.search and self.max_steps > 0, "--search tries epochs, which --max_steps overrides; leave it out."),
            (self.search and not all(grid), "--search needs at least one value for each of its --search_* flags."),
            (self.push_to_hub and several, "--push_to_hub pushes one model; leave out --search and --seeds."),
        ):
            if is_wrong:
                raise UserError(message)


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
    trainer_class: "type[FineTuningTrainer] | None" = None


@dataclass(frozen=True)
class Trial:
    """One fine-tuning: its folder, the arguments that it changes, all that its Trainer gets, and what it is."""

    folder: Path
    values: dict[str, Any]
    args: FineTuningArguments
    identity: RunIdentity

    @property
    def name(self) -> str:
        """What its values are."""
        shown = {name: value if isinstance(value, int) else f"{value:g}" for name, value in self.values.items()}
        return ", ".join(f"{_SHORT_NAMES[name]} {value}" for name, value in shown.items())


class FineTuningTrainer(HeadTrainer):
    """A Trainer that scales every architecture's loss alike."""

    args: FineTuningArguments

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # Heads that take any keyword are believed to divide their loss by the number of examples of a whole step.
        # Most do not, and accumulating gradients over n batches would then multiply their gradients by n.
        self.model_accepts_loss_kwargs = False


class BestOnEvaluation(EarlyStoppingCallback):
    """Keeps an eye on the best checkpoint, and goes on with it where a run was cut short."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        vars(self).update(state.stateful_callbacks[type(self).__name__]["attributes"])
        control.should_training_stop = self.early_stopping_patience_counter >= self.early_stopping_patience
        best = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if best.is_dir():  # also where the whole folder has moved
            state.best_model_checkpoint = str(best)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:  # type: ignore[override]
        # Of the first evaluation part; the metrics of the others have other names.
        if f"eval_{args.metric_for_best_model.removeprefix('eval_')}" in metrics:
            super().on_evaluate(args, state, control, metrics, **kwargs)


def fingerprint_rows(*parts: Dataset) -> str:
    """A short word for all that stands in some data sets, the same wherever they are read from."""
    digest = hashlib.sha256()
    for rows in parts:
        digest.update(f"{rows.column_names} {len(rows)}".encode())
        for batch in rows.iter(batch_size=1000):
            digest.update(repr(batch).encode())
    return digest.hexdigest()[:16]


def plan_trials(folder: Path, training: FineTuningArguments, decides: dict[str, Any]) -> list[Trial]:
    """The trials of a job: a grid, several seeds, or a single one, which gets the job's own folder."""
    seed, decides = training.seed, decides | training.head_identity()
    planned: dict[str, dict[str, Any]] = {"": {"seed": seed}}
    if (training.search or training.seeds > 1) and not training.do_train:
        raise UserError("--search and --seeds are for training; leave them out, or add --do_train.")
    if training.do_train and training.load_best_model_at_end and training.eval_strategy == IntervalStrategy.NO:
        remedy = "add --eval_strategy, or --load_best_model_at_end false"
        raise UserError(f"--load_best_model_at_end needs evaluations while training; {remedy}.")
    if training.search:
        grid = itertools.product(training.search_epochs, training.search_learning_rates, training.search_batch_sizes)
        names = "epochs-{:g}-rate-{:g}-batch-{}"
        planned = {names.format(*of): dict(zip(_SHORT_NAMES, (seed, *of), strict=True)) for of in grid}
    elif training.seeds > 1:
        planned = {f"seed-{n}": {"seed": n} for n in range(seed, seed + training.seeds)}
    trials = []
    for name, values in planned.items():
        args = copy.copy(training)
        vars(args).update(values | {"output_dir": str(folder / name)})
        if training.search:
            progress.divide_batch(args, values["global_batch_size"])
        trials.append(Trial(folder / name, values, args, progress.training_identity(args, decides)))
    return trials


def check_job(
    folder: Path, decides: dict[str, Any], training: FineTuningArguments, inputs: Iterable[str] = ()
) -> bool:
    """
    Check that a job with the identity `decides` may use a folder, and write nothing; whether all of it is finished.

    Raises a `UserError` if the folder holds another job, other files, something of the `inputs` that --overwrite would
    delete, or a finished trial that was shorter.
    """
    trials = plan_trials(folder, training, decides)
    if check_run_folder(folder, _job_identity(training, decides), training.overwrite, inputs) == "new":
        return False
    states = {trial.folder: check_run_folder(trial.folder, trial.identity) for trial in trials}
    for place, state in states.items():
        if state == "grown" and not training.overwrite:
            what = f"{place} holds this run, finished after fewer steps, and the state of its optimizer was deleted"
            raise UserError(f"{what}; choose another folder, or pass --overwrite to train it anew.")
    whole = set(states.values()) == {"finished"} and trial_folders(folder) == list(states)
    return whole and not (training.search and lacks_weights(best_trial(folder)))


def holds_checkpoint(trial: Trial) -> bool:
    """Whether --resume_from_checkpoint names one of this trial: others have another seed, or other data."""
    given = trial.args.resume_from_checkpoint
    return given is not None and progress.lies_in(given, trial.folder)


def run_job(job: Job, folder: Path, training: FineTuningArguments, started: dict[str, Any]) -> dict[str, Any]:
    """
    Run all trials of a job that are not finished in a folder that [`check_job`] has let pass; gives the job's metrics.
    A job that is finished is only pushed, if --push_to_hub says so.

    `started` is recorded: the arguments as a recipe that gives the job again. Raises a `UserError` if another process
    is at work in the folder, or training diverges.
    """
    trials = plan_trials(folder, training, job.identity)
    is_one = trials[0].folder == folder
    progress.refuse_other_checkpoints(training, [trial.folder for trial in trials])
    if check_job(folder, job.identity, training):
        progress.upload_run(training, folder, f"Fine-tuned on {job.title}")
        return read_metrics(folder)
    PartialState().wait_for_everyone()  # until all have looked at what is there
    if not is_one and not training.overwrite and training.should_save:
        (folder / METRICS_FILE).unlink(missing_ok=True)  # a summary of fewer trials
    identity = _job_identity(training, job.identity)
    hold = nullcontext() if is_one else progress.hold_folder(training, folder, identity, started)
    is_silent = is_one or bool(training.disable_tqdm) or not training.should_log
    with hold:
        # Of several, those that are still here in spite of --overwrite belong to this very command, cut short.
        waiting = [t for t in trials if is_one or not (t.folder / METRICS_FILE).is_file()]
        for trial in tqdm(trials, f"{job.title}, trials", unit="trial", disable=is_silent):
            if trial in waiting:
                _run_held(job, trial, started, announces=trial is waiting[0])
            if training.search and training.should_save:
                keep_best_weights([trial.folder for trial in trials])
        PartialState().wait_for_everyone()
        best = max(trials, key=lambda trial: read_metrics(trial.folder)["score"])
        gave_way = training.search and lacks_weights(best.folder)  # to a better trial of a larger grid
        PartialState().wait_for_everyone()  # until all have read what the next run deletes
        if gave_way:
            best.args.overwrite = True
            _run_held(job, best, started, announces=not waiting)
        if not is_one and training.should_save:
            results = [read_metrics(trial.folder) for trial in trials]
            plot_task_curves({r["name"]: r["history"] for r in results}, folder / "curve.png", job.title)
            write_json(folder / METRICS_FILE, summarise_trials(results, training.search, job.facts))
    PartialState().wait_for_everyone()
    return read_metrics(folder)


def _run_held(job: Job, trial: Trial, started: dict[str, Any], announces: bool) -> None:
    """Run a trial in its folder, whose recorded arguments are a recipe that gives it again, alone."""
    arguments = {name: value for name, value in started.items() if name not in _SEVERAL_TRIALS} | trial.values
    if "global_batch_size" in trial.values:
        arguments.pop("gradient_accumulation_steps", None)
        arguments["per_device_train_batch_size"] = trial.args.per_device_train_batch_size
    with progress.hold_folder(trial.args, trial.folder, trial.identity, arguments):
        run_trial(job, trial, arguments, announces)


def run_trial(job: Job, trial: Trial, arguments: dict[str, Any], announces: bool = True) -> None:
    """Fine-tune once, evaluate, and leave the model with its metrics, curve and card."""
    start = time.perf_counter()
    args, trains = trial.args, "train" in job.splits
    args.run_name = " ".join(filter(None, (args.run_name, job.name, trial.name)))
    set_seed(args.seed)
    model = job.build_model()
    if trains and args.calibrate_head and getattr(model, "has_new_head", True):
        calibrate_head(model, job.splits["train"], job.collator, args.device)
    if announces:
        counts = ", ".join(f"{name} {len(examples):,}" for name, examples in job.splits.items())
        progress.announce(
            model=progress.describe_model(model, f"from {job.facts['started_from']}"),
            data=f"{job.title}: {counts} examples",
            steps=progress.describe_steps(args, len(job.splits["train"])) if trains else "",
        )
    keeps_best, timer = trains and args.load_best_model_at_end, progress.StepTimer()
    parts = [name for name in job.splits if name != "train"]
    trainer = (job.trainer_class or FineTuningTrainer)(
        model=model,
        args=args,
        train_dataset=job.splits.get("train"),
        eval_dataset=job.splits[parts[0]],
        data_collator=job.collator,
        processing_class=job.processing_class,
        compute_metrics=job.compute_metrics,
        callbacks=[timer, *([BestOnEvaluation(args.early_stopping_patience or 10**9)] if keeps_best else [])],
    )
    trained: dict[str, Any] = {}
    if trains:
        resumed = args.resume_from_checkpoint if holds_checkpoint(trial) else find_checkpoint(trial.folder)
        trained |= trainer.train(resume_from_checkpoint=resumed).metrics | timer.metrics()
        trained["train_samples"] = len(job.splits["train"])
        if keeps_best:
            trained["best_step"] = trainer.state.best_global_step
    # What is measured of the best model, behind the last step, is nothing of that step.
    history = trainer.history() if keeps_best else None
    measured = _evaluate(trainer, job, parts)
    if trains and hasattr(model, "merge_and_unload"):
        trainer.model = model = merge_adapters(model, trial.folder / "adapter" if args.should_save else None)
    if trains:
        # As a step of the Trainer's own, which does not push yet: the card and the metrics are still to come.
        trainer.save_model(_internal_call=True)
        trainer.save_state()
    if trainer.is_world_process_zero():
        values = ("num_train_epochs", "learning_rate") if trains else ()
        result = {
            "name": trial.name,
            "folder": trial.folder.name,
            "job": job.name,
            "score": measured["eval_score"],
            **{name: getattr(args, name) for name in ("seed", *values)},
            "global_batch_size": progress.global_batch(args),
            **job.facts,
            **trained,
            **measured,
            "seconds": time.perf_counter() - start,
            "model_type": model.config.model_type,
            "parameters": model.num_parameters(),
            "environment": describe_environment(args.device.type),
            "history": history or trainer.history(),
        }
        for name, metrics in (("train", trained), ("eval", measured), ("all", trained | measured)):
            if metrics:
                write_json(trial.folder / f"{name}_results.json", metrics)
        _report_trial(job, trial, result, arguments)
    progress.finish_trackers(args)
    progress.upload_run(args, trial.folder, f"Fine-tuned on {job.title}")
    PartialState().wait_for_everyone()


def predict(
    model: PreTrainedModel, examples: Dataset, collator: Collator, training: FineTuningArguments, folder: Path
) -> np.ndarray:
    """What a model answers to encoded examples, over all devices: logits `(num_examples, num_labels)`."""
    args = copy.copy(training)
    args.output_dir, args.eval_strategy, args.load_best_model_at_end = str(folder), IntervalStrategy.NO, False
    args.push_to_hub, args.report_to = False, []
    predictions = FineTuningTrainer(model=model, args=args, data_collator=collator).predict(examples).predictions
    return predictions[0] if isinstance(predictions, tuple) else predictions


def keep_best_weights(folders: Sequence[Path]) -> None:
    """Delete the weights of all finished trials but the best; what they measured stays."""
    scores = {folder: read_metrics(folder)["score"] for folder in folders if (folder / METRICS_FILE).is_file()}
    for folder in scores.keys() - {max(scores, key=scores.__getitem__)}:
        for file in folder.rglob(_WEIGHTS):  # and its adapter's
            file.unlink()


def lacks_weights(folder: Path) -> bool:
    """Whether a finished trial's model was deleted, because another one was better."""
    return not any(folder.glob(_WEIGHTS))


def trial_folders(folder: Path) -> list[Path]:
    """The folders of a finished job's trials: its own if there is a single one; none if it is not finished."""
    if not (folder / METRICS_FILE).is_file():
        return []
    trials = read_metrics(folder).get("trials")
    return [folder] if trials is None else [folder / trial["folder"] for trial in trials]


def best_trial(folder: Path) -> Path:
    """The folder of a finished job's trial with the best score, the first of equals."""
    return max(trial_folders(folder), key=lambda trial: read_metrics(trial)["score"])


def read_metrics(folder: Path) -> dict[str, Any]:
    """What a finished trial or job has measured."""
    return read_json(folder / METRICS_FILE)


def summarise_trials(results: Sequence[dict[str, Any]], search: bool, facts: dict[str, Any]) -> dict[str, Any]:
    """A job's metrics: the best of a search, or the median of several seeds, with every trial's score and time."""
    scores = [result["score"] for result in results]
    best = results[scores.index(max(scores))]
    kept = ("folder", "name", "seed", "score", "seconds", "num_train_epochs", "learning_rate", "global_batch_size")
    return {
        "job": best["job"],
        "score": best["score"] if search else statistics.median(scores),
        "kind": "search" if search else "seeds",
        **({} if search else {"std": statistics.stdev(scores)}),
        "scores": scores,
        "best": best["name"],
        "trials": [
            {name: result[name] for name in result if name in kept or name.startswith("eval_")} for result in results
        ],
        **{name: best[name] for name in (*facts, "model_type", "parameters", "environment")},
    }


def summarise_seeds(folder: Path, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Median and standard deviation over a finished job's seeds, of each metric of its first evaluation part."""
    trials = [read_metrics(trial) for trial in trial_folders(folder)]
    values = {name: [trial[f"eval_{name}"] for trial in trials] for name in names}
    return {
        f"{title} of {len(trials)} seeds": {name: summarise(of_name) for name, of_name in values.items()}
        for title, summarise in (("median", statistics.median), ("standard deviation", statistics.stdev))
    }


def _job_identity(training: FineTuningArguments, decides: dict[str, Any]) -> RunIdentity:
    """The identity of a job's folder: of several trials it leaves out in what they differ."""
    identity = progress.training_identity(training, decides | training.head_identity())
    if not training.search and training.seeds == 1:
        return identity
    differing = ("learning_rate", "global_batch_size") if training.search else ("seed",)
    shared = {name: value for name, value in identity.decides.items() if name not in differing}
    length = {"num_train_epochs": 0.0} if training.search else identity.length
    return RunIdentity(shared | {"trials": "search" if training.search else "seeds"}, length, identity.precision)


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
        plot_task_curves({trial.name: result["history"]}, folder / "curve.png", job.title)
        job.write_card(folder, result, arguments)
    # Last, because a folder with metrics is a finished trial.
    write_json(folder / METRICS_FILE, result)
    for state in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(state)
    shown = ", ".join(f"{name} {result[f'eval_{name}']:.4f}" for name in job.shown)
    logger.info("%s, %s: %s (%.0f s). In %s.", job.title, trial.name, shown, result["seconds"], folder)
