"""Labelled sequences of bytes, pixels or symbols as the Trainer reads them."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


# Padding. The values of a task are one higher in inputs, and behind them comes the mask of pre-training.
PAD = 0
PARTS = ("train", "validation", "test")


def part_sizes(count: int, num_held_out: int) -> dict[str, int]:
    """How many of `count` examples each part has, validation and test `num_held_out` each."""
    return dict(zip(PARTS, (count - 2 * num_held_out, num_held_out, num_held_out), strict=True))


@dataclass(frozen=True)
class Examples(torch.utils.data.Dataset):
    """
    Labelled sequences, or groups of `per_example` of them, such as the two of a pair.

    Args:
        values (`np.ndarray` of `uint8`): All sequences, one behind the other, of values from 0 on.
        lengths (`np.ndarray` of shape `(num_examples * per_example,)`): How many values each sequence has.
        labels (`np.ndarray` of shape `(num_examples,)`): The number of each example's class.
        source (`str`): Where they come from, for people.
        per_example (`int`): Sequences in an example.
    """

    values: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    source: str
    per_example: int = 1

    @classmethod
    def of_rows(
        cls, rows: Iterable[np.ndarray], labels: Sequence[int] | np.ndarray, source: str, per_example: int = 1
    ) -> "Examples":
        """Sequences of any lengths, a matrix with one in each row; a `ValueError` if a value does not fit a byte."""
        rows = list(rows)
        values = np.concatenate(rows) if rows else np.zeros(0)
        if values.size and not 0 <= values.min() <= values.max() <= 255:
            raise ValueError(f"Values must lie between 0 and 255; these go from {values.min()} to {values.max()}.")
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        values = values.astype(np.uint8, copy=False)  # the bytes of a whole benchmark
        return cls(values, lengths, np.asarray(labels, dtype=np.int64), source, per_example)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", np.cumsum(self.lengths))

    def __len__(self) -> int:
        return len(self.labels)

    def sequence(self, number: int | np.integer) -> np.ndarray:
        """The values of one sequence, counted over all examples."""
        end = self._ends[number]  # type: ignore[attr-defined]
        return self.values[end - self.lengths[number] : end]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The values of an example as `input_ids`, by which the Trainer groups lengths, and how long its parts are."""
        first = int(index) * self.per_example
        lengths = self.lengths[first : first + self.per_example]
        start = self._ends[first] - lengths[0]  # type: ignore[attr-defined]
        values = self.values[start : start + lengths.sum()]
        return {"input_ids": values, "lengths": lengths, "labels": int(self.labels[index])}

    def select(self, indices: Sequence[int] | np.ndarray) -> "Examples":
        """Some of the examples."""
        n = self.per_example
        rows = [self.sequence(n * int(index) + part) for index in indices for part in range(n)]
        return Examples.of_rows(rows, self.labels[list(indices)], self.source, n)

    def fingerprint(self) -> str:
        """A short word for all that is read of them."""
        digest = hashlib.sha256(self.per_example.to_bytes())
        for array in (self.values, self.lengths, self.labels):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


def strip_table(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a table without their ends, a byte order mark before the first, and empty ones behind the last."""
    empty = 0
    for number, line in enumerate(lines):
        line = line.rstrip(b"\r\n")
        if number == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line:
            empty += 1
            continue
        yield from [b""] * empty  # which stand between others
        empty = 0
        yield line


def collate(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """
    Pad the sequences of a batch on the right to the longest of it.

    Returns `input_ids` and, if there is padding, `attention_mask`, of shape `(batch_size, length)`, or
    `(batch_size, per_example, length)` of groups, and `labels` `(batch_size,)`.
    """
    lengths = np.concatenate([example["lengths"] for example in examples])
    input_ids = np.full((len(lengths), lengths.max()), PAD, dtype=np.int64)
    mask = np.arange(lengths.max()) < lengths[:, None]
    input_ids[mask] = np.concatenate([example["input_ids"] for example in examples]).astype(np.int64) + PAD + 1
    per_example = len(lengths) // len(examples)
    shape = (len(examples), -1) if per_example == 1 else (len(examples), per_example, -1)
    batch = {"input_ids": input_ids.reshape(shape)}
    if not mask.all():
        batch["attention_mask"] = mask.astype(np.int64).reshape(shape)
    batch["labels"] = np.array([example["labels"] for example in examples])
    return {name: torch.from_numpy(array) for name, array in batch.items()}
