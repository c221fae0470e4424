"""How fast heads and layers learn, in the groups of an optimizer."""

import re
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

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


@pytest.mark.parametrize("has_head_rate", [False, True])
def test_lower_layers_may_learn_more_slowly(has_head_rate):
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 9}
    models: list[Any] = [
        BertForSequenceClassification(BertConfig(num_attention_heads=1, **sizes)),
        SKTformerForSequenceClassification(make_config()),
    ]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if has_head_rate:
            set_head_rate(optimizer, model, 3.0)
        set_layer_rates(optimizer, model, 0.5)
        rates = {weight: group["lr"] for group in optimizer.param_groups for weight in group["params"]}
        assert len(rates) == len(list(model.parameters()))
        of: dict[str, set[float]] = {}
        for name, weight in model.named_parameters():
            layer = re.search(r"layers?\.(\d+)\.", name)
            part = layer[1] if layer else "embeddings" if "embeddings" in name else "head"
            part = "norm" if "norm" in name and part == "head" else part
            of.setdefault(part, set()).add(rates[weight])
        layers = model.config.num_hidden_layers
        assert of["head"] == {3.0 if has_head_rate else 1.0}
        assert of.get("norm", {1.0}) == {1.0}
        assert of["embeddings"] == {0.5 ** (layers + 1)}
        assert [of[str(n)] for n in range(layers)] == [{0.5 ** (layers - n)} for n in range(layers)]
