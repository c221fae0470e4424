"""What all training scripts share: the arguments of a run, checks before it begins, its identity and first lines."""

import importlib
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import datasets
import torch
import transformers
from accelerate.utils import broadcast_object_list
from huggingface_hub import create_repo, upload_folder, whoami
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_pt_utils import AcceleratorConfig, get_model_param_count
from transformers.trainer_utils import HubStrategy

from experiments.arguments import (
    ROOT,
    Command,
    UserError,
    explained,
    flag,
    flag_values,
    one_line,
    require_at_least,
)
from experiments.model_card import name_in_card
from experiments.parallel import available_cores
from experiments.run_folder import ARGUMENTS_FILE, RUN_FILE, RunIdentity, claim_run_folder


logger = logging.getLogger(__name__)

STAGES = ("do_train", "do_eval", "do_predict")
# What accelerate calls types of products that are not float32.
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
# The arguments of the Trainer that decide a result, beside the number of steps and the global batch.
_DECISIVE = (
    *("seed", "data_seed"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("weight_decay", "optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("label_smoothing_factor", "neftune_noise_alpha"),
    *("train_sampling_strategy", "dataloader_drop_last"),
    *("load_best_model_at_end", "early_stopping_patience"),
)
# Of these a run says nothing but where they are changed: they are for several devices, and for few optimizers.
_DECISIVE_IF_CHANGED = ("average_tokens_across_devices", "optim_target_modules")
_DECISIVE_FOR_THE_BEST = (
    *("metric_for_best_model", "greater_is_better"),
    *("eval_strategy", "eval_steps", "eval_delay", "save_strategy", "save_steps"),
)
# Metrics of which the best is the lowest, beside losses.
_SMALLER_IS_BETTER = ("mse", "mae", "perplexity")
# Files of a run that say where things lie on the machine it was made on, and those that are none of its result.
LOCAL_FILES = [
    *(ARGUMENTS_FILE, RUN_FILE, "training_args.bin", "trainer_state.json"),
    *("checkpoint-*", "runs/*", "tokenizer/*", "*.lock", ".*"),
    *("lra.md", "lra.json"),  # which name their command
]


@dataclass
class RunArguments(TrainingArguments):
    """The arguments of the Trainer and what a run of this project adds."""

    output_dir: str | None = flag("runs/run", "Folder of the run.")
    overwrite: bool = flag(
        False, "Delete another run, or this one finished, from --output_dir; leave it out to go on."
    )
    global_batch_size: int | None = flag(None, "Sequences per step over all devices; shares and accumulation follow.")
    num_threads: int | None = flag(None, "Threads of a process, by default OMP_NUM_THREADS or a launcher's cores.")
    license: str = flag("apache-2.0", "Licence of the weights, for the model card.")
    language: str = flag("en", "Language of the text, for the model card.")

    def __post_init__(self) -> None:
        if self.greater_is_better is None and str(self.metric_for_best_model).endswith(_SMALLER_IS_BETTER):
            self.greater_is_better = False  # the Trainer takes what is not called a loss for a score
        super().__post_init__()
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed {self.seed} must lie between 0 and {2**32 - 1}.")
        batches = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        require_at_least(1, self, *batches, "num_threads")
        require_at_least(0, self, "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps")
        require_at_least(0, self, "dataloader_num_workers")
        if self.train_sampling_strategy == "batch_rebalance":
            order = "has one order whatever the seed, which a run that is resumed begins anew"
            raise UserError(f"--train_sampling_strategy batch_rebalance {order}; give group_by_length.")
        if self.save_strategy == "best" and not self.metric_for_best_model:
            raise UserError("--save_strategy best saves what a metric calls the best; add --metric_for_best_model.")
        if self.max_steps <= 0 and not 0 < self.num_train_epochs < math.inf:
            raise UserError(f"--num_train_epochs {self.num_train_epochs:g} must be a number above 0.")
        if self.prediction_loss_only or self.batch_eval_metrics or not self.eval_do_concat_batches:
            unused = "--prediction_loss_only, --batch_eval_metrics and --eval_do_concat_batches"
            raise UserError(f"The metrics need all predictions at once; leave out {unused}.")
        if self.bf16_full_eval or self.fp16_full_eval:
            unused = "--bf16_full_eval and --fp16_full_eval"
            raise UserError(f"{unused} would leave the model in half precision; evaluate with --bf16 or --fp16.")
        if self.auto_find_batch_size:
            remedy = "lower --per_device_train_batch_size, which --global_batch_size leaves the batch of a step"
            raise UserError(f"--auto_find_batch_size would change the batch on the way, and so the run; {remedy}.")
        sharing = cast(AcceleratorConfig, self.accelerator_config)
        usual = {"split_batches": False, "even_batches": True, "use_seedable_sampler": True}
        if changed := [name for name, value in usual.items() if getattr(sharing, name) != value]:
            raise UserError(
                f"--accelerator_config would change the batches by {' and '.join(changed)}; leave that out."
            )
        if self.ignore_data_skip:
            raise UserError(
                "--ignore_data_skip would give a run that goes on other data than a whole one; leave it out."
            )
        if self.load_best_model_at_end and self.save_strategy == "steps" and self.eval_steps != self.save_steps:
            steps = f"make --eval_steps {self.eval_steps:g} and --save_steps {self.save_steps:g} the same"
            raise UserError(f"--load_best_model_at_end takes a model that was measured and saved: {steps}.")
        if self.save_only_model:
            raise UserError(
                "--save_only_model leaves no run that could go on; --save_total_limit keeps fewer instead."
            )
        if self.torch_compile and self.torch_compile_backend not in torch.compiler.list_backends(()):
            known = ", ".join(torch.compiler.list_backends())  # without those for debugging
            named = f"--torch_compile_backend {self.torch_compile_backend}"
            raise UserError(f"{named} is none that PyTorch has; give one of {known}.")
        # Whose copies of a collator would not hear of a new epoch, by which masks are numbered.
        self.dataloader_persistent_workers = False

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP shares out the weights, as asked for here or of `accelerate launch`."""
        return bool(self.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")

    @property
    def num_readers(self) -> int:
        """How many processes read a stream at the same time."""
        return self.world_size * max(1, self.dataloader_num_workers)


def prepare(training: RunArguments, given: dict[str, Any]) -> None:
    """
    Set up logging, bars and threads, work out stages and gradient accumulation, and refuse what would fail late or
    train something else than was asked for. `given`, what recipes and flags set, changes `training` in place. Raises a
    `UserError` for trackers that are not installed, processes that would not train together, or a batch that cannot be
    divided among the devices.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO if training.should_log else logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    training.disable_tqdm = training.disable_tqdm or not training.should_log or not sys.stderr.isatty()
    if training.disable_tqdm:
        datasets.disable_progress_bars()  # of which every step would be a line in a log file
        transformers.utils.logging.disable_progress_bar()
    asked = [given[stage] for stage in STAGES if stage in given]
    if asked and not any(asked):
        raise UserError("Nothing is asked for: add --do_train, --do_eval or --do_predict, or leave all of them out.")
    if not asked:
        training.do_train = training.do_eval = True
    elif not given.get("do_eval"):
        training.do_eval = False  # which the Trainer's arguments switch on with --eval_strategy
    training.logging_nan_inf_filter = False  # which would show a loss of 0 where there is none
    with explained(f"--report_to {training.report_to}"):  # now, and not after the data has been read
        for callback in get_reporting_integration_callbacks(training.report_to):
            callback()
    if training.hub_token is not None:
        # Where the library looks for it too: the Trainer saves its arguments beside the model, to be pushed with it.
        os.environ["HF_TOKEN"], training.hub_token = training.hub_token, None
    if training.push_to_hub:
        _check_upload(training, given)
    if training.fp16 and training.device.type == "cpu":
        raise UserError("--fp16 needs an accelerator; leave it out, or give --bf16 with --use_cpu.")
    if training.deepspeed and training.use_cpu:
        raise UserError("--deepspeed needs GPUs, and would be passed over with --use_cpu; leave one of them out.")
    _check_sharding(training)
    _check_processes(training)
    _set_threads(training)
    folder, cache = Path(str(training.output_dir)).resolve(), given.get("cache_dir")
    if cache and Path(cache).expanduser().resolve().is_relative_to(folder):
        raise UserError(f"--cache_dir {cache} lies in --output_dir, which is a run's alone; name a folder outside.")
    checkpoint = training.resume_from_checkpoint
    if str(checkpoint).lower() == "true":
        training.resume_from_checkpoint = None  # which is what happens anyway: the folder's newest is looked for
    elif checkpoint is not None and not Path(str(checkpoint)).is_dir():
        raise UserError(f"--resume_from_checkpoint {checkpoint} is no folder; leave it out to go on with the newest.")
    if training.global_batch_size is not None:
        each = training.per_device_train_batch_size
        divide_batch(training, training.global_batch_size)
        if training.per_device_train_batch_size < each and "per_device_train_batch_size" in flag_values(sys.argv[1:]):
            share = f"a share of --global_batch_size {training.global_batch_size}"
            logger.info("--per_device_train_batch_size %d is more than a device reads, %s.", each, share)


def lies_in(checkpoint: str | Path, folder: str | Path) -> bool:
    """Whether a checkpoint is one of the run in a folder."""
    return Path(checkpoint).resolve().parent == Path(folder).resolve()


def refuse_other_checkpoints(training: RunArguments, folders: Iterable[str | Path]) -> None:
    """A `UserError` if --resume_from_checkpoint names no whole checkpoint of a run in one of the folders."""
    if (checkpoint := training.resume_from_checkpoint) is None:
        return
    remedy = "leave it out to go on with the newest, or start from its weights with --model_name_or_path"
    if not any(lies_in(checkpoint, folder) for folder in folders):
        raise UserError(
            f"--resume_from_checkpoint {checkpoint} is of another run than {training.output_dir}; {remedy}."
        )
    if not Path(checkpoint, "trainer_state.json").is_file():
        raise UserError(f"--resume_from_checkpoint {checkpoint} holds no whole checkpoint; {remedy}.")


def training_identity(training: TrainingArguments, decides: dict[str, Any]) -> RunIdentity:
    """
    The identity of a run: what the Trainer's arguments decide, and `decides` (data, model).

    Evaluation and saving belong to it where the best checkpoint is kept, and not else; where no step is taken no
    argument of an optimizer decides what a model answers.
    """
    precision = describe_precision(training)
    if not training.do_train or getattr(training, "fit_head", False):
        seed = {"seed": training.seed} if training.do_train else {}
        return RunIdentity({"do_train": training.do_train} | seed | decides, {"num_train_epochs": 0}, precision)
    changed = [each for each in _DECISIVE_IF_CHANGED if getattr(training, each) != getattr(RunArguments, each)]
    names = [*_DECISIVE, *changed, *(_DECISIVE_FOR_THE_BEST if training.load_best_model_at_end else ())]
    values = {name: getattr(training, name) for name in names if hasattr(training, name)}
    values = {name: getattr(value, "value", value) for name, value in values.items()}
    values["global_batch_size"] = global_batch(training)
    length = {"max_steps": training.max_steps, "num_train_epochs": training.num_train_epochs}
    return RunIdentity({"do_train": True} | values | decides, length, precision)


def describe_precision(training: TrainingArguments) -> str:
    """The type of the products, as flags, a launcher or its configuration have it."""
    name = _PRECISIONS.get(training.mixed_precision, "float32")
    return f"{name} with TF32" if training.tf32 else name


def global_batch(training: TrainingArguments) -> int:
    """How many sequences make one optimizer step, over all devices."""
    return training.train_batch_size * training.world_size * training.gradient_accumulation_steps


def divide_batch(training: TrainingArguments, global_batch_size: int) -> None:
    """
    Set accumulation so that a step has this many sequences; a `UserError` if no whole number of batches makes one.

    Where all devices would read more at once, each reads its share: the global batch decides the result, and theirs
    does not, but for statistics of a batch norm, which are each device's own.
    """
    devices = training.world_size
    at_once = training.train_batch_size * devices
    if 0 < global_batch_size < at_once and global_batch_size % devices == 0:
        at_once, training.per_device_train_batch_size = global_batch_size, global_batch_size // devices
    if global_batch_size % at_once or global_batch_size < 1:
        each = training.per_device_train_batch_size
        read = f"what {devices} device(s) with --per_device_train_batch_size {each} read at once"
        raise UserError(f"--global_batch_size {global_batch_size} is not a multiple of {at_once}, {read}; change one.")
    training.gradient_accumulation_steps = global_batch_size // at_once


@contextmanager
def hold_folder(training: RunArguments, folder: str | Path, identity: RunIdentity, arguments: dict) -> Iterator[None]:
    """
    Hold a folder as [`claim_run_folder`] in the first process, while all of them are at work in it; what it raises is
    raised in all.
    """
    with ExitStack() as stack:
        failure, reasons = None, [""]
        if training.process_index == 0:
            try:
                stack.enter_context(claim_run_folder(folder, identity, arguments, training.overwrite))
            except Exception as error:
                failure, reasons = error, [str(error) or type(error).__name__]
        broadcast_object_list(reasons)
        if reasons[0]:
            raise failure or UserError(reasons[0])
        yield


def announce_run(command: Command, **facts: str) -> None:
    """[`announce`] what every run has, around what is particular to one: the recipe, the devices and the notes."""
    training = command.groups[-1]
    recipes = ", ".join(path.removeprefix(f"{ROOT}/") for path in command.recipes) or "no recipe"
    schedule = getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type)
    if decay := getattr(training, "learning_rate_decay", None):  # a forecaster's
        schedule = f"times {decay:g} after every epoch"
    takes_steps = training.do_train and not getattr(training, "fit_head", False)
    steps = f"learning rate {training.learning_rate:g} ({schedule})" if takes_steps else "no training step"
    recipe = f"{recipes}; {steps}, seed {training.seed}"
    kind, precision = training.device.type, describe_precision(training)
    name = torch.cuda.get_device_name() if kind == "cuda" else f"{torch.get_num_threads()} thread(s)"
    devices = f"{training.world_size} x {kind} ({name}), {precision}"
    announce(recipe=recipe, **facts, devices=devices, note=" ".join(command.notes))


def announce(**facts: str) -> None:
    """Say what is about to run, a line for each fact that there is: model, recipe, data, steps, devices."""
    for name, fact in facts.items():
        if fact:
            logger.info("%s %s", f"{name.capitalize()}:".ljust(9), fact)


def describe_model(model: PreTrainedModel, origin: str) -> str:
    """Words for [`announce`]: what is trained, how large it is and where it comes from."""
    return f"{model.config.model_type}, {get_model_param_count(model):,} parameters, {origin}"


def describe_steps(training: TrainingArguments, num_examples: int | None) -> str:
    """Words for [`announce`]: how many steps of how many sequences; `num_examples` is None where it is not known."""
    batch, steps, epochs = global_batch(training), training.max_steps, training.num_train_epochs
    if num_examples is None:
        return f"{steps:,} of {batch} sequences" if steps > 0 else f"{epochs:g} pass(es), {batch} sequences each"
    at_once = training.per_device_train_batch_size * training.world_size
    if training.dataloader_drop_last and num_examples < at_once:
        raise UserError(
            f"--dataloader_drop_last drops all {num_examples:,} examples, fewer than a batch; leave it out."
        )
    if training.dataloader_drop_last:
        num_examples -= num_examples % at_once
    per_epoch = max(1, math.ceil(num_examples / batch))
    steps, epochs = (steps, steps / per_epoch) if steps > 0 else (math.ceil(epochs * per_epoch), epochs)
    return f"{steps:,} of {batch} sequences, {epochs:.3g} pass(es) over the data"


def upload_run(training: TrainingArguments, folder: str | Path, message: str) -> None:
    """Push a finished run, if --push_to_hub says so, without what names this machine; a `UserError` if that fails."""
    if not training.push_to_hub or training.process_index != 0:
        return
    name = training.hub_model_id or Path(folder).absolute().name
    try:
        repo = create_repo(name, private=training.hub_private_repo, exist_ok=True)
        name_in_card(folder, repo.repo_id)
        upload_folder(
            repo_id=repo.repo_id,
            folder_path=str(folder),
            revision=training.hub_revision,
            commit_message=message,
            ignore_patterns=LOCAL_FILES,
        )
    except Exception as error:  # of the Hub's client, whose kinds change with it
        problem = f"it was not uploaded ({one_line(error)}); the same command tries again"
        raise UserError(f"{folder} holds the run, finished, but {problem}.") from error
    logger.info("%s is on the Hub as %s.", folder, repo.repo_id)


def finish_trackers(training: TrainingArguments) -> None:
    """End the trackers' run, so that the next training of this process begins one of its own."""
    for name in ("wandb", "trackio"):
        if name in (training.report_to or []) and training.process_index == 0:
            # The callback of trackio ends its run behind the last step; a second end is an error.
            with suppress(RuntimeError) if name == "trackio" else nullcontext():
                importlib.import_module(name).finish()


def _check_upload(training: TrainingArguments, given: dict[str, Any]) -> None:
    """Find out now, and not after hours of training, that nothing can be uploaded."""
    if not training.do_train:
        raise UserError("--push_to_hub uploads what is trained, here nothing; add --do_train, or leave it out.")
    if "hub_strategy" in given and training.hub_strategy != HubStrategy.END:
        what = f"--hub_strategy {HubStrategy(training.hub_strategy).value} uploads a folder as it is"
        raise UserError(f"{what}, with paths of this machine; leave it out: a finished run is uploaded.")
    training.hub_strategy = HubStrategy.END
    with explained("--push_to_hub cannot reach the Hub as a user"):
        whoami()


def _check_sharding(training: RunArguments) -> None:
    version = (training.fsdp_plugin_args or {}).get("fsdp_version") or int(os.environ.get("FSDP_VERSION", "1"))
    loads_once = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() in ("1", "true")
    if training.is_sharded and version > 1 and loads_once:
        off = "leave cpu_ram_efficient_loading out of --fsdp_config"
        if not training.fsdp:
            off = "give `accelerate launch` --fsdp_cpu_ram_efficient_loading false, or say so in its configuration"
        raise UserError(f"FSDP's RAM-efficient loading hands on no buffers, such as SKTformer's samples; {off}.")


def _check_processes(training: TrainingArguments) -> None:
    # Asking for the device joins the process group, without which the world is one process.
    training.dataloader_pin_memory = training.dataloader_pin_memory and training.device.type == "cuda"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > training.world_size:
        remedy = "there is no accelerator for them; add --use_cpu to train on processors"
        raise UserError(f"{processes} processes were launched but each would train alone: {remedy}.")
    if training.n_gpu > 1:
        remedy = "start with `accelerate launch` or `torchrun`, or show it one with CUDA_VISIBLE_DEVICES=0"
        raise UserError(f"{training.n_gpu} GPUs are seen by a single process, which multiplies the batch; {remedy}.")


def _set_threads(training: RunArguments) -> None:
    """Launchers give every process one thread, also where it is alone on the machine."""
    launched = any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"))
    threads = training.num_threads
    if threads is None and launched and training.device.type == "cpu" and os.environ.get("OMP_NUM_THREADS") == "1":
        threads = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if threads is not None:
        torch.set_num_threads(threads)
