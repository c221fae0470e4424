"""The tables of the frontier: what equal time buys by length."""

from dataclasses import replace

from experiments.comparisons.stages import Case, Curve, Measure, Stage, Table
from experiments.comparisons.text_tables import PRETRAINING


_TOKENS, _TOKENS_ON_GPU = 4096, 65_536  # of a step: as many as it takes for a GPU to be busy


def frontier_case(length: int, minutes: float = 3.0, tokens: int = _TOKENS) -> Case:
    """Equal time at one length, and equal tokens a step."""
    batch = str(tokens // length)
    flags: tuple[str, ...] = ("--document_unit", "file", "--max_seq_length", str(length))
    flags += ("--global_batch_size", batch, "--per_device_train_batch_size", batch)
    flags += ("--per_device_eval_batch_size", batch, "--max_eval_samples", str(65_536 // length))
    return Case(f"{length:,} tokens", str(length), flags, minutes=minutes)


FRONTIER = replace(
    PRETRAINING,
    folder="frontier",
    runs="frontier.txt",
    recipes=("pretrain/frontier.yaml",),
    cases=tuple(map(frontier_case, (128, 512, 2048, 4096))),
    measures=(
        PRETRAINING.measures[1],
        Measure("steps", "step", format=",.0f"),
        Measure("step (ms)", "step_time_ms", format=".0f"),
        Measure("billion multiply-adds a step", "step_multiply_adds", format=",.1f", factor=1e-9),
    ),
    needs=("train_file",),
    search_steps=200,
    rate_case=1,
    curves=(Curve(against="minutes of training"), Curve(), Curve(against="trillion multiply-adds")),
)


def _of_size(size: str, cases: tuple[Case, ...], learning_rates: tuple[float, ...]) -> Stage:
    """The same with the sizes of a larger preset; wider models want lower rates, and larger batches higher ones."""
    recipes, folder = (f"pretrain/frontier_{size}.yaml",), f"frontier/{size}"
    return replace(FRONTIER, folder=folder, recipes=recipes, cases=cases, rate_case=0, learning_rates=learning_rates)


_MINI = _of_size("mini", (frontier_case(512, 10.0), frontier_case(4096, 10.0)), (5e-4, 1e-3, 2e-3))
_SMALL = _of_size("small", (frontier_case(4096, 10.0, _TOKENS_ON_GPU),), (5e-4, 1e-3, 2e-3))
_BASE = _of_size("base", (frontier_case(4096, 30.0, _TOKENS_ON_GPU),), (2e-4, 4e-4, 8e-4))
# The same of what was tried of the model: equal time on books, where improvements.md has equal steps.
_IMPROVEMENTS = replace(
    FRONTIER,
    runs="pretrain_improvements.txt",
    cases=(frontier_case(512),),
    rate_case=0,
    measures=(PRETRAINING.measures[0], *FRONTIER.measures),
    learning_rates=(2e-3,),
)
# What was better there, and is a part of the paper's model, in a longer training.
_IMPROVEMENTS_LONG = replace(
    _IMPROVEMENTS, cases=(frontier_case(512, 10.0),), only=("SKTformer-best", "best-no-fourier")
)


def _equal_time(where: str = "", tokens: int = _TOKENS) -> str:
    """What a table of equal time compares."""
    return (
        f"Masked language modelling on whole books for {{minutes:g}} minutes{where}: {{0[config_name]}} sizes, no "
        f"dropout, the same text, tokenizer and masks, and {tokens:,} tokens a step for every row. Each row takes as "
        "many of its own steps as fit into the time, with a schedule of that length. Loss in nats per masked token of "
        "books not trained on. {data}."
    )


_FORMS = (
    "- BERT has PyTorch's fused attention (SDPA). Longformer's window is 512 tokens; shorter inputs are padded to it. "
    "Nystromformer has its linear form at every length, at 128 tokens too, where full attention takes fewer "
    "multiply-adds.",
    "- All rows have the same width and depth. SKTformer's filters grow with the length, so that it has more "
    "parameters than the others at the greater lengths: at 4,096 tokens up to twice BERT's.",
)
_SHORT = (
    "- The time is short: rows near the unigram frequencies have hardly begun to learn; where they would end is not "
    "said here. Some rows were still near them when the rates were chosen; for those the choice says little."
)
HOW_TIMED = (
    "- How many steps fit into the time is measured beforehand, in short runs of every row, one at a time, in rounds "
    "of all rows, of which the median counts. Evaluations and the preparation of a batch, the same for every row, do "
    "not count."
)
_TIMED = (
    f"{HOW_TIMED} Minutes in the pictures are steps times the measured time of a step.",
    "- Multiply-adds are those of the encoder in forward and backward pass, with the fused attention of GPUs, and "
    "SKTformer in the form that processors choose: a cost that no machine or load changes.",
)
_RATE_OF_PRESETS = "- The learning rate is the one that [the frontier](frontier.md) chose for both presets."
TABLES = {
    "frontier": Table(
        "The frontier: what minutes of training buy, by the length of documents",
        _equal_time(),
        (FRONTIER,),
        (
            *_TIMED,
            *_FORMS,
            _SHORT,
            "- [What to choose, and where ours is behind, and why](../long_documents.md#what-to-choose). [What was "
            "tried](tried.md) to move the frontier, at equal steps, at equal time, and what it costs.",
        ),
    ),
    **{
        f"frontier_{size}": Table(
            f"The frontier at the sizes of sktformer-{size}",
            _equal_time(tokens=tokens),
            (stage,),
            (*_TIMED, *_FORMS, _SHORT),
        )
        for size, stage, tokens in (
            ("mini", _MINI, _TOKENS),
            ("small", _SMALL, _TOKENS_ON_GPU),
            ("base", _BASE, _TOKENS_ON_GPU),
        )
    },
    "improvements_books": Table(
        "What was tried, on books at equal time",
        _equal_time(where=", in inputs of 512 tokens"),
        (_IMPROVEMENTS,),
        (*_TIMED, _RATE_OF_PRESETS),
    ),
    "improvements_books_long": Table(
        "Without the Fourier convolution, on books in a longer training",
        _equal_time(where=", in inputs of 512 tokens"),
        (_IMPROVEMENTS_LONG,),
        (
            *_TIMED,
            _RATE_OF_PRESETS,
            "- best-no-fourier: SKTformer-best without its Fourier convolution (`use_fourier_convolution=False`), "
            "which [is ahead after three minutes](improvements_books.md).",
        ),
    ),
}
