"""
Pre-train several architectures alike, fine-tune them alike on tasks of GLUE, and write the table.

    python scripts/compare_glue.py --train_file a.txt b.txt --validation_file c.txt --data_name "a + b" --data_dir glue

Pre-trains every line of configuration/runs/pretrain_glue.txt once, fine-tunes every line of glue_compare.txt on every
task with every seed, and writes glue.md, .json and .png into --results_dir. Started again it goes on where it was cut
short.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_pretraining import ROOT, SCRIPTS, load_recipes, pretrain_all, text_flags
from experiments.arguments import UserError, given_arguments, parse_args, run_script
from experiments.glue.table import format_definitions, format_rows
from experiments.glue.tasks import TASKS
from experiments.plots import plot_task_scores
from experiments.results import format_origin, write_atomically, write_json
from experiments.run_folder import METRICS_FILE, is_finished_run, recorded_arguments
from experiments.runs import Run, execute_runs, read_runs
from run_glue import GLUE_ARGUMENTS, task_arguments


CONFIGURATION = ROOT / "configuration"
# What has to be known to read a row.
_NOTES = {
    "SKTformer-mean": "SKTformer classifies by its first token, as the others do; SKTformer-mean by the mean over its "
    "tokens (`classifier_pooling`).",
    "FNet": "FNet takes no mask: what it answers depends on the padding of the batch.",
    "Nystromformer": "Nystromformer runs as transformers ships it, with full attention at these lengths: its linear "
    "mode takes no padded batch.",
}


@dataclass
class GlueComparisonArguments:
    """What is compared, on what, and where the table goes."""

    data_dir: str = field(metadata={"help": "Local folder of tasks, as for run_glue.py."})
    train_file: list[str] = field(default_factory=list, metadata={"help": "Text to pre-train on."})
    validation_file: list[str] = field(default_factory=list, metadata={"help": "Text to evaluate pre-training on."})
    data_name: str = field(default="local text", metadata={"help": "Name of the text, for the table."})
    task_name: list[str] = field(
        default_factory=lambda: ["cola", "sst2", "stsb"], metadata={"help": "Tasks to fine-tune on."}
    )
    pretraining_runs: str = field(
        default=str(CONFIGURATION / "runs" / "pretrain_glue.txt"), metadata={"help": "One line a checkpoint."}
    )
    glue_runs: str = field(
        default=str(CONFIGURATION / "runs" / "glue_compare.txt"),
        metadata={"help": "One line a row; --model_name_or_path is the name of a line of --pretraining_runs."},
    )
    pretraining_recipes: list[str] = field(
        default_factory=lambda: [
            str(CONFIGURATION / "pretrain" / "compare.yaml"),
            str(CONFIGURATION / "pretrain" / "compare_glue.yaml"),
        ],
        metadata={"help": "What all pre-trainings have in common."},
    )
    glue_recipes: list[str] = field(
        default_factory=lambda: [
            str(CONFIGURATION / "glue" / "base.yaml"),
            str(CONFIGURATION / "glue" / "compare.yaml"),
        ],
        metadata={"help": "What all fine-tunings have in common."},
    )
    vocab_size: int = field(default=4096, metadata={"help": "Size of the tokenizer that all models share."})
    seeds: int = field(default=3, metadata={"help": "Every checkpoint is fine-tuned with this many seeds."})
    output_dir: str = field(default="runs/compare_glue", metadata={"help": "Folder of the runs."})
    results_dir: str = field(default=str(ROOT / "model_cards" / "results"), metadata={"help": "Folder of the table."})

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise UserError(f"--seeds is {self.seeds}; a comparison needs at least 2.")


def main() -> None:
    (arguments,) = parse_args([GlueComparisonArguments], description=__doc__)
    output = Path(arguments.output_dir)
    text = text_flags(arguments.train_file, arguments.validation_file)
    pretrained = pretrain_all(
        arguments.pretraining_runs,
        [0],
        output / "pretrained",
        arguments.pretraining_recipes,
        arguments.vocab_size,
        text,
    )
    checkpoints = {run.name: run.folder for run in pretrained}
    finetuned = [
        name_checkpoint(run, checkpoints) for run in read_runs(arguments.glue_runs, [0], output / "finetuned")
    ]
    shared = ["--recipe", *arguments.glue_recipes, "--task_name", *arguments.task_name]
    shared += ["--seeds", str(arguments.seeds), "--data_dir", arguments.data_dir]
    execute_runs(SCRIPTS / "run_glue.py", finetuned, shared, "glue.json", check_finished_run)
    write_table(checkpoints, finetuned, arguments)


def name_checkpoint(run: Run, checkpoints: Mapping[str, Path]) -> Run:
    """
    Put the folder of a pre-trained checkpoint in the place of its name.

    Raises:
        UserError: if the run names none of them.
    """
    arguments = list(run.arguments)
    place = arguments.index("--model_name_or_path") + 1 if "--model_name_or_path" in arguments else 0
    if not place or arguments[place] not in checkpoints:
        raise UserError(f"{run.name}: --model_name_or_path must be one of {', '.join(checkpoints)}.")
    arguments[place] = str(checkpoints[arguments[place]])
    return replace(run, arguments=tuple(arguments))


def check_finished_run(run: Run, arguments: list[str]) -> None:
    """Refuse to put a run of other arguments into the table."""
    given = recorded_arguments(given_arguments(GLUE_ARGUMENTS, arguments))
    for name in given["task_name"]:
        if not is_finished_run(run.folder / name, task_arguments(TASKS[name], given)):
            raise UserError(f"{run.folder / name} was run with other arguments; choose another --output_dir.")


def write_table(checkpoints: Mapping[str, Path], finetuned: Sequence[Run], arguments: GlueComparisonArguments) -> None:
    """Collect what the runs measured: a row for each model, mean and standard deviation over its seeds."""
    tasks = [name for name in TASKS if name in arguments.task_name]
    pretraining = {str(folder): read_json(folder / METRICS_FILE) for folder in checkpoints.values()}
    results = [{task: read_json(run.folder / task / METRICS_FILE) for task in tasks} for run in finetuned]
    rows = [
        summarise(run.name, pretraining[after[tasks[0]]["started_from"]], after)
        for run, after in zip(finetuned, results, strict=True)
    ]
    environments = [task["environment"] for after in results for task in after.values()]
    table = {
        "data": arguments.data_name,
        "tasks": tasks,
        "seeds": arguments.seeds,
        "pretraining": load_recipes(arguments.pretraining_recipes),
        "fine-tuning": load_recipes(arguments.glue_recipes),
        "environment": environments[0],
        "commits": sorted(
            {str(e["commit"]) for e in [*environments, *(p["environment"] for p in pretraining.values())]}
        ),
        "rows": rows,
    }
    folder = Path(arguments.results_dir)
    write_json(folder / "glue.json", table)
    write_atomically(folder / "glue.md", format_table(table))
    plot_task_scores(
        {row["name"]: {TASKS[task].title: row["scores"][task]["mean"] for task in tasks} for row in rows},
        {row["name"]: {TASKS[task].title: row["scores"][task]["std"] for task in tasks} for row in rows},
        folder / "glue.png",
        f"GLUE, mean and standard deviation over {arguments.seeds} seeds",
    )
    print((folder / "glue.md").read_text(encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def summarise(name: str, pretraining: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One row: mean and standard deviation over the seeds of each task's score and of their mean, in percent."""
    scores = {task: [100 * score for score in result["scores"]] for task, result in results.items()}
    scores["mean"] = [statistics.mean(of_seed) for of_seed in zip(*scores.values(), strict=True)]
    return {
        "name": name,
        "parameters": next(iter(results.values()))["parameters"],
        "pretraining_loss": pretraining["eval_loss"],
        "scores": {
            task: {"mean": statistics.mean(values), "std": statistics.stdev(values), "seeds": values}
            for task, values in scores.items()
        },
    }


def format_table(table: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    before, after, tasks = table["pretraining"], table["fine-tuning"], table["tasks"]
    cells = {
        row["name"]: {
            "parameters": f"{row['parameters']:,}",
            "loss": f"{row['pretraining_loss']:.3f}",
            **{task: f"{values['mean']:.2f} ± {values['std']:.2f}" for task, values in row["scores"].items()},
        }
        for row in table["rows"]
    }
    titles = ["parameters", "pre-training loss", *(TASKS[task].title for task in tasks)]
    lines = [
        "# GLUE compared: small models, alike in all but the architecture",
        "",
        f"Each model is pre-trained once on {table['data']}: {before['max_steps']} steps of "
        f"{before['per_device_train_batch_size']} sequences of {before['max_seq_length']} tokens, with the same "
        f"tokenizer, data and schedule; then fine-tuned with {table['seeds']} seeds on each task: "
        f"{after['num_train_epochs']} epochs at learning rate {after['learning_rate']}, "
        f"{after['per_device_train_batch_size']} texts of at most {after['max_seq_length']} tokens a batch, padded to "
        "the longest of it. In percent on the evaluation parts, mean and standard deviation over the seeds.",
        "",
        *format_rows(titles, ["parameters", "loss", *tasks], cells),
        "",
        *format_definitions(tasks),
        "- Pre-training loss: nats per masked token of the evaluation text.",
        *(f"- {note}" for name, note in _NOTES.items() if name in cells),
        "- These are models of two layers after minutes of pre-training; the table says how they compare, and not "
        "what a trained model reaches.",
        "",
        "![Scores by task](glue.png)",
        "",
        format_origin("compare_glue.py", table["environment"], table["commits"]),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
