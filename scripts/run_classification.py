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
from pathlib import Path

from experiments.adapters import LoraArguments, check_adapters
from experiments.arguments import CONFIGURATION, UserError, parse_command, run_script
from experiments.checkpoints import CheckpointArguments
from experiments.classification import jobs
from experiments.classification.data import TextArguments, load_texts
from experiments.classification.labels import checkpoint_problem, format_names
from experiments.classification.metrics import measure_baselines
from experiments.classification.report import check_answers, delete_answers, write_report
from experiments.fine_tuning import run_job
from experiments.fitted_head import predict_frozen
from experiments.results import check_writable
from experiments.run_folder import recorded_arguments, trained_length
from experiments.text import classifier
from experiments.text.packing import count_tokens
from experiments.text.tokenizer import check_known
from experiments.training import announce_run, describe_model, prepare, upload_run
from experiments.trials import FineTuningArguments, best_trial, check_job, trial_folders


logger = logging.getLogger("run_classification")
ARGUMENTS = (CheckpointArguments, LoraArguments, TextArguments, FineTuningArguments)


def main() -> None:
    recipe = CONFIGURATION / "classification" / "base.yaml"
    command = parse_command(ARGUMENTS, __doc__, recipe, output_dir="runs/classification")
    checkpoint, lora, texts, training = command.groups
    check_adapters(lora, training)
    prepare(training, command.given)
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
    trained = None if trains else jobs.load_model(command, checkpoint, predicted, tokenizer, trains)
    data = load_texts(texts, wanted, tokenizer, predicted)
    jobs.check_kind(data.problem, texts, training)
    model = trained or jobs.load_model(command, checkpoint, data.problem, tokenizer, trains)
    collator = classifier.make_collator(tokenizer, jobs.input_length(texts, model), texts.pad_to_max_length)
    rows = {name: part.examples(data.columns) for name, part in data.parts.items()}
    workers = texts.preprocessing_num_workers
    splits = {name: classifier.encode_texts(part, data.columns, collator, workers) for name, part in rows.items()}
    first = next(iter(splits))
    check_known(count_tokens(splits[first], len(tokenizer)), tokenizer, f"the texts for {first}")
    job = jobs.make_job(command, data, splits, collator) if "validation" in splits else None
    finished = job and check_job(folder, job.identity, training, command.paths())
    if only_predicts or finished:
        check_writable(folder, "output_dir")
    announce_run(
        command,
        texts=f"{', '.join(data.columns)} of {', '.join(dict.fromkeys(part.source for part in data.parts.values()))}",
        split=data.held_out or "as given",
        labels=format_names(data.problem.labels) or "numbers",
        inputs="" if texts.excerpt_length else classifier.describe_lengths(splits.values(), collator.max_length or 0),
        run=f"finished, in {folder}" if finished else "",
        model="" if job else describe_model(model, f"from {checkpoint.model_name_or_path}"),
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
            model = jobs.load_model(command, best, data.problem, tokenizer, trains=False)
    results = jobs.answer(command, model, data, splits, collator, baselines)
    if training.should_save:
        print(write_report(folder, results, is_added=only_predicts, predicts="test" in data.parts), end="")
    if job:  # again, with what has been written since
        upload_run(training, folder, "Evaluated")


if __name__ == "__main__":
    run_script(main)
