"""The forecaster that is trained: SKTformer, or another one of transformers with the same interface."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForTimeSeriesPrediction,
    EvalPrediction,
    PatchTSMixerConfig,
    PatchTSMixerForPrediction,
    PatchTSTConfig,
    PatchTSTForPrediction,
    PreTrainedConfig,
    PreTrainedModel,
)

from experiments.arguments import UserError, explained, flag, require_at_least
from experiments.fine_tuning import FineTuningTrainer
from experiments.models import TRAINED_DTYPE, check_one_model, override_fields, override_trained
from experiments.sized_models import SizedModelArguments
from experiments.trials import FineTuningArguments
from modeling_sktformer import SKTformerConfig, SKTformerForPrediction
from modeling_sktformer.forecasting import prediction_loss


# What the sizes of an SKTformer are called in other forecasters, and what else was published of them where the
# library's default is another one; what they have no word for, they have not.
_PEERS: dict[str, tuple[type, type, dict[str, str], dict[str, Any]]] = {
    "sktformer": (SKTformerConfig, SKTformerForPrediction, {}, {}),
    "patchtst": (
        PatchTSTConfig,
        PatchTSTForPrediction,
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "num_hidden_layers",
            "num_attention_heads": "num_attention_heads",
            "intermediate_size": "ffn_dim",
            "hidden_dropout_prob": "ff_dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        # By default every time step is a patch, and the decoder reads the mean over them.
        {"patch_length": 16, "patch_stride": 8, "pooling_type": None},
    ),
    "patchtsmixer": (
        PatchTSMixerConfig,
        PatchTSMixerForPrediction,
        {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "hidden_dropout_prob": "dropout"},
        {},
    ),
}
# The paper's batch, after which the code it was measured with drops the windows that do not fill another one.
_LEGACY_BATCH = 32


@dataclass
class ForecasterArguments(SizedModelArguments):
    """The forecaster."""

    model_name_or_path: str | None = flag(
        None, "Forecaster to forecast with, or to go on from: a folder of this script."
    )
    trust_remote_code: bool = flag(False, "Run the code that a checkpoint carries.")
    model_type: Literal[tuple(_PEERS)] = flag(  # type: ignore[valid-type]
        "sktformer", "Architecture of a new forecaster, of the same sizes."
    )


def load_config(arguments: ForecasterArguments) -> PreTrainedConfig:
    """
    The configuration of a trained forecaster, with another dropout if the arguments override it.

    Raises:
        UserError: if it cannot be had, is of no forecaster or another type, or weights depend on what is overridden.
    """
    name = str(arguments.model_name_or_path)
    check_one_model(name)
    with explained(f"The checkpoint {name} cannot be loaded"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=arguments.trust_remote_code)
    lacking = [n for n in ("context_length", "prediction_length", "num_input_channels") if not hasattr(config, n)]
    if lacking or not str((config.architectures or [""])[0]).endswith("ForPrediction"):
        raise UserError(f"The checkpoint {name} is no forecaster, but a {(config.architectures or ['model'])[0]}.")
    if arguments.model_type not in ("sktformer", config.model_type):
        raise UserError(f"--model_type {arguments.model_type}: the checkpoint {name} is a {config.model_type}.")
    override_trained(name, config, arguments.config_overrides)
    return config


def build_forecaster(
    arguments: ForecasterArguments, context_length: int, prediction_length: int, num_channels: int
) -> PreTrainedModel:
    """
    Load or make the forecaster that is asked for; the landmarks of a new SKTformer are those of PyTorch's seed.

    Raises:
        UserError: if it cannot be made, or was made for another length, horizon or number of channels.
    """
    lengths = {
        "context_length": context_length,
        "prediction_length": prediction_length,
        "num_input_channels": num_channels,
    }
    name = arguments.model_name_or_path
    if name:
        config = load_config(arguments)
        for field_name, value in lengths.items():
            made = getattr(config, field_name)
            if made != value:
                raise UserError(f"The checkpoint {name} was made for {field_name} {made}, and {value} is asked for.")
        known = _PEERS.get(config.model_type)
        model_class: Any = known[1] if known else AutoModelForTimeSeriesPrediction
        options = {} if known else {"trust_remote_code": arguments.trust_remote_code}
        with explained(f"The checkpoint {name} cannot be loaded"):
            return model_class.from_pretrained(name, config=config, dtype=TRAINED_DTYPE, **options)
    config_class, model_class, names, published = _PEERS[arguments.model_type]
    fields = arguments.fields()
    with explained(f"No {arguments.model_type} can be made of these fields"):
        if arguments.model_type == "sktformer":
            config = config_class(**{"landmark_seed": torch.initial_seed() % 2**31, **fields}, **lengths)
        else:
            sizes = {names[key]: value for key, value in fields.items() if key in names}
            config = config_class(**published, **sizes, **lengths)
        for override in filter(None, (arguments.config_overrides or "").split(",")):
            if override.partition("=")[0] in lengths:
                raise UserError(f"--config_overrides: {override} has a flag of its own; leave it out.")
        override_fields(config, arguments.config_overrides)
        return model_class(config)


def model_inputs(model: PreTrainedModel, window: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a forecaster reads of a batch of windows, by the names that it has for it."""
    inputs = {"past_values": window["past_values"]}
    if "past_observed_mask" in window:
        taken = inspect.signature(model.forward).parameters
        name = "past_observed_mask" if "past_observed_mask" in taken else "observed_mask"
        inputs[name] = window["past_observed_mask"]
    return inputs


class ForecastingTrainer(FineTuningTrainer):
    """
    A Trainer whose evaluation keeps the errors of each window in place of its forecast, and whose loss counts what
    was observed, for every architecture alike.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        bare = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        outputs = model(**model_inputs(bare, inputs))
        forecast = outputs["prediction_outputs"] if isinstance(outputs, dict) else outputs[0]
        kind = bare.config.loss if bare.config.loss in ("mse", "mae") else "mse"
        loss = prediction_loss(forecast, inputs["future_values"], inputs.get("future_observed_mask"), kind)
        return (loss, forecast) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Loss, sums of squared and absolute errors `(B, 2)`, and how many values each window has `(B,)`."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, forecast = self.compute_loss(model, inputs, return_outputs=True)
        errors = forecast.float() - inputs["future_values"]
        errors = errors if errors.device.type == "mps" else errors.double()  # which that knows not
        observed = inputs.get("future_observed_mask")
        count = torch.full((len(errors),), errors[0].numel(), device=errors.device)
        if observed is not None:
            errors, count = errors * observed, observed.sum(dim=(1, 2))
        sums = torch.stack([errors.square().sum(dim=(1, 2)), errors.abs().sum(dim=(1, 2))], dim=1)
        return loss.detach(), sums, count

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The library's schedule, or the protocol's: the rate multiplied after each epoch."""
        decay = cast(ForecastingArguments, self.args).learning_rate_decay
        if decay is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            per_epoch = num_training_steps / max(1, self.args.num_train_epochs)
            self.lr_scheduler = LambdaLR(
                optimizer or cast(Any, self.optimizer), lambda step: decay ** (step // per_epoch)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler


@dataclass
class ForecastingArguments(FineTuningArguments):
    """The arguments of fine-tuning for forecasters."""

    output_dir: str | None = flag("runs/forecasting", "Folder of the runs; every horizon gets a folder in it.")
    learning_rate_decay: float | None = flag(
        None, "Multiply the rate by this after every epoch; no other schedule counts then."
    )
    num_plots: int = flag(3, "Windows to draw with --do_predict.")

    def __post_init__(self) -> None:
        decay = self.learning_rate_decay
        if decay is not None and not 0 < decay <= 1:
            raise UserError(f"--learning_rate_decay is {decay:g}; it must lie between 0 and 1.")
        if decay is not None:
            self.lr_scheduler_type = "constant"  # between the ends of epochs
        super().__post_init__()
        require_at_least(0, self, "num_plots")
        unused = {
            "calibrate_head": self.calibrate_head,
            "fit_head": self.fit_head,
            "head_learning_rate": self.head_learning_rate is not None,
            "layer_decay": self.layer_decay is not None,
            "label_smoothing_factor": self.label_smoothing_factor,
            "train_sampling_strategy": self.train_sampling_strategy == "group_by_length",
        }
        if given := [name for name, is_given in unused.items() if is_given]:
            raise UserError(f"--{' and --'.join(given)} mean nothing to a forecaster; leave them out.")
        self.remove_unused_columns = False  # masks go by different names


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """
    MSE and MAE over all windows, each value with the same weight, whatever the size of a batch.

    `score` is 1 - MSE, on scaled series about the share of the variance that is explained; `legacy_mse` and
    `legacy_mae` leave out the last windows as batches of 32 that drop what does not fill one do.
    """
    sums, counts = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    mse, mae = (sums.sum(axis=0) / max(1, counts.sum())).tolist()
    metrics = {"score": 1 - mse, "mse": mse, "mae": mae}
    kept = len(sums) // _LEGACY_BATCH * _LEGACY_BATCH
    if kept and counts[:kept].sum():
        legacy = (sums[:kept].sum(axis=0) / counts[:kept].sum()).tolist()
        metrics |= dict(zip(("legacy_mse", "legacy_mae"), legacy, strict=True))
    return metrics


@torch.no_grad()
def forecast(model: PreTrainedModel, window: dict[str, torch.Tensor]) -> np.ndarray:
    """What a forecaster says to a batch of windows, scaled: `(batch_size, prediction_length, num_channels)`."""
    inputs = {name: values.to(model.device) for name, values in model_inputs(model, window).items()}
    return model.eval()(**inputs).prediction_outputs.float().cpu().numpy()


def load_best(folder: Path, arguments: ForecasterArguments) -> PreTrainedModel:
    """The forecaster that a finished run has left."""
    trained = ForecasterArguments(model_name_or_path=str(folder), trust_remote_code=arguments.trust_remote_code)
    config = load_config(trained)
    lengths = [getattr(config, name) for name in ("context_length", "prediction_length", "num_input_channels")]
    return build_forecaster(trained, *lengths)
