"""Forecasts that need no network: what every table holds a forecaster against."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from tqdm import tqdm

from experiments.forecasting.windows import Windows


LAST, SEASONAL, LINEAR = "last value", "seasonal naive", "linear"
NAMES = (LAST, SEASONAL, LINEAR)
# Of the mean square of a value: how far the weights of the linear forecast are held back. The best on validation.
# The first is for constant series, whose equations nothing else makes solvable.
_PENALTIES = (1e-9, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_WINDOWS_AT_ONCE = 64


class Baselines:
    """
    Forecasts of a series by repetition and by least squares.

    - The last observed value, repeated.
    - The last season of observed values, repeated.
    - A linear map of the context, the same for all channels (what DLinear is, whose decomposition adds up to one),
      fitted exactly by least squares, with the penalty that is best on the validation windows. Where values are
      missing, the last observed ones stand in their place, in what it reads and in what it is fitted to.

    Args:
        windows (`dict`): The [`Windows`] of `train`, `validation` and `test`.
        season (`int`): Time steps of a season.
        silent (`bool`): Whether to show no bar.
    """

    def __init__(self, windows: dict[str, Windows], season: int, silent: bool):
        self.windows, self.season, self.silent = windows, season, silent
        self.filled = _fill_gaps(windows["train"])

    def forecast(self, name: str, origins: np.ndarray) -> torch.Tensor:
        """Forecasts `(num_origins, prediction_length, num_channels)` from the steps before each origin, scaled."""
        horizon = self.windows["train"].prediction_length
        steps = np.arange(horizon)
        if name == LAST:
            return self.filled[origins - 1][:, None].expand(-1, horizon, -1)
        if name == SEASONAL:
            # A season that begins before the series does is cut to what there is of it.
            season = np.minimum(self.season, origins)[:, None]
            return self.filled[origins[:, None] - season + steps % season]
        return self._map(self.weights, origins)

    def measure(self, part: str) -> dict[str, dict[str, float]]:
        """MSE and MAE of each baseline over all windows of a part."""
        sums = {name: np.zeros(3) for name in NAMES}
        for origins, future, observed in self._batches(part, "Baselines"):
            for name in NAMES:
                sums[name] += _errors(self.forecast(name, origins) - future, observed)
        return {name: {"mse": s[0] / max(1, s[2]), "mae": s[1] / max(1, s[2])} for name, s in sums.items()}

    @cached_property
    def weights(self) -> torch.Tensor:
        """Of the linear forecast, offsets in the last row: `(context_length + 1, prediction_length)`, in float64."""
        length, horizon = self.windows["train"].context_length, self.windows["train"].prediction_length
        inner = torch.zeros(length + 1, length + 1, dtype=torch.double)
        outer = torch.zeros(length + 1, horizon, dtype=torch.double)
        for origins, future, _ in self._batches("train", "Linear baseline", of_filled=True):
            rows = self._contexts(origins).mT.flatten(0, 1).double()
            rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
            inner += rows.T @ rows
            outer += rows.T @ future.mT.flatten(0, 1).double()
        diagonal = torch.eye(length + 1, dtype=torch.double) * inner.trace() / (length + 1)
        diagonal[-1, -1] = 0
        found: list[tuple[float, torch.Tensor]] = []
        for penalty in _PENALTIES:
            weights = torch.linalg.solve(inner + penalty * diagonal, outer)
            total = np.zeros(3)
            for origins, future, observed in self._batches("validation", None):
                total += _errors(self._map(weights, origins) - future, observed)
            found.append((total[0] / max(1, total[2]), weights))
        return min(found, key=lambda entry: entry[0])[1]

    def _map(self, weights: torch.Tensor, origins: np.ndarray) -> torch.Tensor:
        products = torch.einsum("blc,lh->bhc", self._contexts(origins), weights[:-1].float())
        return products + weights[-1].float()[:, None]

    def _contexts(self, origins: np.ndarray) -> torch.Tensor:
        length = self.windows["train"].context_length
        return self.filled[origins[:, None] + np.arange(-length, 0)]  # (B, L, C)

    def _batches(
        self, part: str, title: str | None, of_filled: bool = False
    ) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor | None]]:
        """Origins with what came after them and where that was observed."""
        windows = self.windows[part]
        starts = range(0, len(windows), _WINDOWS_AT_ONCE)
        for start in tqdm(starts, title, disable=self.silent or title is None, leave=False):
            origins = windows.origins[start : start + _WINDOWS_AT_ONCE]
            places = origins[:, None] + np.arange(windows.prediction_length)
            observed = None if of_filled or windows.observed is None else windows.observed[places]
            yield origins, (self.filled if of_filled else windows.values)[places], observed


def _errors(differences: torch.Tensor, observed: torch.Tensor | None) -> np.ndarray:
    """Sums of squares and of absolute values of what was observed, and how much that is."""
    kept = differences.double() if observed is None else differences.double()[observed]
    return np.array([float(kept.square().sum()), float(kept.abs().sum()), kept.numel()])


def _fill_gaps(windows: Windows) -> torch.Tensor:
    """The series with the last observed value in each gap, and the mean, which is 0, before the first one."""
    if windows.observed is None:
        return windows.values
    rows = torch.arange(len(windows.values))[:, None] * windows.observed
    return windows.values.gather(0, rows.cummax(dim=0).values)
