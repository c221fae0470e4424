"""
Measure time and memory of a step against the length of the inputs, for SKTformer and other encoders alike.

    python scripts/benchmark.py --size lra --batch_size 4 --lengths 1024 4096
    python scripts/benchmark.py --size tiny --tokens_per_batch 65536 --lengths 128 1024 8192
    python scripts/benchmark.py --size tiny mini --made_for 512 --lengths 128 --padded
    python scripts/benchmark.py --profile --size lra --batch_size 4 --lengths 1024 4096

The first compares models at each length, of the same width, depth, heads, batch, precision and data, each made for
the length. The others take SKTformer alone: lengths at the same number of tokens, inputs shorter than those that the
model was made for, and the parts of a training step. Steps are timed in interleaved rounds, memory is measured for
each alone. NAME.md, .json and pictures go to --results_dir after all that is timed together; started again with the
same flags, it measures what is missing. --merge keeps what the files hold of other settings.
"""

from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from experiments.arguments import UserError, parse_args, run_script
from experiments.benchmark.cells import Cell, MeasurementArguments, measure_cells
from experiments.benchmark.models import MODELS, SIZES, Setting, Workload, build_sizes
from experiments.benchmark.profile import profile_steps
from experiments.benchmark.report import COMPARISONS, open_section, save_section


@dataclass
class BenchmarkArguments(MeasurementArguments):
    """What is measured and where it goes."""

    models: list[str] | None = field(
        default=None,
        metadata={"help": f"Any of {', '.join(MODELS)}. By default all, or sktformer where it is alone."},
    )
    lengths: list[int] = field(
        default_factory=lambda: [512, 1024, 2048, 3072, 4096, 8192, 16384], metadata={"help": "Tokens in an input."}
    )
    batch_size: int = field(default=32, metadata={"help": "Inputs in a batch."})
    tokens_per_batch: int | None = field(
        default=None, metadata={"help": "Tokens in a batch of every length, instead of --batch_size."}
    )
    made_for: int | None = field(
        default=None,
        metadata={"help": "Tokens that the model was made for, beside one made for each of the shorter --lengths."},
    )
    padded: bool = field(default=False, metadata={"help": "With --made_for: inputs padded to the length."})
    size: list[str] = field(
        default_factory=lambda: ["lra"],
        metadata={"help": f"Sizes of all models, the paper's for LRA or a preset's: {', '.join(SIZES)}."},
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
    profile: bool = field(
        default=False, metadata={"help": "Measure the parts of SKTformer's training step at each length instead."}
    )
    merge: bool = field(default=False, metadata={"help": "Keep what the results hold of other settings."})
    results_name: str | None = field(
        default=None, metadata={"help": f"Name of the results' files, by default {', '.join(COMPARISONS)}."}
    )
    results_dir: str = field(default="runs/benchmark", metadata={"help": "Folder of the results."})

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = self.comparison != "speed"
        if self.profile:
            self.modes, self.dropout = ["training"], self.dropout[-1:]
        self.models = list(dict.fromkeys(self.models or (["sktformer"] if alone else MODELS)))
        self.lengths, self.size = sorted(set(self.lengths)), list(dict.fromkeys(self.size))
        self.dropout = list(dict.fromkeys(self.dropout))
        for flag, given, known in (
            ("--models", self.models, MODELS),
            ("--modes", self.modes, ("training", "inference")),
            ("--size", self.size, SIZES),
        ):
            unknown = [name for name in given if name not in known]
            if unknown or not given:
                raise UserError(f"{flag} {' '.join(unknown)}: choose from {', '.join(known)}.")
        if sum(map(bool, (self.tokens_per_batch, self.made_for, self.profile))) > 1:
            raise UserError("--tokens_per_batch, --made_for and --profile measure different things; give one of them.")
        if alone and self.models != ["sktformer"]:
            raise UserError(f"--models {' '.join(self.models)}: this measures sktformer alone; leave the flag out.")
        if not alone and self.baseline not in self.models:
            raise UserError(
                f"--baseline {self.baseline} is none of --models {' '.join(self.models)}; choose one of them."
            )
        for flag in ("batch_size", "tokens_per_batch", "made_for", "num_layers"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise UserError(f"--{flag} {value} must be at least 1.")
        # Samples, windows and patches of the models do not fit into fewer tokens.
        if not self.lengths or self.lengths[0] < 16:
            raise UserError(f"--lengths {' '.join(map(str, self.lengths))}: each must be at least 16 tokens.")
        odd = [str(length) for length in self.lengths if (self.tokens_per_batch or 0) % length]
        if odd:
            raise UserError(f"--tokens_per_batch {self.tokens_per_batch} is no multiple of --lengths {' '.join(odd)}.")
        if self.made_for and self.lengths[-1] >= self.made_for:
            raise UserError(f"--made_for {self.made_for} must be more than --lengths, which has {self.lengths[-1]}.")
        if self.padded and not self.made_for:
            raise UserError("--padded: models are compared without padding; give --made_for with it.")
        if not self.dropout or not all(0 <= value < 1 for value in self.dropout):
            raise UserError(f"--dropout {' '.join(map(str, self.dropout))}: each must be at least 0 and below 1.")
        if self.profile and (self.autocast or self.compile):
            raise UserError("--profile runs the parts one by one, without --autocast and --compile; leave them out.")
        if self.autocast and self.precision == "float32":
            raise UserError("--autocast casts to a smaller type; give --precision bfloat16 or float16 with it.")
        depths = {build_sizes(size, self.num_layers).num_hidden_layers for size in self.size}
        self.num_layers = depths.pop() if len(depths) == 1 else None

    @property
    def comparison(self) -> str:
        """One of [`COMPARISONS`]."""
        if self.profile:
            return "speed_profile"
        return "scaling" if self.tokens_per_batch else "short_inputs" if self.made_for else "speed"

    @property
    def setting(self) -> Setting:
        """What all steps have in common."""
        return Setting(self.num_layers, self.precision, self.autocast, self.compile, self.device, self.padded)

    @property
    def cells(self) -> list[Cell]:
        """What is timed in turn, and in which order: lengths or models of one case."""
        cases = [("training", value) for value in self.dropout] if "training" in self.modes else []
        cases += [("inference", 0.0)] if "inference" in self.modes else []  # which has no dropout
        groups: dict[tuple, list[Workload]] = {}
        for length, (mode, dropout), size, model in product(self.lengths, cases, self.size, self.models or []):
            batch_size = self.tokens_per_batch // length if self.tokens_per_batch else self.batch_size
            for positions in (length, self.made_for) if self.made_for else (length,):
                workload = Workload(model, size, length, positions, batch_size, mode, dropout)
                together = (size, mode, dropout, None if self.tokens_per_batch else length)
                groups.setdefault(together, []).append(workload)
        baseline = self.baseline if self.comparison == "speed" else "sktformer"
        return [
            Cell(tuple(group), next(workload for workload in group if workload.model == baseline))
            for group in groups.values()
        ]


def main() -> None:
    (arguments,) = parse_args([BenchmarkArguments], description=__doc__)
    path = Path(arguments.results_dir) / (arguments.results_name or arguments.comparison)
    section = open_section({**asdict(arguments), "comparison": arguments.comparison}, path, arguments.merge)
    if arguments.profile:
        workloads = [cell.baseline for cell in arguments.cells]
        section |= profile_steps(workloads, arguments.setting, arguments.rounds)
    else:
        for rows in measure_cells(arguments.cells, arguments.setting, arguments, section["rows"]):
            section["rows"] += rows
            save_section(section, path)
    section["finished"] = True
    save_section(section, path)
    print(Path(f"{path}.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_script(main)
