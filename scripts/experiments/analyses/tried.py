"""What was tried of the model, in one table: every change with its loss at equal steps and at equal time, and cost."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import results
from experiments.arguments import CONFIGURATION, UserError, flag_values
from experiments.plots import open_figure
from experiments.runs import read_runs


ARGUMENTS = (results.ResultsArguments,)
# The tables that are joined and the title of a column in each, with its title here.
_STEPS, _MINUTES = "loss after 500 steps of 128 tokens", "after 3 minutes of books, 512 tokens"
_COLUMNS = {
    _STEPS: ("improvements", "loss"),
    "after 2,500 steps": ("improvements_long", "loss"),
    _MINUTES: ("improvements_books", "loss"),
    "after 10 minutes": ("improvements_books_long", "loss"),
    "steps in 3 minutes": ("improvements_books", "steps"),
    "step (ms)": ("improvements_books", "step (ms)"),
    "billion multiply-adds a step": ("improvements_books", "billion multiply-adds a step"),
}
_PAPER, _BEST = "SKTformer", "SKTformer-best"


def analyze(places: results.ResultsArguments) -> str:
    """
    Write `tried.md`, `.json` and `.png` from the tables `improvements*.json` in the same folder.

    Raises a `UserError` if one of them is not there, or is something else.
    """
    folder = Path(places.results_dir)
    columns = {title: _read_column(folder, *source) for title, source in _COLUMNS.items()}
    for title in (_STEPS, _MINUTES):
        if missing := {_PAPER, _BEST} - columns[title]["values"].keys():
            file = folder / f"{_COLUMNS[title][0]}.json"
            raise UserError(f"{file} has no row {', '.join(sorted(missing))}; write it again with all rows.")
    changes = _changes()
    cells = [
        [
            row,
            f"{base}: {change}" if change else "the preset",
            *(columns[title]["cells"].get(row, "-") for title in _COLUMNS),
        ]
        for row, (base, change) in changes.items()
    ]
    differences = {title: _differences(columns[title]["values"], changes) for title in (_STEPS, _MINUTES)}
    _plot(differences, folder / "tried.png")
    environment, command = results.describe_environment(), results.command_line()
    links = ", ".join(f"[{name}.md]({name}.md)" for name in dict.fromkeys(name for name, _ in _COLUMNS.values()))
    paragraphs = [
        "# What was tried of the model",
        "Masked-LM loss in nats, mean and standard deviation over seeds: at equal steps, and at equal time on books. "
        f"What was held equal, and the data, stand in the tables that this one joins: {links}. Steps, their times and "
        "multiply-adds are those of the 3 minutes.",
        "\n".join(results.format_table(["", "changed", *_COLUMNS], cells)),
        f"{_PAPER} is the paper's model with layer norm in its stem, {_BEST} is with the two changes of [those "
        "presets](../presets.md). The picture has the difference from what a row changes, with the standard deviation "
        "of that: below 0 is better.",
        "![Differences of the loss](tried.png)",
        results.format_origin([environment], command),
    ]
    values = {"command": command, "environment": environment, "columns": columns, "differences": differences}
    return results.write_results(folder / "tried", values, paragraphs)


def _read_column(folder: Path, table: str, title: str) -> Mapping[str, Any]:
    file = folder / f"{table}.json"
    if not file.is_file():
        raise UserError(f"{file} is not there; write it with `reproduce.py {table} --results_dir {folder}`.")
    try:
        column = next(column for column in results.read_json(file)["columns"] if column["title"] == title)
        return {"cells": column["cells"], "values": column["values"]}
    except (KeyError, TypeError, StopIteration) as error:
        raise UserError(f"{file} is no table of `reproduce.py {table}` ({error!r}); remove it.") from error


def _changes() -> dict[str, tuple[str, str]]:
    """Of each row the one that it changes and how, as its flag says it; of the paper's model itself."""
    found = {}
    for name in ("pretrain_improvements.txt", "pretrain_improvements_long.txt"):
        for row, words in read_runs(CONFIGURATION / "runs" / name).items():
            flags = flag_values(words)
            if "model_type" not in flags:
                overrides = str(flags.get("config_overrides") or "").replace(",", ", ")
                found[row] = (_BEST if "config_name" in flags and overrides else _PAPER, overrides)
    return found


def _differences(
    values: Mapping[str, list[float]], changes: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[float, float]]:
    """By how much the mean of each row lies above that of what it changes, and the standard deviation of that."""
    found = {}
    for row in (row for row in changes if row in values and row != _PAPER):
        pair = values[row], values[changes[row][0]]
        spread = math.hypot(*(statistics.stdev(of_row) if len(of_row) > 1 else 0.0 for of_row in pair))
        found[row] = (statistics.mean(pair[0]) - statistics.mean(pair[1]), spread)
    return found


def _plot(differences: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> None:
    rows = list(dict.fromkeys(row for of in differences.values() for row in of))[::-1]
    with open_figure(path, "What was tried: change of the loss", (8.5, 0.36 * len(rows) + 1.6)) as (figure, axes):
        axes.axvline(0, color="0.4", lw=1)
        for shift, marker, (title, of) in zip((0.13, -0.13), "os", differences.items(), strict=True):
            places = [rows.index(row) + shift for row in of]
            means, spreads = zip(*of.values(), strict=True)
            axes.errorbar(means, places, xerr=spreads, fmt=marker, ms=5, label=title.removeprefix("loss "))
        # Most lie within a tenth of a nat; a part that carries the model lies far out.
        axes.set_xscale("symlog", linthresh=0.2, linscale=3)
        ticks = (-0.5, -0.1, -0.05, 0, 0.05, 0.1, 0.5, 2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel("difference of the loss (nats per masked token)")
        figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
