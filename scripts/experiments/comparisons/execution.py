"""Runs of a table, one stage after the other: learning rates, times of steps, and then every row with every seed."""

import hashlib
import itertools
import os
import statistics
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from transformers.hf_argparser import string_to_bool

from experiments.arguments import (
    CONFIGURATION,
    UserError,
    flag_values,
    join_overrides,
    load_recipe,
    recipe_to_flags,
)
from experiments.comparisons.stages import SEARCH_SEED, Case, ComparisonArguments, Stage
from experiments.parallel import available_cores
from experiments.results import read_json
from experiments.run_folder import ARGUMENTS_FILE
from experiments.runs import Run, choose_launcher, execute_runs


@dataclass
class Outcome:
    """What a row has reached in a case."""

    rate: float | None  # the learning rate that was chosen
    search: dict[str, float | None] = field(default_factory=dict)  # what chose it, by rate; None if it diverged
    search_steps: int | None = None  # after which it was chosen, if not after a recipe's passes
    step_times: list[float] = field(default_factory=list)  # milliseconds by round, where minutes are the budget
    timed_at: list[float] = field(default_factory=list)  # when a round of these ended, in seconds since the epoch
    folders: list[Path] = field(default_factory=list)  # a checkpoint for each seed
    metrics: list[dict[str, Any]] = field(default_factory=list)  # for each seed
    environments: list[dict[str, Any]] = field(default_factory=list)  # of what chose the rate and timed steps


# By row and key of the case.
Outcomes: TypeAlias = dict[tuple[str, str], Outcome]
# Likewise: milliseconds of a step, and the device and threads that it was measured with.
Times: TypeAlias = dict[tuple[str, str], tuple[float, str]]
# What decides no run, and would be said of all runs of a table.
_MEANS = ("bf16", "fp16", "tf32", "torch_compile", "activation_checkpointing", "num_threads")
_RENAMED = {"gradient_checkpointing": "activation_checkpointing"}  # names that transformers still takes
_TIMED_ROUNDS = 3  # in which steps are timed: a machine that slows down for a while does so for every row


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
    starts: set[str] | None = None  # that the stage behind has; of the last stage every row is run
    for stage in reversed(stages):
        rows = stage.rows()
        if starts is not None and not starts <= set(rows):
            lacking = f"{stage.runs} has no row {', '.join(sorted(starts - set(rows)))}"
            raise UserError(f"{lacking}: every --model_name_or_path must be one of {', '.join(rows)}.")
        chosen.append({name: row for name, row in rows.items() if starts is None or name in starts})
        starts = {start_of(row) for row in chosen[-1].values()} - {""}
    if arguments.parallel_runs > 1:
        # For steps that are timed alone, too: with more threads than in training they would take less time.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // arguments.parallel_runs)))
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

    @property
    def cells(self) -> list[tuple[str, Case]]:
        """Every row in every case."""
        return [(name, case) for case in self.stage.cases for name in self.rows]

    def run(self) -> Outcomes:
        """Choose learning rates, time steps where budgets are minutes, and run all rows with all seeds."""
        outcomes = self.choose_rates()
        times = self.time_steps(outcomes)
        self.run_seeds(outcomes, times)
        return outcomes

    def choose_rates(self) -> Outcomes:
        """What each row is run with in each case: the rate that its row says, or the best of several by short runs."""
        offered = self.stage.learning_rates and (self.arguments.learning_rates or self.stage.learning_rates)
        outcomes: Outcomes = {}
        tried: dict[tuple[str, str], dict[float, Run]] = {}
        for name, case in self.cells:
            own = flag_values(self.rows[name]).get("learning_rate")
            choosing = self.stage.choosing_case(case)
            steps = self.arguments.search_steps or self.stage.search_steps or choosing.max_steps
            short = replace(choosing, max_steps=steps, minutes=None)
            rates = (float(own),) if offered and own else offered
            tried[name, case.key] = {rate: self.plan(name, short, rate) for rate in rates}
            outcomes[name, case.key] = Outcome(next(iter(rates), None), search_steps=steps)
        searches = {key: runs for key, runs in tried.items() if len(runs) > 1}
        if searches:
            every = [run for runs in searches.values() for run in runs.values()]
            self.execute(every, f"{self.stage.folder}, learning rates", "Training has diverged")
        for (name, key), runs in searches.items():
            reached = {rate: read_json(run.result) for rate, run in runs.items() if run.result.is_file()}
            found = {rate: metrics["eval_loss"] for rate, metrics in reached.items()}
            outcomes[name, key].environments += [metrics["environment"] for metrics in reached.values()]
            if not found:
                raise UserError(f"{name} diverges at every one of --learning_rates {' '.join(map(str, runs))}.")
            outcomes[name, key].rate = min(found, key=found.__getitem__)
            outcomes[name, key].search = {f"{rate:g}": found.get(rate) for rate in runs}
        return outcomes

    def time_steps(self, outcomes: Outcomes) -> Times:
        """
        How long a step takes: the median of short runs, one by one, in rounds of all rows.

        In cases whose budget is minutes; a row that says its steps has no use for them.
        """
        threads = os.environ.get("OMP_NUM_THREADS", "")  # with others steps take another time
        runs = [
            (
                (name, case.key),
                self.plan(name, case.timed(threads), outcomes[name, case.key].rate, SEARCH_SEED + number),
            )
            for number in range(_TIMED_ROUNDS)
            for name, case in self.cells
            if case.minutes and "max_steps" not in flag_values(self.rows[name])
        ]
        if runs:
            timed = [replace(run, arguments=(*run.arguments, *self.stage.timed_flags)) for _, run in runs]
            self.execute(timed, f"{self.stage.folder}, times of steps", at_once=1)
        taken: list[tuple[str, str]] = []  # the row and what it was timed with
        for key, run in runs:
            metrics = read_json(run.result)
            if "step_time_ms" not in metrics:
                raise UserError(f"{run.folder} was cut short behind its last step, and measured no time; delete it.")
            outcomes[key].step_times.append(metrics["step_time_ms"])
            outcomes[key].environments.append(metrics["environment"])
            outcomes[key].timed_at.append(run.result.stat().st_mtime)
            taken.append((key[0], _means(metrics)))
        if len({means for _, means in taken}) > 1:
            found = ", ".join(f"{name} on {means}" for name, means in dict.fromkeys(taken))
            remedy = f"delete {runs[0][1].folder.parent}/*-timed-*, to have all of them timed here"
            raise UserError(f"Steps were timed by different means ({found}), which cannot be compared; {remedy}.")
        return {key: (statistics.median(outcomes[key].step_times), dict(taken)[key[0]]) for key, _ in runs}

    def run_seeds(self, outcomes: Outcomes, times: Times) -> None:
        """Run all rows with the first seed, all with the second, and so on, and note what they reach."""
        runs: dict[tuple[str, str, int], Run] = {}
        for seed, (name, case) in itertools.product(self.arguments.seeds, self.cells):
            key = name, case.key
            of_length = case.in_steps(times[key][0]) if key in times else case
            runs[*key, seed] = self.plan(name, of_length, outcomes[key].rate, seed)
        # Where budgets are minutes the first to end show whether steps take here what they took.
        first = [key for key in runs if key[:2] in times][: self.arguments.parallel_runs]
        for keys in filter(None, (first, [key for key in runs if key not in first])):
            self.execute([runs[key] for key in keys], self.stage.folder)
            self._check_times({key: runs[key] for key in keys}, times)
        for (name, case_key, _), run in runs.items():
            key, metrics = (name, case_key), read_json(run.result)
            if key in times:
                # What chose the steps is what the table says, whatever ran beside the training.
                metrics["step_time_ms"], _ = times[key]
            outcomes[key].folders.append(run.result.parent)
            outcomes[key].metrics.append(metrics)

    def _check_times(self, runs: Mapping[tuple[str, str, int], Run], times: Times) -> None:
        for (name, case_key, _), run in runs.items():
            if (name, case_key) in times:
                _, means = times[name, case_key]
                if means != (trained := _means(read_json(run.result))):
                    timed = f"{run.folder.parent}/*-timed-*, to have steps timed again"
                    remedy = f"choose another --output_dir, or delete {run.folder}, or {timed}"
                    raise UserError(f"Steps of {name} were timed on {means} and taken on {trained}; {remedy}.")

    def plan(self, name: str, case: Case, rate: float | None, seed: int = SEARCH_SEED) -> Run:
        """One run of a row."""
        row, started_from = list(self.rows[name]), ""
        if self.earlier and start_of(row):
            start = next(outcome for (of, _), outcome in self.earlier.items() if of == start_of(row))
            seeds = self.arguments.seeds
            checkpoint = start.folders[seeds.index(seed) if seed in seeds else 0]
            row = [*_without_flag(row, "model_name_or_path"), "--model_name_or_path", str(checkpoint)]
            # Another start, of another budget or rate, makes another run.
            path = checkpoint.relative_to(self.arguments.output_dir).as_posix()
            started_from = f"from-{hashlib.sha256(path.encode()).hexdigest()[:6]}"
        recipes = [str(CONFIGURATION / path) for path in self.stage.recipes]
        flags = ["--recipe", *recipes] if recipes else []
        flags += recipe_to_flags({flag: value for flag, value in self.given.items() if flag in self.stage.data})
        # A search is shorter than the runs that it is for.
        lengths = ("num_train_epochs", "max_steps") if case.max_steps else ()
        run_flags = _without_flag(self.stage.run_flags, *lengths)
        row = row if rate is None else _without_flag(row, "learning_rate")  # it stands at the end, whoever chose it
        flags += [*case.flags, *run_flags, *row, "--seed", str(seed)]
        # Where both say it, the row would win, and the rows would differ in more than they say.
        flags += recipe_to_flags(join_overrides(flag_values(self.stage.run_flags), flag_values(row)))
        flags += [] if case.max_steps is None else ["--max_steps", str(case.max_steps)]
        flags += [] if rate is None else ["--learning_rate", f"{rate:g}"]
        steps = f"{case.max_steps}steps" if case.minutes and case.max_steps else ""  # those that minutes have become
        words = [name, case.key, steps, "" if rate is None else f"{rate:g}", str(seed), started_from]
        folder = Path(self.arguments.output_dir) / self.stage.folder / "-".join(filter(None, words))
        return Run(self.stage.script, tuple(flags), folder, self.stage.result.format(case=case.name))

    def execute(
        self, runs: Iterable[Run], title: str, tolerated: str | None = None, at_once: int | None = None
    ) -> None:
        launcher, different = choose_launcher(self.arguments.launcher), list(dict.fromkeys(runs))
        for run in different:
            _check_means(run, self.stage.recipe())
        execute_runs(different, launcher, title, tolerated, at_once or self.arguments.parallel_runs)


def _check_means(run: Run, recipe: Mapping[str, Any]) -> None:
    """Raise a `UserError` for a finished run that was computed by other means than the table would say of it."""
    recorded = run.result.with_name(ARGUMENTS_FILE)
    if run.result.is_file() and recorded.is_file():
        was, recipe, flags = map(_under_new_names, (load_recipe(recorded), recipe, flag_values(run.arguments)))
        # What a recipe says of precision is not taken, and not recorded, where the device has none.
        now = {name: value for name, value in recipe.items() if name in was} | flags
        for name in _MEANS:
            there, here = (_word(given[name]) if name in given else "false" for given in (was, now))
            if there != here:
                remedy = f"choose another --output_dir, or delete {run.result.parent}"
                raise UserError(f"{run.result.parent} was run with --{name} {there}, and not {here}; {remedy}.")


def _under_new_names(given: Mapping[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in given.items()}


def _word(value: Any) -> str:
    """A flag's value as a recipe and a command line say it alike; a flag without one is set."""
    text = "true" if value is None else str(value).lower()
    with suppress(ArgumentTypeError):
        text = str(string_to_bool(text)).lower()
    return text


def _means(metrics: Mapping[str, Any]) -> str:
    """What the steps of a run were taken with; a processor's threads, which do not matter where a GPU computes."""
    environment = metrics["environment"]
    threads = "" if environment.get("is_gpu") else f", {environment['threads']} thread(s)"
    return f"{environment['device']}{threads}"


def _without_flag(flags: Sequence[str], *names: str) -> list[str]:
    """Flags with their values, but for those of these names."""
    kept, is_kept = [], True
    for word in flags:
        if word.startswith("--"):
            is_kept = word[2:].partition("=")[0].replace("-", "_") not in names
        kept += [word] * is_kept
    return kept
