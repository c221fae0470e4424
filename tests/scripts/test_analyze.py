"""What is found out about trained models."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import analyze
from experiments.analyses import lengthening
from experiments.arguments import UserError
from experiments.comparisons import report
from experiments.comparisons.execution import Outcome
from experiments.comparisons.report import write_table
from experiments.comparisons.tables import TABLES
from experiments.lra.published import ROWS, published_figures
from experiments.lra.tasks import TASKS as LRA_TASKS
from experiments.results import describe_environment
from modeling_sktformer import SKTformerConfig, SKTformerForMaskedLM, SKTformerForSequenceClassification
from support.glue_rows import make_tokenizer


SIZES: dict = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run_analysis(*flags):
        monkeypatch.setattr(sys, "argv", list(map(str, ("analyze.py", *flags))))
        analyze.main()

    text = tmp_path / "text.txt"
    text.write_text("\n".join("the cat sees a dog . the bird hears two trees often ." for _ in range(40)))
    flags = ["--train_file", text, "--validation_file", text, "--cache_dir", tmp_path / "cache"]
    return lambda *more: run_analysis("lengthening", *flags, "--results_dir", tmp_path / "results", *more)


def save(folder, model):
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_lengthening_is_measured_by_both_rules(tmp_path, run, capsys):
    config = SKTformerConfig(**SIZES, max_position_embeddings=16, num_segments=2, num_landmark_features=2)
    run("--model_name_or_path", save(tmp_path / "ours", SKTformerForMaskedLM(config)), "--factors", 2)
    results = json.loads((tmp_path / "results" / "lengthening.json").read_text())
    rows = [list(row.values()) for row in results["rows"]]
    assert [row[:3] for row in rows] == [
        *([16, "none", 16], [32, "tile", 16], [32, "tile", 32], [32, "last", 16], [32, "last", 32]),
    ]
    assert all(2 < row[3] < 6 for row in rows)
    assert rows[1][3] != rows[2][3] != rows[4][3]  # by the length of inputs, and by the rule
    table = (tmp_path / "results" / "lengthening.md").read_text()
    assert capsys.readouterr().out == table + "\n"
    assert "of ours on text.txt, at its own length" in table
    assert f"| {rows[0][3]:.3f} " in table
    assert "```bash\npython analyze.py lengthening --train_file " in table
    for file in make_tokenizer().save_pretrained(tmp_path / "words"):
        (tmp_path / "ours" / Path(file).name).unlink()
    run("--model_name_or_path", tmp_path / "ours", "--tokenizer_name", tmp_path / "words", "--factors", 2)
    assert json.loads((tmp_path / "results" / "lengthening.json").read_text())["rows"] == results["rows"]


def test_checkpoints_in_half_precision_are_measured_in_single(tmp_path, run, monkeypatch):
    config = SKTformerConfig(**SIZES, max_position_embeddings=16, num_segments=2, num_landmark_features=2)
    types = set()
    evaluate = lengthening.MaskedLMTrainer.evaluation_loop

    def note_type(trainer, *args):
        types.add(trainer.model.dtype)
        return evaluate(trainer, *args)

    monkeypatch.setattr(lengthening.MaskedLMTrainer, "evaluation_loop", note_type)
    model = SKTformerForMaskedLM(config)
    model.bfloat16()
    ours = save(tmp_path / "ours", model)
    run("--model_name_or_path", ours, "--factors", 2)
    assert types == {torch.float32}


def test_what_cannot_be_lengthened_is_refused(tmp_path, run, monkeypatch):
    bert = save(tmp_path / "bert", BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=16)))
    with pytest.raises(UserError, match="is of type bert; only an SKTformer"):
        run("--model_name_or_path", bert)
    config = SKTformerConfig(**SIZES, max_position_embeddings=16, num_segments=2, num_landmark_features=2)
    with pytest.raises(UserError, match="has no masked-LM head"):
        run("--model_name_or_path", save(tmp_path / "classifier", SKTformerForSequenceClassification(config)))
    with pytest.raises(UserError, match="--streaming is for training"):
        run("--streaming")
    with pytest.raises(UserError, match="--factors 1"):
        run("--model_name_or_path", bert, "--factors", 1)
    for argv in ([], ["widening"]):
        monkeypatch.setattr(sys, "argv", ["analyze.py", *argv])
        with pytest.raises(UserError, match="write lengthening or incoherence or lra or tried first"):
            analyze.main()


def write_lra_table(task, rows, seeds, folder):
    """The table of a task as reproduce.py writes it, whose rows have these accuracies with each seed."""
    table = TABLES[f"lra_{task}"]
    (stage,) = table.stages
    shared = {"published": published_figures(task, SKTformerConfig(), 0), "history": [], "step_time_ms": 1.0}
    shared |= {"max_length": LRA_TASKS[task].max_length, "eval_test_samples": 500, "parameters": 1000}
    shared |= {"environment": describe_environment(), "model_type": "sktformer"}
    cell = stage.cases[0].key
    outcomes = {
        (row, cell): Outcome(1e-3, metrics=[shared | {"eval_test_accuracy": value} for value in values])
        for row, values in rows.items()
    }
    write_table(f"lra_{task}", table, [outcomes], {}, seeds, folder)


def test_tables_of_tasks_are_joined(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "_plot", lambda *args: [])
    monkeypatch.setattr(sys, "argv", ["analyze.py", "lra", "--results_dir", str(tmp_path)])
    with pytest.raises(UserError, match=r"has no lra_TASK.json; write it with `reproduce.py lra_TASK"):
        analyze.main()
    for number, task in enumerate(LRA_TASKS):
        rows = {"SKTformer": [0.5, 0.6 + number / 100], **({} if task == "text" else {"BERT": [0.25, 0.25]})}
        write_lra_table(task, rows, [0, 1], tmp_path)
    analyze.main()
    printed = re.sub(" +", " ", capsys.readouterr().out)
    assert "| SKTformer | 55.00 | 55.50 | 56.00 | 56.50 | 57.00 | 56.00 |" in printed
    assert "| BERT | 25.00 | - | 25.00 | 25.00 | 25.00 | - |" in printed
    for mean, row in ((64.11, "SKTformer"), (66.08, "SKTformer, best"), (55.16, "FNet")):
        figures = " | ".join(f"{value:.2f}" for value in ROWS[f"{row} (paper)"].values())
        assert f"| {row} (paper) | {figures} | {mean} |" in printed
    assert "| Text | 1,000 | 500 | 0, 1 | [lra_text.md](lra_text.md) |" in printed
    results = json.loads((tmp_path / "lra.json").read_text())
    assert results["means"]["SKTformer"] == pytest.approx(56)
    # Of some of the tasks there is no mean.
    (tmp_path / "lra_image.json").unlink()
    analyze.main()
    assert "| SKTformer | 55.00 | 55.50 | 56.00 | - | 57.00 | - |" in re.sub(" +", " ", capsys.readouterr().out)
    (tmp_path / "lra_image.json").write_text('{"columns": []}')
    with pytest.raises(UserError, match=r"lra_image.json is no table of `reproduce.py lra_image`"):
        analyze.main()


def test_what_was_tried_is_one_table(tmp_path, monkeypatch, capsys):
    def write(table, **columns):
        cells = {title.replace("_", " "): values for title, values in columns.items()}
        of = [{"title": t, "values": v, "cells": {row: f"{t} of {row}" for row in v}} for t, v in cells.items()]
        (tmp_path / f"{table}.json").write_text(json.dumps({"columns": of}))

    losses = {"SKTformer": [5.0, 5.2], "SKTformer-best": [4.5, 4.7], "best-gate": [4.4, 4.4], "batch-norm": [5.5]}
    write("improvements", loss=losses)
    write("improvements_long", loss={"SKTformer-best": [3.5], "best-relu-gate": [3.4], "Nystromformer": [3.6]})
    monkeypatch.setattr(sys, "argv", ["analyze.py", "tried", "--results_dir", str(tmp_path)])
    with pytest.raises(UserError, match=r"improvements_books.json is not there; write it with `reproduce.py improvem"):
        analyze.main()
    costs = {title: {row: [1.0] for row in losses} for title in ("steps", "step (ms)", "billion multiply-adds a step")}
    write("improvements_books", loss=losses, **costs)
    write("improvements_books_long", loss={"SKTformer-best": [3.0]})
    analyze.main()
    printed = re.sub(" +", " ", capsys.readouterr().out)
    where = "| loss of best-gate | - | loss of best-gate | - | steps of best-gate | step (ms) of best-gate |"
    assert f"| best-gate | SKTformer-best: use_residual_gate=True {where}" in printed
    assert "| SKTformer | the preset | loss of SKTformer |" in printed
    assert (
        "| best-relu-gate | SKTformer-best: smoother_activation=relu, use_residual_gate=True | - | loss of " in printed
    )
    assert "Nystromformer" not in printed
    differences = json.loads((tmp_path / "tried.json").read_text())["differences"]
    assert len(differences) == 2
    for of in differences.values():
        assert of["SKTformer-best"] == pytest.approx([-0.5, 0.2])
        assert of["best-gate"] == pytest.approx([-0.2, 0.02**0.5])
        assert of["batch-norm"] == pytest.approx([0.4, 0.02**0.5])
    assert (tmp_path / "tried.png").stat().st_size > 1000
    write("improvements", loss={"SKTformer": [5.0]})
    with pytest.raises(UserError, match=r"improvements.json has no row SKTformer-best; write it again with all rows"):
        analyze.main()
    write("improvements", accuracy=losses)
    with pytest.raises(UserError, match=r"improvements.json is no table of `reproduce.py improvements`"):
        analyze.main()


@pytest.mark.parametrize("name", analyze.TABLES)
def test_analyses_that_are_tables_say_their_command(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["analyze.py", name, "--data_dir", "x"])
    with pytest.raises(
        UserError, match=rf"`{name}` is a table .*write `python scripts/reproduce\.py lra_{name}"
    ) as error:
        analyze.main()
    table = str(error.value).partition("reproduce.py ")[2].rstrip("`.")
    assert all(table.replace("TASK", task) in TABLES for task in LRA_TASKS)
