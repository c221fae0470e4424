"""
The incoherence of what the attention reads, before and after the Fourier convolution (Definition 1 of the paper).

The fewer tokens and columns a matrix's energy is gathered in, the better a random sample of them stands for all: the
paper's reason for a smoother.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification

from experiments import results
from experiments.arguments import CONFIGURATION, UserError, flag, parse_command, require_at_least, split_words
from experiments.lra.data import LraArguments, load_parts
from experiments.lra.examples import collate
from experiments.lra.jobs import LraTrainingArguments
from experiments.lra.models import LraModelArguments, build_model
from experiments.lra.published import published_incoherence
from experiments.lra.tasks import TASKS
from experiments.plots import open_figure
from experiments.run_folder import ARGUMENTS_FILE
from experiments.runs import Run, choose_launcher, execute_runs, read_runs
from experiments.trials import read_metrics
from modeling_sktformer.circle import Circle
from modeling_sktformer.smoothing import FourierConvolution, Smoother


RUNS = CONFIGURATION / "runs" / "lra_incoherence.txt"
STAGES = ("before", "after")


@dataclass
class IncoherenceArguments:
    """What is trained and measured."""

    tasks: list[str] = flag(
        ["text", "pathfinder"], f"Of {', '.join(name for name in TASKS if TASKS[name].per_example == 1)}."
    )
    run_flags: str = flag("", "Further flags of all runs, in quotes; {task} is the task: '--data_dir data/{task}'.")
    ranks: list[int] = flag([16, 32], "Singular vectors that count.")
    num_examples: int = flag(200, "Test examples of each task.")
    output_dir: str = flag("runs/incoherence", "Folder of the runs.")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.tasks) - set(TASKS)):
            raise UserError(f"--tasks {' '.join(unknown)}: there is no such task; there are {', '.join(TASKS)}.")
        if pairs := [task for task in self.tasks if TASKS[task].per_example > 1]:
            raise UserError(f"--tasks {' '.join(pairs)}: pairs of inputs are not measured; leave it out.")
        if min(self.ranks, default=0) < 1:
            raise UserError(f"--ranks {' '.join(map(str, self.ranks))}: give whole numbers of at least 1.")
        require_at_least(2, self, "num_examples")


ARGUMENTS = (IncoherenceArguments, results.ResultsArguments)
_GROUPS = (LraModelArguments, LraArguments, LraTrainingArguments)


def incoherence(matrices: torch.Tensor, rank: int) -> torch.Tensor:
    """
    Definition 1: mu = the larger of n / r max_i |e_i^T W|^2 and d / r max_i |e_i^T V|^2, of shape `(...)`.

    W and V hold the first r = `rank` left and right singular vectors of `matrices` `(..., n, d)`, tokens and their
    columns. Between 1, where energy is spread evenly, and max(n, d) / r; a `ValueError` if r is larger than n or d.
    """
    if rank > min(matrices.shape[-2:]):
        raise ValueError(f"A matrix of shape {tuple(matrices.shape[-2:])} has no {rank} singular vectors.")
    left, _, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    sides = (left[..., :rank], right.mT[..., :rank])
    leverages = [side.square().sum(dim=-1).amax(dim=-1) * side.shape[-2] / rank for side in sides]
    return torch.maximum(*leverages)


def analyze(arguments: IncoherenceArguments, places: results.ResultsArguments) -> str:
    """
    Write `incoherence.md`, `.json` and `.png`: train each task for the steps in the table of runs, then measure the
    input of each layer's smoother and what its Fourier convolution makes of it, on test examples. Raises a `UserError`
    if a run fails, its data cannot be had, a rank is larger than the model is wide, or the model has no convolution.
    """
    runs = {}
    for task in arguments.tasks:
        words = [word.format(task=task, configuration=CONFIGURATION) for word in read_runs(RUNS)["SKTformer"]]
        flags = (*words, *split_words("run_flags", arguments.run_flags.replace("{task}", task)))
        runs[task] = Run("run_lra.py", flags, Path(arguments.output_dir) / task)
        _check_model(task, flags, arguments)
    execute_runs(list(runs.values()), choose_launcher(None), "incoherence")
    found = {TASKS[task].title: _measure(run, arguments) for task, run in runs.items()}
    measured, data = ({title: of_task[part] for title, of_task in found.items()} for part in (0, 1))
    figures = {TASKS[task].title: published_incoherence(task) for task in runs}
    steps = sorted({read_metrics(run.folder)["history"][-1]["step"] for run in runs.values()})
    return write_report(Path(places.results_dir) / "incoherence", measured, data, figures, steps)


def _check_model(task: str, flags: Sequence[str], arguments: IncoherenceArguments) -> None:
    """Find out before training, and not after it, that there is nothing to measure."""
    command = parse_command(_GROUPS, argv=flags)
    of_model, of_task, training = command.groups
    given = f"--run_flags {arguments.run_flags!r}"
    if training.seeds > 1 or training.search:
        raise UserError(f"{given}: one model of each task is measured; leave --seeds and --search out.")
    if "output_dir" in command.given:
        raise UserError(f"{given}: the folder of all runs is said by --output_dir of this command.")
    model = build_model(of_model, TASKS[task], of_task.length, False, seed=0)
    if not any(isinstance(module, FourierConvolution) for module in model.modules()):
        remedy = "take an SKTformer with all parts of its smoother"
        raise UserError(f"{given}: the model has no Fourier convolution; {remedy}.")
    if max(arguments.ranks) > model.config.hidden_size:
        raise UserError(f"--ranks {max(arguments.ranks)}: the model has {model.config.hidden_size} columns.")


def _measure(run: Run, arguments: IncoherenceArguments) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """By layer, rank and stage, a value for each example; and what the examples are."""
    recipe = ["--recipe", str(run.folder / ARGUMENTS_FILE)]
    _, of_task, _ = parse_command(_GROUPS, argv=recipe).groups
    test = load_parts(of_task)["test"]
    if len(test) < 2:
        raise UserError(f"{of_task.task_name} has one test example, and a spread needs two; read more.")
    test = test.select(np.linspace(0, len(test) - 1, min(len(test), arguments.num_examples)).astype(int))
    model = AutoModelForSequenceClassification.from_pretrained(run.folder).eval()
    values: dict[str, list[float]] = {}
    batches = DataLoader(test, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    for batch in tqdm(batches, f"{of_task.task_name}, incoherence", disable=None):
        for layer, stages in enumerate(smoother_inputs(model, batch), start=1):
            for rank in arguments.ranks:
                for stage, matrices in zip(STAGES, stages, strict=True):
                    found = [float(incoherence(matrix, rank)) for matrix in matrices if len(matrix) >= rank]
                    values.setdefault(f"layer {layer}, rank {rank}, {stage}", []).extend(found)
    if min(map(len, values.values())) < 2:
        raise UserError(f"--ranks {max(arguments.ranks)}: hardly any input of {of_task.task_name} has so many tokens.")
    data = {"length": of_task.length, "test_examples": len(test), "source": test.source}
    return {name: np.array(of_name) for name, of_name in values.items()}, data


@torch.no_grad()
def smoother_inputs(model: Any, batch: Mapping[str, torch.Tensor]) -> Iterator[tuple[list, list]]:
    """Of each layer, without padding, `(num_tokens, hidden_size)`: what the smoother reads, and its convolution."""
    read: list[tuple[Smoother, tuple]] = []
    smoothers = [module for module in model.modules() if isinstance(module, Smoother)]
    hooks = [s.register_forward_pre_hook(lambda module, inputs: read.append((module, inputs))) for s in smoothers]
    model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
    for hook in hooks:
        hook.remove()
    for smoother, (states, sequences, _) in read:
        states, convolution = sequences.zero_padding(states), cast(FourierConvolution, smoother.fourier_convolution)
        smoothed = convolution(states, Circle(convolution.num_positions))
        lengths = [sequences.length] * len(states) if sequences.num_tokens is None else sequences.num_tokens.tolist()
        before, after = ([row[:n] for row, n in zip(of, lengths, strict=True)] for of in (states, smoothed))
        yield before, after


def write_report(
    path: Path,
    measured: dict[str, dict[str, np.ndarray]],
    data: dict[str, dict[str, Any]],
    published: dict[str, dict[str, float]],
    steps: Sequence[int],
) -> str:
    """Write a table, the values and a picture of them; gives the Markdown."""
    environment, command = results.describe_environment(), results.command_line()
    header = ["", "layer and rank", *(f"{stage}{paper}" for paper in ("", ", paper") for stage in STAGES)]
    rows = []
    for task, values in measured.items():
        for case in dict.fromkeys(name.rpartition(", ")[0] for name in values):  # tasks may differ in depth
            found = [values[f"{case}, {stage}"] for stage in STAGES]
            paper = [published[task].get(f"{case.partition(', ')[2]}, {stage}") for stage in STAGES]
            cells = [f"{v.mean():.2f} ± {v.std(ddof=1):.2f}" for v in found]
            rows.append([task, case, *cells, *("" if figure is None else f"{figure:.2f}" for figure in paper)])
    plot_distributions(measured, path.with_suffix(".png"), "Incoherence before and after the Fourier convolution")
    of = [
        f"{task}: {facts['test_examples']:,} examples of {facts['source']}, at most {facts['length']:,} values long"
        for task, facts in data.items()
    ]
    lists = {task: {name: v.tolist() for name, v in values.items()} for task, values in measured.items()}
    return results.write_results(
        path,
        {"command": command, "environment": environment, "data": data, "values": lists},
        [
            "# Incoherence before and after the Fourier convolution",
            f"Definition 1 of the paper, after {' or '.join(map(str, steps))} steps of training: mean and standard "
            "deviation over test examples. The paper's figures are after 100 steps; of which layer it does not say.",
            "\n".join(results.format_table(header, rows)),
            f"Measured on {'; '.join(of)}.",
            f"![Incoherence]({path.name}.png)",
            results.format_origin([environment], command),
        ],
    )


def plot_distributions(groups: Mapping[str, Mapping[str, np.ndarray]], path: str | Path, title: str) -> None:
    """Draw boxes with medians, quartiles and 5 to 95 % of values, a panel for each of the groups, a box for a name."""
    rows = max(len(values) for values in groups.values())
    with open_figure(path, title, (5.5 * len(groups), 0.42 * rows + 1.4), (1, len(groups)), grid="x") as (_, panels):
        for panel, (group, values) in zip(np.ravel(panels), groups.items(), strict=True):
            style: dict[str, Any] = {"whis": (5, 95), "showfliers": False, "patch_artist": True}
            boxes = panel.boxplot(list(values.values()), orientation="horizontal", **style)
            for name, box, median in zip(values, boxes["boxes"], boxes["medians"], strict=True):
                box.set_facecolor("C1" if name.endswith("after") else "0.8")
                median.set_color("black")
            panel.set_yticks(range(1, len(values) + 1), list(values))
            panel.invert_yaxis()
            panel.set(title=group, xlabel="incoherence")
