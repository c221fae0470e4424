"""
The trials of a job of fine-tuning: one, or several seeds or values of a grid; which are finished, which is the best.

A trial has a folder of its own, that of the job if it is the only one, and is finished where its metrics are.
"""

import copy
import itertools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import IntervalStrategy

from experiments.arguments import UserError, flag, flag_values, require_at_least
from experiments.heads import HeadArguments
from experiments.results import read_json
from experiments.run_folder import METRICS_FILE, RunIdentity, check_run_folder
from experiments.training import divide_batch, lies_in, training_identity


# What makes several trials of one job, and does not belong to any of them.
SEVERAL_TRIALS = ("seeds", "search", "search_epochs", "search_learning_rates", "search_batch_sizes")
# What a trial may have of its own, and what it is called in the trial's name.
_SHORT_NAMES = {"seed": "seed", "num_train_epochs": "epochs", "learning_rate": "rate", "global_batch_size": "batch"}
_GRID: tuple[list[float], list[float], list[int]] = ([4, 10, 20], [5e-5, 1e-4], [16, 32])
# Flags of one training, and those that a search has for them.
_SEARCHED = {
    "num_train_epochs": "--search_epochs",
    "learning_rate": "--search_learning_rates",
    **dict.fromkeys(("global_batch_size", "gradient_accumulation_steps"), "--search_batch_sizes"),
}
_WEIGHTS = "*.safetensors*"  # of one file, or of several with an index


@dataclass
class FineTuningArguments(HeadArguments):
    """The arguments of the Trainer, what is run more than once, and what is kept of it."""

    seeds: int = flag(1, "Train with so many seeds from --seed on, and say how they spread.")
    search: bool = flag(False, "Try all of the --search_* values, and keep the best.")
    search_epochs: list[float] = flag(_GRID[0], "Epochs.")
    search_learning_rates: list[float] = flag(_GRID[1], "Rates.")
    search_batch_sizes: list[int] = flag(_GRID[2], "Global batches.")
    early_stopping_patience: int | None = flag(None, "Stop after so many evaluations without a new best; keep that.")

    def __post_init__(self) -> None:
        several, patience = self.search or self.seeds > 1, self.early_stopping_patience
        grid = (self.search_epochs, self.search_learning_rates, self.search_batch_sizes)
        self.load_best_model_at_end = self.load_best_model_at_end or patience is not None
        if self.load_best_model_at_end:
            self.metric_for_best_model = self.metric_for_best_model or "score"
        if patience is not None and IntervalStrategy(self.eval_strategy) == IntervalStrategy.NO:
            raise UserError("--early_stopping_patience needs evaluations while training; add --eval_strategy.")
        super().__post_init__()
        require_at_least(1, self, "seeds", "early_stopping_patience")
        for is_wrong, message in (
            (self.search and self.seeds > 1, "--search tries values with one seed; use --seeds after it."),
            (self.search and self.max_steps > 0, "--search tries epochs, which --max_steps overrides; leave it out."),
            (
                not self.search and grid != _GRID,
                "--search_epochs, --search_learning_rates and --search_batch_sizes are for --search; add it, or leave "
                "them out.",
            ),
            (self.search and not all(grid), "--search needs at least one value for each of its --search_* flags."),
            (
                self.search and any(value <= 0 for values in grid for value in values),
                "The values of --search_* must be more than 0.",
            ),
            (
                several and (self.metric_for_best_model or "score").removeprefix("eval_") != "score",
                f"--metric_for_best_model {self.metric_for_best_model} chooses among the evaluations of one training, "
                "and --search and --seeds compare trainings by their score; leave it out.",
            ),
            (
                self.fit_head and several,
                "--fit_head takes no step that --search or --seeds could vary; leave them out.",
            ),
            (
                self.fit_head
                and (self.calibrate_head or [self.head_learning_rate, self.layer_decay, patience] != [None] * 3),
                "--fit_head takes no step, for which --calibrate_head, --head_learning_rate, --layer_decay and "
                "--early_stopping_patience are; leave them out.",
            ),
            (
                self.fit_head and self.label_smoothing_factor > 0,
                "--fit_head computes a head from the labels as they are; leave --label_smoothing_factor out.",
            ),
            (
                self.seed + self.seeds > 2**32,
                f"--seeds {self.seeds} from --seed {self.seed} on go beyond {2**32 - 1}.",
            ),
            (self.push_to_hub and several, "--push_to_hub pushes one model; leave out --search and --seeds."),
            # Which has room for one in a process; the next one measures, or has another seed.
            (self.deepspeed_plugin is not None, "DeepSpeed is for pre-training alone; fine-tune without --deepspeed."),
            (self.is_sharded, "FSDP is for pre-training alone; fine-tune without --fsdp."),
        ):
            if is_wrong:
                raise UserError(message)


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
        if typed := [name for name in _SEARCHED if name in flag_values(sys.argv[1:])]:
            raise UserError(f"--search tries values of its own for --{typed[0]}; give {_SEARCHED[typed[0]]} instead.")
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
            divide_batch(args, values["global_batch_size"])
        trials.append(Trial(folder / name, values, args, training_identity(args, decides)))
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
    if check_run_folder(folder, job_identity(training, decides), training.overwrite, inputs) == "new":
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
    return given is not None and lies_in(given, trial.folder)


def job_identity(training: FineTuningArguments, decides: dict[str, Any]) -> RunIdentity:
    """The identity of a job's folder: of several trials it leaves out in what they differ."""
    identity = training_identity(training, decides | training.head_identity())
    if not training.search and training.seeds == 1:
        return identity
    differing = ("learning_rate", "global_batch_size") if training.search else ("seed",)
    shared = {name: value for name, value in identity.decides.items() if name not in differing}
    length = {"num_train_epochs": 0.0} if training.search else identity.length
    return RunIdentity(shared | {"trials": "search" if training.search else "seeds"}, length, identity.precision)


def counted_trials(metrics: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The trials that a finished job's result is of: all seeds, and of a search the one that is best on validation."""
    trials = metrics.get("trials", [metrics])
    return [trial for trial in trials if metrics.get("kind") != "search" or trial["name"] == metrics["best"]]


def describe_trials(metrics: Mapping[str, Any]) -> str:
    """Words for what [`counted_trials`] gives."""
    if metrics.get("kind") == "search":
        return f"one seed, the best on validation of {len(metrics['trials'])} trials ({metrics['best']})"
    seeds = len(counted_trials(metrics))
    return f"mean and standard deviation of {seeds} seeds" if seeds > 1 else "one seed"


def keep_best_weights(folders: Iterable[Path]) -> None:
    """Delete the weights of all finished trials but the best; what they measured stays."""
    finished = [folder for folder in folders if (folder / METRICS_FILE).is_file()]
    for folder in {*finished} - {best_of(finished)}:
        for file in folder.rglob(_WEIGHTS):  # and its adapter's
            file.unlink()


def best_of(folders: Iterable[Path]) -> Path:
    """The first of the finished trials with the best score."""
    return max(folders, key=lambda folder: read_metrics(folder)["score"])


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
    return best_of(trial_folders(folder))


def read_metrics(folder: Path) -> dict[str, Any]:
    """What a finished trial or job has measured."""
    return read_json(folder / METRICS_FILE)


def summarise_trials(results: Sequence[dict[str, Any]], search: bool, facts: dict[str, Any]) -> dict[str, Any]:
    """
    A job's metrics: the best of a search, or the median of several seeds, with every trial's score and the time that
    its last start took.
    """
    scores = [result["score"] for result in results]
    best = max(results, key=lambda result: result["score"])
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
        # Of facts that a trial of an earlier version does not have nothing is said.
        **{name: best[name] for name in (*facts, "model_type", "parameters", "environment") if name in best},
    }


def summarise_seeds(folder: Path, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Median and standard deviation over a finished job's seeds, of each metric of its first evaluation part."""
    trials = [read_metrics(trial) for trial in trial_folders(folder)]
    values = {name: [trial[f"eval_{name}"] for trial in trials] for name in names}
    return {
        f"{title} of {len(trials)} seeds": {name: summarise(of_name) for name, of_name in values.items()}
        for title, summarise in (("median", statistics.median), ("standard deviation", statistics.stdev))
    }
