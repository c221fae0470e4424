"""Pictures of runs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib


matplotlib.use("Agg")  # a picture file is wanted, also where there is no screen

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator


def plot_loss_curve(
    log_history: Iterable[Mapping[str, float]],
    path: str | Path,
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """
    Draw training and evaluation loss against the step.

    Args:
        log_history (iterable of mappings): What `Trainer` logged: `step` with `loss` or `eval_loss` (nats per token).
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
        baselines (mapping of `str` to `float`, *optional*): Losses to draw as level lines.
    """
    history = list(log_history)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for key, label, style in (
        ("loss", "training", {"lw": 1.2}),
        ("eval_loss", "evaluation", {"lw": 1.8, "marker": "o", "ms": 4}),
    ):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    for number, (label, value) in enumerate((baselines or {}).items()):
        axes.axhline(value, color="0.45", ls=("--", ":", "-.")[number % 3], lw=1.2, label=f"{label} ({value:.2f})")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per masked token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_mean_curves(
    curves: Mapping[str, Iterable[Iterable[tuple[int, float]]]], path: str | Path, title: str
) -> None:
    """
    Draw the mean evaluation loss of several models against the step, with the range over their seeds.

    Args:
        curves (mapping of `str` to lists of curves): For each model a curve of (step, loss in nats) for each seed.
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, seeds in curves.items():
        points: dict[int, list[float]] = {}
        for curve in seeds:
            for step, loss in curve:
                points.setdefault(step, []).append(loss)
        steps = sorted(points)
        means = [sum(points[step]) / len(points[step]) for step in steps]
        (line,) = axes.plot(steps, means, marker="o", ms=4, label=f"{name} ({means[-1]:.2f})")
        lowest, highest = [min(points[step]) for step in steps], [max(points[step]) for step in steps]
        axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.2, lw=0)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per masked token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_scaling(curves: Mapping[str, Iterable[tuple[int, float, float]]], path: str | Path, title: str) -> None:
    """
    Draw time and memory of a fixed number of tokens against the length of the sequences, as multiples of the shortest.

    Args:
        curves (mapping of `str` to iterables of points): For each model its points: length in tokens, multiples of
            time and of memory.
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    lengths = sorted({point[0] for points in curves.values() for point in points})
    for name, points in curves.items():
        own, *multiples = zip(*points, strict=True) if points else [()] * 3
        for values, marker, label in zip(multiples, "os", ("step time", "peak memory"), strict=True):
            axes.plot(own, values, marker=marker, label=f"{label} per token{f', {name}' if len(curves) > 1 else ''}")
    axes.plot(lengths, [length / lengths[0] for length in lengths], color="0.6", ls=":", label="quadratic cost")
    axes.set(title=title, xlabel="tokens in a sequence", ylabel="multiple of the shortest length", ylim=(0, 3))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_task_curves(histories: Mapping[str, Iterable[Mapping[str, float]]], path: str | Path, title: str) -> None:
    """
    Draw training loss and evaluation score against the epoch, a line for each trial.

    Args:
        histories (mapping of `str` to iterables of mappings): What `Trainer` logged for each trial: `epoch` with
            `loss` or `eval_score` (0 to 1).
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
    """
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axes, key, label, factor in (
        (panels[0], "loss", "training loss", 1),
        (panels[1], "eval_score", "evaluation score (%)", 100),
    ):
        for name, history in histories.items():
            points = sorted({entry["epoch"]: factor * entry[key] for entry in history if key in entry}.items())
            if points:
                axes.plot(*zip(*points, strict=True), label=name, lw=1.4, marker="o", ms=3 if len(points) < 50 else 0)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    panels[1].legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_task_scores(
    rows: Mapping[str, Mapping[str, float]],
    spreads: Mapping[str, Mapping[str, float]],
    path: str | Path,
    title: str,
    label: str = "score (%)",
) -> None:
    """
    Draw the scores of several models side by side, a group for each task.

    Args:
        rows (mapping of `str` to mappings): For each model the score (in percent) of each task, in order.
        spreads (mapping of `str` to mappings): Their standard deviations, where there are any.
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
        label (`str`): What the scores are.
    """
    tasks = list(dict.fromkeys(task for scores in rows.values() for task in scores))
    figure, axes = plt.subplots(figsize=(max(6, 1.1 * len(tasks) + 2), 4.2), layout="constrained")
    for number, (name, scores) in enumerate(rows.items()):
        offset = 0.6 * (number - (len(rows) - 1) / 2) / len(rows)
        places = [n + offset for n, task in enumerate(tasks) if task in scores]
        deviations = [spreads.get(name, {}).get(task, 0.0) for task in scores]
        axes.errorbar(places, list(scores.values()), yerr=deviations, fmt="os^Dv<>"[number % 7], ms=6, label=name)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set(title=title, ylabel=label)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_benchmark(
    curves: Mapping[str, Mapping[str, Iterable[tuple[int, float, float]]]], path: str | Path, title: str
) -> None:
    """
    Draw time and peak memory of a step against the length of the inputs, both axes logarithmic, a line for each model.

    Args:
        curves (mapping of `str` to mappings): For each case (a row of two panels) and each model its points: length
            in tokens, time in ms, memory in MiB.
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
    """
    names = list(dict.fromkeys(name for models in curves.values() for name in models))
    colours = ["black", *plt.get_cmap("tab10").colors]  # type: ignore[attr-defined]
    styles = {
        name: {"color": colours[n % 11], "marker": "os^Dv<>PX*h"[n % 11], "ls": ("-", "--")[n % 2], "lw": 1.3}
        for n, name in enumerate(names)
    }
    figure, panels = plt.subplots(
        len(curves), 2, figsize=(11, 4.2 * len(curves) + 0.3), layout="constrained", squeeze=False
    )
    for row, (case, models) in zip(panels, curves.items(), strict=True):
        lengths = sorted({point[0] for points in models.values() for point in points})
        for axes, column, label in ((row[0], 1, "time of a step (ms)"), (row[1], 2, "peak memory of a step (MiB)")):
            for name, points in models.items():
                # A step too small to be measured would have no place on a logarithmic axis.
                drawn = [(point[0], point[column]) for point in points if point[column] > 0]
                if drawn:
                    axes.plot(*zip(*drawn, strict=True), ms=5, label=name, **styles[name])
            axes.set(title=case, xlabel="tokens in an input", ylabel=label, yscale="log")
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
            # Powers of ten alone would leave an axis of less than a decade without a number.
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    handles = [plt.Line2D([], [], ms=5, label=name, **styles[name]) for name in names]
    figure.legend(handles=handles, frameon=False, fontsize="small", loc="outside right center")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_confusion_matrix(counts: np.ndarray, labels: Sequence[str], path: str | Path, title: str) -> None:
    """
    Draw how often each label was taken for each, shaded by its share of the label's examples.

    Args:
        counts (`np.ndarray` of shape `(num_labels, num_labels)`): A row for each true label.
        labels (sequence of `str`): Their names; long ones are cut.
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in labels]
    side = min(40.0, 0.42 * len(names) + 2.6)
    figure, axes = plt.subplots(figsize=(side + 0.8, side), layout="constrained")
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    few = len(names) < 6
    if len(names) <= 80:  # in more cells a number would be too small to be read
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.6 else "black"
            number = f"{counts[row, column]:,}"
            size = 9 if few or len(number) < 5 else 6
            axes.text(column, row, number, ha="center", va="center", color=colour, fontsize=size)
    size = 10 if len(names) <= 80 else 5
    rotation, place = (0, "center") if few and max(map(len, names)) < 12 else (45, "right")
    axes.set_xticks(range(len(names)), names, rotation=rotation, ha=place, fontsize=size)
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set(title=title, xlabel="predicted", ylabel="true")
    figure.colorbar(picture, ax=axes, shrink=0.8, label="share of the true label")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_forecasts(
    columns: Sequence[str],
    past: np.ndarray,
    truth: np.ndarray | None,
    forecasts: Mapping[str, np.ndarray],
    path: str | Path,
    title: str,
) -> None:
    """
    Draw a context and what is said to follow, a panel for each of the first channels.

    Args:
        columns (sequence of `str`): Names of the channels.
        past (`np.ndarray` of shape `(context_length, num_channels)`): In the units of the series; gaps stay open.
        truth (`np.ndarray` of shape `(prediction_length, num_channels)`, *optional*): What followed.
        forecasts (mapping of `str` to `np.ndarray` of the same shape): What was said, the model's first.
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
    """
    shown = list(range(len(columns)))[:4]
    figure, panels = plt.subplots(
        len(shown), 1, figsize=(9, 2.3 * len(shown) + 0.8), layout="constrained", sharex=True, squeeze=False
    )
    before = np.arange(-len(past), 0)
    for axes, channel in zip(panels[:, 0], shown, strict=True):
        axes.plot(before, past[:, channel], color="0.35", lw=1.2, label="context")
        if truth is not None:
            axes.plot(np.arange(len(truth)), truth[:, channel], color="black", lw=1.2, label="truth")
        for number, (name, values) in enumerate(forecasts.items()):
            style = {"color": "C3", "lw": 1.6} if number == 0 else {"color": f"C{number - 1}", "lw": 1, "ls": "--"}
            axes.plot(np.arange(len(values)), values[:, channel], label=name, **style)  # type: ignore[arg-type]
        axes.axvline(-0.5, color="0.7", lw=0.8)
        axes.set_ylabel(columns[channel][:24])
        axes.grid(alpha=0.3)
    panels[-1, 0].set_xlabel("time steps from the forecast's first")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="small", loc="outside lower center", ncols=len(labels))
    left_out = f" ({len(shown)} of {len(columns)} channels)" if len(shown) < len(columns) else ""
    figure.suptitle(title + left_out)
    figure.savefig(path, dpi=120)
    plt.close(figure)
