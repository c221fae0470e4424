"""A user's own texts: found, read, checked, cut and split; metrics and baselines."""

import json
import os
import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from datasets import ClassLabel, Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, EvalPrediction, PreTrainedTokenizerFast

from experiments.arguments import UserError
from experiments.checkpoints import CheckpointArguments
from experiments.classification import labels as label_module
from experiments.classification.data import Part, TextArguments, TextData, find_columns, load_texts
from experiments.classification.excerpts import cut_excerpts, hold_out, spread
from experiments.classification.labels import MULTI, REGRESSION, SINGLE, Problem, read_labels
from experiments.classification.metrics import (
    average_documents,
    compute_metrics,
    decide,
    measure,
    measure_baselines,
    probabilities,
)
from support.glue_rows import CUES, make_tokenizer


WORDS = ("cat", "dog", "bird", "tree", "house")


@pytest.fixture
def write(tmp_path):
    """Write a file of rows, as .csv unless it is named otherwise, and return its path."""

    def write_file(rows, name="texts.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_file


@pytest.fixture
def load(tmp_path):
    """Read the parts that there are files for."""

    def load_files(known=None, **flags):
        wanted = [part for part in ("train", "validation", "test") if flags.get(f"{part}_file")]
        wanted = wanted if known or "train" not in wanted else list(dict.fromkeys(["train", "validation", *wanted]))
        flags = {name: [value] if name.endswith("_file") else value for name, value in flags.items()}
        return load_texts(TextArguments(**flags, cache_dir=str(tmp_path / "cache")), wanted, make_tokenizer(), known)

    return load_files


def test_whole_texts_are_not_repeated_for_every_excerpt(write, load, monkeypatch):
    books = write([{"text": f"{author} " * 500, "label": author, "id": author} for author in ("cat", "dog")])
    repeated: list[int] = []
    select = Part.select

    def watch(part, indices):
        if len(indices) > len(part.rows):
            repeated.extend(len(str(value)) for row in part.rows for value in row.values())
        return select(part, indices)

    monkeypatch.setattr(Part, "select", watch)
    train = load(train_file=books, excerpt_length=12, max_excerpts_per_document=20).parts["train"]
    assert max(repeated) == len("cat")
    assert train.rows.column_names == ["label", "id", "excerpt", "text"]
    assert [row["label"] for row in train.rows] == [row["text"].split()[0] for row in train.rows]


def rows_of(labels, **columns):
    return [{"text": f"the {CUES[n % 6]} {WORDS[n % 5]}", "label": label} | columns for n, label in enumerate(labels)]


def test_text_and_label_are_found_by_their_names_or_by_their_kind():
    arguments = TextArguments(train_file=["x.csv"])
    named = Dataset.from_dict({"id": ["a"], "text": ["b"], "label": [1]})
    assert find_columns("x", named, arguments) == (("text",), "label")
    other = Dataset.from_dict({"number": [1], "opinion": ["b"], "labels": [1]})
    assert find_columns("x", other, arguments) == (("opinion",), "labels")
    unlabelled = Dataset.from_dict({"sentence": ["b"]})
    assert find_columns("x", unlabelled, arguments, label_needed=False) == (("sentence",), None)
    flags = TextArguments(train_file=["x.csv"], text_column="id", text_pair_column="text", label_column="label")
    assert find_columns("x", named, flags) == (("id", "text"), "label")


@pytest.mark.parametrize(
    ("columns", "flags", "message"),
    [
        (("id", "title", "label"), {}, "plainly the text; name it with --text_column"),
        (("text", "sentence", "label"), {}, "plainly the text"),
        (("text", "class"), {}, "plainly the label; name it with --label_column"),
        (("text", "label", "labels"), {}, "plainly the label"),
        (("text", "label"), {"text_column": "body"}, "--text_column body"),
        (("text", "label"), {"label_column": "class"}, "--label_column class"),
        (("text", "label"), {"text_column": "text", "text_pair_column": "text"}, "name a column twice"),
        (
            ("label", "y"),
            {"text_column": "label", "label_column": "y"},
            "where labels are to stand; rename it: my.csv has",
        ),
    ],
)
def test_columns_that_may_be_several_are_asked_for_by_name(columns, flags, message):
    rows = Dataset.from_dict({name: ["x"] for name in columns})
    with pytest.raises(UserError, match=message) as error:
        find_columns("my.csv", rows, TextArguments(train_file=["my.csv"], **flags))
    assert all(f"`{name}`" in str(error.value) for name in columns)
    assert "my.csv" in str(error.value)


@pytest.mark.parametrize(
    ("labels", "flags", "kind", "names"),
    [
        (["b", "a", "c"] * 4, {}, SINGLE, ("a", "b", "c")),
        ([10, 9, 2] * 4, {}, SINGLE, ("2", "9", "10")),
        (["-1", "--1", "1"] * 4, {}, SINGLE, ("--1", "-1", "1")),
        ([True, False] * 4, {}, SINGLE, ("False", "True")),
        ([0.5, 1.0, 2.25] * 4, {}, REGRESSION, ()),
        ([1, 2, 3] * 4, {"problem_type": "regression"}, REGRESSION, ()),
        ([1.0, 2.0] * 4, {"problem_type": "single_label_classification"}, SINGLE, ("1", "2")),
        ([1000000.0, 1000001.0] * 4, {"problem_type": "single_label_classification"}, SINGLE, ("1000000", "1000001")),
        ([["x", "y"], [], ["y"]] * 4, {}, MULTI, ("x", "y")),
        (["x;y", "", "y; z"] * 4, {"label_separator": ";"}, MULTI, ("x", "y", "z")),
    ],
)
def test_the_kind_of_problem_and_its_labels_are_told_from_the_column(write, load, labels, flags, kind, names):
    data = load(train_file=write(rows_of(labels)), **flags)
    assert data.problem == Problem(kind, names)
    assert len(data.parts["train"].documents) + len(data.parts["validation"].documents) == len(labels)


def test_labels_keep_the_order_that_a_checkpoint_has_them_in(write, load):
    path, other = write(rows_of(["a", "b"] * 6)), write(rows_of(["a", "c"] * 6), "other.jsonl")
    trained = Problem(SINGLE, ("b", "a"))
    tokenizer, wanted = make_tokenizer(), ["train", "validation"]
    for file, labels in ((path, ("b", "a")), (other, ("a", "c"))):
        data = load_texts(TextArguments(train_file=[file]), wanted, tokenizer, trained)
        assert data.problem.labels == labels
        assert {data.problem.labels[n] for n in data.parts["train"].labels or ()} == set(labels)


def test_names_of_files_are_taken_literally_where_they_exist(write, load, tmp_path, monkeypatch):
    write(rows_of(["wrong", "file"] * 6), "books [7]/a1.jsonl")
    path = write(rows_of(["a", "b"] * 6), "books [7]/a[1].jsonl")
    assert load(train_file=path).problem.labels == ("a", "b")
    monkeypatch.chdir(tmp_path / "books [7]")
    assert load(train_file="a[1].jsonl").problem.labels == ("a", "b")


def test_labels_are_encoded_for_their_kind():
    assert Problem(SINGLE, ("a", "b")).encode("x", [("b",), ("a",)]) == [1, 0]
    assert Problem(MULTI, ("a", "b")).encode("x", [("b",), (), ("b", "a")]) == [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert Problem(REGRESSION, ()).encode("x", [0.5, 2.0]) == [0.5, 2.0]


def test_labels_of_the_hub_keep_their_order_and_minus_one_is_none(load, monkeypatch):
    rows = Dataset.from_dict({"text": ["a", "b", "c", "d"], "label": [0, 1, 0, 1]})
    rows = rows.cast_column("label", ClassLabel(names=["spam", "ham"]))
    hidden = Dataset.from_dict({"text": ["a"], "label": [-1]}).cast_column("label", ClassLabel(names=["spam", "ham"]))
    splits = {"train": rows, "dev": rows, "test": hidden}
    monkeypatch.setattr("experiments.classification.data.load_prepared", lambda *args, **kwargs: splits)
    arguments = TextArguments(dataset_name="someone/mails")
    data = load_texts(arguments, ["train", "validation", "test"], make_tokenizer())
    assert data.problem.labels == ("spam", "ham")
    assert data.parts["validation"].source == "someone/mails (dev)"
    assert data.parts["test"].labels is None
    del splits["test"]
    with pytest.raises(UserError, match="no texts for test; someone/mails has `train`, `dev`"):
        load_texts(arguments, ["train", "validation", "test"], make_tokenizer())


def test_a_table_in_text_keeps_words_that_look_like_nothing(write, load):
    rows = "text,label\nNone,NA\nNA,yes\n" + "the cat,NA\nthe dog,yes\n" * 4
    data = load(train_file=write(rows, "a.csv"), validation_file=write(rows, "b.csv"))
    assert data.problem.labels == ("NA", "yes")
    assert data.parts["train"].rows["text"][:2] == ["None", "NA"]


def test_a_table_in_text_keeps_its_words_whatever_they_look_like(write, load, caplog):
    rows = [("00", "the cat", "007"), ("01", "the dog", "7"), ("1", "a bird", "10")] * 4000
    lines = [f"{first},{text},{label}" for first, text, label in rows]
    lines[10_500:10_502] = ["x12345678901234567890,a tree,7", ",a house,10"]  # beyond what types are guessed from
    data = load(train_file=write("id,text,label\n" + "\n".join(lines), "a.csv"))
    assert data.problem == Problem(SINGLE, ("007", "7", "10"))
    found = data.parts["train"].rows["id"][:] + data.parts["validation"].rows["id"][:]
    assert set(found) == {"00", "01", "1", "x12345678901234567890", ""}
    # The only column of words is the text, as it was where numbers had a type of their own.
    table = "id,story,label\n" + "1,the cat,0.5\n2,the dog,1\n" * 9
    data = load(train_file=write(table, "b.csv"))
    assert (data.columns, data.problem.kind) == (("story",), REGRESSION)
    assert {"stand among those for training" in record.getMessage() for record in caplog.records} == {True}
    load(train_file=write(table.replace("0.5", "0.0"), "c.csv"))
    load(train_file=write(rows_of([2.0, 3.0] * 9), "d.jsonl"))
    for label in ("0.0", "2.0"):
        assert f"labels such as {label} are taken for numbers; --problem_type says otherwise" in caplog.text


BAD_FILES = {
    "a label that is missing": ("text,label\na,x\nb,\nc,y\n", {}, "row 2 has no label"),
    "a label that is no number": (
        '{"text": "a", "label": 0.5}\n{"text": "b", "label": null}\n',
        {},
        "row 2 has no label",
    ),
    "labels that are words": ("text,label\na,x\nb,y\n", {"problem_type": "regression"}, "row 1 has the label 'x'"),
    "infinity": ("text,label\na,1.5\nb,inf\n", {}, "row 2 has the label 'inf', which is not a finite number"),
    "fractions but for a word": (
        "text,label\n" + "a,1.5\nb,2\n" * 9 + "c,none\n",
        {},
        "row 19 has the label 'none', and most others are fractions; .*--problem_type",
    ),
    "a text that is missing": (
        '{"text": "a", "label": 1}\n{"text": null, "label": 1}\n',
        {},
        "row 2 has None in place",
    ),
    "a text of blanks": ("text,label\na,x\n  ,y\n", {}, "row 2 has '  ' in place of a text"),
    "numbers as texts": ("text,label\n1,x\n2,y\n", {}, "has nothing but numbers in `text`, where texts are to stand"),
    "one example": ("text,label\na,x\nb,y\nc,x\n", {}, "single example of `y`, which cannot be both learned and held"),
    "one label": ("text,label\na,x\nb,x\n", {}, "has `x` alone as label"),
    "a one for each label": (
        '{"text": "a", "label": [0, 1]}\n{"text": "b", "label": [1, 0]}\n',
        {},
        r"has a 0 or 1 for each label, such as \[0, 1\]; give lists of the names",
    ),
    "the same labels everywhere": (
        '{"text": "a", "label": ["x", "y"]}\n{"text": "b", "label": ["y", "x"]}\n',
        {},
        "has `x`, `y` as labels of every row: nothing to learn",
    ),
    "nothing among labels": (
        '{"text": "a", "label": ["x", null]}\n{"text": "b", "label": ["y"]}\n',
        {},
        r"row 1 has the label \['x', None\], which is not a list of the labels",
    ),
    "columns in place of rows": (
        '{"text": {"0": "a", "1": "b", "2": "c"}, "label": 1}\n',
        {},
        "row 1 has {'0': 'a', .*} in place of a text in `text`; a JSON file holds a list of rows",
    ),
    "lists for single labels": (
        '{"text": "a", "label": ["x", "y"]}\n',
        {"problem_type": SINGLE},
        "which is not a single label",
    ),
    "no rows": ("text,label\n", {}, "rows"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_one_line(write, load, name):
    text, flags, message = BAD_FILES[name]
    path = write(text, "bad.csv" if text.startswith("text") else "bad.jsonl")
    with pytest.raises(UserError, match=message) as error:
        load(train_file=path, **flags)
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_another_table_of_the_same_name_and_time_is_read(write, load):
    for labels in (["a", "b"] * 4, ["x", "y", "z"] * 4):
        file = write(rows_of(labels))
        os.utime(file, (1, 1))
        assert load(train_file=file).problem.labels == tuple(sorted(set(labels)))


def test_files_that_do_not_go_together_are_one_line(write, load):
    train = write(rows_of(["a", "b"] * 4))
    with pytest.raises(UserError, match=r"dev.jsonl has the label `c`, `d`; known are `a`, `b`\."):
        load(train_file=train, validation_file=write(rows_of(["a", "d", "c"]), "dev.jsonl"))
    with pytest.raises(UserError, match=r"dev2\.jsonl has no column `text`; its columns are `body`, `label`"):
        load(train_file=train, validation_file=write([{"body": "x", "label": "a"}], "dev2.jsonl"))
    known = Problem(SINGLE, ("good", "bad"))
    with pytest.raises(UserError, match="known are `good`, `bad`"):
        load(known, validation_file=train)
    with pytest.raises(UserError, match=r"texts for train; give --train_file"):
        load_texts(TextArguments(test_file=[train]), ["train"], make_tokenizer())
    with pytest.raises(UserError, match="has a column `prediction`, where predictions are to stand"):
        load(known, test_file=write([{"text": "x", "prediction": "a"}], "dev3.jsonl"))
    with pytest.raises(UserError, match="no such file"):
        load(train_file="nowhere.csv")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "Give the texts either"),
        ({"train_file": ["a"], "dataset_name": "a/b"}, "Give the texts either"),
        ({"train_file": ["a"], "dataset_revision": "b"}, "--dataset_revision is for --dataset_name"),
        ({"train_file": ["a"], "validation_fraction": 1.0}, "between 0 and 1"),
        ({"train_file": ["a"], "validation_file": ["b"], "split_seed": 1}, "--split_seed: nothing is held out"),
        ({"train_file": ["a"], "text_pair_column": "b"}, "name the first with --text_column"),
        ({"train_file": ["a"], "excerpt_length": 64, "max_seq_length": 32}, "--max_seq_length 32 cuts"),
        ({"train_file": ["a"], "max_excerpts_per_document": 2}, "needs --excerpt_length"),
        ({"train_file": ["a"], "excerpt_length": 2}, "at least 8"),
        ({"train_file": ["a"], "max_train_samples": 0}, "at least 1"),
        ({"train_file": ["a"], "label_from_file_name": "a(b"}, "no regular expression"),
        ({"train_file": ["a"], "label_from_file_name": "^a"}, r"has no \(group\)"),
        ({"dataset_name": "a/b", "label_from_file_name": "^(a)"}, "--label_from_file_name is for files"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        TextArguments(**flags)


def test_labels_come_from_names_of_files_or_folders(write, load, tmp_path):
    for author in ("austen", "poe"):
        for title in ("first", "second"):
            write(f"the {author} writes {title}", f"books/{author}/{author}_{title}.txt")
    pattern = str(tmp_path / "books" / "*" / "*.txt")
    by_name = load(train_file=pattern, label_from_file_name="^([^_]+)_")
    by_folder = load(train_file=pattern, label_from_file_name="([^/]+)/[^/]+$")
    for data in (by_name, by_folder):
        assert data.problem.labels == ("austen", "poe")
        assert sorted(data.parts["train"].labels) == sorted(data.parts["validation"].labels) == [0, 1]
    with pytest.raises(UserError, match=r"\^\(x\) finds no label in austen_first.txt"):
        load(train_file=pattern, label_from_file_name="^(x)")
    with pytest.raises(UserError, match=r"plainly the label.*--label_from_file_name for \.txt files"):
        load(train_file=pattern)
    unlabelled = load(by_name.problem, test_file=pattern)
    assert unlabelled.parts["test"].labels is None
    shouted = write("the poe writes third", "books/POE_THIRD.TXT")
    assert load(by_name.problem, test_file=shouted).parts["test"].rows["text"] == ["the poe writes third"]
    twice = [str(tmp_path / "books" / "poe" / "poe_first.txt"), pattern, str(tmp_path / "books" / "*" / "*_first.txt")]
    once = load_texts(TextArguments(test_file=twice), ["test"], make_tokenizer(), by_name.problem)
    assert sorted(once.parts["test"].rows["file"]) == sorted(unlabelled.parts["test"].rows["file"])
    write("", "books/empty.txt")
    with pytest.raises(UserError, match=r"empty\.txt is empty"):
        load(by_name.problem, test_file=str(tmp_path / "books" / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"latin\.txt cannot be read as UTF-8"):
        load(by_name.problem, test_file=str(tmp_path / "latin.txt"))


def test_texts_are_cut_between_words_into_whole_excerpts():
    tokenizer = make_tokenizer()
    text = " ".join(WORDS * 8)  # 40 tokens
    (excerpts,) = cut_excerpts([text], tokenizer, 10, None)
    assert " ".join(excerpts) == text
    assert [len(tokenizer(excerpt)["input_ids"]) for excerpt in excerpts] == [10] * 5
    short, rest, kept = cut_excerpts(
        ["cat", " ".join(WORDS * 8 + ("cat",) * 3), " ".join(WORDS * 9)[:-1]], tokenizer, 10, None
    )
    assert short == ["cat"]
    assert len(rest) == 5  # three tokens are less than half of eight
    assert len(kept) == 6
    assert cut_excerpts([text], tokenizer, 10, 2) == [[excerpts[1], excerpts[3]]]


def test_a_word_is_not_cut_unless_it_is_longer_than_an_excerpt():
    pieces = ["?", *"abcxyz", *(f"##{letter}" for letter in "abcxyz")]
    letters = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?")
    (excerpts,) = cut_excerpts(["abc xyz abc xyz"], tokenizer, 8, None)
    assert excerpts == ["abc xyz", "abc xyz"]
    (excerpts,) = cut_excerpts(["abcxyzabcxyzabcxyz abc"], tokenizer, 8, None)
    assert excerpts[0] == "abcxyzab"
    assert "".join(excerpts) == "abcxyzabcxyzabcxyz abc"


def test_places_are_spread_evenly():
    assert spread(3, None) == spread(3, 5) == [0, 1, 2]
    assert spread(10, 2) == [2, 7]
    assert spread(100, 4) == [12, 37, 62, 87]


def test_a_checkpoint_that_does_not_say_what_it_predicts_is_asked_for_it(monkeypatch):
    config = BertConfig(id2label={0: "a", 1: "b"})
    monkeypatch.setattr(label_module, "load_trained_config", lambda checkpoint: config)
    checkpoint = CheckpointArguments(model_name_or_path="x")
    kinds = (label_module.MULTI, label_module.SINGLE)
    assert [label_module.checkpoint_problem(checkpoint, kind).kind for kind in kinds] == [*kinds]
    config.problem_type = "single_label_classification"
    with pytest.raises(UserError, match=r"x was trained for single_\w+, and not for --problem_type multi_\w+; leave"):
        label_module.checkpoint_problem(checkpoint, label_module.MULTI)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["LABEL_0", "LABEL_1"], "1"),
        (["LABEL_A", "LABEL_B"], None),
        (["a", "b"], None),
        (["LABEL_1", "LABEL_0"], None),
    ],
)
def test_labels_without_names_may_be_called_by_their_numbers(monkeypatch, names, expected):
    monkeypatch.setattr(
        label_module, "load_trained_config", lambda checkpoint: BertConfig(id2label=dict(enumerate(names)))
    )
    problem = label_module.checkpoint_problem(CheckpointArguments(model_name_or_path="x"))
    assert problem.labels == tuple(names)
    assert problem.encode("rows", [(names[1],)]) == [1]
    several = Problem(label_module.MULTI, problem.labels)
    with nullcontext() if expected else pytest.raises(UserError, match="rows has the label `0`, `1`; known are"):
        assert problem.encode("rows", [("1",), ("0",)]) == [1, 0]
        assert several.encode("rows", [("1", "LABEL_0"), ("0",), ()]) == [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]


def test_every_label_has_its_share_held_out():
    labels = ["a"] * 40 + ["b"] * 20
    train, held, words = hold_out(labels, range(60), 0.1, seed=0)
    assert sorted(train + held) == list(range(60))
    assert [labels[place] for place in held] == ["a"] * 4 + ["b"] * 2
    assert words == "6 of 60 examples held out with --split_seed 0"
    assert hold_out(labels, range(60), 0.1, seed=0)[1] == held != hold_out(labels, range(60), 0.1, seed=1)[1]


def test_whole_documents_are_held_out_where_every_label_has_five():
    documents = [number // 3 for number in range(30)]
    labels = ["a"] * 15 + ["b"] * 15
    train, held, words = hold_out(labels, documents, 0.1, seed=0)
    assert len({documents[place] for place in held}) == 2
    assert not {documents[place] for place in held} & {documents[place] for place in train}
    assert {labels[place] for place in held} == {"a", "b"}
    assert words == "2 of 10 documents held out with --split_seed 0"


def test_the_ends_of_documents_are_held_out_where_a_label_has_few():
    documents = [0] * 10 + [1] * 10 + [2] * 10
    _, held, words = hold_out(["a"] * 20 + ["b"] * 10, documents, 0.2, seed=0)
    assert held == [8, 9, 18, 19, 28, 29]
    assert "the last excerpts of every document" in words


def test_a_label_of_short_documents_has_whole_ones_held_out_beside_the_ends_of_others():
    labels, documents = [0, 0, *[1] * 12], [0, 1, *[2] * 6, *[3] * 6]
    train, held, _ = hold_out(labels, documents, 0.2, seed=0)
    assert {labels[place] for place in held} == {labels[place] for place in train} == {0, 1}
    assert held == [1, 7, 13]


def test_a_label_of_few_documents_changes_nothing_for_the_others():
    sizes = {"a": [*[1] * 99, 5], "b": [1] * 4, "c": [3, 1, 3]}
    labels = [label for label, counts in sizes.items() for count in counts for _ in range(count)]
    counts = [count for of_label in sizes.values() for count in of_label]
    documents = [number for number, count in enumerate(counts) for _ in range(count)]
    _, held, words = hold_out(labels, documents, 0.1, seed=0)
    documents_held = {label: {documents[n] for n in held if labels[n] == label} for label in sizes}
    assert {label: len(of_label) for label, of_label in documents_held.items()} == {"a": 10, "b": 1, "c": 2}
    assert [place for place in held if labels[place] == "c"] == [len(labels) - 5, len(labels) - 1]
    assert words == (
        "11 of 104 documents held out with --split_seed 0, and the last excerpts of 2 documents of labels that have "
        "fewer than five"
    )


def test_something_of_every_label_and_document_is_left_to_train_on():
    train, held, _ = hold_out([0, 0, 1, 1], [0, 1, 2, 3], 0.9, 0)
    assert len(train) == len(held) == 2
    assert 3 in hold_out([0, 0, 0, 1], [0, 0, 0, 1], 0.4, 0)[0]


def test_text_files_to_predict_may_have_no_label_in_their_name_and_a_mark_before_their_text(load, tmp_path):
    (tmp_path / "nobody.txt").write_bytes(b"\xef\xbb\xbfthe cat")
    known, file = Problem(SINGLE, ("a", "b")), str(tmp_path / "nobody.txt")
    test = load(known, test_file=file, label_from_file_name="^([^_]+)_").parts["test"]
    assert test.labels is None
    assert list(test.rows["text"]) == ["the cat"]


@pytest.mark.parametrize("kind", [REGRESSION, SINGLE])
def test_no_number_is_no_label(kind):
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [1.0, float("nan")]})
    assert read_labels("x", rows, "label", kind, None)[1] is None


def test_excerpts_keep_their_document_and_its_columns(write, load):
    rows = [{"text": " ".join(WORDS * 8), "label": label, "title": f"{label}{n}"} for label in "ab" for n in range(5)]
    data = load(train_file=write(rows), text_column="text", excerpt_length=10, max_excerpts_per_document=3)
    train, held = data.parts["train"], data.parts["validation"]
    assert list(train.rows["excerpt"]) == [1, 2, 3] * 8
    assert {title[0] for title in train.rows["title"]} == {title[0] for title in held.rows["title"]} == {"a", "b"}
    assert not set(train.rows["title"]) & set(held.rows["title"])
    assert data.held_out.startswith("2 of 10 documents")


def test_excerpts_may_be_cut_from_a_table_that_numbers_some_already(write, load):
    rows = [{"text": " ".join(WORDS * 8), "label": label, "excerpt": 7} for label in "ab" for _ in range(5)]
    data = load(train_file=write(rows), text_column="text", excerpt_length=10, max_excerpts_per_document=3)
    assert list(data.parts["train"].rows["excerpt"]) == [1, 2, 3] * 8


def test_excerpts_of_a_column_that_is_called_so_are_refused(write, load):
    with pytest.raises(UserError, match="has its texts in `excerpt`, where --excerpt_length writes numbers; rename"):
        load(train_file=write([{"excerpt": "cat", "label": "a"}] * 4), text_column="excerpt", excerpt_length=10)


def test_a_text_without_tokens_gives_no_excerpt(write, load):
    rows = [row | {"text": "\u200b\u200b"} if n == 1 else row for n, row in enumerate(rows_of(["a", "b"] * 10))]
    with pytest.raises(UserError, match=r"row 2 has no tokens in `text`; leave it out\.$"):
        load(train_file=write(rows), text_column="text", excerpt_length=10)


def test_tests_that_are_labelled_in_part_are_not_scored_and_say_so(write, load, caplog):
    path, test = write(rows_of(["a", "b"] * 10)), write(rows_of(["a", None, "b"]), "test.jsonl")
    data = load(train_file=path, test_file=test)
    assert data.parts["test"].labels is None
    assert "1 of 3 rows have no label, so that none is scored" in caplog.text


def test_limits_take_examples_from_all_over(write, load):
    path = write(rows_of(["a"] * 20 + ["b"] * 20))
    data = load(train_file=path, validation_file=path, max_train_samples=4, max_eval_samples=2)
    assert data.parts["train"].labels == [0, 0, 1, 1]
    assert data.parts["validation"].labels == [0, 1]


def test_metrics_have_their_known_values():
    single = Problem(SINGLE, ("a", "b"))
    chances = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    values = measure(single, chances, [0, 1, 1, 1], range(4))
    assert values == pytest.approx(
        {"accuracy": 0.75, "macro_f1": (2 / 3 + 0.8) / 2, "matthews_correlation": 1 / 3**0.5}
    )
    multi = measure(Problem(MULTI, ("a", "b")), chances, [[1, 0], [0, 1], [1, 1], [0, 0]], range(4))
    assert multi == pytest.approx({"micro_f1": 0.75, "macro_f1": (1 + 0.5) / 2, "exact_match": 0.5})
    numbers = measure(Problem(REGRESSION, ()), np.array([[1.0], [2.0], [4.0]]), [1.0, 2.0, 3.0], range(3))
    assert numbers == pytest.approx({"pearson": 0.9819805, "spearmanr": 1.0, "mse": 1 / 3})
    constant = measure(Problem(REGRESSION, ()), np.ones((3, 1)), [1.0, 2.0, 3.0], range(3))
    assert constant["pearson"] == constant["spearmanr"] == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = measure(single, chances[:1], [0], range(1))
    assert alone == {"accuracy": 1.0, "macro_f1": 1.0, "matthews_correlation": 0.0}


def test_a_document_is_decided_by_the_mean_of_its_excerpts():
    chances = np.array([[0.9, 0.1], [0.4, 0.6], [0.4, 0.6], [0.1, 0.9], [0.2, 0.8]])
    documents = [3, 3, 3, 7, 7]
    means, first = average_documents(chances, documents)
    assert means == pytest.approx(np.array([[1.7 / 3, 1.3 / 3], [0.15, 0.85]]))
    assert first.tolist() == [0, 3]
    values = measure(Problem(SINGLE, ("a", "b")), chances, [0, 0, 0, 1, 1], documents)
    assert values["accuracy"] == 0.6
    assert values["document_accuracy"] == 1.0


def test_logits_become_probabilities_and_the_score_is_the_first_metric():
    logits = np.array([[0.0, 0.0, np.log(2)]] * 2)
    prediction = EvalPrediction(predictions=(logits,), label_ids=np.array([2, 1]))
    single = Problem(SINGLE, ("a", "b", "c"))
    assert probabilities(single, prediction.predictions) == pytest.approx(np.array([[0.25, 0.25, 0.5]] * 2))
    assert compute_metrics(single, [0, 1], prediction)["score"] == 0.5
    assert decide(Problem(MULTI, ("a", "b")), probabilities(Problem(MULTI, ("a", "b")), [[-1, 1]])).tolist() == [
        [0, 1]
    ]
    with pytest.raises(UserError, match="not finite"):
        probabilities(single, np.array([[0.0, np.nan, 0.0]]))


@pytest.mark.parametrize("kind", [SINGLE, MULTI, REGRESSION])
def test_words_are_a_better_baseline_than_the_commonest_label(write, load, kind):
    labels = {SINGLE: [CUES[n % 6] for n in range(60)], REGRESSION: [n % 6 + 0.5 for n in range(60)]}
    labels[MULTI] = [[CUES[n % 6], WORDS[n % 5]] for n in range(60)]
    data = load(train_file=write(rows_of(labels[kind])))
    values = measure_baselines(data, with_tfidf=True)["validation"]
    first = next(iter(values["TF-IDF"]))
    assert values["TF-IDF"][first] > 0.8 > values["always the same"][first]
    assert list(measure_baselines(data, with_tfidf=False)["validation"]) == ["always the same"]


def test_a_baseline_of_words_knows_of_labels_without_an_example():
    labels = [1, 2] * 10  # and never 0
    part = Part("x", Dataset.from_dict({"text": [f"the {CUES[n]}" for n in labels]}), labels, list(range(20)))
    data = TextData(Problem(SINGLE, ("a", "b", "c")), ("text",), {"train": part, "validation": part})
    assert measure_baselines(data, with_tfidf=True)["validation"]["TF-IDF"]["accuracy"] == 1.0


def test_a_baseline_of_words_needs_words(write, load):
    rows = [{"text": "! ?", "label": label} for label in ["a", "b"] * 6]
    data = load(train_file=write("".join(json.dumps(row) + "\n" for row in rows)))
    with pytest.raises(UserError, match="--baseline tfidf finds no word in the training texts"):
        measure_baselines(data, with_tfidf=True)


def test_a_baseline_of_words_needs_two_labels(write, load):
    data = load(train_file=write(rows_of(["a"] * 10 + ["b"] * 2)), max_train_samples=4)
    with pytest.raises(UserError, match="--baseline tfidf finds a single label in the training texts; leave it out"):
        measure_baselines(data, with_tfidf=True)


def test_a_baseline_of_words_gives_rare_labels_their_weight():
    noise = random.Random(0)
    labels = [0] * 400 + [1] * 8
    texts = [" ".join([("plum", "fig")[label], *noise.choices(WORDS, k=8)]) for label in labels]
    rare = Part("x", Dataset.from_dict({"text": texts[-8:]}), labels[-8:], list(range(8)))
    part = Part("x", Dataset.from_dict({"text": texts[:-4]}), labels[:-4], list(range(404)))
    data = TextData(Problem(SINGLE, ("a", "b")), ("text",), {"train": part, "validation": rare})
    assert measure_baselines(data, with_tfidf=True)["validation"]["TF-IDF"]["accuracy"] == 1.0


def test_half_an_excerpt_is_an_excerpt():
    tokenizer = make_tokenizer()
    for rest, number in ((3, 1), (4, 2)):  # of eight tokens beside the special ones
        (excerpts,) = cut_excerpts([" ".join([*["cat"] * 8, *["dog"] * rest])], tokenizer, 10, None)
        assert len(excerpts) == number
