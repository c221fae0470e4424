"""
Measure time and memory of a step against the length of the inputs, for SKTformer and other encoders alike.

    python scripts/benchmark.py --size lra --batch_size 4 --lengths 1024 4096
    python scripts/benchmark.py --size tiny --tokens_per_batch 65536 --lengths 128 1024 8192
    python scripts/benchmark.py --size tiny mini --made_for 512 --lengths 128 --padded
    python scripts/benchmark.py --count

The first compares models at each length, of the same width, depth, heads, batch, precision and data, each made for
the length. The next two take SKTformer alone: lengths at the same number of tokens, and inputs shorter than those that
the model was made for. Steps are timed in interleaved rounds, memory is measured for each alone. --count measures
nothing and needs no GPU: it counts the operators, bytes and multiply-adds of one layer. NAME.md, .json and pictures go
to --results_dir after all that is timed together; started again with the same flags, it measures what is missing,
or all anew where nothing is, and keeps what is finished until then. --merge keeps what the files hold of other
settings.
"""

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from experiments.arguments import UserError, flag, parse_args, require_at_least, run_script
from experiments.benchmark import counts
from experiments.benchmark.cells import Cell, MeasurementArguments, measure_cells
from experiments.benchmark.models import MODELS, PRECISIONS, SIZES, Setting, Workload, build_sizes
from experiments.benchmark.report import open_section, save_section
from experiments.results import check_writable


MODES = ["training", "inference"]
_TIMING = ("rounds", "warmup", "time_limit_s", "compile", "device")  # flags that counting does not read
# What stands for flags that are not given.
DEFAULTS: dict[str, Any] = {
    **{"models": [name for name in MODELS if not name.startswith("sktformer-")], "size": ["lra"]},
    **{"lengths": [512, 1024, 2048, 3072, 4096, 8192, 16384]},
    **{"batch_size": 32, "dropout": [0.0, 0.1], "precision": "float32", "modes": MODES},
}


@dataclass
class BenchmarkArguments(MeasurementArguments):
    """What is measured and where it goes."""

    models: list[str] = flag([], "By default all but variants of sktformer; seven to --count.", MODELS)
    size: list[str] = flag([], "By default lra; base to --count.", SIZES)
    lengths: list[int] = flag([], "Tokens in an input, by default 512 to 16,384.")
    batch_size: int | None = flag(None, "Inputs in a batch, by default 32.")
    tokens_per_batch: int | None = flag(None, "Tokens in every batch instead.")
    made_for: int | None = flag(None, "Compare with a model made for so many tokens.")
    padded: bool = flag(False, "With --made_for: inputs padded to the length.")
    num_layers: int | None = flag(None, "Layers, if not those of --size.")
    dropout: list[float] = flag([], "In training, by default 0 and 0.1.")
    precision: str = flag("", "By default float32; bfloat16 to --count.", PRECISIONS)
    modes: list[str] = flag([], "By default both.", MODES)
    count: bool = flag(False, "Count what a layer's training step does.")
    merge: bool = flag(False, "Keep what the results hold of other settings.")
    results_dir: str = flag("runs/benchmark", "Folder of the results.")

    def __post_init__(self) -> None:
        self._check_comparison()
        super().__post_init__()
        require_at_least(1, self, "batch_size", "tokens_per_batch", "made_for", "num_layers")
        self._fill_in_defaults()
        self._check_lengths()
        if not all(0 <= value < 1 for value in self.dropout):
            raise UserError(f"--dropout {' '.join(map(str, self.dropout))}: each must be at least 0 and below 1.")
        depths = {build_sizes(size, self.num_layers).num_hidden_layers for size in self.size}
        self.num_layers = depths.pop() if len(depths) == 1 and not self.count else None

    def _check_comparison(self) -> None:
        """Refuse flags of different comparisons, and what a comparison takes no notice of."""
        if sum(map(bool, (self.tokens_per_batch and not self.count, self.made_for, self.count))) > 1:
            raise UserError("--tokens_per_batch, --made_for and --count measure different things; give one of them.")
        if self.tokens_per_batch and self.batch_size:
            raise UserError("--tokens_per_batch and --batch_size both say how large a batch is; give one of them.")
        if self.is_of_one_model and self.models not in ([], ["sktformer"]):
            raise UserError(f"--models {' '.join(self.models)}: this measures sktformer alone; leave the flag out.")
        if self.count and (self.modes or self.dropout[1:] or self.num_layers):
            unused = "--modes, --num_layers and more than one --dropout"
            raise UserError(f"--count is of a layer's training step; leave {unused} out.")
        timing = [name for name in _TIMING if getattr(self, name) != getattr(MeasurementArguments, name)]
        if self.count and timing:
            raise UserError(f"--{timing[0]}: --count times nothing; leave it out.")
        if self.modes == ["inference"] and any(self.dropout):
            raise UserError("--dropout: inference has none; leave it out, or add training to --modes.")
        if self.padded and not self.made_for:
            raise UserError("--padded: models are compared without padding; give --made_for with it.")

    def _fill_in_defaults(self) -> None:
        """Those of the comparison, for flags that are not given; values that are given twice count once."""
        of_comparison = counts.DEFAULTS if self.count else {"models": ["sktformer"]} if self.is_of_one_model else {}
        defaults = DEFAULTS | of_comparison
        if self.batch_size:
            defaults.pop("tokens_per_batch", None)
        for name, value in defaults.items():
            setattr(self, name, getattr(self, name) or value)
        if self.count:
            self.modes, self.dropout = ["training"], self.dropout[-1:]
        self.models, self.size = list(dict.fromkeys(self.models)), list(dict.fromkeys(self.size))
        self.lengths, self.dropout = sorted(set(self.lengths)), sorted(set(self.dropout))

    def _check_lengths(self) -> None:
        """Refuse lengths that the comparison cannot have."""
        # Samples, windows and patches of the models do not fit into fewer tokens.
        if self.lengths[0] < 16:
            raise UserError(f"--lengths {' '.join(map(str, self.lengths))}: each must be at least 16 tokens.")
        odd = [str(length) for length in self.lengths if (self.tokens_per_batch or 0) % length]
        if odd:
            what = f"--tokens_per_batch {self.tokens_per_batch} is no multiple of --lengths {' '.join(odd)}"
            raise UserError(f"{what}; give other ones{', or --batch_size' if self.count else ''}.")
        if self.made_for and self.lengths[-1] >= self.made_for:
            raise UserError(f"--made_for {self.made_for} must be more than --lengths, which has {self.lengths[-1]}.")

    @property
    def comparison(self) -> str:
        """Its name in [`~experiments.benchmark.report.COMPARISONS`]."""
        if self.count:
            return "counts"
        return "scaling" if self.tokens_per_batch else "short_inputs" if self.made_for else "speed"

    @property
    def is_of_one_model(self) -> bool:
        """Whether sktformer is compared with itself alone."""
        return self.comparison in ("scaling", "short_inputs")

    @property
    def setting(self) -> Setting:
        """What all steps have in common."""
        device = "meta" if self.count else self.device
        return Setting(self.num_layers, self.precision, self.compile, device, self.padded)

    @property
    def cells(self) -> list[Cell]:
        """What is timed in turn, and in which order: lengths or models of one case."""
        cases = [("training", value) for value in self.dropout] if "training" in self.modes else []
        cases += [("inference", 0.0)] if "inference" in self.modes else []  # which has no dropout
        groups: dict[tuple, list[Workload]] = {}
        for length, (mode, dropout), size, model in product(self.lengths, cases, self.size, self.models):
            batch_size = self.tokens_per_batch // length if self.tokens_per_batch else self.batch_size or 1
            own = max(512, length) if self.count else length
            for positions in (own, self.made_for) if self.made_for else (own,):
                workload = Workload(model, size, length, positions, batch_size, mode, dropout)
                together = (size, mode, dropout, None if self.comparison == "scaling" else length)
                groups.setdefault(together, []).append(workload)
        baseline = "bert-sdpa" if "bert-sdpa" in self.models else self.models[0]
        return [
            Cell(tuple(group), next(each for each in group if each.model == baseline)) for group in groups.values()
        ]


def main() -> None:
    (arguments,) = parse_args([BenchmarkArguments], description=__doc__)
    cells, setting = arguments.cells, arguments.setting
    path = Path(arguments.results_dir) / arguments.comparison
    plan = {"comparison": arguments.comparison, "device": setting.device, "baseline": cells[0].baseline.model}
    check_writable(arguments.results_dir)
    section = open_section(asdict(arguments) | plan, path, arguments.merge)
    workloads = [workload for cell in cells for workload in cell.workloads]
    if arguments.count:
        section["rows"] = counts.count_rows(workloads, setting)
    else:
        for rows in measure_cells(cells, setting, arguments, section["rows"]):
            section["rows"] += rows
            save_section(section, path)
    section["finished"] = True
    print(save_section(section, path))


if __name__ == "__main__":
    run_script(main)
