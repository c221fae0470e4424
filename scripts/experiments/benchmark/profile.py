"""
Where the time of SKTformer's training step goes: each part alone, against the machine's matrix-product rate.

Modules are repeated on recorded inputs, forward and backward. `torch.profiler` knows operators, and the module of a
backward one no longer.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils.benchmark import Timer, timer
from tqdm import tqdm

from experiments.benchmark.counts import FILTER_PRODUCTS, TRANSFORMS, count_operations
from experiments.benchmark.measurement import time_interleaved, wait_for_device
from experiments.benchmark.models import PRECISIONS, SIZES, Setting, Workload, build_config, build_model, make_inputs
from experiments.results import format_table


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


def profile_steps(workloads: Sequence[Workload], setting: Setting, rounds: int) -> dict[str, Any]:
    """The machine's rate at matrix products, `matmul_gflops`, and the parts of SKTformers' steps, `profiles`."""
    rate = measure_matmul_rate(setting)
    profiles = [
        {"size": workload.size, "length": workload.length, "parts": profile_step(workload, setting, rounds, rate)}
        for workload in tqdm(workloads, desc="Profile", unit="length", disable=None)
    ]
    return {"matmul_gflops": rate / 1e9, "profiles": profiles}


def measure_matmul_rate(setting: Setting, size: int = 2048) -> float:
    """Floating-point operations per second of the fastest of seven products of large square matrices."""
    left, right = torch.randn(2, size, size, device=setting.device).to(PRECISIONS[setting.precision])
    clock = time.process_time if setting.device == "cpu" else timer
    product = Timer("torch.mm(left, right)", timer=clock, globals=locals(), num_threads=torch.get_num_threads())
    return 2 * size**3 / min(product.timeit(1).median for _ in range(7))


@dataclass(eq=False)
class ModuleCall:
    """A call of a module, to be repeated alone: inputs with gradients of their own, one tensor that it returned."""

    module: nn.Module
    arguments: tuple
    options: dict[str, Any]
    output: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs, output and parameters, each counted once."""
        return self.output.nbytes + sum(tensor.nbytes for tensor in self._leaves())

    def run_forward(self) -> torch.Tensor:
        """Call the module; what a backward pass needs is kept as in training."""
        return _first_tensor(self.module(*self.arguments, **self.options))

    def run_both(self) -> None:
        """Call the module and go back to all its inputs and parameters."""
        for tensor in self._leaves():
            tensor.grad = None
        self.run_forward().backward(self.output)

    def _leaves(self) -> list[torch.Tensor]:
        values = [*self.arguments, *self.options.values(), *self.module.parameters()]
        return [value for value in values if isinstance(value, torch.Tensor)]


def record_calls(modules: Iterable[nn.Module], run: Callable[[], Any]) -> list[ModuleCall]:
    """Record how modules are called while something runs, in the order in which the calls end."""
    calls: list[ModuleCall] = []

    def record(module: nn.Module, arguments: tuple, options: dict[str, Any], output: Any) -> None:
        arguments = tuple(_detach(value) for value in arguments)
        options = {name: _detach(value) for name, value in options.items()}
        calls.append(ModuleCall(module, arguments, options, _first_tensor(output).detach()))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in dict.fromkeys(modules)]
    run()
    for hook in hooks:
        hook.remove()
    return calls


def _detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    return value


def _first_tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def profile_step(workload: Workload, setting: Setting, rounds: int, matmul_rate: float) -> list[dict[str, Any]]:
    """
    Measure the parts of a training step.

    Each part runs alone on the inputs that it has in the first layer, forward and backward, and is counted for all
    layers. The fastest of the interleaved rounds counts: whatever else the machine does only adds. Times on
    processors are those of all threads together.

    Args:
        workload ([`Workload`]): An SKTformer in training, made for the length of its inputs.
        setting ([`Setting`]): Depth, precision, device.
        rounds (`int`): How often each part is timed.
        matmul_rate (`float`): Floating-point operations per second of large matrix products.

    Returns:
        `list` of mappings: `part`, `forward_ms`, `backward_ms`, `gflop` of both, `mib` of the forward pass's inputs,
        outputs and weights, `share` of the step's time, `matmul_share` of the rate. The last three rows are what
        stands between the parts, the step and the optimizer.
    """
    config = build_config(workload, setting.num_layers)
    model = build_model("sktformer", config).train()
    model = cast(Any, model).to(setting.device, PRECISIONS[setting.precision])
    inputs = make_inputs(workload, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (workload.batch_size, workload.length, config.hidden_size)
    pieces = profile_pieces(model, torch.empty(shape, device=model.device, dtype=model.dtype))
    calls = record_calls([module for _, _, module in pieces], lambda: model(**inputs))

    def forward() -> torch.Tensor:
        return model(**inputs).loss

    steps: dict[Any, Callable[[], Any]] = {"forward": forward, "both": lambda: forward().backward()}
    steps["both"]()
    steps["optimizer"] = optimizer.step
    for call in calls:
        steps |= {(call, False): call.run_forward, (call, True): call.run_both}
    times = time_interleaved({name: wait_for_device(step, setting.device) for name, step in steps.items()}, rounds)
    # Processors are timed by what they work, which waiting for other programs does not change.
    clock = "cpu" if setting.device == "cpu" else "wall"
    fastest = {name: 1000 * min(entry[clock] for entry in entries) for name, entries in times.items()}

    counted = count_operations("sktformer", config, workload.batch_size, workload.length)
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


def format_profile(section: Mapping) -> list[str]:
    """The profiles of a section, as paragraphs of Markdown."""
    paragraphs = [
        "Each part alone on the inputs that it has in the model, all layers together, the fastest of "
        f"{section['plan']['rounds']} interleaved rounds. GFLOP counts matrix products, convolutions and Fourier "
        "transforms of both passes; MiB is what the forward pass reads and writes at least; the last column holds the "
        f"part's rate against that of large matrix products here, {section['matmul_gflops']:.1f} GFLOP/s. "
        + ("Times are processor time. " if section["key"]["device"] == "cpu" else "")
        + '"Projections" are linear maps that attention calls; folded attention (`folded_attention.py`) has none.'
    ]
    header = ["part", "forward, ms", "backward, ms", "share of the step", "GFLOP", "MiB", "of the matrix-product rate"]
    for profile in section["profiles"]:
        rows = [
            [
                row["part"],
                *(f"{row[key]:.1f}" for key in ("forward_ms", "backward_ms")),
                f"{row['share']:.0%}",
                f"{row['gflop']:.2f}" if row.get("gflop") else "",
                f"{row['mib']:.1f}" if "mib" in row else "",
                f"{row['matmul_share']:.0%}" if row.get("gflop") else "",
            ]
            for row in profile["parts"]
        ]
        title = f"### {SIZES[profile['size']]}, {profile['length']:,} tokens"
        paragraphs += [title, "\n".join(format_table(header, rows))]
    return paragraphs
