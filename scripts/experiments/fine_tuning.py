"""
Fine-tuning of any task: one seed or many, at fixed values or over a grid, on one device or several.

Nothing here knows a task. A script describes what it trains as a [`Job`] and hands it over:

    group = parse_command((MyDataArguments, CheckpointArguments, FineTuningArguments), __doc__, BASE_RECIPE)
    ...
    identity = {"data": fingerprint_rows(train, validation), "checkpoint": ...}
    finished = check_job(folder, identity, training, inputs)   # before anything is written: raises, or says if done
    metrics = run_job(job, folder, training, started)          # all trials that are not finished; the job's metrics
    best = best_trial(folder)                                  # the folder with the best model, for predictions

A job has one trial, or several (`--seeds`, `--search`). Each trial is a run of its own, with its folder, its identity,
its lock and its run in the trackers: the job's folder where there is one, else `seed-N` or `epochs-E-rate-R-batch-B`
below it. A trial that is cut short is resumed, a finished one is skipped, so `--seeds 3` may grow to `--seeds 5`.
A trial's folder holds model, tokenizer, `metrics.json`, `all_results.json`, `trainer_state.json`, `curve.png` and the
card; a job of several trials has `metrics.json` (median or best) and `curve.png` in its own folder.

`metrics.json` of a trial has `name`, `folder`, `job`, `score` (of the first evaluation part), `seed`,
`global_batch_size`, `train_samples`, the metrics `eval_*` (also `eval_samples`) of the first evaluation part and
`eval_PART_*` of every other (without `validation_`), `model_type`, `parameters`, `seconds`, `environment`, `history` and
what `Job.facts` adds; that of several trials `job`, `kind` ("seeds" or "search"), `score`, `std` (of seeds), `scores`,
`best` (a trial's name), `trials`, `model_type`, `parameters`, `environment` and the facts.
"""

import copy
import inspect
import itertools
import json
import logging
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from datasets import Dataset
from tqdm import tqdm
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, IntervalStrategy

from experiments.arguments import UserError
from experiments.glue.metrics import compute_task_metrics
from experiments.glue.tasks import GlueArguments, GlueTask, encode_split, load_split
from experiments.model_card import write_classification_card
from experiments.models import CheckpointArguments, check_fit, load_classifier, load_tokenizer
from experiments.plots import plot_task_curves
from experiments.results import describe_environment, write_atomically, write_json
from experiments.run_folder import ARGUMENTS_FILE, METRICS_FILE, find_checkpoint
from experiments.training import RunArguments, StepTimer, accumulation_steps, share_buffers, upload_run


logger = logging.getLogger("run_glue")

REGRESSION_LABEL = "similarity"
# What makes several trials of one run, and does not belong to any of them.
_SEVERAL_TRIALS = ("seeds", "search", "search_epochs", "search_learning_rates", "search_batch_sizes")
_SHORT_NAMES = {
    "seed": "seed",
    "num_train_epochs": "epochs",
    "learning_rate": "rate",
    "global_batch_size": "batch",
}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass
class FineTuningArguments(RunArguments):
    """The arguments of the Trainer, and what is run more than once."""

    output_dir: str | None = field(
        default="runs/glue", metadata={"help": "Folder of the runs; every task gets a folder of its name in it."}
    )
    seeds: int = field(
        default=1,
        metadata={"help": "Run every task with this many seeds from --seed on, and report median and spread."},
    )
    search: bool = field(
        default=False,
        metadata={"help": "Try every combination of the --search_* values and keep the best on the evaluation part."},
    )
    search_epochs: list[float] = field(default_factory=lambda: [4, 10, 20], metadata={"help": "Epochs to try."})
    search_learning_rates: list[float] = field(
        default_factory=lambda: [5e-5, 1e-4], metadata={"help": "Learning rates to try."}
    )
    search_batch_sizes: list[int] = field(
        default_factory=lambda: [16, 32], metadata={"help": "Sequences per optimizer step to try, over all devices."}
    )

    mnli_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "Checkpoint fine-tuned on MNLI from which RTE, MRPC and STS-B start: a folder, a name on the Hub, "
            "or `run` for the best one of this --output_dir."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds < 1:
            raise UserError(f"--seeds is {self.seeds}; it must be at least 1.")
        if self.search and self.seeds > 1:
            raise UserError(
                "--search tries values with one seed, --seeds runs seeds at fixed values; use one after the other."
            )
        if self.search and self.max_steps > 0:
            raise UserError("--search tries numbers of epochs, which --max_steps overrides; leave it out.")
        if self.prediction_loss_only or self.batch_eval_metrics or not self.eval_do_concat_batches:
            raise UserError(
                "GLUE's metrics need all predictions at once; leave out --prediction_loss_only, "
                "--batch_eval_metrics and --eval_do_concat_batches."
            )
        if self.search and not (self.search_epochs and self.search_learning_rates and self.search_batch_sizes):
            raise UserError("--search needs at least one value for each of its --search_* flags.")


@dataclass(frozen=True)
class Job:
    """
    One thing to fine-tune on.

    Args:
        name (`str`): Of its folder, its row and its run in trackers.
        title (`str`): In pictures and messages.
        build_model (callable): Gives the model to start from; called once a trial, after the seed is set.
        splits (`dict` of `str` to `Dataset`): Encoded examples: `train` if it trains; every other one is an evaluation
            part, and the first of these gives the score.
        collator (callable): Makes a batch of a list of examples.
        processing_class (any): What is saved with the model, a tokenizer for example.
        compute_metrics (callable): Takes an `EvalPrediction`, gives the metrics and, among them, `score`, the number
            by which trials are compared (more is better).
        shown (`tuple` of `str`): The metrics to show.
        identity (`dict`): What decides the result beside the arguments of the Trainer: fingerprints of data and
            checkpoint, changes of the model, the length of the inputs.
        facts (`dict`): What `metrics.json` records beside the measurements: `started_from` (a name, no path),
            `is_partial`, ...
        write_card (callable): Takes the folder, the trial's metrics and its arguments, and writes `README.md`.
    """

    name: str
    title: str
    build_model: Callable[[], PreTrainedModel]
    splits: dict[str, Dataset]
    collator: Callable[[list[Any]], dict[str, Any]]
    processing_class: Any
    compute_metrics: Callable[[EvalPrediction], dict[str, float]]
    shown: tuple[str, ...]
    identity: dict[str, Any]
    facts: dict[str, Any]
    write_card: Callable[[Path, dict[str, Any], dict[str, Any]], None]


@dataclass(frozen=True)
class Trial:
    """
    One fine-tuning.

    Args:
        folder (`Path`): Where its model and its metrics go.
        values (`dict`): Arguments of the Trainer that it changes: its seed and, in a search, what is tried.
    """

    folder: Path
    values: dict[str, Any]


class GlueTrainer(Trainer):
    """A Trainer that scales every architecture's loss alike and evaluates one model on all processes."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # Heads that take any keyword are believed to divide their loss by the number of examples of a whole step.
        # Most do not, and accumulating gradients over n batches would then multiply their gradients by n.
        self.model_accepts_loss_kwargs = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        share_buffers(self)
        return super().evaluation_loop(*args, **kwargs)


def plan_trials(folder: Path, training: FineTuningArguments) -> list[Trial]:
    """The trials of one task: a grid, several seeds, or a single one, which gets the task's own folder."""
    seed = training.seed
    if training.search:
        grid = itertools.product(training.search_epochs, training.search_learning_rates, training.search_batch_sizes)
        return [
            Trial(
                folder / f"epochs-{epochs:g}-rate-{rate:g}-batch-{batch}",
                {"seed": seed, "num_train_epochs": epochs, "learning_rate": rate, "global_batch_size": batch},
            )
            for epochs, rate, batch in grid
        ]
    if training.seeds > 1:
        return [Trial(folder / f"seed-{n}", {"seed": n}) for n in range(seed, seed + training.seeds)]
    return [Trial(folder, {"seed": seed})]


def load_splits(task: GlueTask, glue: GlueArguments, training: FineTuningArguments) -> dict[str, Dataset]:
    """
    Read the splits that a run needs of a task.

    Raises:
        UserError: as [`data.glue.load_split`].
    """
    names = [
        *(["train"] if training.do_train else []),
        *(task.evaluation_splits if training.do_train or training.do_eval else []),
    ]
    if glue.validation_file:  # of MNLI's two evaluation parts a single file is the first
        names = [name for name in names if name not in task.evaluation_splits[1:]]
    return {name: load_split(task, name, glue) for name in names}


def load_task_model(task: GlueTask, checkpoint: CheckpointArguments, new_head: bool) -> PreTrainedModel:
    """
    Load the checkpoint as a model for a task.

    Raises:
        UserError: as [`architectures.load_classifier`].
    """
    return load_classifier(checkpoint, task.labels, REGRESSION_LABEL, new_head)


def load_task_tokenizer(
    model: PreTrainedModel, checkpoint: CheckpointArguments, max_length: int
) -> PreTrainedTokenizerBase:
    """
    Load the tokenizer of a model, which then gives the inputs that the model takes and no others.

    Raises:
        UserError: if it cannot be loaded, or does not fit the model or the length.
    """
    name = checkpoint.tokenizer_name or checkpoint.model_name_or_path
    tokenizer: Any = load_tokenizer(name, checkpoint.trust_remote_code, (), checkpoint.model_revision)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"The tokenizer {name} has no pad token, which batches need; give another one.")
        tokenizer.pad_token = tokenizer.eos_token
    check_fit(model.config, tokenizer, max_length)
    taken = inspect.signature(model.forward).parameters
    unused = {"token_type_ids"} if getattr(model.config, "type_vocab_size", 2) < 2 else set()
    tokenizer.model_input_names = [n for n in tokenizer.model_input_names if n in taken and n not in unused]
    return tokenizer


def run_task(
    task: GlueTask,
    folder: Path,
    checkpoint: CheckpointArguments,
    glue: GlueArguments,
    training: FineTuningArguments,
    splits: dict[str, Dataset],
    started: dict[str, Any],
) -> None:
    """
    Run all trials of a task that are not finished, and leave the task's metrics and curve.

    Args:
        task ([`GlueTask`]): The task.
        folder (`Path`): The task's folder.
        checkpoint ([`CheckpointArguments`]), glue ([`GlueArguments`]), training ([`FineTuningArguments`]): The run.
        splits (`dict`): What [`load_splits`] gives.
        started (`dict`): The arguments to record.

    Raises:
        UserError: if the model cannot be loaded or does not fit, or diverges.
    """
    trials = plan_trials(folder, training)
    finished = [(trial.folder / METRICS_FILE).is_file() for trial in trials]
    tokenizer = load_task_tokenizer(
        load_task_model(task, checkpoint, training.do_train), checkpoint, glue.max_seq_length
    )
    examples = {
        name: encode_split(task, rows, tokenizer, glue.max_seq_length, f"Tokenizing {task.title}, {name}")
        for name, rows in splits.items()
    }
    bar = tqdm(
        total=len(trials),
        initial=sum(finished),
        desc=f"{task.title}, trials",
        unit="trial",
        disable=len(trials) == 1 or bool(training.disable_tqdm) or not training.should_log,
    )
    for trial, is_finished in zip(trials, finished, strict=True):
        if not is_finished:
            arguments = {name: value for name, value in started.items() if name not in _SEVERAL_TRIALS} | trial.values
            run_trial(task, trial, checkpoint, tokenizer, glue, training, examples, arguments)
            bar.update()
        if training.search and training.should_save:
            keep_best_weights([trial.folder for trial in trials])
    bar.close()
    if len(trials) > 1 and training.should_save:
        results = [read_metrics(trial.folder) for trial in trials]
        plot_task_curves(
            {result["name"]: result["history"] for result in results}, folder / "curve.png", task_title(task)
        )
        write_json(folder / METRICS_FILE, summarise_trials(results, training.search))
    PartialState().wait_for_everyone()


def run_trial(
    task: GlueTask,
    trial: Trial,
    checkpoint: CheckpointArguments,
    tokenizer: PreTrainedTokenizerBase,
    glue: GlueArguments,
    training: FineTuningArguments,
    examples: dict[str, Dataset],
    arguments: dict[str, Any],
) -> None:
    """Fine-tune once, evaluate, and leave the model with its metrics, curve and card."""
    start = time.perf_counter()
    args = trial_arguments(trial, training)
    if training.search:
        arguments = arguments | {"per_device_train_batch_size": args.per_device_train_batch_size}
    if args.should_save:
        write_arguments(trial.folder, arguments)
    set_seed(args.seed)
    model = load_task_model(task, checkpoint, training.do_train)
    evaluation = [name for name in examples if name in task.evaluation_splits]
    timer = StepTimer()
    trainer = build_trainer(
        task,
        model,
        args,
        tokenizer,
        glue,
        train_dataset=examples.get("train"),
        eval_dataset=examples[evaluation[0]],
        callbacks=[timer],
    )
    metrics: dict[str, Any] = {}
    if training.do_train:
        resumed = training.resume_from_checkpoint or find_checkpoint(trial.folder)
        metrics |= trainer.train(resume_from_checkpoint=resumed).metrics | timer.metrics()
    for name in evaluation:
        prefix = "eval" if name == evaluation[0] else f"eval_{name.removeprefix('validation_')}"
        metrics |= trainer.evaluate(examples[name], metric_key_prefix=prefix)
    values = {name: getattr(args, name) for name in ("num_train_epochs", "learning_rate")} if training.do_train else {}
    result = {
        "name": ", ".join(f"{_SHORT_NAMES[name]} {value:g}" for name, value in trial.values.items()),
        "folder": trial.folder.name,
        "task": task.name,
        "score": metrics["eval_score"],
        "seed": args.seed,
        **values,
        "global_batch_size": args.train_batch_size * args.world_size * args.gradient_accumulation_steps,
        **metrics,
        "seconds": time.perf_counter() - start,
        "is_partial": bool(glue.max_train_samples or glue.max_eval_samples),
        "train_examples": len(examples["train"]) if "train" in examples else 0,
        "started_from": checkpoint.model_name_or_path,
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "environment": describe_environment(),
        "history": trainer.state.log_history,
    }
    if training.do_train:
        # As a step of the Trainer's own, which does not push yet: the card and the metrics are still to come.
        trainer.save_model(_internal_call=True)
    if trainer.is_world_process_zero():
        report_trial(task, trial.folder, result, arguments, training.do_train)
    if training.push_to_hub:
        upload_run(trainer, trial.folder, f"End of fine-tuning on {task.title}")
    PartialState().wait_for_everyone()


def report_trial(
    task: GlueTask, folder: Path, result: dict[str, Any], arguments: dict[str, Any], trained: bool
) -> None:
    """Write a finished trial's curve, card and metrics."""
    if trained:
        plot_task_curves({result["name"]: result["history"]}, folder / "curve.png", task_title(task))
        write_classification_card(folder, task, result, arguments)
    # Last, because a folder with metrics is a finished trial.
    write_json(folder / METRICS_FILE, result)
    for state in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(state)
    shown = ", ".join(f"{name} {result[f'eval_{name}']:.4f}" for name in task.metrics)
    logger.info("%s, %s: %s (%.0f s). In %s.", task.title, result["name"], shown, result["seconds"], folder)


def trial_arguments(trial: Trial, training: FineTuningArguments) -> FineTuningArguments:
    """The arguments of the Trainer for one trial."""
    args = copy.copy(training)
    args.output_dir = str(trial.folder)
    args.seed = trial.values["seed"]
    if training.search:
        args.num_train_epochs = trial.values["num_train_epochs"]
        args.learning_rate = trial.values["learning_rate"]
        batch = trial.values["global_batch_size"]
        args.per_device_train_batch_size = min(training.per_device_train_batch_size, max(1, batch // args.world_size))
        args.gradient_accumulation_steps = accumulation_steps(args, batch)
    return args


def prediction_arguments(training: FineTuningArguments, folder: Path) -> FineTuningArguments:
    """The arguments of a Trainer that only predicts."""
    args = copy.copy(training)
    args.output_dir = str(folder)
    args.eval_strategy = IntervalStrategy.NO
    args.push_to_hub = False
    return args


def build_trainer(
    task: GlueTask,
    model: PreTrainedModel,
    args: FineTuningArguments,
    tokenizer: PreTrainedTokenizerBase,
    glue: GlueArguments,
    **kwargs: Any,
) -> GlueTrainer:
    """A Trainer for a task; further arguments are the Trainer's."""
    padding = "max_length" if glue.pad_to_max_length else "longest"
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # by which a decoder finds the last token of a text
    return GlueTrainer(
        model=model,
        args=args,
        data_collator=DataCollatorWithPadding(tokenizer, padding=padding, max_length=glue.max_seq_length),
        processing_class=tokenizer,
        compute_metrics=partial(compute_task_metrics, task),
        **kwargs,
    )


def keep_best_weights(folders: Sequence[Path]) -> None:
    """Delete the weights of all finished trials but the best; what they measured stays."""
    finished = [folder for folder in folders if (folder / METRICS_FILE).is_file()]
    for folder in finished:
        if folder != best_trial(finished):
            for pattern in _WEIGHTS:
                for file in folder.glob(pattern):
                    file.unlink()


def best_trial(folders: Iterable[Path]) -> Path:
    """The folder with the best score, the first of equals."""
    return max(folders, key=lambda folder: read_metrics(folder)["score"])


def read_metrics(folder: Path) -> dict[str, Any]:
    """What a finished trial or task has measured."""
    return json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))


def task_trials(folder: Path) -> list[Path]:
    """The folders of a finished task's trials: its own if there was a single one."""
    trials = read_metrics(folder).get("trials")
    return [folder] if trials is None else [folder / trial["folder"] for trial in trials]


def summarise_trials(results: Sequence[dict[str, Any]], search: bool) -> dict[str, Any]:
    """A task's metrics: the best of a search, or the median of several seeds, with every trial's score and time."""
    scores = [result["score"] for result in results]
    best = results[scores.index(max(scores))]
    kept = ("folder", "name", "seed", "score", "seconds", "num_train_epochs", "learning_rate", "global_batch_size")
    return {
        "task": best["task"],
        "score": best["score"] if search else statistics.median(scores),
        "kind": "search" if search else "seeds",
        **({} if search else {"std": statistics.stdev(scores)}),
        "scores": scores,
        "best": best["name"],
        "trials": [
            {name: result[name] for name in result if name in kept or name.startswith("eval_")} for result in results
        ],
        **{name: best[name] for name in ("is_partial", "started_from", "model_type", "parameters", "environment")},
    }


def write_arguments(folder: Path, arguments: dict[str, Any]) -> None:
    """Record a trial's arguments as a recipe that gives it again."""
    write_atomically(folder / ARGUMENTS_FILE, yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True))


def task_title(task: GlueTask) -> str:
    """A task with what its score is."""
    return f"{task.title} ({' and '.join(task.scored).replace('_', ' ')})"
