"""
The models of the speed benchmark at one size, and the steps that are timed.

SKTformer and encoders of transformers, and two that transformers has not: Linformer and Performer, written here as
their papers have them, with BERT's layers around their attention.

Letters in shapes: B batch, S tokens, d hidden size, H heads, h width of a head, k projected length, m random features.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from experiments.models import length_fields, resize_config
from modeling_sktformer import SKTformerConfig, load_preset


# Names of the flags, and how tables call them.
MODELS = {
    "sktformer": "SKTformer",
    "bert-eager": "BERT (eager)",
    "bert-sdpa": "BERT (SDPA)",
    "modernbert": "ModernBERT",
    "nystromformer": "Nyströmformer",
    "fnet": "FNet",
    "bigbird": "BigBird",
    "longformer": "Longformer",
    "reformer": "Reformer",
    "linformer": "Linformer",
    "performer": "Performer",
}

# What has to be known to read a model's row.
NOTES = {
    "bert-sdpa": "PyTorch's fused attention; on CPUs that serves no dropout, with which unfused products run, in "
    "ModernBERT and Linformer too.",
    "modernbert": "gated feed-forward part of three matrices instead of two; every third layer attends to all tokens.",
    "nystromformer": "64 landmarks at every length (half the length below 128 tokens), the mode that is linear.",
    "bigbird": "blocks of 64, 3 random ones, no dropout on these; up to 704 tokens it attends to all by itself.",
    "longformer": "window of 512 tokens, global attention from the first token.",
    "reformer": "local and LSH layers in turn, one hash; its backward pass computes the layers again.",
    "linformer": "projected length 256; our implementation of the paper's equations.",
    "performer": "FAVOR+ with 4 random features per column of a head, 64 to 256; our implementation of the paper's "
    "equations.",
}

MODEL_TYPES = {
    "bert-eager": "bert",
    "bert-sdpa": "bert",
    "modernbert": "modernbert",
    "nystromformer": "nystromformer",
    "fnet": "fnet",
    "bigbird": "big_bird",
    "longformer": "longformer",
    "reformer": "reformer",
    "linformer": "bert",
    "performer": "bert",
}

SIZES = ("lra", "base")
NUM_LABELS = 2
_WARM_LENGTH = 128
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """What all models of a comparison have in common."""

    size: str
    num_layers: int
    batch_size: int
    precision: str
    autocast: bool
    compile: bool
    device: str


@dataclass(frozen=True)
class Case:
    """What is timed: a step of training with all dropouts at a value, or one of inference."""

    mode: str
    dropout: float

    @property
    def title(self) -> str:
        """Words for tables."""
        return "Inference" if self.mode == "inference" else f"Training, dropout {self.dropout:g}"


def build_sizes(size: str, num_layers: int | None = None) -> SKTformerConfig:
    """
    The sizes that all models take over.

    Args:
        size (`str`): `"lra"`, the paper's model for the Text task of Long Range Arena (Table 4), or `"base"`, the
            sizes of BERT base.
        num_layers (`int`, *optional*): Layers, if not those of the size.

    Returns:
        [`SKTformerConfig`]
    """
    if size == "base":
        config = load_preset("sktformer-base")
    else:
        config = SKTformerConfig(
            vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
        )
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    return config


def build_config(name: str, setting: Setting, length: int, dropout: float) -> PreTrainedConfig:
    """
    The configuration of one model, made for inputs of exactly `length` tokens.

    Args:
        name (`str`): One of [`MODELS`].
        setting ([`Setting`]): Size and depth.
        length (`int`): Tokens in an input.
        dropout (`float`): Value of every dropout that the architecture has.

    Returns:
        `PreTrainedConfig`
    """
    sizes = build_sizes(setting.size, setting.num_layers)
    config = sizes if name == "sktformer" else resize_config(MODEL_TYPES[name], sizes)
    values: dict[str, Any] = {
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": length,
        "pad_token_id": 0,
        "num_labels": NUM_LABELS,
        "problem_type": "single_label_classification",
    }
    values |= length_fields(config, length)
    if hasattr(config, "classifier_pooling"):
        values["classifier_pooling"] = "mean"
    if name == "reformer":
        values |= _reformer_fields(sizes, length)
    elif name == "linformer":
        values["projected_length"] = min(256, length)
    elif name == "performer":
        values["num_random_features"] = min(256, max(64, 4 * sizes.head_dim))
    values |= dict.fromkeys((field for field in vars(config) if "dropout" in field), float(dropout))
    for field, value in values.items():
        setattr(config, field, value)
    return config


def _reformer_fields(sizes: SKTformerConfig, length: int) -> dict[str, Any]:
    """Sizes by Reformer's names; its positions are a grid, whose sides multiply to the length."""
    kinds = ("local", "lsh")
    rows = max(side for side in range(1, int(length**0.5) + 1) if length % side == 0)
    return {
        "attn_layers": tuple(kinds[i % 2] for i in range(sizes.num_hidden_layers)),
        "attention_head_size": sizes.head_dim,
        "feed_forward_size": sizes.intermediate_size,
        "axial_pos_shape": (rows, length // rows),
        "axial_pos_embds_dim": (sizes.hidden_size // 4, sizes.hidden_size - sizes.hidden_size // 4),
    }


def unsupported_reason(name: str, length: int) -> str | None:
    """Why a model cannot take inputs of a length, in a few words; None if nothing is known against it."""
    if name == "nystromformer" and length % min(64, length // 2):
        return f"not a multiple of {min(64, length // 2)}"
    if name == "reformer" and length > 64 and length % 64:
        return "not a multiple of 64"
    return None


def build_model(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A model with a sequence classification head and random weights, the same ones at every call."""
    torch.manual_seed(0)
    options = {"attn_implementation": "eager" if name == "bert-eager" else "sdpa"} if _is_bert(name) else {}
    if name in ("linformer", "performer"):
        model_class = LinformerForSequenceClassification if name == "linformer" else PerformerForSequenceClassification
        return model_class._from_config(config, **options)
    return AutoModelForSequenceClassification.from_config(config, **options)


def _is_bert(name: str) -> bool:
    return MODEL_TYPES.get(name) == "bert"


def make_inputs(setting: Setting, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens `(batch_size, length)` without padding, and labels `(batch_size,)`: the same for every model."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = build_sizes(setting.size).vocab_size
    inputs = torch.randint(1, vocab_size, (setting.batch_size, length), generator=generator)
    labels = torch.randint(NUM_LABELS, (setting.batch_size,), generator=generator)
    return inputs.to(setting.device), labels.to(setting.device)


def make_step(name: str, setting: Setting, length: int, case: Case) -> Callable[[], None]:
    """
    A step of one model, which waits for its device.

    A training step zeroes gradients, runs forward and backward and lets AdamW update; inference is a forward pass in
    evaluation mode.

    Args:
        name (`str`): One of [`MODELS`].
        setting ([`Setting`]): What the models have in common.
        length (`int`): Tokens in an input.
        case ([`Case`]): Training or inference.

    Returns:
        callable: without arguments and result.
    """
    # Here, because it must hold in the processes that measure memory too: models say at each call how they pad.
    logging.set_verbosity_error()
    precision = PRECISIONS[setting.precision]
    model: nn.Module = build_model(name, build_config(name, setting, length, case.dropout))
    model = model.to(setting.device)
    if not setting.autocast:
        model = model.to(precision)
    model.train(case.mode == "training")
    inputs, labels = make_inputs(setting, length)
    forward = cast(Callable[..., Any], torch.compile(model, dynamic=False) if setting.compile else model)
    on_cuda = setting.device == "cuda"

    def autocast() -> contextlib.AbstractContextManager:
        return torch.autocast(setting.device, precision) if setting.autocast else contextlib.nullcontext()

    def infer() -> None:
        with torch.inference_mode(), autocast():
            forward(inputs)
        if on_cuda:
            torch.cuda.synchronize()

    if case.mode == "inference":
        return infer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train() -> None:
        optimizer.zero_grad()
        with autocast():
            loss = forward(inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        if on_cuda:
            torch.cuda.synchronize()

    return train


def make_warm_step(name: str, setting: Setting, length: int, case: Case) -> Callable[[], None]:
    """As [`make_step`], after a step on short inputs: what libraries load when they are first used is loaded then."""
    make_step(name, setting, min(length, _WARM_LENGTH), case)()
    return make_step(name, setting, length, case)


class _HeadedAttention(nn.Module, ABC):
    """Query, key and value projections in place of BERT's self-attention, which they are called like."""

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any):
        if attention_mask is not None:
            raise ValueError("This baseline takes inputs without padding alone.")
        context = self.attend(self.query(hidden_states), self.key(hidden_states), self.value(hidden_states))
        return context.transpose(1, 2).flatten(2), None  # (B, S, d)

    @abstractmethod
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Map three tensors `(batch_size, sequence_length, hidden_size)` to `(B, H, S, h)`."""

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """`(B, S, d)` to `(B, H, S, h)`."""
        return states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class LinformerSelfAttention(_HeadedAttention):
    """
    Attention to keys and values that learned matrices have shortened from S to k tokens.

    Computes softmax(Q (E K)^T / sqrt(h)) F V, E and F shared by the heads (headwise sharing): Equation 7, Section 4 of
    [Linformer: Self-Attention with Linear Complexity](https://arxiv.org/abs/2006.04768), Wang et al. 2020. Inputs
    have exactly the length that the matrices were made for.

    Args:
        config (`BertConfig`): With `projected_length`, k.
    """

    def __init__(self, config):
        super().__init__(config)
        self.dropout = config.attention_probs_dropout_prob
        shape = (config.projected_length, config.max_position_embeddings)
        self.key_shortening = nn.Parameter(torch.randn(shape) * config.projected_length**-0.5)  # E
        self.value_shortening = nn.Parameter(torch.randn(shape) * config.projected_length**-0.5)  # F

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(
            self.split_heads(query),
            self.split_heads(self.key_shortening @ key),  # (B, H, k, h)
            self.split_heads(self.value_shortening @ value),
            dropout_p=self.dropout if self.training else 0.0,
        )


class PerformerSelfAttention(_HeadedAttention):
    """
    Attention whose softmax kernel is an inner product of positive random features (FAVOR+), in both directions.

    See [`performer_attention`]. The features are drawn once and shared by the heads. There is no attention matrix that
    dropout could act on.

    Args:
        config (`BertConfig`): With `num_random_features`, m.
    """

    features: torch.Tensor

    def __init__(self, config):
        super().__init__(config)
        head_dim = config.hidden_size // config.num_attention_heads
        self.register_buffer("features", draw_orthogonal_features(config.num_random_features, head_dim))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return performer_attention(
            self.split_heads(query), self.split_heads(key), self.split_heads(value), self.features
        )


def draw_orthogonal_features(num_features: int, head_dim: int) -> torch.Tensor:
    """
    Gaussian vectors that are orthogonal in blocks of `head_dim`: Section 2.4 of Choromanski et al. 2021.

    Returns:
        `torch.Tensor` of shape `(num_features, head_dim)`.
    """
    num_blocks = -(-num_features // head_dim)
    factors = torch.linalg.qr(torch.randn(num_blocks, head_dim, head_dim))
    # The decomposition picks signs that depend on what is decomposed; without them every direction is equally likely.
    directions = factors.Q * factors.R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = torch.randn(num_features, head_dim).norm(dim=1, keepdim=True)
    return lengths * directions.flatten(0, 1)[:num_features]


def performer_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """
    Softmax attention approximated with positive random features.

    With phi(x) = exp(W x - |x|^2 / 2) for x = query or key / h^(1/4), computes
    phi(Q) (phi(K)^T V) / (phi(Q) phi(K)^T 1): Equations 4 and 7, Sections 2.2 and 2.3 of
    [Rethinking Attention with Performers](https://arxiv.org/abs/2009.14794), Choromanski et al. 2021. Factors that
    stand above and below the fraction line, such as phi's 1 / sqrt(m) and the query's exp(-|x|^2 / 2), are left out.
    Time O(S m h) per head.

    Args:
        query, key, value (`torch.Tensor` of shape `(batch_size, num_heads, sequence_length, head_dim)`): As in
            softmax attention, unscaled.
        features (`torch.Tensor` of shape `(num_features, head_dim)`): The random vectors W.

    Returns:
        `torch.Tensor` of `query`'s shape.
    """
    scaled_features = features * query.shape[-1] ** -0.25
    query_logits = query @ scaled_features.mT  # (B, H, S, m)
    key_logits = key @ scaled_features.mT - key.square().sum(dim=-1, keepdim=True) * (query.shape[-1] ** -0.5 / 2)
    # Largest exponents are taken out so that none overflows; the fraction does not change.
    query_features = (query_logits - query_logits.amax(dim=-1, keepdim=True).detach()).exp()
    key_features = (key_logits - key_logits.amax(dim=(-2, -1), keepdim=True).detach()).exp()
    context = query_features @ (key_features.mT @ value)
    total = query_features @ key_features.sum(dim=-2).unsqueeze(-1)  # (B, H, S, 1)
    return context / (total + 1e-6)


class _BertWithOtherAttention(BertForSequenceClassification):
    """BERT whose layers have another attention."""

    attention_class: type[_HeadedAttention]

    def __init__(self, config):
        super().__init__(config)
        for layer in cast(Any, self.bert.encoder.layer):
            layer.attention.self = self.attention_class(config).apply(self._init_weights)


class LinformerForSequenceClassification(_BertWithOtherAttention):
    """Linformer's encoder with a classification head, see [`LinformerSelfAttention`]."""

    attention_class = LinformerSelfAttention


class PerformerForSequenceClassification(_BertWithOtherAttention):
    """Performer's encoder with a classification head, see [`PerformerSelfAttention`]."""

    attention_class = PerformerSelfAttention
