"""The tables of text: pre-training, GLUE and authorship, what is run and what has to be known to read them."""

from dataclasses import fields, replace
from typing import Any

from experiments.comparisons.stages import Case, Measure, Stage, Table
from experiments.glue.table import MAJORITY, format_definitions
from experiments.glue.tasks import TASKS
from experiments.text.corpus import CorpusArguments


# What a script that reads text takes.
TEXT = (*(flag.name for flag in fields(CorpusArguments)), "tokenizer_name")
TFIDF = "TF-IDF"
_SHORT, _MEDIUM, _LONG = (
    Case(f"{steps:,} steps", flags=("--max_eval_samples", "512"), max_steps=steps) for steps in (500, 1000, 2500)
)
PRETRAINING = Stage(
    folder="pretraining",
    script="pretrain_mlm.py",
    runs="pretrain.txt",
    recipes=("pretrain/compare.yaml",),
    data=TEXT,
    cases=(_SHORT, _LONG),
    measures=(
        Measure("parameters", "parameters", format=",.0f", pooled=True),
        Measure("loss", "eval_loss", "lowest", baselines=(("unigram frequencies", "unigram_loss"),)),
        Measure("accuracy (%)", "eval_accuracy", "highest", format=".1f", factor=100),
        Measure("step (ms)", "step_time_ms", format=".0f", pooled=True),
        Measure("step (ms of processor time)", "step_cpu_time_ms", format=".0f", pooled=True),
    ),
    learning_rates=(1e-3, 2e-3, 4e-3),
)
_STARTED = (PRETRAINING.measures[0], Measure("pre-training loss", "eval_loss", "lowest"))
_PRETRAINING_TEXT = (
    "Masked language modelling: steps of {0[global_batch_size]} sequences of {0[max_seq_length]} tokens, the same "
    "tokenizer, text, masks, steps and schedule for every row, every budget with a schedule of its own. Logits are "
    "computed where something is predicted, by every row. Loss in nats per masked token of 512 sequences spread over "
    "the evaluation text. Other runs may have gone on beside those that were timed: no comparison of speed. {data}."
)
_FULL_ATTENTION = "- Nystromformer has full attention, as it ships: its linear mode takes no padded batch."
_IMPROVEMENTS = replace(PRETRAINING, runs="pretrain_improvements.txt", cases=(_SHORT,))
GLUE = Stage(
    folder="glue",
    script="run_glue.py",
    runs="glue_compare.txt",
    recipes=("glue/base.yaml", "glue/compare.yaml"),
    data=("data_dir",),
    cases=tuple(Case(TASKS[name].title, name, ("--task_name", name)) for name in ("sst2", "cola", "stsb")),
    measures=(Measure("", "score", "highest", format=".2f", factor=100, baselines=((MAJORITY, "majority.score"),)),),
    result="{case}/metrics.json",
    learning_rates=(1e-4, 3e-4, 1e-3),
    # SST-2 chooses for all tasks: by its score CoLA would choose by chance, by its loss the model of one label.
    search_steps=400,
    rate_case=0,
    has_mean=True,
)
BOOKS = replace(
    PRETRAINING,
    folder="authorship/pretraining",
    runs="pretrain_books.txt",
    recipes=("pretrain/compare.yaml", "pretrain/compare_books.yaml"),
    cases=(Case("", flags=("--document_unit", "file")),),
    measures=_STARTED,
    learning_rates=(),
)
BOOK_RATE = "- Pre-training has the learning rate of the recipe, 0.002, which was not searched here."


def _authorship(length: int, most: int, batch: int) -> dict[str, Any]:
    """Books whose authors stand first in the names of their files, in at most so many excerpts each."""
    flags = ["--do_train", "--do_eval", "--do_predict", "--label_from_file_name", "^([^_]+)_"]
    flags += ["--excerpt_length", str(length), "--max_excerpts_per_document", str(most)]
    flags += ["--per_device_train_batch_size", str(batch)]
    measures = tuple(
        Measure(title, f"test_{key}", "highest", ".1f", 100, baselines=((TFIDF, f"test_baselines.{TFIDF}.{key}"),))
        for title, key in (
            (f"excerpts of {length:,} tokens right (%)", "accuracy"),
            (f"books by excerpts of {length:,} right (%)", "document_accuracy"),
        )
    )
    return {"cases": (Case(f"{length:,} tokens", str(length), tuple(flags)),), "measures": measures}


_AUTHORSHIP = Stage(
    folder="authorship/fine-tuning",
    script="run_classification.py",
    runs="authorship.txt",
    recipes=("classification/base.yaml", "classification/long_documents.yaml"),
    data=("train_file", "validation_file", "test_file", "cache_dir"),
    **_authorship(512, 32, batch=8),
    learning_rates=(3e-5, 1e-4, 3e-4, 1e-3),
    search_steps=500,
    drawn_by_row=2,
    label="right (%)",
)
_AUTHORSHIP_LONG = replace(
    _AUTHORSHIP,
    folder="authorship/longer",
    runs="authorship_long.txt",
    recipes=(*_AUTHORSHIP.recipes, "classification/longer_excerpts.yaml"),
    **_authorship(4096, 4, batch=2),
    learning_rates=(),
)
_AUTHORSHIP_NOTES = (
    "- SKTformer-scratch starts from untrained weights.",
    f"- {TFIDF}: logistic regression on the frequencies of words and pairs of words in the same excerpts.",
)


TABLES = {
    "pretraining": Table("Pre-training compared", _PRETRAINING_TEXT, (PRETRAINING,), (_FULL_ATTENTION,)),
    "improvements": Table(
        "What was tried: changes of the paper's model, compared", _PRETRAINING_TEXT, (_IMPROVEMENTS,)
    ),
    "glue": Table(
        "GLUE compared: small models, alike in all but the architecture",
        "Each model is pre-trained with every seed: 1,000 steps of {0[global_batch_size]} sequences of "
        "{0[max_seq_length]} tokens, the same tokenizer, text and schedule for all; then fine-tuned with that seed "
        "on each task: {1[max_steps]} steps of {1[per_device_train_batch_size]} texts of at most {1[max_seq_length]} "
        "tokens, padded to the longest of each. Models of two layers after minutes of pre-training: the table says "
        "how they compare, and not what a trained model reaches. {data}.",
        (
            replace(PRETRAINING, runs="pretrain_glue.txt", cases=(_MEDIUM,), measures=_STARTED, learning_rates=()),
            GLUE,
        ),
        (
            *format_definitions([case.name for case in GLUE.cases]),
            "- Pre-training has for each row the learning rate that [its own comparison](pretraining.md) chose from "
            "three for 500 steps: 0.002, for FNet 0.004.",
            "- SKTformer classifies by its first token, as the others do; SKTformer-mean and -best by the mean over "
            "their tokens (`classifier_pooling`).",
            "- FNet takes no mask: what it answers depends on the padding of the batch.",
            _FULL_ATTENTION,
            "- majority: the commonest label of the training part for every text, for STS-B the mean similarity.",
        ),
    ),
    "authorship": Table(
        "Authorship: who wrote a book that was never seen in training",
        "Each model is pre-trained with every seed on the books for training: {0[max_steps]:,} steps of "
        "{0[global_batch_size]} sequences of {0[max_seq_length]} tokens; then fine-tuned with the same seed on "
        "32 excerpts of 512 tokens of each of these books, spread evenly over it: {1[num_train_epochs]} epochs, "
        "{1[global_batch_size]} excerpts a step. Excerpts of test books are then attributed, and a book by the mean "
        "of the probabilities of its excerpts. {data}.",
        (BOOKS, _AUTHORSHIP),
        (
            f"{BOOK_RATE} BERT has 0.001.",
            *_AUTHORSHIP_NOTES,
            "- SKTformer is read by mean and standard deviation over its tokens, SKTformer-best-mean by the mean "
            "alone, standardised for a new head (`--calibrate_head`); BERT, as transformers has it, by its first "
            "token behind a pooler that pre-training has not trained.",
        ),
    ),
    "authorship_long": Table(
        "Authorship by longer excerpts",
        "The models that the table of authorship fine-tunes on excerpts of 512 tokens, lengthened and fine-tuned "
        "further on excerpts of 4,096: 4 of a book, as much text with an eighth of the labels, "
        "{2[num_train_epochs]} epochs, {2[global_batch_size]} excerpts a step. {data}.",
        (BOOKS, _AUTHORSHIP, _AUTHORSHIP_LONG),
        (
            BOOK_RATE,
            *_AUTHORSHIP_NOTES,
            "- An SKTformer of 512 tokens is lengthened, which a BERT cannot be: no model has seen that length in "
            "pre-training.",
            "- What is held out at one length is partly trained on at the other; test books never are.",
        ),
    ),
}
