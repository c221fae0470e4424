"""What is drawn in pictures of runs."""

import pytest
from matplotlib.axes import Axes

from experiments.plots import plot_mean_curves, plot_task_curves


@pytest.fixture
def lines(monkeypatch):
    """The lines that are drawn, by their labels: places and values."""
    drawn: dict[str, list] = {}
    plot = Axes.plot

    def note(axes, places, values, **style):
        drawn.setdefault(style["label"], []).append((list(places), list(values)))
        return plot(axes, places, values, **style)

    monkeypatch.setattr(Axes, "plot", note)
    return drawn


def test_scores_are_drawn_in_percent_and_losses_as_they_are(tmp_path, lines):
    history = [{"epoch": 2, "eval_score": 0.75}, {"epoch": 1, "loss": 3.5}, {"epoch": 1, "eval_score": 0.5}]
    plot_task_curves({"seed 1": history}, tmp_path / "curve.png", "title")
    assert lines == {"seed 1": [([1], [3.5]), ([1, 2], [50, 75])]}


def test_errors_are_drawn_in_their_unit(tmp_path, lines):
    history = [{"epoch": 1, "eval_mse": 2.4}, {"epoch": 1, "loss": 3.5}]
    plot_task_curves({"seed 1": history}, tmp_path / "curve.png", "title", ("eval_mse", "MSE", 1))
    assert lines == {"seed 1": [([1], [3.5]), ([1], [2.4])]}


def test_trials_of_a_search_are_told_apart(tmp_path, monkeypatch):
    styles = []
    plot = Axes.plot

    def note(*args, **style):
        styles.append(style)
        return plot(*args, **style)

    monkeypatch.setattr(Axes, "plot", note)
    histories = {f"trial {n}": [{"epoch": 1, "loss": float(n)}, {"epoch": 2, "loss": 1.0}] for n in range(12)}
    plot_task_curves(histories, tmp_path / "curve.png", "title")
    assert len({(style["color"], style["marker"], style["ls"]) for style in styles}) == 12


def test_curves_are_means_over_seeds(tmp_path, lines):
    seeds = [[(1, 6.0), (2, 4.0)], [(1, 7.0), (4, 5.0)]]
    plot_mean_curves({"ours": seeds}, tmp_path / "curve.png", "title", references={"published": [(3, 2.0)]})
    assert lines == {"ours (4.50)": [([1, 3], [6.5, 4.5])], "published (2.00)": [([3], [2.0])]}
