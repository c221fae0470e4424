"""The pre-training script from the command line to the checkpoint."""

import json
import math
import random
import re
import signal
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

import pretrain_mlm
from experiments import models, training
from experiments.arguments import UserError, parse_command, run_script
from experiments.run_folder import find_checkpoint
from experiments.text.masked_lm import MaskedLMTrainer
from experiments.text.pretraining import check_stages, run_identity
from modeling_sktformer import SKTformerForMaskedLM, load_preset
from support.glue_rows import files_below
from support.processes import run_on_processes
from support.steps import note_steps


SCRIPT = Path(pretrain_mlm.__file__)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A language of sentences whose second half follows from the first."""
    folder = tmp_path_factory.mktemp("text")
    choose = random.Random(0)
    subjects = {"the cat": "meows at night", "the dog": "barks at noon", "a bird": "sings in spring"}
    lines = []
    for _ in range(1500):
        subject = choose.choice(list(subjects))
        lines.append(f"{subject} {choose.choice(['often', 'never', 'always'])} {subjects[subject]} .")
    (folder / "train.txt").write_text("\n".join(lines[:1400]))
    (folder / "validation.txt").write_text("\n".join(lines[1400:]))
    return folder


@pytest.fixture
def recipe(tmp_path, text):
    """Flags of a run that takes seconds."""
    path = tmp_path / "recipe.yaml"
    flags = {
        "config_overrides": "num_hidden_layers=1,hidden_size=32,intermediate_size=64",
        "max_seq_length": 24,
        "vocab_size": 200,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "train_file": [str(text / "train.txt")],
        "validation_file": [str(text / "validation.txt")],
        "cache_dir": str(tmp_path / "cache"),
        "output_dir": str(tmp_path / "run"),
        "disable_tqdm": True,
    }
    path.write_text(yaml.safe_dump(flags))
    return path


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, flags)])
    pretrain_mlm.main()


def metrics_of(folder):
    return json.loads((Path(folder) / "metrics.json").read_text())


def test_a_run_leaves_a_model_that_fills_masks(tmp_path, recipe, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    steps = ["--max_steps", 220, "--eval_steps", 110, "--save_steps", 110, "--learning_rate", 2e-3, "--seed", 3]
    overrides = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "hidden_dropout_prob": 0.0}
    overrides |= {"smoother_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = ",".join(f"{name}={value}" for name, value in overrides.items())
    run(monkeypatch, "--recipe", recipe, *steps, "--config_overrides", sizes)
    folder = tmp_path / "run"
    metrics = metrics_of(folder)
    assert metrics["eval_loss"] < 0.6 * metrics["unigram_loss"]
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert metrics["unigram_perplexity"] == pytest.approx(math.exp(metrics["unigram_loss"]))
    assert metrics["seed"] == 3
    assert metrics["step_multiply_adds"] > 0
    assert metrics["environment"]["torch"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    fill_mask = pipeline("fill-mask", model=str(folder))
    guesses = {guess["token_str"] for guess in fill_mask("the dog often [MASK] at noon .", top_k=3)}
    assert len(guesses & {"barks", "meows", "sings"}) >= 2
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert model.config.landmark_seed == 3
    assert model.num_parameters() == metrics["parameters"]
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    assert "[MASK]" in (folder / "README.md").read_text()
    assert "unigram" in caplog.text

    again = yaml.safe_load((folder / "arguments.yaml").read_text())
    assert again["max_steps"] == 220
    results = json.loads((folder / "all_results.json").read_text())
    assert results["eval_loss"] == metrics["eval_loss"]
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 220
    before = files_below(folder)
    run(monkeypatch, "--recipe", folder / "arguments.yaml")
    assert "holds this run, finished" in caplog.text
    with pytest.raises(UserError, match=r"another run \(.*seed: 3 there, 4 here"):
        run(monkeypatch, "--recipe", folder / "arguments.yaml", "--seed", 4)
    assert {path.name for path, time in files_below(folder).items() if before[path] != time} <= {".lock"}


def test_any_architecture_with_the_same_tokenizer(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe)
    tokenizer = tmp_path / "run" / "tokenizer"
    other = tmp_path / "bert"
    run(monkeypatch, "--recipe", recipe, "--model_type", "bert", "--tokenizer_name", tokenizer, "--output_dir", other,
        "--config_overrides", "num_hidden_layers=1")  # fmt: skip
    assert metrics_of(other)["model_type"] == "bert"
    assert metrics_of(other)["unigram_loss"] == metrics_of(tmp_path / "run")["unigram_loss"]
    assert metrics_of(other)["eval_predicted_tokens"] == metrics_of(tmp_path / "run")["eval_predicted_tokens"]


def without(recipe, *names):
    flags = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({name: value for name, value in flags.items() if name not in names}))


def test_pre_training_goes_on_at_another_length(tmp_path, recipe, monkeypatch, caplog):
    caplog.set_level("INFO")
    run(monkeypatch, "--recipe", recipe)
    without(recipe, "config_overrides")
    longer = ["--model_name_or_path", tmp_path / "run", "--output_dir", tmp_path / "longer", "--max_seq_length", 48]
    run(monkeypatch, "--recipe", recipe, *longer)
    config = SKTformerForMaskedLM.from_pretrained(tmp_path / "longer").config
    assert (config.num_hidden_layers, config.max_position_embeddings) == (1, 48)
    assert AutoTokenizer.from_pretrained(tmp_path / "longer").model_max_length == 48
    assert "The model is lengthened from 24 to 48 tokens" in caplog.text
    # From there on this is the length that is meant.
    without(recipe, "max_seq_length")
    run(
        monkeypatch,
        "--recipe",
        recipe,
        "--model_name_or_path",
        tmp_path / "longer",
        "--output_dir",
        tmp_path / "again",
    )
    assert yaml.safe_load((tmp_path / "again" / "arguments.yaml").read_text())["max_seq_length"] == 48


def test_evaluation_alone_trains_nothing(tmp_path, recipe, text, monkeypatch, caplog):
    run(monkeypatch, "--recipe", recipe)
    without(recipe, "config_overrides")
    flags = ["--model_name_or_path", tmp_path / "run", "--output_dir", tmp_path / "evaluation", "--do_eval"]
    with monkeypatch.context() as context:
        context.setattr(MaskedLMTrainer, "train", stop)
        caplog.clear()
        caplog.set_level("INFO")
        run(context, "--recipe", recipe, *flags)
    assert "\n\nmetrics.json is in" in caplog.text
    assert "Steps: " not in caplog.text
    run(monkeypatch, "--recipe", recipe, *flags)
    assert "holds this run, finished; --overwrite repeats it." in caplog.text
    evaluation = metrics_of(tmp_path / "evaluation")
    assert evaluation["eval_loss"] == pytest.approx(metrics_of(tmp_path / "run")["eval_loss"], rel=1e-5)
    assert not (tmp_path / "evaluation" / "model.safetensors").exists()
    # Without the recipe, too, in the blocks of 24 tokens that the checkpoint was trained on.
    files = ["--train_file", text / "train.txt", "--validation_file", text / "validation.txt", "--use_cpu"]
    (tmp_path / "corpus.yaml").write_text("mlm_probability: 0.15\n")  # a recipe that says nothing of a length
    files += ["--recipe", tmp_path / "corpus.yaml"]
    run(monkeypatch, *flags[:2], "--do_eval", *files, "--output_dir", tmp_path / "as-trained")
    assert metrics_of(tmp_path / "as-trained")["eval_loss"] == pytest.approx(evaluation["eval_loss"], rel=1e-5)
    with pytest.raises(UserError, match="FSDP prepares no model without an optimizer: evaluate a checkpoint without"):
        run(monkeypatch, *flags, "--fsdp")
    for name, value in (
        ("ACCELERATE_USE_FSDP", "true"),
        ("FSDP_VERSION", "2"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--fsdp_cpu_ram_efficient_loading false"):
        run(monkeypatch, "--recipe", recipe, "--output_dir", tmp_path / "sharded")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    with pytest.raises(UserError, match="--do_eval alone evaluates a checkpoint"):
        run(monkeypatch, "--recipe", recipe, "--do_eval", "--output_dir", tmp_path / "nothing")


def test_a_finished_run_goes_on_to_more_steps(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe)
    counted, taken = metrics_of(tmp_path / "run")["step_multiply_adds"], note_steps(monkeypatch, MaskedLMTrainer)
    run(monkeypatch, "--recipe", recipe, "--max_steps", 6, "--logging_steps", 2, "--per_device_train_batch_size", 4,
        "--gradient_accumulation_steps", 2)  # fmt: skip
    steps = [entry["step"] for entry in metrics_of(tmp_path / "run")["history"] if "eval_loss" in entry]
    assert steps == [2, 4, 6]
    assert {number for _, number in taken} == {4, 5}
    assert metrics_of(tmp_path / "run")["step_multiply_adds"] == pytest.approx(counted)  # of the same global batch
    with pytest.raises(UserError, match="no run can be shortened"):
        run(monkeypatch, "--recipe", recipe)


def test_a_loss_of_other_samples_is_that_of_another_run(recipe, monkeypatch):
    flags = ["--recipe", recipe, "--max_eval_samples"]
    run(monkeypatch, *flags, 9)
    with pytest.raises(UserError, match="max_eval_samples: 9 there, 8 here"):
        run(monkeypatch, *flags, 8)


def test_what_is_masked_and_read_makes_another_run(recipe, monkeypatch):
    monkeypatch.setattr(models, "fingerprint_checkpoint", lambda name, revision: name)
    command = parse_command(pretrain_mlm.ARGUMENTS, argv=["--recipe", str(recipe)])
    command.groups[3].do_train = True
    corpus: Any = types.SimpleNamespace(fingerprint="text")
    before = vars(command.groups[2]).copy()

    def identity(**changes):
        vars(command.groups[2]).update(before | changes)
        return run_identity(command, corpus).values

    changes = {name: not value if isinstance(value, bool) else f"not {value}" for name, value in before.items()}
    same = {name for name, value in changes.items() if identity(**{name: value}) == identity()}
    assert same == {"sparse_prediction"}


def test_every_seed_is_evaluated_on_the_same_tokens(recipe, monkeypatch):
    mask_once, predicted = pretrain_mlm.mask_once, []

    def note(*args, **options):
        predicted.append(mask_once(*args, **options)["labels"][:])
        raise Stopped

    monkeypatch.setattr(pretrain_mlm, "mask_once", note)
    for seed in (1, 2):
        with pytest.raises(Stopped):
            run(monkeypatch, "--recipe", recipe, "--seed", seed)
    assert predicted[0] == predicted[1]


def test_a_text_that_has_changed_makes_another_run(tmp_path, recipe, text, monkeypatch):
    moved, changed = tmp_path / "moved.txt", tmp_path / "changed.txt"
    moved.write_text((text / "train.txt").read_text())
    changed.write_text((text / "train.txt").read_text() + "\nthe cat never barks .")
    run(monkeypatch, "--recipe", recipe)
    before = files_below(tmp_path / "run")
    run(monkeypatch, "--recipe", recipe, "--train_file", moved)
    assert {path.name for path, time in files_below(tmp_path / "run").items() if before[path] != time} <= {".lock"}
    with pytest.raises(UserError, match=r"another run \(data: "):
        run(monkeypatch, "--recipe", recipe, "--train_file", changed)


def test_a_configuration_that_has_changed_makes_another_run(tmp_path, recipe, monkeypatch):
    folder = tmp_path / "run"
    run(monkeypatch, "--recipe", recipe)
    assert json.loads((folder / "run.json").read_text())["decides"]["config_name"].startswith("sktformer-tiny@")
    with monkeypatch.context() as later:
        later.setattr(models, "load_preset", partial(load_preset, smoother_activation="silu"))
        with pytest.raises(UserError, match=r"another run \(config_name: sktformer-tiny@\w+ there, sktformer-tiny@"):
            run(monkeypatch, "--recipe", recipe)
    file = tmp_path / "mine.json"
    fields = json.loads((tmp_path / "run" / "config.json").read_text())
    file.write_text(json.dumps(fields))
    flags = ["--recipe", recipe, "--config_name", file, "--output_dir", tmp_path / "other"]
    run(monkeypatch, *flags)
    moved = tmp_path / "moved" / "mine.json"
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    run(monkeypatch, *flags, "--config_name", moved, "--max_steps", 6)
    assert metrics_of(tmp_path / "other")["history"][-1]["step"] == 6
    file.write_text(json.dumps(fields | {"hidden_dropout_prob": 0.4}))
    with pytest.raises(UserError, match=r"another run \(config_name: mine\.json@\w+ there, mine\.json@\w+ here\)"):
        run(monkeypatch, *flags, "--max_steps", 8)


def test_a_diverged_run_is_not_taken_for_a_good_one(tmp_path, recipe, monkeypatch):
    with pytest.raises(UserError, match="Training has diverged"):
        run(monkeypatch, "--recipe", recipe, "--learning_rate", 1e30, "--max_grad_norm", 0, "--optim", "sgd")
    assert not list((tmp_path / "run").rglob("metrics.json"))
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_first_lines_say_what_runs(tmp_path, recipe, monkeypatch, caplog):
    caplog.set_level("INFO")
    run(monkeypatch, "--recipe", recipe)
    said = "\n".join(record.getMessage() for record in caplog.records)
    starts = [f"\n{said}".index(f"\n{name}:") for name in ("Recipe", "Devices", "Model", "Data", "Steps")]
    assert starts == sorted(starts)
    assert starts[1] < said.index("Trained") < starts[2]
    assert f"{metrics_of(tmp_path / 'run')['parameters']:,} parameters" in said
    assert "recipe.yaml" in said
    assert "4 of 8 sequences" in said
    # What is known before the text has been read is said before it is, which may take hours.
    plan = next(line for line in said.splitlines() if line.startswith("Plan:"))
    assert said.index(plan) < said.index("Trained")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    config = load_preset("sktformer-tiny", **sizes, vocab_size=200, max_position_embeddings=24)
    size = SKTformerForMaskedLM(config).num_parameters()
    model = f"sktformer, {size:,} parameters, new, sktformer-tiny with at most 200 tokens"
    assert plan.split(maxsplit=1)[1] == f"{model}; steps: 4 of 8 sequences of 24 tokens"


def test_evaluation_in_between_changes_nothing(tmp_path, recipe, monkeypatch):
    losses = []
    for steps in (1, 4):
        run(monkeypatch, "--recipe", recipe, "--eval_steps", steps, "--output_dir", tmp_path / str(steps))
        losses.append([entry["loss"] for entry in metrics_of(tmp_path / str(steps))["history"] if "loss" in entry])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("flags", [[], ["--streaming", "--max_train_samples", "6"]])
def test_a_run_that_is_cut_short_ends_as_if_it_had_not_been(tmp_path, recipe, monkeypatch, flags):
    flags = ["--recipe", recipe, *flags]  # of the stream, when it has begun again
    run(monkeypatch, *flags, "--output_dir", tmp_path / "whole")

    def cut(trainer, *args, **kwargs):
        if trainer.state.global_step == 3:
            raise Stopped
        return training_step(trainer, *args, **kwargs)

    training_step = MaskedLMTrainer.training_step
    with monkeypatch.context() as context:
        context.setattr(MaskedLMTrainer, "training_step", cut)
        with pytest.raises(Stopped):
            run(context, *flags)
    folder = tmp_path / "run"
    assert find_checkpoint(folder) == str(folder / "checkpoint-2")
    (folder / "checkpoint-3").mkdir()  # begun when the power went: not one to go on from
    assert find_checkpoint(folder) == str(folder / "checkpoint-2")
    assert not (folder / "metrics.json").exists()
    steps = note_steps(monkeypatch, MaskedLMTrainer)
    run(monkeypatch, *flags)
    assert [number for _, number in steps] == [2, 3]
    for name in ("loss", "eval_loss"):
        there, here = (
            [entry[name] for entry in metrics_of(place)["history"] if name in entry]
            for place in (tmp_path / "whole", folder)
        )
        assert here == pytest.approx(there, rel=1e-5)


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path, recipe):
    command = [sys.executable, str(SCRIPT), "--recipe", str(recipe), "--max_steps", "400"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while find_checkpoint(tmp_path / "run") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert find_checkpoint(tmp_path / "run")
    subprocess.run(command, check=True, capture_output=True)
    assert "train_loss" not in metrics_of(tmp_path / "run")  # which only training from the first step has
    assert metrics_of(tmp_path / "run")["train_runtime"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--bf16"],
        ["--activation_checkpointing"],
        ["--torch_compile", "--torch_compile_backend", "aot_eager"],
        ["--one_document_per_block", "--document_unit", "row"],
        ["--config_overrides", "smoother_norm=batch_norm", "--activation_checkpointing"],
        ["--dataloader_num_workers", "2"],
    ],
    ids=lambda flags: flags[0].lstrip("-"),
)
def test_ways_to_train(tmp_path, recipe, monkeypatch, flags):
    run(monkeypatch, "--recipe", recipe, *flags)
    assert metrics_of(tmp_path / "run")["eval_loss"] > 0


def test_streaming(tmp_path, recipe, monkeypatch, caplog):
    caplog.set_level("INFO")
    run(monkeypatch, "--recipe", recipe, "--streaming")
    # Readers share the documents among themselves: another number of them reads another order of blocks.
    with pytest.raises(UserError, match=r"another run \(readers: 1 there, 2 here\)"):
        run(monkeypatch, "--recipe", recipe, "--streaming", "--dataloader_num_workers", 2)
    assert re.search(r"Data: +a stream, evaluated on \d+ blocks", caplog.text)
    assert [entry["step"] for entry in metrics_of(tmp_path / "run")["history"] if "loss" in entry] == [1, 2, 3, 4]
    assert "unigram frequencies of the evaluation text" in (tmp_path / "run" / "README.md").read_text()


def test_of_a_kept_best_model_its_own_step_is_recorded(tmp_path, recipe, monkeypatch):
    worst = ["--metric_for_best_model", "eval_loss", "--greater_is_better", "true"]  # which is known to be the first
    run(monkeypatch, "--recipe", recipe, "--load_best_model_at_end", *worst)
    metrics = metrics_of(tmp_path / "run")
    losses = {entry["step"]: entry["eval_loss"] for entry in metrics["history"] if "eval_loss" in entry}
    assert (metrics["step"], metrics["eval_loss"]) == (2, pytest.approx(losses[2]))
    assert losses.keys() == {2, 4}
    assert losses[4] < losses[2]


def test_a_run_whose_only_loss_is_that_of_its_best_model_has_a_curve(tmp_path, recipe, monkeypatch):
    late = ["--eval_delay", "100", "--logging_strategy", "no"]
    run(monkeypatch, "--recipe", recipe, "--load_best_model_at_end", *late)
    assert [entry["step"] for entry in metrics_of(tmp_path / "run")["history"]] == [4]
    assert (tmp_path / "run" / "loss.png").exists()


def test_streaming_needs_steps(recipe, monkeypatch):
    with pytest.raises(UserError, match="--max_steps"):
        run(monkeypatch, "--recipe", recipe, "--streaming", "--max_steps", -1)


class Stopped(Exception):
    """Raised where a test has seen enough of a run."""


def stop(*args, **kwargs):
    raise Stopped


@pytest.mark.parametrize(("per_device", "accumulation"), [(8, 2), (16, 1), (32, 1)])
def test_the_global_batch_is_kept_by_accumulation(recipe, monkeypatch, per_device, accumulation):
    seen: dict[str, int] = {}
    monkeypatch.setattr(
        MaskedLMTrainer,
        "train",
        lambda trainer, **_: seen.update(steps=trainer.args.gradient_accumulation_steps) or stop(),
    )
    with pytest.raises(Stopped):
        run(monkeypatch, "--recipe", recipe, "--global_batch_size", 16, "--per_device_train_batch_size", per_device)
    assert seen == {"steps": accumulation}


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, recipe):
    dropouts = ["hidden_dropout_prob", "attention_probs_dropout_prob", "smoother_dropout_prob"]
    sizes = "num_hidden_layers=1,hidden_size=32,intermediate_size=64,smoother_norm=layer_norm"
    flags = ["--config_overrides", ",".join([sizes, *(f"{name}=0.0" for name in dropouts)])]
    losses = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        command = [SCRIPT, "--recipe", recipe, "--global_batch_size", 16, "--max_steps", 6, *flags]
        run_on_processes(number, *command, "--output_dir", folder)
        losses.append([entry.get("loss", entry.get("eval_loss")) for entry in metrics_of(folder)["history"]])
    assert len(losses[0]) > 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--global_batch_size", "12"], "not a multiple of 8"),
        (["--max_seq_length", "2"], "at least 3"),
        (["--mlm_probability", "1.5"], "between 0 and 1"),
        (["--config_overrides", "hidden_size=30"], "not divisible"),
        (["--config_overrides", "num_landmark_tokens=99"], "larger than `max_position_embeddings`"),
        (["--config_name", "sktformer-huge"], "neither a preset"),
        (["--train_file", "nowhere.txt"], "nowhere.txt"),
        (["--tokenizer_name", "nowhere"], "tokenizer nowhere cannot be loaded"),
        (["--model_name_or_path", "nowhere"], "nowhere"),
        (["--tokenizer_name", "mine", "--vocab_size", "99"], "--vocab_size is of a tokenizer .*, and mine has one"),
        (["--datasets", "Salesforce/wikitext:wikitext-103-raw-v1"], "(?i)offline|reach"),
        (["--attn_implementation", "sdpa"], "--attn_implementation"),
        (["--evaluation_strategy", "steps"], "--evaluation_strategy"),
        (["--vocab_size", "5"], "--vocab_size is 5; it must be at least 7"),
        (["--config_overrides", "hidden_act=gleu"], "hidden_act"),
        (["--config_overrides", "initializer_range=-1"], "initializer_range"),
        (["--resume_from_checkpoint", "nowhere"], "--resume_from_checkpoint nowhere"),
        (["--global_batch_size", "-8"], "not a multiple"),
        (["--push_to_hub", "--hub_model_id", "me/mine"], "cannot reach the Hub"),
        (["--learning_rate", "-1"], "--learning_rate is -1"),
        (["--report_to", "carrier_pigeon"], "--report_to .*carrier_pigeon"),
        (["--max_steps", "5", "--num_train_epochs", "1"], "contradict each other"),
        (["--do_predict"], "--do_predict is for labels"),
        (["--max_seq_length", "4000", "--full_blocks_only"], "does not fill one block"),
        (["--lr_scheduler_type", "cosine_with_min_lr"], "--lr_scheduler_type cosine_with_min_lr: .*min_lr"),
        (["--optim", "lion_8bit"], "--optim lion_8bit: "),
    ],
)
def test_mistakes_are_explained_and_leave_nothing(tmp_path, recipe, monkeypatch, flags, message):
    with pytest.raises(UserError, match=message) as error:
        run(monkeypatch, "--recipe", recipe, *flags)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_run_is_not_gone_on_from(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--output_dir", tmp_path / "other")
    for folder in (tmp_path / "other" / "checkpoint-4", tmp_path / "other"):
        with pytest.raises(UserError, match=r"--resume_from_checkpoint .* is of another run than .*run; leave it out"):
            run(monkeypatch, "--recipe", recipe, "--resume_from_checkpoint", folder, "--seed", 7)
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(UserError, match="checkpoint-2 holds no whole checkpoint; leave it out"):
        run(monkeypatch, "--recipe", recipe, "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2")


def test_overwriting_is_for_runs_alone(tmp_path, recipe, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="no run of this script"):
        run(monkeypatch, "--recipe", recipe, "--overwrite")
    (folder / "thesis.tex").unlink()
    run(monkeypatch, "--recipe", recipe, "--overwrite")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(UserError, match="would delete"):
        run(monkeypatch, "--recipe", recipe, "--overwrite", "--tokenizer_name", folder / "tokenizer", "--seed", 5)
    (folder / "mine.yaml").write_text("seed: 5\n")
    with pytest.raises(UserError, match=r"would delete .*mine\.yaml"):
        run(monkeypatch, "--recipe", recipe, folder / "mine.yaml", "--overwrite")
    (folder / "mine.yaml").unlink()
    with pytest.raises(UserError, match="not divisible"):
        run(monkeypatch, "--recipe", recipe, "--overwrite", "--config_overrides", "hidden_size=30")
    with pytest.raises(UserError, match="does not fill one block"):  # which shows late
        run(monkeypatch, "--recipe", recipe, "--overwrite", "--max_seq_length", 4000, "--full_blocks_only")
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "overwrite" not in (folder / "arguments.yaml").read_text()
    run(monkeypatch, "--recipe", recipe, "--overwrite", "--seed", 5)
    assert metrics_of(folder)["seed"] == 5


def test_a_folder_is_emptied_when_all_processes_have_looked_at_it(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe)
    seen = []
    monkeypatch.setattr(
        pretrain_mlm.PartialState,
        "wait_for_everyone",
        lambda _: seen.append((tmp_path / "run" / "metrics.json").exists()),
    )
    run(monkeypatch, "--recipe", recipe, "--overwrite")
    assert seen[0], "another process may not have looked yet"


@pytest.mark.parametrize(
    ("flags", "origin"), [((), ("owner/model", "v1")), (("owner/words",), ("owner/words", "main"))]
)
def test_a_revision_is_that_of_the_checkpoint_and_its_tokenizer(recipe, monkeypatch, flags, origin):
    asked = []

    def load(name, trust_remote_code, needed, revision):
        asked.append((name, revision))
        raise Stopped

    monkeypatch.setattr(models, "load_tokenizer", load)
    named = [word for name in flags for word in ("--tokenizer_name", name)]
    with pytest.raises(Stopped):
        run(monkeypatch, "--recipe", recipe, "--model_name_or_path", "owner/model", "--model_revision", "v1", *named)
    assert asked == [origin]


def test_what_must_stay_secret_is_not_written_down(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--hub_token", "hf_secret")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.suffix in (".yaml", ".json", ".md"):
            assert "hf_secret" not in path.read_text(), path
    assert str(tmp_path) not in (tmp_path / "run" / "README.md").read_text()


def test_recipes_written_with_an_equals_sign_replace_the_quick_start(tmp_path, recipe, monkeypatch):
    run(monkeypatch, f"--recipe={recipe}")
    assert "config_name" not in yaml.safe_load((tmp_path / "run" / "arguments.yaml").read_text())


def test_nystromformer_gets_full_blocks_alone(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe, "--model_type", "nystromformer", "--config_overrides", "num_landmarks=8")
    assert metrics_of(tmp_path / "run")["model_type"] == "nystromformer"


def test_a_folder_of_other_files_is_not_touched(tmp_path, recipe, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--recipe", str(recipe)])
    with pytest.raises(SystemExit) as exit_info:
        run_script(pretrain_mlm.main)
    assert exit_info.value.code == 2
    assert "holds files that are no run of this script" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_finished_run_is_uploaded_with_its_card(tmp_path, recipe, monkeypatch):
    uploads = []
    monkeypatch.setattr(
        MaskedLMTrainer, "init_hf_repo", lambda trainer, *_: setattr(trainer, "hub_model_id", "me/mine")
    )
    monkeypatch.setattr(MaskedLMTrainer, "_push_from_checkpoint", lambda *_: None)
    monkeypatch.setattr(training, "whoami", lambda: {"name": "me"})
    monkeypatch.setattr(training, "upload_folder", lambda **arguments: uploads.append(arguments))
    monkeypatch.setattr(training, "create_repo", lambda name, **_: types.SimpleNamespace(repo_id=name))
    run(monkeypatch, "--recipe", recipe)
    assert not uploads
    # A finished run can still be uploaded.
    run(monkeypatch, "--recipe", recipe, "--push_to_hub", "--hub_model_id", "me/mine")
    (upload,) = uploads
    run(monkeypatch, "--recipe", recipe, "--push_to_hub", "--hub_model_id", "me/mine", "--overwrite")
    assert len(uploads) == 2
    assert (upload["repo_id"], upload["folder_path"]) == ("me/mine", str(tmp_path / "run"))
    card = (tmp_path / "run" / "README.md").read_text()
    assert "unigram frequencies" in card
    assert "pipeline_tag: fill-mask" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code, "card", "exec")


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        (1, "probabilities", [0.5, 0.5]),
        (1, "one_document_per_block", True),
        (1, "streaming", True),
        (0, "model_type", "bert"),
        (0, "config_overrides", "hidden_size=64"),
        (0, "config_name", "sktformer-mini"),
        (2, "tokenizer_name", "owner/words"),
    ],
)
def test_what_is_read_and_made_makes_another_run(recipe, group, name, value):
    command = parse_command(pretrain_mlm.ARGUMENTS, argv=["--recipe", str(recipe)])
    command.groups[3].do_train = True
    corpus: Any = types.SimpleNamespace(fingerprint="text")
    before = run_identity(command, corpus)
    setattr(command.groups[group], name, value)
    assert run_identity(command, corpus) != before


def test_a_run_goes_on_from_the_checkpoint_that_is_named(tmp_path, recipe, monkeypatch):
    run(monkeypatch, "--recipe", recipe)
    steps = note_steps(monkeypatch, MaskedLMTrainer)
    named = tmp_path / "run" / "checkpoint-2"
    run(monkeypatch, "--recipe", recipe, "--max_steps", 6, "--resume_from_checkpoint", named)
    assert [number for _, number in steps] == [2, 3, 4, 5]


def test_a_stream_is_not_read_by_one_process_for_all(recipe):
    command = parse_command(pretrain_mlm.ARGUMENTS, argv=["--recipe", str(recipe), "--streaming", "--do_train"])
    model, corpus, _, training_arguments = command.groups
    check_stages(training_arguments, model, corpus)
    assert training_arguments.accelerator_config.dispatch_batches is False
