"""
Measure time and memory of a step against the length of the inputs, for SKTformer and other encoders alike.

    python scripts/benchmark.py --size lra --batch_size 4 --lengths 1024 4096
    python scripts/benchmark.py --size tiny --tokens_per_batch 65536 --lengths 128 1024 8192
    python scripts/benchmark.py --size tiny mini --made_for 512 --lengths 128 --padded
    python scripts/benchmark.py --profile --size lra --batch_size 4 --lengths 1024 4096
    python scripts/benchmark.py --count

The first compares models at each length, of the same width, depth, heads, batch, precision and data, each made for
the length. The next three take SKTformer alone: lengths at the same number of tokens, inputs shorter than those that
the model was made for, and the parts of a training step. Steps are timed in interleaved rounds, memory is measured for
each alone. --count measures nothing, and needs no GPU for what it says about GPUs: operators, bytes and multiply-adds
of one layer. NAME.md, .json and pictures go to --results_dir after all that is timed together; started again with the
same flags, it measures what is missing. --merge keeps what the files hold of other settings.
"""

from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from experiments.arguments import UserError, parse_args, run_script
from experiments.benchmark.cells import Cell, MeasurementArguments, measure_cells
from experiments.benchmark.counts import COUNTED, count_layers
from experiments.benchmark.models import MODELS, SIZES, Setting, Workload, build_sizes
from experiments.benchmark.profile import profile_steps
from experiments.benchmark.report import COMPARISONS, open_section, save_section


LENGTHS = [512, 1024, 2048, 3072, 4096, 8192, 16384]


@dataclass
class BenchmarkArguments(MeasurementArguments):
    """What is measured and where it goes."""

    models: list[str] | None = field(
        default=None,
        metadata={"choices": list(MODELS), "help": "By default all, or sktformer where it is alone; five to --count."},
    )
    lengths: list[int] | None = field(
        default=None, metadata={"help": f"Tokens in an input, by default {LENGTHS}; 512 and 4,096 to --count."}
    )
    batch_size: int | None = field(default=None, metadata={"help": "Inputs in a batch, by default 32."})
    tokens_per_batch: int | None = field(
        default=None,
        metadata={"help": "Tokens in a batch of every length, instead of --batch_size; 16,384 to --count."},
    )
    made_for: int | None = field(
        default=None,
        metadata={"help": "Tokens that the model was made for, beside one made for each of the shorter --lengths."},
    )
    padded: bool = field(default=False, metadata={"help": "With --made_for: inputs padded to the length."})
    size: list[str] | None = field(
        default=None,
        metadata={"choices": list(SIZES), "help": "Sizes of all models: the paper's for LRA, or base to --count."},
    )
    num_layers: int | None = field(default=None, metadata={"help": "Layers, if not those of --size."})
    dropout: list[float] | None = field(
        default=None, metadata={"help": "Dropouts of every model in training, by default 0 and 0.1; 0 to --count."}
    )
    precision: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None,
        metadata={"help": "Type of the weights, or with --autocast of the products: float32; bfloat16 to --count."},
    )
    autocast: bool = field(default=False, metadata={"help": "Keep float32 weights and cast where PyTorch does."})
    modes: list[str] = field(
        default_factory=lambda: ["training", "inference"], metadata={"choices": ["training", "inference"]}
    )
    baseline: str = field(default="bert-sdpa", metadata={"help": "The model that speeds are multiples of."})
    profile: bool = field(
        default=False, metadata={"help": "Measure the parts of SKTformer's training step at each length instead."}
    )
    count: bool = field(default=False, metadata={"help": "Count what one layer's training step does instead."})
    merge: bool = field(default=False, metadata={"help": "Keep what the results hold of other settings."})
    results_name: str | None = field(
        default=None, metadata={"help": f"Name of the results' files, by default {', '.join(COMPARISONS)}."}
    )
    results_dir: str = field(default="runs/benchmark", metadata={"help": "Folder of the results."})

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = self.comparison not in ("speed", "counts")
        defaults: dict[str, Any] = {
            **{"models": ["sktformer"] if alone else list(MODELS), "lengths": LENGTHS, "batch_size": 32},
            **{"size": ["lra"], "dropout": [0.0, 0.1], "precision": "float32"},
        }
        if self.count:
            defaults |= {"models": COUNTED, "lengths": [512, 4096], "size": ["base"], "dropout": [0.0]}
            defaults |= {"precision": "bfloat16"} | ({} if self.batch_size else {"tokens_per_batch": 16384})
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.profile or self.count:
            self.modes, self.dropout = ["training"], self.dropout[-1:]
        self.lengths = sorted(set(self.lengths))
        self.models, self.size, self.dropout = (
            list(dict.fromkeys(values)) for values in (self.models, self.size, self.dropout)
        )
        self._check(alone)
        depths = {build_sizes(size, self.num_layers).num_hidden_layers for size in self.size}
        self.num_layers = depths.pop() if len(depths) == 1 and not self.count else None
        self.device = "meta" if self.count else self.device

    def _check(self, alone: bool) -> None:
        if sum(map(bool, (self.tokens_per_batch and not self.count, self.made_for, self.profile, self.count))) > 1:
            raise UserError(
                "--tokens_per_batch, --made_for, --profile and --count measure different things; give one of them."
            )
        if alone and self.models != ["sktformer"]:
            raise UserError(f"--models {' '.join(self.models)}: this measures sktformer alone; leave the flag out.")
        if self.comparison == "speed" and self.baseline not in self.models:
            raise UserError(
                f"--baseline {self.baseline} is none of --models {' '.join(self.models)}; choose one of them."
            )
        for flag in ("batch_size", "tokens_per_batch", "made_for", "num_layers"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise UserError(f"--{flag} {value} must be at least 1.")
        # Samples, windows and patches of the models do not fit into fewer tokens.
        if self.lengths[0] < 16:
            raise UserError(f"--lengths {' '.join(map(str, self.lengths))}: each must be at least 16 tokens.")
        odd = [str(length) for length in self.lengths if (self.tokens_per_batch or 0) % length]
        if odd:
            raise UserError(f"--tokens_per_batch {self.tokens_per_batch} is no multiple of --lengths {' '.join(odd)}.")
        if self.made_for and self.lengths[-1] >= self.made_for:
            raise UserError(f"--made_for {self.made_for} must be more than --lengths, which has {self.lengths[-1]}.")
        if self.padded and not self.made_for:
            raise UserError("--padded: models are compared without padding; give --made_for with it.")
        if not all(0 <= value < 1 for value in self.dropout):
            raise UserError(f"--dropout {' '.join(map(str, self.dropout))}: each must be at least 0 and below 1.")
        if (self.profile or self.count) and (self.autocast or self.compile):
            raise UserError("--profile and --count take no --autocast and no --compile; leave them out.")
        if self.autocast and self.precision == "float32":
            raise UserError("--autocast casts to a smaller type; give --precision bfloat16 or float16 with it.")

    @property
    def comparison(self) -> str:
        """One of [`COMPARISONS`]."""
        if self.profile or self.count:
            return "speed_profile" if self.profile else "counts"
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
        for length, (mode, dropout), size, model in product(self.lengths, cases, self.size, self.models):
            batch_size = self.tokens_per_batch // length if self.tokens_per_batch else self.batch_size
            own = max(512, length) if self.count else length
            for positions in (own, self.made_for) if self.made_for else (own,):
                workload = Workload(model, size, length, positions, batch_size, mode, dropout)
                together = (size, mode, dropout, None if self.comparison == "scaling" else length)
                groups.setdefault(together, []).append(workload)
        baseline = self.baseline if self.comparison == "speed" else self.models[0]
        return [
            Cell(tuple(group), next(workload for workload in group if workload.model == baseline))
            for group in groups.values()
        ]


def main() -> None:
    (arguments,) = parse_args([BenchmarkArguments], description=__doc__)
    path = Path(arguments.results_dir) / (arguments.results_name or arguments.comparison)
    section = open_section({**asdict(arguments), "comparison": arguments.comparison}, path, arguments.merge)
    cells, setting = arguments.cells, arguments.setting
    if arguments.profile:
        workloads = [cell.baseline for cell in cells]
        section["profiles"] = profile_steps(workloads, setting, arguments.rounds, arguments.warmup)
    elif arguments.count:
        section["rows"] = count_layers([workload for cell in cells for workload in cell.workloads], setting)
    else:
        for rows in measure_cells(cells, setting, arguments, section["rows"]):
            section["rows"] += rows
            save_section(section, path)
    section["finished"] = True
    print(save_section(section, path))


if __name__ == "__main__":
    run_script(main)
