"""Results: files that are there as a whole or not at all, tables, and where their numbers come from."""

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from experiments.arguments import ROOT, UserError, flag, one_line


# Of the environment: they say how memory is taken and given back, which changes times on processors.
_ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_")
# Of the project: what changes results.
_SOURCES = ("modeling_sktformer", "scripts", "configuration")


@dataclass
class ResultsArguments:
    """Where a table goes."""

    results_dir: str = flag("runs/results", "Folder of the table, its data and pictures.")


def check_writable(folder: str | Path, flag: str = "results_dir") -> None:
    """A `UserError` if files cannot be written to the folder of a flag, which is made: before any work is lost."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--{flag} {folder} cannot be written ({error.strerror}); choose another one.") from error


@contextlib.contextmanager
def replace_file(path: str | Path) -> Iterator[Path]:
    """A path to write to, whose file then takes the place of `path`: as a whole or not at all, also on a full disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | Path, text: str) -> None:
    """Write a text file as [`replace_file`] does."""
    with replace_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | Path, values: Any) -> None:
    """Write JSON as [`replace_file`] does; ValueError if a number is not finite, which JSON does not know."""
    write_atomically(path, json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_results(path: Path, values: Any, paragraphs: Iterable[str]) -> str:
    """Write `path`.json with values and `path`.md with the paragraphs that are not empty, which are returned, too."""
    text = "\n\n".join(filter(None, paragraphs)) + "\n"
    write_json(f"{path}.json", values)
    write_atomically(f"{path}.md", text)
    return text


def read_json(path: str | Path, default: Any = None) -> Any:
    """The contents of a JSON file, or a `default` that is given if there is none; UserError if it cannot be read."""
    if default is not None and not Path(path).is_file():
        return default
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); mend the file or remove it.") from error


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table whose columns are aligned for a terminal."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    aligned = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in aligned]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def command_line() -> str:
    """How this process was started, as it stands beside a table; the script by its path in the project."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    # Several processes of a launcher, which the script alone would not start.
    launcher = ["accelerate", "launch"] if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ["python"]
    command = shlex.join([*launcher, str(name), *sys.argv[1:]])
    return re.sub(r"(--hub[_-]token[ =])[^\s'\"]+", r"\1$HF_TOKEN", command)  # nobody's business


def describe_environment(device: str | None = None) -> dict[str, Any]:
    """What a result has to be read with: versions, commit and device, the best one or that of a type, "cpu" say."""
    packages = ("torch", "transformers", "datasets", "accelerate", "tokenizers")
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = device or (best.type if best else "cpu")
    together = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    name = _device_name(kind)
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "device": f"{together} x {name}" if together > 1 else name,
        "is_gpu": kind != "cpu",
        # Processors of one name differ in these by more than most models differ in speed.
        **({"instructions": torch.backends.cpu.get_cpu_capability()} if kind == "cpu" else {}),
        "threads": torch.get_num_threads(),
        "commit": _COMMIT,
        **{name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ALLOCATOR_VARIABLES)},
    }


def format_origin(environments: Sequence[Mapping[str, Any]], command: str) -> str:
    """What stands under a table: the command that wrote it, from which code, with which versions, and where."""

    def found(name: str, among: Sequence[Mapping[str, Any]] = environments) -> str:
        return " and ".join(dict.fromkeys(str(environment[name]) for environment in among if name in environment))

    commits = sorted({environment["commit"] or "an unknown commit" for environment in environments})
    versions = ", ".join(f"{name} {found(name)}" for name in ("python", "torch", "transformers"))
    where, processors = [found("device")], [each for each in environments if not each.get("is_gpu")]
    if processors:
        where += [instructions] if (instructions := found("instructions", processors)) else []
        where.append(f"{found('threads', processors)} thread(s)")
        variables = {name for each in processors for name in each if name.startswith(_ALLOCATOR_VARIABLES)}
        where += [f"{name}={found(name, processors)}" for name in sorted(variables)]
    origin = f"Written by the command below at {', '.join(commits)}: {versions}, {', '.join(where)}."
    return f"{origin}\n\n```bash\n{command}\n```"


def _device_name(kind: str) -> str:
    if kind in ("cuda", "xpu"):
        return str(getattr(torch, kind).get_device_name())
    return _processor_name() if kind == "cpu" else f"{kind} of {_processor_name()}"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{name} ({os.cpu_count()} cores)"


def source_commit() -> str | None:
    """The commit of the source tree, with a + if files in it have changed; None outside a git checkout."""
    git = ("git", "-C", str(ROOT))
    looks = ("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", *_SOURCES)
    try:
        commit, changes = (
            subprocess.check_output([*git, *look], text=True, stderr=subprocess.DEVNULL) for look in looks
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changes.strip() else "")


_COMMIT = source_commit()  # now, where the code is read: a checkout may move on while a run lasts
