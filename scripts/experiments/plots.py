"""Pictures of runs: each function writes the PNG `path`, above which stands `title`."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")  # a picture file is wanted, also where there is no screen

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from experiments.results import replace_file


# What is drawn of evaluations, if nothing else is asked for: a key, its label and what it is multiplied by.
SCORE = ("eval_score", "evaluation score (%)", 100.0)

matplotlib.rcParams["text.parse_math"] = False  # names of files, columns and labels may have a $ in them


@contextlib.contextmanager
def open_figure(
    path: str | Path,
    title: str,
    size: tuple[float, float] = (7, 4.2),
    panels: tuple[int, int] = (1, 1),
    grid: str | None = "both",
) -> Iterator[tuple[Any, Any]]:
    """A figure of `size` inches and its panels, one or an array; written as a whole or not at all, and closed."""
    figure, axes = plt.subplots(*panels, figsize=size, layout="constrained", squeeze=False)
    try:
        figure.suptitle(title)
        for panel in axes.flat if grid else ():
            panel.grid(alpha=0.3, axis=grid)
        yield figure, axes if panels != (1, 1) else axes[0, 0]
        with replace_file(path) as partial:
            figure.savefig(partial, dpi=120, format="png")
    finally:
        plt.close(figure)


def plot_mean_curves(
    curves: Mapping[str, Iterable[Iterable[tuple[float, float]]]],
    path: str | Path,
    title: str,
    labels: tuple[str, str] = ("step", "loss (nats per masked token)"),
    references: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """
    Draw mean and range over seeds of each model's curves, as long as each other and measured after the same steps, and
    single `references`; `labels` name the axes.
    """
    styles = line_styles(curves)
    with open_figure(path, title, (8.5, 4.6)) as (figure, axes):
        for name, seeds in curves.items():
            # Point by point: where time is on the axis, those of several seeds lie a little apart.
            points = list(zip(*seeds, strict=True))
            places, means = ([np.mean([p[axis] for p in of_seeds]) for of_seeds in points] for axis in (0, 1))
            lowest, highest = ([of(p[1] for p in of_seeds) for of_seeds in points] for of in (min, max))
            label = f"{name} ({means[-1]:.2f})" if means else name
            axes.plot(places, means, ms=5 if len(places) < 50 else 0, label=label, **styles[name])
            axes.fill_between(places, lowest, highest, color=styles[name]["color"], alpha=0.2, lw=0)
        for number, (name, known) in enumerate((references or {}).items()):
            style = {"color": "0.4", "ls": ("--", ":")[number % 2], "lw": 1.4, "marker": "x", "ms": 4}
            if known:
                axes.plot(*zip(*known, strict=True), label=f"{name} ({known[-1][1]:.2f})", **style)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        # Beside the picture, where it lies on no curve.
        figure.legend(frameon=False, fontsize="small", loc="outside right center")


def line_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour, a marker and a dash for each name, so that lines which lie on each other are told apart."""
    colours = ["black", *plt.get_cmap("tab10").colors]  # type: ignore[attr-defined]
    return {
        name: {"color": colours[n % 11], "marker": "os^Dv<>PX*"[n % 10], "ls": ("-", "--")[n % 2], "lw": 1.3}
        for n, name in enumerate(names)
    }


def plot_task_curves(
    histories: Mapping[str, Iterable[Mapping[str, float]]],
    path: str | Path,
    title: str,
    measure: tuple[str, str, float] = SCORE,
) -> None:
    """
    Draw training loss and a measure (its key, its label, what it is multiplied by) of the evaluations against the
    epoch, a line for each trial's log of `Trainer`.
    """
    drawn, styles = (("loss", "training loss", 1), measure), line_styles(histories)
    with open_figure(path, title, (10 if len(styles) < 5 else 12, 4.2), (1, 2)) as (figure, panels):
        for axes, (key, label, factor) in zip(panels.flat, drawn, strict=True):
            for name, history in histories.items():
                points = sorted({entry["epoch"]: factor * entry[key] for entry in history if key in entry}.items())
                if points:
                    size = 3 if len(points) < 50 else 0
                    axes.plot(*zip(*points, strict=True), label=name, ms=size, **styles[name])
            axes.set(xlabel="epoch", ylabel=label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        # Beside the picture, where it covers nothing; a short run may have logged one of the two alone.
        lines = max((axes.get_legend_handles_labels() for axes in panels.flat), key=lambda of_axes: len(of_axes[1]))
        figure.legend(*lines, frameon=False, fontsize="small", loc="outside right center")


def plot_task_scores(
    rows: Mapping[str, Mapping[str, float]],
    spreads: Mapping[str, Mapping[str, float]],
    path: str | Path,
    title: str,
    label: str = "score (%)",
) -> None:
    """Draw models' scores (in percent) side by side, a group for each task, with standard deviations if there are."""
    tasks = list(dict.fromkeys(task for scores in rows.values() for task in scores))
    with open_figure(path, title, (max(6, 1.1 * len(tasks) + 2), 4.2), grid="y") as (_, axes):
        for number, (name, scores) in enumerate(rows.items()):
            places = np.arange(len(tasks)) + 0.6 * (number - (len(rows) - 1) / 2) / len(rows)
            values = [scores.get(task, np.nan) for task in tasks]  # which nothing is drawn of
            deviations = [spreads.get(name, {}).get(task, 0.0) for task in tasks]
            axes.errorbar(places, values, yerr=deviations, fmt="os^Dv<>"[number % 7], ms=6, label=name)
        crowded = max(map(len, tasks), default=0) > 12
        axes.set_xticks(range(len(tasks)), tasks, rotation=30 if crowded else 0, ha="right" if crowded else "center")
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def plot_benchmark(
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float, float | None]]]], path: str | Path, title: str
) -> None:
    """
    Draw time and peak memory of a step against the length of the inputs, a line for each model. Axes are logarithmic;
    values that lie close together are drawn from zero on.

    `curves` has for each case, a row of panels, each model's (length in tokens, time in ms, memory in MiB, if known).
    """
    known = any(point[2] is not None for models in curves.values() for points in models.values() for point in points)
    labels = ("time of a step (ms)", "peak memory of a step (MiB)")[: 2 if known else 1]
    names = list(dict.fromkeys(name for models in curves.values() for name in models))
    styles = line_styles(names)
    size = (5 + 3 * len(labels), 4.2 * len(curves) + 0.3)
    with open_figure(path, title, size, (len(curves), len(labels))) as (figure, panels):
        for row, (case, models) in zip(np.reshape(panels, (-1, len(labels))), curves.items(), strict=True):
            lengths = sorted({point[0] for points in models.values() for point in points})
            for column, (axes, label) in enumerate(zip(row, labels, strict=True), start=1):
                shown: list[float] = []
                for name, points in models.items():
                    # A step too small to be measured would have no place on a logarithmic axis.
                    if drawn := [(point[0], value) for point in points if (value := point[column])]:
                        axes.plot(*zip(*drawn, strict=True), ms=5, label=name, **styles[name])
                        shown += [value for _, value in drawn]
                axes.set(title=case, xlabel="tokens in an input", ylabel=label)
                axes.set_xscale("log", base=2)
                axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
                if max(shown, default=0) < 3 * min(shown, default=1):
                    # A logarithmic axis would make much of small differences.
                    axes.set_ylim(0, 1.1 * max(shown, default=1))
                else:
                    # Powers of ten alone would leave an axis of less than a decade without a number.
                    axes.set_yscale("log")
                    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter("{x:,g}")
                axes.minorticks_off()
        handles = [plt.Line2D([], [], ms=5, label=name, **styles[name]) for name in names]
        figure.legend(handles=handles, frameon=False, fontsize="small", loc="outside right center")


def plot_confusion_matrix(counts: np.ndarray, labels: Sequence[str], path: str | Path, title: str) -> None:
    """Draw how often each label (a row) was taken for each, shaded by its share of the label's examples."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in labels]
    side, few, many = min(40.0, 0.42 * len(names) + 2.6), len(names) < 6, len(names) > 80
    with open_figure(path, title, (side + 0.8, side), grid=None) as (figure, axes):
        picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for row, column in () if many else np.argwhere(counts):  # in more cells a number would be too small
            colour = "white" if shares[row, column] > 0.6 else "black"
            number = f"{counts[row, column]:,}"
            size = 9 if few or len(number) < 5 else 6
            axes.text(column, row, number, ha="center", va="center", color=colour, fontsize=size)
        size = 5 if many else 10
        rotation, place = (0, "center") if few and max(map(len, names)) < 12 else (45, "right")
        axes.set_xticks(range(len(names)), names, rotation=rotation, ha=place, fontsize=size)
        axes.set_yticks(range(len(names)), names, fontsize=size)
        axes.set(xlabel="predicted", ylabel="true")
        figure.colorbar(picture, ax=axes, shrink=0.8, label="share of the true label")
