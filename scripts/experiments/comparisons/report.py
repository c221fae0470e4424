"""What a comparison has measured, as Markdown, JSON and pictures."""

import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.comparisons.execution import Outcome, Outcomes, start_of
from experiments.comparisons.stages import DATA, SEARCH_SEED, Case, Curve, Measure, Stage, Table
from experiments.plots import plot_mean_curves, plot_task_scores
from experiments.results import command_line, format_origin, format_table, write_results
from modeling_sktformer import SKTformerConfig


_WIDEST = 12  # columns of a table that a page can show


@dataclass
class Column:
    """What the rows have reached: a value for each seed, or one for all."""

    title: str
    measure: Measure
    values: dict[str, list[float]]

    def cell(self, row: str) -> str:
        """The mean, with its standard deviation where there are several values; of costs the mean alone."""
        values = self.values.get(row, [])
        statistic = (statistics.mean, statistics.stdev)[: min(len(values), 2 if self.measure.best else 1)]
        return " ± ".join(format(of(values), self.measure.format) for of in statistic)

    def winners(self, rows: Iterable[str] | None = None) -> list[str]:
        """The rows with the best mean, of all or of some: one, or several that are printed alike."""
        means = {row: statistics.mean(self.values[row]) for row in (self.values if rows is None else rows)}
        best = format((min if self.measure.best == "lowest" else max)(means.values()), self.measure.format)
        return [row for row, mean in means.items() if format(mean, self.measure.format) == best]


def write_table(
    name: str, table: Table, outcomes: Sequence[Outcomes], given: Mapping[str, Any], seeds: Sequence[int], folder: Path
) -> str:
    """Write `NAME.md`, `NAME.json` and the pictures of a table from the outcomes of its stages; gives the Markdown."""
    last, rows = outcomes[-1], table.stages[-1].rows()
    columns: list[Column] = []
    sources = {row: row for row in rows}  # the rows of a stage that those of the table start from
    for stage, of_stage in reversed([*zip(table.stages, outcomes, strict=True)]):
        columns = _build_columns(stage, of_stage, sources) + columns
        started = stage.rows()
        sources = {row: start_of(started.get(source, ())) for row, source in sources.items()}
    cells_run = {f"{row}-{key}": o for of_stage in outcomes for (row, key), o in of_stage.items()}
    measured = [m for of_stage in outcomes for o in of_stage.values() for m in o.metrics]
    every = [o for of_stage in outcomes for o in of_stage.values()]
    environments = [m["environment"] for m in measured] + [e for o in every for e in o.environments]
    recipes = [stage.recipe() for stage in table.stages]
    results = {
        **{"command": command_line(), "data": dict(given), "seeds": list(seeds), "recipes": recipes},
        "environments": [value for n, value in enumerate(environments) if value not in environments[:n]],
        "searches": {cell: o.search for cell, o in cells_run.items() if o.search},
        "step_times_ms": {cell: o.step_times for cell, o in cells_run.items() if o.step_times},
        "columns": [asdict(c) | {"cells": {row: c.cell(row) for row in c.values}} for c in columns],
    }
    ours = {row for (row, _), o in last.items() if o.metrics[0]["model_type"] == SKTformerConfig.model_type}
    titles = {row: f"{row} ({'ours' if row in ours else 'not ours'})" for column in columns for row in column.values}
    winners = {column.title: column.winners() for column in columns if column.measure.best}
    best = [f"{title} {' and '.join(map(titles.__getitem__, of_column))}" for title, of_column in winners.items()]
    names = dict.fromkeys([*rows, *(row for column in columns for row in column.values)])
    searched, timed = _describe_searches(table.stages, outcomes), _describe_rounds(cells_run)
    beaten = _describe_floors(table.stages[-1], columns)
    over = "Mean and standard deviation over seeds" if len(seeds) > 1 else "One seed,"
    partial = ["- Some of these runs use a part of their data."] * any(m.get("is_partial") for m in measured)
    flags = shlex.join(table.stages[0].run_flags)
    further = [f"- Further flags of all runs: `{flags}`."] if flags else []
    statistics_note = f"- {over} {', '.join(map(str, seeds))}; of times the median."
    paragraphs = [
        f"# {table.title}",
        table.text.format(*recipes, data=_describe_data(given, measured), minutes=table.minutes),
        *_format_columns(columns, list(names)),
        f"Best: {'; '.join(best)}.",
        "\n".join([statistics_note, *searched, *beaten, *partial, *further, *table.notes_on(names), *timed]),
        "\n".join(_plot(name, table, columns, last, folder)),
        format_origin(environments, command_line()),
    ]
    return write_results(folder / name, results, paragraphs)


def _build_columns(stage: Stage, outcomes: Outcomes, sources: Mapping[str, str]) -> list[Column]:
    """The columns of a stage; `sources` says which of its rows stands in which row of the table."""
    columns, not_run = [], Outcome(None)
    for measure in stage.measures:
        together = measure.pooled or len(stage.cases) == 1
        for cases in [stage.cases] if together else [(case,) for case in stage.cases]:
            runs = {
                row: [m for case in cases for m in outcomes.get((source, case.key), not_run).metrics]
                for row, source in sources.items()
            }
            # A run that was resumed behind its last step has measured no time.
            found = {row: [_look_up(m, measure.key) for m in metrics] for row, metrics in runs.items()}
            values = {row: [value for value in of_row if value is not None] for row, of_row in found.items()}
            if measure.pooled:
                values = {row: [statistics.median(of_row)] for row, of_row in values.items() if of_row}
            for row, key in measure.baselines:
                known = [_look_up(metrics, key) for of_row in runs.values() for metrics in of_row]
                values[row] = [value for value in known if value is not None][:1]
            values = {row: [measure.factor * value for value in of_row] for row, of_row in values.items()}
            title = ", ".join(filter(None, [measure.title, "" if together else cases[0].title]))
            columns.append(Column(title, measure, {row: of_row for row, of_row in values.items() if of_row}))
    if stage.has_mean:
        scores = [column.values for column in columns[-len(stage.cases) :]]
        seeds = {row: zip(*(of_case[row] for of_case in scores), strict=True) for row in scores[0]}
        means = {row: [statistics.mean(seed) for seed in of_row] for row, of_row in seeds.items()}
        columns.append(Column("mean", stage.measures[-1], means))
    rate = Measure("learning rate", "", format="g")
    for case in dict.fromkeys(map(stage.choosing_case, stage.cases)) if stage.learning_rates else ():
        chosen = {row: outcomes.get((source, case.key), not_run).rate for row, source in sources.items()}
        rates = {row: [value] for row, value in chosen.items() if value is not None}
        title = rate.title if stage.rate_case is not None else f"{rate.title}, {case.title}"
        columns.append(Column(title, rate, rates))
    return [column for column in columns if column.values]


def _format_columns(columns: Sequence[Column], rows: Sequence[str]) -> list[str]:
    """One table; where that were too wide, one for each measure of several cases, behind them one for the others."""
    parts = [list(columns)]
    if len(columns) > _WIDEST:
        groups = [
            [c for c in columns if c.measure == measure] for measure in dict.fromkeys(c.measure for c in columns)
        ]
        several = [group for group in groups if len(group) > 1]
        parts = [*several, [group[0] for group in groups if len(group) == 1]]
    tables = []
    for part in filter(None, parts):
        cells = [[row, *(column.cell(row) or "-" for column in part)] for row in rows]
        tables.append("\n".join(format_table(["", *(column.title for column in part)], cells)))
    return tables


def _look_up(metrics: Any, key: str) -> Any:
    """A value by its names from outside to inside, with points between them; None if it was not measured."""
    for name in key.split("."):
        metrics = (metrics or {}).get(name)
    return metrics


def _describe_data(given: Mapping[str, Any], measured: Iterable[Mapping[str, Any]]) -> str:
    """What was read: the names of files and not where they lie; of many the first and the last."""
    sources = dict.fromkeys(metrics["source"] for metrics in measured if "source" in metrics)
    is_named = not given.keys().isdisjoint(DATA)
    parts = [] if is_named else [", ".join(sources) or "the documentation of the Python installation"]
    for flag, value in given.items():
        names = ["/".join(Path(str(name)).parts[-2:]) for name in (value if isinstance(value, list) else [value])]
        names = names if len(names) < 5 else [f"{len(names)} files, {names[0]} to {names[-1]}"]
        parts += [] if flag == "cache_dir" else [f"{flag.replace('_', ' ')} {', '.join(names)}"]
    return f"Data: {'; '.join(parts)}"


def _describe_searches(stages: Sequence[Stage], outcomes: Sequence[Outcomes]) -> list[str]:
    """How each stage chose learning rates, and for whom a rate further out might be better still."""
    searches = [(s, {key: o for key, o in of.items() if o.search}) for s, of in zip(stages, outcomes, strict=True)]
    searches, lines = [(stage, searched) for stage, searched in searches if searched], []
    for stage, searched in searches:
        of = "" if stage.rate_case is None else f" at {stage.cases[stage.rate_case].title}"
        steps = sorted({outcome.search_steps for outcome in searched.values() if outcome.search_steps})
        after = f" after {' or '.join(f'{number:,}' for number in steps)} steps" if steps else ""
        rates = sorted({float(rate) for outcome in searched.values() for rate in outcome.search})
        edge = [key for key, outcome in searched.items() if outcome.rate in (rates[0], rates[-1])]
        started = " from the first checkpoint of the row" if stage is not stages[0] else ""
        names = dict.fromkeys(row if stage.rate_case is not None else f"{row} {case}".strip() for row, case in edge)
        lines.append(
            f"- Learning rates{f' of {stage.folder}' if len(searches) > 1 else ''}: rows without one of their own "
            f"take the one of {', '.join(f'{rate:g}' for rate in rates)} with the lowest "
            f"evaluation loss{after}{of} under seed {SEARCH_SEED}{started}, "
            f"which the table does not count; chosen at the edge of these: {', '.join(names) or 'none'}."
        )
    return lines


def _describe_rounds(cells: Mapping[str, Outcome]) -> list[str]:
    """How far the rounds in which steps were timed lie apart: an error of the budget that no seed holds."""
    rounds = {cell: o.step_times for cell, o in cells.items() if len(o.step_times) > 1}
    if not rounds:
        return []
    apart = {cell: max(times) / min(times) - 1 for cell, times in rounds.items()}
    # Rows of another table that were timed for it stay as they are.
    last_begun = max(min(cells[cell].timed_at) for cell in rounds)
    earlier = [cell for cell in rounds if max(cells[cell].timed_at) < last_begun]
    others = [f"- Timed earlier than the rest, in rounds of their own: {', '.join(earlier)}."] if earlier else []
    widest = max(apart, key=apart.__getitem__)
    return [
        f"- Between {len(rounds[widest])} rounds the steps of one row lie {statistics.median(apart.values()):.1%} "
        f"apart in the median over the rows, and {apart[widest]:.1%} at most ({widest}).",
        *others,
    ]


def _describe_floors(stage: Stage, columns: Sequence[Column]) -> list[str]:
    """Which rows are no better than one that needs no training, and in which cases."""
    scores = [column for column in columns if column.title in {case.title for case in stage.cases}]
    lines = []
    for row in stage.rows():
        lost = {
            f: [c.title for c in scores if {f, row} <= c.values.keys() and f in c.winners((f, row))]
            for f in stage.floors
        }
        parts = [f"{floor} at {', '.join(titles)}" for floor, titles in lost.items() if titles]
        lines += [f"- {row} is not better than {'; '.join(parts)}."] if parts else []
    return lines


def _has_seeds(outcomes: Outcomes) -> bool:
    """Whether there are several."""
    return any(len(outcome.metrics) > 1 for outcome in outcomes.values())


def _plot(name: str, table: Table, columns: Sequence[Column], outcomes: Outcomes, folder: Path) -> list[str]:
    """Draw what the last stage says that is drawn; gives the links."""
    stage = table.stages[-1]
    if not (stage.has_mean or stage.drawn_by_row):
        return [link for case in stage.cases for link in _plot_curves(name, stage, case, outcomes, folder)]
    if stage.has_mean:
        shown = {column.title: column.values for column in columns if column.title in {c.title for c in stage.cases}}
        rows = dict.fromkeys(row for values in shown.values() for row in values)
        scores = {row: {title: of[row] for title, of in shown.items() if row in of} for row in rows}
    else:
        drawn = stage.measures[: stage.drawn_by_row]
        scores = {column.title: column.values for column in columns if column.measure in drawn}
    means, spreads = (
        {line: {place: of(values) for place, values in of_line.items()} for line, of_line in scores.items()}
        for of in (statistics.mean, lambda values: statistics.stdev(values) if len(values) > 1 else 0.0)
    )
    title = f"{table.title}\n{'mean and standard deviation' if _has_seeds(outcomes) else 'one seed'}"
    plot_task_scores(means, spreads, folder / f"{name}.png", title, stage.label)
    return [f"![Scores]({name}.png)"]


def _points_in_common(curve: Curve, seeds: Sequence[Mapping[str, Any]]) -> list[list[tuple[float, float]]]:
    """The points of each seed after steps that all have been evaluated at."""
    # As in the table a step takes its median time: a seed that ran beside others does not move the whole row, and one
    # that was resumed behind its last step has no time of its own.
    times = [time for metrics in seeds if (time := metrics.get("step_time_ms"))]
    seeds = [{**metrics, "step_time_ms": statistics.median(times or [0.0])} for metrics in seeds]
    found = [
        (replace(curve, against="step").points(metrics), points)
        for metrics in seeds
        if (points := curve.points(metrics))
    ]
    common = set.intersection(*({step for step, _ in steps} for steps, _ in found)) if found else set()
    return [[p for (step, _), p in zip(steps, points, strict=True) if step in common] for steps, points in found]


def _plot_curves(name: str, stage: Stage, case: Case, outcomes: Outcomes, folder: Path) -> Iterator[str]:
    measured = {row: outcomes[row, case.key].metrics for row in stage.rows() if (row, case.key) in outcomes}
    for curve in stage.curves:
        words = [name, case.key if len(stage.cases) > 1 else "", "" if curve is stage.curves[0] else curve.against]
        file = "-".join(filter(None, words)).replace(" ", "-") + ".png"
        curves = {row: drawn for row, of_row in measured.items() if (drawn := _points_in_common(curve, of_row))}
        over = "mean {} over the seeds, with their range" if _has_seeds(outcomes) else "{}, one seed"
        title = f"{case.title}: {over.format(curve.title)}"
        seen = [points for of_row in curves.values() for points in of_row]
        # Runs may not have measured what they would be drawn against, or but once.
        if max(map(len, seen), default=0) < 2:
            continue
        longest = max(x for points in seen for x, _ in points)
        known = {name: _look_up(next(iter(measured.values()))[0], key) for name, key in curve.baselines}
        references = {
            name: [(int(step), curve.factor * value) for step, value in values.items() if int(step) <= longest]
            for name, values in known.items()
        }
        plot_mean_curves(curves, folder / file, title, (curve.against, curve.label), references)
        yield f"![{curve.title.capitalize()}, {case.title}]({file})"
