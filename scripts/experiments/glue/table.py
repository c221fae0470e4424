"""The GLUE table: a model's scores beside those that need no model and those that the paper prints."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.glue.metrics import METRICS
from experiments.glue.tasks import TASKS
from experiments.plots import plot_task_scores
from experiments.results import command_line, format_origin, format_table, write_results


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
MAJORITY = "majority"
_MAJORITY_NOTE = (
    f"- Row `{MAJORITY}`: the commonest label of the training part for every text, for STS-B the mean similarity; "
    "what is not above it is not learned."
)
_PUBLISHED_NOTE = (
    "- Published rows: the paper's table, the best of a grid on the same evaluation parts, models of BERT-base's size "
    "pre-trained on WikiText-103 and BooksCorpus."
)


def write_glue_table(folder: Path, title: str, results: Mapping[str, dict[str, Any]]) -> str:
    """Write `glue.md`, which is returned, `.json` and `.png`: the tasks with a `metrics.json`, beside other rows."""
    tasks = [name for name in TASKS if name in results]
    titles = [TASKS[name].title for name in tasks]
    spreads = {name: 100 * results[name]["std"] for name in tasks if "std" in results[name]}
    rows = {
        title: {name: 100 * results[name]["score"] for name in tasks},
        MAJORITY: {n: 100 * results[n]["majority"]["score"] for n in tasks if results[n].get("majority")},
        **{f"{name} (published)": {t: row[t] for t in tasks if t in row} for name, row in PUBLISHED.items()},
    }
    rows = {name: scores for name, scores in rows.items() if scores}
    averaged = [name for name in tasks if name in AVERAGED]
    complete = {name for name, scores in rows.items() if averaged and set(averaged) <= set(scores)}
    means = {n: statistics.mean(rows[n][task] for task in averaged) if n in complete else None for n in rows}

    def cells(name: str) -> list[str]:
        shown = {task: f"{score:.2f}" for task, score in rows[name].items()}
        if name == title:
            shown |= {task: f"{shown[task]} ± {spread:.2f}" for task, spread in spreads.items()}
        return [name, *(shown.get(task, "") for task in tasks), "" if means[name] is None else f"{means[name]:.2f}"]

    environments = [result["environment"] for result in results.values()]
    plot_task_scores(
        {name: {TASKS[task].title: value for task, value in scores.items()} for name, scores in rows.items()},
        {title: {TASKS[task].title: value for task, value in spreads.items()}},
        folder / "glue.png",
        "GLUE, evaluation parts",
    )
    notes = [*format_definitions(tasks), *describe_results(results, tasks)]
    notes += ([_MAJORITY_NOTE] if MAJORITY in rows else []) + ([_PUBLISHED_NOTE] if averaged else [])
    return write_results(
        folder / "glue",
        {"scores": rows, "means": means, "std": spreads, "tasks": dict(results)},
        [
            f"# GLUE: {title}",
            "\n".join(format_table(["", *titles, "mean"], map(cells, rows))),
            "In percent, on the evaluation parts; the mean is over "
            f"{', '.join(TASKS[name].title for name in averaged) or 'none of the eight tasks'}"
            f"{' (not WNLI)' if 'wnli' in tasks else ''}.",
            "\n".join(notes),
            "![Scores by task](glue.png)",
            format_origin(environments, command_line()),
        ],
    )


def format_definitions(tasks: Sequence[str]) -> list[str]:
    """A line for each task that says what its score is."""
    return [
        f"- {TASKS[name].title}: "
        + (" and ".join(METRICS[metric][1] for metric in TASKS[name].scored))
        + (", their mean" if len(TASKS[name].scored) > 1 else "")
        + (", on the matched part" if name == "mnli" else "")
        + "."
        for name in tasks
    ]


def describe_results(results: Mapping[str, dict[str, Any]], tasks: Sequence[str]) -> list[str]:
    """Lines that say how the scores came about; one for all tasks where that is the same."""
    described = {name: describe(results[name]) for name in tasks}
    partial, chosen = (
        ", ".join(TASKS[name].title for name in tasks if results[name].get(fact)) for fact in ("is_partial", "is_best")
    )
    lines = [f"- {TASKS[name].title} is the {text}." for name, text in described.items()]
    if len(tasks) > 1 and len(set(described.values())) == 1:
        lines = [f"- Every score is the {described[tasks[0]]}."]
    lines += [f"- Of a training the best evaluation counts, which is optimistic: {chosen}."] if chosen else []
    return lines + ([f"- Run on a part of the data: {partial}."] if partial else [])


def describe(result: Mapping[str, Any]) -> str:
    """How a task's score came about, in words."""
    if "trials" not in result:
        return f"result of one run ({result['name']})"
    values = ", ".join(f"{100 * score:.2f}" for score in sorted(result["scores"]))
    if result["kind"] == "search":
        return f"best of a search on the evaluation part ({result['best']}), which is optimistic; all trials: {values}"
    return f"median over {len(result['scores'])} seeds, with the standard deviation ({values})"
