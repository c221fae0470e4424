"""Every file below configuration/ is one that a script accepts, and says nothing twice."""

import functools
import json
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForMaskedLM

import pretrain_mlm
import run_classification
import run_forecasting
import run_glue
import run_lra
from experiments.arguments import (
    RIVALS,
    flag_values,
    load_recipe,
    merge_recipes,
    parse_args,
    parse_command,
    recipes_behind,
)
from experiments.comparisons.execution import start_of
from experiments.comparisons.stages import Stage
from experiments.comparisons.tables import TABLES
from experiments.glue.tasks import TASKS
from experiments.lra.models import build_model
from experiments.lra.published import PUBLISHED_TASKS, published_figures
from experiments.lra.tasks import TASKS as LRA_TASKS
from experiments.models import ModelArguments, build_config
from experiments.runs import read_runs
from experiments.training import RunArguments
from modeling_sktformer import SKTformerConfig, SKTformerForMaskedLM, load_preset


CONFIGURATION = Path(__file__).parents[2] / "configuration"
RESULTS = CONFIGURATION.parent / "model_cards" / "results"
PRETRAINING = pretrain_mlm.ARGUMENTS
# Recipes that are read behind another one, and which.
OVERLAYS = {
    path.relative_to(CONFIGURATION).as_posix(): Path(behind).relative_to(CONFIGURATION).as_posix()
    for path in sorted(CONFIGURATION.rglob("*.yaml"))
    for behind in recipes_behind(str(path))[:-1]
} | {"lra/self_pretraining.yaml": "lra/listops.yaml"}


def keys_of(path: Path) -> set[str]:
    """What a recipe gives when it is named alone: also of those behind it, but for what it contradicts."""
    keys: set[str] = set()
    for behind in recipes_behind(str(path)):
        own = set(load_recipe(behind))
        keys = keys - {key for rivals in RIVALS if own & set(rivals) for key in rivals} | own
    return keys


def test_every_folder_is_tested():
    folders = {"classification", "forecasting", "glue", "lra", "models", "pretrain", "runs"}
    assert {path.name for path in CONFIGURATION.iterdir()} == {"README.md", *folders}
    runs = {stage.runs for table in TABLES.values() for stage in table.stages}
    assert {path.name for path in (CONFIGURATION / "runs").iterdir()} == {
        *runs,
        "forecasting.txt",
        "glue.txt",
        "lra_incoherence.txt",
    }


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
    config = load_preset("sktformer-tiny", max_position_embeddings=2048, vocab_size=99)
    assert (config.hidden_size, config.max_position_embeddings, config.vocab_size) == (128, 2048, 99)
    with pytest.raises(ValueError, match=r"no preset `sktformer-huge`; the presets are .*sktformer-base"):
        load_preset("sktformer-huge")


@pytest.mark.parametrize("path", sorted((CONFIGURATION / "pretrain").glob("*.yaml")), ids=lambda path: path.stem)
def test_pretraining_recipes_parse(path, monkeypatch):
    # Where there is no accelerator a recipe's bfloat16 is left out.
    assert parse_command(PRETRAINING, argv=["--recipe", str(path)]).given.keys() | {"bf16"} == keys_of(path) | {"bf16"}
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
    parse_args(run_glue.ARGUMENTS, ["--recipe", str(base), str(path), *needed])
    given = parse_command(run_glue.ARGUMENTS, argv=["--recipe", str(path), *needed]).given
    assert given.keys() - {"model_name_or_path", "task_name", "use_cpu"} == keys_of(path)


@pytest.mark.parametrize("path", sorted((CONFIGURATION / "classification").glob("*.yaml")), ids=lambda path: path.stem)
def test_classification_recipes_parse(path):
    needed = ["--model_name_or_path", "x", "--train_file", "x.csv", "--use_cpu"]
    given = parse_command(run_classification.ARGUMENTS, argv=["--recipe", str(path), *needed]).given
    assert given.keys() - {"model_name_or_path", "train_file", "use_cpu"} == keys_of(path)


def test_best_recipes_are_read_behind_the_task_s():
    assert {name for name in OVERLAYS if name.startswith("lra/best/")} == {
        f"lra/best/{name}.yaml" for name in PUBLISHED_TASKS
    }
    base, image, best = (str(CONFIGURATION / f"lra/{name}.yaml") for name in ("base", "image", "best/image"))
    alone = parse_command(run_lra.ARGUMENTS, argv=["--recipe", best, "--use_cpu"])
    assert alone.recipes == [base, image, best]
    assert alone.given == parse_command(run_lra.ARGUMENTS, argv=["--recipe", image, best, "--use_cpu"]).given
    assert alone.given["task_name"] == "image"


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_restate_nothing(name):
    overlay = load_recipe(CONFIGURATION / name)
    base = functools.reduce(merge_recipes, map(load_recipe, recipes_behind(str(CONFIGURATION / OVERLAYS[name]))))
    assert overlay
    assert restated(overlay, base) == restated(overlay.get("model_config", {}), base.get("model_config", {})) == set()


def restated(later, earlier):
    """What is said again; a number may be a word there, as YAML takes 1e-3 for one, and none here."""

    def number(value):
        try:
            return float(value)
        except (TypeError, ValueError):
            return value

    return {name for name, value in later.items() if name in earlier and number(earlier[name]) == number(value)}


def test_the_fine_tuning_is_a_point_of_the_paper_s_grid():
    needed = ["--model_name_or_path", "x", "--task_name", "all", "--use_cpu"]
    base, small = CONFIGURATION / "glue" / "base.yaml", CONFIGURATION / "glue" / "small_tasks.yaml"
    for recipes in ([base], [base, small]):
        *_, glue, training = parse_args(run_glue.ARGUMENTS, ["--recipe", *map(str, recipes), *needed])
        assert training.num_train_epochs in training.search_epochs == [4, 10, 20]
        assert training.learning_rate in training.search_learning_rates == [5e-5, 1e-4]
        assert training.per_device_train_batch_size in training.search_batch_sizes == [16, 32]
        assert (glue.max_seq_length, training.lr_scheduler_type, training.max_grad_norm) == (128, "linear", 1.0)


def test_fine_tuning_runs_are_the_nine_tasks(monkeypatch):
    monkeypatch.chdir(CONFIGURATION.parent)
    runs = read_runs(CONFIGURATION / "runs" / "glue.txt")
    assert list(runs) == list(TASKS)
    for name, arguments in runs.items():
        flags = ["--model_name_or_path", "x", "--use_cpu", *arguments]
        *_, glue, training = parse_args(run_glue.ARGUMENTS, flags)
        assert glue.task_name == [name]
        assert training.num_train_epochs == (10 if name in ("cola", "stsb", "mrpc", "rte", "wnli") else 4)


FINE_TUNING = {
    "run_glue.py": (run_glue.ARGUMENTS, ["--task_name", "cola"]),
    "run_classification.py": (run_classification.ARGUMENTS, ["--train_file", "x.txt"]),
}
STAGES: dict[str, Stage] = {}  # each once, however many tables share it; tests of run_lra.py read its own
for _name, _table in TABLES.items():
    for _stage in _table.stages:
        if _stage.script != "run_lra.py" and _stage not in STAGES.values():
            STAGES[f"{_name}, {_stage.folder}"] = _stage


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_rows_of_tables_parse_and_restate_nothing(stage, monkeypatch):
    monkeypatch.chdir(CONFIGURATION.parent)
    shared = stage.recipe()
    recipes = ["--recipe", *(str(CONFIGURATION / path) for path in stage.recipes), "--use_cpu"]
    for row in stage.rows().values():
        if stage.script == "run_forecasting.py":
            # Every row is a recipe of its own.
            parse_args(run_forecasting.ARGUMENTS, ["--use_cpu", "--task_name", "ili", *row])
            assert "--recipe" in row
            continue
        if stage.script in FINE_TUNING:
            arguments, required = FINE_TUNING[stage.script]
            for case in stage.cases:
                parse_args(arguments, [*recipes, *required, *case.flags, *row])
            given = parse_command(arguments, argv=[*required, *row]).given
        else:
            model, _, mlm, _ = parse_args(PRETRAINING, [*recipes, *row])
            build_config(model, 4096, mlm.max_seq_length, 0, 0)
            given = parse_command(PRETRAINING, argv=row).given
        assert not restated(given, shared)
        # Steps are the table's, where it has cases of several lengths; a rate of a row's own is one of those searched.
        assert not stage.learning_rates or "max_steps" not in given
        assert not stage.learning_rates or given.get("learning_rate", stage.learning_rates[0]) in stage.learning_rates
        # A recipe of fine-tuning is for anyone and says a rate; those of comparisons leave it to the table.
        left = {"max_steps"} if stage.script in FINE_TUNING else {"learning_rate", "max_steps"}
        assert not any(case.max_steps for case in stage.cases) or not left & {*shared}


def test_the_paper_s_recipes_of_long_range_arena():
    rows = {}
    for task in PUBLISHED_TASKS:
        file = CONFIGURATION / "lra" / f"{task}.yaml"
        model, arguments, training = parse_args(run_lra.ARGUMENTS, ["--recipe", str(file), "--use_cpu"])
        config = build_model(model, LRA_TASKS[task], 64, False, seed=0).config
        assert (arguments.task_name, config.hidden_size, config.num_hidden_layers) == (task, 64, 2)
        assert (config.num_attention_heads, config.intermediate_size, config.smoother_norm) == (2, 128, "batch_norm")
        assert (config.num_segments, config.num_landmark_tokens, config.num_landmark_features) == (8, 8, 8)
        dropouts = (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.smoother_dropout_prob)
        optimisation = (training.num_train_epochs, training.learning_rate, training.weight_decay)
        rows[task] = (*optimisation, training.global_batch_size, *dropouts)
    assert rows == {
        "listops": (5, 1e-4, 0, 32, 0, 0, 0),
        "text": (30, 1e-4, 1e-2, 32, 0.5, 0.1, 0.5),
        "retrieval": (15, 1e-4, 1e-2, 32, 0.1, 0.1, 0.1),
        "image": (60, 1e-3, 1e-2, 256, 0.1, 0.1, 0.5),
        "pathfinder": (100, 1e-4, 1e-2, 256, 0, 0, 0.5),
    }


def test_the_paper_s_best_values_of_long_range_arena():
    rows = {}
    for task in PUBLISHED_TASKS:
        file = CONFIGURATION / "lra" / "best" / f"{task}.yaml"
        model, arguments, training = parse_args(run_lra.ARGUMENTS, ["--recipe", str(file), "--use_cpu"])
        config = build_model(model, LRA_TASKS[task], arguments.length, False, seed=0).config
        counts = (config.num_segments, config.num_landmark_tokens, config.num_landmark_features)
        dropouts = (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.smoother_dropout_prob)
        optimisation = (training.num_train_epochs, training.learning_rate, training.weight_decay)
        rows[task] = (*optimisation, training.global_batch_size, counts, dropouts)
    assert rows == {
        "listops": (10, 1e-4, 1e-2, 32, (8, 8, 8), (0, 0, 0)),
        "text": (30, 1e-4, 1e-2, 32, (16, 32, 8), (0.5, 0.1, 0.5)),  # ours: the paper does not say all of its
        "retrieval": (15, 1e-4, 1e-2, 32, (8, 32, 32), (0.1, 0.1, 0.1)),
        "image": (60, 1e-3, 1e-2, 256, (8, 16, 16), (0.5, 0.1, 0.5)),
        "pathfinder": (100, 1e-4, 1e-2, 256, (8, 128, 32), (0.1, 0.1, 0.5)),
    }


def test_a_training_of_an_analysis_that_is_cut_short_is_seen():
    for task in LRA_TASKS:
        for name in (f"lra_{task}", f"lra_impact_{task}", f"lra_ablation_{task}"):
            assert TABLES[name].text.startswith("{0[num_train_epochs]} pass(es) over the training part"), name
    assert "deviations of 1.54 (SKTformer (paper)) and 1.83 (SKTformer, best (paper))" in TABLES["lra_image"].notes[0]


def test_every_recipe_of_fine_tuning_that_is_compared_is_another():
    """Of checkpoints that are pre-trained without dropout; each row changes something that the others have not."""
    first, second = TABLES["fine_tuning"].stages
    assert second.rows() == TABLES["fine_tuning_sst2"].stages[1].rows()
    for stage in TABLES["fine_tuning"].stages[1], TABLES["fine_tuning_sst2"].stages[1]:
        seen = set()
        for row, words in stage.rows().items():
            flags = {**stage.recipe(), **flag_values(words)}
            overrides = dict(
                pair.split("=") for pair in (flags.pop("config_overrides", None) or "").split(",") if pair
            )
            pretrained = dict(pair.split("=") for pair in first.recipe()["config_overrides"].split(","))
            pretrained["classifier_pooling"] = load_preset("sktformer-tiny-best").classifier_pooling
            given = {name: str(value) for name, value in flags.items() if name != "run_name"}
            changed = {name: value for name, value in overrides.items() if pretrained[name] != value}
            assert changed == overrides, row
            seen.add(tuple(sorted({**given, **overrides}.items())))
        assert len(seen) == len(stage.rows())


def test_rows_of_the_paper_s_analyses_have_its_figures():
    """Of Image, by the names of the rows; the ablation's are losses."""
    impact = {"r-8-s1-8-s2-8": 53.90, "r-1": 51.36, "r-16": 54.20, "r-32": 53.73, "r-64": 51.28, "s1-32": 54.92}
    impact |= {"s1-64": 51.22, "s1-128": 49.08, "s1-256": 46.24, "s2-1": 40.97, "s2-4": 46.74, "s2-16": 54.11}
    impact |= {"s2-32": 51.66}
    losses = {"whole": 0, "no-Fourier-convolution": 5.64, "no-convolution-stem": 1.76, "no-feature-attention": 10.63}
    losses |= {"no-token-attention": 2.64}
    ablation = {name: 53.90 - loss for name, loss in losses.items()}
    for name, figures in (("lra_impact_image", impact), ("lra_ablation_image", ablation)):
        (stage,) = TABLES[name].stages
        recipes = ["--recipe", *(str(CONFIGURATION / path) for path in stage.recipes), "--use_cpu"]
        unpublished = ["no-smoother"] if figures is ablation else []
        assert list(stage.rows()) == [*figures, *unpublished]
        for row, words in stage.rows().items():
            model, arguments, _ = parse_args(run_lra.ARGUMENTS, [*recipes, *words])
            config = build_model(model, LRA_TASKS["image"], arguments.length, False, seed=0).config
            setting = published_figures("image", config, 0)["setting"]
            assert setting == (None if row in unpublished else pytest.approx(figures[row] / 100)), row


def test_rows_of_a_second_stage_start_from_those_of_the_first():
    for task in LRA_TASKS:
        first, second = TABLES[f"lra_self_pretraining_{task}"].stages
        assert {start_of(row) for row in second.rows().values()} == {*first.rows(), ""}
        for name in first.rows():
            assert start_of(second.rows()[name]) == name
            assert start_of(second.rows()[f"{name}-scratch"]) == ""
    started_elsewhere = {"BERT-wide", "Longformer", "best-relu"}
    for name in ("authorship", "glue"):
        first, second = TABLES[name].stages[:2]
        assert {start_of(row) for row in second.rows().values()} == set(first.rows()) - started_elsewhere
    long = TABLES["authorship_long"].stages
    assert long[:3] == TABLES["authorship"].stages
    assert set(long[2].rows()) == set(long[1].rows())
    for earlier, stage in pairwise(long[1:]):
        for name, row in stage.rows().items():
            assert start_of(row) == name in earlier.rows()


def test_what_tables_share_is_run_once():
    pretraining, improvements = (TABLES[name].stages[0] for name in ("pretraining", "improvements"))
    alike = {field.name for field in fields(Stage)} - {"runs", "cases", "measures"}
    assert all(getattr(improvements, name) == getattr(pretraining, name) for name in alike)
    assert set(improvements.cases) < set(pretraining.cases)
    rows = improvements.rows()
    assert {n for n, row in pretraining.rows().items() if rows.get(n) == row} == {"SKTformer", "SKTformer-best"}


def test_longer_training_of_what_was_tried_shares_rows_at_their_rates():
    pretraining, longer = (TABLES[name].stages[0] for name in ("pretraining", "improvements_long"))
    alike = {field.name for field in fields(Stage)} - {"runs", "cases", "learning_rates"}
    assert all(getattr(longer, name) == getattr(pretraining, name) for name in alike)
    assert set(longer.cases) < set(pretraining.cases)
    searches = json.loads((RESULTS / "pretraining.json").read_text(encoding="utf-8"))["searches"]
    shared = {name for name, row in longer.rows().items() if pretraining.rows().get(name) == row}
    assert shared == {"SKTformer-best", "Nystromformer"}
    for name in shared:
        tried = {float(rate): loss for rate, loss in searches[f"{name}-2500"].items()}
        assert longer.learning_rates == (min(tried, key=tried.__getitem__),)


def test_activations_differ_in_nothing_else_on_glue():
    glue, activation = (TABLES[name].stages for name in ("glue", "glue_activation"))
    assert activation == (glue[0], replace(glue[1], runs=activation[1].runs))
    rows, started = activation[1].rows(), activation[0].rows()
    assert rows.keys() == {"SKTformer-best", "best-relu"}
    assert rows["SKTformer-best"] == glue[1].rows()["SKTformer-best"]
    assert all(flag_values(row) == {"run_name": name, "model_name_or_path": name} for name, row in rows.items())
    ours, relu = (flag_values(started[name]) for name in ("SKTformer-best", "best-relu"))
    assert relu == ours | {"run_name": "best-relu", "config_overrides": "smoother_activation=relu"}


@pytest.mark.parametrize("size", ["mini", "small", "base"])
def test_the_frontier_of_larger_models_differs_by_their_sizes(size):
    frontier, larger = (TABLES[name].stages[0] for name in ("frontier", f"frontier_{size}"))
    preset = f"sktformer-{size}"
    assert larger.recipe() == frontier.recipe() | {"config_name": preset}
    assert larger.folder != frontier.folder  # where runs of one name are the same
    assert larger.rows()["SKTformer-best"] == ("--run_name", "SKTformer-best", "--config_name", f"{preset}-best")
    assert {case.name for case in larger.cases} < {case.name for case in frontier.cases}


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith(("frontier", "improvements_books"))])
def test_tables_of_the_frontier_say_how_many_tokens_a_step_has(name):
    (stage,) = TABLES[name].stages
    for flags in (flag_values(case.flags) for case in stage.cases):
        tokens = int(flags["max_seq_length"] or 0) * int(flags["global_batch_size"] or 0)
        assert f" {tokens:,} tokens a step" in TABLES[name].text


def test_what_was_tried_on_books_shares_rows_of_the_frontier_at_its_rates():
    frontier, improvements = (TABLES[name].stages[0] for name in ("frontier", "improvements_books"))
    alike = {field.name for field in fields(Stage)} - {"runs", "cases", "measures", "learning_rates", "rate_case"}
    assert all(getattr(improvements, name) == getattr(frontier, name) for name in alike)
    assert set(improvements.cases) < set(frontier.cases)
    (longer,) = TABLES["improvements_books_long"].stages
    (case,) = longer.cases
    assert replace(longer, cases=improvements.cases, only=None) == improvements
    assert replace(case, minutes=improvements.cases[0].minutes) == improvements.cases[0]
    assert [frontier.choosing_case(case) for case in improvements.cases] == list(improvements.cases)
    rows = improvements.rows()
    shared = {name for name, row in frontier.rows().items() if rows.get(name) == row}
    assert shared == {"SKTformer", "SKTformer-best"}
    searches = json.loads((RESULTS / "frontier.json").read_text(encoding="utf-8"))["searches"]
    for name in shared:
        tried = {float(rate): loss for rate, loss in searches[f"{name}-512-3min"].items()}
        assert improvements.learning_rates == (min(tried, key=tried.__getitem__),)


def test_glue_starts_from_the_rows_of_the_pretraining_table_at_their_rates():
    compared, started = (TABLES[name].stages[0] for name in ("pretraining", "glue"))
    results = json.loads((RESULTS / "pretraining.json").read_text(encoding="utf-8"))
    rows = compared.rows()
    for name in started.rows().keys() - {"best-relu"}:
        row = started.rows()[name]
        tried = {float(rate): loss for rate, loss in results["searches"][f"{name}-500"].items()}
        rate = flag_values(row)["learning_rate"]
        assert float(str(rate)) == min(tried, key=tried.__getitem__)
        assert row == (*rows[name], "--learning_rate", rate)
    assert started.rows().keys() - {"best-relu"} == rows.keys() - {"BERT-wide"}


def test_rows_of_the_pretraining_table_are_alike():
    configs = {}
    for name, row in TABLES["pretraining"].stages[0].rows().items():
        configs[name] = build_config(parse_args([ModelArguments, RunArguments], row)[0], 4096, 128, 0, 0)
    sizes = {name: AutoModelForMaskedLM.from_config(config).num_parameters() for name, config in configs.items()}
    assert list(sizes) == ["SKTformer", "SKTformer-best", "BERT", "BERT-wide", "FNet", "Nystromformer", "ModernBERT"]
    assert abs(sizes["BERT-wide"] / sizes["SKTformer"] - 1) < 0.01
    assert max(sizes.values()) == sizes["SKTformer"]
    assert min(sizes.values()) > 0.7 * sizes["SKTformer"]
    for name, config in configs.items():
        assert (config.num_hidden_layers, config.hidden_size) == (2, 154 if name == "BERT-wide" else 128)
    assert configs["ModernBERT"].layer_types == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(("argv", "steps"), [([], 2000), (["--seed", "4"], 1_000_000)])
def test_the_quick_start_is_for_a_command_without_arguments(monkeypatch, argv, steps):
    def prepare(training, given):
        assert training.max_steps == steps
        raise InterruptedError

    monkeypatch.setattr(sys, "argv", ["pretrain_mlm.py", *argv])
    monkeypatch.setattr(pretrain_mlm, "prepare", prepare)
    with pytest.raises(InterruptedError):
        pretrain_mlm.main()
