"""CIFAR-10 as sequences of grey pixels, row by row, and noise on them."""

import io
import lzma
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.arguments import UserError, one_line
from experiments.loading import explained_errors, load_prepared
from experiments.lra.examples import Examples
from experiments.model_card import public_name


HUB_DATASET = "uoft-cs/cifar10"
_FETCH = "--data_dir cifar-10-python.tar.gz, fetched from https://www.cs.toronto.edu/~kriz/cifar.html"
SIDE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Ten-thousandths of red, green and blue, as the benchmark makes them grey: whole, so that halves are exact anywhere.
_LUMA = np.array([2989, 5870, 1140], dtype=np.int32)
_HELD_OUT = 10  # of so many training pictures the last one of ten parts chooses the model
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def read_images(path: Path) -> dict[str, Examples]:
    """
    Read pictures from a file or folder: training, the last tenth of it for validation, and test.

    Args:
        path (`Path`): An `.npz` with `x_train`, `y_train`, `x_test` and `y_test`; or the original archive
            `cifar-10-python.tar.gz`, or the folder that is in it.

    Returns:
        The parts `train`, `validation` and `test`, sequences of 1,024 grey values.

    Raises:
        UserError: if there is no such file, or it holds something else.
    """
    try:
        if path.is_dir():
            return split_images(_unpickle((path / name).read_bytes() for name in _names()), path.resolve().name)
        if path.suffix == ".npz":
            with np.load(path) as file:
                if lacking := [name for name in _ARRAYS if name not in file]:
                    raise UserError(f"{path} has no {', '.join(lacking)}; it needs {', '.join(_ARRAYS)}.")
                arrays = [file[name] for name in tqdm(_ARRAYS, f"Reading {path.name}", disable=None)]
            return split_images(arrays, path.name)
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive.getmembers()}
            files = (archive.extractfile(members[name]) for name in _names())
            return split_images(_unpickle(file.read() for file in files if file), path.name)
    except UserError:
        raise
    except (
        OSError,
        LookupError,
        AttributeError,
        ImportError,
        ValueError,
        TypeError,
        EOFError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        pickle.PickleError,
    ) as error:
        what = "an .npz, cifar-10-python.tar.gz or the folder cifar-10-batches-py that is in it"
        raise UserError(f"{path} cannot be read as pictures ({one_line(error)}); give {what}.") from error


def load_images(name: str, revision: str | None, cache_dir: str | None) -> dict[str, Examples]:
    """The same from the Hub, with the columns `img` and `label`."""
    with explained_errors(name, _FETCH, "give another --dataset_name"):
        splits = load_prepared(name, None, revision, cache_dir)
        arrays = []
        for part in ("train", "test"):
            if part not in splits or not {"img", "label"} <= set(splits[part].column_names):
                raise UserError(f"{name} has no part {part} with the columns img and label; give another data set.")
            rows = enumerate(tqdm(splits[part]["img"], f"Reading {name}", disable=None), start=1)
            arrays += [np.stack([_to_array(picture, f"{name}, {part}, row {number}") for number, picture in rows])]
            arrays += [np.asarray(splits[part]["label"])]
    return split_images(arrays, public_name(name))


def _to_array(picture: Any, where: str) -> np.ndarray:
    if picture is None:
        raise UserError(f"{where} has no picture; give another data set.")
    return np.asarray(picture.convert("RGB"))


def split_images(arrays: Any, source: str) -> dict[str, Examples]:
    """Parts from pictures and labels of training and test; colours become grey."""
    train, train_labels, test, test_labels = arrays
    parts = {}
    if len(train) < _HELD_OUT:
        raise UserError(f"{source} has {len(train)} training pictures; give at least {_HELD_OUT}.")
    for part, pictures, labels in (("train", train, train_labels), ("test", test, test_labels)):
        if pictures.ndim == 4 and pictures.shape[-1] == 1:
            pictures = pictures[..., 0]
        if pictures.ndim == 4 and pictures.shape[-1] != len(_LUMA):
            raise UserError(
                f"{source} has pictures of shape {pictures.shape[1:]}; colours stand last, red, green, blue."
            )
        if not len(pictures):
            raise UserError(f"{source} has no picture for {part}.")
        lowest, highest = (float(of(initial=0)) for of in (pictures.min, pictures.max))
        is_whole = pictures.dtype.kind in "iu" or bool((pictures == np.rint(pictures)).all())
        if not (0 <= lowest and 1 < highest <= 255 and is_whole):
            raise UserError(f"{source} has pixels from {lowest:g} to {highest:g}; they must be whole, from 0 to 255.")
        sides = pictures.shape[1:3]  # which pictures given as rows of pixels have none of
        if pictures.ndim == 4:
            pictures = pictures.astype(np.int32) @ _LUMA / 10_000
        pictures = np.rint(pictures).astype(np.uint8).reshape(len(pictures), -1)
        if pictures.shape[1] != SIDE * SIDE:
            raise UserError(f"{source} has pictures of {pictures.shape[1]} pixels; they must be {SIDE} x {SIDE}.")
        if len(sides) > 1 and sides != (SIDE, SIDE):
            raise UserError(f"{source} has pictures of {sides[0]} x {sides[1]} pixels; they must be {SIDE} x {SIDE}.")
        labels = np.ravel(labels)
        if len(labels) != len(pictures):
            raise UserError(f"{source} has {len(pictures)} pictures for {part} and {len(labels)} labels.")
        if strange := set(labels.tolist()) - set(range(len(CLASSES))):
            what = f"the label {min(strange, key=str)} for {part}; labels must be whole, from 0 to {len(CLASSES) - 1}"
            raise UserError(f"{source} has {what}.")
        parts[part] = Examples.of_rows(pictures, labels, source)
    kept = len(train) - len(train) // _HELD_OUT
    numbers = range(len(train))
    return {
        "train": parts["train"].select(numbers[:kept]),
        "validation": parts["train"].select(numbers[kept:]),
        "test": parts["test"],
    }


def add_noise(parts: Mapping[str, Examples], amplitude: float, seed: int) -> dict[str, Examples]:
    """Add noise from U(-amplitude, amplitude) to each value, rounded and kept within 0 to 255: the paper's Table 5."""
    noisy = {}
    for number, (part, examples) in enumerate(parts.items()):
        noise = np.random.default_rng([seed, number]).uniform(-amplitude, amplitude, examples.values.shape)
        values = np.rint(examples.values + noise).clip(0, 255).astype(np.uint8)
        noisy[part] = replace(examples, values=values)
    return noisy


def _names() -> list[str]:
    return [name for names in _BATCHES.values() for name in names]


class _Unpickler(pickle.Unpickler):
    """Knows arrays alone, because a pickle from elsewhere may run anything."""

    _KNOWN = ("numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode")

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")  # as NumPy was cut when the archive was made
        if f"{module}.{name}" in self._KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of CIFAR-10")


def _unpickle(contents: Iterator[bytes]) -> list[np.ndarray]:
    """Training and test pictures `(num_pictures, 32, 32, 3)` and labels of the original batches."""
    batches = {
        name: _Unpickler(io.BytesIO(b), encoding="bytes").load() for name, b in zip(_names(), contents, strict=True)
    }
    arrays = []
    for names in _BATCHES.values():
        data = np.concatenate([batches[name][b"data"] for name in names])
        arrays += [data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)]
        arrays += [np.concatenate([batches[name][b"labels"] for name in names])]
    return arrays
