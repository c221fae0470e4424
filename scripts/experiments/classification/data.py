"""A user's own texts: read from files or the Hub, checked, cut into excerpts and split."""

import logging
import os
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from experiments.arguments import UserError, flag, one_line, require_at_least
from experiments.classification.excerpts import cut_excerpts, hold_out, spread
from experiments.classification.labels import (
    SINGLE,
    Problem,
    find_kind,
    find_labels,
    format_names,
    is_number,
    read_labels,
)
from experiments.loading import VALIDATION_SPLITS, explained_errors, find_files, load_prepared, read_table_file


_FILES = "a .csv, .tsv, .json, .jsonl or .parquet file, or .txt files (a quoted pattern will do)"
_TEXTS = ("text", "sentence", "content", "review", "document")
_SPLITS = {"train": ("train",), "validation": VALIDATION_SPLITS, "test": ("test",)}
logger = logging.getLogger(__name__)
_WRITTEN = {"prediction", "probability", "excerpt", "excerpts"}  # columns of the files of predictions


@dataclass
class TextArguments:
    """The texts and their labels."""

    train_file: list[str] | None = flag(None, f"Training data: {_FILES}.")
    validation_file: list[str] | None = flag(None, "Likewise for evaluation; by default training data are held out.")
    test_file: list[str] | None = flag(None, "Likewise to predict, labelled or not.")
    dataset_name: str | None = flag(None, "Data set of the Hub, in place of files.")
    dataset_config_name: str | None = flag(None, "Its configuration.")
    dataset_revision: str | None = flag(None, "Its commit, tag or branch.")
    cache_dir: str | None = flag(None, "Folder for prepared data; by default the cache of the datasets library.")
    text_column: str | None = flag(None, "Column of texts; by default found by its name or as the only one.")
    text_pair_column: str | None = flag(None, "Column of the second texts of pairs.")
    label_column: str | None = flag(None, "Column of labels; by default found by its name.")
    label_separator: str | None = flag(None, "What stands between the labels of a row that has several, such as `,`.")
    label_from_file_name: str | None = flag(
        None, "Expression whose first group is the label in a .txt file's name, or path, with a /: `^([^_]+)_`."
    )
    problem_type: Literal["auto", "single_label_classification", "multi_label_classification", "regression"] = flag(
        "auto", "What to predict; by default what the labels look like."
    )
    validation_fraction: float = flag(0.1, "Share of each label's training data to hold out without validation data.")
    split_seed: int = flag(0, "Seed of what is held out, whichever --seed trains.")
    max_seq_length: int | None = flag(
        None,
        "Longest input; by default an excerpt, or what it was trained on, to train if that is more than 512.",
    )
    pad_to_max_length: bool = flag(False, "Pad every input to --max_seq_length, and not to the longest of its batch.")
    excerpt_length: int | None = flag(None, "Cut every text into consecutive excerpts of this many tokens.")
    max_excerpts_per_document: int | None = flag(None, "Keep only so many excerpts of a text, spread evenly over it.")
    max_train_samples: int | None = flag(None, "Train on so many examples, spread evenly over all.")
    max_eval_samples: int | None = flag(None, "Likewise for evaluation.")
    max_predict_samples: int | None = flag(None, "Likewise for prediction.")
    preprocessing_num_workers: int | None = flag(None, "Processes that tokenize.")
    baseline: list[str] = flag(
        [],
        "Measure linear models, too: tfidf of words and pairs of words, frozen of what the encoder gives beforehand.",
    )

    def __post_init__(self) -> None:
        if any((self.train_file, self.validation_file, self.test_file)) == bool(self.dataset_name):
            raise UserError("Give the texts either by --train_file (and the like) or by --dataset_name.")
        for name in ("dataset_config_name", "dataset_revision"):
            if getattr(self, name) and not self.dataset_name:
                raise UserError(f"--{name} is for --dataset_name, and the texts are files; leave it out.")
        if self.label_from_file_name and self.dataset_name:
            raise UserError("--label_from_file_name is for files, and --dataset_name has labels; leave it out.")
        for name in ("validation_fraction", "split_seed"):
            if self.validation_file and getattr(self, name) != getattr(TextArguments, name):
                raise UserError(f"--{name}: nothing is held out beside --validation_file; leave it out.")
        if unknown := {*self.baseline} - {"tfidf", "frozen"}:
            raise UserError(f"--baseline {min(unknown)} is not known; give tfidf, frozen or both.")
        require_at_least(8, self, "max_seq_length", "excerpt_length")
        limits = ("max_train_samples", "max_eval_samples", "max_predict_samples")
        require_at_least(1, self, *limits, "max_excerpts_per_document", "preprocessing_num_workers")
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"--validation_fraction is {self.validation_fraction:g}; it must lie between 0 and 1.")
        if self.text_pair_column and not self.text_column:
            raise UserError("--text_pair_column names the second text; name the first with --text_column.")
        if self.excerpt_length and self.excerpt_length > (self.max_seq_length or self.excerpt_length):
            raise UserError(f"--max_seq_length {self.max_seq_length} cuts --excerpt_length {self.excerpt_length}.")
        if self.max_excerpts_per_document and not self.excerpt_length:
            raise UserError("--max_excerpts_per_document needs --excerpt_length, which cuts the excerpts.")
        try:
            if self.label_from_file_name and not re.compile(self.label_from_file_name).groups:
                raise UserError(f"--label_from_file_name {self.label_from_file_name} has no (group) for the label.")
        except re.error as error:
            raise UserError(f"--label_from_file_name is no regular expression: {one_line(error)}.") from error


@dataclass
class Part:
    """Examples: where they come from, their columns, encoded labels if there are any, and each one's document."""

    source: str
    rows: Dataset
    labels: list | None
    documents: list[int]

    def select(self, places: list[int]) -> "Part":
        """Some of the examples."""
        labels = self.labels and [self.labels[place] for place in places]
        return Part(self.source, self.rows.select(places), labels, [self.documents[place] for place in places])

    def examples(self, columns: Sequence[str]) -> Dataset:
        """The columns of text and, of labelled examples, `label`."""
        rows = self.rows.select_columns(list(columns))
        return rows if self.labels is None else rows.add_column("label", self.labels)


@dataclass(frozen=True)
class TextData:
    """What is predicted, the columns of text (one or two), the parts, and how the evaluation part was held out."""

    problem: Problem
    columns: tuple[str, ...]
    parts: dict[str, Part]
    held_out: str = ""

    def texts(self, part: str) -> list[str]:
        """The texts of a part, both of a pair in one."""
        columns = (self.parts[part].rows[name] for name in self.columns)
        return ["\n".join(texts) for texts in zip(*columns, strict=True)]


def load_texts(
    arguments: TextArguments,
    wanted: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    predicted: Problem | None = None,
) -> TextData:
    """
    Read the parts that a run has `wanted`, of `train`, `validation` (which may be held out of the first) and `test`.

    Excerpts are cut by the tokens of a tokenizer. Where nothing is trained the problem is what the checkpoint has
    `predicted`; else its labels have the order that they have there, if they are the same.
    Raises a `UserError` if something cannot be found, read or understood, in one line that says where.
    """
    sources, known = _read_sources(arguments, wanted), None if "train" in wanted else predicted
    first, rows = next(iter(sources.values()))
    columns, label = find_columns(first, rows, arguments, label_needed=list(sources) != ["test"])
    if arguments.excerpt_length and len(columns) > 1:
        raise UserError(f"--excerpt_length cuts single texts, and {first} has pairs; leave it out.")
    if arguments.excerpt_length and columns[0] == "excerpt":
        raise UserError(f"{first} has its texts in `excerpt`, where --excerpt_length writes numbers; rename it.")
    kind = known.kind if known else arguments.problem_type
    kind = kind if kind != "auto" else find_kind(first, rows, str(label), arguments.label_separator)
    problem, parts, held_out = known or Problem(kind, ()), {}, ""
    for name, (source, rows) in sources.items():
        _check_rows(source, rows, columns, label if name != "test" else None)
        values = [None] * len(rows)
        # The cells of a test part that has the column and no label are empty, which is no label, and not none of them.
        if label in rows.column_names and (name != "test" or any(cell not in ("", None) for cell in rows[label])):
            values = read_labels(source, rows, str(label), kind, arguments.label_separator)
        if None in values and name != "test":
            raise UserError(f"{source}: row {values.index(None) + 1} has no label; give it one or leave it out.")
        if 0 < (lacking := values.count(None)) < len(values):
            logger.warning("%s: %d of %d rows have no label, so that none is scored.", source, lacking, len(values))
        if not known and name == "train":
            labels = find_labels(source, rows, str(label), kind, values)
            problem = Problem(kind, predicted.labels if predicted and {*predicted.labels} == {*labels} else labels)
        part = Part(source, rows, None if None in values else problem.encode(source, values), list(range(len(rows))))
        parts[name] = _cut(part, columns[0], tokenizer, arguments) if arguments.excerpt_length else part
    if "train" in sources and "validation" not in sources:
        parts["train"], parts["validation"], held_out = _split(parts["train"], problem, arguments)
    limits = (arguments.max_train_samples, arguments.max_eval_samples, arguments.max_predict_samples)
    for name, limit in zip(_SPLITS, limits, strict=True):
        if name in parts:
            parts[name] = parts[name].select(spread(len(parts[name].documents), limit))
    data = TextData(problem, columns, {name: parts[name] for name in _SPLITS if name in parts}, held_out)
    _warn_of_doubles(data)
    return data


def _warn_of_doubles(data: TextData) -> None:
    """Say which parts have texts that are trained on."""
    # Of long texts their hashes are all that is kept.
    learnt = set(map(hash, data.texts("train"))) if "train" in data.parts else set()
    for name in data.parts.keys() - {"train"} if learnt else ():
        texts = data.texts(name)
        if count := sum(hash(text) in learnt for text in texts):
            what = f"{count:,} of {len(texts):,} texts for {name} stand among those for training, too"
            logger.warning("%s: what is measured on them says little of new ones.", what)


def find_columns(
    source: str, rows: Dataset, arguments: TextArguments, label_needed: bool = True
) -> tuple[tuple[str, ...], str | None]:
    """The columns of text and the column of labels: named by flags, or plain from their own names."""
    there = rows.column_names
    has = f"{source} has {format_names(there)}."
    given = {column: getattr(arguments, column) for column in ("text_column", "text_pair_column", "label_column")}
    for column, name in given.items():
        if name is not None and name not in there and (column != "label_column" or label_needed):
            raise UserError(f"--{column} {name}: there is no such column; {has}")
    text, pair, label = given.values()
    named = [name for name in given.values() if name is not None]
    if len(set(named)) < len(named):
        raise UserError(f"--text_column, --text_pair_column and --label_column name a column twice; {has}")
    labels = [label] if label else [name for name in ("label", "labels") if name in there]
    if len(labels) != 1 and label_needed:
        hint = "--label_column (or --label_from_file_name for .txt files)"
        raise UserError(f"No column is plainly the label; name it with {hint}: {has}")
    others = [name for name in there if name not in labels]
    texts = [text] if text else [name for name in _TEXTS if name in others]
    texts = texts or [name for name in others if _holds_words(rows, name)]
    if len(texts) != 1:
        raise UserError(f"No column is plainly the text; name it with --text_column (and --text_pair_column): {has}")
    columns = (texts[0], pair) if pair else (texts[0],)
    if "label" in columns:
        raise UserError(f"Texts cannot stand in a column `label`, where labels are to stand; rename it: {has}")
    return columns, labels[0] if labels else None


def _holds_words(rows: Dataset, column: str) -> bool:
    """Whether something in a column is neither a number nor empty."""
    is_text = "string" in str(getattr(rows.features[column], "dtype", ""))
    return is_text and any(word and not is_number(word) for word in rows[column])


def _read_sources(arguments: TextArguments, wanted: Sequence[str]) -> dict[str, tuple[str, Dataset]]:
    """The rows of each part, with what to call them."""
    name, found, hint = arguments.dataset_name, {}, "give --{}_file"
    if name:
        with explained_errors(name, "--train_file", "give --dataset_config_name"):
            place = (arguments.dataset_config_name, arguments.dataset_revision, arguments.cache_dir)
            splits = load_prepared(name, *place)
        there = {part: [split for split in _SPLITS[part] if split in splits] for part in wanted}
        found = {part: (f"{name} ({names[0]})", splits[names[0]]) for part, names in there.items() if names}
        hint = f"{name} has {format_names(list(splits))}"
    for part in wanted:
        if patterns := getattr(arguments, f"{part}_file"):
            found[part] = _read_files(f"--{part}_file", patterns, arguments)
        elif part not in found and (part != "validation" or "train" not in found):
            raise UserError(f"There are no texts for {part}; {hint.format(part)}.")
    return found


def _read_files(given_by: str, patterns: Sequence[str], arguments: TextArguments) -> tuple[str, Dataset]:
    """The rows of a table or of .txt files, with what to call them."""
    found = {Path(file).resolve(): file for pattern in patterns for file in find_files(pattern)}
    files = list(found.values())  # each once, also where patterns overlap
    if all(file.lower().endswith(".txt") for file in files):
        rows = _read_text_files(given_by, files, arguments.label_from_file_name)
        return f"{Path(files[0]).parent} ({len(files)} .txt files)", rows
    if len(files) > 1 or arguments.label_from_file_name:
        raise UserError(f"{given_by} {files[0]}: give one table, or .txt files, which --label_from_file_name is for.")
    return files[0], read_table_file(files[0], arguments.cache_dir)


def _read_text_files(given_by: str, files: list[str], expression: str | None) -> Dataset:
    """A row for each file: its path below what all share, its text and, if an expression finds it there, its label."""
    texts, labels = [], []
    for file in files:
        try:
            texts.append(Path(file).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{given_by} {file} cannot be read as UTF-8 text: {one_line(error)}.") from error
        name = Path(file).resolve().as_posix() if expression and "/" in expression else Path(file).name
        found = re.search(expression, name) if expression else None
        if expression and not found and given_by != "--test_file":
            raise UserError(f"--label_from_file_name {expression} finds no label in {name}; change it.")
        if not texts[-1].strip():
            raise UserError(f"{given_by} {file} is empty; leave it out.")
        labels.append(found.group(1) if found else None)
    # By what tells them apart, because the column is written to predictions and uploaded with them.
    paths = [Path(file).resolve() for file in files]
    shared = os.path.commonpath({path.parent for path in paths})
    names = [path.relative_to(shared).as_posix() for path in paths]
    return Dataset.from_dict({"file": names, "text": texts} | ({"label": labels} if any(labels) else {}))


def _check_rows(source: str, rows: Dataset, columns: Sequence[str], label: str | None) -> None:
    there = rows.column_names
    missing = format_names([name for name in (*columns, label) if name is not None and name not in there])
    if missing or not len(rows):
        what = f"no column {missing}" if missing else "no rows"
        raise UserError(f"{source} has {what}; its columns are {format_names(there)}.")
    if label is None and (taken := sorted(_WRITTEN & set(there))):
        raise UserError(f"{source} has a column {format_names(taken)}, where predictions are to stand; rename it.")
    for column in columns:
        for number, text in enumerate(rows[column], start=1):
            if not isinstance(text, str) or not text.strip():
                hint = "a JSON file holds a list of rows" if isinstance(text, dict) else "mend it"
                what = f"row {number} has {reprlib.repr(text)} in place of a text in `{column}`"
                raise UserError(f"{source}: {what}; {hint}.")
        if label is not None and not _holds_words(rows, column):
            raise UserError(f"{source} has nothing but numbers in `{column}`, where texts are to stand; name another.")


def _cut(part: Part, column: str, tokenizer: PreTrainedTokenizerBase, arguments: TextArguments) -> Part:
    """A part whose examples are excerpts of its texts, numbered."""
    length, limit = arguments.excerpt_length or 0, arguments.max_excerpts_per_document
    pieces = cut_excerpts(part.rows[column], tokenizer, length, limit)
    if [] in pieces:
        raise UserError(f"{part.source}: row {pieces.index([]) + 1} has no tokens in `{column}`; leave it out.")
    rows = part.rows.remove_columns([*({"excerpt"} & set(part.rows.column_names))])
    # Whole texts go first: they would be repeated for every excerpt. Without any column a table would have no rows.
    rows = rows.add_column("excerpt", list(range(len(rows)))).remove_columns(column).rename_column("excerpt", column)
    part = replace(part, rows=rows).select([document for document, texts in enumerate(pieces) for _ in texts])
    rows = part.rows.add_column("excerpt", [number for texts in pieces for number in range(1, len(texts) + 1)])
    rows = rows.remove_columns(column).add_column(column, [text for texts in pieces for text in texts])
    return replace(part, rows=rows)


def _split(part: Part, problem: Problem, arguments: TextArguments) -> tuple[Part, Part, str]:
    """A training part and an evaluation part that is held out of it, and how."""
    labels = part.labels if problem.kind == SINGLE and part.labels else [0] * len(part.documents)
    counts = Counter(labels) if problem.kind == SINGLE else Counter()
    if alone := format_names([problem.labels[label] for label, count in counts.items() if count == 1]):
        what = f"{part.source} has a single example of {alone}, which cannot be both learned and held out"
        raise UserError(f"{what}; add examples, leave it out, or give --validation_file.")
    train, held, words = hold_out(labels, part.documents, arguments.validation_fraction, arguments.split_seed)
    if not held:
        raise UserError(f"{part.source} has too few examples to hold some out; give --validation_file.")
    return part.select(train), part.select(held), words
