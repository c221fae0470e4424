"""Pictures of runs."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib


matplotlib.use("Agg")  # a picture file is wanted, also where there is no screen

import matplotlib.pyplot as plt


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


def plot_scaling(rows: Iterable[Mapping[str, float]], path: str | Path, title: str) -> None:
    """
    Draw time and memory of a fixed number of tokens against the length of the sequences, as multiples of the shortest.

    Args:
        rows (iterable of mappings): `length`, `time_ratio` and `memory_ratio`.
        path (`str` or `Path`): The PNG to write.
        title (`str`): Stands above the picture.
    """
    rows = list(rows)
    lengths = [row["length"] for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(lengths, [row["time_ratio"] for row in rows], marker="o", label="step time per token")
    axes.plot(lengths, [row["memory_ratio"] for row in rows], marker="s", label="peak memory per token")
    axes.plot(lengths, [length / lengths[0] for length in lengths], color="0.6", ls=":", label="quadratic cost")
    axes.set(title=title, xlabel="tokens in a sequence", ylabel=f"multiple of length {lengths[0]}", ylim=(0, 3))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)
