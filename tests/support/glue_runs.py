"""Runs of run_glue.py in this process, whole or cut short, and checkpoints of other architectures."""

import sys
from pathlib import Path

from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import run_glue
from experiments.fine_tuning import FineTuningTrainer
from support.glue_rows import make_tokenizer


SCRIPT = Path(run_glue.__file__)


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, flags)])
    run_glue.main()


class Stopped(Exception):
    """Raised where a test has seen enough of a run."""


def stop(*args, **kwargs):
    raise Stopped


def stop_at_step(context, seed, step):
    training_step = FineTuningTrainer.training_step

    def cut(trainer, *args, **kwargs):
        if (trainer.args.seed, trainer.state.global_step) == (seed, step):
            raise Stopped
        return training_step(trainer, *args, **kwargs)

    context.setattr(FineTuningTrainer, "training_step", cut)


def save_other_architecture(model_type, folder):
    tokenizer: PreTrainedTokenizerBase = make_tokenizer()
    names = {
        "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 64},
        "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 3, "eos_token_id": 3},
        "roberta": {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 0},
    }
    sizes = {
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        **{"max_position_embeddings": 64, "pad_token_id": 0},
    }
    sizes = names[model_type] if model_type in ("distilbert", "gpt2") else {**sizes, **names.get(model_type, {})}
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **sizes)
    if model_type == "gpt2":
        model = AutoModelForSequenceClassification.from_config(config)
        # As GPT-2's own: without a token to pad with.
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, unk_token="[UNK]", bos_token="[SEP]", eos_token="[SEP]"
        )
    else:
        model = AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
