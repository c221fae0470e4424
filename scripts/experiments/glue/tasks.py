"""The nine tasks of GLUE: what they read, and how it becomes tokens and labels.

A task's rows come from a data set of the Hub, from a folder of tasks or from single files; all have the columns and
the numbering of labels of `nyu-mll/glue`.
"""

import reprlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from experiments.arguments import UserError, flag, require_at_least
from experiments.loading import TABLE_READERS, explained_errors, load_prepared, read_table_file


@dataclass(frozen=True)
class GlueTask:
    """One task."""

    name: str  # on the Hub and on the command line
    title: str  # in tables
    columns: tuple[str, ...]  # of text, one or two
    labels: tuple[str, ...]  # a word for each class; none for regression
    metrics: tuple[str, ...] = ("accuracy",)  # the benchmark's
    unscored: tuple[str, ...] = ()  # those that do not count in the task's score in the paper's table
    submits_words: bool = False  # whether a submission holds the words of the labels, and not their numbers
    evaluation_splits: tuple[str, ...] = ("validation",)  # the first gives the score
    # Name of a test split to that of its file in a submission, where there are several.
    test_files: dict[str, str] = field(default_factory=dict)

    @property
    def is_regression(self) -> bool:
        """Whether the labels are numbers and not classes."""
        return not self.labels

    @property
    def scored(self) -> tuple[str, ...]:
        """The metrics whose mean is the task's score in the paper's table."""
        return tuple(metric for metric in self.metrics if metric not in self.unscored)

    @property
    def submission(self) -> dict[str, str]:
        """Name of a test split to that of its file in a submission."""
        return self.test_files or {"test": self.title}


_PAIR = ("sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")
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
            submits_words=True,
            evaluation_splits=("validation_matched", "validation_mismatched"),
            test_files={"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"},
        ),
        GlueTask("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), _BOTH),
        GlueTask("qnli", "QNLI", ("question", "sentence"), ("entailment", "not_entailment"), submits_words=True),
        GlueTask("sst2", "SST-2", ("sentence",), ("negative", "positive")),
        GlueTask("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",)),
        GlueTask("stsb", "STS-B", _PAIR, (), ("pearson", "spearmanr"), unscored=("pearson",)),
        GlueTask("mrpc", "MRPC", _PAIR, ("not_equivalent", "equivalent"), _BOTH),
        GlueTask("rte", "RTE", _PAIR, ("entailment", "not_entailment"), submits_words=True),
        GlueTask("wnli", "WNLI", _PAIR, ("not_entailment", "entailment")),
    )
}
# The benchmark's diagnostic set has no training part: the model of MNLI predicts it.
DIAGNOSTICS = GlueTask("ax", "AX", ("premise", "hypothesis"), _NLI, (), submits_words=True)
# The range of similarities that people gave.
SIMILARITY_RANGE = (0.0, 5.0)


@dataclass
class GlueArguments:
    """Which tasks, where their data lies, and how it is read."""

    task_name: list[str] = flag(MISSING, f"Tasks to run, in this order: {', '.join(TASKS)}; or `all`.")
    dataset_name: str = flag("nyu-mll/glue", "Data set of the Hub with a part per task.")
    dataset_config_name: str | None = flag(None, "The part of it that holds the one task, if not that of its name.")
    dataset_revision: str | None = flag(None, "Its commit, tag or branch.")
    data_dir: str | None = flag(None, f"Folder with a folder per task: train{'|'.join(TABLE_READERS)} and so on.")
    train_file: str | None = flag(None, "Local training file of the one task.")
    validation_file: str | None = flag(None, "Local validation file of the one task.")
    test_file: str | None = flag(None, "Local test file of the one task.")
    cache_dir: str | None = flag(None, "Prepared data; by default in the library's cache.")
    mnli_checkpoint: str | None = flag(None, "Start of RTE, MRPC and STS-B; `run`: this folder's best MNLI model.")
    max_seq_length: int = flag(128, "Longest input in tokens; longer ones are cut, a shorter SKTformer is lengthened.")
    pad_to_max_length: bool = flag(False, "Pad all inputs to --max_seq_length.")
    preprocessing_num_workers: int | None = flag(None, "Processes that tokenize.")
    max_train_samples: int | None = flag(None, "Use only the first rows for training.")
    max_eval_samples: int | None = flag(None, "Use only the first rows for evaluation.")
    max_predict_samples: int | None = flag(None, "Use only the first rows of test parts.")

    def __post_init__(self) -> None:
        unknown = [name for name in self.task_name if name not in TASKS and name != "all"]
        if unknown or not self.task_name:
            raise UserError(f"--task_name {' '.join(unknown)}: the tasks are {', '.join(TASKS)}, and `all`.")
        self.task_name = [name for name in TASKS if name in self.task_name or "all" in self.task_name]
        files = [name for name in ("train_file", "validation_file", "test_file") if getattr(self, name)]
        if self.dataset_config_name and len(self.task_name) > 1:
            raise UserError(f"--dataset_config_name {self.dataset_config_name} is the part of one task; name one.")
        if files and len(self.task_name) > 1:
            raise UserError(f"--{files[0]} belongs to one task; give --data_dir for {len(self.task_name)} tasks.")
        if files and self.data_dir:
            raise UserError(f"--{files[0]} and --data_dir both say where the data lies; give one of them.")
        for name in ("dataset_name", "dataset_config_name", "dataset_revision"):
            if self.inputs() and getattr(self, name) != getattr(GlueArguments, name):
                raise UserError(f"--{name} says what to read from the Hub, and the data lie here; leave it out.")
        if self.train_file and not self.validation_file:
            raise UserError("--train_file is given without --validation_file; say what to evaluate on.")
        limits = ("max_train_samples", "max_eval_samples", "max_predict_samples")
        require_at_least(1, self, *limits, "preprocessing_num_workers")
        require_at_least(5, self, "max_seq_length")  # which two texts and what stands between them need

    def inputs(self) -> list[str]:
        """The local folders and files that are read; none if the data comes from the Hub."""
        return [path for path in (self.data_dir, self.train_file, self.validation_file, self.test_file) if path]


def load_splits(task: GlueTask, arguments: GlueArguments, trains: bool) -> dict[str, Dataset]:
    """The training split, if the task trains, and the evaluation splits; of MNLI's two a single file is the first."""
    evaluation = task.evaluation_splits[:1] if arguments.validation_file else task.evaluation_splits
    return {name: load_split(task, name, arguments) for name in ([*(["train"] if trains else []), *evaluation])}


def load_tests(task: GlueTask, arguments: GlueArguments) -> list[tuple[GlueTask, str, Dataset]]:
    """The test splits that a task's model predicts; MNLI's predicts the diagnostic set too, where there is one."""
    wanted = [(task, name) for name in (list(task.submission)[:1] if arguments.test_file else task.submission)]
    data = arguments.data_dir  # on the Hub it is complete
    has_others = (Path(data) / DIAGNOSTICS.name).is_dir() if data else arguments.dataset_config_name is None
    if task.name == "mnli" and not arguments.test_file and has_others:
        wanted.append((DIAGNOSTICS, "test"))
    return [(part, name, load_split(part, name, arguments)) for part, name in wanted]


def load_split(task: GlueTask, split: str, arguments: GlueArguments) -> Dataset:
    """
    Read one split of a task and check it: its columns of text and `label`, an integer or, for regression, a float. A
    test split has in its place `idx`, the row's number in a submission.

    Raises a `UserError` if the split cannot be found or reached, is empty, lacks a column or a text, or has a label
    that is none of the task's.
    """
    name, rows = _read_split(task, split, arguments)
    is_test = split in task.submission
    needed = [*task.columns, *(() if is_test else ("label",))]
    if missing := [f"`{column}`" for column in needed if column not in rows.column_names]:
        needs = f"{task.name} needs {', '.join(needed)}, and there are {', '.join(rows.column_names)}"
        raise UserError(f"{name} has no column {' and no '.join(missing)}; {needs}.")
    if not len(rows):
        raise UserError(f"{name} is empty; {task.name} needs rows there.")
    part = "predict" if is_test else "train" if split == "train" else "eval"
    rows = rows.take(min(len(rows), getattr(arguments, f"max_{part}_samples") or len(rows)))
    columns: dict[str, list] = {column: list(rows[column]) for column in task.columns}
    for column, texts in columns.items():
        for number, text in enumerate(texts, start=1):
            if not isinstance(text, str):
                raise UserError(f"{name}: row {number} has {reprlib.repr(text)} for `{column}`, which must be text.")
    if is_test:
        columns["idx"] = list(rows["idx"]) if "idx" in rows.column_names else list(range(len(rows)))
    else:
        columns["label"] = _read_labels(name, task, rows["label"])
    return Dataset.from_dict(columns)


def _read_split(task: GlueTask, split: str, arguments: GlueArguments) -> tuple[str, Dataset]:
    """The rows of a split as they are, and what to call it in messages."""
    if arguments.inputs():
        file = _find_split(task, split, arguments) if arguments.data_dir else _given_file(task, split, arguments)
        return str(file), read_table_file(file, arguments.cache_dir)
    name = f"{arguments.dataset_name} ({arguments.dataset_config_name or task.name}, {split})"
    if arguments.dataset_name.count("/") != 1:
        raise UserError(f"--dataset_name {arguments.dataset_name}: ids of the Hub have the form owner/name.")
    place = (arguments.dataset_config_name or task.name, arguments.dataset_revision, arguments.cache_dir)
    with explained_errors(name, "--data_dir", "give a data set with a part for each task"):
        return name, load_prepared(arguments.dataset_name, *place, split)


def _given_file(task: GlueTask, split: str, arguments: GlueArguments) -> Path:
    flags = {"train": "train_file", task.evaluation_splits[0]: "validation_file"}
    flags |= {next(iter(task.submission)): "test_file"}
    given = getattr(arguments, flags[split]) if split in flags else None
    if given is None:
        remedy = f"give --{flags[split]}, or " if split in flags else ""
        raise UserError(f"There is no file for the split `{split}` of {task.name}; {remedy}use --data_dir.")
    return Path(given)


def _find_split(task: GlueTask, split: str, arguments: GlueArguments) -> Path:
    folder = Path(str(arguments.data_dir))
    if not folder.is_dir():
        raise UserError(f"--data_dir {folder} is no folder; check the path.")
    place, there = folder / task.name, sorted(path.name for path in folder.iterdir() if path.is_dir())
    if task.name not in there:
        raise UserError(f"--data_dir {folder} has no folder `{task.name}`; there is {', '.join(there) or 'none'}.")
    # One file, or the only shard of a data set downloaded from the Hub.
    files = [path for path in sorted(place.iterdir()) if path.suffix.lower() in TABLE_READERS]
    found = [path for path in files if path.stem == split or path.stem.startswith(f"{split}-0")]
    if len(found) != 1:
        what = f"{len(found)} files ({', '.join(path.name for path in found)})" if found else "no file"
        first, *others = TABLE_READERS
        wanted = f"put one {split}{first} (or {', '.join(others)}) there"
        raise UserError(f"{place} has {what} for the split `{split}`; {wanted}.")
    return found[0]


def _read_labels(name: str, task: GlueTask, labels: Iterable) -> list[int] | list[float]:
    low, high = SIMILARITY_RANGE if task.is_regression else (0, len(task.labels) - 1)
    kind = float if task.is_regression else int
    numbers = []
    for number, label in enumerate(labels, start=1):
        value: Any = task.labels.index(label) if label in task.labels else label
        with suppress(ValueError):  # numbers in a csv file whose column holds something else too are words
            value = kind(value) if isinstance(value, str) else value
        if type(value) not in (int, kind) or not low <= value <= high:  # as nothing is to what is no number
            classes = ", ".join(f"{index} ({word})" for index, word in enumerate(task.labels)) or f"{low} to {high}"
            raise UserError(f"{name}: row {number} has the label {label!r}; {task.name} has {classes}.")
        numbers.append(kind(value))
    return numbers
