"""Text for masked language modelling: corpora, tokenizers, blocks of tokens, masks."""
