"""Tables whose runs are trainings of small models."""

import json
import math
import random
import statistics
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import AutoConfig

import reproduce
from experiments import runs
from experiments.comparisons.stages import Case
from experiments.comparisons.tables import TABLES
from experiments.glue.tasks import TASKS
from support.glue_rows import CUES, files_below, make_rows, read_metrics, write_tasks
from support.processes import run_in_process
from support.tables import cells, read_run


@pytest.fixture
def small_glue(tmp_path, monkeypatch):
    """The table `glue`, of two steps on made text; returns the flags of its data."""
    tasks = write_tasks(tmp_path / "glue")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(row["sentence"] for row in make_rows(TASKS["sst2"], "train", 600)))
    shared = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 8}
    small = "hidden_size=32,intermediate_size=32"
    files = {
        "first.yaml": yaml.safe_dump(
            {**shared, "config_name": "sktformer-tiny", "max_seq_length": 32, "full_blocks_only": True}
            | {"eval_strategy": "steps", "eval_steps": 0.5, "global_batch_size": 8, "learning_rate": 1e-3}
        ),
        "second.yaml": yaml.safe_dump({**shared, "max_seq_length": 32, "max_steps": 6, "global_batch_size": 8}),
        "first.txt": f"--run_name ours --config_overrides {small}\n"
        f"--run_name ModernBERT --model_type modernbert --config_overrides {small}\n",
        "second.txt": "--run_name ours --model_name_or_path ours\n--run_name BERT --model_name_or_path ModernBERT\n"
        "--run_name mean --model_name_or_path ours --config_overrides classifier_pooling=mean\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    table = TABLES["glue"]
    changes: tuple[dict[str, Any], ...] = (
        {"cases": (Case("2 steps", max_steps=2),), "recipes": (str(tmp_path / "first.yaml"),)},
        {"cases": tuple(case for case in table.stages[1].cases if case.name != "sst2")}
        | {"recipes": (str(tmp_path / "second.yaml"),), "search_steps": 4},
    )
    stages = tuple(
        replace(stage, runs=str(tmp_path / f"{name}.txt"), **change)
        for stage, name, change in zip(table.stages, ("first", "second"), changes, strict=True)
    )
    monkeypatch.setitem(TABLES, "glue", replace(table, stages=stages))
    flags = ["--train_file", text, "--validation_file", text, "--cache_dir", tmp_path / "cache", "--data_dir", tasks]
    flags += ["--vocab_size", 120, "--output_dir", tmp_path / "out", "--results_dir", tmp_path / "results"]
    return list(map(str, flags))


@pytest.mark.slow
def test_a_table_starts_a_process_for_every_run(tmp_path, monkeypatch, small_glue):
    flags = ["--seeds", "0", "--learning_rates", "1e-3"]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "glue", *small_glue, *flags])
    reproduce.main()
    columns = json.loads((tmp_path / "results" / "glue.json").read_text())["columns"]
    values = {column["title"]: column["values"] for column in columns}
    for row, start in (("ours", "ours"), ("BERT", "ModernBERT"), ("mean", "ours")):
        pretrained = read_metrics(tmp_path / "out" / "pretraining" / f"{start}-2-0")
        assert values["pre-training loss"][row] == [pretrained["eval_loss"]]
        for title, task in (("CoLA", "cola"), ("STS-B", "stsb")):
            metrics = read_run(tmp_path / "out" / "glue", f"{row}-{task}-0.001-0-from-", task)
            assert values[title][row] == pytest.approx([100 * metrics["score"]])


def test_models_are_pre_trained_and_fine_tuned_alike(tmp_path, monkeypatch, small_glue):
    monkeypatch.setattr(runs.Children, "run", run_in_process)
    flags = ["--seeds", "0", "1", "--learning_rates", "1e-3", "2e-3"]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "glue", *small_glue, *flags])
    reproduce.main()
    results = json.loads((tmp_path / "results" / "glue.json").read_text())
    markdown = (tmp_path / "results" / "glue.md").read_text()
    titles = [column["title"] for column in results["columns"]]
    assert titles[:2] == ["parameters", "pre-training loss"]
    assert titles[2:] == ["CoLA", "STS-B", "mean", "learning rate"]
    for row, start in (("ours", "ours"), ("BERT", "ModernBERT"), ("mean", "ours")):
        pretrained = [tmp_path / "out" / "pretraining" / f"{start}-2-{seed}" for seed in (0, 1)]
        assert results["columns"][1]["values"][row] == [read_metrics(folder)["eval_loss"] for folder in pretrained]
        scores = []
        (chosen,) = results["columns"][5]["values"][row]
        glue, rates = tmp_path / "out" / "glue", (1e-3, 2e-3)
        searched = {f"{rate:g}": read_run(glue, f"{row}-cola-4-{rate:g}-100-from-", "cola") for rate in rates}
        losses = {rate: metrics["eval_loss"] for rate, metrics in searched.items()}
        assert min(losses, key=losses.__getitem__) == f"{chosen:g}"
        for task in ("cola", "stsb"):
            assert results["searches"][f"{row}-{task}"] == losses
            found = [read_run(glue, f"{row}-{task}-{chosen:g}-{seed}-from-", task) for seed in (0, 1)]
            scores.append([100 * metrics["score"] for metrics in found])
        for column, values in zip(results["columns"][2:5], [*scores, np.mean(scores, axis=0)], strict=True):
            assert column["values"][row] == pytest.approx(values)
            assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" in cells(markdown, row)
    (last,) = (tmp_path / "out" / "glue").glob("mean-cola-*-1-from-*/cola")
    assert AutoConfig.from_pretrained(last).classifier_pooling == "mean"
    assert cells(markdown, "majority")[2] == "0.00"
    assert (tmp_path / "results" / "glue.png").read_bytes().startswith(b"\x89PNG")
    before = files_below(tmp_path / "out")
    reproduce.main()
    assert files_below(tmp_path / "out") == before


def write_books(folder):
    """Of two authors, whose words give them away: two each to train on and one to test on."""
    choose = random.Random(0)
    for part, titles in (("train", ("one", "two")), ("test", ("three",))):
        (folder / part).mkdir()
        for number, author in enumerate(("austen", "poe")):
            for title in titles:
                words = choose.choices(["the", "river", "house", CUES[number], CUES[number]], k=150)
                (folder / part / f"{author}_{title}.txt").write_text(" ".join(words))


@pytest.mark.slow
def test_books_are_attributed_to_their_authors(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.Children, "run", run_in_process)
    write_books(tmp_path)
    shared = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "eval_strategy": "no"}
    small = "hidden_size=32,intermediate_size=32"
    files = {
        "first.yaml": yaml.safe_dump(
            {**shared, "config_name": "sktformer-tiny", "max_seq_length": 32, "document_unit": "file", "max_steps": 2}
            | {"validation_fraction": 0.25, "eval_strategy": "steps", "eval_steps": 0.5}
        ),
        "second.yaml": yaml.safe_dump({**shared, "max_steps": 4, "calibrate_head": True}),
        "third.yaml": yaml.safe_dump({**shared, "max_steps": 2, "learning_rate": 1e-4}),
        "fourth.yaml": yaml.safe_dump({**shared, "max_steps": 2, "learning_rate": 1e-4}),
        "first.txt": f"--run_name ours --config_overrides {small}\n"
        f"--run_name untrained --max_steps 1 --learning_rate 0 --config_overrides {small}\n"
        f"--run_name BERT --model_type bert --config_overrides {small}\n",
        "second.txt": "--run_name ours --model_name_or_path ours --config_overrides classifier_pooling=mean\n"
        "--run_name scratch --model_name_or_path untrained\n--run_name BERT --model_name_or_path BERT\n",
        "third.txt": "--run_name ours --model_name_or_path ours --baseline tfidf\n"
        "--run_name scratch --model_name_or_path scratch\n--run_name BERT --model_name_or_path BERT\n",
        "fourth.txt": "--run_name ours --model_name_or_path ours --baseline tfidf\n"
        "--run_name scratch --model_name_or_path scratch\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    table = TABLES["authorship_long"]
    stages = [
        replace(stage, runs=str(tmp_path / f"{name}.txt"), recipes=(str(tmp_path / f"{name}.yaml"),))
        for stage, name in zip(table.stages, ("first", "second", "third", "fourth"), strict=True)
    ]
    cases = [replace(case, flags=("--document_unit", "file"), minutes=1e-4) for case in stages[0].cases]
    stages[0] = replace(stages[0], cases=tuple(cases))
    for number, lengths, rates in ((1, (16,), (1e-2,)), (2, (32,), ()), (3, (64,), ())):
        cases = [
            replace(case, flags=(*case.flags, "--excerpt_length", str(length)), max_steps=None)
            for case, length in zip(stages[number].cases, lengths, strict=True)
        ]
        stages[number] = replace(stages[number], cases=tuple(cases), learning_rates=rates)
    # What other tables say of a recipe is not in these short ones.
    monkeypatch.setitem(TABLES, "authorship_long", replace(table, text="{data}.", stages=tuple(stages)))
    flags = ["--train_file", tmp_path / "train" / "*.txt", "--test_file", tmp_path / "test" / "*.txt"]
    flags += ["--cache_dir", tmp_path / "cache", "--vocab_size", 60, "--seeds", 0, 1]
    flags += ["--output_dir", tmp_path / "out", "--results_dir", tmp_path / "results"]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "authorship_long", *map(str, flags)])
    reproduce.main()
    markdown = (tmp_path / "results" / "authorship_long.md").read_text()
    started, short, middle, long = ([measure.title for measure in stage.measures] for stage in table.stages)
    assert cells(markdown, "") == [*started, *short, "learning rate, 128 tokens", *middle, *long]
    assert cells(markdown, "TF-IDF")[5:] == ["100.0"] * 4
    assert "| BERT " not in markdown  # whose lengths cannot grow
    assert "-" not in cells(markdown, "scratch")
    out = tmp_path / "out" / "authorship"
    assert {path.name.partition("-from")[0] for path in (out / "short").iterdir() if path.is_dir()} == {
        f"{row}-128-0.01-{seed}" for row in ("ours", "scratch") for seed in (0, 1)
    }
    (tuned,) = (out / "longer").glob("ours-4096-1-from-*/")
    assert read_metrics(tuned)["started_from"].startswith("ours-512-1-from-")
    results = json.loads((tuned / "report.json").read_text())["test, this model"]
    assert {f"test_{name}": value for name, value in results.items()}.items() <= read_metrics(tuned).items()
    assert AutoConfig.from_pretrained(tuned).max_position_embeddings == 64
    untrained = read_metrics(out / "pretraining" / "untrained-512-0.0001min-1")
    assert untrained["step"] == 1  # as the row says
    assert not [*out.glob("pretraining/untrained-512-timed-*")]
    assert untrained["eval_loss"] == pytest.approx(math.log(60), abs=0.3)  # it answers alike with every word
    assert (out / "pretraining" / "tokenizer-60").is_dir()
    before = files_below(tmp_path / "out")
    reproduce.main()
    assert files_below(tmp_path / "out") == before


@pytest.mark.slow
def test_books_are_attributed_by_encoders_that_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.Children, "run", run_in_process)
    write_books(tmp_path)
    small = "hidden_size=32,intermediate_size=32"
    files = {
        "first.yaml": yaml.safe_dump(
            {"use_cpu": True, "config_name": "sktformer-tiny", "max_seq_length": 32, "document_unit": "file"}
            | {"max_steps": 2, "validation_fraction": 0.25, "eval_strategy": "no", "disable_tqdm": True}
        ),
        "second.yaml": yaml.safe_dump(
            {"config_overrides": "classifier_pooling=layers", "use_cpu": True, "eval_strategy": "no", "fit_head": True}
        ),
        "first.txt": f"--run_name ours --config_overrides {small}\n"
        f"--run_name ModernBERT --model_type modernbert --config_overrides {small}\n",
        "second.txt": "--run_name ours --model_name_or_path ours --baseline tfidf frozen\n"
        "--run_name ModernBERT --model_name_or_path ModernBERT --config_overrides classifier_pooling=mean "
        "--baseline frozen\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    table = TABLES["authorship_frozen_512"]
    stages = [
        replace(stage, runs=str(tmp_path / f"{name}.txt"), recipes=(str(tmp_path / f"{name}.yaml"),))
        for stage, name in zip(table.stages, ("first", "second"), strict=True)
    ]
    cases = [replace(case, flags=("--document_unit", "file"), minutes=1e-4) for case in stages[0].cases]
    stages[0] = replace(stages[0], cases=tuple(cases))
    (case,) = stages[1].cases
    stages[1] = replace(stages[1], cases=(replace(case, flags=(*case.flags, "--excerpt_length", "64")),))
    monkeypatch.setitem(TABLES, "authorship_frozen_512", replace(table, text="{data}.", stages=tuple(stages)))
    flags = ["--train_file", tmp_path / "train" / "*.txt", "--test_file", tmp_path / "test" / "*.txt"]
    flags += ["--cache_dir", tmp_path / "cache", "--vocab_size", 60, "--seeds", 0, 1]
    flags += ["--output_dir", tmp_path / "out", "--results_dir", tmp_path / "results"]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "authorship_frozen_512", *map(str, flags)])
    reproduce.main()
    markdown = (tmp_path / "results" / "authorship_frozen_512.md").read_text()
    titles = [measure.title for stage in table.stages for measure in stage.measures]
    assert cells(markdown, "") == titles
    assert cells(markdown, "ours")[2] == "1"  # that fits into the time
    assert cells(markdown, "TF-IDF")[3:] == ["100.0", "100.0", "-", "-"]
    for row in ("ours", "ModernBERT"):
        assert "-" not in cells(markdown, row)
    computed = read_run(tmp_path / "out" / "authorship" / "frozen", "ours-512-1-from-")
    assert computed["test_baselines"]["frozen encoder"]["accuracy"] == computed["test_accuracy"]
    assert not {"train_runtime", "learning_rate"} & computed.keys()
