"""Tables of runs: every line of a file with every seed, one after another, resumed where it was left."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from experiments.arguments import UserError


@dataclass(frozen=True)
class Run:
    """
    One run of a script.

    Args:
        name (`str`): The row of the table that it belongs to.
        arguments (`tuple` of `str`): What it is started with.
        folder (`Path`): Where its output goes.
    """

    name: str
    arguments: tuple[str, ...]
    folder: Path


def read_runs(path: str | Path, seeds: Sequence[int], output_dir: str | Path) -> list[Run]:
    """
    Read a file of runs: one line of arguments each, `#` begins a comment; every line has a `--run_name`.

    Args:
        path (`str` or `Path`): The file.
        seeds (sequence of `int`): Seeds to run each line with.
        output_dir (`str` or `Path`): Folder of all runs; each gets `NAME-SEED` in it.

    Returns:
        `list` of [`Run`]: all lines with the first seed, then all with the second, so that a table that is cut short
        has whole columns.

    Raises:
        UserError: if the file cannot be read or a line has no name or the name of another.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"The runs {path} cannot be read ({error.strerror}).") from error
    named: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(lines, start=1):
        arguments = shlex.split(line, comments=True)
        if not arguments:
            continue
        name = arguments[arguments.index("--run_name") + 1] if "--run_name" in arguments[:-1] else None
        if name is None or name in named:
            raise UserError(f"{path}, line {number}: every run needs a --run_name of its own.")
        named[name] = tuple(arguments)
    if not named:
        raise UserError(f"{path} names no run.")
    return [
        Run(name, (*arguments, "--seed", str(seed)), Path(output_dir) / f"{name}-{seed}")
        for seed in seeds
        for name, arguments in named.items()
    ]


def execute_runs(
    script: Path,
    runs: Sequence[Run],
    shared_arguments: Sequence[str],
    finished_file: str,
    check: Callable[[Run, list[str]], None] = lambda run, arguments: None,
) -> None:
    """
    Run a script once for each run that is not finished.

    What a run prints goes to a log of its name beside its folder.

    Args:
        script (`Path`): The script; it has to take `--output_dir`, and to resume what was cut short.
        runs (sequence of [`Run`]): The runs.
        shared_arguments (sequence of `str`): Arguments before those of the run.
        finished_file (`str`): A run whose folder holds this file is finished.
        check (callable, *optional*): Called with each finished run and the arguments it would be started with; raises
            a `UserError` if it was started with others.

    Raises:
        UserError: if a run fails; it names the log.
    """
    for run in runs:
        if (run.folder / finished_file).is_file():
            check(run, [*shared_arguments, *run.arguments])
    waiting = [run for run in runs if not (run.folder / finished_file).is_file()]
    bar = tqdm(waiting, desc="Runs", unit="run", initial=len(runs) - len(waiting), total=len(runs))
    for run in bar:
        bar.set_postfix_str(run.folder.name)
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        log = run.folder.with_name(f"{run.folder.name}.log")
        command = [sys.executable, str(script), *shared_arguments, *run.arguments, "--output_dir", str(run.folder)]
        with log.open("w", encoding="utf-8") as output:
            result = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
        if result.returncode:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise UserError(f"The run {run.folder.name} failed ({' '.join(last)}); all of its output is in {log}.")
