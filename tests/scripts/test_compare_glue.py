"""Architectures compared on GLUE, from pre-training to the table."""

import json
import logging
import statistics
import sys

import pytest
import yaml
from transformers import AutoConfig

import compare_glue
import compare_pretraining
import pretrain_mlm
import run_glue
import train_tokenizer
from experiments.arguments import UserError
from experiments.glue.tasks import TASKS
from support.glue_rows import files_below, make_rows, read_metrics, write_tasks


@pytest.fixture(autouse=True)
def restored_logging():
    """Scripts set up logging, which would outlive the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("glue"))


def run_in_process(script, runs, shared, finished, check=lambda run, arguments: None):
    """What `execute_runs` does, without a process for each run."""
    modules = {m.__name__: m for m in (train_tokenizer, pretrain_mlm, run_glue)}
    for item in runs:
        if (item.folder / finished).is_file():
            check(item, [*shared, *item.arguments])
            continue
        with pytest.MonkeyPatch.context() as context:
            argv = [str(script), *shared, *item.arguments, "--output_dir", str(item.folder)]
            context.setattr(sys, "argv", argv)
            modules[script.stem].main()


@pytest.fixture
def comparison(tmp_path, tasks):
    """Flags of a comparison of two small models on two tasks."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(row["sentence"] for row in make_rows(TASKS["sst2"], "train", 600)))
    shared = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "cache_dir": str(tmp_path / "cache")}
    pretraining = {
        **{"config_name": "sktformer-tiny", "max_seq_length": 32, "full_blocks_only": True, "max_steps": 2},
        **{"per_device_train_batch_size": 4, "learning_rate": 1e-3},
    }
    finetuning = {
        **{"max_seq_length": 32, "num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-2},
        "train_sampling_strategy": "group_by_length",
    }
    (tmp_path / "pretraining.yaml").write_text(yaml.safe_dump(shared | pretraining))
    (tmp_path / "finetuning.yaml").write_text(yaml.safe_dump(shared | finetuning))
    small = "--config_overrides num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=32"
    (tmp_path / "checkpoints.txt").write_text(f"--run_name ours {small}\n--run_name BERT --model_type bert {small}\n")
    (tmp_path / "rows.txt").write_text(
        "--run_name ours --model_name_or_path ours\n--run_name BERT --model_name_or_path BERT\n"
        "--run_name mean --model_name_or_path ours --config_overrides classifier_pooling=mean\n"
    )
    return [
        *("--train_file", text, "--validation_file", text, "--data_name", "rows", "--data_dir", tasks),
        *("--pretraining_runs", tmp_path / "checkpoints.txt", "--glue_runs", tmp_path / "rows.txt"),
        *("--pretraining_recipes", tmp_path / "pretraining.yaml"),
        *("--glue_recipes", tmp_path / "finetuning.yaml", "--vocab_size", 120, "--seeds", 2),
        *("--task_name", "stsb", "cola", "--output_dir", tmp_path / "out", "--results_dir", tmp_path / "results"),
    ]


def compare(monkeypatch, flags, *more):
    monkeypatch.setattr(sys, "argv", ["compare_glue.py", *map(str, flags), *map(str, more)])
    compare_glue.main()


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_comparison_pre_trains_and_fine_tunes_alike(tmp_path, comparison, monkeypatch, in_process):
    if in_process:
        monkeypatch.setattr(compare_pretraining, "execute_runs", run_in_process)
        monkeypatch.setattr(compare_glue, "execute_runs", run_in_process)
    compare(monkeypatch, comparison)
    results = json.loads((tmp_path / "results" / "glue.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["ours", "BERT", "mean"]
    assert results["tasks"] == ["cola", "stsb"]
    for row, name in zip(results["rows"], ("ours", "BERT", "ours"), strict=True):
        folder = tmp_path / "out" / "finetuned" / f"{row['name']}-0"
        pretrained = tmp_path / "out" / "pretrained" / f"{name}-0"
        assert read_metrics(folder / "cola")["started_from"] == str(pretrained)
        assert row["pretraining_loss"] == read_metrics(pretrained)["eval_loss"]
        scores = [100 * read_metrics(folder / "stsb" / f"seed-{seed}")["score"] for seed in (0, 1)]
        assert row["scores"]["stsb"]["seeds"] == pytest.approx(scores)
        assert row["scores"]["stsb"]["mean"] == pytest.approx(statistics.mean(scores))
        assert row["parameters"] == read_metrics(folder / "cola")["parameters"]
    assert AutoConfig.from_pretrained(folder / "cola" / "seed-1").classifier_pooling == "mean"
    table = (tmp_path / "results" / "glue.md").read_text()
    assert f"| {results['rows'][1]['pretraining_loss']:.3f} " in table
    assert (tmp_path / "results" / "glue.png").read_bytes().startswith(b"\x89PNG")
    before = files_below(tmp_path / "out")
    compare(monkeypatch, comparison)
    assert files_below(tmp_path / "out") == before
    (tmp_path / "rows.txt").write_text("--run_name ours --model_name_or_path others\n")
    with pytest.raises(UserError, match="ours: --model_name_or_path must be one of ours, BERT"):
        compare(monkeypatch, comparison)
    (tmp_path / "rows.txt").write_text("--run_name ours --model_name_or_path ours\n")
    (tmp_path / "other.yaml").write_text("learning_rate: 3e-3\n")
    with pytest.raises(UserError, match="run with other arguments"):
        compare(monkeypatch, comparison, "--glue_recipes", tmp_path / "finetuning.yaml", tmp_path / "other.yaml")
    assert files_below(tmp_path / "out") == before


def test_comparison_rows_are_over_the_seeds():
    results = {
        "cola": {"scores": [0.1, 0.3], "parameters": 1234567},
        "sst2": {"scores": [0.5, 0.9], "parameters": 1234567},
    }
    row = compare_glue.summarise("ours", {"eval_loss": 3.25}, results)
    assert row["scores"]["cola"]["mean"] == pytest.approx(20)
    assert row["scores"]["cola"]["std"] == pytest.approx(statistics.stdev([10, 30]))
    assert row["scores"]["mean"]["seeds"] == pytest.approx([30, 60])
    assert row["scores"]["mean"]["std"] == pytest.approx(statistics.stdev([30, 60]))
    environment = {name: name for name in ("python", "torch", "transformers", "device", "threads")}
    before = {"max_steps": 7, "per_device_train_batch_size": 3, "max_seq_length": 128}
    after = {"num_train_epochs": 2, "learning_rate": 3e-4, "per_device_train_batch_size": 5, "max_seq_length": 64}
    text = compare_glue.format_table(
        {
            **{"data": "a text", "seeds": 2, "tasks": ["sst2", "cola"], "rows": [row]},
            **{"pretraining": before, "fine-tuning": after, "environment": environment, "commits": ["abc", "def"]},
        }
    )
    (line,) = [line for line in text.splitlines() if line.startswith("| ours ")]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        *("ours", "1,234,567", "3.250", "70.00 ± 28.28", "20.00 ± 14.14", "45.00 ± 21.21"),
    ]
    for words in ("a text: 7 steps of 3 sequences of 128 tokens", "2 epochs at learning rate 0.0003", "abc, def"):
        assert words in text


def test_comparison_needs_seeds(tasks, monkeypatch):
    with pytest.raises(UserError, match="--seeds is 1"):
        compare(monkeypatch, ["--data_dir", tasks, "--seeds", 1])
