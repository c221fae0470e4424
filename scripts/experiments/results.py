"""Results: files that are there as a whole or not at all, and where their numbers come from."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


# Of the environment: they say how memory is taken and given back, which changes times on processors.
_ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_")


def write_atomically(path: str | Path, text: str) -> None:
    """Write a text file so that it is there as a whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: str | Path, values: Any) -> None:
    """Write JSON as [`write_atomically`] does."""
    write_atomically(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def describe_environment() -> dict[str, Any]:
    """Versions, device and the project's commit: what a result has to be read with."""
    packages = ("torch", "transformers", "datasets", "accelerate", "tokenizers")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor_name()
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "device": device,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        **{name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ALLOCATOR_VARIABLES)},
    }


def format_origin(script: str, environment: dict[str, Any], commits: Iterable[Any]) -> str:
    """One sentence under a table: what wrote it, from which code, with which versions and on which machine."""
    versions = ", ".join(f"{key} {environment[key]}" for key in ("python", "torch", "transformers"))
    allocator = [f", {name}={environment[name]}" for name in environment if name.startswith(_ALLOCATOR_VARIABLES)]
    return (
        f"Written by `scripts/{script}` at {', '.join(map(str, commits))}: {versions}, {environment['device']}, "
        f"{environment['threads']} thread(s){''.join(allocator)}."
    )


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({os.cpu_count()} cores)"
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} cores)"


def _commit() -> str | None:
    """The commit of the source tree, with a + if files in it have changed; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")
