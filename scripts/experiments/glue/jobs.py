"""A task of GLUE as a job of fine-tuning: which checkpoint it starts from, what decides its result, its card."""

import logging
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments import fine_tuning, trials
from experiments.adapters import add_lora
from experiments.arguments import Command, UserError
from experiments.checkpoints import CheckpointArguments, load_classifier, load_trained_config, start_classifier
from experiments.glue.metrics import compute_metrics, majority_metrics, predicted_labels
from experiments.glue.tasks import DIAGNOSTICS, SIMILARITY_RANGE, TASKS, GlueArguments, GlueTask
from experiments.model_card import example_input, public_name, write_classifier_card
from experiments.models import fingerprint_checkpoint
from experiments.results import check_writable, read_json, replace_file, write_atomically
from experiments.run_folder import ARGUMENTS_FILE, RUN_FILE
from experiments.text import classifier


logger = logging.getLogger(__name__)

REGRESSION_LABEL = "similarity"
# Tasks that are too small to learn what MNLI teaches.
FROM_MNLI = ("rte", "mrpc", "stsb")


def task_identity(
    task: GlueTask, command: Command, splits: dict[str, Dataset], start: CheckpointArguments | None
) -> dict[str, Any]:
    """
    What decides a task's result beside the checkpoint and the arguments of the Trainer. An MNLI model that this run is
    still to make is taken for the one that the task's folder has started from.
    """
    _, _, glue, training = command.groups
    mnli = glue.mnli_checkpoint if task.name in FROM_MNLI else None
    if mnli and start:
        mnli = fingerprint_checkpoint(start.model_name_or_path)
    elif mnli:
        recorded = read_json(Path(training.output_dir) / task.name / RUN_FILE, {"decides": {"mnli_checkpoint": mnli}})
        mnli = recorded["decides"].get("mnli_checkpoint")
    return {
        "task_name": task.name,
        "data": fine_tuning.fingerprint_rows(*splits.values()),
        "mnli_checkpoint": mnli,
        "max_seq_length": glue.max_seq_length,
        "pad_to_max_length": glue.pad_to_max_length,
    }


def choose_start(task: GlueTask, command: Command, runs_mnli: bool = False) -> CheckpointArguments | None:
    """The checkpoint that a task starts from; None if it is an MNLI model that this run is still to make."""
    checkpoint, _, glue, training = command.groups
    start, folder = glue.mnli_checkpoint, Path(training.output_dir) / "mnli"
    if start is None or task.name not in FROM_MNLI:
        return checkpoint
    if start == "run":
        if runs_mnli:
            return None
        if not trials.trial_folders(folder):
            raise UserError(f"--mnli_checkpoint run: {folder} has no finished run of mnli; add mnli to --task_name.")
        start = str(trials.best_trial(folder))
    # The labels are others, and so must the head be.
    return replace(checkpoint, model_name_or_path=start, model_revision="main", ignore_mismatched_sizes=True)


def load_task_tokenizer(task: GlueTask, start: CheckpointArguments, command: Command) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, which is seen to make a model for a task."""
    load_trained_config(start)  # a checkpoint that is not there is not called a tokenizer
    tokenizer = classifier.load_text_tokenizer(start)
    load_task_model(task, start, command, tokenizer, command.groups[-1].do_train)
    return tokenizer


def load_task_model(
    task: GlueTask, start: CheckpointArguments, command: Command, tokenizer: PreTrainedTokenizerBase, trains: bool
) -> PreTrainedModel:
    """A checkpoint as a model for a task and for inputs of --max_seq_length, with adapters if they are trained."""
    _, lora, glue, _ = command.groups
    model = (start_classifier if trains else load_classifier)(start, task.labels, REGRESSION_LABEL)
    classifier.fit_text_classifier(model, tokenizer, glue.max_seq_length)
    return add_lora(model, lora, start.model_revision) if lora.lora and trains else model


def make_job(
    task: GlueTask, command: Command, start: CheckpointArguments, tokenizer: Any, identity: dict, splits: dict
) -> fine_tuning.Job:
    """The job of a task, whose rows become tokens here, from what the functions above give."""
    (glue, training), trains = command.groups[2:], "train" in splits
    evaluation, workers = splits[task.evaluation_splits[0]], glue.preprocessing_num_workers
    is_local = bool(glue.inputs()) or public_name(glue.dataset_name) != glue.dataset_name
    collator = classifier.make_collator(tokenizer, glue.max_seq_length, glue.pad_to_max_length)
    return fine_tuning.Job(
        name=task.name,
        title=f"{task.title} ({' and '.join(task.scored).replace('_', ' ')})",
        build_model=partial(load_task_model, task, start, command, tokenizer, trains),
        splits={name: classifier.encode_texts(rows, task.columns, collator, workers) for name, rows in splits.items()},
        collator=collator,
        processing_class=tokenizer,
        compute_metrics=lambda p: compute_metrics(task, predicted_labels(task, p.predictions), p.label_ids),
        shown=task.metrics,
        identity=identity,
        facts={
            "started_from": public_name(start.model_name_or_path),
            "is_partial": bool(glue.max_train_samples or glue.max_eval_samples),
            "is_best": trains and training.load_best_model_at_end and not training.fit_head,
            "majority": majority_metrics(task, splits["train"], evaluation) if trains else None,
        },
        # Files that lie here may be anything.
        write_card=partial(write_task_card, task, start, () if is_local else (glue.dataset_name,)),
    )


def predict_tests(task: GlueTask, tests: list[tuple[GlueTask, str, Dataset]], command: Command) -> None:
    """Write the predictions of a task's best model, or of the checkpoint itself where nothing was trained."""
    start, _, glue, training = command.groups
    output = Path(training.output_dir)
    best = trials.best_trial(output / task.name) if trials.trial_folders(output / task.name) else None
    if best is not None and "train_samples" in trials.read_metrics(best):
        if trials.lacks_weights(best):
            raise UserError(f"{best} has no weights any more; run it again with --recipe {best / ARGUMENTS_FILE}.")
        start = replace(start, model_name_or_path=str(best), tokenizer_name=None, model_revision="main")
        glue = _as_trained(glue, best)
        command = replace(command, groups=(*command.groups[:2], glue, training))
    tokenizer = classifier.load_text_tokenizer(start)
    model = load_task_model(task, start, command, tokenizer, trains=False)
    check_writable(output, "output_dir")
    collator = classifier.make_collator(tokenizer, glue.max_seq_length, glue.pad_to_max_length)
    for part, split, rows in tests:
        examples = classifier.encode_texts(rows, part.columns, collator, glue.preprocessing_num_workers)
        folder = output / "submission"
        logits = fine_tuning.predict(model, examples.remove_columns("idx"), collator, training, folder)
        if training.should_save:
            write_predictions(folder, part, split, rows["idx"], predicted_labels(task, logits))
    PartialState().wait_for_everyone()


def _as_trained(glue: GlueArguments, folder: Path) -> GlueArguments:
    """The arguments with which a run's model reads as it has learnt to."""
    decides = read_json(folder / RUN_FILE)["decides"]
    lengths = {name: decides[name] for name in ("max_seq_length", "pad_to_max_length")}
    for name in (name for name, value in lengths.items() if value != getattr(glue, name)):
        logger.info("%s predicts with --%s %s, as it was trained.", folder, name, lengths[name])
    return replace(glue, **lengths)


def write_predictions(folder: Path, task: GlueTask, split: str, indices: Iterable[int], labels: np.ndarray) -> None:
    """Write the classes or similarities `(num_examples,)` of a test split under the name that is asked for."""
    if task.is_regression:
        predictions = [f"{value:.3f}" for value in np.clip(labels, *SIMILARITY_RANGE)]
    elif task.submits_words:
        predictions = [task.labels[label] for label in labels]
    else:
        predictions = [str(label) for label in labels]
    rows = [f"{index}\t{prediction}" for index, prediction in zip(indices, predictions, strict=True)]
    write_atomically(folder / f"{task.submission[split]}.tsv", "\n".join(["index\tprediction", *rows]) + "\n")


def delete_predictions(output: Path, task: GlueTask) -> None:
    """Delete what an earlier model of a task has predicted, its diagnostics too, and the archive that holds it."""
    files = [output / "submission" / name for name in _prediction_files(task)]
    for file in files if any(file.exists() for file in files) else []:
        file.unlink(missing_ok=True)
        (output / "submission.zip").unlink(missing_ok=True)


def _prediction_files(task: GlueTask) -> list[str]:
    """The files of what a task's model predicts: MNLI's also the diagnostics."""
    parts = (task, *([DIAGNOSTICS] if task.name == "mnli" else []))
    return [f"{name}.tsv" for part in parts for name in part.submission.values()]


def pack_submission(folder: Path, archive: Path) -> list[str]:
    """
    Put the files of predictions in a folder into one archive, without folders in it; returns their names. Those of a
    task whose model is being replaced are left out.
    """
    places = {folder.parent / task.name: task for task in TASKS.values()}
    replaced = [
        task for place, task in places.items() if (place / RUN_FILE).is_file() and not trials.trial_folders(place)
    ]
    outdated = {name for task in replaced for name in _prediction_files(task)}
    files = sorted(file for file in folder.glob("*.tsv") if file.name not in outdated)
    with replace_file(archive) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            packed.write(file, file.name)
    return [file.name for file in files]


def write_task_card(
    task: GlueTask, start: CheckpointArguments, datasets: tuple, folder: Path, metrics: dict, arguments: dict
) -> None:
    """Write the model card of a trial."""
    scores = {name: metrics[f"eval_{name}"] for name in task.metrics}
    if "eval_mismatched_accuracy" in metrics:
        scores["mismatched_accuracy"] = metrics["eval_mismatched_accuracy"]
    low, high = SIMILARITY_RANGE
    guess = "mean" if task.is_regression else "commonest label"
    write_classifier_card(
        *(folder, metrics, arguments),
        script="run_glue.py",
        learned=f"{task.title} of GLUE",
        answers=" or ".join(f"`{word}`" for word in task.labels) or f"a similarity from {low:g} to {high:g}",
        example=example_input(task.columns),
        scores=scores,
        others={f"always the {guess}": {n: v for n, v in metrics["majority"].items() if n in scores}},
        evaluated_on=f"{metrics['eval_samples']:,} examples of the evaluation part of {task.title}",
        datasets=datasets,
        base_model=start.model_name_or_path,
        tags=("glue",),
    )
