"""Made-up text, and a reading of documents that does not share the library's code."""

import itertools
import random
from pathlib import Path

from datasets import Dataset
from transformers import BertTokenizer

from experiments.text.corpus import Corpus, CorpusArguments, load_corpus
from experiments.text.source import TextSource, Unit
from experiments.text.tokenizer import train_wordpiece


WORDS = [
    f"{first}{second}" for first in ("ba", "co", "du", "fi", "ge", "hu") for second in ("lan", "mer", "nit", "pos")
]


def make_texts(num_documents: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [
        f"{number} " + " ".join(generator.choices(WORDS, k=generator.randint(1, 60)))
        for number in range(num_documents)
    ]


def make_tokenizer(vocab_size: int = 200) -> BertTokenizer:
    return train_wordpiece(make_texts(200, seed=1), vocab_size)


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


def write(path: Path, text: str, encoding: str = "utf-8") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding=encoding)
    return str(path)
