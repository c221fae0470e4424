"""Runs of run_glue.py: resumed, refused, never overwritten unasked, uploaded, on several processes."""

import json
import logging
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import yaml
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

import run_glue
from experiments import training
from experiments.arguments import UserError
from experiments.fine_tuning import FineTuningTrainer
from experiments.glue.jobs import pack_submission
from experiments.glue.tasks import TASKS
from experiments.results import write_atomically
from experiments.run_folder import RUN_FILE
from support.glue_rows import files_below, make_rows, make_tokenizer, read_metrics, write_rows, write_tasks
from support.glue_runs import SCRIPT, Stopped, run, save_other_architecture, stop, stop_at_step
from support.processes import run_on_processes
from support.steps import note_steps


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
    flags = ["--task_name", "rte", "--model_name_or_path", tmp_path / "run" / "rte", "--do_predict"]
    run(monkeypatch, "--recipe", recipe, *flags, "--test_file", test)
    with pytest.raises(UserError, match=r"--output_dir .*test\.jsonl/run cannot be written"):
        run(monkeypatch, "--recipe", recipe, *flags, "--test_file", test, "--output_dir", test / "run")
    lines = (tmp_path / "other" / "submission" / "RTE.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "8", "3"]


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
        (["--task_name", "stsb", "--fit_head"], "--fit_head is for single labels, and stsb has none"),
        (["--task_name", "cola", "--fit_head", "--lora"], "adapters of --lora could learn; leave one of them out"),
        (["--task_name", "cola", "--search", "--max_steps", "3"], "which --max_steps overrides"),
        (["--task_name", "cola", "--search", "--max_steps", "-1", "--search_batch_sizes", "8", "12"], "12 is not a"),
        (["--task_name", "cola", "--global_batch_size", "12"], "not a multiple of 8"),
        (["--task_name", "cola", "rte", "--push_to_hub"], "--push_to_hub pushes one model"),
        (["--task_name", "cola", "--push_to_hub"], "cannot reach the Hub"),
        (["--task_name", "cola", "--resume_from_checkpoint", "nowhere"], "--resume_from_checkpoint nowhere"),
        (["--task_name", "cola", "--evaluation_strategy", "no"], "--evaluation_strategy"),
        (["--task_name", "cola", "--learning_rate", "-1"], "--learning_rate is -1"),
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
        ({"train_file": "{rows}", "validation_file": "{bad}"}, r"bad\.jsonl: row 2 has the label 3"),
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


def test_a_new_mnli_model_is_waited_for(tmp_path, recipe, monkeypatch):
    more = ["--task_name", "mnli", "rte", "--mnli_checkpoint", "run", "--max_steps", 1]
    run(monkeypatch, "--recipe", recipe, *more, "--seeds", 2)
    run(monkeypatch, "--recipe", recipe, *more, "--overwrite")
    assert read_metrics(tmp_path / "run" / "rte")["started_from"] == "mnli"


def test_another_mnli_model_makes_another_run(tmp_path, recipe, monkeypatch):
    more, folder = ["--mnli_checkpoint", "run", "--max_steps", 1], tmp_path / "run"
    run(monkeypatch, "--recipe", recipe, "--task_name", "mnli", "rte", *more)
    before = files_below(folder / "rte")
    shutil.rmtree(folder / "mnli")
    run(monkeypatch, "--recipe", recipe, "--task_name", "mnli", "rte", *more)
    assert files_below(folder / "rte") == before  # the very same model was made again
    decided = {name: json.loads((folder / name / "run.json").read_text())["decides"] for name in ("mnli", "rte")}
    assert decided["mnli"]["mnli_checkpoint"] is None
    assert decided["rte"]["mnli_checkpoint"] not in (None, "run")
    run(monkeypatch, "--recipe", recipe, "--task_name", "mnli", "--max_steps", 2, "--overwrite")
    with pytest.raises(UserError, match=r"holds another run \(mnli_checkpoint: "):
        run(monkeypatch, "--recipe", recipe, "--task_name", "rte", *more)
    assert files_below(folder / "rte") == before


def test_a_model_s_folder_is_no_place_for_tasks(recipe, monkeypatch, checkpoint):
    before = files_below(checkpoint)
    with pytest.raises(UserError, match="is a model's folder"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--output_dir", checkpoint)
    assert files_below(checkpoint) == before


def test_tokens_of_the_hub_are_not_saved(tmp_path, recipe, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")  # so that it is taken back afterwards
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--hub-token", "hf_secret")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if b"hf_secret" in path.read_bytes()]


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
    for other, message in (
        (["--model_name_or_path", everything / "qnli"], "holds cola of another checkpoint"),
        (["--config_overrides", "classifier_pooling=mean"], r"overrides \(None there, classifier_pooling=mean here"),
        (["--task_name", "rte", "cola", "--resume_from_checkpoint", folder], "names one task's; give one task"),
    ):
        with pytest.raises(UserError, match=message):
            run(monkeypatch, "--recipe", recipe, "--task_name", "rte", *other)
        assert files_below(folder) == before
    with pytest.raises(UserError, match="would delete"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--model_name_or_path", folder / "cola",
            "--overwrite")  # fmt: skip
    assert files_below(folder) == before
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--seeds", 2, "--overwrite")
    assert len(read_metrics(folder / "cola")["trials"]) == 2
    assert "overwrite" not in (folder / "cola" / "arguments.yaml").read_text()


def test_predictions_are_of_the_model_that_is_there(tmp_path, recipe, monkeypatch, everything):
    folder, other = tmp_path / "run", ["--model_name_or_path", everything / "sst2", "--ignore_mismatched_sizes"]
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", "--do_train", "--do_eval", "--do_predict")
    before = files_below(folder)
    with pytest.raises(UserError, match="holds cola of another checkpoint"):
        run(monkeypatch, "--recipe", recipe, "--task_name", "cola", *other, "--do_predict", "--overwrite")
    assert files_below(folder) == before
    with monkeypatch.context() as context:
        context.setattr(FineTuningTrainer, "train", stop)
        with pytest.raises(Stopped):
            run(context, "--recipe", recipe, "--task_name", "cola", *other, "--overwrite")
    with monkeypatch.context() as context:
        stop_at_step(context, 42, 1)
        with pytest.raises(Stopped):
            run(context, "--recipe", recipe, "--task_name", "cola", *other, "--overwrite", "--save_strategy", "steps",
                "--save_steps", 1)  # fmt: skip
    run(monkeypatch, "--recipe", recipe, "--task_name", "rte", *other, "--do_train", "--do_predict")
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        assert archive.namelist() == ["RTE.tsv"]
    assert (folder / "submission" / "CoLA.tsv").exists()
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola", *other, "--overwrite")
    assert [path.name for path in folder.rglob("*.tsv")] == ["RTE.tsv"]
    assert not (folder / "submission.zip").exists()


def test_the_diagnostics_of_a_replaced_model_are_not_submitted(tmp_path):
    for name in ("AX", "CoLA", "MNLI-m", "MNLI-mm"):
        write_atomically(tmp_path / "submission" / f"{name}.tsv", "index\tprediction\n")
    write_atomically(tmp_path / "mnli" / RUN_FILE, "{}")
    assert pack_submission(tmp_path / "submission", tmp_path / "submission.zip") == ["CoLA.tsv"]


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
    saved = ["--save_strategy", "steps", "--save_steps", 1]
    with monkeypatch.context() as context:
        stop_at_step(context, 42, 1)
        with pytest.raises(Stopped):
            run(context, "--recipe", recipe, "--task_name", "cola", *saved)
    shutil.copytree(tasks, tmp_path / "data")
    shutil.copytree(checkpoint, tmp_path / "model")
    more = ["--data_dir", tmp_path / "data", "--model_name_or_path", tmp_path / "model", "--task_name", "cola"]
    taken = note_steps(monkeypatch, FineTuningTrainer)
    run(monkeypatch, "--recipe", recipe, *more, *saved, "--logging_steps", 2)
    assert taken[0] == (42, 1)
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
    monkeypatch.setattr(training, "whoami", lambda: {"name": "me"})
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


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path, recipe):
    run_on_processes(2, SCRIPT, "--recipe", recipe, "--task_name", "mnli", "rte", "--mnli_checkpoint", "run",
                     "--seeds", 2, "--global_batch_size", 16, "--do_train", "--do_predict")  # fmt: skip
    metrics = read_metrics(tmp_path / "run" / "rte" / "seed-43")
    assert metrics["global_batch_size"] == 16
    assert metrics["eval_loss"] > 0
    assert len((tmp_path / "run" / "submission" / "RTE.tsv").read_text().splitlines()) == 7


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one(tmp_path, recipe, monkeypatch):
    # Layer norm in the smoother and no dropout: what is drawn and what is averaged over a batch would differ.
    more = ["--recipe", recipe, "--task_name", "sst2", "--max_steps", 6, "--eval_strategy", "steps", "--eval_steps", 2,
            "--save_strategy", "steps", "--save_steps", 2, "--load_best_model_at_end", "--do_train",
            "--do_predict", "--global_batch_size", 8, "--per_device_eval_batch_size", 3]  # fmt: skip
    run(monkeypatch, *more, "--output_dir", tmp_path / "one")
    run_on_processes(2, SCRIPT, *more, "--per_device_train_batch_size", 4)
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


def test_other_lengths_and_padding_make_another_run(recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--task_name", "cola")
    for name, value in (("max_seq_length", 48), ("pad_to_max_length", True)):
        with pytest.raises(UserError, match=f"another run .*{name}: "):
            run(monkeypatch, "--recipe", recipe, "--task_name", "cola", f"--{name}", value)
