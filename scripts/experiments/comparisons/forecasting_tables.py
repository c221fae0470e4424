"""The tables of forecasting: a public series each, with what needs no training and what was published."""

from experiments.comparisons.stages import Case, Measure, Stage, Table
from experiments.forecasting.baselines import NAMES
from experiments.forecasting.benchmarks import BENCHMARKS


def _forecasting(task: str) -> Table:
    """Forecasters of a public series at its horizons, beside what needs no training and what was published."""
    benchmark = BENCHMARKS[task]

    def errors(title: str, key: str) -> Measure:
        rows = [(name, f"baselines.test.{name}.{key}") for name in NAMES]
        rows += [(name, f"published.{name}.{key}") for name in benchmark.published]
        return Measure(title, f"eval_test_{key}", "lowest", format=".4f", baselines=tuple(rows))

    flags = ("--task_name", task, "--global_batch_size", "32")  # of the recipes, on any number of devices
    stage = Stage(
        folder=f"forecasting-{task}",
        script="run_forecasting.py",
        runs="forecasting_exchange.txt" if task == "exchange" else "forecasting_compare.txt",
        recipes=(),
        data=("data_dir",),
        cases=tuple(
            Case(f"{horizon} steps", str(horizon), (*flags, "--prediction_length", str(horizon)))
            for horizon in benchmark.horizons
        ),
        measures=(errors("MAE", "mae"), errors("", "mse")),
        result="horizon-{case}/metrics.json",
        learning_rates=(3e-4, 1e-3, 3e-3),
        rate_case=0,
        has_mean=True,
        label="MSE",
        floors=NAMES,
    )
    text = (
        f"{benchmark.title}, contexts of {benchmark.context_length} steps: errors on scaled values over all test "
        "windows, MSE where the column does not say MAE. Each row starts from the recipe that its line in "
        f"`configuration/runs/{stage.runs}` names. SKTformer keeps its recipe's learning rate, others get the best of "
        "three at the first horizon. The model that is tested is the best on validation."
    )
    walk = " Nothing forecasts a random walk, which exchange rates almost are, better than its last value: most of "
    walk += "what is learnt beyond is noise."
    notes = (
        "- last value, seasonal naive: the last value or season, repeated; linear: least squares of the context with "
        "a ridge chosen on validation, the same map for every channel, as DLinear is."
        + (walk if task == "exchange" else ""),
        "- SKTformer has layer norm in its stem, where the paper has batch norm over positions"
        + (", but for SKTformer-code." if task == "exchange" else "."),
        "- Test errors were seen while our recipes were chosen"
        + (
            ", the one made for Exchange by validation errors at all horizons, where other rows search a rate at one."
            if task == "exchange"
            else ", on ETTh1 those of other recipes."
        ),
        "- Published rows: "
        + (
            "FEDformer's from its own paper, the others as later papers reprint them; their"
            if task == "etth1"
            else "the paper's Table 2 and reprints of the others, whose"
        )
        + " test may leave out the last windows.",
    )
    return Table(f"Forecasts of {benchmark.title} compared", text, (stage,), notes)


TABLES = {f"forecasting_{task}": _forecasting(task) for task in BENCHMARKS}
