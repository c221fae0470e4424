"""The speed benchmark: baselines compute their papers' equations, failures become rows, files survive interruption."""

import json
import math
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

import benchmark
from benchmark import BenchmarkArguments
from experiments.arguments import UserError, parse_args
from experiments.benchmark import measurement, profile
from experiments.benchmark.counts import SKTformerVariant, count_matrix_products, count_operations, count_step
from experiments.benchmark.measurement import (
    MAX_CALLS,
    OUT_OF_MEMORY,
    Probe,
    StepFailure,
    median_ratio,
    probe_step,
    time_interleaved,
    time_step,
)
from experiments.benchmark.models import (
    MODELS,
    Case,
    LinformerSelfAttention,
    Setting,
    build_config,
    build_model,
    draw_orthogonal_features,
    make_inputs,
    make_step,
    performer_attention,
    unsupported_reason,
)
from modeling_sktformer import folded_attention, folded_stem


TINY = Setting(
    size="lra", num_layers=1, batch_size=2, precision="float32", autocast=False, compile=False, device="cpu"
)


def softmax_attention(query, key, value):
    return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) @ value


def make_linformer(length: int, projected_length: int) -> LinformerSelfAttention:
    config = BertConfig(hidden_size=8, num_attention_heads=2, max_position_embeddings=length)
    config.projected_length = projected_length
    return LinformerSelfAttention(config).double().eval()


def test_linformer_computes_its_equation():
    attention, states = make_linformer(12, 5), torch.randn(3, 12, 8, dtype=torch.float64)
    output, _ = attention(states)
    for head in range(2):
        columns = slice(4 * head, 4 * head + 4)
        query, key, value = (f(states)[..., columns] for f in (attention.query, attention.key, attention.value))
        expected = softmax_attention(query, attention.key_shortening @ key, attention.value_shortening @ value)
        torch.testing.assert_close(output[..., columns], expected)


def test_linformer_that_shortens_nothing_is_full_attention():
    attention, states = make_linformer(12, 12), torch.randn(3, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        attention.key_shortening.copy_(torch.eye(12))
        attention.value_shortening.copy_(torch.eye(12))
    query, key, value = (attention.split_heads(f(states)) for f in (attention.query, attention.key, attention.value))
    expected = softmax_attention(query, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(states)[0], expected)


def test_performer_computes_its_equation():
    query, key, value = torch.randn(3, 2, 2, 10, 4, dtype=torch.float64)
    features = draw_orthogonal_features(6, 4).double()

    def phi(states):
        states = states / 4**0.25
        return (states @ features.mT - states.square().sum(-1, keepdim=True) / 2).exp() / 6**0.5

    kernel = phi(query) @ phi(key).mT
    expected = kernel @ value / kernel.sum(-1, keepdim=True)
    torch.testing.assert_close(performer_attention(query, key, value, features), expected, rtol=1e-4, atol=1e-5)


def test_performer_approaches_softmax_attention_with_more_features():
    query, key, value = 0.3 * torch.randn(3, 1, 2, 20, 8, dtype=torch.float64)
    expected = softmax_attention(query, key, value)

    def error(num_features):
        draws = [draw_orthogonal_features(num_features, 8).double() for _ in range(10)]
        return sum(float((performer_attention(query, key, value, w) - expected).norm()) for w in draws)

    errors = [error(number) for number in (16, 256, 4096)]  # it falls with the square root of their number
    assert errors[1] < errors[0] / 2.5
    assert errors[2] < errors[1] / 2.5


def test_random_features_are_orthogonal_in_blocks():
    features = draw_orthogonal_features(12, 8)
    assert features.shape == (12, 8)
    products = features[:8] @ features[:8].mT
    torch.testing.assert_close(products, products.diagonal().diag(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_and_infers(name):
    for case in (Case("training", 0.1), Case("inference", 0.0)):
        make_step(name, TINY, 128, case)()


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_same_sizes_and_dropouts(name):
    config = build_config(name, TINY, 64, 0.3)
    model = build_model(name, config)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} <= {0.3}
    assert {value for field, value in vars(config).items() if "dropout" in field} == {0.3}
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size, config.num_labels) == (64, 1, 512, 2)
    assert getattr(config, "classifier_pooling", "mean") == "mean"
    if name == "nystromformer":
        assert config.num_landmarks < config.segment_means_seq_len == 64


@pytest.mark.parametrize("folding_overhead", [0, 1 << 40], ids=["folded", "direct"])
@pytest.mark.parametrize("name", ["bert-eager", "fnet", "sktformer", "nystromformer", "reformer"])
def test_counted_operations_are_those_that_are_run(name, folding_overhead, monkeypatch):
    monkeypatch.setattr(folded_attention, "FOLDING_OVERHEAD", folding_overhead)
    config = build_config(name, TINY, 128, 0.0)
    model = build_model(name, config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        # The counter hooks all modules to say which one an operation belongs to.
        monkeypatch.setattr(nn.modules.module, "_has_any_global_hook", lambda: False)
        model(make_inputs(TINY, 128)[0])
    counted = count_operations(name, config, TINY.batch_size, 128)
    assert 2 * count_matrix_products(counted) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_operations_of_bert_by_hand():
    config = build_config("bert-sdpa", TINY, 128, 0.0)
    projections, attention, feed_forward = 4 * 128 * 64 * 64, 2 * 128 * 128 * 64, 2 * 128 * 64 * 128
    head = 64 * 64 + 64 * 2
    counted = count_operations("bert-sdpa", config, 2, 128)
    assert sum(counted.values()) == 2 * (projections + attention + feed_forward + head)
    assert count_step(counted, "bert-sdpa", "training") == 3 * sum(counted.values())


def test_variants_of_sktformer_are_counted():
    config = build_config("sktformer", TINY, 128, 0.0)
    plain = count_operations("sktformer", config, 2, 128, SKTformerVariant(fold_attention=False))
    folded = count_operations("sktformer", config, 2, 128, SKTformerVariant(fold_attention=True, fold_stem=True))
    assert plain["stem"] == 2 * 128 * 128 * 64 * 3 == 2 * folded["stem"]
    assert folded["filter products"] == 4 * 2 * 8 * 64 * 65
    # What convolves one sequence, in products at N / 2 + 1 frequencies of two parts.
    assert folded["folding the stem"] == plain["stem"] / 2 / 2 / 128 * 2 * 65
    filtered = count_operations("sktformer", config, 2, 128, SKTformerVariant(filter_minimally=True))
    assert filtered["stem"] == plain["stem"] / 2
    assert plain["queries"] == plain["output projection"] == 2 * 128 * 64 * 64
    assert "queries" not in folded
    assert "output projection" not in folded


def test_ratios_are_taken_in_each_round():
    own = [{"wall": wall, "cpu": 2 * wall} for wall in (1.0, 10.0, 2.0)]
    baseline = [{"wall": wall, "cpu": wall} for wall in (3.0, 20.0, 8.0)]
    row = benchmark.summarise(own, baseline)
    assert (row["speed_ratio"], row["cpu_speed_ratio"], row["step_time_ms"]) == (3.0, 1.5, 2000.0)
    # A slow step took part in the first round alone.
    assert median_ratio(baseline, own[:1]) == 3.0


def test_slow_steps_take_part_in_fewer_rounds():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "AB"}
    times = time_interleaved(steps, 3, warmup=2, fewer_rounds={"B": 1})
    # From its second turn on a step is known to be short, and taken once more before it counts.
    assert "".join(calls) == "A" + "AAB" + "AABB" + "AA" + "AA"
    assert [len(times[name]) for name in "AB"] == [3, 1]


def test_long_steps_are_called_once_in_a_turn(monkeypatch):
    monkeypatch.setattr(measurement, "SHORT_STEP_S", 0.0)
    calls: list[str] = []
    time_interleaved({name: partial(calls.append, name) for name in "AB"}, 2, warmup=1)
    assert "".join(calls) == "AB" * 3


def test_a_busy_machine_is_said():
    row = {"reason": None, "step_time_ms": 100.0, "step_cpu_time_ms": 100.0}
    section = {"key": {"device": "cpu"}, "environment": {"threads": 2}, "rows": [{"reason": "over 60 s"}, row]}
    assert "50 %" in benchmark.busy_machine_warning(section)[0]
    assert benchmark.busy_machine_warning({**section, "environment": {"threads": 1}}) == []
    assert benchmark.busy_machine_warning({**section, "key": {"device": "cuda"}}) == []


def test_what_was_too_much_is_not_tried_on_longer_inputs():
    row = {"length": 512, "reason": None, "step_time_ms": 30_000.0}
    assert benchmark.reason_from_shorter([row], 1024, 60.0) is None
    assert benchmark.reason_from_shorter([row], 2048, 60.0) == "over 60 s"
    assert benchmark.reason_from_shorter([{**row, "reason": OUT_OF_MEMORY}], 1024, 60.0) == OUT_OF_MEMORY
    assert benchmark.reason_from_shorter([{**row, "reason": "not a multiple of 64"}], 1024, 60.0) is None
    assert benchmark.reason_from_shorter([], 1024, 60.0) is None


def allocate(num_bytes):
    """For the process that measures memory."""
    return lambda: torch.ones(num_bytes, dtype=torch.uint8)


def test_memory_is_measured_and_limited_in_a_process_of_its_own():
    probe = probe_step(allocate, 2**27, preload=("torch",))
    assert 2**27 <= probe.peak_memory < 2**27 + 2**25
    with pytest.raises(StepFailure, match=f"^{OUT_OF_MEMORY}$"):
        probe_step(allocate, 2**29, memory_limit=2**28, preload=("torch",))


def make_sleep(folder, seconds):
    """A step of a known time, which leaves the number of its process."""

    def step():
        with Path(folder, str(os.getpid())).open("a") as file:
            file.write("x")
        time.sleep(seconds)

    return step


@pytest.mark.parametrize(("seconds", "calls"), [(0.01, 2 + MAX_CALLS), (0.6, 4)])
def test_each_round_is_timed_in_a_process_of_its_own(tmp_path, seconds, calls):
    step = partial(time_step, make_sleep, str(tmp_path), seconds, warmup=2, preload=("torch",))
    times = time_interleaved({"sleep": step}, 2, warmup=0)["sleep"]
    assert [entry["wall"] for entry in times] == pytest.approx([seconds] * 2, abs=0.05)
    assert all(entry["cpu"] < 0.05 for entry in times)
    assert [len(path.read_text()) for path in tmp_path.iterdir()] == [calls] * 2


def test_a_step_that_cannot_be_taken_elsewhere_says_why():
    with pytest.raises(StepFailure, match="unknown scheme"):
        time_step(make_failure, preload=("torch",))


def make_failure():
    raise ValueError("unknown scheme")


class QuickBenchmark:
    """Runs the benchmark in a folder with steps that do nothing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: list[tuple[str, int]] = []  # models and lengths of the last run
        self.fail_at: tuple[str, int] | None = None
        self.error: BaseException = RuntimeError("Kernel | is missing. Get one.")

    def prepare_step(self, arguments, name, length, case):
        self.made.append((name, length))
        if self.fail_at == (name, length):
            raise self.error
        return lambda: None

    def __call__(self, *flags: str) -> list[dict]:
        lengths = () if "--lengths" in flags else ("--lengths", "64", "100")
        common = (
            "--models",
            "bert-sdpa",
            "nystromformer",
            "--num_layers",
            "1",
            "--modes",
            "training",
            "--rounds",
            "2",
        )
        argv = [*common, *lengths, "--device", "cpu", "--dropout", "0", "--results_dir", str(self.folder), *flags]
        (arguments,) = parse_args([BenchmarkArguments], argv)
        self.made.clear()
        benchmark.benchmark(arguments, self.folder / "speed")
        return json.loads((self.folder / "speed.json").read_text())["sections"]


@pytest.fixture
def quick(monkeypatch, tmp_path):
    run = QuickBenchmark(tmp_path)
    monkeypatch.setattr(benchmark, "prepare_step", run.prepare_step)
    monkeypatch.setattr(benchmark, "probe_model", lambda *arguments: Probe(2**20, 0.01))
    return run


def test_tables_and_pictures_are_written(quick):
    (section,) = quick("--lengths", "64", "128")
    assert section["finished"]
    assert [(row["model"], row["length"], row["rounds"]) for row in section["rows"]] == [
        ("bert-sdpa", 64, 2),
        ("nystromformer", 64, 2),
        ("bert-sdpa", 128, 2),
        ("nystromformer", 128, 2),
    ]
    text = (quick.folder / "speed.md").read_text()
    assert "| model | 64 | 128 |" in text
    assert "| BERT (SDPA) | 1 | 1 |" in text  # MiB
    assert "- Nyströmformer: " in text
    assert "- Longformer: " not in text
    (picture,) = quick.folder.glob("*.png")
    assert f"]({picture.name})" in text
    assert picture.stat().st_size > 10_000


def test_failures_become_values_of_the_table(quick):
    quick.fail_at = ("bert-sdpa", 64)
    (section,) = quick()
    reasons = {(row["model"], row["length"]): row["reason"] for row in section["rows"]}
    assert reasons == {
        ("bert-sdpa", 64): "Kernel / is missing",
        ("bert-sdpa", 100): None,
        ("nystromformer", 64): None,
        ("nystromformer", 100): None,
    }
    assert [
        row["speed_ratio"] for row in section["rows"] if (row["model"], row["length"]) == ("nystromformer", 64)
    ] == [None]
    assert "| BERT (SDPA) | Kernel / is missing | " in (quick.folder / "speed.md").read_text()


def test_a_step_that_fails_later_becomes_a_value_too(quick, monkeypatch):
    def fail():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(
        benchmark, "prepare_step", lambda _, name, *others: fail if name == "nystromformer" else lambda: None
    )
    (section,) = quick()
    assert {row["reason"] for row in section["rows"] if row["model"] == "nystromformer"} == {OUT_OF_MEMORY}
    assert {row["reason"] for row in section["rows"] if row["model"] == "bert-sdpa"} == {None}


def test_lengths_that_a_model_cannot_take_are_said():
    assert unsupported_reason("nystromformer", 200) == "not a multiple of 64"
    assert unsupported_reason("reformer", 200) == "not a multiple of 64"
    assert [unsupported_reason(name, 192) for name in MODELS] == [None] * len(MODELS)


def test_an_interrupted_run_goes_on_where_it_was_cut(quick):
    quick.fail_at, quick.error = ("nystromformer", 100), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        quick()
    assert "Unfinished" in (quick.folder / "speed.md").read_text()
    quick.fail_at = None
    (section,) = quick()
    assert quick.made == [("bert-sdpa", 100), ("nystromformer", 100)]
    assert len(section["rows"]) == 4
    assert "Unfinished" not in (quick.folder / "speed.md").read_text()
    quick()  # finished: measured anew
    assert len(quick.made) == 4


def test_an_interrupted_run_of_other_flags_is_measured_anew(quick):
    quick.fail_at, quick.error = ("nystromformer", 100), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        quick()
    quick.fail_at = None
    (section,) = quick("--warmup", "1")
    assert len(quick.made) == len(section["rows"]) == 4


def test_sections_are_merged_and_replaced(quick):
    quick()
    with pytest.raises(UserError, match="--merge"):
        quick("--batch_size", "2")
    assert [entry["key"]["batch_size"] for entry in quick("--batch_size", "2", "--merge")] == [32, 2]
    sections = quick("--merge", "--lengths", "64")
    assert [(entry["key"]["batch_size"], len(entry["rows"])) for entry in sections] == [(32, 2), (2, 4)]
    text = (quick.folder / "speed.md").read_text()
    assert text.index("## LRA model, 1 layer, batch 32") < text.index("## LRA model, 1 layer, batch 2,")
    assert len(list(quick.folder.glob("*.png"))) == 2


def test_results_of_another_script_are_left_alone(quick):
    (quick.folder / "speed.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match="no results of this script"):
        quick()


@pytest.mark.parametrize(
    "flags",
    [
        ["--models", "gpt"],
        ["--modes", "testing"],
        ["--lengths", "8"],
        ["--batch_size", "0"],
        ["--num_layers", "0"],
        ["--dropout", "1"],
        ["--rounds", "0"],
        ["--warmup", "-1"],
        ["--models", "fnet"],
        ["--autocast"],
        ["--profile", "--compile"],
    ],
)
def test_mistakes_are_said_in_one_line(flags):
    with pytest.raises(UserError, match=flags[0] if flags != ["--models", "fnet"] else "--baseline") as error:
        parse_args([BenchmarkArguments], flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("folded", [False, True])
def test_profile_parts_add_up_to_the_step(folded, monkeypatch):
    monkeypatch.setattr(folded_attention, "FOLDING_OVERHEAD", 0 if folded else 1 << 40)
    monkeypatch.setattr(folded_stem, "MAX_NARROW_SIZE", 0 if folded else 1000)
    monkeypatch.setattr(folded_stem, "MIN_SEQUENCES", 1)
    parts = profile.profile_step(TINY, 64, Case("training", 0.1), rounds=1, matmul_rate=1e9)
    names = [row["part"] for row in parts]
    assert names[-3:] == ["between the parts", "forward and backward pass", "optimizer"]
    assert {"feed-forward with its norm", "layer norms"} <= set(names)
    assert ("smoother, its stem folded" in names) == folded
    assert ({"Fourier convolution", "convolution stem"} <= set(names)) != folded
    assert ("attention with its projections" in names) == folded
    assert ("projections" in names) != folded
    for key in ("forward_ms", "backward_ms", "gflop"):
        assert sum(row[key] for row in parts[:-2]) == pytest.approx(parts[-2][key])
    config = build_config("sktformer", TINY, 64, 0.0)
    assert parts[-2]["gflop"] == pytest.approx(6e-9 * sum(count_operations("sktformer", config, 2, 64).values()))
    # Nothing that is counted belongs to no part.
    assert parts[-3]["gflop"] == pytest.approx(0, abs=1e-9)
    results = {
        "key": {**vars(TINY), "dropout": [0.1]},
        "rounds": 1,
        "matmul_gflops": 1.0,
        "environment": {"python": "3", "torch": "2", "transformers": "5", "device": "x", "threads": 1, "commit": "c"},
        "lengths": [{"length": 64, "parts": parts}],
    }
    text = profile.format_profile(results, "LRA model")
    assert "## 64 tokens" in text
    assert text.count("\n| ") == len(parts) + 1
