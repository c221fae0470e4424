"""Time and memory, measured so that they can be trusted on a noisy machine."""

import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm


def time_interleaved(steps: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[dict]]:
    """
    Time several steps in turn, A B C, A B C ..., so that a slow minute of the machine meets all of them.

    Args:
        steps (mapping of `str` to callables): What to time. A step must wait for its device itself.
        rounds (`int`): How often each is timed.
        warmup (`int`, *optional*, defaults to 2): Rounds before those that count.

    Returns:
        `dict`: for each step a list with one mapping a round: `wall` and `cpu` seconds of this process.
    """
    times: dict[str, list[dict]] = {name: [] for name in steps}
    for number in tqdm(range(-warmup, rounds), desc="Timing", unit="round"):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            if number >= 0:
                times[name].append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    return times


def median_ratio(times: list[dict], baseline: list[dict], clock: str = "wall") -> float:
    """Median over the rounds of a step's time divided by the baseline's in the same round."""
    return statistics.median(own[clock] / other[clock] for own, other in zip(times, baseline, strict=True))


def peak_memory(make_step: Callable[..., Callable[[], Any]], *arguments: Any) -> int:
    """
    Memory that a step needs beyond what was there before its first call.

    Measured in a process of its own, because what an allocator has once taken it seldom gives back.

    Args:
        make_step (callable): Builds the step in the new process; a function of a module.
        arguments: Its arguments.

    Returns:
        `int`: bytes.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(sender, torch.get_num_threads(), make_step, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        process.join()
        raise RuntimeError(f"The process that measured memory ended with status {process.exitcode}.") from error
    finally:
        process.join()


def _measure_peak(
    sender: Any, num_threads: int, make_step: Callable[..., Callable[[], Any]], arguments: tuple
) -> None:
    torch.set_num_threads(num_threads)
    step = make_step(*arguments)
    with contextlib.suppress(OSError):
        # Linux forgets the peak that imports and construction have left; elsewhere a step below it measures nothing.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = psutil.Process().memory_info().rss
    for _ in range(2):
        step()
    sender.send(max(0, _peak_resident_size() - before))


def _peak_resident_size() -> int:
    """Bytes. Not from `getrusage` where it can be helped: that also counts the process this one was forked from."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # which Windows has not

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
