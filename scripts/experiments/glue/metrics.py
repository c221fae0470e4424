"""The metrics of GLUE, computed without a network."""

import logging
from collections.abc import Callable
from typing import Any

import datasets
import evaluate
import numpy as np
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from experiments.fine_tuning import finite_logits
from experiments.glue.tasks import TASKS, GlueTask


logger = logging.getLogger(__name__)

# What computes each, and what it is.
METRICS: dict[str, tuple[Callable[..., Any], str]] = {
    "accuracy": (accuracy_score, "share of the predictions that are right"),
    "f1": (f1_score, "F1 of the class with label 1"),
    "matthews_correlation": (matthews_corrcoef, "Matthews correlation coefficient"),
    "pearson": (pearsonr, "Pearson correlation of predictions and labels"),
    "spearmanr": (spearmanr, "Spearman rank correlation of predictions and labels"),
}


class GlueMetric(evaluate.Metric):
    """The metrics of the task `config_name` by the interface of `evaluate`, whose own are fetched from the Hub."""

    def __init__(self, config_name: str):
        # The predictions of a data set as small as these need no file.
        super().__init__(config_name=config_name, keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("float64" if TASKS[str(self.config_name)].is_regression else "int64")
        return evaluate.MetricInfo(
            description="The metrics of one GLUE task.",
            citation="Wang et al., GLUE: A Multi-Task Benchmark and Analysis Platform, 2018",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _build_data_dir(self) -> str:
        # The library would make a folder in the user's cache, though nothing is kept in it.
        return str(self._data_dir_root)

    def _compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        values, task = (np.asarray(predictions), np.asarray(references)), TASKS[str(self.config_name)]
        return {name: _measure(task.name, name, *values) for name in task.metrics}


def compute_metrics(task: GlueTask, predicted: Any, expected: Any) -> dict[str, float]:
    """
    The metrics of a task, as the benchmark defines them, and their mean as in the paper's table, its `score`.

    Where a metric is not defined it is 0, with a warning: a correlation of predictions or labels that are all equal,
    F1 without a label or prediction of class 1, Matthews correlation of a single class.
    """
    metrics: dict[str, float] = GlueMetric(task.name).compute(predictions=predicted, references=expected)
    return {**metrics, "score": float(np.mean([metrics[name] for name in task.scored]))}


def majority_metrics(task: GlueTask, training: Dataset, evaluation: Dataset) -> dict[str, float]:
    """What a model without any skill measures: the commonest training label, or the mean, whatever the text is."""
    values, counts = np.unique(training["label"], return_counts=True)
    answer = np.mean(training["label"]) if task.is_regression else values[counts.argmax()]
    level = logger.level
    logger.setLevel(logging.ERROR)  # that all predictions are equal is what is asked for
    metrics = compute_metrics(task, np.full(len(evaluation), answer), evaluation["label"])
    logger.setLevel(level)
    return metrics


def predicted_labels(task: GlueTask, predictions: Any) -> np.ndarray:
    """The classes, or similarities as they are, `(num_examples,)`, of a model's logits, `(num_examples, labels)`."""
    logits = finite_logits(predictions, f"{task.name}: the model")
    return logits.reshape(len(logits)) if task.is_regression else logits.argmax(axis=-1)


def _measure(task: str, name: str, predicted: np.ndarray, expected: np.ndarray) -> float:
    alike = [what for what, values in (("predictions", predicted), ("labels", expected)) if len(np.unique(values)) < 2]
    problem = f"where all {' and all '.join(alike)} are equal" if alike else ""
    if name in ("accuracy", "f1"):
        problem = "without any example of class 1" if name == "f1" and 1 not in {*predicted, *expected} else ""
    if problem:
        logger.warning("%s: %s is not defined %s; it counts as 0.", task, name, problem)
        return 0.0
    compute, _ = METRICS[name]
    value = compute(expected, predicted)
    return float(getattr(value, "statistic", value))
