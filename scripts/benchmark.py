"""
Measure time and memory of a step against the length of the inputs, for SKTformer and other encoders alike.

    python scripts/benchmark.py --size lra --batch_size 4 --lengths 1024 4096

Every model has a sequence classification head, the same width, depth, heads, batch, precision and data, and is made
anew for each length. Steps are timed in interleaved rounds, memory is measured for each model alone. NAME.md, .json
and a picture go to --results_dir after every length; started again with the same flags, it measures what is missing.
--merge keeps what the files hold of other settings. --profile measures the parts of SKTformer's step instead.
"""

import dataclasses
import gc
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from tqdm import tqdm

from experiments.arguments import UserError, one_line, parse_args, run_script
from experiments.benchmark.counts import count_operations, count_step
from experiments.benchmark.measurement import (
    OUT_OF_MEMORY,
    Probe,
    StepFailure,
    failure_reason,
    median_ratio,
    probe_cuda_step,
    probe_step,
    time_interleaved,
    time_step,
)
from experiments.benchmark.models import (
    MODELS,
    NOTES,
    SIZES,
    Case,
    Setting,
    build_config,
    build_sizes,
    make_step,
    make_warm_step,
    unsupported_reason,
)
from experiments.benchmark.profile import format_profile, profile_lengths
from experiments.plots import plot_benchmark
from experiments.results import describe_environment, format_origin, write_atomically, write_json


@dataclass
class BenchmarkArguments:
    """What is measured and where it goes."""

    models: list[str] = field(default_factory=lambda: list(MODELS), metadata={"help": f"Any of {', '.join(MODELS)}."})
    lengths: list[int] = field(
        default_factory=lambda: [512, 1024, 2048, 3072, 4096, 8192, 16384], metadata={"help": "Tokens in an input."}
    )
    batch_size: int = field(default=32, metadata={"help": "Inputs in a batch."})
    size: Literal["lra", "base"] = field(
        default="lra", metadata={"help": "Sizes of all models: the paper's for LRA, or BERT base's."}
    )
    num_layers: int | None = field(default=None, metadata={"help": "Layers, if not those of --size."})
    dropout: list[float] = field(
        default_factory=lambda: [0.0, 0.1],
        metadata={"help": "All dropouts of every model in training, one after another."},
    )
    precision: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", metadata={"help": "Type of the weights, or with --autocast of the products."}
    )
    autocast: bool = field(default=False, metadata={"help": "Keep float32 weights and cast where PyTorch does."})
    modes: list[str] = field(
        default_factory=lambda: ["training", "inference"], metadata={"help": "training, inference or both."}
    )
    baseline: str = field(default="bert-sdpa", metadata={"help": "The model that speeds are multiples of."})
    rounds: int = field(default=7, metadata={"help": "How often each step is timed."})
    warmup: int = field(
        default=2,
        metadata={"help": "Calls before those that count, in each round's process or, on CUDA and compiled, once."},
    )
    time_limit_s: float = field(
        default=60.0,
        metadata={"help": "A slower step is timed in fewer rounds and left out at greater lengths."},
    )
    memory_limit_gib: float | None = field(
        default=None,
        metadata={"help": "A step that needs more is left out. By default what is available, on CPUs."},
    )
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata={"help": "Where the models run."})
    compile: bool = field(default=False, metadata={"help": "Compile every model with torch.compile."})
    profile: bool = field(
        default=False, metadata={"help": "Measure the parts of SKTformer's training step at each length instead."}
    )
    merge: bool = field(default=False, metadata={"help": "Keep what the results hold of other settings."})
    results_name: str = field(default="speed", metadata={"help": "Name of the results' files."})
    results_dir: str = field(
        default=str(Path(__file__).parent.parent / "model_cards" / "results"),
        metadata={"help": "Folder of the results."},
    )

    def __post_init__(self) -> None:
        for flag, given, known in (
            ("--models", self.models, MODELS),
            ("--modes", self.modes, ("training", "inference")),
            ("--size", [self.size], SIZES),
        ):
            unknown = [name for name in given if name not in known]
            if unknown or not given:
                raise UserError(f"{flag} {' '.join(unknown)}: choose from {', '.join(known)}.")
        for flag, value in (
            ("--batch_size", self.batch_size),
            ("--rounds", self.rounds),
            ("--time_limit_s", self.time_limit_s),
        ):
            if value <= 0:
                raise UserError(f"{flag} {value} must be more than 0.")
        if self.num_layers is not None and self.num_layers < 1:
            raise UserError(f"--num_layers {self.num_layers} must be at least 1.")
        if self.warmup < 0:
            raise UserError(f"--warmup {self.warmup} must not be negative.")
        # Samples, windows and patches of the models do not fit into fewer tokens.
        if not self.lengths or min(self.lengths) < 16:
            raise UserError(f"--lengths {' '.join(map(str, self.lengths))}: each must be at least 16 tokens.")
        if not self.dropout or not all(0 <= value < 1 for value in self.dropout):
            raise UserError(f"--dropout {' '.join(map(str, self.dropout))}: each must be at least 0 and below 1.")
        if self.profile and (self.autocast or self.compile):
            raise UserError("--profile runs the parts one by one, without --autocast and --compile; leave them out.")
        if self.baseline not in self.models:
            raise UserError(
                f"--baseline {self.baseline} is none of --models {' '.join(self.models)}; choose one of them."
            )
        if self.autocast and self.precision == "float32":
            raise UserError("--autocast casts to a smaller type; give --precision bfloat16 or float16 with it.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: there is no CUDA device here; leave the flag out or pass --device cpu.")
        self.lengths = sorted(set(self.lengths))
        self.models = list(dict.fromkeys(self.models))
        self.dropout = list(dict.fromkeys(self.dropout))

    @property
    def in_own_processes(self) -> bool:
        """Whether each round of each model is a process. A device is slow to open, a model to compile, for that."""
        return self.setting.device == "cpu" and not self.compile

    @property
    def warmup_rounds(self) -> int:
        """Rounds before those that count, if these have no processes of their own that would have to warm up."""
        return 0 if self.in_own_processes else self.warmup

    @property
    def setting(self) -> Setting:
        """What all models have in common."""
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        return Setting(
            size=self.size,
            num_layers=self.num_layers or build_sizes(self.size).num_hidden_layers,
            batch_size=self.batch_size,
            precision=self.precision,
            autocast=self.autocast,
            compile=self.compile,
            device=device,
        )

    @property
    def cases(self) -> list[Case]:
        """Training with each dropout, and inference, which has none."""
        training = [Case("training", value) for value in self.dropout] if "training" in self.modes else []
        return training + ([Case("inference", 0.0)] if "inference" in self.modes else [])


# What a process that measures memory would import for seconds.
_PRELOADED = (
    "torch",
    "transformers.modeling_utils",
    "matplotlib.pyplot",
    *(name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name),
)
# Flags that say where results go and how, and nothing about what is measured.
_FREE_FLAGS = ("merge", "profile", "results_name", "results_dir", "device")


def main() -> None:
    (arguments,) = parse_args([BenchmarkArguments], description=__doc__)
    path = Path(arguments.results_dir) / arguments.results_name
    if arguments.profile:
        path = path.with_name(f"{path.name}_profile")
        results = profile_lengths(arguments.setting, arguments.lengths, arguments.dropout[-1], arguments.rounds)
        results["command"] = shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]])
        write_json(path.with_suffix(".json"), results)
        write_atomically(path.with_suffix(".md"), format_profile(results, section_title(results)))
    else:
        benchmark(arguments, path)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


def benchmark(arguments: BenchmarkArguments, path: Path) -> None:
    """
    Measure one section of the results and write it after every length.

    Args:
        arguments ([`BenchmarkArguments`]): What is measured.
        path (`Path`): The results' files, without an ending.
    """
    section = open_section(arguments, path)
    cells = [(length, case) for length in arguments.lengths for case in arguments.cases]
    done = {(row["length"], row["mode"], row["dropout"]) for row in section["rows"]}
    cells = [(length, case) for length, case in cells if (length, case.mode, case.dropout) not in done]
    steps_per_cell = len(arguments.models) + arguments.warmup_rounds + arguments.rounds
    with tqdm(total=len(cells) * steps_per_cell, desc="Benchmark", unit="step") as progress:
        for length, case in cells:
            progress.set_postfix_str(f"{case.title.lower()}, {length:,} tokens")
            start = progress.n
            section["rows"] += measure_models(arguments, length, case, section["rows"], progress)
            progress.update(start + steps_per_cell - progress.n)
            save_section(section, path)
    section["finished"] = True
    save_section(section, path)


def open_section(arguments: BenchmarkArguments, path: Path) -> dict[str, Any]:
    """
    The part of the results that belongs to the arguments: an unfinished one of the same flags, or a new one.

    Raises:
        UserError: if the file holds other sections that nobody asked to keep.
    """
    plan = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in _FREE_FLAGS}
    environment = describe_environment()
    section = {
        "key": {**dataclasses.asdict(arguments.setting), "dropout": arguments.dropout},
        "plan": plan,
        "command": shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]]),
        "environment": environment,
        "commits": [environment["commit"]],
        "finished": False,
        "rows": [],
    }
    earlier = load_sections(path)
    others = [entry for entry in earlier if entry["key"] != section["key"]]
    if others and not arguments.merge:
        raise UserError(
            f"{path.with_suffix('.json')} holds results of other settings ({section_title(others[0])}); pass --merge "
            "to keep them beside these, or choose another --results_name."
        )
    for entry in earlier:
        machine = {**entry["environment"], "commit": None}
        if (
            entry["key"] == section["key"]
            and entry["plan"] == plan
            and machine == {**environment, "commit": None}
            and not entry["finished"]
        ):
            entry["commits"] = list(dict.fromkeys([*entry["commits"], environment["commit"]]))
            return entry
    return section


def load_sections(path: Path) -> list[dict[str, Any]]:
    """What the results hold already."""
    path = path.with_suffix(".json")
    if not path.is_file():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))["sections"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} holds no results of this script ({one_line(error)}); choose another --results_name."
        ) from error


def save_section(section: dict[str, Any], path: Path) -> None:
    """Put a section into the results, in the place of an earlier one of its settings, and write table and picture."""
    sections = load_sections(path)
    places = [number for number, entry in enumerate(sections) if entry["key"] == section["key"]]
    if places:
        sections[places[0]] = section
    else:
        sections.append(section)
    write_json(path.with_suffix(".json"), {"sections": sections})
    write_atomically(path.with_suffix(".md"), format_document(sections, path.name))
    curves = {
        case.title: {
            MODELS[row["model"]]: [
                (entry["length"], entry["step_time_ms"], entry["peak_memory_mib"])
                for entry in rows_of(section, case)
                if entry["model"] == row["model"] and entry["reason"] is None
            ]
            for row in rows_of(section, case)
        }
        for case in section_cases(section)
    }
    plot_benchmark(curves, path.with_name(picture_name(section, path.name)), section_title(section))


class GuardedStep:
    """A step that keeps what made it fail, as a few words, and from then on does nothing."""

    def __init__(self, step: Callable[[], Any]):
        self.step: Callable[[], Any] | None = step
        self.reason: str | None = None

    def __call__(self) -> Any:
        if self.step is None:
            return None
        try:
            return self.step()
        except Exception as error:
            self.step, self.reason = None, failure_reason(error)
            return None


def measure_models(
    arguments: BenchmarkArguments, length: int, case: Case, earlier: Sequence[dict], progress: tqdm
) -> list[dict[str, Any]]:
    """
    Measure all models at one length.

    Args:
        arguments ([`BenchmarkArguments`]): What is measured.
        length (`int`): Tokens in an input.
        case ([`Case`]): Training or inference.
        earlier (sequence of mappings): Rows of smaller lengths, which say what is too much at this one.
        progress (`tqdm`): Moved on by one for each model that is measured alone and each round.

    Returns:
        `list` of mappings: a row for each model; where `reason` is not None nothing was measured.
    """
    reasons: dict[str, str | None] = {}
    probes: dict[str, Probe] = {}
    for name in arguments.models:
        same = [
            row for row in earlier if (row["model"], row["mode"], row["dropout"]) == (name, case.mode, case.dropout)
        ]
        reasons[name] = unsupported_reason(name, length) or reason_from_shorter(same, length, arguments.time_limit_s)
        if reasons[name] is None:
            try:
                probes[name] = probe_model(arguments, name, length, case)
            except StepFailure as failure:
                reasons[name] = str(failure)
        progress.update()
    steps: dict[str, GuardedStep] = {}
    for name in probes:
        try:
            steps[name] = GuardedStep(prepare_step(arguments, name, length, case))
        except Exception as error:
            reasons[name] = failure_reason(error)
    fewer = {
        name: max(1, int(arguments.rounds * arguments.time_limit_s / probe.wall))
        for name, probe in probes.items()
        if probe.wall > arguments.time_limit_s
    }
    times = time_interleaved(steps, arguments.rounds, arguments.warmup_rounds, fewer, progress)
    reasons |= {name: step.reason for name, step in steps.items()}
    steps.clear()
    gc.collect()
    if arguments.setting.device == "cuda":
        torch.cuda.empty_cache()
    baseline = times.get(arguments.baseline) if reasons[arguments.baseline] is None else None
    rows = []
    for name in arguments.models:
        row = {"mode": case.mode, "dropout": case.dropout, "model": name, "length": length, "reason": reasons[name]}
        if reasons[name] is None:
            row |= summarise(times[name], baseline) | {"peak_memory_mib": probes[name].peak_memory / 2**20}
        if unsupported_reason(name, length) is None:
            config = build_config(name, arguments.setting, length, case.dropout)
            parts = count_operations(name, config, arguments.batch_size, length)
            row["multiply_adds"] = count_step(parts, name, case.mode)
        rows.append(row)
    return rows


def reason_from_shorter(rows: Sequence[Mapping], length: int, time_limit: float) -> str | None:
    """Why a model is not tried at a length, from its rows of smaller ones: it was too large or too slow already."""
    if not rows:
        return None
    last = max(rows, key=lambda row: row["length"])
    if last["reason"] is not None:
        return last["reason"] if last["reason"].startswith((OUT_OF_MEMORY, "over ")) else None
    # No step grows slower than its input does.
    seconds = last["step_time_ms"] / 1000 * length / last["length"]
    return f"over {time_limit:g} s" if seconds > time_limit else None


def prepare_step(arguments: BenchmarkArguments, name: str, length: int, case: Case) -> Callable[[], Any]:
    """
    A step to be timed; where every round takes place in a process of its own, it returns its time, see [`time_step`].
    """
    what = (name, arguments.setting, length, case)
    if not arguments.in_own_processes:
        return make_step(*what)
    return partial(time_step, make_step, *what, warmup=arguments.warmup, preload=_PRELOADED)


def probe_model(arguments: BenchmarkArguments, name: str, length: int, case: Case) -> Probe:
    """
    Measure one model's memory, alone.

    Raises:
        StepFailure: if it cannot be made, fails or needs more than the limit.
    """
    what = (name, arguments.setting, length, case)
    limit = None if arguments.memory_limit_gib is None else int(arguments.memory_limit_gib * 2**30)
    if arguments.setting.device == "cuda":
        probe = probe_cuda_step(make_step, *what)
    else:
        # Compiled code starts threads, which do not survive a fork.
        preload = () if arguments.compile else _PRELOADED
        available = int(0.9 * psutil.virtual_memory().available)
        try:
            probe = probe_step(make_warm_step, *what, memory_limit=min(limit or available, available), preload=preload)
        except StepFailure as failure:
            if str(failure) == OUT_OF_MEMORY and limit is not None and limit <= available:
                raise StepFailure(f"over {arguments.memory_limit_gib:g} GiB") from failure
            raise
    if limit is not None and probe.peak_memory > limit:
        raise StepFailure(f"over {arguments.memory_limit_gib:g} GiB")
    return probe


def summarise(times: list[dict], baseline: list[dict] | None) -> dict[str, Any]:
    """Medians of a model's rounds, and of the ratios of the baseline's time to its own in the same round."""
    return {
        "rounds": len(times),
        "step_time_ms": 1000 * statistics.median(entry["wall"] for entry in times),
        "step_cpu_time_ms": 1000 * statistics.median(entry["cpu"] for entry in times),
        "speed_ratio": None if baseline is None else median_ratio(baseline, times),
        "cpu_speed_ratio": None if baseline is None else median_ratio(baseline, times, "cpu"),
        "times": times,
    }


def section_title(section: Mapping) -> str:
    """The settings of a section in a few words."""
    key = section["key"]
    size = "LRA model" if key["size"] == "lra" else "BERT base's sizes"
    words = [
        size,
        f"{key['num_layers']} layer{'s' if key['num_layers'] > 1 else ''}",
        f"batch {key['batch_size']}",
        f"{key['precision']} autocast" if key["autocast"] else key["precision"],
        *(["compiled"] if key["compile"] else []),
        {"cpu": "CPU", "cuda": "GPU"}[key["device"]],
    ]
    if key["dropout"] != [0.0, 0.1]:
        words.append(f"dropout {', '.join(f'{value:g}' for value in key['dropout'])}")
    return ", ".join(words)


def picture_name(section: Mapping, name: str) -> str:
    """The file of a section's picture, the same one for the same settings."""
    key = section["key"]
    words = [name, key["size"], f"{key['num_layers']}x{key['batch_size']}", key["precision"], key["device"]]
    words += [word for word in ("autocast", "compile") if key[word]]
    words += [f"{value:g}" for value in key["dropout"]] if key["dropout"] != [0.0, 0.1] else []
    return f"{'-'.join(words)}.png"


def section_cases(section: Mapping) -> list[Case]:
    """The cases that a section has rows of."""
    return list(dict.fromkeys(Case(row["mode"], row["dropout"]) for row in section["rows"]))


def rows_of(section: Mapping, case: Case) -> list[dict]:
    """A section's rows of one case."""
    return [row for row in section["rows"] if (row["mode"], row["dropout"]) == (case.mode, case.dropout)]


def format_document(sections: Sequence[Mapping], name: str) -> str:
    """All sections as Markdown."""
    lines = [
        "# Speed and memory against length",
        "",
        "Sequence classification by encoders of the same width, depth, heads and feed-forward width, each made for "
        "the length, on the same random tokens without padding. A training step is forward pass, backward pass and "
        "AdamW's update; inference is a forward pass in evaluation mode. Memory is measured for each model alone: "
        "gradients, the optimizer's state and what the passes keep, without the weights.",
        "",
        *(
            f"- {MODELS[model]}: {NOTES[model]}"
            for model in MODELS
            if model in NOTES and _is_measured(sections, model)
        ),
        "",
    ]
    for section in sections:
        lines += format_section(section, name)
    return "\n".join(lines)


def _is_measured(sections: Sequence[Mapping], model: str) -> bool:
    return any(row["model"] == model for section in sections for row in section["rows"])


def format_section(section: Mapping, name: str) -> list[str]:
    """The lines of one section: for each case a table of speed, of memory, and of what operations would give."""
    title = section_title(section)
    plan = section["plan"]
    baseline = MODELS[plan["baseline"]]
    lines = [f"## {title}", ""]
    if not section["finished"]:
        lines += ["Unfinished: what is missing has not been measured yet.", ""]
    lines += busy_machine_warning(section)
    for case in section_cases(section):
        rows = rows_of(section, case)
        lines += [
            f"### {case.title}",
            "",
            f"Steps per second, and in brackets the multiple of {baseline}'s speed: medians over {plan['rounds']} "
            "interleaved rounds, of the ratio in a round.",
            "",
            *format_table(rows, lambda row: f"{_digits(1000 / row['step_time_ms'])}{_multiple(row)}"),
            "",
            "Peak memory of a step beyond the model's weights, MiB.",
            "",
            *format_table(rows, lambda row: f"{row['peak_memory_mib']:,.0f}"),
            "",
            f"Multiple of {baseline}'s speed by the clock / by processor time / expected from counted multiply-adds.",
            "",
            *format_table(rows, partial(_comparison, rows=rows, baseline=plan["baseline"])),
            "",
        ]
    lines += [
        f"![Time and memory against length: {title}]({picture_name(section, name)})",
        "",
        format_origin("benchmark.py", section["environment"], section["commits"]),
        "",
    ]
    return lines


def busy_machine_warning(section: Mapping) -> list[str]:
    """A paragraph if the steps had to wait for other programs, which makes ratios by the clock a matter of luck."""
    measured = [row for row in section["rows"] if row["reason"] is None]
    if section["key"]["device"] != "cpu" or not measured:
        return []
    threads = section["environment"]["threads"]
    share = statistics.median(row["step_cpu_time_ms"] / row["step_time_ms"] / threads for row in measured)
    if share > 0.8:
        return []
    return [
        f"The threads of a step computed during {100 * share:.0f} % of its time by the clock: they waited for one "
        "another or for other programs. Ratios of processor time are the ones to read.",
        "",
    ]


def format_table(rows: Sequence[Mapping], cell: Callable[[Mapping], str]) -> list[str]:
    """A table of models (rows) and lengths (columns); where nothing was measured the cell says why."""
    lengths = sorted({row["length"] for row in rows})
    lines = [f"| model | {' | '.join(f'{length:,}' for length in lengths)} |", "|---" * (len(lengths) + 1) + "|"]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {row["length"]: row for row in rows if row["model"] == model}
        cells = [own[n]["reason"] or cell(own[n]) if n in own else "" for n in lengths]
        lines.append(f"| {MODELS[model]} | {' | '.join(cells)} |")
    return lines


def _multiple(row: Mapping) -> str:
    return "" if row["speed_ratio"] is None else f" ({row['speed_ratio']:.2f})"


def _comparison(row: Mapping, rows: Sequence[Mapping], baseline: str) -> str:
    other = next(entry for entry in rows if entry["model"] == baseline and entry["length"] == row["length"])
    measured = [row["speed_ratio"], row["cpu_speed_ratio"], other["multiply_adds"] / row["multiply_adds"]]
    return " / ".join("-" if value is None else f"{value:.2f}" for value in measured)


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-4 else f"{value:.7f}"


if __name__ == "__main__":
    run_script(main)
