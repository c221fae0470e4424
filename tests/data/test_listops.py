"""ListOps: expressions against an evaluator of their text, limits, files, and what is said of bad ones."""

import itertools
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments import parallel
from experiments.arguments import UserError
from experiments.lra.listops import (
    FILES,
    OPERATORS,
    VOCABULARY,
    ListOpsLimits,
    generate_listops,
    make_rows,
    read_listops,
)


SHORT = ListOpsLimits(min_length=3, max_length=40, max_depth=5, max_args=5)
FUNCTIONS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluate(source: str) -> tuple[int, int, int]:
    """Value, depth and most arguments of an operator of an expression, read symbol by symbol."""
    stack: list[list] = [[]]
    depth, most = 1, 0
    for symbol in source.replace("(", "").replace(")", "").split():
        if symbol in FUNCTIONS:
            stack.append([symbol])
            depth = max(depth, len(stack))
        elif symbol == "]":
            name, *values = stack.pop()
            assert len(values) >= 2
            most = max(most, len(values))
            stack[-1].append(FUNCTIONS[name](values))
        else:
            stack[-1].append(int(symbol))
    ((value,),) = stack
    return value, depth, most


def spell(symbols: list[str]) -> str:
    """An expression as the published files have it: a function takes one argument after the other."""
    if len(symbols) == 1:
        return symbols[0]
    parts: list[list[str]] = []
    depth = 0
    for symbol in symbols:
        if depth < 2:
            parts.append([])
        parts[-1].append(symbol)
        depth += 1 if symbol in FUNCTIONS else -1 if symbol == "]" else 0
    text = parts[0][0]
    for part in parts[1:]:
        text = f"( {text} {spell(part)} )"
    return text


def rows_of(limits: ListOpsLimits, count: int) -> list[list[str]]:
    return [row.decode().rstrip("\n").split("\t") for row, _ in make_rows(limits, count, np.random.SeedSequence(1))]


@pytest.mark.parametrize(
    ("limits", "count"),
    [(SHORT, 10_000), (ListOpsLimits(), 100), pytest.param(ListOpsLimits(), 10_000, marks=pytest.mark.slow)],
)
def test_values_are_right_and_limits_hold(limits, count):
    depths: set[int] = set()
    lengths: set[int] = set()
    args: set[int] = set()
    for source, target in rows_of(limits, count):
        value, depth, most = evaluate(source)
        assert target == str(value)
        symbols = source.replace("(", "").replace(")", "").split()
        depths.add(depth)
        lengths.add(len(symbols))
        args.add(most)
    assert limits.min_length < min(lengths) <= max(lengths) < limits.max_length
    assert max(depths) == limits.max_depth
    assert max(args) == limits.max_args


def test_spelling_is_the_published_one():
    for source, _ in rows_of(SHORT, 300):
        assert source == spell(source.replace("(", "").replace(")", "").split())
    assert spell("[MAX 2 3 ]".split()) == "( ( ( [MAX 2 ) 3 ) ] )"


def test_the_grammar_is_the_published_one():
    rows = [source.replace("(", "").replace(")", "").split() for source, _ in rows_of(ListOpsLimits(), 200)]
    symbols = np.array([VOCABULARY.index(symbol) for row in rows for symbol in row])
    counts = np.bincount(symbols, minlength=len(VOCABULARY))
    # A node of the tree that is not the root is an argument, of which an operator has 2 to 10.
    num_args = (counts[:14].sum() - len(rows)) / counts[10:14].sum()
    assert num_args == pytest.approx(6, abs=0.2)
    np.testing.assert_allclose(counts[:10] / counts[:10].mean(), 1, atol=0.05)
    np.testing.assert_allclose(counts[10:14] / counts[10:14].mean(), 1, atol=0.05)


def grow(generator: np.random.Generator, limits: ListOpsLimits, depth: int = 1) -> list[str]:
    """A tree as the published generator grows it, node by node."""
    if depth == limits.max_depth or generator.random() > 0.25:
        return [str(generator.integers(10))]
    args = [grow(generator, limits, depth + 1) for _ in range(generator.integers(2, limits.max_args + 1))]
    return [OPERATORS[generator.integers(4)], *itertools.chain(*args), "]"]


def test_trees_are_as_large_and_deep_as_the_published_ones():
    limits, generator = ListOpsLimits(0, 2000, 4, 10), np.random.default_rng(0)  # all trees fit
    texts = (
        [source for source, _ in rows_of(limits, 10_000)],
        [" ".join(grow(generator, limits)) for _ in range(10_000)],
    )
    measured = []
    for sources in texts:
        depths = [evaluate(source)[1] for source in sources]
        lengths = [len(source.replace("(", "").replace(")", "").split()) for source in sources]
        measured.append((np.mean(np.array(depths) == 1), np.mean(depths), np.mean(lengths)))
    assert measured[0] == pytest.approx(measured[1], rel=0.06)
    assert measured[0][0] == pytest.approx(0.75, abs=0.02)  # digits alone


def test_files_are_the_same_for_any_number_of_processes(tmp_path):
    sizes = {"train": 600, "validation": 30, "test": 20}
    made = {
        name: generate_listops(tmp_path / name, SHORT, sizes, seed, processes)
        for name, seed, processes in (("one", 3, 1), ("two", 3, 2), ("other", 4, 1))
    }
    rows: list[bytes] = []
    for part, size in sizes.items():
        content = made["one"][part].read_bytes()
        assert made["one"][part].name == FILES[part]
        assert content == made["two"][part].read_bytes()
        assert content != made["other"][part].read_bytes()
        assert len(read_listops(made["one"][part])) == size
        rows += content.splitlines()[1:]
    assert len(set(rows)) == len(rows) == 650


def _start_worker(sender) -> None:
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(sender,))
    worker.start()
    worker.join()


def _work(sender) -> None:
    parallel.follow_parent()
    sender.send(os.getpid())
    time.sleep(60)


def test_processes_end_with_one_that_is_killed():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    parent = context.Process(target=_start_worker, args=(sender,))
    parent.start()
    worker = receiver.recv()
    parent.kill()
    parent.join()
    for _ in range(100):
        status = Path(f"/proc/{worker}/status")
        if not status.exists() or "zombie" in status.read_text():
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("The worker went on without its parent.")


def test_nothing_is_left_of_what_is_not_finished(tmp_path):
    # Of digits alone there are ten.
    with pytest.raises(UserError, match=r"only 10 different expressions .* 12 are wanted"):
        generate_listops(tmp_path, ListOpsLimits(0, 2), {"train": 9, "test": 3}, processes=1)
    assert not list(tmp_path.iterdir())
    generate_listops(tmp_path, ListOpsLimits(0, 2), {"train": 7, "test": 3}, processes=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["basic_test.tsv", "basic_train.tsv"]


def test_limits_that_hardly_anything_meets_are_an_error():
    with pytest.raises(UserError, match="None of 204,800 random expressions is within"):
        make_rows(ListOpsLimits(99, 101, 3, 10), 1, np.random.SeedSequence(0))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_length": -1}, "min_length is -1; it must be at least 0"),
        ({"max_args": 1}, "max_args is 1; it must be at least 2"),
        ({"max_depth": 0}, "max_depth is 0; it must be at least 1"),
        ({"min_length": 600, "max_length": 601}, "No length is above min_length 600 and below max_length 601"),
        ({"max_depth": 3}, "With max_depth 3 and max_args 10 no expression has more than 122 symbols"),
    ],
)
def test_impossible_limits(limits, message):
    with pytest.raises(UserError, match=message):
        ListOpsLimits(**limits)


def test_impossible_sizes(tmp_path):
    for sizes in ({"train": 0}, {"dev": 5}):
        with pytest.raises(UserError, match="give at least 1 for each of train, validation, test"):
            generate_listops(tmp_path, sizes=sizes)
    with pytest.raises(UserError, match="0 processes: give at least 1"):
        generate_listops(tmp_path, SHORT, {"train": 5}, processes=0)


def test_expressions_are_read(tmp_path):
    file = tmp_path / "rows.tsv"
    file.write_bytes(b"Source\tTarget\r\n( ( ( [MAX 2 ) ( ( ( [SM 9 ) 8 ) ] ) ) ] )\t7\r\n7\t7\n[MED  1  0 ]\t0\n")
    examples = read_listops(file)
    assert examples.labels.tolist() == [7, 7, 0]
    assert examples.lengths.tolist() == [7, 1, 4]
    assert [VOCABULARY[value] for value in examples.sequence(0)] == "[MAX 2 [SM 9 8 ] ]".split()
    assert examples.sequence(1).tolist() == [7]
    assert examples.values.dtype == np.uint8


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("5", "line 3 has 1 columns; give an expression, a tab and its value"),
        ("5\t5\t5", "line 3 has 3 columns"),
        ("5\tx", "line 3: the value is 'x'; it must be a digit, 0 to 9"),
        ("5\t10", "line 3: the value is '10'"),
        ("[AVG 1 2 ]\t1", r"line 3 has '\[AVG', which is no symbol; known are 0 1 .* \[SM \]"),
        ("[MIN 12 3 ]\t1", "line 3 has '12', which is no symbol"),
        ("[MI N 12 ]\t1", r"line 3 has '\[MI', which is no symbol"),
        ("[MINUS 1 3 ]\t1", r"line 3 has '\[MINUS', which is no symbol"),
        ("a 1 3 ]\t1", "line 3 has 'a', which is no symbol"),
        ("[MIN 1 2\t1", "line 3: the brackets do not match"),
        ("[MIN 1 2 ] ]\t1", "line 3: the brackets do not match"),
        ("1 2\t1", "line 3: the brackets do not match"),
        ("( ( [MAX 2 3 ] )\t3", "line 3: the brackets do not match"),
        ("[MAX 1 [SM ] ]\t1", "line 3 has an operator without arguments"),
        ("\t1", "line 3: the brackets do not match"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, row, message):
    file = tmp_path / "rows.tsv"
    file.write_text(f"Source\tTarget\n4\t4\n{row}\n")
    with pytest.raises(UserError, match=message) as error:
        read_listops(file)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "has no expression"),
        ("Source\tTarget\n", "has no expression"),
        ("4\t4\n", "line 1: the first line must be Source, a tab, Target"),
    ],
)
def test_a_file_without_expressions(tmp_path, content, message):
    file = tmp_path / "rows.tsv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_listops(file)


def test_a_file_may_begin_with_a_mark_and_end_with_empty_lines(tmp_path):
    file = tmp_path / "rows.tsv"
    file.write_bytes(b"\xef\xbb\xbfSource\tTarget\r\n4\t4\r\n7\t7\r\n\r\n")
    assert read_listops(file).labels.tolist() == [4, 7]
    file.write_bytes(b"Source\tTarget\n4\t4\n\n7\t7\n")
    with pytest.raises(UserError, match="line 3 has 1 columns"):
        read_listops(file)
