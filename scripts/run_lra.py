"""
Train and measure models on the tasks of Long Range Arena: ListOps, Text, Retrieval, Image and Pathfinder.

    python scripts/run_lra.py --task_name listops
    python scripts/run_lra.py --task_name image --data_dir cifar-10-python.tar.gz --seeds 5
    python scripts/run_lra.py --task_name image --data_dir cifar10.npz --model_type bert --output_dir runs/lra/bert
    python scripts/run_lra.py --recipe configuration/lra/image.yaml configuration/lra/self_pretraining.yaml \\
        --data_dir cifar10.npz --output_dir runs/lra/image-masked
    python scripts/run_lra.py --task_name image --data_dir cifar10.npz --model_name_or_path runs/lra/image-masked

ListOps and Pathfinder are made by a seed where no published data are given. Without --recipe a task gets the paper's,
configuration/lra/TASK.yaml; configuration/lra/best/TASK.yaml has the paper's best values. Starting the same command
again goes on with a run that was cut short.
"""

import sys
from pathlib import Path

from experiments.arguments import CONFIGURATION, UserError, explained, flag_values, parse_command, run_script
from experiments.fine_tuning import run_job
from experiments.lra.data import LraArguments, load_parts
from experiments.lra.jobs import LraTrainingArguments, check_curve, make_job, record_curve
from experiments.lra.models import LraModelArguments, build_model
from experiments.lra.report import draw_examples, write_report
from experiments.lra.tasks import TASKS
from experiments.run_folder import check_run_folder, recorded_arguments, trained_length
from experiments.training import announce_run, prepare, upload_run
from experiments.trials import check_job, plan_trials, read_metrics, trial_folders


ARGUMENTS = (LraModelArguments, LraArguments, LraTrainingArguments)


def main() -> None:
    # The task on the command line, whose recipe is read where none is named.
    named = flag_values(sys.argv[1:]).get("task_name")
    recipe = CONFIGURATION / "lra" / f"{named}.yaml" if named in TASKS else None
    command = parse_command(ARGUMENTS, __doc__, recipe)
    model, arguments, training = command.groups
    task = TASKS[arguments.task_name]
    if "output_dir" not in command.given:
        training.output_dir = f"runs/lra/{arguments.task_name}"
    prepare(training, command.given)
    folder = Path(training.output_dir)
    if not (model.model_name_or_path or "model_config" in command.given):
        raise UserError(
            f"No recipe says how large the model is; read configuration/lra/{arguments.task_name}.yaml first."
        )
    if not (training.do_train or model.model_name_or_path):
        raise UserError("Nothing is trained: add --do_train, or name a model with --model_name_or_path.")

    if not (training.do_train or arguments.max_seq_length):
        arguments.max_seq_length = trained_length(model.model_name_or_path)
    # Everything that can be wrong with the arguments is found before data are made and the folder is touched.
    if model.model_name_or_path:
        build_model(model, task, arguments.length, False, training.seed, training.mask_probability is not None)
    with training.main_process_first(local=False):  # data that are made and cached are made once
        parts = load_parts(arguments)
    job = make_job(command, parts)
    check_job(folder, job.identity, training, command.paths())
    for planned in plan_trials(folder, training, job.identity) if training.test_curve else ():
        if check_run_folder(planned.folder, planned.identity, training.overwrite) != "new":
            check_curve(planned.folder)
    place = folder.resolve()
    drawn = place.with_name(f"{place.name}-examples.png")  # beside the folder, which only training may begin
    if arguments.draw_examples and training.should_save:
        with explained(f"--output_dir {folder} cannot be made"):
            drawn.parent.mkdir(parents=True, exist_ok=True)
        draw_examples(parts["train"], task, drawn)
    announce_run(command)
    run_job(job, folder, training, recorded_arguments(command.given))
    if training.should_save:
        if arguments.draw_examples:
            drawn.replace(folder / "examples.png")
        for trial in trial_folders(folder) if training.test_curve else ():
            record_curve(trial)
        if training.mask_probability is None:
            print(write_report(folder, task, read_metrics(folder)))
    upload_run(training, folder, "Reported")  # again, with what has been written since


if __name__ == "__main__":
    run_script(main)
