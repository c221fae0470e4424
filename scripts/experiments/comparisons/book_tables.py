"""The tables of what models pre-trained on whole books for an equal time can be fine-tuned to."""

from dataclasses import replace

from experiments.classification.metrics import FROZEN, TFIDF
from experiments.comparisons.frontier_tables import FRONTIER, HOW_TIMED, frontier_case
from experiments.comparisons.stages import Case, Measure, Stage, Table
from experiments.comparisons.text_tables import GLUE, PRETRAINING
from experiments.glue.table import MAJORITY


# Books whose authors stand first in the names of their files.
_LABELLED = ("--do_train", "--do_eval", "--do_predict", "--label_from_file_name", "^([^_]+)_")
_SHORT = frontier_case(512, minutes=5.0)
# The learning rate that the frontier has chosen for every row, of whom those that say one keep theirs.
_BOOKS = replace(
    FRONTIER,
    folder="authorship/pretraining",
    runs="pretrain_books.txt",
    cases=(replace(_SHORT, flags=(*_SHORT.flags, "--learning_rate", "2e-3")),),
    measures=(
        PRETRAINING.measures[0],
        Measure("pre-training loss", "eval_loss", "lowest"),
        Measure("steps of it", "step", format=",.0f"),
    ),
    learning_rates=(),
    search_steps=None,
    rate_case=None,
)


def _excerpts(length: int, most: int, batch: int, max_steps: int) -> Case:
    """Books in at most so many excerpts each."""
    flags = [*_LABELLED, "--excerpt_length", str(length), "--max_excerpts_per_document", str(most)]
    flags += ["--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", str(2 * batch)]
    return Case(f"{length:,} tokens", str(length), tuple(flags), max_steps)


def _right(what: str, key: str) -> Measure:
    baselines = ((TFIDF, f"test_baselines.{TFIDF}.{key}"),)
    return Measure(f"{what} right (%)", f"test_{key}", "highest", ".1f", 100, baselines=baselines)


_AUTHORSHIP_SHORT = Stage(
    folder="authorship/short",
    script="run_classification.py",
    runs="authorship_short.txt",
    recipes=("classification/short_excerpts.yaml",),
    data=("train_file", "validation_file", "test_file", "cache_dir"),
    needs=("train_file", "test_file"),
    cases=(_excerpts(128, 512, batch=32, max_steps=1200),),
    measures=(Measure("excerpts of 128 tokens right (%)", "test_accuracy", "highest", ".1f", 100),),
    learning_rates=(1e-3,),
    drawn_by_row=2,
    label="right (%)",
)
_AUTHORSHIP = replace(
    _AUTHORSHIP_SHORT,
    folder="authorship/fine-tuning",
    runs="authorship.txt",
    recipes=("classification/longer_excerpts.yaml",),
    cases=(_excerpts(512, 128, batch=8, max_steps=600),),
    measures=(_right("excerpts of 512 tokens", "accuracy"), _right("books by excerpts of 512", "document_accuracy")),
    learning_rates=(),
)
_AUTHORSHIP_LONG = replace(
    _AUTHORSHIP,
    folder="authorship/longer",
    runs="authorship_long.txt",
    cases=(_excerpts(4096, 16, batch=2, max_steps=75),),
    measures=(
        _right("excerpts of 4,096 tokens", "accuracy"),
        _right("books by excerpts of 4,096", "document_accuracy"),
    ),
)


def _right_frozen(what: str, key: str) -> Measure:
    return Measure(f"all layers, {what} right (%)", f"test_baselines.{FROZEN}.{key}", "highest", ".1f", 100)


def _frozen(length: int) -> Stage:
    """Encoders as they are, of which most read no more tokens than their pre-training had."""
    flags = (*_LABELLED, "--excerpt_length", str(length), "--per_device_eval_batch_size", str(16384 // length))
    return replace(
        _AUTHORSHIP,
        folder="authorship/frozen",
        runs="authorship_frozen.txt",
        only=None if length == 512 else ("SKTformer", "SKTformer-best", "ModernBERT"),
        recipes=("classification/frozen_encoder.yaml",),
        cases=(Case(f"{length:,} tokens", str(length), flags),),
        measures=(
            _right(f"excerpts of {length:,} tokens", "accuracy"),
            _right(f"books by excerpts of {length:,}", "document_accuracy"),
            _right_frozen("excerpts", "accuracy"),
            _right_frozen("books", "document_accuracy"),
        ),
        drawn_by_row=4,
    )


# How a head reads a sequence, and at which rate it learns: no comparison of models, and so of equal steps.
_EVALUATED = ("--max_eval_samples", "200", "--per_device_eval_batch_size", "16")
_POOLING_STARTS = replace(
    _BOOKS,
    folder="pooling/pretraining",
    cases=(replace(_BOOKS.cases[0], flags=(*_BOOKS.cases[0].flags, *_EVALUATED), minutes=None, max_steps=1500),),
    measures=_BOOKS.measures[:2],
)
_SST2 = ("--task_name", "sst2", "--max_train_samples", "4000")
_FEW_TEXTS = (*_SST2, "--global_batch_size", "32", "--save_strategy", "no")
_POOLING = replace(
    GLUE,
    folder="pooling/fine-tuning",
    runs="pooling.txt",
    recipes=("glue/base.yaml",),
    cases=(Case("SST-2", "sst2", _FEW_TEXTS),),
    measures=(replace(GLUE.measures[0], title="accuracy (%)"),),
    search_steps=None,
    rate_case=None,
    has_mean=False,
    drawn_by_row=1,
)
# What a recipe of fine-tuning should have: one thing of the default changed at a time.
_FEW_EXCERPTS = ("--excerpt_length", "512", "--max_excerpts_per_document", "20", "--validation_fraction", "0.5")
_BATCH = ("--global_batch_size", "16")
_RECIPES = replace(
    _AUTHORSHIP_SHORT,
    folder="fine-tuning/books",
    runs="fine_tuning.txt",
    recipes=("classification/base.yaml",),
    needs=("train_file",),
    data=("train_file", "cache_dir"),
    cases=(Case("512 tokens", "512", (*_LABELLED[3:], *_FEW_EXCERPTS, *_BATCH)),),
    measures=(Measure("excerpts right (%)", "eval_accuracy", "highest", ".1f", 100),),
    learning_rates=(),
    drawn_by_row=1,
)
_RECIPES_SST2 = replace(
    _POOLING,
    folder="fine-tuning/sst2",
    runs="fine_tuning.txt",
    recipes=("classification/base.yaml",),
    cases=(Case("SST-2", "sst2", (*_SST2, "--max_seq_length", "128", *_BATCH)),),
    learning_rates=(),
)
_STARTED_ONE = (
    "SKTformer-best, pre-trained with every seed on whole books for {minutes:g} minutes in steps of 4,096 tokens, 512 "
    "a sequence, is fine-tuned with the same seed"
)
_ONE_CHANGED = (
    "- base: the recipe `configuration/classification/base.yaml`. Every other row changes what its name says and "
    "nothing else, as `configuration/runs/fine_tuning.txt` has it; calibrated-head is `--calibrate_head` with a head "
    "that learns at a rate of .005. Checkpoints have no dropout, as their pre-training, and so have all rows but "
    "those of that name; presets have 0.1.",
    "- The model of the best evaluation after a pass counts, and is measured by the same examples: that flatters all.",
)
_RATE = (
    "- Pre-training has the learning rate that [the frontier](frontier.md) chose for every row from three, 0.002, and "
    "no dropout."
)
_FINE_TUNING_RATE = (
    "- Fine-tuning has the rates of its recipes for every row. That of short excerpts, 0.001, and to begin with these "
    "was settled with scores of SKTformer-best on the test books in view, under one seed: both flatter our rows."
)
_MAJORITY = f"- {MAJORITY}: the commonest label of the training part for every text."
_WORDS = f"- {TFIDF}: logistic regression on the frequencies of words and pairs of words in excerpts of that length."
_HELD_OUT = "- What is held out at one length is partly trained on at another; test books never are."
_FULL_ATTENTION = (
    "Nystromformer is pre-trained in its linear form and has full attention here: that form takes no padded batch."
)
_TABLE_OF_512 = "[the table of 512 tokens](authorship_frozen_512.md)"
_GROWN = (
    "- An SKTformer of 512 tokens is lengthened, and ModernBERT reads positions by rotation; the others of {} cannot "
    "grow. No model has seen that length in pre-training."
)


def _frozen_table(length: int, note: str) -> Table:
    return Table(
        f"Authorship by excerpts of {length:,} tokens, with encoders that stay as they are",
        "Each model is pre-trained with every seed on whole books for {minutes:g} minutes, in steps of 4,096 tokens, "
        "512 a sequence: as many steps as a row takes in this time, with a schedule of that length. Its head is then "
        f"computed from all excerpts of {length:,} tokens of each of these books, and no step is taken "
        "(`--fit_head`). Excerpts of test books are attributed, and a book by the mean of the probabilities of its "
        "excerpts. {data}.",
        (_BOOKS, _frozen(length)),
        (
            _RATE,
            "- The head is a linear classifier of what it reads: of SKTformer mean and standard deviation of all "
            'layers over the tokens (`classifier_pooling="layers"`), of ModernBERT what its head makes of the mean of '
            'the last. Columns "all layers" have the same classifier of the same statistics for every row '
            "(`--baseline frozen`).",
            "- Its form, logistic regression on features that are whitened within labels with a tenth of the identity "
            "in their covariance, was settled by training books that were left out, with the scores of test books of "
            "one encoder in view, which flatters it.",
            _WORDS,
            note,
            HOW_TIMED,
        ),
    )


TABLES = {
    "authorship": Table(
        "Authorship: who wrote a book that was never seen in training",
        "Each model is pre-trained with every seed on whole books for {minutes:g} minutes, in steps of 4,096 tokens, "
        "512 a sequence: as many steps as a row takes in this time, with a schedule of that length. Then it is "
        "fine-tuned with the same seed on excerpts of each of these books, spread evenly over it: on 512 of 128 "
        "tokens, 1,200 steps of {1[global_batch_size]} excerpts, which is twice over; then on 128 of 512 tokens, 600 "
        "steps of {2[global_batch_size]}, which is once over. Excerpts of test books are attributed after either, and "
        "a book by the mean of the probabilities of its excerpts. {data}.",
        (_BOOKS, _AUTHORSHIP_SHORT, _AUTHORSHIP),
        (
            _RATE,
            _FINE_TUNING_RATE,
            _WORDS,
            "- SKTformer is read by mean and standard deviation over its tokens, standardised for a new head "
            "(`--calibrate_head`); ModernBERT by the mean, with the layer that its checkpoint lends the head scaled "
            "by the same flag, which raises its scores; the others, as transformers has them, by the first token, "
            f"behind a layer that pre-training has not trained. {_FULL_ATTENTION}",
            _HELD_OUT,
            HOW_TIMED,
        ),
    ),
    "authorship_long": Table(
        "Authorship by longer excerpts",
        "The models that [the table of authorship](authorship.md) fine-tunes on excerpts of 512 tokens, pre-trained "
        "for {minutes:g} minutes, fine-tuned further on longer ones of 4,096: 16 of a book, as much text with an "
        "eighth of the labels, 75 steps of {3[global_batch_size]} excerpts. {data}.",
        (_BOOKS, _AUTHORSHIP_SHORT, _AUTHORSHIP, _AUTHORSHIP_LONG),
        (
            _RATE,
            _FINE_TUNING_RATE,
            _WORDS,
            _GROWN.format("that table"),
            _HELD_OUT,
        ),
    ),
    "authorship_frozen_512": _frozen_table(
        512,
        "- The heads of the others read the first token, through a layer that pre-training has not trained. "
        f"{_FULL_ATTENTION}",
    ),
    "authorship_frozen_2048": _frozen_table(2048, _GROWN.format(_TABLE_OF_512)),
    "authorship_frozen": _frozen_table(4096, _GROWN.format(_TABLE_OF_512)),
    "fine_tuning": Table(
        "Recipes of fine-tuning: authors of excerpts of books",
        _STARTED_ONE
        + " on the first ten of 20 excerpts of 512 tokens, spread evenly over each of these books. The others are "
        "attributed. {data}.",
        (_BOOKS, _RECIPES),
        (*_ONE_CHANGED, _RATE),
    ),
    "fine_tuning_sst2": Table(
        "Recipes of fine-tuning: SST-2",
        _STARTED_ONE + " on the first 4,000 texts of SST-2. {data}.",
        (_BOOKS, _RECIPES_SST2),
        (*_ONE_CHANGED, _MAJORITY, _RATE),
    ),
    "pooling": Table(
        "Pooling: what a classifier reads of a sequence",
        "Models pre-trained on books with every seed, 1,500 steps of 8 sequences of 512 tokens, then fine-tuned with "
        "the same seed on the first 4,000 texts of SST-2: {1[num_train_epochs]} epochs of 32 "
        "texts a batch, by the first token or the mean over all (`classifier_pooling`). {data}.",
        (_POOLING_STARTS, _POOLING),
        (_MAJORITY, _RATE),
    ),
}
