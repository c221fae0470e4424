"""The nine tasks of GLUE: what they read, and how it becomes tokens and labels.

A task's rows come from a data set of the Hub, from a folder of tasks or from single files; all have the columns and
the numbering of labels of `nyu-mll/glue`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from experiments.arguments import UserError
from experiments.loading import explained_errors


@dataclass(frozen=True)
class GlueTask:
    """
    One task.

    Args:
        name (`str`): Its name on the Hub and on the command line.
        title (`str`): Its name in tables.
        columns (`tuple` of `str`): The columns of text, one or two.
        labels (`tuple` of `str`): A word for each class; empty for regression.
        metrics (`tuple` of `str`): The benchmark's metrics.
        scored (`tuple` of `str`): Those whose mean is the task's score in the paper's table.
        evaluation_splits (`tuple` of `str`): The first gives the score.
        submission (`dict`): Name of a test split to that of its file in a submission.
        submits_words (`bool`): Whether a submission holds the words of the labels, and not their numbers.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    scored: tuple[str, ...]
    submission: dict[str, str]
    submits_words: bool = False
    evaluation_splits: tuple[str, ...] = ("validation",)

    @property
    def is_regression(self) -> bool:
        """Whether the labels are numbers and not classes."""
        return not self.labels


_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")
_ACCURACY = ("accuracy",)
_BOTH = ("accuracy", "f1")

# In the order of the paper's table; MNLI stands first, so that other tasks can start from its model.
TASKS = {
    task.name: task
    for task in (
        GlueTask(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            _NLI,
            _ACCURACY,
            _ACCURACY,
            {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"},
            submits_words=True,
            evaluation_splits=("validation_matched", "validation_mismatched"),
        ),
        GlueTask(
            "qqp",
            "QQP",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
            _BOTH,
            _BOTH,
            {"test": "QQP"},
        ),
        GlueTask(
            "qnli",
            "QNLI",
            ("question", "sentence"),
            ("entailment", "not_entailment"),
            _ACCURACY,
            _ACCURACY,
            {"test": "QNLI"},
            submits_words=True,
        ),
        GlueTask("sst2", "SST-2", ("sentence",), ("negative", "positive"), _ACCURACY, _ACCURACY, {"test": "SST-2"}),
        GlueTask(
            "cola",
            "CoLA",
            ("sentence",),
            ("unacceptable", "acceptable"),
            ("matthews_correlation",),
            ("matthews_correlation",),
            {"test": "CoLA"},
        ),
        GlueTask("stsb", "STS-B", _PAIR, (), ("pearson", "spearmanr"), ("spearmanr",), {"test": "STS-B"}),
        GlueTask("mrpc", "MRPC", _PAIR, ("not_equivalent", "equivalent"), _BOTH, _BOTH, {"test": "MRPC"}),
        GlueTask(
            "rte",
            "RTE",
            _PAIR,
            ("entailment", "not_entailment"),
            _ACCURACY,
            _ACCURACY,
            {"test": "RTE"},
            submits_words=True,
        ),
        GlueTask("wnli", "WNLI", _PAIR, ("not_entailment", "entailment"), _ACCURACY, _ACCURACY, {"test": "WNLI"}),
    )
}
# The benchmark's diagnostic set has no training part: the model of MNLI predicts it.
DIAGNOSTICS = GlueTask("ax", "AX", ("premise", "hypothesis"), _NLI, (), (), {"test": "AX"}, submits_words=True)
# The range of similarities that people gave.
SIMILARITY_RANGE = (0.0, 5.0)

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


@dataclass
class GlueArguments:
    """Which tasks, and where their data lies."""

    task_name: list[str] = field(
        metadata={"help": f"Tasks to run: {', '.join(TASKS)}, or `all`. They run in the order of the table."}
    )
    dataset_name: str = field(default="nyu-mll/glue", metadata={"help": "Data set of the Hub with a part per task."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Its commit, tag or branch."})
    data_dir: str | None = field(
        default=None,
        metadata={
            "help": "Local folder with a folder per task that holds train, validation and test as .jsonl, .json, "
            ".csv, .tsv or .parquet (for mnli validation_matched and so on)."
        },
    )
    train_file: str | None = field(default=None, metadata={"help": "Local training file of the one task."})
    validation_file: str | None = field(default=None, metadata={"help": "Local validation file of the one task."})
    test_file: str | None = field(default=None, metadata={"help": "Local test file of the one task."})
    cache_dir: str | None = field(
        default=None, metadata={"help": "Folder for prepared data; by default the cache of the datasets library."}
    )
    max_seq_length: int = field(
        default=128, metadata={"help": "Longest input in tokens, special ones included; longer ones are cut."}
    )
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad every input to --max_seq_length, and not to the longest of its batch."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first rows for training."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only the first rows for evaluation."})

    def __post_init__(self) -> None:
        unknown = [name for name in self.task_name if name not in TASKS and name != "all"]
        if unknown or not self.task_name:
            raise UserError(f"--task_name {' '.join(unknown)}: the tasks are {', '.join(TASKS)}, and `all`.")
        self.task_name = [name for name in TASKS if name in self.task_name or "all" in self.task_name]
        files = [name for name in ("train_file", "validation_file", "test_file") if getattr(self, name)]
        if files and len(self.task_name) > 1:
            raise UserError(f"--{files[0]} belongs to one task; give --data_dir for {len(self.task_name)} tasks.")
        if files and self.data_dir:
            raise UserError(f"--{files[0]} and --data_dir both say where the data lies; give one of them.")
        if self.train_file and not self.validation_file:
            raise UserError("--train_file is given without --validation_file; say what to evaluate on.")
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}; it must be at least 1.")
        if self.max_seq_length < 5:
            raise UserError(f"--max_seq_length is {self.max_seq_length}; two texts need at least 5 tokens.")


def load_split(task: GlueTask, split: str, arguments: GlueArguments) -> Dataset:
    """
    Read one split of a task and check it.

    Args:
        task ([`GlueTask`]): The task.
        split (`str`): `train`, one of its `evaluation_splits` or of the keys of its `submission`.
        arguments ([`GlueArguments`]): Where the data lies.

    Returns:
        `Dataset`: the task's columns of text and, but for a test split, `label`: an integer or, for regression, a
        float. A test split has `idx`, the row's number in a submission.

    Raises:
        UserError: if the split cannot be found or reached, is empty, lacks a column or a text, or has a label that is
            none of the task's.
    """
    name, rows = _read_split(task, split, arguments)
    is_test = split in task.submission
    needed = [*task.columns, *(() if is_test else ("label",))]
    missing = [column for column in needed if column not in rows.column_names]
    if missing:
        raise UserError(
            f"{name} has no column {' and no '.join(f'`{column}`' for column in missing)}; {task.name} needs "
            f"{', '.join(needed)}, and there are {', '.join(rows.column_names)}."
        )
    limit = arguments.max_train_samples if split == "train" else arguments.max_eval_samples
    if limit is not None and not is_test:
        rows = rows.select(range(min(limit, len(rows))))
    if not len(rows):
        raise UserError(f"{name} is empty; {task.name} needs rows there.")
    columns = {}
    for column in task.columns:
        columns[column] = list(rows[column])
        _check_texts(name, column, columns[column])
    if is_test:
        columns["idx"] = list(rows["idx"]) if "idx" in rows.column_names else list(range(len(rows)))
    else:
        columns["label"] = _read_labels(name, task, rows["label"])
    return Dataset.from_dict(columns)


def encode_split(
    task: GlueTask, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, desc: str
) -> Dataset:
    """
    Tokenize a split of [`load_split`].

    Args:
        task ([`GlueTask`]): The task.
        rows (`Dataset`): Its texts and labels.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        max_length (`int`): Longest input in tokens; of a pair the longer text is cut first.
        desc (`str`): Stands before the progress bar.

    Returns:
        `Dataset`: what the tokenizer makes of the texts, without padding, and the other columns of `rows`.
    """

    def encode(batch: dict[str, list]) -> dict[str, list]:
        return dict(tokenizer(*(batch[column] for column in task.columns), truncation=True, max_length=max_length))

    return rows.map(encode, batched=True, remove_columns=list(task.columns), desc=desc)


def _read_split(task: GlueTask, split: str, arguments: GlueArguments) -> tuple[str, Dataset]:
    """The rows of a split as they are, and what to call it in messages."""
    file = _local_file(task, split, arguments)
    if file is not None:
        return str(file), _read_file(file, arguments.cache_dir)
    name = f"{arguments.dataset_name} ({task.name}, {split})"
    if arguments.dataset_name.count("/") != 1:
        raise UserError(f"--dataset_name {arguments.dataset_name}: ids of the Hub have the form owner/name.")
    with explained_errors(name, "--data_dir", "give a data set with a part for each task"):
        return name, load_dataset(
            arguments.dataset_name,
            task.name,
            split=split,
            revision=arguments.dataset_revision,
            cache_dir=arguments.cache_dir,
        )


def _local_file(task: GlueTask, split: str, arguments: GlueArguments) -> Path | None:
    """The local file with a split; None if the data is not local."""
    if arguments.data_dir is not None:
        return _find_split(Path(arguments.data_dir).expanduser(), task, split)
    kinds = {"train": arguments.train_file, task.evaluation_splits[0]: arguments.validation_file}
    kinds |= {next(iter(task.submission)): arguments.test_file}
    given = kinds.get(split)
    if given is None:
        if any(kinds.values()):
            raise UserError(f"There is no file for the split `{split}` of {task.name}; give it, or use --data_dir.")
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        raise UserError(f"{given}: no such file; check the path (it is read from {Path.cwd()}).")
    return path


def _find_split(folder: Path, task: GlueTask, split: str) -> Path:
    place = folder / task.name
    if not place.is_dir():
        if not folder.is_dir():
            raise UserError(f"--data_dir {folder} is no folder; check the path.")
        there = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise UserError(f"--data_dir {folder} has no folder `{task.name}`; there is {', '.join(there) or 'none'}.")
    # One file, or the only shard of a data set downloaded from the Hub.
    files = [path for path in sorted(place.iterdir()) if path.suffix.lower() in _READERS]
    found = [path for path in files if path.stem == split or path.stem.startswith(f"{split}-0")]
    if len(found) != 1:
        what = "no file" if not found else f"{len(found)} files ({', '.join(path.name for path in found)})"
        raise UserError(f"{place} has {what} for the split `{split}`; put one {split}.jsonl (or {_types()}) there.")
    return found[0]


def has_split(task: GlueTask, split: str, arguments: GlueArguments) -> bool:
    """Whether a split is named or lies in the local folder; data on the Hub is taken to be complete."""
    try:
        _local_file(task, split, arguments)
    except UserError:
        return False
    return True


def _read_file(path: Path, cache_dir: str | None) -> Dataset:
    if path.suffix.lower() not in _READERS:
        raise UserError(f"{path}: files of type `{path.suffix}` cannot be read; give {_types()}.")
    if not path.stat().st_size:
        raise UserError(f"{path} is empty; give a file with rows.")
    options: dict = {}
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        options["keep_default_na"] = False  # "None" and "NA" are words
    if kind == ".tsv":
        options |= {"delimiter": "\t", "quoting": 3}
    with explained_errors(str(path), "another file", "check the file"):
        files = {"rows": str(path)}
        try:
            return load_dataset(_READERS[kind], data_files=files, split="rows", cache_dir=cache_dir, **options)
        except ValueError as error:
            if "corresponds to no data" not in str(error):
                raise
            raise UserError(f"{path} is empty; give a file with rows.") from error


def _types() -> str:
    return ", ".join(_READERS)


def _check_texts(name: str, column: str, texts: Iterable) -> None:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{name}: row {number} has {text!r} for `{column}`, which must be text.")


def _read_labels(name: str, task: GlueTask, labels: Iterable) -> list[int] | list[float]:
    numbers = []
    for number, label in enumerate(labels):
        if task.is_regression:
            low, high = SIMILARITY_RANGE
            similarity = _number(label, float)
            is_number = isinstance(similarity, int | float) and not isinstance(similarity, bool)
            if not is_number or not math.isfinite(similarity) or not low <= similarity <= high:
                raise UserError(f"{name}: row {number} has the label {label!r}; {task.name} has {low} to {high}.")
            numbers.append(float(similarity))
            continue
        value = task.labels.index(label) if label in task.labels else _number(label, int)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(task.labels):
            classes = ", ".join(f"{index} ({word})" for index, word in enumerate(task.labels))
            raise UserError(f"{name}: row {number} has the label {label!r}; {task.name} has {classes}.")
        numbers.append(value)
    return numbers


def _number(label: Any, kind: type) -> Any:
    """A label of a csv file whose column holds something else than numbers too."""
    if not isinstance(label, str):
        return label
    try:
        return kind(label)
    except ValueError:
        return label
