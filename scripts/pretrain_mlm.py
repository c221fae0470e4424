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
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from filelock import FileLock
from huggingface_hub import upload_folder
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.trainer_pt_utils import AcceleratorConfig

from architectures import ModelArguments, build_masked_lm
from arguments import UserError, given_arguments, parse_args, run_script
from checkpoint_card import write_pretraining_card
from data.corpus import Corpus, CorpusArguments, TextSource, load_corpus
from data.packing import mix_blocks, prepare_blocks, stream_blocks, unigram_cross_entropy
from masked_lm import MaskedLMTrainer, MaskingCollator, MaskNumbering, StepTimer, mask_once
from plots import plot_loss_curve
from run_folder import METRICS_FILE, describe_environment, find_checkpoint, prepare_run_folder, write_json
from train_tokenizer import sample_texts, save_tokenizer, train_wordpiece


QUICKSTART = Path(__file__).parent.parent / "configuration" / "pretrain" / "quickstart.yaml"
logger = logging.getLogger("pretrain_mlm")


@dataclass
class MaskedLMArguments:
    """What is masked and how it is cut into blocks."""

    tokenizer_name: str | None = field(
        default=None,
        metadata={
            "help": "Tokenizer: a folder or a name on the Hub. By default the model's, or one trained on the corpus."
        },
    )
    vocab_size: int = field(default=30522, metadata={"help": "Size of a tokenizer that is trained on the corpus."})
    max_seq_length: int = field(
        default=512, metadata={"help": "Length of a block in tokens, [CLS] and [SEP] included."}
    )
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to predict."})
    full_blocks_only: bool = field(
        default=False,
        metadata={"help": "Leave out each corpus' last, shorter block, for architectures that take one length alone."},
    )

    def __post_init__(self):
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"--mlm_probability must lie between 0 and 1, got {self.mlm_probability}.")
        if self.max_seq_length < 3:
            raise ValueError(f"--max_seq_length must be at least 3, got {self.max_seq_length}.")


@dataclass
class PretrainingArguments(TrainingArguments):
    """The arguments of the Trainer and what a pre-training run adds."""

    output_dir: str | None = field(default="runs/pretrain", metadata={"help": "Folder of the run."})
    overwrite: bool = field(default=False, metadata={"help": "Delete what --output_dir holds."})
    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Sequences per optimizer step over all devices; gradient accumulation is worked out from it."
        },
    )


def main() -> None:
    argv = sys.argv[1:]
    if "--recipe" not in argv:
        argv = ["--recipe", str(QUICKSTART), *argv]
    types = (ModelArguments, CorpusArguments, MaskedLMArguments, PretrainingArguments)
    model_arguments, corpus_arguments, mlm_arguments, training = parse_args(types, argv, description=__doc__)
    started = given_arguments(types, argv)
    check_training_arguments(training, corpus_arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO if training.should_log else logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    set_seed(training.seed)

    corpus = load_corpus(corpus_arguments)
    with training.main_process_first(local=False):
        if training.should_save:
            prepare_run_folder(training.output_dir, started, training.overwrite)
    tokenizer = load_tokenizer(model_arguments, mlm_arguments, corpus, training.output_dir)
    model = build_masked_lm(model_arguments, tokenizer, mlm_arguments.max_seq_length, training.seed)
    train_blocks, eval_blocks, unigram_loss = load_blocks(corpus, tokenizer, corpus_arguments, mlm_arguments, training)

    # Every process masks its own part of a batch.
    mask_seed = training.seed * training.world_size + training.process_index
    collator = MaskingCollator(tokenizer=tokenizer, mlm_probability=mlm_arguments.mlm_probability, seed=mask_seed)
    timer = StepTimer()
    trainer = MaskedLMTrainer(
        model=model,
        args=training,
        train_dataset=train_blocks,
        eval_dataset=mask_once(eval_blocks, tokenizer, mlm_arguments.mlm_probability, seed=0),
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[timer, MaskNumbering(collator)],
    )
    checkpoint = training.resume_from_checkpoint or find_checkpoint(training.output_dir)
    train_metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    metrics = {
        **trainer.evaluate(),
        **train_metrics,
        **timer.metrics(),
        "unigram_loss": unigram_loss,
        "unigram_perplexity": math.exp(unigram_loss),
        "parameters": model.num_parameters(),
        "model_type": model.config.model_type,
        "seed": training.seed,
        "environment": describe_environment(),
        "history": [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry],
    }
    # As a step of the Trainer's own, which does not push yet: the card and the metrics are still to come.
    trainer.save_model(_internal_call=True)
    if trainer.is_world_process_zero():
        report(trainer, metrics, started, corpus, eval_blocks)
    if training.push_to_hub:
        upload(trainer)
    if torch.distributed.is_initialized():
        # Gloo now and then aborts a process that exits with the group still up.
        torch.distributed.destroy_process_group()


def check_training_arguments(training: PretrainingArguments, corpus_arguments: CorpusArguments) -> None:
    """Work out gradient accumulation, and refuse combinations that would train something else than what was asked."""
    # Asking for the device joins the process group, without which the world is one process.
    training.dataloader_pin_memory = training.dataloader_pin_memory and training.device.type == "cuda"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > training.world_size:
        raise UserError(
            f"{processes} processes were launched but each would train alone: there is no accelerator for them. "
            "Add --use_cpu to train on processors."
        )
    if corpus_arguments.streaming and training.max_steps <= 0:
        raise UserError("A streamed corpus has no known length: say how long to train with --max_steps.")
    if corpus_arguments.streaming:
        # Every process reads its own shards of the stream; dispatching would read all of it in the first.
        cast(AcceleratorConfig, training.accelerator_config).dispatch_batches = False
    if training.global_batch_size is not None:
        at_once = training.train_batch_size * training.world_size
        steps, rest = divmod(training.global_batch_size, at_once)
        if rest or not steps:
            raise UserError(
                f"--global_batch_size {training.global_batch_size} is not a multiple of {at_once}, which is what "
                f"{training.world_size} device(s) with --per_device_train_batch_size "
                f"{training.per_device_train_batch_size} read at once; change one of the two."
            )
        training.gradient_accumulation_steps = steps


def load_tokenizer(
    model_arguments: ModelArguments, mlm_arguments: MaskedLMArguments, corpus: Corpus, output_dir: str
) -> PreTrainedTokenizerBase:
    """Load the named tokenizer or the model's, or train one on the corpus, once for a run folder."""
    trained = Path(output_dir) / "tokenizer"
    name = mlm_arguments.tokenizer_name or model_arguments.model_name_or_path
    if name is None:
        # A file lock and not a barrier: training on a large corpus outlasts the time-out of a collective.
        with FileLock(f"{trained}.lock"):
            if not trained.is_dir():
                texts = sample_texts(corpus.train, probabilities=corpus.probabilities)
                length = mlm_arguments.max_seq_length
                save_tokenizer(train_wordpiece(texts, mlm_arguments.vocab_size, model_max_length=length), trained)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name or trained, trust_remote_code=model_arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"The tokenizer {name or trained} cannot be loaded: {' '.join(str(error).split())}") from error
    if tokenizer.mask_token is None or tokenizer.pad_token is None:
        raise UserError(f"The tokenizer {name or trained} has no mask or no padding token, which masking needs.")
    return tokenizer


def load_blocks(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    corpus_arguments: CorpusArguments,
    mlm_arguments: MaskedLMArguments,
    training: PretrainingArguments,
) -> tuple[Dataset | IterableDataset, Dataset, float]:
    """Pack the corpus: training blocks, on disk or as a stream, evaluation blocks and their unigram loss."""
    length, single = mlm_arguments.max_seq_length, corpus_arguments.one_document_per_block
    if not corpus.validation:
        raise UserError("There is no text to evaluate on; give --validation_file or a --validation_fraction above 0.")

    def prepare(sources: list[TextSource], desc: str) -> list[Dataset]:
        blocks = [prepare_blocks(source, tokenizer, length, corpus.cache_dir, single, desc) for source in sources]
        if mlm_arguments.full_blocks_only:
            blocks = [part.select(range(len(part) - (len(part[-1]["input_ids"]) < length))) for part in blocks]
        return blocks

    eval_blocks = mix_blocks(prepare(corpus.validation, "Packing evaluation text"))
    if not len(eval_blocks):
        raise UserError(f"The evaluation text does not fill one block of {length} tokens; give more of it.")
    special = tokenizer.all_special_ids
    if corpus_arguments.streaming:
        readers = training.world_size * max(1, training.dataloader_num_workers)
        streams = [stream_blocks(source, tokenizer, length, single, readers) for source in corpus.train]
        # The frequencies of a stream are not known before its end; the evaluation text's own are the harder baseline.
        unigram_loss = unigram_cross_entropy(eval_blocks, eval_blocks, len(tokenizer), special)
        stream = mix_blocks(streams, corpus.probabilities, training.seed)
        return stream.shuffle(seed=training.seed, buffer_size=10_000), eval_blocks, unigram_loss
    train_blocks = mix_blocks(prepare(corpus.train, "Packing training text"), corpus.probabilities, training.seed)
    return train_blocks, eval_blocks, unigram_cross_entropy(train_blocks, eval_blocks, len(tokenizer), special)


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
    text = ", ".join(source.name for source in corpus.train)
    write_pretraining_card(folder, folder.name, text, metrics, arguments, examples[0])
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


def upload(trainer: MaskedLMTrainer) -> None:
    """Push the finished run with its card; the Trainer's own last push would write another card over it."""
    if trainer.is_world_process_zero():
        upload_folder(
            repo_id=str(trainer.hub_model_id),
            folder_path=str(trainer.args.output_dir),
            token=trainer.args.hub_token,
            revision=trainer.args.hub_revision,
            commit_message="End of pre-training",
            ignore_patterns=["checkpoint-*", "tokenizer/*", "*.lock"],
        )


if __name__ == "__main__":
    run_script(main)
