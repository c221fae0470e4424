"""The tables of text: pre-training and GLUE, what is run and what has to be known to read them."""

from dataclasses import fields, replace

from experiments.comparisons.stages import Case, Measure, Stage, Table
from experiments.glue.table import MAJORITY, format_definitions
from experiments.glue.tasks import TASKS
from experiments.text.corpus import CorpusArguments


# What a script that reads text takes.
TEXT = (*(flag.name for flag in fields(CorpusArguments)), "tokenizer_name")
_EVALUATED = 512  # sequences
_SHORT, _MEDIUM, _LONG = (
    Case(f"{steps:,} steps", flags=("--max_eval_samples", str(_EVALUATED)), max_steps=steps)
    for steps in (500, 1000, 2500)
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
    f"computed where something is predicted, by every row. Loss in nats per masked token of at most {_EVALUATED} "
    "sequences spread over the evaluation text. Other runs may have gone on beside those that were timed: no "
    "comparison of speed. {data}."
)
_FULL_ATTENTION = (
    "Nystromformer",
    "- Nystromformer has full attention, as it ships: its linear mode takes no padded batch.",
)
_IMPROVEMENTS = replace(PRETRAINING, runs="pretrain_improvements.txt", cases=(_SHORT,))
_IMPROVEMENTS_LONG = replace(
    PRETRAINING, runs="pretrain_improvements_long.txt", cases=(_LONG,), learning_rates=(2e-3,)
)
GLUE = Stage(
    folder="glue",
    script="run_glue.py",
    runs="glue_compare.txt",
    recipes=("glue/compare.yaml",),
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
_GLUE_STAGES = (
    replace(PRETRAINING, runs="pretrain_glue.txt", cases=(_MEDIUM,), measures=_STARTED, learning_rates=()),
    GLUE,
)
_GLUE_TEXT = (
    "Each model is pre-trained with every seed: 1,000 steps of {0[global_batch_size]} sequences of "
    "{0[max_seq_length]} tokens, the same tokenizer, text and schedule for all; then fine-tuned with that seed on "
    "each task: {1[max_steps]} steps of {1[global_batch_size]} texts of at most {1[max_seq_length]} tokens, padded to "
    "the longest of each. Models of two layers after minutes of pre-training: the table says how they compare, and "
    "not what a trained model reaches. {data}."
)
_MAJORITY = "- majority: the commonest label of the training part for every text, for STS-B the mean similarity."


TABLES = {
    "pretraining": Table("Pre-training compared", _PRETRAINING_TEXT, (PRETRAINING,), (_FULL_ATTENTION,)),
    "improvements": Table(
        "What was tried: changes of the paper's model, compared", _PRETRAINING_TEXT, (_IMPROVEMENTS,)
    ),
    "improvements_long": Table(
        "What was tried: a gate, another activation and no Fourier convolution, in longer training",
        _PRETRAINING_TEXT,
        (_IMPROVEMENTS_LONG,),
        (
            "- The learning rate is the one that [their comparison](pretraining.md) chose for SKTformer-best and "
            "Nystromformer from three.",
            (
                "best-gate",
                "- best-gate: what goes past the attention of SKTformer-best is weighed by a gate "
                "(`use_residual_gate`).",
            ),
            ("best-relu", "- best-relu: ReLU, the paper's, in the place of SiLU (`smoother_activation=relu`)."),
            ("best-relu-gate", "- best-relu-gate: ReLU, and a gate that weighs what goes past the attention."),
            (
                "best-no-fourier",
                "- best-no-fourier: without its Fourier convolution (`use_fourier_convolution=False`).",
            ),
            _FULL_ATTENTION,
        ),
    ),
    "glue": Table(
        "GLUE compared: small models, alike in all but the architecture",
        _GLUE_TEXT,
        _GLUE_STAGES,
        (
            *format_definitions([case.name for case in GLUE.cases]),
            "- Pre-training has for each row the learning rate that [its own comparison](pretraining.md) chose from "
            "three for 500 steps: 0.002, for FNet 0.004.",
            "- SKTformer classifies by its first token, as the others do; SKTformer-mean and -best by the mean over "
            "their tokens (`classifier_pooling`).",
            (
                "FNet",
                "- FNet takes no mask: what it answers depends on the padding of the batch, of which there is more in "
                "evaluation, in the order of the texts, than in training, in batches of like lengths.",
            ),
            _FULL_ATTENTION,
            _MAJORITY,
        ),
    ),
    "glue_activation": Table(
        "GLUE by the activation in the stem: SiLU, and the paper's ReLU",
        _GLUE_TEXT,
        (_GLUE_STAGES[0], replace(GLUE, runs="glue_activation.txt")),
        (
            *format_definitions([case.name for case in GLUE.cases]),
            "- SKTformer-best has SiLU; best-relu is the same with ReLU (`smoother_activation=relu`). Both were "
            "pre-trained at the rate that [the comparison](pretraining.md) chose for the former from three for 500 "
            "steps, 0.002.",
            _MAJORITY,
        ),
    ),
}
