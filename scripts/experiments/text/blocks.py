"""What masked language modelling reads: a tokenizer, and a corpus packed into blocks for one model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from filelock import FileLock
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from experiments.architectures import fixed_length
from experiments.arguments import Command, UserError, flag, require_at_least
from experiments.models import load_tokenizer
from experiments.text.corpus import Corpus
from experiments.text.packing import (
    count_tokens,
    mix_blocks,
    prepare_blocks,
    reaches_all_shards,
    stream_blocks,
    unigram_cross_entropy,
)
from experiments.text.source import TextSource
from experiments.text.tokenizer import check_known, sample_texts, save_tokenizer, train_wordpiece


# What packing and masking put into a block.
MASKED_LM_TOKENS = ("mask", "pad", "cls", "sep")
EVALUATION_TOKENS = 500_000
# What of a stream is held to be shuffled: of long blocks as many tokens, of short ones as many blocks.
_SHUFFLED_TOKENS, _SHUFFLED_BLOCKS = 4_000_000, 256


@dataclass
class MaskedLMArguments:
    """What is masked and how it is cut into blocks."""

    tokenizer_name: str | None = flag(None, "Folder or Hub id; by default the model's, or one trained on the corpus.")
    vocab_size: int = flag(30522, "Size of a tokenizer that is trained on the corpus.")
    max_seq_length: int = flag(512, "Length of a block in tokens, [CLS] and [SEP] included.")
    mlm_probability: float = flag(0.15, "Share of the tokens to predict.")
    sparse_prediction: bool = flag(
        False, "Compute logits only where something is predicted, as SKTformer always does; the loss stays the same."
    )
    full_blocks_only: bool = flag(False, "Leave out shorter blocks, for architectures that take one length alone.")
    max_train_samples: int | None = flag(None, "Train on so many blocks; by default all.")
    max_eval_samples: int | None = flag(None, f"Evaluate on so many blocks, by default {EVALUATION_TOKENS:,} tokens.")

    def __post_init__(self):
        require_at_least(1, self, "max_train_samples", "max_eval_samples")
        require_at_least(3, self, "max_seq_length")
        require_at_least(7, self, "vocab_size")
        if not 0 < self.mlm_probability < 1:
            raise UserError(f"--mlm_probability is {self.mlm_probability}; it must lie between 0 and 1.")


@dataclass
class Blocks:
    """Packed text."""

    train: Dataset | IterableDataset
    evaluation: Dataset
    unigram_loss: float  # what unigram frequencies score on the evaluation blocks, in nats per token
    token_counts: np.ndarray  # (vocab_size,): of the training blocks or, where they are a stream, of the evaluation's
    description: str  # how much text there is, and how much of it is used

    @property
    def is_stream(self) -> bool:
        return isinstance(self.train, IterableDataset)


def train_tokenizer_once(folder: Path, corpus: Corpus, mlm_arguments: MaskedLMArguments) -> PreTrainedTokenizerBase:
    """Train a run's tokenizer in one of its processes and load it in all; if it is in `folder` it is only loaded."""
    # A file lock and not a barrier: training on a large corpus outlasts the time-out of a collective.
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            texts = sample_texts(corpus.train, probabilities=corpus.probabilities)
            length = mlm_arguments.max_seq_length
            save_tokenizer(train_wordpiece(texts, mlm_arguments.vocab_size, model_max_length=length), folder)
    return load_tokenizer(str(folder), False, MASKED_LM_TOKENS)


def load_blocks(
    command: Command, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> Blocks:
    """
    Pack a corpus into blocks for a model, and measure what unigram frequencies would score.

    Sources are mixed, and streams shuffled, in an order that follows from the seed of a command's training. Raises a
    `UserError` if there is no text to evaluate on, too little for a block, or most of it unknown to the tokenizer.
    """
    _, corpus_arguments, mlm_arguments, training = command.groups
    length, single, seed = mlm_arguments.max_seq_length, corpus_arguments.one_document_per_block, training.seed
    if not corpus.validation:
        raise UserError("There is no text to evaluate on; give --validation_file or a --validation_fraction above 0.")
    full_only = mlm_arguments.full_blocks_only or fixed_length(config) is not None

    def too_short(kind: str) -> UserError:
        hint = "give more of it, or another --validation_fraction"
        return UserError(f"The {kind} text does not fill one block of {length} tokens; {hint}.")

    def prepare(kind: str, sources: list[TextSource], max_blocks: int | None = None) -> list[Dataset]:
        options = (length, corpus.cache_dir, single, corpus_arguments.preprocessing_num_workers, max_blocks)
        blocks = [prepare_blocks(source, tokenizer, *options) for source in sources]
        blocks = [part.select(_full_blocks(part, length)) for part in blocks] if full_only else blocks
        # With probabilities every source is drawn from.
        fills = all if kind == "training" and corpus.probabilities else any
        if not fills(map(len, blocks)):
            raise too_short(kind)
        return blocks

    most = mlm_arguments.max_eval_samples or max(1, EVALUATION_TOKENS // length)
    # Of a stream only the beginning is read: there is no end in sight.
    whole = mix_blocks(prepare("evaluation", corpus.validation, most if corpus_arguments.streaming else None))
    evaluation = spread(whole, most)
    evaluation_counts = count_tokens(evaluation, len(tokenizer))
    check_known(evaluation_counts, tokenizer, "the evaluation text")
    train: Dataset | IterableDataset
    if corpus_arguments.streaming:
        check_readers(training.num_readers, corpus, mlm_arguments)
        streams = [stream_blocks(source, tokenizer, length, single, training.num_readers) for source in corpus.train]
        train = mix_blocks(streams, corpus.probabilities, seed)
        if full_only:
            train = train.filter(lambda block: len(block["input_ids"]) == length)
        if mlm_arguments.max_train_samples:
            train = train.take(mlm_arguments.max_train_samples)
        if next(iter(train), None) is None:
            raise too_short("training")
        # Every reader begins again by itself: none waits for another that has more blocks, and a resumed run, whose
        # Trainer knows of no passes over a stream, skips what it has seen whichever pass that was in.
        train = train.shuffle(seed=seed, buffer_size=max(_SHUFFLED_BLOCKS, _SHUFFLED_TOKENS // length)).repeat(None)
        # The frequencies of a stream are not known before its end; the evaluation text's own are the harder baseline.
        counts, size = evaluation_counts, "a stream"
    else:
        available = mix_blocks(prepare("training", corpus.train), corpus.probabilities, seed)
        train = spread(available, mlm_arguments.max_train_samples)
        counts = count_tokens(train, len(tokenizer))
        size = f"{_count_of(train, available)} blocks with {counts.sum():,} tokens"
    hint = "" if len(evaluation) == len(whole) else " (--max_eval_samples sets how many)"
    read = f"{_count_of(evaluation, whole)} blocks with {evaluation_counts.sum():,} tokens{hint}"
    unigram_loss = unigram_cross_entropy(counts, evaluation_counts, tokenizer.all_special_ids)
    return Blocks(train, evaluation, unigram_loss, counts, f"{size}, evaluated on {read}")


def check_readers(num_readers: int, corpus: Corpus, mlm_arguments: MaskedLMArguments) -> None:
    """A `UserError` if a process or worker that reads a stream would find nothing, and the others wait for it."""
    needed = all if corpus.probabilities else any
    if needed(reaches_all_shards(source, num_readers) for source in corpus.train):
        if (mlm_arguments.max_train_samples or num_readers) >= num_readers:
            return
        what = f"--max_train_samples {mlm_arguments.max_train_samples} is less than"
    else:
        what = "--streaming: the training text has fewer documents, or parts of 64 rows, than"
    readers = f"the {num_readers} that read it (processes times --dataloader_num_workers)"
    raise UserError(f"{what} {readers}; start fewer, or leave --streaming out.")


def spread(blocks: Dataset, count: int | None) -> Dataset:
    """At most `count` blocks, taken evenly from the first to the last."""
    if count is None or len(blocks) <= count:
        return blocks
    return blocks.select(np.arange(count) * len(blocks) // count)


def _count_of(used: Dataset, available: Dataset) -> str:
    return f"{len(used):,}" if len(used) == len(available) else f"{len(used):,} of {len(available):,}"


def _full_blocks(blocks: Dataset, length: int) -> np.ndarray:
    """The numbers of the blocks of exactly `length` tokens."""
    return (pc.list_value_length(blocks.data.column("input_ids")).to_numpy() == length).nonzero()[0]
