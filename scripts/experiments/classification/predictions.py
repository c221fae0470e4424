"""Files of predictions: a row for each example, each document, each label."""

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from sklearn.metrics import confusion_matrix

from experiments.classification.data import TextData
from experiments.classification.labels import MULTI, SINGLE, Problem
from experiments.classification.metrics import average_documents, decide
from experiments.plots import plot_confusion_matrix
from experiments.results import write_atomically


def write_answers(folder: Path, data: TextData, name: str, chances: np.ndarray) -> None:
    """
    Write what a model answers to a part.

    Of the test part `predictions.csv`: its rows with predictions; of excerpts `documents.csv`, too. Of a part with
    single labels `confusion.csv` and `confusion.png`: how often each label (rows) was taken for each (columns).

    Args:
        folder (`Path`): Where to.
        data ([`data.TextData`]), name (`str`): What was read, and which part of it was predicted.
        chances (`np.ndarray` of shape `(num_examples, num_labels)`): What [`metrics.probabilities`] gives.
    """
    part, problem = data.parts[name], data.problem
    if part.labels is not None and problem.kind == SINGLE:
        counts = confusion_matrix(part.labels, decide(problem, chances), labels=range(len(problem.labels)))
        file = folder / ("test_confusion" if name == "test" else "confusion")
        rows = ([label, *row] for label, row in zip(problem.labels, counts.tolist(), strict=True))
        _write_csv(file.with_suffix(".csv"), [["label", *problem.labels], *rows])
        title = f"{counts.trace() / counts.sum():.1%} of {counts.sum():,} examples for {name} right"
        plot_confusion_matrix(counts, problem.labels, file.with_suffix(".png"), title)
    tables = {"predictions.csv": (part.rows, chances)} if name == "test" else {}
    if tables and "excerpt" in part.rows.column_names:
        texts = part.rows.remove_columns(data.columns[0])  # a novel would stand there in pieces
        means, first = average_documents(chances, part.documents)
        counts = np.unique(part.documents, return_counts=True)[1]
        documents = texts.select(first.tolist()).remove_columns("excerpt").add_column("excerpts", counts.tolist())
        tables = {"predictions.csv": (texts, chances), "documents.csv": (documents, means)}
    names = [f"probability of {label}" for label in problem.labels] if problem.kind == MULTI else ["probability"]
    for file_name, (table, values) in tables.items():
        header = [*table.column_names, "prediction", *(names if problem.labels else [])]
        lines = zip((row.values() for row in table), _answers(problem, values), strict=True)
        _write_csv(folder / file_name, [header, *([*row, *answer] for row, answer in lines)])


def _answers(problem: Problem, chances: np.ndarray) -> Iterator[list]:
    for row, decided in zip(chances, decide(problem, chances), strict=True):
        if problem.kind == SINGLE:
            yield [problem.labels[decided], f"{row.max():.6f}"]
        elif problem.kind == MULTI:
            chosen = [name for name, is_chosen in zip(problem.labels, decided, strict=True) if is_chosen]
            yield [",".join(chosen), *(f"{value:.6f}" for value in row)]
        else:
            yield [f"{decided:.6g}"]


def _write_csv(path: Path, rows: Iterable[Iterable]) -> None:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    write_atomically(path, table.getvalue())
