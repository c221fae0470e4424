"""Fine-tuning on texts of one's own as the engine takes it, and what its model answers."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from experiments.adapters import add_lora
from experiments.architectures import longest_input
from experiments.arguments import Command
from experiments.checkpoints import CheckpointArguments, load_classifier, start_classifier
from experiments.classification.data import TextArguments, TextData
from experiments.classification.labels import Problem
from experiments.classification.metrics import METRICS, compute_metrics, measure, probabilities
from experiments.classification.report import write_answers, write_text_card
from experiments.fine_tuning import Job, fingerprint_rows, predict
from experiments.fitted_head import check_single
from experiments.model_card import public_name
from experiments.text import classifier
from experiments.trials import FineTuningArguments, summarise_seeds


logger = logging.getLogger(__name__)


def check_kind(problem: Problem, texts: TextArguments, training: FineTuningArguments) -> None:
    """Raise a `UserError` if flags that are for single labels meet others."""
    for_single_labels = {
        "--label_smoothing_factor": training.label_smoothing_factor,
        "--fit_head": training.fit_head,
        "--baseline frozen": "frozen" in texts.baseline,
    }
    for name in [name for name, given in for_single_labels.items() if given]:
        check_single(name, problem.kind)


def input_length(texts: TextArguments, model: PreTrainedModel) -> int:
    """The longest input in tokens: what was asked for, or 512 if the model takes as many."""
    return texts.max_seq_length or texts.excerpt_length or min(512, longest_input(model) or 512)


def load_model(
    command: Command, start: CheckpointArguments, problem: Problem, tokenizer: PreTrainedTokenizerBase, trains: bool
) -> Any:
    """A checkpoint as a model that predicts what is asked of inputs as long as is asked, with adapters to train."""
    _, lora, texts, _ = command.groups
    model = (start_classifier if trains else load_classifier)(start, problem.labels, "value")
    model.config.problem_type = problem.kind  # type: ignore[assignment]
    classifier.fit_text_classifier(model, tokenizer, input_length(texts, model))
    return add_lora(model, lora, start.model_revision) if lora.lora and trains else model


def make_job(command: Command, data: TextData, splits: dict[str, Dataset], collator: DataCollatorWithPadding) -> Job:
    """The fine-tuning as the engine takes it."""
    checkpoint, lora, texts, training = command.groups
    splits = {part: rows for part, rows in splits.items() if part != "test"}
    source, metrics = Path(data.parts["validation"].source).name, METRICS[data.problem.kind]
    return Job(
        name="classification",
        title=f"{source} ({metrics[0].replace('_', ' ')})",
        build_model=partial(load_model, command, checkpoint, data.problem, collator.tokenizer, training.do_train),
        splits=splits,
        collator=collator,
        processing_class=collator.tokenizer,
        compute_metrics=partial(compute_metrics, data.problem, data.parts["validation"].documents),
        shown=metrics,
        identity={
            "data": fingerprint_rows(*splits.values()),
            "labels": [data.problem.kind, *data.problem.labels],
            "inputs": f"{collator.max_length} tokens, padded to {collator.padding}",
            **classifier.checkpoint_identity(checkpoint, lora),
        },
        facts={
            "started_from": public_name(checkpoint.model_name_or_path),
            "problem_type": data.problem.kind,
            "held_out": data.held_out,
            "is_partial": bool(texts.max_train_samples or texts.max_eval_samples),
            "is_best": training.do_train and training.load_best_model_at_end and not training.fit_head,
        },
        write_card=partial(write_text_card, data, texts),
    )


def answer(
    command: Command,
    model: PreTrainedModel,
    data: TextData,
    splits: dict[str, Dataset],
    collator: DataCollatorWithPadding,
    baselines: dict[str, dict[str, dict[str, float]]],
) -> dict[str, dict[str, float]]:
    """Predict validation and test, as far as they are there, write that, and give what is measured, by its row."""
    _, _, texts, training = command.groups
    folder = Path(training.output_dir)
    results: dict[str, dict[str, float]] = {}
    for name in (name for name in ("validation", "test") if name in splits):
        part = data.parts[name]
        chances = probabilities(data.problem, predict(model, splits[name], collator, training, folder))
        if part.labels is not None:
            answers = {"this model": measure(data.problem, chances, part.labels, part.documents)}
            if name == "validation" and training.seeds > 1:  # the best of several flatters
                answers |= summarise_seeds(folder, answers["this model"])
            answers |= baselines[name]
            results |= {f"{name}, {row}": values for row, values in answers.items()}
        if training.should_save:
            write_answers(folder, data, name, chances, texts.label_separator or ",")
            if name == "test":
                logger.info("%d predictions are in %s.", len(part.rows), folder / "predictions.csv")
    return results
