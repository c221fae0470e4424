"""
Measure what a pre-trained SKTformer loses when it is lengthened, without further training.

    python scripts/measure_lengthening.py --model_name_or_path runs/quickstart

Evaluates the checkpoint at its own length N, and lengthened to a multiple of N by each rule for new positions, on
blocks of N and of the new length. Writes lengthening.md and .json into --results_dir.
"""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from transformers import AutoTokenizer, TrainingArguments

from experiments.arguments import UserError, one_line, parse_args, run_script
from experiments.results import describe_environment, format_origin, write_atomically, write_json
from experiments.text.corpus import CorpusArguments, load_corpus
from experiments.text.masked_lm import MaskedLMTrainer, MaskingCollator, mask_once
from experiments.text.packing import mix_blocks, prepare_blocks
from modeling_sktformer import SKTformerForMaskedLM


@dataclass
class LengtheningArguments:
    """What is lengthened, and where the table goes."""

    model_name_or_path: str = field(default="runs/quickstart", metadata={"help": "A pre-trained SKTformer."})
    factors: list[int] = field(default_factory=lambda: [2, 4], metadata={"help": "Multiples of its length."})
    data_name: str = field(default="local text", metadata={"help": "Name of the evaluation text, for the table."})
    results_dir: str = field(
        default=str(Path(__file__).parent.parent / "model_cards" / "results"),
        metadata={"help": "Folder of the table."},
    )


def main() -> None:
    arguments, corpus_arguments = parse_args([LengtheningArguments, CorpusArguments], description=__doc__)
    name = arguments.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        length = SKTformerForMaskedLM.from_pretrained(name).config.max_position_embeddings
    except (OSError, ValueError) as error:
        raise UserError(f"The checkpoint {name} cannot be loaded: {one_line(error)}") from error
    corpus = load_corpus(corpus_arguments)
    if not corpus.validation:
        raise UserError("There is no text to evaluate on; give --validation_file.")

    def evaluate(model_length: int, block_length: int, extension: str) -> dict[str, Any]:
        model = SKTformerForMaskedLM.from_pretrained(name)
        if model_length != length:
            model.resize_position_embeddings(model_length, extension)
        blocks = [prepare_blocks(source, tokenizer, block_length, corpus.cache_dir) for source in corpus.validation]
        trainer = MaskedLMTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=gettempdir(),
                per_device_eval_batch_size=max(1, 8192 // block_length),
                dataloader_pin_memory=False,
            ),
            eval_dataset=mask_once(mix_blocks(blocks), tokenizer, 0.15, seed=0),
            data_collator=MaskingCollator(tokenizer=tokenizer),
            processing_class=tokenizer,
        )
        loss = trainer.evaluate()["eval_loss"]
        return {"model_length": model_length, "extension": extension, "block_length": block_length, "eval_loss": loss}

    rows = [evaluate(length, length, "none")]
    for factor in arguments.factors:
        for extension in ("tile", "last"):
            rows += [evaluate(factor * length, blocks, extension) for blocks in (length, factor * length)]
    results = {"data": arguments.data_name, "environment": describe_environment(), "rows": rows}
    folder = Path(arguments.results_dir)
    write_json(folder / "lengthening.json", results)
    write_atomically(folder / "lengthening.md", format_table(results))
    print((folder / "lengthening.md").read_text(encoding="utf-8"))


def format_table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    environment = results["environment"]
    lines = [
        "# Lengthening without further training",
        "",
        f"Evaluation loss (nats per masked token) of one pre-trained checkpoint on {results['data']}, at its own "
        "length and after `resize_position_embeddings(length, extension)`.",
        "",
        "| model's length | new positions | length of the inputs | evaluation loss |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['model_length']} | {row['extension']} | {row['block_length']} | {row['eval_loss']:.3f} |"
        for row in results["rows"]
    ]
    lines += ["", format_origin("measure_lengthening.py", environment, [environment["commit"]]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main)
