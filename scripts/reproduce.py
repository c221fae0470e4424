"""
Reproduce a table: run its rows, each at its best learning rate and with several seeds, and write what they reach.

    python scripts/reproduce.py pretraining --train_file a.txt b.txt --validation_file c.txt
    python scripts/reproduce.py improvements --train_file a.txt b.txt --validation_file c.txt
    python scripts/reproduce.py glue --train_file a.txt b.txt --validation_file c.txt --data_dir glue
    python scripts/reproduce.py authorship --train_file 'novels/train/*.txt' --test_file 'novels/test/*.txt'
    python scripts/reproduce.py forecasting_etth1 --data_dir series

NAME.md, NAME.json and pictures go to --results_dir. Started again it goes on where it was cut short, and tables on the
same data share the runs that they have in common. It starts every run itself, on several GPUs with accelerate launch.
"""

import glob
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from experiments.arguments import UserError, flag_values, parse_command, recipe_to_flags, run_script
from experiments.comparisons.execution import run_stages
from experiments.comparisons.report import write_table
from experiments.comparisons.stages import ComparisonArguments, Table
from experiments.comparisons.tables import TABLES
from experiments.comparisons.text_tables import TEXT
from experiments.results import ResultsArguments, check_writable
from experiments.runs import Run, execute_runs
from experiments.text.corpus import CorpusArguments


ARGUMENTS = (ComparisonArguments, CorpusArguments, ResultsArguments)


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("reproduce.py starts its runs itself: start it once, and say how with --launcher.")
    argv = sys.argv[1:]
    is_named = bool(argv) and not argv[0].startswith("-")
    command = parse_command(ARGUMENTS, __doc__, argv=["--table", *argv] if is_named else argv)
    arguments, _, results = command.groups
    if arguments.table not in TABLES:
        raise UserError(f"There is no table {arguments.table}; the tables are {', '.join(TABLES)}.")
    table = TABLES[arguments.table].with_arguments(arguments)
    taken = {flag for stage in table.stages for flag in stage.data}
    known = {flag for other in TABLES.values() for stage in other.stages for flag in stage.data}
    given = {name: value for name, value in command.given.items() if name in known}
    if not given.keys() <= taken:
        raise UserError(f"The table {arguments.table} takes no --{' and no --'.join(sorted(given.keys() - taken))}.")
    if lacking := sorted({flag for stage in table.stages for flag in stage.needs} - given.keys()):
        raise UserError(f"The table {arguments.table} needs --{' and --'.join(lacking)}.")
    if "vocab_size" in command.given and "tokenizer_name" not in taken:
        raise UserError(f"The table {arguments.table} trains no tokenizer; leave --vocab_size out.")
    check_files(given)
    check_flags(table)
    check_writable(results.results_dir)
    tokenizer = train_tokenizer(table, given, arguments) if "tokenizer_name" in taken else {}
    outcomes = run_stages(table.stages, given | tokenizer, arguments)
    print(write_table(arguments.table, table, outcomes, given, arguments.seeds, Path(results.results_dir)))


def check_files(given: Mapping[str, Any]) -> None:
    """Raise a `UserError` for data of later stages that are not there, before hours of earlier ones."""
    for name in ("data_dir", "test_file"):
        value = given.get(name) or []
        for path in [value] if isinstance(value, str) else value:
            path = os.path.expanduser(path)  # a name with brackets is no pattern where it is there
            if not os.path.exists(path) and not glob.glob(path, recursive=True):
                raise UserError(f"--{name} {path}: there is no such file or folder; check the path.")


def check_flags(table: Table) -> None:
    """Raise a `UserError` for a flag of all runs that the script of a later stage would refuse."""
    given = flag_values(table.stages[0].run_flags)
    scripts = {stage.script for stage in table.stages}
    for script in sorted(scripts) if given and len(scripts) > 1 else ():
        groups = importlib.import_module(script.removesuffix(".py")).ARGUMENTS
        known = {each.name for group in groups for each in fields(group)}
        if unknown := [name for name in given if not {name, name.removeprefix("no_")} & known]:
            raise UserError(f"--run_flags: the table runs {script}, too, which has no --{unknown[0]}; leave it out.")


def train_tokenizer(table: Table, given: dict[str, Any], arguments: ComparisonArguments) -> dict[str, str]:
    """Train the tokenizer of the pre-trainings in a folder, unless it is there; returns the flag that names it."""
    folder = Path(arguments.output_dir) / table.stages[0].folder / f"tokenizer-{arguments.vocab_size}"
    text = recipe_to_flags({flag: value for flag, value in given.items() if flag in TEXT})
    # A finished tokenizer of this text is not trained again; that of another one gives way.
    flags = ("--vocab_size", str(arguments.vocab_size), *text, "--overwrite")
    execute_runs([Run("train_tokenizer.py", flags, folder, "tokenizer.json")], [sys.executable], "tokenizer")
    return {"tokenizer_name": str(folder)}


if __name__ == "__main__":
    run_script(main)
