"""
Pre-train several architectures alike and write the table.

    python scripts/compare_pretraining.py --train_file a.txt b.txt --validation_file c.txt --data_name "a + b"

Trains one tokenizer on the training text, runs every line of configuration/runs/pretrain.txt with every seed, and
writes NAME.md, .json and .png into --results_dir. Started again it goes on where it was cut short.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments.arguments import UserError, given_arguments, load_recipe, parse_args, run_script
from experiments.plots import plot_mean_curves
from experiments.results import format_origin, write_atomically, write_json
from experiments.run_folder import ARGUMENTS_FILE, METRICS_FILE, recorded_arguments
from experiments.runs import Run, execute_runs, read_runs
from pretrain_mlm import PRETRAINING_ARGUMENTS


SCRIPTS = Path(__file__).parent
ROOT = SCRIPTS.parent


@dataclass
class ComparisonArguments:
    """What is compared, on what, and where the table goes."""

    train_file: list[str] = field(default_factory=list, metadata={"help": "Text to train on."})
    validation_file: list[str] = field(default_factory=list, metadata={"help": "Text to evaluate on."})
    data_name: str = field(default="local text", metadata={"help": "Name of the text, for the table."})
    runs: str = field(
        default=str(ROOT / "configuration" / "runs" / "pretrain.txt"), metadata={"help": "One line a model."}
    )
    recipe_of_runs: list[str] = field(
        default_factory=lambda: [str(ROOT / "configuration" / "pretrain" / "compare.yaml")],
        metadata={"help": "What all runs have in common."},
    )
    vocab_size: int = field(default=4096, metadata={"help": "Size of the tokenizer that all runs share."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Every model runs with each."})
    output_dir: str = field(default="runs/compare_pretraining", metadata={"help": "Folder of the runs."})
    results_name: str = field(default="pretraining", metadata={"help": "Name of the table's files."})
    results_dir: str = field(default=str(ROOT / "model_cards" / "results"), metadata={"help": "Folder of the table."})


def main() -> None:
    (arguments,) = parse_args([ComparisonArguments], description=__doc__)
    runs = pretrain_all(
        arguments.runs,
        arguments.seeds,
        Path(arguments.output_dir),
        arguments.recipe_of_runs,
        arguments.vocab_size,
        text_flags(arguments.train_file, arguments.validation_file),
    )
    write_table(runs, arguments)


def text_flags(train_file: Sequence[str], validation_file: Sequence[str]) -> list[str]:
    """The flags that name text, without those that have no value."""
    return [
        *(("--train_file", *train_file) if train_file else ()),
        *(("--validation_file", *validation_file) if validation_file else ()),
    ]


def pretrain_all(
    runs_file: str, seeds: Sequence[int], output: Path, recipes: Sequence[str], vocab_size: int, text: Sequence[str]
) -> list[Run]:
    """
    Train one tokenizer, and with it every line of a file of runs with every seed.

    Args:
        runs_file (`str`): One run a line.
        seeds (sequence of `int`): Seeds of each line.
        output (`Path`): Folder of the tokenizer and the runs.
        recipes (sequence of `str`): What all runs have in common.
        vocab_size (`int`): Most tokens that the tokenizer may have.
        text (sequence of `str`): Flags that name the text.

    Returns:
        `list` of [`Run`]: all of them finished.

    Raises:
        UserError: if a run fails, or a finished one was run with other arguments.
    """
    tokenizer = Run("tokenizer", ("--vocab_size", str(vocab_size)), output / "tokenizer")
    execute_runs(SCRIPTS / "train_tokenizer.py", [tokenizer], text, "tokenizer.json")
    runs = read_runs(runs_file, seeds, output)
    shared = ["--recipe", *recipes, "--tokenizer_name", str(tokenizer.folder), *text]
    execute_runs(SCRIPTS / "pretrain_mlm.py", runs, shared, METRICS_FILE, check_finished_run)
    return runs


def load_recipes(paths: Sequence[str]) -> dict[str, Any]:
    """The flags of several recipes, of which the last one wins."""
    return {name: value for path in paths for name, value in load_recipe(path).items()}


def check_finished_run(run: Run, arguments: list[str]) -> None:
    """Refuse to put a run of other arguments into the table."""
    earlier = yaml.safe_load((run.folder / ARGUMENTS_FILE).read_text(encoding="utf-8"))
    now = recorded_arguments(given_arguments(PRETRAINING_ARGUMENTS, arguments))
    changed = sorted(n for n in {*earlier, *now} - {"output_dir"} if earlier.get(n) != now.get(n))
    if changed:
        raise UserError(f"{run.folder} was run with another {', '.join(changed)}; choose another --output_dir.")


def write_table(runs: list[Run], arguments: ComparisonArguments) -> None:
    """Collect what the runs measured: a row for each line, mean and standard deviation over its seeds."""
    metrics = {run: json.loads((run.folder / METRICS_FILE).read_text(encoding="utf-8")) for run in runs}
    rows = [summarise(name, [metrics[run] for run in runs if run.name == name]) for name in unique_names(runs)]
    first = metrics[runs[0]]
    folder, name = Path(arguments.results_dir), arguments.results_name
    results = {
        "data": arguments.data_name,
        "recipe": load_recipes(arguments.recipe_of_runs),
        "vocab_size": arguments.vocab_size,
        "seeds": arguments.seeds,
        "unigram_loss": first["unigram_loss"],
        "environment": first["environment"],
        "commits": sorted({str(values["environment"]["commit"]) for values in metrics.values()}),
        "rows": rows,
    }
    write_json(folder / f"{name}.json", results)
    write_atomically(folder / f"{name}.md", format_table(results, name))
    curves = {row["name"]: [evaluation_curve(metrics[run]) for run in runs if run.name == row["name"]] for row in rows}
    plot_mean_curves(
        curves, folder / f"{name}.png", f"Mean evaluation loss over {len(arguments.seeds)} seeds, with their range"
    )
    print((folder / f"{name}.md").read_text(encoding="utf-8"))


def unique_names(runs: list[Run]) -> list[str]:
    """The rows of the table, in the order of the file."""
    return list(dict.fromkeys(run.name for run in runs))


def summarise(name: str, metrics: list[dict]) -> dict:
    """One row: mean and standard deviation of the losses, medians of the times."""
    losses = [values["eval_loss"] for values in metrics]
    return {
        "name": name,
        "model_type": metrics[0]["model_type"],
        "parameters": metrics[0]["parameters"],
        "eval_losses": losses,
        "eval_loss": statistics.mean(losses),
        "eval_loss_std": statistics.stdev(losses) if len(losses) > 1 else 0.0,
        "eval_accuracy": statistics.mean(values["eval_accuracy"] for values in metrics),
        # A run that was resumed behind its last step has measured none.
        "step_time_ms": statistics.median(values.get("step_time_ms", math.nan) for values in metrics),
        "step_cpu_time_ms": statistics.median(values.get("step_cpu_time_ms", math.nan) for values in metrics),
    }


def evaluation_curve(metrics: dict) -> list[tuple[int, float]]:
    """Steps and evaluation losses of a run."""
    return sorted({entry["step"]: entry["eval_loss"] for entry in metrics["history"] if "eval_loss" in entry}.items())


def format_table(results: dict, name: str) -> str:
    """The results as Markdown."""
    recipe = results["recipe"]
    lines = [
        f"# Pre-training compared: {results['data']}",
        "",
        f"Masked language modelling, {recipe['max_steps']} steps of {recipe['per_device_train_batch_size']} sequences "
        f"of {recipe['max_seq_length']} tokens at learning rate {recipe['learning_rate']}, the same tokenizer "
        f"({results['vocab_size']} tokens at most), data, steps and schedule for every row; seeds "
        f"{', '.join(map(str, results['seeds']))}. Loss in nats per masked token over the same masks, mean and "
        f"standard deviation over the seeds. Unigram frequencies of the training text: {results['unigram_loss']:.3f}.",
        "",
        "| model | parameters | evaluation loss | accuracy | step, ms (processor time) |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['name']} | {row['parameters']:,} | {row['eval_loss']:.3f} ± {row['eval_loss_std']:.3f} "
            f"| {row['eval_accuracy']:.1%} | {row['step_time_ms']:.0f} ({row['step_cpu_time_ms']:.0f}) |"
        )
    lines += [
        "",
        f"![Evaluation loss against the step]({name}.png)",
        "",
        "Times are medians of single runs one after another, no comparison of speed. "
        + format_origin("compare_pretraining.py", results["environment"], results["commits"]),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
