"""What a layer of each model asks of a device, counted on the meta device ([`~experiments.counting`]), as a table."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import saved_tensors_hooks
from tqdm import tqdm

from experiments.architectures import takes_mask
from experiments.benchmark import models
from experiments.benchmark.measurement import failure_reason
from experiments.benchmark.models import MODELS, PRECISIONS, SIZES, Setting, Workload
from experiments.counting import FusedAttention, OperatorCounter, storage_of
from experiments.results import format_table
from modeling_sktformer.kernels import saves_multiply_adds


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
    "two operations are one multiply-add. SKTformer is counted as processors compute it; a GPU computes it as "
    "SKTformer (eager) does, but short inputs of large batches on shorter circles."
)
# What stands for flags of the benchmark that are not given.
DEFAULTS: dict[str, Any] = {
    "models": ["sktformer", "sktformer-eager", "sktformer-sdpa", "bert-sdpa", "modernbert", "nystromformer", "fnet"],
    "size": ["base"],
    **{"lengths": [512, 4096], "tokens_per_batch": 16384, "dropout": [0.0], "precision": "bfloat16"},
}
# The modules of the model whose form depends on where they run.
_CHOOSERS = ("attention", "circle")


def count_step(workload: Workload, setting: Setting) -> dict[str, float]:
    """
    Count a step of a whole model, in training or inference, without the optimizer's part: operators, bytes and
    multiply-adds. A `ValueError` if the model takes no mask and the setting is of padded inputs.
    """
    inputs = models.make_inputs(workload, replace(setting, device="meta"))
    is_training = workload.mode == "training"
    counter, kept = OperatorCounter(answer=not setting.padded), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_of(tensor)] = tensor.untyped_storage()  # held, so that its number is not given to another
        return tensor.detach()

    with torch.device("meta"), FusedAttention(), torch.set_grad_enabled(is_training):
        model: Any = models.build_model(workload.model, models.build_config(workload, setting.num_layers))
        model.to(PRECISIONS[setting.precision]).train(is_training)
        if setting.padded and not (MODELS[workload.model].reads_mask and takes_mask(model)):
            raise ValueError("takes no mask")
        # Models look whether they are part of a graph, which has a form of its own, and where they run.
        graph = patch("torch.compiler.is_compiling", return_value=True) if setting.compile else nullcontext()

        def saves(config: Any, device: torch.device) -> bool:
            return saves_multiply_adds(config, torch.device(setting.device))

        where = (patch(f"modeling_sktformer.{name}.saves_multiply_adds", saves) for name in _CHOOSERS)
        with ExitStack() as stack:
            for context in (saved_tensors_hooks(keep, lambda tensor: tensor), counter, graph, *where):
                stack.enter_context(context)
            loss = model(**inputs).loss
        forward = counter.operators
        if is_training:
            with counter:
                loss.backward()
    for tensor in (*model.parameters(), *model.buffers()):
        kept.pop(storage_of(tensor), None)
    return {
        "forward_operators": forward,
        "backward_operators": counter.operators - forward,
        "product_bytes": counter.product_bytes,
        "other_bytes": counter.other_bytes,
        "kept_bytes": sum(storage.nbytes() for storage in kept.values()),
        "multiply_adds": counter.flops / 2,
    }


def count_layer(workload: Workload, setting: Setting) -> dict[str, float]:
    """The mean of [`count_step`] over a pattern of layers, `multiply_adds` of a token."""
    pattern = MODELS[workload.model].layer_pattern
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
