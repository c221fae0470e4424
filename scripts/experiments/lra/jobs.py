"""A task of Long Range Arena as a job of fine-tuning: trained, chosen on validation, measured on the whole test."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import EvalPrediction
from transformers.trainer import TRAINER_STATE_NAME

from experiments.architectures import explain_failure, takes_mask
from experiments.arguments import Command, UserError, flag
from experiments.fine_tuning import FineTuningTrainer, Job, finite_logits
from experiments.lra.examples import Examples, collate
from experiments.lra.models import build_model, guesses_values, vocab_size
from experiments.lra.pretraining import MaskedCollator, SelfPretrainingTrainer
from experiments.lra.pretraining import compute_metrics as compute_masked_metrics
from experiments.lra.published import published_figures
from experiments.lra.report import write_task_card
from experiments.lra.tasks import TASKS
from experiments.model_card import public_name
from experiments.models import fingerprint_checkpoint
from experiments.results import read_json, write_json
from experiments.run_folder import METRICS_FILE, find_checkpoint
from experiments.sized_models import describe_config
from experiments.trials import FineTuningArguments, read_metrics


@dataclass
class LraTrainingArguments(FineTuningArguments):
    """The arguments of training on Long Range Arena."""

    output_dir: str | None = flag(None, "Folder of the run; by default runs/lra/TASK.")
    mask_probability: float | None = flag(
        None, "Masked self-pretraining: guess this share of the values, in place of the labels."
    )
    test_curve: bool = flag(False, "Measure the test at each evaluation, for a curve; nothing is chosen by it.")

    def __post_init__(self) -> None:
        self.output_dir = self.output_dir or "runs/lra"
        super().__post_init__()
        self.remove_unused_columns = False  # an example has none of the model's names yet
        if self.mask_probability is not None and not 0 < self.mask_probability < 1:
            raise UserError(f"--mask_probability is {self.mask_probability:g}; it must lie between 0 and 1.")
        if self.do_predict:
            raise UserError("--do_predict: run_lra.py measures the test and writes no predictions; leave it out.")
        if self.mask_probability is not None and self.train_sampling_strategy == "sequential":
            what = "would hide the same values in every epoch"
            raise UserError(f"--mask_probability with --train_sampling_strategy sequential {what}; leave one out.")
        if self.mask_probability is not None and self.per_device_train_batch_size == 1:
            what = "would hide the same values in every epoch; give at least 2"
            raise UserError(f"--mask_probability with --per_device_train_batch_size 1 {what}.")
        if self.mask_probability is not None and self.test_curve:
            raise UserError("--test_curve measures labels, of which --mask_probability makes no use; leave one out.")


class CurveTrainer(FineTuningTrainer):
    """A Trainer that measures the test, too, whenever it evaluates, for a curve: nothing is chosen by it."""

    def __init__(self, test: Examples, **kwargs: Any):
        super().__init__(**kwargs)
        self.test = test

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        if eval_dataset is None:
            super().evaluate(self.test, metric_key_prefix="eval_test")  # type: ignore[arg-type]
        return super().evaluate(eval_dataset, *args, **kwargs)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """The share of all examples that are classified right; `score` is the same."""
    logits = finite_logits(prediction.predictions)
    accuracy = float((logits.argmax(axis=-1) == prediction.label_ids).mean())
    return {"score": accuracy, "accuracy": accuracy}


def make_job(command: Command, parts: Mapping[str, Examples]) -> Job:
    """A task as the engine takes it."""
    model_arguments, arguments, training = command.groups
    task, name = TASKS[arguments.task_name], model_arguments.model_name_or_path
    trains, masks = training.do_train, training.mask_probability is not None
    splits = {part: examples for part, examples in parts.items() if trains or part != "train"}
    is_partial = arguments.is_partial or sum(map(len, parts.values())) < 0.99 * task.count
    has_length = arguments.length == task.max_length
    is_padded = any((part.lengths != arguments.length).any() for part in splits.values())

    def build() -> Any:
        return build_model(model_arguments, task, arguments.length, is_padded, torch.initial_seed(), masks)

    model = build()  # which shows now whether it can be made, and then whether it can read
    if not name and (reason := explain_failure(model.base_model, arguments.length)):
        raise UserError(f"A {model_arguments.model_type} cannot read {arguments.length} tokens: {reason}.")
    if model_arguments.masked_dropout is not None and not masks:
        raise UserError("--masked_dropout is for --mask_probability; set dropout by --config_overrides.")
    if name and not trains and not masks and guesses_values(model.config):
        raise UserError(f"The model {name} has guessed values and has no head for labels yet; add --do_train.")
    test: dict[str, Any] = {"trainer_class": partial(CurveTrainer, splits["test"])} if training.test_curve else {}
    masked: dict[str, Any] = {
        "trainer_class": partial(SelfPretrainingTrainer, task.per_example),
        "collator": MaskedCollator(vocab_size(task) - 1, training.mask_probability or 0.0, takes_mask(model)),
        "compute_metrics": compute_masked_metrics,
    }
    classified = {"collator": collate, "compute_metrics": compute_metrics, **test}
    return Job(
        name=arguments.task_name,
        title=f"{task.title}, masked values" if masks else task.title,
        build_model=build,
        splits=splits,  # type: ignore[arg-type]
        processing_class=None,
        shown=("accuracy",),
        identity={
            "task": arguments.task_name,
            "data": {part: examples.fingerprint() for part, examples in splits.items()},
            "checkpoint": fingerprint_checkpoint(name) if name else describe_config(model, model_arguments),
            "config": describe_config(model, model_arguments) if name else None,
            "mask_probability": training.mask_probability,
        },
        facts={
            "started_from": public_name(name) if name else "scratch",
            "is_partial": is_partial,
            "source": splits["test"].source,
            "measured": _describe_choice(training),
            "max_length": arguments.length,
            "noise": arguments.noise,
            "published": published_figures(arguments.task_name, model.config, arguments.noise, has_length),
        },
        write_card=partial(write_task_card, task, masks, shlex.join(arguments.decisive_flags())),
        **(masked if masks else classified),
    )


def _describe_choice(training: LraTrainingArguments) -> str:
    """Which model of a run is measured."""
    if not training.do_train:
        return "The model as it is"
    return f"The {'checkpoint that is best on validation' if training.load_best_model_at_end else 'last model'}"


def record_curve(folder: Path) -> None:
    """
    Write into a trial's metrics the test accuracy after each evaluation, by its step: `curve`. A `UserError` if not
    all evaluations have measured it.
    """
    metrics = read_metrics(folder)
    found = _find_curve(folder, metrics["history"])
    if found and "curve" not in metrics:
        write_json(folder / METRICS_FILE, metrics | {"curve": found})


def check_curve(folder: Path) -> None:
    """Raise a `UserError` if a run in a folder, cut short or finished, has evaluations that no curve could have."""
    if (folder / METRICS_FILE).is_file():
        _find_curve(folder, read_metrics(folder)["history"])
    elif checkpoint := find_checkpoint(folder):
        _find_curve(folder, read_json(Path(checkpoint) / TRAINER_STATE_NAME)["log_history"])


def _find_curve(folder: Path, history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    key = "eval_test_accuracy"
    found = {str(entry["step"]): entry[key] for entry in history if key in entry}
    if len(found) < len({entry["step"] for entry in history if "eval_accuracy" in entry}):
        remedy = "choose another folder, or leave --test_curve out"
        raise UserError(f"{folder} was trained, at least in part, without --test_curve, and has no curve; {remedy}.")
    return found
