"""Loading and saving: Auto classes, pipelines, code in checkpoints and presets."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    pipeline,
)
from transformers.models.bert.modeling_bert import BertModel

from modeling_sktformer import (
    SKTformerConfig,
    SKTformerForMaskedLM,
    SKTformerForMultipleChoice,
    SKTformerForPrediction,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForSequenceMatching,
    SKTformerForTokenClassification,
    SKTformerModel,
    available_presets,
    load_preset,
)
from modeling_sktformer.sequences import draw_permutation
from support.builders import (
    HEADS,
    MODELS,
    PAIR_HEADS,
    call,
    in_pairs,
    make_batch,
    make_config,
    make_model,
    token_outputs,
)
from support.processes import run_program, run_without_package


ROOT = Path(__file__).parents[2]
AUTO_NAMES = {
    SKTformerModel: "AutoModel",
    SKTformerForMaskedLM: "AutoModelForMaskedLM",
    SKTformerForSequenceClassification: "AutoModelForSequenceClassification",
    SKTformerForTokenClassification: "AutoModelForTokenClassification",
    SKTformerForQuestionAnswering: "AutoModelForQuestionAnswering",
    SKTformerForMultipleChoice: "AutoModelForMultipleChoice",
    SKTformerForSequenceMatching: "AutoModelForNextSentencePrediction",
}
CODE = {
    "attention.py",
    "circle.py",
    "configuration_sktformer.py",
    "cpu_dropout.py",
    "kernels.py",
    "lengthening.py",
    "losses.py",
    "modeling_sktformer.py",
    "outputs.py",
    "position_batch_norm.py",
    "sequences.py",
    "smoothing.py",
}
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat ran on mat under tree this example is . good bad".split()

all_models = pytest.mark.parametrize("model_class", MODELS, ids=lambda c: c.__name__)
all_heads = pytest.mark.parametrize("model_class", HEADS, ids=lambda c: c.__name__)


def auto_class(model_class):
    return getattr(transformers, AUTO_NAMES[model_class])


def make_float32_model(model_class, **overrides):
    """A model as it is saved and loaded, whose every parameter and statistic is random."""
    return make_model(model_class, **overrides).float()


def make_inputs() -> dict[str, torch.Tensor]:
    return make_batch([7, 3, 12, 9]).inputs("left")


@torch.no_grad()
def outputs_of(model) -> list[torch.Tensor]:
    output = call(model, make_inputs())
    return token_outputs(output) or [output.logits]


def landmarks(model) -> dict[str, torch.Tensor]:
    """The landmark buffers, by their names in the base model."""
    return {name: buffer for name, buffer in model.base_model.named_buffers() if "landmark" in name}


def assert_equal(tensors, expected) -> None:
    """Check that two dictionaries (or lists) of tensors are equal bit for bit."""
    if isinstance(expected, dict):
        assert list(tensors) == list(expected)
        tensors, expected = list(tensors.values()), list(expected.values())
    assert [tensor.dtype for tensor in tensors] == [tensor.dtype for tensor in expected]
    assert len(expected) > 0
    for tensor, expected_tensor in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, expected_tensor)


def differ(tensors, others) -> bool:
    return any(not torch.equal(tensor, other) for tensor, other in zip(tensors, others, strict=True))


# Saving and loading


@all_models
@pytest.mark.parametrize("max_shard_size", ["1GB", "5KB"], ids=["one file", "shards"])
def test_loading_gives_back_every_tensor(model_class, max_shard_size, tmp_path):
    model = make_float32_model(model_class)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "5KB")

    loaded, info = auto_class(model_class).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class
    assert not any(info.values()), info
    assert_equal(loaded.state_dict(), model.state_dict())
    assert_equal(dict(loaded.named_buffers()), dict(model.named_buffers()))
    assert_equal(outputs_of(loaded), outputs_of(model))


def test_the_configuration_is_loaded_as_it_was_saved(tmp_path):
    config = make_config(landmark_seed=5, smoother_norm="layer_norm", classifier_pooling="mean", num_labels=7)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is SKTformerConfig
    fields = [field.name for field in dataclasses.fields(SKTformerConfig) if field.name != "transformers_version"]
    assert {name: getattr(loaded, name) for name in fields} == {name: getattr(config, name) for name in fields}


@all_heads
def test_a_base_checkpoint_lacks_only_the_head(model_class, tmp_path):
    base = make_float32_model(SKTformerModel)
    base.save_pretrained(tmp_path)
    model, info = auto_class(model_class).from_pretrained(tmp_path, output_loading_info=True)
    # The decoder's weight is the word embeddings'.
    head = {name for name in model.state_dict() if not name.startswith("sktformer.")} - {"decoder.weight"}
    assert info.pop("missing_keys") == head
    assert not any(info.values()), info
    assert_equal(model.base_model.state_dict(), base.state_dict())


@all_heads
def test_the_base_model_is_loaded_from_any_head(model_class, tmp_path):
    model = make_float32_model(model_class)
    model.save_pretrained(tmp_path)
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not any(name.startswith("sktformer.") for name in info["unexpected_keys"])
    assert_equal(base.state_dict(), model.base_model.state_dict())


# Landmarks


@pytest.fixture(scope="module")
def expected_landmarks():
    """Each layer's landmarks for `landmark_seed=0`, by the definition."""
    config = make_config()
    sizes = {"landmark_order": config.max_position_embeddings, "landmark_features": config.head_dim}
    return {
        f"encoder.layers.{layer}.attention.{name}": draw_permutation(size, 0, layer, name)
        for layer in range(config.num_hidden_layers)
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("seed", [0, 1])
@all_models
def test_landmarks_are_the_same_however_a_model_is_made(model_class, seed, expected_landmarks, tmp_path):
    torch.manual_seed(seed)
    model = auto_class(model_class).from_config(make_config())
    assert_equal(landmarks(model), expected_landmarks)

    model.save_pretrained(tmp_path)
    assert_equal(landmarks(model_class.from_pretrained(tmp_path)), expected_landmarks)

    with torch.device("meta"):
        model = model_class(make_config())
    model.to_empty(device="cpu")
    model.init_weights()
    assert_equal(landmarks(model), expected_landmarks)


@all_models
def test_landmarks_missing_in_a_checkpoint_are_drawn(model_class, expected_landmarks, tmp_path):
    model = make_float32_model(model_class)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "landmark" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    prefix = "" if model_class is SKTformerModel else "sktformer."
    assert info["missing_keys"] == {prefix + name for name in expected_landmarks}
    assert_equal(landmarks(loaded), expected_landmarks)
    assert_equal(outputs_of(loaded), outputs_of(model))


def test_drawing_landmarks_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    draw_permutation(100, seed=0, layer_idx=0, name="landmark_order")
    assert torch.equal(torch.get_rng_state(), state)


def test_landmarks_differ_between_seeds_layers_and_kinds():
    drawn = [
        draw_permutation(50, seed, layer_idx, name)
        for seed in (0, 1)
        for layer_idx in (0, 1)
        for name in ("landmark_order", "landmark_features")
    ]
    assert len({tuple(order.tolist()) for order in drawn}) == len(drawn)
    assert all(sorted(order.tolist()) == list(range(50)) for order in drawn)


def test_landmark_seed_changes_the_landmarks(expected_landmarks):
    other = landmarks(SKTformerModel(make_config(landmark_seed=1)))
    assert list(other) == list(expected_landmarks)
    assert all(differ([other[name]], [expected]) for name, expected in expected_landmarks.items())


def test_saved_landmarks_outlive_another_seed(tmp_path):
    model = make_float32_model(SKTformerModel, landmark_seed=3)
    model.save_pretrained(tmp_path)
    assert_equal(landmarks(SKTformerModel.from_pretrained(tmp_path, landmark_seed=4)), landmarks(model))


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_landmark_tokens": 2},
        {"num_landmark_tokens": 16},
        {"num_landmark_features": 1},
        {"num_landmark_features": 6},
    ],
    ids=str,
)
def test_the_number_of_landmarks_can_be_overridden_on_loading(overrides, tmp_path):
    model = make_float32_model(SKTformerForMaskedLM)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True, **overrides)
    assert not any(info.values()), info
    assert_equal(loaded.state_dict(), model.state_dict())
    assert differ(outputs_of(loaded), outputs_of(model))

    made = SKTformerForMaskedLM(make_config(**overrides)).eval()
    made.load_state_dict(model.state_dict())
    assert_equal(outputs_of(loaded), outputs_of(made))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_class", "kept"),
    [
        (SKTformerForMaskedLM, {"filter", "running_mean", "running_var"}),
        (SKTformerForSequenceClassification, {"filter", "running_mean", "running_var", "center", "scale"}),
    ],
)
def test_what_half_precision_would_lose_is_loaded_in_float32(model_class, kept, dtype, tmp_path):
    make_float32_model(model_class, smoother_norm="batch_norm").save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, dtype=dtype).state_dict()
    types = {name: value.dtype for name, value in loaded.items() if value.is_floating_point()}
    assert {name.rpartition(".")[2] for name, kind in types.items() if kind == torch.float32} == kept
    assert {*types.values()} == {torch.float32, dtype}


def test_a_new_head_of_a_checkpoint_in_half_precision_is_calibrated_in_float32(tmp_path):
    make_float32_model(SKTformerForMaskedLM).save_pretrained(tmp_path)
    model = SKTformerForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pooling = model.classifier.pooling
    assert (pooling.center.dtype, pooling.scale.dtype) == (torch.float32, torch.float32)
    pooled = 5 + 0.01 * torch.randn(64, pooling.width, generator=torch.Generator().manual_seed(0))
    pooling.calibrate(pooled)
    torch.testing.assert_close(pooling.center, pooled.mean(dim=0), rtol=1e-5, atol=0)


def test_an_impossible_number_of_landmarks_is_an_error_on_loading(tmp_path):
    make_float32_model(SKTformerModel).save_pretrained(tmp_path)
    with pytest.raises(
        Exception, match=r"`num_landmark_tokens` \(17\) is larger than `max_position_embeddings` \(16\)"
    ):
        AutoModel.from_pretrained(tmp_path, num_landmark_tokens=17)


@pytest.mark.parametrize("load", [SKTformerForMaskedLM.from_pretrained, AutoModelForMaskedLM.from_pretrained])
def test_another_length_on_loading_names_the_way_to_lengthen(load, tmp_path):
    make_float32_model(SKTformerForMaskedLM).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"`model.resize_position_embeddings\(...\)`"):
        load(tmp_path, max_position_embeddings=32)


def test_another_number_of_labels_on_loading_names_the_way_to_a_new_head(tmp_path):
    make_float32_model(SKTformerForSequenceClassification, num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"`ignore_mismatched_sizes=True` begins with a new head"):
        SKTformerForSequenceClassification.from_pretrained(tmp_path, num_labels=5)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_landmarks", "no field `num_landmarks`; did you mean `num_landmark_tokens`"),
        ("hidden_sise", "no field `hidden_sise`; did you mean `hidden_size`"),
        ("layers", "no field `layers`; did you mean `num_hidden_layers`"),
        ("max_positions", "no field `max_positions`; did you mean `max_position_embeddings`"),
    ],
)
def test_fields_that_are_none_are_refused(field, message):
    fields: dict[str, Any] = {field: 100}
    with pytest.raises(ValueError, match=message):
        SKTformerConfig(**fields)
    with pytest.raises(ValueError, match=f"no field `{field}`"):
        load_preset("sktformer-tiny", **fields)


def test_a_head_s_width_cannot_be_chosen():
    with pytest.raises(ValueError, match="`head_dim` is hidden_size / num_attention_heads"):
        SKTformerConfig(**dict[str, Any](head_dim=64))
    with pytest.raises(ValueError, match="no field `validate`"):
        load_preset("sktformer-tiny", validate=3)


def test_keys_of_others_are_kept(tmp_path):
    others: dict[str, Any] = {"sep_token_id": 3, "mask_token_id": 4, "my_note": "hello"}
    others |= {"pad_token": "[PAD]", "pad_token_label_id": -100, "use_token_type_ids": True}
    config = SKTformerConfig(**others)
    others["features"] = config.features = ["title", "body"]  # which a constructor would take for a slip
    config.save_pretrained(tmp_path)
    kept = vars(SKTformerConfig.from_pretrained(tmp_path))
    assert {name: kept[name] for name in others} == others


def test_saving_leaves_the_configuration_as_it_is(tmp_path):
    model = make_float32_model(SKTformerForMaskedLM)
    before = dict(vars(model.config))
    model.save_pretrained(tmp_path)
    assert vars(model.config) == before
    assert "auto_map" in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("model_class", [SKTformerModel, SKTformerForMaskedLM])
def test_a_misspelt_keyword_is_an_error(model_class):
    model = make_float32_model(model_class)
    inputs = make_inputs()
    with pytest.raises(TypeError, match="no keyword `atention_mask`; did you mean `attention_mask`"):
        model(inputs["input_ids"], atention_mask=inputs["attention_mask"])
    hint = r"\." if model_class is SKTformerModel else "; did you mean `labels`"
    with pytest.raises(TypeError, match=f"no keyword `labls`{hint}"):
        model(**inputs, labls=inputs["input_ids"])


@all_models
def test_what_a_model_returns_can_be_read_from_its_annotation(model_class):
    """As sentence-transformers does, for cross and sparse encoders."""
    model = make_float32_model(model_class)
    annotation = inspect.signature(model.forward).return_annotation
    fields = [field.name for field in dataclasses.fields(annotation)]
    assert {*fields} >= {"hidden_states", "attentions"}
    if model_class in MODELS and model_class not in PAIR_HEADS:
        everything = dict.fromkeys(("output_hidden_states", "output_attentions", "output_feature_attentions"), True)
        output = model(**make_inputs(), **everything)
        assert type(output) is annotation
        assert list(output) == [name for name in fields if name in output]  # in what order tuples have it


@pytest.mark.parametrize("model_class", HEADS, ids=lambda c: c.__name__)
def test_a_misspelt_keyword_is_an_error_in_every_head(model_class):
    model, batch = make_model(model_class), make_batch([12, 7])
    inputs = in_pairs(batch.inputs()) if model_class in PAIR_HEADS else batch.inputs()
    labels = batch.labels(model_class)
    off = {"head_mask": None, "use_cache": False, "is_causal": False}  # as wrappers do
    assert torch.equal(model(**inputs, **labels, **off)[0], model(**inputs, **labels)[0])
    with pytest.raises(TypeError, match="no keyword `use_cache`"):
        model(**inputs, **labels, use_cache=True)
    inputs["atention_mask"] = inputs.pop("attention_mask")
    with pytest.raises(TypeError, match="no keyword `atention_mask`; did you mean `attention_mask`"):
        model(**inputs, **batch.labels(model_class))


def test_hints_name_what_the_head_takes():
    model = make_float32_model(SKTformerForQuestionAnswering)
    with pytest.raises(TypeError, match="no keyword `start_position`; did you mean `start_positions`"):
        model(**make_inputs(), start_position=torch.zeros(2))
    for keyword in ("labels", "kwarg", "sel"):
        with pytest.raises(TypeError, match=rf"no keyword `{keyword}`\."):
            model(**make_inputs(), **{keyword: torch.zeros(2)})


def test_a_misspelt_keyword_is_an_error_in_a_forecaster():
    model = SKTformerForPrediction(make_config(context_length=16, prediction_length=4, num_input_channels=2))
    with pytest.raises(TypeError, match="no keyword `past_observd_mask`; did you mean `past_observed_mask`"):
        model(torch.zeros(1, 16, 2), past_observd_mask=torch.ones(1, 16, 2))


@pytest.mark.parametrize("model_class", [SKTformerModel, SKTformerForMaskedLM])
def test_a_configuration_without_return_dict_gives_tuples(model_class, tmp_path):
    model = make_float32_model(model_class)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, return_dict=False)
    first, *_ = loaded(**make_inputs())
    assert torch.equal(first, model(**make_inputs())[0])


# Attention implementations, other architectures


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", {"": "flash_attention_2"}], ids=str)
def test_other_attention_implementations_are_refused(attention, tmp_path):
    model = make_float32_model(SKTformerForMaskedLM)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="SKTformer has no `attn_implementation="):
        AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=attention)
    with pytest.raises(ValueError, match="SKTformer has no `attn_implementation="):
        AutoModel.from_config(make_config(), attn_implementation=attention)
    with pytest.raises(ValueError, match="SKTformer has no `attn_implementation="):
        SKTformerModel(make_config(attn_implementation=attention))
    with pytest.raises(ValueError, match="SKTformer has no `attn_implementation="):
        model.set_attn_implementation(attention)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_eager_and_fused_attention_can_be_asked_for(attention, tmp_path):
    model = make_float32_model(SKTformerForMaskedLM)
    expected = outputs_of(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=attention)
    assert loaded.sktformer.encoder.layers[0].attention.is_fused() == (attention == "sdpa")
    torch.testing.assert_close(outputs_of(loaded), expected)
    attentions = loaded(**make_inputs(), output_attentions=True).attentions
    assert len(attentions) == (0 if attention == "sdpa" else 2)
    model.set_attn_implementation(attention)
    assert_equal(outputs_of(model), outputs_of(loaded))


def test_plans_for_several_devices_name_modules_that_there_are():
    names = {re.sub(r"\.\d+", ".*", name) for name, _ in make_model(SKTformerModel).named_modules()}
    plan = SKTformerConfig.base_model_fsdp_plan
    assert set(plan) <= names
    # A weight that a decoder shares is sharded by itself: in a larger part it would be sharded twice.
    model = make_model(SKTformerForMaskedLM)
    shared, encoder = model.decoder.weight, model.sktformer
    parts = [encoder.get_submodule(name) for name in plan if "*" not in name]
    holders = [part for part in parts if any(weight is shared for weight in part.parameters())]
    assert holders == [model.get_input_embeddings()]


@all_models
def test_a_checkpoint_of_another_architecture_is_refused(model_class, tmp_path):
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
    )
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='`model_type` "bert", not "sktformer"'):
        model_class.from_pretrained(tmp_path)


# Pipelines


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    return BertTokenizer(vocab=vocabulary, model_max_length=16)


def save_for_pipeline(model_class, tokenizer, folder, **overrides):
    model = make_float32_model(model_class, vocab_size=len(WORDS), **overrides)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert type(AutoTokenizer.from_pretrained(folder)) is BertTokenizer
    return model


def test_tokenizer_of_a_checkpoint_without_its_class(tokenizer, tmp_path):
    save_for_pipeline(SKTformerModel, tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is BertTokenizer


def test_fill_mask_pipeline(tokenizer, tmp_path):
    model = save_for_pipeline(SKTformerForMaskedLM, tokenizer, tmp_path)
    text = "the cat [MASK] on the mat."
    inputs = tokenizer(text, return_tensors="pt")
    (place,) = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0]
    expected = model(**inputs).logits[0, place].softmax(dim=-1).topk(3)
    answers = pipeline("fill-mask", model=str(tmp_path), device="cpu")(text, top_k=3)
    assert [answer["token"] for answer in answers] == expected.indices.tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(expected.values.tolist())


def test_text_classification_pipeline(tokenizer, tmp_path):
    names: dict[str, dict] = {
        "id2label": {0: "low", 1: "middle", 2: "high"},
        "label2id": {"low": 0, "middle": 1, "high": 2},
    }
    model = save_for_pipeline(SKTformerForSequenceClassification, tokenizer, tmp_path, **names)
    text = "a dog ran under the tree"
    expected = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(dim=-1)
    answers = pipeline("text-classification", model=str(tmp_path), device="cpu")(text, top_k=None)
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(
        {name: expected[index].item() for index, name in names["id2label"].items()}
    )


def test_token_classification_pipeline(tokenizer, tmp_path):
    model = save_for_pipeline(SKTformerForTokenClassification, tokenizer, tmp_path)
    text = "the dog sat under a tree"
    scores, labels = model(**tokenizer(text, return_tensors="pt")).logits[0, 1:-1].softmax(dim=-1).max(dim=-1)
    answers = pipeline("token-classification", model=str(tmp_path), device="cpu", ignore_labels=[])(text)
    assert [answer["word"] for answer in answers] == text.split()
    assert [answer["entity"] for answer in answers] == [f"LABEL_{label}" for label in labels]
    assert [answer["score"] for answer in answers] == pytest.approx(scores.tolist())


def test_feature_extraction_pipeline(tokenizer, tmp_path):
    model = save_for_pipeline(SKTformerModel, tokenizer, tmp_path)
    text = "the cat ran"
    features = pipeline("feature-extraction", model=str(tmp_path), device="cpu")(text, return_tensors=True)
    assert_equal([features], [model(**tokenizer(text, return_tensors="pt")).last_hidden_state])


def test_zero_shot_classification_pipeline(tokenizer, tmp_path):
    names: dict[str, dict] = {
        "id2label": {0: "contradiction", 1: "entailment"},
        "label2id": {"contradiction": 0, "entailment": 1},
    }
    model = save_for_pipeline(SKTformerForSequenceClassification, tokenizer, tmp_path, num_labels=2, **names)
    text, labels = "the dog sat", ["good", "bad"]
    pairs = tokenizer([text] * 2, [f"this example is {label}." for label in labels], return_tensors="pt")
    expected = model(**pairs).logits[:, 1].softmax(dim=0)
    answer = pipeline("zero-shot-classification", model=str(tmp_path), device="cpu")(text, labels)
    assert dict(zip(answer["labels"], answer["scores"], strict=True)) == pytest.approx(
        dict(zip(labels, expected.tolist(), strict=True)), rel=1e-4
    )


# Checkpoints without the package

# Loads every checkpoint of a folder, keeps the outputs, and saves every model again.
LOAD_AND_SAVE_ALL = """
from pathlib import Path
import torch
import transformers

folder, saved_again = Path(sys.argv[1]), Path(sys.argv[2])
calls = torch.load(folder / "calls.pt")
torch.set_num_threads(calls.pop("num_threads"))
outputs = {}
for name, inputs in calls.items():
    auto_class = getattr(transformers, name)
    model = auto_class.from_pretrained(folder / name, trust_remote_code=True)
    from_masked_lm = auto_class.from_pretrained(folder / "AutoModelForMaskedLM", trust_remote_code=True)
    assert type(from_masked_lm).__name__ == type(model).__name__
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        outputs[name] = dict(model.eval()(**inputs))
        outputs[name + " from the masked LM"] = dict(from_masked_lm.eval().base_model(**calls["AutoModel"]))
    model.save_pretrained(saved_again / name)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "AutoModel", trust_remote_code=True)
assert type(tokenizer) is transformers.BertTokenizer, type(tokenizer)
outputs["AutoTokenizer"] = dict(tokenizer("the cat sat", "on a mat", return_tensors="pt"))
tokenizer.save_pretrained(saved_again / "AutoModel")
config = transformers.AutoConfig.from_pretrained(folder / "config", trust_remote_code=True)
assert config.num_landmark_tokens == 5, config
config.save_pretrained(saved_again / "config")
torch.save(outputs, folder / "outputs.pt")
"""


def test_checkpoints_work_without_the_package_and_can_be_saved_again_there(tokenizer, tmp_path):
    folders = [tmp_path / name for name in ("saved", "saved_again", "saved_twice")]
    calls: dict = {"num_threads": torch.get_num_threads()}
    expected = {"AutoTokenizer": dict(tokenizer("the cat sat", "on a mat", return_tensors="pt"))}
    for model_class, name in AUTO_NAMES.items():
        model = make_float32_model(model_class)
        model.save_pretrained(folders[0] / name)
        calls[name] = in_pairs(make_inputs()) if model_class in PAIR_HEADS else make_inputs()
        with torch.no_grad():
            expected[name] = dict(model(**calls[name]))
    masked_lm = AutoModelForMaskedLM.from_pretrained(folders[0] / "AutoModelForMaskedLM")
    with torch.no_grad():
        base_output = dict(masked_lm.base_model(**make_inputs()))
    expected |= {f"{name} from the masked LM": base_output for name in AUTO_NAMES.values()}
    tokenizer.save_pretrained(folders[0] / "AutoModel")
    make_config().save_pretrained(folders[0] / "config")

    for folder, saved_again in pairwise(folders):
        torch.save(calls, folder / "calls.pt")
        for name in AUTO_NAMES.values():
            assert {path.name for path in (folder / name).glob("*.py")} == CODE
        run_without_package(LOAD_AND_SAVE_ALL, folder, saved_again, folder=folder / "elsewhere")
        outputs = torch.load(folder / "outputs.pt")
        assert outputs.keys() == expected.keys()
        for name, output in expected.items():
            assert_equal(outputs[name], output)


def test_parts_of_a_model_can_be_saved_without_the_package(tmp_path):
    model = make_float32_model(SKTformerForMaskedLM)
    model.save_pretrained(tmp_path / "masked_lm")
    program = """
from transformers import AutoModel, AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.base_model.save_pretrained(sys.argv[2])
AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True)
"""
    run_without_package(program, tmp_path / "masked_lm", tmp_path / "base", folder=tmp_path / "elsewhere")
    assert {path.name for path in (tmp_path / "base").glob("*.py")} == CODE
    assert_equal(AutoModel.from_pretrained(tmp_path / "base").state_dict(), model.base_model.state_dict())


def test_a_class_of_one_s_own_is_saved_as_the_one_that_has_a_file(tmp_path):
    """Of a notebook's class, and of what FSDP puts in the place of a model's, a checkpoint would hold no code."""
    parents = (type("Mixin", (), {}), SKTformerForSequenceClassification)
    own = type("Mine", parents, {"__module__": "torch.distributed.fsdp._fully_shard"})
    model = make_float32_model(own)
    model.save_pretrained(tmp_path / "saved")
    assert (own.__module__, own.__name__) == ("torch.distributed.fsdp._fully_shard", "Mine")
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == CODE
    program = """
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__name__ == "SKTformerForSequenceClassification", type(model)
"""
    run_without_package(program, tmp_path / "saved", folder=tmp_path / "elsewhere")


def test_a_class_of_one_s_own_with_a_file_is_saved_with_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from modeling_sktformer import SKTformerForSequenceClassification\n\n\n"
        "class Mine(SKTformerForSequenceClassification):\n    pass\n"
    )
    make_float32_model(importlib.import_module("mine").Mine).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["architectures"] == ["Mine"]
    assert saved["auto_map"]["AutoModelForSequenceClassification"] == "mine.Mine"
    assert (tmp_path / "saved" / "mine.py").is_file()


def test_switches_work_without_the_package(tmp_path):
    """Files of a local checkpoint are loaded one by one, and the class of configurations twice."""
    make_float32_model(SKTformerForMaskedLM).save_pretrained(tmp_path / "saved")
    program = """
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.set_attn_implementation("sdpa")
model.set_kernels("eager")
assert (model.config._attn_implementation, model.config.kernels) == ("sdpa", "eager"), model.config
try:
    model.set_kernels("nonsense")
except Exception as error:
    assert "nonsense" in str(error), error
else:
    sys.exit("any word is taken")
"""
    run_without_package(program, tmp_path / "saved", folder=tmp_path / "elsewhere")


def test_code_in_checkpoints_is_not_run_without_consent(tmp_path):
    make_float32_model(SKTformerModel).save_pretrained(tmp_path / "saved")
    program = """
from transformers import AutoModel
try:
    AutoModel.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    sys.exit("the code was run")
"""
    run_without_package(program, tmp_path / "saved", folder=tmp_path / "elsewhere")


def test_the_installed_package_is_preferred_to_code_in_checkpoints(tmp_path):
    make_float32_model(SKTformerForMaskedLM).save_pretrained(tmp_path)
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=True)) is SKTformerForMaskedLM


def test_saved_code_imports_no_package_of_its_own():
    for name in CODE:
        tree = ast.parse((ROOT / "modeling_sktformer" / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("modeling_sktformer") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                is_own = node.level > 0
                assert f"{node.module}.py" in CODE if is_own else not str(node.module).startswith("modeling_sktformer")


# Presets

SIZES = {
    "sktformer-base": (12, 768, 3072),
    "sktformer-small": (4, 512, 2048),
    "sktformer-mini": (4, 256, 1024),
    "sktformer-tiny": (2, 128, 512),
}
PRESETS = SIZES | {f"{name}-best": sizes for name, sizes in SIZES.items()}


def test_the_presets_are_the_published_sizes():
    assert available_presets() == sorted(PRESETS)
    for name, sizes in PRESETS.items():
        config = load_preset(name)
        assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == sizes
        assert config.head_dim == 64
        assert config.use_smoother_residual == name.endswith("-best")
        assert config.smoother_activation == ("silu" if name.endswith("-best") else "relu")
    assert load_preset("sktformer-tiny", attn_implementation="sdpa")._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 0}, "`num_hidden_layers` must be at least 1, got 0"),
        ({"hidden_dropout_prob": 1.0}, "`hidden_dropout_prob` must be at least 0 and below 1"),
        ({"initializer_range": -0.1}, "`initializer_range` must be finite and not negative, got -0.1"),
        ({"layer_norm_eps": float("nan")}, "`layer_norm_eps` must be finite and not negative, got nan"),
        ({"scaling_epsilon": float("inf")}, "`scaling_epsilon` must be finite"),
        ({"pad_token_id": 99999}, r"`pad_token_id` \(99999\) is not one of 30522 tokens"),
        ({"num_segments": 7}, r"`hidden_size` \(768\) is not divisible by `num_segments` \(7\)\."),
        ({"num_landmark_tokens": 513}, r"`num_landmark_tokens` \(513\) is larger than `max_position_embeddings`"),
        ({"num_landmark_features": 65}, r"`num_landmark_features` \(65\) is larger than the width of a head"),
        ({"conv_kernel_size": 4}, "`conv_kernel_size` must be odd"),
        ({"use_token_attention": False, "use_feature_attention": False}, "are both off; switch at least one on"),
        ({"use_residual_gate": True}, "`use_residual_gate` weighs what `use_smoother_residual` adds"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        SKTformerConfig(**fields)


def test_the_defaults_are_those_of_base():
    base = load_preset("sktformer-base").to_dict()
    assert base.pop("architectures") == ["SKTformerForMaskedLM"]
    defaults = SKTformerConfig().to_dict()
    defaults.pop("architectures")
    assert defaults == base


def test_an_installed_wheel_carries_the_presets(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="setuptools builds the wheel")
    source = tmp_path / "source"
    for name in ("modeling_sktformer", "configuration/models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "setup.cfg", ROOT / "pyproject.toml", *ROOT.glob("README*"), *ROOT.glob("LICENSE*")):
        shutil.copy(path, source)
    build = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('..')"]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")

    program = """
import sys
sys.path.insert(0, sys.argv[1])
import modeling_sktformer
from modeling_sktformer import available_presets, load_preset
print(modeling_sktformer.__file__, *(f"{name}:{load_preset(name).hidden_size}" for name in available_presets()))
"""
    printed = run_program(program, tmp_path / "installed", folder=tmp_path).split()
    assert Path(printed[0]).is_relative_to(tmp_path / "installed")
    assert printed[1:] == [f"{name}:{PRESETS[name][1]}" for name in sorted(PRESETS)]
