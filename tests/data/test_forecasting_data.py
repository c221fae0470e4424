"""Series, splits, scales, windows and baselines of forecasting, against the protocol written out by hand."""

import datetime

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.arguments import UserError
from experiments.forecasting import baselines as baselines_module
from experiments.forecasting.baselines import LAST, LINEAR, NAMES, SEASONAL, Baselines
from experiments.forecasting.benchmarks import BENCHMARKS, PAPER
from experiments.forecasting.forecasters import compute_metrics
from experiments.forecasting.series import make_series, make_synthetic, read_file
from experiments.forecasting.windows import (
    Scaler,
    SeriesArguments,
    Windows,
    fingerprint_series,
    make_windows,
    read_series,
    split_borders,
)


def table(num_rows: int = 50, frequency: str = "h", **columns) -> pd.DataFrame:
    times = pd.date_range("2024-01-01", periods=num_rows, freq=frequency)
    values = {"a": np.arange(num_rows, dtype=float), "b": np.arange(num_rows) ** 0.5}
    return pd.DataFrame({"date": times.astype(str), **values, **columns})


def make_parts(series, context, horizon, **options):
    arguments = SeriesArguments(**options)
    borders = split_borders(len(series.values), None, arguments.split_fractions)
    scaler = Scaler.fit(series, borders["train"].stop)
    return scaler, make_windows(series, scaler, arguments, context, horizon)


# Reading


def test_a_file_is_read(tmp_path):
    table().to_csv(tmp_path / "s.csv", index=False)
    series = read_file(str(tmp_path / "s.csv"), None, None)
    assert series.columns == ["a", "b"]
    np.testing.assert_allclose(series.values[:, 0], np.arange(50))
    assert series.season() == 24
    assert series.following_timestamps(2) == ["2024-01-03 02:00:00", "2024-01-03 03:00:00"]
    assert read_file(str(tmp_path / "s.csv"), "date", ["b"]).columns == ["b"]


@pytest.mark.parametrize("name", [None, "when"])
def test_times_that_are_the_index_of_a_parquet_file_are_read(tmp_path, name):
    values = table().drop(index=[7, 8])
    values.index = pd.DatetimeIndex(values.pop("date"), name=name)
    values.to_parquet(tmp_path / "s.parquet")
    series = read_file(str(tmp_path / "s.parquet"), None, None)
    assert series.columns == ["a", "b"]
    assert len(series.values) == 50
    assert series.num_gaps == 4
    assert series.timestamp_column == (name or "date")
    values[::-1].to_parquet(tmp_path / "back.parquet")
    with pytest.raises(UserError, match="is before that of the row above"):
        read_file(str(tmp_path / "back.parquet"), None, None)


def test_whatever_pandas_keeps_as_the_index_of_a_parquet_file_is_read(tmp_path):
    file = tmp_path / "s.parquet"
    values = table()[["a", "b"]]
    days = pd.Index(pd.date_range("2024-01-01", periods=50).date)
    for index in (pd.Index(table()["date"], name=None), pd.period_range("2024-01", periods=50, freq="M"), days):
        values.set_index(index).to_parquet(file)
        series = read_file(str(file), None, None)
        assert (series.columns, series.timestamp_column) == (["a", "b"], "date")
    values.drop(index=[7, 8]).to_parquet(file)  # which numbers the rows that are left
    assert read_file(str(file), None, None).columns == ["a", "b"]
    # Names of rows are no times, and what stands in a column already is not read again.
    for index in (pd.Index([f"r{n}" for n in range(50)]), pd.Index(values["a"]), pd.RangeIndex(50, name="id")):
        values.set_index(index).to_parquet(file)
        assert read_file(str(file), None, None).columns == ["a", "b"]
        table().set_index(index).to_parquet(file)
        series = read_file(str(file), None, None)
        assert (series.columns, series.timestamp_column) == (["a", "b"], "date")
    levels = pd.MultiIndex.from_product([["x", "y"], pd.date_range("2024-01-01", periods=25)], names=["of", "date"])
    values.set_index(levels).to_parquet(file)
    with pytest.raises(UserError, match="is before that of the row above"):
        read_file(str(file), None, None)


def test_the_index_that_a_file_was_written_with_is_no_channel(tmp_path):
    table().to_csv(tmp_path / "s.csv")
    series = read_file(str(tmp_path / "s.csv"), None, None)
    assert series.columns == ["a", "b"]
    assert series.notes == ("A column without a name numbers the rows: it is left out.",)
    assert read_file(str(tmp_path / "s.csv"), None, ["Unnamed: 0", "a"]).columns == ["Unnamed: 0", "a"]
    from_library = table()[["a", "b"]].assign(__index_level_0__=np.arange(50)[::-1])  # as other readers name it
    series = make_series("s", from_library, None, None)
    assert (series.columns, series.is_whole) == (["a", "b"], True)
    table(c=1.5)[["c", "date", "a"]].rename(columns={"c": ""}).to_csv(tmp_path / "c.csv", index=False)
    assert len(read_file(str(tmp_path / "c.csv"), None, None).columns) == 2


def test_data_sets_are_read_as_the_hub_has_them(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    folder.mkdir()
    for name, rows in (("ETTh1", 50), ("exchange_rate", 60)):
        table(rows).to_csv(folder / f"{name}.csv", index=False)
    configs = "".join(f"  - config_name: {name}\n    data_files: {name}.csv\n" for name in ("ETTh1", "exchange_rate"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    monkeypatch.setattr("experiments.forecasting.windows.HUB_DATASET", str(folder))
    cache = str(tmp_path / "cache")
    series = read_series(SeriesArguments(task_name="exchange", cache_dir=cache))
    assert series.columns == ["a", "b"]
    assert len(series.values) == 60
    np.testing.assert_array_equal(series.values, read_file(str(folder / "exchange_rate.csv"), None, None).values)
    own = SeriesArguments(dataset_name=str(folder), dataset_config_name="ETTh1", cache_dir=cache)
    assert len(read_series(own).values) == 50
    with pytest.raises(UserError, match="give --dataset_config_name"):
        read_series(SeriesArguments(dataset_name=str(folder), cache_dir=cache))


def test_rows_of_public_series_are_steps_whatever_their_times_say(tmp_path):
    """As published, Weather has a time twice and lacks nine."""
    rows = table(60).drop(index=range(40, 49)).iloc[[*range(21), *range(20, 51)]]
    rows.to_csv(tmp_path / "weather.csv", index=False)
    series = read_series(SeriesArguments(task_name="weather", data_dir=str(tmp_path)))
    np.testing.assert_array_equal(series.values[:, 0], rows["a"])
    assert series.following_timestamps(1) == ["2024-01-03 12:00:00"]
    with pytest.raises(UserError, match="equals that of the row above"):
        read_series(SeriesArguments(data_file=str(tmp_path / "weather.csv")))


@pytest.mark.parametrize(
    ("frequency", "season", "following"),
    [
        ("15min", 96, "2024-01-01 12:30:00"),
        ("D", 7, "2024-02-20"),
        ("B", 5, "2024-03-11"),
        ("W", 52, "2024-12-22"),
        ("MS", 12, "2028-03-01"),
        ("ME", 12, "2028-03-31"),
        ("QS", 4, "2036-07-01"),
        ("QE", 4, "2036-09-30"),
        ("YS", 1, "2074-01-01"),
        ("YE", 1, "2074-12-31"),
        (pd.DateOffset(months=1), 12, "2028-03-01"),
    ],
)
def test_time_goes_on_as_it_was(frequency, season, following):
    series = make_series("s", table(frequency=frequency), None, None)
    assert series.season() == season
    assert series.following_timestamps(1) == [following]


@pytest.mark.parametrize(("first", "last"), [(9, 15), (8, 15), (9, 16), (0, 7)])
@pytest.mark.parametrize("days", ["D", "B"])
def test_a_day_has_the_hours_that_there_are(first, last, days):
    """Hours of business are 9 to 17 to pandas, whichever hours a night lies between."""
    hours = pd.timedelta_range(f"{first}h", f"{last}h", freq="h")
    times = [day + hour for day in pd.date_range("2024-01-01", periods=10, freq=days) for hour in hours]
    series = make_series("s", pd.DataFrame({"date": times, "a": range(len(times))}), None, None)
    assert series.season() == len(hours)
    if (first, last, days) == (9, 16, "B"):
        assert series.following_timestamps(1) == ["2024-01-15 09:00:00"]
    else:
        assert "not evenly spaced" in series.notes[0]


def test_series_without_timestamps_are_numbered():
    series = make_series("s", table().drop(columns="date"), None, None)
    assert series.timestamps is None
    assert series.following_timestamps(2) == ["50", "51"]
    assert series.season() == 1


def test_rows_that_time_lacks_become_gaps():
    series = make_series("s", table().drop(index=[7, 8, 20]), None, None)
    assert len(series.values) == 50
    assert np.isnan(series.values[[7, 8, 20]]).all()
    assert series.num_gaps == 6
    assert "lack 3 steps" in series.notes[0]
    working = make_series("s", table(frequency="B").drop(index=[7, 20]), None, None)
    assert (len(working.values), working.num_gaps, working.season()) == (50, 4, 5)
    assert working.following_timestamps(1) == ["2024-03-11"]
    assert "lack 2 working days" in working.notes[0]
    uneven = make_series(
        "s", table().assign(date=table()["date"].where(table().index != 4, "2024-01-01 04:17")), None, None
    )
    assert len(uneven.values) == 50
    assert "not evenly spaced" in uneven.notes[0]
    times = pd.date_range("2024-01-01", periods=50, freq="ms").insert(0, pd.Timestamp("1970-01-01"))[:50]
    outlying = make_series("s", table().assign(date=times), None, None)  # of 1.7e12 milliseconds
    assert len(outlying.values) == 50
    assert "not evenly spaced" in outlying.notes[0]


@pytest.mark.parametrize("frequency", ["MS", "ME", "QS-FEB", "QE", "YS"])
def test_months_quarters_and_years_that_lack_become_gaps(frequency):
    whole = make_series("s", table(frequency=frequency), None, None)
    series = make_series("s", table(frequency=frequency).drop(index=[7, 47, 48]), None, None)
    np.testing.assert_array_equal(series.timestamps, whole.timestamps)
    assert np.isnan(series.values[[7, 47, 48]]).all()
    assert series.num_gaps == 6
    months = {"M": 1, "Q": 3, "Y": 12}[frequency[0]]
    assert series.notes == (f"Its timestamps lack 3 steps of {months} month(s), which are gaps now.",)
    assert series.following_timestamps(3) == whole.following_timestamps(3)
    assert whole.notes == ()


def test_months_go_on_by_their_day():
    times = pd.date_range("2024-01-15", periods=50, freq=pd.DateOffset(months=1)).astype(str)
    series = make_series("s", table(date=times).drop(index=[9]), None, None)
    assert (len(series.values), series.num_gaps) == (50, 2)
    assert series.following_timestamps(2) == ["2028-03-15", "2028-04-15"]
    day_first = pd.to_datetime(times).strftime("%d/%m/%Y")
    assert make_series("s", table(date=day_first).drop(index=[9]), None, None).num_gaps == 2
    first = pd.date_range("2020-01-01", periods=40, freq="MS")
    rows = table(40, date=first.strftime("%d/%m/%Y")).drop(index=[9])
    assert make_series("s", rows, None, None).following_timestamps(1) == ["2023-05-01"]


def test_months_without_a_grid_go_on_by_their_median_step():
    times = pd.DatetimeIndex(
        first
        for n, first in enumerate(pd.date_range("2020-01-01", periods=40, freq="MS"))
        if n in (0, 1, 3, 8, 12, 19, 27, 36)
    )
    series = make_series("s", table(8, date=times.astype(str)), None, None)
    assert "not evenly spaced" in series.notes[0]
    assert series.following_timestamps(1) == ["2023-06-03"]


@pytest.mark.parametrize(
    ("numbers", "following"),
    [
        (np.arange(1950, 2000), "2000-01-01"),
        (pd.date_range("2021-10-01", periods=50).strftime("%Y%m%d").astype(int), "2021-11-20"),
        (pd.date_range("2020-01", periods=50, freq="MS").strftime("%Y%m").astype(int), "2024-03-01"),
        (1_700_000_000 + 3600 * np.arange(50), "2023-11-17 00:13:20"),
        (1000 * (1_700_000_000 + 60 * np.arange(50)), "2023-11-14 23:03:20"),
        (pd.period_range("2020-01", periods=50, freq="M"), "2024-03-01"),
    ],
)
def test_numbers_and_periods_may_say_when(numbers, following):
    rows = table().drop(columns="date").assign(t=numbers)
    series = make_series("s", rows, "t", None)
    assert (series.columns, series.timestamp_column) == (["a", "b"], "t")
    assert series.following_timestamps(1) == [following]


def test_numbers_that_say_nothing_number_the_steps():
    rows = table().drop(columns="date").assign(time=np.arange(50))
    series = make_series("s", rows, None, None)
    assert (series.columns, series.timestamps, series.timestamp_column) == (["a", "b"], None, None)
    assert series.notes == ("Its column time holds numbers and no dates: steps are numbered.",)
    assert make_series("s", rows, None, ["a", "time"]).columns == ["a", "time"]
    for numbers in (rows["time"], *(2024010100 + rows["time"], 202401010000 + rows["time"]), _with_a_hole()):
        assert make_series("s", rows.assign(time=numbers), None, ["a"]).timestamps is None
        with pytest.raises(UserError, match=r"column time holds numbers and no dates; .* or none"):
            make_series("s", rows.assign(time=numbers), "time", None)
    for numbers in (202401 + rows["time"], 20240101 + rows["time"]):  # of which 32 of January is no day
        assert make_series("s", rows.assign(time=numbers), None, None).timestamps is None
        with pytest.raises(UserError, match=r"column time holds `\d+` in row \d+, which is no date with a year"):
            make_series("s", rows.assign(time=numbers), "time", None)
    years = rows.assign(time=1950 + rows["time"])
    assert make_series("s", years, None, None).timestamps is None
    assert make_series("s", years, "time", None).timestamps is not None


def _with_a_hole() -> pd.Series:
    return pd.Series([2000, None, *range(2002, 2050)], dtype="Int64")


def test_a_series_may_be_said_to_have_no_times():
    series = make_series("s", table(), "none", ["a"])
    assert (series.columns, series.timestamps, series.timestamp_column) == (["a"], None, "none")
    assert make_series("s", table().assign(time=range(50)), "none", None).columns == ["a", "b", "time"]
    assert make_series("s", table().drop(columns="date"), "none", None).columns == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"c": ["x"] * 50}, {}, "column c holds `x` in row 1, which is no number"),
        ({"b": [np.inf] * 50}, {}, "column b holds `inf` in row 1"),
        (
            {"b": [pd.NaT, pd.Timestamp("2024-01-01")] * 25},
            {},
            "column b holds `2024.* in row 2, .*; name it as --time",
        ),
        ({"b": [pd.Timedelta("1h")] * 50}, {}, "column b holds `0 days 01:00:00` in row 1, .*; mend it"),
        (
            {"b": pd.period_range("2024", periods=50, freq="D")},
            {},
            "column b holds `2024-01-01` in row 1, .*; name it",
        ),
        ({"b": [None] * 50}, {}, "column b is empty"),
        ({}, {"target_columns": ["z"]}, "s has no column z, which --target_columns .* its columns are date, a, b"),
        ({}, {"timestamp_column": "day"}, "s has no column day, which .* pass --timestamp_column none if"),
        ({}, {"timestamp_column": "a"}, "column a holds numbers and no dates"),
        ({}, {"target_columns": ["a", "a"]}, "name each column to forecast once"),
        ({"date": ["soon"] * 50}, {}, "column date holds `soon` in row 1, which is no date"),
        (
            {"date": ["Jan-15", "Feb-15"] * 25},
            {},
            "date holds `Jan-15` in row 1, which is no date with a year; .* none",
        ),
        ({"date": ["00:00", "1:00 pm"] * 25}, {}, "date holds `00:00` in row 1, which is no date with a year"),
        ({"date": ["2024-01-01 00:00", "12:30:15.5"] * 25}, {}, "date holds `12:30:15.5` in row 2, which is no date"),
        ({"b": ["1,5"] * 50}, {}, "column b holds `1,5` in row 1, .*; write decimals by points, and nothing between"),
    ],
)
def test_columns_that_cannot_be_read_are_named(change, options, message):
    options = {"timestamp_column": None, "target_columns": None, **options}
    with pytest.raises(UserError, match=message):
        make_series("s", table(**change), **options)


@pytest.mark.parametrize(("frequency", "following"), [("D", "2024-02-20"), ("MS", "2028-03-01")])
def test_dates_are_read_with_the_day_first_where_they_go_on_evenly_like_that(frequency, following):
    times = pd.date_range("2024-01-01", periods=50, freq=frequency)
    assert make_series("s", table(date=times.strftime("%d/%m/%Y")), None, None).following_timestamps(1) == [following]
    assert make_series("s", table(date=times.strftime("%m/%d/%Y")), None, None).following_timestamps(1) == [following]


@pytest.mark.parametrize("written", ["%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M"])
def test_hours_of_which_one_lacks_are_read_in_the_order_of_their_days(written):
    """Of the first twelve days of a month, which could be months."""
    times = pd.date_range("2024-02-01", periods=288, freq="h").strftime(written)
    series = make_series("s", table(288, date=times).drop(index=50), None, None)
    assert (len(series.values), series.num_gaps) == (288, 2)
    assert series.following_timestamps(1) == ["2024-02-13 00:00:00"]


@pytest.mark.parametrize("frequency", ["D", "MS", "B"])
@pytest.mark.parametrize(
    "written",
    [
        lambda time: time,
        lambda time: time.isoformat(),
        lambda time: time.to_pydatetime().replace(tzinfo=datetime.timezone(time.utcoffset())),
    ],
)
def test_days_are_those_of_the_place(frequency, written):
    """A day in spring has 23 hours there."""
    times = pd.date_range("2024-02-01", periods=90, freq=frequency, tz="Europe/Berlin")
    rows = table(90, date=[written(time) for time in times])
    for missing in ([], [5], [50]):
        series = make_series("s", rows.drop(index=missing), None, None)
        assert (len(series.values), series.num_gaps) == (90, 2 * len(missing))
        after = pd.date_range(times[-1], periods=2, freq=frequency)[1]
        assert series.following_timestamps(1) == [str(after.date())]


def test_days_of_the_place_may_have_an_odd_one():
    times = [f"2024-03-{day:02}T00:00+01:00" for day in range(20, 32)] + [
        f"2024-04-{day:02}T00:00+02:00" for day in range(1, 9)
    ]
    times[3] = "2024-03-23T01:00+01:00"
    assert make_series("s", table(20, date=times), None, None).following_timestamps(1) == ["2024-04-09 00:00:00"]


def test_days_of_one_distance_from_utc_keep_it():
    times = [f"2024-02-{day:02}T22:00:00Z" for day in range(1, 20)]
    assert make_series("s", table(19, date=times), None, None).following_timestamps(1) == ["2024-02-20 22:00:00+00:00"]


def test_time_goes_on_across_daylight_saving():
    times = pd.date_range("2024-03-30", periods=50, freq="h", tz="Europe/Berlin")
    series = make_series("s", table(date=[time.isoformat() for time in times]), None, None)
    assert series.following_timestamps(1) == ["2024-04-01 01:00:00+00:00"]
    assert not series.notes


@pytest.mark.parametrize(
    "text", ["date;a\n2024-01-01;1.5\n2024-01-02;2.5\n", "date;a\n2024-01-01;1,5\n2024-01-02;2,5\n", "a\n1,7\n2,8\n"]
)
def test_other_separators_than_commas_are_refused(tmp_path, text):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(UserError, match=r"more fields than the line of names|one column `date;a`; separate fields"):
        read_file(str(tmp_path / "s.csv"), None, None)


def test_dates_under_another_name_are_offered_as_such():
    with pytest.raises(UserError, match=r"column day holds .* in row 1, .*; name it as --timestamp_column"):
        make_series("s", table().rename(columns={"date": "day"}), None, None)


def test_timestamps_out_of_order_are_named():
    rows = table()
    with pytest.raises(UserError, match=r"timestamp of row 4, .*, is before that of the row above; give each"):
        make_series("s", rows.iloc[[0, 1, 3, 2, 4]], None, None)
    with pytest.raises(UserError, match=r"timestamp of row 3, .*, equals that of the row above"):
        make_series("s", rows.iloc[[0, 1, 1, 2]], None, None)


def test_files_that_are_not_there_or_no_tables_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_file(str(tmp_path / "none.csv"), None, None)
    (tmp_path / "s.xlsx").write_text("x")
    with pytest.raises(UserError, match=r"files of type `.xlsx` cannot be read; give .csv"):
        read_file(str(tmp_path / "s.xlsx"), None, None)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(UserError, match="cannot be read"):
        read_file(str(tmp_path / "empty.csv"), None, None)


def test_missing_values_need_a_word(tmp_path):
    table(a=[1.0] * 10 + [None] + [2.0] * 39).to_csv(tmp_path / "s.csv", index=False)
    first = r"lacks 1 values, the first one of a in time step 11 \(2024-01-01 10:00:00\). Fill them, or pass --mask"
    with pytest.raises(UserError, match=first):
        read_series(SeriesArguments(data_file=str(tmp_path / "s.csv")))
    table().drop(index=[7]).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(UserError, match=r"step 8 \(.* 07:00:00\). Its timestamps lack 1 steps of .* now. Fill them"):
        read_series(SeriesArguments(data_file=str(tmp_path / "rows.csv")))
    assert read_series(SeriesArguments(data_file=str(tmp_path / "s.csv"), mask_missing=True)).num_gaps == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction_length": [0]}, "--prediction_length is 0; it must be at least 1"),
        ({"prediction_length": [5, 5]}, "names a horizon twice"),
        ({"context_length": 0}, "--context_length is 0"),
        ({"task_name": "ili", "data_file": "x.csv"}, "--task_name and --data_file name several series"),
        ({"data_dir": "x"}, "--data_dir is where --task_name is read from"),
        ({"split_fractions": [0.5, 0.5, 0.5]}, "give three shares that make 1"),
        ({"task_name": "ili", "split_fractions": [0.5, 0.2, 0.3]}, "a public series has a split of its own"),
        ({"data_file": "x.csv", "dataset_config_name": "a"}, "--dataset_config_name: it is for --dataset_name"),
        ({"task_name": "ili", "data_dir": "x", "dataset_revision": "a"}, "nothing is read from the Hub here"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SeriesArguments(**options)


def test_the_synthetic_series_is_the_seed_s():
    first, second, other = make_synthetic(100, 0), make_synthetic(100, 0), make_synthetic(100, 1)
    assert np.array_equal(first.values, second.values)
    assert not np.array_equal(first.values, other.values)
    assert np.array_equal(make_synthetic(100, 0, None, ["c", "a"]).values, first.values[:, [2, 0]])
    assert make_synthetic(100, 0, "none").timestamps is None
    with pytest.raises(UserError, match=r"synthetic hours \(seed 0\) has no column z"):
        make_synthetic(100, 0, None, ["z"])


# Protocol


def test_splits_are_the_protocol_s():
    assert split_borders(17420, BENCHMARKS["etth1"], []) == {
        "train": range(8640),
        "validation": range(8640, 11520),
        "test": range(11520, 14400),
    }
    assert split_borders(69680, BENCHMARKS["ettm1"], [])["test"] == range(46080, 57600)
    # int(.7 N) and int(.2 N), the rest between them.
    assert split_borders(7588, BENCHMARKS["exchange"], []) == {
        "train": range(5311),
        "validation": range(5311, 6071),
        "test": range(6071, 7588),
    }
    with pytest.raises(UserError, match="ETTh1 has 99 rows, fewer than the protocol's 14,400"):
        split_borders(99, BENCHMARKS["etth1"], [])


@pytest.mark.parametrize(
    ("horizon", "train", "validation", "test"), [(96, 5120, 665, 1422), (192, 5024, 569, 1326), (720, 4496, 41, 798)]
)
def test_the_protocol_s_numbers_of_windows(horizon, train, validation, test):
    borders = split_borders(7588, BENCHMARKS["exchange"], [])
    sizes = {name: len(Windows(np.zeros((7588, 1)), part, 96, horizon)) for name, part in borders.items()}
    assert sizes == {"train": train, "validation": validation, "test": test}


# MSE/MAE, or MSE alone, at the four horizons.
PUBLISHED = """
ettm2 SKTformer .192/.283 .255/.324 .324/.364 .431/.433
ettm2 iTransformer .180/.264 .250/.309 .311/.348 .412/.407
ettm2 PatchTST .175/.259 .241/.302 .305/.343 .402/.400
ettm2 DLinear .193/.292 .284/.362 .369/.427 .554/.522
ettm2 FEDformer .203 .269 .325 .421
etth1 iTransformer .386/.405 .441/.436 .487/.458 .503/.491
etth1 PatchTST .414/.419 .460/.445 .501/.466 .500/.488
etth1 DLinear .386/.400 .437/.432 .481/.459 .519/.516
etth1 FEDformer .376/.415 .423/.446 .444/.462 .469/.492
etth2 iTransformer .297/.349 .380/.400 .428/.432 .427/.445
etth2 PatchTST .302/.348 .388/.400 .426/.433 .431/.446
etth2 DLinear .333/.387 .477/.476 .594/.541 .831/.657
exchange SKTformer .086/.204 .188/.292 .356/.433 .727/.669
exchange iTransformer .086/.206 .177/.299 .331/.417 .847/.691
exchange PatchTST .088/.205 .176/.299 .301/.397 .901/.714
exchange FEDformer .139 .256 .426 1.090
weather SKTformer .182/.262 .228/.306 .295/.355 .383/.418
weather iTransformer .174/.214 .221/.254 .278/.296 .358/.347
weather PatchTST .177/.218 .225/.259 .278/.297 .354/.348
weather FEDformer .217 .276 .339 .403
electricity SKTformer .218/.332 .259/.361 .267/.367 .293/.385
electricity iTransformer .148/.240 .162/.253 .178/.269 .225/.317
electricity DLinear .197/.282 .196/.285 .209/.301 .245/.333
electricity FEDformer .183 .195 .212 .231
traffic SKTformer .592/.352 .583/.343 .598/.346 .641/.397
traffic iTransformer .395/.268 .417/.276 .433/.283 .467/.302
traffic PatchTST .526/.347 .522/.332 .517/.334 .552/.352
traffic DLinear .650/.396 .598/.370 .605/.373 .645/.394
traffic FEDformer .562 .562 .570 .596
ili SKTformer 2.431/.997 2.287/.972 2.418/1.002 2.425/1.043
ili FEDformer 2.203 2.272 2.209 2.545
"""


def test_published_rows_are_complete():
    assert len(BENCHMARKS) == 9
    paper = [name for name, benchmark in BENCHMARKS.items() if PAPER in benchmark.published]
    assert paper == ["ettm2", "electricity", "exchange", "traffic", "weather", "ili"]
    assert all(len(row) == 4 for benchmark in BENCHMARKS.values() for row in benchmark.published.values())
    assert BENCHMARKS["exchange"].published[PAPER][3] == (0.727, 0.669)
    known = {
        (name, model.removesuffix(" (published)").removesuffix(" (paper)")): row
        for name, benchmark in BENCHMARKS.items()
        for model, row in benchmark.published.items()
    }
    printed = {
        tuple(line.split(maxsplit=2)[:2]): [tuple(map(float, pair.split("/"))) for pair in line.split()[2:]]
        for line in PUBLISHED.strip().splitlines()
    }
    assert known == printed
    ili = BENCHMARKS["ili"]
    figures = [ili.published_at(horizon, context)[PAPER]["mse"] for context in (36, 60) for horizon in ili.horizons]
    assert figures == [2.431, 2.287, 2.418, 2.425, 2.185, 2.155, 2.333, 2.018]
    assert list(ili.published_at(24, 60)) == [PAPER]
    assert BENCHMARKS["exchange"].published_at(96, 60) == {}
    assert BENCHMARKS["exchange"].published_at(96, 96)["FEDformer (published)"] == {"mse": 0.139}


def test_the_scale_is_the_training_part_s(caplog):
    series = make_series("s", table(100, b=[3.0] * 100), None, None)
    scaler, windows = make_parts(series, 5, 2)
    assert "s: b, constant in the part for training, is not scaled." in caplog.text
    assert scaler.mean == [34.5, 3.0]
    np.testing.assert_allclose(scaler.std, [np.arange(70).std(), 1.0])
    values = windows["train"].values
    np.testing.assert_allclose(values[:70, 0].mean(), 0, atol=1e-6)
    assert (values[:, 1] == 0).all()
    np.testing.assert_allclose(scaler.restore(scaler.apply(series)), series.values)


def test_values_without_a_finite_deviation_are_refused():
    with pytest.raises(UserError, match="s: a has values too large for a deviation; give it other units"):
        make_parts(make_series("s", table(100, a=np.arange(100) * 1e200), None, None), 5, 2)


def test_small_units_are_no_constants():
    series = make_series("s", table(100, a=1e-11 + 1e-13 * np.sin(np.arange(100)), b=[0.1] * 100), None, None)
    scaler, windows = make_parts(series, 5, 2)
    np.testing.assert_allclose(np.asarray(windows["train"].values[:70]).std(axis=0), [1, 0], atol=1e-6)
    assert scaler.std[1] == 1


def test_windows_are_all_there_is_of_a_part():
    series = make_series("s", table(50), None, None)
    scaler, parts = make_parts(series, 6, 4)
    steps = np.arange(50)
    expected = {"train": range(6, 32), "validation": range(35, 37), "test": range(40, 47)}
    for name, windows in parts.items():
        assert windows.origins.tolist() == list(expected[name])
        for number, origin in enumerate(expected[name]):
            window = windows[number]
            past, future = (scaler.restore(window[f"{when}_values"].numpy())[:, 0] for when in ("past", "future"))
            np.testing.assert_allclose(past, steps[origin - 6 : origin], atol=1e-4)
            np.testing.assert_allclose(future, steps[origin : origin + 4], atol=1e-4)
    assert make_parts(series, 6, 4, max_train_samples=3)[1]["train"].origins.tolist() == [6, 18, 31]


def test_gaps_are_masked_in_windows():
    values = make_series("s", table(50, a=[1.0] * 20 + [None] + [2.0] * 29), None, None)
    _, parts = make_parts(values, 6, 4)
    window = parts["train"][12]  # steps 12 .. 21
    assert window["past_observed_mask"].all()
    assert window["future_observed_mask"][:, 0].tolist() == [True, True, False, True]
    assert all(tensor.isfinite().all() for tensor in window.values())


@pytest.mark.parametrize(("steps", "part"), [(30, "validation"), (20, "train")])
def test_series_that_are_too_short_are_refused(steps, part):
    series = make_series("s", table(steps), None, None)
    with pytest.raises(UserError, match=f"the {part} part has .* time steps, and a context of 12 with a horizon of 4"):
        make_parts(series, 12, 4)


@pytest.mark.parametrize(("start", "part"), [(30, "validation"), (40, "test")])
def test_a_part_without_a_value_is_refused(start, part):
    gone = [1.0, 2.0] * (start // 2) + [None] * (50 - start)
    values = make_series("s", table(50, a=gone, b=gone), None, None)
    with pytest.raises(UserError, match=f"no value of the {part} part was observed"):
        make_parts(values, 6, 4)


def test_a_channel_that_begins_behind_the_training_part_is_named():
    late = make_series("s", table(50, b=[None] * 40 + [1.0] * 10), None, None)
    with pytest.raises(UserError, match=r"no value of b was observed in the part for training, .* with --target_col"):
        make_parts(late, 6, 4)
    whole = Scaler.fit(make_series("s", table(50), None, None), 35)
    assert len(make_windows(late, whole, SeriesArguments(), 6, 4)["train"])


# Baselines and metrics


def test_baselines_are_what_they_are_called():
    series = make_synthetic(400, 0)
    _, parts = make_parts(series, 30, 7)
    baselines = Baselines(parts, season=5, silent=True)
    origins = parts["test"].origins[:3]
    values = parts["test"].values
    for row, origin in enumerate(origins):
        assert torch.equal(baselines.forecast(LAST, origins)[row], values[origin - 1].expand(7, -1))
        repeated = values[[origin - 5 + step % 5 for step in range(7)]]
        assert torch.equal(baselines.forecast(SEASONAL, origins)[row], repeated)
    measured = baselines.measure("test")
    assert set(measured) == set(NAMES)
    forecasts = baselines.forecast(LINEAR, parts["test"].origins)
    future = torch.stack([window["future_values"] for window in parts["test"]])
    assert measured[LINEAR]["mse"] == pytest.approx(float((forecasts - future).square().mean()), rel=1e-5)
    assert measured[LINEAR]["mse"] < measured[LAST]["mse"]


def test_the_linear_baseline_finds_a_linear_rule():
    steps = np.arange(300)
    waves = np.stack([np.sin(steps / 3), np.cos(steps / 3)], axis=1)
    series = make_series("s", pd.DataFrame(waves, columns=["a", "b"]), None, None)
    _, parts = make_parts(series, 8, 5)
    assert Baselines(parts, 1, silent=True).measure("test")[LINEAR]["mse"] < 1e-6


def test_the_linear_baseline_is_held_back_as_is_best_on_validation(monkeypatch):
    noise = np.random.default_rng(0).normal(size=120)
    _, parts = make_parts(make_series("s", table(120, a=noise, b=noise[::-1]), None, None), 30, 5)

    def error(*penalties):
        monkeypatch.setattr(baselines_module, "_PENALTIES", penalties)
        return Baselines(parts, 1, silent=True).measure("validation")[LINEAR]["mse"]

    penalties = baselines_module._PENALTIES
    errors = [error(penalty) for penalty in penalties]
    assert error(*penalties) == min(errors) < 0.98 * errors[0]


def test_baselines_of_gaps_and_constants():
    rows = table(120, b=[3.0] * 120)
    rows.loc[100:104, "a"] = np.nan
    series = make_series("s", rows, None, None)
    _, parts = make_parts(series, 8, 5)
    measured = Baselines(parts, 4, silent=True).measure("test")
    assert all(np.isfinite(list(pair.values())).all() for pair in measured.values())


def test_metrics_weigh_values_alike():
    generator = np.random.default_rng(0)
    counts = np.full(70, 12)
    sums = generator.uniform(size=(70, 2)) * 12
    metrics = compute_metrics(type("", (), {"predictions": sums, "label_ids": counts})())
    assert metrics["mse"] == pytest.approx((sums[:, 0] / 12).mean())
    assert metrics["mae"] == pytest.approx((sums[:, 1] / 12).mean())
    assert metrics["score"] == pytest.approx(1 - metrics["mse"])
    assert metrics["legacy_mse"] == pytest.approx((sums[:64, 0] / 12).mean())
    full = compute_metrics(type("", (), {"predictions": sums[:64], "label_ids": counts[:64]})())
    assert (full["legacy_mse"], full["legacy_mae"]) == (full["mse"], full["mae"])
    assert "legacy_mse" not in compute_metrics(type("", (), {"predictions": sums[:9], "label_ids": counts[:9]})())


def test_a_season_longer_than_the_past_is_cut_to_it():
    _, parts = make_parts(make_synthetic(100, 0), 10, 5)
    origins = parts["train"].origins[:1]
    forecast = Baselines(parts, season=50, silent=True).forecast(SEASONAL, origins)
    assert torch.equal(forecast[0], parts["train"].values[:5])  # and nothing of the series' end


def make_gappy() -> tuple[np.ndarray, np.ndarray]:
    """A series of two channels with gaps, and the same with the last observed value in each, 0 before the first."""
    steps = np.arange(120)
    values = np.stack([np.sin(steps / 3) + 2, np.cos(steps / 5) - 1], axis=1)
    values[[0, 1, 30, 31, 50, 90, 110], 0] = np.nan
    filled = pd.DataFrame(values).ffill().fillna(0).to_numpy()
    return values, filled


def parts_of(values: np.ndarray, context: int = 8, horizon: int = 4) -> dict[str, Windows]:
    borders = split_borders(len(values), None, [0.7, 0.1, 0.2])
    return {name: Windows(values, part, context, horizon) for name, part in borders.items()}


def test_baselines_fill_gaps_and_count_what_was_observed(monkeypatch):
    monkeypatch.setattr(baselines_module, "_PENALTIES", (1e-4,))
    values, filled = make_gappy()
    gappy, whole = (Baselines(parts_of(each), 4, silent=True) for each in (values, filled))
    np.testing.assert_allclose(gappy.filled, filled, rtol=1e-6)
    torch.testing.assert_close(gappy.weights, whole.weights)
    windows = parts_of(values)["test"]
    errors = [values[origin : origin + 4] - filled[origin - 1] for origin in windows.origins]
    assert gappy.measure("test")[LAST]["mse"] == pytest.approx(np.nanmean(np.square(errors)), rel=1e-5)
    assert gappy.measure("test")[LAST]["mae"] == pytest.approx(np.nanmean(np.abs(errors)), rel=1e-5)


def test_series_are_told_apart_by_their_names_too():
    series = make_series("s", table(50), None, None)
    other = make_series("s", table(50).rename(columns={"a": "b", "b": "a"}), None, None)
    assert fingerprint_series(series) != fingerprint_series(other)


def test_small_units_about_a_large_mean_are_constants():
    series = make_series("s", table(100, a=1e3 + 1e-10 * (np.arange(100) % 2)), None, None)
    assert Scaler.fit(series, 70).std[0] == 1


def test_time_goes_on_as_it_was_of_late():
    rows = table(200)
    rows["date"] = [*pd.date_range("2020-01-01 00:07", periods=100, freq="37min").astype(str), *rows["date"][100:]]
    series = make_series("s", rows, None, None, rows_are_steps=True)
    assert series.following_timestamps(1) == ["2024-01-09 08:00:00"]


def test_a_season_that_is_cut_repeats_and_reads_no_future():
    baselines = Baselines(parts_of(np.arange(200.0)[:, None], context=3, horizon=10), season=50, silent=True)
    forecast = baselines.forecast(SEASONAL, np.array([3]))
    assert forecast[0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_the_offset_of_the_linear_baseline_is_not_held_back(monkeypatch):
    monkeypatch.setattr(baselines_module, "_PENALTIES", (1.0,))
    values = np.random.default_rng(0).normal(3, 1, (200, 1))
    parts = parts_of(values)
    baselines = Baselines(parts, 1, silent=True)
    windows = parts["train"]
    future = torch.stack([windows[n]["future_values"] for n in range(len(windows))])
    errors = baselines.forecast(LINEAR, windows.origins) - future
    assert errors.mean(dim=0).abs().max() < 1e-4
