"""Time series as tables: read from a file, the Hub or a seed, checked, and put on an even grid of time steps."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.arguments import UserError, one_line
from experiments.loading import explained_errors, load_prepared


_TIMESTAMPS = ("date", "datetime", "timestamp", "time", "ds")
_NO_TIMESTAMPS = "none"
_UNEVEN = "Its timestamps are not evenly spaced: every row is taken as one time step."
# Numbers that say when a row was, as digits of a date or since 1970, and between which values they lie.
# Hours and minutes written as 2024013112 and 202401311259 lie between the latter two.
_FIRST_YEAR = 1000
_CLOCK = r"\s*\d\d?(:\d\d){1,2}([.,]\d+)?\s*([AaPp]\.?[Mm]\.?)?\s*"
_DIGITS = {"%Y": (_FIRST_YEAR, 2999), "%Y%m": (100 * _FIRST_YEAR, 299912), "%Y%m%d": (10**4 * _FIRST_YEAR, 29991231)}
_NUMBERED = _DIGITS | {"s": (10**8, 19 * 10**8), "ms": (3 * 10**11, 19 * 10**11)}


def _read_parquet(file: Path) -> pd.DataFrame:
    """A table with what pandas keeps as its index as columns, but for numbers of rows and what is no time or name."""
    table = pd.read_parquet(file)
    index, columns = table.index, {str(name).lower() for name in table.columns}
    if isinstance(index, pd.MultiIndex):
        return table.reset_index()
    if pd.api.types.is_integer_dtype(index) and str(index.name).lower() not in _TIMESTAMPS:
        return table
    if index.name is None:
        is_time = isinstance(index, (pd.DatetimeIndex, pd.PeriodIndex))
        if not columns & {*_TIMESTAMPS} and index.inferred_type in ("string", "date", "datetime"):
            is_time = bool(pd.to_datetime(index, errors="coerce", format="mixed", utc=True).notna().all())
        index.name = _TIMESTAMPS[0] if is_time else None
    return table if index.name is None or index.name in table.columns else table.reset_index()


# No column stands for the rows: fields that have no name would be taken for it.
_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": partial(pd.read_csv, index_col=False),
    ".tsv": partial(pd.read_csv, sep="\t", index_col=False),
    ".parquet": _read_parquet,
}
# Time steps after which a series is most like itself, by their length in seconds.
_DAY = 86400
_ONE_DAY = pd.Timedelta(days=1)
_SEASONS = {91 * _DAY: 4, 30 * _DAY: 12, 7 * _DAY: 52}


@dataclass(frozen=True)
class Series:
    """
    A multivariate series.

    Args:
        source (`str`): What to call it.
        columns (`list` of `str`): Names of the channels.
        values (`np.ndarray` of shape `(num_steps, num_channels)`): In the units of the source, NaN where missing.
        timestamps (`pd.DatetimeIndex`, *optional*): When each step was.
        timestamp_column (`str`, *optional*): Where that was read; "none" where it was not to be.
        notes (`tuple` of `str`): What was done to it.
        is_whole (`bool`): Whether it has all channels and, where it is a public one, all time steps of its source.
    """

    source: str
    columns: list[str]
    values: np.ndarray
    timestamps: pd.DatetimeIndex | None
    timestamp_column: str | None = None
    notes: tuple[str, ...] = ()
    is_whole: bool = True

    @property
    def num_gaps(self) -> int:
        """Missing values."""
        return int(np.isnan(self.values).sum())

    def following_timestamps(self, num_steps: int) -> list[str]:
        """When the steps after the last one are; their numbers, counted from the first step, without timestamps."""
        times = self.timestamps
        if times is None:
            return [str(len(self.values) + step) for step in range(num_steps)]
        frequency = _months(times[-50:]) or _frequency(times[-50:]) or pd.Series(times).diff().median()
        following = pd.date_range(times[-1], periods=num_steps + 1, freq=frequency)[1:]
        are_days = (
            times.tz is None and (times == times.normalize()).all() and (following == following.normalize()).all()
        )
        return [str(time.date() if are_days else time) for time in following]

    def season(self) -> int:
        """Steps of a day where they are shorter than one, of a week of days, of a year of longer ones; else 1."""
        if self.timestamps is None:
            return 1
        step = pd.Series(self.timestamps).diff().median().total_seconds()
        if step < _DAY:
            # Of whole days, which may lack the hours of every night.
            days = self.timestamps.normalize().value_counts().sort_index().iloc[1:-1]
            return max(1, round(days.median() if len(days) else _DAY / step))
        if step == _DAY:
            return 5 if _has_working_days_alone(self.timestamps) else 7
        return next((steps for length, steps in _SEASONS.items() if abs(step - length) <= 2 * _DAY), 1)


def read_file(
    path: str, timestamp_column: str | None, target_columns: Sequence[str] | None, rows_are_steps: bool = False
) -> Series:
    """
    Read a series from a file; the last three arguments are those of [`make_series`].

    Raises:
        UserError: if it cannot be read, or as [`make_series`].
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{path}: no such file; check the path (it is read from {Path.cwd()}).")
    if file.suffix.lower() not in _READERS:
        raise UserError(f"{path}: files of type `{file.suffix}` cannot be read; give {', '.join(_READERS)}.")
    commas = "separate fields by commas, and decimals by points"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = _READERS[file.suffix.lower()](file)
    except pd.errors.ParserWarning as error:
        raise UserError(f"{path} has rows with more fields than the line of names; {commas}.") from error
    except (ValueError, OSError, ImportError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}; give a table with a line of names.") from error
    if len(table.columns) == 1 and ";" in str(table.columns[0]):
        raise UserError(f"{path} has the one column `{table.columns[0]}`; {commas}.")
    return make_series(file.name, table, timestamp_column, target_columns, rows_are_steps)


def read_hub(
    name: str,
    configuration: str | None,
    revision: str | None,
    cache_dir: str | None,
    timestamp_column: str | None,
    target_columns: Sequence[str] | None,
    rows_are_steps: bool = False,
) -> Series:
    """
    Read a series from the Hub: all rows of the split `train`, which has those of every part. The last three arguments
    are those of [`make_series`].

    Raises:
        UserError: if it cannot be had, or as [`make_series`].
    """
    with explained_errors(name, "--data_dir or --data_file", "give --dataset_config_name"):
        rows = load_prepared(name, configuration, revision, cache_dir, "train")
    source = f"{name} ({configuration})" if configuration else name
    return make_series(source, rows.to_pandas(), timestamp_column, target_columns, rows_are_steps)


def make_synthetic(
    num_steps: int, seed: int, timestamp_column: str | None = None, target_columns: Sequence[str] | None = None
) -> Series:
    """
    Three channels of days and weeks in hours, with a slow trend and noise; the last arguments are those of
    [`make_series`].
    """
    generator = np.random.default_rng(seed)
    hours = np.arange(num_steps)
    columns = []
    for _ in range(3):
        daily, weekly, slope = generator.uniform(0.5, 1.5, 3)
        phases = generator.uniform(0, 2 * np.pi, 3)
        day, week = 2 * np.pi * hours / 24, 2 * np.pi * hours / 168
        waves = daily * np.sin(day + phases[0]) + 0.4 * daily * np.sin(2 * day + phases[1])
        trend = slope * hours / num_steps
        columns.append(10 + waves + weekly * np.sin(week + phases[2]) + trend + generator.normal(0, 0.3, num_steps))
    times = pd.date_range("2020-01-01", periods=num_steps, freq="h")
    table = pd.DataFrame({_TIMESTAMPS[0]: times} | dict(zip("abc", columns, strict=True)))
    return make_series(f"synthetic hours (seed {seed})", table, timestamp_column, target_columns)


def make_series(
    source: str,
    table: pd.DataFrame,
    timestamp_column: str | None,
    target_columns: Sequence[str] | None,
    rows_are_steps: bool = False,
) -> Series:
    """
    Check a table and make a series of it. Rows that an even grid of time lacks become gaps.

    Args:
        source (`str`): What to call it.
        table (`pd.DataFrame`): A row for each time step, in order.
        timestamp_column (`str`, *optional*):
            Of dates, years, seconds or milliseconds since 1970; by default the one named `date` or the like, if there
            is one, and with "none" none.
        target_columns (sequence of `str`, *optional*): By default all others.
        rows_are_steps (`bool`):
            Whether every row is one time step whatever the timestamps say, as the protocols of public series count:
            Weather has a time twice, and nine that are missing.

    Raises:
        UserError: for columns that are not there, timestamps out of order, and values that are no numbers.
    """
    table.columns = [str(name) for name in table.columns]
    there = f"its columns are {', '.join(table.columns)}"
    if not len(table):
        raise UserError(f"{source} has no rows.")
    named = timestamp_column if timestamp_column != _NO_TIMESTAMPS else None
    for flag, names in (("timestamp_column", [named] if named else []), ("target_columns", target_columns or [])):
        for name in names:
            if name not in table.columns:
                hint = f"; pass --{flag} {_NO_TIMESTAMPS} if its rows have no times" if name == named else ""
                asked = f"which --{flag} or the checkpoint asks for"
                raise UserError(f"{source} has no column {name}, {asked}; {there}{hint}.")
    dated = [n for n in table.columns if pd.api.types.is_datetime64_any_dtype(table[n])]
    likely = [n for n in table.columns if n.lower() in _TIMESTAMPS and n not in (target_columns or ())] or dated
    if has_none := timestamp_column == _NO_TIMESTAMPS:  # dates are no channel, numbers may be one
        likely = [name for name in likely if not pd.api.types.is_numeric_dtype(table[name])]
    found = [named] if named else likely[:1]
    times, notes = None, []
    if found and not has_none:
        times = _read_timestamps(source, table[found[0]], rows_are_steps, is_sure=named is not None)
        if times is None:
            notes.append(f"Its column {found[0]} holds numbers and no dates: steps are numbered.")
    numbering = [] if target_columns else [name for name in table.columns if _numbers_the_rows(table[name])]
    if numbering:
        notes.append("A column without a name numbers the rows: it is left out.")
    columns = list(target_columns or [name for name in table.columns if name not in (*found, *numbering)])
    if not columns or set(columns) & set(found) or len(set(columns)) < len(columns):
        raise UserError(f"{source}: name each column to forecast once with --target_columns; {there}.")
    values = np.stack([_read_numbers(source, table[name]) for name in columns], axis=1)
    read_from = timestamp_column if has_none else None if times is None else found[0]
    is_whole = {*table.columns} <= {*columns, *found, *numbering}
    series = Series(source, columns, values, times, read_from, tuple(notes), is_whole)
    return series if rows_are_steps else _even_out(series)


def _numbers_the_rows(column: pd.Series) -> bool:
    """Whether it is the index of a table as `to_csv` writes it, or `to_parquet` under a name of its own."""
    if not pd.api.types.is_integer_dtype(column):
        return False
    is_unnamed = column.name in ("", "Unnamed: 0") and bool((column.diff().iloc[1:] == 1).all())
    return is_unnamed or column.name == "__index_level_0__"


def _read_numbers(source: str, column: pd.Series) -> np.ndarray:
    # Which pandas would count in nanoseconds, those of no time as well.
    is_time = column.dtype.kind in "mM" or isinstance(column.dtype, pd.PeriodDtype)
    numbers = pd.to_numeric(column.astype(str) if is_time else column, errors="coerce").to_numpy(dtype=float)
    wrong = np.flatnonzero((np.isnan(numbers) & column.notna().to_numpy()) | np.isinf(numbers))
    if len(wrong):
        is_text = not pd.api.types.is_numeric_dtype(column)
        dates = column.dropna().astype(str) if is_text else column
        is_date = is_text and pd.to_datetime(dates, errors="coerce", format="mixed", utc=True).notna().all()
        points = pd.to_numeric(dates.astype(str).str.replace(",", ".", regex=False), errors="coerce")
        way = "name it as --timestamp_column if it says when" if is_date else "mend it"
        way = "write decimals by points, and nothing between thousands" if is_text and points.notna().all() else way
        raise UserError(
            f"{source}: column {column.name} holds `{column.iloc[wrong[0]]}` in row {wrong[0] + 1}, which is no "
            f"number; {way}, or leave the column out with --target_columns."
        )
    if np.isnan(numbers).all():
        raise UserError(f"{source}: column {column.name} is empty; leave it out with --target_columns.")
    return numbers


def _read_timestamps(
    source: str, column: pd.Series, in_any_order: bool, is_sure: bool = True
) -> pd.DatetimeIndex | None:
    """When each row was; None for numbers that are no times, in a column that nobody has named."""
    if isinstance(column.dtype, pd.PeriodDtype):
        column = column.dt.to_timestamp()
    if pd.api.types.is_numeric_dtype(column):
        numbered = next((unit for unit, (low, high) in _NUMBERED.items() if column.between(low, high).all()), None)
        is_by_name = is_sure or numbered not in ("%Y", "%Y%m")  # a count may run through the same numbers
        if numbered is None or not is_by_name or column.isna().any() or (column % 1 != 0).any():
            if not is_sure:
                return None
            remedy = f"name another --timestamp_column, or {_NO_TIMESTAMPS}"
            raise UserError(f"{source}: column {column.name} holds numbers and no dates; {remedy}.")
        column = column.astype("int64")
        if numbered in _DIGITS:
            times = pd.to_datetime(column.astype(str), format=numbered, errors="coerce")
            if not is_sure and times.isna().any():  # a count again
                return None
        else:
            times = pd.to_datetime(column, unit=numbered)
    else:
        times = _parse_dates(column)
    # Years as Jan-15 is read, and hours and minutes, which would be today's.
    missing = times.isna() | (times.dt.year < _FIRST_YEAR) | column.astype(str).str.fullmatch(_CLOCK)
    missing = np.flatnonzero(missing.to_numpy())
    if len(missing):
        raise UserError(
            f"{source}: column {column.name} holds `{column.iloc[missing[0]]}` in row {missing[0] + 1}, which is no "
            f"date with a year; mend it, or name another --timestamp_column, or {_NO_TIMESTAMPS}."
        )
    steps = times.diff().iloc[1:]
    for is_wrong, what in ((steps == pd.Timedelta(0), "equals"), (steps < pd.Timedelta(0), "is before")):
        rows = np.flatnonzero(is_wrong.to_numpy())
        if len(rows) and not in_any_order:
            raise UserError(
                f"{source}: the timestamp of row {rows[0] + 2}, {times.iloc[rows[0] + 1]}, {what} that of the row "
                "above; give each series a column of its own, or sort the rows and keep one for each time."
            )
    return pd.DatetimeIndex(_of_place(times, times.dt.tz_localize(None)))


def _of_place(times: pd.Series, local: pd.Series) -> pd.Series:
    """Times, or what clocks of the place show if these are dates, or whole days more often than times."""
    # A day of the place has 23 hours in spring.
    whole = [(read.diff().iloc[1:] % _ONE_DAY == pd.Timedelta(0)).mean() for read in (times, local)]
    is_local = whole[1] > whole[0] or bool((local == local.dt.normalize()).all())
    return local if is_local and times.diff().median() >= _ONE_DAY else times


def _parse_dates(column: pd.Series) -> pd.Series:
    """Dates as they are usually read, or with the day before the month if they go on more evenly like that."""
    read: list[pd.Series] = []
    for parse in (partial(pd.to_datetime, errors="coerce", format="mixed", dayfirst=flag) for flag in (False, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dates that can only be read the other way
            try:
                times = parse(column)
            except ValueError:
                times = None
            # Across daylight saving, with two distances from UTC, in which hours are even.
            if times is None or (times.isna().any() and parse(column, utc=True).notna().all()):
                times = in_utc = parse(column, utc=True)
                if in_utc.diff().median() >= _ONE_DAY:
                    local = pd.Series([parse(date).tz_localize(None) for date in column], column.index)
                    times = _of_place(in_utc, local)
            read.append(times)
    even = [times for times in read if times.notna().all() and _frequency(pd.DatetimeIndex(times)) is not None]
    # Of a few rows with a gap days are told from months by nothing.
    long = [times for times in read if len(times) > 12 and times.notna().all()]
    monthly = [times for times in long if _months(pd.DatetimeIndex(times)) is not None]
    rising = [times for times in read if times.is_monotonic_increasing and times.is_unique]
    if len(column) > 12:
        rising.sort(key=lambda times: times.diff().value_counts().iloc[0], reverse=True)
    return [*even, *monthly, *rising, *read][0]


def _frequency(times: pd.DatetimeIndex) -> Any:
    """By what evenly spaced times go on, months and working days included; None if they are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a word for it that will be an object
        found = pd.infer_freq(times) if len(times) > 2 else None
        # Any hours with nights between them are called business hours, which are those from 9 to 17.
        is_found = found is not None and pd.date_range(times[0], periods=len(times), freq=found).equals(times)
        return found if is_found else None


def _months(times: pd.DatetimeIndex) -> Any:
    """The step of months, quarters or years that all times keep to, though some may be lacking; else None."""
    steps = np.diff(times.year * 12 + times.month)
    if len(steps) < 2 or (steps < 1).any():
        return None
    at_ends = bool((times.day == times.days_in_month).all())
    at_same = len((times - times.normalize()).unique()) == 1 and (at_ends or len(times.day.unique()) == 1)
    common = int(np.bincount(steps).argmax())
    if not at_same or (steps % common).any() or steps.sum() >= 2 * common * len(times):
        return None
    return pd.offsets.MonthEnd(common) if at_ends else pd.DateOffset(months=common)


def _even_out(series: Series) -> Series:
    """Put in rows that an even grid lacks, as gaps; where time has no even grid, the rows are the steps."""
    times = series.timestamps
    if times is None or len(times) < 3:
        return series
    steps = times[1:] - times[:-1]
    common, months = steps.value_counts().index[0], _months(times)
    if (steps == common).all() or (months is None and _frequency(times) is not None):
        return series
    is_working = common == pd.Timedelta(days=1) and _has_working_days_alone(times)
    uneven = replace(series, notes=(*series.notes, _UNEVEN))
    if months is None and (times[-1] - times[0]) / common > 4 * len(times):  # a grid that may not fit into memory
        return uneven
    grid = pd.date_range(times[0], times[-1], freq=months or ("B" if is_working else common))
    if len(grid) == len(times) and (grid == times).all():
        return series
    places = grid.get_indexer(times)
    if (places < 0).any() or len(grid) > 2 * len(times):
        return uneven
    values = np.full((len(grid), len(series.columns)), np.nan)
    values[places] = series.values
    if months:
        common = f"{months.kwds.get('months', months.n)} month(s)"
    what = "working days" if is_working else f"steps of {common}"
    note = f"Its timestamps lack {len(grid) - len(times):,} {what}, which are gaps now."
    return replace(series, values=values, timestamps=grid, notes=(*series.notes, note))


def _has_working_days_alone(times: pd.DatetimeIndex) -> bool:
    return len(times) > 5 and bool((times.day_of_week < 5).all())
