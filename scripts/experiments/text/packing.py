"""From rows of text to blocks of tokens of one length, on disk or on the fly.

A block is `[CLS] content [SEP]`. Documents follow one another in the content with a `[SEP]` between them, and nothing
is dropped: what does not fit into a block opens the next one.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, interleave_datasets
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from experiments.arguments import UserError
from experiments.text.corpus import TextSource


logger = logging.getLogger(__name__)

BlocksT = TypeVar("BlocksT", Dataset, IterableDataset)

# Part of the name of prepared blocks: a change of the rules below must not meet blocks that older rules have made.
FORMAT_VERSION = 1

_FEATURES = Features({"input_ids": List(Value("int32"))})
_BLOCKS_FILE = "blocks.arrow"
_STATISTICS_FILE = "statistics.json"
# Bounds on what is in memory at a time: characters of a row, rows and characters tokenized together, blocks written.
_MAX_ROW_CHARACTERS = 50_000
_BATCH_ROWS = 1000
# A corpus without a blank row is one document: dealt out whole it would leave all shards but one empty.
_SHARD_PIECES = 64
_BATCH_CHARACTERS = 1_000_000
_BATCH_BLOCKS = 1000


@dataclass(frozen=True)
class BlockStatistics:
    """
    What is in prepared blocks.

    Args:
        source (`str`):
            Name of the text.
        num_documents (`int`):
            Documents with at least one token.
        num_tokens (`int`):
            Tokens of the text, without the `[CLS]` and `[SEP]` of the blocks.
        num_blocks (`int`):
            Blocks, the last, shorter one included.
    """

    source: str
    num_documents: int
    num_tokens: int
    num_blocks: int


def pack_documents(
    documents_tokens: Iterable[Sequence[int]],
    block_length: int,
    cls_id: int,
    sep_id: int,
    one_document_per_block: bool = False,
) -> Iterator[list[int]]:
    """
    Pack documents into blocks.

    A separator may meet the end of a block, which then ends in two `[SEP]`.

    Args:
        documents_tokens (iterable of sequences of `int`):
            The token ids of each document, without special tokens.
        block_length (`int`):
            Tokens of a block with its `[CLS]` and `[SEP]`; at least 3.
        cls_id (`int`):
            Id of `[CLS]`.
        sep_id (`int`):
            Id of `[SEP]`.
        one_document_per_block (`bool`, *optional*, defaults to `False`):
            End a block with its document. Blocks are then of any length up to `block_length`; a longer document takes
            several.

    Yields:
        `list[int]`: blocks of exactly `block_length` tokens, except for the last one.

    Raises:
        ValueError: if `block_length` leaves no room for content.
    """
    pieces = ((tokens, True) for tokens in documents_tokens)
    yield from _pack(pieces, block_length, cls_id, sep_id, one_document_per_block)


def prepare_blocks(
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    cache_dir: str | Path,
    one_document_per_block: bool = False,
    desc: str = "Tokenizing",
) -> Dataset:
    """
    Tokenize and pack a source once, and open the result, which stays on disk and is mapped into memory.

    Blocks are kept under a name made of the text, the tokenizer and the options, and used again whenever these are the
    same. If several processes ask for the same blocks, one prepares them and the others wait. A folder of blocks
    appears when it is complete, so that an interrupted run leaves nothing that could be taken for one.

    Args:
        source (`TextSource`):
            The text.
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer with `[CLS]` and `[SEP]`, or what takes their place.
        block_length (`int`):
            Tokens of a block with its `[CLS]` and `[SEP]`.
        cache_dir (`str` or `Path`):
            Where folders of blocks are kept.
        one_document_per_block (`bool`, *optional*, defaults to `False`):
            See [`pack_documents`].
        desc (`str`, *optional*):
            Title of the progress bar.

    Returns:
        `datasets.Dataset` with the column `input_ids`. [`block_statistics`] counts what is in it.

    Raises:
        UserError: if the text holds no token or `cache_dir` cannot be written.
        ValueError: if the tokenizer has no `[CLS]` or `[SEP]`.
    """
    cls_id, sep_id = _boundary_ids(tokenizer)
    key = _cache_key(source, tokenizer, block_length, one_document_per_block)
    folder = Path(cache_dir) / f"blocks-{key}"
    if not folder.exists():
        with _lock(folder):
            if not folder.exists():  # nobody else has prepared it meanwhile
                bar = tqdm(source, total=source.num_rows, desc=desc, unit=" rows", disable=None)
                pieces = _tokenize(_read_pieces(bar, source.document_unit), tokenizer)
                _write_blocks(folder, source, pieces, (block_length, cls_id, sep_id, one_document_per_block))
    blocks = Dataset.from_file(str(folder / _BLOCKS_FILE))
    statistics = block_statistics(blocks)
    logger.info(
        "%s: %s documents, %s tokens, %s blocks of %d in %s",
        source.name,
        f"{statistics.num_documents:,}",
        f"{statistics.num_tokens:,}",
        f"{statistics.num_blocks:,}",
        block_length,
        folder,
    )
    return blocks


def block_statistics(blocks: Dataset) -> BlockStatistics:
    """Count what is in blocks that [`prepare_blocks`] has returned."""
    path = Path(blocks.cache_files[0]["filename"]).with_name(_STATISTICS_FILE)
    return BlockStatistics(**json.loads(path.read_text(encoding="utf-8")))


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
    making the blocks that it has seen once more and skipping them.

    Args:
        source (`TextSource`):
            The text.
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer with `[CLS]` and `[SEP]`, or what takes their place.
        block_length (`int`):
            Tokens of a block with its `[CLS]` and `[SEP]`.
        one_document_per_block (`bool`, *optional*, defaults to `False`):
            See [`pack_documents`].
        num_shards (`int`, *optional*, defaults to 1):
            Number of parts that can be read at the same time.

    Returns:
        `datasets.IterableDataset` with the column `input_ids`. It has no length: the Trainer needs `max_steps`.

    Raises:
        ValueError: if the tokenizer has no `[CLS]` or `[SEP]`.
    """
    _boundary_ids(tokenizer)
    return IterableDataset.from_generator(
        _generate_shards,
        features=_FEATURES,
        gen_kwargs={
            "shards": list(range(num_shards)),  # the one list among the arguments is what gets divided
            "num_shards": num_shards,
            "source": source,
            "tokenizer": tokenizer,
            "block_length": block_length,
            "one_document_per_block": one_document_per_block,
        },
    )


def mix_blocks(datasets: list[BlocksT], probabilities: list[float] | None = None, seed: int | None = None) -> BlocksT:
    """
    Put blocks of several sources together.

    Args:
        datasets (`list` of `Dataset` or of `IterableDataset`):
            The blocks of each source.
        probabilities (`list[float]`, *optional*):
            How often to draw from each, with sum 1. One pass ends when every source has been read to its end; the
            shorter ones are repeated until then. By default the sources are joined as they are.
        seed (`int`, *optional*):
            Seed of the draws.

    Returns:
        `Dataset` or `IterableDataset`, as given.
    """
    if len(datasets) == 1:
        return datasets[0]
    if probabilities is None:
        return concatenate_datasets(datasets)
    return interleave_datasets(datasets, probabilities, seed=seed, stopping_strategy="all_exhausted")


def unigram_cross_entropy(
    train_blocks: Dataset, validation_blocks: Dataset, vocab_size: int, ignored_ids: Iterable[int] = ()
) -> float:
    """
    Loss of the simplest model: it predicts every token from the frequencies of the tokens in the training blocks.

    A masked language model that has learnt nothing but how frequent words are has this loss. Frequencies are smoothed
    by adding one to each count.

    Args:
        train_blocks (`datasets.Dataset`):
            Blocks to count, with the column `input_ids`.
        validation_blocks (`datasets.Dataset`):
            Blocks to predict, with the column `input_ids`.
        vocab_size (`int`):
            Number of token ids.
        ignored_ids (iterable of `int`, *optional*):
            Ids that are neither counted nor predicted: the special tokens, which are never masked.

    Returns:
        `float`: mean cross entropy in nats per token.

    Raises:
        ValueError: if there is no token to predict.
    """
    kept = np.ones(vocab_size, dtype=bool)
    kept[list(ignored_ids)] = False
    train_counts = _count_tokens(train_blocks, vocab_size)[kept] + 1.0
    validation_counts = _count_tokens(validation_blocks, vocab_size)[kept]
    if not validation_counts.any():
        raise ValueError("`validation_blocks` hold no token to predict.")
    log_frequencies = np.log(train_counts / train_counts.sum())
    return float(-(validation_counts @ log_frequencies) / validation_counts.sum())


def _count_tokens(blocks: Dataset, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in blocks.with_format("arrow").iter(batch_size=10 * _BATCH_BLOCKS):
        for chunk in table.column("input_ids").chunks:
            counts += np.bincount(chunk.flatten().to_numpy(zero_copy_only=False), minlength=vocab_size)
    return counts


def _boundary_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer; load one that has a tokenizer.json.")
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        raise ValueError(f"{type(tokenizer).__name__} has no `cls_token` or no `sep_token`; set both.")
    return tokenizer.cls_token_id, tokenizer.sep_token_id


def _cache_key(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, block_length: int, one_document_per_block: bool
) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding"):  # left by the tokenizer's last call, and not used here
        backend.pop(setting, None)
    options = [_boundary_ids(tokenizer), block_length, one_document_per_block]
    parts = [FORMAT_VERSION, source.fingerprint, backend, options]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("Waiting for another process that prepares %s.", folder)
            lock.acquire()
    except OSError as error:
        raise UserError(f"{folder.parent} cannot be written ({error.strerror}); give another --cache_dir.") from error
    try:
        yield
    finally:
        lock.release()


def _write_blocks(
    folder: Path,
    source: TextSource,
    pieces: Iterable[tuple[list[int], bool]],
    packing: tuple[int, int, int, bool],
) -> None:
    """Pack pieces into a folder beside `folder`, and rename it when it is complete."""
    unfinished = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed; the lock says that none is at work
    unfinished.mkdir()
    try:
        counter = _PieceCounter(pieces)
        num_blocks = _write_arrow(unfinished / _BLOCKS_FILE, _pack(counter, *packing))
        if not num_blocks:
            raise UserError(f"{source.name} holds no text that the tokenizer turns into tokens; give other text.")
        statistics = BlockStatistics(source.name, counter.num_documents, counter.num_tokens, num_blocks)
        (unfinished / _STATISTICS_FILE).write_text(json.dumps(asdict(statistics), indent=2), encoding="utf-8")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_arrow(path: Path, blocks: Iterator[list[int]]) -> int:
    num_blocks = 0
    schema = _FEATURES.arrow_schema
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while batch := list(islice(blocks, _BATCH_BLOCKS)):
            writer.write_batch(pa.record_batch([pa.array(batch, schema.field("input_ids").type)], schema=schema))
            num_blocks += len(batch)
    return num_blocks


class _PieceCounter:
    """Passes pieces of documents on and counts the documents and tokens that go by."""

    def __init__(self, pieces: Iterable[tuple[list[int], bool]]):
        self.pieces = pieces
        self.num_documents = 0
        self.num_tokens = 0

    def __iter__(self) -> Iterator[tuple[list[int], bool]]:
        is_open = False
        for tokens, ends_document in self.pieces:
            self.num_documents += bool(tokens) and not is_open
            self.num_tokens += len(tokens)
            is_open = (is_open or bool(tokens)) and not ends_document
            yield tokens, ends_document


def _generate_shards(
    shards: list[int],
    num_shards: int,
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    one_document_per_block: bool,
) -> Iterator[dict[str, list[int]]]:
    cls_id, sep_id = _boundary_ids(tokenizer)
    for shard in shards:
        pieces = _select_documents(_read_pieces(source, source.document_unit), shard, num_shards)
        for block in _pack(_tokenize(pieces, tokenizer), block_length, cls_id, sep_id, one_document_per_block):
            yield {"input_ids": block}


def _select_documents(pieces: Iterable[tuple[str, bool]], shard: int, num_shards: int) -> Iterator[tuple[str, bool]]:
    """Every `num_shards`-th document; where there are several shards, long documents are dealt out in parts."""
    document = length = 0
    for text, ends_document in pieces:
        length += 1
        ends_part = ends_document or (num_shards > 1 and length == _SHARD_PIECES)
        if document % num_shards == shard:
            yield text, ends_part
        if ends_part:
            document, length = document + 1, 0


def _read_pieces(rows: Iterable[str], document_unit: str) -> Iterator[tuple[str, bool]]:
    """Pieces of text of bounded length, each with whether a document ends with it."""
    for row in rows:
        *pieces, last = _cut(row)
        yield from ((piece, False) for piece in pieces)
        yield last, document_unit == "row" or not row.strip()


def _cut(text: str) -> Iterator[str]:
    """Cut a text that is too long for one call of the tokenizer behind white space, where no token crosses."""
    start = 0
    while len(text) - start > _MAX_ROW_CHARACTERS:
        limit = start + _MAX_ROW_CHARACTERS
        end = next((position + 1 for position in range(limit - 1, start, -1) if text[position].isspace()), limit)
        yield text[start:end]
        start = end
    yield text[start:]


def _tokenize(
    pieces: Iterable[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], bool]]:
    for batch in _batch_pieces(pieces):
        encoding = tokenizer(
            [text for text, _ in batch],
            add_special_tokens=False,
            split_special_tokens=True,  # a text that says "[MASK]" holds three words, not a masked token
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # rows may be longer than the model's input: they are cut into blocks afterwards
        )
        yield from zip(encoding["input_ids"], (ends_document for _, ends_document in batch), strict=True)


def _batch_pieces(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece[0])
        if len(batch) == _BATCH_ROWS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _pack(
    pieces: Iterable[tuple[Sequence[int], bool]],
    block_length: int,
    cls_id: int,
    sep_id: int,
    one_document_per_block: bool,
) -> Iterator[list[int]]:
    """[`pack_documents`] for documents in pieces, each with whether a document ends with it."""
    capacity = block_length - 2
    if capacity < 1:
        raise ValueError(f"`block_length` is {block_length}; a block with [CLS] and [SEP] needs at least 3 tokens.")
    content: list[int] = []
    at_boundary = False
    for tokens, ends_document in pieces:
        start = 0
        while start < len(tokens):
            if at_boundary and content:
                content.append(sep_id)
            at_boundary = False
            end = start + capacity - len(content)
            content += tokens[start:end]
            start = end
            if len(content) == capacity:
                yield [cls_id, *content, sep_id]
                content = []
        at_boundary = at_boundary or ends_document
        if ends_document and one_document_per_block and content:
            yield [cls_id, *content, sep_id]
            content = []
    if content:
        yield [cls_id, *content, sep_id]
