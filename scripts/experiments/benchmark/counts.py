"""
What a step asks of a device, counted on the meta device: no GPU, no weights, no data.

Counted is each operator that PyTorch dispatches and that launches work, which views and empty tensors do not. On the
meta device a model computes its plain equations; fused attention is put in as the operators that GPUs have for it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry
from tqdm import tqdm
from transformers import PreTrainedModel

from experiments.benchmark import models
from experiments.benchmark.measurement import failure_reason
from experiments.benchmark.models import MODELS, PRECISIONS, SIZES, Setting, Workload
from experiments.results import format_table


LEGEND = (
    "One training step of one layer, on the meta device: what a model of twice as many layers adds to one of as many"
    " as a pattern of layers has (three in ModernBERT, two in Reformer, one in the others), divided by these. Models"
    " are made for 512 tokens, or for the length where it is greater. Masks belong to batches padded to the length; "
    "those made once for all layers are not counted. Operators are those that launch work, views and empty tensors "
    "left out; fused attention is one. Their bytes are those of all tensors that they read and write, matrix "
    "products, convolutions and fused attention apart from the rest. Kept is what the forward pass saves for the "
    "backward pass, each storage once, without parameters and buffers. Multiply-adds are those of matrix products, "
    "convolutions, attention, whose fused backward pass computes scores again, and Fourier transforms (of n real "
    "values 2.5 n log2 n operations, of n complex ones 5 n log2 n), and four for each product of complex numbers; "
    "two operations are one multiply-add."
)
# What stands for flags of the benchmark that are not given.
DEFAULTS: dict[str, Any] = {
    "models": ["sktformer", "sktformer-eager", "bert-sdpa", "modernbert", "nystromformer", "fnet"],
    "size": ["base"],
    **{"lengths": [512, 4096], "tokens_per_batch": 16384, "dropout": [0.0], "precision": "bfloat16"},
}
_aten = torch.ops.aten
_LAYER_PATTERNS = {"modernbert": 3, "reformer": 2}
# These read as much of their first argument as they return, these read and write as much of it as of their source, in
# place where no mode looks on, and these read nothing of it.
_GATHERS = (_aten.gather, _aten.index, _aten.index_select, _aten.embedding)
_ADDITIONS = (_aten.scatter_add, _aten.scatter_add_, _aten.index_add, _aten.index_add_)
_OVERWRITES = (_aten.copy_, _aten.fill_, _aten.zero_)


def _transform_flops(source: torch.Tensor, dims: Sequence[int], *options: Any, out_val: torch.Tensor) -> float:
    values = out_val if source.is_complex() else source  # of one that is real on either side, the real ones
    per_value = 5.0 if source.is_complex() and out_val.is_complex() else 2.5
    return per_value * values.numel() * math.log2(math.prod(values.shape[dim] for dim in dims))


def _complex_flops(*factors: Any, out_val: torch.Tensor) -> float:
    return 8.0 * out_val.numel() if out_val.is_complex() else 0.0


def _convolution_backward_flops(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *options: Any, out_val: Sequence
) -> float:
    """As many as forward for each of the gradients but the bias's; PyTorch's formula takes no account of groups."""
    forward = conv_flop_count(list(inputs.shape), list(weight.shape), list(gradient.shape), transposed=options[4])
    return sum(result is not None for result in out_val[:2]) * forward


_PRODUCTS: dict[Any, Callable] = flop_registry | {_aten.convolution_backward: _convolution_backward_flops}
_TRANSFORMS = dict.fromkeys((_aten._fft_r2c, _aten._fft_c2r, _aten._fft_c2c), _transform_flops)
_FORMULAS: dict[Any, Callable] = _PRODUCTS | _TRANSFORMS | {_aten.mul: _complex_flops}


class OperatorCounter(TorchDispatchMode):
    """
    Adds up `operators`, `product_bytes`, `other_bytes` and `flops` of what is dispatched on the meta device.

    There are no values there: to a model that asks for one, as whether its mask keeps every token, `answer` is given.
    """

    def __init__(self, answer: bool = True) -> None:
        super().__init__()
        self.answer = answer
        self.operators = self.product_bytes = self.other_bytes = 0
        self.flops = 0.0

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if operator is _aten._local_scalar_dense.default:
            return self.answer
        packet, result = operator.overloadpacket, operator(*args, **(kwargs or {}))
        read, written = (
            [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
            for values in ((args, kwargs), result)
        )
        storages = set(map(_storage, read))
        is_work = operator._schema.is_mutable or not storages.issuperset(map(_storage, written))
        if not is_work or "empty" in operator.name():
            return result
        sizes, results = list(map(_num_bytes, read)), list(map(_num_bytes, written))
        if packet in _GATHERS:
            sizes[0] = min(sizes[0], _num_bytes(result))
        elif packet in _ADDITIONS:
            sizes[0] = results[0] = sizes[-1]
        elif packet in _OVERWRITES:
            sizes[0] = 0
        self.operators += 1
        where = "product_bytes" if packet in _PRODUCTS else "other_bytes"
        vars(self)[where] += sum(sizes) + sum(results)
        if packet in _FORMULAS:
            self.flops += _FORMULAS[packet](*args, **(kwargs or {}), out_val=result)
        return result


class FusedAttention(TorchFunctionMode):
    """Computes `scaled_dot_product_attention` of meta tensors, which would get its equation, as GPUs do."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        attend = _attend if function is scaled_dot_product_attention else function
        return attend(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    inputs, scale = (query, key, value), options.get("scale")
    if attn_mask is None and query.dtype != torch.float32:
        return _aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    attend = _aten._scaled_dot_product_efficient_attention
    return attend(*inputs, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def count_step(workload: Workload, setting: Setting) -> dict[str, float]:
    """
    Count a step of a whole model, in training or inference, without the optimizer's part: operators, bytes and
    multiply-adds. A `ValueError` if the model takes no mask and the setting is of padded inputs.
    """
    inputs = models.make_inputs(workload, replace(setting, device="meta"))
    is_training = workload.mode == "training"
    counter, kept = OperatorCounter(answer=not setting.padded), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[_storage(tensor)] = tensor.untyped_storage()  # held, so that its number is not given to another
        return tensor.detach()

    with torch.device("meta"), FusedAttention(), torch.set_grad_enabled(is_training):
        model: Any = models.build_model(workload.model, models.build_config(workload, setting.num_layers))
        model.to(PRECISIONS[setting.precision]).train(is_training)
        if setting.padded and not takes_mask(workload.model, model):
            raise ValueError("takes no mask")
        with saved_tensors_hooks(keep, lambda tensor: tensor), counter:
            loss = model(**inputs).loss
        forward = counter.operators
        if is_training:
            with counter:
                loss.backward()
    for tensor in (*model.parameters(), *model.buffers()):
        kept.pop(_storage(tensor), None)
    return {
        "forward_operators": forward,
        "backward_operators": counter.operators - forward,
        "product_bytes": counter.product_bytes,
        "other_bytes": counter.other_bytes,
        "kept_bytes": sum(storage.nbytes() for storage in kept.values()),
        "multiply_adds": counter.flops / 2,
    }


def takes_mask(name: str, model: PreTrainedModel) -> bool:
    """Whether a model does something with `attention_mask`."""
    return name not in ("linformer", "performer") and "attention_mask" in signature(model.forward).parameters


def count_layer(workload: Workload, setting: Setting) -> dict[str, float]:
    """The mean of [`count_step`] over a pattern of layers, `multiply_adds` of a token."""
    pattern = _LAYER_PATTERNS.get(workload.model, 1)
    more, fewer = (count_step(workload, replace(setting, num_layers=times * pattern)) for times in (2, 1))
    layer = {name: (more[name] - fewer[name]) / pattern for name in more}
    return layer | {"multiply_adds": layer["multiply_adds"] / (workload.batch_size * workload.length)}


def count_row(workload: Workload, setting: Setting, masked: bool) -> dict[str, Any]:
    """A row of results: a layer without or with a mask; where `reason` is not None nothing was counted."""
    row = {**asdict(workload), "masked": masked, "reason": None}
    try:
        return row | count_layer(workload, replace(setting, padded=masked))
    except Exception as error:  # of any architecture
        return row | {"reason": failure_reason(error)}


def count_rows(workloads: Sequence[Workload], setting: Setting) -> list[dict[str, Any]]:
    """Rows of results: each layer without and with a mask."""
    counted = tqdm(list(product(workloads, (False, True))), "Count", unit="row", disable=None)
    return [count_row(workload, setting, masked) for workload, masked in counted]


def format_counts(rows: Sequence[Mapping]) -> list[str]:
    """A table of layers for each batch, as paragraphs of Markdown."""
    tables: dict[str, list[list[str]]] = {}
    for row in rows:
        cells = [row["reason"], *[""] * 5]
        if row["reason"] is None:
            cells = [f"{row[f'{phase}_operators']:.4g}" for phase in ("forward", "backward")]
            cells += [f"{row[f'{what}_bytes'] / 2**20:,.0f}" for what in ("product", "other", "kept")]
            cells.append(f"{row['multiply_adds'] / 1e6:.2f}")
        title = f"### {SIZES[row['size']]}, {row['batch_size']} x {row['length']:,} tokens"
        model = [MODELS[row["model"]].title, "yes" if row["masked"] else "no"]
        tables.setdefault(title, []).append([*model, *cells])
    header = ["model", "mask", "operators forward", "backward", "MiB in products", "MiB elsewhere", "MiB kept"]
    header.append("million multiply-adds a token")
    return [text for title, cells in tables.items() for text in (title, "\n".join(format_table(header, cells)))]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensor: torch.Tensor) -> int:
    """What is read of a tensor, which may be repeated or a part of a larger one."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
