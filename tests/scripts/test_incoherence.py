"""The incoherence of what the attention reads: Definition 1, and what is measured of models."""

import json
import sys

import numpy as np
import pytest
import torch

import analyze
from experiments import runs
from experiments.analyses import incoherence as analysis
from experiments.arguments import UserError
from experiments.lra.examples import Examples, collate
from experiments.lra.models import LraModelArguments, build_model
from experiments.lra.tasks import TASKS
from support.processes import run_in_process


def naive_incoherence(matrix: np.ndarray, rank: int) -> float:
    left, _, right = np.linalg.svd(matrix)
    rows = max(np.sum(left[i, :rank] ** 2) for i in range(len(matrix))) * len(matrix) / rank
    columns = max(np.sum(right[:rank, j] ** 2) for j in range(matrix.shape[1])) * matrix.shape[1] / rank
    return max(rows, columns)


def test_incoherence_is_the_definition():
    generator = np.random.default_rng(0)
    for shape, rank in (((12, 7), 3), ((5, 9), 5), ((8, 8), 1)):
        matrix = generator.normal(size=shape)
        assert analysis.incoherence(torch.tensor(matrix), rank).item() == pytest.approx(
            naive_incoherence(matrix, rank)
        )
    several = torch.tensor(generator.normal(size=(4, 6, 5)))
    each = [analysis.incoherence(matrix, 2) for matrix in several]
    assert torch.allclose(analysis.incoherence(several, 2), torch.stack(each))


def test_incoherence_lies_between_its_bounds():
    # Energy in one token is the worst, energy everywhere the best.
    spike, flat = torch.zeros(16, 4), torch.ones(16, 4)
    spike[3, 2] = 1
    assert analysis.incoherence(spike, 1).item() == pytest.approx(16)
    assert analysis.incoherence(flat, 1).item() == pytest.approx(1)
    with pytest.raises(ValueError, match=r"shape \(16, 4\) has no 5 singular vectors"):
        analysis.incoherence(spike, 5)


def test_smoothers_are_read_without_their_padding():
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_landmark_features": 4}
    arguments = LraModelArguments(model_config=json.dumps({**fields, "num_segments": 4, "intermediate_size": 8}))
    model = build_model(arguments, TASKS["listops"], 40, True, seed=0).eval()
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 15, length) for length in (30, 40)]
    examples = Examples.of_rows(rows, [0, 1], "here")
    together = list(analysis.smoother_inputs(model, collate([examples[0], examples[1]])))
    assert len(together) == 2  # layers
    for number in range(2):
        alone = list(analysis.smoother_inputs(model, collate([examples[number]])))
        for layer in range(2):
            for stage in range(2):
                found = together[layer][stage][number]
                assert found.shape == (len(rows[number]), 16)
                assert torch.allclose(found, alone[layer][stage][0], atol=1e-5)
    # What the first layer's Fourier convolution gives is the equations' circular sum.
    before, after = together[0][0][1].double(), together[0][1][1].double()
    kernel = torch.fft.irfft(
        torch.view_as_complex(model.sktformer.encoder.layers[0].smoother.fourier_convolution.filter.double()), n=40
    )
    segments = before.unflatten(-1, (4, 4)).mean(-1).repeat_interleave(4, dim=-1)
    positions = torch.arange(40)
    circular = kernel[:, (positions[:, None] - positions) % 40]  # (d, to, from)
    assert torch.allclose(torch.einsum("cij,jc->ic", circular, segments), after, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "pathfinder", "retrieval"], "--tasks retrieval: pairs of inputs are not measured; leave it out"),
        (["--run_flags=--model_type bert"], "--run_flags '--model_type bert': the model has no Fourier convolution"),
        (["--run_flags=--config_overrides use_smoother=false"], "the model has no Fourier convolution"),
        (["--run_flags=--config_overrides use_fourier_convolution=false"], "the model has no Fourier convolution"),
        (["--ranks", "65"], "--ranks 65: the model has 64 columns"),
        (["--run_flags=--seeds 2"], "one model of each task is measured; leave --seeds and --search out"),
        (["--run_flags=--search --max_steps -1"], "one model of each task is measured"),
        (["--run_flags=--output_dir here"], "the folder of all runs is said by --output_dir of this command"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "execute_runs", lambda *args: pytest.fail("It trains."))
    monkeypatch.setattr(sys, "argv", ["analyze.py", "incoherence", "--output_dir", str(tmp_path / "runs"), *flags])
    with pytest.raises(UserError, match=message):
        analyze.main()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_tasks_may_have_models_of_different_depths(tmp_path):
    values = {f"layer {n}, rank 4, {stage}": np.arange(1.0, 4.0) for n in (1, 2) for stage in analysis.STAGES}
    shallow = {name: of for name, of in values.items() if name.startswith("layer 1")}
    facts = {"length": 8, "test_examples": 3, "source": "a seed"}
    text = analysis.write_report(
        tmp_path / "incoherence",
        {"A": values, "B": shallow},
        {"A": facts, "B": facts},
        {"A": {"rank 4, before": 2.5}, "B": {}},
        [2],
    )
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith(("| A ", "| B "))]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["A", "layer 1, rank 4"],
        ["A", "layer 2, rank 4"],
        ["B", "layer 1, rank 4"],
    ]


def test_the_analysis_trains_measures_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs.Children, "run", run_in_process)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    flags = f"--use_cpu --model_config={json.dumps(json.dumps(sizes))} --num_generated 100 --max_steps 2"
    flags += " --preprocessing_num_workers 1 --run_name {task}"
    flags += f" --per_device_train_batch_size 4 --global_batch_size 4 --cache_dir {tmp_path / 'cache'}"
    argv = ["analyze.py", "incoherence", "--tasks", "pathfinder", "--ranks", "4", "--num_examples", "6"]
    argv += [
        "--output_dir",
        str(tmp_path / "runs"),
        "--results_dir",
        str(tmp_path / "results"),
        f"--run_flags={flags}",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    analyze.main()
    results = json.loads((tmp_path / "results" / "incoherence.json").read_text())
    values = results["values"]["Pathfinder"]
    assert {name: len(of_name) for name, of_name in values.items()} == {
        "layer 1, rank 4, before": 6,
        "layer 1, rank 4, after": 6,
    }
    assert all(1 <= value <= 256 for of_name in values.values() for value in of_name)
    assert "--run_name pathfinder" in (tmp_path / "runs" / "pathfinder.log").read_text()
    printed = capsys.readouterr().out
    assert "after 2 steps of training" in printed
    source = "pathfinder-100-seed-0.npz"
    assert f"Measured on Pathfinder: 6 examples of {source}, at most 1,024 values long." in printed
    assert results["data"] == {"Pathfinder": {"length": 1024, "test_examples": 6, "source": source}}
    assert f"{np.mean(values['layer 1, rank 4, after']):.2f} ± " in printed
    assert (tmp_path / "results" / "incoherence.png").read_bytes().startswith(b"\x89PNG")
    for bad, message in ((["--tasks", "chess"], "no such task"), (["--ranks", "0"], "at least 1")):
        monkeypatch.setattr(sys, "argv", [*argv, *bad])
        with pytest.raises(UserError, match=message):
            analyze.main()
