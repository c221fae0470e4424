"""Fine-tuning on GLUE from the command line to the table and the files of a submission."""

import json
import statistics
import zipfile

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from experiments.arguments import UserError
from experiments.fine_tuning import FineTuningTrainer
from experiments.glue.tasks import DIAGNOSTICS, TASKS
from support.glue_rows import files_below, make_rows, make_tokenizer, read_metrics, write_rows
from support.glue_runs import run, save_other_architecture, stop


FILES = {
    **{"MNLI-m": "mnli", "MNLI-mm": "mnli", "AX": "mnli", "QQP": "qqp", "QNLI": "qnli", "SST-2": "sst2"},
    **{"CoLA": "cola", "STS-B": "stsb", "MRPC": "mrpc", "RTE": "rte", "WNLI": "wnli"},
}


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


def test_tests_are_read_at_the_length_of_the_training(tmp_path, recipe, monkeypatch, caplog):
    caplog.set_level("INFO")
    flags = ["--recipe", recipe, "--task_name", "stsb", "--do_predict"]
    run(monkeypatch, *flags, "--do_train")
    trained = (tmp_path / "run" / "submission" / "STS-B.tsv").read_text()
    run(monkeypatch, *flags, "--max_seq_length", 6)
    assert "stsb predicts with --max_seq_length 32, as it was trained." in caplog.text
    assert (tmp_path / "run" / "submission" / "STS-B.tsv").read_text() == trained
    other = ["--model_name_or_path", tmp_path / "run" / "stsb", "--output_dir", tmp_path / "other"]
    run(monkeypatch, *flags, *other, "--max_seq_length", 6)
    assert (tmp_path / "other" / "submission" / "STS-B.tsv").read_text() != trained


def test_similarities_stay_in_their_range(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--task_name", "stsb")
    assert "always the mean" in (tmp_path / "run" / "stsb" / "README.md").read_text()
    other = ["--model_name_or_path", tmp_path / "run" / "stsb", "--output_dir", tmp_path / "other"]
    with pytest.raises(UserError, match=r"classes are unacceptable, acceptable: it was fine-tuned on another task"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--do_predict", *other)
    weights = tmp_path / "run" / "stsb" / "model.safetensors"
    changed = load_file(weights)
    (bias,) = [name for name in changed if name.endswith("classifier.output.bias")]
    for value, prediction in ((50.0, "5.000"), (-50.0, "0.000")):
        changed[bias] = torch.tensor([value])
        save_file(changed, weights, metadata={"format": "pt"})
        run(monkeypatch, "--recipe", recipe, "--task_name", "stsb", "--do_predict")
        lines = (tmp_path / "run" / "submission" / "STS-B.tsv").read_text().splitlines()
        assert [line.split("\t")[1] for line in lines[1:]] == [prediction] * 6


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
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))  # none where nothing is padded
            assert mask.shape[1] == mask.sum(dim=1).max() < 32
        assert len({batch["input_ids"].shape[1] for batch in batches[kind]}) > 1
    with monkeypatch.context() as context:
        batches = spy_on_batches(context)
        run(context, "--recipe", recipe, *small, "--pad_to_max_length", "--output_dir", tmp_path / "padded")
    assert {batch["input_ids"].shape[1] for batch in batches["train"] + batches["eval"]} == {32}


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


def test_a_checkpoint_is_measured_with_as_many_tokens_as_it_was_trained_with(tmp_path, everything, tasks, monkeypatch):
    flags = ["--model_name_or_path", everything / "rte", "--data_dir", tasks, "--task_name", "rte", "--do_eval"]
    for typed, length in (([], 32), (["--max_seq_length", 16], 16)):
        folder = tmp_path / str(length)
        run(monkeypatch, *flags, *typed, "--use_cpu", "--cache_dir", tmp_path / "cache", "--output_dir", folder)
        assert json.loads((folder / "rte" / "run.json").read_text())["decides"]["max_seq_length"] == length
        assert yaml.safe_load((folder / "rte" / "arguments.yaml").read_text())["max_seq_length"] == length


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


def test_adapters_are_trained_searched_and_predict(tmp_path, recipe, monkeypatch):
    pytest.importorskip("peft")
    more = ["--task_name", "sst2", "--lora", "--max_steps", -1, "--search", "--search_epochs", 1, 2,
            "--search_learning_rates", 1e-2, "--search_batch_sizes", 8, "--do_train", "--do_predict"]  # fmt: skip
    run(monkeypatch, "--recipe", recipe, *more)
    folder = tmp_path / "run" / "sst2"
    (adapter,) = folder.rglob("adapter_model.safetensors")
    weights = adapter.parent.parent / "model.safetensors"
    assert list(folder.rglob("model.safetensors")) == [weights]
    assert (tmp_path / "run" / "submission" / "SST-2.tsv").is_file()
    with pytest.raises(UserError, match=r"holds sst2 of another lora \(.* there, None here\)"):
        run(monkeypatch, "--recipe", recipe, *(flag for flag in more if flag != "--lora"))
    # Where the best weights are gone nothing else answers in their place.
    weights.unlink()
    with pytest.raises(UserError, match=r"has no weights any more; run it again with --recipe .*arguments\.yaml"):
        run(monkeypatch, "--recipe", recipe, *(flag for flag in more if flag != "--do_train"))
    run(monkeypatch, "--recipe", recipe, *more)
    assert weights.is_file()


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
    with pytest.raises(UserError, match=r"answers with unacceptable, acceptable, .*pass --ignore_mismatched_sizes"):
        run(monkeypatch, "--recipe", recipe, *more)
    assert not (tmp_path / "run").exists()
    run(monkeypatch, "--recipe", recipe, *more, "--ignore_mismatched_sizes")
    assert AutoConfig.from_pretrained(tmp_path / "run" / "sst2").id2label == {0: "negative", 1: "positive"}


def test_part_of_the_data_is_said_to_be_one(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "rte", "--max_eval_samples", 4)
    table = (tmp_path / "run" / "glue.md").read_text()
    assert "Run on a part of the data: CoLA, RTE." in table
    assert "Every score is the result of one run (seed 42)." in table


def test_a_data_set_of_the_hub_is_named_in_the_card(tmp_path, recipe, monkeypatch, tasks):
    flags = yaml.safe_load(recipe.read_text())
    del flags["data_dir"]
    recipe.write_text(yaml.safe_dump(flags))
    read = []

    def load(name, part, revision, cache_dir, split):
        read.append((name, part, split))
        return Dataset.from_list(make_rows(TASKS[part.removesuffix("-small")], split))

    monkeypatch.setattr("experiments.glue.tasks.load_prepared", load)
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--dataset_name", "me/my-glue")
    assert read == [("me/my-glue", "cola", "train"), ("me/my-glue", "cola", "validation")]
    assert "datasets:\n- me/my-glue" in (tmp_path / "run" / "cola" / "README.md").read_text()
    named = ["--dataset_name", "me/my-glue", "--dataset_config_name", "rte-small"]
    run(monkeypatch, "--recipe", recipe, "--task_name", "rte", *named)
    assert read[2:] == [("me/my-glue", "rte-small", "train"), ("me/my-glue", "rte-small", "validation")]
