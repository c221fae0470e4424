"""The speed benchmark: failures become rows, files survive interruption, a model is compared with itself."""

import functools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import matplotlib.pyplot as plt
import pytest

import benchmark
from benchmark import BenchmarkArguments
from experiments.arguments import UserError, parse_args
from experiments.benchmark import cells, measurement, report
from experiments.benchmark.counts import count_step
from experiments.benchmark.measurement import OUT_OF_MEMORY, Probe
from experiments.benchmark.models import Setting, Workload
from experiments.plots import open_figure, plot_benchmark


RESULTS = Path(__file__).parents[2] / "model_cards" / "results"
count_once = functools.cache(count_step)  # the same rows are made by many tests
WORKLOAD = Workload("sktformer", "lra", 1024, 1024, 4, "training", 0.0)


def test_ratios_are_taken_in_each_round():
    own = cells.summarise([{"wall": wall, "cpu": 2 * wall} for wall in (1.0, 10.0, 2.0)], Probe(2**21, 0.1))
    baseline = cells.summarise([{"wall": wall, "cpu": wall} for wall in (3.0, 20.0, 8.0)], Probe(2**20, 0.1))
    row, other = {"reason": None, "multiply_adds": 3, **own}, {"reason": None, "multiply_adds": 6, **baseline}
    assert (own["step_time_ms"], own["peak_memory_mib"]) == (2000.0, 2.0)
    assert list(cells.compare(row, other).values()) == [3.0, 1.5, 2.0, 2.0, [2.0, 4.0]]
    # What was not measured has no ratio, what was not counted no expected one.
    assert list(cells.compare(row, {"reason": "over 60 s", "multiply_adds": 6}).values()) == [None, None, 2.0, None]
    assert cells.compare(row, {"reason": "not a multiple of 64"})["expected_speed_ratio"] is None


def test_a_busy_machine_is_said():
    row = {"reason": None, "step_time_ms": 100.0, "step_cpu_time_ms": 100.0}
    section = {"key": {"device": "cpu"}, "environment": {"threads": 2}, "rows": [{"reason": "over 60 s"}, row]}
    assert "50%" in report.busy_machine_warning(section)[0]
    assert report.busy_machine_warning({**section, "environment": {"threads": 1}}) == []
    assert report.busy_machine_warning({**section, "key": {"device": "cuda"}}) == []


def test_what_was_too_much_is_not_tried_on_longer_inputs():
    def reason(length, **changes):
        earlier = {**vars(WORKLOAD), "length": 512, "positions": 512, "reason": None, "step_time_ms": 30_000.0}
        return cells.reason_from_shorter([earlier | changes], replace(WORKLOAD, length=length, positions=length), 60.0)

    assert reason(1024) is None
    assert reason(2048) == "over 60 s"
    assert reason(1024, reason=OUT_OF_MEMORY) == OUT_OF_MEMORY
    assert reason(1024, reason="not a multiple of 64") is None
    assert reason(2048, model="fnet") is None
    assert cells.reason_from_shorter([], WORKLOAD, 60.0) is None


class QuickBenchmark:
    """Runs the script in a folder with steps that do nothing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.made: list[tuple[str, int]] = []  # models and lengths of the last run
        self.fail_at: tuple[str, int] | None = None
        self.error: BaseException = RuntimeError("Kernel | is missing. Get one.")
        self.seconds_per_position: float | None = None  # by default every step takes as long

    def prepare_turn(self, workload, setting, warmup):
        self.made.append((workload.model, workload.length))
        if self.fail_at == (workload.model, workload.length):
            raise self.error
        seconds = 0.01 if self.seconds_per_position is None else self.seconds_per_position * workload.positions
        return lambda: {"wall": seconds, "cpu": seconds}

    def run(self, *flags: str, name: str) -> list[dict]:
        argv = ["benchmark.py", "--device", "cpu", "--rounds", "2", "--results_dir", str(self.folder), *flags]
        self.monkeypatch.setattr(sys, "argv", argv)
        self.made.clear()
        benchmark.main()
        return json.loads((self.folder / f"{name}.json").read_text())["sections"]

    def __call__(self, *flags: str) -> list[dict]:
        lengths = () if "--lengths" in flags else ("--lengths", "64", "100")
        common = ["--models", "bert-sdpa", "nystromformer", "--num_layers", "1", "--modes", "training"]
        return self.run(*common, *lengths, "--dropout", "0", *flags, name="speed")


@pytest.fixture
def quick(monkeypatch, tmp_path):
    run = QuickBenchmark(tmp_path, monkeypatch)
    monkeypatch.setattr(cells, "count_step", count_once)
    monkeypatch.setattr(cells, "prepare_turn", run.prepare_turn)
    monkeypatch.setattr(cells, "probe_step", lambda *arguments: Probe(2**20, 0.01))
    return run


def test_tables_and_pictures_are_written(quick):
    (section,) = quick("--lengths", "64", "128")
    assert section["finished"]
    assert [(row["model"], row["length"], row["rounds"]) for row in section["rows"]] == [
        ("bert-sdpa", 64, 2),
        ("nystromformer", 64, 2),
        ("bert-sdpa", 128, 2),
        ("nystromformer", 128, 2),
    ]
    text = (quick.folder / "speed.md").read_text()
    assert "| model         | 64       | 128      |" in text
    assert "| BERT (SDPA)   | 1 (1.00) | 1 (1.00) |" in text  # MiB
    assert "- Nyströmformer: " in text
    assert "- Longformer: " not in text
    (picture,) = quick.folder.glob("*.png")
    assert f"]({picture.name})" in text
    assert picture.stat().st_size > 10_000


def test_a_picture_is_there_as_a_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError), open_figure(tmp_path / "curve.png", "a model"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_failures_become_values_of_the_table(quick):
    quick.fail_at = ("bert-sdpa", 64)
    (section,) = quick()
    assert {(row["model"], row["length"]): row["reason"] for row in section["rows"]} == {
        ("bert-sdpa", 64): "Kernel / is missing",
        ("bert-sdpa", 100): None,
        ("nystromformer", 64): None,
        ("nystromformer", 100): None,
    }
    (row,) = [row for row in section["rows"] if (row["model"], row["length"]) == ("nystromformer", 64)]
    assert row["speed_ratio"] is None
    assert "| BERT (SDPA)   | Kernel / is missing | " in (quick.folder / "speed.md").read_text()


def test_a_step_that_fails_later_becomes_a_value_too(quick, monkeypatch):
    def fail():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    turn = quick.prepare_turn
    monkeypatch.setattr(
        cells, "prepare_turn", lambda work, *others: fail if work.model == "nystromformer" else turn(work, *others)
    )
    (section,) = quick()
    assert {row["reason"] for row in section["rows"] if row["model"] == "nystromformer"} == {OUT_OF_MEMORY}
    assert {row["reason"] for row in section["rows"] if row["model"] == "bert-sdpa"} == {None}


def test_an_interrupted_run_goes_on_where_it_was_cut(quick):
    quick.fail_at, quick.error = ("nystromformer", 100), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        quick()
    assert "Unfinished" in (quick.folder / "speed.md").read_text()
    quick.fail_at = None
    (section,) = quick()
    assert quick.made == [("bert-sdpa", 100), ("nystromformer", 100)]
    assert len(section["rows"]) == 4
    assert "Unfinished" not in (quick.folder / "speed.md").read_text()
    quick()  # finished: measured anew
    assert len(quick.made) == 4


def test_what_is_finished_stays_until_it_is_measured_anew(quick):
    (finished,) = quick()
    (picture,) = quick.folder.glob("*.png")
    drawn = picture.read_bytes()
    quick.fail_at, quick.error = ("nystromformer", 100), KeyboardInterrupt()
    for flags in ((), ("--rounds", "3")):
        with pytest.raises(KeyboardInterrupt):
            quick(*flags)
        unfinished, stays = json.loads((quick.folder / "speed.json").read_text())["sections"]
        assert stays == finished
        assert not unfinished["finished"]
        assert picture.read_bytes() == drawn
    quick.fail_at = None
    quick.made.clear()
    (section,) = quick("--rounds", "3")
    assert section["finished"]
    assert quick.made == [("bert-sdpa", 100), ("nystromformer", 100)]  # 64 tokens were there


def test_where_results_cannot_be_written_is_found_before_the_work(quick):
    file = quick.folder.parent / "file"
    file.write_text("x")
    for place in (file, file / "x"):
        with pytest.raises(UserError, match=r"--results_dir .* cannot be written \(.*\); choose another one"):
            quick("--results_dir", str(place))
    assert not quick.made


def test_an_interrupted_run_of_other_flags_is_measured_anew(quick):
    quick.fail_at, quick.error = ("nystromformer", 100), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        quick()
    quick.fail_at = None
    (section,) = quick("--warmup", "1")
    assert len(quick.made) == len(section["rows"]) == 4


def test_sections_are_merged_and_replaced(quick):
    quick()
    with pytest.raises(UserError, match="--merge"):
        quick("--batch_size", "2")
    assert [entry["key"]["batch_size"] for entry in quick("--batch_size", "2", "--merge")] == [32, 2]
    sections = quick("--merge", "--lengths", "64", "100", "128")
    assert [(entry["key"]["batch_size"], len(entry["rows"])) for entry in sections] == [(32, 6), (2, 4)]
    text = (quick.folder / "speed.md").read_text()
    assert text.index("## LRA model, 1 layer, batch 32") < text.index("## LRA model, 1 layer, batch 2,")
    assert len(list(quick.folder.glob("*.png"))) == 2


@pytest.mark.parametrize(
    ("flags", "lost"),
    [
        (["--lengths", "64", "200"], "--lengths 100"),
        (["--models", "bert-sdpa"], "--models nystromformer"),
        (["--modes", "inference", "--merge"], "--modes training"),
    ],
)
def test_rows_of_the_same_settings_are_not_lost(quick, flags, lost):
    before = quick()
    with pytest.raises(UserError, match=f"holds results of {lost} of these settings; name them too"):
        quick(*flags)
    assert json.loads((quick.folder / "speed.json").read_text())["sections"] == before


def test_what_was_planned_and_not_measured_holds_nobody_up(quick):
    quick.fail_at, quick.error = ("bert-sdpa", 100), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        quick()
    (section,) = quick("--lengths", "64")
    assert section["finished"]
    assert {row["length"] for row in section["rows"]} == {64}


def test_published_results_can_be_merged_with(quick):
    shutil.copy(RESULTS / "speed.json", quick.folder)
    published = json.loads((quick.folder / "speed.json").read_text())["sections"]
    sections = quick("--merge")
    assert [entry["rows"] for entry in sections[:-1]] == [entry["rows"] for entry in published]
    with pytest.raises(UserError, match="holds results of --lengths 512 1024 2048 4096 of these settings"):
        quick("--merge", "--num_layers", "2", "--batch_size", "4", "--dropout", "0", "0.1", "--lengths", "64")
    text = (quick.folder / "speed.md").read_text()
    for words in ("expected from counted multiply-adds", "## LRA model, 2 layers, batch 4, float32, CPU"):
        assert words in text
    assert " 8.94 (7.99, 6.41-8.05) " in text
    assert "## As the paper has it" in text
    assert re.search(r"\| SKTformer +\| 32.2 \(1.35\) +\| 20.4 \(2.62\) ", text)


@pytest.mark.parametrize(
    ("compile", "device", "known"), [(False, "cpu", True), (True, "cpu", False), (True, "cuda", True)]
)
def test_memory_is_known_but_of_compiled_steps_on_processors(monkeypatch, compile, device, known):
    monkeypatch.setattr(measurement, "run_alone", lambda *arguments: Probe(2**20, 0.01))
    probe = cells.probe_step(WORKLOAD, Setting(1, "float32", compile, device))
    assert probe == Probe(2**20 if known else None, 0.01)


def test_unknown_memory_is_neither_drawn_nor_in_a_table(quick, monkeypatch):
    monkeypatch.setattr(cells, "probe_step", lambda *arguments: Probe(None, 0.01))
    drawn = []
    monkeypatch.setattr(report, "plot_benchmark", lambda curves, path, title: drawn.append(curves))
    quick("--compile")
    assert {point[2] for models in drawn[-1].values() for points in models.values() for point in points} == {None}
    text = (quick.folder / "speed.md").read_text()
    assert "Memory is not measured" in text
    assert "![Time against length" in text
    assert "Peak memory of a step" not in text


def test_a_picture_without_memory_has_one_panel(tmp_path):
    sizes = []
    for memory in (1.0, None):
        plot_benchmark({"Training": {"a": [(64, 1.0, memory), (128, 2.0, memory)]}}, tmp_path / "a.png", "speed")
        sizes.append(plt.imread(tmp_path / "a.png").shape[1])
    assert sizes[1] < 0.8 * sizes[0]


def test_every_section_has_its_own_command(quick):
    quick()
    quick("--batch_size", "2", "--merge")
    text = (quick.folder / "speed.md").read_text()
    first, second = text.split("## LRA model, 1 layer, batch ")[1:]
    assert "--batch_size" not in first
    assert "--dropout 0 --batch_size 2 --merge\n```" in second
    assert first.count("Written by") == second.count("Written by") == 1


def test_results_stay_in_the_folder_of_runs_unless_told_otherwise():
    (arguments,) = parse_args([BenchmarkArguments], [])
    assert arguments.results_dir == "runs/benchmark"


def test_several_sizes_stand_below_one_another(quick):
    (section,) = quick("--size", "tiny", "lra", "--lengths", "64")
    assert section["key"]["size"] == ["tiny", "lra"]
    text = (quick.folder / "speed.md").read_text()
    assert text.index("### tiny preset: Training, dropout 0") < text.index("### LRA model: Training, dropout 0")


def test_lengths_are_compared_at_the_same_number_of_tokens(quick):
    quick.seconds_per_position = 0.01 / 32
    flags = ["--size", "tiny", "--tokens_per_batch", "256", "--lengths", "32", "64", "--dropout", "0.1"]
    (section,) = quick.run(*flags, name="scaling")
    assert quick.made == [("sktformer", 32), ("sktformer", 64)] * 2  # both lengths in turn, in training and inference
    rows = [row for row in section["rows"] if row["mode"] == "training"]
    assert [(row["length"], row["positions"], row["batch_size"]) for row in rows] == [(32, 32, 8), (64, 64, 4)]
    assert [row["memory_ratio"] for row in rows] == [1.0, 1.0]
    assert [row["speed_ratio"] for row in rows] == [1.0, 0.5]
    text = (quick.folder / "scaling.md").read_text()
    assert "# Step time and memory against length" in text
    assert "## tiny preset, 2 layers, 256 tokens, float32, CPU, dropout 0.1" in text
    assert "in brackets the multiple of the shortest length's speed" in text
    assert re.search(r"\| SKTformer \| 100 \(1\.00\) +\| 50 \(0\.50\)\S* +\|", text)
    (picture,) = quick.folder.glob("scaling*.png")
    assert f"]({picture.name})" in text
    assert picture.stat().st_size > 10_000


def test_short_inputs_are_compared_with_a_model_of_their_length(quick):
    quick.seconds_per_position = 0.01 / 64
    flags = ["--size", "tiny", "mini", "--made_for", "64", "--padded", "--lengths", "16", "32", "--modes", "training"]
    (section,) = quick.run(*flags, "--dropout", "0", name="short_inputs")
    rows = section["rows"]
    assert [(row["size"], row["length"], row["positions"]) for row in rows] == [
        (size, length, positions) for length in (16, 32) for size in ("tiny", "mini") for positions in (length, 64)
    ]
    assert [row["speed_ratio"] for row in rows] == [1.0, 0.25] * 2 + [1.0, 0.5] * 2
    text = (quick.folder / "short_inputs.md").read_text()
    assert "tiny preset and mini preset, batch 32, made for 64 tokens, padded" in text
    assert "### mini preset: Training, dropout 0" in text
    assert re.search(r"\| SKTformer, made for 64 \| 100 \(0\.25\)\S* +\| 100 \(0\.50\)\S* +\|", text)
    assert not list(quick.folder.glob("*.png"))


def test_steps_are_really_taken_in_their_own_processes(tmp_path, monkeypatch):
    alone = Mock(wraps=measurement.run_alone)
    monkeypatch.setattr(measurement, "run_alone", alone)
    flags = ["--made_for", "32", "--padded", "--lengths", "16", "--modes", "training", "--dropout", "0"]
    (section,) = QuickBenchmark(tmp_path, monkeypatch).run(
        *flags, "--batch_size", "2", "--warmup", "0", "--rounds", "1", name="short_inputs"
    )
    assert [row["reason"] for row in section["rows"]] == [None, None]
    assert all(row["step_time_ms"] > 0 for row in section["rows"])
    assert alone.call_count == 2 * (1 + 1)  # a probe and a round of each


@pytest.mark.parametrize("text", ['{"rows": []}', '{"sections": [{"key": {}}]}', "{"])
def test_results_of_another_script_are_left_alone(quick, text):
    (quick.folder / "speed.json").write_text(text)
    with pytest.raises(UserError, match="no results of this script"):
        quick()


@pytest.mark.parametrize(
    "flags",
    [
        ["--models", "gpt"],
        ["--modes", "testing"],
        ["--size", "huge"],
        ["--lengths", "8"],
        ["--batch_size", "0"],
        ["--num_layers", "0"],
        ["--dropout", "1"],
        ["--rounds", "0"],
        ["--warmup", "-1"],
        ["--time_limit_s", "0"],
        ["--time_limit_s", "nan"],
        ["--compile", "--count"],
        ["--rounds", "3", "--count"],
        ["--device", "cpu", "--count"],
        ["--tokens_per_batch", "1000"],
        ["--tokens_per_batch", "512", "--lengths", "512", "--batch_size", "2"],
        ["--tokens_per_batch", "-512", "--lengths", "512"],
        ["--models", "fnet", "--made_for", "32768"],
        ["--made_for", "512"],
        ["--padded"],
        ["--count", "--made_for", "32768"],
        ["--count", "--modes", "inference"],
        ["--count", "--dropout", "0.1", "0.3"],
        ["--count", "--num_layers", "1"],
        ["--dropout", "0.3", "--modes", "inference"],
    ],
)
def test_mistakes_are_said_in_one_line(flags):
    with pytest.raises(UserError, match=flags[0]) as error:
        parse_args([BenchmarkArguments], flags)
    assert "\n" not in str(error.value)


def test_slow_steps_take_part_in_fewer_rounds(quick, monkeypatch):
    monkeypatch.setattr(
        cells, "probe_step", lambda work, *_: Probe(2**20, 90.0 if work.model == "bert-sdpa" else 0.01)
    )
    (section,) = quick("--rounds", "6", "--time_limit_s", "30", "--lengths", "64")
    assert {row["model"]: row["rounds"] for row in section["rows"]} == {"bert-sdpa": 2, "nystromformer": 6}
    assert any("medians over 2 to 6 interleaved rounds" in line for line in report.format_section(section, "speed"))


def test_an_interrupted_run_of_another_machine_is_measured_anew_and_one_of_another_commit_goes_on(quick, monkeypatch):
    machine = {"device": "one", "threads": 1, "commit": "abc", "python": "3", "torch": "2", "transformers": "5"}
    monkeypatch.setattr(report, "describe_environment", lambda device: machine)
    quick.fail_at, quick.error = ("nystromformer", 100), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        quick()
    shutil.copy(quick.folder / "speed.json", quick.folder / "kept")
    quick.fail_at = None
    machine = machine | {"commit": "def"}
    (section,) = quick()
    assert (len(quick.made), section["commits"]) == (2, ["abc", "def"])
    shutil.copy(quick.folder / "kept", quick.folder / "speed.json")
    machine = machine | {"device": "another"}
    quick()
    assert len(quick.made) == 4


def test_a_step_may_take_most_of_the_memory_there_is(monkeypatch):
    run_alone = Mock(return_value=Probe(1, 0.1))
    monkeypatch.setattr(measurement, "run_alone", run_alone)
    monkeypatch.setattr(cells.psutil, "virtual_memory", lambda: type("", (), {"available": 1000})())
    for device in ("cpu", "cuda"):
        cells.probe_step(WORKLOAD, Setting(1, "float32", False, device))
    assert [call.args[2] for call in run_alone.call_args_list] == [900, None]


def test_the_longest_of_the_shorter_inputs_tells_what_is_too_much():
    def reason(*rows):
        earlier = [
            {**vars(WORKLOAD), "step_time_ms": 1.0, "length": n, "positions": n, "reason": why} for n, why in rows
        ]
        return cells.reason_from_shorter(earlier, replace(WORKLOAD, length=2048, positions=2048), 60.0)

    assert reason((512, None), (1024, OUT_OF_MEMORY)) == OUT_OF_MEMORY
    assert reason((512, measurement.KILLED)) == measurement.KILLED
