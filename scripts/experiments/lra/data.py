"""The data of a task of Long Range Arena: read where they are given, else made by a seed or read from the Hub."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock

from experiments.arguments import UserError, explained, flag, recipe_to_flags, require_at_least
from experiments.lra import images, listops, pathfinder, texts
from experiments.lra.examples import PARTS, Examples, part_sizes
from experiments.lra.listops import ListOpsLimits
from experiments.lra.tasks import TASKS
from experiments.model_card import public_name
from experiments.results import check_writable


CACHE = Path("runs/lra-data")
_LIMITS = tuple(field.name for field in fields(ListOpsLimits))
# Flags of one task alone.
_FLAGS_OF = {"listops": _LIMITS, "retrieval": ("stand_in",), "image": ("noise",)}
# Flags without which a model would be measured on other data than it was made for, wherever those lie.
_DECISIVE = (
    *(*_LIMITS, "num_generated", "generation_seed", "stand_in", "dataset_name", "dataset_revision"),
    *("noise", "max_seq_length", "max_predict_samples"),
)


@dataclass
class LraArguments:
    """The task and its data."""

    task_name: Literal[tuple(TASKS)] = flag(MISSING, "The task.")  # type: ignore[valid-type]
    data_dir: str | None = flag(None, "Its published data: a folder, or of Image and Pathfinder a file, too.")
    dataset_name: str | None = flag(None, "Its data on the Hub, in place of the usual ones (Image and Text).")
    dataset_revision: str | None = flag(None, "Their commit, tag or branch.")
    cache_dir: str | None = flag(None, f"Folder of data that are made (by default {CACHE}), or read from the Hub.")
    num_generated: int | None = flag(None, "Examples to make: by default as many as published, of a stand-in 10,000.")
    generation_seed: int = flag(0, "Seed of what is made and of noise, whichever --seed trains.")
    min_length: int = flag(ListOpsLimits.min_length, "ListOps: expressions have more symbols than this,")
    max_length: int = flag(ListOpsLimits.max_length, "and fewer than this.")
    max_depth: int = flag(ListOpsLimits.max_depth, "ListOps: levels of an expression.")
    max_args: int = flag(ListOpsLimits.max_args, "ListOps: the most arguments of an operator.")
    stand_in: bool = flag(False, "Retrieval: make pairs that stand in for the published ones.")
    noise: float = flag(0.0, "Image: add noise from U(-a, a) to the pixels of all parts; a up to 255.")
    max_seq_length: int | None = flag(
        None, "Longest input; the rest of longer ones is cut, of ListOps none may be longer. By default the task's."
    )
    max_train_samples: int | None = flag(None, "Train on so many examples, spread evenly over all.")
    max_eval_samples: int | None = flag(None, "Likewise for validation.")
    max_predict_samples: int | None = flag(None, "Likewise for the test.")
    draw_examples: bool = flag(False, "Image, Pathfinder: draw training pictures beside the run, at its end into it.")
    preprocessing_num_workers: int | None = flag(None, "Processes that make data; by default one for each core.")

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_train_samples", "max_eval_samples", "max_predict_samples")
        require_at_least(1, self, "max_seq_length", "preprocessing_num_workers")
        require_at_least(100, self, "num_generated")
        require_at_least(0, self, "noise", "generation_seed")
        task = TASKS[self.task_name]
        for of, name in ((of, name) for of, names in _FLAGS_OF.items() for name in names):
            if getattr(self, name) != getattr(LraArguments, name) and self.task_name != of:
                raise UserError(f"--{name} is for --task_name {of}; leave it out.")
            if getattr(self, name) != getattr(LraArguments, name) and name in _LIMITS and self.data_dir:
                raise UserError(f"--{name} says what is made, and --data_dir what is read; leave one of them out.")
        is_made = not self.data_dir and (task.is_made or self.stand_in)
        if self.num_generated and not is_made:
            raise UserError("--num_generated: nothing is made here; leave it out.")
        if self.generation_seed != LraArguments.generation_seed and not (is_made or self.noise):
            raise UserError("--generation_seed: nothing is made here, nor is there --noise; leave it out.")
        if self.dataset_revision and (self.data_dir or not task.hub):
            raise UserError("--dataset_revision: nothing is read from the Hub here; leave it out.")
        of_tasks_made = task.is_made and is_made  # a stand-in is made at once
        if self.preprocessing_num_workers and not of_tasks_made:
            raise UserError("--preprocessing_num_workers: nothing is made here by processes; leave it out.")
        if self.cache_dir and self.stand_in:
            raise UserError("--cache_dir: a stand-in is made anew for each run, and is not kept; leave it out.")
        if self.draw_examples and not task.is_picture:
            raise UserError(f"--draw_examples: {task.title} has no pictures; leave it out.")
        if self.noise > 255:
            raise UserError(f"--noise is {self.noise:g}; pixels end at 255.")
        if self.dataset_name and not task.hub:
            raise UserError(f"--dataset_name: {task.title} is not read from the Hub; give --data_dir.")
        if self.data_dir and (self.dataset_name or self.stand_in):
            raise UserError("--data_dir and --dataset_name or --stand_in name several data sets; give one.")
        if self.max_seq_length and task.is_picture and self.max_seq_length != task.max_length:
            raise UserError(
                f"--max_seq_length {self.max_seq_length}: a picture has {task.max_length} pixels; leave it out."
            )

    @property
    def is_partial(self) -> bool:
        """Whether not all examples are used, or others are made than the benchmark has."""
        is_other = not self.data_dir and (
            self.stand_in
            or self.num_generated not in (None, TASKS[self.task_name].count)
            or any(getattr(self, name) != getattr(LraArguments, name) for name in _LIMITS)
        )
        return is_other or any((self.max_train_samples, self.max_eval_samples, self.max_predict_samples))

    @property
    def length(self) -> int:
        """The longest input: of expressions that are made, as long as they are made at most."""
        makes_expressions = self.task_name == "listops" and not self.data_dir
        longest = self.max_length if makes_expressions else TASKS[self.task_name].max_length
        return self.max_seq_length or longest

    def path(self) -> Path | None:
        """Where published data lie; a `UserError` if nothing is there."""
        if self.data_dir and not Path(self.data_dir).exists():
            there = f"there is no such file or folder (it is read from {Path.cwd()})"
            raise UserError(f"--data_dir {self.data_dir}: {there}.")
        return Path(self.data_dir) if self.data_dir else None

    def decisive_flags(self) -> list[str]:
        """The flags, where they are not as they are by default, that give data like these again."""
        given = {name: getattr(self, name) for name in _DECISIVE}
        given = {name: value for name, value in given.items() if value != getattr(LraArguments, name)}
        if self.dataset_name:
            given["dataset_name"] = public_name(self.dataset_name)
        return recipe_to_flags(given)

    @property
    def how_to_make(self) -> tuple[int, int | None]:
        """The seed of what is made, and the processes that make it."""
        return self.generation_seed, self.preprocessing_num_workers

    def made(self, name: str) -> Path:
        """Where data that are made are kept."""
        return Path(self.cache_dir or CACHE) / name


def load_parts(arguments: LraArguments) -> dict[str, Examples]:
    """
    The parts `train`, `validation` and `test` of a task.

    Raises:
        UserError: if they are not there, cannot be made or are malformed, in one line that says where.
    """
    task = TASKS[arguments.task_name]
    parts = _READERS[arguments.task_name](arguments)
    longest = max(int(part.lengths.max(initial=0)) for part in parts.values())
    if not task.can_be_cut and longest > arguments.length:
        raise UserError(
            f"An input of {task.title} has {longest} values, more than --max_seq_length {arguments.length}, and would "
            f"have another label if it were cut; give --max_seq_length {longest}{_or_shorter(arguments)}."
        )
    if arguments.noise:
        parts = images.add_noise(parts, arguments.noise, arguments.generation_seed)
    limits = (arguments.max_train_samples, arguments.max_eval_samples, arguments.max_predict_samples)
    for name, limit in zip(PARTS, limits, strict=True):
        part = parts[name]
        if limit and limit < len(part):
            part = part.select(np.linspace(0, len(part) - 1, limit).round().astype(int).tolist())
        parts[name] = part
    return parts


def _or_shorter(arguments: LraArguments) -> str:
    is_made = arguments.task_name == "listops" and not arguments.data_dir
    return ", or make shorter ones with --min_length and --max_length" if is_made else ""


def _make_once(arguments: LraArguments, files: Sequence[Path], make: Callable[[], Any]) -> None:
    """Make files that are not there; of several processes one makes them, and the others wait."""
    if not all(file.is_file() for file in files):
        cache = Path(arguments.cache_dir or CACHE)
        check_writable(cache, "cache_dir")  # before long work is lost
        lock = FileLock(cache / f".{files[0].relative_to(cache).parts[0]}.lock")
        with explained(f"--cache_dir {cache} cannot be locked"):
            lock.acquire()
        try:
            if not all(file.is_file() for file in files):
                make()
        finally:
            lock.release()


@contextmanager
def _explained_if_made(path: Path, arguments: LraArguments) -> Iterator[None]:
    """Of what was made earlier, nobody has to mend a line."""
    try:
        yield
    except UserError as error:
        if arguments.data_dir:
            raise
        raise UserError(f"{path}, made earlier, is damaged; delete it, and it is made again. ({error})") from error


def _read_listops(arguments: LraArguments) -> dict[str, Examples]:
    folder = arguments.path()
    if folder and folder.is_file():
        raise UserError(f"--data_dir {folder} is a file; give the folder with {', '.join(listops.FILES.values())}.")
    if folder is None:
        numbers = [getattr(arguments, name) for name in _LIMITS]
        limits, count = ListOpsLimits(*numbers), arguments.num_generated or TASKS["listops"].count
        folder = arguments.made("-".join(map(str, ["listops", *numbers, count, "seed", arguments.generation_seed])))
        files, sizes = [folder / name for name in listops.FILES.values()], part_sizes(count, count // 50)
        _make_once(arguments, files, partial(listops.generate_listops, folder, limits, sizes, *arguments.how_to_make))
    with _explained_if_made(folder, arguments):
        return {part: listops.read_listops(folder / name) for part, name in listops.FILES.items()}


def _read_pathfinder(arguments: LraArguments) -> dict[str, Examples]:
    path = arguments.path()
    if path is None:
        count = arguments.num_generated or TASKS["pathfinder"].count
        path = arguments.made(f"pathfinder-{count}-seed-{arguments.generation_seed}.npz")
        _make_once(arguments, [path], partial(pathfinder.generate_pathfinder, path, count, *arguments.how_to_make))
    with _explained_if_made(path, arguments):
        return pathfinder.read_pathfinder(path)


def _read_images(arguments: LraArguments) -> dict[str, Examples]:
    if path := arguments.path():
        return images.read_images(path)
    return images.load_images(
        arguments.dataset_name or images.HUB_DATASET, arguments.dataset_revision, arguments.cache_dir
    )


def _read_texts(arguments: LraArguments) -> dict[str, Examples]:
    if folder := arguments.path():
        return texts.read_reviews(folder, arguments.length, arguments.cache_dir)
    name = arguments.dataset_name or texts.IMDB
    return texts.load_reviews(name, arguments.dataset_revision, arguments.cache_dir, arguments.length)


def _read_pairs(arguments: LraArguments) -> dict[str, Examples]:
    if folder := arguments.path():
        return texts.read_pairs(folder, arguments.length)
    if arguments.stand_in:
        count = arguments.num_generated or 10_000
        return texts.make_pairs(part_sizes(count, count // 10), arguments.length, arguments.generation_seed)
    raise UserError(
        "Retrieval needs the published pairs: fetch https://storage.googleapis.com/long-range-arena/lra_release.gz, "
        "and give --data_dir lra_release/lra_release/tsv_data; or make others with --stand_in."
    )


# What gives the parts of a task.
_READERS: Mapping[str, Callable[[LraArguments], dict[str, Examples]]] = {
    "listops": _read_listops,
    "text": _read_texts,
    "retrieval": _read_pairs,
    "image": _read_images,
    "pathfinder": _read_pathfinder,
}
