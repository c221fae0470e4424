"""The benchmark's models: baselines compute their papers' equations, all have one size, counts are what is run."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from experiments.benchmark.models import (
    MODELS,
    SIZES,
    Setting,
    Workload,
    build_config,
    build_model,
    build_sizes,
    draw_orthogonal_features,
    linformer_attention,
    make_inputs,
    make_step,
    performer_attention,
    unsupported_reason,
)
from modeling_sktformer import load_preset
from modeling_sktformer.kernels import Dropout


TINY = Setting(num_layers=1, precision="float32", compile=False, device="cpu")


def workload(model: str, length: int = 128, dropout: float = 0.0, mode: str = "training") -> Workload:
    return Workload(model, "lra", length, length, 2, mode, dropout)


def softmax_attention(query, key, value):
    return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) @ value


def test_linformer_computes_its_equation():
    query, key, value = torch.randn(3, 3, 2, 12, 4, dtype=torch.float64)
    module = SimpleNamespace(
        key_shortening=torch.randn(5, 12, dtype=torch.float64),
        value_shortening=torch.randn(5, 12, dtype=torch.float64),
    )
    expected = softmax_attention(query, module.key_shortening @ key, module.value_shortening @ value)
    output, _ = linformer_attention(module, query, key, value, None, dropout=0.0)
    torch.testing.assert_close(output, expected.transpose(1, 2))


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


@pytest.mark.parametrize("name", ["linformer", "performer"])
def test_layers_of_bert_attend_in_our_way(name):
    model = build_model(name, build_config(workload(name, 32), 2)).eval()
    inputs = make_inputs(workload(name, 32), TINY)["input_ids"]
    attention = model.bert.encoder.layer[0].attention.self
    states = model.bert.embeddings(inputs)
    query, key, value = (
        layer(states).unflatten(-1, (2, 32)).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    if name == "performer":
        expected = performer_attention(query, key, value, attention.features)
    else:
        expected = softmax_attention(query, attention.key_shortening @ key, attention.value_shortening @ value)
    torch.testing.assert_close(attention(states)[0], expected.transpose(1, 2).flatten(2))
    names = {key for key, _ in [*attention.named_parameters(), *attention.named_buffers()] if "." not in key}
    assert names == ({"features"} if name == "performer" else {"key_shortening", "value_shortening"})


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_and_infers(name):
    make_step(workload(name, dropout=0.1), TINY)()
    make_step(workload(name, mode="inference"), TINY)()


def test_every_compiled_step_runs_graphs(monkeypatch):
    """Models share code, of which PyTorch compiles a few variants and runs all further ones as they are."""
    compile, runs = torch.compile, []

    def backend(graph, inputs):
        def run(*values):
            runs.append(graph)
            return graph(*values)

        return run

    monkeypatch.setattr(torch, "compile", lambda model, **options: compile(model, backend=backend, **options))
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        for number in range(3):
            step = make_step(workload("bert-sdpa", 8 + number, mode="inference"), replace(TINY, compile=True))
            runs.clear()
            step()
            assert runs, number
        make_step(workload("nystromformer"), replace(TINY, compile=True))()
    torch.compiler.reset()


def test_a_gpu_is_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(0))
    monkeypatch.setattr(nn.Module, "to", lambda module, *_: module)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor)
    for mode in ("training", "inference"):
        make_step(workload("bert-sdpa", mode=mode), replace(TINY, device="cuda"))()
    assert len(waits) == 2


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_same_sizes_and_dropouts(name):
    config = build_config(workload(name, 64, 0.3), 1)
    model = build_model(name, config)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} <= {0.3}
    assert {value for field, value in vars(config).items() if "dropout" in field} == {0.3}
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size, config.num_labels) == (64, 1, 512, 2)
    assert getattr(config, "classifier_pooling", "mean") == "mean"
    if name == "nystromformer":
        assert config.num_landmarks < config.segment_means_seq_len == 64


def test_sizes_are_the_papers_and_the_presets():
    presets = {"base", "small", "mini", "tiny"}
    assert set(SIZES) == {"lra"} | presets | {f"{preset}-best" for preset in presets}
    assert build_sizes("tiny-best").use_smoother_residual
    fields = ("use_smoother_residual", "smoother_activation")
    best = {name: [getattr(build_config(workload(name), 1), field, None) for field in fields] for name in MODELS}
    preset = [getattr(load_preset("sktformer-tiny-best"), field) for field in fields]
    assert [name for name, values in best.items() if values == preset] == ["sktformer-best"]


def test_plain_code_has_a_row_of_its_own():
    kernels = {name: build_config(workload(name), 1).to_dict().get("kernels") for name in MODELS}
    assert [name for name, value in kernels.items() if value == "eager"] == ["sktformer-eager"]
    attentions = {
        name: build_model(name, build_config(workload(name), 1)).config._attn_implementation
        for name in MODELS
        if name.startswith("sktformer")
    }
    assert [name for name, value in attentions.items() if value == "sdpa"] == ["sktformer-sdpa"]
    model = build_model("sktformer-no-kernel", build_config(workload("sktformer-no-kernel"), 1))
    dropouts = {m.config.kernels for m in model.modules() if isinstance(m, Dropout)}
    assert (dropouts, model.config.kernels) == ({"eager"}, "auto")
    assert build_sizes("lra").hidden_size == 64
    assert (build_sizes("base").hidden_size, build_sizes("base", 2).num_hidden_layers) == (768, 2)


def test_padded_inputs_are_those_of_a_collator():
    inputs = make_inputs(replace(workload("sktformer", 64), batch_size=9), replace(TINY, padded=True))
    lengths = inputs["attention_mask"].sum(1)
    assert lengths[0] == 64  # to the longest of the batch
    assert lengths[1:].min() >= 16
    assert len(set(lengths.tolist())) > 3
    torch.testing.assert_close((inputs["input_ids"] != 0).long(), inputs["attention_mask"])
    assert "attention_mask" not in make_inputs(workload("sktformer"), TINY)


@pytest.mark.parametrize("name", ["fnet", "nystromformer"])
def test_what_knows_no_smaller_types_is_computed_in_float32(name):
    for mode in ("training", "inference"):
        make_step(workload(name, mode=mode), replace(TINY, precision="bfloat16"))()


def test_a_mask_hides_padding_from_nystromformer():
    padded = replace(TINY, padded=True)
    model = build_model("nystromformer", build_config(workload("nystromformer"), 1)).eval()
    inputs = make_inputs(workload("nystromformer"), padded)
    padding = make_inputs(workload("bert-sdpa"), padded)["attention_mask"] == 0
    assert padding.any()
    torch.testing.assert_close((inputs["attention_mask"] < 0).squeeze((1, 2)), padding)
    assert model(**inputs).logits.isfinite().all()


def test_lengths_that_a_model_cannot_take_are_said():
    assert unsupported_reason("nystromformer", 200) == "not a multiple of 64"
    assert unsupported_reason("reformer", 200) == "not a multiple of 64"
    assert [unsupported_reason(name, 192) for name in MODELS] == [None] * len(MODELS)
