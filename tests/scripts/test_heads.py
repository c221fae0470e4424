"""How fast heads and layers learn, in the groups of an optimizer."""

import re
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    XLMConfig,
    XLMForSequenceClassification,
)

from experiments.heads import set_head_rate, set_layer_rates
from modeling_sktformer import SKTformerForSequenceClassification
from support.builders import make_config


def test_a_pooler_learns_at_the_rate_of_its_head():
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
    model: Any = BertForSequenceClassification(BertConfig(num_attention_heads=1, **sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    set_head_rate(optimizer, model, 0.5)
    rates = {weight: group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    fast = {name for name, weight in model.named_parameters() if rates[weight] == 0.5}
    assert fast == {f"{layer}.{part}" for layer in ("bert.pooler.dense", "classifier") for part in ("weight", "bias")}
    assert set(rates.values()) == {0.25, 0.5}


def rates_of(model, optimizer):
    rates = {weight: group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(rates) == len([*model.parameters()])
    return {name: rates[weight] for name, weight in model.named_parameters()}


@pytest.mark.parametrize("has_head_rate", [False, True])
@pytest.mark.parametrize("name", ["bert", "sktformer", "xlm", "albert"])
def test_lower_layers_may_learn_more_slowly(name, has_head_rate):
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 9}
    sizes |= {"intermediate_size": 8}
    xlm: dict[str, Any] = {"emb_dim": 8, "n_layers": 2, "n_heads": 1, "vocab_size": 9}
    models: dict[str, Any] = {
        "bert": lambda: BertForSequenceClassification(BertConfig(**sizes)),
        "sktformer": lambda: SKTformerForSequenceClassification(make_config(num_hidden_layers=2)),
        "xlm": lambda: XLMForSequenceClassification(XLMConfig(**xlm)),  # each part of its layers has a list
        "albert": lambda: AlbertForSequenceClassification(AlbertConfig(embedding_size=8, **sizes)),  # one layer, twice
    }
    model = models[name]()
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    if has_head_rate:
        set_head_rate(optimizer, model, 3.0)
    set_layer_rates(optimizer, model, 0.5)
    for group in optimizer.param_groups:
        assert all((weight.dim() > 1) == (group["weight_decay"] > 0) for weight in group["params"])
    layers = 1 if name == "albert" else 2
    for weight, rate in rates_of(model, optimizer).items():
        number = re.search(r"\.(\d+)\.", weight)
        if number:
            assert rate == 0.5 ** (layers - int(number[1])), weight
        elif "embed" in weight:
            assert rate == 0.5 ** (layers + 1), weight
        elif weight.startswith(("classifier", "sequence_summary")) or "pooler" in weight:
            assert rate == (3.0 if has_head_rate else 1.0), weight
        else:
            assert "norm" in weight.lower(), weight
            assert rate == 1.0, weight


def test_a_model_without_layers_keeps_its_rate():
    model = torch.nn.Module()
    model.base_model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    set_layer_rates(optimizer, model, 0.5)
    assert set(rates_of(model, optimizer).values()) == {1.0}
