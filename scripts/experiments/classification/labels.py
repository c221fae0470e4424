"""What is predicted: one label of several, any number of them, or a number."""

import logging
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Dataset

from experiments.arguments import UserError
from experiments.checkpoints import CheckpointArguments, label_names, load_trained_config


logger = logging.getLogger(__name__)
SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
_WORDS = {SINGLE: "a single label", MULTI: "a list of the labels that apply, each once", REGRESSION: "a finite number"}


@dataclass(frozen=True)
class Problem:
    """What is predicted: transformers' `problem_type` and the names of the labels in order, none for regression."""

    kind: str
    labels: tuple[str, ...]

    def encode(self, source: str, values: Sequence[Any]) -> list[Any]:
        """Of what [`read_labels`] gives: a label's number, a 0. or 1. for each label, or the number to predict."""
        if self.kind == REGRESSION:
            return list(values)
        numbers = {name: number for number, name in enumerate(self.labels)}
        if all(name == f"LABEL_{number}" for name, number in numbers.items()):  # transformers' words for no names
            numbers |= {str(number): number for number in numbers.values()}
        unknown = sorted({name for names in values for name in names} - set(numbers))
        if unknown:
            raise UserError(f"{source} has the label {format_names(unknown)}; known are {format_names(self.labels)}.")
        if self.kind == SINGLE:
            return [numbers[names[0]] for names in values]
        rows = [{numbers[name] for name in names} for names in values]
        return [[float(number in row) for number in range(len(self.labels))] for row in rows]


def format_names(names: Sequence[str], limit: int = 10) -> str:
    """The first of many names, for one line."""
    return ", ".join(f"`{n}`" for n in names[:limit]) + (f" and {len(names) - limit} more" if names[limit:] else "")


def checkpoint_problem(checkpoint: CheckpointArguments, asked: str = "auto") -> Problem:
    """
    What a fine-tuned checkpoint predicts. One that does not say it may be `asked` for any kind of problem; a
    `UserError` if one that says it is asked for another.
    """
    config = load_trained_config(checkpoint)
    names = [str(name) for name in label_names(config)]
    asked = asked if asked != "auto" else ""
    kind = config.problem_type or asked or (REGRESSION if len(names) == 1 else SINGLE)
    if asked not in ("", kind):
        what = f"The checkpoint {checkpoint.model_name_or_path} was trained for {kind}"
        raise UserError(f"{what}, and not for --problem_type {asked}; leave it out, or add --do_train.")
    return Problem(kind, () if kind == REGRESSION else tuple(names))


def find_kind(source: str, rows: Dataset, column: str, separator: str | None) -> str:
    """
    What a column of labels looks like: lists or separated strings, fractions, or single labels; a `UserError` if it
    looks like fractions but for a few rows.
    """
    feature = rows.features[column]
    if hasattr(feature, "feature") or separator:
        return MULTI
    words = [word for word in rows[column] if word not in (None, "") and word == word]
    if getattr(feature, "dtype", "") in ("string", "large_string"):  # of a table in text
        numbers = [word for word in words if is_number(word)]
        are_whole = all(word.strip().removeprefix("-").isdecimal() for word in numbers)
        if are_whole or 10 * len(numbers) < 9 * len(words):
            return SINGLE
        if len(numbers) < len(words):
            row, word = next((n, w) for n, w in enumerate(rows[column], start=1) if w and not is_number(w))
            what = f"{source}: row {row} has the label {word!r}, and most others are fractions"
            raise UserError(f"{what}; mend it, or say what is predicted with --problem_type.")
    elif not str(getattr(feature, "dtype", "")).startswith("float"):
        return SINGLE
    if words and all(float(word).is_integer() for word in words):
        logger.warning("%s: labels such as %s are taken for numbers; --problem_type says otherwise.", source, words[0])
    return REGRESSION


def is_number(word: str) -> bool:
    """Whether a word is a number, infinities included and nan not."""
    try:
        return not math.isnan(float(word))
    except ValueError:
        return False


def read_labels(source: str, rows: Dataset, column: str, kind: str, separator: str | None) -> list[Any]:
    """A tuple of names or, for regression, a number for each row; None where there is no label."""
    feature = getattr(rows.features[column], "feature", rows.features[column])

    def read(value: Any) -> Any:
        if value is None or value != value or (value == "" and kind != MULTI):
            return None
        if kind == REGRESSION:
            if not math.isfinite(float(value)):
                raise ValueError
            return float(value)
        several: Any = value.split(separator) if isinstance(value, str) and separator else value
        several = several if isinstance(several, list) else [several]
        if any(each is None or each != each for each in several):
            raise ValueError
        if isinstance(feature, ClassLabel):  # -1 is how data sets of the Hub hide labels
            names = [feature.names[number] for number in several if number >= 0]
        else:
            numbers = (int(n) if isinstance(n, float) and n.is_integer() else n for n in several)
            names = [str(name).strip() for name in numbers]
        names = [name for name in names if name]
        if len(set(names)) < len(names) or (kind == SINGLE and len(names) > 1):
            raise ValueError
        return tuple(names) if names or kind == MULTI else None

    cells = rows[column]
    vectors = [cell for cell in cells if isinstance(cell, list) and len(cell) > 1]
    is_one_hot = len(vectors) == len(cells) and len({len(cell) for cell in vectors}) == 1
    if is_one_hot and all(each in (0, 1) for cell in vectors for each in cell):
        what = f"{source} has a 0 or 1 for each label, such as {reprlib.repr(vectors[0])}"
        raise UserError(f"{what}; give lists of the names of those that apply.")
    values = []
    for number, value in enumerate(cells, start=1):
        try:
            values.append(read(value))
        except (ValueError, TypeError) as error:
            shown = reprlib.repr(value)
            raise UserError(f"{source}: row {number} has the label {shown}, which is not {_WORDS[kind]}.") from error
    return values


def find_labels(source: str, rows: Dataset, column: str, kind: str, values: Sequence[Any]) -> tuple[str, ...]:
    """The names of all labels: in a data set's own order, that of the numbers they are, or that of the alphabet."""
    feature = getattr(rows.features[column], "feature", rows.features[column])
    if isinstance(feature, ClassLabel):
        return tuple(feature.names)
    found = set() if kind == REGRESSION else {name for names in values for name in names}
    if len(found) < 2 and kind != REGRESSION:
        raise UserError(f"{source} has {format_names(sorted(found)) or 'no name'} alone as label: nothing to learn.")
    if kind == MULTI and len(set(map(frozenset, values))) < 2:
        raise UserError(f"{source} has {format_names(sorted(found))} as labels of every row: nothing to learn.")
    are_numbers = all(name.removeprefix("-").isdecimal() for name in found)
    return tuple(sorted(found, key=lambda name: (int(name) if are_numbers else 0, name)))
