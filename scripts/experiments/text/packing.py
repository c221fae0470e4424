"""From rows of text to blocks of tokens of one length, on disk or on the fly.

A block is `[CLS] content [SEP]`. Documents follow one another in the content with a `[SEP]` between them, and nothing
is dropped: what does not fit into a block opens the next one.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, interleave_datasets
from datasets.exceptions import DatasetGenerationError
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from experiments.arguments import UserError, one_line
from experiments.text.source import TextSource, digest


BlocksT = TypeVar("BlocksT", Dataset, IterableDataset)
# Pieces of documents, as text and as tokens, each with whether a document ends with it.
TextPiece: TypeAlias = tuple[str, bool]
TokenPiece: TypeAlias = tuple[Sequence[int], bool]

# Part of the name of prepared blocks: a change of the rules below must not meet blocks that older rules have made.
FORMAT_VERSION = 3

_FEATURES = Features({"input_ids": List(Value("int32"))})
# Bounds on what is in memory at a time: characters of a row, rows and characters tokenized together, blocks counted.
_MAX_ROW_CHARACTERS = 50_000
_BATCH_ROWS = 1000
_BATCH_CHARACTERS = 1_000_000
_BATCH_BLOCKS = 10_000
# A corpus without a blank row is one document: dealt out whole it would leave all shards but one empty.
_SHARD_PIECES = 64


def pack_documents(
    pieces: Iterable[TokenPiece], block_length: int, cls_id: int, sep_id: int, one_document_per_block: bool = False
) -> Iterator[list[int]]:
    """
    Pack documents into blocks of exactly `block_length` tokens, `[CLS]` and `[SEP]` included, except for the last one.

    A separator may meet the end of a block, which then ends in two `[SEP]`. Blocks that end with their document are of
    any length up to `block_length`; a longer document takes several. Raises a `ValueError` if `block_length` leaves no
    room for content.
    """
    capacity = block_length - 2
    if capacity < 1:
        raise ValueError(f"`block_length` is {block_length}; a block with [CLS] and [SEP] needs at least 3 tokens.")
    content: list[int] = []
    at_boundary = False
    for tokens, ends_document in pieces:
        if tokens:
            content += [sep_id, *tokens] if at_boundary and content else tokens
            at_boundary = False
        while len(content) >= capacity or (content and ends_document and one_document_per_block):
            yield [cls_id, *content[:capacity], sep_id]
            content = content[capacity:]
        at_boundary = at_boundary or ends_document
    if content:
        yield [cls_id, *content, sep_id]


def prepare_blocks(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    cache_dir: str | Path,
    one_document_per_block: bool = False,
    num_proc: int | None = None,
    max_blocks: int | None = None,
) -> Dataset:
    """
    Tokenize and pack a source once, and open the result (a column `input_ids`), which stays on disk; a `UserError` if
    the text holds no token or `cache_dir` cannot be written.

    Blocks are kept under a name made of the text, the tokenizer and the options, and used again whenever these are the
    same; the datasets library sees to it that one process prepares them while others wait, and that they appear when
    they are complete. Its `map` could tokenize, too, but not pack (a block goes on where the batch before it has
    ended) without writing the tokens to disk once more. However many processes tokenize, the blocks are the same.
    """
    packing = (block_length, tokenizer.cls_token_id, tokenizer.sep_token_id, one_document_per_block)
    batches = DataLoader(
        _TokenizedBatches(source, tokenizer),
        batch_size=None,
        collate_fn=list,
        num_workers=num_proc or 0,
        generator=torch.Generator(),  # the global one stays as it is, whether blocks are prepared or found
    )

    def read() -> Iterator[Any]:
        try:
            yield from chain.from_iterable(batches)
        except OSError as error:  # which is not the cache's
            raise UserError(f"{source.name} cannot be read to its end ({one_line(error)}); try again.") from error

    def generate() -> Iterator[dict[str, list[int]]]:
        blocks = islice(pack_documents(read(), *packing), max_blocks)
        first = next(blocks, None)
        if first is None:
            raise UserError(f"{source.name} holds no text that the tokenizer turns into tokens; give other text.")
        yield from ({"input_ids": block} for block in chain([first], blocks))

    key = _cache_key(source, tokenizer, packing, max_blocks)
    try:
        return Dataset.from_generator(generate, features=_FEATURES, cache_dir=str(cache_dir), fingerprint=key)
    except (OSError, DatasetGenerationError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):
            raise UserError(f"{cache_dir} cannot be written ({one_line(cause)}); give another --cache_dir.") from error
        raise cause from None


def stream_blocks(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    one_document_per_block: bool = False,
    num_shards: int = 1,
) -> IterableDataset:
    """
    Tokenize and pack a source while it is read; with one shard the blocks are those of [`prepare_blocks`].

    Shard `k` of `n` packs the documents `k, k + n, k + 2n...`, long ones in parts of 64 rows. Ranks and workers
    of a `DataLoader` divide the shards among themselves: give a multiple of ranks times workers. Every shard reads all
    of the source, but tokenizes only its own documents. The order is the same in every pass; a run is resumed by
    making the blocks that it has seen once more and skipping them. There is no length: the Trainer needs `max_steps`.
    """
    options = {
        "shards": list(range(num_shards)),  # the one list among the arguments is what gets divided
        "num_shards": num_shards,
        "source": source,
        "tokenizer": tokenizer,
        "packing": (block_length, tokenizer.cls_token_id, tokenizer.sep_token_id, one_document_per_block),
    }
    return IterableDataset.from_generator(_generate_shards, features=_FEATURES, gen_kwargs=options)


def reaches_all_shards(source: TextSource, num_shards: int) -> bool:
    """Whether a source has a document, or part of one, for each of so many shards, see [`stream_blocks`]."""
    return any(True for _ in _select_documents(_read_pieces(source), num_shards - 1, num_shards))


def _generate_shards(
    shards: list[int], num_shards: int, source: TextSource, tokenizer: PreTrainedTokenizerBase, packing: tuple
) -> Iterator[dict[str, list[int]]]:
    for shard in shards:
        pieces = _select_documents(_read_pieces(source), shard, num_shards)
        tokens = (_tokenize(batch, tokenizer) for batch in _batch_pieces(pieces))
        yield from ({"input_ids": block} for block in pack_documents(chain.from_iterable(tokens), *packing))


def mix_blocks(datasets: list[BlocksT], probabilities: list[float] | None = None, seed: int | None = None) -> BlocksT:
    """Put blocks one after the other, or draw them with `probabilities` of sum 1 until all sources were read."""
    if len(datasets) == 1:
        return datasets[0]
    if probabilities is None:
        return concatenate_datasets(datasets)
    return interleave_datasets(datasets, probabilities, seed=seed, stopping_strategy="all_exhausted")


def count_tokens(blocks: Dataset, vocab_size: int) -> np.ndarray:
    """How often each of `vocab_size` tokens is in blocks, special tokens included; int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in blocks.with_format("arrow").iter(batch_size=_BATCH_BLOCKS):
        for chunk in table.column("input_ids").chunks:
            counts += np.bincount(chunk.flatten().to_numpy(zero_copy_only=False), minlength=vocab_size)
    return counts


def unigram_cross_entropy(
    train_counts: np.ndarray, evaluation_counts: np.ndarray, ignored_ids: Iterable[int] = ()
) -> float:
    """
    Loss of the simplest model, in nats per token: it has learnt nothing but how frequent words are, with one added to
    each count of the training text. Special tokens are ignored; a `ValueError` if there is no other token to predict.
    """
    kept = np.ones(len(train_counts), dtype=bool)
    kept[list(ignored_ids)] = False
    frequencies, predicted = train_counts[kept] + 1.0, evaluation_counts[kept]
    if not predicted.any():
        raise ValueError("There is no token to predict.")
    return float(-(predicted @ np.log(frequencies / frequencies.sum())) / predicted.sum())


def _cache_key(source: TextSource, tokenizer: PreTrainedTokenizerBase, *options: Any) -> str:
    return digest(json.dumps([FORMAT_VERSION, source.fingerprint, tokenizer_rules(tokenizer), options]))


def tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """All that says how it tokenizes, wherever it lies."""
    rules: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}  # of its last call


class _TokenizedBatches(torch.utils.data.IterableDataset):
    """Pieces of a source in batches, tokenized: workers of a `DataLoader` do every n-th one, which keeps the order."""

    def __init__(self, source: TextSource, tokenizer: PreTrainedTokenizerBase):
        self.source, self.tokenizer = source, tokenizer

    def __iter__(self) -> Iterator[list[TokenPiece]]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # each is one of the processes asked for
        batches = islice(_batch_pieces(_read_pieces(self.source)), first, None, step)
        yield from (_tokenize(batch, self.tokenizer) for batch in batches)


def _tokenize(batch: list[TextPiece], tokenizer: PreTrainedTokenizerBase) -> list[TokenPiece]:
    encoding = tokenizer(
        [text for text, _ in batch],
        add_special_tokens=False,
        split_special_tokens=True,  # a text that says "[MASK]" holds three words, not a masked token
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # rows may be longer than the model's input: they are cut into blocks afterwards
    )
    return list(zip(encoding["input_ids"], (ends_document for _, ends_document in batch), strict=True))


def _select_documents(pieces: Iterable[TextPiece], shard: int, num_shards: int) -> Iterator[TextPiece]:
    """Every `num_shards`-th document; where there are several shards, long documents are dealt out in parts."""
    document, length, has_text = 0, 0, False
    for text, ends_document in pieces:
        length, has_text = length + 1, has_text or bool(text.strip())
        ends_part = ends_document or (num_shards > 1 and length == _SHARD_PIECES)
        if document % num_shards == shard:
            yield text, ends_part
        if ends_part:
            # Several blank rows in a row are no documents, which would be a shard's turn.
            document, length, has_text = document + has_text, 0, False


def _read_pieces(source: TextSource) -> Iterator[TextPiece]:
    """The rows, those too long for one call of the tokenizer cut behind white space, where no token crosses."""
    for row in source:
        start = 0
        while len(row) - start > _MAX_ROW_CHARACTERS:
            limit = start + _MAX_ROW_CHARACTERS
            end = next((place + 1 for place in range(limit - 1, start, -1) if row[place].isspace()), limit)
            yield row[start:end], False
            start = end
        yield row[start:], source.document_unit == "row" or not row.strip()


def _batch_pieces(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece[0])
        if len(batch) == _BATCH_ROWS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
