"""Tables, from their runs to their files."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import reproduce
import run_classification
from experiments.analyses import lengthening
from experiments.arguments import CONFIGURATION, UserError, flag_values, parse_command
from experiments.comparisons import execution, report
from experiments.comparisons.stages import Case, ComparisonArguments, Curve, Measure, Stage, Table
from experiments.comparisons.tables import TABLES
from experiments.results import ResultsArguments
from experiments.runs import Run
from support.glue_rows import files_below, read_metrics
from support.tables import cells, read_run


# A training in no time: rates have an optimum, which differs between rows; above 1 training diverges.
SCRIPT = """
import json, math, sys
from pathlib import Path
def flag(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
folder, name, rate = Path(flag("--output_dir")), flag("--run_name"), float(flag("--learning_rate", "1"))
steps, seed = int(flag("--max_steps", "10")), int(flag("--seed"))
folder.mkdir(exist_ok=True)
if rate > 1 or "--broken" in sys.argv:
    sys.exit("script.py: error: Training has diverged: loss is nan" if rate > 1 else "script.py: error: it is broken")
best = {"ours": 0.001, "theirs": 0.1}.get(name, 1)
metrics = {
    "eval_loss": 5 + abs(math.log10(rate / best)) + 0.1 * seed - steps / 1000 - (name == "theirs"),
    "score": 0.5 + 0.1 * seed + 0.01 * len(flag("--task", "")), "parameters": 1234567, "seed": seed,
    "model_type": "sktformer" if name == "ours" else "bert", "unigram_loss": 6.5, "accuracy": rate,
    "other": {"score": 0.75, "loss": 4.95},
    "environment": {"python": "3", "torch": "2", "transformers": "5", "device": "d", "threads": 1, "commit": "abc"},
    "started_from": flag("--model_name_or_path"),
    "history": [{"step": step, "eval_loss": 6.0} for step in (1, steps)],
}
if seed:  # a run that was resumed behind its last step has measured no time
    metrics["step_time_ms"] = 100.0 * seed
config = {"model_type": metrics["model_type"], "architectures": ["BertForMaskedLM"]}
(folder / "config.json").write_text(json.dumps(config))
(folder / "metrics.json").write_text(json.dumps(metrics))
"""

FRONTIERS = tuple(name for name in TABLES if name.startswith("frontier"))
OF_TEXT = (
    "pretraining",
    "improvements",
    "improvements_books",
    "improvements_books_long",
    *FRONTIERS,
    "authorship",
    "glue",
    "glue_activation",
)


@pytest.fixture
def stage(tmp_path):
    """A stage of two rows and two budgets, whose rates are searched."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "rows.txt").write_text("--run_name ours\n--run_name theirs --x 1\n")
    (tmp_path / "recipe.yaml").write_text("batch: 8\n")
    return Stage(
        folder="first",
        script=str(tmp_path / "script.py"),
        runs=str(tmp_path / "rows.txt"),
        recipes=(str(tmp_path / "recipe.yaml"),),
        data=("train_file", "validation_file"),
        cases=(Case("short", max_steps=100), Case("long", max_steps=200)),
        measures=(
            Measure("parameters", "parameters", format=",.0f", pooled=True),
            Measure("loss", "eval_loss", "lowest", baselines=(("guess", "unigram_loss"),)),
            Measure("step (ms)", "step_time_ms", "lowest", format=".0f", pooled=True),
        ),
        learning_rates=(0.001, 0.01, 0.1),
    )


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a table of stages, with flags; returns its Markdown and its JSON."""

    def make_table(stages, *flags, notes=()):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setitem(TABLES, "test", Table("A table", "Batches of {0[batch]}. {data}.", tuple(stages), notes))
        argv = [
            "reproduce.py",
            "test",
            *flags,
            "--output_dir",
            tmp_path / "out",
            "--results_dir",
            tmp_path / "results",
        ]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        reproduce.main()
        folder = tmp_path / "results"
        return (folder / "test.md").read_text(), json.loads((folder / "test.json").read_text())

    return make_table


def test_a_table_is_a_description(make, stage, tmp_path, capsys):
    text, results = make([stage], "--train_file", tmp_path / "a.txt", "--seeds", 0, 1, 2)
    assert capsys.readouterr().out.endswith(text + "\n")
    assert text.splitlines()[:3] == ["# A table", "", f"Batches of 8. Data: train file {tmp_path.name}/a.txt."]
    ours = ["5.000 ± 0.100", "4.900 ± 0.100", "150", "0.001", "0.001"]
    assert cells(text, "ours") == ["1,234,567", *ours]
    assert cells(text, "theirs")[1:3] == ["4.000 ± 0.100", "3.900 ± 0.100"]
    assert cells(text, "guess") == ["-", "6.500", "6.500", "-", "-", "-"]
    best = "loss, short theirs (not ours); loss, long theirs (not ours); step (ms) ours (ours) and theirs (not ours)"
    assert f"\nBest: {best}.\n" in text
    assert "the one of 0.001, 0.01, 0.1 with the lowest evaluation loss after 100 or 200 steps under seed 100" in text
    assert "at the edge of these: ours 100, theirs 100, ours 200, theirs 200." in text
    assert f"```bash\npython reproduce.py test --train_file {tmp_path / 'a.txt'} --seeds 0 1 2 " in text
    assert "at abc: python 3" in text
    losses = {rate: pytest.approx(13.9 + distance) for rate, distance in (("0.001", 2), ("0.01", 1), ("0.1", 0))}
    assert results["searches"]["theirs-100"] == losses
    assert results["columns"][1]["values"]["ours"] == pytest.approx([4.9, 5.0, 5.1])
    assert results["data"] == {"train_file": [str(tmp_path / "a.txt")]}
    for case in (100, 200):
        assert (tmp_path / "results" / f"test-{case}.png").read_bytes().startswith(b"\x89PNG")
        assert f"(test-{case}.png)" in text
    # A log says what was run: the recipe, data, the row, its rate and seed.
    log = (tmp_path / "out" / "first" / "theirs-200-0.1-1.log").read_text()
    for flags in ("recipe.yaml --train_file", "--x 1", "--max_steps 200", "--learning_rate 0.1", "--seed 1"):
        assert flags in log


def test_of_one_seed_there_is_no_mean(make, stage, monkeypatch):
    titles = []
    monkeypatch.setattr(report, "plot_mean_curves", lambda *args: titles.append(args[2]))
    monkeypatch.setattr(report, "plot_task_scores", lambda *args: titles.append(args[3]))
    text, _ = make([stage], "--seeds", 1)
    assert cells(text, "ours") == ["1,234,567", "5.000", "4.900", "100", "0.001", "0.001"]
    assert "\n- One seed, 1; of times the median.\n" in text
    make([replace(stage, drawn_by_row=2)], "--seeds", 1)
    assert titles == ["short: evaluation loss, one seed", "long: evaluation loss, one seed", "A table\none seed"]
    make([replace(stage, drawn_by_row=2)], "--seeds", 1, 2)
    assert titles[3:] == ["A table\nmean and standard deviation"]


def test_notes_on_rows_stand_where_the_rows_do(stage):
    notes = ("- Of all.", ("ours", "- Of ours."), ("(paper)", "- Of the paper."), ("our", "- Of no row."))
    table = Table("A table", "", (stage,), notes)
    assert table.notes_on(["ours", "theirs"]) == ["- Of all.", "- Of ours."]
    assert table.notes_on(["theirs", "ours (paper)"]) == ["- Of all.", "- Of the paper."]


def test_notes_are_written(make, stage):
    text, _ = make([stage], notes=("- Of all.", ("guess", "- Of guesses."), ("nobody", "- Of nobody.")))
    assert "\n- Of all.\n- Of guesses.\n" in text
    assert "- Of nobody." not in text


def test_curves_know_what_they_are_drawn_against():
    metrics = {"history": [{"step": 10, "eval_loss": 6.0}, {"loss": 1.0}, {"step": 5, "eval_loss": 7.0}]}
    assert Curve().points(metrics) == [(5, 7.0), (10, 6.0)]
    timed = Curve(against="minutes of training")
    assert timed.points(metrics | {"step_time_ms": 6000}) == [(0.5, 7.0), (1.0, 6.0)]
    assert timed.points(metrics) == []
    counted = Curve(against="trillion multiply-adds")
    assert counted.points(metrics | {"step_multiply_adds": 4e11}) == [(2.0, 7.0), (4.0, 6.0)]
    assert counted.points(metrics) == []


def test_curves_are_drawn_against_steps_and_time_and_scores_by_row(make, stage, tmp_path, monkeypatch):
    (case, _), curve = stage.cases, stage.curves[0]
    text, _ = make([replace(stage, cases=(case,), curves=(curve, replace(curve, against="minutes of training")))])
    for name in ("test.png", "test-minutes-of-training.png"):
        assert f"({name})" in text
        assert (tmp_path / "results" / name).read_bytes().startswith(b"\x89PNG")
    lines: dict = {}
    with monkeypatch.context() as context:
        context.setattr(report, "plot_mean_curves", lambda curves, *args: lines.update(curves))
        make([replace(stage, cases=(case,), curves=(replace(curve, against="minutes of training"),))])
    assert {row: len(seeds) for row, seeds in lines.items()} == {"ours": 3, "theirs": 3}  # one has no time itself
    counted = replace(stage, cases=(case,), curves=(replace(curve, against="trillion multiply-adds"),))
    text, _ = make([counted])
    assert ".png" not in text  # the runs have not counted any
    with monkeypatch.context() as context:
        context.setattr(Curve, "points", lambda curve, metrics: [(5.0, 6.0)])
        text, _ = make([replace(stage, cases=(case,))])
    assert ".png" not in text  # a single evaluation is no curve
    drawn = []
    monkeypatch.setattr(report, "plot_task_scores", lambda *args: drawn.append(args))
    measures = (Measure("measured", "eval_loss"), Measure("published", "score", pooled=True), stage.measures[0])
    text, _ = make([replace(stage, cases=(case,), measures=measures, drawn_by_row=2, label="loss")])
    means, spreads, path, _, label = drawn[0]
    assert list(means) == ["measured", "published"]
    assert means["measured"] == pytest.approx({"ours": 5.0, "theirs": 4.0})
    assert spreads["published"] == {"ours": 0, "theirs": 0}
    assert (path.name, label) == ("test.png", "loss")
    assert "![Scores](test.png)" in text


def test_rows_that_are_printed_alike_share_the_first_place():
    measure = Measure("loss", "eval_loss", "lowest", ".2f")
    assert report.Column("loss", measure, {"a": [1.001], "b": [1.002], "c": [2.0]}).winners() == ["a", "b"]


def test_of_times_the_median_stands_in_the_table(stage):
    stage = replace(stage, cases=stage.cases[:1], measures=(Measure("step (ms)", "time", pooled=True),))
    outcome = execution.Outcome(None, metrics=[{"time": time} for time in (100.0, 100.0, 400.0)])
    (column,) = report._build_columns(stage, {("ours", stage.cases[0].key): outcome}, {"ours": "ours"})
    assert column.values == {"ours": [100.0]}


def test_rows_that_no_training_equals_are_named(make, stage):
    stage = replace(stage, measures=(Measure("", "eval_loss", "lowest", baselines=(("guess", "other.loss"),)),))
    assert "not better" not in make([stage])[0]
    text, results = make([replace(stage, floors=("guess",))])
    assert [column["cells"]["ours"] for column in results["columns"][:2]] == ["5.000 ± 0.100", "4.900 ± 0.100"]
    assert [line for line in text.splitlines() if "not better" in line] == [
        "- ours is not better than guess at short."
    ]


def test_rows_go_on_where_they_were_cut_short(make, stage, tmp_path):
    first = make([stage])
    before = files_below(tmp_path / "out")
    assert len(list((tmp_path / "out").rglob("metrics.json"))) == 2 * 2 * (3 + 3)
    assert make([stage]) == first
    assert files_below(tmp_path / "out") == before
    (tmp_path / "out" / "first" / "ours-100-0.001-2" / "metrics.json").unlink()
    make([stage])
    changed = {path.parent.name for path, when in files_below(tmp_path / "out").items() if before.get(path) != when}
    assert changed == {"ours-100-0.001-2", "first"}


def test_flags_of_all_rows_add_to_what_a_row_overrides(make, stage, tmp_path):
    (tmp_path / "rows.txt").write_text("--run_name ours --config_overrides a=1,b=2\n--run_name theirs\n")
    make([stage], "--seeds", 0, "--run_flags", "--config_overrides b=3,c=4")
    logs = {row: (tmp_path / "out" / "first" / f"{row}-100-0.1-0.log").read_text() for row in ("theirs",)}
    logs["ours"] = (tmp_path / "out" / "first" / "ours-100-0.001-0.log").read_text()
    assert "--config_overrides=b=2,c=4,a=1" in logs["ours"]
    assert logs["theirs"].count("--config_overrides") == 1


def test_tables_say_where_data_are_limited(make, stage, tmp_path):
    note = "- Some of these runs use a part of their data."
    assert note not in make([stage], "--seeds", 0)[0]
    script = tmp_path / "script.py"
    script.write_text(script.read_text().replace('"unigram_loss": 6.5', '"unigram_loss": 6.5, "is_partial": True'))
    assert note in make([stage], "--seeds", 1)[0]


def test_some_rows_are_compared(make, stage, tmp_path):
    text, results = make([stage], "--rows", "theirs", "--seeds", 0)
    assert not list((tmp_path / "out" / "first").glob("ours*"))
    assert cells(text, "theirs")
    assert "ours" not in results["columns"][1]["values"]
    with pytest.raises(UserError, match="The table has no row whose, mine; its rows are ours, theirs"):
        make([stage], "--rows", "whose", "ours", "mine")


def test_searches_of_several_stages_are_told_apart(make, stage, tmp_path):
    rows = ("ours", "theirs")
    (tmp_path / "more.txt").write_text("".join(f"--run_name {row} --model_name_or_path {row}\n" for row in rows))
    text, _ = make([stage, replace(stage, folder="second", runs=str(tmp_path / "more.txt"), rate_case=0)])
    chosen = "rows without one of their own take the one of 0.001, 0.01, 0.1 with the lowest evaluation loss"
    assert f"- Learning rates of first: {chosen} after 100 or 200 steps under seed 100" in text
    assert f"- Learning rates of second: {chosen} after 100 steps at {stage.cases[0].title} under seed 100" in text


def test_a_row_keeps_the_rate_that_it_says(make, stage, tmp_path):
    (tmp_path / "rows.txt").write_text("--run_name ours --learning_rate 0.1\n--run_name theirs --x 1\n")
    text, results = make([stage])
    assert cells(text, "ours")[-2:] == ["0.1", "0.1"]
    assert cells(text, "theirs")[-2:] == ["0.1", "0.1"]
    assert set(results["searches"]) == {"theirs-100", "theirs-200"}
    assert not [path for path in (tmp_path / "out" / "first").iterdir() if path.name.startswith("ours-100-0.1-100")]


def test_time_is_spent_on_as_many_steps_as_it_holds(make, stage, tmp_path):
    cases = (Case("short", "short", max_steps=100), Case("half a minute", "books", minutes=0.5))
    stage = replace(stage, cases=cases, search_steps=10)
    text, results = make([stage])
    assert "loss, half a minute" in text
    names = sorted(path.parent.name for path in (tmp_path / "out").rglob("ours*/metrics.json"))
    assert [name for name in names if name.endswith("-0")] == [
        "ours-books-0.5min-3steps-0.001-0",
        "ours-short-100-0.001-0",
    ]
    # Steps of the short runs, whose seeds are 100 to 102, have taken ten seconds and more: of the median three fit.
    assert "--max_steps 3 " in (tmp_path / "out" / "first" / "ours-books-0.5min-3steps-0.001-0.log").read_text()
    rounds = [10000, 10100, 10200]
    assert results["step_times_ms"] == {"ours-books-0.5min": rounds, "theirs-books-0.5min": rounds}
    assert "\n- Between 3 rounds the steps of one row lie 2.0% apart in the median over the rows, and 2.0% at" in text
    timed = sorted((tmp_path / "out").rglob("ours-books-timed-40-0.001-*/metrics.json"))
    assert [path.parent.name[-3:] for path in timed] == ["100", "101", "102"]
    logs = [path.parent.with_name(f"{path.parent.name}.log").read_text() for path in timed]
    assert all("--eval_strategy no --save_strategy no" in log for log in logs)
    known = timed[1].read_text()
    timed[1].write_text(known.replace('"threads": 1', '"threads": 2'))
    by = r"timed by different means \(ours on d, 1 thread\(s\), theirs on d, 1 .*, ours on d, 2 thread\(s\)\)"
    with pytest.raises(UserError, match=by):
        make([stage])
    for path in timed:
        path.write_text(known.replace('"device": "d"', '"device": "another"'))
    later = tmp_path / "out" / "first" / "ours-books-0.5min-3steps-0.001-1"
    shutil.rmtree(later)
    with pytest.raises(
        UserError, match=r"ours were timed on another, .*taken on d, 1 thread\(s\); .* or delete .*first"
    ):
        make([stage], "--rows", "ours")
    assert not later.exists()  # the first seed has shown it
    for path in timed:
        path.write_text(known.replace('"device"', '"is_gpu": true, "device"'))
    with pytest.raises(UserError, match=r"Steps of ours were timed on d and taken on d, 1 thread"):
        make([stage], "--rows", "ours")
    timed[0].write_text(json.dumps({k: v for k, v in json.loads(known).items() if "time" not in k}))
    with pytest.raises(UserError, match=r"ours-books-timed-40-0.001-100 was cut short .* no time; delete it"):
        make([stage])


def test_what_was_computed_by_other_means_is_not_said_to_be_like_the_rest(make, stage, tmp_path):
    make([stage], "--seeds", 0)
    folder = tmp_path / "out" / "first" / "ours-100-0.001-0"
    (folder / "arguments.yaml").write_text("bf16: false\nmax_steps: 100\n")
    make([stage], "--seeds", 0)
    for flags, message in (
        ("--bf16", "was run with --bf16 false, and not true; choose another --output_dir, or delete"),
        ("--torch_compile=yes", "was run with --torch_compile false, and not true"),
        ("--num_threads 4", "was run with --num_threads false, and not 4"),
        ("--activation_checkpointing", "was run with --activation_checkpointing false, and not true"),
        ("--gradient_checkpointing", "was run with --activation_checkpointing false, and not true"),
    ):
        with pytest.raises(UserError, match=f"{folder.name} {message}"):
            make([stage], "--seeds", 0, f"--run_flags={flags}")
    # Of a task of its own the results lie in a folder of the run.
    (folder / "task").mkdir()
    for name in ("metrics.json", "arguments.yaml"):
        (folder / name).rename(folder / "task" / name)
    with pytest.raises(UserError, match=r"ours-100-0\.001-0/task was run with --bf16 false, and not true"):
        execution._check_means(Run("script.py", ("--bf16",), folder, "task/metrics.json"), {})


def test_precision_of_a_recipe_is_compared_where_it_was_taken(make, stage, tmp_path):
    (tmp_path / "recipe.yaml").write_text("batch: 8\nbf16: true\n")
    make([stage], "--seeds", 0)
    recorded = tmp_path / "out" / "first" / "ours-100-0.001-0" / "arguments.yaml"
    for text in ("bf16: true\n", "max_steps: 100\n"):  # and where the device has none
        recorded.write_text(text)
        make([stage], "--seeds", 0)
    recorded.write_text("bf16: false\n")
    with pytest.raises(UserError, match="was run with --bf16 false, and not true"):
        make([stage], "--seeds", 0)


def test_data_from_the_hub_and_of_the_documentation_are_told_apart(make, stage):
    stage = replace(stage, data=("datasets", "one_document_per_block"))
    text, _ = make([stage], "--datasets", "a/b:c", "--seeds", 0)
    assert "Data: datasets a/b:c." in text
    text, _ = make([stage], "--one_document_per_block", "--seeds", 0)
    assert "Data: the documentation of the Python installation; one document per block True." in text


def test_curves_are_means_of_evaluations_after_the_same_steps():
    def seed(*steps, **times):
        return {"history": [{"step": step, "eval_loss": 1.0 * step} for step in steps], **times}

    # One ran beside others, one was resumed behind its last step, and one says nothing.
    seeds = [seed(500, 1000, step_time_ms=60_000), seed(250, 500, 750, 1000, step_time_ms=60_000)]
    seeds += [seed(500, 1000, step_time_ms=600_000), seed(500, 1000), seed()]
    for curve in (Curve(), Curve(against="minutes of training")):
        assert report._points_in_common(curve, seeds) == [[(500, 500), (1000, 1000)]] * 4
        assert report._points_in_common(curve, seeds[4:]) == []
    assert report._points_in_common(Curve(against="minutes of training"), seeds[3:]) == []


def test_rows_that_were_timed_for_another_table_are_named(make, stage, tmp_path):
    stage = replace(stage, cases=(Case("half a minute", "books", minutes=0.5),), search_steps=10)
    make([stage], "--rows", "ours")
    timed = list((tmp_path / "out").rglob("ours-books-timed-*/metrics.json"))
    assert len(timed) == 3
    for path in timed:
        os.utime(path, (1, 1))
    text, _ = make([stage])
    assert "\n- Timed earlier than the rest, in rounds of their own: ours-books-0.5min." in text
    for number, path in enumerate(sorted((tmp_path / "out").rglob("*-timed-*/metrics.json"), key=_round)):
        os.utime(path, (number, number))
    text, _ = make([stage])
    assert "Timed earlier" not in text


def _round(path):
    return int(path.parent.name.rpartition("-")[2])


def test_one_slow_round_takes_no_steps_from_a_row(make, stage, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(script.read_text().replace("100.0 * seed", "500.0 if seed == 101 else 100.0"))
    text, results = make([replace(stage, cases=(Case("half a minute", "books", minutes=0.5),))], "--rows", "ours")
    assert results["step_times_ms"] == {"ours-books-0.5min": [100, 500, 100]}
    assert "--max_steps 300 " in (tmp_path / "out" / "first" / "ours-books-0.5min-300steps-0.001-0.log").read_text()
    assert "400.0% at most (ours-books-0.5min)" in text


def test_steps_are_timed_alone_and_trained_at_once(make, stage, tmp_path, monkeypatch):
    started = []

    def execute(runs, launcher, title, tolerated=None, at_once=1):
        started.append((title, at_once, all(run.arguments[-2:] == ("--brief", "1") for run in runs)))
        execute_runs(runs, launcher, title, tolerated, at_once)

    execute_runs = execution.execute_runs
    monkeypatch.setattr(execution, "execute_runs", execute)
    cases = (Case("half a minute", "books", minutes=0.5),)
    stage = replace(stage, cases=cases, search_steps=10, timed_flags=("--brief", "1"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(execution, "available_cores", lambda: 8)
    text, results = make([stage], "--parallel_runs", 2)
    assert os.environ.pop("OMP_NUM_THREADS") == "4"  # of all of them
    # The first two show whether steps take what they took; what is timed alone has flags of its own.
    trained = ("first", 2, False)
    assert started == [("first, learning rates", 2, False), ("first, times of steps", 1, True), trained, trained]
    # The time is that of the short runs, and not of trainings beside which others ran.
    assert cells(text, "ours")[2] == "10100"
    assert results["columns"][2]["values"]["ours"] == [10_100]


@pytest.mark.parametrize(("number", "title"), [(0, "short"), (1, "long")])
def test_one_case_may_choose_for_all(make, stage, tmp_path, number, title):
    text, results = make([replace(stage, rate_case=number)])
    steps = stage.cases[number].max_steps
    searched = sorted(path.parent.name for path in (tmp_path / "out").rglob("*-100/metrics.json"))
    assert searched == sorted(f"{row}-{steps}-{rate}-100" for row in ("ours", "theirs") for rate in (0.001, 0.01, 0.1))
    assert [column["title"] for column in results["columns"]][-1] == "learning rate"
    assert [column["title"] for column in results["columns"]][-2] != "learning rate"
    assert cells(text, "ours")[-1] == "0.001"
    assert cells(text, "theirs")[-1] == "0.1"
    assert results["searches"]["theirs-200"] == results["searches"]["theirs-100"]
    assert f"with the lowest evaluation loss after {steps} steps at {title} under seed 100" in text
    assert "at the edge of these: ours, theirs." in text


def test_a_table_that_were_too_wide_is_cut_by_measures(make, stage):
    measures = (*stage.measures, *(Measure(f"cost {n}", "seed", format=f".{n}f") for n in range(6)))
    text, results = make([replace(stage, measures=measures, rate_case=0)])
    headers = [line for line in text.splitlines() if re.match(r"\| {2,}\|", line)]
    shown = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in headers]
    assert len(shown) > 6
    assert all({title.partition(",")[0] for title in titles} == {titles[0].partition(",")[0]} for titles in shown[:-1])
    assert "learning rate" in shown[-1]
    assert sorted(title for titles in shown for title in titles) == sorted(c["title"] for c in results["columns"])
    assert text.count("| theirs ") == len(shown)


def test_costs_have_no_spread_and_no_winner(make, stage):
    measures = (Measure("loss", "eval_loss", "lowest"), Measure("cost", "seed", format=".1f"))
    text, _ = make([replace(stage, cases=(Case("short", max_steps=100),), measures=measures)], "--seeds", 0, 1)
    assert cells(text, "ours")[:2] == ["4.950 ± 0.071", "0.5"]
    assert "\nBest: loss theirs (not ours).\n" in text


def test_every_case_of_equal_time_is_timed_by_itself(make, stage, tmp_path):
    cases = (Case("short", "short", max_steps=100), Case("half a minute", "books", minutes=0.5))
    make([replace(stage, cases=cases, search_steps=10, rate_case=0)])
    names = sorted(path.parent.name for path in (tmp_path / "out").rglob("ours-books*/metrics.json"))
    assert [name for name in names if name.endswith("-100")] == ["ours-books-timed-40-0.001-100"]
    assert "--max_steps 3 " in (tmp_path / "out" / "first" / "ours-books-0.5min-3steps-0.001-0.log").read_text()


def test_minutes_can_be_given(make, stage, tmp_path):
    cases = (Case("half a minute", minutes=0.5),)
    make([replace(stage, cases=cases)], "--learning_rates", 0.01, "--minutes", 2)
    names = sorted(path.parent.name for path in (tmp_path / "out").rglob("ours*/metrics.json"))
    assert names == [
        *(f"ours-2min-12steps-0.01-{seed}" for seed in (0, 1, 2)),
        *(f"ours-timed-40-0.01-{seed}" for seed in (100, 101, 102)),
    ]
    assert "--max_steps 12 " in (tmp_path / "out" / "first" / "ours-2min-12steps-0.01-0.log").read_text()
    with pytest.raises(UserError, match="--minutes: the table test is not of equal time; leave it out"):
        make([stage], "--minutes", 2)
    with pytest.raises(UserError, match="--minutes is 0; it must be above 0"):
        make([stage], "--minutes", 0)


def test_rows_and_title_follow_the_flags_of_all_runs(make, stage, tmp_path):
    (tmp_path / "rows.txt").write_text("--run_name ours --batch {batch}-best\n")
    text, results = make([stage], "--seeds", 0, "--run_flags", "--batch 16 --bf16")
    assert "Batches of 16. " in text
    assert results["recipes"] == [{"batch": 16, "bf16": True}]
    log = (tmp_path / "out" / "first" / "ours-100-0.001-0.log").read_text()
    assert log.index("--batch 16 --bf16") < log.index("--batch 16-best")


@pytest.mark.parametrize("name", OF_TEXT)
def test_improved_rows_have_the_sizes_of_the_others(name):
    arguments = ComparisonArguments(table=name, run_flags="--config_name sktformer-mini")
    rows = TABLES[name].with_arguments(arguments).stages[0].rows()
    sizes = {flag_values(row).get("config_name") for row in rows.values()} - {None}
    assert sizes == {"sktformer-mini-best"}


def test_rates_are_searched_with_fewer_steps_or_not_at_all(make, stage, tmp_path):
    text, results = make([stage], "--search_steps", 10)
    searched = sorted(path.parent.name for path in (tmp_path / "out").rglob("*-100/metrics.json"))
    assert searched == sorted(f"{row}-10-{rate}-100" for row in ("ours", "theirs") for rate in (0.001, 0.01, 0.1))
    assert cells(text, "theirs")[-2:] == ["0.1", "0.1"]
    text, results = make([stage], "--learning_rates", 0.01)
    assert cells(text, "theirs")[-2:] == ["0.01", "0.01"]
    assert "Learning rates:" not in text
    assert results["searches"] == {}


def test_rates_at_which_training_diverges_are_not_chosen(make, stage, tmp_path):
    text, results = make([stage], "--learning_rates", 0.1, 10)
    assert cells(text, "ours")[-2:] == ["0.1", "0.1"]
    assert results["searches"]["ours-100"]["10"] is None
    before = files_below(tmp_path / "out")
    make([stage], "--learning_rates", 0.1, 10)
    assert files_below(tmp_path / "out") == before  # nor tried again
    with pytest.raises(UserError, match=r"ours diverges at every one of --learning_rates 10.0 20.0"):
        make([stage], "--learning_rates", 10, 20)
    with pytest.raises(UserError, match=r"failed \(script.py: error: it is broken\)"):
        make([stage], "--run_flags=--broken", "--learning_rates", 0.1, 10)


def test_a_second_stage_starts_from_the_runs_of_the_first(make, stage, tmp_path, monkeypatch):
    (tmp_path / "more.txt").write_text(
        "--run_name ours --model_name_or_path ours\n--run_name other --model_name_or_path ours --y 2\n"
    )
    second = replace(
        stage,
        folder="second",
        runs=str(tmp_path / "more.txt"),
        data=("data_dir",),
        cases=(Case("One", "one", ("--task", "one")), Case("Two", "two", ("--task", "three"))),
        measures=(Measure("", "score", "highest", format=".1f", factor=100, baselines=(("most", "other.score"),)),),
        learning_rates=(),
        has_mean=True,
    )
    text, _ = make([replace(stage, cases=stage.cases[:1]), second], "--seeds", 0, 2, "--data_dir", tmp_path)
    assert not list((tmp_path / "out" / "first").glob("theirs*"))
    for row in ("ours", "other"):
        for seed in (0, 2):
            start = tmp_path / "out" / "first" / f"ours-100-0.001-{seed}"
            assert read_run(tmp_path / "out" / "second", f"{row}-two-{seed}-from-")["started_from"] == str(start)
    assert cells(text, "other") == [
        *("1,234,567", "5.000 ± 0.141", "200", "0.001", "63.0 ± 14.1", "65.0 ± 14.1", "64.0 ± 14.1"),
    ]
    assert cells(text, "most")[4:] == ["75.0", "75.0", "75.0"]
    assert "mean most (not ours)" in text
    assert (tmp_path / "results" / "test.png").exists()
    # The picture has rows that are not run, too.
    drawn: list[tuple] = []
    with monkeypatch.context() as context:
        context.setattr(report, "plot_task_scores", lambda *args: drawn.append(args))
        make([replace(stage, cases=stage.cases[:1]), second], "--seeds", 0, 2, "--data_dir", tmp_path)
    assert list(drawn[0][0]) == ["ours", "other", "most"]
    assert drawn[0][0]["most"] == {"One": 75.0, "Two": 75.0}
    (tmp_path / "more.txt").write_text("--run_name ours --model_name_or_path nobody\n")
    with pytest.raises(UserError, match="every --model_name_or_path must be one of ours, theirs"):
        make([stage, second])


def test_what_starts_from_runs_of_another_budget_has_another_folder(make, stage, tmp_path):
    (tmp_path / "more.txt").write_text("--run_name tuned --model_name_or_path ours\n")
    first = replace(stage, cases=(Case("half a minute", minutes=0.5),))
    second = replace(stage, folder="second", runs=str(tmp_path / "more.txt"), cases=stage.cases[:1], learning_rates=())
    for minutes in ((), ("--minutes", 2), ()):
        make([first, second], "--seeds", 0, "--learning_rates", 0.01, *minutes)
    make([first, second], "--seeds", 0, "--learning_rates", 0.1)
    starts = [read_metrics(path)["started_from"] for path in (tmp_path / "out" / "second").glob("tuned-100-0-from-*/")]
    names = ("ours-0.5min-3steps-0.01-0", "ours-0.5min-3steps-0.1-0", "ours-2min-12steps-0.01-0")
    assert sorted(Path(start).name for start in starts) == sorted(names)


def test_nothing_is_run_for_rows_that_are_left_out(make, stage, tmp_path):
    (tmp_path / "more.txt").write_text("--run_name tuned --model_name_or_path ours\n--run_name scratch\n")
    second = replace(stage, folder="second", runs=str(tmp_path / "more.txt"), learning_rates=())
    with pytest.raises(UserError, match="no row ours; its rows are tuned, scratch"):
        make([stage, second], "--seeds", 0, "--rows", "ours")
    text, _ = make([stage, second], "--seeds", 0, "--rows", "scratch")
    assert not (tmp_path / "out" / "first").exists()
    assert cells(text, "scratch")
    make([stage, second], "--seeds", 0)
    assert len(list((tmp_path / "out" / "first").glob("ours-*-0"))) == len(stage.cases)
    assert not list((tmp_path / "out" / "first").glob("theirs*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seeds", 1, 1], "--seeds 1 1: give each once"),
        (["--seeds", 1, 100], "100 is the seed that chooses"),
        (["--seeds", 100], "100 is the seed that chooses"),
        (["--seeds", 0, -1], "--seeds 0 -1: each must lie between 0 and 4294967295"),
        (["--run_flags=--recipe a.yaml"], "leave --recipe out; .* write its flags out"),
        (["--run_flags=--context_length 192"], "leave --context_length out; the table says it of every column"),
        (["--search_steps", 0], "--search_steps is 0"),
        (["--data_dir", "x"], "The table test takes no --data_dir"),
        (["--learning_rate", 1], "unrecognized|--learning_rate"),
        (["--run_flags", "--x 'y"], r"--run_flags .* cannot be split into words \(No closing quotation\)"),
        (["--run_flags=--max_steps 50"], "leave --max_steps out; the table says how long its runs are"),
        (["--run_flags=--num-train-epochs=2"], "leave --num_train_epochs out; the table says"),
        (["--run_flags=--learning_rate=1"], "leave --learning_rate out; each row has one of its own"),
        (["--run_flags=--x 1 --seeds 2"], "leave --seeds out; a run is one model"),
        (["--run_flags=--search"], "leave --search out; a run is one model"),
        (["--run_flags=--seed 3"], "leave --seed out; --seeds of this command"),
        (["--run_flags=--output_dir x"], "leave --output_dir out; --output_dir of this command"),
        (
            ["--run_flags=--hub-token hf_a"],
            "leave --hub_token out; the table would show it; set the variable HF_TOKEN",
        ),
        (["--run_flags=--gradient_accumulation_steps 2"], "--global_batch_size says how many sequences a step has"),
        (["--run_flags=--overwrite"], "leave --overwrite out; .* delete the folders of those that shall be"),
        (["--run_flags=--run_name x"], "leave --run_name out; it is the row's"),
        (["--run_flags=--model_type bert"], "leave --model_type out; it is the row's"),
        (["--run_flags=--do_train false"], "leave --do_train out; the table says what is run"),
        (["--run_flags=--train_file b.txt"], "leave --train_file out; give it to this command itself"),
        (["--run_flags=--task_name cola"], "leave --task_name out; the table is of its own"),
        (["--vocab_size", 7], "The table test trains no tokenizer; leave --vocab_size out"),
        (["--learning_rates", 0.1, "--search_steps", 7], "--search_steps: of one learning rate none is searched"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(make, stage, flags, message):
    with pytest.raises(UserError, match=message):
        make([stage], *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max_seq_length 64", "leave --max_seq_length out; the table says it of every column"),
        ("--global_batch_size 8", "leave --global_batch_size out; the table says it"),
        ("--vocab_size 9", "leave --vocab_size out; --vocab_size of this command says what all read"),
    ],
)
def test_what_a_table_says_of_its_columns_is_no_flag_of_all_runs(flags, message):
    with pytest.raises(UserError, match=message):
        TABLES["frontier"].with_arguments(ComparisonArguments(table="frontier", run_flags=flags))
    TABLES["frontier"].with_arguments(
        ComparisonArguments(table="frontier", run_flags="--per_device_train_batch_size 1")
    )


@pytest.mark.parametrize("name", ["lra_image", "forecasting_exchange"])  # whose recipes are those of rows
def test_passes_are_not_counted_in_steps(name):
    arguments = ComparisonArguments(table=name, run_flags="--max_steps 10")
    with pytest.raises(UserError, match="leave --max_steps out; the table counts passes, which --num_train_epochs"):
        TABLES[name].with_arguments(arguments)


def test_the_table_of_noise_is_cut_short_by_steps_and_says_so():
    table = TABLES["lra_noise"]
    with pytest.raises(UserError, match="leave --num_train_epochs out; the table counts steps, which --max_steps"):
        table.with_arguments(ComparisonArguments(table="lra_noise", run_flags="--num_train_epochs 1"))
    for steps in ("-1", "0", "5_000"):
        with pytest.raises(UserError, match=f"--max_steps is {steps}; give a whole number of steps, 1 or more"):
            table.with_arguments(ComparisonArguments(table="lra_noise", run_flags=f"--max_steps={steps}"))
    arguments = ComparisonArguments(table="lra_noise", run_flags="--max_steps 30 --global_batch_size 16")
    cut = table.with_arguments(arguments)
    for each, steps in ((table, "5,000"), (cut, "30")):
        assert each.text.format(each.stages[0].recipe(), data="x").startswith(f"{steps} steps, ")
    (stage,) = cut.stages
    planner = execution._StageRuns(stage, stage.rows(), {}, arguments, {})
    for length, expected in ((None, "30"), (7, "7")):  # the latter as a search has it
        words = planner.plan("BERT", replace(stage.cases[0], max_steps=length), 0.1).arguments
        assert [words[at + 1] for at, word in enumerate(words) if word == "--max_steps"] == [expected]


def test_a_later_recipe_takes_the_place_of_what_it_contradicts():
    recipe = TABLES["glue"].stages[1].recipe()
    assert recipe["max_steps"] == 800
    assert "num_train_epochs" not in recipe


def test_a_recipe_that_is_named_behind_one_of_its_own_wins_in_a_table_as_in_a_run():
    recipes = ("classification/short_excerpts.yaml", "classification/base.yaml")
    argv = [
        "--recipe",
        *(str(CONFIGURATION / path) for path in recipes),
        "--train_file",
        "x",
        "--model_name_or_path",
        "x",
    ]
    given, stage = parse_command(run_classification.ARGUMENTS, argv=argv).given, TABLES["authorship_frozen"].stages[-1]
    merged = replace(stage, recipes=recipes).recipe()
    assert merged["num_train_epochs"] == given["num_train_epochs"] == 5


def test_every_training_has_as_many_sequences_a_step_on_any_number_of_devices():
    for name, table in TABLES.items():
        for stage in table.stages:
            for case in stage.cases:
                flags = flag_values(case.flags)
                recipe = stage.recipe()
                assert "fit_head" in recipe or {*flags, *recipe} & {"global_batch_size"}, (name, case.title)


def test_rows_are_those_of_the_table_and_not_of_its_file():
    arguments = ComparisonArguments(table="authorship_frozen", rows=["BERT"])
    with pytest.raises(UserError, match="no row BERT; its rows are SKTformer, SKTformer-best, ModernBERT"):
        TABLES["authorship_frozen"].with_arguments(arguments)


@pytest.mark.parametrize("search_steps", [None, 1000])
def test_a_folder_that_tables_share_is_of_one_run(search_steps):
    """What is run for one table and called the same in another has the same flags there."""
    commands: dict[Path, tuple] = {}
    for name, table in TABLES.items():
        for stage in table.stages:
            planner = execution._StageRuns(stage, stage.rows(), {}, ComparisonArguments(table=name), {})
            for row, case in planner.cells:
                steps = search_steps or stage.search_steps or case.max_steps
                search = replace(stage.choosing_case(case), max_steps=steps, minutes=None)
                own = flag_values(planner.rows[row]).get("learning_rate")
                for rate in (float(own),) if own else stage.learning_rates or (None,):
                    for run in (planner.plan(row, search, rate), planner.plan(row, case, rate, 0)):
                        assert commands.setdefault(run.folder, run.arguments) == run.arguments, run.folder


@pytest.mark.parametrize("name", ["improvements_long", "improvements_books", "authorship"])
def test_a_rate_that_a_table_explains_is_its_own(name):
    with pytest.raises(UserError, match=f"The table {name} says where its one learning rate is from; leave it"):
        TABLES[name].with_arguments(ComparisonArguments(table=name, learning_rates=[5e-4]))


def test_a_table_without_a_choice_of_rates_takes_none(make, stage):
    for flag in ("--learning_rates", "--search_steps"):
        with pytest.raises(UserError, match="The table test searches no learning rate; leave --learning_rates and"):
            make([replace(stage, learning_rates=())], flag, 1)


def test_what_a_later_stage_needs_is_asked_for_before_the_first(make, stage, tmp_path):
    with pytest.raises(UserError, match="The table test needs --validation_file"):
        make([stage, replace(stage, needs=("train_file", "validation_file"))], "--train_file", tmp_path / "rows.txt")
    assert not (tmp_path / "out").exists()


def test_data_of_later_stages_are_looked_for_before_the_first(make, stage, tmp_path):
    later = replace(stage, data=("test_file", "data_dir"))
    (tmp_path / "a.txt").touch()
    (tmp_path / "[1]").mkdir()
    for flags in (["--test_file", tmp_path / "a.txt", tmp_path / "b*.txt"], ["--data_dir", tmp_path / "b.txt"]):
        with pytest.raises(UserError, match=rf"{flags[0]} .*b\*?\.txt: there is no such file or folder; check"):
            make([stage, later], *flags)
    assert not (tmp_path / "out").exists()
    text, _ = make([stage, later], "--seeds", 0, "--test_file", tmp_path / "*.txt", "--data_dir", tmp_path / "[1]")
    assert "test file" in text


@pytest.mark.parametrize(
    ("flag", "refusing"),
    [("--mlm_probability 0.3", "run_glue.py"), ("--head_learning_rate 0.1", "pretrain_mlm.py"), ("--bf16", None)],
)
def test_flags_of_all_runs_are_known_to_the_scripts_of_all_stages(flag, refusing):
    arguments = ComparisonArguments(table="glue", run_flags=flag)
    table = TABLES["glue"].with_arguments(arguments)
    if refusing is None:
        reproduce.check_flags(table)
    else:
        with pytest.raises(UserError, match=f"the table runs {refusing}, too, which has no {flag.split()[0]}; leave"):
            reproduce.check_flags(table)


@pytest.mark.parametrize("name", FRONTIERS)
def test_frontiers_are_of_books_that_are_given(name, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", name, "--output_dir", str(tmp_path / "out")])
    with pytest.raises(UserError, match=f"The table {name} needs --train_file"):
        reproduce.main()


def test_a_search_of_fewer_steps_is_not_as_long_as_all_runs(make, stage, tmp_path):
    flags = ["--run_flags", "--num_train_epochs 3 --bf16", "--search_steps", 7, "--seeds", 0]
    make([replace(stage, cases=(Case("All", "all"),))], *flags)
    search, run = (
        (tmp_path / "out" / "first" / f"ours-all-{name}.log").read_text() for name in ("7-0.1-100", "0.001-0")
    )
    assert [words in search for words in (" --bf16 ", " --max_steps 7 ", "num_train_epochs")] == [True, True, False]
    assert [words in run for words in (" --num_train_epochs 3 --bf16 ", "max_steps")] == [True, False]


def test_only_one_process_makes_a_table(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "nothing"])
    with pytest.raises(UserError, match="There is no table nothing; the tables are pretraining, "):
        reproduce.main()
    monkeypatch.setattr(sys, "argv", ["reproduce.py", ""])
    with pytest.raises(UserError, match="There is no table ; the tables are pretraining, "):
        reproduce.main()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it once"):
        reproduce.main()


def test_longer_excerpts_are_for_encoders_that_grow():
    rows = {name: set(TABLES[name].stages[-1].rows()) for name in TABLES if name.startswith("authorship_frozen")}
    assert rows["authorship_frozen"] == rows["authorship_frozen_2048"] == {"SKTformer", "SKTformer-best", "ModernBERT"}
    assert rows["authorship_frozen_512"] > {"BERT", "Nystromformer", "FNet", "Longformer"}
    folders = [TABLES[name].stages[-1].cases[0].key for name in rows]
    assert len(set(folders)) == len(rows)  # they share their pre-trainings, and no other run


def test_tables_are_not_published_unless_a_folder_is_named():
    assert all(ResultsArguments in arguments for arguments in (reproduce.ARGUMENTS, lengthening.ARGUMENTS))
    assert ResultsArguments().results_dir == "runs/results"


def test_all_rows_predict_alike():
    """The rule that logits are computed where something is predicted belongs to every row, ours or not."""
    for name in OF_TEXT:
        assert TABLES[name].stages[0].recipe()["sparse_prediction"] is True


def test_data_that_no_flag_names_are_named_by_the_runs():
    assert report._describe_data({}, [{"source": "made"}, {"source": "made"}, {}]) == "Data: made"
    assert report._describe_data({"data_dir": "a/b/c"}, [{"source": "made"}]) == "Data: data dir b/c"
    assert "documentation of the Python installation" in report._describe_data({}, [{}])


def test_a_case_of_little_time_has_a_step():
    assert Case("a second", minutes=1 / 60).in_steps(90_000).max_steps == 1


def test_of_many_files_the_first_and_the_last_are_named():
    files = [f"/data/{n}.txt" for n in range(5)]
    assert report._describe_data({"train_file": files[:4]}, []) == (
        "Data: train file data/0.txt, data/1.txt, data/2.txt, data/3.txt"
    )
    assert report._describe_data({"train_file": files}, []) == "Data: train file 5 files, data/0.txt to data/4.txt"


def test_a_tokenizer_of_another_text_gives_way(tmp_path, monkeypatch):
    planned: list = []
    monkeypatch.setattr(reproduce, "execute_runs", lambda runs, *rest: planned.extend(runs))
    arguments = ComparisonArguments(table="pretraining", output_dir=str(tmp_path))
    reproduce.train_tokenizer(TABLES["pretraining"], {"train_file": ["a.txt"]}, arguments)
    assert "--overwrite" in planned[0].arguments
