"""
Fine-tune a checkpoint on the tasks of GLUE, evaluate it, and write the table and the files of a submission.

    accelerate launch scripts/run_glue.py --model_name_or_path runs/sktformer-base --task_name cola
    accelerate launch scripts/run_glue.py --model_name_or_path runs/sktformer-base --task_name all --seeds 5
    accelerate launch scripts/run_glue.py --model_name_or_path runs/sktformer-base --task_name rte stsb --search
    accelerate launch scripts/run_glue.py --model_name_or_path runs/sktformer-base --task_name all \\
        --mnli_checkpoint run --do_train --do_eval --do_predict

Any sequence-classification architecture of transformers will do. Without --recipe it starts from
configuration/glue/base.yaml. Starting the same command again goes on with the first task that is not finished.
"""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from experiments.arguments import UserError, given_arguments, parse_args, run_script
from experiments.fine_tuning import (
    FineTuningArguments,
    best_trial,
    build_trainer,
    load_splits,
    load_task_model,
    load_task_tokenizer,
    plan_trials,
    prediction_arguments,
    read_metrics,
    run_task,
    task_trials,
    trial_arguments,
)
from experiments.glue.metrics import predicted_labels
from experiments.glue.submission import pack_submission, write_predictions
from experiments.glue.table import write_glue_table
from experiments.glue.tasks import DIAGNOSTICS, TASKS, GlueArguments, GlueTask, encode_split, has_split, load_split
from experiments.models import CheckpointArguments
from experiments.run_folder import (
    ARGUMENTS_FILE,
    METRICS_FILE,
    check_run_folder,
    claim_run_folder,
    is_finished_run,
    recorded_arguments,
)
from experiments.training import check_hub_access, check_run_arguments, leave_process_group


BASE_RECIPE = Path(__file__).parent.parent / "configuration" / "glue" / "base.yaml"
GLUE_ARGUMENTS = (CheckpointArguments, GlueArguments, FineTuningArguments)
# Tasks that are too small to learn what MNLI teaches.
_FROM_MNLI = ("rte", "mrpc", "stsb")
_STAGES = ("do_train", "do_eval", "do_predict")
logger = logging.getLogger("run_glue")


def main() -> None:
    argv = sys.argv[1:]
    if not any(argument.split("=")[0] == "--recipe" for argument in argv):
        argv = ["--recipe", str(BASE_RECIPE), *argv]
    checkpoint, glue, training = parse_args(GLUE_ARGUMENTS, argv, description=__doc__)
    given = given_arguments(GLUE_ARGUMENTS, argv)
    if not any(given.get(stage) for stage in _STAGES):
        training.do_train = training.do_eval = True
    elif not given.get("do_eval"):
        training.do_eval = False  # which the Trainer's arguments switch on with --eval_strategy
    check_run_arguments(training)
    logging.basicConfig(format="%(message)s", level=logging.INFO if training.should_log else logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if training.disable_tqdm or not training.should_log or not sys.stderr.isatty():
        # In a log file every step of a bar would be a line.
        training.disable_tqdm = True
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
    run(checkpoint, glue, training, recorded_arguments(given) | {"seed": training.seed})
    leave_process_group()


def run(
    checkpoint: CheckpointArguments, glue: GlueArguments, training: FineTuningArguments, started: dict[str, Any]
) -> None:
    """Run the tasks that are not finished, then predict and write the table."""
    output = Path(str(training.output_dir))
    tasks = [TASKS[name] for name in glue.task_name]
    arguments = {task.name: task_arguments(task, started) for task in tasks}
    check_output(output, checkpoint, tasks, training.overwrite)
    waiting = [
        task
        for task in tasks
        if (training.do_train or training.do_eval)
        and (training.overwrite or not is_finished_run(output / task.name, arguments[task.name]))
    ]
    starts = {task.name: choose_start(task, checkpoint, training, output, TASKS["mnli"] in waiting) for task in tasks}
    # Everything that can be wrong with the arguments is found before a folder is touched or a task takes hours.
    inputs = [checkpoint.model_name_or_path, *filter(None, (glue.data_dir, glue.train_file, glue.validation_file))]
    for task in waiting:
        if task.is_regression and training.label_smoothing_factor:
            raise UserError(f"--label_smoothing_factor is for classes, and {task.name} has none; leave it out.")
        for trial in plan_trials(output / task.name, training):
            trial_arguments(trial, training)
        check_run_folder(output / task.name, arguments[task.name], training.overwrite, inputs)
    if training.push_to_hub:
        if len(tasks) > 1 or training.search or training.seeds > 1:
            raise UserError("--push_to_hub pushes one model; give one task, without --search and --seeds.")
        check_hub_access(training.hub_token)
    splits = {task.name: check_task(task, starts[task.name], glue, training) for task in waiting}
    tests = {task.name: load_tests(task, glue) for task in tasks} if training.do_predict else {}
    silent = len(waiting) < 2 or bool(training.disable_tqdm) or not training.should_log
    done = len(tasks) - len(waiting)
    for task in tqdm(waiting, "Tasks", unit="task", initial=done, total=len(tasks), disable=silent):
        with training.main_process_first(local=False):
            if training.should_save:
                claim_run_folder(output / task.name, arguments[task.name])
        start = starts[task.name] or best_mnli_start(checkpoint, output)
        run_task(task, output / task.name, start, glue, training, splits.pop(task.name), arguments[task.name])
    for task in tasks:
        if task.name in tests:
            predict(task, tests[task.name], checkpoint, glue, training, output)
    if training.should_save:
        report(output, checkpoint, bool(tests))


def choose_start(
    task: GlueTask, checkpoint: CheckpointArguments, training: FineTuningArguments, output: Path, runs_mnli: bool
) -> CheckpointArguments | None:
    """The checkpoint that a task starts from; None if it is an MNLI model that this run makes."""
    if training.mnli_checkpoint is None or task.name not in _FROM_MNLI:
        return checkpoint
    if training.mnli_checkpoint != "run":
        # The labels are others, and so must the head be.
        return replace(
            checkpoint,
            model_name_or_path=training.mnli_checkpoint,
            model_revision="main",
            ignore_mismatched_sizes=True,
        )
    return None if runs_mnli else best_mnli_start(checkpoint, output)


def best_mnli_start(checkpoint: CheckpointArguments, output: Path) -> CheckpointArguments:
    """
    The best model that was fine-tuned on MNLI in the same output folder.

    Raises:
        UserError: if there is none.
    """
    folder = output / "mnli"
    if not (folder / METRICS_FILE).is_file():
        raise UserError(f"--mnli_checkpoint run: {folder} has no finished run of mnli; add mnli to --task_name.")
    best = str(best_trial(task_trials(folder)))
    return replace(checkpoint, model_name_or_path=best, model_revision="main", ignore_mismatched_sizes=True)


def task_arguments(task: GlueTask, started: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a task's folder records: the same, whichever tasks ran with it and what was predicted."""
    unused = {"do_train", "do_predict"} | ({"mnli_checkpoint"} if task.name not in _FROM_MNLI else set())
    if started.get("do_train"):
        unused.add("do_eval")  # training evaluates
    return {name: value for name, value in started.items() if name not in unused} | {"task_name": [task.name]}


def check_output(output: Path, checkpoint: CheckpointArguments, tasks: list[GlueTask], overwrite: bool) -> None:
    """Refuse a folder that is a model, or has tasks of another one, which would stand in one table with this one's."""
    if (output / "config.json").is_file():
        raise UserError(f"--output_dir {output} is a model's folder; choose another one for the tasks.")
    for name in TASKS:
        file = output / name / ARGUMENTS_FILE
        if not file.is_file() or (overwrite and TASKS[name] in tasks):
            continue
        try:
            earlier = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("model_name_or_path")
        except (yaml.YAMLError, AttributeError) as error:
            raise UserError(f"{file} cannot be read; mend it, or choose another --output_dir.") from error
        if earlier != checkpoint.model_name_or_path:
            raise UserError(
                f"--output_dir {output} holds {name} of another checkpoint ({earlier}); choose another folder."
            )


def check_task(
    task: GlueTask, start: CheckpointArguments | None, glue: GlueArguments, training: FineTuningArguments
) -> dict[str, Dataset]:
    """Read a task's data and see that its model can be loaded."""
    if start is not None and (training.do_train or training.do_eval):
        model = load_task_model(task, start, training.do_train)
        load_task_tokenizer(model, start, glue.max_seq_length)
    return load_splits(task, glue, training)


def load_tests(task: GlueTask, glue: GlueArguments) -> list[tuple[GlueTask, str, Dataset]]:
    """The test splits that a task's model predicts; MNLI's predicts the diagnostic set too, where there is one."""
    names = list(task.submission)[:1] if glue.test_file else list(task.submission)
    wanted = [(task, name) for name in names]
    if task.name == "mnli" and not glue.test_file and has_split(DIAGNOSTICS, "test", glue):
        wanted.append((DIAGNOSTICS, "test"))
    return [(part, name, load_split(part, name, glue)) for part, name in wanted]


def predict(
    task: GlueTask,
    tests: list[tuple[GlueTask, str, Dataset]],
    checkpoint: CheckpointArguments,
    glue: GlueArguments,
    training: FineTuningArguments,
    output: Path,
) -> None:
    """Write the predictions of a task's best model, or of the checkpoint itself where nothing was trained."""
    name = checkpoint.model_name_or_path
    if (output / task.name / METRICS_FILE).is_file():
        best = best_trial(task_trials(output / task.name))
        name = str(best) if any(best.glob("*.safetensors*")) else name
    start = replace(checkpoint, model_name_or_path=name)
    model = load_task_model(task, start, new_head=False)
    tokenizer = load_task_tokenizer(model, start, glue.max_seq_length)
    trainer = build_trainer(task, model, prediction_arguments(training, output / "submission"), tokenizer, glue)
    for part, split, rows in tests:
        examples = encode_split(part, rows, tokenizer, glue.max_seq_length, f"Tokenizing {part.title}, {split}")
        labels = predicted_labels(task, trainer.predict(examples.remove_columns("idx")).predictions)
        if training.should_save:
            write_predictions(output / "submission", part, split, rows["idx"], labels)
    PartialState().wait_for_everyone()


def report(output: Path, checkpoint: CheckpointArguments, predicted: bool) -> None:
    """Write and show the table of all finished tasks in the folder, and pack the submission."""
    finished = {name: read_metrics(output / name) for name in TASKS if (output / name / METRICS_FILE).is_file()}
    if finished:
        print(write_glue_table(output, Path(checkpoint.model_name_or_path).name, finished))
        logger.info("The table is in %s, glue.json and glue.png.", output / "glue.md")
    if predicted:
        archive = output / "submission.zip"
        names = pack_submission(output / "submission", archive)
        logger.info("%s holds %s.", archive, ", ".join(names))
        lacking = [n for t in [*TASKS.values(), DIAGNOSTICS] for n in t.submission.values() if f"{n}.tsv" not in names]
        if lacking:
            logger.info("The benchmark wants all of its files; %s are not there yet.", ", ".join(lacking))


if __name__ == "__main__":
    run_script(main)
