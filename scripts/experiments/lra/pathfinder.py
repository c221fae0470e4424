"""Pathfinder of Long Range Arena: are two markers joined by a dashed contour among others (1) or not (0)?"""

import contextlib
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from experiments.arguments import UserError, one_line
from experiments.lra.contours import PathfinderParameters
from experiments.lra.examples import PARTS, Examples, part_sizes
from experiments.lra.scenes import make_scenes
from experiments.parallel import map_parts, split_work
from experiments.results import replace_file


SIZE = 32  # pixels of an image's side, as they are read
COUNT = 200_000  # images of the published set
PUBLISHED = "curv_contour_length_14"  # its folder, of three the hard one

_PART = 500  # images that a process makes at a time


def generate_pathfinder(
    file: str | Path,
    count: int = COUNT,
    seed: int = 0,
    processes: int | None = None,
    parameters: PathfinderParameters | None = None,
) -> None:
    """
    Write an `.npz` of `count` images, half of each class: `images`, uint8 of shape `(count, image_size ** 2)` row by
    row, and `labels`, uint8. It does not depend on the number of processes.

    Raises:
        UserError: if `count` is less than 1, or contours do not fit into an image.
    """
    if count < 1:
        raise UserError(f"{count} images: give at least 1.")
    p = parameters or PathfinderParameters()
    labels = np.random.default_rng(seed).permutation(np.arange(count) % 2).astype(np.uint8)
    images = []
    parts = ((labels[part.start : part.stop], child) for part, child in split_work(count, _PART, seed))
    drawn = contextlib.closing(map_parts(partial(_make_images, p), parts, processes))
    with drawn as results, tqdm(total=count, desc="Pathfinder", unit=" images", disable=None) as progress:
        for result in results:
            images.append(result)
            progress.update(len(result))
    with replace_file(file) as unfinished, open(unfinished, "wb") as stream:
        np.savez_compressed(stream, images=np.concatenate(images), labels=labels)


def _make_images(p: PathfinderParameters, part: tuple[np.ndarray, np.random.SeedSequence]) -> np.ndarray:
    labels, seed = part
    return make_scenes(labels, np.random.default_rng(seed), p).draw().reshape(len(labels), -1)


def read_pathfinder(path: str | Path) -> dict[str, Examples]:
    """
    Training, validation and test examples, 80, 10 and 10 % by a shuffle that is always the same.

    Args:
        path (`str` or `Path`): A file of [`generate_pathfinder`]; or the published folder `curv_contour_length_14`,
            or one that holds it.

    Raises:
        UserError: names the file that cannot be read, an image of another size or a label other than 0 and 1.
    """
    path = Path(path)
    return split_pathfinder(_read_folder(path) if path.is_dir() else _read_file(path))


def split_pathfinder(examples: Examples) -> dict[str, Examples]:
    """The three parts of at least three images; each has at least one."""
    order = np.random.default_rng(0).permutation(len(examples))
    sizes = part_sizes(len(examples), max(1, len(examples) // 10))
    borders = np.cumsum(list(sizes.values()))[:-1]
    return {part: examples.select(rows.tolist()) for part, rows in zip(sizes, np.split(order, borders), strict=True)}


def _to_examples(images: np.ndarray, labels: np.ndarray, path: Path) -> Examples:
    if len(images) < len(PARTS):
        raise UserError(f"{path} has {len(images)} images; three parts need at least 3.")
    lengths = np.full(len(images), SIZE * SIZE)
    return Examples(images.reshape(-1), lengths, labels.astype(np.int64), path.resolve().name)


def _read_file(path: Path) -> Examples:
    try:
        with np.load(path) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); give an .npz with images and labels.") from error
    if images.dtype != np.uint8 or images.shape[1:] != (SIZE * SIZE,) or labels.shape != images.shape[:1]:
        raise UserError(
            f"{path}: images are {images.dtype} {images.shape}, labels {labels.shape}; images must be uint8 of "
            f"{SIZE} x {SIZE} pixels in a row each, with a label each."
        )
    wrong = np.flatnonzero((labels != 0) & (labels != 1))
    if len(wrong):
        raise UserError(f"{path}: image {wrong[0]} has label {labels[wrong[0]]}; labels are 0 and 1.")
    return _to_examples(images, labels, path)


def _read_folder(path: Path) -> Examples:
    """The images that the files in `metadata` name, in their order."""
    folder = path if (path / "metadata").is_dir() else path / PUBLISHED
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise UserError(f"{path} has no metadata/*.npy with labels; give the folder {PUBLISHED}, or an .npz.")
    rows = [row for file in files for row in _read_metadata(file)]
    images = np.empty((len(rows), SIZE, SIZE), dtype=np.uint8)
    for number, (name, _) in enumerate(tqdm(rows, "Pathfinder", unit=" images", disable=None)):
        try:
            with Image.open(folder / name) as image:
                pixels = np.asarray(image.convert("L"))
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{folder / name} cannot be read ({one_line(error)}); fetch it again.") from error
        if pixels.shape != (SIZE, SIZE):
            size = " x ".join(map(str, pixels.shape[::-1]))
            raise UserError(f"{folder / name} has {size} pixels; images of {SIZE} x {SIZE} are read.")
        images[number] = pixels
    return _to_examples(images, np.array([label for _, label in rows]), folder)


def _read_metadata(file: Path) -> Iterator[tuple[str, int]]:
    """Path and label of each row: sub-folder, file name, number, label, and how it was made; as text or an array."""
    try:
        if file.read_bytes().startswith(b"\x93NUMPY"):
            rows = np.load(file).astype(str).tolist()
        else:
            rows = [line.split() for line in file.read_text(encoding="utf-8").rstrip().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({one_line(error)}); fetch it again.") from error
    for number, row in enumerate(rows, 1):
        if len(row) < 4 or row[3] not in ("0", "1"):
            found = f"label {row[3]}" if len(row) > 3 else f"{len(row)} columns"
            raise UserError(f"{file}, line {number} has {found}; give folder, file, number and a label, 0 or 1.")
        yield f"{row[0]}/{row[1]}", int(row[3])
