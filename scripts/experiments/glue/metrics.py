"""The metrics of GLUE, computed without a network."""

import logging
import warnings
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import EvalPrediction

from experiments.arguments import UserError
from experiments.glue.tasks import TASKS, GlueTask


logger = logging.getLogger(__name__)

DEFINITIONS = {
    "accuracy": "share of the predictions that are right",
    "f1": "F1 of the class with label 1",
    "matthews_correlation": "Matthews correlation coefficient",
    "pearson": "Pearson correlation of predictions and labels",
    "spearmanr": "Spearman rank correlation of predictions and labels",
}


class GlueMetric(evaluate.Metric):
    """
    The metrics of one GLUE task, as the benchmark defines them, on scikit-learn and scipy.

        GlueMetric("mrpc").compute(predictions=[0, 1], references=[0, 1])  # {"accuracy": 1.0, "f1": 1.0}

    Where a metric is not defined it is 0, with a warning: a correlation of predictions or labels that are all equal,
    F1 without a label or prediction of class 1, Matthews correlation of a single class.

    Args:
        config_name (`str`): Name of a task.
    """

    def __init__(self, config_name: str, **kwargs: Any):
        if config_name not in TASKS:
            raise ValueError(f"There is no GLUE task `{config_name}`; the tasks are {', '.join(TASKS)}.")
        # The predictions of a data set as small as these need no file.
        super().__init__(config_name=config_name, keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("float64" if TASKS[str(self.config_name)].is_regression else "int64")
        return evaluate.MetricInfo(
            description="The metrics of one GLUE task.",
            citation="Wang et al., GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language "
            "Understanding, 2018",
            inputs_description="Class numbers, or similarities for stsb.",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _build_data_dir(self) -> str:
        # The library would make a folder in the user's cache, though nothing is kept in it.
        return str(self._data_dir_root)

    def _compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        predicted, expected = np.asarray(predictions), np.asarray(references)
        return {
            name: _METRICS[name](predicted, expected, f"{self.config_name}: {name}")
            for name in TASKS[str(self.config_name)].metrics
        }


def score_of(task: GlueTask, metrics: dict[str, float]) -> float:
    """The one number that stands for a task in the paper's table: the mean of its scored metrics."""
    return float(np.mean([metrics[name] for name in task.scored]))


def predicted_labels(task: GlueTask, predictions: Any) -> np.ndarray:
    """
    Turn what a model gives into classes or similarities.

    Args:
        task ([`GlueTask`]): The task.
        predictions (`np.ndarray` of shape `(num_examples, num_labels)`, or a tuple that begins with it): Logits.

    Returns:
        `np.ndarray` of shape `(num_examples,)`: class numbers, or for regression the values as they are.

    Raises:
        UserError: if a prediction is not a finite number.
    """
    logits = np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions, dtype=np.float64)
    if not np.isfinite(logits).all():
        raise UserError(
            f"{task.name}: the model's predictions are not finite numbers, the training has diverged; lower "
            "--learning_rate, or give a checkpoint whose weights are finite."
        )
    return logits.reshape(len(logits)) if task.is_regression else logits.argmax(axis=-1)


def compute_task_metrics(task: GlueTask, prediction: EvalPrediction) -> dict[str, float]:
    """The metrics of a task and its `score`, for the Trainer."""
    labels = predicted_labels(task, prediction.predictions)
    metrics = GlueMetric(task.name).compute(predictions=labels, references=prediction.label_ids)
    return {**metrics, "score": score_of(task, metrics)}


def _accuracy(predicted: np.ndarray, expected: np.ndarray, name: str) -> float:
    return float(accuracy_score(expected, predicted))


def _f1(predicted: np.ndarray, expected: np.ndarray, name: str) -> float:
    if not (predicted == 1).any() and not (expected == 1).any():
        logger.warning("%s is not defined without any example of class 1; it counts as 0.", name)
    return float(f1_score(expected, predicted, pos_label=1, average="binary", zero_division=0.0))


def _matthews(predicted: np.ndarray, expected: np.ndarray, name: str) -> float:
    _warn_if_constant(predicted, expected, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's own words for a single class
        return float(matthews_corrcoef(expected, predicted))


def _pearson(predicted: np.ndarray, expected: np.ndarray, name: str) -> float:
    return 0.0 if _warn_if_constant(predicted, expected, name) else float(pearsonr(predicted, expected).statistic)


def _spearman(predicted: np.ndarray, expected: np.ndarray, name: str) -> float:
    return 0.0 if _warn_if_constant(predicted, expected, name) else float(spearmanr(predicted, expected).statistic)


def _warn_if_constant(predicted: np.ndarray, expected: np.ndarray, name: str) -> bool:
    constant = [what for what, x in (("predictions", predicted), ("labels", expected)) if len(np.unique(x)) < 2]
    if constant:
        logger.warning("%s is not defined where all %s are equal; it counts as 0.", name, " and all ".join(constant))
    return bool(constant)


_METRICS = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews,
    "pearson": _pearson,
    "spearmanr": _spearman,
}
