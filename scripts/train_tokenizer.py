"""Train the WordPiece vocabulary of BERT on a corpus.

    python scripts/train_tokenizer.py --output_dir out/tokenizer --vocab_size 8192
    python scripts/train_tokenizer.py --output_dir out/tokenizer --datasets Salesforce/wikitext:wikitext-103-raw-v1

Without a corpus the vocabulary is trained on the documentation of the Python installation.
"""

import logging
from dataclasses import MISSING, dataclass

from experiments.arguments import flag, parse_args, require_at_least, run_script
from experiments.text.corpus import CorpusArguments, load_corpus
from experiments.text.tokenizer import MAX_CHARACTERS, check_output_dir, sample_texts, save_tokenizer, train_wordpiece


logger = logging.getLogger(__name__)


@dataclass
class TokenizerArguments:
    """Flags of the tokenizer itself."""

    output_dir: str = flag(MISSING, "Folder to write the tokenizer to.")
    vocab_size: int = flag(30522, "Largest number of tokens, special tokens included.")
    lowercase: bool = flag(True, "Lower case without accents; --no_lowercase keeps both.")
    min_frequency: int = flag(2, "How often a token must occur to be made.")
    max_characters: int = flag(MAX_CHARACTERS, "Train on so much text, spread evenly (of a stream: its beginning).")
    model_max_length: int | None = flag(None, "Tokens that the model takes, to which the tokenizer truncates.")
    overwrite: bool = flag(False, "Replace the tokenizer that is in --output_dir.")

    def __post_init__(self) -> None:
        require_at_least(1, self, "vocab_size", "min_frequency", "max_characters", "model_max_length")


def main() -> None:
    arguments, corpus_arguments = parse_args([TokenizerArguments, CorpusArguments], description=__doc__)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    check_output_dir(arguments.output_dir, arguments.overwrite)
    corpus = load_corpus(corpus_arguments)
    tokenizer = train_wordpiece(
        sample_texts(corpus.train, arguments.max_characters, corpus.probabilities),
        arguments.vocab_size,
        lowercase=arguments.lowercase,
        min_frequency=arguments.min_frequency,
        model_max_length=arguments.model_max_length,
    )
    save_tokenizer(tokenizer, arguments.output_dir, arguments.overwrite)
    logger.info("The tokenizer is in %s.", arguments.output_dir)


if __name__ == "__main__":
    run_script(main)
