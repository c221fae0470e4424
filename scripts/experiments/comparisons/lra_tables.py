"""The tables of Long Range Arena: tasks, learning curves, equal time, noise, analyses and self-pretraining."""

from collections.abc import Iterable
from dataclasses import replace

from experiments.comparisons.frontier_tables import HOW_TIMED
from experiments.comparisons.stages import Case, Curve, Measure, Stage, Table
from experiments.lra.published import CURVE_STEPS, NOISES, PUBLISHED_TASKS, ROWS, SPREADS
from experiments.lra.tasks import TASKS


_DATA = ("data_dir", "dataset_name", "cache_dir")
_RATES = (1e-4, 3e-4, 1e-3)
_SETTING = Measure("the same in the paper (%)", "published.setting", format=".2f", factor=100, pooled=True)
_TEXT = (
    "{0[global_batch_size]} sequences a step, weight decay {0[weight_decay]}; everything else in the recipe "
    "`configuration/lra/%s.yaml`. {data}."
)
_NOTES = (
    "- Accuracy of the model that is best on validation where the column names no step.",
    "- Every architecture has the same sizes, pools by the mean and has the same head.",
    (
        "FNet",
        "- FNet takes no mask: where inputs are padded, its answers depend on the batch, and training in batches of "
        "like lengths has less padding than evaluation, in the order of the examples.",
    ),
    ("Nystromformer", "- Nystromformer is linear where no input is padded, and has full attention where some are."),
)
_PAPER = ("(paper)", "- Rows marked as the paper's are reprints of its tables, on data and a split of its own.")
_TRAINED = "- Times of steps are those of the trainings, beside which other runs may have gone on."


def _accuracy(title: str, key: str = "eval_test_accuracy", rows: tuple[tuple[str, str], ...] = ()) -> Measure:
    return Measure(title, key, "highest", ".2f", 100, baselines=rows)


def _costs(published: Iterable[str] = ()) -> tuple[Measure, ...]:
    """What a number is of, and what it takes; of rows of the paper the length."""
    lengths = tuple((row, "published.length") for row in published)
    return (
        Measure("length", "max_length", format=",.0f", pooled=True, baselines=lengths),
        Measure("test examples", "eval_test_samples", format=",.0f", pooled=True),
        Measure("parameters", "parameters", format=",.0f", pooled=True),
        Measure("step (ms)", "step_time_ms", format=".0f", pooled=True),
    )


def _stage(task: str, what: str, runs: str, measures: tuple[Measure, ...], cases: tuple[Case, ...] = ()) -> Stage:
    return Stage(
        folder="-".join(filter(None, (f"lra/{task}", what))),
        script="run_lra.py",
        runs=f"{runs}.txt",
        recipes=(f"lra/{task}.yaml",),
        data=_DATA,
        cases=cases or (Case(TASKS[task].title),),
        measures=measures,
        learning_rates=_RATES,
        curves=(Curve("validation accuracy", "eval_accuracy", "accuracy (%)", 100, "minutes of training"),),
    )


def _table(task: str, title: str, *stages: Stage) -> Table:
    return Table(f"Long Range Arena, {TASKS[task].title}: {title}", _TEXT % task, stages, (*_NOTES, _TRAINED, _PAPER))


def _whole(task: str) -> Table:
    """Table 1: the paper's recipe, with its best values, and others; of other tasks a recipe of ours alone."""
    published = tuple(name for name in ROWS if task in ROWS[name])
    rows = tuple((name, f"published.rows.{name}") for name in published)
    measures = (_accuracy("accuracy (%)", rows=rows), *_costs(published))
    runs, title = ("lra", "the paper's recipe") if published else ("lra_curves", "the recipe")
    table = _table(task, title, _stage(task, "", runs, measures))
    spreads = (f"{of[task]:.2f} ({row})" for row, of in SPREADS.items() if task in of)
    notes = (
        f"- Over the paper's five seeds its figures have standard deviations of {' and '.join(spreads)}.",
        (
            "SKTformer-best",
            "- SKTformer-best has the paper's best values and no preset's: "
            f"`configuration/lra/best/{task}.yaml`, with passes and weight decay of its own where that says so.",
        ),
    )
    return replace(_counting_passes(table), notes=(*notes, *table.notes) if published else table.notes)


def _counting_passes(table: Table) -> Table:
    """A training is cut short by a flag of all runs, which has to be seen."""
    return replace(table, text=f"{{0[num_train_epochs]}} pass(es) over the training part, {table.text}")


def _curves(task: str, num_steps: int, is_whole: bool = False) -> Table:
    """Accuracy on the test after so many steps, the first of the paper's training or a short whole one, and others."""
    steps = [step for step in CURVE_STEPS if step <= num_steps]
    every = ["--eval_strategy", "steps", "--eval_steps", "500", "--save_strategy", "steps", "--save_steps", "500"]
    if is_whole:
        folder, runs, rates = "curves-short", "lra_curves_short", (1e-3, 3e-3, 6e-3)
        note = "- The rates tried are those of a short training."
    else:
        folder, runs, rates = "curves", "lra_curves_listops" if task == "listops" else "lra_curves", _RATES
        note = "- After the warm-up the rate is constant."
        every += ["--lr_scheduler_type", "constant_with_warmup"]
    published = ("with", "without") if task in PUBLISHED_TASKS else ()
    rows = {f"{which} smoother (paper)": f"published.curve.{which}" for which in published}
    measures = [
        _accuracy(f"after {step:,} steps", f"curve.{step}", tuple((row, f"{key}.{step}") for row, key in rows.items()))
        for step in steps
    ]
    title = f"{TASKS[task].title}, {num_steps:,} steps"
    case = Case(title, flags=("--test_curve", "true", *every), max_steps=num_steps)
    stage = replace(_stage(task, folder, runs, (*measures, *_costs(rows)), (case,)), learning_rates=rates)
    curve = Curve("test accuracy", "eval_test_accuracy", "accuracy (%)", 100, baselines=tuple(rows.items()))
    timed = replace(curve, against="minutes of training", baselines=())
    table = _table(task, f"learning curves, {num_steps:,} steps", replace(stage, curves=(curve, timed)))
    return replace(table, notes=(note, *table.notes))


def _equal_time(task: str) -> Table:
    """What each of the encoders reaches in the same time, in a training of that length."""
    every = ("--eval_strategy", "steps", "--eval_steps", "0.1", "--save_strategy", "steps", "--save_steps", "0.1")
    case = Case(TASKS[task].title, flags=every, minutes=30.0)
    measures = (_accuracy("accuracy (%)"), Measure("steps", "steps", format=",.0f", pooled=True), *_costs())
    unmeasured = ("--max_eval_samples", "1", "--max_predict_samples", "1")
    stage = _stage(task, "time", "lra_curves_short", measures, (case,))
    stage = replace(stage, search_steps=500, timed_flags=unmeasured)
    table = _table(task, "equal time", stage)
    text = (
        "Each row trains for {minutes:g} minutes: as many of its own steps as fit into the time, with a schedule of "
        "that length. "
    )
    median = (
        "- Where lengths differ, so do the times of steps, of which the median counts. In batches of like lengths the "
        "steps that are timed are longer ones, which costs an encoder the more steps, the faster its cost grows."
    )
    return replace(table, text=text + table.text, notes=(*_NOTES, HOW_TIMED, median))


def _noise() -> Table:
    """Table 5: noise on the pixels of Image."""
    amplitudes = next(iter(NOISES.values()))
    measure = _accuracy("", rows=tuple((name, f"published.noise.{name}") for name in NOISES))
    cases = tuple(Case(f"noise {a}", f"noise-{a}", ("--noise", str(a))) for a in amplitudes)
    stage = _stage("image", "noise", "lra_noise", (*_costs(NOISES), measure), cases)
    stage = replace(stage, recipes=("lra/noise.yaml",), rate_case=0, has_mean=True, label="accuracy (%)")
    table = _table("image", "noise on the pixels", stage)
    return replace(table, text="{0[max_steps]:,} steps, " + table.text)


def _analysis(task: str, runs: str, title: str) -> Table:
    """The impact of r, s1 and s2, or the ablation: the paper's figure beside ours."""
    stage = _stage(task, runs, f"lra_{runs}", (_accuracy("accuracy (%)"), _SETTING, *_costs()))
    stage = replace(stage, learning_rates=(), drawn_by_row=2, label="accuracy (%)")
    return _counting_passes(_table(task, title, stage))


def _self_pretraining(task: str) -> Table:
    """Masked self-pretraining on the task's own training inputs, and none."""
    measure = _accuracy("masked values guessed (%)", "eval_accuracy")
    first = _stage(task, "masked", "lra_masked", (measure,))
    recipes = (*first.recipes, "lra/self_pretraining.yaml")
    last = _stage(task, "self-pretrained", "lra_self_pretraining", (_accuracy("accuracy (%)"), *_costs()))
    stages = (replace(first, recipes=recipes, learning_rates=()), replace(last, learning_rates=()))
    table = _table(task, "masked self-pretraining on its own training inputs", *stages)
    # As in Table 1, a training cut short has to be seen.
    passes = (
        "{0[num_train_epochs]} pass(es) of self-pretraining over the training part, without labels, as "
        "`configuration/lra/self_pretraining.yaml` says, which rows from scratch go without; then "
        "{1[num_train_epochs]} pass(es) with labels, "
    )
    return replace(table, text=passes + table.text)


def tables_of(task: str) -> dict[str, Table]:
    """All tables of a task by name; of one that the paper does not have, without its figures."""
    return {
        f"lra_{task}": _whole(task),
        f"lra_curves_{task}": _curves(task, 5000),
        f"lra_time_{task}": _equal_time(task),
        f"lra_impact_{task}": _analysis(task, "impact", "r, s1 and s2"),
        f"lra_ablation_{task}": _analysis(task, "ablation", "without a part"),
        f"lra_self_pretraining_{task}": _self_pretraining(task),
    }


TABLES = {"lra_curves_image_1000": _curves("image", 1000, is_whole=True), "lra_noise": _noise()}
for _task in TASKS:
    TABLES |= tables_of(_task)
