"""Fine-tuning on GLUE from the command line to the table and the files of a submission."""

import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    pipeline,
)

import run_glue
from experiments import training
from experiments.arguments import UserError
from experiments.fine_tuning import FineTuningTrainer
from experiments.glue.tasks import DIAGNOSTICS, TASKS
from experiments.run_folder import find_checkpoint
from support.glue_rows import (
    files_below,
    make_rows,
    make_tokenizer,
    read_metrics,
    save_checkpoint,
    write_rows,
    write_tasks,
)


SCRIPT = Path(run_glue.__file__)
FILES = {
    **{"MNLI-m": "mnli", "MNLI-mm": "mnli", "AX": "mnli", "QQP": "qqp", "QNLI": "qnli", "SST-2": "sst2"},
    **{"CoLA": "cola", "STS-B": "stsb", "MRPC": "mrpc", "RTE": "rte", "WNLI": "wnli"},
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A pre-trained checkpoint, but for the pre-training."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tasks, checkpoint):
    """Flags of a run that takes less than a second."""
    return {
        **{"model_name_or_path": str(checkpoint), "data_dir": str(tasks), "max_seq_length": 32},
        **{"cache_dir": str(tmp_path_factory.mktemp("cache")), "per_device_train_batch_size": 8, "max_steps": 2},
        **{"learning_rate": 1e-2, "eval_strategy": "no", "save_strategy": "no", "logging_steps": 1},
        **{"use_cpu": True, "disable_tqdm": True},
    }


@pytest.fixture
def recipe(tmp_path, flags):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**flags, "output_dir": str(tmp_path / "run")}))
    return path


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, flags)])
    run_glue.main()


class Stopped(Exception):
    """Raised where a test has seen enough of a run."""


def stop(*args, **kwargs):
    raise Stopped


def stop_at_step(context, seed, step):
    training_step = FineTuningTrainer.training_step

    def cut(trainer, *args, **kwargs):
        if (trainer.args.seed, trainer.state.global_step) == (seed, step):
            raise Stopped
        return training_step(trainer, *args, **kwargs)

    context.setattr(FineTuningTrainer, "training_step", cut)


@pytest.fixture(scope="module")
def everything(tmp_path_factory, flags):
    """The folder of one run of all nine tasks with predictions."""
    folder = tmp_path_factory.mktemp("everything")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**flags, "task_name": "all", "output_dir": str(folder / "run")}))
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(monkeypatch, "--recipe", recipe, "--do_train", "--do_predict", "--save_strategy", "epoch", "--seed", 5)
    return folder / "run"


@pytest.mark.parametrize("name", TASKS)
def test_every_task_leaves_a_model_and_what_it_measured(everything, checkpoint, name):
    folder, task = everything / name, TASKS[name]
    metrics = read_metrics(folder)
    assert (metrics["job"], metrics["seed"], metrics["train_samples"]) == (name, 5, 24)
    assert metrics["started_from"] == "tiny"
    assert metrics["score"] == pytest.approx(statistics.mean(metrics[f"eval_{metric}"] for metric in task.scored))
    assert ("eval_mismatched_accuracy" in metrics) == (name == "mnli")
    assert metrics["seconds"] > 0
    assert metrics["environment"]["transformers"]
    arguments = yaml.safe_load((folder / "arguments.yaml").read_text())
    assert (arguments["task_name"], arguments["seed"], arguments["learning_rate"]) == ([name], 5, 1e-2)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("checkpoint-*"))
    config = AutoConfig.from_pretrained(folder)
    words = task.labels or ("similarity",)
    assert config.id2label == dict(enumerate(words))
    assert config.label2id == {word: number for number, word in enumerate(words)}
    assert config.problem_type == ("single_label_classification" if task.labels else "regression")
    card = (folder / "README.md").read_text()
    assert all(f"{metrics[f'eval_{metric}']:.4f}" in card for metric in task.metrics)
    assert "pipeline_tag: text-classification" in card
    assert "seed 5" in card
    assert str(checkpoint.parent) not in card


def test_models_answer_with_the_words_of_the_task(everything):
    def answers(name, text):
        return pipeline("text-classification", model=str(everything / name))(text, top_k=None)

    pair = {"text": "the cat sees", "text_pair": "the dog two ."}
    assert {answer["label"] for answer in answers("cola", "the cat sees one .")} == {"acceptable", "unacceptable"}
    assert {answer["label"] for answer in answers("mnli", [pair])[0]} == set(TASKS["mnli"].labels)
    ((answer,),) = answers("stsb", [pair])
    model = AutoModelForSequenceClassification.from_pretrained(everything / "stsb")
    inputs = AutoTokenizer.from_pretrained(everything / "stsb")(*pair.values(), return_tensors="pt")
    assert answer["label"] == "similarity"
    assert answer["score"] == pytest.approx(model(**inputs).logits.item(), abs=1e-5)


def test_the_table_is_text_markdown_json_and_a_picture(everything, capsys, monkeypatch):
    before = files_below(everything)
    monkeypatch.setattr(FineTuningTrainer, "train", stop)
    # What arguments.yaml of any of the tasks says, for all of them.
    run(monkeypatch, "--recipe", everything / "cola" / "arguments.yaml", "--task_name", "all")
    printed = capsys.readouterr().out
    text = (everything / "glue.md").read_text()
    assert text in printed
    titles = ["MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE", "WNLI", "mean"]
    assert [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")][1:] == titles
    table = json.loads((everything / "glue.json").read_text())
    scores = {name: 100 * read_metrics(everything / name)["score"] for name in TASKS}
    assert table["scores"]["tiny"] == pytest.approx(scores)
    eight = [score for name, score in scores.items() if name != "wnli"]
    assert table["means"]["tiny"] == pytest.approx(statistics.mean(eight))
    for name in ("BERT-Base", "FNet-Base", "PoNet-Base", "SKTformer"):
        assert f"| {name} (published)" in text
    assert "seed 5" in text
    assert (everything / "glue.png").read_bytes().startswith(b"\x89PNG")
    after = files_below(everything)
    assert {path for path in after if after[path] != before.get(path)} <= {
        everything / name for name in ("glue.md", "glue.json", "glue.png", "submission.zip")
    } | set((everything / "submission").iterdir())


def test_the_submission_is_what_the_benchmark_takes(everything):
    folder = everything / "submission"
    with zipfile.ZipFile(everything / "submission.zip") as archive:
        assert sorted(archive.namelist()) == sorted(f"{name}.tsv" for name in FILES)
        assert archive.read("CoLA.tsv") == (folder / "CoLA.tsv").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.tsv" for name in FILES)
    for name, task in FILES.items():
        header, *lines = (folder / f"{name}.tsv").read_text().splitlines()
        assert header == "index\tprediction"
        rows = [line.split("\t") for line in lines]
        assert [index for index, _ in rows] == list("012345")
        predictions = [prediction for _, prediction in rows]
        if task == "stsb":
            assert all(0 <= float(prediction) <= 5 for prediction in predictions)
        elif task in ("mnli", "qnli", "rte"):
            assert set(predictions) <= set(TASKS[task].labels)
        else:
            assert set(predictions) <= {"0", "1"}


def test_predictions_are_the_model_s(everything):
    model = AutoModelForSequenceClassification.from_pretrained(everything / "mnli")
    tokenizer = AutoTokenizer.from_pretrained(everything / "mnli")
    for task, split, name in (
        (DIAGNOSTICS, "test", "AX"),
        (TASKS["mnli"], "test_matched", "MNLI-m"),
        (TASKS["mnli"], "test_mismatched", "MNLI-mm"),
    ):
        rows = make_rows(task, split)
        inputs = tokenizer(
            [row["premise"] for row in rows], [row["hypothesis"] for row in rows], padding=True, return_tensors="pt"
        )
        words = [TASKS["mnli"].labels[number] for number in model(**inputs).logits.argmax(-1)]
        lines = (everything / "submission" / f"{name}.tsv").read_text().splitlines()[1:]
        assert lines == [f"{number}\t{word}" for number, word in enumerate(words)]


def test_similarities_stay_in_their_range(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--task_name", "stsb")
    weights = tmp_path / "run" / "stsb" / "model.safetensors"
    changed = load_file(weights)
    (bias,) = [name for name in changed if name.startswith("classifier") and name.endswith("bias")]
    for value, prediction in ((50.0, "5.000"), (-50.0, "0.000")):
        changed[bias] = torch.tensor([value])
        save_file(changed, weights, metadata={"format": "pt"})
        run(monkeypatch, "--recipe", recipe, "--task_name", "stsb", "--do_predict")
        lines = (tmp_path / "run" / "submission" / "STS-B.tsv").read_text().splitlines()
        assert [line.split("\t")[1] for line in lines[1:]] == [prediction] * 6


def test_a_finished_run_predicts_later_without_training(tmp_path, tasks, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--task_name", "rte", "sst2")
    assert not (tmp_path / "run" / "submission").exists()
    before = {name: files_below(tmp_path / "run" / name) for name in ("rte", "sst2")}
    with monkeypatch.context() as context:
        context.setattr(FineTuningTrainer, "train", stop)
        run(context, "--recipe", recipe, "--task_name", "rte", "sst2", "--do_predict")
        run(context, "--recipe", recipe, "--task_name", "rte", "sst2", "--do_train", "--do_eval")  # finished
        with zipfile.ZipFile(tmp_path / "run" / "submission.zip") as archive:
            assert archive.namelist() == ["RTE.tsv", "SST-2.tsv"]
        assert before == {name: files_below(tmp_path / "run" / name) for name in ("rte", "sst2")}
    (tmp_path / "run" / "submission" / "RTE.tsv").unlink()
    flags = yaml.safe_load(recipe.read_text())
    del flags["data_dir"]
    recipe.write_text(yaml.safe_dump({**flags, "output_dir": str(tmp_path / "other")}))
    # A model from elsewhere, and a file of one's own.
    rows = [{"sentence1": "the cat", "sentence2": "the dog", "idx": number} for number in (8, 3)]
    test = write_rows(tmp_path / "test.jsonl", rows)
    run(monkeypatch, "--recipe", recipe, "--task_name", "rte", "--model_name_or_path", tmp_path / "run" / "rte",
        "--do_predict", "--test_file", test)  # fmt: skip
    lines = (tmp_path / "other" / "submission" / "RTE.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "8", "3"]


def test_what_can_be_learned_is_learned(tmp_path, recipe, monkeypatch):
    data = tmp_path / "glue"
    for split, count in (("train", 96), ("validation", 40)):
        write_rows(data / "sst2" / f"{split}.jsonl", make_rows(TASKS["sst2"], split, count))
        write_rows(data / "stsb" / f"{split}.jsonl", make_rows(TASKS["stsb"], split, count))
    epochs = ["--max_steps", -1, "--num_train_epochs", 10, "--eval_strategy", "epoch"]
    run(monkeypatch, "--recipe", recipe, "--data_dir", data, "--task_name", "sst2", "stsb", *epochs)
    metrics = {name: read_metrics(tmp_path / "run" / name) for name in ("sst2", "stsb")}
    assert metrics["sst2"]["eval_accuracy"] > 0.9
    assert metrics["stsb"]["eval_spearmanr"] > 0.8
    losses = [entry["loss"] for entry in metrics["sst2"]["history"] if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    assert len([entry for entry in metrics["sst2"]["history"] if "eval_score" in entry]) >= 10


def test_arguments_and_data_files_give_a_run_again(tmp_path, tasks, recipe, monkeypatch):
    flags = yaml.safe_load(recipe.read_text())
    folder = Path(flags.pop("data_dir")) / "mrpc"
    recipe.write_text(yaml.safe_dump(flags))
    files = ["--train_file", folder / "train.jsonl", "--validation_file", folder / "validation.jsonl"]
    more = ["--task_name", "mrpc", "--max_steps", 6, "--seed", 11, "--global_batch_size", 8]
    run(monkeypatch, "--recipe", recipe, *files, *more, "--per_device_train_batch_size", 4)
    run(monkeypatch, "--recipe", tmp_path / "run" / "mrpc" / "arguments.yaml", "--output_dir", tmp_path / "again")
    first, second = read_metrics(tmp_path / "run" / "mrpc"), read_metrics(tmp_path / "again" / "mrpc")
    for name in ("score", "eval_loss", "train_loss", "seed", "global_batch_size"):
        assert first[name] == second[name], name
    run(monkeypatch, "--recipe", recipe, *files, *more, "--seed", 12, "--output_dir", tmp_path / "other")
    assert read_metrics(tmp_path / "other" / "mrpc")["eval_loss"] != first["eval_loss"]
    # Evaluating what was trained gives what was measured.
    run(monkeypatch, "--recipe", recipe, *files, *more, "--model_name_or_path", tmp_path / "run" / "mrpc",
        "--output_dir", tmp_path / "evaluation", "--do_eval")  # fmt: skip
    evaluation = read_metrics(tmp_path / "evaluation" / "mrpc")
    assert evaluation["eval_loss"] == pytest.approx(first["eval_loss"])
    assert evaluation["score"] == first["score"]
    assert "train_loss" not in evaluation


def spy_on_batches(context):
    batches: dict[str, list] = {"train": [], "eval": []}
    training_step, prediction_step = FineTuningTrainer.training_step, FineTuningTrainer.prediction_step

    def train(trainer, model, inputs, *args, **kwargs):
        batches["train"].append(dict(inputs))
        return training_step(trainer, model, inputs, *args, **kwargs)

    def predict(trainer, model, inputs, *args, **kwargs):
        batches["eval"].append(dict(inputs))
        return prediction_step(trainer, model, inputs, *args, **kwargs)

    context.setattr(FineTuningTrainer, "training_step", train)
    context.setattr(FineTuningTrainer, "prediction_step", predict)
    return batches


def test_inputs_are_padded_to_the_longest_of_their_batch(tmp_path, recipe, monkeypatch):
    small = ["--task_name", "cola", "--per_device_train_batch_size", 3, "--per_device_eval_batch_size", 3,
             "--max_steps", 8]  # fmt: skip
    with monkeypatch.context() as context:
        batches = spy_on_batches(context)
        run(context, "--recipe", recipe, *small)
    for kind, count in (("train", 8), ("eval", 4)):
        assert len(batches[kind]) == count
        for batch in batches[kind]:
            assert batch["attention_mask"].shape[1] == batch["attention_mask"].sum(dim=1).max() < 32
        assert len({batch["input_ids"].shape[1] for batch in batches[kind]}) > 1
    with monkeypatch.context() as context:
        batches = spy_on_batches(context)
        run(context, "--recipe", recipe, *small, "--pad_to_max_length", "--output_dir", tmp_path / "padded")
    assert {batch["input_ids"].shape[1] for batch in batches["train"] + batches["eval"]} == {32}


def save_other_architecture(model_type, folder):
    tokenizer: PreTrainedTokenizerBase = make_tokenizer()
    names = {
        "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 64},
        "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 3, "eos_token_id": 3},
        "roberta": {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 0},
    }
    sizes = {
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        **{"max_position_embeddings": 64, "pad_token_id": 0},
    }
    sizes = names[model_type] if model_type in ("distilbert", "gpt2") else {**sizes, **names.get(model_type, {})}
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **sizes)
    if model_type == "gpt2":
        model = AutoModelForSequenceClassification.from_config(config)
        # As GPT-2's own: without a token to pad with.
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, unk_token="[UNK]", bos_token="[SEP]", eos_token="[SEP]"
        )
    else:
        model = AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("model_type", "inputs"),
    [
        ("bert", {"input_ids", "token_type_ids", "attention_mask"}),
        ("fnet", {"input_ids", "token_type_ids"}),
        ("roberta", {"input_ids", "attention_mask"}),
        ("distilbert", {"input_ids", "attention_mask"}),
        ("gpt2", {"input_ids", "attention_mask"}),
    ],
)
def test_any_architecture(tmp_path, recipe, monkeypatch, model_type, inputs):
    save_other_architecture(model_type, tmp_path / "other")
    more = ["--task_name", "rte", "--model_name_or_path", tmp_path / "other"]
    with monkeypatch.context() as context:
        batches = spy_on_batches(context)
        run(context, "--recipe", recipe, *more, "--do_train", "--do_predict")
    for batch in [*batches["train"], *batches["eval"]]:
        assert set(batch) - {"labels"} == inputs
    assert len(batches["train"]) == 2
    if "token_type_ids" in inputs:
        assert all((batch["token_type_ids"] == 1).any(dim=1).all() for batch in batches["train"])
    metrics = read_metrics(tmp_path / "run" / "rte")
    assert metrics["model_type"] == model_type
    assert metrics["eval_loss"] < 5
    assert (tmp_path / "run" / "submission" / "RTE.tsv").is_file()
    card = (tmp_path / "run" / "rte" / "README.md").read_text()
    assert "trust_remote_code" not in card
    if model_type == "gpt2":
        # Not trained here, so that nothing has put a padding token into its configuration.
        run(monkeypatch, "--recipe", recipe, *more, "--do_eval", "--output_dir", tmp_path / "evaluation")
        assert read_metrics(tmp_path / "evaluation" / "rte")["eval_loss"] > 0


def test_accumulation_changes_no_gradient(tmp_path, recipe, monkeypatch):
    save_other_architecture("bert", tmp_path / "bert")
    histories = []
    for batch, steps in ((8, 1), (4, 2)):
        folder = tmp_path / f"steps-{steps}"
        run(monkeypatch, "--recipe", recipe, "--task_name", "sst2", "--model_name_or_path", tmp_path / "bert",
            "--config_overrides", "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0",
            "--per_device_train_batch_size", batch, "--global_batch_size", 8, "--output_dir", folder)  # fmt: skip
        metrics = read_metrics(folder / "sst2")
        assert metrics["global_batch_size"] == 8
        histories.append([(e["loss"], e["grad_norm"]) for e in metrics["history"] if "grad_norm" in e])
    assert len(histories[0]) == 2
    for whole, parts in zip(*histories, strict=True):
        assert parts == pytest.approx(whole, rel=1e-3)


def test_a_run_that_is_cut_short_ends_as_if_it_had_not_been(tmp_path, recipe, monkeypatch):
    more = ["--task_name", "sst2", "--seeds", 2, "--max_steps", 6, "--save_strategy", "steps", "--save_steps", 2]
    run(monkeypatch, "--recipe", recipe, *more, "--output_dir", tmp_path / "whole")
    whole = read_metrics(tmp_path / "whole" / "sst2")
    with monkeypatch.context() as context:
        stop_at_step(context, 43, 3)
        with pytest.raises(Stopped):
            run(context, "--recipe", recipe, *more)
    folder = tmp_path / "run" / "sst2"
    assert find_checkpoint(folder / "seed-43") == str(folder / "seed-43" / "checkpoint-2")
    assert not (folder / "metrics.json").exists()
    before = files_below(folder / "seed-42")
    steps, training_step = [], FineTuningTrainer.training_step

    def note(trainer, *args, **kwargs):
        steps.append(trainer.state.global_step)
        return training_step(trainer, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(FineTuningTrainer, "training_step", note)
        run(context, "--recipe", recipe, *more)
    assert steps == [2, 3, 4, 5]
    assert files_below(folder / "seed-42") == before
    resumed = read_metrics(folder)
    assert resumed["scores"] == whole["scores"]
    for trial, expected in zip(resumed["trials"], whole["trials"], strict=True):
        assert trial["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert not list(folder.rglob("checkpoint-*"))


def test_only_what_is_unfinished_is_run_again(tmp_path, recipe, monkeypatch):
    more = ["--task_name", "wnli", "sst2", "rte"]
    run_job, started = run_glue.run_job, []

    def cut(job, *args):
        started.append(job.name)
        return stop() if started == ["sst2", "rte"] else run_job(job, *args)

    monkeypatch.setattr(run_glue, "run_job", cut)
    with pytest.raises(Stopped):
        run(monkeypatch, "--recipe", recipe, *more)
    before = files_below(tmp_path / "run" / "sst2")
    run(monkeypatch, "--recipe", recipe, *more)
    assert started == ["sst2", "rte", "rte", "wnli"]
    assert files_below(tmp_path / "run" / "sst2") == before
    assert set(json.loads((tmp_path / "run" / "glue.json").read_text())["tasks"]) == {"sst2", "rte", "wnli"}


def test_a_search_keeps_all_trials_and_the_best_weights(tmp_path, recipe, monkeypatch):
    grid = ["--search", "--search_epochs", 1, 2, "--search_learning_rates", 1e-4, 1e-2, "--search_batch_sizes", 4]
    run(monkeypatch, "--recipe", recipe, "--task_name", "stsb", *grid, "--max_steps", -1, "--do_train",
        "--do_predict", "--seed", 3)  # fmt: skip
    folder = tmp_path / "run" / "stsb"
    metrics = read_metrics(folder)
    assert metrics["kind"] == "search"
    assert [(t["num_train_epochs"], t["learning_rate"], t["global_batch_size"]) for t in metrics["trials"]] == [
        *((1, 1e-4, 4), (1, 1e-2, 4), (2, 1e-4, 4), (2, 1e-2, 4)),
    ]
    assert all(trial["seed"] == 3 and trial["seconds"] > 0 for trial in metrics["trials"])
    assert metrics["scores"] == [trial["score"] for trial in metrics["trials"]]
    assert len(set(metrics["scores"])) > 1
    assert metrics["score"] == max(metrics["scores"])
    best = folder / metrics["trials"][metrics["scores"].index(metrics["score"])]["folder"]
    assert list(folder.rglob("*.safetensors")) == [best / "model.safetensors"]
    assert {path.parent for path in folder.glob("*/metrics.json")} == {folder / t["folder"] for t in metrics["trials"]}
    assert (folder / "curve.png").is_file()
    assert metrics["best"] in (tmp_path / "run" / "glue.md").read_text()
    lines = (tmp_path / "run" / "submission" / "STS-B.tsv").read_text().splitlines()[1:]
    model = AutoModelForSequenceClassification.from_pretrained(best)
    rows = make_rows(TASKS["stsb"], "test")
    inputs = make_tokenizer()(
        [row["sentence1"] for row in rows], [row["sentence2"] for row in rows], padding=True, return_tensors="pt"
    )
    expected = model(**inputs).logits.flatten().clamp(0, 5).tolist()
    assert [float(line.split("\t")[1]) for line in lines] == pytest.approx(expected, abs=2e-3)
    # The best trial's arguments give it again, alone.
    run(monkeypatch, "--recipe", best / "arguments.yaml", "--output_dir", tmp_path / "again")
    assert read_metrics(tmp_path / "again" / "stsb")["score"] == metrics["score"]


def test_seeds_give_median_and_spread(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--task_name", "stsb", "--seeds", 3, "--seed", 7)
    folder = tmp_path / "run" / "stsb"
    metrics = read_metrics(folder)
    scores = [read_metrics(folder / f"seed-{seed}")["score"] for seed in (7, 8, 9)]
    assert len(set(scores)) == 3
    assert metrics["scores"] == scores
    assert metrics["score"] == statistics.median(scores)
    assert metrics["std"] == pytest.approx(statistics.stdev(scores))
    assert [trial["seed"] for trial in metrics["trials"]] == [7, 8, 9]
    assert len(list(folder.rglob("model.safetensors"))) == 3
    table = (tmp_path / "run" / "glue.md").read_text()
    assert f"{100 * metrics['score']:.2f} ± {100 * metrics['std']:.2f}" in table
    assert "median over 3 seeds" in table


def test_small_tasks_start_from_mnli(tmp_path, recipe, monkeypatch, everything, checkpoint):
    run(monkeypatch, "--recipe", recipe, "--task_name", "sst2", "rte", "mnli", "--mnli_checkpoint", "run",
        "--max_steps", 1)  # fmt: skip
    folder = tmp_path / "run"
    assert {name: read_metrics(folder / name)["started_from"] for name in ("mnli", "sst2", "rte")} == {
        **{"mnli": "tiny", "sst2": "tiny", "rte": "mnli"},
    }
    for name in ("mrpc", "stsb"):
        other = tmp_path / name
        run(monkeypatch, "--recipe", recipe, "--task_name", name, "--mnli_checkpoint", everything / "mnli",
            "--output_dir", other, "--learning_rate", 0.0)  # fmt: skip
        assert read_metrics(other / name)["started_from"] == "mnli"
        weights, trained = (load_file(path / "model.safetensors") for path in (everything / "mnli", other / name))
        same = {key for key in weights if weights[key].shape == trained[key].shape}
        assert all(torch.equal(weights[key], trained[key]) for key in same)
        assert {key.split(".")[0] for key in weights.keys() - same} == {"classifier"}


def test_a_longer_input_lengthens_the_model_and_its_tokenizer(tmp_path, recipe, monkeypatch, checkpoint):
    data = tmp_path / "glue"
    for split, count in (("train", 24), ("validation", 20)):
        rows = make_rows(TASKS["sst2"], split, count)
        # What tells the class stands where the checkpoint's 64 positions are long over.
        rows = [row | {"sentence": "the " * 90 + row["sentence"]} for row in rows]
        write_rows(data / "sst2" / f"{split}.jsonl", rows)
    run(monkeypatch, "--recipe", recipe, "--data_dir", data, "--task_name", "sst2", "--max_seq_length", 128,
        "--max_steps", -1, "--num_train_epochs", 8)  # fmt: skip
    folder = tmp_path / "run" / "sst2"
    metrics = read_metrics(folder)
    assert AutoConfig.from_pretrained(folder).max_position_embeddings == 128
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 128
    # As the card has it: what was measured is what a user gets.
    classify = pipeline("text-classification", model=str(folder), truncation=True)
    rows = [json.loads(line) for line in (data / "sst2" / "validation.jsonl").read_text().splitlines()]
    answers = classify([row["sentence"] for row in rows], batch_size=8)
    right = [answer["label"] == TASKS["sst2"].labels[row["label"]] for answer, row in zip(answers, rows, strict=True)]
    assert statistics.mean(right) == metrics["eval_accuracy"]
    assert AutoConfig.from_pretrained(checkpoint).max_position_embeddings == 64
    # A shorter input changes nothing: the tokenizer's limit is the model's.
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "cola").model_max_length == 64


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path, recipe, monkeypatch, checkpoint):
    AutoModelForMaskedLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="holds no tokenizer"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--model_name_or_path", tmp_path / "model")
    assert not (tmp_path / "run").exists()
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--model_name_or_path", tmp_path / "model",
        "--tokenizer_name", checkpoint)  # fmt: skip
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "cola")) == len(make_tokenizer())


def test_models_of_two_stacks_are_refused_in_one_line(tmp_path, recipe, monkeypatch):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model("t5", vocab_size=len(tokenizer), **sizes)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    with pytest.raises(UserError, match="t5") as error:
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--model_name_or_path", tmp_path / "t5")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--task_name", "nonsense"], "--task_name nonsense: the tasks are mnli"),
        (["--task_name"], "--task_name"),
        ([], "required: --task_name"),
        (["--task_name", "cola", "--model_name_or_path", "nowhere"], "The checkpoint nowhere cannot be loaded"),
        (["--task_name", "cola", "--tokenizer_name", "nowhere"], "tokenizer nowhere cannot be loaded"),
        (["--task_name", "cola", "--data_dir", "nowhere"], "--data_dir nowhere is no folder"),
        (["--task_name", "cola", "--validation_file", "a.csv"], "--validation_file and --data_dir"),
        (["--task_name", "cola", "--seeds", "2", "--search"], "--search .*--seeds"),
        (["--task_name", "cola", "--seeds", "0"], "--seeds is 0"),
        (["--task_name", "cola", "--search", "--search_epochs"], "--search_epochs"),
        (["--task_name", "cola", "--do_eval"], "has no classification head"),
        (["--task_name", "cola", "--do_predict"], "has no classification head"),
        (["--task_name", "rte", "--mnli_checkpoint", "run"], "add mnli to --task_name"),
        (["--task_name", "rte", "--mnli_checkpoint", "nowhere"], "The checkpoint nowhere cannot be loaded"),
        (["--task_name", "cola", "--config_overrides", "hidden_size=30"], "not divisible"),
        (["--task_name", "cola", "--config_overrides", "hidden_sise=32"], "is not field=value"),
        (["--task_name", "cola", "--config_overrides", "num_labels=5"], "the number of labels is the task's"),
        (["--task_name", "cola", "--seed", "-1"], "--seed -1 must lie between 0 and"),
        (["--task_name", "cola", "--batch_eval_metrics", "True"], "need all predictions at once"),
        (["--task_name", "stsb", "--label_smoothing_factor", "0.1"], "--label_smoothing_factor is for classes"),
        (["--task_name", "cola", "--search", "--max_steps", "3"], "which --max_steps overrides"),
        (["--task_name", "cola", "--search", "--max_steps", "-1", "--search_batch_sizes", "8", "12"], "12 is not a"),
        (["--task_name", "cola", "--global_batch_size", "12"], "not a multiple of 8"),
        (["--task_name", "cola", "rte", "--push_to_hub"], "--push_to_hub pushes one model"),
        (["--task_name", "cola", "--push_to_hub"], "cannot reach the Hub"),
        (["--task_name", "cola", "--resume_from_checkpoint", "nowhere"], "--resume_from_checkpoint nowhere"),
        (["--task_name", "cola", "--evaluation_strategy", "no"], "--evaluation_strategy"),
        (["--task_name", "cola", "--learning_rate", "-1"], "--learning_rate -1 must be"),
        (["--task_name", "cola", "--report_to", "nobody"], "--report_to"),
        (["--task_name", "cola", "--early_stopping_patience", "2"], "add --eval_strategy"),
        (["--task_name", "cola", "--seeds", "2", "--do_eval"], "has no classification head"),
    ],
)
def test_mistakes_are_explained_and_leave_nothing(tmp_path, recipe, monkeypatch, more, message):
    with pytest.raises(UserError, match=message) as error:
        run(monkeypatch, "--recipe", recipe, *more)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "nyu-mll/glue .cola, train. is not in the cache"),
        ({"dataset_name": "glue"}, "ids of the Hub have the form owner/name"),
        ({"train_file": "{rows}"}, "--train_file is given without --validation_file"),
        ({"train_file": "{rows}", "validation_file": "nowhere.csv"}, r"nowhere\.csv: no such file"),
        ({"train_file": "{rows}", "validation_file": "{bad}"}, r"bad\.jsonl: row 1 has the label 3"),
        ({"train_file": "{rows}", "validation_file": "{empty}"}, r"empty\.jsonl is empty"),
        ({"validation_file": "{rows}"}, "no file for the split `train` of cola; give --train_file, or use --data_dir"),
    ],
)
def test_data_that_cannot_be_used_leaves_nothing(tmp_path, recipe, tasks, monkeypatch, files, message):
    places = {
        "rows": tasks / "cola" / "train.jsonl",
        "bad": write_rows(tmp_path / "bad.jsonl", [{"sentence": "a", "label": label} for label in (0, 3)]),
        "empty": write_rows(tmp_path / "empty.jsonl", []),
    }
    flags = yaml.safe_load(recipe.read_text())
    del flags["data_dir"]
    recipe.write_text(yaml.safe_dump(flags | {name: value.format(**places) for name, value in files.items()}))
    with pytest.raises(UserError, match=message):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola")
    assert not (tmp_path / "run").exists()


def test_one_bad_task_is_found_before_the_first_begins(tmp_path, recipe, monkeypatch):
    data = write_tasks(tmp_path / "glue", [TASKS["mnli"], TASKS["cola"]])
    write_rows(data / "cola" / "validation.jsonl", [{"sentence": "a", "label": 3}])
    with pytest.raises(UserError, match="has the label 3"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "mnli", "cola", "--data_dir", data)
    assert not (tmp_path / "run").exists()


def test_a_mistake_ends_the_script_with_one_line_and_status_2(tmp_path, recipe):
    command = [sys.executable, str(SCRIPT), "--recipe", str(recipe), "--task_name", "cola", "--do_eval"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("run_glue.py: error: ")
    assert "has no classification head" in line
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_adapters_are_trained_searched_and_predict(tmp_path, recipe, monkeypatch):
    pytest.importorskip("peft")
    more = ["--task_name", "sst2", "--lora", "--max_steps", -1, "--search", "--search_epochs", 1, 2,
            "--search_learning_rates", 1e-2, "--search_batch_sizes", 8, "--do_train", "--do_predict"]  # fmt: skip
    run(monkeypatch, "--recipe", recipe, *more)
    folder = tmp_path / "run" / "sst2"
    (weights,) = folder.rglob("*.safetensors")
    assert weights.name == "adapter_model.safetensors"
    assert (tmp_path / "run" / "submission" / "SST-2.tsv").is_file()
    with pytest.raises(UserError, match=r"lora: .* there, None here"):
        run(monkeypatch, "--recipe", recipe, *(flag for flag in more if flag != "--lora"))
    # Where the best weights are gone nothing else answers in their place.
    weights.unlink()
    with pytest.raises(UserError, match=r"has no weights any more; run it again with --recipe .*arguments\.yaml"):
        run(monkeypatch, "--recipe", recipe, *more)


def test_a_head_of_another_size_is_dropped_only_when_asked(tmp_path, recipe, monkeypatch, everything):
    more = ["--task_name", "stsb", "--model_name_or_path", everything / "mnli"]
    with pytest.raises(UserError, match="head for 3 labels, and 1 are needed; pass --ignore_mismatched_sizes"):
        run(monkeypatch, "--recipe", recipe, *more)
    assert not (tmp_path / "run").exists()
    run(monkeypatch, "--recipe", recipe, *more, "--ignore_mismatched_sizes")
    assert AutoConfig.from_pretrained(tmp_path / "run" / "stsb").num_labels == 1


def test_a_head_is_only_asked_for_its_own_classes(tmp_path, recipe, monkeypatch, everything):
    more = ["--task_name", "sst2", "--model_name_or_path", everything / "cola"]
    with pytest.raises(UserError, match="answers with unacceptable, acceptable, and the task's classes are negative"):
        run(monkeypatch, "--recipe", recipe, *more, "--do_eval")
    assert not (tmp_path / "run").exists()
    run(monkeypatch, "--recipe", recipe, *more)  # training makes it another one
    assert AutoConfig.from_pretrained(tmp_path / "run" / "sst2").id2label == {0: "negative", 1: "positive"}


def test_a_new_mnli_model_is_waited_for(tmp_path, recipe, monkeypatch):
    more = ["--task_name", "mnli", "rte", "--mnli_checkpoint", "run", "--max_steps", 1]
    run(monkeypatch, "--recipe", recipe, *more, "--seeds", 2)
    run(monkeypatch, "--recipe", recipe, *more, "--overwrite")
    assert read_metrics(tmp_path / "run" / "rte")["started_from"] == "mnli"


def test_a_model_s_folder_is_no_place_for_tasks(recipe, monkeypatch, checkpoint):
    before = files_below(checkpoint)
    with pytest.raises(UserError, match="is a model's folder"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--output_dir", checkpoint)
    assert files_below(checkpoint) == before


def test_tokens_of_the_hub_are_not_saved(tmp_path, recipe, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")  # so that it is taken back afterwards
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--hub_token", "hf_secret")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if b"hf_secret" in path.read_bytes()]


def test_part_of_the_data_is_said_to_be_one(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "rte", "--max_eval_samples", 4)
    table = (tmp_path / "run" / "glue.md").read_text()
    assert "Run on a part of the data: CoLA, RTE." in table
    assert "Every score is the result of one run (seed 42)." in table


def test_checkpoints_of_another_architecture_are_refused(tmp_path, recipe, monkeypatch, checkpoint):
    folder = tmp_path / "bert"
    save_other_architecture("bert", folder)
    weights = load_file(checkpoint / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="another architecture or size"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--model_name_or_path", folder)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path, recipe, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["unknown"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="do not belong together"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--tokenizer_name", tmp_path / "tokenizer")
    assert not (tmp_path / "run").exists()


def test_training_that_diverges_is_no_result(tmp_path, recipe, monkeypatch):
    with pytest.raises(UserError, match="Training has diverged: loss is nan at step"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--learning_rate", 1e30, "--max_steps", 5)
    assert not list((tmp_path / "run").rglob("metrics.json"))
    assert not (tmp_path / "run" / "glue.md").exists()


def test_a_run_is_never_overwritten_unasked(tmp_path, recipe, monkeypatch, everything):
    folder = tmp_path / "run"
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola")
    before = files_below(folder)
    for more, message in (
        (["--learning_rate", 1e-3], r"another run \(learning_rate: 0.01 there, 0.001 here\).*--overwrite"),
        (["--seeds", 2], r"another run \(.*trials: none there, seeds here"),
        (["--model_name_or_path", everything / "sst2"], "holds cola of another checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            run(monkeypatch, "--recipe", recipe, "--task_name", "cola", *more)
        assert files_below(folder) == before
    with pytest.raises(UserError, match="holds cola of another checkpoint"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "rte", "--model_name_or_path", everything / "qnli")
    assert files_below(folder) == before
    with pytest.raises(UserError, match="would delete"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--model_name_or_path", folder / "cola",
            "--overwrite")  # fmt: skip
    assert files_below(folder) == before
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--seeds", 2, "--overwrite")
    assert len(read_metrics(folder / "cola")["trials"]) == 2
    assert "overwrite" not in (folder / "cola" / "arguments.yaml").read_text()


def test_what_a_run_reads_is_not_deleted(tmp_path, recipe, monkeypatch, tasks):
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola")
    folder = tmp_path / "run" / "cola"
    shutil.copytree(tasks / "cola", folder / "data")
    flags = yaml.safe_load(recipe.read_text())
    del flags["data_dir"]
    recipe.write_text(yaml.safe_dump(flags))
    files = ["--train_file", folder / "data/train.jsonl", "--validation_file", folder / "data/validation.jsonl"]
    with pytest.raises(UserError, match=r"--overwrite would delete .*train\.jsonl, which this run needs"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", *files, "--overwrite")
    assert (folder / "data" / "train.jsonl").is_file()


def test_the_same_data_and_checkpoint_may_lie_elsewhere(tmp_path, recipe, monkeypatch, tasks, checkpoint, caplog):
    with monkeypatch.context() as context:
        stop_at_step(context, 42, 1)
        with pytest.raises(Stopped):
            run(context, "--recipe", recipe, "--task_name", "cola")
    shutil.copytree(tasks, tmp_path / "data")
    shutil.copytree(checkpoint, tmp_path / "model")
    more = ["--data_dir", tmp_path / "data", "--model_name_or_path", tmp_path / "model", "--task_name", "cola"]
    run(monkeypatch, "--recipe", recipe, *more, "--logging_steps", 2)
    before = files_below(tmp_path / "run" / "cola")
    caplog.set_level(logging.INFO)
    run(monkeypatch, "--recipe", recipe, *more, "--preprocessing_num_workers", 2)
    assert files_below(tmp_path / "run" / "cola") == before
    assert f"{tmp_path / 'run' / 'cola'} holds CoLA, finished." in caplog.messages
    # What stands in the files is another matter.
    write_rows(tmp_path / "data" / "cola" / "train.jsonl", make_rows(TASKS["cola"], "train", 30))
    with pytest.raises(UserError, match=r"holds another run \(data: "):
        run(monkeypatch, "--recipe", recipe, *more)


def test_the_first_lines_say_what_is_about_to_run(tmp_path, recipe, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--output_dir", tmp_path / "run")
    lines = [line for record in caplog.records if record.name.startswith("experiments") for line in [record.message]]
    named = {line.split(":")[0]: line for line in lines[:5]}
    assert list(named) == ["Recipe", "Devices", "Model", "Data", "Steps"]
    assert "recipe.yaml" in named["Recipe"]
    assert "parameters, from tiny" in named["Model"]
    assert "train 24, validation 10 examples" in named["Data"]
    assert "2 of 8 sequences" in named["Steps"]


def test_what_is_uploaded_names_no_place_of_the_machine(tmp_path, recipe, monkeypatch):
    uploads = []
    monkeypatch.setattr(training, "whoami", lambda token=None: {"name": "me"})
    monkeypatch.setattr(training, "upload_folder", lambda **options: uploads.append(options))
    monkeypatch.setattr(training, "create_repo", lambda name, **_: types.SimpleNamespace(repo_id=name))
    monkeypatch.setattr(
        FineTuningTrainer, "init_hf_repo", lambda trainer, *args: setattr(trainer, "hub_model_id", "me/cola")
    )
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--push_to_hub", "--hub_model_id", "me/cola")
    (upload,) = uploads
    folder = tmp_path / "run" / "cola"
    assert (upload["repo_id"], upload["folder_path"]) == ("me/cola", str(folder))
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    uploaded = list(filter_repo_objects(files, ignore_patterns=upload["ignore_patterns"]))
    assert {"model.safetensors", "tokenizer.json", "README.md", "metrics.json", "all_results.json"} <= set(uploaded)
    for name in uploaded:
        content = (folder / name).read_bytes()
        assert str(tmp_path).encode() not in content, name
        assert str(tmp_path.parent).encode() not in content, name
    card = (folder / "README.md").read_text()
    assert "# me/cola" in card
    assert "always the commonest label" in card
    # The rows lie here, whatever they are.
    assert "nyu-mll" not in card


def test_a_data_set_of_the_hub_is_named_in_the_card(tmp_path, recipe, monkeypatch, tasks):
    flags = yaml.safe_load(recipe.read_text())
    del flags["data_dir"]
    recipe.write_text(yaml.safe_dump(flags))
    read = []

    def load(name, part, split, **options):
        read.append((name, part, split))
        return Dataset.from_list(make_rows(TASKS[part], split))

    monkeypatch.setattr("experiments.glue.tasks.load_dataset", load)
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--dataset_name", "me/my-glue")
    assert read == [("me/my-glue", "cola", "train"), ("me/my-glue", "cola", "validation")]
    assert "datasets:\n- me/my-glue" in (tmp_path / "run" / "cola" / "README.md").read_text()


def test_a_folder_of_other_files_is_not_touched(tmp_path, recipe, monkeypatch):
    (tmp_path / "run" / "cola").mkdir(parents=True)
    (tmp_path / "run" / "cola" / "thesis.tex").write_text("precious")
    for more in ([], ["--overwrite"]):
        with pytest.raises(UserError, match="holds files that are no run of this script"):
            run(monkeypatch, "--recipe", recipe, "--task_name", "cola", *more)
    assert [path.name for path in (tmp_path / "run").rglob("*.*")] == ["thesis.tex"]


def test_scripts_without_a_recipe_read_the_base_recipe(tmp_path, checkpoint, monkeypatch):
    seen = {}

    monkeypatch.setattr(run_glue, "run", lambda command: seen.update(command.given))
    run(monkeypatch, "--model_name_or_path", checkpoint, "--task_name", "cola", "--use_cpu", "--output_dir", tmp_path)
    recipe = yaml.safe_load((run_glue.CONFIGURATION / "glue" / "base.yaml").read_text())
    assert seen.items() >= recipe.items() - {("learning_rate", "1e-4")}
    assert seen["learning_rate"] == 1e-4


def test_models_train_and_evaluate_only_what_was_asked(tmp_path, checkpoint, monkeypatch):
    seen = []
    monkeypatch.setattr(
        run_glue, "run", lambda command: seen.append((command.groups[-1].do_train, command.groups[-1].do_eval))
    )
    monkeypatch.setattr(run_glue, "report", lambda *args: None)
    for stages in ([], ["--do_train"], ["--do_eval"], ["--do_predict"], ["--do_train", "--do_eval"]):
        run(monkeypatch, "--model_name_or_path", checkpoint, "--task_name", "cola", "--use_cpu", *stages,
            "--output_dir", tmp_path)  # fmt: skip
    assert seen == [(True, True), (True, False), (False, True), (False, False), (True, True)]


def run_two_processes(*flags):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    result = subprocess.run(
        [*launcher, str(SCRIPT), *map(str, flags)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path, recipe):
    run_two_processes("--recipe", recipe, "--task_name", "mnli", "rte", "--mnli_checkpoint", "run", "--seeds", 2,
                      "--global_batch_size", 16, "--do_train", "--do_predict")  # fmt: skip
    metrics = read_metrics(tmp_path / "run" / "rte" / "seed-43")
    assert metrics["global_batch_size"] == 16
    assert metrics["eval_loss"] > 0
    assert len((tmp_path / "run" / "submission" / "RTE.tsv").read_text().splitlines()) == 7


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one(tmp_path, recipe, monkeypatch):
    # Layer norm in the smoother and no dropout: what is drawn and what is averaged over a batch would differ.
    more = ["--recipe", recipe, "--task_name", "sst2", "--max_steps", 6, "--eval_strategy", "steps", "--eval_steps", 2,
            "--save_strategy", "steps", "--save_steps", 2, "--load_best_model_at_end", "--do_train",
            "--do_predict", "--global_batch_size", 8, "--per_device_eval_batch_size", 5]  # fmt: skip
    run(monkeypatch, *more, "--output_dir", tmp_path / "one")
    run_two_processes(*more, "--per_device_train_batch_size", 4)
    one, two = (read_metrics(tmp_path / name / "sst2") for name in ("one", "run"))
    for name in ("loss", "eval_loss", "eval_score", "grad_norm"):
        curves = [[entry[name] for entry in metrics["history"] if name in entry] for metrics in (one, two)]
        assert len(curves[0]) >= 3
        assert curves[1] == pytest.approx(curves[0], rel=2e-3 if name == "grad_norm" else 1e-5), name
    assert (one["score"], one["best_step"]) == (two["score"], two["best_step"])
    answers = [(tmp_path / name / "submission" / "SST-2.tsv").read_text() for name in ("one", "run")]
    assert answers[0] == answers[1]


def test_bars_are_not_written_into_files(recipe, monkeypatch):
    seen = []
    monkeypatch.setattr(run_glue, "run", lambda command: seen.append(command.groups[-1].disable_tqdm))
    flags = yaml.safe_load(recipe.read_text())
    del flags["disable_tqdm"]
    recipe.write_text(yaml.safe_dump(flags))
    assert not sys.stderr.isatty()
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola")
    assert seen == [True]
