"""Text for pretraining: data sets of the Hub, local files, or the documentation of this Python installation.

`load_corpus` turns the flags of `CorpusArguments` into `TextSource`s, which can be read again and again. Nothing is
tokenized here, see `data.packing` for that.
"""

import glob
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from datasets import (
    Dataset,
    DatasetBuilder,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    disable_progress_bars,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.config import HF_DATASETS_CACHE
from datasets.packaged_modules.text.text import TextConfig

from experiments.arguments import UserError
from experiments.loading import explained_errors
from experiments.text.documentation import documentation_versions, iter_documentation


logger = logging.getLogger(__name__)

Rows: TypeAlias = Dataset | IterableDataset
Side: TypeAlias = Literal["train", "validation"]
Unit: TypeAlias = Literal["row", "blank_line"]

_SIDES: tuple[Side, Side] = ("train", "validation")

_FILE_TYPES = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
# Short ids that worked once and stand in many recipes.
_NAMESPACED_IDS = {
    "wikitext": "Salesforce/wikitext",
    "bookcorpus": "rojagtap/bookcorpus",
    "wikipedia": "wikimedia/wikipedia",
    "openwebtext": "Skylion007/openwebtext",
    "c4": "allenai/c4",
    "imdb": "stanfordnlp/imdb",
    "ag_news": "fancyzhx/ag_news",
}
_DATASET = re.compile(r"(?P<path>[^:@]+)(?::(?P<config>[^@]+))?(?:@(?P<revision>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_READ_ROWS = 1000  # rows that are decoded together
# A text file may hold no blank line at all; so that it can still be split, longer documents are dealt out in parts.
_SPLIT_ROWS = 64


@dataclass
class CorpusArguments:
    """Flags that say which text to read. Without any, the documentation of this Python installation is read."""

    datasets: list[str] | None = field(
        default=None,
        metadata={
            "help": "Data sets, each written path[:config][@revision], where path is a Hub id (owner/name) or a local "
            "folder, e.g. Salesforce/wikitext:wikitext-103-raw-v1. Several are mixed, also with --train_file."
        },
    )
    train_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "Local .txt, .json, .jsonl, .csv or .parquet files; patterns such as books/*.txt are allowed."
        },
    )
    validation_file: list[str] | None = field(
        default=None,
        metadata={"help": "Local files to validate on, in place of the validation splits of the data sets."},
    )
    text_column: str | None = field(
        default=None,
        metadata={"help": "The column that holds the text; by default `text`, or the only column of strings."},
    )
    probabilities: list[float] | None = field(
        default=None,
        metadata={
            "help": "How often to draw from each entry of --datasets, then of --train_file; any positive numbers. By "
            "default each counts in proportion to its size."
        },
    )
    validation_fraction: float = field(
        default=0.01,
        metadata={
            "help": "Share of the documents to hold out for validation if there is neither a validation split nor a "
            "--validation_file; 0 for none."
        },
    )
    document_unit: Literal["auto", "row", "blank_line"] = field(
        default="auto",
        metadata={
            "help": "What one document is: a row, or the rows between two blank ones. auto: blank_line for text "
            "files, row for everything else."
        },
    )
    one_document_per_block: bool = field(
        default=False, metadata={"help": "Never put two documents in one block of tokens."}
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Read and tokenize while training instead of preparing everything on disk first."},
    )
    cache_dir: str | None = field(
        default=None,
        metadata={"help": "Folder for prepared text and blocks; by default the cache of the datasets library."},
    )
    max_train_documents: int | None = field(
        default=None, metadata={"help": "Use only this many documents of each training source."}
    )
    max_eval_documents: int | None = field(
        default=None, metadata={"help": "Use only this many documents of each validation source."}
    )

    def __post_init__(self) -> None:
        if self.validation_file and not (self.train_file or self.datasets):
            raise UserError("--validation_file is given without --train_file or --datasets; say what to train on.")
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"--validation_fraction is {self.validation_fraction}; it must be in [0, 1).")
        for name in ("max_train_documents", "max_eval_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}; it must be at least 1.")
        self._check_probabilities()

    def _check_probabilities(self) -> None:
        entries = [*(self.datasets or []), *(self.train_file or [])]
        if self.probabilities is None:
            return
        if len(self.probabilities) != max(len(entries), 1):
            raise UserError(
                f"--probabilities has {len(self.probabilities)} numbers for {max(len(entries), 1)} sources of text; "
                "give one for each entry of --datasets and --train_file."
            )
        if not all(0 < probability < float("inf") for probability in self.probabilities):
            raise UserError(f"--probabilities must be positive numbers, not {self.probabilities}.")


@dataclass(frozen=True)
class TextSource:
    """
    Rows of text that can be read again and again.

    Iterating yields `str`. What a document is follows from `document_unit`: with `"row"` every row is one, with
    `"blank_line"` a blank row ends one.

    Args:
        name (`str`):
            What to call the source in messages.
        rows (`datasets.Dataset` or `datasets.IterableDataset`):
            The rows as loaded, with the text as their only column.
        fingerprint (`str`):
            Equal for equal text: a hash of the content of local files, of the revision of a Hub data set, of the
            installed versions for the documentation, and of all that selects from it.
        document_unit (`str`):
            `"row"` or `"blank_line"`.
        side (`str`, *optional*):
            `"train"` or `"validation"` if the source is only one side of `rows`.
        threshold (`int`, *optional*, defaults to 0):
            Documents with a smaller hash (of 64 bits) are on the side of `"validation"`.
        max_documents (`int`, *optional*):
            Stop after this many documents.
    """

    name: str
    rows: Rows
    fingerprint: str
    document_unit: Unit
    side: Side | None = None
    threshold: int = 0
    max_documents: int | None = None

    def __iter__(self) -> Iterator[str]:
        if self.side is None and self.max_documents is None:
            yield from self._read()
            return
        documents = self._documents(_SPLIT_ROWS)
        if self.side:
            documents = (document for document in documents if self._side_of(document) == self.side)
        for document in islice(documents, self.max_documents):
            yield from document
            if self.document_unit == "blank_line":
                yield ""

    @property
    def num_rows(self) -> int | None:
        """About how many rows there are, for progress bars; `None` if unknown, as it is when streaming."""
        if isinstance(self.rows, IterableDataset) or self.max_documents is not None:
            return None
        share = self.threshold / 2**64
        return round(self.rows.num_rows * {None: 1.0, "train": 1 - share, "validation": share}[self.side])

    @property
    def num_bytes(self) -> int | None:
        """About how much text there is, in bytes; `None` if unknown."""
        if isinstance(self.rows, IterableDataset) or not self.rows.num_rows or self.num_rows is None:
            return None
        return self.rows.data.nbytes * self.num_rows // self.rows.num_rows

    def split(self, fraction: float) -> "tuple[TextSource, TextSource]":
        """
        Hold out about `fraction` of the documents, chosen by their content: equal documents are on the same side, and
        documents that are added later move no other one (unless there are too few to reach `fraction`).

        Args:
            fraction (`float`):
                Share of the documents for validation, in (0, 1). At least one document is held out.

        Returns:
            `tuple` of two `TextSource`: training and validation.

        Raises:
            UserError: if no document is left for training.
        """
        threshold, lowest = int(fraction * 2**64), 2**64
        for document in self._documents(_SPLIT_ROWS):
            lowest = min(lowest, _document_hash(document))
            if lowest < threshold:
                break
        threshold = max(threshold, lowest + 1)
        if all(_document_hash(document) < threshold for document in self._documents(_SPLIT_ROWS)):
            hint = ", or --document_unit row if its lines are documents" if self.document_unit == "blank_line" else ""
            raise UserError(
                f"{self.name} holds a single document, and none can be held out for validation; give "
                f"--validation_file or --validation_fraction 0{hint}."
            )
        train, validation = (
            replace(
                self,
                name=f"{self.name}, {side} part",
                fingerprint=_digest(self.fingerprint, side, str(threshold)),
                side=side,
                threshold=threshold,
            )
            for side in _SIDES
        )
        return train, validation

    def limit(self, max_documents: int | None) -> "TextSource":
        """The same source up to `max_documents` documents, without a limit if `None`."""
        if max_documents is None:
            return self
        fingerprint = _digest(self.fingerprint, f"first {max_documents}")
        return replace(self, fingerprint=fingerprint, max_documents=max_documents)

    def _read(self) -> Iterator[str]:
        for batch in self.rows.iter(batch_size=_READ_ROWS):
            (texts,) = batch.values()
            yield from (text or "" for text in texts)  # a column may hold None

    def _documents(self, max_rows: int) -> Iterator[list[str]]:
        """Documents that hold text, each as its rows without blank ones, in parts of at most `max_rows`."""
        document: list[str] = []
        for text in self._read():
            if text.strip():
                document.append(text)
            if document and (self.document_unit == "row" or not text.strip() or len(document) == max_rows):
                yield document
                document = []
        if document:
            yield document

    def _side_of(self, document: list[str]) -> Side:
        return "validation" if _document_hash(document) < self.threshold else "train"


@dataclass(frozen=True)
class Corpus:
    """
    The text of a pretraining run.

    Args:
        train (`list[TextSource]`):
            One source or more.
        validation (`list[TextSource]`):
            Empty if nothing is held out.
        probabilities (`list[float]`, *optional*):
            How often to draw from each source of `train`, with sum 1. By default in proportion to their sizes.
        cache_dir (`Path`):
            Where prepared blocks belong.
    """

    train: list[TextSource]
    validation: list[TextSource]
    probabilities: list[float] | None
    cache_dir: Path


@dataclass(frozen=True)
class _Loaded:
    """One entry of the command line: sources for its splits, the validation split where it has one."""

    train: TextSource
    validation: TextSource | None = None


def load_corpus(arguments: CorpusArguments) -> Corpus:
    """
    Open the text that `arguments` name.

    Validation text comes from `validation_file`, else from the validation splits of the data sets, else (if there is
    none at all) from documents that every source holds out.

    Args:
        arguments (`CorpusArguments`):
            The parsed flags.

    Returns:
        `Corpus`: sources of text for training and validation.

    Raises:
        UserError: if something cannot be found, reached or read, or holds no text.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()  # in a log file every step of a bar would be a line
    loaded = [_load_dataset(spec, arguments) for spec in arguments.datasets or []]
    loaded += [_Loaded(source) for source in _load_files(arguments.train_file or [], arguments)]
    if not loaded:
        loaded = [_Loaded(_load_documentation(arguments))]
    train = [entry.train for entry in loaded]
    if arguments.streaming and len(train) > 1 and arguments.probabilities is None:
        raise UserError("With --streaming the sizes of several sources are not known; give --probabilities for them.")
    if arguments.validation_file:
        validation = _load_files(arguments.validation_file, arguments)
    else:
        validation = [entry.validation for entry in loaded if entry.validation is not None]
    if not validation and arguments.validation_fraction:
        splits = [source.split(arguments.validation_fraction) for source in train]
        train, validation = [first for first, _ in splits], [second for _, second in splits]
    weights = arguments.probabilities
    corpus = Corpus(
        train=[source.limit(arguments.max_train_documents) for source in train],
        validation=[source.limit(arguments.max_eval_documents) for source in validation],
        probabilities=[weight / sum(weights) for weight in weights] if weights else None,
        cache_dir=Path(arguments.cache_dir or HF_DATASETS_CACHE).expanduser() / "sktformer",
    )
    logger.info("Training text: %s.", ", ".join(source.name for source in corpus.train))
    logger.info("Validation text: %s.", ", ".join(source.name for source in corpus.validation) or "none")
    return corpus


def _load_documentation(arguments: CorpusArguments) -> TextSource:
    fingerprint = _digest(documentation_versions())
    rows = Dataset.from_generator(
        _documentation_rows,
        features=Features({"text": Value("string")}),
        cache_dir=arguments.cache_dir,
        fingerprint=fingerprint,
    )
    if arguments.streaming:
        rows = rows.to_iterable_dataset()
    return _make_source("documentation of the Python installation", rows, fingerprint, "row", arguments)


def _documentation_rows() -> Iterator[dict[str, str]]:
    logger.info("Reading the documentation of this Python installation (once, the result is kept).")
    return ({"text": document} for document in iter_documentation())


def _load_files(patterns: list[str], arguments: CorpusArguments) -> list[TextSource]:
    """With probabilities every entry is a source of its own, otherwise all files of one type are one source."""
    groups = [[pattern] for pattern in patterns] if arguments.probabilities else [patterns]
    sources = []
    for group in groups:
        files = list(dict.fromkeys(file for pattern in group for file in _find_files(pattern)))
        types = list(dict.fromkeys(map(_file_type, files)))
        if len(types) > 1 and arguments.probabilities:
            raise UserError(f"{group[0]} matches files of several types; give --probabilities for one pattern a type.")
        for file_type in types:
            name = ", ".join(group) + (f" ({file_type})" if len(types) > 1 else "")
            sources.append(_load_group(name, file_type, [f for f in files if _file_type(f) == file_type], arguments))
    return sources


def _find_files(pattern: str) -> list[str]:
    path = os.path.expanduser(pattern)
    files = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not files:
        raise UserError(f"{pattern}: no such file; check the path (it is read from {os.getcwd()}).")
    return files


def _file_type(path: str) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in _FILE_TYPES:
        raise UserError(f"{path}: files of type `{suffix}` cannot be read; give {', '.join(_FILE_TYPES)}.")
    return _FILE_TYPES[suffix]


def _load_group(name: str, file_type: str, files: list[str], arguments: CorpusArguments) -> TextSource:
    files = [file for file in files if os.path.getsize(file)]
    if not files:
        raise UserError(f"{name} holds no text; give a file that does.")
    patterns = [glob.escape(file) for file in files]
    is_text = file_type == "text"
    with _explained_errors(name):
        splits = load_dataset(
            file_type,
            # Each text file is a split of its own, which shows where it ends.
            data_files={f"file{n}": pattern for n, pattern in enumerate(patterns)} if is_text else {"train": patterns},
            cache_dir=arguments.cache_dir,
            streaming=arguments.streaming,
        )
        rows = _join_files(list(splits.values()))
    unit: Unit = "blank_line" if is_text else "row"
    return _make_source(name, rows, _digest(file_type, *map(_hash_file, files)), unit, arguments)


def _join_files(files: list[Rows]) -> Rows:
    """The rows of all files, with a blank row between two files, so that a document ends with its file."""
    if len(files) == 1:
        return files[0]
    blank: Rows = Dataset.from_dict({"text": [""]})
    if isinstance(files[0], IterableDataset):
        blank = blank.to_iterable_dataset()
    return concatenate_datasets([part for file in files for part in (file, blank)][:-1])


def _load_dataset(spec: str, arguments: CorpusArguments) -> _Loaded:
    path, config, revision = _parse_spec(spec)
    if Path(path, "state.json").is_file():
        return _Loaded(_load_saved_dataset(path, arguments))
    with _explained_errors(spec):
        builder = load_dataset_builder(path, config, revision=revision, cache_dir=arguments.cache_dir)
        _check_revision(spec, revision, builder)
        if arguments.streaming:
            splits: dict[str, Rows] = dict(builder.as_streaming_dataset())
        else:
            builder.download_and_prepare()
            splits = dict(builder.as_dataset())
    sources = {
        side: _make_source(
            f"{spec} ({split})",
            splits[split],
            _builder_fingerprint(path, builder, split),
            "blank_line" if isinstance(builder.config, TextConfig) else "row",
            arguments,
        )
        for side, split in _select_splits(spec, list(splits)).items()
        if not (side == "validation" and arguments.validation_file)
    }
    return _Loaded(sources["train"], sources.get("validation"))


def _load_saved_dataset(path: str, arguments: CorpusArguments) -> TextSource:
    """Open a folder that `Dataset.save_to_disk` has written: `load_dataset` refuses those."""
    with _explained_errors(path):
        rows = load_from_disk(path)
    fingerprint = _digest(*map(_hash_file, sorted(glob.glob(f"{glob.escape(path)}/*.arrow"))))
    if arguments.streaming:
        rows = rows.to_iterable_dataset()
    return _make_source(path, rows, fingerprint, "row", arguments)


def _parse_spec(spec: str) -> tuple[str, str | None, str | None]:
    if os.path.isdir(os.path.expanduser(spec)):
        return os.path.expanduser(spec), None, None
    match = _DATASET.fullmatch(spec)
    if match is None:
        raise UserError(f"--datasets {spec}: write path[:config][@revision], e.g. {_NAMESPACED_IDS['wikitext']}.")
    path = os.path.expanduser(match["path"])
    if os.path.isdir(path):
        if match["revision"]:
            raise UserError(f"{spec}: a local folder has no revisions; leave out @{match['revision']}.")
        return path, match["config"], None
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise UserError(f"{spec}: {_explain_path(path)}")
    return path, match["config"], match["revision"]


def _explain_path(path: str) -> str:
    if path in _NAMESPACED_IDS:
        return f"the Hub knows `{path}` as {_NAMESPACED_IDS[path]}; write that, or the path of a local folder."
    if "/" not in path:
        return f"there is no folder `{path}`, and the ids of the Hub have the form owner/name; write the owner too."
    return f"there is no folder {path}; check the path, or give single files with --train_file."


def _check_revision(spec: str, revision: str | None, builder: DatasetBuilder) -> None:
    # Without a network the datasets library takes the newest copy of its cache, whichever revision was asked for.
    if revision and _COMMIT.fullmatch(revision) and builder.hash != revision:
        raise UserError(
            f"{spec} cannot be reached, and the cache holds revision {builder.hash}; connect to the Hub once, or ask "
            "for that revision."
        )


def _select_splits(spec: str, splits: list[str]) -> dict[Side, str]:
    train = "train" if "train" in splits else splits[0]
    if train != "train" and len(splits) > 1:
        raise UserError(f"{spec} has no split `train` but {', '.join(splits)}; give another data set, or files.")
    validation = [split for split in _VALIDATION_SPLITS if split in splits and split != train]
    return {"train": train, "validation": validation[0]} if validation else {"train": train}


def _builder_fingerprint(path: str, builder: DatasetBuilder, split: str) -> str:
    if os.path.isdir(path):
        files = sorted(builder.config.data_files[split])
        return _digest(type(builder.config).__name__, *map(_hash_file, files))
    return _digest(path, builder.config.name, str(builder.hash), split)


def _make_source(name: str, rows: Rows, fingerprint: str, unit: Unit, arguments: CorpusArguments) -> TextSource:
    if arguments.document_unit != "auto":
        unit = arguments.document_unit
    with _explained_errors(name):
        column = _select_column(name, rows, arguments.text_column)
        source = TextSource(name, rows.select_columns([column]), _digest(fingerprint, column, unit), unit)
        if not any(text.strip() for text in source):
            raise UserError(f"{name} holds no text in its column `{column}`; give text, or another --text_column.")
    return source


def _select_column(name: str, rows: Rows, wanted: str | None) -> str:
    if rows.features is None:  # a stream of .csv or .json lines says what it holds with its first row
        row: dict[str, object] = next(iter(rows), {})
        columns, text_columns = list(row), [column for column, value in row.items() if isinstance(value, str)]
    else:
        columns = list(rows.features)
        text_columns = [column for column in columns if _is_text(rows.features[column])]
    if wanted is not None:
        if wanted not in columns:
            raise UserError(f"{name} has no column `{wanted}`; its columns are {', '.join(columns)}.")
        if wanted not in text_columns:
            raise UserError(f"The column `{wanted}` of {name} holds no strings; give another --text_column.")
        return wanted
    if "text" in text_columns:
        return "text"
    if not text_columns:
        raise UserError(f"{name} holds no text: none of its columns ({', '.join(columns)}) is one of strings.")
    if len(text_columns) > 1:
        raise UserError(
            f"{name} has several columns; say with --text_column which to read: {', '.join(text_columns)}."
        )
    return text_columns[0]


def _is_text(feature: object) -> bool:
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def _explained_errors(name: str) -> AbstractContextManager[None]:
    return explained_errors(name, "--train_file", "write the configuration as path:config")


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _document_hash(document: list[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(document).encode(), digest_size=8).digest())


def _hash_file(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
