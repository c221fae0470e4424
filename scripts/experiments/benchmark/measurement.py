"""
Time and memory of steps, measured so that they can be trusted on a noisy machine.

`torch.utils.benchmark` repeats one statement in one process by one clock. Here the steps of several models take turns,
each turn in a process of its own on processors, by the wall and by processor time, and may fail; and memory is
measured besides.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from tqdm import tqdm

from experiments.parallel import end_with_parent


OUT_OF_MEMORY = "out of memory"
KILLED = "killed, as where memory is short"
SHORT_STEP_S = 1.0
MAX_CALLS = 20
Result = TypeVar("Result")
StepMaker = Callable[[], Callable[[], Any]]
Turn = Callable[[], dict[str, float]]


@dataclass
class Probe:
    """What a step needs that is taken alone: bytes beyond what was there before it, seconds of its last call."""

    peak_memory: int | None  # None if unknown
    wall: float


def time_in_turn(
    turns: dict[Any, Turn], rounds: Mapping[Any, int], failures: dict[Any, str | None], progress: tqdm
) -> dict[Any, list[dict[str, float]]]:
    """
    Time several steps in turn, A B C, A B C ..., so that a slow minute of the machine meets all of them.

    A turn returns `wall` and `cpu` seconds, as [`median_times`] does, one for each of a step's rounds. `failures` is
    told in a few words why steps fail, which leave `turns` then.
    """
    times: dict[Any, list[dict[str, float]]] = {name: [] for name in turns}
    for number in range(max(rounds.values(), default=0)):
        for name in [name for name in turns if number < rounds[name]]:
            try:
                times[name].append(turns[name]())
            except Exception as error:
                failures[name] = failure_reason(error)
                del turns[name]  # and with it what it holds of the memory
        progress.update()
    return times


def median_times(make_step: StepMaker, warmup: int = 1) -> dict[str, float]:
    """
    `wall` and `cpu` seconds of a step: medians over twenty calls after the warm-up or as many as begin in a second.

    How fast a step of a small model is depends on where its tensors lie in memory, and a process keeps to one such
    place: rounds in processes of their own average over many.
    """
    step = make_step()
    for _ in range(warmup):
        step()
    calls: list[dict[str, float]] = []
    while len(calls) < MAX_CALLS and sum(call["wall"] for call in calls) < SHORT_STEP_S:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        calls.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    return {clock: statistics.median(call[clock] for call in calls) for clock in ("wall", "cpu")}


def probe_memory(make_step: StepMaker, device: str = "cpu") -> Probe:
    """
    Make a step and take it twice, of which the second's memory counts: the first compiles what is compiled. In a
    process of its own: what an allocator has taken it seldom gives back.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        # glibc would keep some of the large blocks that are freed, as many as the order of allocations happens to
        # leave behind, and the peak would say how fragmented they are and not what the step holds.
        ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    step = make_step()
    gc.collect()  # a model that has been compiled stays until then, and it would be freed during the step
    before = torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            # Linux forgets the peak that imports and construction have left; elsewhere a lower one measures nothing.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = time.perf_counter()
    step()
    wall = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _peak_resident_size()
    return Probe(max(0, peak - before), wall)


def _peak_resident_size() -> int:
    """Bytes. Not from `getrusage` where it can be helped: that also counts the process this one was forked from."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # which Windows has not

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if psutil.MACOS else 1024)


def round_ratios(numerator: list[dict], denominator: list[dict], clock: str = "wall") -> list[float]:
    """One step's time divided by another's in the same round, for the rounds that both took part in."""
    return [over[clock] / under[clock] for over, under in zip(numerator, denominator, strict=False)]


def failure_reason(error: BaseException) -> str:
    """An error in a few words that can stand in a table."""
    message = " ".join(str(error).split()).replace("|", "/")
    known = (OUT_OF_MEMORY, "can't allocate memory", "not enough memory", "memory error")
    if isinstance(error, MemoryError) or any(words in message.lower() for words in known):
        return OUT_OF_MEMORY
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return "does not compile"  # whose message is a page
    words = message.split(". ")[0].rstrip(".")
    return (words if len(words) <= 80 else f"{words[:77]}...") or type(error).__name__


def run_alone(
    measure: Callable[[StepMaker], Result],
    make_step: StepMaker,
    memory_limit: int | None = None,
    preload: Sequence[str] = (),
) -> Result:
    """
    What `measure`, [`probe_memory`] or [`median_times`], returns or raises in a new process.

    `make_step` builds the step there: a function of a module, or a `partial` of one. The process may allocate
    `memory_limit` bytes, the step's weights included (Linux alone). Where there is fork, the first call that names
    modules to `preload`, which take long to import, imports them for all later ones too.
    """
    forks = bool(preload) and "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(list(preload))
    with ProcessPoolExecutor(1, context, _prepare_process, (torch.get_num_threads(), memory_limit)) as pool:
        try:
            return pool.submit(measure, make_step).result()
        except BrokenProcessPool as error:
            raise RuntimeError(KILLED) from error


def _prepare_process(num_threads: int, memory_limit: int | None) -> None:
    end_with_parent()
    torch.set_num_threads(num_threads)
    if memory_limit is not None:
        with contextlib.suppress(OSError, AttributeError):  # where psutil has no limits
            process: Any = psutil.Process()
            process.rlimit(psutil.RLIMIT_DATA, (process.memory_info().data + memory_limit,) * 2)
