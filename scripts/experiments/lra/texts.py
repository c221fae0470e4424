"""Reviews and pairs of papers as sequences of bytes."""

import reprlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from experiments.arguments import UserError, one_line
from experiments.loading import explained_errors, load_prepared, read_table_file
from experiments.lra.examples import Examples, strip_table
from experiments.model_card import public_name


IMDB = "stanfordnlp/imdb"
_FETCH = "--data_dir aclImdb, unpacked from https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_HELD_OUT = 10  # every tenth training review of each label chooses the model
_LABELS = {"neg": 0, "pos": 1}
_PAIRS = {
    part: f"new_aan_pairs.{name}.tsv" for part, name in (("train", "train"), ("validation", "eval"), ("test", "test"))
}
_COLUMNS = 5  # label, two names, two texts


def read_reviews(folder: Path, max_length: int, cache_dir: str | None = None) -> dict[str, Examples]:
    """
    Read labelled texts: training, every tenth of it for validation, and test.

    Args:
        folder (`Path`): With `train` and `test`, each a folder of `pos/*.txt` and `neg/*.txt` as the original archive
            has them, or a table (`train.csv`, `train.jsonl`, `train.parquet`, ...) with the columns `text` and
            `label`.
        max_length (`int`): Bytes of each text that are kept.

    Raises:
        UserError: if they are not there, a table has other columns or labels, or a label has fewer than two texts.
    """
    parts = {}
    for part in ("train", "test"):
        tables = sorted(file for file in folder.glob(f"{part}.*") if file.is_file())
        if (folder / part).is_dir():
            files = {name: sorted((folder / part / name).glob("*.txt")) for name in _LABELS}
            if empty := [name for name, found in files.items() if not found]:
                raise UserError(f"{folder / part / empty[0]} has no .txt files; {part} needs pos/*.txt and neg/*.txt.")
            pairs = [(file, _LABELS[name]) for name, found in files.items() for file in found]
            texts = [_read_bytes(file) for file, _ in tqdm(pairs, f"Reading {folder / part}", disable=None)]
            if blank := [file for (file, _), text in zip(pairs, texts, strict=True) if not text.strip()]:
                raise UserError(f"{blank[0]} is empty; mend it or leave it out.")
            parts[part] = (texts, [label for _, label in pairs])
        elif tables:
            parts[part] = _read_columns(str(tables[0]), read_table_file(tables[0], cache_dir))
        else:
            raise UserError(f"{folder} has neither a folder {part} nor a table {part}.csv, .jsonl or .parquet.")
    return _split_reviews(parts, folder.resolve().name, max_length)


def load_reviews(name: str, revision: str | None, cache_dir: str | None, max_length: int) -> dict[str, Examples]:
    """The same from the Hub, with the columns `text` and `label`."""
    with explained_errors(name, _FETCH, "give another --dataset_name"):
        splits = load_prepared(name, None, revision, cache_dir)
    if lacking := {"train", "test"} - set(splits):
        raise UserError(f"{name} has no part {' and no '.join(sorted(lacking))}; it has {', '.join(splits)}.")
    parts = {part: _read_columns(name, splits[part]) for part in ("train", "test")}
    return _split_reviews(parts, public_name(name), max_length)


def read_pairs(folder: Path, max_length: int) -> dict[str, Examples]:
    """
    Read pairs of texts from the published tables `new_aan_pairs.train.tsv`, `.eval.tsv` and `.test.tsv`: rows of a
    label, two names and two texts. Of each text `max_length` bytes are kept.

    Raises:
        UserError: if a table is not there, or a row is malformed, with its number.
    """
    parts = {}
    for part, name in _PAIRS.items():
        file, rows, labels = folder / name, [], []
        try:
            with file.open("rb") as lines:
                rows_read = tqdm(lines, f"Reading {name}", unit="row", disable=None)
                for number, line in enumerate(strip_table(rows_read), start=1):
                    cells = line.split(b"\t")
                    if len(cells) != _COLUMNS or cells[0] not in (b"0", b"1", b"0.0", b"1.0"):
                        first = cells[0][:20].decode("utf-8", "replace")
                        raise UserError(
                            f"{file}, line {number}: a row must be 0 or 1, two names and two texts, with tabs between "
                            f"them; this one has {len(cells)} columns and begins with {first!r}."
                        )
                    labels.append(int(float(cells[0])))
                    texts = zip(("first", "second"), cells[3:], strict=True)
                    rows += [_encode(t, max_length, f"{file}, line {number}: the {which} text") for which, t in texts]
        except OSError as error:
            raise UserError(
                f"{file} cannot be read ({one_line(error)}); --data_dir needs {', '.join(_PAIRS.values())}."
            ) from error
        if not labels:
            raise UserError(f"{file} is empty; give a table with rows.")
        parts[part] = Examples.of_rows(rows, labels, folder.resolve().name, per_example=2)
    return parts


def make_pairs(sizes: Mapping[str, int], length: int, seed: int) -> dict[str, Examples]:
    """
    Make pairs that stand in for papers: texts of made-up words, each about one of many topics, which a pair that
    belongs together (label 1) has in common. Half of all pairs do.

    Args:
        sizes (mapping of `str` to `int`): Pairs in each part.
        length (`int`): Bytes of a text, at most; at least half as many.
        seed (`int`): Of everything.
    """
    generator = np.random.default_rng(seed)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)

    def make_words(number: int) -> list[bytes]:
        return [generator.choice(letters, generator.integers(3, 9)).tobytes() for _ in range(number)]

    common, topics = make_words(200), [make_words(12) for _ in range(50)]

    def write(topic: int) -> bytes:
        size = generator.integers(length // 2, length + 1)
        chosen = (topics[topic] if is_topical else common for is_topical in generator.random(size // 4) < 0.3)
        return b" ".join(words[generator.integers(len(words))] for words in chosen)[:size]

    parts = {}
    for part, size in sizes.items():
        labels, rows = generator.permutation(np.arange(size) % 2), []
        for label in tqdm(labels, f"Making {part}", unit="pair", disable=None):
            first = int(generator.integers(len(topics)))
            other = first if label else (first + int(generator.integers(1, len(topics)))) % len(topics)
            rows += [_encode(write(topic), length, part) for topic in (first, other)]
        parts[part] = Examples.of_rows(rows, labels.tolist(), f"made-up pairs (seed {seed})", per_example=2)
    return parts


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); mend it or leave it out.") from error


def _read_columns(source: str, rows: Dataset) -> tuple[list[bytes], list[int]]:
    if lacking := {"text", "label"} - set(rows.column_names):
        raise UserError(f"{source} has no column {' and no '.join(sorted(lacking))}; it has {rows.column_names}.")
    words = _LABELS | {"negative": 0, "positive": 1, "0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
    names = [words.get(str(label).strip().lower(), label) for label in rows["label"]]
    for number, label in enumerate(names, start=1):
        if label not in (0, 1):
            known = "0 or 1 (or neg or pos, negative or positive)"
            raise UserError(f"{source}, row {number}: the label is {label}; it must be {known}.")
    for number, text in enumerate(rows["text"], start=1):
        if not isinstance(text, str | None):
            raise UserError(f"{source}, row {number}: {reprlib.repr(text)} stands in the place of a text; mend it.")
    return [(text or "").encode() for text in rows["text"]], [int(label) for label in names]


def _split_reviews(
    parts: dict[str, tuple[list[bytes], list[int]]], source: str, max_length: int
) -> dict[str, Examples]:
    encoded = {}
    for part, (texts, labels) in parts.items():
        rows = [_encode(text, max_length, f"{source}, {part}, text {n}") for n, text in enumerate(texts, start=1)]
        encoded[part] = Examples.of_rows(rows, labels, source)
    classes = encoded["train"].labels
    for label, number in zip(_LABELS, np.bincount(classes, minlength=len(_LABELS)), strict=True):
        if number < 2:
            what = f"{source} has {number} training text(s) with the label {label}"
            raise UserError(f"{what}; give at least 2, of which one chooses the model.")
    order = np.random.default_rng(0).permutation(len(classes))
    held = [place for label in (0, 1) for place in order[classes[order] == label][::_HELD_OUT]]
    kept = np.setdiff1d(order, held)
    return {
        "train": encoded["train"].select(kept),
        "validation": encoded["train"].select(held),
        "test": encoded["test"],
    }


def _encode(text: bytes, max_length: int, where: str) -> np.ndarray:
    if not text.strip():
        raise UserError(f"{where} is empty; mend it or leave it out.")
    return np.frombuffer(text[:max_length], dtype=np.uint8)
