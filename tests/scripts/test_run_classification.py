"""Fine-tuning on one's own texts from the command line to predictions, documents, pictures and pipelines."""

import csv
import json
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    NystromformerConfig,
    RobertaConfig,
    RobertaForMaskedLM,
    pipeline,
)

import run_classification
from experiments import training
from experiments.arguments import CONFIGURATION, UserError
from experiments.classification import jobs
from experiments.classification.labels import SINGLE, Problem
from experiments.classification.report import write_answers
from experiments.fine_tuning import FineTuningTrainer
from modeling_sktformer import SKTformerForSequenceClassification
from support.glue_rows import CUES, files_below, make_tokenizer, read_metrics, save_checkpoint
from support.steps import note_steps


NAMES = ("Red, or so", "Green", "blue")
FILLERS = ("the", "cat", "dog", "bird", "sees", "hears", "a", "river")
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def make_text(number: int, length: int = 5) -> str:
    """A text whose last word gives its label away."""
    choose = random.Random(number)
    return " ".join([*choose.choices(FILLERS, k=length), CUES[number % 3]])


def write_table(path: Path, columns: dict[str, list]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A pre-trained checkpoint, but for the pre-training."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return save_checkpoint(folder, max_position_embeddings=32, classifier_pooling="mean")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A table for each part, one without labels, and books of three authors."""
    folder = tmp_path_factory.mktemp("texts")
    for part, count in (("train", 90), ("dev", 18), ("test", 12)):
        columns: dict[str, list] = {
            "id": list(range(count)),
            "text": [make_text(n + len(part) * 100 * 3) for n in range(count)],
        }
        if part == "test":
            write_table(folder / "unlabelled.csv", columns)
        write_table(folder / f"{part}.csv", columns | {"label": [NAMES[n % 3] for n in range(count)]})
    for part, titles in (("train", 3), ("test", 1)):
        (folder / part).mkdir()
        for n, author in enumerate(("austen", "poe", "wells")):
            for title in range(titles):
                text = " ".join(make_text(3 * k + n, 4) for k in range(20 * title, 20 * title + 12))
                (folder / part / f"{author}_{title}.txt").write_text(text)
    return folder


@pytest.fixture
def run(monkeypatch, tmp_path_factory, tmp_path, checkpoint):
    """Run the script with flags that make it take a second."""
    cache = tmp_path_factory.getbasetemp() / "cache"

    def run_script(*flags, model=checkpoint, epochs=5):
        common = {
            **{"--model_name_or_path": model, "--cache_dir": cache, "--output_dir": tmp_path / "run"},
            **{"--num_train_epochs": epochs, "--learning_rate": "2e-2", "--use_cpu": True, "--disable_tqdm": True},
            **{"--per_device_train_batch_size": 8},
        }
        argv = ["run_classification.py", *(part for pair in common.items() for part in pair), *flags]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        run_classification.main()
        return tmp_path / "run"

    return run_script


def test_one_table_is_enough_for_a_model_with_its_report(run, files, caplog):
    caplog.set_level("INFO")
    folder = run("--train_file", files / "train.csv", "--test_file", files / "test.csv", epochs=8)
    assert "long_documents.yaml" not in caplog.text
    assert "--test_file is not read; add" in caplog.text
    assert "stand among those for training" not in caplog.text
    metrics = read_metrics(folder)
    assert metrics["train_samples"] + metrics["eval_samples"] == 90
    assert metrics["eval_samples"] == 9
    assert metrics["held_out"] == "9 of 90 examples held out with --split_seed 0"
    assert metrics["score"] == metrics["eval_accuracy"] > 0.6
    assert metrics["baselines"]["always the same"]["accuracy"] == pytest.approx(1 / 3)
    assert json.loads((folder / "all_results.json").read_text())["eval_macro_f1"] == metrics["eval_macro_f1"]
    config = AutoConfig.from_pretrained(folder)
    assert config.id2label == dict(enumerate(sorted(NAMES)))
    assert config.problem_type == "single_label_classification"
    for name in ("README.md", "curve.png", "confusion.png", "arguments.yaml", "trainer_state.json"):
        assert (folder / name).stat().st_size
    confusion = read_table(folder / "confusion.csv")
    assert [row["label"] for row in confusion] == sorted(NAMES)
    assert sum(int(row[row["label"]]) for row in confusion) / 9 == metrics["eval_accuracy"]
    for line in ("configuration/classification/base.yaml", "text of", "held out", "`Green`, `Red, or so`, `blue`"):
        assert line in caplog.text
    assert "parameters, from tiny" in caplog.text
    assert "steps:" in caplog.text.lower()


def test_rows_of_confusions_are_the_true_labels(tmp_path):
    part = SimpleNamespace(labels=[0, 0, 0, 1], rows=None, documents=range(4))
    data: Any = SimpleNamespace(parts={"validation": part}, problem=Problem(SINGLE, ("a", "b")))
    write_answers(tmp_path, data, "validation", np.eye(2)[[0, 1, 1, 1]], ",")
    rows = read_table(tmp_path / "confusion.csv")
    assert rows == [{"label": "a", "a": "1", "b": "2"}, {"label": "b", "a": "0", "b": "1"}]


def test_parts_of_their_own_give_predictions_confusions_and_a_report(run, files, capfd, caplog):
    caplog.set_level("INFO")
    flags = ["--train_file", files / "train.csv", "--validation_file", files / "dev.csv", "--baseline", "tfidf"]
    flags += ["--test_file", files / "test.csv", "--do_train", "--do_eval", "--do_predict"]
    folder = run(*flags, epochs=8)
    rows = read_table(folder / "predictions.csv")
    assert list(rows[0]) == ["id", "text", "label", "prediction", "probability"]
    assert all(1 / 3 < float(row["probability"]) <= 1 for row in rows)
    results = json.loads((folder / "report.json").read_text())
    answers = ("this model", "always the same", "TF-IDF")
    assert list(results) == [f"{part}, {answer}" for part in ("validation", "test") for answer in answers]
    assert results["validation, this model"]["accuracy"] == read_metrics(folder)["eval_accuracy"]
    right = sum(row["prediction"] == row["label"] for row in rows)
    assert results["test, this model"]["accuracy"] == right / len(rows) > 0.6
    assert results["test, TF-IDF"]["accuracy"] == 1.0
    everything = json.loads((folder / "all_results.json").read_text())
    assert everything["test_accuracy"] == read_metrics(folder)["test_accuracy"] == right / len(rows)
    assert everything["eval_accuracy"] == read_metrics(folder)["eval_accuracy"]
    assert read_metrics(folder)["test_baselines"]["TF-IDF"] == results["test, TF-IDF"]
    assert read_metrics(folder)["baselines"]["TF-IDF"] == results["validation, TF-IDF"]
    assert (folder / "report.md").read_text() in capfd.readouterr().out
    assert "Validation has the best evaluation of the training, which flatters" in (folder / "report.md").read_text()
    assert (folder / "test_confusion.png").is_file()
    card = (folder / "README.md").read_text()
    assert "fine-tuned on train.csv" in card
    assert re.search(r"\| TF-IDF +\| 1\.0000", card)
    assert "(given for evaluation). Its training's best evaluation on these counts, which flatters it. All" in card
    assert str(files) not in card

    metrics = read_metrics(folder)
    kept = [folder / name for name in ("model.safetensors", "metrics.json", "run.json", "README.md")]
    before = files_below(folder)
    run(*flags, epochs=8)
    after = files_below(folder)
    assert [after[path] for path in kept] == [before[path] for path in kept]
    assert f"finished, in {folder}" in caplog.text
    # What was measured beside the same scores stays, though it is not asked for again.
    run(*(flag for flag in flags if flag not in ("--baseline", "tfidf")), epochs=8)
    assert json.loads((folder / "report.json").read_text()) == results
    assert read_metrics(folder) == metrics


def test_a_run_that_is_cut_short_is_resumed_to_the_same_model(run, files, tmp_path, monkeypatch):
    flags = ["--train_file", files / "train.csv"]
    whole = read_metrics(run(*flags, epochs=3))
    (tmp_path / "run").rename(tmp_path / "whole")
    training_step = FineTuningTrainer.training_step

    def cut(trainer, *args, **kwargs):
        if trainer.state.global_step == 15:  # a pass has eleven steps
            raise KeyboardInterrupt
        return training_step(trainer, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(FineTuningTrainer, "training_step", cut)
        with pytest.raises(KeyboardInterrupt):
            run(*flags, epochs=3)
    assert not (tmp_path / "run" / "metrics.json").exists()
    copy = tmp_path / "elsewhere.csv"
    copy.write_bytes((files / "train.csv").read_bytes())
    steps = note_steps(monkeypatch, FineTuningTrainer)
    again = read_metrics(run("--train_file", copy, epochs=3))
    assert [number for _, number in steps] == [*range(11, 33)]
    assert again["eval_loss"] == whole["eval_loss"]
    with pytest.raises(UserError, match="another run"):
        run("--train_file", files / "dev.csv", epochs=3)


def test_excerpts_of_novels_are_counted_by_document(run, files, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    folder = run(
        *("--train_file", files / "train" / "*.txt", "--test_file", files / "test" / "*.txt"),
        *("--label_from_file_name", "^([^_]+)_", "--excerpt_length", 12, "--max_excerpts_per_document", 4),
        *("--do_train", "--do_eval", "--do_predict", "--baseline", "tfidf", "frozen"),
    )
    assert "long_documents.yaml and frozen_encoder.yaml are made for them" in caplog.text
    metrics = read_metrics(folder)
    assert metrics["held_out"].startswith("the last excerpts of every document")
    assert (metrics["train_samples"], metrics["eval_samples"]) == (27, 9)
    assert metrics["eval_accuracy"] > 0.6
    excerpts = read_table(folder / "predictions.csv")
    assert list(excerpts[0]) == ["file", "label", "excerpt", "prediction", "probability"]
    assert [row["excerpt"] for row in excerpts] == ["1", "2", "3", "4"] * 3
    documents = read_table(folder / "documents.csv")
    authors = [(author, "4") for author in ("austen", "poe", "wells")]
    assert [(row["label"], row["excerpts"]) for row in documents] == authors
    for n, row in enumerate(documents):
        agreeing = [e for e in excerpts[4 * n : 4 * n + 4] if e["prediction"] == row["prediction"]]
        assert sum(float(e["probability"]) for e in agreeing) / 4 <= float(row["probability"]) + 1e-5 <= 1 + 1e-5
    results = json.loads((folder / "report.json").read_text())
    right = sum(row["prediction"] == row["label"] for row in documents)
    assert results["test, this model"]["document_accuracy"] == right / 3
    assert "document_accuracy" in results["test, TF-IDF"]
    assert results["test, frozen encoder"]["accuracy"] > 0.6
    assert AutoConfig.from_pretrained(folder).max_position_embeddings == 32
    # A long text without excerpts is read as far as an excerpt reached in training, and not as far as the model could.
    lengths: list[int] = []

    def note(texts, _):
        lengths.append(texts.max_seq_length)
        return texts.max_seq_length

    monkeypatch.setattr(jobs, "input_length", note)
    run("--test_file", files / "test" / "*.txt", "--do_predict", "--output_dir", tmp_path / "later", model=folder)
    assert {*lengths} == {12}
    # The card leaves out what names a place, and nothing that only sounds like it.
    card = (folder / "README.md").read_text()
    assert "label_from_file_name: ^([^_]+)_" in card
    assert "train_file" not in card
    assert str(files) not in card


def test_an_encoder_that_takes_no_padding_is_refused(run, files, tmp_path):
    tokenizer = make_tokenizer()
    linear = {
        "max_position_embeddings": 64,
        "segment_means_seq_len": 64,
        "num_landmarks": 8,
        "vocab_size": len(tokenizer),
    }
    AutoModelForMaskedLM.from_config(NystromformerConfig(**(SIZES | linear))).save_pretrained(tmp_path / "linear")
    tokenizer.save_pretrained(tmp_path / "linear")
    start = ["--model_name_or_path", tmp_path / "linear", "--train_file", files / "train.csv", "--do_train"]
    with pytest.raises(
        UserError, match=r"without padding; --config_overrides num_landmarks=64 gives it full attention"
    ):
        run(*start)
    run(*start, "--config_overrides", "num_landmarks=64", epochs=1)


def test_a_table_of_nothing_but_texts_is_cut_and_answered(run, files, tmp_path):
    """And what was answered goes when another model comes."""
    train = ["--train_file", files / "train.csv", "--excerpt_length", 8]
    (tmp_path / "letters.csv").write_text("text\nthe cat sees a dog and the dog sees the cat\ntwo birds\n")
    letters = ["--test_file", tmp_path / "letters.csv", "--do_predict"]
    folder = run(*train, *letters, "--do_train", "--seeds", 2, epochs=1)
    assert list(read_table(folder / "documents.csv")[0]) == ["excerpts", "prediction", "probability"]
    assert {row["excerpt"] for row in read_table(folder / "predictions.csv")} >= {"1", "2"}
    run(*train, "--do_train", "--seeds", 2, epochs=1)  # which is finished
    assert (folder / "predictions.csv").exists()
    run(*train, "--do_train", "--seeds", 3, epochs=1)
    assert not (folder / "predictions.csv").exists()
    assert not (folder / "documents.csv").exists()


def test_nothing_that_is_uploaded_says_where_it_was_made(run, files, tmp_path):
    """Nor do the adapter, and the predictions, which name the file of each text."""
    pytest.importorskip("peft")
    folder = run(
        *("--train_file", files / "train" / "*.txt", "--test_file", files / "test" / "*.txt", "--lora"),
        *("--label_from_file_name", "^([^_]+)_", "--excerpt_length", 12, "--max_excerpts_per_document", 4),
        *("--do_train", "--do_eval", "--do_predict", "--baseline", "tfidf"),
        epochs=1,
    )
    there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    uploaded = list(filter_repo_objects(there, ignore_patterns=training.LOCAL_FILES))
    assert {"adapter/adapter_config.json", "predictions.csv", "documents.csv", "report.md", "README.md"} <= {*uploaded}
    places = [str(path).encode() for path in (files.parent, tmp_path, Path.cwd())]
    assert not [name for name in uploaded for place in places if place in (folder / name).read_bytes()]
    assert [row["file"] for row in read_table(folder / "documents.csv")][:2] == ["austen_0.txt", "poe_0.txt"]


def test_a_head_is_computed_on_an_encoder_that_stays(run, files, tmp_path, checkpoint):
    """By its recipe, and trained further like any other."""
    recipe = ["--recipe", CONFIGURATION / "classification" / "frozen_encoder.yaml"]
    books = ["--train_file", files / "train" / "*.txt", "--label_from_file_name", "^([^_]+)_", "--excerpt_length", 12]
    folder = run(*recipe, *books, "--test_file", files / "test" / "*.txt", "--do_train", "--do_eval", "--do_predict")
    before, after = (load_file(place / "model.safetensors") for place in (Path(checkpoint), folder))
    encoder = [name for name in after if name.startswith("sktformer.")]
    assert encoder
    assert all(torch.equal(after[name], before[name]) for name in encoder)
    assert AutoConfig.from_pretrained(folder).classifier_pooling == "layers"
    assert json.loads((folder / "report.json").read_text())["test, this model"]["accuracy"] > 0.9
    assert "curve.png" not in (folder / "README.md").read_text()
    further = run(*books, "--output_dir", tmp_path / "further", model=folder, epochs=1)
    assert read_metrics(further)["score"] > 0.9


def test_several_labels_and_numbers_are_predicted(run, files, tmp_path, caplog):
    labels = [" | ".join(sorted({NAMES[n % 3], NAMES[n // 3 % 3]})) for n in range(90)]
    texts = [f"{make_text(n)} {CUES[n // 3 % 3]}" for n in range(90)]
    table = write_table(tmp_path / "several.csv", {"text": texts, "label": labels})
    flags = ["--train_file", table, "--test_file", table, "--do_train", "--do_predict"]
    folder = run(*flags, "--label_separator", "|", epochs=8)
    assert "81 of 90 texts for test stand among those for training, too: what is measured on them says" in caplog.text
    assert "texts for validation stand" not in caplog.text
    metrics = read_metrics(folder)
    assert metrics["score"] == metrics["eval_micro_f1"] > 0.8
    assert {"eval_macro_f1", "eval_exact_match"} <= set(metrics)
    config = AutoConfig.from_pretrained(folder)
    assert config.problem_type == "multi_label_classification"
    rows = read_table(folder / "predictions.csv")
    assert set(rows[0]) == {"text", "label", "prediction", *(f"probability of {name}" for name in NAMES)}
    # What is written is read with the same separator.
    assert {name for row in rows for name in row["prediction"].split("|")} - {""} == set(NAMES)
    assert not (folder / "confusion.csv").exists()
    blank = write_table(tmp_path / "blank.csv", {"text": texts[:3], "label": [""] * 3})
    unread = ["--train_file", table, "--validation_file", "nowhere.csv"]
    run("--test_file", blank, *unread, "--do_predict", "--output_dir", tmp_path / "blank", model=folder)
    for part in ("train", "validation"):
        assert f"--{part}_file is not read; add" in caplog.text
    assert not (tmp_path / "blank" / "report.md").exists()  # what has no label at all is not scored

    table = write_table(tmp_path / "numbers.csv", {"text": texts, "label": [n % 3 + 0.5 for n in range(90)]})
    folder = run(*flags[:1], table, "--test_file", table, "--do_train", "--do_predict", "--overwrite", epochs=8)
    metrics = read_metrics(folder)
    assert metrics["score"] == metrics["eval_pearson"] > 0.8
    assert metrics["baselines"]["always the same"]["mse"] == pytest.approx(2 / 3, abs=0.3)
    row = read_table(folder / "predictions.csv")[0]
    assert abs(float(row["prediction"]) - float(row["label"])) < 1
    assert set(row) == {"text", "label", "prediction"}


def test_a_trained_model_evaluates_and_predicts_alone_as_pipelines_do(run, files, tmp_path, caplog):
    caplog.set_level("INFO")
    trained = run("--train_file", files / "train.csv", epochs=8).rename(tmp_path / "trained")
    folder = run("--validation_file", files / "dev.csv", "--do_eval", model=trained)
    assert read_metrics(folder)["eval_accuracy"] > 0.6
    assert "train_samples" not in read_metrics(folder)
    assert not (folder / "model.safetensors").exists()
    folder.rename(tmp_path / "evaluated")
    before = files_below(trained)
    folder = run("--test_file", files / "unlabelled.csv", "--do_predict", model=trained)
    assert f"predictions are in {folder / 'predictions.csv'}." in caplog.text
    assert files_below(trained) == before
    classify = pipeline("text-classification", model=str(trained), device="cpu")
    rows = read_table(folder / "predictions.csv")
    expected = classify([row["text"] for row in rows])
    assert [row["prediction"] for row in rows] == [answer["label"] for answer in expected]
    scores = [answer["score"] for answer in expected]
    assert [float(row["probability"]) for row in rows] == pytest.approx(scores, abs=1e-4)
    with pytest.raises(UserError, match="holds predictions; choose another --output_dir, or pass --overwrite"):
        run("--test_file", files / "unlabelled.csv", "--do_predict", model=trained)
    run("--test_file", files / "unlabelled.csv", "--do_predict", "--overwrite", model=trained)
    run("--test_file", files / "test.csv", "--do_predict", "--overwrite", model=trained)
    assert json.loads((folder / "all_results.json").read_text())["test_accuracy"] > 0.6
    assert not (folder / "metrics.json").exists()  # nothing was trained or evaluated that could be finished
    # Of rows without labels the scores of others are none.
    beside = ["--validation_file", files / "dev.csv", "--do_eval", "--do_predict", "--output_dir", tmp_path / "beside"]
    for name, has_scores in (("test", True), ("unlabelled", False)):
        run("--test_file", files / f"{name}.csv", *beside, model=trained)
        for file in ("report.md", "metrics.json", "all_results.json"):
            assert ("test" in (tmp_path / "beside" / file).read_text()) == has_scores, file
    other = write_table(tmp_path / "other.csv", {"text": ["the cat"] * 2, "label": ["Green", "yellow"]})
    with pytest.raises(UserError, match=r"has the label `yellow`; known are `Green`, `Red, or so`, `blue`\."):
        run("--validation_file", other, "--do_eval", "--output_dir", tmp_path / "other", model=trained)


def test_predictions_leave_other_folders_and_runs_alone(run, files, tmp_path):
    """Scores of one model never come to stand in the folder of another."""
    one = run("--train_file", files / "train.csv", epochs=8).rename(tmp_path / "one")
    other = run("--train_file", files / "train.csv", epochs=1).rename(tmp_path / "other")
    before = files_below(one)
    labelled = ["--test_file", files / "test.csv", "--do_predict"]
    unlabelled = ["--test_file", files / "unlabelled.csv", "--do_predict"]
    with pytest.raises(
        UserError, match=r"one holds files that are no predictions of .*other \(.*`README.md`.* more\)"
    ):
        run(*labelled, "--overwrite", "--output_dir", one, model=other)
    assert files_below(one) == before
    with pytest.raises(UserError, match=r"train\.csv is a file; name a folder"):
        run(*labelled, "--output_dir", files / "train.csv", model=other)
    with pytest.raises(UserError, match=r"--output_dir .*train\.csv/run cannot be written"):
        run(*labelled, "--output_dir", files / "train.csv" / "run", model=other)
    with pytest.raises(UserError, match=r"The checkpoint .*/nope cannot be loaded"):
        run(*labelled, model=tmp_path / "nope")
    report = json.loads((one / "report.json").read_text())
    run(*labelled, "--output_dir", one, model=one)
    added = json.loads((one / "report.json").read_text())
    run("--train_file", files / "train.csv", "--output_dir", one, epochs=8)  # finished: nothing is lost
    assert json.loads((one / "report.json").read_text()) == added
    assert added.keys() > report.keys() == {"validation, this model", "validation, always the same"}
    assert read_metrics(one)["test_accuracy"] == added["test, this model"]["accuracy"]
    run(*unlabelled, "--overwrite", "--output_dir", one, model=one)
    assert json.loads((one / "report.json").read_text()) == report
    assert not [name for name in read_metrics(one) if name.startswith("test_")]
    assert (one / "all_results.json").is_file()
    run("--validation_file", files / "dev.csv", "--do_eval", "--output_dir", tmp_path / "alone", model=one)
    run(*labelled, "--output_dir", tmp_path / "alone", model=one)  # where the same model was evaluated
    assert {"eval_accuracy", "test_accuracy"} <= read_metrics(tmp_path / "alone").keys()
    with pytest.raises(UserError, match="holds files that are no predictions"):
        run(*labelled, "--output_dir", tmp_path / "alone", "--overwrite", model=other)
    folder = run(*labelled, model=other)
    assert {"report.md", "report.json", "test_confusion.csv"} <= {path.name for path in folder.iterdir()}
    run(*unlabelled, "--overwrite", model=one)  # of which nothing is known but the predictions
    assert {path.name for path in folder.iterdir()} == {"predictions.csv"}


def test_labels_may_have_the_names_of_no_names(run, files, tmp_path):
    texts = {"text": [make_text(number) for number in range(24)], "label": ["LABEL_0", "LABEL_1"] * 12}
    named = write_table(tmp_path / "named.csv", texts)
    trained = run("--train_file", named, epochs=1).rename(tmp_path / "trained")
    numbered = write_table(tmp_path / "numbered.csv", texts | {"label": [0, 1] * 12})
    scores = []
    for number, file in enumerate((named, numbered)):
        flags = ["--test_file", file, "--do_predict", "--output_dir", tmp_path / str(number)]
        run(*flags, model=trained)
        answers = {row["prediction"] for row in read_table(tmp_path / str(number) / "predictions.csv")}
        assert answers <= {"LABEL_0", "LABEL_1"}
        scores.append(json.loads((tmp_path / str(number) / "report.json").read_text()))
    assert scores[0] == scores[1]


def test_labels_are_read_by_their_numbers(run, files, tmp_path):
    """A file of JSON may be sorted by its keys, which are words: 0, 1, 10, 2."""
    names = [f"label {number:02}" for number in range(12)]
    texts = {"text": [make_text(number) for number in range(24)], "label": names * 2}
    trained = run("--train_file", write_table(tmp_path / "many.csv", texts), epochs=1).rename(tmp_path / "trained")
    flags = ["--test_file", tmp_path / "many.csv", "--do_predict", "--output_dir"]
    run(*flags, tmp_path / "before", model=trained)
    config = json.loads((trained / "config.json").read_text())
    (trained / "config.json").write_text(json.dumps(config, sort_keys=True))
    run(*flags, tmp_path / "after", model=trained)
    assert read_table(tmp_path / "after" / "predictions.csv") == read_table(tmp_path / "before" / "predictions.csv")


def test_an_untrained_head_predicts_nothing(run, files):
    for name in ("unlabelled.csv", "dev.csv"):
        with pytest.raises(UserError, match="has no classification head"):
            run("--test_file", files / name, "--do_predict")


def test_a_longer_input_lengthens_the_model(run, files):
    folder = run("--train_file", files / "train.csv", "--max_seq_length", 48, epochs=1)
    assert AutoConfig.from_pretrained(folder).max_position_embeddings == 48
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 48


def test_a_checkpoint_of_long_texts_reads_as_much(run, files, tmp_path, checkpoint):
    long = shutil.copytree(checkpoint, tmp_path / "long")
    for recorded, length in ((600, 600), (20, 32)):  # it takes 32
        (long / "arguments.yaml").write_text(f"max_seq_length: {recorded}\n")
        folder = run("--train_file", files / "train.csv", "--max_train_samples", 8, model=long, epochs=1)
        assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == length
        arguments = yaml.safe_load((folder / "arguments.yaml").read_text())
        assert arguments.get("max_seq_length") == (600 if recorded == 600 else None)
        folder.rename(tmp_path / str(recorded))


def test_texts_that_are_cut_are_counted(run, files, caplog):
    caplog.set_level("INFO")
    run("--train_file", files / "train.csv", "--max_seq_length", 8, epochs=1)
    assert "Inputs:   90 of 90 fill 8 tokens, behind which texts are cut; see --max_seq_length" in caplog.text
    caplog.clear()
    run("--train_file", files / "train.csv", "--overwrite", epochs=1)
    assert "Inputs:" not in caplog.text


def test_adapters_are_trained_and_predict(run, files):
    pytest.importorskip("peft")
    flags = [
        "--train_file",
        files / "train.csv",
        "--test_file",
        files / "test.csv",
        "--lora",
        "--do_train",
        "--do_predict",
    ]
    folder = run(*flags, epochs=12)
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    answers = pipeline("text-classification", model=str(folder))([make_text(number) for number in range(3)])
    assert [answer["label"] for answer in answers] == list(NAMES)
    results = json.loads((folder / "report.json").read_text())
    assert results["validation, this model"]["accuracy"] == read_metrics(folder)["eval_accuracy"]
    alone = folder.with_name("alone")
    run("--test_file", files / "test.csv", "--do_predict", "--output_dir", alone, model=folder)
    assert read_table(alone / "predictions.csv") == read_table(folder / "predictions.csv")


def test_several_seeds_predict_with_the_best(run, files, caplog):
    caplog.set_level("INFO")
    flags = ["--train_file", files / "train.csv", "--test_file", files / "test.csv", "--do_train", "--do_predict"]
    folder = run(*flags, "--seeds", 2, "--seed", 7, epochs=1)
    metrics = read_metrics(folder)
    best = metrics["scores"].index(max(metrics["scores"]))  # with these seeds not the first
    results = json.loads((folder / "report.json").read_text())
    assert results["validation, this model"]["accuracy"] == max(metrics["scores"])
    assert results["validation, median of 2 seeds"]["accuracy"] == pytest.approx(metrics["score"])
    assert results["validation, standard deviation of 2 seeds"]["accuracy"] == pytest.approx(metrics["std"])
    assert len(results) == 6  # with the commonest label's, and the test's
    assert re.search(rf"the best of 2, in \S+seed-{7 + best}\.", caplog.text)
    assert len(read_table(folder / "predictions.csv")) == 12
    with pytest.raises(UserError, match=r"run holds a model in each of seed-\d+, seed-\d+; give one of these folders"):
        run(*flags[2:4], "--do_predict", "--output_dir", folder / "answers", model=folder)
    run(*flags, "--seeds", 3, "--seed", 7, epochs=1)
    grown = json.loads((folder / "report.json").read_text())
    assert [row for row in grown if "seeds" in row] == [
        "validation, median of 3 seeds", "validation, standard deviation of 3 seeds",
    ]  # fmt: skip


def test_texts_of_another_language_are_refused(run, tmp_path):
    table = write_table(tmp_path / "t.csv", {"text": ["жук", "лиса и жук"] * 20, "label": ["a", "b"] * 20})
    with pytest.raises(UserError, match=r"100% of the texts for train are \[UNK\]"):
        run("--train_file", table)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "model_class"), [(BertConfig, BertForMaskedLM), (RobertaConfig, RobertaForMaskedLM)]
)
def test_other_architectures_read_pairs_of_texts(run, tmp_path, config, model_class):
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model_class(config(vocab_size=len(tokenizer), max_position_embeddings=40, **SIZES)).save_pretrained(
        tmp_path / "other"
    )
    tokenizer.save_pretrained(tmp_path / "other")
    columns = {"first": [make_text(n) for n in range(30)], "second": [make_text(n // 3) for n in range(30)]}
    table = write_table(tmp_path / "pairs.csv", columns | {"same": [n % 3 == n // 3 % 3 for n in range(30)]})
    flags = ["--text_column", "first", "--text_pair_column", "second", "--label_column", "same"]
    folder = run("--train_file", table, *flags, model=tmp_path / "other", epochs=1)
    assert AutoConfig.from_pretrained(folder).id2label == {0: "False", 1: "True"}
    assert read_metrics(folder)["eval_samples"] == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--do_eval", "--baseline", "tfidf"], "learns from the training texts"),
        (["--do_train", "--baseline", "tfidf", "words"], "--baseline words is not known; give tfidf, frozen or both"),
        (
            ["--do_train", "--problem_type", "regression", "--label_column", "id", "--baseline", "frozen"],
            "--baseline frozen is for single labels, not regression; leave it out",
        ),
        (["--do_train", "--do_predict"], "no texts for test; give --test_file"),
        (["--problem_type", "regression", "--label_column", "id", "--label_smoothing_factor", 0.1], "single labels"),
        (["--problem_type", "regression", "--label_column", "id", "--fit_head"], "single labels, not regression"),
        (["--fit_head", "--label_smoothing_factor", 0.1], "leave --label_smoothing_factor out"),
        (["--fit_head", "--lora"], "the adapters of --lora could learn; leave one of them out"),
        (
            ["--excerpt_length", 8, "--text_pair_column", "id", "--text_column", "text", "--label_column", "label"],
            "pairs",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_folder_is_made(run, files, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run("--train_file", files / "train.csv", *flags)
    assert not (tmp_path / "run").exists()


def test_a_fine_tuned_checkpoint_of_other_labels_needs_a_new_head(run, files, tmp_path, checkpoint):
    two = tmp_path / "two"
    SKTformerForSequenceClassification.from_pretrained(checkpoint, num_labels=2).save_pretrained(two)
    make_tokenizer().save_pretrained(two)
    with pytest.raises(UserError, match="head for 2 labels, and 3 are needed"):
        run("--train_file", files / "train.csv", model=two)
    assert read_metrics(run("--train_file", files / "train.csv", "--ignore_mismatched_sizes", model=two, epochs=1))


def test_a_head_goes_on_with_its_own_labels(run, files, tmp_path):
    """Its rows are those of its labels, in whatever order; other names are no names of these rows."""
    trained = run("--train_file", files / "train.csv", "--do_train").rename(tmp_path / "trained")
    model = SKTformerForSequenceClassification.from_pretrained(trained)
    flip = [2, 0, 1]
    for weights in (model.classifier.output.weight, model.classifier.output.bias):
        weights.data = weights.data[flip]
    model.config.id2label = {n: model.config.id2label[place] for n, place in enumerate(flip)}
    model.config.label2id = {name: n for n, name in model.config.id2label.items()}
    model.save_pretrained(trained)
    flags = ["--train_file", files / "train.csv", "--validation_file", files / "train.csv", "--learning_rate", 0]
    further = run(*flags, "--calibrate_head", model=trained, epochs=1)
    assert read_metrics(further)["eval_accuracy"] > 0.8
    kept = SKTformerForSequenceClassification.from_pretrained(further).classifier.state_dict()
    # By the names of the labels: no calibration moves what is trained.
    assert sorted(kept["output.bias"].tolist()) == sorted(model.classifier.output.bias.tolist())
    for name in ("pooling.center", "pooling.scale", "dense.weight", "dense.bias"):
        assert torch.equal(kept[name], model.classifier.state_dict()[name]), name
    rows = [row | {"label": row["label"] + "!"} for row in read_table(files / "train.csv")]
    renamed = write_table(tmp_path / "renamed.csv", {name: [row[name] for row in rows] for name in rows[0]})
    flags = ["--train_file", renamed, "--validation_file", renamed, "--learning_rate", 0, "--overwrite"]
    with pytest.raises(UserError, match=r"answers with .*pass --ignore_mismatched_sizes to start with a"):
        run(*flags, model=trained, epochs=1)
    folder = run(*flags, "--ignore_mismatched_sizes", model=trained, epochs=1)
    fresh = SKTformerForSequenceClassification.from_pretrained(folder)
    assert torch.equal(
        fresh.sktformer.embeddings.word_embeddings.weight, model.sktformer.embeddings.word_embeddings.weight
    )
    assert not torch.equal(fresh.classifier.output.weight, model.classifier.output.weight)


def test_the_card_of_a_computed_head_speaks_of_no_training(run, files, caplog):
    caplog.set_level("INFO")
    folder = run("--train_file", files / "train.csv", "--fit_head", "--baseline", "frozen")
    assert [line for line in caplog.messages if line.startswith("Recipe:") and "; no training step, seed" in line]
    card = (folder / "README.md").read_text()
    assert "as it was, below a head that was computed from train.csv" in card
    assert "fine-tuned" not in card.partition("\n# ")[2].partition("\n## ")[0]
    assert "flatters" not in card + (folder / "report.md").read_text()
    assert read_metrics(folder)["eval_accuracy"] > 0.8


def test_dollars_in_names_are_no_formulas(run, files, tmp_path):
    rows = [row | {"label": f"$0_{row['label']}_$5"} for row in read_table(files / "train.csv")]
    table = write_table(tmp_path / "a_$_b_$.csv", {name: [row[name] for row in rows] for name in rows[0]})
    folder = run("--train_file", table, epochs=1)
    for picture in ("curve.png", "confusion.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_a_run_is_uploaded_again_with_its_report(run, files, monkeypatch):
    seen: list = []
    monkeypatch.setattr(
        run_classification,
        "upload_run",
        lambda _, folder, message: seen.append((message, (folder / "report.md").is_file())),
    )
    run("--train_file", files / "train.csv", epochs=1)
    assert seen[-1] == ("Evaluated", True)


def test_other_names_of_labels_and_other_padding_make_another_run(run, files, tmp_path):
    run("--train_file", files / "train.csv", epochs=1)
    with pytest.raises(UserError, match="another run"):
        run("--train_file", files / "train.csv", "--pad_to_max_length", epochs=1)
    first = write_table(tmp_path / "a.csv", {"text": [make_text(n) for n in range(30)], "label": ["a", "b", "c"] * 10})
    other = write_table(tmp_path / "b.csv", {"text": [make_text(n) for n in range(30)], "label": ["d", "e", "f"] * 10})
    run("--train_file", first, "--output_dir", tmp_path / "named", epochs=1)
    with pytest.raises(UserError, match="another run"):
        run("--train_file", other, "--output_dir", tmp_path / "named", epochs=1)
