"""The metrics of GLUE against their formulas, and the table that they go into."""

import json
import math
import statistics

import numpy as np
import pytest
from datasets import Dataset

from experiments.arguments import UserError
from experiments.glue.metrics import (
    METRICS,
    compute_metrics,
    majority_metrics,
    predicted_labels,
)
from experiments.glue.table import AVERAGED, PUBLISHED, write_glue_table
from experiments.glue.tasks import TASKS


def compute(task, predictions, references):
    metrics = compute_metrics(TASKS[task], predictions, references)
    assert metrics.pop("score") == pytest.approx(statistics.mean(metrics[name] for name in TASKS[task].scored))
    return metrics


def counts(predicted, expected):
    """True positives, false positives, false negatives and true negatives of class 1."""
    pairs = list(zip(predicted, expected, strict=True))
    return tuple(pairs.count(pair) for pair in ((1, 1), (1, 0), (0, 1), (0, 0)))


def correlation(x, y):
    """Pearson's, from its definition."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))


def ranks(values):
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [statistics.mean(n for n, other in enumerate(ordered, 1) if other == value) for value in values]


@pytest.fixture
def classes():
    generator = np.random.default_rng(0)
    expected = generator.integers(0, 2, 60)
    # Right in about three of four, and class 1 more often than it is there, so that no two counts are equal.
    predicted = np.where(generator.random(60) < 0.7, expected, 1)
    assert len({*counts(predicted.tolist(), expected.tolist())}) >= 3
    return predicted.tolist(), expected.tolist()


def test_every_task_has_its_metrics():
    names = {task: set(TASKS[task].metrics) for task in TASKS}
    both, accuracy = {"accuracy", "f1"}, {"accuracy"}
    assert names == {
        **{"cola": {"matthews_correlation"}, "sst2": accuracy, "mrpc": both, "qqp": both, "mnli": accuracy},
        **{"stsb": {"pearson", "spearmanr"}, "qnli": accuracy, "rte": accuracy, "wnli": accuracy},
    }
    for task, metrics in names.items():
        assert set(compute(task, [0, 1, 1], [0, 1, 0])) == metrics
        assert metrics <= METRICS.keys()


def test_values_worked_out_by_hand():
    # Two true positives, one false positive, one false negative, four true negatives.
    predicted, expected = [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]
    assert compute("mrpc", predicted, expected) == pytest.approx({"accuracy": 6 / 8, "f1": 4 / 6})
    assert compute("cola", predicted, expected)["matthews_correlation"] == pytest.approx(7 / 15)
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4.
    similarities = compute("stsb", [0.0, 2.0, 2.0, 5.0], [1.0, 2.0, 3.0, 4.0])
    assert similarities["spearmanr"] == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert similarities["pearson"] == pytest.approx(7.5 / math.sqrt(12.75 * 5))


def test_accuracy_and_f1_are_their_formulas(classes):
    predicted, expected = classes
    tp, fp, fn, tn = counts(predicted, expected)
    metrics = compute("qqp", predicted, expected)
    assert metrics["accuracy"] == pytest.approx((tp + tn) / 60)
    assert metrics["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert metrics["f1"] != pytest.approx(2 * tn / (2 * tn + fp + fn))  # of class 0
    assert compute("mnli", [0, 1, 2, 2], [0, 2, 2, 1]) == {"accuracy": 0.5}


def test_matthews_correlation_is_its_formula(classes):
    predicted, expected = classes
    tp, fp, fn, tn = counts(predicted, expected)
    value = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert compute("cola", predicted, expected)["matthews_correlation"] == pytest.approx(value)
    assert compute("cola", [1 - p for p in predicted], expected)["matthews_correlation"] == pytest.approx(-value)


def test_correlations_are_their_formulas():
    generator = np.random.default_rng(1)
    expected = (generator.integers(0, 11, 40) / 2).tolist()  # many equal ones, as people gave them
    predicted = (np.asarray(expected) + generator.normal(size=40)).round(1).tolist()
    metrics = compute("stsb", predicted, expected)
    assert metrics["pearson"] == pytest.approx(correlation(predicted, expected))
    assert metrics["spearmanr"] == pytest.approx(correlation(ranks(predicted), ranks(expected)))
    assert metrics["pearson"] != pytest.approx(metrics["spearmanr"], abs=1e-4)


@pytest.mark.parametrize(
    ("task", "predicted", "expected", "metric"),
    [
        ("cola", [1, 1, 1], [0, 1, 1], "matthews_correlation"),
        ("cola", [0, 1, 1], [1, 1, 1], "matthews_correlation"),
        ("cola", [1, 1], [1, 1], "matthews_correlation"),
        ("mrpc", [0, 0, 0], [0, 0, 0], "f1"),
        ("stsb", [2.5, 2.5, 2.5], [1.0, 2.0, 3.0], "pearson"),
        ("stsb", [2.5, 2.5, 2.5], [1.0, 2.0, 3.0], "spearmanr"),
        ("stsb", [1.0, 2.0, 3.0], [2.0, 2.0, 2.0], "spearmanr"),
        ("stsb", [1.0], [2.0], "pearson"),
    ],
)
def test_what_is_not_defined_is_zero_with_a_warning(task, predicted, expected, metric, caplog):
    assert compute(task, predicted, expected)[metric] == 0.0
    assert f"{task}: {metric} is not defined" in caplog.text


def test_f1_without_a_prediction_of_class_1_is_zero():
    assert compute("mrpc", [0, 0, 0], [0, 1, 0]) == pytest.approx({"accuracy": 2 / 3, "f1": 0.0})


def test_defined_metrics_come_without_a_warning(classes, caplog):
    compute("cola", *classes)
    compute("mrpc", *classes)
    compute("stsb", [1.0, 2.0], [2.0, 3.0])
    assert not caplog.records


def test_scores_are_those_of_the_paper_s_table():
    scored = {name: task.scored for name, task in TASKS.items() if task.scored != ("accuracy",)}
    both = ("accuracy", "f1")
    assert scored == {"qqp": both, "mrpc": both, "cola": ("matthews_correlation",), "stsb": ("spearmanr",)}
    assert compute_metrics(TASKS["mrpc"], [0, 1, 1], [0, 1, 0])["score"] == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_the_commonest_label_scores_without_any_skill(caplog):
    def measure(task, training, evaluation):
        return majority_metrics(
            TASKS[task], *(Dataset.from_dict({"label": labels}) for labels in (training, evaluation))
        )

    # Always answering 1 is what MRPC is easily mistaken for.
    assert measure("mrpc", [1, 1, 0], [1, 0, 1, 1]) == pytest.approx(
        {"accuracy": 3 / 4, "f1": 6 / 7, "score": 45 / 56}
    )
    assert measure("mrpc", [0, 1, 0], [1, 0, 1, 1]) == pytest.approx({"accuracy": 1 / 4, "f1": 0.0, "score": 1 / 8})
    assert measure("mnli", [2, 1, 2], [2, 0])["score"] == 0.5
    assert measure("cola", [1, 1, 0], [1, 0])["score"] == 0.0
    assert measure("stsb", [1.0, 2.0], [1.0, 3.0]) == {"pearson": 0.0, "spearmanr": 0.0, "score": 0.0}
    assert not caplog.records


def test_logits_become_classes_and_similarities():
    logits = np.array([[0.1, 2.0, -1.0], [3.0, 0.0, 0.0]], dtype=np.float32)
    assert predicted_labels(TASKS["mnli"], logits).tolist() == [1, 0]
    assert predicted_labels(TASKS["mnli"], (logits, np.zeros(5))).tolist() == [1, 0]
    assert predicted_labels(TASKS["stsb"], np.array([[1.5], [-2.0]])).tolist() == [1.5, -2.0]
    assert predicted_labels(TASKS["stsb"], np.array([[1.5]])).shape == (1,)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("task", ["rte", "stsb"])
def test_predictions_that_are_no_numbers_are_an_error(task, value):
    logits = np.zeros((3, 1 if task == "stsb" else 2))
    logits[1, 0] = value
    with pytest.raises(UserError, match=f"{task}: .*not finite.*--learning_rate"):
        predicted_labels(TASKS[task], logits)


def test_a_score_is_the_mean_of_two_metrics():
    logits = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    metrics = compute_metrics(TASKS["mrpc"], predicted_labels(TASKS["mrpc"], logits), np.array([1, 0, 0, 0]))
    assert metrics == pytest.approx({"accuracy": 0.75, "f1": 2 / 3, "score": (0.75 + 2 / 3) / 2})


def make_result(score, **more):
    environment = {name: name for name in ("python", "torch", "transformers", "device", "threads", "commit")}
    majority = {"score": score / 2}
    return {
        **{"score": score, "name": "seed 7", "environment": environment, "is_partial": False, "majority": majority},
        **more,
    }


def cells_of(text, name):
    """A row of a Markdown table, without its name."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in row[1:-1].split("|")][1:]


def test_published_rows_have_the_published_means():
    means = {name: statistics.mean(row.values()) for name, row in PUBLISHED.items()}
    assert means == pytest.approx(
        {"BERT-Base": 80.37, "FNet-Base": 73.48, "PoNet-Base": 76.80, "SKTformer": 77.01}, abs=0.01
    )
    assert set(AVERAGED) == TASKS.keys() - {"wnli"}


def test_the_table_s_mean_is_over_eight_tasks(tmp_path):
    results = {name: make_result(0.5 + number / 100) for number, name in enumerate(TASKS)}
    text = write_glue_table(tmp_path, "mine", results)
    assert text == (tmp_path / "glue.md").read_text()
    assert cells_of(text, "mine") == [*(f"{50 + number:.2f}" for number in range(9)), "53.50"]
    published = ["76.86", "87.67", "84.12", "90.14", "46.72", "84.87", "81.84", "63.87", "", "77.01"]
    assert cells_of(text, "SKTformer (published)") == published
    assert cells_of(text, "majority") == [*(f"{25 + number / 2:.2f}" for number in range(9)), "26.75"]
    assert "not WNLI" in text
    assert "Matthews correlation coefficient" in text
    saved = json.loads((tmp_path / "glue.json").read_text())
    assert saved["means"]["mine"] == pytest.approx(53.5)
    assert saved["scores"]["BERT-Base (published)"]["mnli"] == 81.98
    assert saved["tasks"]["rte"] == results["rte"]
    assert (tmp_path / "glue.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_of_some_tasks_compares_the_same_tasks(tmp_path):
    spread = {"is_best": True, "std": 0.02, "kind": "seeds", "scores": [0.6, 0.64], "trials": []}
    search = {"kind": "search", "scores": [0.4, 0.5], "best": "epochs 4", "trials": []}
    text = write_glue_table(tmp_path, "mine", {"rte": make_result(0.62, **spread), "cola": make_result(0.5, **search)})
    assert "62.00 ± 2.00" in text
    assert "median over 2 seeds" in text
    assert "Of a training the best evaluation counts, which is optimistic: RTE." in text
    assert "best of a search on the evaluation part (epochs 4)" in text
    assert json.loads((tmp_path / "glue.json").read_text())["means"] == pytest.approx(
        {
            "mine": 56.0,
            "majority": 28.0,
            **{f"{name} (published)": (row["rte"] + row["cola"]) / 2 for name, row in PUBLISHED.items()},
        }
    )


def test_a_table_of_wnli_alone_has_no_mean(tmp_path):
    text = write_glue_table(tmp_path, "mine", {"wnli": make_result(0.5)})
    assert "none of the eight tasks" in text
    table = json.loads((tmp_path / "glue.json").read_text())
    assert table["means"] == {"mine": None, "majority": None}
    assert "published" not in text.lower()


def test_rows_without_all_tasks_have_no_mean(tmp_path):
    # Evaluation alone reads no training part, whose commonest label is therefore not known.
    results = {"rte": make_result(0.5), "cola": make_result(0.5, majority=None)}
    text = write_glue_table(tmp_path, "mine", results)
    assert cells_of(text, "majority") == ["", "25.00", ""]
    assert cells_of(text, "mine") == ["50.00", "50.00", "50.00"]
    del results["rte"]
    assert "majority" not in write_glue_table(tmp_path, "mine", results)
