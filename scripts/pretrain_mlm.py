"""
Pre-train a masked language model: SKTformer, or another architecture of transformers at the same size.

    accelerate launch scripts/pretrain_mlm.py
    accelerate launch scripts/pretrain_mlm.py --recipe configuration/pretrain/processor.yaml \\
        --train_file corpus.txt --output_dir runs/mine
    accelerate launch scripts/pretrain_mlm.py --recipe configuration/pretrain/adapt.yaml \\
        --model_name_or_path runs/mine --train_file corpus.txt --max_seq_length 4096 \\
        --per_device_train_batch_size 1 --output_dir runs/mine-long
    accelerate launch scripts/pretrain_mlm.py \\
        --recipe configuration/pretrain/base.yaml configuration/pretrain/wikitext103_bookscorpus.yaml

Without any argument it is the quick start of configuration/pretrain/quickstart.yaml; a command that names something,
but no recipe, takes the paper's million steps, configuration/pretrain/base.yaml. Starting the same command again goes
on with a run that was cut short, and --max_steps may have grown meanwhile. Blocks are as long as those that a
checkpoint was trained on, where its folder says that and no recipe or --max_seq_length does.
"""

import logging
import math
import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_pt_utils import get_model_param_count

from experiments import models
from experiments.arguments import CONFIGURATION, Command, UserError, flag_values, parse_command, run_script
from experiments.counting import count_encoder
from experiments.results import describe_environment
from experiments.run_folder import check_run_folder, find_checkpoint, recorded_arguments, trained_length
from experiments.text.blocks import MASKED_LM_TOKENS, Blocks, MaskedLMArguments, load_blocks, train_tokenizer_once
from experiments.text.corpus import Corpus, CorpusArguments, load_corpus
from experiments.text.examples import show_predictions
from experiments.text.masked_lm import MaskedLMTrainer, MaskingCollator, MaskNumbering, mask_once
from experiments.text.pretraining import check_stages, run_identity
from experiments.text.report import write_report
from experiments.text.sparse_prediction import score_labelled_only
from experiments.trainer import StepTimer
from experiments.training import (
    RunArguments,
    announce,
    announce_run,
    describe_model,
    describe_steps,
    finish_trackers,
    global_batch,
    hold_folder,
    prepare,
    refuse_other_checkpoints,
    upload_run,
)


logger = logging.getLogger("pretrain_mlm")
ARGUMENTS = (models.ModelArguments, CorpusArguments, MaskedLMArguments, RunArguments)


def main() -> None:
    paper, quick_start = (CONFIGURATION / "pretrain" / f"{name}.yaml" for name in ("base", "quickstart"))
    command = parse_command(ARGUMENTS, __doc__, paper, quick_start, output_dir="runs/pretrain")
    model_arguments, corpus_arguments, mlm_arguments, training = command.groups
    prepare(training, command.given)
    set_seed(training.seed)
    refuse_other_checkpoints(training, [str(training.output_dir)])
    check_stages(training, model_arguments, corpus_arguments)
    if not command.asks_for("max_seq_length") and (trained := trained_length(model_arguments.model_name_or_path)):
        mlm_arguments.max_seq_length = command.given["max_seq_length"] = trained

    # Everything that can be wrong with the arguments is found before the folder is touched.
    corpus = load_corpus(corpus_arguments)
    length = mlm_arguments.max_seq_length
    named = mlm_arguments.tokenizer_name or model_arguments.model_name_or_path
    if named and "vocab_size" in flag_values(sys.argv[1:]):
        raise UserError(f"--vocab_size is of a tokenizer that is trained, and {named} has one; leave it out.")
    if named:
        revision = "main" if mlm_arguments.tokenizer_name else model_arguments.model_revision
        tokenizer = models.load_tokenizer(named, model_arguments.trust_remote_code, MASKED_LM_TOKENS, revision)
        model = models.build_masked_lm(model_arguments, tokenizer, length, training.seed, bool(training.do_train))
    else:
        model = models.sketch_masked_lm(model_arguments, mlm_arguments.vocab_size, length, training.seed)
    most = "" if named else f" with at most {mlm_arguments.vocab_size:,} tokens"
    steps = f"; steps: {describe_steps(training, None)} of {length:,} tokens" if training.do_train else ""
    announce_run(command, plan=f"{describe(command, model)}{most}{steps}")
    identity, folder = run_identity(command, corpus), str(training.output_dir)
    if check_run_folder(folder, identity, training.overwrite, command.paths()) == "finished":
        remedy = "give more --max_steps to go on, or --overwrite" if training.do_train else "--overwrite repeats it"
        logger.info("%s holds this run, finished; %s.", folder, remedy)
        upload_run(training, folder, "Pre-trained")
        return
    PartialState().wait_for_everyone()  # before the first process empties the folder that the others look at
    with hold_folder(training, folder, identity, recorded_arguments(command.given)):
        if not named:
            tokenizer = train_tokenizer_once(Path(folder) / "tokenizer", corpus, mlm_arguments)
            model = models.build_masked_lm(model_arguments, tokenizer, length, training.seed)
        blocks = load_blocks(command, corpus, tokenizer, model.config)
        train(command, model, tokenizer, corpus, blocks)


def describe(command: Command, model: PreTrainedModel) -> str:
    """The model, for people."""
    origin, name = command.groups[0].model_name_or_path, command.groups[0].config_name
    return describe_model(model, f"from {origin}" if origin else f"new, {name}")


def losses(trainer: MaskedLMTrainer) -> list[dict[str, float]]:
    """What the log has of losses up to now."""
    return [entry for entry in trainer.history() if "loss" in entry or "eval_loss" in entry]


def train(
    command: Command, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, blocks: Blocks
) -> None:
    """Train, evaluate, and leave the checkpoint with its report."""
    _, _, mlm_arguments, training = command.groups
    num_blocks = None if blocks.is_stream else len(blocks.train)
    announce(
        model=describe(command, model),
        data=blocks.description,
        steps=describe_steps(training, num_blocks) if training.do_train else "",
    )
    collator = MaskingCollator(
        tokenizer=tokenizer,
        mlm_probability=mlm_arguments.mlm_probability,
        seed=training.seed,
        process_index=training.process_index,
        num_processes=training.world_size,
    )
    if mlm_arguments.sparse_prediction:
        score_labelled_only(model)
    timer = StepTimer()
    trainer = MaskedLMTrainer(
        model=model,
        args=training,
        train_dataset=blocks.train,
        eval_dataset=mask_once(blocks.evaluation, tokenizer, mlm_arguments.mlm_probability, seed=0),
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[timer, MaskNumbering(collator)],
    )
    metrics: dict[str, Any] = {}
    if training.do_train:
        checkpoint = training.resume_from_checkpoint or find_checkpoint(str(training.output_dir))
        metrics |= trainer.train(resume_from_checkpoint=checkpoint).metrics | timer.metrics()
        batch_size = training.per_device_train_batch_size
        counted = count_encoder(model, batch_size, mlm_arguments.max_seq_length)
        if counted is not None:
            metrics["step_multiply_adds"] = counted * global_batch(training) / batch_size
    state = trainer.state
    # Where the best model is kept it is measured once more, behind the training; that is no part of the curve.
    history = losses(trainer) if training.load_best_model_at_end else []
    metrics |= {
        **(trainer.last_evaluation() or trainer.evaluate()),
        "step": (training.load_best_model_at_end and state.best_global_step) or state.global_step,
        "is_stream": blocks.is_stream,
        "unigram_loss": blocks.unigram_loss,
        "unigram_perplexity": math.exp(blocks.unigram_loss),
        "parameters": get_model_param_count(model),
        "model_type": model.config.model_type,
        "seed": training.seed,
        "environment": describe_environment(training.device.type),
        "history": history or losses(trainer),
    }
    logger.info("\nMasked words of the evaluation text:")
    examples = show_predictions(trainer, blocks)
    if training.do_train:
        trainer.save_finished()
    if trainer.is_world_process_zero():
        write_report(trainer, metrics, corpus, examples[0], recorded_arguments(command.given))
    finish_trackers(training)
    upload_run(training, str(training.output_dir), "Pre-trained")


if __name__ == "__main__":
    run_script(main)
