"""What is timed together: the steps of a cell of the results, in interleaved rounds, each probed alone before."""

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import psutil
import torch
from accelerate.utils import release_memory
from tqdm import tqdm

from experiments.arguments import UserError, flag, require_at_least
from experiments.benchmark import measurement
from experiments.benchmark.counts import count_step
from experiments.benchmark.measurement import KILLED, OUT_OF_MEMORY, Probe, failure_reason, round_ratios
from experiments.benchmark.models import Setting, Workload, make_step, make_warm_step, unsupported_reason


# What a process that takes a step would import for seconds.
_PRELOADED = (
    *("torch", "transformers.modeling_utils", "matplotlib.pyplot"),
    *(name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name),
)
# Of a step to the baseline's: speed by both clocks, speed by counted operations, memory.
RATIOS = ("speed_ratio", "cpu_speed_ratio", "expected_speed_ratio", "memory_ratio")


@dataclass
class MeasurementArguments:
    """How steps are measured."""

    rounds: int = flag(7, "How often each step is timed.")
    warmup: int = flag(2, "Calls before those that count, in each round.")
    time_limit_s: float = flag(60.0, "A slower step is timed in fewer rounds and left out at greater lengths.")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "Where the models run.")
    compile: bool = flag(False, "Compile every model with torch.compile.")

    def __post_init__(self) -> None:
        require_at_least(1, self, "rounds")
        require_at_least(0, self, "warmup")
        if not 0 < self.time_limit_s:
            raise UserError(f"--time_limit_s {self.time_limit_s:g} must be more than 0.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: there is no CUDA device here; leave the flag out or pass --device cpu.")
        self.device = "cpu" if self.device == "cpu" or not torch.cuda.is_available() else "cuda"


@dataclass(frozen=True)
class Cell:
    """Workloads that are timed in turn, and the one that speeds and memory are multiples of."""

    workloads: tuple[Workload, ...]
    baseline: Workload


def measure_cells(
    cells: Sequence[Cell], setting: Setting, arguments: MeasurementArguments, earlier: Sequence[Mapping]
) -> Iterator[list[dict[str, Any]]]:
    """
    Measure cells one after another, smaller lengths first, but for those whose rows there are already. Yields for each
    cell a row for each workload; where `reason` is not None nothing was measured.
    """
    rows = list(earlier)
    for number, cell in enumerate(cells, 1):
        if any(asdict(cell.baseline).items() <= row.items() for row in rows):
            continue
        what = f"{number}/{len(cells)}: {cell.baseline.mode}, {cell.baseline.length:,} tokens"
        turns = len(cell.workloads) + arguments.rounds
        with tqdm(total=turns, desc=what, unit="turn", disable=None) as progress:
            new = measure_cell(cell, setting, arguments, rows, progress)
        rows += new
        yield new


def measure_cell(
    cell: Cell, setting: Setting, arguments: MeasurementArguments, earlier: Sequence[Mapping], progress: tqdm
) -> list[dict[str, Any]]:
    """Measure one cell as [`measure_cells`] does; `progress` moves on by one for each probe and each round."""
    reasons: dict[Any, str | None] = {}
    probes: dict[Workload, Probe] = {}
    turns: dict[Any, measurement.Turn] = {}
    limit = arguments.time_limit_s
    for workload in cell.workloads:
        reason = unsupported_reason(workload.model, workload.positions)
        reasons[workload] = reason or reason_from_shorter(earlier, workload, limit)
        if reasons[workload] is None:
            try:
                probes[workload] = probe_step(workload, setting)
                turns[workload] = prepare_turn(workload, setting, arguments.warmup)
            except Exception as error:
                reasons[workload] = failure_reason(error)
        progress.update()
    rounds = {name: max(1, int(arguments.rounds * min(1, limit / probes[name].wall))) for name in turns}
    times = measurement.time_in_turn(turns, rounds, reasons, progress)
    turns.clear()
    torch.compiler.reset()
    release_memory()
    rows: dict[Workload, dict[str, Any]] = {}
    for workload in cell.workloads:
        rows[workload] = row = {**asdict(workload), "reason": reasons[workload]}
        if row["reason"] is None:
            row |= summarise(times[workload], probes[workload])
        with contextlib.suppress(Exception):  # of lengths that a model cannot take, and Longformer, which reads values
            row["multiply_adds"] = count_step(workload, setting)["multiply_adds"]
    return [row | compare(row, rows[cell.baseline]) for row in rows.values()]


def reason_from_shorter(rows: Sequence[Mapping], workload: Workload, time_limit: float) -> str | None:
    """Why a workload is not tried, from rows of smaller lengths: it was too large or too slow already."""
    same = {name: getattr(workload, name) for name in ("model", "size", "batch_size", "mode", "dropout")}
    rows = [row for row in rows if same.items() <= row.items() and row["length"] == row["positions"]]
    if not rows or workload.length != workload.positions:
        return None
    last = max(rows, key=lambda row: row["length"])
    if last["reason"] is not None:
        return last["reason"] if last["reason"].startswith((OUT_OF_MEMORY, KILLED, "over ")) else None
    # No step grows slower than its input does.
    seconds = last["step_time_ms"] / 1000 * workload.length / last["length"]
    return f"over {time_limit:g} s" if seconds > time_limit else None


def prepare_turn(workload: Workload, setting: Setting, warmup: int) -> measurement.Turn:
    """A step's turn, in a process of its own; but a device is slow to open and a model to compile for that."""
    measure = partial(measurement.median_times, warmup=warmup)
    if setting.device == "cpu" and not setting.compile:
        return partial(measurement.run_alone, measure, partial(make_step, workload, setting), preload=_PRELOADED)
    step = make_step(workload, setting)
    return lambda: measure(lambda: step)


def probe_step(workload: Workload, setting: Setting) -> Probe:
    """
    Measure one step's memory, alone; fails if it cannot be made or taken. Memory is unknown where a step is compiled
    on processors: what the compiler keeps cannot be told from it.
    """
    probe, make = partial(measurement.probe_memory, device=setting.device), partial(make_warm_step, workload, setting)
    limit = int(0.9 * psutil.virtual_memory().available) if setting.device == "cpu" else None
    if not setting.compile:
        return measurement.run_alone(probe, make, limit, _PRELOADED)
    # Compiled code starts threads, which do not survive a fork.
    found = measurement.run_alone(probe, make, limit)
    return replace(found, peak_memory=None) if setting.device == "cpu" else found


def summarise(times: list[dict[str, float]], probe: Probe) -> dict[str, Any]:
    """Medians of a step's rounds, in ms, and its memory in MiB, None if unknown."""
    wall, cpu = (1000 * statistics.median(entry[clock] for entry in times) for clock in ("wall", "cpu"))
    memory = None if probe.peak_memory is None else probe.peak_memory / 2**20
    cost = {"step_time_ms": wall, "step_cpu_time_ms": cpu, "peak_memory_mib": memory}
    return {"rounds": len(times), **cost, "times": times}


def compare(row: Mapping, baseline: Mapping) -> dict[str, Any]:
    """
    The [`RATIOS`] of a row, None for what was not measured: those of times are medians over the rounds, of which
    `speed_ratio_range` has the least and the greatest.
    """
    ratios: dict[str, Any] = dict.fromkeys(RATIOS)
    if row["reason"] is None and baseline["reason"] is None:
        of_rounds = round_ratios(baseline["times"], row["times"])
        ratios["speed_ratio"] = statistics.median(of_rounds)
        ratios["speed_ratio_range"] = [min(of_rounds), max(of_rounds)]
        ratios["cpu_speed_ratio"] = statistics.median(round_ratios(baseline["times"], row["times"], "cpu"))
        if baseline["peak_memory_mib"]:
            ratios["memory_ratio"] = row["peak_memory_mib"] / baseline["peak_memory_mib"]
    if "multiply_adds" in row and "multiply_adds" in baseline:
        ratios["expected_speed_ratio"] = baseline["multiply_adds"] / row["multiply_adds"]
    return ratios
