"""Series as examples: which series is asked for, its split, its scale and its windows."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from experiments.arguments import UserError, flag, require_at_least
from experiments.forecasting.benchmarks import BENCHMARKS, HUB_DATASET, Benchmark
from experiments.forecasting.series import Series, make_synthetic, read_file, read_hub
from experiments.results import write_json


logger = logging.getLogger(__name__)

PARTS = ("train", "validation", "test")
SPLIT = [0.7, 0.1, 0.2]  # of Informer and its successors
SCALER_FILE = "series.json"


@dataclass
class SeriesArguments:
    """The series, and what is forecast of it. Without any of them: hours of a seed."""

    task_name: Literal[tuple(BENCHMARKS)] | None = flag(  # type: ignore[valid-type]
        None, "A public series with its split and horizons, from the Hub or --data_dir."
    )
    data_dir: str | None = flag(None, "Folder with the public series as CSV: exchange_rate.csv, ETTh1.csv, ...")
    data_file: str | None = flag(None, "A series of your own: .csv, .tsv or .parquet, a row for each time step.")
    dataset_name: str | None = flag(None, "A series of your own on the Hub.")
    dataset_config_name: str | None = flag(None, "Its configuration.")
    dataset_revision: str | None = flag(None, "Its commit, tag or branch; also of --task_name.")
    cache_dir: str | None = flag(None, "Folder for prepared data; by default the cache of the datasets library.")
    timestamp_column: str | None = flag(
        None, "When each row was; by default the column `date` or the like; `none`: no times."
    )
    target_columns: list[str] | None = flag(None, "Columns to forecast; by default all but the timestamps.")
    mask_missing: bool = flag(False, "Read missing values as gaps, which a mask tells the model of.")
    split_fractions: list[float] | None = flag(
        None,
        "Shares of training, validation and test of a series of your own, in the order of time; by default those of "
        f"the checkpoint, or {' '.join(map(str, SPLIT))}.",
    )
    prediction_length: list[int] | None = flag(None, "Time steps to forecast; several train one model each.")
    context_length: int | None = flag(None, "Time steps to read; by default the task's, or 96.")
    seasonal_period: int | None = flag(
        None, "Time steps of the seasonal baseline; by default the task's, a day's, a week's or a year's."
    )
    max_train_samples: int | None = flag(None, "Train on so many windows, spread evenly over all.")
    max_eval_samples: int | None = flag(None, "Likewise for validation.")
    max_predict_samples: int | None = flag(None, "Likewise for the test.")
    synthetic_steps: int = flag(3000, "Time steps of the series that is made where none is named.")
    synthetic_seed: int = flag(0, "Its seed, whichever --seed trains.")

    def __post_init__(self) -> None:
        named = [name for name in ("task_name", "data_file", "dataset_name") if getattr(self, name)]
        if len(named) > 1:
            raise UserError(f"--{' and --'.join(named)} name several series; give one.")
        if self.data_dir and not self.task_name:
            raise UserError("--data_dir is where --task_name is read from; name a task, or give --data_file.")
        is_from_hub = self.dataset_name or (self.task_name and not self.data_dir)
        is_split = not self.task_name or self.split_fractions == SPLIT
        for name, default, is_read, why in (
            ("split_fractions", None, is_split, "a public series has a split of its own"),
            ("dataset_config_name", None, self.dataset_name, "it is for --dataset_name"),
            ("dataset_revision", None, is_from_hub, "nothing is read from the Hub here"),
        ):
            if not is_read and getattr(self, name) != default:
                raise UserError(f"--{name}: {why}; leave it out.")
        limits = ("max_train_samples", "max_eval_samples", "max_predict_samples")
        require_at_least(1, self, "context_length", "seasonal_period", "synthetic_steps", *limits)
        if too_short := [steps for steps in self.prediction_length or [] if steps < 1]:
            raise UserError(f"--prediction_length is {too_short[0]}; it must be at least 1.")
        if self.prediction_length is not None and len(set(self.prediction_length)) < len(self.prediction_length):
            raise UserError("--prediction_length names a horizon twice; give each once.")
        shares = self.split_fractions
        if shares and (len(shares) != 3 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6):
            raise UserError(f"--split_fractions {' '.join(map(str, shares))}: give three shares that make 1.")

    @property
    def benchmark(self) -> Benchmark | None:
        """The public series that is asked for."""
        return BENCHMARKS[self.task_name] if self.task_name else None

    @property
    def is_partial(self) -> bool:
        """Whether not all windows are used."""
        return any((self.max_train_samples, self.max_eval_samples, self.max_predict_samples))

    def season(self, series: Series) -> int:
        """Time steps of the seasonal baseline."""
        return self.seasonal_period or (self.benchmark.season if self.benchmark else series.season())

    def horizons(self) -> tuple[int, ...]:
        """What is forecast where no checkpoint says it."""
        return tuple(self.prediction_length or (self.benchmark.horizons if self.benchmark else (96,)))


@dataclass(frozen=True)
class Scaler:
    """What is saved of a series with a model: names, means and standard deviations of the training part, its split."""

    columns: list[str]
    mean: list[float]
    std: list[float]
    timestamp_column: str | None = None
    split_fractions: list[float] | None = None

    @classmethod
    def fit(cls, series: Series, stop: int, split_fractions: list[float] | None = None) -> "Scaler":
        """
        The scale of the first `stop` steps; a channel that is constant there is left in its units, and one without a
        value there, or without a finite deviation, is a `UserError`. Of fractions that have chosen these steps a note
        is kept.
        """
        part = series.values[:stop]
        if not len(part):
            steps = f"{series.source} has {len(series.values):,} time steps, none of them in the part for training"
            raise UserError(f"{steps}, by which it is scaled; give a longer series.")
        observed = ~np.isnan(part)
        for name, known in zip(series.columns, observed.any(axis=0), strict=True):
            if not known:
                what = f"no value of {name} was observed in the part for training, by which it is scaled"
                raise UserError(f"{series.source}: {what}; leave it out with --target_columns.")
        with np.errstate(over="ignore"):
            mean, std = np.nanmean(part, axis=0), np.nanstd(part, axis=0)
        # A constant's deviation is rounding.
        is_constant = std <= 1e-12 * np.abs(mean)
        std = np.where(is_constant, 1, std)
        for name, is_finite in zip(series.columns, np.isfinite(mean) & np.isfinite(std), strict=True):
            if not is_finite:
                raise UserError(f"{series.source}: {name} has values too large for a deviation; give it other units.")
        if is_constant.any():
            names = ", ".join(np.array(series.columns)[is_constant])
            logger.warning("%s: %s, constant in the part for training, is not scaled.", series.source, names)
        return cls(series.columns, mean.tolist(), std.tolist(), series.timestamp_column, split_fractions)

    def apply(self, series: Series) -> np.ndarray:
        """The values in units of the scale."""
        return (series.values - np.array(self.mean)) / np.array(self.std)

    def restore(self, values: np.ndarray) -> np.ndarray:
        """Values in the units of the source."""
        return values * np.array(self.std) + np.array(self.mean)

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Write `series.json`; the name is the one by which the Trainer saves what belongs to a model."""
        write_json(Path(folder) / SCALER_FILE, vars(self))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Scaler":
        """
        Read what `save_pretrained` wrote.

        Raises:
            UserError: if it is not there.
        """
        try:
            return cls(**json.loads((Path(folder) / SCALER_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{folder} has no readable {SCALER_FILE}, which says how the series was scaled: it is no folder that "
                "run_forecasting.py has trained a forecaster in."
            ) from error


def read_series(arguments: SeriesArguments) -> Series:
    """
    Read the series that is asked for.

    Raises:
        UserError: if it cannot be read, or misses values that nothing is said about.
    """
    columns = (arguments.timestamp_column, arguments.target_columns)
    benchmark, revision, cache = arguments.benchmark, arguments.dataset_revision, arguments.cache_dir
    if arguments.data_file:
        series = read_file(arguments.data_file, *columns)
    elif benchmark and arguments.data_dir:
        file = str(Path(arguments.data_dir) / f"{benchmark.file}.csv")
        series = read_file(file, *columns, rows_are_steps=True)
    elif benchmark:
        series = read_hub(HUB_DATASET, benchmark.file, revision, cache, *columns, rows_are_steps=True)
    elif arguments.dataset_name:
        series = read_hub(arguments.dataset_name, arguments.dataset_config_name, revision, cache, *columns)
    else:
        series = make_synthetic(arguments.synthetic_steps, arguments.synthetic_seed, *columns)
    if benchmark and benchmark.num_steps not in (None, len(series.values)):
        counts = f"{len(series.values):,} time steps, and the public series {benchmark.num_steps:,}"
        note = f"It has {counts}: its parts are others, and no published errors stand beside it."
        series = replace(series, notes=(*series.notes, note), is_whole=False)
    if series.num_gaps and not arguments.mask_missing:
        row, column = np.argwhere(np.isnan(series.values))[0]
        when = f"in time step {row + 1}" + (f" ({series.timestamps[row]})" if series.timestamps is not None else "")
        raise UserError(
            f"{series.source} lacks {series.num_gaps:,} values, the first one of {series.columns[column]} {when}. "
            f"{''.join(f'{note} ' for note in series.notes)}Fill them, or pass --mask_missing to read them as gaps."
        )
    return series


def split_borders(num_steps: int, benchmark: Benchmark | None, fractions: Sequence[float] | None) -> dict[str, range]:
    """
    The time steps that are forecast in each part.

    The protocol of Informer and its successors, and of the authors' code: ETT has 12, 4 and 4 months of 30 days, where
    the paper says 7 : 1 : 2 of all series; others have shares, of which training and test are rounded down.

    Raises:
        UserError: if the series is shorter than its protocol.
    """
    if benchmark and benchmark.steps_per_month:
        months = np.array([0, 12, 16, 20]) * benchmark.steps_per_month
        if num_steps < months[-1]:
            raise UserError(f"{benchmark.title} has {num_steps:,} rows, fewer than the protocol's {months[-1]:,}.")
        borders = months.tolist()
    else:
        train, _, test = fractions or SPLIT
        borders = [0, int(num_steps * train), num_steps - int(num_steps * test), num_steps]
    return {name: range(*pair) for name, pair in zip(PARTS, pairwise(borders), strict=True)}


class Windows(torch.utils.data.Dataset):
    """
    Every window of a part: a context and the steps after it, all of which lie in the part.

    Contexts reach back into the part before, so that each part is forecast from its first step on; that of training
    begins a context later.

    Args:
        values (`np.ndarray` of shape `(num_steps, num_channels)`): The whole series, scaled, NaN where missing.
        part (`range`): The steps that are forecast.
        context_length, prediction_length (`int`): Steps that are read and forecast.
        limit (`int`, *optional*): Keep so many windows, spread evenly.
    """

    def __init__(
        self, values: np.ndarray, part: range, context_length: int, prediction_length: int, limit: int | None = None
    ):
        self.context_length, self.prediction_length = context_length, prediction_length
        observed = ~np.isnan(values)
        self.values = torch.tensor(np.where(observed, values, 0), dtype=torch.float32)
        self.observed = None if observed.all() else torch.tensor(observed)
        first = max(part.start, context_length)
        self.origins = np.arange(first, max(first, part.stop - prediction_length + 1))
        if limit is not None and limit < len(self.origins):
            self.origins = self.origins[np.linspace(0, len(self.origins) - 1, limit).round().astype(int)]

    def __len__(self) -> int:
        return len(self.origins)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        origin = int(self.origins[index])
        past = slice(origin - self.context_length, origin)
        future = slice(origin, origin + self.prediction_length)
        window = {"past_values": self.values[past], "future_values": self.values[future]}
        if self.observed is not None:
            window |= {"past_observed_mask": self.observed[past], "future_observed_mask": self.observed[future]}
        return window


def make_windows(
    series: Series, scaler: Scaler, arguments: SeriesArguments, context_length: int, prediction_length: int
) -> dict[str, Windows]:
    """
    The windows of all parts.

    Raises:
        UserError: if a part is too short for a single one.
    """
    values = scaler.apply(series)
    borders = split_borders(len(values), arguments.benchmark, arguments.split_fractions)
    limits = (arguments.max_train_samples, arguments.max_eval_samples, arguments.max_predict_samples)
    windows = {}
    for (name, part), limit in zip(borders.items(), limits, strict=True):
        windows[name] = Windows(values, part, context_length, prediction_length, limit)
        if np.isnan(values[part.start : part.stop]).all():
            raise UserError(f"{series.source}: no value of the {name} part was observed; give a series that goes on.")
        if not len(windows[name]):
            needed = prediction_length + (context_length if name == "train" else 0)
            shares = "" if arguments.benchmark else "other --split_fractions, "
            raise UserError(
                f"{series.source}: the {name} part has {len(part):,} of {len(values):,} time steps, and a context of "
                f"{context_length} with a horizon of {prediction_length} needs {needed:,}; give a longer series, "
                f"{shares}or train for a smaller --prediction_length or --context_length."
            )
    return windows


def fingerprint_series(series: Series) -> str:
    """A short word for the values and their names."""
    digest = hashlib.sha256(repr(series.columns).encode())
    digest.update(np.ascontiguousarray(series.values).tobytes())
    return digest.hexdigest()[:16]
