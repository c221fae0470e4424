"""The GLUE table: a model's scores beside those that the paper prints."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.glue.metrics import DEFINITIONS
from experiments.glue.tasks import TASKS
from experiments.plots import plot_task_scores
from experiments.results import format_origin, write_atomically, write_json


# The paper's GLUE table: evaluation parts, the best of a grid, in percent.
PUBLISHED: dict[str, dict[str, float]] = {
    name: dict(zip(("mnli", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte"), scores, strict=True))
    for name, scores in (
        ("BERT-Base", (81.98, 89.25, 88.22, 91.07, 48.08, 87.98, 86.43, 69.98)),
        ("FNet-Base", (73.20, 85.83, 80.57, 88.66, 40.67, 80.64, 80.88, 57.41)),
        ("PoNet-Base", (77.02, 87.59, 84.37, 89.29, 45.38, 84.66, 81.82, 64.27)),
        ("SKTformer", (76.86, 87.67, 84.12, 90.14, 46.72, 84.87, 81.84, 63.87)),
    )
}
# The tasks whose mean the paper prints; WNLI stands beside it.
AVERAGED = tuple(PUBLISHED["SKTformer"])


def write_glue_table(folder: Path, title: str, results: Mapping[str, dict[str, Any]]) -> str:
    """
    Write `glue.md`, `glue.json` and `glue.png`: the tasks that are there, and the published rows for the same tasks.

    Args:
        folder (`Path`): Where they go.
        title (`str`): Name of the model.
        results (mapping of `str` to `dict`): Contents of each finished task's `metrics.json`, by the task's name.

    Returns:
        `str`: the Markdown, whose columns are aligned for a terminal.
    """
    tasks = [name for name in TASKS if name in results]
    scores = {name: 100 * results[name]["score"] for name in tasks}
    spreads = {name: 100 * results[name]["std"] for name in tasks if "std" in results[name]}
    published = {
        f"{name} (published)": {task: values[task] for task in tasks if task in values}
        for name, values in PUBLISHED.items()
    }
    rows = {title: scores, **published}
    means = {name: mean_score(values) for name, values in rows.items()}
    shown = {
        name: {task: f"{value:.2f}" for task, value in values.items()} | {"mean": format_number(means[name])}
        for name, values in rows.items()
    }
    for task, spread in spreads.items():
        shown[title][task] += f" ± {spread:.2f}"
    averaged = [TASKS[name].title for name in tasks if name in AVERAGED]
    lines = [
        f"# GLUE: {title}",
        "",
        *format_rows([TASKS[name].title for name in tasks], tasks, shown),
        "",
        f"In percent, on the evaluation parts; the mean is over {', '.join(averaged) or 'none of the eight tasks'}"
        f"{' (not WNLI)' if 'wnli' in tasks else ''}.",
        "",
        *format_definitions(tasks),
        *describe_results(results, tasks),
        "- Published rows: the paper's table, the best of a grid on the same evaluation parts, models of BERT-base's "
        "size pre-trained on WikiText-103 and BooksCorpus.",
        "",
        f"![Scores by task](glue.png)\n\n{format_origin('run_glue.py', *_origin(results.values()))}",
        "",
    ]
    text = "\n".join(lines)
    plot_task_scores(
        {name: {TASKS[task].title: value for task, value in values.items()} for name, values in rows.items()},
        {title: {TASKS[task].title: value for task, value in spreads.items()}},
        folder / "glue.png",
        "GLUE, evaluation parts",
    )
    write_json(folder / "glue.json", {"scores": rows, "means": means, "std": spreads, "tasks": dict(results)})
    write_atomically(folder / "glue.md", text)
    return text


def mean_score(scores: Mapping[str, float]) -> float | None:
    """The mean over those of the paper's eight tasks that are there; None without any."""
    values = [value for task, value in scores.items() if task in AVERAGED]
    return statistics.mean(values) if values else None


def format_number(value: float | None) -> str:
    """A score with two decimals, as the paper prints it."""
    return "" if value is None else f"{value:.2f}"


def format_rows(titles: Sequence[str], tasks: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Lines of a Markdown table with aligned columns: a row for each model, a column for each task, and the mean."""
    cells = [["", *titles, "mean"]]
    cells += [[name, *(values.get(task, "") for task in tasks), values["mean"]] for name, values in rows.items()]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def format_definitions(tasks: Sequence[str]) -> list[str]:
    """A line for each task that says what its score is."""
    return [
        f"- {TASKS[name].title}: "
        + (" and ".join(DEFINITIONS[metric] for metric in TASKS[name].scored))
        + (", their mean" if len(TASKS[name].scored) > 1 else "")
        + (", on the matched part" if name == "mnli" else "")
        + "."
        for name in tasks
    ]


def describe_results(results: Mapping[str, dict[str, Any]], tasks: Sequence[str]) -> list[str]:
    """Lines that say how the scores came about; one for all tasks where that is the same."""
    described = {name: describe(results[name]) for name in tasks}
    partial = [TASKS[name].title for name in tasks if results[name]["is_partial"]]
    lines = [f"- {TASKS[name].title} is the {text}." for name, text in described.items()]
    if len(tasks) > 1 and len(set(described.values())) == 1:
        lines = [f"- Every score is the {described[tasks[0]]}."]
    return lines + ([f"- Run on a part of the data: {', '.join(partial)}."] if partial else [])


def describe(result: Mapping[str, Any]) -> str:
    """How a task's score came about, in words."""
    if "trials" not in result:
        return f"result of one run ({result['name']})"
    values = ", ".join(f"{100 * score:.2f}" for score in sorted(result["scores"]))
    if result["kind"] == "search":
        return f"best of a search on the evaluation part ({result['best']}), which is optimistic; all trials: {values}"
    return f"median over {len(result['scores'])} seeds, with the standard deviation ({values})"


def _origin(results: Any) -> tuple[dict[str, Any], list[str]]:
    environments = [result["environment"] for result in results]
    return environments[0], sorted({str(environment["commit"]) for environment in environments})
