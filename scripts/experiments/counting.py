"""
Operators, bytes and multiply-adds of what PyTorch dispatches, counted on the meta device: no GPU, no weights, no data.

Counted is each operator that launches work, which views and empty tensors do not. On the meta device a model computes
what it does on processors; fused attention is put in as the operators that GPUs have for it.
"""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry
from transformers import PreTrainedModel


logger = logging.getLogger(__name__)
_aten = torch.ops.aten
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
        if operator is _aten._local_scalar_dense.default and args[0].is_meta:
            return self.answer
        packet, result = operator.overloadpacket, operator(*args, **(kwargs or {}))
        read, written = (
            [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
            for values in ((args, kwargs), result)
        )
        storages = set(map(storage_of, read))
        is_work = operator._schema.is_mutable or not storages.issuperset(map(storage_of, written))
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


def count_encoder(model: PreTrainedModel, batch_size: int, length: int) -> float | None:
    """
    Count the multiply-adds of a training step, without the optimizer's part, of what stands below a model's head.

    Of a batch without padding, on any machine the same: with the fused attention of GPUs, and SKTformer in the form
    that processors choose. Heads are left out: they read as many tokens as are masked, whatever stands below them.
    `None` of an encoder that needs values to know what it computes, or to be made.
    """
    # Some ask whether a token is special, as one that attends to all, others whether the mask keeps every token; the
    # wrong answer leads to what meta tensors do not have. Sizes may be computed by tensors, which are no meta tensors.
    for answer in (False, True):
        try:
            with torch.device("meta"):
                encoder: Any = type(model.base_model)(copy.deepcopy(model.config)).train()
                tokens = torch.zeros(batch_size, length, dtype=torch.long)
            with FusedAttention(), OperatorCounter(answer) as counter:
                states = encoder(input_ids=tokens)[0]
                states.backward(torch.empty_like(states))
        except Exception as error:  # of any architecture
            logger.debug("Multiply-adds are not counted: %s.", error)
        else:
            return counter.flops / 2
    return None


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors that share their memory have in common."""
    return tensor.untyped_storage()._cdata


def _num_bytes(tensor: torch.Tensor) -> int:
    """What is read of a tensor, which may be repeated or a part of a larger one."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
