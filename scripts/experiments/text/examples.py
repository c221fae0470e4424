"""Examples of what a masked language model has learnt: words of the evaluation text, masked, and its guesses."""

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from experiments.text.blocks import Blocks, spread
from experiments.text.masked_lm import MaskedLMTrainer


logger = logging.getLogger(__name__)

# Of the words of the training text, commonest first: those that are no function words, and still known to anyone.
_SHOWN_RANKS = slice(100, 2000)
_SENTENCE_LENGTHS = range(8, 41)  # tokens
_SEARCHED_BLOCKS = 200
_SHOWN = 6  # words


class MaskedWord(NamedTuple):
    """The word at a place of a block of token ids, and the places of the sentence that it stands in."""

    block: list[int]
    place: int
    sentence: slice


def choose_words(blocks: Blocks, tokenizer: PreTrainedTokenizerBase, count: int) -> list[MaskedWord]:
    """
    Words of the evaluation text that a person can judge guesses for.

    They are whole words of at least three letters, common in the training text but no function words, each in a whole
    sentence of a block of its own. If there are not enough of them, any place is taken, with the words around it.
    """
    words = [word.strip() for word in tokenizer.batch_decode([[number] for number in range(len(tokenizer))])]
    is_word = np.array([len(word) >= 3 and word.isalpha() for word in words])
    ranking = np.argsort(-np.where(is_word, blocks.token_counts, -1), kind="stable")[: is_word.sum()]
    common = set(ranking[_SHOWN_RANKS].tolist()) or set(ranking.tolist())
    generator = np.random.default_rng(0)
    chosen, others = [], []
    for block in spread(blocks.evaluation, _SEARCHED_BLOCKS)["input_ids"]:
        found = [
            MaskedWord(block, place, sentence)
            for sentence in _sentences([words[token] for token in block], set(tokenizer.all_special_tokens))
            for place in range(sentence.start, sentence.stop - 1)
            if block[place] in common and words[block[place]] in _words_around(tokenizer, block, place)
        ]
        if found:
            chosen.append(found[generator.integers(len(found))])
        else:
            place = int(generator.integers(1, max(2, len(block) - 1)))
            others.append(MaskedWord(block, place, slice(max(1, place - 12), place + 12)))
    step = max(1, len(chosen) // count)
    return [*chosen[::step], *others][:count]


def show_predictions(trainer: MaskedLMTrainer, blocks: Blocks) -> list[str]:
    """Print what a model puts in the place of a few words, on all processes; returns their sentences, masked."""
    tokenizer: Any = trainer.processing_class
    model, sentences = trainer.model_wrapped, []
    model.eval()  # which does not return the model where DeepSpeed wraps it
    for block, place, sentence in choose_words(blocks, tokenizer, _SHOWN):
        ids = torch.tensor([block], device=trainer.args.device)
        ids[0, place] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, place]
        best = zip(*logits.float().softmax(dim=-1).topk(5), strict=True)
        guesses = [f"{tokenizer.decode(int(token)).strip()} ({probability:.0%})" for probability, token in best]
        sentences.append(tokenizer.decode(ids[0, sentence]).strip())
        was = tokenizer.decode(block[place]).strip()
        logger.info("  %s\n    was: %s; guessed: %s", sentences[-1], was, ", ".join(guesses))
    return sentences


def _words_around(tokenizer: PreTrainedTokenizerBase, block: list[int], place: int) -> list[str]:
    """The words that a token and its neighbours make: the token is among them where it is no part of a word."""
    return re.findall(r"\w+", str(tokenizer.decode(block[place - 1 : place + 2])))


def _sentences(tokens: Sequence[str], special: set[str]) -> Iterator[slice]:
    ends = [place for place, name in enumerate(tokens) if name in (".", "!", "?")]
    for before, end in pairwise(ends):
        if end - before in _SENTENCE_LENGTHS and special.isdisjoint(tokens[before:end]):
            yield slice(before + 1, end + 1)
