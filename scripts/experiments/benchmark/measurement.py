"""Time and memory, measured so that they can be trusted on a noisy machine."""

import contextlib
import ctypes
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from tqdm import tqdm


OUT_OF_MEMORY = "out of memory"
SHORT_STEP_S = 1.0
MAX_CALLS = 20


class StepFailure(RuntimeError):
    """A step that cannot be taken; the message is a few words that can stand in a table."""


@dataclass
class Probe:
    """
    What a step needs that is taken alone.

    `peak_memory`: bytes beyond what was there before its first call. `wall`: seconds of its last call.
    """

    peak_memory: int
    wall: float


def time_interleaved(
    steps: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 2,
    fewer_rounds: Mapping[str, int] | None = None,
    progress: tqdm | None = None,
) -> dict[str, list[dict]]:
    """
    Time several steps in turn, A B C, A B C ..., so that a slow minute of the machine meets all of them.

    A step whose last call took less than a second is called twice in its turn and the second call counts, as in a
    training that repeats it: what the other steps have left in caches and in the process's memory is not its cost.

    Args:
        steps (mapping of `str` to callables):
            What to time. A step must wait for its device itself; or it returns its `wall` and `cpu` seconds in a
            mapping, as [`time_step`] does, and then they count.
        rounds (`int`): How often each is timed.
        warmup (`int`, *optional*, defaults to 2): Rounds before those that count.
        fewer_rounds (mapping of `str` to `int`, *optional*):
            Slow steps, which take part in that many rounds from the first on, and in one of warm-up at most.
        progress (`tqdm`, *optional*): Bar that is moved on by one each round. By default one of its own.

    Returns:
        `dict`: for each step a list with one mapping a round: `wall` and `cpu` seconds of this process.
    """
    times: dict[str, list[dict]] = {name: [] for name in steps}
    last: dict[str, float] = {}
    fewer_rounds = fewer_rounds or {}
    with contextlib.ExitStack() as stack:
        bar = progress if progress is not None else stack.enter_context(tqdm(desc="Timing", unit="round"))
        if progress is None:
            bar.reset(total=warmup + rounds)
        for number in range(-warmup, rounds):
            for name, step in steps.items():
                if name in fewer_rounds and not -1 <= number < fewer_rounds[name]:
                    continue
                for _ in range(2 if last.get(name, SHORT_STEP_S) < SHORT_STEP_S else 1):
                    wall, cpu = time.perf_counter(), time.process_time()
                    own = step()
                    entry = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
                if isinstance(own, Mapping):
                    entry = dict(own)
                else:
                    last[name] = entry["wall"]
                if number >= 0:
                    times[name].append(entry)
            bar.update()
    return times


def median_ratio(times: list[dict], baseline: list[dict], clock: str = "wall") -> float:
    """Median of a step's time divided by the baseline's in the same round, over the rounds that both took part in."""
    return statistics.median(own[clock] / other[clock] for own, other in zip(times, baseline, strict=False))


def failure_reason(error: BaseException) -> str:
    """An error in a few words that can stand in a table."""
    message = " ".join(str(error).split()).replace("|", "/")
    lowered = message.lower()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in lowered for words in (OUT_OF_MEMORY, "can't allocate memory", "not enough memory", "memory error")
    ):
        return OUT_OF_MEMORY
    words = message.split(". ")[0].rstrip(".")
    return (words if len(words) <= 80 else f"{words[:77]}...") or type(error).__name__


def measure_matmul_rate(device: str, dtype: torch.dtype, clock: str, size: int = 2048) -> float:
    """Floating-point operations per second, by a clock, of the fastest of seven products of large square matrices."""
    left, right = torch.randn(2, size, size, device=device).to(dtype)

    def multiply() -> None:
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()

    times = time_interleaved({"product": multiply}, 7)
    return 2 * size**3 / min(entry[clock] for entry in times["product"])


@dataclass(eq=False)
class ModuleCall:
    """
    One call of a module, to be repeated alone.

    `arguments`, `options`: what it was called with, floating-point tensors detached and with gradients of their own.
    `output`: one floating-point tensor that it returned.
    """

    module: nn.Module
    arguments: tuple
    options: dict[str, Any]
    output: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs, output and parameters, each counted once."""
        tensors = [value for value in self._inputs() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in [*tensors, self.output, *self.module.parameters()])

    def run_forward(self) -> torch.Tensor:
        """Call the module; what a backward pass needs is kept as in training."""
        return _first_tensor(self.module(*self.arguments, **self.options))

    def run_both(self) -> None:
        """Call the module and go back to all its inputs and parameters."""
        for tensor in [*self._inputs(), *self.module.parameters()]:
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None
        self.run_forward().backward(self.output)

    def _inputs(self) -> list[Any]:
        return [*self.arguments, *self.options.values()]


def record_calls(modules: Iterable[nn.Module], run: Callable[[], Any]) -> list[ModuleCall]:
    """
    Record how modules are called.

    Args:
        modules (iterable of `nn.Module`): The modules; each is recorded once however often it is named.
        run (callable): Calls them, each any number of times.

    Returns:
        `list` of [`ModuleCall`]: in the order in which the calls ended.
    """
    calls: list[ModuleCall] = []

    def record(module: nn.Module, arguments: tuple, options: dict[str, Any], output: Any) -> None:
        arguments = tuple(_detach(value) for value in arguments)
        options = {name: _detach(value) for name, value in options.items()}
        calls.append(ModuleCall(module, arguments, options, _first_tensor(output).detach()))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in dict.fromkeys(modules)]
    run()
    for hook in hooks:
        hook.remove()
    return calls


def _detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    return value


def _first_tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


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
    return probe_step(make_step, *arguments).peak_memory


def probe_step(
    make_step: Callable[..., Callable[[], Any]],
    *arguments: Any,
    memory_limit: int | None = None,
    preload: Sequence[str] = (),
) -> Probe:
    """
    Take a step twice in a process of its own on the CPU.

    Args:
        make_step (callable): Builds the step in the new process; a function of a module.
        arguments: Its arguments.
        memory_limit (`int`, *optional*):
            Bytes that the process may allocate, the step's weights included; more is a failure (Linux alone).
        preload (sequence of `str`, *optional*):
            Installed modules that take long to import. Where there is fork, the first call that names some imports
            them for all later ones too.

    Returns:
        [`Probe`]

    Raises:
        StepFailure: if the step cannot be built or taken.
    """
    return _run_in_process(_measure_peak, (make_step, arguments), memory_limit, preload)


def time_step(
    make_step: Callable[..., Callable[[], Any]], *arguments: Any, warmup: int = 1, preload: Sequence[str] = ()
) -> dict[str, float]:
    """
    Time a step in a process of its own on the CPU.

    How fast a step of a small model is depends on where its tensors lie in memory, and a process keeps to one such
    place: rounds in processes of their own average over many.

    Args:
        make_step (callable): Builds the step in the new process; a function of a module.
        arguments: Its arguments.
        warmup (`int`, *optional*, defaults to 1): Calls before those that count.
        preload (sequence of `str`, *optional*): As for [`probe_step`].

    Returns:
        `dict`: `wall` and `cpu` seconds of the process, medians over twenty calls or as many as begin within a second.

    Raises:
        StepFailure: if the step cannot be built or taken.
    """
    return _run_in_process(_measure_times, (make_step, arguments, warmup), None, preload)


def _run_in_process(
    measure: Callable[..., Any], arguments: tuple, memory_limit: int | None, preload: Sequence[str]
) -> Any:
    """What a function of this module returns in a new process; its errors become [`StepFailure`]s."""
    forks = bool(preload) and "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(list(preload))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_send_result, args=(sender, torch.get_num_threads(), memory_limit, measure, arguments)
    )
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError as error:
        process.join()
        if process.exitcode == -9:  # what Linux does to a process when memory is short
            raise StepFailure(OUT_OF_MEMORY) from error
        raise StepFailure(f"The process that took the step ended with status {process.exitcode}") from error
    finally:
        process.join()
    if isinstance(result, str):
        raise StepFailure(result)
    return result


def probe_cuda_step(make_step: Callable[..., Callable[[], Any]], *arguments: Any) -> Probe:
    """
    Take a step three times on the CUDA device, the last time with the clock running, and free what it took.

    Arguments, result and failures as [`probe_step`]'s; memory is what PyTorch's allocator has given out.
    """
    step, reason, wall = None, None, 0.0
    try:
        step = make_step(*arguments)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            wall = time.perf_counter() - start
        memory = torch.cuda.max_memory_allocated() - before
    except Exception as error:
        reason = failure_reason(error)  # and not the error, whose traceback would keep the step's tensors alive
    step = None
    gc.collect()
    torch.cuda.empty_cache()
    if reason is not None:
        raise StepFailure(reason)
    return Probe(memory, wall)


def _send_result(
    sender: Any, num_threads: int, memory_limit: int | None, measure: Callable[..., Any], arguments: tuple
) -> None:
    torch.set_num_threads(num_threads)
    try:
        if memory_limit is not None:
            _limit_memory(memory_limit)
        sender.send(measure(*arguments))
    except Exception as error:
        sender.send(failure_reason(error))


def _measure_peak(make_step: Callable[..., Callable[[], Any]], arguments: tuple) -> Probe:
    _map_large_blocks()
    step = make_step(*arguments)
    with contextlib.suppress(OSError):
        # Linux forgets the peak that imports and construction have left; elsewhere a step below it measures nothing.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = psutil.Process().memory_info().rss
    wall = 0.0
    for _ in range(2):
        start = time.perf_counter()
        step()
        wall = time.perf_counter() - start
    return Probe(max(0, _peak_resident_size() - before), wall)


def _measure_times(make_step: Callable[..., Callable[[], Any]], arguments: tuple, warmup: int) -> dict[str, float]:
    step = make_step(*arguments)
    for _ in range(warmup):
        step()
    walls: list[float] = []
    cpus: list[float] = []
    while len(walls) < MAX_CALLS and sum(walls) < SHORT_STEP_S:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {"wall": statistics.median(walls), "cpu": statistics.median(cpus)}


def _map_large_blocks() -> None:
    """
    Let the C library give blocks of 1 MiB and more back as soon as they are freed, where it is glibc.

    It would keep some for later, as many as the order of a step's allocations happens to leave behind, and the peak
    would say how fragmented they are and not what the step holds.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


def _limit_memory(memory_limit: int) -> None:
    """Let this process allocate so many bytes more and no further; nothing where that cannot be told."""
    with contextlib.suppress(OSError, ImportError):
        import resource  # which Windows has not

        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmData:"):
                limit = int(line.split()[1]) * 1024 + memory_limit
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _peak_resident_size() -> int:
    """Bytes. Not from `getrusage` where it can be helped: that also counts the process this one was forked from."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # which Windows has not

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
