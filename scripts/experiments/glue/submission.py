"""The files that gluebenchmark.com takes: one of predictions for each test split, in one archive."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments.glue.tasks import SIMILARITY_RANGE, GlueTask
from experiments.results import replace_file, write_atomically


def write_predictions(folder: Path, task: GlueTask, split: str, indices: Iterable[int], labels: np.ndarray) -> Path:
    """
    Write the classes or similarities `(num_examples,)` predicted for a test split into the submission's folder.

    The file is named as the benchmark asks for, and has the columns `index` (the rows' numbers) and `prediction`.
    """
    if task.is_regression:
        predictions = [f"{value:.3f}" for value in np.clip(labels, *SIMILARITY_RANGE)]
    elif task.submits_words:
        predictions = [task.labels[label] for label in labels]
    else:
        predictions = [str(label) for label in labels]
    rows = [f"{index}\t{prediction}" for index, prediction in zip(indices, predictions, strict=True)]
    path = folder / f"{task.submission[split]}.tsv"
    write_atomically(path, "\n".join(["index\tprediction", *rows]) + "\n")
    return path


def pack_submission(folder: Path, archive: Path) -> list[str]:
    """Put all files of predictions in a folder into one archive, without folders in it; returns their names."""
    files = sorted(folder.glob("*.tsv"))
    with replace_file(archive) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            packed.write(file, file.name)
    return [file.name for file in files]
