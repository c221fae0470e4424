"""
Where the time of SKTformer's training step goes: the modules that it calls, forward and backward.

`torch.profiler` knows which operator runs when; the module of a backward operator is that of the forward one with the
same number.
"""

import contextlib
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.profiler import profile, record_function

from experiments.benchmark.models import PRECISIONS, SIZES, Setting, Workload, build_config, build_model, make_inputs
from experiments.results import format_table


os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would tell the terminal of every start and stop
_PART = "part: "
_NODE = "autograd::engine::evaluate_function: "


def profile_step(workload: Workload, setting: Setting, rounds: int, warmup: int) -> list[dict[str, Any]]:
    """
    Measure the parts of a training step.

    Returns:
        `list` of mappings: `part`, a module without those that it calls, in all layers together; `forward_ms` and
        `backward_ms`, medians over the rounds of the operators' time on the device; `share` of the step's time.
    """
    model: Any = build_model(workload.model, build_config(workload, setting.num_layers)).train()
    model.to(setting.device, PRECISIONS[setting.precision])
    inputs = make_inputs(workload, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    prefix = f"{model.base_model_prefix}."
    names = {m: re.sub(r"\.\d+", "", name).removeprefix(prefix) or "head" for name, m in model.named_modules()}

    def step() -> None:
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        with record_function(f"{_PART}optimizer"):
            optimizer.step()

    for _ in range(max(1, warmup)):
        step()
    times: list[dict[tuple[str, str], float]] = []
    for _ in range(rounds):
        with label_calls(names), profile() as profiler:
            step()
        times.append(sum_parts(cast(Any, profiler.events()), setting.device))
    rows: list[dict[str, Any]] = []
    for part in dict.fromkeys(part for of_round in times for part, _ in of_round):
        phases = [[of_round[part, phase] / 1000 for of_round in times] for phase in ("forward", "backward")]
        rows.append(
            {"part": part} | dict(zip(("forward_ms", "backward_ms"), map(statistics.median, phases), strict=True))
        )
    total = sum(row["forward_ms"] + row["backward_ms"] for row in rows)
    return [row | {"share": (row["forward_ms"] + row["backward_ms"]) / total} for row in rows]


@contextlib.contextmanager
def label_calls(names: Mapping[nn.Module, str]) -> Iterator[None]:
    """Let the profiler know when modules are called. Hooks would do so too, and keep fast paths from being taken."""
    call = nn.Module.__call__

    def labelled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"{_PART}{names.get(module, 'other modules')}"):
            return call(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", labelled):
        yield


def sum_parts(events: Sequence[Any], device: str) -> dict[tuple[str, str], float]:
    """Microseconds of a step by part and phase, from the profiler's events."""
    parts: dict[int, str] = {}  # of the forward operators by the numbers that they share with backward ones
    times: dict[tuple[str, str], float] = defaultdict(float)
    for event in sorted(events, key=lambda event: event.time_range.start):
        owner = event
        while owner is not None and not owner.name.startswith((_PART, _NODE)):
            owner = owner.cpu_parent
        phase = "forward"
        if owner is None:
            part = "outside of the modules"
        elif owner.name.startswith(_PART):
            part = parts[event.sequence_nr] = owner.name.removeprefix(_PART)
        else:
            phase, part = "backward", parts.get(owner.sequence_nr, "between the modules")
            part = "gradients of weights" if "AccumulateGrad" in owner.name else part
        times[part, phase] += event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
    return times


def format_profile(section: Mapping) -> list[str]:
    """The profiles of a section, as paragraphs of Markdown."""
    paragraphs = [
        "Each module without those that it calls, all layers together: the time of its operators, medians over "
        f"{section['plan']['rounds']} steps under the profiler. The operators that a step is made of, and what they "
        "read, write and compute, are counted by `--count`."
    ]
    for each in section["profiles"]:
        rows = [
            [row["part"], *(f"{row[key]:.1f}" for key in ("forward_ms", "backward_ms")), f"{row['share']:.0%}"]
            for row in each["parts"]
        ]
        table = format_table(["part", "forward, ms", "backward, ms", "share of the step"], rows)
        paragraphs += [f"### {SIZES[each['size']]}, {each['length']:,} tokens", "\n".join(table)]
    return paragraphs
