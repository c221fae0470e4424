"""
SKTformer: an encoder with skeleton attention and a smoother, linear in the length of the sequence.

"SKTformer: A Skeleton Transformer for Long Sequence Data", also published as "S3Attention: Improving Long Sequence
Attention with Smoothed Skeleton Sketching". The equations live in `smoothing.py` and `attention.py`; this file puts
them together.

Letters in shapes: B batch, S tokens, d hidden size, H heads, k landmark tokens.
"""

import copy
import difflib
import inspect
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import output_capturing
from transformers.utils.generic import ModelOutput, can_return_tuple
from transformers.utils.import_utils import is_tracing

from .attention import SkeletonAttention
from .circle import Circle, choose_circle
from .configuration_sktformer import SKTformerConfig
from .kernels import Dropout, LayerNorm
from .lengthening import extend_positions
from .losses import IGNORE_INDEX, classification_loss, cross_entropy, find_problem_type, span_loss
from .outputs import SKTformerHeadOutput, SKTformerModelOutput, SKTformerSpanOutput
from .position_batch_norm import PositionBatchNorm
from .sequences import SequencePooling, Sequences, TokenPlaces
from .smoothing import FourierConvolution, Smoother


_HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
AUTO_MAP = {
    "AutoConfig": "configuration_sktformer.SKTformerConfig",
    "AutoModel": "modeling_sktformer.SKTformerModel",
    **{f"AutoModelFor{head}": f"modeling_sktformer.SKTformerFor{head}" for head in _HEADS},
    "AutoModelForNextSentencePrediction": "modeling_sktformer.SKTformerForSequenceMatching",
}

# Of tokenizers' outputs and sentence-transformers' features: libraries hand them to every model as they are.
_FROM_LIBRARIES = {
    *("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "num_truncated_tokens", "length"),
    *("token_embeddings", "cls_token_embeddings", "all_layer_embeddings", "sentence_embedding", "token_weights_sum"),
}


class SKTformerKwargs(TypedDict, total=False):
    """What every forward pass takes besides its inputs, see [`SKTformerModel.forward`]; `Trainer` counts the items."""

    output_hidden_states: bool | None
    output_attentions: bool | None
    output_feature_attentions: bool | None
    return_dict: bool | None
    num_items_in_batch: torch.Tensor | int | None


class SKTformerEmbeddings(nn.Module):
    """Sum of word, position and token type embeddings, normalised: BERT's."""

    def __init__(self, config: SKTformerConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob, config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        length, device = inputs_embeds.shape[1], inputs_embeds.device
        if position_ids is None:
            position_ids = torch.arange(length, device=device).unsqueeze(0)
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        sums = inputs_embeds + self.position_embeddings(position_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.norm(sums))


class SKTformerMLP(nn.Module):
    """The feed-forward part: linear, activation, linear."""

    def __init__(self, config: SKTformerConfig):
        super().__init__()
        self.chunk_size = config.chunk_size_feed_forward
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.chunk_size > 0 and not is_tracing() and hidden_states.shape[1] > self.chunk_size:
            return torch.cat([*map(self.forward, hidden_states.split(self.chunk_size, dim=1))], dim=1)
        return self.down_proj(self.activation(self.up_proj(hidden_states)))  # in one piece in graphs, for all lengths


class SKTformerLayer(GradientCheckpointingLayer):
    """
    One layer, normalised before each part.

        x <- x + dropout(attention(s))          where s = smoother(LN_1(x)); if `use_smoother_residual`
                                                g * s + attention(s) in place of attention(s), where g = 1
                                                or, if `use_residual_gate`, 2 sigmoid(W LN_1(x) + b)
        x <- x + dropout(MLP(LN_2(x)))          if `use_mlp`
    """

    def __init__(self, config: SKTformerConfig, layer_idx: int):
        super().__init__()
        self.attention_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.smoother = Smoother(config) if config.use_smoother else None
        self.use_smoother_residual = config.use_smoother_residual
        self.residual_gate = nn.Linear(config.hidden_size, config.hidden_size) if config.use_residual_gate else None
        self.attention = SkeletonAttention(config, layer_idx)
        self.use_mlp = config.use_mlp
        if self.use_mlp:
            self.mlp_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            self.mlp = SKTformerMLP(config)
        self.dropout = Dropout(config.hidden_dropout_prob, config)

    def forward(self, hidden_states: torch.Tensor, sequences: Sequences, circle: Circle, **asked: Any) -> torch.Tensor:
        # `asked` is not read: what is compiled alone has another graph, with hooks in it, where outputs are asked for.
        normalized = self.attention_norm(hidden_states)
        attention_input = normalized if self.smoother is None else self.smoother(normalized, sequences, circle)
        attention_output, *_ = self.attention(attention_input, sequences)
        if self.use_smoother_residual:
            if self.residual_gate is not None:
                attention_input = 2 * self.residual_gate(normalized).sigmoid() * attention_input
            attention_output = attention_output + attention_input
        hidden_states = hidden_states + self.dropout(attention_output)
        if not self.use_mlp:
            return hidden_states
        return hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))


class SKTformerEncoder(nn.Module):
    """The layers and a last layer norm, and what all layers share: where sequences end, and how they are convolved."""

    def __init__(self, config: SKTformerConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(SKTformerLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm: nn.Module = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None, **asked: Any) -> torch.Tensor:
        """
        Run the layers on embedded tokens `(B, S, d)`. The mask `(B, S)` is True at real tokens, which stand before the
        padding; what stands at padding, if finite, has no influence. By default every token is real.
        """
        batch_size, length, _ = hidden_states.shape
        sequences = Sequences.from_mask(length, token_mask, hidden_states.dtype)
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        circle = choose_circle(self.config, batch_size, sequences, dtype, hidden_states.device)
        for layer in self.layers:
            hidden_states = layer(hidden_states, sequences, circle, **asked)
        return self.final_norm(hidden_states)

    def landmark_positions(self, shape: torch.Size, places: TokenPlaces | None) -> tuple[torch.Tensor, ...]:
        """Where every layer's landmarks stand in an input `(B, S)`, `(B, k)` each and -1 for none."""
        sequences = Sequences.from_mask(shape[1], None if places is None else places.token_mask, torch.float32)
        found = []
        for layer in self.layers:
            ranks, is_there = cast(SKTformerLayer, layer).attention.select_landmarks(sequences)
            ranks = ranks.expand(shape[0], -1)
            positions = ranks if places is None else places.places.gather(1, ranks)
            found.append(positions if is_there is None else positions.masked_fill(~is_there, -1))
        return tuple(found)


class SKTformerPreTrainedModel(PreTrainedModel):
    """Initialisation, saving with code, and lengthening, which all SKTformer models share."""

    config: SKTformerConfig
    encoder: SKTformerEncoder  # of models that are no heads
    config_class = SKTformerConfig
    base_model_prefix = "sktformer"
    supports_gradient_checkpointing = True
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["SKTformerEmbeddings", "SKTformerLayer"]
    _can_compile_fullgraph = True
    # The classes that a checkpoint names for the Auto classes.
    _auto_map = AUTO_MAP
    _other_sizes = (
        "Sizes are a checkpoint's own. If its length differs, `model.resize_position_embeddings(...)` changes that of "
        "the loaded model; if its labels or what heads read, `ignore_mismatched_sizes=True` begins with a new head."
    )
    _can_record_outputs = {
        "hidden_states": SKTformerLayer,
        "attentions": output_capturing.OutputRecorder(SkeletonAttention, index=1),
        "feature_attentions": output_capturing.OutputRecorder(SkeletonAttention, index=2),
    }
    # Half precision loses sums of many small steps and small differences; filters are transformed in float32.
    _keep_in_fp32_modules_strict = ["running_mean", "running_var", "filter"]

    def __init__(self, config: SKTformerConfig, *inputs, **kwargs):
        for name, others in (("hidden_act", ()), ("smoother_activation", ("elu",))):
            if getattr(config, name) not in (*ACT2FN, *others):
                raise ValueError(f"`{name}` is {getattr(config, name)!r}, which transformers does not have; try gelu.")
        # Fields that `from_pretrained(..., field=value)` sets in a configuration are only checked one by one.
        config.validate()
        super().__init__(config, *inputs, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FourierConvolution):
            # The listing's Kaiming initialisation, whose fan-in makes it 1 / sqrt(d) for the real and imaginary part.
            std = self.config.fourier_initializer_scale * self.config.hidden_size**-0.5
            init.normal_(module.filter, mean=0.0, std=std)
        elif isinstance(module, PositionBatchNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
            init.zeros_(module.running_mean)
            init.ones_(module.running_var)
        elif isinstance(module, SequencePooling):
            init.zeros_(module.center)
            init.ones_(module.scale)
        elif isinstance(module, nn.PReLU):
            init.constant_(module.weight, 0.25)
        elif isinstance(module, SkeletonAttention):
            for name, drawn in module.draw_samples().items():
                init.copy_(getattr(module, name), drawn)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """
        Return `"eager"`, the default, or `"sdpa"`: the token branch is cross attention to the landmarks, and PyTorch's
        fused kernel computes it from the queries of all tokens. Then its matrices cannot be returned.

        Raises:
            ValueError: if another implementation is requested.
        """
        if requested_attention not in (None, "eager", "sdpa"):
            raise ValueError(
                f'SKTformer has no `attn_implementation="{requested_attention}"`: its attention is not a softmax over '
                'all tokens, which is what that computes. Use "eager", "sdpa" or leave the argument out.'
            )
        return requested_attention or "eager"

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """Choose `"eager"` or `"sdpa"`; anything else is an error, see [`get_correct_attn_implementation`]."""
        requested = attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
        for implementation in requested.values():
            chosen = self.get_correct_attn_implementation(implementation)
            for config in self._configs():
                config._attn_implementation_internal = chosen

    def set_kernels(self, kernels: Literal["auto", "eager"]) -> None:
        """
        Choose what computes a batch: `"auto"` kernels and forms that are faster for it, `"eager"` the plain equations.

        What stands beside a sequence in a batch of the same shape changes no bit of it. Another number of sequences
        changes roundings alone, and with `"eager"` not which operators compute them. Checkpoints keep the choice.

        Raises:
            huggingface_hub.errors.StrictDataclassFieldValidationError: for anything else.
        """
        for config in self._configs():
            config.kernels = kernels

    def _configs(self) -> list[SKTformerConfig]:
        """All configurations: a forecaster's layers have their own, and a checkpoint's code may have a class twice."""
        found: dict[int, Any] = {id(m.config): m.config for m in self.modules() if hasattr(m, "config")}
        return [c for c in found.values() if any(k.__name__ == SKTformerConfig.__name__ for k in type(c).__mro__)]

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a checkpoint; where sizes differ from its own, the `RuntimeError` says how they are changed."""
        try:
            loaded = super().from_pretrained(*args, **kwargs)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise RuntimeError(f"{error} {cls._other_sizes}") from error
        (loaded[0] if isinstance(loaded, tuple) else loaded)._check_samples()
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs):
        """
        Save weights, configuration and the model's code, with a class for every Auto class: the checkpoint loads with
        any head where this package is not installed (`trust_remote_code=True`). Of a class in a file of your own, that
        file, and its class alone.

        Raises:
            ValueError: if averages have spoilt the samples, or the encoder alone was resized.
        """
        self._check_samples()
        base = cast(PreTrainedModel, self.base_model)
        length, inner_length = (model.config.max_position_embeddings for model in (self, base))
        if length != inner_length:
            raise ValueError(
                f"The encoder has {inner_length} positions and the whole model {length}; call "
                f"`resize_position_embeddings({inner_length})` on the whole model, loaded anew, not on its encoder."
            )
        before, kind = dict(vars(self.config)), type(self)
        own = kind.__module__, kind.__name__
        if self._auto_class is not None:
            # Whose file is copied: FSDP puts a class of torch's in the place of the model's, a notebook's has none.
            fileless = ("torch.", "__main__", "__mp_main__")
            named = next(c for c in kind.__mro__ if hasattr(c, "_auto_map") and not c.__module__.startswith(fileless))
            kind.__module__, kind.__name__ = named.__module__, named.__name__
            files = ("configuration_sktformer.", f"{named.__module__.rpartition('.')[2]}.")
            self.config.auto_map = {a: name for a, name in self._auto_map.items() if name.startswith(files)}
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            kind.__module__, kind.__name__ = own
            vars(self.config).clear()
            vars(self.config).update(before)

    def _check_samples(self) -> None:
        """A `ValueError` if averages have made numbers of the samples that are none: a mean of 7 and 7 may be 6."""
        for name, order in self.named_buffers():
            if "landmark_" in name and order.device.type != "meta" and len(order.unique()) < len(order):
                raise ValueError(f"`{name}` is no permutation: averages have to leave whole numbers as they are.")

    def _check_keywords(self, keywords: Mapping[str, Any]) -> None:
        known = SKTformerKwargs.__annotations__
        # Libraries give what they want to be off to every model: a cache, say.
        unknown = [key for key, value in keywords.items() if value is not None and value is not False]
        for keyword in (key for key in unknown if key not in known and key not in _FROM_LIBRARIES):
            expected = {*inspect.signature(type(self).forward).parameters, *known} - {"self", "kwargs"}
            similar = difflib.get_close_matches(keyword, expected, n=1)
            hint = f"; did you mean `{similar[0]}`?" if similar else "."
            raise TypeError(f"SKTformer takes no keyword `{keyword}`{hint}")

    def _encode(self, hidden_states: torch.Tensor, places: TokenPlaces | None, **kwargs: Any) -> SKTformerModelOutput:
        """Run the model's `encoder` on sequences whose real tokens stand in front."""
        kwargs["return_dict"] = True  # here; the configuration decides for the caller
        outputs = self._capture(hidden_states, None if places is None else places.token_mask, **kwargs)
        if outputs.get("attentions"):
            outputs["landmark_positions"] = self.encoder.landmark_positions(hidden_states.shape[:2], places)
        return outputs

    @output_capturing.capture_outputs
    def _capture(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None, **kwargs) -> SKTformerModelOutput:
        asked = {name: value for name, value in kwargs.items() if name.startswith("output_") and value}
        return SKTformerModelOutput(last_hidden_state=self.encoder(hidden_states, token_mask, **asked))

    def get_position_embeddings(self) -> nn.Embedding:
        """The position embeddings, `(max_position_embeddings, hidden_size)`."""
        return cast(SKTformerModel, self.base_model).embeddings.position_embeddings

    @torch.no_grad()
    def resize_position_embeddings(
        self,
        new_num_position_embeddings: int,
        extension: str = "tile",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """
        Lengthen or shorten the model, and its tokenizer, in place.

            model.resize_position_embeddings(1024, tokenizer=tokenizer)

        Call it on the whole model, not on the encoder inside of it: it gives the model, with all its parts, a
        configuration of its own, so that other models made from the same configuration object stay as they are.

        Inputs of at most half the smaller length keep their outputs (up to rounding): filters keep their lags
        ([`~lengthening.resize_filter`]), position embeddings and batch norm keep their trained positions, and the
        permutation of the positions keeps its order ([`~lengthening.resize_order`]). Longer inputs change: they reach
        around the old circle. Without Fourier convolution there is none, and all up to the smaller length keep theirs.
        Parameters stay the objects that they are, without gradients; an optimizer's moments of them are of old sizes.

        Args:
            new_num_position_embeddings (`int`): The longest input wanted, in tokens.
            extension (`str`, *optional*, defaults to `"tile"`):
                What the position embeddings and the batch norm of new positions start from: `"tile"` repeats the
                trained positions from the start, `"last"` repeats the last one.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                The tokenizer that is saved with the model. Its `model_max_length` becomes the new length, to which
                pipelines and `tokenizer(..., truncation=True)` truncate.

        Raises:
            ValueError: for another `extension`, and if weights are not there, or not the model's own.
            huggingface_hub.errors.StrictDataclassError: if the configuration does not allow that length, for instance
                because it is smaller than `num_landmark_tokens`.
        """
        resized = {id(config): copy.deepcopy(config) for config in self._configs()}
        for config in resized.values():
            config.max_position_embeddings = new_num_position_embeddings
            config.validate()
        embeddings, weights = self.get_position_embeddings(), [*self.parameters(), *self.buffers()]
        own = {embeddings: "weight"} | {m: "filter" for m in self.modules() if isinstance(m, FourierConvolution)}
        if any(weight.is_meta for weight in weights) or any(own[part] not in part._parameters for part in own):
            raise ValueError("Load the weights, and merge adapters of positions and filters, before resizing.")
        embeddings.weight.data = extend_positions(embeddings.weight, new_num_position_embeddings, extension)
        embeddings.num_embeddings = new_num_position_embeddings
        self.zero_grad()  # whose sizes are the old ones
        for module in self.modules():
            if isinstance(module, PositionBatchNorm):
                module.resize(new_num_position_embeddings, extension)
            elif isinstance(module, (FourierConvolution, SkeletonAttention)):
                module.resize(new_num_position_embeddings)
            if (known := id(getattr(module, "config", None))) in resized:
                setattr(module, "config", resized[known])  # noqa: B010
        if tokenizer is not None:
            tokenizer.model_max_length = new_num_position_embeddings


class SKTformerModel(SKTformerPreTrainedModel):
    """
    The encoder: embeddings, layers and a last layer norm.

    A sequence is its real tokens. They are moved to the front, in their order, before the stack, and what comes out
    goes back to their places. So padding on the left, on the right or in between is the same to the model and changes
    no output at a real token; outputs at padding have no meaning. A configuration whose fields do not fit together is
    a `huggingface_hub.errors.StrictDataclassError`.
    """

    _auto_class = "AutoModel"

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        own_config = copy.deepcopy(config)  # the object may be changed to make another model
        self.embeddings = SKTformerEmbeddings(own_config)
        self.encoder = SKTformerEncoder(own_config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[SKTformerKwargs],
    ) -> SKTformerModelOutput:
        """
        Encode a batch of sequences.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
                Tokens; any length from 1 to `max_position_embeddings`.
            attention_mask (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*):
                1 for tokens to keep, 0 for padding, wherever it stands. By default every token is kept.
            token_type_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
                0 for sentence A, 1 for sentence B.
            position_ids (`torch.LongTensor` of shape `(batch_size or 1, sequence_length)`, *optional*):
                Which position embedding each token gets. By default its rank among the real tokens.
            inputs_embeds (`torch.Tensor` of shape `(batch_size, sequence_length, hidden_size)`, *optional*):
                Embedded tokens instead of `input_ids`.
            output_hidden_states, output_attentions, output_feature_attentions (`bool`, *optional*):
                Also return these of every layer, see [`~outputs.SkeletonMatrices`]. A list keeps the hidden states
                of the layers that it names alone, where 0 is what enters the first.
            return_dict (`bool`, *optional*): Whether to return an output object (the default) or a tuple.

        Returns:
            [`SKTformerModelOutput`] with `last_hidden_state` of shape `(batch_size, sequence_length, hidden_size)`.

        Raises:
            TypeError: for a keyword that means nothing here.
            ValueError: if not exactly one of `input_ids` and `inputs_embeds` is given, if the input has other axes, is
                empty or longer than `max_position_embeddings`, or if the mask, token types or positions are not
                two-dimensional ones of the input's shape.
        """
        self._check_keywords(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        inputs = cast(torch.Tensor, input_ids if inputs_embeds is None else inputs_embeds)
        others = {"token_type_ids": token_type_ids, "position_ids": position_ids}
        self._check_inputs(inputs.shape, attention_mask, 2 if inputs_embeds is None else 3, **others)
        given = [input_ids, token_type_ids, position_ids, inputs_embeds]
        places = TokenPlaces.from_mask(attention_mask)
        if places is not None:
            given = [places.to_front(values) for values in given]
        outputs = self._encode(self.embeddings(*given), places, **kwargs)
        if places is not None:
            outputs.last_hidden_state = places.restore(outputs.last_hidden_state)
            for name, dim in (("hidden_states", 1), ("attentions", 2)):
                captured = outputs.get(name)
                # As it is, if it can be, where outputs may be asked for their gradients with respect to it.
                has_gradient = any(getattr(states, "requires_grad", False) for states in captured or ())
                if captured and not (has_gradient and places.in_place()):
                    outputs[name] = tuple(places.restore(states, dim) for states in captured)
        return SKTformerModelOutput(**outputs)  # in the order of the fields, in which heads return them, too

    def _check_inputs(self, shape: torch.Size, attention_mask: torch.Tensor | None, num_axes: int, **others) -> None:
        if len(shape) != num_axes:
            axes = ("batch_size", "sequence_length", "hidden_size")[:num_axes]
            raise ValueError(f"The input has shape {tuple(shape)}; it must be ({', '.join(axes)}).")
        shape = shape[:2]
        length, longest = shape[1], self.encoder.config.max_position_embeddings
        if min(shape) < 1:
            raise ValueError(f"The input, of shape {tuple(shape)}, has no token; give at least 1.")
        if length > longest:
            raise ValueError(
                f"The input has {length} tokens, this model takes at most max_position_embeddings={longest}. Truncate "
                f"it (`tokenizer(..., truncation=True, max_length={longest})`) or lengthen the model "
                f"(`model.resize_position_embeddings({length})`)."
            )
        if attention_mask is not None and attention_mask.shape != shape:
            raise ValueError(
                f"`attention_mask` has shape {tuple(attention_mask.shape)}, expected {tuple(shape)}: 1 for tokens to "
                "keep and 0 for padding. Masks of pairs of tokens (3 or 4 dimensions) have no meaning here, where "
                "tokens attend to sampled ones."
            )
        for name, values in others.items():
            if values is not None and tuple(values.shape) not in (tuple(shape), (1, length)):
                raise ValueError(f"`{name}` has shape {tuple(values.shape)}, expected {tuple(shape)}.")


def captured_outputs(encoded: ModelOutput) -> dict[str, Any]:
    """What a head returns of the encoder's outputs: all that was asked for."""
    return {name: value for name, value in encoded.items() if name != "last_hidden_state"}


class SKTformerHeadModel(SKTformerPreTrainedModel):
    """
    An encoder with a head, whose class says what `labels` and `logits` are; all else is the same for every head.

    A head defines `_score`, and `_loss` if it is not the one here. A function that is set as `model.loss_function`
    stands in the place of `_loss`, and is given by keyword what transformers' own take: `logits`, `pooled_logits` (the
    same), `labels`, `config`, `vocab_size` and `num_items_in_batch`.
    """

    # Of inputs that have an axis of choices after the batch, `(batch_size, num_choices, ...)`; 0 for any number.
    num_choices: int | None = None
    # Whether `config.sparse_prediction` is about this head: in training only labelled tokens are scored.
    can_be_sparse = False
    evaluates_sparsely = False  # in evaluation too, where a trainer reads no others
    # Whether `config.classifier_pooling` is.
    pools_tokens = False

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)
        self.sktformer = SKTformerModel(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[SKTformerKwargs],
    ) -> SKTformerHeadOutput:
        """
        Encode a batch and score it. Inputs, keywords and errors are those of [`SKTformerModel.forward`].

        Returns:
            [`~outputs.SKTformerHeadOutput`] with `logits`, the `loss` if `labels` are given, and what is asked for of
            `hidden_states`, `attentions` with their `landmark_positions`, and `feature_attentions`.
        """
        self._check_keywords(kwargs)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        rows = inputs if self.num_choices is None else self._flatten_choices(*inputs)
        shown = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        if reads_layers := self.pools_tokens and self.config.classifier_pooling == "layers":
            kwargs["output_hidden_states"] = True
        outputs = self.sktformer(*rows, return_dict=True, **kwargs)
        states: tuple[torch.Tensor, ...] = outputs.hidden_states if reads_layers else (outputs.last_hidden_state,)
        if self.num_choices is not None:
            shape = cast(torch.Tensor, input_ids if inputs_embeds is None else inputs_embeds).shape
            states = tuple(layer.unflatten(0, shape[:2]) for layer in states)
        set_by_user = getattr(self, "_loss_function", None)
        if not (labels is None or self.pools_tokens or set_by_user) and labels.shape != states[-1].shape[:-1]:
            raise ValueError(f"`labels` have shape {tuple(labels.shape)}, expected {tuple(states[-1].shape[:-1])}.")
        is_sparse = self.can_be_sparse and self.config.sparse_prediction and (self.training or self.evaluates_sparsely)
        if is_sparse and labels is not None:
            labels = labels.to(states[-1].device)
            labelled = (labels != IGNORE_INDEX).flatten().nonzero().squeeze(1)
            states = (states[-1].flatten(0, 1).index_select(0, labelled),)
            labels = labels.flatten().index_select(0, labelled)
        logits = self._score(states, attention_mask)
        loss = None
        if labels is not None:
            options: dict[str, Any] = {"num_items_in_batch": kwargs.get("num_items_in_batch")}
            if set_by_user:
                options |= {"pooled_logits": logits, "config": self.config, "vocab_size": self.config.vocab_size}
            loss = (set_by_user or self._loss)(logits=logits, labels=labels, **options)
        returned = captured_outputs(outputs)
        if not shown:
            returned.pop("hidden_states", None)
        elif reads_layers and (some := output_capturing.selected_hidden_states(shown)) is not None:
            kept = output_capturing.resolve_hidden_states_indices(self, some, len(outputs.hidden_states))
            returned["hidden_states"] = tuple(s if n in kept else None for n, s in enumerate(outputs.hidden_states))
        return SKTformerHeadOutput(loss=loss, logits=logits, **returned)

    def _flatten_choices(self, *inputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Make the choices of `(batch_size, num_choices, ...)` rows of the batch; a `ValueError` for other shapes."""
        names, count = {"input_ids": "", "attention_mask": "", "inputs_embeds": ", hidden_size"}, self.num_choices
        for (name, last), rows in zip(names.items(), (*inputs[:2], inputs[-1]), strict=True):
            if rows is not None and (rows.dim() != 3 + bool(last) or rows.shape[1] != (count or rows.shape[1])):
                expected = f"(batch_size, {count or 'num_choices'}, sequence_length{last})"
                raise ValueError(f"`{name}` has shape {tuple(rows.shape)}, this model reads {expected}.")
        return tuple(values if values is None or values.dim() < 3 else values.flatten(0, 1) for values in inputs)

    def _score(self, states: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None) -> torch.Tensor:
        """The logits, from the last hidden states, or all of them; every class below this one brings its own."""
        raise NotImplementedError

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


class SKTformerForMaskedLM(SKTformerHeadModel):
    """
    SKTformer with a masked language modelling head.

    `labels` of shape `(batch_size, sequence_length)` are the tokens to predict, -100 where there is nothing to
    predict. `logits` have shape `(batch_size, sequence_length, vocab_size)`; in training with labels and
    `config.sparse_prediction` `(num_labelled_tokens, vocab_size)`.
    """

    _auto_class = "AutoModelForMaskedLM"
    _tied_weights_keys = {"decoder.weight": "sktformer.embeddings.word_embeddings.weight"}
    can_be_sparse = True

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        dense = nn.Linear(config.hidden_size, config.hidden_size)
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.head = nn.Sequential(OrderedDict(dense=dense, activation=ACT2FN[config.hidden_act], norm=norm))
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder = new_embeddings

    def _score(self, states: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.decoder(self.head(states[-1]))


class SKTformerClassificationHead(nn.Module):
    """
    Scores of a sequence: pooled and standardised ([`SequencePooling`]), linear, tanh, linear.

    It is called `classifier` in the models, which is what adapters' libraries train and save beside the adapter.
    """

    num_parts = 1  # that `combine` makes of what is pooled
    _keep_in_fp32_modules_strict = ["pooling"]  # which models take over from their parts

    def __init__(self, config: SKTformerConfig, num_labels: int):
        super().__init__()
        self.pooling = SequencePooling(config)
        self.dense = nn.Linear(self.num_parts * self.pooling.width, config.hidden_size)
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.output = nn.Linear(config.hidden_size, num_labels)

    def forward(self, states: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None) -> torch.Tensor:
        pooled = self.combine(self.pooling(states, attention_mask))
        return self.output(self.dropout(torch.tanh(self.dense(pooled))))

    def combine(self, pooled: torch.Tensor) -> torch.Tensor:
        """What the first linear reads: all that is pooled, `(..., width)`."""
        return pooled


def classifier_dropout(config: SKTformerConfig) -> float:
    """Probability of the dropout before classifiers."""
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


class SKTformerForSequenceClassification(SKTformerHeadModel):
    """
    SKTformer with a sequence classification or regression head.

    `logits` have shape `(batch_size, num_labels)`. `labels` are classes `(batch_size,)` or targets `(batch_size,
    num_labels)`, see `config.problem_type`: one label is regression (mean squared error), integer labels are classes
    (cross entropy), others a multi-label problem (binary cross entropy). The first labels decide it where the
    configuration does not, and it is saved with the model. Labels of another shape are a `ValueError`.
    """

    _auto_class = "AutoModelForSequenceClassification"
    _head_class = SKTformerClassificationHead
    pools_tokens = True

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        self.classifier = self._head_class(config, self.num_labels)
        self.post_init()

    def _score(self, states: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(states, attention_mask)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        kind: Any = self.config.problem_type or find_problem_type(logits, labels)
        loss = classification_loss(logits, labels, kind, **options)
        self.config.problem_type = kind  # by which pipelines know what logits are
        return loss


class SKTformerForTokenClassification(SKTformerHeadModel):
    """
    SKTformer with a token classification head.

    `labels` of shape `(batch_size, sequence_length)` are classes, -100 where there is nothing to learn. `logits` have
    shape `(batch_size, sequence_length, num_labels)`.
    """

    _auto_class = "AutoModelForTokenClassification"

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def _score(self, states: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(self.dropout(states[-1]))


class SKTformerForMultipleChoice(SKTformerHeadModel):
    """
    SKTformer with a multiple choice head: scores each choice, a softmax picks one.

    Inputs have an axis of choices after the batch: `(batch_size, num_choices, sequence_length)`. `labels` of shape
    `(batch_size,)` are the indices of the right choices, `logits` have shape `(batch_size, num_choices)`.
    """

    _auto_class = "AutoModelForMultipleChoice"
    pools_tokens = True
    num_choices = 0

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        self.classifier = SKTformerClassificationHead(config, 1)
        self.post_init()

    def _score(self, states: tuple[torch.Tensor, ...], attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(states, attention_mask).squeeze(-1)


class SKTformerMatchingHead(SKTformerClassificationHead):
    """Scores of pairs `(B, 2, S, d)` with masks `(B, 2, S)`, pooled to a and b: those of [a, b, a * b, a - b]."""

    num_parts = 4

    def combine(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map `(B, 2, width)` to `(B, 4 width)`."""
        first, second = pooled.unbind(dim=1)
        return torch.cat([first, second, first * second, first - second], dim=-1)


class SKTformerForSequenceMatching(SKTformerForSequenceClassification):
    """
    SKTformer with a matching head: says how two sequences belong together, for instance whether one cites the other
    (Retrieval in "Long Range Arena: A Benchmark for Efficient Transformers", Section 2.2.3).

    The encoder reads each of them by itself and `config.classifier_pooling` pools it (`"mean"` is recommended). No
    Auto class is made for this; it is registered with `AutoModelForNextSentencePrediction`, transformers' own for two
    sequences and a yes or no. Inputs and labels are those of multiple choice with two choices, not that class's:
    `(batch_size, 2, sequence_length)`, and `(batch_size, 2, sequence_length, hidden_size)` for `inputs_embeds`;
    others are a `ValueError`. In hidden states and attentions the sequences are rows of the batch, first and second in
    turn: `(batch_size * 2, ...)`.

    `labels` and `logits` are as in [`SKTformerForSequenceClassification`], of the pairs.
    """

    _auto_class = "AutoModelForNextSentencePrediction"
    _head_class = SKTformerMatchingHead
    num_choices = 2


class SKTformerForQuestionAnswering(SKTformerPreTrainedModel):
    """SKTformer with a span head: where an answer starts and ends. It never points at padding."""

    _auto_class = "AutoModelForQuestionAnswering"

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        self.sktformer = SKTformerModel(config)
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs: Unpack[SKTformerKwargs],
    ) -> SKTformerSpanOutput:
        """
        Point at answers. Inputs, keywords and errors are those of [`SKTformerModel.forward`].

        Args:
            start_positions, end_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
                First and last token of the answer; one outside the input or at padding counts in no loss. A function
                that is set as `model.loss_function` is given what [`~losses.span_loss`] takes.

        Returns:
            [`~outputs.SKTformerSpanOutput`] with `start_logits` and `end_logits` of shape
            `(batch_size, sequence_length)`, the lowest finite value at padding.
        """
        self._check_keywords(kwargs)
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.sktformer(*inputs, return_dict=True, **kwargs)
        logits = self.qa_outputs(self.dropout(outputs.last_hidden_state))
        if attention_mask is not None:
            is_padding = ~attention_mask.to(logits.device).bool().unsqueeze(-1)
            logits = logits.masked_fill(is_padding, torch.finfo(logits.dtype).min)
        start, end = (scores.contiguous() for scores in logits.unbind(dim=-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (getattr(self, "_loss_function", None) or span_loss)(start, end, start_positions, end_positions)
        return SKTformerSpanOutput(loss=loss, start_logits=start, end_logits=end, **captured_outputs(outputs))
