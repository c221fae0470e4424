"""
Measure what fine-tuning on short texts costs from a checkpoint that was pre-trained on longer ones.

    python scripts/measure_fine_tuning.py

For each preset a model made for the long and one made for the short inputs train on the same short batches, with the
optimizer. Writes fine_tuning.md and .json into --results_dir.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from experiments.arguments import UserError, parse_args, run_script
from experiments.benchmark.measurement import median_ratio, time_interleaved
from experiments.results import describe_environment, format_origin, write_atomically, write_json
from modeling_sktformer import SKTformerForSequenceClassification, available_presets, load_preset


@dataclass
class FineTuningCostArguments:
    """What is measured."""

    presets: list[str] = field(
        default_factory=lambda: ["sktformer-tiny", "sktformer-mini", "sktformer-small"],
        metadata={"help": "Sizes of the model."},
    )
    length: int = field(default=128, metadata={"help": "Tokens in an input."})
    trained_length: int = field(default=512, metadata={"help": "Length that the checkpoint was made for."})
    batch_size: int = field(default=32, metadata={"help": "Inputs in a batch."})
    rounds: int = field(default=9, metadata={"help": "How often each model is timed."})
    results_dir: str = field(
        default=str(Path(__file__).parent.parent / "model_cards" / "results"),
        metadata={"help": "Folder of the table."},
    )

    def __post_init__(self) -> None:
        unknown = sorted(set(self.presets) - set(available_presets()))
        if unknown:
            raise UserError(f"--presets {', '.join(unknown)}: the presets are {', '.join(available_presets())}.")
        if not 0 < self.length <= self.trained_length:
            raise UserError(f"--length {self.length} must be at least 1 and at most --trained_length.")


def make_step(preset: str, num_positions: int, length: int, batch_size: int) -> Callable[[], None]:
    """A training step, on inputs of `length` tokens, of a model made for `num_positions`."""
    torch.manual_seed(0)
    model = SKTformerForSequenceClassification(load_preset(preset, max_position_embeddings=num_positions)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randint(model.config.vocab_size, (batch_size, length))
    # As the collator of a fine-tuning gives it, with padding up to the length.
    lengths = torch.randint(length // 4, length + 1, (batch_size, 1))
    mask = (torch.arange(length) < lengths).long()
    labels = torch.zeros(batch_size, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()

    return step


def main() -> None:
    (arguments,) = parse_args([FineTuningCostArguments], description=__doc__)
    rows = []
    for preset in arguments.presets:
        steps = {
            name: make_step(preset, positions, arguments.length, arguments.batch_size)
            for name, positions in (("short", arguments.length), ("long", arguments.trained_length))
        }
        times = time_interleaved(steps, arguments.rounds)
        rows.append(
            {
                "preset": preset,
                **{
                    f"{name}_step_time_ms": 1000 * statistics.median(entry["wall"] for entry in times[name])
                    for name in times
                },
                "time_ratio": median_ratio(times["long"], times["short"]),
                "cpu_time_ratio": median_ratio(times["long"], times["short"], "cpu"),
            }
        )
    results = {
        "length": arguments.length,
        "trained_length": arguments.trained_length,
        "batch_size": arguments.batch_size,
        "rounds": arguments.rounds,
        "environment": describe_environment(),
        "rows": rows,
    }
    folder = Path(arguments.results_dir)
    write_json(folder / "fine_tuning.json", results)
    write_atomically(folder / "fine_tuning.md", format_table(results))
    print((folder / "fine_tuning.md").read_text(encoding="utf-8"))


def format_table(results: dict) -> str:
    """The results as Markdown."""
    length, trained = results["length"], results["trained_length"]
    lines = [
        "# What fine-tuning on short inputs costs",
        "",
        f"A training step with the optimizer on {results['batch_size']} inputs padded to {length} tokens, float32: "
        f"from a checkpoint made for {trained} tokens against one made for {length}. Ratios are medians over "
        f"{results['rounds']} interleaved rounds of the ratio in a round. Where the transform is longer than the "
        "inputs need, the equal result is computed at a shorter length.",
        "",
        f"| preset | made for {length}, ms | made for {trained}, ms | ratio | ratio of processor times |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['preset']} | {row['short_step_time_ms']:.0f} | {row['long_step_time_ms']:.0f} "
            f"| {row['time_ratio']:.2f} | {row['cpu_time_ratio']:.2f} |"
        )
    environment = results["environment"]
    lines += ["", format_origin("measure_fine_tuning.py", environment, [environment["commit"]]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
