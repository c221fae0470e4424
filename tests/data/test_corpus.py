"""The text of pretraining: flags, files, data sets, and what goes wrong with them."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetNotFoundError

from experiments.arguments import UserError, parse_args
from experiments.loading import load_prepared
from experiments.text.corpus import CorpusArguments
from support.texts import load, make_texts, read_documents, write


# Reading


@pytest.mark.parametrize("streaming", [False, True])
def test_every_kind_of_file_is_read(tmp_path, streaming):
    rows = ["balan comer", "dunit"]
    table = Dataset.from_dict({"text": rows, "number": [1, 2]})
    write(tmp_path / "a.txt", "balan comer\ndunit")
    write(tmp_path / "a.csv", "text,number\nbalan comer,1\ndunit,2\n")
    write(tmp_path / "a.json", json.dumps([{"text": row} for row in rows]))
    write(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": row}) for row in rows))
    table.to_parquet(tmp_path / "a.parquet")
    for suffix in ("txt", "csv", "json", "jsonl", "parquet"):
        path = str(tmp_path / f"a.{suffix}")
        corpus = load(tmp_path, train_file=[path], streaming=streaming, validation_fraction=0)
        assert list(corpus.train[0]) == rows, suffix
        assert list(corpus.train[0]) == rows, "a source can be read again"
        assert corpus.validation == []
        assert corpus.train[0].document_unit == ("blank_line" if suffix == "txt" else "row")


def test_other_text_of_the_same_name_and_time_is_read(tmp_path):
    """As archives and copies that keep times leave it."""
    file, folder = tmp_path / "a.txt", tmp_path / "folder"
    for text in ("balan comer", "dunit"):
        for path in (file, folder / "train.txt"):
            write(path, text)
            os.utime(path, (1, 1))
        for source in ({"train_file": [str(file)]}, {"datasets": [str(folder)]}):
            corpus = load(tmp_path, validation_fraction=0, **source)
            assert list(corpus.train[0]) == [text]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_with_more_fields_than_columns_are_not_shifted(tmp_path, streaming):
    rows = ["balan comer", "dunit"]
    write(tmp_path / "a.csv", "text,author\nbalan comer,Anna,\ndunit,Bela,\n")
    flags = {"streaming": streaming, "text_column": "text", "validation_fraction": 0}
    assert list(load(tmp_path, train_file=[str(tmp_path / "a.csv")], **flags).train[0]) == rows
    write(tmp_path / "a.csv", "text,author\nbalan comer,Anna,x\ndunit,Bela,y\n")
    with pytest.raises(
        UserError, match=r"a\.csv cannot be read: a row has more fields than the first line, where all"
    ):
        load(tmp_path, train_file=[str(tmp_path / "a.csv")], **flags)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_document_ends_with_its_file(tmp_path, streaming):
    write(tmp_path / "a[1].txt", "balan\ncomer")
    write(tmp_path / "b.txt", "")
    write(tmp_path / "c.txt", "dunit\n\nfilan\n")
    corpus = load(tmp_path, train_file=[str(tmp_path / "*.txt")], streaming=streaming, validation_fraction=0)
    assert read_documents(corpus.train[0]) == [["balan", "comer"], ["dunit"], ["filan"]]


def test_splits_of_a_folder_are_used(tmp_path):
    folder = tmp_path / "folder"
    write(folder / "train.txt", "balan\n\ncomer")
    write(folder / "validation.txt", "dunit")
    corpus = load(tmp_path, datasets=[str(folder)])
    assert read_documents(corpus.train[0]) == [["balan"], ["comer"]]
    assert read_documents(corpus.validation[0]) == [["dunit"]]
    replaced = load(tmp_path, datasets=[str(folder)], validation_file=[write(tmp_path / "other.txt", "filan")])
    assert read_documents(replaced.validation[0]) == [["filan"]]


def test_validation_text_of_one_source_spares_the_others(tmp_path):
    folder = tmp_path / "folder"
    write(folder / "train.txt", "balan\n\ncomer")
    write(folder / "validation.txt", "dunit")
    path = write(tmp_path / "more.txt", "filan\n\nhumer")
    corpus = load(tmp_path, datasets=[str(folder)], train_file=[path], probabilities=[3, 1])
    assert [read_documents(source) for source in corpus.validation] == [[["dunit"]]]
    assert read_documents(corpus.train[1]) == [["filan"], ["humer"]]
    assert corpus.probabilities == [0.75, 0.25]


def test_saved_data_sets_are_read(tmp_path):
    Dataset.from_dict({"body": ["balan", None, "comer"]}).save_to_disk(tmp_path / "saved")
    corpus = load(tmp_path, datasets=[str(tmp_path / "saved")], validation_fraction=0)
    assert list(corpus.train[0]) == ["balan", "", "comer"]


@pytest.mark.parametrize("unit", ["row", "blank_line"])
@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_documents_are_chosen_by_their_content(tmp_path, unit, streaming):
    documents = [f"{text}\nand more" for text in make_texts(400)]
    shuffled = random.Random(0).sample(documents, k=len(documents))
    splits = []
    for name, texts in (("a", documents), ("b", [*shuffled, documents[0], "one more"])):
        path = write(tmp_path / f"{name}.txt", "\n\n".join(texts))
        flags = {"train_file": [path], "validation_fraction": 0.1, "document_unit": unit, "streaming": streaming}
        corpus = load(tmp_path, **flags)
        splits.append(
            [{tuple(document) for document in read_documents(side[0])} for side in (corpus.train, corpus.validation)]
        )
    (train, validation), (other_train, other_validation) = splits
    assert not train & validation
    assert not other_train & other_validation
    assert (other_train | other_validation) - (train | validation) == {("one more",)}
    assert validation <= other_validation
    total = len(train) + len(validation)
    assert total == (400 if unit == "blank_line" else 401)
    assert 0.05 < len(validation) / total < 0.16


def test_a_small_corpus_holds_out_at_least_one_document(tmp_path):
    path = write(tmp_path / "train.txt", "balan\n\ncomer\n\ndunit")
    corpus = load(tmp_path, train_file=[path])
    assert len(read_documents(corpus.train[0])) == 2
    assert len(read_documents(corpus.validation[0])) == 1


def test_a_text_without_blank_lines_is_held_out_in_parts(tmp_path):
    path = write(tmp_path / "train.txt", "\n".join(make_texts(300)))
    corpus = load(tmp_path, train_file=[path])
    rows = [row for source in (*corpus.train, *corpus.validation) for row in source if row]
    assert sorted(rows) == sorted(make_texts(300))
    assert 0 < len(read_documents(corpus.validation[0])) < len(read_documents(corpus.train[0]))


def test_text_without_spaces_is_divided_too(tmp_path):
    text = "河水流过山谷。" * 100
    corpus = load(tmp_path, train_file=[write(tmp_path / "river.txt", text)], validation_fraction=0.1)
    assert ["".join(side[0]) for side in (corpus.train, corpus.validation)] == [text[:-70], text[-70:]]


def test_a_first_word_longer_than_what_is_to_be_left_stays_whole(tmp_path):
    text = "internationalisation is a long word and more follow"
    corpus = load(tmp_path, train_file=[write(tmp_path / "words.txt", text)], validation_fraction=0.7)
    sides = ["".join(side[0]) for side in (corpus.train, corpus.validation)]
    assert sides == ["internationalisation ", "is a long word and more follow"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("unit", ["auto", "row", "file"])
def test_of_a_corpus_that_is_one_document_the_end_is_held_out(tmp_path, caplog, unit, streaming):
    caplog.set_level("INFO")
    text = " ".join(make_texts(100)) + "\n" * (unit == "auto") + "balan"
    flags = {"train_file": [write(tmp_path / "novel.txt", text)], "document_unit": unit, "streaming": streaming}
    corpus = load(tmp_path, **flags, validation_fraction=0.1)
    train, validation = ("".join(side[0]) for side in (corpus.train, corpus.validation))
    assert train + validation == text.replace("\n", "")
    assert 0.1 * len(text) <= len(validation) < 0.1 * len(text) + 10
    assert train.endswith(" "), "no word is cut"
    assert f"one document: its last {len(validation)} characters are held out" in caplog.text
    fingerprints = {source.fingerprint for source in (*corpus.train, *corpus.validation)}
    assert len(fingerprints) == 2
    again = load(tmp_path, **flags, validation_fraction=0.2)
    assert again.train[0].fingerprint not in fingerprints


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_can_be_a_document(tmp_path, streaming):
    for name, texts in (
        ("a", ["balan", "", "comer"]),
        ("b", ["", "dunit"]),
        ("c", []),
        ("d", ["filan", " ", "gemer"]),
    ):
        write(tmp_path / f"{name}.txt", "\n".join(texts))
    flags = {"train_file": [str(tmp_path / "*.txt")], "streaming": streaming}
    corpus = load(tmp_path, document_unit="file", validation_fraction=0, **flags)
    assert [[row.split() for row in document] for document in read_documents(corpus.train[0])] == [
        [["balan", "comer"]],
        [["dunit"]],
        [["filan", "gemer"]],
    ]
    assert corpus.fingerprint != load(tmp_path, document_unit="row", validation_fraction=0, **flags).fingerprint
    held_out = load(tmp_path, document_unit="file", validation_fraction=0.4, **flags)
    documents = [*read_documents(held_out.train[0]), *read_documents(held_out.validation[0])]
    assert sorted(documents) == sorted(read_documents(corpus.train[0])), "files are held out as a whole"


@pytest.mark.parametrize("streaming", [False, True])
def test_other_encodings_are_read(tmp_path, streaming):
    for name, text in (("train.txt", "café\n\nthé"), ("train.csv", "text\ncafé\nthé\n")):
        files = [write(tmp_path / name, text, "latin-1")]
        corpus = load(tmp_path, train_file=files, encoding="latin-1", validation_fraction=0, streaming=streaming)
        assert [row for row in corpus.train[0] if row] == ["café", "thé"]


def test_a_corpus_names_its_files(tmp_path, caplog):
    caplog.set_level("INFO")
    for number in range(42):
        write(tmp_path / "novels" / f"{number:02d}.txt", f"{number} balan\n\n{number} comer")
    pattern = str(tmp_path / "novels" / "*.txt")
    corpus = load(tmp_path, train_file=[pattern])
    assert corpus.description == "42 files: 00.txt, 01.txt, 02.txt, ... and 39 more"
    assert f"Training text: {corpus.description}." in caplog.text
    assert load(tmp_path, train_file=[str(tmp_path / "novels" / "07.txt")]).description == "07.txt"
    folder = str(tmp_path / "novels")
    both = load(tmp_path, datasets=[folder], train_file=[pattern.replace("*", "0[12]")])
    assert both.description == "novels (train); 2 files: 01.txt, 02.txt"
    assert both.hub_datasets == ()


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_errors_name_the_file_that_is_at_fault(tmp_path, suffix):
    texts = {"txt": ("balan", "café"), "jsonl": ('{"text": "balan"}\n', '{"text": "café}\n')}
    for name, text in zip("abc", (texts[suffix][0], *texts[suffix][::-1]), strict=True):
        write(tmp_path / f"{name}.{suffix}", text, "latin-1" if suffix == "txt" else "utf-8")
    with pytest.raises(UserError, match=rf"/b\.{suffix} ") as caught:
        load(tmp_path, train_file=[str(tmp_path / f"*.{suffix}")])
    assert "*" not in str(caught.value)


def test_text_that_is_trained_on_is_not_measured_on_without_a_word(tmp_path, caplog):
    files = [write(tmp_path / f"{name}.txt", name) for name in ("balan", "comer", "dunit")]
    load(tmp_path, train_file=files[:2], validation_file=files[2:])
    assert "says little" not in caplog.text
    load(tmp_path, train_file=[str(tmp_path / "*.txt")], validation_file=files[:1])
    assert "balan.txt stands in --train_file, too: of a model that learns it the loss says little" in caplog.text
    load(tmp_path, train_file=files, validation_file=files)
    assert "balan.txt and 2 more stand in --train_file, too" in caplog.text


def test_the_fingerprint_of_a_corpus_follows_all_of_its_text(tmp_path):
    texts = {"train": "balan\n\ncomer", "more": "dunit", "validation": "filan"}

    def fingerprint(folder: str, **changes: str) -> str:
        files = {name: write(tmp_path / folder / f"{name}.txt", text) for name, text in (texts | changes).items()}
        flags = {"train_file": [files["train"], files["more"]], "validation_file": [files["validation"]]}
        return load(tmp_path, **flags).fingerprint

    changed = [fingerprint(name, **{name: f"{texts[name]} more"}) for name in texts]
    assert len({fingerprint("here"), *changed}) == 4
    assert fingerprint("here") == fingerprint("there")


def test_fingerprints_follow_the_content_of_files(tmp_path):
    text = "balan\n\ncomer\n\ndunit"

    def fingerprint(name: str, content: str = text, **flags) -> str:
        return load(tmp_path, train_file=[write(tmp_path / name / "train.txt", content)], **flags).train[0].fingerprint

    expected = fingerprint("a")
    assert fingerprint("b") == expected
    assert fingerprint("c", text + "\n\nfilan") != expected
    assert fingerprint("a", document_unit="row") != expected
    assert fingerprint("a", validation_fraction=0) != expected


def test_flags_and_recipes_reach_the_arguments(tmp_path):
    recipe = write(tmp_path / "data.yaml", "datasets: [owner/a, owner/b:c@d]\nprobabilities: [1, 3]\n")
    (arguments,) = parse_args([CorpusArguments], ["--recipe", recipe, "--document_unit", "blank_line", "--streaming"])
    assert arguments.datasets == ["owner/a", "owner/b:c@d"]
    assert arguments.probabilities == [1.0, 3.0]
    assert arguments.document_unit == "blank_line"
    assert arguments.streaming


def test_a_data_set_is_named_as_run_mlm_does(tmp_path):
    arguments = CorpusArguments(dataset_name="owner/name@main", dataset_config_name="small")
    assert arguments.datasets == ["owner/name:small@main"]
    write(tmp_path / "folder" / "train.txt", "balan\n\ncomer")
    assert load(tmp_path, dataset_name=str(tmp_path / "folder")).description == "folder (train)"


# The Hub


@pytest.fixture
def cached_hub_dataset(tmp_path) -> str:
    """A data set as an earlier download has left it in the cache; returns its revision."""
    revision = "0123456789abcdef" * 2 + "01234567"
    write(tmp_path / "source" / "train.jsonl", '{"text": "balan"}\n{"text": "comer"}\n')
    prepared = load_dataset(str(tmp_path / "source"), cache_dir=str(tmp_path / "elsewhere"))["train"]
    source = Path(prepared.cache_files[0]["filename"]).parent
    folder = tmp_path / "cache" / "owner___name" / "default" / "0.0.0" / revision
    shutil.copytree(source, folder)
    (folder / "source-train.arrow").rename(folder / "name-train.arrow")
    return revision


def test_cached_data_sets_are_read_without_a_network(tmp_path, cached_hub_dataset):
    corpus = load(tmp_path, datasets=[f"owner/name:default@{cached_hub_dataset}"], validation_fraction=0)
    assert list(corpus.train[0]) == ["balan", "comer"]
    assert corpus.hub_datasets == ("owner/name",)


def test_another_cached_revision_is_not_taken_for_the_one_asked_for(tmp_path, cached_hub_dataset):
    with pytest.raises(UserError, match=f"cache holds revision {cached_hub_dataset}"):
        load(tmp_path, datasets=["owner/name:default@" + "f" * 40])
    prepared, cache = ("owner/name", "default"), str(tmp_path / "cache")
    assert load_prepared(*prepared, cached_hub_dataset, cache, "train")["text"][:] == ["balan", "comer"]
    assert list(load_prepared(*prepared, None, cache)) == ["train"]
    with pytest.raises(UserError, match=f"cache holds revision {cached_hub_dataset}"):
        load_prepared(*prepared, "f" * 40, cache)


def test_unreachable_data_sets_are_explained(tmp_path):
    with pytest.raises(UserError, match=r"owner/other .*HF_HUB_OFFLINE.*--train_file"):
        load(tmp_path, datasets=["owner/other"])


def test_unknown_data_sets_are_explained(tmp_path, monkeypatch):
    def find_nothing(path, *args, **options):
        raise DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr("experiments.loading.load_dataset_builder", find_nothing)
    with pytest.raises(UserError, match=r"owner/other.*hf auth login"):
        load(tmp_path, datasets=["owner/other"])


# Mistakes


def flags_of_mistake(name: str, folder: Path) -> dict:
    """The flags of a mistake by its name, with the files that it takes."""
    text = write(folder / "train.txt", "balan\n\ncomer")
    write(folder / "script" / "script.py", "")
    (folder / "empty").mkdir()
    flags: dict[str, dict] = {
        "missing file": {"train_file": [str(folder / "missing.txt")]},
        "pattern without a match": {"train_file": [str(folder / "missing*.txt")]},
        "brackets": {"train_file": [str(folder / "a [1]" / "*.txt")]},
        "unknown type": {"train_file": [write(folder / "train.pdf", "x")]},
        "empty file": {"train_file": [write(folder / "empty.txt", "")]},
        "blank file": {"train_file": [write(folder / "blank.txt", "\n\n  \n")]},
        "blank validation file": {"train_file": [text], "validation_file": [str(folder / "blank.txt")]},
        "no text at all": {"train_file": [write(folder / "null.jsonl", '{"text": null}\n')]},
        "no such column": {"train_file": [write(folder / "a.csv", "body,n\nx,1\n")], "text_column": "text"},
        "column of numbers": {"train_file": [str(folder / "a.csv")], "text_column": "n"},
        "two columns of text": {"train_file": [write(folder / "b.csv", "body,title\nx,y\n")]},
        "broken json": {"train_file": [write(folder / "broken.jsonl", "{not json\n")]},
        "single word": {"train_file": [write(folder / "single.txt", "balan")]},
        "missing folder": {"datasets": ["./missing/folder"]},
        "empty folder": {"datasets": [str(folder / "empty")]},
        "known short id": {"datasets": ["wikitext"]},
        "unknown short id": {"datasets": ["something"]},
        "not a data set": {"datasets": ["@main"]},
        "script": {"datasets": [str(folder / "script")]},
        "revision of a folder": {"datasets": [f"{folder}@main"]},
        "unknown config": {"datasets": [f"{folder / 'script' / '..'}:nothing"]},
        "too few probabilities": {"train_file": [text, text], "probabilities": [1.0]},
        "negative probability": {"train_file": [text, text], "probabilities": [1.0, -1.0]},
        "mixed stream": {"train_file": [text, str(folder / "a.csv")], "streaming": True},
        "mixed pattern": {"train_file": [str(folder / "t*")], "probabilities": [1.0]},
        "fraction": {"validation_fraction": 1.0},
        "validation only": {"validation_file": [text]},
        "two spellings": {"dataset_name": "owner/name", "datasets": ["owner/name"]},
        "configuration alone": {"dataset_config_name": "small"},
        "unknown encoding": {"train_file": [text], "encoding": "utf-9"},
        "rows as files": {"train_file": [str(folder / "a.csv")], "document_unit": "file"},
        "encoding of a data set": {"datasets": [str(folder)], "encoding": "latin-1"},
        "data sets as files": {"datasets": [str(folder)], "document_unit": "file"},
        "no processes": {"preprocessing_num_workers": 0},
    }
    write(folder / "text.jsonl", '{"text": "x"}')
    if name == "mixed pattern":
        (folder / "train.pdf").unlink()
    return flags[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing file", r"missing\.txt: no such file"),
        ("pattern without a match", r"missing\*\.txt: no such file"),
        ("brackets", r"a \[1\]/\*\.txt: no such file; .*brackets are part of a pattern: write \[\[\] for one"),
        ("unknown type", r"train\.pdf: files of type `\.pdf` cannot be read; give \.txt, .*\.parquet"),
        ("empty file", r"empty\.txt holds no text"),
        ("blank file", r"blank\.txt holds no text in its column `text`"),
        ("blank validation file", r"blank\.txt holds no text"),
        ("no text at all", r"null\.jsonl holds text in the columns \(none\) of text"),
        ("no such column", r"there is no column --text_column text; there is body, n"),
        ("column of numbers", r"in the columns body of body, n"),
        ("two columns of text", r"in the columns body, title of body, title; name one"),
        ("broken json", r"broken\.jsonl cannot be read: .*JSON"),
        ("single word", r"single\.txt holds a single word; give more text"),
        ("missing folder", r"no folder ./missing/folder"),
        ("empty folder", r"doesn't contain any data files"),
        ("known short id", r"wikitext.*owner/name"),
        ("unknown short id", r"something.*owner/name"),
        ("not a data set", r"path\[:config\]\[@revision\]"),
        ("script", r"Python script.*parquet"),
        ("revision of a folder", r"no revisions"),
        ("unknown config", r"BuilderConfig 'nothing' not found.*path:config"),
        ("too few probabilities", r"1 numbers for 2 sources; give one for each"),
        ("negative probability", r"positive numbers"),
        ("mixed stream", r"--streaming.*--probabilities"),
        ("mixed pattern", r"several types"),
        ("fraction", r"--validation_fraction is 1\.0"),
        ("validation only", r"without --train_file"),
        ("two spellings", r"--dataset_name and --datasets"),
        ("configuration alone", r"--dataset_config_name small is given without --dataset_name"),
        ("unknown encoding", r"unknown encoding: utf-9\); name its --encoding"),
        ("rows as files", r"a\.csv: --document_unit file is for \.txt files"),
        ("encoding of a data set", r"--encoding latin-1 is for --train_file and --validation_file"),
        ("data sets as files", r"--document_unit file.*--train_file"),
        ("no processes", r"--preprocessing_num_workers is 0"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, name, message):
    flags = flags_of_mistake(name, tmp_path / "data")
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, **flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_folders_may_have_brackets_in_their_names(tmp_path, monkeypatch, streaming):
    folder = tmp_path / "books [7]"
    folder.mkdir()
    write(folder / "a.txt", "one line\n")
    monkeypatch.chdir(folder)
    corpus = load(tmp_path, train_file=["a.txt"], streaming=streaming, validation_fraction=0)
    assert list(corpus.train[0]) == ["one line"]


def test_a_column_that_is_not_there_is_named(tmp_path):
    path = write(tmp_path / "two.csv", "title,body\na,b\n")
    with pytest.raises(UserError, match="there is no column --text_column foo; there is title, body"):
        load(tmp_path, train_file=[path], text_column="foo")


@pytest.mark.parametrize("streaming", [False, True])
def test_text_that_is_not_utf8_is_explained(tmp_path, streaming):
    path = write(tmp_path / "latin.txt", "balan\n\n" * 20_000 + "café\n", "latin-1")
    with pytest.raises(UserError, match=r"latin\.txt is not written in utf-8 .*--encoding"):
        load(tmp_path, train_file=[path], streaming=streaming)
    with pytest.raises(UserError, match=r"latin\.txt is not written in utf-16 .*--encoding"):  # nor says which half
        load(tmp_path, train_file=[path], streaming=streaming, encoding="utf-16")
