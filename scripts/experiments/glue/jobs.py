"""A task of GLUE as a job of fine-tuning: which checkpoint it starts from, what decides its result, its card."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from experiments.arguments import UserError
from experiments.fine_tuning import (
    FineTuningArguments,
    Job,
    best_trial,
    fingerprint_rows,
    predict,
    read_metrics,
    trial_folders,
)
from experiments.glue.metrics import compute_task_metrics, majority_metrics, predicted_labels
from experiments.glue.submission import write_predictions
from experiments.glue.tasks import SIMILARITY_RANGE, GlueArguments, GlueTask, encode_split
from experiments.model_card import CardFacts, format_scores, write_card
from experiments.models import CheckpointArguments, fingerprint_checkpoint, load_classifier
from experiments.run_folder import ARGUMENTS_FILE
from experiments.text.classifier import fit_text_classifier, load_text_tokenizer


REGRESSION_LABEL = "similarity"
# Tasks that are too small to learn what MNLI teaches.
FROM_MNLI = ("rte", "mrpc", "stsb")


def task_identity(
    task: GlueTask, checkpoint: CheckpointArguments, glue: GlueArguments, splits: dict[str, Dataset]
) -> dict[str, Any]:
    """What decides a task's result beside the arguments of the Trainer."""
    mnli = glue.mnli_checkpoint if task.name in FROM_MNLI else None
    return {
        "task_name": task.name,
        "data": fingerprint_rows(*splits.values()),
        "checkpoint": fingerprint_checkpoint(checkpoint.model_name_or_path, checkpoint.model_revision),
        "tokenizer": checkpoint.tokenizer_name
        and fingerprint_checkpoint(checkpoint.tokenizer_name, checkpoint.model_revision),
        "mnli_checkpoint": mnli if mnli in (None, "run") else fingerprint_checkpoint(mnli, "main"),
        "config_overrides": checkpoint.config_overrides,
        "max_seq_length": glue.max_seq_length,
        "pad_to_max_length": glue.pad_to_max_length,
    }


def choose_start(
    task: GlueTask, checkpoint: CheckpointArguments, glue: GlueArguments, output: Path, runs_mnli: bool = False
) -> CheckpointArguments | None:
    """
    The checkpoint that a task starts from; None if it is an MNLI model that this run is still to make.

    Raises:
        UserError: if it is to be an MNLI model of the output folder, and there is none.
    """
    if glue.mnli_checkpoint is None or task.name not in FROM_MNLI:
        return checkpoint
    start = glue.mnli_checkpoint
    if start == "run":
        if runs_mnli:
            return None
        if not trial_folders(output / "mnli"):
            raise UserError(
                f"--mnli_checkpoint run: {output / 'mnli'} has no finished run of mnli; add mnli to --task_name."
            )
        start = str(best_trial(output / "mnli"))
    # The labels are others, and so must the head be.
    return replace(checkpoint, model_name_or_path=start, model_revision="main", ignore_mismatched_sizes=True)


def fit_tokenizer(
    task: GlueTask, start: CheckpointArguments, glue: GlueArguments, new_head: bool
) -> PreTrainedTokenizerBase:
    """
    Load the tokenizer of a checkpoint and see that the checkpoint makes a model for a task.

    Raises:
        UserError: as [`load_task_model`] and `load_text_tokenizer`.
    """
    model = load_classifier(start, task.labels, REGRESSION_LABEL, new_head)
    tokenizer = load_text_tokenizer(start)
    fit_text_classifier(model, tokenizer, glue.max_seq_length)
    return tokenizer


def load_task_model(
    task: GlueTask, start: CheckpointArguments, tokenizer: PreTrainedTokenizerBase, glue: GlueArguments, new_head: bool
) -> PreTrainedModel:
    """
    Load a checkpoint as a model for a task that takes inputs of the length that is asked for.

    Raises:
        UserError: as `load_classifier` and `fit_text_classifier`.
    """
    model = load_classifier(start, task.labels, REGRESSION_LABEL, new_head)
    fit_text_classifier(model, tokenizer, glue.max_seq_length)
    return model


def make_job(
    task: GlueTask,
    start: CheckpointArguments,
    tokenizer: PreTrainedTokenizerBase,
    glue: GlueArguments,
    identity: dict[str, Any],
    splits: dict[str, Dataset],
) -> Job:
    """
    Make the job of a task; its rows become tokens here.

    Args:
        task ([`GlueTask`]): The task.
        start ([`CheckpointArguments`]): What [`choose_start`] gives.
        tokenizer (`PreTrainedTokenizerBase`): What [`fit_tokenizer`] gives.
        glue ([`GlueArguments`]): How the data is read.
        identity (`dict`): What [`task_identity`] gives.
        splits (`dict`): What `load_splits` gives.
    """
    name, trains = start.model_name_or_path, "train" in splits
    facts: dict[str, Any] = {
        # A name, and not where it lies on this machine.
        "started_from": Path(name).resolve().name if Path(name).exists() else name,
        "is_partial": bool(glue.max_train_samples or glue.max_eval_samples),
    }
    if trains:
        facts["majority"] = majority_metrics(task, splits["train"], splits[task.evaluation_splits[0]])
    return Job(
        name=task.name,
        title=f"{task.title} ({' and '.join(task.scored).replace('_', ' ')})",
        build_model=partial(load_task_model, task, start, tokenizer, glue, trains),
        splits={
            split: encode_split(task, rows, tokenizer, glue, f"Tokenizing {task.title}, {split}")
            for split, rows in splits.items()
        },
        collator=make_collator(tokenizer, glue),
        processing_class=tokenizer,
        compute_metrics=partial(compute_task_metrics, task),
        shown=task.metrics,
        identity=identity,
        facts=facts,
        write_card=partial(write_task_card, task, start, glue),
    )


def make_collator(tokenizer: PreTrainedTokenizerBase, glue: GlueArguments) -> DataCollatorWithPadding:
    """What pads a batch to its longest input, or all batches alike."""
    padding = "max_length" if glue.pad_to_max_length else "longest"
    return DataCollatorWithPadding(tokenizer, padding=padding, max_length=glue.max_seq_length)


def predict_tests(
    task: GlueTask,
    tests: list[tuple[GlueTask, str, Dataset]],
    checkpoint: CheckpointArguments,
    glue: GlueArguments,
    training: FineTuningArguments,
) -> None:
    """
    Write the predictions of a task's best model, or of the checkpoint itself where nothing was trained.

    Raises:
        UserError: if the best model's weights are not there any more, or as [`load_task_model`].
    """
    output = Path(str(training.output_dir))
    best = best_trial(output / task.name) if trial_folders(output / task.name) else None
    if best is not None and "train_samples" in read_metrics(best):
        if not any(best.glob("*.safetensors*")):
            raise UserError(f"{best} has no weights any more; run it again with --recipe {best / ARGUMENTS_FILE}.")
        checkpoint = replace(checkpoint, model_name_or_path=str(best), tokenizer_name=None, model_revision="main")
    tokenizer = load_text_tokenizer(checkpoint)
    model = load_task_model(task, checkpoint, tokenizer, glue, new_head=False)
    for part, split, rows in tests:
        examples = encode_split(part, rows, tokenizer, glue, f"Tokenizing {part.title}, {split}")
        collator, folder = make_collator(tokenizer, glue), output / "submission"
        logits = predict(model, examples.remove_columns("idx"), collator, tokenizer, training, folder)
        if training.should_save:
            write_predictions(folder, part, split, rows["idx"], predicted_labels(task, logits))
    PartialState().wait_for_everyone()


def write_task_card(
    task: GlueTask,
    start: CheckpointArguments,
    glue: GlueArguments,
    folder: Path,
    metrics: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    """Write the model card of a trial."""
    scores = {name: metrics[f"eval_{name}"] for name in task.metrics}
    rows = {"this model": scores, "always the commonest label": metrics["majority"]}
    if "eval_mismatched_accuracy" in metrics:
        scores["mismatched_accuracy"] = metrics["eval_mismatched_accuracy"]
    labels = " or ".join(f"`{word}`" for word in task.labels)
    low, high = SIMILARITY_RANGE
    facts = CardFacts(
        title=str(arguments.get("hub_model_id") or folder.resolve().name),
        script="run_glue.py",
        pipeline_tag="text-classification",
        description=f"`{metrics['started_from']}`, a model of type `{metrics['model_type']}` with "
        f"{metrics['parameters']:,} parameters, fine-tuned on {task.title} of GLUE with seed {metrics['seed']}. It "
        f"answers with {labels or f'a similarity from {low:g} to {high:g}'}.",
        example='{"text": "One text.", "text_pair": "Another text."}' if len(task.columns) == 2 else '"One text."',
        scores=scores,
        results=format_scores(
            {row: {name: f"{values[name]:.4f}" for name in scores if name in values} for row, values in rows.items()}
        ),
        evaluated_on=f"{metrics['eval_samples']:,} examples of the evaluation part of {task.title}",
        picture="curve.png",
        picture_title="Loss and score",
        # Files that lie here may be anything.
        datasets=() if glue.inputs() else (glue.dataset_name,),
        base_model=start.model_name_or_path,
        tags=("glue",),
    )
    write_card(folder, facts, metrics, arguments)
