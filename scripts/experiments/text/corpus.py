"""Text for pretraining: data sets of the Hub, local files, or the documentation of this Python installation.

`load_corpus` turns the flags of `CorpusArguments` into `TextSource`s, which can be read again and again. Nothing is
tokenized here, see `text.packing` for that.
"""

import glob
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets
from datasets.packaged_modules.text.text import TextConfig

from experiments.arguments import UserError, flag, one_line, require_at_least
from experiments.loading import NO_INDEX, VALIDATION_SPLITS, explained_errors, find_dataset, find_files
from experiments.text.documentation import documentation_versions, iter_documentation
from experiments.text.source import Rows, Side, TextSource, Unit, digest


logger = logging.getLogger(__name__)

_FILE_TYPES = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_DATASET = re.compile(r"(?P<path>[^:@]+)(?::(?P<config>[^@]+))?(?:@(?P<revision>.+))?")
_explained_errors = partial(
    explained_errors, local="--train_file", configuration="write the configuration as path:config"
)


@dataclass
class CorpusArguments:
    """Flags that say which text to read. Without any, the documentation of this Python installation is read."""

    datasets: list[str] | None = flag(None, "Data sets to mix: ids of the Hub or folders, path[:config][@revision].")
    dataset_name: str | None = flag(None, "A single data set in place of --datasets: path or path@revision.")
    dataset_config_name: str | None = flag(None, "The configuration of --dataset_name.")
    train_file: list[str] | None = flag(None, "Local .txt, .json, .jsonl, .csv or .parquet files, or books/*.txt.")
    validation_file: list[str] | None = flag(None, "Local files to validate on in place of validation splits.")
    encoding: str = flag("utf-8", "Encoding of --train_file and --validation_file, e.g. latin-1.")
    text_column: str | None = flag(None, "The column with the text; by default `text`, or the only one of strings.")
    probabilities: list[float] | None = flag(None, "Shares of --datasets, then --train_file; by default their sizes.")
    validation_fraction: float = flag(0.01, "Share of documents to hold out (0: none) without text to validate on.")
    document_unit: Literal["auto", "row", "blank_line", "file"] = flag(
        "auto",
        "What ends a document: its row, a blank row, its text file; auto: a blank row in text files, else its row.",
    )
    one_document_per_block: bool = flag(False, "Never put two documents in one block of tokens.")
    streaming: bool = flag(False, "Read and tokenize while training; nothing is prepared on disk first.")
    preprocessing_num_workers: int | None = flag(None, "Processes that tokenize what is prepared on disk.")
    cache_dir: str | None = flag(None, "Folder for prepared text and blocks; by default that of the datasets library.")

    def __post_init__(self) -> None:
        if self.dataset_config_name and not self.dataset_name:
            raise UserError(f"--dataset_config_name {self.dataset_config_name} is given without --dataset_name.")
        if self.dataset_name:
            if self.datasets:
                raise UserError("--dataset_name and --datasets are both given; give one of them.")
            name, at, revision = self.dataset_name.partition("@")
            configuration = f":{self.dataset_config_name}" if self.dataset_config_name else ""
            self.datasets = [f"{name}{configuration}{at}{revision}"]
        if self.validation_file and not (self.train_file or self.datasets):
            what = "the text to train on, or that the evaluated model was trained on, with whose words it is compared"
            raise UserError(f"--validation_file is given without --train_file or --datasets; name {what}.")
        if self.encoding != CorpusArguments.encoding and not (self.train_file or self.validation_file):
            raise UserError(f"--encoding {self.encoding} is for --train_file and --validation_file; leave it out.")
        if self.document_unit == "file" and (self.datasets or not self.train_file):
            raise UserError("--document_unit file is for text files alone; name them with --train_file.")
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"--validation_fraction is {self.validation_fraction}; it must be in [0, 1).")
        require_at_least(1, self, "preprocessing_num_workers")
        given = self.probabilities or []
        entries = len([*(self.datasets or []), *(self.train_file or [])]) or 1
        if len(given) not in (0, entries):
            raise UserError(f"--probabilities has {len(given)} numbers for {entries} sources; give one for each.")
        if not all(0 < probability < float("inf") for probability in given):
            raise UserError(f"--probabilities must be positive numbers, not {given}.")


@dataclass(frozen=True)
class Corpus:
    """The text of a pretraining run."""

    train: list[TextSource]
    validation: list[TextSource]  # empty if nothing is held out
    probabilities: list[float] | None  # of drawing from each source of `train`, with sum 1; by default by their sizes
    cache_dir: Path  # of prepared blocks
    hub_datasets: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """What is trained on, without the paths of this machine: names of data sets and of files."""
        return _describe(self.train)

    @property
    def fingerprint(self) -> str:
        """Equal for equal text, wherever it lies, and another one if a file of it changes."""
        train, validation = ([source.fingerprint for source in side] for side in (self.train, self.validation))
        return digest(*train, "", *validation)


def load_corpus(arguments: CorpusArguments) -> Corpus:
    """
    Open the text that `arguments` name. Validation text comes from `validation_file`, else from validation splits,
    else every source holds documents out. Raises a `UserError` if something cannot be found, reached or read, or holds
    no text.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # in a log file every step of a bar would be a line
    loaded = [_load_dataset(spec, arguments) for spec in arguments.datasets or []]
    train = [sides["train"] for sides in loaded] + _load_files(arguments.train_file or [], arguments)
    train = train or [_load_documentation(arguments)]
    if arguments.streaming and len(train) > 1 and arguments.probabilities is None:
        raise UserError("With --streaming the sizes of several sources are not known; give --probabilities for them.")
    validation = [sides["validation"] for sides in loaded if "validation" in sides]
    validation += _load_files(arguments.validation_file or [], arguments)
    if arguments.validation_file:
        _warn_of_shared_files(arguments.train_file or [], arguments.validation_file)
    if not validation and arguments.validation_fraction:
        splits = [source.split(arguments.validation_fraction) for source in train]
        train, validation = [split["train"] for split in splits], [split["validation"] for split in splits]
    logger.info("Training text: %s.", _describe(train))
    logger.info("Validation text: %s.", _describe(validation) or "none")
    weights = arguments.probabilities
    probabilities = [weight / sum(weights) for weight in weights] if weights else None
    cache_dir = Path(arguments.cache_dir or datasets.config.HF_DATASETS_CACHE) / "sktformer"
    paths = [_parse_spec(spec)[0] for spec in arguments.datasets or []]
    return Corpus(train, validation, probabilities, cache_dir, tuple(p for p in paths if not os.path.isdir(p)))


def _warn_of_shared_files(train: list[str], validation: list[str]) -> None:
    learnt, held = ({Path(f).resolve() for each in side for f in find_files(each)} for side in (train, validation))
    if shared := [file.name for file in sorted(learnt & held)]:
        what = f"{shared[0]} and {len(shared) - 1:,} more stand" if len(shared) > 1 else f"{shared[0]} stands"
        logger.warning("%s in --train_file, too: of a model that learns it the loss says little of new text.", what)


def _load_documentation(arguments: CorpusArguments) -> TextSource:
    def read() -> Iterator[dict[str, str]]:
        logger.info("Reading the documentation of this Python installation (once, the result is kept).")
        return ({"text": document} for document in iter_documentation())

    content = digest(documentation_versions())
    features = datasets.Features({"text": datasets.Value("string")})
    rows: Any = datasets.Dataset.from_generator(read, features, cache_dir=arguments.cache_dir, fingerprint=content)
    return _make_source("documentation of the Python installation", rows, content, "row", arguments)


def _load_files(patterns: list[str], arguments: CorpusArguments) -> list[TextSource]:
    """With probabilities every entry is a source of its own, otherwise all files of one type are one source."""
    sources = []
    for group in [[pattern] for pattern in patterns] if arguments.probabilities else [patterns]:
        files: dict[str, list[str]] = {}  # of each type
        for file in dict.fromkeys(file for pattern in group for file in find_files(pattern)):
            suffix = Path(file).suffix.lower()
            if suffix not in _FILE_TYPES:
                raise UserError(f"{file}: files of type `{suffix}` cannot be read; give {', '.join(_FILE_TYPES)}.")
            files.setdefault(_FILE_TYPES[suffix], []).append(file)
        if len(files) > 1 and arguments.probabilities:
            raise UserError(f"{group[0]} matches files of several types; give --probabilities for one pattern a type.")
        for file_type, of_type in files.items():
            try:
                sources.append(_load_group(file_type, of_type, arguments))
            except UserError:
                for file in of_type if len(of_type) > 1 else []:  # to name the one that is at fault
                    _load_group(file_type, [file], arguments)
                raise
    return sources


def _load_group(file_type: str, files: list[str], arguments: CorpusArguments) -> TextSource:
    """Files of one type as one source."""
    description = _list_files([Path(file).name for file in files])
    name = files[0] if len(files) == 1 else description
    whole_files = arguments.document_unit == "file"
    if whole_files and file_type != "text":
        raise UserError(f"{name}: --document_unit file is for .txt files; leave it out.")
    encoding = None if file_type == "parquet" else arguments.encoding
    hashes = [_hash_file(file, encoding) for file in files]
    files = [file for file in files if os.path.getsize(file)]
    if not files:
        raise UserError(f"{name} holds no text; give a file that does.")
    options: dict[str, Any] = {"cache_dir": arguments.cache_dir, "streaming": arguments.streaming}
    options |= {"sample_by": "document"} if whole_files else {}
    options |= {"encoding": encoding} if encoding and encoding != "utf-8" else {}
    options |= NO_INDEX if file_type == "csv" else {}
    by_line = file_type == "text" and not whole_files
    patterns = [glob.escape(os.path.abspath(file)) for file in files]
    # Each text file is a split of its own, which shows where it ends.
    parts = {f"file{n}": pattern for n, pattern in enumerate(patterns)} if by_line else {"train": patterns}
    content = digest(file_type, str(whole_files), *hashes)
    with _explained_errors(name):
        # By their content: the library's cache knows a file by its path and time alone.
        rows = _join_files(list(datasets.load_dataset(file_type, content, data_files=parts, **options).values()))
    return _make_source(name, rows, content, "blank_line" if by_line else "row", arguments, description)


def _join_files(files: list[Rows]) -> Rows:
    """The rows of all files, with a blank row between two files, so that a document ends with its file."""
    if len(files) == 1:
        return files[0]
    blank = datasets.Dataset.from_dict({"text": [""]})
    blank = blank if isinstance(files[0], datasets.Dataset) else blank.to_iterable_dataset()
    return datasets.concatenate_datasets([part for file in files for part in (file, blank)][:-1])


def _list_files(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    named = [*names[:3], f"... and {len(names) - 3} more"] if len(names) > 4 else names
    return f"{len(names)} files: {', '.join(named)}"


def _describe(sources: list[TextSource]) -> str:
    return "; ".join(source.description or source.name for source in sources)


def _load_dataset(spec: str, arguments: CorpusArguments) -> dict[Side, TextSource]:
    """A source for the training split, and one for the validation split if there is one and it is wanted."""
    path, config, revision = _parse_spec(spec)
    if Path(path, "state.json").is_file():  # which `Dataset.save_to_disk` has written, and `load_dataset` refuses
        fingerprint = digest(*map(_hash_file, sorted(glob.glob(f"{glob.escape(path)}/*.arrow"))))
        with _explained_errors(path):
            rows = datasets.load_from_disk(path)
        return {"train": _make_source(path, rows, fingerprint, "row", arguments, Path(path).name)}
    cache_dir = arguments.cache_dir
    if os.path.isdir(path):  # by its content, as above
        found = [file for file in Path(path).rglob("*") if file.is_file()]
        files = sorted(str(file) for file in found if "/." not in f"/{file.relative_to(path).as_posix()}")
        cache_dir = os.path.join(cache_dir or datasets.config.HF_DATASETS_CACHE, digest(*map(_hash_file, files)))
    with _explained_errors(spec):
        builder = find_dataset(path, config, revision, cache_dir)
        if arguments.streaming:
            splits: dict[str, Rows] = dict(builder.as_streaming_dataset())
        else:
            builder.download_and_prepare()
            splits = dict(builder.as_dataset())
    unit: Unit = "blank_line" if isinstance(builder.config, TextConfig) else "row"
    title = Path(path).name if os.path.isdir(path) else spec
    sides: dict[Side, TextSource] = {}
    for side, split in _select_splits(spec, list(splits)).items():
        if side == "train" or not arguments.validation_file:
            names, content = [f"{name} ({split})" for name in (spec, title)], _fingerprint(path, builder, split)
            sides[side] = _make_source(names[0], splits[split], content, unit, arguments, names[1])
    return sides


def _parse_spec(spec: str) -> tuple[str, str | None, str | None]:
    whole = os.path.expanduser(spec)
    if os.path.isdir(whole):
        return whole, None, None
    match = _DATASET.fullmatch(whole)
    if match is None:
        raise UserError(f"--datasets {spec}: write path[:config][@revision], e.g. Salesforce/wikitext.")
    path, config, revision = match.groups()
    if os.path.isdir(path) and revision:
        raise UserError(f"{spec}: a local folder has no revisions; leave out @{revision}.")
    if not os.path.isdir(path) and (path.count("/") != 1 or path.startswith((".", "/"))):
        raise UserError(f"{spec}: there is no folder {path}, and ids of the Hub have the form owner/name; check both.")
    return path, config, revision


def _select_splits(spec: str, splits: list[str]) -> dict[Side, str]:
    if "train" not in splits and len(splits) > 1:
        raise UserError(f"{spec} has no split `train` but {', '.join(splits)}; give another data set, or files.")
    chosen: dict[Side, str] = {"train": "train" if "train" in splits else splits[0]}
    validation = [split for split in VALIDATION_SPLITS if split in splits and "train" in splits]
    return chosen | ({"validation": validation[0]} if validation else {})


def _fingerprint(path: str, builder: datasets.DatasetBuilder, split: str) -> str:
    if not os.path.isdir(path):
        return digest(path, builder.config.name, str(builder.hash), split)
    return digest(type(builder.config).__name__, *map(_hash_file, sorted(builder.config.data_files[split])))


def _make_source(
    name: str, rows: Rows, content: str, unit: Unit, arguments: CorpusArguments, description: str | None = None
) -> TextSource:
    if arguments.document_unit in ("row", "blank_line"):
        unit = arguments.document_unit
    if arguments.streaming and isinstance(rows, datasets.Dataset):
        rows = rows.to_iterable_dataset()
    with _explained_errors(name):
        column = _select_column(name, rows, arguments.text_column)
        source = TextSource(name, rows.select_columns([column]), digest(content, column, unit), unit, description)
        if not any(text.strip() for text in source):
            raise UserError(f"{name} holds no text in its column `{column}`; give text, or another --text_column.")
    return source


def _select_column(name: str, rows: Rows, wanted: str | None) -> str:
    # A stream of .csv or .json lines says what it holds with its first row.
    features = rows.features or datasets.Dataset.from_list(list(rows.take(1))).features
    columns, strings = list(features), ("string", "large_string")
    text_columns = [column for column in columns if getattr(features[column], "dtype", None) in strings]
    chosen = [wanted] if wanted is not None else ["text"] if "text" in text_columns else text_columns
    if wanted is not None and wanted not in columns:
        raise UserError(f"{name}: there is no column --text_column {wanted}; there is {', '.join(columns)}.")
    if len(chosen) != 1 or chosen[0] not in text_columns:
        found = f"in the columns {', '.join(text_columns) or '(none)'} of {', '.join(columns)}"
        raise UserError(f"{name} holds text {found}; name one with --text_column.")
    return chosen[0]


def _hash_file(path: str, encoding: str | None = None) -> str:
    """A hash of bytes, or of text: the datasets library does not say which file it cannot decode."""
    content = hashlib.blake2b()
    try:
        with open(path, mode="r" if encoding else "rb", encoding=encoding) as file:
            while chunk := file.read(1 << 20):
                content.update(chunk.encode() if encoding else chunk)
    except (UnicodeError, LookupError) as error:  # of the file, or of the encoding's name
        raise UserError(f"{path} is not written in {encoding} ({one_line(error)}); name its --encoding.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions.") from error
    return content.hexdigest()
