"""Models in other data types, offloaded, placed part by part, and with adapters in the place of their layers."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM

from model.test_auto_classes import all_models, assert_equal, auto_class, make_float32_model, make_inputs, outputs_of
from modeling_sktformer import (
    SKTformerForMaskedLM,
    SKTformerForPrediction,
    SKTformerForSequenceClassification,
    SKTformerModel,
)
from support.builders import MODELS, make_config, make_model


# Data types


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@all_models
def test_half_precision_spares_landmarks_and_statistics(model_class, dtype, tmp_path):
    model = make_float32_model(model_class)
    model.save_pretrained(tmp_path / "float32")
    loaded = auto_class(model_class).from_pretrained(tmp_path / "float32", dtype=dtype)
    loaded.save_pretrained(tmp_path / "half")
    again = auto_class(model_class).from_pretrained(tmp_path / "half")
    for half in (loaded, again):
        buffers, expected = dict(half.named_buffers()), dict(model.named_buffers())
        assert {buffer.dtype for buffer in buffers.values()} == {torch.int64, torch.float32}
        assert_equal(buffers, expected)
        for name, parameter in half.named_parameters():
            assert parameter.dtype == (torch.float32 if name.endswith("filter") else dtype)
        assert all(output.dtype == dtype and output.isfinite().all() for output in outputs_of(half))
    assert_equal(outputs_of(again), outputs_of(loaded))


# Offloading and adapters


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("offloaded", ["whole model", "second layer"])
def test_offloading_to_disk_changes_no_output(offloaded, offload_buffers, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate brings offloaded weights back")
    model = make_float32_model(SKTformerForMaskedLM)
    model.save_pretrained(tmp_path)
    encoder = "sktformer.encoder"
    names = ("sktformer.embeddings", f"{encoder}.layers.0", f"{encoder}.final_norm", "head", "decoder")
    devices = {**dict.fromkeys(names, "cpu"), f"{encoder}.layers.1": "disk"}
    if offloaded == "whole model":
        devices = {"": "disk"}
    loaded = AutoModelForMaskedLM.from_pretrained(
        tmp_path, device_map=devices, offload_folder=tmp_path / "offloaded", offload_buffers=offload_buffers
    )
    attention = loaded.sktformer.encoder.layers[1].attention
    assert {parameter.device.type for parameter in attention.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in attention.buffers()} == {"meta" if offload_buffers else "cpu"}
    # All columns of keys and values are computed where a weight is brought in for its own layer alone.
    torch.testing.assert_close(outputs_of(loaded), outputs_of(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.4, 0.7, 0.9])
def test_parts_are_placed_where_there_is_room(share, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate places the parts")
    model = make_float32_model(SKTformerForMaskedLM)
    model.save_pretrained(tmp_path)
    room = {"cpu": int(share * sum(value.nbytes for value in model.state_dict().values()))}
    loaded = AutoModelForMaskedLM.from_pretrained(
        tmp_path, device_map="auto", max_memory=room, offload_folder=tmp_path / "offloaded"
    )
    torch.testing.assert_close(outputs_of(loaded), outputs_of(model), rtol=1e-5, atol=1e-5)


def test_layers_are_placed_one_by_one(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate places the parts")
    model = make_float32_model(SKTformerForMaskedLM, num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    room = {"cpu": int(0.7 * sum(value.nbytes for value in model.state_dict().values()))}
    loaded = AutoModelForMaskedLM.from_pretrained(
        tmp_path, device_map="auto", max_memory=room, offload_folder=tmp_path / "offloaded"
    )
    places = [loaded.hf_device_map.get(f"sktformer.encoder.layers.{number}") for number in range(4)]
    assert (places[0], places[3]) == ("cpu", "disk")
    torch.testing.assert_close(outputs_of(loaded), outputs_of(model), rtol=1e-5, atol=1e-5)


class LowRankAdapter(nn.Module):
    """A linear layer plus a trained term of low rank, in the layer's place; what adapter libraries do."""

    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
        self.up = nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + self.up(self.down(inputs))

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        merged = copy.deepcopy(self.layer)
        merged.weight += self.up.weight @ self.down.weight
        return merged


@pytest.mark.parametrize("projection", ["query", "key", "value"])
@pytest.mark.parametrize("switched_off", [None, "use_token_attention", "use_feature_attention"])
def test_adapters_act_like_their_merged_weights(switched_off, projection):
    model = make_model(SKTformerModel, **{switched_off: False} if switched_off else {})
    plain = outputs_of(model)
    merged = copy.deepcopy(model)
    for layer, merged_layer in zip(model.encoder.layers, merged.encoder.layers, strict=True):
        adapter = LowRankAdapter(getattr(layer.attention, projection))
        setattr(layer.attention, projection, adapter)
        setattr(merged_layer.attention, projection, adapter.merge())
    adapted = outputs_of(model)
    torch.testing.assert_close(adapted, outputs_of(merged), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(adapted[0], plain[0])

    model(**make_inputs()).last_hidden_state.square().sum().backward()
    for layer in model.encoder.layers:
        assert getattr(layer.attention, projection).up.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("model_class", [*MODELS, SKTformerForPrediction], ids=lambda c: c.__name__)
def test_a_name_that_adapters_are_put_on_is_of_one_kind(model_class):
    """Libraries of adapters go by the ends of names: `output` is no part of the layers, as it is in other models."""
    places: dict[str, set[str]] = {}
    for name, module in model_class(make_config()).named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            *parents, own = name.split(".")
            places.setdefault(own, set()).add(re.sub(r"\d+", "*", ".".join(parents)))
    assert places.keys() >= {"query", "key", "value", "out_proj", "convolution"}
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_an_adapter_is_loaded_on_a_model_with_another_head(tmp_path):
    peft = pytest.importorskip("peft")
    make_float32_model(SKTformerForMaskedLM).save_pretrained(tmp_path / "base")
    inputs = make_inputs()

    def load(seed):
        """The same checkpoint, with what it has not drawn from a seed."""
        torch.manual_seed(seed)
        options = {"landmark_seed": seed, "num_labels": 3}
        return SKTformerForSequenceClassification.from_pretrained(tmp_path / "base", **options)

    targets = ["query", "value", "out_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(load(0), lora).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    other = load(1).eval()
    loaded = peft.PeftModel.from_pretrained(other, tmp_path / "adapter").eval()
    expected = adapted(**inputs).logits
    assert torch.equal(loaded(**inputs).logits, expected)
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(**inputs).logits, expected)
