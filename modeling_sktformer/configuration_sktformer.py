"""Configuration of SKTformer."""

import difflib
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class SKTformerConfig(PreTrainedConfig):
    r"""
    Sizes and switches of an SKTformer, the skeleton transformer for long sequences (also published as S3Attention).

    Every field is checked for its type when it is set, and the fields are checked against each other when a
    configuration is made, saved, or used to build a model. The defaults give the size of BERT base.

    Args:
        vocab_size (`int`): Number of tokens in the vocabulary.
        hidden_size (`int`): Width d of the hidden states; divisible by `num_attention_heads` and `num_segments`.
        num_hidden_layers (`int`): Number of layers.
        num_attention_heads (`int`): Number of attention heads.
        intermediate_size (`int`): Width of the feed-forward part.
        hidden_act (`str`): Activation of the feed-forward part and the masked-LM head, known to `transformers`.
        max_position_embeddings (`int`): Longest input N, in tokens, and the length of the whole-sequence filter, see
            [`SKTformerModel.resize_position_embeddings`].
        type_vocab_size (`int`): Number of token types (sentence A, sentence B).
        hidden_dropout_prob (`float`): Dropout after the embeddings and at the end of each residual branch.
        attention_probs_dropout_prob (`float`): Dropout on both attention matrices.
        smoother_dropout_prob (`float`): Dropout at the end of the convolution stem.
        classifier_dropout (`float`, *optional*): Dropout before the classifiers; `hidden_dropout_prob` when not given.
        initializer_range (`float`): Standard deviation of the initial weights.
        layer_norm_eps (`float`): Epsilon of the layer norms.
        pad_token_id (`int`, *optional*): Padding token.
        tie_word_embeddings (`bool`): Whether the masked-LM decoder shares the word embeddings.
        num_segments (`int`): Segments r that columns are averaged into before the Fourier transform (Equation 6).
        num_landmark_tokens (`int`): Sampled tokens s1 that every token attends to; at most `max_position_embeddings`.
        num_landmark_features (`int`): Sampled columns s2 per head that its features attend to; at most its width.
        landmark_seed (`int`): Seed of the samples, which are drawn once and saved with the weights.
        conv_kernel_size (`int`): Width of the convolution stem in tokens, odd.
        smoother_norm (`"batch_norm"` or `"layer_norm"`):
            Normalisation in the convolution stem: over the batch and the columns at each position (the paper's), or
            over the columns of each token, which couples no samples (the default).
        smoother_activation (`str`): Of the convolution stem; also `"elu"`, which later code of the authors has.
        fourier_initializer_scale (`float`):
            Multiplies the initial standard deviation of the Fourier filter, 1 / sqrt(hidden_size) per part.
        use_smoother (`bool`): Off: queries, keys and values are read from the layer norm's output.
        use_fourier_convolution (`bool`): Off: the convolution stem sees its input alone.
        use_convolution_stem (`bool`): Off: the smoother returns the sum of the Fourier convolution and its input.
        use_token_attention (`bool`), use_feature_attention (`bool`):
            One off: the layer norm of the other alone. Both off is an error.
        use_smoother_residual (`bool`):
            Whether the smoother's output, without a smoother the layer norm's, is added to the attention's. Not the
            paper's: what the few coefficients that the branches read of a token leave out reaches the next part of the
            layer.
        use_residual_gate (`bool`): Whether a learned gate weighs each token's columns of that. Not the paper's either.
        use_mlp (`bool`): Off: layers have no feed-forward part, as in the paper's forecaster.
        classifier_pooling (`"cls"`, `"mean"`, `"mean_std"` or `"layers"`): Sequence heads read the first real token,
            the mean of all, mean and standard deviation, or these of the embeddings and of every layer.
        sparse_prediction (`bool`): Whether the masked-LM head computes logits at labelled positions only while
            training; without labels and in evaluation mode logits are always complete.
        kernels (`"auto"` or `"eager"`):
            Whether forms and kernels are chosen for each batch, see [`SKTformerPreTrainedModel.set_kernels`].
        context_length (`int`): Time steps that a forecaster reads, [`SKTformerForPrediction`]; it takes the place of
            `max_position_embeddings` there, of which `num_landmark_tokens` may still not be more.
        prediction_length (`int`): Time steps that it forecasts.
        num_input_channels (`int`): Channels of its series.
        num_harmonics (`int`): Waves of 1 .. `num_harmonics` cycles in the context that the forecast continues, beside
            the constant (Algorithm 4). From `context_length // 2` on these are all, which repeat the decoded series.
        scaling_location (`"mean"` or `"last"`):
            What a series is measured from: the mean of its context (the paper's), or its last observed value.
        scaling_epsilon (`float`):
            Added to the variance of a context before its root scales the series. The listing has 1: a context of
            variance 1 is divided by sqrt(2), and a nearly constant one keeps its amplitude.
        embed_level (`bool`):
            Whether the layers of a forecaster are told each series' last observed value, which the instance
            normalisation takes away.
        channel_independence (`bool`): Whether each channel is forecast by itself, with the same weights.
        decoder_initializer_scale (`float`):
            Multiplies the initial standard deviation of a forecaster's decoder. With 0 the first forecast is what the
            series is measured from.
        loss (`"mse"` or `"mae"`): Loss of the forecaster: mean squared or mean absolute error.

    Raises:
        huggingface_hub.errors.StrictDataclassError: for a value of the wrong type or a combination that cannot work.
        ValueError: for a field name that looks like a misspelling, and for decoder options.

    Example:

    ```python
    >>> from modeling_sktformer import SKTformerConfig, SKTformerModel
    >>> model = SKTformerModel(SKTformerConfig(num_hidden_layers=2, max_position_embeddings=4096))
    ```
    """

    model_type = "sktformer"
    _auto_class = "AutoConfig"
    base_model_fsdp_plan = {"embeddings.word_embeddings": "free_full_weight", "encoder.layers.*": "free_full_weight"}

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    smoother_dropout_prob: float | int = 0.1
    classifier_dropout: float | int | None = None
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-5
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    num_segments: int = 8
    num_landmark_tokens: int = 8
    num_landmark_features: int = 8
    landmark_seed: int = 0
    conv_kernel_size: int = 3
    smoother_norm: Literal["batch_norm", "layer_norm"] = "layer_norm"
    smoother_activation: str = "relu"
    fourier_initializer_scale: float | int = 1.0
    use_smoother: bool = True
    use_fourier_convolution: bool = True
    use_convolution_stem: bool = True
    use_token_attention: bool = True
    use_feature_attention: bool = True
    use_smoother_residual: bool = False
    use_residual_gate: bool = False
    classifier_pooling: Literal["cls", "mean", "mean_std", "layers"] = "cls"
    sparse_prediction: bool = True
    kernels: Literal["auto", "eager"] = "auto"
    use_mlp: bool = True
    context_length: int = 96
    prediction_length: int = 96
    num_input_channels: int = 1
    num_harmonics: int = 8
    scaling_location: Literal["mean", "last"] = "mean"
    scaling_epsilon: float | int = 1.0
    embed_level: bool = False
    channel_independence: bool = False
    decoder_initializer_scale: float | int = 1.0
    loss: Literal["mse", "mae"] = "mse"

    def __post_init__(self, **kwargs):
        for option in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
            if kwargs.get(option, getattr(self, option, False)):
                raise ValueError(f"SKTformer is an encoder: `{option}=True` cannot be had; leave the option out.")
        if "head_dim" in kwargs:
            raise ValueError("`head_dim` is hidden_size / num_attention_heads; choose these.")
        # Unknown keys are kept as attributes, so a misspelt size would be ignored; what was saved has its owner's.
        for key in kwargs if self.transformers_version is None else ():
            if not hasattr(PreTrainedConfig, key) and (similar := self._similar_field(key)):
                raise ValueError(f"SKTformerConfig has no field `{key}`; did you mean `{similar}`?")
        super().__post_init__(**kwargs)

    @classmethod
    def _similar_field(cls, key: str) -> str | None:
        """The field whose name is almost the key's, or ends with a plural or begins with what it is the plural of."""
        fields = cls.__dataclass_fields__
        similar = difflib.get_close_matches(key, fields, n=1, cutoff=0.87)  # not `pad_token`
        plural = [f for f in fields if key.endswith("s") and (f.endswith(f"_{key}") or f.startswith(f"{key[:-1]}_"))]
        return next(iter(similar + plural), None)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As loading does; a `ValueError` for the fields of another architecture, whose weights would not fit."""
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            other = f'the `model_type` "{model_type}", not "{cls.model_type}"'
            raise ValueError(f"This configuration has {other}; load it with that one's classes or the Auto classes.")
        return super().from_dict(config_dict, **kwargs)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads

    def validate_sizes(self):
        """Check that every size is positive and fits the others, and that no other number is out of its range."""
        for name, kind in SKTformerConfig.__annotations__.items():
            value = getattr(self, name)
            is_size = kind is int and name not in ("landmark_seed", "num_harmonics")
            if is_size and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
            if "dropout" in name and value is not None and not 0 <= value < 1:
                raise ValueError(f"`{name}` must be at least 0 and below 1, got {value}.")
            if (name == "num_harmonics" or kind == float | int) and not 0 <= value < float("inf"):
                raise ValueError(f"`{name}` must be finite and not negative, got {value}.")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"`pad_token_id` ({self.pad_token_id}) is not one of {self.vocab_size} tokens.")
        for name in ("num_attention_heads", "num_segments"):
            if self.hidden_size % (parts := getattr(self, name)):
                raise ValueError(f"`hidden_size` ({self.hidden_size}) is not divisible by `{name}` ({parts}).")
        positions, columns = self.max_position_embeddings, self.head_dim
        for name, there, what in (
            ("num_landmark_tokens", positions, f"`max_position_embeddings` ({positions})"),
            ("num_landmark_features", columns, f"the width of a head ({columns} = hidden_size / num_attention_heads)"),
        ):
            if getattr(self, name) > there:
                raise ValueError(f"`{name}` ({getattr(self, name)}) is larger than {what}; choose a smaller one.")

    def validate_switches(self):
        """Check the kernel width, and that some attention and what is gated are left."""
        if self.conv_kernel_size % 2 == 0:
            raise ValueError(f"`conv_kernel_size` must be odd, got {self.conv_kernel_size}.")
        if self.use_residual_gate and not self.use_smoother_residual:
            raise ValueError("`use_residual_gate` weighs what `use_smoother_residual` adds; switch that on, too.")
        if not (self.use_token_attention or self.use_feature_attention):
            raise ValueError("`use_token_attention` and `use_feature_attention` are both off; switch at least one on.")
