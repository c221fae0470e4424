"""Results of the speed benchmark: sections that survive interruption, and what is written of them."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.arguments import UserError, one_line
from experiments.benchmark.cells import RATIOS
from experiments.benchmark.counts import LEGEND, format_counts
from experiments.benchmark.models import MODELS, SIZES
from experiments.benchmark.published import format_published
from experiments.plots import plot_benchmark
from experiments.results import command_line, describe_environment, format_origin, format_table, write_results


_STEPS = (
    "A training step is forward pass, backward pass and AdamW's update; inference is a forward pass in evaluation "
    "mode. Memory is measured for each model alone: gradients, the optimizer's state and what the passes keep, "
    "without the weights."
)
# What is compared, by the name that its files have: title and first words.
COMPARISONS = {
    "speed": (
        "Speed and memory against length",
        "Sequence classification by encoders of the same width, depth, heads and feed-forward width, each made for "
        f"the length, on the same random tokens without padding. {_STEPS}",
    ),
    "scaling": (
        "Step time and memory against length, for the same number of tokens",
        "Sequence classification by SKTformer, each model made for its length. Every batch holds the same number of "
        "tokens, so that ratios to the shortest length are those of a token; positions, and with them the optimizer's "
        f"part, are as many as the length. {_STEPS}",
    ),
    "short_inputs": (
        "What short inputs cost a model made for longer ones",
        "Sequence classification by SKTformer on inputs shorter than it was made for, as in fine-tuning from a "
        "checkpoint of longer texts, beside the same model made for their length, to which ratios are. Where the "
        "transform is longer than the inputs need, the equal result is computed at a shorter length. Padded batches "
        f"hold inputs of a quarter of the length and more. {_STEPS}",
    ),
    "counts": ("What a layer asks of a device", LEGEND),
}
# The flags that tell sections of a file apart, and those that say nothing about what is measured.
_SETTINGS = (
    *("comparison", "size", "num_layers", "batch_size", "tokens_per_batch", "made_for", "padded"),
    *("precision", "compile", "device", "dropout"),
)
_FREE_FLAGS = ("merge", "results_dir")
_PICTURED = ("speed", "scaling")
# What ratios are to, where it is no other model.
_BASELINES = {"scaling": "the shortest length's", "short_inputs": "the model of that length's"}


def open_section(flags: Mapping[str, Any], path: Path, merge: bool) -> dict[str, Any]:
    """
    The part of the results `path` that belongs to a command: an unfinished one of the same flags, or a new one.

    `flags` are all flags, and `comparison`, one of [`COMPARISONS`]. Raises a `UserError` if the file holds sections of
    other settings and `merge` does not ask to keep them, or lengths, models or modes of these settings that the flags
    leave out: they would be lost.
    """
    # What is counted is laid out on no device, and counted by a processor.
    environment = describe_environment("cpu" if flags["device"] == "meta" else flags["device"])
    section = {
        "key": {name: flags[name] for name in _SETTINGS},
        "plan": {name: value for name, value in flags.items() if name not in _FREE_FLAGS},
        **{"command": command_line(), "environment": environment, "commits": [environment["commit"]]},
        **{"finished": False, "rows": []},
    }
    earlier = load_sections(path)
    others = [section_title(entry) for entry in earlier if entry["key"] != section["key"]]
    if others and not merge:
        remedy = "pass --merge to keep them beside these, or choose another --results_dir"
        raise UserError(f"{path}.json holds results of other settings ({others[0]}); {remedy}.")
    for entry in (entry for entry in earlier if entry["key"] == section["key"]):
        for name in ("lengths", "models", "modes"):
            measured = dict.fromkeys(row[name.removesuffix("s")] for row in entry["rows"])
            if lost := [str(value) for value in measured if value not in flags[name]]:
                remedy = "name them too, or choose another --results_dir"
                raise UserError(f"{path}.json holds results of --{name} {' '.join(lost)} of these settings; {remedy}.")
        same_machine = {**entry["environment"], "commit": None} == {**environment, "commit": None}
        if entry["plan"] == section["plan"] and same_machine and not entry["finished"]:
            return entry | {"commits": list(dict.fromkeys([*entry["commits"], environment["commit"]]))}
    return section


def load_sections(path: Path) -> list[dict[str, Any]]:
    """What the results hold already."""
    path = path.with_name(f"{path.name}.json")
    try:
        sections = json.loads(path.read_text(encoding="utf-8"))["sections"] if path.is_file() else []
        return [section | {"key": {name: section["key"][name] for name in _SETTINGS}} for section in sections]
    except (ValueError, KeyError, TypeError) as error:
        what = f"{path} holds no results of this script ({one_line(error)})"
        raise UserError(f"{what}; choose another --results_dir.") from error


def save_section(section: Mapping, path: Path) -> str:
    """
    Put a section into the results, in the place of an earlier one of its settings; returns their Markdown.

    An earlier one that is finished stays behind it, and keeps its picture, until this one is finished.
    """
    earlier: list[Mapping] = list(load_sections(path))
    place = next((n for n, entry in enumerate(earlier) if entry["key"] == section["key"]), len(earlier))
    finished = [entry for entry in earlier if entry["key"] == section["key"] and entry["finished"]]
    kept = [] if section["finished"] else finished
    sections = [*earlier[:place], section, *kept, *(e for e in earlier[place:] if e["key"] != section["key"])]
    if section["key"]["comparison"] in _PICTURED and not kept:
        curves: dict[str, dict[str, list[tuple[int, float, float | None]]]] = {}
        for case, rows in section_groups(section).items():
            models = curves.setdefault(case, {})
            for row in rows:
                points = models.setdefault(MODELS[row["model"]].title, [])
                if row["reason"] is None:
                    memory = row["peak_memory_mib"] if _has_memory(section) else None
                    points.append((row["length"], row["step_time_ms"], memory))
        plot_benchmark(curves, path.with_name(picture_name(section, path.name)), section_title(section))
    return write_results(path, {"sections": sections}, format_document(sections, path.name))


def section_title(section: Mapping) -> str:
    """The settings of a section in a few words."""
    key = section["key"]
    depth, tokens, dropout = key["num_layers"], key["tokens_per_batch"], key["dropout"]
    words = [
        " and ".join(SIZES[size] for size in key["size"]),
        f"{depth} layer{'s' if depth > 1 else ''}" if depth else "",
        f"{tokens:,} tokens" if tokens else f"batch {key['batch_size']}",
        f"made for {key['made_for']:,} tokens" if key["made_for"] else "",
        "padded" if key["padded"] else "",
        key["precision"],
        "compiled" if key["compile"] else "",
        {"cpu": "CPU", "cuda": "GPU"}.get(key["device"], ""),
        f"dropout {', '.join(map('{:g}'.format, dropout))}" if dropout != [0.0, 0.1] else "",
    ]
    return ", ".join(filter(None, words))


def picture_name(section: Mapping, name: str) -> str:
    """The file of a section's picture, the same one for the same settings."""
    key = section["key"]
    batch = f"{key['tokens_per_batch']}tokens" if key["tokens_per_batch"] else key["batch_size"]
    dropout = key["dropout"] if key["dropout"] != [0.0, 0.1] else []
    words = [name, *key["size"], f"{key['num_layers'] or ''}x{batch}", key["precision"], key["device"]]
    return "-".join([*words, *["compile"] * key["compile"], *map("{:g}".format, dropout)]) + ".png"


def section_groups(section: Mapping) -> dict[str, list[dict]]:
    """A section's rows by what a table holds: one case, and one size unless sizes stand beside each other."""
    groups: dict[str, list[dict]] = {}
    for row in section["rows"]:
        title = "Inference" if row["mode"] == "inference" else f"Training, dropout {row['dropout']:g}"
        if len(section["key"]["size"]) > 1:
            title = f"{SIZES[row['size']]}: {title}"
        groups.setdefault(title, []).append(row)
    return groups


def format_document(sections: Sequence[Mapping], name: str) -> list[str]:
    """All sections as paragraphs of Markdown."""
    comparisons = list(dict.fromkeys(section["key"]["comparison"] for section in sections))
    measured = {row["model"] for section in sections for row in section["rows"]}
    notes = [f"- {model.title}: {model.note}" for name, model in MODELS.items() if name in measured and model.note]
    titles, texts = zip(*(COMPARISONS[comparison] for comparison in comparisons), strict=True)
    parts = [part for section in sections for part in format_section(section, name)]
    if any(section["key"]["comparison"] == "speed" and "lra" in section["key"]["size"] for section in sections):
        parts += format_published()
    return [f"# {titles[0]}", *texts, *(["\n".join(notes)] if notes else []), *parts]


def format_section(section: Mapping, name: str) -> list[str]:
    """The paragraphs of one section, down to the command that measured it."""
    comparison, title = section["key"]["comparison"], section_title(section)
    paragraphs = [f"## {title}"]
    if not section["finished"]:
        paragraphs.append("Unfinished: what is missing has not been measured yet.")
    if comparison == "counts":
        paragraphs += format_counts(section["rows"])
    else:
        paragraphs += busy_machine_warning(section)
        for group, rows in section_groups(section).items():
            paragraphs += [f"### {group}", *_format_speeds(rows, section)]
    if comparison in _PICTURED:
        what = "Time and memory" if _has_memory(section) else "Time"
        paragraphs.append(f"![{what} against length: {title}]({picture_name(section, name)})")
    environments = [section["environment"] | {"commit": commit} for commit in section["commits"]]
    return [*paragraphs, format_origin(environments, section["command"])]


def busy_machine_warning(section: Mapping) -> list[str]:
    """A paragraph if the steps had to wait for other programs, which makes ratios by the clock a matter of luck."""
    rows = [row for row in section["rows"] if row["reason"] is None]
    shares = [row["step_cpu_time_ms"] / row["step_time_ms"] / section["environment"]["threads"] for row in rows]
    if section["key"]["device"] != "cpu" or not shares or statistics.median(shares) > 0.8:
        return []
    return [
        f"The threads of a step computed during {statistics.median(shares):.0%} of its time by the clock: they waited "
        "for one another or for other programs. Ratios of processor time are the ones to read."
    ]


def _format_speeds(rows: Sequence[Mapping], section: Mapping) -> list[str]:
    """Tables of models and lengths: of speed, of memory, and of what operations would give."""
    plan, comparison = section["plan"], section["key"]["comparison"]
    baseline = _BASELINES.get(comparison) or f"{MODELS[plan['baseline']].title}'s"
    return [
        f"Steps per second, and in brackets the multiple of {baseline} speed: medians over {_describe_rounds(rows)} "
        "interleaved rounds, of the ratio in a round, and the least and the greatest of these.",
        _model_table(rows, lambda row: _digits(1000 / row["step_time_ms"]) + _show_ratio(row)),
        *_format_memory(rows, section, baseline),
        f"Multiple of {baseline} speed by the clock / by processor time / expected from counted multiply-adds.",
        _model_table(rows, lambda row: " / ".join(_show(row[ratio]) or "-" for ratio in RATIOS[:3])),
    ]


def _describe_rounds(rows: Sequence[Mapping]) -> str:
    """In how many rounds the steps were timed: slow ones in fewer."""
    fewest, most = (of((row["rounds"] for row in rows if row["reason"] is None), default=0) for of in (min, max))
    return f"{most}" if fewest == most else f"{fewest} to {most}"


def _has_memory(section: Mapping) -> bool:
    """Whether it is measured, see [`~cells.probe_step`]."""
    return not section["key"]["compile"] or section["key"]["device"] != "cpu"


def _format_memory(rows: Sequence[Mapping], section: Mapping, baseline: str) -> list[str]:
    if not _has_memory(section):
        return ["Memory is not measured: what a compiler keeps in a process cannot be told from what the step needs."]
    return [
        f"Peak memory of a step beyond the model's weights, MiB, and in brackets the multiple of {baseline}.",
        _model_table(rows, lambda row: f"{row['peak_memory_mib']:,.0f}" + _show(row["memory_ratio"], " ({:.2f})")),
    ]


def _model_table(rows: Sequence[Mapping], cell: Callable[[Mapping], str]) -> str:
    """A table of models (rows) and lengths (columns); where nothing was measured the cell says why."""
    lengths = sorted({row["length"] for row in rows})
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        made_for = f", made for {row['positions']:,}" if row["positions"] != row["length"] else ""
        table.setdefault(MODELS[row["model"]].title + made_for, {})[row["length"]] = row["reason"] or cell(row)
    cells = [[title, *(of_model.get(length, "") for length in lengths)] for title, of_model in table.items()]
    return "\n".join(format_table(["model", *(f"{length:,}" for length in lengths)], cells))


def _show(value: float | None, form: str = "{:.2f}") -> str:
    return "" if value is None else form.format(value)


def _show_ratio(row: Mapping) -> str:
    """A row's multiple of the baseline's speed, and between what it lay."""
    low, high = map("{:.2f}".format, row.get("speed_ratio_range", [0, 0]))
    return _show(row["speed_ratio"], " ({:.2f})" if low == high else f" ({{:.2f}}, {low}-{high})")


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-4 else f"{value:.7f}"
