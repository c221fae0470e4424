"""Pictures of forecasts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.plots import open_figure


def plot_forecasts(
    columns: Sequence[str],
    past: np.ndarray,
    truth: np.ndarray | None,
    forecasts: Mapping[str, np.ndarray],
    path: str | Path,
    title: str,
) -> None:
    """
    Draw a context and what is said to follow, a panel for each of the first channels, which `columns` names.

    `past` is `(context_length, num_channels)`, in the units of the series, with NaN for gaps; `truth` and every one of
    `forecasts`, the model's first, `(prediction_length, num_channels)`.
    """
    shown = list(range(len(columns)))[:4]
    left_out = f" ({len(shown)} of {len(columns)} channels)" if len(shown) < len(columns) else ""
    size, panels = (9, 2.3 * len(shown) + 0.8), (len(shown), 1)
    with open_figure(path, title + left_out, size, panels) as (figure, axes_of):
        rows = np.ravel(axes_of)
        for axes, channel in zip(rows, shown, strict=True):
            observed = {"context": (np.arange(-len(past), 0), past, "0.35")}
            if truth is not None:
                observed["truth"] = (np.arange(len(truth)), truth, "black")
            for name, (steps, values, colour) in observed.items():
                # Between missing values one may stand alone, of which a line shows nothing.
                marker = "." if np.isnan(values[:, channel]).any() else None
                axes.plot(steps, values[:, channel], color=colour, lw=1.2, marker=marker, ms=4, label=name)
            for number, (name, values) in enumerate(forecasts.items()):
                style = {"color": f"C{number - 1}", "lw": 1, "ls": "--"} if number else {"color": "C3", "lw": 1.6}
                axes.plot(np.arange(len(values)), values[:, channel], label=name, **style)
            axes.axvline(-0.5, color="0.7", lw=0.8)
            axes.set_xlim(-len(past) - 1, max(map(len, forecasts.values())))
            axes.set_ylabel(columns[channel][:24])
        rows[-1].set_xlabel("time steps from the forecast's first")
        handles, labels = rows[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize="small", loc="outside lower center", ncols=len(labels))
