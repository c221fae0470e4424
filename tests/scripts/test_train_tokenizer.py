"""The tokenizer that is trained on a corpus: its vocabulary, its file, and the command line that makes it."""

import itertools
import json
import logging
import os
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, BertTokenizer

import train_tokenizer
from experiments.arguments import UserError
from experiments.text.source import TextSource
from experiments.text.tokenizer import SPECIAL_TOKENS, sample_texts, save_tokenizer, train_wordpiece
from train_tokenizer import main


SCRIPT = Path(train_tokenizer.__file__)


def make_texts(num_texts: int = 300, seed: int = 0) -> list[str]:
    """Rows of made-up words, frequent ones and rare ones, with capitals, accents and punctuation."""
    generator = random.Random(seed)
    syllables = ["ba", "co", "dé", "fu", "Gi", "lan", "mer", "nit", "pos", "tür", "wa"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(500)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    return [" ".join(generator.choices(words, weights, k=20)) + "." for _ in range(num_texts)]


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return train_wordpiece(make_texts(), vocab_size=400, model_max_length=64)


def test_special_tokens_stand_in_the_order_of_bert(tokenizer):
    assert tuple(tokenizer.convert_ids_to_tokens(range(5))) == SPECIAL_TOKENS
    names = ("pad", "unk", "cls", "sep", "mask")
    assert [getattr(tokenizer, f"{name}_token_id") for name in names] == [0, 1, 2, 3, 4]
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]


def test_the_vocabulary_has_the_size_asked_for(tokenizer):
    assert len(tokenizer) == 400
    assert sorted(tokenizer.get_vocab().values()) == list(range(400))


def test_frequent_words_are_one_token_and_rare_ones_several():
    tokenizer = train_wordpiece(["clock " * 50 + "cocl"] * 3, vocab_size=200)
    assert tokenizer.tokenize("clock") == ["clock"]
    assert len(tokenizer.tokenize("kloc")) > 1
    assert tokenizer.unk_token not in tokenizer.tokenize("kloc")


def test_a_saved_tokenizer_is_found_by_the_auto_class(tmp_path, tokenizer):
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    config = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "BertTokenizer"
    assert type(loaded) is BertTokenizer
    assert loaded.model_max_length == 64
    texts = [*make_texts(20, seed=1), "Unseen 中文 words, $5!"]
    expected = tokenizer(texts, texts[::-1], padding=True)
    assert loaded(texts, texts[::-1], padding=True).data == expected.data
    assert set(expected) == {"input_ids", "token_type_ids", "attention_mask"}
    assert 1 in expected["token_type_ids"][0]
    assert len(loaded(" ".join(texts), truncation=True)["input_ids"]) == 64


def test_lower_case_is_a_choice_that_is_saved(tmp_path, tokenizer):
    assert tokenizer.tokenize("GIBA Dé") == tokenizer.tokenize("giba de")
    cased = train_wordpiece(make_texts(), vocab_size=400, lowercase=False)
    save_tokenizer(cased, tmp_path / "cased")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "cased")
    assert loaded.tokenize("Giba") != loaded.tokenize("giba")
    assert loaded.decode(loaded("Giba dé", add_special_tokens=False)["input_ids"]) == "Giba dé"


def test_printable_characters_are_known_even_if_the_texts_lack_them(tokenizer):
    assert tokenizer.unk_token not in tokenizer.tokenize(string.printable)
    assert tokenizer.tokenize("$") == ["$"]


def test_vocabularies_are_equal_in_other_processes(tmp_path, tokenizer):
    # Hash tables are ordered by chance, anew in each process: one process alone cannot show that it plays no part.
    path = tmp_path / "train.txt"
    path.write_text("\n".join(make_texts()), encoding="utf-8")
    flags = ["--output_dir", "tokenizer", "--vocab_size", "400", "--model_max_length", "64"]
    corpus_flags = ["--train_file", "train.txt", "--validation_fraction", "0", "--cache_dir", "cache"]
    subprocess.run([sys.executable, SCRIPT, *flags, *corpus_flags], cwd=tmp_path, check=True, capture_output=True)
    save_tokenizer(tokenizer, tmp_path / "here")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "tokenizer" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["cache", "here", "tokenizer", "train.txt"]


def test_a_small_corpus_gives_a_small_vocabulary(caplog):
    with caplog.at_level(logging.INFO):
        tokenizer = train_wordpiece(["clock watch " * 5], vocab_size=5000)
    assert len(tokenizer) < 200
    assert "too small for the 5,000 tokens" in caplog.text


def test_a_small_vocabulary_keeps_its_size():
    assert len(train_wordpiece(make_texts(), vocab_size=30)) <= 30


def test_vocabularies_without_room_or_text_are_an_error():
    with pytest.raises(ValueError, match="at least 7"):
        train_wordpiece(["clock"], vocab_size=6)
    with pytest.raises(ValueError, match="no text"):
        train_wordpiece(["", " "], vocab_size=100)


# Sampling


def make_source(size: int, letter: str = "a", streaming: bool = False) -> TextSource:
    rows = Dataset.from_dict({"text": [f"{number:05d}{letter * 95}" for number in range(size)]})
    return TextSource(letter, rows.to_iterable_dataset() if streaming else rows, letter, "row")


def test_a_small_corpus_is_taken_whole():
    assert list(sample_texts([make_source(20)], 1_000_000)) == list(make_source(20))


def test_a_large_corpus_is_sampled_evenly(caplog):
    with caplog.at_level("INFO"):
        sample = list(sample_texts([make_source(1000)], 10_000))
    assert not caplog.messages
    positions = [int(text[:5]) for text in sample]
    assert 9_000 <= sum(map(len, sample)) <= 10_000
    gaps = [second - first for first, second in itertools.pairwise([0, *positions, 1000])]
    assert max(gaps) <= 2 * 1000 / len(positions) + 1


@pytest.mark.parametrize("row", ["one", "ein Fluß", "река течёт", "河水流动", "a b " * 200])
def test_a_sample_is_counted_in_characters_of_any_script(row):
    source = TextSource("a", Dataset.from_dict({"text": [row] * 1000}), "a", "row")
    assert sum(map(len, sample_texts([source], 1000 * len(row)))) == 1000 * len(row)
    half = sum(map(len, sample_texts([source], 500 * len(row))))
    assert half == pytest.approx(500 * len(row), rel=0.01)


def test_a_row_longer_than_the_cap_is_cut():
    source = TextSource("a", Dataset.from_dict({"text": ["clock " * 10 + "watch " * 10]}), "a", "row")
    assert list(sample_texts([source], 60)) == ["clock " * 10]


def test_a_stream_is_sampled_from_its_beginning(caplog):
    with caplog.at_level("INFO"):
        sample = list(sample_texts([make_source(1000, streaming=True)], 10_000))
    assert caplog.messages == ["Only the first 10,000 characters are read."]
    assert [int(text[:5]) for text in sample] == list(range(100))


@pytest.mark.parametrize(("probabilities", "share"), [(None, 0.75), ([0.5, 0.5], 0.5)])
def test_every_source_has_its_share_of_the_sample(probabilities, share):
    sample = "".join(sample_texts([make_source(600, "a"), make_source(200, "b")], 10_000, probabilities))
    assert sample.count("a") / (sample.count("a") + sample.count("b")) == pytest.approx(share, abs=0.03)


# The folder


def test_a_folder_with_files_is_refused(tmp_path, tokenizer):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save_tokenizer(tokenizer, folder)  # empty folders are taken
    with pytest.raises(UserError, match=r"holds a tokenizer; .*--overwrite"):
        save_tokenizer(tokenizer, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(UserError, match="holds other files"):
        save_tokenizer(tokenizer, tmp_path / "other")
    with pytest.raises(UserError, match="is a file"):
        save_tokenizer(tokenizer, tmp_path / "other" / "notes.txt")
    (tmp_path / "other" / "config.json").touch()
    with pytest.raises(UserError, match="holds a model, which has learnt its own tokenizer; choose another one"):
        save_tokenizer(tokenizer, tmp_path / "other", overwrite=True)


def test_overwriting_leaves_other_files_alone(tmp_path, tokenizer):
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "notes.txt").write_text("keep", encoding="utf-8")
    (tmp_path / "tokenizer" / "vocabulary.txt").touch()
    for name in ("special_tokens_map.json", "added_tokens.json"):  # of an older transformers, and another kind
        (tmp_path / "tokenizer" / name).write_text("{}", encoding="utf-8")
    save_tokenizer(train_wordpiece(make_texts(), vocab_size=150), tmp_path / "tokenizer", overwrite=True)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer")) == 150
    assert (tmp_path / "tokenizer" / "notes.txt").read_text(encoding="utf-8") == "keep"
    assert (tmp_path / "tokenizer" / "vocabulary.txt").is_file()
    assert not {"special_tokens_map.json", "added_tokens.json"} & set(os.listdir(tmp_path / "tokenizer"))
    assert os.listdir(tmp_path) == ["tokenizer"]


def test_a_failed_save_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    def fill_the_disk(folder):
        Path(folder).mkdir()
        Path(folder, "tokenizer.json").write_text("{", encoding="utf-8")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", fill_the_disk)
    with pytest.raises(UserError, match="No space left on device"):
        save_tokenizer(tokenizer, tmp_path / "tokenizer")
    assert os.listdir(tmp_path) == []


# The command line


def run(monkeypatch, tmp_path, *flags: str) -> None:
    (tmp_path / "train.txt").write_text("\n\n".join(make_texts()), encoding="utf-8")
    files = ["--train_file", str(tmp_path / "train.txt"), "--cache_dir", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", "--output_dir", str(tmp_path / "out"), *files, *flags])
    main()


def test_the_command_line_trains_a_tokenizer(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "--vocab_size", "300", "--no_lowercase")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == 300
    assert tokenizer.tokenize("Giba") != tokenizer.tokenize("giba")


def test_the_folder_is_checked_before_the_work(monkeypatch, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    monkeypatch.setattr(train_tokenizer, "load_corpus", lambda arguments: pytest.fail("the text was read"))
    with pytest.raises(UserError, match="--overwrite"):
        run(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab_size", "6"], "at least 7"),
        (["--vocab_size", "0"], "--vocab_size is 0"),
        (["--max_characters", "-1"], "--max_characters is -1"),
        (["--output_dir", f"{__file__}/x"], "--output_dir .* cannot be written"),
        (["--vocab", "300"], "--vocab"),
    ],
)
def test_mistakes_of_the_command_line_are_one_clear_line(monkeypatch, tmp_path, flags, message):
    with pytest.raises(UserError, match=message) as caught:
        run(monkeypatch, tmp_path, *flags)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_is_held_out_counts_to_no_side_but_its_own():
    whole = make_source(1000)
    sides = whole.split(0.25)
    sizes = {side: source.num_bytes for side, source in sides.items()}
    for side, source in sides.items():
        assert sizes[side] == pytest.approx(sum(map(len, source)), rel=0.2)
