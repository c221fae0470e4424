"""Tables of runs, and what is made of them."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

import compare_pretraining
import measure_fine_tuning
import measure_scaling
from experiments.arguments import UserError
from experiments.benchmark import measurement
from experiments.benchmark.measurement import median_ratio, peak_memory, time_interleaved
from experiments.results import describe_environment, format_origin
from experiments.runs import Run, execute_runs, read_runs


def test_runs_are_every_line_with_every_seed(tmp_path):
    path = tmp_path / "runs.txt"
    path.write_text("# a comment\n--run_name a --x 1\n\n--run_name b --y 'two words'  # why\n")
    runs = read_runs(path, [3, 4], tmp_path / "out")
    assert [run.folder.name for run in runs] == ["a-3", "b-3", "a-4", "b-4"]
    assert runs[1].arguments == ("--run_name", "b", "--y", "two words", "--seed", "3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--x 1\n", "line 1: every run needs a --run_name"),
        ("--run_name a\n--run_name a\n", "line 2"),
        ("--x --run_name\n", "line 1"),
        ("# nothing\n", "names no run"),
    ],
)
def test_runs_without_a_name_of_their_own_are_refused(tmp_path, text, message):
    (tmp_path / "runs.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        read_runs(tmp_path / "runs.txt", [0], tmp_path)


def test_missing_runs_are_explained(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_runs(tmp_path / "runs.txt", [0], tmp_path)


SCRIPT = """
import sys
from functools import partial
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir(exist_ok=True)
if "--fail" in sys.argv:
    sys.exit("it is broken")
with (folder / "count").open("a") as file:
    file.write("x")
(folder / "done").touch()
"""


def test_finished_runs_are_not_run_again_and_failures_name_their_log(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runs = [Run("a", (), tmp_path / "out" / "a"), Run("b", (), tmp_path / "out" / "b")]
    execute_runs(script, runs[:1], [], "done")
    execute_runs(script, runs, [], "done")
    assert [(run.folder / "count").read_text() for run in runs] == ["x", "x"]
    with pytest.raises(UserError, match=r"c failed \(it is broken\).*c\.log"):
        execute_runs(script, [Run("c", ("--fail",), tmp_path / "out" / "c")], [], "done")


def test_comparison_writes_a_table_a_picture_and_json(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the number {n} follows the number {n - 1} ." for n in range(1, 900)))
    recipe, runs = tmp_path / "recipe.yaml", tmp_path / "runs.txt"
    flags = {
        **{"max_seq_length": 16, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "full_blocks_only": True},
        **{"per_device_train_batch_size": 4, "learning_rate": 1e-3, "use_cpu": True, "save_strategy": "no"},
        "cache_dir": str(tmp_path / "cache"),
    }
    recipe.write_text(yaml.safe_dump(flags))
    runs.write_text("--run_name ours\n--run_name BERT --model_type bert\n")
    argv = [
        *("compare", "--train_file", text, "--validation_file", text, "--data_name", "numbers", "--runs", runs),
        *("--recipe_of_runs", recipe, "--vocab_size", 120, "--seeds", 0, 1),
        *("--output_dir", tmp_path / "out", "--results_dir", tmp_path / "results"),
    ]
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    compare_pretraining.main()
    results = json.loads((tmp_path / "results" / "pretraining.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["ours", "BERT"]
    for row in results["rows"]:
        assert len(row["eval_losses"]) == 2
        assert row["eval_loss"] == pytest.approx(sum(row["eval_losses"]) / 2)
        assert row["step_time_ms"] > 0
    table = (tmp_path / "results" / "pretraining.md").read_text()
    assert f"| BERT | {results['rows'][1]['parameters']:,} |" in table
    assert (tmp_path / "results" / "pretraining.png").read_bytes().startswith(b"\x89PNG")
    with monkeypatch.context() as context:
        context.setattr(sys, "argv", [*map(str, argv), "--recipe_of_runs", str(tmp_path / "other.yaml")])
        (tmp_path / "other.yaml").write_text(yaml.safe_dump({**flags, "learning_rate": 3e-3}))
        with pytest.raises(UserError, match="ours-0 was run with another learning_rate"):
            compare_pretraining.main()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/metrics.json")}
    compare_pretraining.main()
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/metrics.json")}


def make_allocation(mebibytes):
    return lambda: bytearray(b"x") * (mebibytes * 2**20)


def fail_to_make():
    raise RuntimeError("no such model")


def test_results_name_the_settings_of_the_allocator(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    origin = format_origin("benchmark.py", describe_environment(), ["abc"])
    assert origin.startswith("Written by `scripts/benchmark.py` at abc: ")
    assert origin.endswith("thread(s), MALLOC_TRIM_THRESHOLD_=1.")


def test_memory_is_what_a_step_adds():
    small, large = peak_memory(make_allocation, 50), peak_memory(make_allocation, 250)
    assert (large - small) / 2**20 == pytest.approx(200, abs=20)
    with pytest.raises(RuntimeError, match="no such model"):
        peak_memory(fail_to_make)


@pytest.mark.parametrize(("short_step", "turn"), [(0.0, ["a", "b"]), (1000.0, ["a", "a", "b", "b"])])
def test_times_are_taken_in_turn_and_short_steps_twice(monkeypatch, short_step, turn):
    monkeypatch.setattr(measurement, "SHORT_STEP_S", short_step)
    order: list[str] = []
    times = time_interleaved({name: partial(order.append, name) for name in "ab"}, rounds=3, warmup=1)
    assert order == ["a", "b"] + turn * 3  # no time is known yet in the first round
    assert [len(rounds) for rounds in times.values()] == [3, 3]
    fast, slow = [{"wall": 1.0, "cpu": 1.0}] * 3, [{"wall": w, "cpu": 3.0} for w in (2.0, 9.0, 2.5)]
    assert median_ratio(slow, fast) == 2.5
    assert median_ratio(slow, fast, "cpu") == 3.0


def test_scaling_table(tmp_path, monkeypatch):
    argv = ["measure", "--lengths", "16", "32", "--tokens_per_batch", "64", "--rounds", "2", "--results_dir", tmp_path]
    monkeypatch.setattr(sys, "argv", list(map(str, argv)))
    measure_scaling.main()
    results = json.loads((tmp_path / "scaling.json").read_text())
    assert [(row["length"], row["batch_size"]) for row in results["rows"]] == [(16, 4), (32, 2)]
    assert results["rows"][0]["time_ratio"] == 1
    assert "| 32 | 2 |" in (tmp_path / "scaling.md").read_text()
    assert (Path(tmp_path) / "scaling.png").stat().st_size > 5000


def test_fine_tuning_is_measured_beside_a_shorter_model(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        ["measure_fine_tuning.py", "--presets", "sktformer-tiny", "--length", "8", "--trained_length", "32",
         "--batch_size", "2", "--rounds", "2", "--results_dir", str(tmp_path)],
    )  # fmt: skip
    measure_fine_tuning.main()
    results = json.loads((tmp_path / "fine_tuning.json").read_text())
    (row,) = results["rows"]
    assert row["preset"] == "sktformer-tiny"
    assert 0 < row["time_ratio"] < 100
    assert f"| {row['time_ratio']:.2f} |" in (tmp_path / "fine_tuning.md").read_text()
    for flags, message in ((["--presets", "huge"], "--presets huge"), (["--length", "600"], "--length 600")):
        monkeypatch.setattr(sys, "argv", ["measure_fine_tuning.py", *flags])
        with pytest.raises(UserError, match=message):
            measure_fine_tuning.main()
