"""Tables of runs: every line of a file a row, every run a child process, resumed where it was left."""

import glob
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from experiments.arguments import CONFIGURATION, ROOT, UserError, flag_values, one_line, recipes_behind, split_words
from experiments.run_folder import METRICS_FILE


_PRESETS = CONFIGURATION / "models"


@dataclass(frozen=True)
class Run:
    """One run of a script that takes `--output_dir`, resumes what was cut short, and leaves finished runs alone."""

    script: str  # a name below scripts, or a path
    arguments: tuple[str, ...]
    folder: Path  # of its output; what it prints goes to a log of the same name beside it
    file: str = METRICS_FILE  # in the folder, left by a finished run

    @property
    def result(self) -> Path:
        return self.folder / self.file

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def mark(self) -> str:
        """What the log of a finished run ends with: a digest of its arguments and of what they name."""
        cache = "--cache_dir"
        read = [w for before, w in pairwise(["", *self.arguments]) if cache not in (before, w.partition("=")[0])]
        words = [os.path.expanduser(word.partition("=")[2] if word.startswith("--") else word) for word in read]
        named = [p for w in words for p in ([w] if os.path.exists(w) else glob.glob(w, recursive=True))]
        recipes = [file for path in named if path.endswith(".yaml") for file in recipes_behind(path)]
        named += [recipe for recipe in recipes if recipe not in named]
        # Whoever looks into the folder of a finished run touches its .lock.
        files = [file for path in map(Path, named) for file in (path, *sorted(path.rglob("[!.]*")))]
        marks = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
        state: list[Any] = [self.arguments, marks]
        # Presets are named without their folder, by recipes too.
        said = "\n".join([*words, *(Path(recipe).read_text(encoding="utf-8") for recipe in recipes)])
        state += [preset.read_bytes() for preset in sorted(_PRESETS.glob("*.json")) if preset.stem in said]
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def read_runs(path: str | Path) -> dict[str, tuple[str, ...]]:
    """The arguments of the lines of a file, without comments, by their `--run_name`, which all must have."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"The runs {path} cannot be read ({error.strerror}).") from error
    named: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            arguments = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{path}, line {number} cannot be split into words ({one_line(error)}).") from error
        name = flag_values(arguments).get("run_name")
        if arguments and (name is None or name in named):
            raise UserError(f"{path}, line {number}: every run needs a --run_name of its own.")
        if name is not None:
            named[name] = tuple(arguments)
    if not named:
        raise UserError(f"{path} names no run.")
    return named


def choose_launcher(launcher: str | None) -> list[str]:
    """
    What starts a run: plain Python on one device; on several it would multiply the batch by their number.

    A `UserError` if the `launcher` is no program.
    """
    several = torch.accelerator.is_available() and torch.accelerator.device_count() > 1
    # A port of its own for each of several that begin at once.
    launch = ["-m", "accelerate.commands.launch", "--main_process_port", "0"]
    default = [sys.executable, *(launch if several else [])]
    words = default if launcher is None else split_words("launcher", launcher)
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"--launcher {launcher!r} names no program that can be started.")
    return words


class Children:
    """The processes that have been started, which end with this one."""

    def __init__(self) -> None:
        self._lock, self._are_stopped = threading.Lock(), False
        self._running: set[subprocess.Popen] = set()

    def run(self, command: Sequence[str], **options: Any) -> int:
        """Start a process and wait for it; gives its status."""
        with self._lock:
            if self._are_stopped:
                return -signal.SIGTERM
            process = subprocess.Popen(command, **options)
            self._running.add(process)
        status = process.wait()
        with self._lock:
            self._running.remove(process)
        return status

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Pass on what ends this process: Ctrl-C, or the SIGTERM of schedulers and `timeout`."""

        def stop(number: int, _: Any) -> None:
            signal.signal(number, signal.SIG_IGN)  # `timeout` sends it to a process and then to its group
            sys.exit(128 + number)

        earlier = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            with self._lock:
                self._are_stopped = True
                for process in self._running:
                    _terminate(process)
            raise
        finally:
            signal.signal(signal.SIGTERM, earlier)


def _terminate(process: subprocess.Popen) -> None:
    """End a run and what it has started: some launchers end without their children."""
    with suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        for child in started:
            with suppress(psutil.Error):
                child.terminate()


def execute_runs(
    runs: Sequence[Run], launcher: Sequence[str], title: str, tolerated: str | None = None, at_once: int = 1
) -> None:
    """
    Start every run that is not finished, so many at once; one that fails with the words `tolerated` has no result.

    A run whose log has the mark of these very arguments is passed over. Any other script is started, and knows itself
    whether its folder holds this run, cut short or finished, or another one. A `UserError` names the log of a failure;
    what runs beside it comes to its end, and nothing else is started.
    """
    waiting = [run for run in runs if not _is_done(run, tolerated)]
    done = len(runs) - len(waiting)
    children, has_failed = Children(), threading.Event()
    with (
        tqdm(desc=title, initial=done, total=len(runs), unit="run", disable=None) as bar,
        ThreadPoolExecutor(at_once) as pool,
        children.stopped_by_signals(),
    ):

        def start(number: int, run: Run) -> None:
            if has_failed.is_set():
                return
            bar.set_postfix_str(run.folder.name)
            if bar.disable:  # without a terminal a line for each run, whole where several begin at once
                print(f"{title}: {run.folder.name} ({number} of {len(runs)})\n", end="", flush=True)
            try:
                _execute(run, launcher, tolerated, children)
            except BaseException:
                has_failed.set()
                raise

        started = [pool.submit(start, number, run) for number, run in enumerate(waiting, start=done + 1)]
        try:
            for finished in as_completed(started):
                finished.result()
                bar.update()
        except Exception:
            has_failed.set()
            wait(started)  # here, where a signal still reaches what runs
            raise
        finally:
            has_failed.set()  # as where it is interrupted


def _execute(run: Run, launcher: Sequence[str], tolerated: str | None, children: Children) -> None:
    command = [*launcher, str(ROOT / "scripts" / run.script), *run.arguments, "--output_dir", str(run.folder)]
    mark = run.mark  # what changes while it runs is not what it has read
    try:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        log = run.log.open("ab")
    except OSError as error:
        raise UserError(f"--output_dir: {run.folder.parent} cannot be written ({error.strerror}).") from error
    with log:
        log.write(f"{shlex.join(command)}\n".encode())
        log.flush()
        begin = log.tell()
        status = children.run(command, stdout=log, stderr=subprocess.STDOUT)
        output = run.log.read_bytes()[begin:].decode("utf-8", errors="replace")
        passed = tolerated is not None and tolerated.lower() in output.lower()
        if not passed and (status or not run.result.is_file()):
            lines = [line for line in output.split("\n") if line.strip()] or ["without a word"]
            # Launchers print a traceback of their own behind the script's line.
            reason = ([line for line in lines if ": error: " in line] or lines)[-1].strip()
            raise UserError(f"The run {run.folder.name} failed ({reason}); all of its output is in {run.log}.")
        log.write(f"{'passed over' if passed else 'finished'} {mark}\n".encode())


def _is_done(run: Run, tolerated: str | None) -> bool:
    if not run.log.is_file() or not (run.result.is_file() or tolerated):
        return False
    end = run.log.read_bytes()[-100:].decode("utf-8", errors="replace")
    return end.endswith(f"{'finished' if run.result.is_file() else 'passed over'} {run.mark}\n")
