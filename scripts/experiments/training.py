"""What all training scripts share: the arguments of a run, checks before it begins, and the time of its steps."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import upload_folder, whoami
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from transformers import Trainer, TrainerCallback, TrainingArguments

from experiments.arguments import UserError, one_line


@dataclass
class RunArguments(TrainingArguments):
    """The arguments of the Trainer and what a run of this project adds."""

    overwrite: bool = field(
        default=False, metadata={"help": "Delete another run, or this one finished, from --output_dir."}
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Sequences per optimizer step over all devices; gradient accumulation is worked out from it."
        },
    )


def check_run_arguments(training: RunArguments) -> None:
    """
    Work out gradient accumulation, and refuse combinations that would train something else than what was asked.

    Raises:
        UserError: if the processes would not train together, a checkpoint to go on from is none, or the batch cannot
            be divided among the devices.
    """
    if not 0 <= training.seed < 2**32:
        raise UserError(f"--seed {training.seed} must lie between 0 and {2**32 - 1}.")
    if training.hub_token is not None:
        # Where the library looks for it too: the Trainer saves its arguments beside the model, to be pushed with it.
        os.environ["HF_TOKEN"], training.hub_token = training.hub_token, None
    # Asking for the device joins the process group, without which the world is one process.
    training.dataloader_pin_memory = training.dataloader_pin_memory and training.device.type == "cuda"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > training.world_size:
        raise UserError(
            f"{processes} processes were launched but each would train alone: there is no accelerator for them. "
            "Add --use_cpu to train on processors."
        )
    checkpoint = training.resume_from_checkpoint
    if str(checkpoint).lower() == "true":
        training.resume_from_checkpoint = None  # which is what happens anyway: the folder's newest is looked for
    elif checkpoint is not None and not Path(str(checkpoint)).is_dir():
        raise UserError(f"--resume_from_checkpoint {checkpoint} is no folder; leave it out to go on with the newest.")
    if training.global_batch_size is not None:
        training.gradient_accumulation_steps = accumulation_steps(training, training.global_batch_size)


def accumulation_steps(training: TrainingArguments, global_batch_size: int) -> int:
    """
    How many batches of all devices make one optimizer step.

    Raises:
        UserError: if no whole number of them does.
    """
    at_once = training.train_batch_size * training.world_size
    steps, rest = divmod(global_batch_size, at_once)
    if rest or steps < 1:
        raise UserError(
            f"--global_batch_size {global_batch_size} is not a multiple of {at_once}, which is what "
            f"{training.world_size} device(s) with --per_device_train_batch_size "
            f"{training.per_device_train_batch_size} read at once; change one of the two."
        )
    return steps


def check_hub_access(token: str | None) -> None:
    """Find out now, and not after hours of training, that nothing can be uploaded."""
    try:
        whoami(token=token)
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"--push_to_hub cannot reach the Hub as a user: {one_line(error)}") from error


def upload_run(trainer: Trainer, folder: str | Path, message: str) -> None:
    """Push a finished run with its card; the Trainer's own last push would write another card over it."""
    if trainer.is_world_process_zero():
        upload_folder(
            repo_id=str(trainer.hub_model_id),
            folder_path=str(folder),
            token=trainer.args.hub_token,
            revision=trainer.args.hub_revision,
            commit_message=message,
            ignore_patterns=["checkpoint-*", "tokenizer/*", "*.lock"],
        )


def leave_process_group() -> None:
    """Call at the end of a script: gloo now and then aborts a process that exits with the group still up."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def share_buffers(trainer: Trainer) -> None:
    """
    Give all processes the first one's buffers before an evaluation.

    Running statistics of a batch norm differ between processes after a step; the first one's are saved.
    """
    if torch.distributed.is_initialized():
        for buffer in trainer.accelerator.unwrap_model(trainer.model).buffers():
            torch.distributed.broadcast(buffer, src=0)


class StepTimer(TrainerCallback):
    """Measures each optimizer step, in wall-clock and in processor seconds of this process."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.wall.append(time.perf_counter() - self._start[0])
        self.cpu.append(time.process_time() - self._start[1])

    def metrics(self) -> dict[str, float]:
        """Medians in milliseconds, without the first steps, which set things up; empty before the first step."""
        if not self.wall:
            return {}
        skipped = min(5, len(self.wall) - 1)
        return {
            "step_time_ms": 1000 * float(np.median(self.wall[skipped:])),
            "step_cpu_time_ms": 1000 * float(np.median(self.cpu[skipped:])),
        }
