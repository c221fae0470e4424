"""The tables lra_TASK of Long Range Arena as one, with the mean over the tasks, beside the paper's."""

import statistics
from pathlib import Path

from experiments import results
from experiments.arguments import UserError
from experiments.lra.published import PUBLISHED_TASKS, ROWS
from experiments.lra.tasks import TASKS


ARGUMENTS = (results.ResultsArguments,)


def analyze(places: results.ResultsArguments) -> str:
    """
    Write `lra.md` and `.json` from the tables `lra_TASK.json` in the same folder; a row of all tasks has a mean.

    Raises a `UserError` if there is none, or one is something else.
    """
    folder = Path(places.results_dir)
    ours: dict[str, dict[str, float]] = {}
    facts = []
    for task, file in ((task, folder / f"lra_{task}.json") for task in TASKS):
        if not file.is_file():
            continue
        table = results.read_json(file)
        try:
            columns = {column["title"]: column for column in table["columns"]}
            rows = {row: of for row, of in columns["accuracy (%)"]["values"].items() if row not in ROWS}
            numbers = [columns[name]["cells"][next(iter(rows))] for name in ("length", "test examples")]
            seeds = ", ".join(map(str, table["seeds"]))
        except (KeyError, TypeError, StopIteration) as error:
            raise UserError(f"{file} is no table of `reproduce.py lra_{task}` ({error!r}); remove it.") from error
        for row, values in rows.items():
            ours.setdefault(row, {})[task] = statistics.mean(values)
        facts.append([TASKS[task].title, *numbers, seeds, f"[{file.stem}.md]({file.stem}.md)"])
    if not facts:
        raise UserError(
            f"{folder} has no lra_TASK.json; write it with `reproduce.py lra_TASK --results_dir {folder}`."
        )
    scores = {row: dict(of_row) for row, of_row in (ours | dict(ROWS)).items()}
    whole = [row for row, of_row in scores.items() if {*PUBLISHED_TASKS} <= of_row.keys()]
    means = {row: statistics.mean(scores[row][task] for task in PUBLISHED_TASKS) for row in whole}
    cells = [
        [row, *("-" if n is None else f"{n:.2f}" for n in (*map(of_row.get, TASKS), means.get(row)))]
        for row, of_row in scores.items()
    ]
    environment, command = results.describe_environment(), results.command_line()
    paragraphs = [
        "# Long Range Arena: all tasks",
        "Test accuracy in percent, means over seeds; deviations, data, versions and what was cut short stand in the "
        "tables of the tasks. FNet's figures come to 55.16, where the paper prints 54.42.",
        "\n".join(results.format_table(["", *(task.title for task in TASKS.values()), "mean"], cells)),
        "\n".join(results.format_table(["", "length", "test examples", "seeds", "table"], facts)),
        results.format_origin([environment], command),
    ]
    values = {"command": command, "environment": environment, "accuracies": scores, "means": means}
    return results.write_results(folder / "lra", values, paragraphs)
