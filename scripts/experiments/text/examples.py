"""Examples of what a masked language model has learnt: words of the evaluation text, masked, and its guesses."""

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from experiments.text.blocks import Blocks, spread
from experiments.text.masked_lm import IGNORE_INDEX, MaskedLMTrainer


logger = logging.getLogger(__name__)

# Of the words of the training text, commonest first: those that are no function words, and still known to anyone.
_SHOWN_RANKS = slice(100, 2000)
_SENTENCE_LENGTHS = range(8, 41)  # tokens
_SEARCHED_BLOCKS = 200
# Byte-level and SentencePiece vocabularies mark the tokens that begin a word, WordPiece those that go on with one.
_WORD_BEGINS = ("Ġ", "▁")


class MaskedWord(NamedTuple):
    """The word at a place of a block of token ids, and the places of the sentence that it stands in."""

    block: list[int]
    place: int
    sentence: slice


def choose_words(blocks: Blocks, tokenizer: PreTrainedTokenizerBase, count: int) -> list[MaskedWord]:
    """
    Words of the evaluation text that a person can judge guesses for.

    They are whole words of at least three letters, common in the training text but no function words, each in a whole
    sentence of a block of its own. If there are not enough of them, any word is taken, with the words around it.
    """
    names = np.array(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    letters = [name.lstrip("".join(_WORD_BEGINS)) for name in names]
    is_word = np.array([len(word) >= 3 and word.isalpha() for word in letters])
    ranking = np.argsort(-np.where(is_word, blocks.token_counts, -1), kind="stable")[: is_word.sum()]
    common = set(ranking[_SHOWN_RANKS].tolist()) or set(ranking.tolist())
    generator = np.random.default_rng(0)
    chosen, others = [], []
    for block in spread(blocks.evaluation, _SEARCHED_BLOCKS)["input_ids"]:
        tokens = names[block].tolist()
        words = [place for place in range(1, len(block) - 1) if _is_whole_word(tokens, place)]
        found = [
            MaskedWord(block, place, sentence)
            for sentence in _sentences(tokens)
            for place in words
            if sentence.start <= place < sentence.stop and block[place] in common
        ]
        if found:
            chosen.append(found[generator.integers(len(found))])
        else:
            place = int(generator.choice(words)) if words else 1
            others.append(MaskedWord(block, place, slice(max(1, place - 12), place + 12)))
    length = max(len(word.block) for word in (*chosen, *others))
    # Rows of one length, and of the usual one: some architectures take no other.
    fitting = [word for word in (*chosen, *others) if len(word.block) == length]
    step = max(1, min(len(chosen), len(fitting)) // count)
    return fitting[: step * count : step]


def show_predictions(trainer: MaskedLMTrainer, blocks: Blocks, count: int = 6) -> list[str]:
    """Print what a model puts in the place of a few words, on all processes; returns their sentences, masked."""
    tokenizer: Any = trainer.processing_class
    words = choose_words(blocks, tokenizer, count)
    inputs = np.array([word.block for word in words])
    labels = np.full_like(inputs, IGNORE_INDEX)
    masked = (range(len(words)), [word.place for word in words])
    labels[masked], inputs[masked] = inputs[masked], tokenizer.mask_token_id
    predictions = trainer.predict_masked(Dataset.from_dict({"input_ids": inputs, "labels": labels}))
    sentences = []
    for word, row, answer, best in zip(words, inputs, labels[masked], predictions, strict=True):
        guesses = (f"{tokenizer.decode(int(token)).strip()} ({probability:.0%})" for token, probability in best.T)
        sentences.append(tokenizer.decode(row[word.sentence]).strip())
        was = tokenizer.decode(answer).strip()
        logger.info("  %s\n    was: %s; guessed: %s", sentences[-1], was, ", ".join(guesses))
    return sentences


def _is_whole_word(tokens: Sequence[str], place: int) -> bool:
    name, after = tokens[place], tokens[place + 1]
    if any(token.startswith(_WORD_BEGINS) for token in tokens):
        return name.startswith(_WORD_BEGINS) and (after.startswith(_WORD_BEGINS) or not after.isalpha())
    return name.isalpha() and not after.startswith("##")


def _sentences(tokens: Sequence[str]) -> Iterator[slice]:
    ends = [place for place, name in enumerate(tokens) if name in (".", "!", "?")]
    for before, end in pairwise(ends):
        if end - before in _SENTENCE_LENGTHS and not any(name.startswith(("[", "<")) for name in tokens[before:end]):
            yield slice(before + 1, end + 1)
