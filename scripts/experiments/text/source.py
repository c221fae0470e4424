"""A source of text: rows that can be read again and again, what a document is in them, and which are held out."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, TypeAlias

import pyarrow.compute as arrow
from datasets import Dataset, IterableDataset

from experiments.arguments import UserError


logger = logging.getLogger(__name__)

Rows: TypeAlias = Dataset | IterableDataset
Side: TypeAlias = Literal["train", "validation"]
Unit: TypeAlias = Literal["row", "blank_line"]

_SIDES: tuple[Side, Side] = ("train", "validation")
_READ_ROWS = 100  # rows that are decoded together; a row may be a whole book
# A text file may hold no blank line at all; so that it can still be split, longer documents are dealt out in parts.
_SPLIT_ROWS = 64
_LONGEST_WORD = 100  # characters; WordPiece reads no longer ones


@dataclass(frozen=True)
class TextSource:
    """Rows of text that can be read again and again; iterating yields `str`."""

    name: str  # in errors: a path or a data set
    rows: Rows  # whose only column is the text
    # Equal for equal text: a hash of the content of local files, of the revision of a Hub data set, of the installed
    # versions for the documentation, and of all that selects from it.
    fingerprint: str
    document_unit: Unit  # a document is a row, or ends with a blank one
    description: str | None = None  # everywhere else: without a path
    side: Side | None = None  # of the rows, where the source is not all of them
    threshold: int = 0  # documents whose hash of 64 bits is below it are on the side of validation

    def __iter__(self) -> Iterator[str]:
        if self.side is None:
            yield from self._read()
            return
        for document in self._documents():
            if self.side == ("validation" if _document_hash(document) < self.threshold else "train"):
                yield from document
                if self.document_unit == "blank_line":
                    yield ""

    @property
    def num_bytes(self) -> int | None:
        """About how much text there is, in bytes; `None` if unknown, as it is when streaming."""
        if isinstance(self.rows, IterableDataset) or not self.rows.num_rows:
            return None
        held_out, column = self.threshold / 2**64, self.rows.data.column(0)
        num_rows = self.rows.num_rows * {None: 1.0, "train": 1 - held_out, "validation": held_out}[self.side]
        total = arrow.sum(arrow.binary_length(column)).as_py() or 0  # pyarrow's own count has more than the text
        return round(total * num_rows / len(column))

    def split(self, fraction: float) -> "dict[Side, TextSource]":
        """
        Divide into training and validation, with about `fraction`, in (0, 1), of the documents for validation.

        They are chosen by their content: equal documents are on the same side, and documents that are added later move
        no other one (unless there are too few to reach `fraction`). Of a single document the end is held out. Raises a
        `UserError` if the text is a single word.
        """
        threshold = int(fraction * 2**64)
        if not any(_document_hash(document) < threshold for document in self._documents()):
            threshold = min(map(_document_hash, self._documents())) + 1
        if all(_document_hash(document) < threshold for document in self._documents()):
            return self._split_inside(fraction)
        chosen = {side: digest(self.fingerprint, side, str(threshold)) for side in _SIDES}
        return {side: replace(self, fingerprint=chosen[side], side=side, threshold=threshold) for side in _SIDES}

    def _split_inside(self, fraction: float) -> "dict[Side, TextSource]":
        """Hold out the end of the text, about `fraction` of its characters, from the beginning of a word on."""
        rows = list(self._read())
        ends = list(accumulate(map(len, rows)))
        place = ends[-1] - max(1, round(fraction * ends[-1]))
        number = next(number for number, end in enumerate(ends) if end > place)
        row, cut = rows[number], place - ends[number] + len(rows[number])
        # Text without spaces is cut anywhere, but not inside of what may be a word.
        anywhere = cut if cut > _LONGEST_WORD else 0
        cut = next((end for end in range(cut, 0, -1) if row[end - 1].isspace()), anywhere)
        if not cut and not any(text.strip() for text in rows[:number]):  # behind the first word, then
            cut = next((end for end in range(1, len(row)) if row[end - 1].isspace() and row[:end].strip()), 0)
        parts: dict[Side, list[str]]
        parts = {"train": [*rows[:number], row[:cut]], "validation": [row[cut:], *rows[number + 1 :]]}
        if not all(any(text.strip() for text in part) for part in parts.values()):
            raise UserError(f"{self.name} holds a single word; give more text.")
        held_out = sum(map(len, parts["validation"]))
        logger.info("%s is one document: its last %s characters are held out for validation.", self.name, held_out)
        chosen = {side: digest(self.fingerprint, side, str(place)) for side in parts}
        sides = {side: Dataset.from_dict({"text": part}) for side, part in parts.items()}
        return {side: replace(self, rows=rows, fingerprint=chosen[side]) for side, rows in sides.items()}

    def _read(self) -> Iterator[str]:
        for batch in self.rows.iter(batch_size=_READ_ROWS):
            (texts,) = batch.values()
            yield from (text or "" for text in texts)  # a column may hold None

    def _documents(self) -> Iterator[list[str]]:
        """Documents that hold text, each as its rows without blank ones, in parts of at most `_SPLIT_ROWS`."""
        document: list[str] = []
        for text in self._read():
            if text.strip():
                document.append(text)
            if document and (self.document_unit == "row" or not text.strip() or len(document) == _SPLIT_ROWS):
                yield document
                document = []
        if document:
            yield document


def digest(*parts: str) -> str:
    """A hash of strings, in 32 characters."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _document_hash(document: list[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(document).encode(), digest_size=8).digest())
