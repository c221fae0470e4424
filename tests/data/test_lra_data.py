"""Sequences of Long Range Arena: padded, cut, read from what people have, and refused in one line."""

import importlib
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value

from experiments.arguments import UserError
from experiments.lra import images, listops, texts
from experiments.lra.data import LraArguments, load_parts
from experiments.lra.examples import Examples, collate, part_sizes
from experiments.lra.jobs import LraTrainingArguments
from experiments.lra.pretraining import MaskedCollator, SelfPretrainingTrainer
from experiments.trainer import ExperimentTrainer
from modeling_sktformer import SKTformerForMaskedLM
from support.builders import make_config


ROWS = [np.array([3, 1, 2]), np.array([0]), np.array([255, 254]), np.array([7, 7, 7, 7])]


def test_batches_are_padded_to_their_longest():
    examples = Examples.of_rows(ROWS, [0, 1, 0, 1], "here")
    batch = collate([examples[0], examples[1]])
    assert batch["input_ids"].tolist() == [[4, 2, 3], [1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [0, 1]
    assert "attention_mask" not in collate([examples[3]])  # nothing is padded
    pairs = Examples.of_rows(ROWS, [1, 0], "here", per_example=2)
    batch = collate([pairs[0], pairs[1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 2, 4)
    assert batch["input_ids"][1].tolist() == [[256, 255, 0, 0], [8, 8, 8, 8]]
    assert batch["labels"].tolist() == [1, 0]


@pytest.mark.parametrize("value", [256, -1])
def test_values_that_are_no_bytes_are_refused(value):
    with pytest.raises(ValueError, match="must lie between 0 and 255; these go from"):
        Examples.of_rows([np.array([7, value])], [0], "here")


def test_examples_are_selected_and_told_apart():
    examples = Examples.of_rows(ROWS, [0, 1, 0, 1], "here")
    assert [len(examples), *examples.select([3, 0]).lengths] == [4, 4, 3]
    assert examples.select([2])[0]["input_ids"].tolist() == [255, 254]
    short = Examples.of_rows([row[:2] for row in ROWS], [0, 1, 0, 1], "here")
    prints = {examples.fingerprint(), short.fingerprint(), examples.select([0, 1, 2]).fingerprint()}
    other = Examples(examples.values, examples.lengths, examples.labels[::-1], "here")
    assert len(prints | {other.fingerprint()}) == 4
    assert examples.select(range(4)).fingerprint() == examples.fingerprint()
    pairs = Examples.of_rows(ROWS, [1, 0], "here", per_example=2)
    pair = pairs.select([1])[0]
    assert (pair["input_ids"].tolist(), pair["lengths"].tolist()) == ([255, 254, 7, 7, 7, 7], [2, 4])


def test_masks_hide_values_and_never_padding():
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 256, length) for length in (400, 100)]
    examples = Examples.of_rows(rows, [1], "here", per_example=2)
    batch = MaskedCollator(257, 0.3)([examples[0]])
    hidden = batch["input_ids"] == 257
    assert torch.equal(hidden, batch["labels"] != -100)
    assert not hidden[1, 100:].any()
    assert 0.25 < hidden.sum().item() / 500 < 0.35
    plain = torch.where(hidden, batch["labels"], batch["input_ids"])
    assert plain[0].tolist() == (rows[0] + 1).tolist()
    assert "attention_mask" in batch
    assert "attention_mask" not in MaskedCollator(257, 0.3, takes_mask=False)([examples[0]])
    tiny = Examples.of_rows([np.array([5])], [0], "here")
    assert MaskedCollator(257, 0.001)([tiny[0]])["labels"].tolist() == [[6]]


def test_masks_depend_on_what_is_collated_alone():
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 256, length) for length in (400, 100, 300)]
    examples = Examples.of_rows(rows, [0, 1, 0], "here")
    collator = MaskedCollator(257, 0.3)

    def hidden(*numbers):
        batch = collator([examples[number] for number in numbers])["labels"] != -100
        return {number: row[: len(rows[number])].tolist() for number, row in zip(numbers, batch, strict=True)}

    torch.manual_seed(0)
    first = hidden(0, 1)
    torch.manual_seed(1)
    assert hidden(0, 1) == first
    # A sequence gets other masks in other company, as in every epoch, and so does one that is there twice.
    assert hidden(0, 2)[0] != first[0]
    assert hidden(1, 0)[0] != first[0]
    one, other = collator([examples[0], examples[0]])["labels"] != -100
    assert not torch.equal(one, other)
    collator.is_training = False
    assert hidden(0, 1, 2) == hidden(0) | hidden(2, 1)
    assert hidden(0)[0][:100] != hidden(1)[1]


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    train, test = (generator.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for n in (50, 10))
    return train, np.arange(50) % 10, test, np.arange(10)


def test_pictures_are_read_from_every_form(arrays, tmp_path):
    train, train_labels, test, test_labels = arrays
    np.savez(tmp_path / "pictures.npz", x_train=train, y_train=train_labels, x_test=test, y_test=test_labels)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    batches = {f"data_batch_{n + 1}": (train[10 * n :][:10], train_labels[10 * n :][:10]) for n in range(5)}
    for name, (pictures, labels) in (batches | {"test_batch": (test, test_labels)}).items():
        content = {b"data": pictures.transpose(0, 3, 1, 2).reshape(10, -1), b"labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-py")
    forms = [images.read_images(tmp_path / n) for n in ("pictures.npz", folder.name, "cifar-10-python.tar.gz")]
    grey = np.rint(train @ np.array([0.2989, 0.5870, 0.1140])).astype(np.uint8).reshape(50, 1024)
    for parts in forms:
        assert {part: len(examples) for part, examples in parts.items()} == {"train": 45, "validation": 5, "test": 10}
        assert parts["train"].sequence(7).tolist() == grey[7].tolist()
        assert parts["validation"].sequence(0).tolist() == grey[45].tolist()
        assert parts["validation"].labels.tolist() == [5, 6, 7, 8, 9]
    assert len({parts["test"].fingerprint() for parts in forms}) == 1


def test_colours_become_the_same_grey_on_every_processor(arrays):
    """Sums of fractions would be rounded on the way, so that halves go up or down by their order."""
    colours = np.moveaxis(np.mgrid[0:256:5, 0:256:5, 0:256], 0, -1).reshape(-1, 3)
    weighed = colours @ np.array([2989, 5870, 1140])
    halves = weighed % 10_000 == 5000
    train, *others = arrays
    train[0] = np.resize(colours[halves], (32, 32, 3))
    grey = images.split_images((train, *others), "pictures")["train"].sequence(0).tolist()
    assert grey == np.resize([round(Fraction(int(value), 10_000)) for value in weighed[halves]], 1024).tolist()


def test_noise_is_uniform_bounded_and_seeded(arrays):
    parts = images.split_images(arrays, "here")
    noisy = images.add_noise(parts, 8, seed=1)
    difference = noisy["train"].values.astype(int) - parts["train"].values
    inside = (parts["train"].values > 8) & (parts["train"].values < 247)
    assert np.abs(difference).max() == 8
    assert abs(difference[inside].std() - 16 / 12**0.5) < 0.05
    assert noisy["train"].fingerprint() == images.add_noise(parts, 8, seed=1)["train"].fingerprint()
    assert noisy["train"].fingerprint() != images.add_noise(parts, 8, seed=2)["train"].fingerprint()
    same = images.add_noise(dict.fromkeys(parts, parts["test"]), 8, seed=1)
    assert len({examples.fingerprint() for examples in same.values()}) == 3  # no part shares the noise of another


def test_pictures_are_read_from_the_hub(arrays, tmp_path):
    """A folder of parquet files is read as what lies there."""
    train, train_labels, test, test_labels = arrays
    train[0], train[1], train[2] = [255, 0, 0], [0, 255, 0], [0, 0, 255]
    columns = Features(img=Image(), label=ClassLabel(names=list(images.CLASSES)))
    for part, pictures, labels in (("train", train, train_labels), ("test", test, test_labels)):
        rows = {"img": [PIL.Image.fromarray(picture) for picture in pictures], "label": labels.tolist()}
        Dataset.from_dict(rows, columns).to_parquet(tmp_path / f"{part}.parquet")
    parts = images.load_images(str(tmp_path), None, str(tmp_path / "cache"))
    assert {part: len(examples) for part, examples in parts.items()} == {"train": 45, "validation": 5, "test": 10}
    assert [set(parts["train"].sequence(n).tolist()) for n in range(3)] == [{76}, {150}, {29}]  # red, green and blue
    same = images.split_images(arrays, "here")
    assert [parts[part].fingerprint() for part in parts] == [same[part].fingerprint() for part in parts]


def test_reviews_are_read_from_the_hub(tmp_path):
    for part in ("train", "test"):
        rows = {"text": [f"{n % 2} {part} {n:02}" for n in range(40)], "label": [n % 2 for n in range(40)]}
        columns = Features(text=Value("string"), label=ClassLabel(names=["neg", "pos"]))
        Dataset.from_dict(rows, columns).to_parquet(tmp_path / f"{part}.parquet")
    parts = texts.load_reviews(str(tmp_path), None, str(tmp_path / "cache"), 100)
    assert {part: len(examples) for part, examples in parts.items()} == {"train": 36, "validation": 4, "test": 40}
    read = {
        part: [bytes(examples.sequence(n)).decode() for n in range(len(examples))] for part, examples in parts.items()
    }
    for part, found in read.items():
        assert [int(text[0]) for text in found] == parts[part].labels.tolist()
    assert sorted(parts["validation"].labels) == [0, 0, 1, 1]
    assert sorted(read["train"] + read["validation"]) == sorted(f"{n % 2} train {n:02}" for n in range(40))
    assert read["test"] == [f"{n % 2} test {n:02}" for n in range(40)]


@pytest.mark.parametrize(
    ("task_name", "generate"), [("listops", "generate_listops"), ("pathfinder", "generate_pathfinder")]
)
def test_what_is_made_is_made_once(task_name, generate, tmp_path, monkeypatch):
    limits: dict[str, Any] = {"min_length": 8, "max_length": 40} if task_name == "listops" else {}
    arguments = LraArguments(
        task_name=task_name, num_generated=100, preprocessing_num_workers=1, cache_dir=str(tmp_path), **limits
    )
    first = load_parts(arguments)
    module = importlib.import_module(f"experiments.lra.{task_name}")
    monkeypatch.setattr(module, generate, lambda *args: pytest.fail("It is made again."))
    again = load_parts(arguments)
    assert [again[part].fingerprint() for part in again] == [first[part].fingerprint() for part in first]
    with pytest.raises(pytest.fail.Exception, match="made again"):
        load_parts(replace(arguments, generation_seed=1))
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        file.write_bytes(b"no longer what it was")
    with pytest.raises(UserError, match="made earlier, is damaged; delete it, and it is made again"):
        load_parts(arguments)


def test_what_another_process_makes_is_waited_for(tmp_path, monkeypatch):
    arguments = LraArguments(
        task_name="listops", num_generated=100, preprocessing_num_workers=1, cache_dir=str(tmp_path), max_length=700
    )
    made, generate = [], listops.generate_listops

    def note(*args):
        made.append(args)
        generate(*args)

    monkeypatch.setattr(listops, "generate_listops", note)
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(load_parts, [arguments, arguments])
    assert len(made) == 1
    assert first["test"].fingerprint() == other["test"].fingerprint()


def test_every_part_has_its_own_limit():
    limits: dict[str, Any] = {"max_train_samples": 7, "max_eval_samples": 3, "max_predict_samples": 5}
    arguments = LraArguments(task_name="retrieval", stand_in=True, num_generated=100, max_seq_length=60, **limits)
    lengths = {part: len(examples) for part, examples in load_parts(arguments).items()}
    assert lengths == {"train": 7, "validation": 3, "test": 5}


def test_pictures_that_are_none_are_refused(arrays, tmp_path):
    train, train_labels, test, test_labels = arrays
    np.savez(tmp_path / "a.npz", x_train=train)
    np.savez(tmp_path / "b.npz", x_train=train[:, :16], y_train=train_labels, x_test=test, y_test=test_labels)
    np.savez(tmp_path / "c.npz", x_train=train, y_train=train_labels + 1, x_test=test, y_test=test_labels)
    wholes = {"x_train": train, "y_train": train_labels, "x_test": test, "y_test": test_labels}
    np.savez(tmp_path / "f.npz", **wholes | {"x_train": train / 255, "x_test": test / 255})
    np.savez(tmp_path / "g.npz", **wholes | {"x_train": train.astype(int) - 128})
    np.savez(tmp_path / "h.npz", **wholes | {"x_train": train[:9], "y_train": train_labels[:9]})
    np.savez(tmp_path / "i.npz", **wholes | {"x_train": train.astype(str)})
    np.savez(tmp_path / "j.npz", **wholes | {"x_train": train.reshape(50, 16, 64, 3)})
    np.savez(tmp_path / "k.npz", **wholes | {"x_test": test[..., 0].reshape(10, 64, 16)})
    np.savez(tmp_path / "l.npz", **wholes | {"y_test": test_labels[1:]})
    (tmp_path / "d.tar.gz").write_bytes(b"no archive")
    (tmp_path / "e").mkdir()

    class Bad:
        def __reduce__(self):
            return (print, ("run",))

    for name in (f"data_batch_{n}" for n in range(1, 6)):
        (tmp_path / "e" / name).write_bytes(pickle.dumps({b"data": Bad()}))
    for name, message in (
        ("a.npz", "has no y_train, x_test, y_test"),
        ("b.npz", "pictures of 512 pixels; they must be 32 x 32"),
        ("c.npz", "the label 10 for train; labels must be whole, from 0 to 9"),
        ("l.npz", "has 10 pictures for test and 9 labels"),
        ("d.tar.gz", "cannot be read as pictures"),
        ("f.npz", "pixels from 0 to 1; they must be whole, from 0 to 255"),
        ("g.npz", "pixels from -128 to 127; they must"),
        ("h.npz", "has 9 training pictures; give at least 10"),
        ("i.npz", "cannot be read as pictures"),
        ("j.npz", "pictures of 16 x 64 pixels; they must be 32 x 32"),
        ("k.npz", "pictures of 64 x 16 pixels; they must be 32 x 32"),
        ("e", "print is not part of CIFAR-10"),
    ):
        with pytest.raises(UserError, match=message):
            images.read_images(tmp_path / name)


def write_reviews(folder, number=20):
    for part in ("train", "test"):
        for label in ("neg", "pos"):
            (folder / part / label).mkdir(parents=True)
            for n in range(number):
                (folder / part / label / f"{n}.txt").write_text(f"{label} {part} {n}")


def test_reviews_are_read_from_folders_and_tables(tmp_path):
    write_reviews(tmp_path / "a")
    parts = texts.read_reviews(tmp_path / "a", 9)
    assert {part: len(examples) for part, examples in parts.items()} == {"train": 36, "validation": 4, "test": 40}
    assert sorted(parts["validation"].labels) == [0, 0, 1, 1]
    read = {bytes(parts[part].sequence(n)) for part in ("train", "validation") for n in range(len(parts[part]))}
    assert read == {f"{label} train {n}".encode()[:9] for label in ("neg", "pos") for n in range(20)}
    assert parts["train"].lengths.max() == 9
    (tmp_path / "b").mkdir()
    for part in ("train", "test"):
        lines = [f"{label} {part} {n},{label}" for label in ("neg", "pos") for n in range(20)]
        (tmp_path / "b" / f"{part}.csv").write_text("\n".join(["text,label", *lines]))
    table = texts.read_reviews(tmp_path / "b", 9)
    assert {part: len(examples) for part, examples in table.items()} == {"train": 36, "validation": 4, "test": 40}
    folder, tests = (
        [(bytes(of["test"].sequence(n)), of["test"].labels[n]) for n in range(40)] for of in (parts, table)
    )
    assert sorted(tests) == sorted(folder)
    for name, content, message in (
        ("train.csv", "words,label\na,1", "has no column text"),
        ("train.csv", "text,label\na,1\nb,3", "row 2: the label is 3"),
    ):
        (tmp_path / "b" / name).write_text(content)
        with pytest.raises(UserError, match=message):
            texts.read_reviews(tmp_path / "b", 9)
    (tmp_path / "b" / "train.jsonl").write_text('{"text": null, "label": 1}')
    (tmp_path / "b" / "train.csv").unlink()
    with pytest.raises(UserError, match="train, text 1 is empty"):
        texts.read_reviews(tmp_path / "b", 9)
    (tmp_path / "b" / "train.jsonl").write_text('{"text": ["a", "b"], "label": 1}')
    with pytest.raises(UserError, match=r"row 1: \['a', 'b'\] stands in the place of a text; mend it"):
        texts.read_reviews(tmp_path / "b", 9)
    (tmp_path / "a" / "test" / "pos" / "77.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"pos/77.txt cannot be read \(No such file or directory\); mend it or leave"):
        texts.read_reviews(tmp_path / "a", 9)
    (tmp_path / "a" / "test" / "pos" / "77.txt").unlink()
    (tmp_path / "a" / "test" / "pos" / "7.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"pos/7.txt is empty"):
        texts.read_reviews(tmp_path / "a", 9)
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError, match="neither a folder train nor a table"):
        texts.read_reviews(tmp_path / "c", 9)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("0 1", r"here has 1 training text\(s\) with the label neg; give at least 2, of which one chooses the model"),
        ("0 0 0 1", r"1 training text\(s\) with the label pos"),
        ("1 1 1", r"0 training text\(s\) with the label neg"),
        ("0 0", r"0 training text\(s\) with the label pos"),
    ],
)
def test_both_labels_are_trained_and_validated(tmp_path, labels, message):
    folder = tmp_path / "here"
    folder.mkdir()
    for part, of_part in (("train", labels), ("test", "0 1")):
        rows = [f"text {n},{label}" for n, label in enumerate(of_part.split())]
        (folder / f"{part}.csv").write_text("\n".join(["text,label", *rows]))
    with pytest.raises(UserError, match=message):
        texts.read_reviews(folder, 9)
    (folder / "train.csv").write_text("text,label\na,0\nb,1\nc,0\nd,1\n")
    assert sorted(texts.read_reviews(folder, 9)["train"].labels) == [0, 1]


def test_other_data_sets_say_what_they_lack(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,1\nb,0\n")
    with pytest.raises(UserError, match="has no part test; it has train"):
        texts.load_reviews(str(tmp_path), None, str(tmp_path / "cache"), 9)
    with pytest.raises(UserError, match="has no part train with the columns img and label"):
        images.load_images(str(tmp_path), None, str(tmp_path / "cache"))


def test_pairs_are_read_and_bad_rows_named(tmp_path):
    rows = [f"{n % 2}.0\ta{n}\tb{n}\tfirst text {n}\tother text {n}" for n in range(4)]
    for part in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_text("\n".join(rows) + "\n")
    parts = texts.read_pairs(tmp_path, 8)
    assert parts["train"].per_example == 2
    assert parts["validation"].labels.tolist() == [0, 1, 0, 1]
    assert bytes(parts["test"][1]["input_ids"]) == b"first teother te"
    for row, message in (
        ("1.0\ta\tb\tonly one", "line 2: .*has 4 columns"),
        ("2\ta\tb\tone\ttwo", "line 2: .*begins with '2'"),
        ("1\ta\tb\t \ttwo", "line 2: the first text is empty"),
        ("1\ta\tb\tone\t", "line 2: the second text is empty"),
    ):
        (tmp_path / "new_aan_pairs.eval.tsv").write_text(f"{rows[0]}\n{row}\n")
        with pytest.raises(UserError, match=message):
            texts.read_pairs(tmp_path, 8)
    (tmp_path / "new_aan_pairs.test.tsv").unlink()
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("")
    with pytest.raises(UserError, match=r"new_aan_pairs.eval.tsv is empty"):
        texts.read_pairs(tmp_path, 8)


def test_tables_may_begin_with_a_mark_and_end_with_empty_lines(tmp_path):
    row = "1\ta\tb\tfirst\tother"
    for part in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_text(f"\ufeff{row}\n{row}\n\n\n", encoding="utf-8")
    assert texts.read_pairs(tmp_path, 8)["test"].labels.tolist() == [1, 1]
    (tmp_path / "new_aan_pairs.test.tsv").write_text(f"{row}\n\n{row}\n")
    with pytest.raises(UserError, match=r"line 2: .*has 1 columns"):
        texts.read_pairs(tmp_path, 8)


@pytest.mark.parametrize("labels", ["0 1", "0.0 1.0", "neg pos", "Negative Positive", "False True"])
def test_labels_of_reviews_may_be_words(tmp_path, labels):
    lines = [f"text {n},{label}" for n, label in enumerate(labels.split() * 2)]
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("\n".join(["text,label", *lines]))
    assert texts.read_reviews(tmp_path, 9)["test"].labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("pixels", [np.array([True, False]), np.array([0, 1]), np.array([34.5, 200.0])])
def test_pixels_that_are_no_grey_values_are_refused(arrays, pixels):
    _, train_labels, test, test_labels = arrays
    pictures = np.resize(pixels, (50, 1024))
    with pytest.raises(UserError, match=r"pixels from \S+ to \S+; they must be whole, from 0 to 255"):
        images.split_images((pictures, train_labels, test, test_labels), "here")


def test_pairs_that_are_made_share_a_topic_when_they_belong_together():
    sizes = part_sizes(240, 20)
    parts, again = (texts.make_pairs(sizes, 300, seed=0) for _ in range(2))
    assert sizes == {name: len(part) for name, part in parts.items()} == {"train": 200, "validation": 20, "test": 20}
    assert parts["train"].fingerprint() == again["train"].fingerprint()
    assert parts["train"].labels.sum() == 100
    assert parts["train"].lengths.max() <= 300

    def shared(number):
        first, other = (set(bytes(parts["train"].sequence(n)).split()[:-1]) for n in (2 * number, 2 * number + 1))
        return len(first & other) / len(first | other)

    scores = np.array([shared(n) for n in range(200)])
    labels = parts["train"].labels
    assert scores[labels == 1].mean() > 2 * scores[labels == 0].mean()
    assert ((scores > np.median(scores)) == labels).mean() > 0.9


def test_a_limit_takes_examples_from_all_over():
    made: dict[str, Any] = {"task_name": "retrieval", "stand_in": True, "num_generated": 100, "max_seq_length": 60}
    whole = load_parts(LraArguments(**made))["train"]
    some = load_parts(LraArguments(**made, max_train_samples=3))["train"]
    assert some.fingerprint() == whole.select([0, round(79 / 2), 79]).fingerprint()


def test_reviews_that_choose_the_model_are_drawn_from_all_over(tmp_path):
    write_reviews(tmp_path / "a", 40)
    parts = texts.read_reviews(tmp_path / "a", 20)
    held = [bytes(parts["validation"].sequence(n)).decode() for n in range(len(parts["validation"]))]
    files = sorted(f"{n}.txt" for n in range(40))
    places = sorted(files.index(f"{text.split()[-1]}.txt") for text in held if text.startswith("neg"))
    assert places != [0, 10, 20, 30]


def test_training_masks_anew_after_an_evaluation(tmp_path, monkeypatch):
    collator, seen = MaskedCollator(29, 0.3), []
    training = LraTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    model = SKTformerForMaskedLM(make_config())
    trainer = SelfPretrainingTrainer(1, model=model, args=training, data_collator=collator)
    monkeypatch.setattr(ExperimentTrainer, "evaluation_loop", lambda self: seen.append(collator.is_training))
    trainer.evaluation_loop()
    assert (seen, collator.is_training) == ([False], True)
