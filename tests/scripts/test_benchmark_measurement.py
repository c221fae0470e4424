"""Time and memory: rounds take turns, processes are their own, failures are said in a few words."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from experiments.benchmark import measurement, profile
from experiments.benchmark.counts import count_operations
from experiments.benchmark.measurement import (
    MAX_CALLS,
    OUT_OF_MEMORY,
    StepFailure,
    median_ratio,
    median_times,
    probe_memory,
    run_alone,
    time_interleaved,
)
from experiments.benchmark.models import Setting, Workload, build_config
from modeling_sktformer import folded_attention, folded_stem


def test_slow_steps_take_part_in_fewer_rounds():
    calls: list[str] = []
    times = time_interleaved({name: partial(calls.append, name) for name in "AB"}, 3, warmup=2, fewer_rounds={"B": 1})
    # From its second turn on a step is known to be short, and taken once more before it counts.
    assert "".join(calls) == "A" + "AAB" + "AABB" + "AA" + "AA"
    assert [len(times[name]) for name in "AB"] == [3, 1]


@pytest.mark.parametrize(("short_step", "turn"), [(0.0, "ab"), (1000.0, "aabb")])
def test_times_are_taken_in_turn_and_short_steps_twice(monkeypatch, short_step, turn):
    monkeypatch.setattr(measurement, "SHORT_STEP_S", short_step)
    order: list[str] = []
    times = time_interleaved({name: partial(order.append, name) for name in "ab"}, rounds=3, warmup=1)
    assert "".join(order) == "ab" + turn * 3  # no time is known yet in the first round
    assert [len(rounds) for rounds in times.values()] == [3, 3]


def test_ratios_are_taken_in_each_round():
    fast, slow = [{"wall": 1.0, "cpu": 1.0}] * 3, [{"wall": w, "cpu": 3.0} for w in (2.0, 9.0, 2.5)]
    assert median_ratio(slow, fast) == 2.5
    assert median_ratio(slow, fast, "cpu") == 3.0
    assert median_ratio(slow, fast[:1]) == 2.0  # a slow step took part in the first round alone


def test_steps_that_fail_leave_the_others_in_turn():
    def fail():
        raise RuntimeError("no | kernel. Sorry.")

    steps = {"good": lambda: None, "bad": fail}
    failures: dict[str, str | None] = {"good": None}
    times = time_interleaved(steps, 2, failures=failures)
    assert failures == {"good": None, "bad": "no / kernel"}
    assert [len(times[name]) for name in ("good", "bad")] == [2, 0]
    assert set(steps) == {"good"}
    with pytest.raises(RuntimeError, match="kernel"):
        time_interleaved({"bad": fail}, 2)


def allocate(num_bytes):
    """For the process that measures memory."""
    return lambda: torch.ones(num_bytes, dtype=torch.uint8)


def make_failure():
    raise ValueError("unknown scheme")


def test_memory_is_measured_and_limited_in_a_process_of_its_own():
    probe = run_alone(probe_memory, partial(allocate, 2**27))
    assert 2**27 <= probe.peak_memory < 2**27 + 2**25
    with pytest.raises(StepFailure, match=f"^{OUT_OF_MEMORY}$"):
        run_alone(probe_memory, partial(allocate, 2**29), memory_limit=2**28, preload=("torch",))


def make_sleep(folder, seconds):
    """A step of a known time, which leaves the number of its process."""

    def step():
        with Path(folder, str(os.getpid())).open("a") as file:
            file.write("x")
        time.sleep(seconds)

    return step


@pytest.mark.parametrize(("seconds", "calls"), [(0.01, 2 + MAX_CALLS), (0.6, 4)])
def test_each_round_is_timed_in_a_process_of_its_own(tmp_path, seconds, calls):
    make_step = partial(make_sleep, str(tmp_path), seconds)
    step = partial(run_alone, partial(median_times, warmup=2), make_step, preload=("torch",))
    times = time_interleaved({"sleep": step}, 2, warmup=0)["sleep"]
    assert [entry["wall"] for entry in times] == pytest.approx([seconds] * 2, abs=0.05)
    assert all(entry["cpu"] < 0.05 for entry in times)
    assert [len(path.read_text()) for path in tmp_path.iterdir()] == [calls] * 2


@pytest.mark.parametrize("measure", [probe_memory, median_times])
def test_a_step_that_cannot_be_taken_elsewhere_says_why(measure):
    with pytest.raises(StepFailure, match="unknown scheme"):
        run_alone(measure, make_failure, preload=("torch",))


@pytest.mark.parametrize("folded", [False, True])
def test_profile_parts_add_up_to_the_step(folded, monkeypatch):
    monkeypatch.setattr(folded_attention, "FOLDING_OVERHEAD", 0 if folded else 1 << 40)
    monkeypatch.setattr(folded_stem, "MAX_NARROW_SIZE", 0 if folded else 1000)
    monkeypatch.setattr(folded_stem, "MIN_SEQUENCES", 1)
    workload = Workload("sktformer", "lra", 64, 64, 2, "training", 0.1)
    setting = Setting(num_layers=1, precision="float32", autocast=False, compile=False, device="cpu")
    parts = profile.profile_step(workload, setting, rounds=1, matmul_rate=1e9)
    names = [row["part"] for row in parts]
    assert names[-3:] == ["between the parts", "forward and backward pass", "optimizer"]
    assert {"feed-forward with its norm", "layer norms"} <= set(names)
    assert ("smoother, its stem folded" in names) == folded
    assert ({"Fourier convolution", "convolution stem"} <= set(names)) != folded
    assert ("attention with its projections" in names) == folded
    assert ("projections" in names) != folded
    for key in ("forward_ms", "backward_ms", "gflop"):
        assert sum(row[key] for row in parts[:-2]) == pytest.approx(parts[-2][key])
    config = build_config(workload, 1)
    assert parts[-2]["gflop"] == pytest.approx(6e-9 * sum(count_operations("sktformer", config, 2, 64).values()))
    # Nothing that is counted belongs to no part.
    assert parts[-3]["gflop"] == pytest.approx(0, abs=1e-9)
