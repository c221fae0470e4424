"""
Fine-tune a checkpoint on your own texts: one label, several labels or a number for each text or pair of texts.

    python scripts/run_classification.py --model_name_or_path runs/sktformer-base --train_file reviews.csv
    python scripts/run_classification.py --model_name_or_path runs/sktformer-base --train_file train.csv \\
        --validation_file dev.csv --test_file test.csv --do_train --do_eval --do_predict --baseline tfidf
    python scripts/run_classification.py --model_name_or_path runs/sktformer-base --train_file 'novels/train/*.txt' \\
        --test_file 'novels/test/*.txt' --label_from_file_name '^([^_]+)_' --excerpt_length 512 \\
        --max_excerpts_per_document 40 --do_train --do_eval --do_predict --output_dir runs/authors
    python scripts/run_classification.py --model_name_or_path runs/authors --test_file letters.csv --do_predict \\
        --output_dir runs/letters

Any sequence-classification architecture of one stack will do. Without --recipe it starts from
configuration/classification/base.yaml. Starting the same command again goes on with a run that was cut short.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from experiments import training as progress
from experiments.adapters import LoraArguments, add_lora, check_adapters
from experiments.architectures import longest_input
from experiments.arguments import CONFIGURATION, Command, UserError, parse_command, run_script
from experiments.checkpoints import CheckpointArguments, load_classifier, start_classifier
from experiments.classification.data import TextArguments, TextData, load_texts
from experiments.classification.labels import Problem, checkpoint_problem, format_names
from experiments.classification.metrics import METRICS, compute_metrics, measure, measure_baselines, probabilities
from experiments.classification.report import (
    check_answers,
    delete_answers,
    write_answers,
    write_report,
    write_text_card,
)
from experiments.fine_tuning import Job, fingerprint_rows, predict, run_job
from experiments.fitted_head import check_single, predict_frozen
from experiments.model_card import public_name
from experiments.results import check_writable
from experiments.run_folder import recorded_arguments, trained_length
from experiments.text import classifier
from experiments.text.packing import count_tokens
from experiments.text.tokenizer import check_known
from experiments.trials import (
    FineTuningArguments,
    best_trial,
    check_job,
    summarise_seeds,
    trial_folders,
)


logger = logging.getLogger("run_classification")
ARGUMENTS = (CheckpointArguments, LoraArguments, TextArguments, FineTuningArguments)


def main() -> None:
    recipe = CONFIGURATION / "classification" / "base.yaml"
    command = parse_command(ARGUMENTS, __doc__, recipe, output_dir="runs/classification")
    checkpoint, lora, texts, training = command.groups
    check_adapters(lora, training)
    progress.prepare(training, command.given)
    folder, trains = Path(training.output_dir), training.do_train
    is_default = [Path(path).resolve() for path in command.recipes] == [recipe]
    if texts.excerpt_length and trains and is_default and not (training.fit_head or training.calibrate_head):
        made_for = "classification/long_documents.yaml and frozen_encoder.yaml are made for them"
        command.notes.append(f"Under this recipe a head learns little from a few hundred long excerpts; {made_for}.")
    if texts.baseline and not trains:
        raise UserError(f"--baseline {' '.join(texts.baseline)} learns from the training texts; add --do_train.")
    wanted = ["train"] * trains + ["validation"] * (trains or training.do_eval) + ["test"] * training.do_predict
    for unread in {"train", "validation", "test"}.difference(wanted):
        if getattr(texts, f"{unread}_file"):
            logger.warning("--%s_file is not read; add --do_train --do_eval --do_predict to do all three.", unread)
    only_predicts = not (trains or training.do_eval)
    if only_predicts:
        check_answers(folder, checkpoint, training.overwrite)

    if not (texts.max_seq_length or texts.excerpt_length):
        trained_on = trained_length(checkpoint.model_name_or_path) or 0
        if trained_on > (512 if trains else 0):
            texts.max_seq_length = command.given["max_seq_length"] = trained_on
    # Everything that can be wrong with the arguments is found before the folder is touched.
    predicted = checkpoint_problem(checkpoint, "auto" if trains else texts.problem_type)
    tokenizer = classifier.load_text_tokenizer(checkpoint)
    # What a checkpoint cannot do is found before labels that it does not know.
    trained = None if trains else load_model(command, checkpoint, predicted, tokenizer, trains)
    data = load_texts(texts, wanted, tokenizer, predicted)
    for_single_labels = {
        "--label_smoothing_factor": training.label_smoothing_factor,
        "--fit_head": training.fit_head,
        "--baseline frozen": "frozen" in texts.baseline,
    }
    for name in [name for name, given in for_single_labels.items() if given]:
        check_single(name, data.problem.kind)
    model = trained or load_model(command, checkpoint, data.problem, tokenizer, trains)
    collator = classifier.make_collator(tokenizer, input_length(texts, model), texts.pad_to_max_length)
    rows = {name: part.examples(data.columns) for name, part in data.parts.items()}
    workers = texts.preprocessing_num_workers
    splits = {name: classifier.encode_texts(part, data.columns, collator, workers) for name, part in rows.items()}
    first = next(iter(splits))
    check_known(count_tokens(splits[first], len(tokenizer)), tokenizer, f"the texts for {first}")
    job = make_job(command, data, splits, collator) if "validation" in splits else None
    finished = job and check_job(folder, job.identity, training, command.paths())
    if only_predicts:
        check_writable(folder, "output_dir")
    progress.announce_run(
        command,
        texts=f"{', '.join(data.columns)} of {', '.join(dict.fromkeys(part.source for part in data.parts.values()))}",
        split=data.held_out or "as given",
        labels=format_names(data.problem.labels) or "numbers",
        inputs="" if texts.excerpt_length else classifier.describe_lengths(splits.values(), collator.max_length or 0),
        run=f"finished, in {folder}" if finished else "",
        model="" if job else progress.describe_model(model, f"from {checkpoint.model_name_or_path}"),
    )
    frozen = predict_frozen(model, splits, collator, training) if "frozen" in texts.baseline else {}
    baselines = measure_baselines(data, "tfidf" in texts.baseline, frozen)
    if job:
        job.facts["baselines"] = baselines["validation"]
        run_job(job, folder, training, recorded_arguments(command.given))
        if not finished and training.should_save:
            delete_answers(folder)
        if trains:
            best = replace(checkpoint, model_name_or_path=str(best_trial(folder)), model_revision="main")
            if len(trials := trial_folders(folder)) > 1:
                logger.info("This model is the best of %d, in %s.", len(trials), best.model_name_or_path)
            model = load_model(command, best, data.problem, tokenizer, trains=False)
    results: dict[str, dict[str, float]] = {}
    for name in (name for name in ("validation", "test") if name in splits):
        part = data.parts[name]
        chances = probabilities(data.problem, predict(model, splits[name], collator, training, folder))
        if part.labels is not None:
            answers = {"this model": measure(data.problem, chances, part.labels, part.documents)}
            if name == "validation" and training.seeds > 1:  # the best of several flatters
                answers |= summarise_seeds(folder, answers["this model"])
            answers |= baselines[name]
            results |= {f"{name}, {answer}": values for answer, values in answers.items()}
        if training.should_save:
            write_answers(folder, data, name, chances, texts.label_separator or ",")
            if name == "test":
                logger.info("%d predictions are in %s.", len(part.rows), folder / "predictions.csv")
    if training.should_save:
        print(write_report(folder, results, is_added=only_predicts), end="")
    if job:  # again, with what has been written since
        progress.upload_run(training, folder, "Evaluated")


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


if __name__ == "__main__":
    run_script(main)
