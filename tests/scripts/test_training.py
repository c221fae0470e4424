"""What every training has in common: checks before it begins, what makes it this run, and when it stops."""

import json
import math
import os
import statistics
import sys
import types
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import AcceleratorState
from datasets import Dataset
from filelock import FileLock
from huggingface_hub.errors import LocalTokenNotFoundError
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_pt_utils import LengthGroupedSampler

from experiments import trainer as trainer_module
from experiments import training as training_module
from experiments.arguments import UserError, parse_args
from experiments.run_folder import RunIdentity, folder_state
from experiments.trainer import ExperimentTrainer, LengthsOfEpoch, StepTimer
from experiments.training import (
    RunArguments,
    describe_steps,
    finish_trackers,
    global_batch,
    hold_folder,
    prepare,
    training_identity,
    upload_run,
)
from modeling_sktformer import SKTformerForMaskedLM, load_preset


def arguments(tmp_path, *flags):
    (training,) = parse_args([RunArguments], ["--output_dir", str(tmp_path / "run"), "--use_cpu", *flags])
    return training


class Line(nn.Module):
    """A model of one weight; its loss is a parabola with noise, so that draws of the generator show."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x, labels=None):
        loss = ((self.weight * x + torch.randn_like(x) * self.training) ** 2).mean()
        return SequenceClassifierOutput(loss=loss, logits=x)


ROWS = Dataset.from_dict({"x": [0.5, 1.0, 1.5, 2.0], "labels": [0, 0, 0, 0]})


def train(training, model=None):
    trainer = ExperimentTrainer(model=model or Line(), args=training, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train()
    return trainer


def test_evaluation_leaves_no_trace_in_training(tmp_path):
    losses = []
    for strategy in (["no"], ["steps", "--eval_steps", "1"], ["steps", "--eval_steps", "3"]):
        flags = ["--max_steps", "6", "--logging_steps", "1", "--save_strategy", "no", "--eval_strategy", *strategy]
        history = train(arguments(tmp_path, *flags, "--disable_tqdm", "true")).state.log_history
        losses.append([entry["loss"] for entry in history if "loss" in entry])
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(
    "flags", [["--learning_rate", "1e30"], ["--learning_rate", "1e30", "--eval_strategy", "steps"]]
)
def test_a_training_that_diverges_stops(tmp_path, flags):
    steps = ["--max_steps", "9", "--logging_steps", "2", "--eval_steps", "1", "--save_strategy", "no"]
    training = arguments(tmp_path, *steps, *flags, "--max_grad_norm", "0", "--optim", "sgd")
    prepare(training, {})
    with pytest.raises(UserError, match=r"diverged: (eval_)?loss is (nan|inf).*--learning_rate \(1e\+30\)"):
        train(training)


def test_the_last_evaluation_is_not_made_twice(tmp_path):
    trainer = train(arguments(tmp_path, "--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2"))
    assert trainer.last_evaluation()["step"] == 4
    trainer = train(arguments(tmp_path, "--max_steps", "3", "--eval_strategy", "steps", "--eval_steps", "2"))
    assert trainer.last_evaluation()["step"] == 3  # the Trainer evaluates behind the last step, too
    assert train(arguments(tmp_path, "--max_steps", "3", "--eval_strategy", "no")).last_evaluation() is None


def test_predictions_keep_the_order_of_the_examples(tmp_path):
    lengths = [3, 1, 4, 2, 5]
    rows = Dataset.from_dict({"input_ids": [[7] * length for length in lengths], "labels": lengths})

    def pad(examples):
        values = [torch.tensor(example["input_ids"]) for example in examples]
        padded = nn.utils.rnn.pad_sequence(values, batch_first=True)
        return {"x": padded.float(), "labels": torch.tensor([example["labels"] for example in examples])}

    flags = ["--train_sampling_strategy", "group_by_length", "--remove_unused_columns", "false"]
    training = arguments(tmp_path, *flags, "--per_device_eval_batch_size", "2")
    trainer = ExperimentTrainer(model=Line(), args=training, train_dataset=rows, data_collator=pad)
    assert list(cast(Any, trainer.predict(rows).label_ids)) == lengths
    assert isinstance(trainer._get_train_sampler(), LengthsOfEpoch)


def test_a_run_in_float16_can_go_on_in_another_precision(tmp_path):
    trainer = ExperimentTrainer(model=Line(), args=arguments(tmp_path), train_dataset=ROWS)
    torch.save({"scale": 2.0}, tmp_path / "scaler.pt")
    trainer._load_scaler(str(tmp_path))
    assert trainer.accelerator.scaler is None


@pytest.mark.parametrize(
    ("flags", "launched", "expected"),
    [([], "no", "float32"), ([], "bf16", "bfloat16"), (["--bf16"], "no", "bfloat16"), ([], "fp16", "float16")],
)
def test_the_precision_is_that_of_flags_or_of_a_launcher(tmp_path, monkeypatch, flags, launched, expected):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    training = arguments(tmp_path, *flags)
    assert training_identity(training, {}).precision == expected
    training.tf32 = True
    assert training_identity(training, {}).precision == f"{expected} with TF32"


@pytest.mark.parametrize("flag", ["--bf16_full_eval", "--fp16_full_eval"])
def test_an_evaluation_does_not_round_the_weights(tmp_path, flag):
    with pytest.raises(UserError, match="would leave the model in half precision; evaluate with --bf16 or --fp16"):
        arguments(tmp_path, flag)


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_a_batch_holds_something(tmp_path, name):
    with pytest.raises(UserError, match=f"--{name} is 0; it must be at least 1"):
        prepare(arguments(tmp_path, f"--{name}", "0"), {})


@pytest.mark.parametrize(
    ("devices", "each", "total", "expected"),
    [
        (1, 8, 8, (8, 1)),
        (1, 8, 32, (8, 4)),
        (1, 8, 4, (4, 1)),  # one batch would be more than a step
        (2, 256, 256, (128, 1)),
        (8, 64, 256, (32, 1)),
        (2, 32, 256, (32, 4)),
    ],
)
def test_a_device_reads_at_most_its_share_of_the_global_batch(tmp_path, monkeypatch, devices, each, total, expected):
    monkeypatch.setattr(RunArguments, "world_size", devices)
    batches = ["--global_batch_size", str(total), "--per_device_train_batch_size", str(each)]
    training = arguments(tmp_path, *batches)
    prepare(training, {})
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == expected
    assert global_batch(training) == total


def test_a_batch_that_was_asked_for_is_not_made_smaller_without_a_word(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    batches = ["--global_batch_size", "8", "--per_device_train_batch_size", "32"]
    for typed in ([], batches):
        monkeypatch.setattr(sys, "argv", ["script.py", *typed])
        prepare(arguments(tmp_path, *batches), {})
        said = "--per_device_train_batch_size 32 is more than a device reads, a share of --global_batch_size 8."
        assert (said in caplog.text) == bool(typed)


@pytest.mark.parametrize(("devices", "total"), [(1, 12), (2, 24), (3, 16), (2, 5), (2, 0), (1, -8)])
def test_a_global_batch_that_cannot_be_divided_is_refused(tmp_path, monkeypatch, devices, total):
    monkeypatch.setattr(RunArguments, "world_size", devices)
    message = rf"--global_batch_size {total} is not a multiple of {8 * devices}, what {devices} device.*_batch_size 8 "
    with pytest.raises(UserError, match=message):
        prepare(arguments(tmp_path, "--global_batch_size", str(total)), {})


def test_a_best_model_needs_a_metric_that_is_measured(tmp_path):
    flags = ["--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2", "--metric_for_best_model", "foo"]
    with pytest.raises(UserError, match="--metric_for_best_model foo: there is no such metric; give one of loss, "):
        train(arguments(tmp_path, *flags, "--save_strategy", "no"))


def test_a_batch_that_is_dropped_is_not_all_there_is(tmp_path):
    training = arguments(tmp_path, "--dataloader_drop_last", "true", "--per_device_train_batch_size", "100")
    with pytest.raises(UserError, match="drops all 99 examples"):
        describe_steps(training, 99)
    assert describe_steps(training, 100).startswith("3 of 100 sequences")
    training.per_device_train_batch_size, training.num_train_epochs = 32, 2
    assert describe_steps(training, 100).startswith("6 of 32 sequences")
    training.dataloader_drop_last = False
    assert describe_steps(training, 100).startswith("8 of 32 sequences")


@pytest.mark.parametrize(
    "flags",
    [
        ["--report_to", "none"],
        ["--logging_steps", "5"],
        ["--save_total_limit", "3"],
        ["--log_level", "info"],
        ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"],
        ["--activation_checkpointing", "true"],
        ["--dataloader_num_workers", "2"],
        ["--save_steps", "7"],
        ["--eval_strategy", "steps", "--eval_steps", "2"],
        ["--max_steps", "900"],
        ["--bf16"],
    ],
    ids=lambda flags: flags[0],
)
def test_what_does_not_decide_the_result_may_change(tmp_path, flags):
    steps = ["--max_steps", "50"] if "--max_steps" not in flags else []
    first = training_identity(arguments(tmp_path, "--do_train", "--max_steps", "50"), {"data": "abc"})
    second = training_identity(arguments(tmp_path, "--do_train", *steps, *flags), {"data": "abc"})
    assert first.decides == second.decides
    assert folder_state(tmp_path, second) == "new"


@pytest.mark.parametrize(
    "flags",
    [
        ["--learning_rate", "1e-3"],
        ["--per_device_train_batch_size", "4"],
        ["--seed", "1"],
        ["--weight_decay", "0.1"],
        ["--warmup_steps", "9"],
        ["--lr_scheduler_type", "cosine"],
        ["--max_grad_norm", "2"],
        ["--label_smoothing_factor", "0.1"],
        ["--data_seed", "1"],
        ["--optim", "sgd"],
        ["--optim_args", "betas=0"],
        ["--adam_beta1", "0.8"],
        ["--adam_beta2", "0.98"],
        ["--adam_epsilon", "1e-6"],
        ["--neftune_noise_alpha", "5"],
        ["--train_sampling_strategy", "group_by_length"],
        ["--dataloader_drop_last", "true"],
        ["--average_tokens_across_devices", "false"],
        ["--optim_target_modules", "all-linear"],
    ],
    ids=lambda flags: flags[0],
)
def test_what_decides_the_result_makes_another_run(tmp_path, flags):
    first = training_identity(arguments(tmp_path, "--do_train"), {"data": "abc"})
    assert first.decides != training_identity(arguments(tmp_path, "--do_train", *flags), {"data": "abc"}).decides
    assert first.decides != training_identity(arguments(tmp_path, "--do_train"), {"data": "xyz"}).decides
    # Of an evaluation alone it decides nothing.
    evaluation = training_identity(arguments(tmp_path), {"data": "abc"})
    assert evaluation == training_identity(arguments(tmp_path, *flags), {"data": "abc"})


def test_the_end_of_a_schedule_decides_the_result(tmp_path):
    flags = ["--do_train", "--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs"]
    first, other = (arguments(tmp_path, *flags, json.dumps({"min_lr": rate})) for rate in (1e-5, 1e-6))
    assert training_identity(first, {}).decides != training_identity(other, {}).decides


def test_the_history_is_json_where_half_precision_overflowed(tmp_path):
    trainer = train(arguments(tmp_path, "--max_steps", "2", "--logging_steps", "1"))
    trainer.state.log_history[0]["grad_norm"] = math.inf
    assert "grad_norm" not in trainer.history()[0]
    assert trainer.history()[0]["loss"] == trainer.state.log_history[0]["loss"]


def test_the_last_evaluation_is_not_taken_for_the_best_model_s(tmp_path):
    trainer = train(arguments(tmp_path, "--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2"))
    trainer.args.load_best_model_at_end, trainer.state.best_global_step = True, 2
    assert trainer.last_evaluation() is None
    trainer.state.best_global_step = 4
    assert trainer.last_evaluation()["step"] == 4


@pytest.mark.parametrize(("metric", "expected"), [("perplexity", False), ("mse", False), ("accuracy", True)])
def test_the_best_perplexity_is_the_lowest(tmp_path, metric, expected):
    every = ["--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1"]
    flags = [*every, "--load_best_model_at_end", "--metric_for_best_model", metric]
    assert arguments(tmp_path, *flags).greater_is_better is expected


@pytest.mark.parametrize(
    "flags",
    [
        ["--greater_is_better", "true"],
        ["--eval_steps", "50", "--save_steps", "50"],
        ["--eval_strategy", "epoch", "--save_strategy", "epoch"],
    ],
)
def test_what_decides_which_checkpoint_is_kept_decides_the_result(tmp_path, flags):
    best = ["--do_train", "--load_best_model_at_end", "--eval_strategy", "steps", "--save_strategy", "steps"]
    first = training_identity(arguments(tmp_path, *best), {})
    assert first.decides != training_identity(arguments(tmp_path, *best, *flags), {}).decides


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rate", "-1"], "--learning_rate is -1"),
        (["--learning_rate", "nan"], "--learning_rate is nan"),
        (["--weight_decay", "-0.1"], "--weight_decay"),
        (["--num_train_epochs", "0"], "--num_train_epochs 0"),
        (["--num_train_epochs", "nan"], "--num_train_epochs nan must be a number above 0"),
        (["--report_to", "wandb"], "--report_to .*wandb"),
        (["--report_to", "tensorboard"], "--report_to .*tensorboard"),
        (["--report_to", "carrier_pigeon"], "--report_to .*carrier_pigeon.*not supported"),
        (["--num_threads", "0"], "--num_threads is 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--prediction_loss_only", "True"], "need all predictions at once"),
        (["--save_only_model"], "--save_only_model .*--save_total_limit"),
        (
            ["--train_sampling_strategy", "batch_rebalance"],
            "has one order whatever the seed, .*; give group_by_length",
        ),
        (["--save_strategy", "best"], "--save_strategy best .*; add --metric_for_best_model"),
        (["--dataloader_num_workers=-1"], "--dataloader_num_workers is -1"),
        (
            [
                *("--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "5"),
                *("--save_strategy", "steps", "--save_steps", "10"),
            ],
            "measured and saved: make --eval_steps 5 and --save_steps 10 the same",
        ),
        (["--torch_compile_backend", "fastest"], "--torch_compile_backend fastest is none .* give one of .*inductor"),
        (["--accelerator_config", '{"split_batches": true}'], "would change the batches by split_batches; leave that"),
        (["--accelerator_config", '{"even_batches": false}'], "would change the batches by even_batches; leave that"),
        (
            ["--accelerator_config", '{"use_seedable_sampler": false}'],
            "would change the batches by use_seedable_sampler",
        ),
        (["--ignore_data_skip"], "--ignore_data_skip would give a run that goes on other data than a whole one"),
        (["--auto_find_batch_size"], "--auto_find_batch_size .*--per_device_train_batch_size"),
        (["--fp16", "--use_cpu"], "--fp16 needs an accelerator; leave it out, or give --bf16 with --use_cpu"),
    ],
)
def test_mistakes_are_found_before_anything_is_read(tmp_path, flags, message, monkeypatch):
    integrations = "transformers.integrations.integration_utils"
    for name in ("wandb", "tensorboard"):
        monkeypatch.setattr(f"{integrations}.is_{name}_available", lambda: False)
    with pytest.raises(UserError, match=message) as error:
        prepare(arguments(tmp_path, *flags), {})
    assert "\n" not in str(error.value)


def test_deepspeed_is_not_passed_over_on_processors(tmp_path):
    training = arguments(tmp_path)
    training.deepspeed = "zero.json"
    with pytest.raises(UserError, match=r"--deepspeed needs GPUs, .*--use_cpu; leave one of them out"):
        prepare(training, {})


def test_a_cache_is_no_part_of_a_run(tmp_path):
    for cache in (tmp_path / "run" / "cache", tmp_path / "run"):
        with pytest.raises(UserError, match=r"--cache_dir .* lies in --output_dir"):
            prepare(arguments(tmp_path), {"cache_dir": str(cache)})
    prepare(arguments(tmp_path), {"cache_dir": str(tmp_path / "runs")})


def test_what_is_logged_and_saved_is_said_by_each_start(tmp_path):
    flags = ["--eval_strategy", "steps", "--save_strategy", "steps"]
    flags += ["--logging_steps", "1", "--eval_steps", "2", "--save_steps", "2"]
    train(arguments(tmp_path, *flags, "--max_steps", "2"))
    flags[5::2] = "3", "4", "5"
    trainer = ExperimentTrainer(
        model=Line(), args=arguments(tmp_path, *flags, "--max_steps", "8"), train_dataset=ROWS, eval_dataset=ROWS
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    names = ("loss", "eval_loss", "train_loss")  # the last of which is of all steps, or none
    logged = {name: [e["step"] for e in trainer.state.log_history if name in e] for name in names}
    assert logged == {"loss": [1, 2, 3, 6], "eval_loss": [2, 4, 8], "train_loss": []}
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} >= {"checkpoint-2", "checkpoint-5"}


def test_workers_are_told_of_every_epoch(tmp_path):
    assert not arguments(tmp_path, "--dataloader_num_workers", "2", "--dataloader_persistent_workers", "True"
    ).dataloader_persistent_workers  # fmt: skip


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(RunArguments, "n_gpu", 2)
    with pytest.raises(UserError, match=r"2 GPUs are seen by a single process.*accelerate launch"):
        prepare(arguments(tmp_path), {})


def test_processes_without_devices_are_refused(tmp_path, monkeypatch):
    training = arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(RunArguments, "world_size", 1)
    with pytest.raises(UserError, match=r"2 processes were launched .*--use_cpu"):
        prepare(training, {})


def test_stages(tmp_path):
    training = arguments(tmp_path)
    prepare(training, {})
    assert (training.do_train, training.do_eval, training.do_predict) == (True, True, False)
    training = arguments(tmp_path, "--do_eval")
    prepare(training, {"do_eval": True})
    assert (training.do_train, training.do_eval) == (False, True)
    with pytest.raises(UserError, match="Nothing is asked for: add --do_train, --do_eval or --do_predict, or leave"):
        prepare(arguments(tmp_path, "--do_train", "false"), {"do_train": False})


def test_a_launcher_s_single_thread_is_not_taken_for_a_wish(tmp_path, monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    prepare(arguments(tmp_path), {})
    assert counts == []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    prepare(arguments(tmp_path), {})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    prepare(arguments(tmp_path), {})
    prepare(arguments(tmp_path, "--num_threads", "3"), {})
    assert counts == [8, 4, 3]


def test_steps_in_words(tmp_path):
    assert (
        describe_steps(arguments(tmp_path, "--max_steps", "50"), 100)
        == "50 of 8 sequences, 3.85 pass(es) over the data"
    )
    assert describe_steps(arguments(tmp_path, "--num_train_epochs", "2"), 100).startswith("26 of 8 sequences, 2 pass")
    assert describe_steps(arguments(tmp_path, "--max_steps", "50"), None) == "50 of 8 sequences"


def test_a_run_is_uploaded_without_what_names_this_machine(tmp_path, monkeypatch):
    uploads = []
    monkeypatch.setattr(training_module, "upload_folder", lambda **options: uploads.append(options))
    (tmp_path / "mine").mkdir()
    card = "---\nmodel-index:\n- name: {0}\n  results: []\n---\n\n# {0}\n\n## mine\n\n"
    card += '"mine" made in mine: `pipeline("x", model="{0}")`\n'
    (tmp_path / "mine" / "README.md").write_text(card.format("mine"))
    repo = types.SimpleNamespace(repo_id="me/mine")
    monkeypatch.setattr(training_module, "create_repo", lambda name, **options: repo if name == "mine" else None)
    training: Any = arguments(tmp_path)
    upload_run(training, tmp_path / "mine", "End")
    assert not uploads
    training.push_to_hub = True
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").rename(tmp_path / "elsewhere" / "moved")
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere" / "moved")  # by the link's name, as the Trainer does
    upload_run(training, tmp_path / "mine", "End")
    assert (uploads[0]["repo_id"], uploads[0]["folder_path"]) == ("me/mine", str(tmp_path / "mine"))
    patterns = uploads[0]["ignore_patterns"]
    assert {"arguments.yaml", "run.json", "training_args.bin", "checkpoint-*", "lra.json"} <= set(patterns)
    assert (tmp_path / "mine" / "README.md").read_text() == card.format("me/mine")

    # Of several processes the first uploads.
    with monkeypatch.context() as context:
        context.setattr(type(training), "process_index", 1)
        context.setattr(training_module, "create_repo", None)
        upload_run(training, tmp_path / "mine", "End")
    # A client's own kind of error is no OSError.
    for kind in (OSError, Exception):

        def refuse(kind=kind, **options):
            raise kind("no route to host")

        monkeypatch.setattr(training_module, "upload_folder", refuse)
        with pytest.raises(UserError, match=r"finished, but it was not uploaded \(no route to host\); the same"):
            upload_run(training, tmp_path / "mine", "End")


def test_to_resume_from_the_newest_checkpoint_is_what_happens_anyway(tmp_path):
    training = arguments(tmp_path, "--resume_from_checkpoint", "True")
    prepare(training, {})
    assert training.resume_from_checkpoint is None


def test_a_hub_strategy_that_uploads_folders_as_they_are_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(training_module, "whoami", lambda: {"name": "me"})
    training = arguments(tmp_path, "--push_to_hub", "--hub_strategy", "every_save")
    with pytest.raises(UserError, match="--hub_strategy every_save uploads a folder as it is"):
        prepare(training, {"hub_strategy": "every_save"})
    training = arguments(tmp_path, "--push_to_hub")
    prepare(training, {})
    assert training.hub_strategy == "end"

    def refuse(token=None):
        raise LocalTokenNotFoundError("no token")

    monkeypatch.setattr(training_module, "whoami", refuse)
    with pytest.raises(UserError, match="cannot reach the Hub"):
        prepare(arguments(tmp_path, "--push_to_hub"), {})


def test_nothing_is_pushed_where_nothing_is_trained(tmp_path):
    with pytest.raises(UserError, match="--push_to_hub uploads what is trained, here nothing; add --do_train, or"):
        prepare(arguments(tmp_path, "--push_to_hub", "--do_eval"), {"do_eval": True})


def test_a_folder_that_is_held_elsewhere_is_left_by_all_processes(tmp_path, monkeypatch):
    identity = RunIdentity({}, {"max_steps": 1})
    (tmp_path / "run").mkdir()
    with (
        FileLock(tmp_path / "run" / ".lock"),
        pytest.raises(UserError, match="Another process is at work"),
        hold_folder(arguments(tmp_path), tmp_path / "run", identity, {}),
    ):
        pass
    other: Any = types.SimpleNamespace(process_index=1)

    def tell(reasons):
        reasons[:] = ["what the first process was told"]

    monkeypatch.setattr(training_module, "broadcast_object_list", tell)
    with pytest.raises(UserError, match="what the first"), hold_folder(other, tmp_path / "new", identity, {}):
        pass
    assert not (tmp_path / "new").exists()


def test_every_training_is_a_run_of_its_own_in_a_tracker(tmp_path, monkeypatch):
    ended = []

    def finish_trackio():
        ended.append("trackio")
        raise RuntimeError("Call trackio.init() before trackio.finish().")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(finish=lambda: ended.append("wandb")))
    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(finish=finish_trackio))
    training = arguments(tmp_path)
    training.report_to = ["wandb", "trackio", "tensorboard"]
    finish_trackers(training)
    assert ended == ["wandb", "trackio"]


def test_the_order_of_like_lengths_is_that_of_the_seed_and_the_epoch():
    """A run that is resumed in a later epoch has drawn less before than one that was never cut short."""
    lengths = torch.randint(1, 50, (200,), generator=torch.Generator().manual_seed(0)).tolist()

    def order(seed: int, epoch: int) -> list[int]:
        sampler = LengthsOfEpoch(LengthGroupedSampler(4, lengths=lengths), 8, seed)  # of two devices
        sampler.epoch = epoch
        torch.rand(epoch + 1)
        return list(sampler)

    assert order(3, 1) == order(3, 1)
    assert order(3, 1) != order(3, 0)
    assert order(4, 0) != order(3, 0)
    assert sorted(order(3, 1)) == list(range(200))
    grouped = [lengths[place] for place in order(3, 1)]
    spans = [max(batch) - min(batch) for batch in (grouped[n : n + 8] for n in range(0, 200, 8))]
    assert statistics.mean(spans) < 15  # of 38 in any order


def test_two_devices_resume_within_the_order_of_their_epoch(tmp_path, monkeypatch):
    """accelerate tells no epoch to a sampler below the shards of two devices whose first batches are skipped."""
    rows = Dataset.from_dict({"input_ids": [[7] * (1 + n % 7) for n in range(40)]})
    flags = ["--train_sampling_strategy", "group_by_length", "--remove_unused_columns", "false"]
    trainer = ExperimentTrainer(model=Line(), args=arguments(tmp_path, *flags), train_dataset=rows)
    trainer.state.max_steps = 1
    monkeypatch.setattr(Trainer, "_run_epoch", lambda self, train_dataloader, **kwargs: read.extend(train_dataloader))

    def batches(epoch, skipped):
        read.clear()
        loader: DataLoader = DataLoader(cast(Any, range(40)), batch_size=2, sampler=trainer._get_train_sampler())
        shard = prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False, rng_types=[])
        trainer._run_epoch(epoch=epoch, train_dataloader=skip_first_batches(shard, skipped))
        return [batch.tolist() for batch in read]

    read: list = []
    assert batches(1, 4) == batches(1, 0)[4:]
    assert batches(1, 4) != batches(0, 4)


def test_a_run_whose_weights_are_kept_in_pieces_is_not_finished(tmp_path, monkeypatch):
    trainer = ExperimentTrainer(model=Line(), args=arguments(tmp_path))
    trainer.save_finished()
    assert (tmp_path / "run" / "model.safetensors").is_file()
    (tmp_path / "run" / "model.safetensors").unlink()
    monkeypatch.setattr(Trainer, "save_model", lambda self, **options: None)
    with pytest.raises(UserError, match=r"No weights were written .*FULL_STATE_DICT"):
        trainer.save_finished()


@pytest.mark.parametrize(("named", "wrapped"), [(None, ["SKTformerLayer"]), (["SKTformerMLP"], ["SKTformerMLP"])])
def test_fsdp_shares_out_layers(tmp_path, monkeypatch, named, wrapped):
    plugin = types.SimpleNamespace(transformer_cls_names_to_wrap=named, activation_checkpointing=False)
    monkeypatch.setattr(AcceleratorState, "fsdp_plugin", plugin, raising=False)
    ExperimentTrainer(model=Line(), args=arguments(tmp_path))
    assert plugin.transformer_cls_names_to_wrap == named
    model = SKTformerForMaskedLM(load_preset("sktformer-tiny", vocab_size=10))
    ExperimentTrainer(model=model, args=arguments(tmp_path))
    assert plugin.transformer_cls_names_to_wrap == wrapped


def test_evaluation_shares_the_buffers_that_are_on_the_device(tmp_path, monkeypatch):
    model, shared = Line(), []
    model.register_buffer("there", torch.ones(1))
    trainer = ExperimentTrainer(model=model, args=arguments(tmp_path))
    model.register_buffer("elsewhere", torch.ones(2, device="meta"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda buffer, src: shared.append((len(buffer), src)))
    monkeypatch.setattr(Trainer, "evaluation_loop", lambda self: "evaluated")
    assert trainer.evaluation_loop() == "evaluated"
    assert shared == [(1, 0)]


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_steps_are_timed_by_what_does_them(device, monkeypatch):
    """The clock on a processor; of a GPU, which works behind it, the events that it passes."""

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.time, now["gpu"] = now["gpu"], now["gpu"] + 3.0

        def elapsed_time(self, end: "Event") -> float:
            return end.time - self.time

        def synchronize(self) -> None:
            now["waited"] += 1

    now = {"clock": 0.0, "gpu": 0.0, "waited": 0}
    for kind in (torch.cuda, torch.xpu):
        monkeypatch.setattr(kind, "Event", Event)
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now["clock"])
    timer = StepTimer()
    args: Any = types.SimpleNamespace(device=torch.device(device))
    assert timer.metrics() == {}
    for seconds in [9.0] * 5 + [1.0, 2.0, 4.0]:
        timer.on_step_begin(args, None, None)
        now["clock"] += seconds
        timer.on_step_end(args, None, None)
    assert timer.metrics()["step_time_ms"] == (2000.0 if device == "cpu" else 3.0)
    assert now["waited"] == (device != "cpu")


def test_a_repository_is_as_private_as_was_asked_and_its_branch_the_one_named(tmp_path, monkeypatch):
    create, upload = Mock(return_value=types.SimpleNamespace(repo_id="me/mine")), Mock()
    monkeypatch.setattr(training_module, "create_repo", create)
    monkeypatch.setattr(training_module, "upload_folder", upload)
    training: Any = arguments(tmp_path)
    training.push_to_hub, training.hub_private_repo, training.hub_revision = True, True, "v2"
    upload_run(training, tmp_path, "End")
    assert create.call_args.kwargs["private"] is True
    assert upload.call_args.kwargs["revision"] == "v2"


def test_threads_that_a_person_has_set_are_kept_under_a_launcher(tmp_path, monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    prepare(arguments(tmp_path), {})
    assert counts == []


def test_what_several_devices_drop_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(RunArguments, "world_size", 2)
    flags = ["--dataloader_drop_last", "true", "--per_device_train_batch_size", "32", "--num_train_epochs", "3"]
    assert describe_steps(arguments(tmp_path, *flags), 100).startswith("3 of 64 sequences")


def test_every_example_is_predicted_whatever_training_drops(tmp_path):
    flags = ["--dataloader_drop_last", "true", "--per_device_eval_batch_size", "3"]
    trainer = ExperimentTrainer(model=Line(), args=arguments(tmp_path, *flags), train_dataset=ROWS)
    assert len(cast(Any, trainer.predict(ROWS).label_ids)) == len(ROWS)
    assert trainer.args.dataloader_drop_last


def test_a_token_leaves_the_arguments_for_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    training = arguments(tmp_path, "--hub_token", "hf_secret")
    prepare(training, {})
    assert (training.hub_token, os.environ["HF_TOKEN"]) == (None, "hf_secret")


@pytest.mark.parametrize(
    "flags",
    [["--eval_steps", "50"], ["--save_steps", "1000"], ["--eval_delay", "9"], ["--metric_for_best_model", "x"]],
)
def test_each_word_about_the_best_checkpoint_decides_the_result(tmp_path, flags):
    best = ["--do_train", "--load_best_model_at_end", "--eval_strategy", "steps", "--save_strategy", "steps"]
    first, other = arguments(tmp_path, *best), arguments(tmp_path, *best)
    setattr(other, flags[0][2:], flags[1])
    assert training_identity(first, {}).decides != training_identity(other, {}).decides


def test_a_step_s_processor_time_is_its_own(monkeypatch):
    timer, now = StepTimer(), {"clock": 0.0, "cpu": 0.0}
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now["clock"])
    monkeypatch.setattr(trainer_module.time, "process_time", lambda: now["cpu"])
    args: Any = types.SimpleNamespace(device=torch.device("cpu"))
    timer.on_step_begin(args, None, None)
    now["cpu"] += 4.0
    timer.on_step_end(args, None, None)
    assert timer.metrics()["step_cpu_time_ms"] == 4000.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_a_loss_that_is_no_number_stops_a_run_wherever_it_is_measured(tmp_path, name, value):
    trainer = ExperimentTrainer(model=nn.Linear(1, 1), args=arguments(tmp_path))
    with pytest.raises(UserError, match=f"diverged: {name} is"):
        trainer.log({name: value})


def test_the_order_of_like_lengths_is_that_of_the_data_seed(tmp_path):
    rows = Dataset.from_dict({"input_ids": [[7] * (1 + n % 7) for n in range(40)]})
    orders = []
    for seeds in (["--seed", "1"], ["--seed", "1", "--data_seed", "2"], ["--seed", "3", "--data_seed", "2"]):
        training = arguments(tmp_path, "--train_sampling_strategy", "group_by_length", *seeds)
        trainer = ExperimentTrainer(model=nn.Linear(1, 1), args=training, train_dataset=rows)
        orders.append(list(trainer._get_train_sampler()))
    assert orders[0] != orders[1] == orders[2]
