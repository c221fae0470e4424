"""Metrics of predictions, by example and by document, and what they have to be compared with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit, softmax
from scipy.stats import pearsonr, spearmanr
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from transformers import EvalPrediction

from experiments.arguments import UserError
from experiments.classification.data import TextData
from experiments.classification.labels import MULTI, REGRESSION, SINGLE, Problem
from experiments.fine_tuning import finite_logits


TFIDF, FROZEN = "TF-IDF", "frozen encoder"  # what is compared with, in reports and tables
# The first of each is the score by which models are chosen.
METRICS = {
    SINGLE: ("accuracy", "macro_f1", "matthews_correlation"),
    MULTI: ("micro_f1", "macro_f1", "exact_match"),
    REGRESSION: ("pearson", "spearmanr", "mse"),
}


def probabilities(problem: Problem, predictions: Any) -> np.ndarray:
    """What a model gives, as `(num_examples, num_labels)` probabilities or, for regression, numbers."""
    logits = finite_logits(predictions)
    if problem.kind == SINGLE:
        return softmax(logits, axis=-1)
    return expit(logits) if problem.kind == MULTI else logits.reshape(len(logits), 1)


def decide(problem: Problem, chances: np.ndarray) -> np.ndarray:
    """Of what [`probabilities`] gives: the label's number, a 0 or 1 for each label, or the number predicted."""
    if problem.kind == SINGLE:
        return chances.argmax(axis=-1)
    return (chances > 0.5).astype(int) if problem.kind == MULTI else chances[:, 0]


def average_documents(chances: np.ndarray, documents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The mean over each document's excerpts, `(num_documents, num_labels)`, and the place of its first excerpt."""
    _, first = np.unique(documents, return_index=True)
    return pd.DataFrame(chances).groupby(np.asarray(documents)).mean().to_numpy(), first


def measure(problem: Problem, chances: np.ndarray, labels: Any, documents: Sequence[int]) -> dict[str, float]:
    """The metrics of the problem and, where documents have several excerpts, the first of them by document."""
    values = _measure(problem, decide(problem, chances), np.asarray(labels))
    if len(set(documents)) < len(documents):
        means, first = average_documents(chances, documents)
        name = METRICS[problem.kind][0]
        values[f"document_{name}"] = _measure(problem, decide(problem, means), np.asarray(labels)[first])[name]
    return values


def compute_metrics(problem: Problem, documents: Sequence[int], prediction: EvalPrediction) -> dict[str, float]:
    """What [`measure`] gives and the `score`, for the Trainer."""
    values = measure(problem, probabilities(problem, prediction.predictions), prediction.label_ids, documents)
    return values | {"score": values[METRICS[problem.kind][0]]}


def measure_baselines(
    data: TextData, with_tfidf: bool, frozen: Mapping[str, np.ndarray] | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """
    What a model is compared with, by part: the commonest labels, or the mean, a linear model of words, and what a
    linear model of the `frozen` encoder answers, probabilities `(num_examples, num_labels)` for each part.
    """
    problem, train = data.problem, data.parts.get("train")
    others = {name: part for name, part in data.parts.items() if name != "train" and part.labels is not None}
    if train is None:
        return {name: {} for name in others}
    labels = np.asarray(train.labels)
    frequencies = (np.eye(len(problem.labels))[labels] if problem.kind == SINGLE else labels).mean(axis=0)
    same = {name: np.tile(frequencies, (len(part.documents), 1)) for name, part in others.items()}
    answers = {"always the same": same}
    if with_tfidf:
        texts = {name: data.texts(name) for name in others}
        answers[TFIDF] = _predict_tfidf(problem, data.texts("train"), labels, texts)
    if frozen:
        answers[FROZEN] = dict(frozen)
    return {
        name: {answer: measure(problem, c[name], part.labels, part.documents) for answer, c in answers.items()}
        for name, part in others.items()
    }


def _predict_tfidf(
    problem: Problem, texts: Sequence[str], labels: np.ndarray, others: Mapping[str, Sequence[str]]
) -> dict[str, np.ndarray]:
    # Labels weigh alike: where those of long books have most of the excerpts, the others would hardly be answered.
    classify = LogisticRegression(C=10, max_iter=1000, class_weight="balanced")
    learner = {SINGLE: classify, MULTI: OneVsRestClassifier(classify), REGRESSION: Ridge()}[problem.kind]
    frequencies = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    if not any(map(frequencies.build_analyzer(), texts)):
        raise UserError("--baseline tfidf finds no word in the training texts; leave it out.")
    if problem.kind == SINGLE and len(np.unique(labels)) < 2:
        raise UserError("--baseline tfidf finds a single label in the training texts; leave it out.")
    model = make_pipeline(frequencies, learner).fit(texts, labels)
    if problem.kind == REGRESSION:
        return {name: model.predict(rows).reshape(-1, 1) for name, rows in others.items()}
    chances = {name: np.zeros((len(rows), len(problem.labels))) for name, rows in others.items()}
    for name, rows in others.items():  # a label may have no example
        chances[name][:, model.classes_] = model.predict_proba(rows)
    return chances


def _measure(problem: Problem, decided: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    if problem.kind == REGRESSION:
        # A correlation with what is always the same is not defined.
        varies = min(np.ptp(decided), np.ptp(expected)) > 0
        correlations = [f(decided, expected).statistic if varies else 0.0 for f in (pearsonr, spearmanr)]
        values = [*correlations, mean_squared_error(expected, decided)]
    else:
        micro, macro = (f1_score(expected, decided, average=kind, zero_division=0.0) for kind in ("micro", "macro"))
        right = accuracy_score(expected, decided)
        values = [micro, macro, right]
        if problem.kind == SINGLE:  # a correlation of a single label is none, of which scikit-learn warns
            several = len({*expected.tolist(), *decided.tolist()}) > 1
            values = [right, macro, matthews_corrcoef(expected, decided) if several else 0.0]
    return dict(zip(METRICS[problem.kind], map(float, values), strict=True))
