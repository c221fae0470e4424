"""
Fine-tune a checkpoint on the tasks of GLUE, evaluate it, and write the table and the files of a submission.

    accelerate launch scripts/run_glue.py --model_name_or_path runs/sktformer-base --task_name cola
    accelerate launch scripts/run_glue.py --model_name_or_path runs/sktformer-base --task_name all --seeds 5
    accelerate launch scripts/run_glue.py --model_name_or_path runs/sktformer-base --task_name rte stsb --search
    accelerate launch scripts/run_glue.py --model_name_or_path runs/sktformer-base --task_name all \\
        --mnli_checkpoint run --do_train --do_eval --do_predict

Any sequence-classification architecture of one stack will do. Without --recipe it starts from
configuration/glue/base.yaml. Every task has a folder of its name in --output_dir. Starting the same command again goes
on with the first task that is not finished. A checkpoint that is not trained here reads as many tokens as it was
trained with, where its folder says that and no recipe or --max_seq_length does.
"""

import logging
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.adapters import LoraArguments, check_adapters
from experiments.arguments import CONFIGURATION, Command, UserError, parse_command, run_script
from experiments.checkpoints import CheckpointArguments
from experiments.fine_tuning import run_job
from experiments.glue import jobs
from experiments.glue.table import write_glue_table
from experiments.glue.tasks import DIAGNOSTICS, TASKS, GlueArguments, GlueTask, load_splits, load_tests
from experiments.model_card import public_name
from experiments.results import read_json
from experiments.run_folder import METRICS_FILE, RUN_FILE, recorded_arguments, trained_length
from experiments.text.classifier import checkpoint_identity
from experiments.training import announce_run, prepare, upload_run
from experiments.trials import FineTuningArguments, check_job, read_metrics


logger = logging.getLogger("run_glue")
ARGUMENTS = (CheckpointArguments, LoraArguments, GlueArguments, FineTuningArguments)


def main() -> None:
    command = parse_command(ARGUMENTS, __doc__, CONFIGURATION / "glue" / "base.yaml", output_dir="runs/glue")
    checkpoint, lora, glue, training = command.groups
    check_adapters(lora, training)
    if training.push_to_hub and len(glue.task_name) > 1:
        raise UserError("--push_to_hub pushes one model; give one task.")
    if training.resume_from_checkpoint and len(glue.task_name) > 1:
        raise UserError("--resume_from_checkpoint names one task's; give one task, or leave it out for the newest.")
    prepare(training, command.given)
    trained = None if training.do_train else trained_length(checkpoint.model_name_or_path)
    if trained and not command.asks_for("max_seq_length"):
        glue.max_seq_length = command.given["max_seq_length"] = trained
    run(command)
    if training.should_save:
        report(Path(training.output_dir), checkpoint, training.do_predict)


def run(command: Command) -> None:
    """Run the tasks that are not finished, then predict."""
    checkpoint, lora, glue, training = command.groups
    output, names = Path(training.output_dir), glue.task_name
    # Everything that can be wrong with the arguments is found before a folder is touched or a task takes hours.
    shared = checkpoint_identity(checkpoint, lora)
    overwrites = training.overwrite and (training.do_train or training.do_eval)
    check_output(output, shared, [name for name in TASKS if not (overwrites and name in names)])
    waiting: dict[str, dict[str, Any]] = {}
    for task in [TASKS[name] for name in names if training.do_train or training.do_eval]:
        if task.is_regression and training.label_smoothing_factor:
            raise UserError(f"--label_smoothing_factor is for classes, and {task.name} has none; leave it out.")
        if task.is_regression and training.fit_head:
            raise UserError(f"--fit_head is for single labels, and {task.name} has none; leave it out.")
        start = jobs.choose_start(task, command, "mnli" in waiting)
        tokenizer = start and jobs.load_task_tokenizer(task, start, command)
        splits = load_splits(task, glue, training.do_train)
        identity = shared | jobs.task_identity(task, command, splits, start)
        if check_job(output / task.name, identity, training, command.paths()) and start:
            logger.info("%s holds %s, finished.", output / task.name, task.title)
            upload_run(training, output / task.name, f"Fine-tuned on {task.title}")
        else:
            waiting[task.name] = {"start": start, "tokenizer": tokenizer, "identity": identity, "splits": splits}
    tests = {name: load_tests(TASKS[name], glue) for name in names if training.do_predict}
    announce_run(command)
    silent = len(waiting) < 2 or bool(training.disable_tqdm) or not training.should_log
    done = len(names) - len(waiting)
    for name in tqdm(list(waiting), "Tasks", unit="task", initial=done, total=len(names), disable=silent):
        task, parts = TASKS[name], waiting.pop(name)
        if parts["start"] is None:
            parts["start"] = start = jobs.choose_start(task, command) or checkpoint
            parts["tokenizer"] = jobs.load_task_tokenizer(task, start, command)
            parts["identity"] = shared | jobs.task_identity(task, command, parts["splits"], start)
            if check_job(output / name, parts["identity"], training, command.paths()):
                continue
        run_job(jobs.make_job(task, command, **parts), output / name, training, task_arguments(task, command))
        if training.should_save:
            jobs.delete_predictions(output, task)
    for name, splits_to_predict in tests.items():
        jobs.predict_tests(TASKS[name], splits_to_predict, command)


def task_arguments(task: GlueTask, command: Command) -> dict[str, Any]:
    """The arguments that a task's folder records: the same, whichever tasks ran with it and what was predicted."""
    training = command.groups[-1]
    unused = {"do_predict"} | ({"mnli_checkpoint"} if task.name not in jobs.FROM_MNLI else set())
    if training.do_train:
        unused |= {"do_train", "do_eval"}  # training evaluates
    started = recorded_arguments(command.given) | {"seed": training.seed}
    return {name: value for name, value in started.items() if name not in unused} | {"task_name": [task.name]}


def check_output(output: Path, model: dict[str, Any], names: list[str]) -> None:
    """
    Refuse a folder that is a model's, or has tasks of another one, which would stand in one table with this one's;
    `model` is its [`checkpoint_identity`].
    """
    if (output / "config.json").is_file():
        raise UserError(f"--output_dir {output} is a model's folder; choose another one for the tasks.")
    for name in names:
        decides = read_json(output / name / RUN_FILE, {"decides": model})["decides"]
        for key in (key for key, value in model.items() if decides.get(key) != value):
            values = "" if key == "checkpoint" else f" ({decides.get(key)} there, {model[key]} here)"
            raise UserError(f"--output_dir {output} holds {name} of another {key}{values}; choose another folder.")


def report(output: Path, checkpoint: CheckpointArguments, predicted: bool) -> None:
    """Write and show the table of all finished tasks in the folder, and pack the submission."""
    finished = {name: read_metrics(output / name) for name in TASKS if (output / name / METRICS_FILE).is_file()}
    if finished:
        print(write_glue_table(output, public_name(checkpoint.model_name_or_path), finished))
        logger.info("The table is in %s, glue.json and glue.png.", output / "glue.md")
    if predicted:
        archive = output / "submission.zip"
        names = jobs.pack_submission(output / "submission", archive)
        logger.info("%s holds %s.", archive, ", ".join(names))
        lacking = [n for t in [*TASKS.values(), DIAGNOSTICS] for n in t.submission.values() if f"{n}.tsv" not in names]
        if lacking:
            logger.info("The benchmark wants all of its files; %s are not there yet.", ", ".join(lacking))


if __name__ == "__main__":
    run_script(main)
