"""Parts of a long piece of work, in processes of their own."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar, cast

import numpy as np

from experiments.arguments import UserError


Part = TypeVar("Part")
Result = TypeVar("Result")


def available_cores() -> int:
    """Cores that this process may use, of which a container or a queue may give it a part."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_parts(
    function: Callable[[Part], Result], parts: Iterable[Part], processes: int | None = None
) -> Generator[Result, None, None]:
    """
    Yield `function(part)` of each part, in the order of the parts, which may be endless.

    Args:
        function (`Callable`): A function of a module, or a `partial` of one.
        parts (`Iterable`): Only so many are taken ahead of what is yielded as keeps all processes busy.
        processes (`int`, *optional*): By default one for each core that this process may use; 1 works in it.

    Raises:
        UserError: if `processes` is less than 1, or if one of them was killed.
    """
    processes = available_cores() if processes is None else processes
    if processes < 1:
        raise UserError(f"{processes} processes: give at least 1.")
    if processes == 1:
        yield from map(function, parts)
        return
    parts, waiting = iter(parts), deque[Future[Result]]()
    with ProcessPoolExecutor(processes, _context(function), follow_parent) as pool:
        try:
            waiting.extend(pool.submit(function, part) for part in itertools.islice(parts, 2 * processes))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(function, part) for part in itertools.islice(parts, 1))
                yield result
        except BrokenProcessPool as error:
            raise UserError("A process was killed, perhaps for memory; try again with fewer processes.") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def split_work(count: int, size: int, seed: int) -> Iterator[tuple[range, np.random.SeedSequence]]:
    """Ranges of at most `size` out of `count`, each with a seed that depends on its place alone."""
    starts = range(0, count, size)
    for start, child in zip(starts, np.random.SeedSequence(seed).spawn(len(starts)), strict=True):
        yield range(start, min(start + size, count)), child


def _context(function: Any) -> Any:
    """Processes that start quickly where there is fork, and hold neither threads nor a GPU of this one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([getattr(function, "func", function).__module__])
    return context


def follow_parent() -> None:
    """Leave interrupts to the parent, and end with it: one that is killed cannot end its processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """End this process when the one that has started it is gone."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    cast(Any, multiprocessing.parent_process()).join()
    os._exit(1)
