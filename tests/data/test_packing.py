"""Packing documents into blocks of tokens, on disk and on the fly."""

import itertools
import json
import math
import multiprocessing
import os
import random
import time
from collections import Counter

import pytest
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from experiments.arguments import UserError
from experiments.text import packing
from experiments.text.packing import (
    count_tokens,
    mix_blocks,
    pack_documents,
    prepare_blocks,
    stream_blocks,
    unigram_cross_entropy,
)
from experiments.text.source import TextSource
from support.texts import load, make_source, make_texts, make_tokenizer, read_documents, write


CLS, SEP = 101, 102


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return make_tokenizer()


def pack(documents, *options) -> list[list[int]]:
    return list(pack_documents([(document, True) for document in documents], *options))


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
    blocks = pack(documents, block_length, CLS, SEP, one_document_per_block)
    assert unpack(blocks) == [token for document in documents for token in document]
    assert all(block[0] == CLS and block[-1] == SEP and len(block) >= 3 for block in blocks)
    lengths = [len(block) for block in blocks]
    assert max(lengths) <= block_length
    if not one_document_per_block:
        assert all(length == block_length for length in lengths[:-1])


def test_documents_are_separated_inside_a_block():
    blocks = pack([[1, 2], [], [3], [4, 5, 6, 7]], 8, CLS, SEP)
    assert blocks == [[CLS, 1, 2, SEP, 3, SEP, 4, SEP], [CLS, 5, 6, 7, SEP]]


def test_a_block_does_not_open_with_a_separator():
    assert pack([[1, 2], [3, 4]], 4, CLS, SEP) == [[CLS, 1, 2, SEP], [CLS, 3, 4, SEP]]


def test_a_block_holds_one_document_if_asked_to():
    documents = [[1, 2, 3, 4, 5], [6], [], [7, 8, 9]]
    blocks = pack(documents, 5, CLS, SEP, True)
    assert blocks == [[CLS, 1, 2, 3, SEP], [CLS, 4, 5, SEP], [CLS, 6, SEP], [CLS, 7, 8, 9, SEP]]


def test_nothing_is_packed_from_nothing():
    assert pack([[], []], 8, CLS, SEP) == []


def test_blocks_without_room_are_an_error():
    with pytest.raises(ValueError, match="at least 3"):
        pack([[1]], 2, CLS, SEP)


# Blocks on disk


@pytest.mark.parametrize("one_document_per_block", [False, True])
@pytest.mark.parametrize(("unit", "num_proc"), [("row", None), ("blank_line", None), ("blank_line", 2)])
def test_blocks_hold_the_tokens_of_the_text(tmp_path, tokenizer, monkeypatch, unit, num_proc, one_document_per_block):
    monkeypatch.setattr(packing, "_BATCH_ROWS", 7)
    texts = make_texts(50)
    texts[5:5], texts[20:20] = ["", " "], [""]
    source = make_source(texts, unit)
    blocks = prepare_blocks(source, tokenizer, 32, tmp_path, one_document_per_block, num_proc)
    documents = [tokenizer(" ".join(rows), add_special_tokens=False)["input_ids"] for rows in read_documents(source)]
    ids = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert blocks["input_ids"][:] == pack(documents, 32, *ids, one_document_per_block)
    assert blocks.features["input_ids"].feature.dtype == "int32"


def test_a_preparation_can_stop_early(tmp_path, tokenizer):
    source = make_source(make_texts(50))
    whole = prepare_blocks(source, tokenizer, 32, tmp_path)
    assert prepare_blocks(source, tokenizer, 32, tmp_path, max_blocks=3)["input_ids"][:] == whole["input_ids"][:3]


def test_preparing_blocks_leaves_the_generators_as_they_were(tmp_path, tokenizer):
    before = torch.get_rng_state()
    prepare_blocks(make_source(make_texts(50)), tokenizer, 32, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


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
    assert tokenizer.sep_token_id not in [token for block in cut["input_ids"] for token in block[:-1]]
    assert cut["input_ids"][:-1] == whole["input_ids"][: len(cut) - 1]


def spy_on_sizes(batches, sizes):
    for batch in batches:
        sizes.append([len(text) for text, _ in batch])
        yield batch


def test_blocks_are_prepared_once(tmp_path, tokenizer, monkeypatch):
    first = prepare_blocks(make_source(make_texts(20)), tokenizer, 32, tmp_path)
    tokenizer("a b", padding="max_length", truncation=True, max_length=5)  # leaves its settings in the backend
    monkeypatch.setattr(packing, "_tokenize", lambda *args: pytest.fail("prepared again"))
    again = prepare_blocks(make_source(make_texts(20)), tokenizer, 32, tmp_path)
    assert again.cache_files == first.cache_files


def test_blocks_are_prepared_again_for_anything_that_changes_them(tmp_path, tokenizer):
    source = make_source(make_texts(20))
    other_tokenizer = make_tokenizer(150)
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


def prepared(folder):
    return list(folder.glob("generator/*/*/*.arrow"))


def test_an_interrupted_preparation_leaves_nothing_to_be_reused(tmp_path, tokenizer, monkeypatch):
    source = make_source(make_texts(50))
    expected = prepare_blocks(source, tokenizer, 32, tmp_path / "elsewhere")["input_ids"][:]

    def interrupt(*args):
        yield from itertools.islice(pack_documents(*args), 25)
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(packing, "pack_documents", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_blocks(source, tokenizer, 32, tmp_path)
    assert not prepared(tmp_path)
    assert prepare_blocks(source, tokenizer, 32, tmp_path)["input_ids"][:] == expected


def test_text_without_tokens_is_an_error_and_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(UserError, match="no text that the tokenizer"):
        prepare_blocks(make_source(["\u200b"]), tokenizer, 32, tmp_path)
    assert not prepared(tmp_path)


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path, tokenizer):
    with pytest.raises(UserError, match="--cache_dir"):
        prepare_blocks(make_source(["balan"]), tokenizer, 32, write(tmp_path / "file", "") + "/cache")


def test_a_source_that_breaks_off_is_no_fault_of_the_cache(tmp_path, tokenizer):
    class Broken(TextSource):
        def __iter__(self):
            yield "balan"
            raise ConnectionError("server disconnected")

    whole = make_source(["balan"])
    with pytest.raises(UserError, match=r"cannot be read to its end \(server disconnected\)"):
        prepare_blocks(Broken(**vars(whole)), tokenizer, 32, tmp_path)
    assert not prepared(tmp_path)


def die_while_preparing(tokenizer, folder):
    """Runs in a process of its own, which ends without a chance to clean up."""

    def die(*args):
        yield from itertools.islice(pack_documents(*args), 25)
        os._exit(9)

    packing.pack_documents = die
    prepare_blocks(make_source(make_texts(50)), tokenizer, 32, folder)


def prepare_slowly(tokenizer, folder, barrier, results):
    """Runs in a process of its own; reports whether it has prepared the blocks itself."""
    packed = []

    def pack_slowly(*args):
        time.sleep(0.5)
        packed.append(True)
        return pack_documents(*args)

    packing.pack_documents = pack_slowly
    barrier.wait()
    blocks = prepare_blocks(make_source(make_texts(50)), tokenizer, 32, folder)
    results.put((bool(packed), blocks["input_ids"][:]))


def test_processes_prepare_blocks_once_after_one_was_killed(tmp_path, tokenizer):
    context = multiprocessing.get_context("fork")  # a process that imports everything anew takes ten times as long
    barrier, results = context.Barrier(2), context.Queue()
    killed = context.Process(target=die_while_preparing, args=(tokenizer, tmp_path))
    killed.start()
    killed.join(60)
    assert killed.exitcode == 9
    assert [path.suffix for path in tmp_path.glob("generator/*/*") if path.is_dir()] == [".incomplete"]
    processes = [
        context.Process(target=prepare_slowly, args=(tokenizer, tmp_path, barrier, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    (first_packed, first), (second_packed, second) = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert first_packed + second_packed == 1
    assert first == second == prepare_blocks(make_source(make_texts(50)), tokenizer, 32, tmp_path)["input_ids"][:]
    assert len(prepared(tmp_path)) == 1


# Streaming


@pytest.fixture
def stream(tmp_path) -> TextSource:
    lines = [json.dumps({"text": text}) for text in make_texts(60)]
    path = write(tmp_path / "train.jsonl", "\n".join(lines))
    source = load(tmp_path, train_file=[path], streaming=True, validation_fraction=0).train[0]
    assert isinstance(source.rows, IterableDataset)
    return source


def tally(blocks) -> Counter:
    return Counter(token for block in blocks for token in block["input_ids"] if token > 4)  # 0..4 are special


@pytest.mark.parametrize("one_document_per_block", [False, True])
def test_streamed_blocks_are_those_on_disk(tmp_path, tokenizer, stream, one_document_per_block):
    expected = prepare_blocks(make_source(make_texts(60)), tokenizer, 32, tmp_path, one_document_per_block)
    blocks = stream_blocks(stream, tokenizer, 32, one_document_per_block)
    for _ in range(2):
        assert list(blocks) == list(expected)


def test_ranks_and_workers_share_a_stream_without_repeating(tokenizer, stream):
    blocks = stream_blocks(stream, tokenizer, 32, num_shards=4)
    expected = tally(stream_blocks(stream, tokenizer, 32))
    assert tally(blocks) == expected
    shares = []
    for rank in range(2):
        part = split_dataset_by_node(blocks, rank=rank, world_size=2)
        shares.append(tally(DataLoader(part, batch_size=None, num_workers=2)))
    assert shares[0] + shares[1] == expected
    assert min(share.total() for share in shares) > 0.3 * expected.total()


def test_a_document_is_in_one_shard(tokenizer):
    rows = [row for text in make_texts(40) for row in (*text.split(" ", maxsplit=3), "")]
    source = make_source(rows, "blank_line")
    shards, whole = (stream_blocks(source, tokenizer, 500, True, num_shards=n) for n in (3, 1))
    assert len(list(whole)) == 40
    assert sorted(block["input_ids"] for block in shards) == sorted(block["input_ids"] for block in whole)


def test_blank_rows_are_no_shard_s_turn(tokenizer):
    source = make_source([row for text in make_texts(40) for row in (text, "", " ")], "blank_line")
    shards = [
        list(split_dataset_by_node(stream_blocks(source, tokenizer, 500, True, num_shards=2), n, 2)) for n in (0, 1)
    ]
    assert [len(blocks) for blocks in shards] == [20, 20]


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
    mixed, again, other = (
        [block[0] for block in mix_blocks([first, second], [0.75, 0.25], seed=seed)["input_ids"]] for seed in (0, 0, 1)
    )
    assert mixed == again != other
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
    train_counts, validation_counts = (count_tokens(make_blocks(rows), 12) for rows in (train, validation))
    result = unigram_cross_entropy(train_counts, validation_counts, ignored)
    assert result == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_tokens_are_counted_in_the_selected_blocks_alone():
    blocks = make_blocks([[2, 2], [3, 3], [0, 3]])
    assert count_tokens(blocks.select([1, 2]), 5).tolist() == [1, 0, 0, 3, 0]


def test_unigram_cross_entropy_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no token"):
        unigram_cross_entropy(count_tokens(make_blocks([[2]]), 4), count_tokens(make_blocks([[0]]), 4), [0])


def test_a_long_document_is_dealt_out_to_several_readers_and_whole_for_one(tokenizer, tmp_path):
    source = make_source(make_texts(200), "blank_line")  # one document
    alone = list(stream_blocks(source, tokenizer, 5000, True))
    assert alone == list(prepare_blocks(source, tokenizer, 5000, tmp_path, True))
    stream = stream_blocks(source, tokenizer, 500, num_shards=2)
    shares = [tally(split_dataset_by_node(stream, rank=rank, world_size=2)) for rank in (0, 1)]
    assert shares[0] + shares[1] == tally(alone)
    assert min(share.total() for share in shares) > 0.3 * tally(alone).total()


def test_blocks_of_older_rules_are_not_met(tmp_path, tokenizer, monkeypatch):
    first = prepare_blocks(make_source(make_texts(20)), tokenizer, 32, tmp_path)
    monkeypatch.setattr(packing, "FORMAT_VERSION", packing.FORMAT_VERSION + 1)
    again = prepare_blocks(make_source(make_texts(20)), tokenizer, 32, tmp_path)
    assert again.cache_files != first.cache_files


def test_a_row_without_tokens_hides_no_end_of_a_document():
    pieces = [([1], True), ([], False), ([2], True)]
    assert list(pack_documents(pieces, 8, 101, 102)) == [[101, 1, 102, 2, 102]]
