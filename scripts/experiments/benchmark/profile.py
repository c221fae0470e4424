"""Where the time of SKTformer's training step goes: each part alone, against the machine's matrix-product rate."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from tqdm import tqdm

from experiments.benchmark.counts import FILTER_PRODUCTS, TRANSFORMS, count_operations
from experiments.benchmark.measurement import measure_matmul_rate, record_calls, time_interleaved
from experiments.benchmark.models import PRECISIONS, Case, Setting, build_config, build_model, make_inputs
from experiments.results import describe_environment, format_origin


# Which counted operations a part of the profile holds.
FEED_FORWARD = "feed-forward with its norm"
FOLDED_SMOOTHER = "smoother, its stem folded"
_COUNTED = {
    "Fourier convolution": (TRANSFORMS, FILTER_PRODUCTS),
    "convolution stem": ("stem",),
    FOLDED_SMOOTHER: (TRANSFORMS, FILTER_PRODUCTS, "folding the stem", "stem"),
    "projections": ("queries", "landmark keys and values", "output projection"),
    "attention without them": ("sampled columns", "attention"),
    "attention with its projections": ("landmark keys and values", "folding the projections", "attention"),
    FEED_FORWARD: ("feed-forward",),
    "head": ("head",),
}


def profile_lengths(setting: Setting, lengths: Sequence[int], dropout: float, rounds: int) -> dict[str, Any]:
    """
    Measure where the time of a training step goes, at each length.

    Args:
        setting ([`Setting`]): Sizes, batch, precision, device.
        lengths (sequence of `int`): Tokens in an input.
        dropout (`float`): Of all parts.
        rounds (`int`): How often each part is timed.

    Returns:
        `dict`: settings, the machine's rate at matrix products and the parts of the step at each length.
    """
    rate = measure_matmul_rate(setting.device, PRECISIONS[setting.precision], profile_clock(setting))
    case = Case("training", dropout)
    return {
        "key": {**dataclasses.asdict(setting), "dropout": [dropout]},
        "rounds": rounds,
        "matmul_gflops": rate / 1e9,
        "environment": describe_environment(),
        "lengths": [
            {"length": length, "parts": profile_step(setting, length, case, rounds, rate)}
            for length in tqdm(lengths, desc="Profile", unit="length")
        ],
    }


def profile_clock(setting: Setting) -> str:
    """Processors are timed by what they work, which waiting for other programs does not change."""
    return "wall" if setting.device == "cuda" else "cpu"


def profile_step(setting: Setting, length: int, case: Case, rounds: int, matmul_rate: float) -> list[dict[str, Any]]:
    """
    Measure the parts of a training step.

    Each part runs alone on the inputs that it has in the first layer, forward and backward, and is counted for all
    layers. The fastest of the interleaved rounds counts: whatever else the machine does only adds. Times on
    processors are those of all threads together.

    Args:
        setting ([`Setting`]): Sizes, batch, precision, device.
        length (`int`): Tokens in an input.
        case ([`Case`]): Gives the dropout.
        rounds (`int`): How often each part is timed.
        matmul_rate (`float`): Floating-point operations per second of large matrix products.

    Returns:
        `list` of mappings: `part`, `forward_ms`, `backward_ms`, `gflop` of both, `mib` of the forward pass's inputs,
        outputs and weights, `share` of the step's time, `matmul_share` of the rate. The last three rows are what
        stands between the parts, the optimizer and the step.
    """
    config = build_config("sktformer", setting, length, case.dropout)
    model = build_model("sktformer", config).train()
    model = cast(Any, model).to(setting.device, PRECISIONS[setting.precision])
    inputs, labels = make_inputs(setting, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (setting.batch_size, length, config.hidden_size)
    pieces = profile_pieces(model, torch.empty(shape, device=model.device, dtype=model.dtype))
    calls = record_calls([module for _, _, module in pieces], lambda: model(inputs, labels=labels))

    def forward() -> torch.Tensor:
        return model(inputs, labels=labels).loss

    steps: dict[Any, Callable[[], Any]] = {"forward": forward, "both": lambda: forward().backward()}
    steps["both"]()
    steps["optimizer"] = optimizer.step
    for call in calls:
        steps |= {(call, False): call.run_forward, (call, True): call.run_both}
    waiting = {name: _wait_for(step, setting.device) for name, step in steps.items()}
    times: Mapping[Any, list[dict]] = time_interleaved(waiting, rounds)
    clock = profile_clock(setting)
    fastest = {name: 1000 * min(entry[clock] for entry in entries) for name, entries in times.items()}

    counted = count_operations("sktformer", config, setting.batch_size, length)
    rows: dict[str, dict[str, Any]] = {}
    for part, weight, module in pieces:
        row = rows.setdefault(part, {"part": part, "forward_ms": 0.0, "backward_ms": 0.0, "mib": 0.0})
        for call in calls:
            if call.module is module:
                row["forward_ms"] += weight * fastest[call, False]
                row["backward_ms"] += weight * (fastest[call, True] - fastest[call, False])
                row["mib"] += max(weight, 0) * call.num_bytes / 2**20
    for part, row in rows.items():
        row["gflop"] = 2 * 3 * sum(counted.get(name, 0.0) for name in _COUNTED.get(part, ())) / 1e9
    whole = {
        "part": "forward and backward pass",
        "forward_ms": fastest["forward"],
        "backward_ms": fastest["both"] - fastest["forward"],
        "gflop": 2 * 3 * sum(counted.values()) / 1e9,
    }
    rest = {key: whole[key] - sum(row[key] for row in rows.values()) for key in ("forward_ms", "backward_ms", "gflop")}
    update = {"part": "optimizer", "forward_ms": fastest["optimizer"], "backward_ms": 0.0}
    result = [*rows.values(), {"part": "between the parts", **rest}, whole, update]
    for row in result:
        total = row["forward_ms"] + row["backward_ms"]
        row["share"] = total / (fastest["both"] + fastest["optimizer"])
        row["matmul_share"] = row.get("gflop", 0.0) * 1e12 / total / matmul_rate if total > 0 else 0.0
    return result


def profile_pieces(model: Any, hidden_states: torch.Tensor) -> list[tuple[str, int, nn.Module]]:
    """
    What the parts of an SKTformer's step are made of: part, how many times a module counts to it, the module.

    Where inputs like `hidden_states` let attention and stem be folded, these call none of the modules that they hold,
    which then are no parts of their own. A module that calls others counts with those taken out again, so that parts
    add up.
    """
    layer, num_layers = model.sktformer.layers[0], len(model.sktformer.layers)
    folded_attention = layer.attention.is_folded(hidden_states)
    pieces: list[tuple[str, int, nn.Module]] = []
    smoother = layer.smoother
    if smoother is not None and smoother.is_stem_folded(hidden_states):
        pieces.append((FOLDED_SMOOTHER, num_layers, smoother))
    elif smoother is not None:
        for part, module in (
            ("Fourier convolution", smoother.fourier_convolution),
            ("convolution stem", smoother.convolution_stem),
        ):
            if module is not None:
                pieces += [(part, num_layers, module), ("smoother without them", -num_layers, module)]
        pieces.append(("smoother without them", num_layers, smoother))
    attention = "attention with its projections" if folded_attention else "attention without them"
    if not folded_attention:
        for module in layer.attention.children():
            if isinstance(module, nn.Linear):
                pieces += [("projections", num_layers, module), (attention, -num_layers, module)]
    # The layer computes its second half in chunks, with the norm and the sum, and calls no module for that.
    first_half = [layer.attention_norm, layer.attention, *([] if smoother is None else [smoother])]
    return [
        *pieces,
        (attention, num_layers, layer.attention),
        (FEED_FORWARD, num_layers, layer),
        *((FEED_FORWARD, -num_layers, module) for module in first_half),
        ("layer norms", num_layers, layer.attention_norm),
        ("layer norms", 1, model.sktformer.final_norm),
        ("embeddings", 1, model.sktformer.embeddings),
        ("head", 1, model.pooler),
        ("head", 1, model.classifier),
    ]


def _wait_for(step: Callable[[], Any], device: str) -> Callable[[], None]:
    def run() -> None:
        step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def format_profile(results: Mapping, title: str) -> str:
    """The profile as Markdown, under a title that names the settings."""
    lines = [
        "# Where the time of a training step goes",
        "",
        f"SKTformer, {title}. Each part alone on the inputs that it has in the model, all layers together, the "
        f"fastest of {results['rounds']} interleaved rounds. GFLOP counts matrix products, convolutions and Fourier "
        "transforms of both passes; MiB is what the forward pass reads and writes at least; the last column holds the "
        f"part's rate against that of large matrix products here, {results['matmul_gflops']:.1f} GFLOP/s. "
        + ("Times are processor time. " if results["key"]["device"] == "cpu" else "")
        + '"Projections" are linear maps that attention calls; folded attention (`folded_attention.py`) has none.',
        "",
    ]
    for entry in results["lengths"]:
        lines += [
            f"## {entry['length']:,} tokens",
            "",
            "| part | forward, ms | backward, ms | share of the step | GFLOP | MiB | of the matrix-product rate |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in entry["parts"]:
            flop = f"{row['gflop']:.2f}" if row.get("gflop") else ""
            rate = f"{row['matmul_share']:.0%}" if row.get("gflop") else ""
            size = f"{row['mib']:.1f}" if "mib" in row else ""
            lines.append(
                f"| {row['part']} | {row['forward_ms']:.1f} | {row['backward_ms']:.1f} | {row['share']:.0%} "
                f"| {flop} | {size} | {rate} |"
            )
        lines.append("")
    environment = results["environment"]
    lines += [format_origin("benchmark.py --profile", environment, [environment["commit"]]), ""]
    return "\n".join(lines)
