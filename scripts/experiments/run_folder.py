"""The folder of a run: its arguments, its metrics and the rule by which it is resumed and never overwritten."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from experiments.arguments import UserError
from experiments.results import write_atomically


ARGUMENTS_FILE = "arguments.yaml"
METRICS_FILE = "metrics.json"

# What may differ between the first and the second half of a run that was cut in two.
_FREE_ARGUMENTS = {"output_dir", "disable_tqdm", "dataloader_num_workers", "test_file"}
# What is said about one start and is no part of the run, and what must not be written down.
_UNRECORDED_ARGUMENTS = {"overwrite", "resume_from_checkpoint", "hub_token"}


def recorded_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """What `arguments.yaml` holds of the arguments that a run was started with."""
    return {name: value for name, value in given.items() if name not in _UNRECORDED_ARGUMENTS}


def check_run_folder(folder: str | Path, arguments: dict[str, Any], overwrite: bool, inputs: Iterable[str]) -> None:
    """
    Check that a run may use a folder, and write nothing.

    A new or empty folder may be taken, and so may one that holds the same run, cut short, which is resumed. With
    `overwrite` a folder that holds another run, or this one finished, may be emptied.

    Args:
        folder (`str` or `Path`): The output folder.
        arguments (`dict`): The run's [`recorded_arguments`].
        overwrite (`bool`): Whether another run in the folder may be deleted.
        inputs (iterable of `str`): Paths that the run reads, which must not be deleted with the folder.

    Raises:
        UserError: if the folder holds another run, a finished run or other files.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file; name a folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / ARGUMENTS_FILE).is_file():
        raise UserError(f"--output_dir {folder} holds files that are no run of this script; choose another folder.")
    obstacle = _obstacle(folder, arguments)
    if obstacle is None:
        return
    if not overwrite:
        raise UserError(
            f"--output_dir {folder} holds {obstacle}; choose another folder, or pass --overwrite to delete it."
        )
    for needed in (Path.cwd(), *map(Path, inputs)):
        if needed.exists() and needed.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"--overwrite would delete {needed}, which this run needs; choose another --output_dir.")


def is_finished_run(folder: str | Path, arguments: dict[str, Any]) -> bool:
    """Whether a folder holds the run with these [`recorded_arguments`], finished."""
    return (Path(folder) / METRICS_FILE).is_file() and _changes(Path(folder), arguments) == []


def claim_run_folder(folder: str | Path, arguments: dict[str, Any]) -> bool:
    """
    Take a folder that [`check_run_folder`] has let pass; `arguments.yaml` then records the run.

    Returns:
        `bool`: whether the run begins here, and is not one that is resumed.

    Raises:
        UserError: if the folder cannot be written.
    """
    folder = Path(folder)
    try:
        if (folder / ARGUMENTS_FILE).is_file():
            if _obstacle(folder, arguments) is None:
                return False
            shutil.rmtree(folder)
        write_atomically(folder / ARGUMENTS_FILE, yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be written ({error.strerror}).") from error
    return True


def _obstacle(folder: Path, arguments: dict[str, Any]) -> str | None:
    """Why a folder with a run cannot be gone on with."""
    changes = _changes(folder, arguments)
    if changes is None:
        return f"a run whose {ARGUMENTS_FILE} cannot be read"
    if changes:
        return f"another run ({', '.join(changes)})"
    return "this very run, finished" if (folder / METRICS_FILE).is_file() else None


def _changes(folder: Path, arguments: dict[str, Any]) -> list[str] | None:
    """In what the run in a folder differs from one with `arguments`; None if that cannot be read."""
    try:
        earlier = yaml.safe_load((folder / ARGUMENTS_FILE).read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, OSError):
        return None
    return [
        f"{name}: {earlier.get(name, 'default')} there, {arguments.get(name, 'default')} here"
        for name in sorted(set(earlier) | set(arguments))
        if name not in _FREE_ARGUMENTS and earlier.get(name) != arguments.get(name)
    ]


def find_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint of a run: the Trainer writes `trainer_state.json` last."""
    states = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json")
    checkpoints = sorted((state.parent for state in states), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    return str(checkpoints[-1]) if checkpoints else None
