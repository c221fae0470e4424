"""The Trainer of all scripts, and what times its steps."""

import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, SchedulerType

from experiments.arguments import UserError, explained
from experiments.training import global_batch
from modeling_sktformer.modeling_sktformer import SKTformerLayer


_TIMED_STEPS = 10_000  # the last steps of a run, whose times are kept


class LengthsOfEpoch(LengthGroupedSampler):
    """
    A sampler's lengths in the order of an epoch; its own depends on what was drawn before, and on how many devices
    share the `batch_size` of a step.
    """

    def __init__(self, sampler: LengthGroupedSampler, batch_size: int, seed: int):
        super().__init__(batch_size, lengths=sampler.lengths)
        self.seed, self.epoch = seed, 0

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


class ExperimentTrainer(Trainer):
    """A Trainer that evaluates one model on all processes, without a trace, and stops where training diverges."""

    _lengths: LengthsOfEpoch | None = None  # the sampler of training, where batches have like lengths

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        plugin, trained = getattr(self.accelerator.state, "fsdp_plugin", None), cast(nn.Module, self.model)
        if plugin is not None and any(isinstance(module, SKTformerLayer) for module in trained.modules()):
            # Of what a device may not split, FSDP would share out the embeddings, too, which the decoder has as well.
            plugin.transformer_cls_names_to_wrap = plugin.transformer_cls_names_to_wrap or [SKTformerLayer.__name__]

    def save_finished(self) -> None:
        """
        Save the model that is left, as a step of the Trainer's own, which does not push yet: the card and the metrics
        are still to come. A `UserError` if nothing was written, as by FSDP, which keeps the weights in pieces.
        """
        self.save_model(_internal_call=True)
        self.save_state()
        if self.is_world_process_zero() and not any(Path(str(self.args.output_dir)).glob("*.safetensors*")):
            remedy = "set FSDP's state_dict_type to FULL_STATE_DICT and start the command again"
            raise UserError(f"No weights were written to {self.args.output_dir}; {remedy}: no step is trained twice.")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """A `UserError` if the optimizer asked for cannot be made."""
        with explained(f"--optim {getattr(self.args.optim, 'value', self.args.optim)}"):
            return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise of the schedule."""
        with explained(f"--lr_scheduler_type {SchedulerType(self.args.lr_scheduler_type).value}"):
            return super().create_scheduler(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate; the generators of training are afterwards where they were, however often there is evaluation."""
        # Running statistics of a batch norm differ between processes after a step; the first one's are saved.
        if torch.distributed.is_initialized():
            for buffer in self.accelerator.unwrap_model(self.model).buffers():
                if buffer.device.type == self.args.device.type:  # not so of a model that is still to be shared out
                    torch.distributed.broadcast(buffer, src=0)
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            return super().evaluation_loop(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Of batches of like lengths, an order that a resumed run has again: of the seed and the epoch alone."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if type(sampler) is LengthGroupedSampler:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler = self._lengths = LengthsOfEpoch(sampler, global_batch(self.args), seed)
        return sampler

    def _load_scaler(self, checkpoint: str | None) -> None:
        """What scaled float16's losses is of no use to a run that goes on in another precision."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """
        Behind training all examples in their order, by which predictions are told apart: the order and the last batch
        that arguments name are training's.
        """
        named = self.args.dataloader_drop_last, self.args.train_sampling_strategy
        if not kwargs.get("is_training"):
            self.args.dataloader_drop_last, self.args.train_sampling_strategy = False, "random"
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_drop_last, self.args.train_sampling_strategy = named

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, on all processes alike; a `UserError` if a loss is no finite number or the best metric is none."""
        for name in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                what = f"Training has diverged: {name} is {logs[name]} at step {self.state.global_step}"
                name = "search_learning_rates" if getattr(self.args, "search", False) else "learning_rate"
                remedy = f"lower --{name} ({self.args.learning_rate:g}) or raise --warmup_steps"
                raise UserError(f"{what}; {remedy}. No model was saved.")
        best = (self.args.metric_for_best_model or "loss").removeprefix("eval_")
        if "eval_loss" in logs and f"eval_{best}" not in logs:
            names = ", ".join(name.removeprefix("eval_") for name in logs if name.startswith("eval_"))
            raise UserError(f"--metric_for_best_model {best}: there is no such metric; give one of {names}.")
        if getattr(self, "_initial_global_step", 0):  # of the steps since a run was resumed alone
            logs.pop("train_loss", None)
        super().log(logs, *args, **kwargs)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        found = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)  # of this start, not of the one that left the checkpoint
        best = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if best.is_dir():  # also where the whole folder has moved
            self.state.best_model_checkpoint = str(best)
        return found

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the newest checkpoint beside the best one: a run that is cut short while measuring trains no more."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # What the Trainer tells of an epoch does not reach a sampler whose first batches several devices skip.
        if self._lengths is not None:
            self._lengths.epoch = kwargs["epoch"]
        # A run that is cut short behind its last checkpoint is resumed within an epoch that has a next batch.
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def last_evaluation(self) -> dict[str, float] | None:
        """What was measured of the model that is left, if that was done behind the last step: not to do it twice."""
        if self.args.load_best_model_at_end and self.state.best_global_step != self.state.global_step:
            return None
        last = [entry for entry in self.state.log_history if entry["step"] == self.state.global_step]
        return next((dict(entry) for entry in reversed(last) if "eval_loss" in entry), None)

    def history(self) -> list[dict[str, float]]:
        """The log, without norms of gradients that half precision could not hold."""
        return [
            {key: value for key, value in entry.items() if not isinstance(value, float) or math.isfinite(value)}
            for entry in self.state.log_history
        ]


class StepTimer(TrainerCallback):
    """
    Measures each optimizer step; the Trainer's own speed is a mean with evaluations and the first steps in it.

    A GPU is still at work when a step has been launched: there a step is what lies between two events that the GPU
    itself passes, so that nothing waits.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Any, Any, float]] = deque(maxlen=_TIMED_STEPS)

    def on_step_begin(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        self._cpu, self._start = time.process_time(), self._mark(args.device)

    def on_step_end(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        self._marks.append((self._start, self._mark(args.device), time.process_time() - self._cpu))

    def _mark(self, device: torch.device) -> Any:
        """Now: of the clock, or of a GPU when it gets there."""
        if device.type == "cpu":
            return time.perf_counter()
        event = getattr(torch, device.type).Event(enable_timing=True)
        event.record()
        return event

    def metrics(self) -> dict[str, float]:
        """Medians in milliseconds, without the first steps, which set things up; empty before the first step."""
        if not self._marks:
            return {}
        kept = [*self._marks][min(5, len(self._marks) - 1) :]
        if isinstance(kept[-1][1], float):
            wall = [1000 * (end - start) for start, end, _ in kept]
        else:
            kept[-1][1].synchronize()
            wall = [start.elapsed_time(end) for start, end, _ in kept]
        cpu = [1000 * seconds for *_, seconds in kept]
        return {"step_time_ms": float(np.median(wall)), "step_cpu_time_ms": float(np.median(cpu))}
