"""Time and memory: rounds take turns, processes are their own, failures are said in a few words."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from experiments.benchmark.measurement import (
    KILLED,
    MAX_CALLS,
    OUT_OF_MEMORY,
    failure_reason,
    median_times,
    probe_memory,
    round_ratios,
    run_alone,
    time_in_turn,
)


SECOND = {"wall": 1.0, "cpu": 1.0}


def test_steps_take_turns_and_slow_ones_take_part_in_fewer_rounds():
    calls: list[str] = []

    def turn(name):
        calls.append(name)
        return SECOND

    with tqdm(total=3, disable=True) as progress:
        times = time_in_turn({name: partial(turn, name) for name in "AB"}, {"A": 3, "B": 1}, {}, progress)
    assert "".join(calls) == "ABAA"
    assert times == {"A": [SECOND] * 3, "B": [SECOND]}


def test_ratios_are_taken_in_each_round():
    fast, slow = [{"wall": 1.0, "cpu": 1.0}] * 3, [{"wall": w, "cpu": 3.0} for w in (2.0, 9.0, 2.5)]
    assert round_ratios(slow, fast) == [2.0, 9.0, 2.5]
    assert round_ratios(slow, fast, "cpu") == [3.0] * 3
    assert round_ratios(slow, fast[:1]) == [2.0]  # a slow step took part in the first round alone


def test_steps_that_fail_leave_the_others_in_turn():
    def fail():
        raise RuntimeError("no | kernel. Sorry.")

    turns = {"good": lambda: SECOND, "bad": fail}
    failures: dict[str, str | None] = {"good": None}
    times = time_in_turn(turns, {"good": 2, "bad": 2}, failures, tqdm(disable=True))
    assert failures == {"good": None, "bad": "no / kernel"}
    assert times == {"good": [SECOND] * 2, "bad": []}
    assert set(turns) == {"good"}


def allocate(num_bytes):
    """For the process that measures memory."""
    return lambda: torch.ones(num_bytes, dtype=torch.uint8)


def make_failure():
    raise ValueError("unknown scheme")


def test_memory_is_measured_and_limited_in_a_process_of_its_own():
    peak = run_alone(probe_memory, partial(allocate, 2**27)).peak_memory
    assert peak is not None
    assert 2**27 <= peak < 2**27 + 2**25
    with pytest.raises(Exception, match="memory") as error:
        run_alone(probe_memory, partial(allocate, 2**29), memory_limit=2**28, preload=("torch",))
    assert failure_reason(error.value) == OUT_OF_MEMORY


def test_memory_on_a_gpu_is_that_of_the_second_call(monkeypatch):
    """The first one compiles and tries kernels out, which is no part of a step."""
    allocated, peak = [100], [100]

    def step():
        first = allocated[0] == 100
        allocated[0] = 130
        peak[0] = max(peak[0], 1000 if first else 150)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, allocated[0]))
    assert probe_memory(lambda: step, "cuda").peak_memory == 50


def test_what_does_not_compile_is_said_without_its_page():
    compiled = torch.compile(lambda states: states @ states, backend="eager")
    with pytest.raises(Exception, match="fake tensor") as error:
        compiled(torch.ones(2, 3))
    assert failure_reason(error.value) == "does not compile"
    assert failure_reason(RuntimeError("a sentence. And more.")) == "a sentence"


def end_process():
    os.kill(os.getpid(), 9)


def test_a_process_that_is_killed_is_said():
    with pytest.raises(RuntimeError, match=f"^{KILLED}$"):
        run_alone(probe_memory, end_process, preload=("torch",))


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
    turn = partial(run_alone, partial(median_times, warmup=2), make_step, preload=("torch",))
    times = [turn(), turn()]
    assert all(seconds <= entry["wall"] < seconds + 1 for entry in times)
    assert all(entry["cpu"] < seconds / 2 for entry in times)
    assert [len(path.read_text()) for path in tmp_path.iterdir()] == [calls] * 2


@pytest.mark.parametrize("measure", [probe_memory, median_times])
def test_a_step_that_cannot_be_taken_elsewhere_says_why(measure):
    with pytest.raises(ValueError, match="unknown scheme"):
        run_alone(measure, make_failure, preload=("torch",))
