"""Command lines of the scripts: recipes (YAML files of flags) and errors that people can act on.

A recipe is a list of flags written as YAML. Recipes are read from left to right, flags on the command line come last,
and the last one wins:

    python scripts/pretrain_mlm.py --recipe configuration/pretrain/base.yaml --learning_rate 3e-4
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from transformers import HfArgumentParser


class UserError(ValueError):
    """A mistake of the person at the command line: one line that says what is wrong and what to do."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here the second one is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` stands twice (line {key_node.start_mark.line + 1})"
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_recipe(path: str | Path) -> dict[str, Any]:
    """
    Read one recipe.

    Args:
        path (`str` or `Path`):
            A YAML file whose keys are flags of a script, without the dashes.

    Returns:
        `dict`: flag to value, in the order of the file.

    Raises:
        UserError: if the file is missing, is no YAML mapping, holds a key twice or a key without a value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"The recipe {path} cannot be read ({error.strerror}); check the path after --recipe."
        ) from error
    try:
        recipe = yaml.load(text, Loader=_UniqueKeyLoader) or {}
    except yaml.YAMLError as error:
        raise UserError(f"The recipe {path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(recipe, dict):
        raise UserError(f"The recipe {path} must hold `flag: value` lines, not a {type(recipe).__name__}.")
    for key, value in recipe.items():
        if value is None:
            raise UserError(f"{path}: `{key}` is empty; leave the key out to keep its default.")
    return recipe


def recipe_to_flags(path: str | Path) -> list[str]:
    """Write the recipe at `path` as command-line flags; lists become several values, mappings become JSON."""
    flags = []
    for key, value in load_recipe(path).items():
        if isinstance(value, list):
            flags += [f"--{key}", *map(str, value)]
        else:
            flags.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the example commands of a description as they are written."""


class _Parser(HfArgumentParser):
    """Reports a bad flag as a `UserError`, so that every mistake reaches the terminal in the same form."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help for the flags.")


def parse_args(dataclass_types: Iterable[type], argv: Sequence[str] | None = None, description: str | None = None):
    """
    Parse recipes and flags into dataclasses.

    Args:
        dataclass_types (iterable of dataclass types):
            The groups of flags that the script takes, one dataclass each.
        argv (sequence of `str`, *optional*):
            The arguments, by default those of the process.
        description (`str`, *optional*):
            The first lines of `--help`.

    Returns:
        `tuple`: one instance for each type in `dataclass_types`.

    Raises:
        UserError: for an unknown flag or recipe key, a value of the wrong type, a missing recipe or a missing flag.
    """
    parser = _build_parser(dataclass_types, description)
    try:
        return parser.parse_args_into_dataclasses(_read_flags(parser, argv), look_for_args_file=False)
    except UserError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        # TrainingArguments and our own dataclasses check their fields against each other in `__post_init__`.
        raise UserError(one_line(error)) from error


def given_arguments(dataclass_types: Iterable[type], argv: Sequence[str] | None = None) -> dict[str, Any]:
    """
    What recipes and flags set, defaults left out: a recipe that gives the same arguments again.

    Args:
        dataclass_types (iterable of dataclass types): As for [`parse_args`].
        argv (sequence of `str`, *optional*): The arguments, by default those of the process.

    Returns:
        `dict`: flag to value.

    Raises:
        UserError: as [`parse_args`].
    """
    parser = _build_parser(dataclass_types)
    flags = _read_flags(parser, argv)
    names = {flag.split("=")[0] for flag in flags if flag.startswith("--")}
    values = vars(parser.parse_args(flags))
    return {a.dest: values[a.dest] for a in parser._actions if names & set(a.option_strings) and a.dest in values}


def _build_parser(dataclass_types: Iterable[type], description: str | None = None) -> _Parser:
    return _Parser(
        cast(Any, dataclass_types),
        allow_abbrev=False,
        description=description,
        formatter_class=_HelpFormatter,
        epilog="--recipe YAML ...: files of flags, read from left to right; flags on the command line come last.",
    )


def _read_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> list[str]:
    """The flags of the recipes that `argv` names, then its own."""
    recipes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipes.add_argument("--recipe", nargs="+", action="extend", default=[])
    known, flags = recipes.parse_known_args(sys.argv[1:] if argv is None else argv)
    names = {option.lstrip("-") for action in parser._actions for option in action.option_strings}
    for path in known.recipe:
        unknown = sorted(set(load_recipe(path)) - names)
        if unknown:
            raise UserError(f"{path}: no such flag: {', '.join(unknown)}. See --help for the flags.")
    return [flag for path in known.recipe for flag in recipe_to_flags(path)] + flags


def one_line(error: BaseException) -> str:
    """The message of a library's error without its line breaks, to put into a `UserError`."""
    return " ".join(str(error).split())


def run_script(main: Callable[[], None]) -> None:
    """Call `main`; a `UserError` ends the process with status 2 and its one line instead of a traceback."""
    try:
        main()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
