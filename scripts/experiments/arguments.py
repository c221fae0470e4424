"""Command lines of the scripts: recipes (YAML files of flags) and errors that people can act on.

A recipe is a list of flags written as YAML. Recipes are read from left to right, flags on the command line come last,
and the last one wins:

    python scripts/pretrain_mlm.py --recipe configuration/pretrain/base.yaml --learning_rate 3e-4

Where two flags contradict each other, as --max_steps and --num_train_epochs do, the later source wins too; in one and
the same source they are an error. `--config_overrides`, which sets single fields, adds to what earlier sources set, as
below `model_config` recipes do.
"""

import argparse
import errno
import json
import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import yaml
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging


ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / "configuration"

# Flags of which one makes the others meaningless.
RIVALS = (
    ("max_steps", "num_train_epochs"),
    *((name, "learning_rate_decay") for name in ("max_steps", "lr_scheduler_type", "warmup_steps")),
    ("global_batch_size", "gradient_accumulation_steps"),
    ("config_name", "model_name_or_path"),
)
_OVERRIDES, _FIELDS = "config_overrides", "model_config"
# Flags that name folders to write to.
_WRITTEN = ("output_dir", "results_dir", "cache_dir")
# Flags that name one folder or file, of whose ~ a shell knows nothing where it stands in a recipe or behind a =.
_PLACES = (
    *(*_WRITTEN, "data_dir", "data_file", "resume_from_checkpoint"),
    *("model_name_or_path", "config_name", "tokenizer_name", "mnli_checkpoint"),
)
# Types of numbers that need an accelerator: a recipe may ask for them and be used where there is none.
_PRECISIONS = ("bf16", "fp16")
# What libraries say where a disk is full, without the system's number for it; the last one is PyTorch.
_DISK_FULL = ("No space left", "unexpected pos")


class UserError(ValueError):
    """A mistake of the person at the command line: one line that says what is wrong and what to do."""


def flag(default: Any, help: str, choices: Iterable[str] = ()) -> Any:
    """A field of a dataclass of flags: its default (`MISSING`: it must be given), its line of --help, its choices."""
    made: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**made, metadata={"help": help} | ({"choices": list(choices)} if choices else {}))


def require_at_least(least: int, flags: Any, *names: str) -> None:
    """Raise a `UserError` if one of these fields of a dataclass of flags is given and is not at least `least`."""
    for name in names:
        if (value := getattr(flags, name)) is not None and not least <= value < math.inf:
            raise UserError(f"--{name} is {value}; it must be at least {least}.")


_BASE = "behind"  # the key of a recipe that names the one behind which it is read


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here the second one is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, str):
                problem = f"line {key_node.start_mark.line + 1} has a key that is no word"
                raise yaml.constructor.ConstructorError(None, None, problem)
            if key in seen:
                problem = f"the key `{key}` stands twice (line {key_node.start_mark.line + 1})"
                raise yaml.constructor.ConstructorError(None, None, problem)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_recipe(path: str | Path) -> dict[str, Any]:
    """The flags and values of a YAML file, in its order; a `UserError` if it is missing or holds anything else."""
    return {flag: value for flag, value in _read_recipe(path).items() if flag != _BASE}


def read_recipes(paths: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What recipes and those behind them say, each once, in the order in which the later ones win."""
    found: dict[Path, str] = {}
    for path in paths:
        found.pop(Path(path).resolve(), None)  # named itself it stands in its own place, and not behind another one
        found |= {place: each for each in recipes_behind(path) if (place := Path(each).resolve()) not in found}
    return {path: load_recipe(path) for path in found.values()}


def recipes_behind(path: str) -> list[str]:
    """A recipe and, before it, the one behind which it says that it is read, and so on."""
    found, base = [path], _read_recipe(path).get(_BASE)
    while base is not None:
        before = os.path.normpath(Path(found[0]).parent / str(base))
        if before in map(os.path.normpath, found):
            raise UserError(f"The recipe {path} is read behind itself; mend `{_BASE}` in {found[0]}.")
        found, base = [before, *found], _read_recipe(before).get(_BASE)
    return found


def _read_recipe(path: str | Path) -> dict[str, Any]:
    try:
        recipe = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeyLoader) or {}
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); check the path after --recipe"
        raise UserError(f"The recipe {path} {problem}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"The recipe {path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"The recipe {path} must hold `flag: value` lines, not a {type(recipe).__name__}.")
    if not isinstance(recipe.get(_OVERRIDES, ""), str):
        raise UserError(f"{path}: `{_OVERRIDES}` must be field=value,field=value.")
    for key, value in recipe.items():
        if value is None:
            raise UserError(f"{path}: `{key}` is empty; leave the key out to keep its default.")
    # As on the command line, where --max-steps is --max_steps.
    fields = {key.replace("-", "_"): value for key, value in recipe.items()}
    if len(fields) < len(recipe):
        raise UserError(f"{path}: a flag stands twice, with dashes and with underscores; remove one.")
    if isinstance(fields.get(_FIELDS), str):  # as a run records it
        with suppress(ValueError):
            fields[_FIELDS] = json.loads(fields[_FIELDS])
    return fields


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the example commands of a description as they are written."""


class _Parser(HfArgumentParser):
    """Reports a bad flag as a `UserError`, so that every mistake reaches the terminal in the same form."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help for the flags.")


@dataclass
class Command:
    """A parsed command line."""

    groups: tuple  # an instance for each type of flags
    given: dict[str, Any]  # what recipes and flags set: a recipe for the same arguments
    recipes: list[str]  # that were read
    notes: list[str] = field(default_factory=list)  # what was decided on the way and has to be said

    def asks_for(self, name: str) -> bool:
        """Whether a flag says it, or a recipe that is named on the command line, and not the default one."""
        typed = flag_values(sys.argv[1:])
        return name in (self.given if "recipe" in typed else typed)

    def paths(self) -> list[str]:
        """
        Whatever may name something on the disk that is read: recipes, and all words of all flags but the folders
        written to.
        """
        values = [value for group in self.groups for name, value in vars(group).items() if name not in _WRITTEN]
        words = [word for value in values for word in (value if isinstance(value, list) else [value])]
        return self.recipes + [word for word in words if isinstance(word, str)]


def parse_command(
    dataclass_types: Iterable[type],
    description: str | None = None,
    default_recipe: str | Path | None = None,
    quick_start: str | Path | None = None,
    argv: Sequence[str] | None = None,
    output_dir: str | None = None,
) -> Command:
    """
    Parse recipes and flags into dataclasses, one for each group of flags.

    `default_recipe` is read if the command line names no recipe, `quick_start` in its place if there is no word on the
    command line at all; `description` heads `--help`, and `output_dir` is the default of that flag. Raises a
    `UserError` for an unknown flag or recipe key, a value of the wrong type, flags that contradict each other, a
    missing recipe or a missing flag.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        cast(Any, dataclass_types),
        allow_abbrev=False,
        description=description,
        formatter_class=_HelpFormatter,
        epilog="--recipe YAML ...: files of flags, read from left to right; flags on the command line come last.",
    )
    if output_dir is not None:
        parser.set_defaults(output_dir=output_dir)
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--recipe", nargs="+", action="extend", default=[])
    known, flags = recipe_parser.parse_known_args(argv)
    default = quick_start if quick_start is not None and not argv else default_recipe
    recipes = read_recipes(map(str, known.recipe or ([] if default is None else [default])))
    actions = {option.lstrip("-"): action for action in parser._actions for option in action.option_strings}
    merged: dict[str, Any] = {}
    for path, recipe in recipes.items():
        if unknown := sorted(set(recipe) - actions.keys()):
            raise UserError(f"{path}: no such flag: {', '.join(unknown)}. See --help for the flags.")
        # To YAML `no` is false.
        is_no = {key for key, value in recipe.items() if value is False and "no" in (actions[key].choices or ())}
        said = recipe | dict.fromkeys(is_no, "no")
        merged = merge_recipes(without_rivals(merged, path, said), said)
    typed = flag_values(flags)
    merged, notes = without_rivals(merged, "The command line", typed), []
    counts = Counter(word.partition("=")[0].lstrip("-").replace("-", "_") for word in flags if word.startswith("--"))
    for name, count in counts.items():
        if count > 1 and name in actions and actions[name].nargs in ("+", "*"):
            notes.append(f"--{name} stands {count} times, of which the last counts; give all values behind one.")
    # A recipe with --use_cpu, as a run records it, means its number type.
    for key in () if torch.accelerator.is_available() or merged.get("use_cpu") else _PRECISIONS:
        if merged.pop(key, False) and key not in typed:
            notes.append(f"The recipe asks for {key}, which needs an accelerator: training in float32.")
    joined = join_overrides(merged, typed) or {name: typed[name] for name in (_OVERRIDES,) if typed.get(name)}
    flags = [*recipe_to_flags(merged), *flags, *recipe_to_flags(joined)]
    try:
        groups = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    except (ValueError, TypeError, ImportError) as error:
        # TrainingArguments and our own dataclasses check their fields against each other in `__post_init__`.
        raise UserError(one_line(error)) from error
    for group in groups:
        for name in _PLACES:
            if isinstance(value := getattr(group, name, None), str):
                setattr(group, name, os.path.expanduser(value))
    given_names = {flag.split("=")[0] for flag in flags if flag.startswith("--")}
    values = vars(parser.parse_args(flags))
    given = {a.dest: values[a.dest] for a in parser._actions if given_names & set(a.option_strings)}
    return Command(groups, given, list(recipes), notes)


def parse_args(dataclass_types: Iterable[type], argv: Sequence[str] | None = None, description: str | None = None):
    """The groups of [`parse_command`], without a default recipe."""
    return parse_command(dataclass_types, description, argv=argv).groups


def recipe_to_flags(recipe: dict[str, Any]) -> list[str]:
    """Write a recipe as command-line flags; lists become several values, mappings become JSON."""
    flags = []
    for key, value in recipe.items():
        if isinstance(value, list):
            flags += [f"--{key}", *map(str, value)]
        else:
            flags.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def split_words(flag: str, text: str) -> list[str]:
    """The words of a flag's value as a shell splits them; a `UserError` if a quotation does not end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"--{flag} {text!r} cannot be split into words ({one_line(error)}); mend it.") from error


def flag_values(flags: Sequence[str]) -> dict[str, str | None]:
    """
    The flags of a command line by their fields, with their (first) value, if any; the last of a repeated flag's, but
    all of `--config_overrides`.
    """
    values: dict[str, str | None] = {}
    for flag, following in zip(flags, [*flags[1:], "--"], strict=False):
        if flag.startswith("--"):
            name, _, value = flag[2:].partition("=")
            last = {name.replace("-", "_"): value or (None if following.startswith("--") else following)}
            values |= last | join_overrides(values, last)
    return values


def merge_recipes(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """What two recipes say, of which the later one wins, of a model field by field."""
    both = isinstance(earlier.get(_FIELDS), dict) and isinstance(later.get(_FIELDS), dict)
    fields = {_FIELDS: earlier[_FIELDS] | later[_FIELDS]} if both else {}
    return {**earlier, **later, **fields, **join_overrides(earlier, later)}


def join_overrides(earlier: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """`--config_overrides` of two sources, with the later one's values of fields that both have."""
    parts = [of[_OVERRIDES] for of in (earlier, source) if of.get(_OVERRIDES)]
    fields = {override.partition("=")[0]: override for part in parts for override in part.split(",") if override}
    return {_OVERRIDES: ",".join(fields.values())} if len(parts) == 2 else {}


def without_rivals(earlier: dict[str, Any], name: str, source: dict[str, Any]) -> dict[str, Any]:
    """What earlier sources say, without that which the source `name` contradicts."""
    contradicted: set[str] = set()
    for rivals in RIVALS:
        # Steps below 1 mean that epochs count.
        there = [key for key in rivals if key in source and (key != "max_steps" or not _is_below_one(source[key]))]
        if len(there) > 1:
            raise UserError(f"{name} gives --{' and --'.join(there)}, which contradict each other; give one.")
        contradicted |= set(rivals) - set(there) if there else set()
    return {key: value for key, value in earlier.items() if key not in contradicted}


def _is_below_one(steps: Any) -> bool:
    return re.fullmatch(r"-\d+|[-+]?0+", str(steps)) is not None


def one_line(error: BaseException) -> str:
    """The message of a library's error without its line breaks, to put into a `UserError`."""
    return " ".join(str(error).split())


@contextmanager
def explained(what: str, quiet: bool = False) -> Iterator[None]:
    """Say in one line what a library refuses; if `quiet`, without transformers' list of weights, checked here."""
    verbosity = transformers_logging.get_verbosity()
    if quiet:
        transformers_logging.set_verbosity_error()
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of all kinds, from what others have written or saved
        raise UserError(f"{what}: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def run_script(main: Callable[[], None]) -> None:
    """Call `main`; a `UserError`, a full disk or an interruption ends the process with one line and a status."""
    try:
        main()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # gloo now and then aborts a process that exits with it up
    except UserError as error:
        _exit(2, f"error: {error}")
    except KeyboardInterrupt:
        _exit(130, "interrupted; the same command goes on from what is finished.")
    except Exception as error:
        is_full = getattr(error, "errno", None) == errno.ENOSPC or any(sign in str(error) for sign in _DISK_FULL)
        if not is_full:
            raise
        _exit(2, "error: the disk is full; make room, and the same command goes on from what is finished.")


def _exit(status: int, message: str) -> NoReturn:
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)
