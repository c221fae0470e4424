"""The tables of the frontier: what equal time buys by length, and what a head reads of a sequence."""

from dataclasses import replace

from experiments.comparisons.stages import Case, Curve, Measure, Table
from experiments.comparisons.text_tables import BOOK_RATE, BOOKS, GLUE, PRETRAINING
from experiments.glue.table import MAJORITY


_FRONTIER_TOKENS = 4096  # of a step


def _frontier_case(length: int, minutes: float = 3.0) -> Case:
    """Equal time at one length, and equal tokens a step."""
    batch = str(_FRONTIER_TOKENS // length)
    flags: tuple[str, ...] = ("--document_unit", "file", "--max_seq_length", str(length))
    flags += ("--global_batch_size", batch, "--per_device_train_batch_size", batch)
    flags += ("--per_device_eval_batch_size", batch, "--max_eval_samples", str(65_536 // length))
    return Case(f"{length:,} tokens", str(length), flags, minutes=minutes)


_FRONTIER = replace(
    PRETRAINING,
    folder="frontier",
    runs="frontier.txt",
    recipes=("pretrain/compare.yaml", "pretrain/frontier.yaml"),
    cases=tuple(map(_frontier_case, (128, 512, 2048, 4096))),
    measures=(
        PRETRAINING.measures[1],
        Measure("steps", "step", format=",.0f"),
        Measure("step (ms)", "step_time_ms", format=".0f"),
        Measure("billion multiply-adds a step", "step_multiply_adds", format=",.1f", factor=1e-9),
    ),
    search_steps=200,
    rate_case=1,
    curves=(Curve(against="minutes of training"), Curve(), Curve(against="trillion multiply-adds")),
)
_MINI = replace(
    _FRONTIER,
    folder="frontier/mini",
    recipes=(*_FRONTIER.recipes, "pretrain/frontier_mini.yaml"),
    cases=(_frontier_case(512, 10.0), _frontier_case(4096, 10.0)),
    rate_case=0,
)
# The same of what was tried of the model: equal time on books, where improvements.md has equal steps.
_IMPROVEMENTS = replace(
    _FRONTIER,
    runs="pretrain_improvements.txt",
    cases=(_frontier_case(512),),
    rate_case=0,
    measures=(PRETRAINING.measures[0], *_FRONTIER.measures),
    learning_rates=(2e-3,),
)
# How a head reads a sequence, and at which rate it learns: of the checkpoints that authorship starts from.
_POOLING = replace(
    GLUE,
    folder="pooling",
    runs="pooling.txt",
    recipes=("glue/base.yaml",),
    cases=(Case("SST-2", "sst2", ("--task_name", "sst2", "--max_train_samples", "4000", "--save_strategy", "no")),),
    measures=(replace(GLUE.measures[0], title="accuracy (%)"),),
    search_steps=None,
    rate_case=None,
    has_mean=False,
    drawn_by_row=1,
)
_EQUAL_TIME = (
    "{0[config_name]} sizes, no dropout, the same text, tokenizer and masks, and "
    f"{_FRONTIER_TOKENS:,} tokens a step for every row. Each row takes as many of its own steps as fit into the time, "
    "with a schedule of that length. Loss in nats per masked token of books not trained on. {data}."
)
_FRONTIER_TEXT = "Masked language modelling on whole books for {minutes:g} minutes: " + _EQUAL_TIME
_WINDOW = "- Longformer's window is 512 tokens; shorter inputs are padded to it."
_SHORT = (
    "- The time is short: rows near the unigram frequencies have hardly begun to learn; where they would end is not "
    "said here."
)
_TIMED = (
    "- How many steps fit into the time is measured in short runs before, one at a time. Evaluations do not count. "
    "Minutes in the pictures are steps times the measured time of a step.",
    "- Multiply-adds are those of the encoder in forward and backward pass, counted as on a GPU: a cost that no "
    "machine or load changes.",
)
TABLES = {
    "pooling": Table(
        "Pooling: what a classifier reads of a sequence",
        "Models pre-trained on books with every seed, {0[max_steps]:,} steps of {0[global_batch_size]} sequences of "
        "{0[max_seq_length]} tokens, then fine-tuned with the same seed on the first 4,000 texts of SST-2: "
        "{1[num_train_epochs]} epochs of {1[per_device_train_batch_size]} texts a batch, by the first token or the "
        "mean over all (`classifier_pooling`). {data}.",
        (BOOKS, _POOLING),
        (f"- {MAJORITY}: the commonest label of the training part for every text.", BOOK_RATE),
    ),
    "frontier": Table(
        "The frontier: what minutes of training buy, by the length of documents",
        _FRONTIER_TEXT,
        (_FRONTIER,),
        (
            *_TIMED,
            _WINDOW,
            _SHORT,
            "- [What to choose](../long_documents.md#what-to-choose). What was tried to move the frontier: "
            "[at equal time](improvements_books.md), [at equal steps](improvements.md).",
        ),
    ),
    "frontier_mini": Table(
        "The frontier at the sizes of sktformer-mini",
        _FRONTIER_TEXT,
        (_MINI,),
        (*_TIMED, _WINDOW, _SHORT),
    ),
    "improvements_books": Table(
        "What was tried, on books at equal time",
        "Masked language modelling on whole books for {minutes:g} minutes, in inputs of 512 tokens: " + _EQUAL_TIME,
        (_IMPROVEMENTS,),
        (*_TIMED, "- The learning rate is the one that [the frontier](frontier.md) chose for both presets."),
    ),
}
