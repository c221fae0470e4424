"""ListOps of Long Range Arena: nested operations on lists of digits, whose value is the class (0 to 9)."""

import contextlib
import itertools
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
from tqdm import tqdm

from experiments.arguments import UserError, one_line
from experiments.lra.examples import Examples, strip_table
from experiments.parallel import map_parts
from experiments.results import replace_file


OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
# What a symbol's number means: digits stand for themselves.
VOCABULARY = (*map(str, range(10)), *OPERATORS, END)
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
SIZES = {"train": 96_000, "validation": 2_000, "test": 2_000}

_HEADER = b"Source\tTarget"
_DIGITS = [b"%d" % digit for digit in range(10)]
# For reading: a letter for each operator, the letters of all their names, and how deep a symbol leads.
_LETTERS, _NAMES = b"abcd", "".join(OPERATORS).replace("[", "").encode()
_STEPS = np.array([0] * 10 + [1] * len(OPERATORS) + [-1], dtype=np.int32)
_OPERATOR_SHARE = 0.25  # of the nodes that are not as deep as they may be
_PART = 500  # expressions that a process makes at a time
_ROOTS = 4096  # trees grown side by side
_MAX_MISSES = 50 * _ROOTS  # trees in a row of which none is within the limits
_MAX_REPEATS = 20 * _PART  # expressions in a row of which none is new


@dataclass(frozen=True)
class ListOpsLimits:
    """
    Which expressions are made, by default the published ones.

    Args:
        min_length (`int`): Expressions have more symbols than this; parentheses do not count.
        max_length (`int`): They have fewer symbols than this.
        max_depth (`int`): Levels of an expression; 1 is a digit alone.
        max_args (`int`): An operator has 2 to so many arguments.

    Raises:
        UserError: if no expression can be within the limits.
    """

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10

    def __post_init__(self) -> None:
        for name, least in (("min_length", 0), ("max_depth", 1), ("max_args", 2)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.max_length < self.min_length + 2:
            raise UserError(
                f"No length is above min_length {self.min_length} and below max_length {self.max_length}; "
                "set them further apart."
            )
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = min(2 + self.max_args * longest, self.max_length)
        if longest <= self.min_length:
            raise UserError(
                f"With max_depth {self.max_depth} and max_args {self.max_args} no expression has more than {longest} "
                f"symbols; lower min_length {self.min_length}, or raise one of these."
            )


def generate_listops(
    folder: str | Path,
    limits: ListOpsLimits | None = None,
    sizes: Mapping[str, int] = SIZES,
    seed: int = 0,
    processes: int | None = None,
) -> dict[str, Path]:
    """
    Write the TSV files of the parts in `sizes`, by the grammar of Long Range Arena and in its spelling.

    The published files come from an unseeded generator: these have the same distribution, not the same rows. No
    expression occurs twice, in whichever parts. The files do not depend on the number of processes.

    Returns the path of each part's file.

    Raises:
        UserError: if there are not so many different expressions within the limits, or hardly any.
    """
    limits = limits or ListOpsLimits()
    for part, size in sizes.items():
        if part not in FILES or size < 1:
            raise UserError(f"{size} expressions for {part!r}: give at least 1 for each of {', '.join(FILES)}.")
    total = sum(sizes.values())
    paths = {part: Path(folder) / FILES[part] for part in sizes}
    with contextlib.ExitStack() as files, tqdm(total=total, desc="ListOps", unit=" rows", disable=None) as progress:
        expressions = files.enter_context(contextlib.closing(_make_different(limits, total, seed, processes)))
        partials = [files.enter_context(replace_file(path)) for path in paths.values()]
        for unfinished, size in zip(partials, sizes.values(), strict=True):
            with open(unfinished, "wb") as file:
                file.write(_HEADER + b"\n")
                for row in itertools.islice(expressions, size):
                    file.write(row)
                    progress.update()
    return paths


def _make_different(
    limits: ListOpsLimits, count: int, seed: int, processes: int | None
) -> Generator[bytes, None, None]:
    """`count` rows of which no two are equal."""
    known: set[bytes] = set()
    repeats = 0
    seeds = (np.random.SeedSequence(seed, spawn_key=(number,)) for number in itertools.count())
    with contextlib.closing(map_parts(partial(make_rows, limits, _PART), seeds, processes)) as parts:
        for rows in parts:
            for row, digest in rows:
                repeats = repeats + 1 if digest in known else 0
                if repeats == _MAX_REPEATS:
                    raise UserError(
                        f"There seem to be only {len(known):,} different expressions within {limits}, "
                        f"{count:,} are wanted; ask for fewer or widen the limits."
                    )
                if repeats:
                    continue
                known.add(digest)
                yield row
                if len(known) == count:
                    return


def make_rows(limits: ListOpsLimits, count: int, seed: np.random.SeedSequence) -> list[tuple[bytes, bytes]]:
    """Lines of a file with `count` random expressions and their values, each with a digest of it."""
    generator = np.random.default_rng(seed)
    words = _words(limits.max_args)
    rows: list[tuple[bytes, bytes]] = []
    misses = 0
    while True:
        before = len(rows)
        for numbers, value in _grow(limits, generator):
            # The last word closes the parenthesis of an argument, too, which a whole expression is not.
            row = b"%s\t%d\n" % (b" ".join(map(words.__getitem__, numbers)).removesuffix(b" )"), value)
            rows.append((row, blake2b(row, digest_size=16).digest()))
            if len(rows) == count:
                return rows
        misses = 0 if len(rows) > before else misses + _ROOTS
        if misses >= _MAX_MISSES:
            raise UserError(
                f"None of {misses:,} random expressions is within {limits}; set min_length and max_length further "
                "apart or nearer to what max_depth and max_args give."
            )


def _words(max_args: int) -> list[bytes]:
    """
    What a file has for each number of `_grow`.

    Functions are written as taking one argument after the other, `( ( ( [MAX 2 ) 3 ) ] )`: an operator stands behind
    as many parentheses as it has arguments and one more, which close behind every argument and the end.
    """
    digits = [b"%d )" % digit for digit in range(10)]
    operators = [b"( " * (args + 1) + name.encode() for args in range(max_args + 1) for name in OPERATORS]
    return [*digits, END.encode() + b" ) )", *operators]


def _grow(limits: ListOpsLimits, generator: np.random.Generator) -> Iterator[tuple[list[int], int]]:
    """
    The trees within the limits among `_ROOTS` random ones: numbers of `_words` in their order, and the value.

    All trees grow together, level by level, and leave when they are too long. Then values are reduced from the leaves
    up, and places in the text given from the roots down: no node is ever an object of its own.
    """
    tree = np.arange(_ROOTS)  # of each node of a level, in the order of their parents
    lengths = np.zeros(_ROOTS, dtype=np.int64)
    levels = []  # of each: tree of a node, number of its arguments, its operator or digit
    for depth in range(1, limits.max_depth + 1):
        is_operator = generator.random(len(tree)) < (_OPERATOR_SHARE if depth < limits.max_depth else 0)
        args = np.where(is_operator, generator.integers(2, limits.max_args + 1, len(tree)), 0)
        symbol = np.where(is_operator, generator.integers(0, 4, len(tree)), generator.integers(0, 10, len(tree)))
        lengths += np.bincount(tree, 1 + is_operator, _ROOTS).astype(np.int64)
        levels.append((tree, args, symbol))
        # What is kept of trees that are too long is thrown away below; they must not grow on.
        args[lengths[tree] >= limits.max_length] = 0
        tree = np.repeat(tree, args)
    fits = (lengths > limits.min_length) & (lengths < limits.max_length)
    if not fits.any():
        return
    levels = [(trees, args[fits[trees]], symbol[fits[trees]]) for trees, args, symbol in levels]

    value: list[np.ndarray] = []
    size: list[np.ndarray] = []
    for _, args, symbol in reversed(levels):
        values, sizes = symbol.copy(), np.ones(len(args), dtype=np.int64)
        if (args > 0).any():
            values[args > 0] = _evaluate(symbol[args > 0], args[args > 0], value[-1])
            sizes[args > 0] = 2 + np.add.reduceat(size[-1], _starts(args[args > 0]))
        value.append(values)
        size.append(sizes)

    ends = np.cumsum(size[-1])
    numbers = np.empty(ends[-1], dtype=np.int64)
    place = ends - size[-1]
    for (_, args, symbol), sizes, below in zip(levels, reversed(size), [*reversed(size[:-1]), None], strict=True):
        inner = args > 0
        numbers[place] = np.where(inner, 11 + 4 * args + symbol, symbol)
        numbers[place[inner] + sizes[inner] - 1] = 10
        if below is not None:
            before = np.cumsum(below) - below
            place = np.repeat(place[inner] + 1 - before[_starts(args[inner])], args[inner]) + before
    symbols = numbers.tolist()
    for end, length, result in zip(ends.tolist(), size[-1].tolist(), value[-1].tolist(), strict=True):
        yield symbols[end - length : end], result


def _starts(args: np.ndarray) -> np.ndarray:
    """Where the arguments of each operator begin among those of all."""
    return np.cumsum(args) - args


def _evaluate(operator: np.ndarray, args: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values of operators, given those of all of their arguments, one operator's behind the other's."""
    starts = _starts(args)
    ordered = np.sort(np.repeat(np.arange(len(args)) * 10, args) + values) % 10
    median = (ordered[starts + (args - 1) // 2] + ordered[starts + args // 2]) // 2
    results = ordered[starts], ordered[starts + args - 1], median, np.add.reduceat(values, starts) % 10
    return np.choose(operator, results)


def read_listops(file: str | Path) -> Examples:
    """
    Expressions of a TSV file, a made or a published one, as numbers of `VOCABULARY`, without parentheses.

    Raises:
        UserError: names the line that is not an expression and its value.
    """
    numbers = np.full(256, 255, dtype=np.uint8)
    numbers[np.frombuffer(b"0123456789%b]" % _LETTERS, dtype=np.uint8)] = np.arange(len(VOCABULARY))
    rows, labels = [], []
    try:
        with open(file, "rb") as lines:
            rows_read = tqdm(strip_table(lines), f"Reading {Path(file).name}", unit=" rows", disable=None)
            for number, line in enumerate(rows_read, 1):
                columns = line.split(b"\t")
                where = f"{file}, line {number}"
                if number == 1:
                    if columns != _HEADER.split(b"\t"):
                        raise UserError(f"{where}: the first line must be Source, a tab, Target.")
                    continue
                if len(columns) != 2:
                    raise UserError(f"{where} has {len(columns)} columns; give an expression, a tab and its value.")
                if columns[1] not in _DIGITS:
                    raise UserError(f"{where}: the value is {_show(columns[1])}; it must be a digit, 0 to 9.")
                rows.append(_parse(columns[0], numbers, where))
                labels.append(int(columns[1]))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({one_line(error)}); give a TSV file of ListOps.") from error
    if not rows:
        raise UserError(f"{file} has no expression; give a TSV file with a line of Source, a tab, Target, and rows.")
    return Examples.of_rows(rows, labels, Path(file).resolve().parent.name)


def _parse(source: bytes, numbers: np.ndarray, where: str) -> np.ndarray:
    """The numbers of an expression's symbols."""
    short = source.translate(None, b"() ")
    for letter, name in zip(_LETTERS, OPERATORS, strict=True):
        short = short.replace(name.encode(), b"%c" % letter)
    symbols = numbers[np.frombuffer(short, dtype=np.uint8)]
    spaced = _is_spaced(source) or _is_spaced(b" ".join(source.split()))
    if not spaced or (symbols == 255).any() or any(letter in source for letter in _LETTERS):
        known = {word.encode() for word in (*VOCABULARY, "(", ")")}
        unknown = next((word for word in source.split() if word not in known), source)
        raise UserError(f"{where} has {_show(unknown)}, which is no symbol; known are {' '.join(VOCABULARY)}.")
    depth = np.cumsum(_STEPS[symbols], dtype=np.int32)
    is_closed = len(symbols) and depth[-1] == 0 and (depth[:-1] >= 1).all()
    if not is_closed or source.count(b"(") != source.count(b")"):
        raise UserError(f"{where}: the brackets do not match; an expression is a digit or like [MAX 2 [MIN 3 4 ] ].")
    if ((_STEPS[symbols[:-1]] > 0) & (_STEPS[symbols[1:]] < 0)).any():
        raise UserError(f"{where} has an operator without arguments; give it some, as in [MAX 2 3 ].")
    return symbols


def _is_spaced(source: bytes) -> bool:
    """Whether there is one space between any two symbols, which without operators' names are one letter each."""
    text = source.translate(None, _NAMES)
    return text[1::2].count(b" ") == len(text) // 2 and b" " not in text[::2]


def _show(word: bytes) -> str:
    text = word.decode("utf-8", "replace")
    return repr(text if len(text) <= 20 else f"{text[:17]}...")
