"""The text of pretraining: reading it, splitting it, packing it into blocks, and what goes wrong on the way."""

import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset, load_dataset
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetNotFoundError
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from experiments.arguments import UserError, parse_args
from experiments.text import corpus as corpus_module
from experiments.text import documentation, packing
from experiments.text.corpus import Corpus, CorpusArguments, TextSource, Unit, load_corpus
from experiments.text.packing import (
    block_statistics,
    mix_blocks,
    pack_documents,
    prepare_blocks,
    stream_blocks,
    unigram_cross_entropy,
)
from experiments.text.tokenizer import train_wordpiece


CLS, SEP = 101, 102
WORDS = [
    f"{first}{second}" for first in ("ba", "co", "du", "fi", "ge", "hu") for second in ("lan", "mer", "nit", "pos")
]


def make_texts(num_documents: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [
        f"{number} " + " ".join(generator.choices(WORDS, k=generator.randint(1, 60)))
        for number in range(num_documents)
    ]


def make_source(texts: list[str], unit: Unit = "row", fingerprint: str = "text") -> TextSource:
    return TextSource("some text", Dataset.from_dict({"text": texts}), fingerprint, unit)


def read_documents(source: TextSource) -> list[list[str]]:
    """Documents by an independent reading of the rule: a row, or the rows between blank ones."""
    if source.document_unit == "row":
        return [[row] for row in source if row.strip()]
    groups = itertools.groupby(source, key=lambda row: bool(row.strip()))
    return [list(rows) for is_text, rows in groups if is_text]


def load(tmp_path: Path, **flags) -> Corpus:
    return load_corpus(CorpusArguments(cache_dir=str(tmp_path / "cache"), **flags))


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return train_wordpiece(make_texts(200, seed=1), vocab_size=200)


# Packing


def unpack(blocks: list[list[int]]) -> list[int]:
    return [token for block in blocks for token in block[1:-1] if token != SEP]


def make_documents(seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    tokens = itertools.count(1000)
    return [[next(tokens) for _ in range(generator.choice([0, 1, 2, 5, 13, 40]))] for _ in range(60)]


@pytest.mark.parametrize("one_document_per_block", [False, True])
@pytest.mark.parametrize("block_length", [3, 4, 7, 16, 500])
def test_every_token_is_packed_once_and_in_order(block_length, one_document_per_block):
    documents = make_documents(block_length)
    blocks = list(pack_documents(documents, block_length, CLS, SEP, one_document_per_block))
    assert unpack(blocks) == [token for document in documents for token in document]
    assert all(block[0] == CLS and block[-1] == SEP and len(block) >= 3 for block in blocks)
    lengths = [len(block) for block in blocks]
    assert max(lengths) <= block_length
    if not one_document_per_block:
        assert all(length == block_length for length in lengths[:-1])


def test_documents_are_separated_inside_a_block():
    blocks = list(pack_documents([[1, 2], [], [3], [4, 5, 6, 7]], 8, CLS, SEP))
    assert blocks == [[CLS, 1, 2, SEP, 3, SEP, 4, SEP], [CLS, 5, 6, 7, SEP]]


def test_a_block_does_not_open_with_a_separator():
    assert list(pack_documents([[1, 2], [3, 4]], 4, CLS, SEP)) == [[CLS, 1, 2, SEP], [CLS, 3, 4, SEP]]


def test_a_block_holds_one_document_if_asked_to():
    documents = [[1, 2, 3, 4, 5], [6], [], [7, 8, 9]]
    blocks = list(pack_documents(documents, 5, CLS, SEP, one_document_per_block=True))
    assert blocks == [[CLS, 1, 2, 3, SEP], [CLS, 4, 5, SEP], [CLS, 6, SEP], [CLS, 7, 8, 9, SEP]]


def test_nothing_is_packed_from_nothing():
    assert list(pack_documents([[], []], 8, CLS, SEP)) == []


def test_blocks_without_room_are_an_error():
    with pytest.raises(ValueError, match="at least 3"):
        list(pack_documents([[1]], 2, CLS, SEP))


# Blocks on disk


@pytest.mark.parametrize("one_document_per_block", [False, True])
@pytest.mark.parametrize("unit", ["row", "blank_line"])
def test_blocks_hold_the_tokens_of_the_text(tmp_path, tokenizer, unit, one_document_per_block):
    texts = make_texts(50)
    texts[5:5], texts[20:20] = ["", " "], [""]
    source = make_source(texts, unit)
    blocks = prepare_blocks(source, tokenizer, 32, tmp_path, one_document_per_block)
    documents = [tokenizer(" ".join(rows), add_special_tokens=False)["input_ids"] for rows in read_documents(source)]
    ids = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert blocks["input_ids"][:] == list(pack_documents(documents, 32, *ids, one_document_per_block))
    assert blocks.features["input_ids"].feature.dtype == "int32"
    statistics = block_statistics(blocks)
    assert statistics.num_documents == len(documents)
    assert statistics.num_tokens == sum(map(len, documents))
    assert statistics.num_blocks == len(blocks)


def test_special_tokens_in_a_text_are_only_words(tmp_path, tokenizer):
    blocks = prepare_blocks(make_source(["a [MASK] b [SEP] c"]), tokenizer, 64, tmp_path)
    specials = [token for token in blocks[0]["input_ids"] if token in tokenizer.all_special_ids]
    assert specials == [tokenizer.cls_token_id, tokenizer.sep_token_id]


def test_giant_rows_are_cut_where_no_token_is_lost(tmp_path, tokenizer, monkeypatch):
    text = " ".join(make_texts(30)) + " " + "x" * 500
    whole = prepare_blocks(make_source([text]), tokenizer, 16, tmp_path / "whole")
    monkeypatch.setattr(packing, "_MAX_ROW_CHARACTERS", 100)
    monkeypatch.setattr(packing, "_BATCH_CHARACTERS", 250)
    sizes: list[list[int]] = []
    monkeypatch.setattr(
        packing, "_batch_pieces", lambda pieces, batch=packing._batch_pieces: spy_on_sizes(batch(pieces), sizes)
    )
    cut = prepare_blocks(make_source([text[: -len("x" * 500)]]), tokenizer, 16, tmp_path / "cut")
    assert max(map(max, sizes)) <= 100
    assert max(map(sum, sizes)) <= 350
    assert block_statistics(cut).num_documents == 1
    assert cut["input_ids"][:-1] == whole["input_ids"][: len(cut) - 1]


def spy_on_sizes(batches, sizes):
    for batch in batches:
        sizes.append([len(text) for text, _ in batch])
        yield batch


def test_blocks_are_prepared_once(tmp_path, tokenizer, monkeypatch):
    first = prepare_blocks(make_source(make_texts(20)), tokenizer, 32, tmp_path)
    tokenizer("a b", padding="max_length", truncation=True, max_length=5)  # leaves its settings in the backend
    monkeypatch.setattr(packing, "_write_blocks", lambda *args: pytest.fail("prepared again"))
    again = prepare_blocks(make_source(make_texts(20)), tokenizer, 32, tmp_path)
    assert again.cache_files == first.cache_files


def test_blocks_are_prepared_again_for_anything_that_changes_them(tmp_path, tokenizer):
    source = make_source(make_texts(20))
    other_tokenizer = train_wordpiece(make_texts(200, seed=1), vocab_size=150)
    variants = [
        prepare_blocks(source, tokenizer, 32, tmp_path),
        prepare_blocks(make_source(make_texts(20), fingerprint="other"), tokenizer, 32, tmp_path),
        prepare_blocks(source, other_tokenizer, 32, tmp_path),
        prepare_blocks(source, tokenizer, 33, tmp_path),
        prepare_blocks(source, tokenizer, 32, tmp_path, one_document_per_block=True),
    ]
    assert len({blocks.cache_files[0]["filename"] for blocks in variants}) == len(variants)


def test_changed_files_are_tokenized_again(tmp_path, tokenizer):
    path = tmp_path / "train.txt"
    found = []
    for text in ("balan comer", "balan comer dunit"):
        source = load(tmp_path, train_file=[write(path, text)], validation_fraction=0).train[0]
        found.append(tokenizer.decode(prepare_blocks(source, tokenizer, 32, tmp_path)[0]["input_ids"]))
    assert found == ["[CLS] balan comer [SEP]", "[CLS] balan comer dunit [SEP]"]


def test_an_interrupted_preparation_leaves_nothing_to_be_reused(tmp_path, tokenizer, monkeypatch):
    source = make_source(make_texts(50))
    tokenize = packing._tokenize
    monkeypatch.setattr(packing, "_BATCH_BLOCKS", 2)

    def interrupt(*args):
        yield from itertools.islice(tokenize(*args), 25)
        raise KeyboardInterrupt

    monkeypatch.setattr(packing, "_tokenize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_blocks(source, tokenizer, 32, tmp_path)
    assert not list(tmp_path.glob("blocks-*/"))
    monkeypatch.setattr(packing, "_tokenize", tokenize)
    assert block_statistics(prepare_blocks(source, tokenizer, 32, tmp_path)).num_documents == 50


def test_text_without_tokens_is_an_error_and_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(UserError, match="no text that the tokenizer"):
        prepare_blocks(make_source(["\u200b"]), tokenizer, 32, tmp_path)
    assert not list(tmp_path.glob("blocks-*/"))


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path, tokenizer):
    with pytest.raises(UserError, match="--cache_dir"):
        prepare_blocks(make_source(["balan"]), tokenizer, 32, write(tmp_path / "file", "") + "/cache")


def test_tokenizers_without_boundaries_are_an_error(tmp_path, tokenizer):
    other = BertTokenizer(vocab=tokenizer.get_vocab())
    other.sep_token = None
    with pytest.raises(ValueError, match="sep_token"):
        prepare_blocks(make_source(["balan"]), other, 32, tmp_path)


def die_while_preparing(tokenizer, folder):
    """Runs in a process of its own, which ends without a chance to clean up."""
    packing._BATCH_BLOCKS = 2
    tokenize = packing._tokenize

    def die(*args):
        yield from itertools.islice(tokenize(*args), 25)
        os._exit(9)

    packing._tokenize = die
    prepare_blocks(make_source(make_texts(50)), tokenizer, 32, folder)


def prepare_slowly(tokenizer, folder, barrier, results):
    """Runs in a process of its own; reports whether it has prepared the blocks itself."""
    write_blocks = packing._write_blocks
    written = []

    def write_slowly(*args):
        time.sleep(0.5)
        write_blocks(*args)
        written.append(True)

    packing._write_blocks = write_slowly
    barrier.wait()
    blocks = prepare_blocks(make_source(make_texts(50)), tokenizer, 32, folder)
    results.put((bool(written), blocks["input_ids"][:]))


def test_processes_prepare_blocks_once_after_one_was_killed(tmp_path, tokenizer):
    context = multiprocessing.get_context("fork")  # a process that imports everything anew takes ten times as long
    barrier, results = context.Barrier(2), context.Queue()
    killed = context.Process(target=die_while_preparing, args=(tokenizer, tmp_path))
    killed.start()
    killed.join(60)
    assert killed.exitcode == 9
    assert [path.suffix for path in tmp_path.glob("blocks-*/")] == [".incomplete"]
    processes = [
        context.Process(target=prepare_slowly, args=(tokenizer, tmp_path, barrier, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    (first_wrote, first), (second_wrote, second) = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert first_wrote + second_wrote == 1
    assert first == second == prepare_blocks(make_source(make_texts(50)), tokenizer, 32, tmp_path)["input_ids"][:]
    assert len(list(tmp_path.glob("blocks-*/"))) == 1


# Streaming


@pytest.fixture
def stream(tmp_path) -> TextSource:
    lines = [json.dumps({"text": text}) for text in make_texts(60)]
    path = write(tmp_path / "train.jsonl", "\n".join(lines))
    source = load(tmp_path, train_file=[path], streaming=True, validation_fraction=0).train[0]
    assert isinstance(source.rows, IterableDataset)
    return source


def count_tokens(blocks) -> Counter:
    return Counter(token for block in blocks for token in block["input_ids"] if token > 4)  # 0..4 are special


@pytest.mark.parametrize("one_document_per_block", [False, True])
def test_streamed_blocks_are_those_on_disk(tmp_path, tokenizer, stream, one_document_per_block):
    expected = prepare_blocks(make_source(make_texts(60)), tokenizer, 32, tmp_path, one_document_per_block)
    blocks = stream_blocks(stream, tokenizer, 32, one_document_per_block)
    for _ in range(2):
        assert list(blocks) == list(expected)


def test_ranks_and_workers_share_a_stream_without_repeating(tokenizer, stream):
    blocks = stream_blocks(stream, tokenizer, 32, num_shards=4)
    expected = count_tokens(stream_blocks(stream, tokenizer, 32))
    assert count_tokens(blocks) == expected
    shares = []
    for rank in range(2):
        part = split_dataset_by_node(blocks, rank=rank, world_size=2)
        shares.append(count_tokens(DataLoader(part, batch_size=None, num_workers=2)))
    assert shares[0] + shares[1] == expected
    assert min(share.total() for share in shares) > 0.3 * expected.total()


def test_a_document_is_in_one_shard(tokenizer):
    rows = [row for text in make_texts(40) for row in (*text.split(" ", maxsplit=3), "")]
    source = make_source(rows, "blank_line")
    shards, whole = (stream_blocks(source, tokenizer, 500, True, num_shards=n) for n in (3, 1))
    assert len(list(whole)) == 40
    assert sorted(block["input_ids"] for block in shards) == sorted(block["input_ids"] for block in whole)


def test_a_stream_goes_on_where_it_was_left(tokenizer, stream):
    blocks = stream_blocks(stream, tokenizer, 32, num_shards=2)
    expected = list(blocks)
    iterator = iter(blocks)
    seen = [next(iterator) for _ in range(5)]
    state = blocks.state_dict()
    resumed = stream_blocks(stream, tokenizer, 32, num_shards=2)
    resumed.load_state_dict(state)
    assert seen + list(resumed) == expected


def test_the_trainer_takes_a_stream(tmp_path, tokenizer, stream):
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    trainer = Trainer(
        BertForMaskedLM(config),
        TrainingArguments(
            str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True
        ),
        train_dataset=stream_blocks(stream, tokenizer, 32, num_shards=2),
        data_collator=DataCollatorForLanguageModeling(tokenizer, seed=0),
    )
    assert trainer.train().global_step == 3
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


# Mixing and the unigram baseline


def make_blocks(rows: list[list[int]]) -> Dataset:
    return Dataset.from_dict({"input_ids": rows}, features=packing._FEATURES)


def test_mixed_blocks_are_all_there():
    first, second = make_blocks([[1], [2]]), make_blocks([[3]])
    assert mix_blocks([first, second])["input_ids"][:] == [[1], [2], [3]]
    assert mix_blocks([first]) is first


def test_probabilities_decide_how_often_blocks_are_drawn():
    first, second = make_blocks([[1]] * 300), make_blocks([[2]] * 300)
    mixed = [block[0] for block in mix_blocks([first, second], [0.75, 0.25], seed=0)["input_ids"]]
    assert mixed.count(2) >= 300
    assert mixed.count(1) / len(mixed) == pytest.approx(0.75, abs=0.05)
    streams = [blocks.to_iterable_dataset() for blocks in (first, second)]
    drawn = [block["input_ids"][0] for block in mix_blocks(streams, [0.75, 0.25], seed=0)]
    assert drawn.count(1) / len(drawn) == pytest.approx(0.75, abs=0.05)


def test_unigram_cross_entropy_is_that_of_a_direct_computation(monkeypatch):
    monkeypatch.setattr(packing, "_BATCH_BLOCKS", 1)
    generator = random.Random(0)
    train, validation = ([generator.choices(range(12), k=9) for _ in range(30)] for _ in range(2))
    ignored = {0, 1}
    counts = Counter(token for block in train for token in block if token not in ignored)
    total = counts.total() + 10  # ids 2 to 11, each with one more
    losses = [-math.log((counts[t] + 1) / total) for block in validation for t in block if t not in ignored]
    result = unigram_cross_entropy(make_blocks(train), make_blocks(validation), 12, ignored)
    assert result == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_unigram_cross_entropy_follows_the_selection_of_blocks():
    blocks = make_blocks([[2, 2], [3, 3]])
    alone = unigram_cross_entropy(blocks.select([1]), blocks.select([1]), 4, [0, 1])
    assert alone == pytest.approx(-math.log(3 / 4))


def test_unigram_cross_entropy_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no token"):
        unigram_cross_entropy(make_blocks([[2]]), make_blocks([[0]]), 4, [0])


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


def test_documents_can_be_limited(tmp_path):
    path = write(tmp_path / "train.txt", "\n\n".join(make_texts(100)))
    flags = {"train_file": [path], "max_train_documents": 7, "max_eval_documents": 2, "validation_fraction": 0.2}
    corpus, whole = load(tmp_path, **flags), load(tmp_path, train_file=[path], validation_fraction=0.2)
    assert read_documents(corpus.train[0]) == read_documents(whole.train[0])[:7]
    assert read_documents(corpus.validation[0]) == read_documents(whole.validation[0])[:2]
    fewer = load(tmp_path, **(flags | {"max_train_documents": 6}))
    assert len({source.train[0].fingerprint for source in (corpus, whole, fewer)}) == 3


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


def test_another_cached_revision_is_not_taken_for_the_one_asked_for(tmp_path, cached_hub_dataset):
    with pytest.raises(UserError, match=f"cache holds revision {cached_hub_dataset}"):
        load(tmp_path, datasets=["owner/name:default@" + "f" * 40])


def test_unreachable_data_sets_are_explained(tmp_path):
    with pytest.raises(UserError, match=r"owner/other .*HF_HUB_OFFLINE.*--train_file"):
        load(tmp_path, datasets=["owner/other"])


def test_unknown_data_sets_are_explained(tmp_path, monkeypatch):
    def find_nothing(path, *args, **options):
        raise DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr(corpus_module, "load_dataset_builder", find_nothing)
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
        "unknown type": {"train_file": [write(folder / "train.pdf", "x")]},
        "empty file": {"train_file": [write(folder / "empty.txt", "")]},
        "blank file": {"train_file": [write(folder / "blank.txt", "\n\n  \n")]},
        "blank validation file": {"train_file": [text], "validation_file": [str(folder / "blank.txt")]},
        "no text at all": {"train_file": [write(folder / "null.jsonl", '{"text": null}\n')]},
        "no such column": {"train_file": [write(folder / "a.csv", "body,n\nx,1\n")], "text_column": "text"},
        "column of numbers": {"train_file": [str(folder / "a.csv")], "text_column": "n"},
        "two columns of text": {"train_file": [write(folder / "b.csv", "body,title\nx,y\n")]},
        "broken json": {"train_file": [write(folder / "broken.jsonl", "{not json\n")]},
        "single document": {"train_file": [write(folder / "single.txt", "balan")]},
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
        "limit": {"max_train_documents": 0},
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
        ("unknown type", r"train\.pdf: files of type `\.pdf` cannot be read; give \.txt, .*\.parquet"),
        ("empty file", r"empty\.txt holds no text"),
        ("blank file", r"blank\.txt holds no text in its column `text`"),
        ("blank validation file", r"blank\.txt holds no text"),
        ("no text at all", r"null\.jsonl holds no text: none of its columns \(text\)"),
        ("no such column", r"no column `text`; its columns are body, n"),
        ("column of numbers", r"column `n` .*holds no strings"),
        ("two columns of text", r"--text_column.*body, title"),
        ("broken json", r"broken\.jsonl cannot be read: .*JSON"),
        ("single document", r"single document.*--validation_file.*--document_unit row"),
        ("missing folder", r"no folder \./missing/folder"),
        ("empty folder", r"doesn't contain any data files"),
        ("known short id", r"Salesforce/wikitext; write that"),
        ("unknown short id", r"`something`.*owner/name"),
        ("not a data set", r"path\[:config\]\[@revision\]"),
        ("script", r"Python script.*parquet"),
        ("revision of a folder", r"no revisions"),
        ("unknown config", r"BuilderConfig 'nothing' not found.*path:config"),
        ("too few probabilities", r"1 numbers for 2 sources"),
        ("negative probability", r"positive numbers"),
        ("mixed stream", r"--streaming.*--probabilities"),
        ("mixed pattern", r"several types"),
        ("fraction", r"--validation_fraction is 1\.0"),
        ("validation only", r"without --train_file"),
        ("limit", r"--max_train_documents is 0"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, name, message):
    flags = flags_of_mistake(name, tmp_path / "data")
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, **flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_text_that_is_not_utf8_is_explained(tmp_path, streaming):
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\xe9\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt cannot be read: .*utf-8"):
        load(tmp_path, train_file=[str(path)], streaming=streaming)


# The documentation corpus


def test_the_documentation_reads_as_prose():
    documents = list(documentation.iter_documentation(max_characters=400_000))
    text = "\n".join(documents)
    paragraphs = text.split("\n")
    assert 400_000 <= len(text) < 500_000
    assert text.isascii()
    assert sum(map(str.isalpha, text)) > 0.78 * len(text)
    assert sum(word in ("the", "a", "of", "is", "to") for word in text.split()) > 0.1 * len(text.split())
    assert all(paragraph[-1] in ".!?)\"'" and len(paragraph.split()) >= 8 for paragraph in paragraphs)
    assert not [paragraph for paragraph in paragraphs if ">>>" in paragraph or "``" in paragraph or "--" in paragraph]
    assert len(set(paragraphs)) == len(paragraphs)


MODULE = '''
"""Tools for clocks.

The clocks of this module are read by many people, and they show the time of :class:`day <Day>` that it is.

    >>> read_clock()
    The time that is shown here is not a sentence of the text.

Parameters
----------
clock : Clock
    The clock to read, which must have been wound up by one of the users before.

========  ==========
the one   the other
========  ==========

.. note:: This directive is not a part of the text that we want to have here.

```python
# The words of this line are in a program, and they are not for the reader.

The words of this line are in the same program, and so it is left out.
```
"""


class Clock:
    """The clocks of this module are read by many people, and they show the time of day that it is."""

    def wind(self):
        """Wind up the ``clock`` so that it will show the *right* time to all of them."""
'''


def test_only_the_prose_of_a_docstring_is_kept(tmp_path, monkeypatch):
    write(tmp_path / "lib" / "clocks.py", MODULE)
    write(
        tmp_path / "lib" / "tests" / "test_clocks.py",
        '"""The tests of a package are not a part of the text that we read."""',
    )
    write(
        tmp_path / "lib" / "broken.py",
        'def broken(:\n    """This is not Python, so that there is no way to read it."""',
    )
    monkeypatch.setattr(
        documentation, "topics", {"TOPIC": "There is one more document, and it is the first of all of them."}
    )
    monkeypatch.setattr(documentation.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert [document.split("\n") for document in documentation.iter_documentation()] == [
        ["There is one more document, and it is the first of all of them."],
        [
            "The clocks of this module are read by many people, and they show the time of day that it is.",
            "The clock to read, which must have been wound up by one of the users before.",
            "Wind up the clock so that it will show the right time to all of them.",
        ],
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_documentation_is_the_default_corpus(tmp_path, monkeypatch, streaming):
    calls = []

    def read_documentation():
        calls.append(True)
        return iter(make_texts(300))

    monkeypatch.setattr(corpus_module, "iter_documentation", read_documentation)
    versions = ["python==1"]
    monkeypatch.setattr(corpus_module, "documentation_versions", lambda: versions[0])
    corpora = [load(tmp_path, streaming=streaming) for _ in range(2)]
    assert len(calls) == 1, "the second time it comes from the cache"
    first, second = corpora
    texts = [*first.train[0], *first.validation[0]]
    assert sorted(texts) == sorted(make_texts(300))
    assert 0 < len(list(first.validation[0])) < 20
    assert first.train[0].fingerprint == second.train[0].fingerprint
    versions[0] = "python==2"
    assert load(tmp_path, streaming=streaming).train[0].fingerprint != first.train[0].fingerprint
    assert len(calls) == 2
