"""
The folder of a run: what the run is, what it has measured, and the rule by which it goes on and is never overwritten.

A run is what decides its result: data, model, optimisation, global batch and seed. Everything else may change when it
is started again, and it may be made longer.
"""

import glob
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from filelock import FileLock, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from experiments.arguments import UserError, load_recipe
from experiments.results import read_json, write_atomically, write_json


logger = logging.getLogger(__name__)

State: TypeAlias = Literal["new", "resumed", "grown", "finished"]

ARGUMENTS_FILE = "arguments.yaml"
METRICS_FILE = "metrics.json"
RUN_FILE = "run.json"
# Where a run that --overwrite deletes waits until the one in its place has come to something.
_SET_ASIDE = ".overwritten"
# Where what says that a run is finished waits until the longer one has come to something.
_FINISHED = ".finished"
_LEFT_FILE = ".left"  # what there was of models and checkpoints then
# What a process that was killed, or met a full disk, may leave behind.
_LEFT_OVER = re.compile(r"\.lock|\.(arguments\.yaml|run\.json)\.\d+")
# What is said about one start and is no part of the run, and what must not be written down.
_UNRECORDED_ARGUMENTS = {"overwrite", "resume_from_checkpoint", "hub_token"}


@dataclass(frozen=True)
class RunIdentity:
    """What makes a run this one and not another."""

    decides: dict[str, Any]  # the result, and is compared for equality: numbers, words, fingerprints of data by name
    length: dict[str, float]  # may grow: `max_steps` and, where these are below 1, `num_train_epochs`
    precision: str = "float32"  # of the products; may change with a warning

    @property
    def values(self) -> dict[str, Any]:
        """All of it as JSON gives it back."""
        return json.loads(json.dumps(vars(self), default=str))


def recorded_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """What `arguments.yaml` holds of the arguments that a run was started with."""
    return {name: value for name, value in given.items() if name not in _UNRECORDED_ARGUMENTS}


def folder_state(folder: str | Path, identity: RunIdentity) -> State:
    """
    What a folder holds of a run: `"new"` is nothing, `"resumed"` the run, cut short, `"grown"` a run that was finished
    and is now asked for more steps. Raises a `UserError` if it holds another run or other files.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file; name a folder.")
    if not folder.exists() or all(_LEFT_OVER.fullmatch(path.name) for path in folder.iterdir()):
        return "new"
    if not ((place := _place(folder)) / RUN_FILE).is_file():
        raise UserError(f"--output_dir {folder} holds files that are no run of this script; choose another folder.")
    remedy = "choose another folder, or pass --overwrite to delete it"
    try:
        earlier = json.loads((place / RUN_FILE).read_text(encoding="utf-8"))
        there, here = earlier["decides"], identity.values["decides"]
        changes = _differences(there, here)
        (unit, before), (unit_now, now) = _steps(earlier["length"]), _steps(identity.length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--output_dir {folder} holds a run whose {RUN_FILE} cannot be read; {remedy}.") from error
    if unit != unit_now or now < before:
        changes.append(f"{unit}: {before:g} there, {unit_now}: {now:g} here, and no run can be shortened")
    if changes:
        raise UserError(f"--output_dir {folder} holds another run ({'; '.join(changes)}); {remedy}.")
    if not any((path / METRICS_FILE).is_file() for path in (folder, place)):
        return "resumed"
    return "grown" if now > before else "finished"


def check_run_folder(
    folder: str | Path, identity: RunIdentity, overwrite: bool = False, inputs: Iterable[str] = ()
) -> State:
    """
    Check that a run may use a folder, and write nothing: its [`folder_state`], `"new"` if it is to be emptied first.

    With `overwrite` another run in the folder, or this one finished, may be deleted, but none of the `inputs`, paths
    and patterns that the run reads. Raises a `UserError` as [`folder_state`], or if deleting would take what the run
    needs.
    """
    folder = Path(folder)
    try:
        state = folder_state(folder, identity)
    except UserError:
        if not overwrite or not (_place(folder) / RUN_FILE).is_file():
            raise
        state = "finished"
    if not overwrite or state in ("new", "resumed"):
        return state
    own = (folder / ARGUMENTS_FILE).resolve()  # a recipe that is written again
    # A data set may be written path:config.
    names = [os.path.expanduser(name) for word in inputs for name in (word, word.partition(":")[0]) if name]
    found = [path for name in names for path in glob.glob(name, recursive=True)]
    for path in map(Path, [os.getcwd(), *names, *found]):
        # Not path.exists(), which raises for words that are too long for a name, as a model's fields are.
        if os.path.exists(path) and path.resolve() != own and path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"--overwrite would delete {path}, which this run needs; choose another --output_dir.")
    return "new"


@contextmanager
def claim_run_folder(
    folder: str | Path, identity: RunIdentity, arguments: dict[str, Any], overwrite: bool = False
) -> Iterator[State]:
    """
    Hold a folder that [`check_run_folder`] has let pass, for as long as the run lasts; yields what that returns.

    `run.json` then says what the run is, and `arguments.yaml` how it was started ([`recorded_arguments`]). A folder
    that was new, or is overwritten, is left as it was if the run ends with an error before its first checkpoint or
    model, and one that is overwritten, or holds a finished run that was to grow, also if it is interrupted there.
    Raises a `UserError` if another process holds the folder, or it cannot be written.
    """
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        remedy = "wait for it, or choose another folder"
        raise UserError(f"Another process is at work in --output_dir {folder}; {remedy}.") from error
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be written ({error.strerror}).") from error
    try:
        if (place := _place(folder)) != folder:
            _put_back(place)
        shutil.rmtree(folder / _FINISHED, ignore_errors=True)  # of a longer run that has come to something
        state = check_run_folder(folder, identity, overwrite)
        if state == "new":
            _set_aside(folder)
        try:
            with _growing(folder) if state == "grown" else nullcontext():
                if state in ("resumed", "grown"):
                    earlier = read_json(folder / RUN_FILE).get("precision")
                    if earlier != identity.precision:
                        logger.warning("The run began in %s and goes on in %s.", earlier, identity.precision)
                if state != "finished":
                    write_json(folder / RUN_FILE, identity.values)
                    text = yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True)
                    write_atomically(folder / ARGUMENTS_FILE, text)
                yield state
        except BaseException as error:
            # An interrupted run goes on, unless it took the place of one that is still there.
            took_a_place = (folder / _SET_ASIDE).is_dir()
            goes_on = not isinstance(error, Exception) and not took_a_place
            # What is finished stays, and so do runs in folders of this one, which are its work; in the place of
            # another run only those that have come to something.
            nested = [file.parent for file in folder.glob(f"[!.]*/{RUN_FILE}")]
            is_work = _has_results(folder) or (any(map(_has_results, nested)) if took_a_place else bool(nested))
            if (state == "new" or took_a_place) and not goes_on and not is_work:
                _restore(folder)
                with suppress(OSError):  # Windows deletes no file that is open
                    (folder / ".lock").unlink(missing_ok=True)
                for path in made:
                    with suppress(OSError):  # others may have come to stand in it
                        path.rmdir()
            raise
        finally:
            shutil.rmtree(folder / _SET_ASIDE, ignore_errors=True)
    finally:
        lock.release()


def find_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint of a run: the Trainer writes `trainer_state.json` last."""
    complete: dict[int, str] = {}
    for state in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json"):
        with suppress(ValueError):  # where the disk was full it is no JSON
            json.loads(state.read_text(encoding="utf-8"))
            complete[int(state.parent.name.rpartition("-")[2])] = str(state.parent)
    return complete[max(complete)] if complete else None


def trained_length(name: str | None) -> int | None:
    """The longest input that a checkpoint was trained on, where there is one and its folder says so."""
    recorded = load_recipe(file) if name and (file := Path(name) / ARGUMENTS_FILE).is_file() else {}
    return recorded.get("max_seq_length") or recorded.get("excerpt_length")


@contextmanager
def _growing(folder: Path) -> Iterator[None]:
    """Make a finished run one that goes on, or, if that ends before there is a checkpoint or model, finished again."""
    aside = folder / _FINISHED
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    write_json(aside / _LEFT_FILE, _left(folder))
    for name in (METRICS_FILE, ARGUMENTS_FILE, RUN_FILE):  # the last one makes the folder the place of the run
        if (folder / name).is_file():
            write_atomically(aside / name, (folder / name).read_text(encoding="utf-8"))
    (folder / METRICS_FILE).unlink()
    try:
        yield
    except BaseException:
        if _place(folder) == aside:
            _put_back(aside)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _has_results(folder: Path) -> bool:
    """Whether a run has left a checkpoint, metrics or a trained model."""
    return any((find_checkpoint(folder), *folder.glob(METRICS_FILE), *folder.glob("*.safetensors")))


def _place(folder: Path) -> Path:
    """Where a folder's run lies: in it, or set aside by a process that was killed before its own came to something."""
    aside, finished = folder / _SET_ASIDE, folder / _FINISHED
    if (aside / RUN_FILE).is_file() and not (folder / RUN_FILE).is_file():
        return aside
    is_kept = (finished / RUN_FILE).is_file() and read_json(finished / _LEFT_FILE, []) == _left(folder)
    return finished if is_kept else folder


def _left(folder: Path) -> list[Any]:
    """A run's checkpoints and models, with the times at which they were written."""
    files = [*folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json"), *folder.glob("*.safetensors")]
    return [[path.relative_to(folder).as_posix(), path.stat().st_mtime_ns] for path in sorted(files)]


def _contents(folder: Path) -> list[Path]:
    """What is in a folder but for the lock that is held and what was set aside; what says that it is a run first."""
    paths = (path for path in folder.iterdir() if path.name not in (".lock", _SET_ASIDE, _LEFT_FILE))
    return sorted(paths, key=lambda path: path.name != RUN_FILE)


def _set_aside(folder: Path) -> None:
    """Empty a folder in a way that [`_restore`] undoes."""
    shutil.rmtree(folder / _SET_ASIDE, ignore_errors=True)  # of a process that was killed
    for path in _contents(folder):
        (folder / _SET_ASIDE).mkdir(exist_ok=True)
        path.rename(folder / _SET_ASIDE / path.name)


def _restore(folder: Path) -> None:
    """Delete what has come into a folder since [`_set_aside`], and put back what was there."""
    for path in _contents(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    _put_back(folder / _SET_ASIDE)


def _put_back(place: Path) -> None:
    """Move what was set aside to where it was, what says that it is a run last."""
    if place.is_dir():
        for path in reversed(_contents(place)):
            path.replace(place.parent / path.name)
        (place / _LEFT_FILE).unlink(missing_ok=True)
        place.rmdir()


def _differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> list[str]:
    """In what two identities differ, for people: of mappings their fields; whether anything is trained says it all."""
    names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    differences = []
    for name in ["do_train"] if "do_train" in names else names:
        values = there.get(name, "none"), here.get(name, "none")
        if all(isinstance(value, dict) for value in values):
            differences += _differences(*values, f"{prefix}{name}.")
        else:
            before, now = (text if len(text := str(value)) <= 80 else f"{text[:77]}..." for value in values)
            differences.append(f"{prefix}{name}: {before} there, {now} here")
    return differences


def _steps(length: dict[str, float]) -> tuple[str, float]:
    """How long a run is to last, and in what."""
    name = "max_steps" if length.get("max_steps", -1) > 0 else "num_train_epochs"
    return name, float(length[name])
