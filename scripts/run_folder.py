"""The folder of a run: its arguments, its metrics and the rule by which it is resumed and never overwritten."""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from arguments import UserError


ARGUMENTS_FILE = "arguments.yaml"
METRICS_FILE = "metrics.json"

# What may differ between the first and the second half of a run that was cut in two.
_FREE_ARGUMENTS = {"output_dir", "overwrite", "resume_from_checkpoint", "disable_tqdm", "dataloader_num_workers"}


def prepare_run_folder(folder: str | Path, arguments: dict[str, Any], overwrite: bool) -> None:
    """
    Claim a folder for a run.

    A new or empty folder is taken. A folder with the same run, cut short, is resumed. Any other content is an error,
    unless it is to be overwritten. `arguments.yaml` records what the run was started with; it can be given as
    `--recipe`.

    Args:
        folder (`str` or `Path`): The output folder.
        arguments (`dict`): The run's arguments that are not at their defaults.
        overwrite (`bool`): Delete what is there.

    Raises:
        UserError: if the folder holds another run, a finished run or other files.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file; name a folder.")
    if overwrite and folder.exists():
        shutil.rmtree(folder)
    if folder.exists() and any(folder.iterdir()):
        _check_same_run(folder, arguments)
    write_atomically(folder / ARGUMENTS_FILE, yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True))


def _check_same_run(folder: Path, arguments: dict[str, Any]) -> None:
    remedy = "choose another --output_dir, or pass --overwrite to delete what is there"
    if not (folder / ARGUMENTS_FILE).is_file():
        raise UserError(f"--output_dir {folder} holds files that are no run of this script; {remedy}.")
    earlier = yaml.safe_load((folder / ARGUMENTS_FILE).read_text(encoding="utf-8")) or {}
    different = [
        name
        for name in sorted(set(earlier) | set(arguments))
        if name not in _FREE_ARGUMENTS and earlier.get(name) != arguments.get(name)
    ]
    if different:
        changes = ", ".join(
            f"{n}: {earlier.get(n, 'default')} there, {arguments.get(n, 'default')} here" for n in different
        )
        raise UserError(f"--output_dir {folder} holds another run ({changes}); {remedy}.")
    if (folder / METRICS_FILE).is_file():
        raise UserError(f"--output_dir {folder} holds this very run, finished; {remedy}.")


def find_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint of a run: the Trainer writes `trainer_state.json` last."""
    states = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json")
    checkpoints = sorted((state.parent for state in states), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    return str(checkpoints[-1]) if checkpoints else None


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
    }


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
