"""What a run leaves beside its model: predictions, confusions, a table of metrics and the model card."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import confusion_matrix

from experiments.arguments import UserError
from experiments.checkpoints import CheckpointArguments
from experiments.classification.data import TextArguments, TextData
from experiments.classification.labels import MULTI, SINGLE, Problem, format_names
from experiments.classification.metrics import METRICS, average_documents, decide
from experiments.model_card import example_input, format_scores, public_name, write_classifier_card
from experiments.models import fingerprint_checkpoint
from experiments.plots import plot_confusion_matrix
from experiments.results import read_json, write_atomically, write_json, write_results
from experiments.run_folder import METRICS_FILE, RUN_FILE
from experiments.trials import best_trial, trial_folders


_OF_SEEDS = re.compile(r"(median|standard deviation) of \d+ seeds$")
_TEST_FILES = ("predictions.csv", "documents.csv", "test_confusion.csv", "test_confusion.png")
_FLATTERED = "Validation has the best evaluation of the training, which flatters this model."


def check_answers(folder: Path, checkpoint: CheckpointArguments, overwrite: bool) -> None:
    """
    Check that a folder may take predictions of a model without a run of their own.

    It may be new, hold an earlier prediction, or be one whose scores these are: of the model, of the trials that it is
    the best of, or of its evaluation. Raises a `UserError` if it holds something else, or predictions without
    `overwrite`.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file; name a folder.")
    model = checkpoint.model_name_or_path
    trials = trial_folders(folder)
    places = [folder, *([best_trial(folder)] if len(trials) > 1 else [])]
    is_own = Path(model).resolve() in [place.resolve() for place in places]
    decides = read_json(folder / RUN_FILE, {}).get("decides", {})
    if not is_own and not decides.get("do_train", True):  # an evaluation
        is_own = decides.get("checkpoint") == fingerprint_checkpoint(model, checkpoint.model_revision)
    files = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    others = sorted(files - {*_TEST_FILES, "report.md", "report.json", "all_results.json"})
    if others and not is_own:
        what = f"holds files that are no predictions of {model} ({format_names(others, 3)})"
        raise UserError(f"--output_dir {folder} {what}; choose another folder.")
    if (folder / "predictions.csv").exists() and not overwrite:
        raise UserError(f"{folder} holds predictions; choose another --output_dir, or pass --overwrite.")


def delete_answers(folder: Path) -> None:
    """Delete what [`write_answers`] has written of a test part: another model answers now."""
    for file in _TEST_FILES:
        (folder / file).unlink(missing_ok=True)


def write_answers(folder: Path, data: TextData, name: str, chances: np.ndarray, separator: str) -> None:
    """
    Write what a model answers to a part, of which [`metrics.probabilities`] gives the `chances`.

    Of the test part `predictions.csv`: its rows with predictions; of excerpts `documents.csv`, too. Several labels
    have the `separator` between them, or are a list in JSON where it stands in one. Of a part with single labels
    `confusion.csv` and `confusion.png`: how often each label (rows) was taken for each (columns).
    """
    part, problem = data.parts[name], data.problem
    if name == "test":
        delete_answers(folder)
    if part.labels is not None and problem.kind == SINGLE:
        counts = confusion_matrix(part.labels, decide(problem, chances), labels=range(len(problem.labels)))
        file = folder / ("test_confusion" if name == "test" else "confusion")
        table = pd.DataFrame(counts, problem.labels, problem.labels).to_csv(index_label="label")
        write_atomically(file.with_suffix(".csv"), table)
        title = f"{counts.trace() / counts.sum():.1%} of {counts.sum():,} examples for {name} right"
        plot_confusion_matrix(counts, problem.labels, file.with_suffix(".png"), title)
    tables = {"predictions.csv": (part.rows, chances)} if name == "test" else {}
    if tables and "excerpt" in part.rows.column_names:
        texts = part.rows.remove_columns(data.columns[0])  # a novel would stand there in pieces
        means, first = average_documents(chances, part.documents)
        counts = np.unique(part.documents, return_counts=True)[1]
        documents = texts.select(first.tolist()).add_column("excerpts", counts.tolist()).remove_columns("excerpt")
        tables = {"predictions.csv": (texts, chances), "documents.csv": (documents, means)}
    names = [f"probability of {label}" for label in problem.labels] if problem.kind == MULTI else ["probability"]
    for file_name, (table, values) in tables.items():
        rows = pd.DataFrame(list(table), columns=table.column_names, dtype=object)
        rows[["prediction", *(names if problem.labels else [])]] = list(_answers(problem, values, separator))
        write_atomically(folder / file_name, rows.to_csv(index=False))


def write_report(folder: Path, results: Mapping[str, Mapping[str, float]], is_added: bool, predicts: bool) -> str:
    """
    Write `report.md` and `.json`, and add what was measured on a labelled test part to the run's metrics.

    If it `is_added` by a prediction, the other rows of a run's report stay; else baselines beside the same scores of
    the model. Of an earlier prediction nothing stays where this command `predicts`, be it without labels; else what
    it added, as long as the run's metrics have it.
    """
    known = read_json(folder / "report.json", {})
    added = {row: values for row, values in known.items() if row.startswith("test, ")}
    if is_added:
        rows = {row: values for row, values in known.items() if row not in added} | {**results}
    else:
        metrics = read_json(folder / METRICS_FILE, {})
        is_known = any(name.startswith("test_") for name in metrics)
        is_kept = is_known and not predicts
        model = {row for row in known if row.endswith(", this model") and results.get(row) == known[row]}
        known = {row: values for row, values in known.items() if not _OF_SEEDS.search(row)}  # which are measured anew
        rows = {row: values for row, values in known.items() if f"{row.partition(', ')[0]}, this model" in model}
        rows |= {**results} | (added if is_kept else {})
    if is_added or (predicts and not any(row.startswith("test, ") for row in results)):
        _forget_test_scores(folder)
    if not rows:
        for name in ("report.md", "report.json"):
            (folder / name).unlink(missing_ok=True)
        return ""
    _record_test_scores(folder, rows)
    run = read_json(folder / METRICS_FILE, {})
    flattered = [_FLATTERED] * bool(run.get("is_best") and "validation, this model" in rows)
    return write_results(folder / "report", rows, [format_scores(rows), *flattered])


def _forget_test_scores(folder: Path) -> None:
    for file in (folder / "all_results.json", folder / METRICS_FILE):
        known = read_json(file, {})
        kept = {name: value for name, value in known.items() if not name.startswith("test_")}
        if not kept:
            file.unlink(missing_ok=True)
        elif kept != known:
            write_json(file, kept)


def _record_test_scores(folder: Path, results: Mapping[str, Mapping[str, float]]) -> None:
    scores = {row.removeprefix("test, "): values for row, values in results.items() if row.startswith("test, ")}
    if not scores:
        return
    found = {f"test_{name}": value for name, value in scores.pop("this model").items()}
    for name, added in (("all_results.json", found), (METRICS_FILE, found | {"test_baselines": scores})):
        known = read_json(folder / name, {})
        # Metrics without a training or an evaluation would make a finished run of a prediction.
        if known | added != known and (known or name != METRICS_FILE):
            write_json(folder / name, known | added)


def write_text_card(
    data: TextData, texts: TextArguments, folder: Path, metrics: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """Write the model card of a trial."""
    kind, on_hub = data.problem.kind, texts.dataset_name
    source = public_name(on_hub) if on_hub else Path(data.parts["train"].source).name
    names = (*METRICS[kind], f"document_{METRICS[kind][0]}")
    write_classifier_card(
        *(folder, metrics, arguments),
        script="run_classification.py",
        learned=source,
        answers=f"{format_names(data.problem.labels, 50) or 'a number'} ({kind.replace('_', ' ')})",
        example=example_input(data.columns),
        scores={name: metrics[f"eval_{name}"] for name in names if f"eval_{name}" in metrics},
        others=metrics["baselines"],
        evaluated_on=f"{metrics['eval_samples']:,} examples ({data.held_out or 'given for evaluation'})",
        datasets=(on_hub,) if on_hub and public_name(on_hub) == on_hub else (),
        base_model=arguments.get("model_name_or_path"),
    )


def _answers(problem: Problem, chances: np.ndarray, separator: str) -> Iterator[list]:
    is_told_apart = not any(separator in name for name in problem.labels)
    for row, decided in zip(chances, decide(problem, chances), strict=True):
        if problem.kind == SINGLE:
            yield [problem.labels[decided], f"{row.max():.6f}"]
        elif problem.kind == MULTI:
            chosen = [name for name, is_chosen in zip(problem.labels, decided, strict=True) if is_chosen]
            yield [
                separator.join(chosen) if is_told_apart else json.dumps(chosen, ensure_ascii=False),
                *(f"{value:.6f}" for value in row),
            ]
        else:
            yield [f"{decided:.6g}"]
