"""Training the WordPiece vocabulary of BERT."""

import logging
import os
import string
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer
from tokenizers.trainers import WordPieceTrainer
from tqdm.auto import tqdm
from transformers import BertTokenizer, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from experiments.arguments import UserError
from experiments.results import check_writable
from experiments.text.source import TextSource


logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_CHARACTERS = 100_000_000

_MAX_ALPHABET = 1000
# What tokenizers of other kinds and older versions leave, which would be read beside the new files.
_OF_OTHER_KINDS = (
    *("vocab.txt", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    lowercase: bool = True,
    min_frequency: int = 2,
    model_max_length: int | None = None,
) -> BertTokenizer:
    """
    Train a WordPiece vocabulary; equal texts give equal vocabularies.

    The special tokens come first, in BERT's order. The alphabet is every printable ASCII character and the commonest
    other characters of the texts, a thousand in all. (`train_new_from_iterator` of transformers would give another
    vocabulary in each process: it cannot list the letters inside of words, see below.) There are fewer than
    `vocab_size` tokens if the texts, which are held in memory, are too small. A token is made out of its parts if it
    occurs `min_frequency` times. Raises a `UserError` if `vocab_size` does not hold the special tokens and two forms
    of a letter, or there is no text.
    """
    # Beside a character there is its form inside of words, "##a" beside "a".
    max_alphabet = min(_MAX_ALPHABET, (vocab_size - len(SPECIAL_TOKENS)) // 2)
    if max_alphabet < 1:
        raise UserError(f"--vocab_size is {vocab_size}; it must be at least {len(SPECIAL_TOKENS) + 2}.")
    sample = list(tqdm(texts, desc="Reading", unit=" rows", disable=None))
    if not any(text.strip() for text in sample):
        raise UserError("No tokenizer can be trained: there is no text to train it on.")
    backend = BertTokenizer(do_lower_case=lowercase).backend_tokenizer
    alphabet = _count_alphabet(sample, backend)[:max_alphabet]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        # The trainer numbers the forms inside of words as it meets them, which is in another order in each process,
        # and breaks ties between merges by number. Listed here, they are numbered before; they are special to the
        # trainer only, the vocabulary it makes is all that is kept.
        special_tokens=[*SPECIAL_TOKENS, *(f"##{letter}" for letter in alphabet if _is_joined(letter, backend))],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(sample, trainer, length=len(sample))
    vocabulary = backend.get_vocab()
    logger.info("Trained %s tokens on %s characters.", f"{len(vocabulary):,}", f"{sum(map(len, sample)):,}")
    if len(vocabulary) < vocab_size:
        logger.info("The texts are too small for the %s tokens that were asked for.", f"{vocab_size:,}")
    return BertTokenizer(vocab=vocabulary, do_lower_case=lowercase, model_max_length=model_max_length)


def sample_texts(
    sources: Sequence[TextSource], max_characters: int = MAX_CHARACTERS, probabilities: Sequence[float] | None = None
) -> Iterator[str]:
    """
    Draw about `max_characters` of text from a corpus, or all of it if it is smaller.

    Rows are taken in their order, evenly from the beginning to the end of a source, or, if its size is not known, from
    the beginning alone. `probabilities`, with sum 1, are the shares of the sources, by default in proportion to their
    sizes, or equal if a size is not known.
    """
    sizes = [source.num_bytes for source in sources]
    if probabilities is None:
        weights = [size or 0 for size in sizes] if all(sizes) else [1] * len(sizes)
        probabilities = [weight / sum(weights) for weight in weights]
    for source, size, probability in zip(sources, sizes, probabilities, strict=True):
        budget = round(max_characters * probability)
        share = budget / size if size else 1
        num_seen = num_kept = 0
        for text in source:
            if num_kept >= budget:
                if not size:
                    logger.info("Only the first %s characters are read.", f"{budget:,}")
                break
            num_seen += len(text.encode())  # as the size is counted
            if num_kept < share * num_seen:
                yield text[: budget - num_kept]
                num_kept += len(text)


def save_tokenizer(tokenizer: BertTokenizer, output_dir: str | Path, overwrite: bool = False) -> None:
    """
    Write a tokenizer, to a new folder as a whole and over files that are there one by one; a `UserError` if there are
    some and no `overwrite`, or it cannot be written.
    """
    folder = Path(output_dir)
    check_output_dir(folder, overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
            content = Path(unfinished, "tokenizer")
            tokenizer.save_pretrained(content)
            if folder.exists() and any(folder.iterdir()):
                new = {file.name for file in content.iterdir()}
                for name in new:
                    os.replace(content / name, folder / name)
                for name in {*_OF_OTHER_KINDS} - new:
                    (folder / name).unlink(missing_ok=True)
            else:
                os.replace(content, folder)
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be written ({error.strerror}); choose another one.") from error


def check_output_dir(output_dir: str | Path, overwrite: bool = False) -> None:
    """
    Raise a `UserError` if `output_dir` is a file, cannot be made, holds a model, or other files and `overwrite` is not
    set.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file; name a folder.")
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        content = "a tokenizer" if (folder / "tokenizer.json").exists() else "other files"
        raise UserError(f"--output_dir {folder} holds {content}; choose another folder, or pass --overwrite.")
    if (folder / CONFIG_NAME).exists():
        raise UserError(
            f"--output_dir {folder} holds a model, which has learnt its own tokenizer; choose another one."
        )
    check_writable(folder.parent, "output_dir")


def _count_alphabet(texts: Iterable[str], backend: Tokenizer) -> list[str]:
    """The characters of the texts as the tokenizer sees them, the commonest first, printable ASCII before all."""
    alphabet: Counter[str] = Counter()
    for character, count in Counter(chain.from_iterable(texts)).items():
        for letter in _normalize(character, backend):
            alphabet[letter] += count
    ascii_letters = {letter for character in string.printable for letter in _normalize(character, backend)}
    alphabet.update(ascii_letters)
    return sorted(alphabet, key=lambda letter: (letter not in ascii_letters, -alphabet[letter], letter))


def _normalize(character: str, backend: Tokenizer) -> str:
    return "".join(backend.normalizer.normalize_str(character).split())


def _is_joined(letter: str, backend: Tokenizer) -> bool:
    """Whether a letter can stand inside of a word; punctuation and Chinese characters are words of their own."""
    return len(backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(f"a{letter}a"))) == 1


def check_known(counts: np.ndarray, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """
    Say how much of a text a tokenizer does not know, if that is more than a twentieth; a `UserError` if it is most.

    `counts`, `(vocab_size,)`, is how often each token is in the text, which messages call `text`.
    """
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.cls_token_id, tokenizer.sep_token_id):
        return
    others = [token for token in tokenizer.all_special_ids if token != unknown]
    share = counts[unknown] / max(counts.sum() - counts[others].sum(), 1)
    what = f"{share:.0%} of {text} are {tokenizer.unk_token}, which the tokenizer does not know"
    if share > 0.5:
        raise UserError(f"{what}; take a tokenizer, and a checkpoint, that were made for such text.")
    if share > 0.05:
        logger.warning("%s.", what)
