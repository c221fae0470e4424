"""The engine of fine-tuning on a task that it has never heard of: sequences of bytes without a tokenizer."""

import dataclasses
import json
import logging
import math
import random
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from transformers import BertConfig, BertForSequenceClassification, ModernBertConfig, ModernBertForMaskedLM

from experiments import fine_tuning, trials
from experiments.arguments import UserError
from experiments.checkpoints import CheckpointArguments, start_classifier
from experiments.fine_tuning import (
    FineTuningTrainer,
    Job,
    fingerprint_rows,
    predict,
    run_job,
)
from experiments.heads import calibrate_head
from experiments.results import write_json
from experiments.run_folder import METRICS_FILE, find_checkpoint
from experiments.trials import (
    FineTuningArguments,
    best_trial,
    check_job,
    plan_trials,
    read_metrics,
    summarise_seeds,
    summarise_trials,
)
from modeling_sktformer import SKTformerForSequenceClassification
from support.builders import make_config
from support.glue_rows import files_below
from support.steps import note_steps


def make_examples(count, seed):
    """Sequences whose first byte tells their class."""
    choose = random.Random(seed)
    rows = [[choose.randrange(1, 30) for _ in range(choose.randint(4, 12))] for _ in range(count)]
    return Dataset.from_dict({"input_ids": rows, "label": [row[0] % 3 for row in rows]})


def pad(examples):
    width = max(len(example["input_ids"]) for example in examples)
    rows = [example["input_ids"] + [0] * (width - len(example["input_ids"])) for example in examples]
    batch = {"input_ids": torch.tensor(rows), "attention_mask": (torch.tensor(rows) > 0).long()}
    if "label" in examples[0]:
        batch["labels"] = torch.tensor([example["label"] for example in examples])
    return batch


def measure(prediction):
    accuracy = float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
    return {"accuracy": accuracy, "score": accuracy}


def write_card(folder, metrics, arguments):
    (folder / "README.md").write_text(f"{metrics['score']} {arguments}")


def make_job(splits=None, **values):
    splits = splits or {"train": make_examples(24, 1), "validation": make_examples(40, 2)}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "smoother_dropout_prob"), 0.1)
    return Job(
        name="bytes",
        title="Bytes (accuracy)",
        build_model=lambda: SKTformerForSequenceClassification(make_config(**dropout)),
        splits=splits,
        collator=pad,
        processing_class=None,
        compute_metrics=measure,
        shown=("accuracy",),
        identity={"data": fingerprint_rows(*splits.values()), **values},
        facts={"started_from": "nothing", "is_partial": False},
        write_card=write_card,
    )


def make_arguments(folder, **values):
    defaults: dict[str, Any] = {
        **{"output_dir": str(folder), "use_cpu": True, "disable_tqdm": True, "report_to": [], "do_train": True},
        **{"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2},
        **{"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "seed": 3},
        "logging_nan_inf_filter": False,  # as prepare() has it
    }
    return FineTuningArguments(**(defaults | values))


def run(folder, job=None, **values):
    """What a script does: check, and run what is not finished."""
    job, training = job or make_job(), make_arguments(folder, **values)
    if check_job(folder, job.identity, training):
        return None
    return run_job(job, folder, training, {"learning_rate": 1e-2, "seeds": training.seeds})


class Stopped(Exception):
    """Raised where a run is cut short."""


@pytest.fixture
def cut(monkeypatch):
    """Cuts a run short before a step of a seed."""

    def at(step, seed=3):
        training_step = FineTuningTrainer.training_step

        def stop(trainer, *args, **kwargs):
            if (trainer.args.seed, trainer.state.global_step) == (seed, step):
                raise Stopped
            return training_step(trainer, *args, **kwargs)

        monkeypatch.setattr(FineTuningTrainer, "training_step", stop)

    return at


@pytest.fixture
def steps(monkeypatch):
    """The steps that are taken, by seed."""
    return note_steps(monkeypatch, FineTuningTrainer)


def losses(metrics):
    return [entry["loss"] for entry in metrics["history"] if "loss" in entry]


def weights(folder):
    return SKTformerForSequenceClassification.from_pretrained(folder).state_dict()


def assert_same_weights(first, second):
    expected = weights(second)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(first).items())


def test_the_engine_knows_no_task():
    files = (fine_tuning.__file__, trials.__file__)
    text = "".join(Path(file).read_text(encoding="utf-8") for file in files).lower()
    assert not [word for word in ("glue", "experiments.text", "tokenizer=", "sentence") if word in text]


def test_a_trial_leaves_all_that_others_look_for(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    metrics = run(tmp_path / "run", eval_strategy="steps", eval_steps=2)
    folder = tmp_path / "run"
    assert metrics == read_metrics(folder)
    assert metrics["score"] == metrics["eval_accuracy"] == metrics["eval_score"]
    assert (metrics["job"], metrics["name"], metrics["seed"]) == ("bytes", "seed 3", 3)
    assert (metrics["train_samples"], metrics["eval_samples"], metrics["global_batch_size"]) == (24, 40, 4)
    assert metrics["started_from"] == "nothing"
    assert metrics["parameters"] == make_job().build_model().num_parameters()
    everything, train, evaluation = (
        json.loads((folder / f"{name}_results.json").read_text()) for name in ("all", "train", "eval")
    )
    assert everything == train | evaluation
    assert everything.items() <= metrics.items()
    assert {"train_loss", "train_runtime", "epoch"} <= train.keys()
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"]) == (6, 6)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "README.md").read_text().startswith(str(metrics["score"]))
    assert not list(folder.glob("checkpoint-*"))
    assert str(tmp_path) not in (folder / "metrics.json").read_text()
    # No evaluation is made twice: after two, four and six steps.
    assert len([entry for entry in metrics["history"] if "eval_loss" in entry]) == 3
    # What is about to run is said before it runs.
    announced = [line for line in caplog.messages if line.startswith(("Model:", "Data:", "Steps:"))]
    assert announced[0].endswith(f"sktformer, {metrics['parameters']:,} parameters, from nothing")
    assert announced[1].endswith("Bytes (accuracy): train 24, validation 40 examples")
    assert "6 of 4 sequences" in announced[2]


def test_every_other_part_is_evaluated_too(tmp_path):
    splits = {"train": make_examples(24, 1), "validation_near": make_examples(9, 2), "test": make_examples(7, 3)}
    metrics = run(tmp_path / "run", make_job(splits))
    assert metrics["score"] == metrics["eval_accuracy"]
    assert (metrics["eval_samples"], metrics["eval_test_samples"]) == (9, 7)
    assert 0 <= metrics["eval_test_accuracy"] <= 1
    del splits["train"]
    evaluated = run(tmp_path / "evaluation", make_job(splits), do_train=False)
    assert not {"train_loss", "learning_rate", "train_samples"} & evaluated.keys()
    assert not list((tmp_path / "evaluation").glob("*.safetensors"))
    # How it would have been trained does not matter to what is not trained.
    assert run(tmp_path / "evaluation", make_job(splits), do_train=False, learning_rate=1e-3, max_steps=2) is None


@pytest.mark.parametrize(
    ("typed", "instead"),
    [("--learning_rate", "--search_learning_rates"), ("--gradient_accumulation_steps", "--search_batch_sizes")],
)
def test_what_a_search_varies_is_not_typed(tmp_path, monkeypatch, typed, instead):
    arguments = make_arguments(tmp_path, search=True, max_steps=-1)
    monkeypatch.setattr(sys, "argv", ["script.py", "--search", typed, "1"])
    with pytest.raises(UserError, match=f"--search tries values of its own for {typed}; give {instead} instead"):
        plan_trials(tmp_path, arguments, {})


def test_the_paper_s_grid_is_the_default(tmp_path):
    trials = plan_trials(tmp_path, make_arguments(tmp_path, search=True, max_steps=-1), {})
    assert {tuple(trial.values.values())[1:] for trial in trials} == {
        (epochs, rate, batch) for epochs in (4, 10, 20) for rate in (5e-5, 1e-4) for batch in (16, 32)
    }
    assert len({trial.folder for trial in trials}) == len(trials) == 12
    for trial in trials:
        args = trial.args
        assert (args.num_train_epochs, args.learning_rate) == tuple(trial.values.values())[1:3]
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == trial.values["global_batch_size"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seeds": 0}, "--seeds is 0"),
        ({"seeds": 2, "search": True}, "--search .*--seeds"),
        ({"search": True}, "which --max_steps overrides"),
        ({"search": True, "max_steps": -1, "search_epochs": []}, "at least one value"),
        ({"search": True, "max_steps": -1, "search_epochs": [0, 1]}, "values of --search_.* must be more than 0"),
        (
            {"search": True, "max_steps": -1, "search_learning_rates": [-1]},
            "values of --search_.* must be more than 0",
        ),
        (
            {"early_stopping_patience": 0, "eval_strategy": "steps", "eval_steps": 9, "save_steps": 9},
            "--early_stopping_patience is 0",
        ),
        ({"early_stopping_patience": 2}, "add --eval_strategy"),
        ({"search_epochs": [1]}, "--search_batch_sizes are for --search; add it"),
        ({"seed": 2**32 - 2, "seeds": 3}, "--seeds 3 from --seed 4294967294 on go beyond 4294967295"),
        (
            {"seeds": 2, "metric_for_best_model": "loss"},
            "--metric_for_best_model loss chooses among .* of one training",
        ),
        ({"seeds": 2, "push_to_hub": True}, "--push_to_hub pushes one model"),
        ({"prediction_loss_only": True}, "need all predictions at once"),
    ],
)
def test_arguments_that_cannot_be_meant_are_explained(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        make_arguments(tmp_path, **values)


def test_several_trials_are_of_training(tmp_path):
    with pytest.raises(UserError, match="--search and --seeds are for training"):
        run(tmp_path / "run", do_train=False, seeds=2)
    with pytest.raises(UserError, match="--load_best_model_at_end needs evaluations"):
        run(tmp_path / "run", load_best_model_at_end=True, save_strategy="no")
    with pytest.raises(UserError, match="--global_batch_size 6 is not a multiple of 4"):
        run(tmp_path / "run", search=True, max_steps=-1, search_batch_sizes=[4, 6])
    assert not (tmp_path / "run").exists()


def test_summaries_are_of_all_trials(tmp_path):
    common = {"job": "rte", "is_partial": False, "started_from": "x", "model_type": "y", "parameters": 1}
    results = [
        {
            **{"name": f"seed {n}", "score": score, "seconds": 2.0, "seed": n, "history": [], "eval_loss": 0.1},
            **{"environment": {}, **common},
        }
        for n, score in enumerate((0.5, 0.9, 0.6))
    ]
    seeds = summarise_trials(results, False, {"is_partial": False})
    assert (seeds["score"], seeds["best"], seeds["kind"], seeds["is_partial"]) == (0.6, "seed 1", "seeds", False)
    assert seeds["trials"][2] == {"name": "seed 2", "score": 0.6, "seconds": 2.0, "seed": 2, "eval_loss": 0.1}
    for n, score in enumerate(seeds["scores"]):
        write_json(tmp_path / str(n) / METRICS_FILE, {"eval_accuracy": score})
    write_json(tmp_path / METRICS_FILE, {"trials": [{"folder": str(n)} for n in range(3)]})
    spread = statistics.stdev(seeds["scores"])
    rows = {"median of 3 seeds": {"accuracy": 0.6}, "standard deviation of 3 seeds": {"accuracy": spread}}
    assert summarise_seeds(tmp_path, ["accuracy"]) == rows
    search = summarise_trials(results, True, {"of a later version": 1})
    assert "of a later version" not in search
    assert (search["score"], search["scores"], "std" in search) == (0.9, [0.5, 0.9, 0.6], False)


def test_seeds_may_become_more(tmp_path, steps):
    folder = tmp_path / "run"
    run(folder, seeds=2)
    before = {name: files_below(folder / name) for name in ("seed-3", "seed-4")}
    summary = run(folder, seeds=4)
    assert {seed for seed, _ in steps} == {3, 4, 5, 6}
    assert len(steps) == 4 * 6
    assert before == {name: files_below(folder / name) for name in before}
    scores = [read_metrics(folder / f"seed-{seed}")["score"] for seed in (3, 4, 5, 6)]
    assert summary["scores"] == scores
    assert summary["score"] == statistics.median(scores)
    assert summary["std"] == pytest.approx(statistics.stdev(scores))
    assert (summary["kind"], summary["is_partial"]) == ("seeds", False)
    assert best_trial(folder) == folder / f"seed-{3 + scores.index(max(scores))}"
    assert "seeds: 4" in (folder / "arguments.yaml").read_text()
    assert "seeds" not in (folder / "seed-5" / "arguments.yaml").read_text()
    assert run(folder, seeds=4) is None
    # Fewer of them are a summary of fewer, and no training.
    assert run(folder, seeds=3)["scores"] == scores[:3]
    assert len(steps) == 4 * 6


def test_one_trial_is_not_several(tmp_path):
    folder = tmp_path / "run"
    run(folder)
    before = files_below(folder)
    with pytest.raises(UserError, match=r"another run \(seed: 3 there, none here; trials: none there, seeds here\)"):
        run(folder, seeds=2)
    assert files_below(folder) == before
    assert len(run(folder, seeds=2, overwrite=True)["trials"]) == 2
    assert not list(folder.glob("*.safetensors"))
    with pytest.raises(UserError, match="trials: seeds there"):
        run(folder)
    assert run(folder, overwrite=True)["name"] == "seed 3"
    assert not list(folder.glob("seed-*"))


def test_an_interrupted_command_goes_on_with_overwrite_too(tmp_path, monkeypatch):
    folder, run_trial = tmp_path / "run", fine_tuning.run_trial

    def run_first(job, trial, *rest):
        if trial.args.seed > 3:
            raise Stopped
        run_trial(job, trial, *rest)

    run(folder, seeds=2)
    monkeypatch.setattr(fine_tuning, "run_trial", run_first)
    with pytest.raises(Stopped):
        run(folder, seeds=2, overwrite=True)
    monkeypatch.undo()
    finished = files_below(folder / "seed-3")
    shutil.copytree(folder, tmp_path / "longer")
    assert len(run(folder, seeds=2, overwrite=True)["trials"]) == 2
    assert files_below(folder / "seed-3") == finished
    # One that was finished after fewer steps than the others shall have is trained anew.
    run(tmp_path / "longer", seeds=2, max_steps=8, overwrite=True)
    trials = [read_metrics(tmp_path / "longer" / f"seed-{seed}") for seed in (3, 4)]
    assert [trial["history"][-1]["step"] for trial in trials] == [8, 8]


def test_large_seeds_are_told_apart(tmp_path):
    trials = run(tmp_path / "run", seed=1_000_000, seeds=2)["trials"]
    assert [trial["name"] for trial in trials] == ["seed 1000000", "seed 1000001"]


def test_a_search_keeps_all_results_and_the_best_weights(tmp_path):
    folder = tmp_path / "run"
    grid = {"search_epochs": [1, 2], "search_learning_rates": [1e-4, 1e-1], "search_batch_sizes": [8]}
    metrics = run(folder, search=True, max_steps=-1, **grid)
    assert [(t["num_train_epochs"], t["learning_rate"], t["global_batch_size"]) for t in metrics["trials"]] == [
        *((1, 1e-4, 8), (1, 1e-1, 8), (2, 1e-4, 8), (2, 1e-1, 8)),
    ]
    assert metrics["score"] == max(metrics["scores"]) > min(metrics["scores"])
    assert list(folder.rglob("*.safetensors")) == [best_trial(folder) / "model.safetensors"]
    recorded = (best_trial(folder) / "arguments.yaml").read_text()
    assert "global_batch_size: 8\n" in recorded
    assert "search" not in recorded
    # A larger grid tries what it has more.
    before = files_below(best_trial(folder))
    more = run(folder, search=True, max_steps=-1, **{**grid, "search_epochs": [1, 2, 3]})
    assert more["scores"][:4] == metrics["scores"]
    assert len(more["scores"]) == 6
    assert {path: time for path, time in before.items() if path.suffix != ".safetensors"}.items() <= files_below(
        folder
    ).items()


def test_a_smaller_grid_has_the_weights_of_its_own_best(tmp_path, steps):
    folder, grid = tmp_path / "run", {"search": True, "max_steps": -1, "search_epochs": [1], "search_batch_sizes": [8]}
    larger = run(folder, search_learning_rates=[1e-4, 1e-1], **grid)
    rates = [trial["learning_rate"] for trial in larger["trials"]]
    worse = rates[larger["scores"].index(min(larger["scores"]))]
    before = len(steps)
    smaller = run(folder, search_learning_rates=[worse], **grid)
    assert len(steps) == before + 6  # its weights had been deleted
    assert smaller["scores"] == [min(larger["scores"])]
    assert weights(best_trial(folder))
    assert run(folder, search_learning_rates=[worse], **grid) is None
    # The larger one's best is there as well.
    assert run(folder, search_learning_rates=rates, **grid)["scores"] == larger["scores"]
    assert len(steps) == before + 6
    assert weights(best_trial(folder))


def test_a_best_trial_that_comes_out_worse_when_trained_again_leaves_the_best_with_weights(tmp_path):
    folder, grid = tmp_path / "run", {"search": True, "max_steps": -1, "search_epochs": [1], "search_batch_sizes": [8]}
    run(folder, search_learning_rates=[1e-4, 1e-1], **grid)
    for score, trial in zip((3.0, 2.0), trials.trial_folders(folder), strict=True):
        (trial / "model.safetensors").unlink(missing_ok=True)
        write_json(trial / METRICS_FILE, read_metrics(trial) | {"score": score})
    assert max(run(folder, search_learning_rates=[1e-4, 1e-1], **grid)["scores"]) <= 1
    assert list(folder.rglob("*.safetensors")) == [best_trial(folder) / "model.safetensors"]


def test_a_search_may_have_a_grid_of_one_cell(tmp_path):
    grid = {"search_epochs": [1], "search_learning_rates": [1e-1], "search_batch_sizes": [8]}
    metrics = run(tmp_path / "run", search=True, max_steps=-1, **grid)
    assert len(metrics["scores"]) == 1
    before = files_below(best_trial(tmp_path / "run"))
    assert run(tmp_path / "run", search=True, max_steps=-1, **grid) is None  # finished
    assert files_below(best_trial(tmp_path / "run")) == before


def test_a_run_that_is_cut_short_ends_as_if_it_had_not_been(tmp_path, monkeypatch, cut):
    whole = run(tmp_path / "whole", seeds=2)
    cut(3, seed=4)
    with pytest.raises(Stopped):
        run(tmp_path / "run", seeds=2)
    monkeypatch.undo()
    folder = tmp_path / "run"
    assert find_checkpoint(folder / "seed-4") == str(folder / "seed-4" / "checkpoint-2")
    assert not (folder / "metrics.json").exists()
    before = files_below(folder / "seed-3")
    taken = note_steps(monkeypatch, FineTuningTrainer)
    resumed = run(folder, seeds=2)
    assert taken == [(4, 2), (4, 3), (4, 4), (4, 5)]
    assert files_below(folder / "seed-3") == before
    assert resumed["scores"] == whole["scores"]
    assert losses(read_metrics(folder / "seed-4")) == losses(read_metrics(tmp_path / "whole" / "seed-4"))
    assert_same_weights(folder / "seed-4", tmp_path / "whole" / "seed-4")
    assert not list(folder.rglob("checkpoint-*"))


@pytest.mark.parametrize("max_steps", [5, 6], ids=["within an epoch", "at its end"])
def test_nothing_is_trained_behind_the_last_step(tmp_path, monkeypatch, max_steps):
    values = {"max_steps": max_steps, "save_steps": 1}
    run(tmp_path / "whole", **values)
    with monkeypatch.context() as context:
        context.setattr(FineTuningTrainer, "save_model", lambda trainer, *args, **kwargs: 1 / 0)
        context.setattr(FineTuningTrainer, "evaluate", lambda *args, **kwargs: 1 / 0)
        context.setattr(FineTuningTrainer, "_save_checkpoint", save_whole_checkpoint)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "run", **values)
    assert find_checkpoint(tmp_path / "run") == str(tmp_path / "run" / f"checkpoint-{max_steps}")
    resumed = run(tmp_path / "run", **values)
    assert len(losses(resumed)) == max_steps
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def save_whole_checkpoint(trainer, model, trial):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(FineTuningTrainer, "save_model", super(FineTuningTrainer, trainer).save_model.__func__)
        super(FineTuningTrainer, trainer)._save_checkpoint(model, trial)


@pytest.mark.parametrize(
    "changes",
    [
        {"logging_steps": 2},
        {"save_total_limit": 3},
        {"save_steps": 3},
        {"log_level": "info"},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"activation_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 3},
        {"dataloader_num_workers": 1},
        {"run_name": "other"},
    ],
    ids=str,
)
def test_what_decides_nothing_may_change_on_the_way(tmp_path, monkeypatch, cut, changes):
    cut(3)
    with pytest.raises(Stopped):
        run(tmp_path / "run")
    monkeypatch.undo()
    taken = note_steps(monkeypatch, FineTuningTrainer)
    metrics = run(tmp_path / "run", **changes)
    assert taken[0] == (3, 2)
    assert metrics["global_batch_size"] == 4
    assert math.isfinite(metrics["eval_loss"])


@pytest.mark.parametrize(
    ("changes", "job", "message"),
    [
        ({"learning_rate": 1e-3}, {}, r"learning_rate: 0\.01 there, 0\.001 here"),
        ({"gradient_accumulation_steps": 2}, {}, "global_batch_size: 4 there, 8 here"),
        ({"max_steps": 5}, {}, "max_steps: 6 there, max_steps: 5 here, and no run can be shortened"),
        ({}, {"length": 7}, "length: none there, 7 here"),
        ({}, {"splits": {"train": make_examples(24, 8), "validation": make_examples(40, 2)}}, "data: "),
    ],
)
def test_what_decides_the_result_is_another_run(tmp_path, monkeypatch, cut, changes, job, message):
    cut(3)
    with pytest.raises(Stopped):
        run(tmp_path / "run")
    monkeypatch.undo()
    before = files_below(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", make_job(**job), **changes)
    assert files_below(tmp_path / "run") == before


def test_a_run_may_be_made_longer_until_it_is_finished(tmp_path, monkeypatch, cut):
    cut(3)
    with pytest.raises(Stopped):
        run(tmp_path / "run")
    monkeypatch.undo()
    taken = note_steps(monkeypatch, FineTuningTrainer)
    assert len(losses(run(tmp_path / "run", max_steps=8))) == 8
    assert taken[0] == (3, 2)
    before = files_below(tmp_path / "run")
    with pytest.raises(UserError, match=r"state of its optimizer was deleted.*--overwrite") as error:
        run(tmp_path / "run", max_steps=10)
    assert str(tmp_path / "run") in str(error.value)
    assert files_below(tmp_path / "run") == before
    assert run(tmp_path / "run", max_steps=8) is None
    assert len(losses(run(tmp_path / "run", max_steps=10, overwrite=True))) == 10


def test_a_checkpoint_that_the_disk_could_not_hold_is_passed_over(tmp_path, monkeypatch, cut):
    whole = run(tmp_path / "whole")
    cut(5)
    with pytest.raises(Stopped):
        run(tmp_path / "run")
    monkeypatch.undo()
    state = tmp_path / "run" / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    taken = note_steps(monkeypatch, FineTuningTrainer)
    assert losses(run(tmp_path / "run")) == losses(whole)
    assert taken[0] == (3, 2)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_two_processes_do_not_share_a_folder(tmp_path):
    for folder, values in ((tmp_path / "one", {}), (tmp_path / "several", {"seeds": 2})):
        folder.mkdir()
        with FileLock(folder / ".lock"), pytest.raises(UserError, match="Another process is at work in"):
            run(folder, **values)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_evaluation_does_not_move_the_generator_of_training(tmp_path):
    without = run(tmp_path / "without")
    often = run(tmp_path / "often", eval_strategy="steps", eval_steps=1)
    assert losses(often) == losses(without)
    assert_same_weights(tmp_path / "often", tmp_path / "without")


BEST = {
    **{"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 1, "max_steps": 12},
    **{"learning_rate": 0.05, "lr_scheduler_type": "constant"},
}


def evaluations(metrics):
    return {entry["step"]: entry["eval_score"] for entry in metrics["history"] if "eval_score" in entry}


def test_the_best_model_on_the_evaluation_part_is_kept(tmp_path):
    metrics = run(tmp_path / "best", **BEST, load_best_model_at_end=True)
    scores = evaluations(metrics)
    best = max(scores.values())
    assert (metrics["score"], metrics["best_step"]) == (best, min(n for n in scores if scores[n] == best))
    assert len(set(scores.values())) > 1
    assert scores[12] < best
    model = SKTformerForSequenceClassification.from_pretrained(tmp_path / "best")
    examples = make_job().splits["validation"]
    logits = predict(model, examples, pad, make_arguments(tmp_path / "best"), tmp_path / "predictions")
    assert float(np.mean(logits.argmax(-1) == np.array(examples["label"]))) == best
    assert str(tmp_path) not in (tmp_path / "best" / "metrics.json").read_text()
    # Any other metric may say what is best.
    metrics = run(tmp_path / "loss", **BEST, load_best_model_at_end=True, metric_for_best_model="eval_loss")
    values = [entry["eval_loss"] for entry in metrics["history"] if "eval_loss" in entry][:12]
    assert metrics["eval_loss"] == min(values)


def test_training_stops_early_and_goes_on_counting(tmp_path, monkeypatch, cut):
    values = BEST | {"early_stopping_patience": 3, "max_steps": 40, "save_total_limit": None}
    whole = run(tmp_path / "whole", **values)
    taken, best = len(losses(whole)), whole["best_step"]
    assert whole["steps"] == taken == best + 3 < 40
    # Cut short while it counts; and then again when it has counted, in a folder that has moved.
    cut(taken - 1)
    with pytest.raises(Stopped):
        run(tmp_path / "run", **values)
    monkeypatch.undo()
    with monkeypatch.context() as context:
        context.setattr(FineTuningTrainer, "save_state", lambda trainer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "run", **values)
    (tmp_path / "run").rename(tmp_path / "moved")
    resumed = run(tmp_path / "moved", **values)
    assert (len(losses(resumed)), resumed["best_step"], resumed["score"]) == (taken, best, whole["score"])
    assert resumed["steps"] == taken
    assert_same_weights(tmp_path / "moved", tmp_path / "whole")


def test_training_that_diverges_leaves_the_trials_before_it(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    training_step = FineTuningTrainer.training_step

    def diverge(trainer, *args, **kwargs):
        return training_step(trainer, *args, **kwargs) * (math.nan if trainer.args.seed == 4 else 1)

    with monkeypatch.context() as context:
        context.setattr(FineTuningTrainer, "training_step", diverge)
        with pytest.raises(UserError, match="diverged: loss is nan at step 1"):
            run(folder, seeds=2)
        with pytest.raises(UserError, match=r"diverged: .* lower --learning_rate \("):
            run(tmp_path / "alone", seed=4)
        with pytest.raises(UserError, match=r"diverged: .* lower --search_learning_rates \("):
            run(tmp_path / "alone", seed=4, search=True, max_steps=-1, search_learning_rates=[0.01])
    assert not (tmp_path / "alone").exists()
    before = files_below(folder / "seed-3")
    assert (folder / "seed-3" / "model.safetensors").is_file()
    assert not (folder / "seed-4").exists()
    assert not (folder / "metrics.json").exists()
    assert len(run(folder, seeds=2)["scores"]) == 2
    assert files_below(folder / "seed-3") == before


def test_fsdp_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="FSDP is for pre-training alone; fine-tune without --fsdp"):
        make_arguments(tmp_path, fsdp=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP is for pre-training alone"):
        make_arguments(tmp_path)


def test_deepspeed_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    """As `accelerate launch --use_deepspeed` asks for it; the package need not be installed."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr("accelerate.utils.DeepSpeedPlugin", MagicMock())
    with pytest.raises(UserError, match="DeepSpeed is for pre-training alone; fine-tune without"):
        make_arguments(tmp_path)


def test_every_trial_is_a_run_in_trackers(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(fine_tuning, "finish_trackers", lambda args: ended.append(args.run_name))
    run(tmp_path / "run", seeds=2, run_name="mine")
    run(tmp_path / "one")
    assert ended == ["mine bytes seed 3", "mine bytes seed 4", "bytes seed 3"]


def test_a_new_head_begins_where_texts_differ(tmp_path, monkeypatch):
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_labels": 3}
    bert: Any = BertForSequenceClassification(BertConfig(num_attention_heads=2, **sizes))
    ours, examples = make_job().build_model(), make_examples(64, 1)
    for model, layer in ((ours, ours.classifier.pooling), (bert, bert.bert.pooler.dense)):
        outputs: list[torch.Tensor] = []
        calibrate_head(model, examples, pad, torch.device("cpu"))
        layer.register_forward_hook(lambda layer, inputs, output, outputs=outputs: outputs.append(output))
        model.eval()(**pad(list(examples)))
        assert torch.allclose(outputs[0].mean(dim=0), torch.zeros(1), atol=1e-4)
        assert torch.allclose(outputs[0].std(dim=0, correction=0), torch.ones(1), atol=1e-3)
    job, seen = make_job(), []

    def note(model, examples, *rest):
        seen.append(examples)
        calibrate_head(model, examples, *rest)

    monkeypatch.setattr(fine_tuning, "calibrate_head", note)
    run(tmp_path / "run", job, calibrate_head=True, learning_rate=0.0)
    assert seen == [job.splits["train"]]
    assert weights(tmp_path / "run")["classifier.pooling.scale"].max() < 1
    with pytest.raises(UserError, match="calibrate_head: True there, none here"):
        run(tmp_path / "run", learning_rate=0.0)


def test_a_head_is_calibrated_by_examples_from_all_over():
    seen: list[int] = []
    examples = Dataset.from_dict({"input_ids": [[1, 2]] * 300, "number": list(range(300))})

    def note(rows):
        seen.extend(row["number"] for row in rows)
        return pad(rows)

    calibrate_head(make_job().build_model(), examples, note, torch.device("cpu"))
    assert seen == list(range(0, 300, 2))


def test_a_layer_that_a_checkpoint_lends_a_head_is_scaled(tmp_path):
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 64}
    config = ModernBertConfig(num_attention_heads=2, pad_token_id=0, **sizes)
    ModernBertForMaskedLM(config).save_pretrained(tmp_path / "guesses")
    checkpoint = CheckpointArguments(model_name_or_path=str(tmp_path / "guesses"))
    model: Any = start_classifier(checkpoint, ["a", "b", "c"], "score")
    assert model.has_new_head
    examples, outputs = make_examples(64, 1), []
    calibrate_head(model, examples, pad, torch.device("cpu"))
    model.head.dense.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    model.eval()(**pad(list(examples)))
    assert model.head.dense.bias is None  # by which a mean could be taken out
    assert torch.allclose(outputs[0].std(dim=0, correction=0), torch.ones(1), atol=1e-3)


def test_a_head_s_treatment_is_nothing_to_an_evaluation(tmp_path):
    treatment = {"calibrate_head": True, "head_learning_rate": 0.1, "layer_decay": 0.5}
    assert make_arguments(tmp_path, do_train=False, **treatment).head_identity() == {}
    assert make_arguments(tmp_path, **treatment).head_identity() == treatment


def test_a_trial_of_a_search_records_what_gives_it_again(tmp_path):
    grid = {"search_epochs": [1], "search_learning_rates": [1e-2], "search_batch_sizes": [8]}
    training = make_arguments(tmp_path, search=True, max_steps=-1, **grid)
    run_job(make_job(), tmp_path, training, {"gradient_accumulation_steps": 2})
    (recorded,) = tmp_path.glob("*/arguments.yaml")
    assert "global_batch_size: 8" in recorded.read_text()
    assert "gradient_accumulation_steps" not in recorded.read_text()  # which contradicts it


def test_predictions_are_pushed_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr(FineTuningTrainer, "init_hf_repo", lambda trainer, *args: 1 / 0)
    job, training = make_job(), make_arguments(tmp_path)
    training.push_to_hub = True
    answers = fine_tuning.predict(job.build_model(), job.splits["validation"], pad, training, tmp_path)
    assert answers.shape == (40, 3)


def test_a_head_is_computed_without_a_step(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    splits = {"train": make_examples(120, 1), "validation": make_examples(40, 2)}
    folder = tmp_path / "run"
    metrics = run(folder, make_job(splits), fit_head=True)
    assert "Steps:    none" in caplog.messages
    assert metrics == read_metrics(folder)
    assert (metrics["train_samples"], metrics["eval_samples"]) == (120, 40)
    assert not {"learning_rate", "num_train_epochs", "best_step", "train_runtime"} & metrics.keys()
    assert weights(folder)["classifier.pooling.scale"].max() < 1
    assert not (folder / "curve.png").exists()
    # What steps would be like is nothing to it.
    assert run(folder, make_job(splits), fit_head=True, learning_rate=1.0, num_train_epochs=9) is None  # finished
    with pytest.raises(UserError, match="fit_head: True there, none here"):
        run(folder, make_job(splits))


@pytest.mark.parametrize("several", [{"seeds": 2}, {"search": True, "max_steps": -1}])
def test_a_head_is_computed_once(tmp_path, several):
    with pytest.raises(
        UserError, match="--fit_head takes no step that --search or --seeds could vary; leave them out"
    ):
        make_arguments(tmp_path, fit_head=True, **several)


@pytest.mark.parametrize(
    "steps",
    [{"calibrate_head": True}, {"head_learning_rate": 1.0}, {"layer_decay": 1.0}, {"early_stopping_patience": 1}],
)
def test_what_is_for_steps_is_refused_where_none_is_taken(tmp_path, steps):
    with pytest.raises(UserError, match=r"--fit_head takes no step, for which --calibrate_head.*leave them out"):
        make_arguments(tmp_path, fit_head=True, eval_strategy="epoch", save_strategy="epoch", **steps)


@pytest.mark.parametrize("of_layers", [{}, {"layer_decay": 0.5}], ids=["head", "head and layers"])
def test_a_head_may_have_a_rate_of_its_own(tmp_path, cut, monkeypatch, of_layers):
    values = {"learning_rate": 0.0, "head_learning_rate": 1e-2, **of_layers}
    whole = run(tmp_path / "whole", **values)
    run(tmp_path / "start", learning_rate=0.0)
    start, end = weights(tmp_path / "start"), weights(tmp_path / "whole")
    changed = {name.split(".")[0] for name in start if not torch.equal(start[name], end[name])}
    assert changed == {"classifier"}
    cut(3)
    with pytest.raises(Stopped):
        run(tmp_path / "run", **values)
    monkeypatch.undo()
    assert losses(run(tmp_path / "run", **values)) == losses(whole)


def test_layers_that_may_learn_more_slowly_are_those_of_a_run(tmp_path):
    whole = run(tmp_path / "whole")
    assert losses(run(tmp_path / "same", layer_decay=1.0)) == losses(whole)
    assert losses(run(tmp_path / "slower", layer_decay=0.1)) != losses(whole)
    with pytest.raises(UserError, match=r"layer_decay: 0\.1 there, none here"):
        run(tmp_path / "slower")
    with pytest.raises(UserError, match="--layer_decay is 0; it must be above 0 and at most 1"):
        make_arguments(tmp_path, layer_decay=0.0)


def test_numbers_that_are_none_do_not_reach_the_metrics(tmp_path, monkeypatch):
    log = FineTuningTrainer.log
    monkeypatch.setattr(
        FineTuningTrainer,
        "log",
        lambda trainer, logs, *args: log(trainer, logs | ({"grad_norm": math.inf} if "loss" in logs else {}), *args),
    )
    metrics = run(tmp_path / "run", max_steps=2)
    assert "Infinity" not in (tmp_path / "run" / "metrics.json").read_text()
    assert not [entry for entry in metrics["history"] if "grad_norm" in entry]


def test_data_is_told_apart_by_what_stands_in_it():
    rows = make_examples(5, 1)
    assert fingerprint_rows(rows) == fingerprint_rows(Dataset.from_list(rows.to_list()))
    others = [rows.select(range(4)), rows.rename_column("label", "labels"), make_examples(5, 2), rows.select([1, 0])]
    assert len({fingerprint_rows(*parts) for parts in [[rows], [rows, rows], *([other] for other in others)]}) == 6
    many = list(range(1500))
    changed = [*many[:1200], 0, *many[1201:]]
    assert len({fingerprint_rows(Dataset.from_dict({"n": numbers})) for numbers in (many, changed)}) == 2


def test_predictions_begin_no_run_in_trackers(tmp_path, monkeypatch):
    asked = Mock(return_value=[])
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", asked)
    job, training = make_job(), make_arguments(tmp_path)
    training.report_to = ["wandb"]
    predict(job.build_model(), job.splits["validation"], pad, training, tmp_path)
    asked.assert_called_once_with([])
    assert training.report_to == ["wandb"]


def test_patience_belongs_to_a_run_that_stops_early(tmp_path):
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": None, "max_steps": 4}
    run(tmp_path / "run", **every, early_stopping_patience=1)
    with pytest.raises(UserError, match="early_stopping_patience: 1 there, 3 here"):
        run(tmp_path / "run", **every, early_stopping_patience=3)


def test_what_goes_on_behind_the_last_step_is_measured_alone(tmp_path, monkeypatch, steps):
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}
    best_first = iter((0.9, 0.5, 0.4))
    job = make_job()
    scored = dataclasses.replace(job, compute_metrics=lambda prediction: {"score": next(best_first)})
    with monkeypatch.context() as context:
        context.setattr(fine_tuning, "_evaluate", Mock(side_effect=Stopped))
        with pytest.raises(Stopped):
            run(tmp_path / "run", scored, **every)
    assert len(steps) == 6
    metrics = run(tmp_path / "run", job, **every)
    assert len(steps) == 6
    assert metrics["best_step"] == 2


def test_an_evaluation_before_the_first_step_counts_once(tmp_path, monkeypatch, cut):
    every = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "early_stopping_patience": 1}
    # Ever better, but for the restored model's, which is what it was.
    scores = iter((0.1, 0.2, 0.2, 0.3, 0.4, 0.5))
    job = dataclasses.replace(make_job(), shown=(), compute_metrics=lambda prediction: {"score": next(scores)})
    cut(3)
    with pytest.raises(Stopped):
        run(tmp_path / "run", job, **every)
    monkeypatch.undo()
    assert run(tmp_path / "run", job, **every)["best_step"] == 6


def test_a_run_goes_on_from_the_checkpoint_that_is_named(tmp_path, monkeypatch, cut, steps):
    cut(5)
    with pytest.raises(Stopped):
        run(tmp_path / "run")
    steps.clear()
    monkeypatch.undo()
    taken, training_step = [], FineTuningTrainer.training_step

    def note(trainer, *args, **kwargs):
        taken.append(trainer.state.global_step)
        return training_step(trainer, *args, **kwargs)

    monkeypatch.setattr(FineTuningTrainer, "training_step", note)
    run(tmp_path / "run", resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert taken == [2, 3, 4, 5]


def test_a_checkpoint_that_is_named_is_of_one_trial(tmp_path, monkeypatch, cut):
    cut(3, seed=4)
    with pytest.raises(Stopped):
        run(tmp_path / "run", seeds=2)
    monkeypatch.undo()
    taken, training_step = [], FineTuningTrainer.training_step

    def note(trainer, *args, **kwargs):
        taken.append((trainer.args.seed, trainer.state.global_step))
        return training_step(trainer, *args, **kwargs)

    monkeypatch.setattr(FineTuningTrainer, "training_step", note)
    run(tmp_path / "run", seeds=3, resume_from_checkpoint=str(tmp_path / "run" / "seed-4" / "checkpoint-2"))
    assert taken == [*((4, n) for n in range(2, 6)), *((5, n) for n in range(6))]


def test_no_head_is_believed_to_divide_by_a_whole_step(tmp_path):
    trainer = FineTuningTrainer(model=make_job().build_model(), args=make_arguments(tmp_path))
    assert trainer.model_accepts_loss_kwargs is False


def test_what_is_measured_while_training_is_the_first_evaluation_part(tmp_path):
    splits = {"train": make_examples(8, 1), "validation": make_examples(9, 2), "test": make_examples(7, 3)}
    job = dataclasses.replace(make_job(splits), shown=(), compute_metrics=lambda p: {"score": len(p.label_ids)})
    metrics = run(tmp_path / "run", job, eval_strategy="steps", eval_steps=1, max_steps=1)
    assert [entry["eval_score"] for entry in metrics["history"] if "eval_score" in entry] == [9]
    assert (metrics["score"], metrics["eval_test_score"]) == (9, 7)


def test_a_run_whose_card_could_not_be_written_is_not_finished(tmp_path):
    job = dataclasses.replace(make_job(), write_card=Mock(side_effect=Stopped))
    with pytest.raises(Stopped):
        run(tmp_path / "run", job)
    assert not (tmp_path / "run" / METRICS_FILE).exists()
