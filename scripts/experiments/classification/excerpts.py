"""Excerpts of long texts, and what is held out for evaluation."""

import itertools
import random
from collections.abc import Hashable, Iterable, Sequence

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase


def spread(count: int, wanted: int | None) -> list[int]:
    """At most `wanted` of `count` places, evenly spread: of a few, none is the title page that stands first."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return [int((place + 0.5) * count / wanted) for place in range(wanted)]


def cut_excerpts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, limit: int | None
) -> list[list[str]]:
    """
    Cut each text between words into consecutive excerpts of `length` tokens, special ones included, and keep `limit`;
    a last excerpt of less than half the length is left out unless it is the only one. A tokenizer's own overflow cuts
    within words, and gives tokens where the linear model and the files of predictions want text.
    """
    room = length - tokenizer.num_special_tokens_to_add()
    documents = []
    for text in tqdm(texts, "Cutting excerpts", unit="text", disable=None):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets, words = encoding["offset_mapping"], encoding.word_ids()
        borders = [0]
        while len(words) - borders[-1] > room:
            end = borders[-1] + room
            while end > borders[-1] and words[end] is not None and words[end] == words[end - 1]:
                end -= 1
            borders.append(end if end > borders[-1] else end + room)  # a word may be longer than an excerpt
        if len(borders) == 1 or len(words) - borders[-1] >= room / 2:
            borders.append(len(words))
        spans = list(itertools.pairwise(borders))
        kept = [spans[place] for place in spread(len(spans), limit)]
        documents.append([text[offsets[start][0] : offsets[end - 1][1]] for start, end in kept if end > start])
    return documents


def hold_out(
    labels: Sequence[Hashable], documents: Sequence[int], fraction: float, seed: int
) -> tuple[list[int], list[int], str]:
    """
    Hold out a share of every label's documents, at least one; where a label has fewer than five, and any that is cut
    into excerpts, the last excerpts of each: a whole one would be too large a share of what there is to learn from. A
    label has none held out that has one document with one excerpt.
    (`train_test_split` of datasets stratifies rows, and would divide a document between both parts.)

    Gives the places of the examples to train on, those of the examples held out, and words that say how.
    """
    examples: dict[int, list[int]] = {}
    groups: dict[Hashable, list[int]] = {}
    for place, (label, document) in enumerate(zip(labels, documents, strict=True)):
        if document not in examples:
            groups.setdefault(label, []).append(document)
        examples.setdefault(document, []).append(place)

    def share(count: int) -> int:
        return min(count - 1, max(1, round(fraction * count)))

    generator, chosen, ends, small, ended = random.Random(seed), [], [], 0, 0
    for group in groups.values():
        if len(group) >= 5 or all(len(examples[document]) == 1 for document in group):
            chosen += generator.sample(group, share(len(group)))
        else:
            parts = [examples[document] for document in group]
            ends += [place for places in parts for place in places[len(places) - share(len(places)) :]]
            small += len(group)
            ended += sum(len(places) > 1 for places in parts)
    held = {*ends, *(place for document in chosen for place in examples[document])}
    kind = "documents" if len(examples) < len(documents) else "examples"
    words = f"{len(chosen):,} of {len(examples) - small:,} {kind} held out with --split_seed {seed}"
    if small == len(examples):
        words = "the last excerpts of every document held out, as no label has five documents"
    elif small:
        words += f", and the last excerpts of {ended:,} documents of labels that have fewer than five"
    return [place for place in range(len(labels)) if place not in held], sorted(held), words
