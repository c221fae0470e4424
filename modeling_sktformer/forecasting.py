"""
Long-term forecasting of time series: SKTformer's layers between an instance normalisation and a Fourier extrapolation.

Section 4.2 and Algorithms 3 and 4 of "SKTformer: A Skeleton Transformer for Long Sequence Data".

Letters in shapes: B batch, L context length, H prediction length, C channels, d hidden size.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.processing_utils import Unpack
from transformers.utils.generic import ModelOutput, can_return_tuple, maybe_autocast

from .configuration_sktformer import SKTformerConfig
from .modeling_sktformer import SKTformerEncoder, SKTformerKwargs, SKTformerPreTrainedModel, captured_outputs
from .outputs import SkeletonMatrices
from .sequences import can_be_read


@dataclass
class PredictionOutput(ModelOutput):
    """
    What the forecasters of transformers return.

    Args:
        loss (`torch.Tensor` of shape `()`, *optional*): Error over the observed future values, if they are given.
        prediction_outputs (`torch.Tensor` of shape `(batch_size, prediction_length, num_channels)`): The forecast.
        loc, scale (`torch.Tensor` of shape `(batch_size, 1, num_channels)`): What each series was measured from, by.
        hidden_states (`tuple` of `torch.Tensor`, *optional*):
            Of shape `(batch_size, context_length, hidden_size)`; independent channels are rows of the batch.
        attentions (`tuple` of `torch.Tensor`, *optional*): The token branch's matrices, as [`SKTformerModel`]'s.
    """

    loss: torch.Tensor | None = None
    prediction_outputs: torch.Tensor | None = None
    loc: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class SKTformerForPredictionOutput(SkeletonMatrices, PredictionOutput):
    """Of the forecaster."""


def fourier_extrapolation(series: torch.Tensor, num_harmonics: int, prediction_length: int) -> torch.Tensor:
    r"""
    Continue a series as the sum of its waves of lowest frequency (Algorithm 4).

    Of the L Fourier coefficients X_k the 1 + 2 `num_harmonics` with the lowest frequency f_k = k / L are kept, and

        y(t) = sum over k of |X_k| / L cos(2 pi f_k t + angle(X_k)),  t = L .. L + H - 1,

    with pi where the listing has 3.1415. Put together, y(t) = sum over s of e(t - s) series(s), where e is the same
    sum of waves for an impulse at 0: a product with a fixed matrix. All of the waves repeat the series as it is.

    Args:
        series (`torch.Tensor` of shape `(batch_size, context_length, num_channels)`): What to continue.
        num_harmonics (`int`): Waves that are kept beside the constant; from L // 2 on all.
        prediction_length (`int`): Time steps H to continue by.

    Returns:
        `torch.Tensor` of shape `(batch_size, prediction_length, num_channels)`, in the dtype of `series`.
    """
    length, device = series.shape[1], series.device
    dtype = torch.promote_types(series.dtype, torch.float32)
    lags = torch.arange(length, device=device)
    waves = torch.arange(1, min(num_harmonics, length // 2) + 1, device=device)
    # A multiple of the circle is taken off before the cosine, which is exact for small angles only.
    angles = (waves[:, None] * lags % length).to(dtype) * (2 * torch.pi / length)
    # Each wave stands for itself and its mirror image, which the one of L / 2 cycles is, too.
    weights = torch.where(2 * waves == length, 1.0, 2.0).to(dtype)
    impulse = (1 + (weights[:, None] * angles.cos()).sum(dim=0)) / length  # (L,)
    times = torch.arange(length, length + prediction_length, device=device)
    extrapolation = impulse[(times[:, None] - lags) % length]  # (H, L)
    with maybe_autocast(device.type, enabled=False):
        return (extrapolation @ series.to(dtype)).to(series.dtype)


def measure_series(values: torch.Tensor, gaps: torch.Tensor | None, epsilon: float) -> tuple[torch.Tensor, ...]:
    """
    Mean, last observed value and scale of each series of a batch (instance normalisation, Algorithm 3).

    The scale is sqrt(variance + epsilon) with the listing's unbiased variance. Only observed values count; a series
    without any has mean and variance 0, and without a variance and an epsilon the scale is 1.

    Args:
        values (`torch.Tensor` of shape `(batch_size, context_length, num_channels)`): Zero where nothing is observed.
        gaps (`torch.BoolTensor` of the same shape, *optional*): Where nothing is observed.
        epsilon (`float`): Added to the variance.

    Returns:
        `tuple` of three `torch.Tensor` of shape `(batch_size, 1, num_channels)`.
    """
    observed = torch.ones_like(values, dtype=torch.bool) if gaps is None else ~gaps
    count = observed.sum(dim=1, keepdim=True)
    mean = values.sum(dim=1, keepdim=True) / count.clamp(min=1)
    squares = ((values - mean) * observed).square().sum(dim=1, keepdim=True)
    variance = squares / (count - 1).clamp(min=1) + epsilon
    last = (observed.cumsum(dim=1) * observed).argmax(dim=1, keepdim=True)
    return mean, values.gather(1, last), torch.where(variance > 0, variance, 1).sqrt()


class SKTformerForPrediction(SKTformerPreTrainedModel):
    """
    SKTformer with a forecasting head: continues multivariate time series (Section 4.2, Algorithm 3).

        x = (past - loc) / scale                over the time steps of each series
        h = value embedding of x;  h <- layer(h) for each layer
        forecast = fourier_extrapolation(decoder(h)) * scale + loc

    A layer adds skeleton attention of the smoothed states to its input, and with `use_mlp` a feed-forward part. The
    context is the longest input that the filters and norms of the layers are made for, whatever
    `max_position_embeddings` says. With `channel_independence` every channel is a series of its own.

    Missing values are named by a mask. They count in no statistic, and an embedding of their own tells the layers
    that there is nothing to read, so that what stands in their place, be it NaN, has no influence. A function that is
    set as `model.loss_function` is given what [`prediction_loss`] takes.

    Args:
        config ([`SKTformerConfig`]): Sizes and switches; those from `context_length` on are this head's. A context of
            fewer time steps than landmarks is a `ValueError`.
    """

    _auto_class = "AutoModelForTimeSeriesPrediction"
    _other_sizes = "A forecaster keeps the lengths and channels that it was made for; train another one for others."
    _auto_map = {
        "AutoConfig": "configuration_sktformer.SKTformerConfig",
        "AutoModelForTimeSeriesPrediction": "forecasting.SKTformerForPrediction",
    }
    main_input_name = "past_values"
    _input_embed_layer = "value_embedding"

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        if (num := config.num_landmark_tokens) > (length := config.context_length):
            raise ValueError(f"`num_landmark_tokens` ({num}) is larger than `context_length` ({length}); sample less.")
        layer_config = copy.deepcopy(config)
        layer_config.max_position_embeddings = config.context_length
        width = 1 if config.channel_independence else config.num_input_channels
        self.value_embedding = nn.Linear(width, config.hidden_size)
        self.gap_embedding = nn.Linear(width, config.hidden_size, bias=False)
        self.level_embedding = nn.Linear(width, config.hidden_size, bias=False) if config.embed_level else None
        self.encoder = SKTformerEncoder(layer_config)
        self.encoder.final_norm = nn.Identity()  # the decoder reads the layers' sum, as in the listing
        self.decoder = nn.Linear(config.hidden_size, width)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.value_embedding:
            # Of a few channels, which are of unit scale: the listing's layers have PyTorch's initialisation.
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif module is self.decoder:
            init.normal_(module.weight, std=self.config.decoder_initializer_scale * self.config.initializer_range)

    def get_position_embeddings(self) -> nn.Embedding:
        """Refuse with a `NotImplementedError`: a forecaster has none."""
        raise NotImplementedError("A forecaster has no position embeddings: filters know how far apart times are.")

    def resize_position_embeddings(self, *args: Any, **kwargs: Any) -> None:
        """Refuse with a `NotImplementedError`: a forecaster reads contexts of one length."""
        what = f"This forecaster reads contexts of context_length={self.config.context_length} time steps alone"
        raise NotImplementedError(f"{what}, which its forecast is tied to; train another one for another length.")

    @can_return_tuple
    def forward(
        self,
        past_values: torch.Tensor,
        past_observed_mask: torch.Tensor | None = None,
        future_values: torch.Tensor | None = None,
        future_observed_mask: torch.Tensor | None = None,
        **kwargs: Unpack[SKTformerKwargs],
    ) -> SKTformerForPredictionOutput:
        """
        Forecast a batch of series.

        Args:
            past_values (`torch.Tensor` of shape `(batch_size, context_length, num_input_channels)`):
                The contexts, best standardised with the training data's mean and standard deviation. With
                `channel_independence` any number of channels. Beyond 1e18 their squares want float64.
            past_observed_mask (`torch.Tensor` of the same shape, *optional*):
                1 where a value was observed, 0 where it is missing. By default every value was observed.
            future_values (`torch.Tensor` of shape `(batch_size, prediction_length, num_input_channels)`, *optional*):
                What came after.
            future_observed_mask (`torch.Tensor` of the same shape, *optional*): Likewise, for what counts in the loss.
            output_hidden_states, output_attentions, output_feature_attentions, return_dict (`bool`, *optional*):
                As in [`SKTformerModel.forward`].

        Returns:
            [`SKTformerForPredictionOutput`], whose forecasts, `loc` and `scale` are float32 at least.

        Raises:
            TypeError: for a keyword that means nothing here.
            ValueError: if the input has another shape, or NaN or an infinite value that no mask names (looked for on
                processors only; elsewhere it makes the forecast NaN).
        """
        self._check_keywords(kwargs)
        self._check_inputs(past_values, past_observed_mask, future_values, future_observed_mask)
        gaps = None if past_observed_mask is None else ~past_observed_mask.bool()
        values = past_values if gaps is None else past_values.masked_fill(gaps, 0)
        # Half precision holds no sum of squares, and of a series far from 0 not its variation.
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        mean, last, scale = measure_series(values, gaps, self.config.scaling_epsilon)
        loc = mean if self.config.scaling_location == "mean" else last
        weight = self.value_embedding.weight  # of a quantised one a function
        dtype = weight.dtype if isinstance(weight, torch.Tensor) and weight.is_floating_point() else self.dtype
        series = ((values - loc) / scale).to(dtype)
        if gaps is not None:
            series = series.masked_fill(gaps, 0)

        batch_size, num_channels = series.shape[0], series.shape[2]
        hidden_states = self.value_embedding(self._separate_channels(series)).to(dtype)  # also under autocast
        if gaps is not None:
            hidden_states = hidden_states + self.gap_embedding(self._separate_channels(gaps.to(series.dtype)))
        elif self.training:
            # Several processes wait for the gradient of every weight, and each may hold a piece of it.
            hidden_states = hidden_states + self.gap_embedding(series.new_zeros(1, self.gap_embedding.in_features))
        if self.level_embedding is not None:
            hidden_states = hidden_states + self.level_embedding(self._separate_channels(last.to(dtype)))
        outputs = self._encode(hidden_states, None, **kwargs)  # every time step is a token, also one without a value
        decoded = self.decoder(outputs.last_hidden_state)  # (B, L, C), or (B C, L, 1)
        forecast = fourier_extrapolation(decoded, self.config.num_harmonics, self.config.prediction_length)
        if self.config.channel_independence:
            forecast = forecast.squeeze(-1).unflatten(0, (batch_size, num_channels)).mT  # (B, H, C)
        forecast = forecast.to(values.dtype) * scale + loc

        loss = None
        if future_values is not None:
            loss_function = getattr(self, "_loss_function", None) or prediction_loss
            loss = loss_function(forecast, future_values, future_observed_mask, self.config.loss)
        return SKTformerForPredictionOutput(
            loss=loss, prediction_outputs=forecast, loc=loc, scale=scale, **captured_outputs(outputs)
        )

    @torch.no_grad()
    def predict(self, past_values: torch.Tensor) -> torch.Tensor:
        """
        Forecast what follows on a series, in evaluation mode; set it before, `model.eval()`, where threads share it.

        `past_values` of shape `([batch_size,] num_steps, num_input_channels)` holds at least `context_length` time
        steps (fewer are a `ValueError`), of which the last ones are read, and NaN where a value is missing. Returns
        `([batch_size,] prediction_length, num_input_channels)`, float64 for a float64 series but on MPS.
        """
        if past_values.dim() not in (2, 3) or past_values.shape[-2] < self.config.context_length:
            raise ValueError(
                f"`past_values` has shape {tuple(past_values.shape)}; give ([batch_size,] num_steps, "
                f"num_input_channels) with at least context_length={self.config.context_length} time steps."
            )
        if past_values.dim() == 2:
            return self.predict(past_values.unsqueeze(0)).squeeze(0)
        device = past_values.device if self.device.type == "meta" else self.device  # offloaded weights are on none
        # Of a series far from 0 float32 does not hold the variation; MPS has no float64.
        own = torch.float32 if device.type == "mps" or not past_values.is_floating_point() else past_values.dtype
        dtype = torch.promote_types(torch.promote_types(self.dtype, own), torch.float32)
        context = past_values[:, -self.config.context_length :].to(device, dtype)
        if bool(context.isinf().any()):
            raise ValueError("`past_values` has an infinite value; give NaN where a value is missing.")
        modes = {module: module.training for module in self.modules()}
        try:
            return self.eval()(context, past_observed_mask=~context.isnan(), return_dict=True).prediction_outputs
        finally:
            for module, was_training in modes.items():
                module.training = was_training

    def _separate_channels(self, values: torch.Tensor) -> torch.Tensor:
        """Make each channel of `(B, L, C)` a series of its own, `(B C, L, 1)`, if the model reads them so."""
        return values.mT.flatten(0, 1).unsqueeze(-1) if self.config.channel_independence else values

    def _check_inputs(
        self,
        past: torch.Tensor,
        past_mask: torch.Tensor | None,
        future: torch.Tensor | None,
        future_mask: torch.Tensor | None,
    ) -> None:
        config = self.config
        channels = "any" if config.channel_independence else config.num_input_channels
        fits = past.dim() == 3 and past.shape[1] == config.context_length and channels in ("any", past.shape[2])
        if not (fits and past.shape[0] * past.shape[2]):
            raise ValueError(
                f"`past_values` has shape {tuple(past.shape)}, this model reads (batch_size, "
                f"context_length={config.context_length}, num_input_channels={channels}) with at least one series."
            )
        future_shape = (past.shape[0], config.prediction_length, past.shape[2])
        for name, given, expected in (
            ("past_observed_mask", past_mask, tuple(past.shape)),
            ("future_values", future, future_shape),
            ("future_observed_mask", future_mask, future_shape),
        ):
            if given is not None and given.shape != expected:
                raise ValueError(f"`{name}` has shape {tuple(given.shape)}, expected {expected}.")
        if not can_be_read(past):
            return
        for name, values, mask in (("past", past, past_mask), ("future", future, future_mask)):
            unnamed = values if values is None or mask is None else values.masked_fill(~mask.bool(), 0)
            if unnamed is not None and not bool(unnamed.isfinite().all()):
                kind = "NaN" if bool(unnamed.isnan().any()) else "an infinite value"
                what = f"`{name}_values` has {kind}{'' if mask is None else ' that its mask counts as observed'}"
                raise ValueError(f"{what}; name missing values by `{name}_observed_mask={name}_values.isfinite()`.")


def prediction_loss(
    forecast: torch.Tensor, future: torch.Tensor, observed_mask: torch.Tensor | None, kind: str
) -> torch.Tensor:
    """Mean squared (`"mse"`) or absolute (`"mae"`) error over what was observed; 0 where that is nothing."""
    if observed_mask is not None:
        observed_mask = observed_mask.bool()  # whose sum half precision would not hold
        # Filled before the difference: a NaN would come back in the gradient of what is masked after it.
        future = torch.where(observed_mask, future, forecast.detach())
    errors = forecast - future.to(forecast.dtype)
    errors = errors.square() if kind == "mse" else errors.abs()
    return errors.mean() if observed_mask is None else errors.sum() / observed_mask.sum().clamp(min=1)
