"""Counts of a step: those of layers that can be worked out by hand."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import benchmark
from experiments.benchmark.counts import count_layer, count_row, count_step
from experiments.benchmark.models import Setting, Workload, build_config, build_model
from experiments.counting import OperatorCounter, count_encoder


SETTING = Setting(num_layers=None, precision="bfloat16", compile=False, device="meta")
NUM_TOKENS, WIDTH, INNER, NUM_HEADS = 4 * 64, 64, 128, 2  # of the size lra


def workload(model: str) -> Workload:
    return Workload(model, "lra", 64, 512, 4, "training", 0.0)


def count(function, *shapes, dtype=torch.float32):
    """Count a function of meta tensors of some shapes."""
    tensors = [torch.empty(shape, device="meta", dtype=dtype) for shape in shapes]
    with OperatorCounter() as counter:
        function(*tensors)
    return counter


def count_layers(work: Workload, num_layers: int) -> float:
    """Count the encoder of a model of so many layers."""
    found = count_encoder(build_model(work.model, build_config(work, num_layers)), work.batch_size, work.length)
    assert found is not None
    return found


def test_a_linear_layer_by_hand():
    layer = nn.Linear(8, 3, device="meta")
    inputs = torch.empty(5, 8, device="meta", requires_grad=True)
    with OperatorCounter() as counter:
        output = layer(inputs)
    assert (counter.operators, counter.flops, counter.other_bytes) == (1, 2 * 5 * 8 * 3, 0)
    assert counter.product_bytes == 4 * (5 * 8 + 8 * 3 + 3 + 5 * 3)
    with counter:
        output.backward(torch.empty(5, 3, device="meta"))
    # Two products, and the sum over the inputs that is the gradient of the bias.
    assert (counter.operators, counter.flops) == (4, 3 * 2 * 5 * 8 * 3)
    assert counter.other_bytes == 4 * (5 * 3 + 3)


def test_views_and_empty_tensors_are_no_work():
    counter = count(lambda x: torch.empty_like(x.view(2, 6).mT[1:].unsqueeze(0)), (3, 4))
    assert (counter.operators, counter.other_bytes) == (0, 0)
    assert count(lambda x: x.mT.contiguous(), (3, 4)).operators == 1


def test_bytes_are_those_that_are_read_and_written():
    assert count(lambda x, y: x.expand(5, 4) + y, (1, 4), (5, 4)).other_bytes == 4 * (4 + 20 + 20)
    indices = torch.zeros(2, dtype=torch.long, device="meta")
    assert count(lambda table: table.index_select(0, indices), (100, 4)).other_bytes == 2 * 4 * 8 + 2 * 8
    assert count(lambda x, y: x.copy_(y), (5, 4), (5, 4)).other_bytes == 4 * 2 * 20
    assert count(lambda x: x.mul_(2), (5, 4)).other_bytes == 4 * 2 * 20
    rows = torch.zeros(2, 4, dtype=torch.long, device="meta")
    added = count(lambda x, y: x.scatter_add_(0, rows, y), (100, 4), (2, 4))
    assert added.other_bytes == 3 * 4 * 8 + 8 * 8


@pytest.mark.parametrize("length", [8, 12])
def test_transforms_take_2_5_n_log_n_operations_of_real_values(length):
    real = 3 * 2.5 * length * math.log2(length)
    assert count(torch.fft.rfft, (3, length)).flops == pytest.approx(real)
    spectrum = (3, length // 2 + 1)
    assert count(lambda x: torch.fft.irfft(x, n=length), spectrum, dtype=torch.complex64).flops == pytest.approx(real)
    assert count(torch.fft.fft, (3, length), dtype=torch.complex64).flops == pytest.approx(2 * real)
    both = count(lambda x: torch.fft.fftn(x, dim=(0, 1)), (4, length), dtype=torch.complex64).flops
    assert both == pytest.approx(5 * 4 * length * math.log2(4 * length))


def test_products_of_complex_numbers_are_four_multiply_adds():
    assert count(torch.mul, (5, 3), (5, 3), dtype=torch.complex64).flops == 2 * 4 * 15
    assert count(torch.mul, (5, 3), (5, 3)).flops == 0


def test_grouped_convolutions_take_twice_as_much_backward():
    layer = nn.Conv1d(8, 8, 3, padding=1, groups=8, device="meta")
    inputs = torch.empty(2, 8, 10, device="meta", requires_grad=True)
    with OperatorCounter() as counter:
        output = layer(inputs)
        assert counter.flops == 2 * 2 * 8 * 10 * 3
        output.sum().backward()
    assert counter.flops == 3 * 2 * 2 * 8 * 10 * 3


@pytest.mark.parametrize("name", ["bert-eager", "bert-sdpa"])
def test_a_layer_of_bert_by_hand(name):
    layer = count_layer(workload(name), SETTING)
    attention = 2 * 64 * WIDTH
    # The fused backward pass has five products of the size of one of the forward pass's two, the plain one four.
    passes = 3 if name == "bert-eager" else 3.5
    assert layer["multiply_adds"] == 3 * (4 * WIDTH**2 + 2 * WIDTH * INNER) + passes * attention
    if name == "bert-sdpa":
        # Six products, attention, activation, two sums and two norms.
        assert layer["forward_operators"] == 12
        # Of the width: inputs, queries, keys, values, context, two sums (the norms' inputs) and what the first norm
        # returns, the second's being the next layer's inputs. Of the inner width: before and after the activation.
        states = NUM_TOKENS * 2 * (8 * WIDTH + 2 * INNER)
        statistics = NUM_TOKENS * 4 * (2 * 2 + NUM_HEADS)  # mean and deviation of two norms, sums of exponentials
        assert layer["kept_bytes"] == pytest.approx(states + statistics, abs=64)


@pytest.mark.parametrize("name", ["sktformer", "bert-sdpa", "modernbert", "nystromformer"])
def test_masks_cost_something(name):
    work = replace(workload(name), positions=64)  # the only length that Nyströmformer takes
    plain, masked = (count_row(work, SETTING, is_masked) for is_masked in (False, True))
    assert plain["reason"] is masked["reason"] is None
    assert masked["forward_operators"] > plain["forward_operators"]
    assert masked["other_bytes"] > plain["other_bytes"]
    assert masked["multiply_adds"] == plain["multiply_adds"]


@pytest.mark.parametrize("name", ["sktformer", "bert-sdpa", "nystromformer", "fnet"])
def test_an_encoder_is_counted_as_its_layers(name):
    work = replace(workload(name), positions=64)
    layer = count_layer(work, replace(SETTING, precision="float32"))["multiply_adds"]
    one, three = (count_layers(work, layers) for layers in (1, 3))
    assert three - one == pytest.approx(2 * NUM_TOKENS * layer, rel=1e-9)


def test_windows_are_counted_without_global_tokens():
    work = replace(workload("longformer"), length=512)
    one, three = (count_layers(work, layers) for layers in (1, 3))
    projections = 4 * WIDTH**2 + 2 * WIDTH * INNER
    full = projections + 2 * 512 * WIDTH
    # Blocks of a window on either side compute more scores than full attention of 512 tokens has.
    assert 3 * projections < (three - one) / (2 * 4 * 512) < 3 * 2 * full


def test_an_encoder_that_needs_values_is_not_counted(monkeypatch):
    model = build_model("fnet", build_config(replace(workload("fnet"), positions=64), 1))
    forward = type(model.base_model).forward

    def forward_by_values(self, input_ids):
        return forward(self, input_ids[:, : input_ids.max().item() + 2.5])

    assert count_encoder(model, 4, 64) is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(model.base_model), "forward", forward_by_values)
        assert count_encoder(model, 4, 64) is None

    def make_by_values(self, config):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(type(model.base_model), "__init__", make_by_values)
    assert count_encoder(model, 4, 64) is None


def test_what_takes_no_mask_says_so():
    assert count_row(workload("fnet"), SETTING, masked=True)["reason"] == "takes no mask"
    assert count_row(workload("fnet"), SETTING, masked=False)["reason"] is None


def test_whole_steps_are_counted_for_the_speed_tables():
    steps = replace(SETTING, precision="float32", num_layers=2)
    training = count_step(workload("bert-eager"), steps)
    inference = count_step(replace(workload("bert-eager"), mode="inference"), steps)
    head = 4 * (WIDTH**2 + 2 * WIDTH)
    layer = NUM_TOKENS * (4 * WIDTH**2 + 2 * WIDTH * INNER + 2 * 64 * WIDTH)
    assert inference["multiply_adds"] == 2 * layer + head
    assert training["multiply_adds"] == 3 * inference["multiply_adds"]
    assert inference["backward_operators"] == inference["kept_bytes"] == 0


def test_counts_are_written(tmp_path, monkeypatch):
    flags = ["--count", "--size", "lra", "--lengths", "64", "--models", "sktformer", "fnet"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *flags, "--batch_size", "4", "--results_dir", str(tmp_path)])
    benchmark.main()
    (section,) = json.loads((tmp_path / "counts.json").read_text())["sections"]
    text = (tmp_path / "counts.md").read_text()
    assert section["finished"]
    assert not section["environment"]["is_gpu"]
    assert [(row["model"], row["masked"], row["reason"]) for row in section["rows"]] == [
        ("sktformer", False, None),
        ("sktformer", True, None),
        ("fnet", False, None),
        ("fnet", True, "takes no mask"),
    ]
    assert "### LRA model, 4 x 64 tokens" in text
    lines = [line for line in text.splitlines() if line.startswith(("| SKT", "| FNet"))]
    for row, line in zip(section["rows"], lines, strict=True):
        assert row["positions"] == 512
        cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
        if row["reason"] is None:
            kinds = ("product_bytes", "other_bytes", "kept_bytes")
            assert cells[:2] == [f"{row[key]:g}" for key in ("forward_operators", "backward_operators")]
            assert cells[2:5] == [f"{row[kind] / 2**20:,.0f}" for kind in kinds]
            assert cells[5] == f"{row['multiply_adds'] / 1e6:.2f}"
        else:
            assert cells == ["takes no mask", *[""] * 5]


def test_plain_code_is_counted_alike_in_every_batch():
    (alone, together), (plain_alone, plain_together) = (
        [
            count_layer(replace(workload(name), size="base", length=512, batch_size=size), SETTING)["multiply_adds"]
            for size in (1, 32)
        ]
        for name in ("sktformer", "sktformer-eager")
    )
    assert plain_alone == plain_together > alone > together


def test_a_gpu_is_counted_as_it_computes():
    small = replace(workload("sktformer"), size="base", length=512, positions=512, batch_size=8)
    plain = count_step(replace(small, model="sktformer-eager"), replace(SETTING, num_layers=1))
    on_gpu, on_processor = (
        count_step(small, replace(SETTING, num_layers=1, device=device)) for device in ("cuda", "cpu")
    )
    assert on_gpu == plain
    assert on_gpu["multiply_adds"] > on_processor["multiply_adds"]
    assert on_gpu["forward_operators"] < on_processor["forward_operators"]


def test_compiled_models_are_counted_in_the_form_of_a_graph():
    """Which convolves the columns, as plain code does, and reads the attention's weights, as processors do."""
    on_processor, compiled, plain = (
        count_layer(replace(workload(name), size="base", length=512, positions=512), setting)["multiply_adds"]
        for name, setting in (
            ("sktformer", SETTING),
            ("sktformer", replace(SETTING, compile=True)),
            ("sktformer-eager", replace(SETTING, compile=True)),
        )
    )
    assert on_processor < compiled < plain


def test_defaults_of_counting():
    arguments = benchmark.BenchmarkArguments(count=True)
    workloads = [workload for cell in arguments.cells for workload in cell.workloads]
    assert {(each.length, each.batch_size, each.positions) for each in workloads} == {(512, 32, 512), (4096, 4, 4096)}
    models = ["sktformer", "sktformer-eager", "sktformer-sdpa", "bert-sdpa", "modernbert", "nystromformer", "fnet"]
    assert [each.model for each in workloads[:7]] == models
    assert {(each.size, each.mode, each.dropout) for each in workloads} == {("base", "training", 0.0)}
    assert (arguments.setting.precision, arguments.setting.device) == ("bfloat16", "meta")
