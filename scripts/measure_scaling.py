"""
Measure how step time and memory grow with the length of the sequences.

    python scripts/measure_scaling.py

For each length a model made for that length reads a batch of the same number of tokens, forward and backward, without
an optimizer. Writes scaling.md, .json and .png into --results_dir.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from experiments.arguments import parse_args, run_script
from experiments.benchmark.measurement import median_ratio, peak_memory, time_interleaved
from experiments.plots import plot_scaling
from experiments.results import describe_environment, format_origin, write_atomically, write_json
from modeling_sktformer import SKTformerForSequenceClassification, load_preset


@dataclass
class ScalingArguments:
    """What is measured."""

    preset: str = field(default="sktformer-tiny", metadata={"help": "Size of the model."})
    lengths: list[int] = field(
        default_factory=lambda: [128, 256, 512, 1024, 2048, 4096, 8192, 16384],
        metadata={"help": "Tokens in a sequence."},
    )
    tokens_per_batch: int = field(default=65536, metadata={"help": "Batch size times length."})
    rounds: int = field(default=7, metadata={"help": "How often each length is timed."})
    results_dir: str = field(
        default=str(Path(__file__).parent.parent / "model_cards" / "results"),
        metadata={"help": "Folder of the table."},
    )


def make_step(preset: str, length: int, tokens_per_batch: int) -> Callable[[], None]:
    """A training step without optimizer of a model made for `length` tokens."""
    torch.manual_seed(0)
    model = SKTformerForSequenceClassification(load_preset(preset, max_position_embeddings=length)).train()
    inputs = torch.randint(model.config.vocab_size, (tokens_per_batch // length, length))
    labels = torch.zeros(len(inputs), dtype=torch.long)

    def step() -> None:
        model.zero_grad()
        model(inputs, labels=labels).loss.backward()

    return step


def main() -> None:
    (arguments,) = parse_args([ScalingArguments], description=__doc__)
    names = {length: str(length) for length in arguments.lengths}
    memory = {
        length: peak_memory(make_step, arguments.preset, length, arguments.tokens_per_batch)
        for length in tqdm(arguments.lengths, desc="Memory", unit="length")
    }
    steps = {
        names[length]: make_step(arguments.preset, length, arguments.tokens_per_batch) for length in arguments.lengths
    }
    times = time_interleaved(steps, arguments.rounds)
    shortest = arguments.lengths[0]
    rows = [
        {
            "length": length,
            "batch_size": arguments.tokens_per_batch // length,
            "step_time_ms": 1000 * statistics.median(entry["wall"] for entry in times[names[length]]),
            "step_cpu_time_ms": 1000 * statistics.median(entry["cpu"] for entry in times[names[length]]),
            "time_ratio": median_ratio(times[names[length]], times[names[shortest]]),
            "cpu_time_ratio": median_ratio(times[names[length]], times[names[shortest]], "cpu"),
            "peak_memory_mib": memory[length] / 2**20,
            "memory_ratio": memory[length] / memory[shortest],
        }
        for length in arguments.lengths
    ]
    results = {
        "preset": arguments.preset,
        "tokens_per_batch": arguments.tokens_per_batch,
        "rounds": arguments.rounds,
        "environment": describe_environment(),
        "rows": rows,
    }
    folder = Path(arguments.results_dir)
    write_json(folder / "scaling.json", results)
    write_atomically(folder / "scaling.md", format_table(results))
    plot_scaling(rows, folder / "scaling.png", f"{arguments.preset}, {arguments.tokens_per_batch:,} tokens a step")
    print((folder / "scaling.md").read_text(encoding="utf-8"))


def format_table(results: dict) -> str:
    """The results as Markdown."""
    environment = results["environment"]
    shortest = results["rows"][0]["length"]
    lines = [
        "# Step time and memory against length",
        "",
        f"Forward and backward pass of `{results['preset']}` with a classification head and its dropout, each model "
        f"made for its length, {results['tokens_per_batch']:,} tokens in every batch, no optimizer, float32. Ratios "
        f"are to length {shortest}, for the same number of tokens: times are medians over {results['rounds']} "
        "interleaved rounds of the ratio in a round, memory is what the step adds to the resident size of a fresh "
        "process.",
        "",
        "| length | batch | step, ms | ratio | processor time, ms | ratio | peak memory, MiB | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['length']:,} | {row['batch_size']} | {row['step_time_ms']:.0f} | {row['time_ratio']:.2f} "
            f"| {row['step_cpu_time_ms']:.0f} | {row['cpu_time_ratio']:.2f} "
            f"| {row['peak_memory_mib']:.0f} | {row['memory_ratio']:.2f} |"
        )
    lines += [
        "",
        "![Step time and memory against length](scaling.png)",
        "",
        format_origin("measure_scaling.py", environment, [environment["commit"]]),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
