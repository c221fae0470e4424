"""A table as stages of runs: its rows, its cases, and what is measured and drawn of them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any, Literal

from experiments.arguments import (
    CONFIGURATION,
    UserError,
    flag,
    flag_values,
    merge_recipes,
    read_recipes,
    require_at_least,
    split_words,
    without_rivals,
)
from experiments.run_folder import METRICS_FILE
from experiments.runs import read_runs


SEARCH_SEED = 100  # chooses learning rates and is counted in no table
# Flags that name what is read.
DATA = ("train_file", "validation_file", "test_file", "data_dir", "dataset_name", "datasets")
_TIMED_STEPS = 40  # that tell how long a step takes


@dataclass
class ComparisonArguments:
    """How a table is run."""

    table: str = flag(MISSING, "The table; written first, it needs no flag.")
    data_dir: str | None = flag(None, "Local folder of the tasks' data.")
    test_file: list[str] | None = flag(None, "Labelled texts by which nothing is chosen.")
    seeds: list[int] = flag([0, 1, 2], "Every row is run with each.")
    rows: list[str] | None = flag(None, "Names of the rows that are compared, and alone written, by default all.")
    learning_rates: list[float] | None = flag(None, "Every row gets the best of these, by default of the table's.")
    search_steps: int | None = flag(None, "Steps that choose it, by default the table's.")
    vocab_size: int = flag(4096, "Size of the tokenizer that all pre-trainings share.")
    minutes: float | None = flag(None, "Of tables of equal time: what a run has, by default the table's.")
    run_flags: str = flag("", "Further flags of all training runs, in quotes.")
    parallel_runs: int = flag(1, "Runs at once, which share the cores; steps are timed one run after another.")
    launcher: str | None = flag(None, "Starts runs: by default python, on several GPUs accelerate launch. In quotes.")
    output_dir: str = flag("runs/reproduce", "Folder of the runs, shared by all tables.")

    def __post_init__(self) -> None:
        if len({*self.seeds, SEARCH_SEED}) <= len(self.seeds):
            hint = f"give each once; {SEARCH_SEED} is the seed that chooses learning rates"
            raise UserError(f"--seeds {' '.join(map(str, self.seeds))}: {hint}.")
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise UserError(f"--seeds {' '.join(map(str, self.seeds))}: each must lie between 0 and {2**32 - 1}.")
        require_at_least(1, self, "search_steps", "parallel_runs")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UserError(f"--minutes is {self.minutes:g}; it must be above 0.")


@dataclass(frozen=True)
class Measure:
    """What a row is measured by: a column for each case."""

    title: str
    key: str  # in the metrics of a run
    best: Literal["lowest", "highest"] | None = None  # what is a cost or a setting has none, and no spread
    format: str = ".3f"
    factor: float = 1.0  # times what the metrics say
    pooled: bool = False  # one column for all cases, with the median: for times
    # Rows that are not run: their names, and their keys in the metrics of the others.
    baselines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Case:
    """What every row is run on: a task, a horizon, a budget."""

    title: str
    name: str = ""  # in the names of folders
    flags: tuple[str, ...] = ()
    max_steps: int | None = None  # where no recipe says it
    minutes: float | None = None  # in place of steps: as many as a row takes in this time by a short run of its own

    @property
    def key(self) -> str:
        budget = f"{self.minutes:g}min" if self.minutes else self.max_steps
        return "-".join(map(str, filter(None, (self.name, budget))))

    def timed(self, threads: str = "") -> "Case":
        """The short run that tells how long a step takes with so many threads, and is not measured on the way."""
        name = "-".join(filter(None, (self.name, "timed", threads and f"{threads}threads")))
        flags = (*self.flags, "--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false")
        return replace(self, name=name, flags=flags, max_steps=_TIMED_STEPS, minutes=None)

    def in_steps(self, step_time: float) -> "Case":
        """The same with the steps that fit into its minutes, where one takes so many milliseconds."""
        return replace(self, max_steps=max(1, round(60_000 * (self.minutes or 0) / step_time)))


@dataclass(frozen=True)
class Curve:
    """What is drawn of the history of runs."""

    title: str = "evaluation loss"
    key: str = "eval_loss"  # in entries of the history
    label: str = "loss (nats per masked token)"
    factor: float = 1.0  # times what they say
    against: Literal["step", "minutes of training", "trillion multiply-adds"] = "step"
    # Curves that are not run: their names, and where the metrics of the others have their values by step.
    baselines: tuple[tuple[str, str], ...] = ()

    def points(self, metrics: Mapping[str, Any]) -> list[tuple[float, float]]:
        """Of one run, in order; minutes are steps times what one took. None where that was not measured."""
        found = {e["step"]: self.factor * e[self.key] for e in metrics["history"] if self.key in e}
        scale = 1.0
        if self.against == "minutes of training":
            scale = metrics.get("step_time_ms", 0.0) / 60_000
        elif self.against == "trillion multiply-adds":
            scale = metrics.get("step_multiply_adds", 0.0) / 1e12
        return [(scale * step, value) for step, value in sorted(found.items()) if scale]


@dataclass(frozen=True)
class Stage:
    """Runs of one script: what all have in common, and what is measured."""

    folder: str  # below --output_dir; stages of several tables with the same folder share their runs
    script: str
    runs: str  # the rows, a file below configuration/runs
    recipes: tuple[str, ...]  # below configuration
    data: tuple[str, ...]  # the flags of data that the script takes
    cases: tuple[Case, ...]
    measures: tuple[Measure, ...]
    needs: tuple[str, ...] = ()  # those without which it would fail behind earlier stages
    result: str = METRICS_FILE  # in the folder of a run; {case} stands for the name of the case
    learning_rates: tuple[float, ...] = ()  # each row that does not say its own gets the best of these
    search_steps: int | None = None  # that choose it by their evaluation loss, by default as many as are compared
    rate_case: int | None = None  # the index of the case that chooses it for all, by default each its own
    has_mean: bool = False  # whether a column has the mean of the last measure over the cases
    label: str = "score (%)"  # of that measure in a picture of scores
    only: tuple[str, ...] | None = None  # the names of the rows that are compared, where not all are
    run_flags: tuple[str, ...] = ()  # further ones of all runs
    timed_flags: tuple[str, ...] = ()  # behind all others, of the short runs that tell how long a step takes
    floors: tuple[str, ...] = ()  # rows that need no training: the table says which others are no better, and where
    # What is drawn: scores by case, where there is a mean of them; else scores of the first measures by row, as many
    # as this says; else these curves, for each case.
    drawn_by_row: int = 0
    curves: tuple[Curve, ...] = (Curve(),)

    def recipe(self) -> dict[str, Any]:
        """The flags of the recipes and of all runs, of which the last one wins as on a command line."""
        merged: dict[str, Any] = {}
        given = flag_values(self.run_flags).items()
        further = {name: True if value is None else int(value) if value.isdigit() else value for name, value in given}
        recipes = read_recipes(str(CONFIGURATION / path) for path in self.recipes)
        for name, flags in (*recipes.items(), ("--run_flags", further)):
            merged = merge_recipes(without_rivals(merged, name, flags), flags)
        return merged

    def counts_passes(self) -> bool:
        """Whether recipes, which may be those of single rows, say how long runs are."""
        of_rows = read_recipes(word for row in self.rows().values() for word in row if word.endswith(".yaml"))
        return any("num_train_epochs" in flags for flags in (self.recipe(), *of_rows.values()))

    def choosing_case(self, case: Case) -> Case:
        """The case by which the learning rate of a case is chosen."""
        return case if self.rate_case is None else self.cases[self.rate_case]

    def rows(self) -> dict[str, tuple[str, ...]]:
        """The arguments of the rows by name; `{configuration}` is that folder, `{flag}` its value in the recipes."""
        values = {"configuration": CONFIGURATION, **self.recipe()}
        rows = read_runs(CONFIGURATION / "runs" / self.runs)
        kept = [name for name in rows if self.only is None or name in self.only]
        return {name: tuple(word.format_map(values) for word in rows[name]) for name in kept}


@dataclass(frozen=True)
class Table:
    """A table, whose rows are those of its last stage."""

    title: str
    text: str  # {0[flag]} stands for a flag in the recipes of the first stage, {data} for the names of the data
    stages: tuple[Stage, ...]
    # What has to be known to read it, as lines of Markdown: each alone, or behind the name of the row that it speaks
    # of, or the last word of their names, without which it is left out.
    notes: tuple[str | tuple[str, str], ...] = ()

    @property
    def minutes(self) -> float | None:
        """What a run of equal time has."""
        return next((case.minutes for stage in self.stages for case in stage.cases if case.minutes), None)

    def notes_on(self, rows: Iterable[str]) -> list[str]:
        """The notes that speak of all rows, or of one of these."""
        words = {word for row in rows for word in (row, row.rpartition(" ")[2])}
        noted = [(None, note) if isinstance(note, str) else note for note in self.notes]
        return [note for row, note in noted if row is None or row in words]

    def with_arguments(self, arguments: ComparisonArguments) -> "Table":
        """The same with what is asked for; a `UserError` for what would not hold for all of its runs."""
        run_flags = tuple(split_words("run_flags", arguments.run_flags))
        self._refuse(arguments, run_flags)
        stages = [replace(stage, run_flags=run_flags) for stage in self.stages]
        if arguments.rows is not None:
            known = stages[-1].rows()
            if lacking := [name for name in arguments.rows if name not in known]:
                raise UserError(f"The table has no row {', '.join(lacking)}; its rows are {', '.join(known)}.")
            stages[-1] = replace(stages[-1], only=tuple(arguments.rows))
        if arguments.minutes:
            if not self.minutes:
                raise UserError(f"--minutes: the table {arguments.table} is not of equal time; leave it out.")
            stages = [
                replace(s, cases=tuple(replace(c, minutes=c.minutes and arguments.minutes) for c in s.cases))
                for s in stages
            ]
        return replace(self, stages=tuple(stages))

    def _refuse(self, arguments: ComparisonArguments, run_flags: tuple[str, ...]) -> None:
        cases = [case for stage in self.stages for case in stage.cases]
        refused = {
            "output_dir": "--output_dir of this command says it",
            "seed": "--seeds of this command says it",
            "seeds": "a run is one model, and --seeds of this command says how often there is one",
            "search": "a run is one model",
            "gradient_accumulation_steps": "--global_batch_size says how many sequences a step has",
            "hub_token": "the table would show it; set the variable HF_TOKEN",
            "overwrite": "runs that are finished would be trained again; delete the folders of those that shall be",
            "run_name": "it is the row's",
            "recipe": "the table would not say what is in it; write its flags out",
            "context_length": "the table says it of every column",
            **dict.fromkeys(("model_type", "model_name_or_path"), "it is the row's"),
            "task_name": "the table is of its own",
            **dict.fromkeys(("do_train", "do_eval", "do_predict"), "the table says what is run"),
        }
        read = [flag for flag in DATA if any(flag in stage.data for stage in self.stages)]
        refused |= dict.fromkeys(read, "give it to this command itself, which says what was read")
        shared = {name for case in cases for name in flag_values(case.flags) if not name.startswith("per_device")}
        refused |= dict.fromkeys(sorted(shared), "the table says it of every column")
        if any("tokenizer_name" in stage.data for stage in self.stages):
            refused |= dict.fromkeys(
                ("tokenizer_name", "vocab_size"), "--vocab_size of this command says what all read"
            )
        if any(stage.learning_rates for stage in self.stages):
            refused["learning_rate"] = "each row has one of its own, of --learning_rates of this command"
        elif arguments.learning_rates or arguments.search_steps:
            what = "--learning_rates and --search_steps"
            raise UserError(f"The table {arguments.table} searches no learning rate; leave {what} out.")
        offered = max(len(stage.learning_rates) for stage in self.stages)
        if arguments.learning_rates and offered == 1:
            raise UserError(
                f"The table {arguments.table} says where its one learning rate is from; leave it as it is."
            )
        if arguments.search_steps and (len(arguments.learning_rates or ()) or offered) < 2:
            raise UserError("--search_steps: of one learning rate none is searched; leave it out.")
        if any(case.max_steps or case.minutes for case in cases):
            refused |= dict.fromkeys(("max_steps", "num_train_epochs"), "the table says how long its runs are")
        elif any(stage.counts_passes() for stage in self.stages):
            refused["max_steps"] = "the table counts passes, which --num_train_epochs changes"
        elif any("max_steps" in stage.recipe() for stage in self.stages):
            refused["num_train_epochs"] = "the table counts steps, which --max_steps changes"
            given = flag_values(run_flags).get("max_steps", "1") or ""
            if not given.isdigit() or int(given) < 1:
                raise UserError(f"--run_flags: --max_steps is {given}; give a whole number of steps, 1 or more.")
        for name in refused:
            if name in flag_values(run_flags):
                raise UserError(f"--run_flags {arguments.run_flags!r}: leave --{name} out; {refused[name]}.")
