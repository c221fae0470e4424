"""What is written about a task of Long Range Arena: its table beside the published rows, cards and pictures."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lra.examples import Examples
from experiments.lra.published import SPREADS
from experiments.lra.tasks import Task
from experiments.model_card import CardFacts, write_card
from experiments.plots import open_figure
from experiments.results import command_line, format_origin, format_table, write_results
from experiments.trials import counted_trials, describe_trials


THIS, SETTING = "this model", "these r, s1, s2 and parts, fixed recipe (paper)"
# What a number is of.
_KEPT = ("job", "model_type", "parameters", "started_from", "max_length", "noise", "is_partial", "source", "measured")


def write_report(folder: Path, task: Task, metrics: Mapping[str, Any]) -> str:
    """
    Write `lra.md` and `lra.json`: the test accuracy of a finished job beside the published rows, each with its length,
    split and source. Returns the Markdown.
    """
    trials, published, noise = counted_trials(metrics), metrics["published"], metrics["noise"]
    values = [100 * trial["eval_test_accuracy"] for trial in trials]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    number = trials[0]["eval_test_samples"]
    split = f"{number:,} examples, " + ("not the whole benchmark" if metrics["is_partial"] else "the whole test")
    source = metrics["source"] + (f", noise {noise:g}" if noise else "")
    rows = [[THIS, f"{statistics.mean(values):.2f}{spread}", f"{metrics['max_length']:,}", split, source]]
    same, where = published["setting"], f"{task.max_length:,}"
    known = published["rows"] | ({SETTING: same} if same is not None else {})
    spreads = {} if noise else {name: f" ± {of[metrics['job']]:.2f}" for name, of in SPREADS.items() if name in known}
    rows += [
        [name, f"{100 * value:.2f}{spreads.get(name, '')}", where, "as published", "the paper's"]
        for name, value in known.items()
    ]
    environment = metrics["environment"]
    return write_results(
        folder / "lra",
        {"command": command_line(), "task": task.title, "accuracies": values, "published": known}
        | {"test_examples": number, "published_length": task.max_length}
        | {name: metrics[name] for name in _KEPT},
        [
            f"# Long Range Arena, {task.title}",
            f"{metrics['model_type']}, {metrics['parameters']:,} parameters, started from {metrics['started_from']}; "
            f"{describe_trials(metrics)}. {metrics['measured']}; accuracy in percent, every test example counted "
            "once.",
            "\n".join(format_table(["", "accuracy", "length", "measured on", "data"], rows)),
            format_origin([environment], command_line()),
        ],
    )


def write_task_card(
    task: Task,
    is_masked_lm: bool,
    data_flags: str,
    folder: Path,
    metrics: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    """Write the model card of a trial; `data_flags` give its data again."""
    accuracy = metrics["eval_test_accuracy"]
    rows = [[THIS, f"{100 * accuracy:.2f}", f"{metrics['max_length']:,}"]]
    if not is_masked_lm:
        known = metrics["published"]["rows"]
        rows += [[name, f"{100 * value:.2f}", f"{task.max_length:,}"] for name, value in known.items()]
    flags = f'--task_name {metrics["job"]} --model_name_or_path "{{title}}" {data_flags}'.rstrip()
    flags += " --output_dir runs/lra/tuned" if is_masked_lm else " --do_eval --output_dir runs/lra/measured"
    example = [f"# `python scripts/run_lra.py {flags}` of SKTformer reads it."]
    if metrics["model_type"] == "sktformer" and not is_masked_lm:
        auto = "AutoModelForSequenceClassification" if task.per_example == 1 else "AutoModelForNextSentencePrediction"
        example = [
            *(f"from transformers import {auto}", ""),
            f'model = {auto}.from_pretrained("{{title}}"{{remote}}).eval()',
            f"# values: whole numbers from 0 on, of shape (batch_size, {'2, ' * (task.per_example > 1)}length)",
            "logits = model(input_ids=values + 1).logits",
            f"# `python scripts/run_lra.py {flags}` of SKTformer measures it again.",
        ]
    facts = CardFacts(
        script="run_lra.py",
        pipeline_tag="other",
        description=f"A model of type `{metrics['model_type']}` with {metrics['parameters']:,} parameters, trained "
        f"with seed {metrics['seed']} to {'guess masked values of' if is_masked_lm else 'classify'} the sequences of "
        f"{task.title} (Long Range Arena, {metrics['source']}), at most {metrics['max_length']:,} values long.",
        example="\n".join(example),
        scores={"accuracy": accuracy},
        results="\n".join(format_table(["", "test accuracy (%)", "length"], rows)),
        evaluated_on=f"{metrics['eval_test_samples']:,} test examples of {metrics['source']}",
    )
    write_card(folder, facts, metrics, arguments)


def draw_examples(examples: Examples, task: Task, path: Path) -> None:
    """Draw six pictures of each class in a row: `path`, a PNG."""
    side, per_class = int(task.max_length**0.5), 6
    rows = [np.flatnonzero(examples.labels == label)[:per_class] for label in range(len(task.labels))]
    size = (1.6 * per_class, 1.75 * len(rows) + 0.4)
    with open_figure(path, f"{task.title}: {examples.source}", size, (len(rows), per_class), grid=None) as (_, panels):
        for label, (places, row) in enumerate(zip(rows, panels, strict=True)):
            for axes in row:
                axes.axis("off")
            for place, axes in zip(places, row, strict=False):
                axes.imshow(examples.sequence(int(place)).reshape(side, side), cmap="gray", vmin=0, vmax=255)
            row[0].set_title(task.labels[label], loc="left", fontsize="small")
