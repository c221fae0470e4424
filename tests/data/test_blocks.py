"""What a run reads: its tokenizer, and as many blocks as are asked for."""

from types import SimpleNamespace

import pytest
from datasets import Dataset, IterableDataset
from transformers import BertConfig, NystromformerConfig

from experiments.arguments import Command, UserError, parse_args
from experiments.text import blocks as blocks_module
from experiments.text.blocks import Blocks, MaskedLMArguments, load_blocks, spread, train_tokenizer_once
from experiments.text.corpus import CorpusArguments, load_corpus
from support.texts import make_texts, make_tokenizer, write


def load(tmp_path, mlm: MaskedLMArguments, config=None, seed=0, readers=1, **flags) -> Blocks:
    texts = make_texts(120)
    path = write(tmp_path / "train.txt", "\n\n".join(texts))
    validation = write(tmp_path / "validation.txt", "\n\n".join(texts[:60]))
    flags = {"train_file": [path], "validation_file": [validation], "cache_dir": str(tmp_path / "cache")} | flags
    arguments = CorpusArguments(**flags)
    training = SimpleNamespace(seed=seed, num_readers=readers)
    command = Command((None, arguments, mlm, training), {}, [])
    return load_blocks(command, load_corpus(arguments), make_tokenizer(), config or BertConfig())


def test_the_whole_text_is_used_where_it_is_small(tmp_path):
    blocks = load(tmp_path, MaskedLMArguments(max_seq_length=32))
    tokens = sum(map(len, blocks.train["input_ids"])), sum(map(len, blocks.evaluation["input_ids"]))
    assert not blocks.is_stream
    assert blocks.token_counts.sum() == tokens[0]
    assert blocks.description == (
        f"{len(blocks.train)} blocks with {tokens[0]:,} tokens, "
        f"evaluated on {len(blocks.evaluation)} blocks with {tokens[1]:,} tokens"
    )


def test_evaluation_is_bounded_by_default_and_spread_over_the_text(tmp_path, monkeypatch):
    whole = load(tmp_path, MaskedLMArguments(max_seq_length=32))
    monkeypatch.setattr(blocks_module, "EVALUATION_TOKENS", 10 * 32 + 5)
    blocks = load(tmp_path, MaskedLMArguments(max_seq_length=32))
    available = len(whole.evaluation)
    expected = [whole.evaluation[place * available // 10]["input_ids"] for place in range(10)]
    assert blocks.evaluation["input_ids"][:] == expected
    assert f"evaluated on 10 of {available} blocks with 320 tokens (--max_eval_samples sets how many)" in (
        blocks.description
    )
    assert blocks.train["input_ids"][:] == whole.train["input_ids"][:]


def test_numbers_of_blocks_are_those_asked_for(tmp_path):
    blocks = load(tmp_path, MaskedLMArguments(max_seq_length=32, max_train_samples=7, max_eval_samples=3))
    assert len(blocks.train) == 7
    assert len(blocks.evaluation) == 3
    assert blocks.description.startswith("7 of ")
    assert "evaluated on 3 of " in blocks.description
    more = load(tmp_path, MaskedLMArguments(max_seq_length=32, max_train_samples=10**6, max_eval_samples=10**6))
    assert " of " not in more.description


@pytest.mark.parametrize("processes", [None, 2])
def test_streams_are_bounded_too(tmp_path, processes):
    mlm = MaskedLMArguments(max_seq_length=32, max_train_samples=7, max_eval_samples=3)
    blocks = load(tmp_path, mlm, streaming=True, preprocessing_num_workers=processes)
    whole = load(tmp_path, MaskedLMArguments(max_seq_length=32))
    assert blocks.is_stream
    trained = [block["input_ids"] for block in blocks.train.take(14)]
    assert sorted(trained[:7]) == sorted(whole.train["input_ids"][:7])
    assert trained[7:] == trained[:7]  # a stream has no end
    assert blocks.evaluation["input_ids"][:] == whole.evaluation["input_ids"][:3]
    assert blocks.description.startswith("a stream, evaluated on 3 blocks")


def test_the_order_of_a_stream_follows_from_the_seed(tmp_path):
    mlm, whole = MaskedLMArguments(max_seq_length=32), load(tmp_path, MaskedLMArguments(max_seq_length=32))
    orders = []
    for seed in (0, 0, 1):
        stream = load(tmp_path, mlm, streaming=True, seed=seed).train.take(len(whole.train))
        orders.append([block["input_ids"] for block in stream])
        assert sorted(orders[-1]) == sorted(whole.train["input_ids"][:])
    assert orders[0] == orders[1] != orders[2]
    assert whole.train["input_ids"][:] not in orders


def test_some_architectures_get_full_blocks_alone(tmp_path):
    for num_landmarks, is_linear in ((8, True), (32, False)):
        config = NystromformerConfig(segment_means_seq_len=32, num_landmarks=num_landmarks)
        blocks = load(tmp_path, MaskedLMArguments(max_seq_length=32), config, one_document_per_block=True)
        lengths = {len(block) for part in (blocks.train, blocks.evaluation) for block in part["input_ids"]}
        assert 32 in lengths
        assert (lengths == {32}) == is_linear


def test_text_that_fills_no_block_is_explained(tmp_path):
    mlm = MaskedLMArguments(max_seq_length=5000, full_blocks_only=True)
    with pytest.raises(UserError, match=r"evaluation text does not fill one block of 5000 .*--validation_fraction"):
        load(tmp_path, mlm)
    with pytest.raises(UserError, match="no text to evaluate on"):
        load(tmp_path, mlm, validation_file=None, validation_fraction=0)


# How much there is of each of several streams is not known.
@pytest.mark.parametrize(("streaming", "probabilities"), [(False, None), (False, [0.5, 0.5]), (True, None)])
def test_training_text_that_fills_no_block_is_explained(tmp_path, streaming, probabilities):
    short = write(tmp_path / "short.txt", "balan comer")
    files = [write(tmp_path / "long.txt", "\n\n".join(make_texts(60))), short] if probabilities else [short]
    mlm = MaskedLMArguments(max_seq_length=32, full_blocks_only=True)
    with pytest.raises(UserError, match=r"The training text does not fill one block of 32 tokens; give more of it"):
        load(tmp_path, mlm, streaming=streaming, train_file=files, probabilities=probabilities)


@pytest.mark.parametrize("unit", ["blank_line", "file"])
def test_readers_of_a_stream_that_would_find_nothing_are_refused(tmp_path, unit):
    """The others would wait for them."""
    few = [write(tmp_path / f"{name}.txt", "\n\n".join(make_texts(2))) for name in "ab"]
    many = write(tmp_path / "many.txt", "\n\n".join(make_texts(60)))
    flags = {"streaming": True, "document_unit": unit, "readers": 5}
    mlm = MaskedLMArguments(max_seq_length=32)
    message = (
        r"fewer documents, or parts of 64 rows, than the 5 that read it .*; start fewer, or leave --streaming out"
    )
    with pytest.raises(UserError, match=message):
        load(tmp_path, mlm, train_file=few, **flags)
    assert load(tmp_path, mlm, train_file=few, **flags | {"readers": 2}).is_stream
    if unit == "blank_line":
        assert load(tmp_path, mlm, train_file=[*few, many], **flags).is_stream
        with pytest.raises(UserError, match="fewer documents"):  # for each source, from which all draw
            load(tmp_path, mlm, train_file=[few[0], many], probabilities=[0.5, 0.5], **flags)
        with pytest.raises(UserError, match="--max_train_samples 4 is less than the 5 that read it"):
            load(tmp_path, MaskedLMArguments(max_seq_length=32, max_train_samples=4), train_file=[many], **flags)


def test_the_buffer_of_a_stream_holds_so_many_tokens(tmp_path, monkeypatch):
    sizes, shuffle = [], IterableDataset.shuffle

    def note(self, *args, buffer_size, **options):
        sizes.append(buffer_size)
        return shuffle(self, *args, buffer_size=buffer_size, **options)

    monkeypatch.setattr(IterableDataset, "shuffle", note)
    monkeypatch.setattr(blocks_module, "_SHUFFLED_TOKENS", 32_000)
    for length in (16, 32, 1024):
        load(tmp_path, MaskedLMArguments(max_seq_length=length), streaming=True)
    assert sizes == [2000, 1000, 256]


def test_text_that_the_tokenizer_does_not_know_is_explained(tmp_path, caplog):
    mlm = MaskedLMArguments(max_seq_length=32)
    words = make_texts(1)[0].split()
    for unknown, known in ((100, 0), (60, 40)):
        text = write(tmp_path / f"{unknown}.txt", " ".join(["жук"] * unknown + (words * 40)[:known]))
        with pytest.raises(UserError, match=rf"{unknown}% of the evaluation text are \[UNK\].*take a tokenizer"):
            load(tmp_path, mlm, validation_file=[text])
    assert not caplog.records
    text = write(tmp_path / "some.txt", " ".join(["жук"] * 20 + (words * 80)[:80]))
    assert load(tmp_path, mlm, validation_file=[text]).unigram_loss > 0
    assert "20% of the evaluation text are [UNK]" in caplog.text


def test_blocks_are_spread_evenly():
    blocks = Dataset.from_dict({"n": list(range(10))})
    assert spread(blocks, 4)["n"][:] == [0, 2, 5, 7]
    assert spread(blocks, 10) is spread(blocks, None) is blocks


def test_a_tokenizer_is_trained_once(tmp_path, monkeypatch):
    arguments = CorpusArguments(
        train_file=[write(tmp_path / "train.txt", "\n\n".join(make_texts(50)))], cache_dir=str(tmp_path / "cache")
    )
    corpus, mlm = load_corpus(arguments), MaskedLMArguments(vocab_size=150, max_seq_length=24)
    first = train_tokenizer_once(tmp_path / "tokenizer", corpus, mlm)
    assert first.model_max_length == 24
    monkeypatch.setattr(blocks_module, "train_wordpiece", lambda *_, **__: pytest.fail("trained again"))
    assert train_tokenizer_once(tmp_path / "tokenizer", corpus, mlm).get_vocab() == first.get_vocab()


@pytest.mark.parametrize("name", ["max_train_samples", "max_eval_samples", "mlm_probability", "max_seq_length"])
def test_impossible_values_are_refused(name):
    with pytest.raises(UserError, match=f"--{name}"):
        parse_args([MaskedLMArguments], [f"--{name}", "0"])
