"""The tables of the frontier: what equal time buys by length."""

from dataclasses import replace

from experiments.comparisons.stages import Case, Curve, Measure, Table
from experiments.comparisons.text_tables import PRETRAINING


_FRONTIER_TOKENS = 4096  # of a step


def frontier_case(length: int, minutes: float = 3.0) -> Case:
    """Equal time at one length, and equal tokens a step."""
    batch = str(_FRONTIER_TOKENS // length)
    flags: tuple[str, ...] = ("--document_unit", "file", "--max_seq_length", str(length))
    flags += ("--global_batch_size", batch, "--per_device_train_batch_size", batch)
    flags += ("--per_device_eval_batch_size", batch, "--max_eval_samples", str(65_536 // length))
    return Case(f"{length:,} tokens", str(length), flags, minutes=minutes)


FRONTIER = replace(
    PRETRAINING,
    folder="frontier",
    runs="frontier.txt",
    recipes=("pretrain/compare.yaml", "pretrain/frontier.yaml"),
    cases=tuple(map(frontier_case, (128, 512, 2048, 4096))),
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
    FRONTIER,
    folder="frontier/mini",
    recipes=(*FRONTIER.recipes, "pretrain/frontier_mini.yaml"),
    cases=(frontier_case(512, 10.0), frontier_case(4096, 10.0)),
    rate_case=0,
    learning_rates=(5e-4, 1e-3, 2e-3),  # wider models want lower ones
)
# The same of what was tried of the model: equal time on books, where improvements.md has equal steps.
_IMPROVEMENTS = replace(
    FRONTIER,
    runs="pretrain_improvements.txt",
    cases=(frontier_case(512),),
    rate_case=0,
    measures=(PRETRAINING.measures[0], *FRONTIER.measures),
    learning_rates=(2e-3,),
)
_EQUAL_TIME = (
    "{0[config_name]} sizes, no dropout, the same text, tokenizer and masks, and "
    f"{_FRONTIER_TOKENS:,} tokens a step for every row. Each row takes as many of its own steps as fit into the time, "
    "with a schedule of that length. Loss in nats per masked token of books not trained on. {data}."
)
_FRONTIER_TEXT = "Masked language modelling on whole books for {minutes:g} minutes: " + _EQUAL_TIME
_FORMS = (
    "- Longformer's window is 512 tokens; shorter inputs are padded to it. Nystromformer has its linear form at every "
    "length, at 128 tokens too, where full attention takes fewer multiply-adds.",
    "- All rows have the same width and depth. SKTformer's filters grow with the length, so that it has more "
    "parameters than the others at the greater lengths: at 4,096 tokens about twice BERT's.",
)
_SHORT = (
    "- The time is short: rows near the unigram frequencies have hardly begun to learn; where they would end is not "
    "said here. Nor had all left these when the rates were chosen, which then says little."
)
HOW_TIMED = (
    "- How many steps fit into the time is measured in a short run of each row before, one at a time. Rows of one and "
    "the same cost have come out a tenth apart there, which no spread over seeds holds. Evaluations do not count."
)
_TIMED = (
    f"{HOW_TIMED} Minutes in the pictures are steps times the measured time of a step.",
    "- Multiply-adds are those of the encoder in forward and backward pass, with the fused attention of GPUs, and "
    "SKTformer in the form that processors choose: a cost that no machine or load changes.",
)
TABLES = {
    "frontier": Table(
        "The frontier: what minutes of training buy, by the length of documents",
        _FRONTIER_TEXT,
        (FRONTIER,),
        (
            *_TIMED,
            *_FORMS,
            _SHORT,
            "- [What to choose](../long_documents.md#what-to-choose). What was tried to move the frontier: "
            "[at equal time](improvements_books.md), [at equal steps](improvements.md).",
        ),
    ),
    "frontier_mini": Table(
        "The frontier at the sizes of sktformer-mini",
        _FRONTIER_TEXT,
        (_MINI,),
        (*_TIMED, *_FORMS, _SHORT),
    ),
    "improvements_books": Table(
        "What was tried, on books at equal time",
        "Masked language modelling on whole books for {minutes:g} minutes, in inputs of 512 tokens: " + _EQUAL_TIME,
        (_IMPROVEMENTS,),
        (*_TIMED, "- The learning rate is the one that [the frontier](frontier.md) chose for both presets."),
    ),
}
