"""What a pre-trained SKTformer loses when it is lengthened, without further training."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from tqdm import tqdm
from transformers import TrainingArguments
from transformers.utils import logging

from experiments import results
from experiments.arguments import UserError, flag
from experiments.models import TRAINED_DTYPE, ModelArguments, build_masked_lm, load_tokenizer
from experiments.text.blocks import MASKED_LM_TOKENS
from experiments.text.corpus import CorpusArguments, load_corpus
from experiments.text.masked_lm import MaskedLMTrainer, MaskingCollator, mask_once
from experiments.text.packing import mix_blocks, prepare_blocks
from modeling_sktformer import SKTformerForMaskedLM


@dataclass
class LengtheningArguments:
    """What is lengthened."""

    model_name_or_path: str = flag("runs/quickstart", "A pre-trained SKTformer.")
    tokenizer_name: str | None = flag(None, "Tokenizer: a folder or a name on the Hub. By default the checkpoint's.")
    factors: list[int] = flag([2, 4], "Multiples of its length.")

    def __post_init__(self) -> None:
        if min(self.factors, default=0) < 2:
            raise UserError(f"--factors {' '.join(map(str, self.factors))}: give whole numbers of at least 2.")


ARGUMENTS = (LengtheningArguments, CorpusArguments, results.ResultsArguments)


def analyze(
    arguments: LengtheningArguments, corpus_arguments: CorpusArguments, places: results.ResultsArguments
) -> str:
    """
    Write `lengthening.md` and `.json`: the loss of a checkpoint at its own length N, and lengthened by each rule for
    new positions on inputs of N and of the new length. A `UserError` if the checkpoint cannot be loaded or is of
    another architecture, or there is no evaluation text.
    """
    if corpus_arguments.streaming:
        raise UserError("--streaming is for training; leave it out.")
    logging.disable_progress_bar()
    name = arguments.model_name_or_path
    tokenizer = load_tokenizer(arguments.tokenizer_name or name, False, MASKED_LM_TOKENS)
    model = build_masked_lm(ModelArguments(model_name_or_path=name), tokenizer, 3, seed=0, trains=False)
    if not isinstance(model, SKTformerForMaskedLM):
        raise UserError(f"{name} is of type {model.config.model_type}; only an SKTformer can be lengthened.")
    corpus = load_corpus(corpus_arguments)
    if not corpus.validation:
        raise UserError("There is no text to evaluate on; give --validation_file.")

    def evaluate(model_length: int, extension: str, input_length: int) -> float:
        lengthened = SKTformerForMaskedLM.from_pretrained(name, dtype=TRAINED_DTYPE)
        if model_length != length:
            lengthened.resize_position_embeddings(model_length, extension)
        reading = corpus_arguments.one_document_per_block, corpus_arguments.preprocessing_num_workers
        blocks = [
            prepare_blocks(source, tokenizer, input_length, corpus.cache_dir, *reading) for source in corpus.validation
        ]
        training = TrainingArguments(gettempdir(), disable_tqdm=True, dataloader_pin_memory=False)
        training.per_device_eval_batch_size = max(1, 8192 // input_length)
        trainer = MaskedLMTrainer(
            model=lengthened,
            args=training,
            eval_dataset=mask_once(mix_blocks(blocks), tokenizer, 0.15, seed=0),
            data_collator=MaskingCollator(tokenizer=tokenizer),
            processing_class=tokenizer,
        )
        return (trainer.evaluation_loop(trainer.get_eval_dataloader(), "").metrics or {})["eval_loss"]

    length = model.config.max_position_embeddings
    cases = [(length, "none", length)]
    for long in (factor * length for factor in arguments.factors):
        cases += [(long, rule, size) for rule in ("tile", "last") for size in (length, long)]
    rows = [(*case, evaluate(*case)) for case in tqdm(cases, "lengthening", unit="evaluation", disable=None)]
    environment, command = results.describe_environment(), results.command_line()
    text = ", ".join(source.description or source.name for source in corpus.validation)
    header = ["length of the model", "new positions", "length of the inputs", "evaluation loss"]
    entries = [dict(zip(header, row, strict=True)) for row in rows]
    return results.write_results(
        Path(places.results_dir) / "lengthening",
        {"command": command, "environment": environment, "rows": entries},
        [
            "# Lengthening without further training",
            f"Evaluation loss (nats per masked token) of {Path(name).name} on {text}, at its own length and after "
            "`resize_position_embeddings(length, extension)`.",
            "\n".join(results.format_table(header, [[*map(str, row[:3]), f"{row[3]:.3f}"] for row in rows])),
            results.format_origin([environment], command),
        ],
    )
