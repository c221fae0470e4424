"""Every file below configuration/ is one that a script accepts, and says nothing twice."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForMaskedLM

import compare_glue
import compare_pretraining
import pretrain_mlm
import run_glue
from experiments.arguments import given_arguments, load_recipe, parse_args
from experiments.glue.tasks import TASKS
from experiments.models import ModelArguments, build_config
from experiments.runs import read_runs
from experiments.text.corpus import CorpusArguments
from modeling_sktformer import SKTformerConfig, SKTformerForMaskedLM, available_presets, load_preset


CONFIGURATION = Path(__file__).parents[2] / "configuration"
PRETRAINING = (ModelArguments, CorpusArguments, pretrain_mlm.MaskedLMArguments, pretrain_mlm.PretrainingArguments)
RUNS = sorted((CONFIGURATION / "runs").glob("pretrain*.txt"))
# Recipes that are read behind another one, and which.
OVERLAYS = {
    "glue/compare.yaml": "glue/base.yaml",
    "glue/small_tasks.yaml": "glue/base.yaml",
    "pretrain/compare_glue.yaml": "pretrain/compare.yaml",
}


def test_every_folder_is_tested():
    assert {path.name for path in CONFIGURATION.iterdir()} == {"README.md", "glue", "models", "pretrain", "runs"}
    assert RUNS


@pytest.mark.parametrize("path", sorted((CONFIGURATION / "models").glob("*.json")), ids=lambda path: path.stem)
def test_presets_are_configurations(path):
    values = json.loads(path.read_text())
    unknown = set(values) - set(SKTformerConfig.__dataclass_fields__) - {"model_type", "architectures"}
    assert not unknown
    config = AutoConfig.from_pretrained(path)
    assert isinstance(config, SKTformerConfig)
    config._name_or_path = ""
    assert config.to_dict() == load_preset(path.stem).to_dict()
    assert config.head_dim == 64
    if config.num_hidden_layers <= 4:
        SKTformerForMaskedLM(config)


def test_presets_take_overrides():
    assert len(available_presets()) == 4
    config = load_preset("sktformer-tiny", max_position_embeddings=2048, vocab_size=99)
    assert (config.hidden_size, config.max_position_embeddings, config.vocab_size) == (128, 2048, 99)
    with pytest.raises(ValueError, match=r"no preset `sktformer-huge`; the presets are .*sktformer-base"):
        load_preset("sktformer-huge")


@pytest.mark.parametrize("path", sorted((CONFIGURATION / "pretrain").glob("*.yaml")), ids=lambda path: path.stem)
def test_pretraining_recipes_parse(path, monkeypatch):
    flags = load_recipe(path)
    assert given_arguments(PRETRAINING, ["--recipe", str(path)]).keys() == flags.keys()
    # bfloat16 is refused where there is no accelerator, unless a processor is asked for.
    model, _, mlm, training = parse_args(PRETRAINING, ["--recipe", str(path), "--use_cpu"])
    build_config(model, mlm.vocab_size, mlm.max_seq_length, 0, training.seed)


def test_the_paper_s_recipe():
    base = CONFIGURATION / "pretrain" / "base.yaml"
    model, _, mlm, training = parse_args(PRETRAINING, ["--recipe", str(base), "--use_cpu"])
    assert model.config_name == "sktformer-base"
    assert (training.max_steps, training.global_batch_size, training.warmup_steps) == (1_000_000, 256, 5000)
    assert (training.learning_rate, training.lr_scheduler_type) == (1e-4, "linear")
    assert (mlm.max_seq_length, mlm.mlm_probability, mlm.vocab_size) == (512, 0.15, 30522)


@pytest.mark.parametrize("path", sorted((CONFIGURATION / "glue").glob("*.yaml")), ids=lambda path: path.stem)
def test_fine_tuning_recipes_parse(path):
    assert path.name == "base.yaml" or f"glue/{path.name}" in OVERLAYS
    needed = ["--model_name_or_path", "x", "--task_name", "all", "--use_cpu"]
    base = CONFIGURATION / "glue" / "base.yaml"
    parse_args(run_glue.GLUE_ARGUMENTS, ["--recipe", str(base), str(path), *needed])
    given = given_arguments(run_glue.GLUE_ARGUMENTS, ["--recipe", str(path), *needed])
    assert given.keys() - {"model_name_or_path", "task_name", "use_cpu"} == load_recipe(path).keys()


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_restate_nothing(name):
    overlay, base = load_recipe(CONFIGURATION / name), load_recipe(CONFIGURATION / OVERLAYS[name])
    assert overlay
    assert not {key for key, value in overlay.items() if base.get(key) == value}


def test_the_fine_tuning_is_a_point_of_the_paper_s_grid():
    needed = ["--model_name_or_path", "x", "--task_name", "all", "--use_cpu"]
    base, small = CONFIGURATION / "glue" / "base.yaml", CONFIGURATION / "glue" / "small_tasks.yaml"
    for recipes in ([base], [base, small]):
        _, glue, training = parse_args(run_glue.GLUE_ARGUMENTS, ["--recipe", *map(str, recipes), *needed])
        assert training.num_train_epochs in training.search_epochs == [4, 10, 20]
        assert training.learning_rate in training.search_learning_rates == [5e-5, 1e-4]
        assert training.per_device_train_batch_size in training.search_batch_sizes == [16, 32]
        assert (glue.max_seq_length, training.lr_scheduler_type, training.max_grad_norm) == (128, "linear", 1.0)


def test_fine_tuning_runs_are_the_nine_tasks(monkeypatch):
    monkeypatch.chdir(CONFIGURATION.parent)
    runs = read_runs(CONFIGURATION / "runs" / "glue.txt", [0], "out")
    assert [run.name for run in runs] == list(TASKS)
    for run in runs:
        flags = ["--model_name_or_path", "x", "--use_cpu", *run.arguments]
        _, glue, training = parse_args(run_glue.GLUE_ARGUMENTS, flags)
        assert glue.task_name == [run.name]
        assert training.num_train_epochs == (10 if run.name in ("cola", "stsb", "mrpc", "rte", "wnli") else 4)


def test_rows_of_the_fine_tuning_comparison_parse():
    arguments = compare_glue.GlueComparisonArguments("glue")
    checkpoints = {run.name: Path(run.name) for run in read_runs(arguments.pretraining_runs, [0], "out")}
    shared = compare_pretraining.load_recipes(arguments.glue_recipes)
    rows = read_runs(arguments.glue_runs, [0], "out")
    assert {row.arguments[row.arguments.index("--model_name_or_path") + 1] for row in rows} == checkpoints.keys()
    for row in rows:
        flags = [*compare_glue.name_checkpoint(row, checkpoints).arguments, "--task_name", "cola", "--use_cpu"]
        parse_args(run_glue.GLUE_ARGUMENTS, ["--recipe", *arguments.glue_recipes, *flags])
        given = given_arguments(run_glue.GLUE_ARGUMENTS, flags)
        assert not {name for name, value in given.items() if shared.get(name) == value}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_runs_parse_and_restate_nothing(path):
    shared = compare_pretraining.load_recipes(compare_pretraining.ComparisonArguments().recipe_of_runs)
    for line in path.read_text().splitlines():
        flags = shlex.split(line, comments=True)
        if not flags:
            continue
        given = given_arguments(PRETRAINING, flags)
        assert not {name for name, value in given.items() if shared.get(name) == value}
        arguments = parse_args([ModelArguments, pretrain_mlm.PretrainingArguments], flags)[0]
        build_config(arguments, 4096, shared["max_seq_length"], 0, 0)


def test_the_wide_bert_has_sktformer_s_number_of_parameters():
    sizes = {}
    for run in read_runs(CONFIGURATION / "runs" / "pretrain.txt", [0], "out"):
        arguments = parse_args([ModelArguments, pretrain_mlm.PretrainingArguments], run.arguments)[0]
        config = build_config(arguments, 4096, 128, 0, 0)
        sizes[run.name] = AutoModelForMaskedLM.from_config(config).num_parameters()
    assert abs(sizes["BERT-wide"] / sizes["SKTformer"] - 1) < 0.01
    assert sizes["BERT"] < sizes["SKTformer"]


def test_scripts_without_a_recipe_read_the_quick_start(monkeypatch):
    def load_corpus(arguments):
        assert arguments == CorpusArguments()
        raise InterruptedError

    def check_training_arguments(training, corpus_arguments):
        assert training.output_dir == "runs/quickstart"
        assert training.seed == 4

    monkeypatch.setattr(sys, "argv", ["pretrain_mlm.py", "--seed", "4"])
    monkeypatch.setattr(pretrain_mlm, "load_corpus", load_corpus)
    monkeypatch.setattr(pretrain_mlm, "check_training_arguments", check_training_arguments)
    with pytest.raises(InterruptedError):
        pretrain_mlm.main()
