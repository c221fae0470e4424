"""
The models of the speed benchmark, and the steps that are timed.

SKTformer and encoders of transformers, and two that transformers has not: Linformer and Performer, written here as
their papers have them, as attention of BERT's layers.

Letters in shapes: B batch, S tokens, H heads, h width of a head, k projected length, m random features.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.utils import logging

from experiments.architectures import length_fields, resize_config
from modeling_sktformer import SKTformerConfig, available_presets, load_preset
from modeling_sktformer.kernels import Dropout


@dataclass(frozen=True)
class Encoder:
    """
    A model.

    Args:
        title (`str`): What tables call it.
        model_type (`str`): Its name in transformers.
        note (`str`): What has to be known to read its row.
        attention (`str`, *optional*): Its `attn_implementation`, of transformers or registered below.
        reads_mask (`bool`): Whether it does something with an `attention_mask` that its `forward` takes.
        layer_pattern (`int`): After how many layers their kinds repeat.
    """

    title: str
    model_type: str
    note: str = ""
    attention: str | None = None
    reads_mask: bool = True
    layer_pattern: int = 1


MODELS = {
    "sktformer": Encoder("SKTformer", "sktformer", "layer norm in the smoother, where the paper has batch norm."),
    "sktformer-eager": Encoder(
        "SKTformer (eager)", "sktformer", 'kernels="eager": no kernel, and the form of fewer operators.'
    ),
    "sktformer-no-kernel": Encoder("SKTformer (no kernel)", "sktformer", "PyTorch's dropout on processors, too."),
    "sktformer-sdpa": Encoder("SKTformer (SDPA)", "sktformer", 'attn_implementation="sdpa".', attention="sdpa"),
    "sktformer-best": Encoder("SKTformer, -best", "sktformer", "with the two changes of the presets -best."),
    "bert-eager": Encoder("BERT (eager)", "bert", attention="eager"),
    "bert-sdpa": Encoder(
        "BERT (SDPA)", "bert", "fused attention, on CPUs without dropout alone, as in other models.", attention="sdpa"
    ),
    "modernbert": Encoder(
        "ModernBERT", "modernbert", "three feed-forward matrices; windows mask full attention.", layer_pattern=3
    ),
    "nystromformer": Encoder("Nyströmformer", "nystromformer", "64 landmarks, half the length below 128 tokens."),
    "fnet": Encoder("FNet", "fnet"),
    "bigbird": Encoder("BigBird", "big_bird", "blocks of 64, 3 random ones, without dropout; full up to 704 tokens."),
    "longformer": Encoder("Longformer", "longformer", "window of 512 tokens, global attention from the first token."),
    "reformer": Encoder(
        "Reformer", "reformer", "local and LSH layers in turn, one hash; layers run twice.", layer_pattern=2
    ),
    "linformer": Encoder(
        "Linformer",
        "bert",
        "projected length 256; our implementation of the paper's equations.",
        attention="linformer",
        reads_mask=False,
    ),
    "performer": Encoder(
        "Performer",
        "bert",
        "FAVOR+, 4 random features per column, 64 to 256; our implementation.",
        attention="performer",
        reads_mask=False,
    ),
}
# The paper's model for the Text task of Long Range Arena (Table 4), and the presets.
_PRESETS = [preset.removeprefix("sktformer-") for preset in available_presets()]
SIZES = {"lra": "LRA model"} | {name: f"{name} preset" for name in _PRESETS} | {"base": "BERT base's sizes"}
NUM_LABELS = 2
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """What all steps of a section have in common. `num_layers` is None where each size keeps its own depth."""

    num_layers: int | None
    precision: str
    compile: bool
    device: str
    padded: bool = False


@dataclass(frozen=True)
class Workload:
    """What is timed: a step of one of [`MODELS`] in one of [`SIZES`], on one batch."""

    model: str
    size: str
    length: int  # tokens in an input
    positions: int  # tokens that the model is made for
    batch_size: int
    mode: str  # training or inference
    dropout: float  # of every kind


def build_sizes(size: str, num_layers: int | None = None) -> SKTformerConfig:
    """The sizes that all models take over: those of one of [`SIZES`], with another depth if one is given."""
    lra: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = SKTformerConfig(vocab_size=512, **lra) if size == "lra" else load_preset(f"sktformer-{size}")
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    return config


def build_config(workload: Workload, num_layers: int | None) -> PreTrainedConfig:
    """The configuration of a model, made for inputs of `positions` tokens; of its size's depth if none is given."""
    name, length = workload.model, workload.positions
    sizes = build_sizes(workload.size, num_layers)
    config = sizes if MODELS[name].model_type == sizes.model_type else resize_config(MODELS[name].model_type, sizes)
    config.pad_token_id = 0  # behind which some architectures begin to count positions
    values: dict[str, Any] = {"vocab_size": sizes.vocab_size, "num_labels": NUM_LABELS}
    values |= {"problem_type": "single_label_classification", **length_fields(config, length)}
    if hasattr(config, "classifier_pooling"):
        values["classifier_pooling"] = "mean"
    if name == "sktformer-best":
        values |= {"use_smoother_residual": True, "smoother_activation": "silu"}
    elif name == "sktformer-eager":
        values["kernels"] = "eager"
    elif name == "reformer":
        # Positions are a grid, whose sides multiply to the length.
        rows = max(side for side in range(1, int(length**0.5) + 1) if length % side == 0)
        values |= {
            "attn_layers": (["local", "lsh"] * sizes.num_hidden_layers)[: sizes.num_hidden_layers],
            "attention_head_size": sizes.head_dim,
            "axial_pos_shape": (rows, length // rows),
            "axial_pos_embds_dim": (sizes.hidden_size // 4, sizes.hidden_size - sizes.hidden_size // 4),
        }
    elif name == "linformer":
        values["projected_length"] = min(256, length)
    elif name == "performer":
        values["num_random_features"] = min(256, max(64, 4 * sizes.head_dim))
    values |= dict.fromkeys((field for field in vars(config) if "dropout" in field), float(workload.dropout))
    config.update(values)
    return config


def unsupported_reason(name: str, length: int) -> str | None:
    """Why a model cannot take inputs of a length, in a few words; None if nothing is known against it."""
    block = min(length, {"nystromformer": min(64, length // 2), "reformer": 64}.get(name, 1))
    return f"not a multiple of {block}" if length % block else None


def build_model(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A model with a sequence classification head and random weights, the same ones at every call."""
    torch.manual_seed(0)
    # Here, because it must hold in the processes that steps are taken in too: models say at each call how they pad.
    logging.set_verbosity_error()
    attention = MODELS[name].attention
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForSequenceClassification.from_config(config, **options)
    for module in model.modules():
        for function in ("fourier_transform", "iterative_inv"):  # FNet's and Nyströmformer's know no smaller types
            if compute := getattr(module, function, None):
                setattr(module, function, _in_float32(compute))
        if isinstance(module, Dropout) and name == "sktformer-no-kernel":
            module.config = copy.deepcopy(config)  # its own: the form is that of the model
            module.config.kernels = "eager"
        elif isinstance(module, BertSelfAttention) and name == "performer":
            features = draw_orthogonal_features(config.num_random_features, module.attention_head_size)
            module.register_buffer("features", features)
        elif isinstance(module, BertSelfAttention) and name == "linformer":
            shape = (config.projected_length, config.max_position_embeddings)
            for which in ("key_shortening", "value_shortening"):  # E, F
                module.register_parameter(which, nn.Parameter(torch.randn(shape) * shape[0] ** -0.5))
    return model


def make_inputs(workload: Workload, setting: Setting) -> dict[str, torch.Tensor]:
    """Random tokens `(batch_size, length)`, the same for every model, and labels; padded as a collator does it."""
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch_size, workload.length)
    inputs = {
        "input_ids": torch.randint(1, build_sizes(workload.size).vocab_size, shape, generator=generator),
        "labels": torch.randint(NUM_LABELS, shape[:1], generator=generator),
    }
    if setting.padded:
        lengths = torch.randint(workload.length // 4, workload.length + 1, (shape[0], 1), generator=generator)
        lengths[0] = workload.length
        inputs["attention_mask"] = (torch.arange(workload.length) < lengths).long()
        inputs["input_ids"] *= inputs["attention_mask"]
    if workload.model == "nystromformer" and (setting.padded or setting.compile):
        # The mask of pairs of tokens that transformers makes, of any inputs in a graph, does not fit its landmarks.
        kept = inputs.get("attention_mask", torch.ones(shape))[:, None, None].to(PRECISIONS[setting.precision])
        inputs["attention_mask"] = (1 - kept) * torch.finfo(kept.dtype).min
    return {name: tensor.to(setting.device) for name, tensor in inputs.items()}


def make_step(workload: Workload, setting: Setting) -> Callable[[], None]:
    """A step of one model, waiting for its device: forward, backward and AdamW's update, or a forward pass alone."""
    is_training = workload.mode == "training"
    # Convolutions have it by default and products have not: models would be timed in different precisions.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    model: Any = build_model(workload.model, build_config(workload, setting.num_layers))
    model = model.to(setting.device, PRECISIONS[setting.precision]).train(is_training)
    inputs = make_inputs(workload, setting)
    forward = cast(Callable[..., Any], _compile(model) if setting.compile else model)
    if not is_training:
        del inputs["labels"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if is_training else None

    def step() -> None:
        if optimizer is None:
            with torch.inference_mode():
                forward(**inputs)
        else:
            optimizer.zero_grad()
            forward(**inputs).loss.backward()
            optimizer.step()
        if setting.device == "cuda":
            torch.cuda.synchronize()

    return step


def _compile(model: PreTrainedModel) -> Callable[..., Any]:
    """A model as a graph of its own. Code that models share has a graph for each of them, or a step fails."""
    # Past the limit PyTorch would run what it has not compiled, and say so in a warning alone.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(model, dynamic=False)


def make_warm_step(workload: Workload, setting: Setting) -> Callable[[], None]:
    """As [`make_step`], after a step on short inputs: what libraries load when they are first used is loaded then."""
    short = min(workload.length, 128)
    make_step(replace(workload, length=short, positions=short), setting)()
    return make_step(workload, setting)


def _in_float32(compute: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of a function of a tensor, the real part in the tensor's type."""
    return lambda states: compute(states.float()).real.to(states.dtype)


def linformer_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, dropout: float, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """
    Attention to keys and values that learned matrices have shortened from S to k tokens.

    Computes softmax(Q (E K)^T / sqrt(h)) F V, E and F shared by the heads (headwise sharing): Equation 7, Section 4 of
    [Linformer: Self-Attention with Linear Complexity](https://arxiv.org/abs/2006.04768), Wang et al. 2020. Inputs
    have exactly the length that the matrices, the module's `key_shortening` and `value_shortening`, were made for.
    """
    keys, values = (
        (matrix @ states.transpose(1, 2).flatten(2)).unflatten(-1, (query.shape[1], -1)).transpose(1, 2)
        for matrix, states in ((module.key_shortening, key), (module.value_shortening, value))
    )  # (B, H, k, h)
    context = nn.functional.scaled_dot_product_attention(query, keys, values, dropout_p=dropout)
    return context.transpose(1, 2), None  # (B, S, H, h)


def _attend_performer(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The features are drawn once and shared by the heads; dropout has no attention matrix that it could act on."""
    return performer_attention(query, key, value, module.features).transpose(1, 2), None


def draw_orthogonal_features(num_features: int, head_dim: int) -> torch.Tensor:
    """`(num_features, head_dim)` Gaussians, orthogonal in blocks of `head_dim`: Section 2.4 of Choromanski et al."""
    blocks = [nn.init.orthogonal_(torch.empty(head_dim, head_dim)) for _ in range(-(-num_features // head_dim))]
    return torch.cat(blocks)[:num_features] * torch.randn(num_features, head_dim).norm(dim=1, keepdim=True)


def performer_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """
    Softmax attention approximated with the positive random features W `(m, h)`, in time O(S m h) per head.

    With phi(x) = exp(W x - |x|^2 / 2) for x = query or key / h^(1/4), computes
    phi(Q) (phi(K)^T V) / (phi(Q) phi(K)^T 1): Equations 4 and 7, Sections 2.2 and 2.3 of
    [Rethinking Attention with Performers](https://arxiv.org/abs/2009.14794), Choromanski et al. 2021. Factors that
    stand above and below the fraction line, such as phi's 1 / sqrt(m) and the query's exp(-|x|^2 / 2), are left out.
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


AttentionInterface.register("linformer", linformer_attention)
AttentionInterface.register("performer", _attend_performer)
