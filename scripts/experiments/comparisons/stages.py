"""A comparison as stages of runs: every row in every case, at its best learning rate, with every seed."""

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from experiments.arguments import (
    CONFIGURATION,
    UserError,
    flag,
    flag_values,
    join_overrides,
    load_recipe,
    recipe_to_flags,
    require_at_least,
    split_words,
)
from experiments.results import read_json
from experiments.run_folder import METRICS_FILE
from experiments.runs import Run, choose_launcher, execute_runs, read_runs


SEARCH_SEED = 100  # chooses learning rates and is counted in no table
_TIMED_STEPS = 100  # that tell how long a step takes


@dataclass
class ComparisonArguments:
    """How a table is run."""

    table: str = flag(MISSING, "The table; written first, it needs no flag.")
    data_dir: str | None = flag(None, "Local folder of the tasks' data.")
    test_file: list[str] | None = flag(None, "Labelled texts by which nothing is chosen.")
    seeds: list[int] = flag([0, 1, 2], "Every row is run with each.")
    rows: list[str] | None = flag(None, "Names of the rows that are compared, by default all of the table's.")
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

    def timed(self) -> "Case":
        """The short run that tells how long a step takes."""
        return replace(self, name="-".join(filter(None, (self.name, "timed"))), max_steps=_TIMED_STEPS, minutes=None)

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
        """Of one run, in order; minutes are steps times their median time. None where that was not measured."""
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
        for flags in (*(load_recipe(CONFIGURATION / path) for path in self.recipes), further):
            merged = merged | flags | join_overrides(merged, flags)
        return merged

    def choosing_case(self, case: Case) -> Case:
        """The case by which the learning rate of a case is chosen."""
        return case if self.rate_case is None else self.cases[self.rate_case]

    def rows(self) -> dict[str, tuple[str, ...]]:
        """
        The arguments of the rows by name; `{configuration}` is that folder, `{flag}` its value in the recipes.

        Raises a `UserError` if one is asked for that is not there.
        """
        values = {"configuration": CONFIGURATION, **self.recipe()}
        rows = read_runs(CONFIGURATION / "runs" / self.runs)
        if lacking := [name for name in self.only or () if name not in rows]:
            raise UserError(f"The table has no row {', '.join(lacking)}; its rows are {', '.join(rows)}.")
        kept = [name for name in rows if self.only is None or name in self.only]
        return {name: tuple(word.format_map(values) for word in rows[name]) for name in kept}


@dataclass(frozen=True)
class Table:
    """A table, whose rows are those of its last stage."""

    title: str
    text: str  # {0[flag]} stands for a flag in the recipes of the first stage, {data} for the names of the data
    stages: tuple[Stage, ...]
    notes: tuple[str, ...] = ()  # what has to be known to read it, as lines of Markdown

    @property
    def minutes(self) -> float | None:
        """What a run of equal time has."""
        return next((case.minutes for stage in self.stages for case in stage.cases if case.minutes), None)

    def with_arguments(self, arguments: ComparisonArguments) -> "Table":
        """The same with what is asked for; a `UserError` for what would not hold for all of its runs."""
        run_flags = tuple(split_words("run_flags", arguments.run_flags))
        self._refuse(arguments, set(flag_values(run_flags)))
        stages = [replace(stage, run_flags=run_flags) for stage in self.stages]
        if arguments.rows is not None:
            stages[-1] = replace(stages[-1], only=tuple(arguments.rows))
        if arguments.minutes:
            if not self.minutes:
                raise UserError(f"--minutes: the table {arguments.table} is not of equal time; leave it out.")
            stages = [
                replace(s, cases=tuple(replace(c, minutes=c.minutes and arguments.minutes) for c in s.cases))
                for s in stages
            ]
        return replace(self, stages=tuple(stages))

    def _refuse(self, arguments: ComparisonArguments, further: set[str]) -> None:
        cases = [case for stage in self.stages for case in stage.cases]
        refused = {
            "output_dir": "--output_dir of this command says it",
            "seed": "--seeds of this command says it",
            "seeds": "a run is one model, and --seeds of this command says how often there is one",
            "search": "a run is one model",
        }
        if any(stage.learning_rates for stage in self.stages):
            refused["learning_rate"] = "each row has one of its own, of --learning_rates of this command"
        elif arguments.learning_rates or arguments.search_steps:
            what = "--learning_rates and --search_steps"
            raise UserError(f"The table {arguments.table} searches no learning rate; leave {what} out.")
        if any(case.max_steps or case.minutes for case in cases):
            refused |= dict.fromkeys(("max_steps", "num_train_epochs"), "the table says how long its runs are")
        for name in refused:
            if name in further:
                raise UserError(f"--run_flags {arguments.run_flags!r}: leave --{name} out; {refused[name]}.")


@dataclass
class Outcome:
    """What a row has reached in a case."""

    rate: float | None  # the learning rate that was chosen
    search: dict[str, float | None] = field(default_factory=dict)  # what chose it, by rate; None if it diverged
    search_steps: int | None = None  # after which it was chosen, if not after a recipe's passes
    folders: list[Path] = field(default_factory=list)  # a checkpoint for each seed
    metrics: list[dict[str, Any]] = field(default_factory=list)  # for each seed


# By row and key of the case.
Outcomes: TypeAlias = dict[tuple[str, str], Outcome]


def start_of(row: Sequence[str]) -> str:
    """The checkpoint that a row starts from."""
    return flag_values(row).get("model_name_or_path") or ""


def run_stages(stages: Sequence[Stage], given: Mapping[str, Any], arguments: ComparisonArguments) -> list[Outcomes]:
    """
    Run what is not finished of a table, with the flags of data that were `given`.

    In a later stage `--model_name_or_path NAME` stands for the run of that row of the stage before with the same seed;
    rows that none starts from are not run. A row that names none starts from scratch. Raises a `UserError` if a run
    fails, a row diverges at every rate, or a row starts from one that is not there.
    """
    chosen: list[dict[str, tuple[str, ...]]] = []
    starts: set[str] = set()
    for stage in reversed(stages):
        rows = stage.rows()
        if not starts <= set(rows):
            lacking = f"{stage.runs} has no row {', '.join(sorted(starts - set(rows)))}"
            raise UserError(f"{lacking}: every --model_name_or_path must be one of {', '.join(rows)}.")
        chosen.append({name: row for name, row in rows.items() if not starts or name in starts})
        starts = {start_of(row) for row in chosen[-1].values()} - {""}
    if arguments.parallel_runs > 1:
        # For steps that are timed alone, too: with more threads than in training they would take less time.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // arguments.parallel_runs)))
    outcomes: list[Outcomes] = [{}]
    for stage, rows in zip(stages, reversed(chosen), strict=True):
        outcomes.append(_StageRuns(stage, rows, given, arguments, outcomes[-1]).run())
    return outcomes[1:]


@dataclass
class _StageRuns:
    stage: Stage
    rows: dict[str, tuple[str, ...]]
    given: Mapping[str, Any]
    arguments: ComparisonArguments
    earlier: Outcomes

    def run(self) -> Outcomes:
        """Choose learning rates; then run all rows with the first seed, all with the second, and so on."""
        choice = self.stage.learning_rates and (self.arguments.learning_rates or self.stage.learning_rates)
        own = {name: flag_values(row).get("learning_rate") for name, row in self.rows.items()}
        rates = {name: (float(rate),) if choice and rate else choice for name, rate in own.items()}
        cells = [(name, case) for case in self.stage.cases for name in self.rows]
        steps = self.arguments.search_steps or self.stage.search_steps
        chooses = {case: self.stage.choosing_case(case) for case in self.stage.cases}
        tried: dict[tuple[str, str], dict[float, Run]] = {}
        for name, case in cells:
            short = replace(chooses[case], max_steps=steps or chooses[case].max_steps, minutes=None)
            tried[name, case.key] = {rate: self.plan(name, short, rate) for rate in rates[name]}
        needed = [(name, case.key) for name, case in cells if len(rates[name]) > 1]
        if searches := [run for key in needed for run in tried[key].values()]:
            self.execute(searches, f"{self.stage.folder}, learning rates", "Training has diverged")
        outcomes = {key: _choose_rate(key[0], of_cell) for key, of_cell in tried.items()}
        for name, case in cells:
            outcomes[name, case.key].search_steps = steps or chooses[case].max_steps
        # A row that says its steps has no use for minutes.
        timed = [
            (name, case) for name, case in cells if case.minutes and "max_steps" not in flag_values(self.rows[name])
        ]
        times = self.time_steps({(name, case): outcomes[name, case.key].rate for name, case in timed})
        runs: dict[tuple[str, str, int], Run] = {}
        for seed, (name, case) in itertools.product(self.arguments.seeds, cells):
            of_length = case.in_steps(times[name, case.key][0]) if (name, case) in timed else case
            runs[name, case.key, seed] = self.plan(name, of_length, outcomes[name, case.key].rate, seed)
        self.execute(runs.values(), self.stage.folder)
        for (name, key, _), run in runs.items():
            outcomes[name, key].folders.append(run.result.parent)
            metrics = read_json(run.result)
            if (name, key) in times:
                # What chose the steps is what the table says, whatever ran beside the training.
                time, device = times[name, key]
                if device != (trained := metrics["environment"]["device"]):
                    remedy = f"choose another --output_dir, or delete {run.folder.parent}"
                    raise UserError(f"Steps of {name} were timed on {device} and taken on {trained}; {remedy}.")
                metrics["step_time_ms"] = time
            outcomes[name, key].metrics.append(metrics)
        return outcomes

    def time_steps(self, rates: Mapping[tuple[str, Case], float | None]) -> dict[tuple[str, str], tuple[float, str]]:
        """How many milliseconds a step takes and where, by row and key of the case: in short runs, one by one."""
        runs = {(name, case.key): self.plan(name, case.timed(), rate) for (name, case), rate in rates.items()}
        if runs:
            self.execute(runs.values(), f"{self.stage.folder}, times of steps", at_once=1)
        times: dict[tuple[str, str], tuple[float, str]] = {}
        for key, run in runs.items():
            metrics = read_json(run.result)
            if "step_time_ms" not in metrics:
                raise UserError(f"{run.folder} was cut short behind its last step, and measured no time; delete it.")
            times[key] = metrics["step_time_ms"], metrics["environment"]["device"]
        return times

    def plan(self, name: str, case: Case, rate: float | None, seed: int = SEARCH_SEED) -> Run:
        """One run of a row."""
        row, started_from = list(self.rows[name]), ""
        if self.earlier and start_of(row):
            start = next(outcome for (of, _), outcome in self.earlier.items() if of == start_of(row))
            first, *_ = seeds = self.arguments.seeds
            checkpoint = start.folders[seeds.index(seed) if seed in seeds else 0]
            row = [*_without_flag(row, "model_name_or_path"), "--model_name_or_path", str(checkpoint)]
            started_from = "" if seed in seeds else f"from-{first}"
        recipes = [str(CONFIGURATION / path) for path in self.stage.recipes]
        flags = ["--recipe", *recipes] if recipes else []
        flags += recipe_to_flags({flag: value for flag, value in self.given.items() if flag in self.stage.data})
        # A search is shorter than the runs that it is for.
        run_flags = _without_flag(self.stage.run_flags, "num_train_epochs" if case.max_steps else "")
        flags += [*case.flags, *run_flags, *row, "--seed", str(seed)]
        # Where both say it, the row would win, and the rows would differ in more than they say.
        flags += recipe_to_flags(join_overrides(flag_values(self.stage.run_flags), flag_values(row)))
        flags += [] if case.max_steps is None else ["--max_steps", str(case.max_steps)]
        flags += [] if rate is None else ["--learning_rate", f"{rate:g}"]
        words = [name, case.key, "" if rate is None else f"{rate:g}", str(seed), started_from]
        folder = Path(self.arguments.output_dir) / self.stage.folder / "-".join(filter(None, words))
        return Run(self.stage.script, tuple(flags), folder, self.stage.result.format(case=case.name))

    def execute(
        self, runs: Iterable[Run], title: str, tolerated: str | None = None, at_once: int | None = None
    ) -> None:
        launcher = choose_launcher(self.arguments.launcher)
        execute_runs(list(dict.fromkeys(runs)), launcher, title, tolerated, at_once or self.arguments.parallel_runs)


def _without_flag(flags: Sequence[str], name: str) -> list[str]:
    """Flags with their values, but for one."""
    kept, is_kept = [], True
    for word in flags:
        if word.startswith("--"):
            is_kept = word[2:].partition("=")[0].replace("-", "_") != name
        kept += [word] * is_kept
    return kept


def _choose_rate(name: str, tried: Mapping[float, Run]) -> Outcome:
    """The rate with the lowest evaluation loss; the only one, or none, where there is no choice."""
    if len(tried) < 2:
        return Outcome(next(iter(tried), None))
    found = {rate: read_json(run.result)["eval_loss"] for rate, run in tried.items() if run.result.is_file()}
    if not found:
        raise UserError(f"{name} diverges at every one of --learning_rates {' '.join(map(str, tried))}.")
    return Outcome(min(found, key=lambda rate: found[rate]), {f"{rate:g}": found.get(rate) for rate in tried})
