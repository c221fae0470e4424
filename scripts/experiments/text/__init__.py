"""Text: corpora, tokenizers, blocks of tokens and masks of language modelling, and what classifiers of texts read."""
