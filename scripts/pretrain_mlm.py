"""
Pre-train a masked language model: SKTformer, or any masked-LM architecture of transformers at the same size.

    accelerate launch scripts/pretrain_mlm.py
    accelerate launch scripts/pretrain_mlm.py --train_file corpus.txt --output_dir runs/mine
    accelerate launch scripts/pretrain_mlm.py \\
        --recipe configuration/pretrain/base.yaml configuration/pretrain/wikitext103_bookscorpus.yaml

Without --recipe it starts from configuration/pretrain/quickstart.yaml. Starting the same command again goes on with a
run that was cut short.
"""

import logging
import math
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_pt_utils import AcceleratorConfig

from experiments.arguments import UserError, given_arguments, parse_args, run_script
from experiments.model_card import write_pretraining_card
from experiments.models import ModelArguments, build_config, build_masked_lm, load_tokenizer
from experiments.plots import plot_loss_curve
from experiments.results import describe_environment, write_json
from experiments.run_folder import (
    METRICS_FILE,
    check_run_folder,
    claim_run_folder,
    find_checkpoint,
    recorded_arguments,
)
from experiments.text.blocks import MASKED_LM_TOKENS, Blocks, MaskedLMArguments, load_blocks, train_tokenizer_once
from experiments.text.corpus import Corpus, CorpusArguments, load_corpus
from experiments.text.masked_lm import MaskedLMTrainer, MaskingCollator, MaskNumbering, mask_once
from experiments.training import (
    RunArguments,
    StepTimer,
    check_hub_access,
    check_run_arguments,
    leave_process_group,
    upload_run,
)


QUICKSTART = Path(__file__).parent.parent / "configuration" / "pretrain" / "quickstart.yaml"
logger = logging.getLogger("pretrain_mlm")


@dataclass
class PretrainingArguments(RunArguments):
    """The arguments of a pre-training run."""

    output_dir: str | None = field(default="runs/pretrain", metadata={"help": "Folder of the run."})


PRETRAINING_ARGUMENTS = (ModelArguments, CorpusArguments, MaskedLMArguments, PretrainingArguments)


def main() -> None:
    argv = sys.argv[1:]
    if not any(argument.split("=")[0] == "--recipe" for argument in argv):
        argv = ["--recipe", str(QUICKSTART), *argv]
    groups = parse_args(PRETRAINING_ARGUMENTS, argv, description=__doc__)
    model_arguments, corpus_arguments, mlm_arguments, training = groups
    started = recorded_arguments(given_arguments(PRETRAINING_ARGUMENTS, argv))
    check_training_arguments(training, corpus_arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO if training.should_log else logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    set_seed(training.seed)

    # Everything that can be wrong with the arguments is found before the folder is touched.
    named = mlm_arguments.tokenizer_name or model_arguments.model_name_or_path
    check_run_folder(training.output_dir, started, training.overwrite, [named] if named else [])
    if training.push_to_hub:
        check_hub_access(training.hub_token)
    corpus = load_corpus(corpus_arguments)
    if named:
        tokenizer = load_tokenizer(named, model_arguments.trust_remote_code, MASKED_LM_TOKENS)
        model = build_masked_lm(model_arguments, tokenizer, mlm_arguments.max_seq_length, training.seed)
    else:
        build_config(model_arguments, mlm_arguments.vocab_size, mlm_arguments.max_seq_length, 0, training.seed)
    is_new = False
    with training.main_process_first(local=False):
        if training.should_save:
            is_new = claim_run_folder(training.output_dir, started)
    try:
        if not named:
            tokenizer = train_tokenizer_once(Path(training.output_dir) / "tokenizer", corpus, mlm_arguments)
            model = build_masked_lm(model_arguments, tokenizer, mlm_arguments.max_seq_length, training.seed)
        readers = training.world_size * max(1, training.dataloader_num_workers)
        model_type = model.config.model_type
        blocks = load_blocks(corpus, tokenizer, model_type, corpus_arguments, mlm_arguments, training.seed, readers)
    except UserError:
        if is_new:  # so that the corrected command finds the folder as this one did
            shutil.rmtree(training.output_dir)
        raise
    train(training, model, tokenizer, corpus, blocks, started, mlm_arguments.mlm_probability)
    leave_process_group()


def train(
    training: PretrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    blocks: Blocks,
    started: dict[str, Any],
    mlm_probability: float,
) -> None:
    """Train, evaluate, and leave the checkpoint with its report."""
    # Every process masks its own part of a batch.
    mask_seed = training.seed * training.world_size + training.process_index
    collator = MaskingCollator(tokenizer=tokenizer, mlm_probability=mlm_probability, seed=mask_seed)
    timer = StepTimer()
    trainer = MaskedLMTrainer(
        model=model,
        args=training,
        train_dataset=blocks.train,
        eval_dataset=mask_once(blocks.evaluation, tokenizer, mlm_probability, seed=0),
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[timer, MaskNumbering(collator)],
    )
    checkpoint = training.resume_from_checkpoint or find_checkpoint(str(training.output_dir))
    train_metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    metrics = {
        **trainer.evaluate(),
        **train_metrics,
        **timer.metrics(),
        "unigram_loss": blocks.unigram_loss,
        "unigram_perplexity": math.exp(blocks.unigram_loss),
        "parameters": model.num_parameters(),
        "model_type": model.config.model_type,
        "seed": training.seed,
        "environment": describe_environment(),
        "history": [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry],
    }
    # As a step of the Trainer's own, which does not push yet: the card and the metrics are still to come.
    trainer.save_model(_internal_call=True)
    if trainer.is_world_process_zero():
        report(trainer, metrics, started, corpus, blocks.evaluation)
    if training.push_to_hub:
        upload_run(trainer, str(training.output_dir), "End of pre-training")


def check_training_arguments(training: PretrainingArguments, corpus_arguments: CorpusArguments) -> None:
    """Work out gradient accumulation, and refuse combinations that would train something else than what was asked."""
    check_run_arguments(training)
    if corpus_arguments.streaming and training.max_steps <= 0:
        raise UserError("A streamed corpus has no known length: say how long to train with --max_steps.")
    if corpus_arguments.streaming:
        # Every process reads its own shards of the stream; dispatching would read all of it in the first.
        cast(AcceleratorConfig, training.accelerator_config).dispatch_batches = False


@torch.no_grad()
def show_predictions(trainer: MaskedLMTrainer, eval_blocks: Dataset, count: int = 3) -> list[str]:
    """Print what the model puts in the place of a few masked words; returns these words' surroundings, masked."""
    tokenizer: Any = trainer.processing_class
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    generator = torch.Generator().manual_seed(0)
    surroundings = []
    for block in eval_blocks.select(range(min(count, len(eval_blocks)))):
        tokens = torch.tensor(block["input_ids"])
        # A whole word in a whole block: some architectures take no shorter input.
        names = [*tokenizer.convert_ids_to_tokens(tokens), "##"]
        words = [n for n in range(len(tokens)) if names[n].isalpha() and not names[n + 1].startswith("##")]
        place = words[int(torch.randint(len(words), (1,), generator=generator))] if words else 1
        tokens[place] = tokenizer.mask_token_id
        logits = model(input_ids=tokens[None].to(model.device)).logits[0, place]
        best = logits.float().softmax(dim=-1).topk(5)
        guesses = zip(tokenizer.convert_ids_to_tokens(best.indices), best.values, strict=True)
        surroundings.append(tokenizer.decode(tokens[max(1, place - 12) : place + 12]))
        logger.info(
            "  %s\n    was: %s; guessed: %s",
            surroundings[-1],
            names[place],
            ", ".join(f"{name} ({probability:.0%})" for name, probability in guesses),
        )
    return surroundings


def report(trainer: MaskedLMTrainer, metrics: dict, arguments: dict, corpus: Corpus, eval_blocks: Dataset) -> None:
    """Write the loss curve, a model card and the metrics, and show what the model has learnt."""
    folder = Path(str(trainer.args.output_dir))
    plot_loss_curve(
        trainer.state.log_history,
        folder / "loss.png",
        f"{metrics['model_type']}, {metrics['parameters'] / 1e6:.1f}M parameters",
        {"unigram frequencies": metrics["unigram_loss"]},
    )
    logger.info("\nMasked words of the evaluation text:")
    examples = show_predictions(trainer, eval_blocks)
    # A card is read elsewhere: names of files, not where they lie on this machine.
    text = ", ".join(Path(source.name).name for source in corpus.train)
    name = trainer.hub_model_id if trainer.args.push_to_hub else folder.name
    write_pretraining_card(folder, str(name), text, metrics, arguments, examples[0])
    # Last, because a folder with metrics is a finished run.
    write_json(folder / METRICS_FILE, metrics)
    logger.info(
        "\nEvaluation loss %.4f, perplexity %.2f (unigram frequencies: %.4f, %.2f), accuracy %.1f %%.\n"
        "%s parameters, %.0f ms per step. Checkpoint, loss.png, README.md and %s are in %s.",
        metrics["eval_loss"],
        metrics["eval_perplexity"],
        metrics["unigram_loss"],
        metrics["unigram_perplexity"],
        100 * metrics["eval_accuracy"],
        f"{metrics['parameters']:,}",
        metrics.get("step_time_ms", float("nan")),
        METRICS_FILE,
        folder,
    )


if __name__ == "__main__":
    run_script(main)
