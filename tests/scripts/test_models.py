"""Models for the scripts, by preset, architecture or checkpoint; their tokenizers, lengths and adapters."""

import copy
import logging
import sys
import types
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from experiments import adapters, checkpoints, models
from experiments.adapters import LoraArguments, add_lora, merge_adapters
from experiments.arguments import CONFIGURATION, UserError, load_recipe
from experiments.checkpoints import CheckpointArguments, load_classifier, load_trained_config, start_classifier
from experiments.models import ModelArguments, build_masked_lm, fingerprint_checkpoint, fit_length, load_tokenizer
from experiments.sized_models import SizedModelArguments, describe_config
from experiments.text.classifier import load_text_tokenizer
from modeling_sktformer import SKTformerConfig, SKTformerForMaskedLM, SKTformerForSequenceClassification


SIZES: dict = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
LABELS = ["negative", "positive"]


@pytest.fixture
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(95))]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)}, model_max_length=16)


def build(tokenizer, length=32, seed=0, **arguments):
    return build_masked_lm(ModelArguments(**arguments), tokenizer, length, seed)


def save(model, folder):
    model.save_pretrained(folder)
    return str(folder)


def save_sktformer(folder, **fields):
    """A masked language model with random statistics and biases, so that nothing that is left out goes unseen."""
    sizes = {"vocab_size": 100, "max_position_embeddings": 32, "num_segments": 4, "num_landmark_features": 4}
    torch.manual_seed(0)
    model = SKTformerForMaskedLM(SKTformerConfig(**{**SIZES, **sizes, **fields}))
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return save(model, folder)


def load(folder, labels=LABELS, new_head=True, **arguments):
    checkpoint = CheckpointArguments(model_name_or_path=folder, **arguments)
    return (start_classifier if new_head else load_classifier)(checkpoint, labels, "score")


def test_a_preset_is_made_for_the_length_vocabulary_and_seed(tokenizer):
    model = build(tokenizer, seed=7)
    assert isinstance(model, SKTformerForMaskedLM)
    config = model.config
    assert (config.vocab_size, config.max_position_embeddings, config.landmark_seed) == (100, 32, 7)
    assert (config.hidden_size, config.num_hidden_layers) == (128, 2)


@pytest.mark.parametrize(
    "model_type",
    ["albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta-v2", "distilbert", "electra",
     "esm", "eurobert", "fnet", "ibert", "longformer", "megatron-bert", "modernbert", "mpnet", "nystromformer",
     "rembert", "roberta", "roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta", "yoso"],
)  # fmt: skip
def test_other_architectures_have_the_same_sizes_and_learn(tokenizer, tmp_path, model_type):
    model = build(tokenizer, model_type=model_type)
    config = model.config
    assert config.model_type == model_type
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (128, 2, 100)
    if model_type != "fnet":
        assert config.num_attention_heads == 2
    assert {getattr(config, name, 512) for name in ("intermediate_size", "hidden_dim")} == {512}
    assert 100_000 < model.num_parameters() < 700_000
    ids = torch.randint(5, 100, (2, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [parameter.grad for parameter in model.get_input_embeddings().parameters()]
    assert gradients[0] is not None
    assert gradients[0].any()
    assert tokenizer.model_max_length == 32
    assert {getattr(config, name, None) for name in ("mask_token_id", "pad_token_id")} <= {None, 0, 4}
    assert isinstance(AutoModelForMaskedLM.from_pretrained(save(model, tmp_path)), type(model))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bart", "is an encoder and a decoder"),
        ("flaubert", "does not take intermediate_size"),
        ("funnel", "does not take num_hidden_layers, intermediate_size"),
        ("perceiver", "does not take hidden_size"),
        ("reformer", "does not take num_hidden_layers|axial"),
        ("luke", r"would have 12\d\.\dM parameters, where BERT of these sizes has 0\.\dM"),
        ("mobilebert", "parts of it have sizes of their own"),
        ("mra", "cannot read --max_seq_length 32 tokens: on cpu its tokens do not see each other"),
        ("xmod", "cannot read --max_seq_length 32 tokens: ValueError: Input language unknown"),
        ("t5", "no masked-LM model of that name"),
        ("gpt2", "no masked-LM model of that name"),
        ("nonsense", "no masked-LM model of that name"),
    ],
)
def test_architectures_that_cannot_be_compared_are_refused(tokenizer, model_type, reason):
    with pytest.raises(UserError, match=reason) as error:
        build(tokenizer, model_type=model_type)
    assert "\n" not in str(error.value)


def test_modernbert_can_predict_labelled_tokens_alone(tokenizer):
    model = build(tokenizer, model_type="modernbert", config_overrides="sparse_prediction=True")
    ids = torch.randint(5, 100, (2, 32))
    labels = ids.where(torch.arange(32) < 4, -100)
    output = model(input_ids=ids, labels=labels)
    assert output.logits.shape == (8, 100)
    assert output.loss.isfinite()


def test_bert_has_fused_attention(tokenizer):
    assert build(tokenizer, model_type="bert").config._attn_implementation == "sdpa"


def test_nystromformer_is_linear(tokenizer):
    config = build(tokenizer, length=256, model_type="nystromformer").config
    assert config.num_landmarks < config.segment_means_seq_len == 256


def test_overrides_and_configuration_files(tokenizer, tmp_path):
    overridden = build(tokenizer, config_overrides="num_segments=4,smoother_norm=layer_norm").config
    assert (overridden.num_segments, overridden.smoother_norm) == (4, "layer_norm")
    overridden.save_pretrained(tmp_path)
    assert build(tokenizer, config_name=str(tmp_path / "config.json")).config.num_segments == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config_name": "sktformer-huge"}, "neither a preset .*sktformer-tiny"),
        ({"config_overrides": "hidden_size=100"}, "not divisible by `num_segments`"),
        ({"config_overrides": "num_landmark_tokens=33"}, "larger than `max_position_embeddings`"),
        ({"config_overrides": "max_position_embeddings=16"}, "too little for --max_seq_length 32"),
        ({"config_overrides": "num_landmark_token=3"}, "`num_landmark_token=3` is not field=value"),
        ({"config_overrides": "num_segments=four"}, "`num_segments=four` cannot be set: invalid literal for int"),
        (
            {"config_overrides": "classifier_dropout=0.2"},
            "`classifier_dropout=0.2` cannot be set: You can only update",
        ),
        ({"config_overrides": "num_segments"}, "is not field=value"),
        ({"config_overrides": "smoother_norm=none"}, "smoother_norm"),
    ],
)
def test_models_that_cannot_be_made_are_explained(tokenizer, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        build(tokenizer, **arguments)
    assert "\n" not in str(error.value)


def test_a_dropout_that_was_written_without_a_point_can_be_set_to_a_fraction():
    for config_class in (SKTformerConfig, BertConfig):
        config = config_class(**SIZES, hidden_dropout_prob=0)
        models.override_fields(config, "hidden_dropout_prob=0.5")
        assert config.hidden_dropout_prob == 0.5
        with pytest.raises(UserError, match="invalid literal for int"):
            models.override_fields(config, "num_hidden_layers=1.5")


def test_a_checkpoint_and_a_new_architecture_exclude_each_other():
    with pytest.raises(ValueError, match="--model_type"):
        ModelArguments(model_name_or_path="x", model_type="bert")


def test_checkpoints(tokenizer, tmp_path):
    bert = BertForMaskedLM(BertConfig(vocab_size=100, max_position_embeddings=32, **SIZES))
    folder = save(bert, tmp_path / "bert")
    loaded = build(tokenizer, model_name_or_path=folder)
    assert torch.equal(loaded.state_dict()[EMBEDDINGS], bert.state_dict()[EMBEDDINGS])
    with pytest.raises(UserError, match="cannot read --max_seq_length 33 tokens: it takes at most 32"):
        build(tokenizer, length=33, model_name_or_path=folder)

    gpt2 = save(GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2)), tmp_path / "gpt2")
    with pytest.raises(UserError, match="architecture gpt2, for which transformers has no masked-LM model"):
        build(tokenizer, model_name_or_path=gpt2)
    with pytest.raises(UserError, match="nowhere cannot be loaded as a masked-LM model"):
        build(tokenizer, model_name_or_path=str(tmp_path / "nowhere"))
    small = save(BertForMaskedLM(BertConfig(vocab_size=99, **SIZES)), tmp_path / "small")
    with pytest.raises(UserError, match="has 100 tokens, the model embeds 99"):
        build(tokenizer, model_name_or_path=small)


def test_a_checkpoint_in_half_precision_is_trained_in_whole(tokenizer, tmp_path):
    model = build(tokenizer).to(torch.bfloat16)
    folder = save(model, tmp_path / "half")
    tokenizer.save_pretrained(folder)
    for loaded in (build(tokenizer, model_name_or_path=folder), load(folder)):
        assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}


def test_weights_of_another_architecture_are_refused(tokenizer, tmp_path):
    BertForMaskedLM(BertConfig(vocab_size=100, max_position_embeddings=32, **SIZES)).save_pretrained(tmp_path)
    config = build(tokenizer).config
    config.update({**SIZES, "num_segments": 4})
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="another architecture"):
        build(tokenizer, model_name_or_path=str(tmp_path))


@pytest.mark.parametrize(
    "model",
    [
        SKTformerForMaskedLM(SKTformerConfig(vocab_size=100, num_segments=4, num_landmark_features=4, **SIZES)),
        BertForMaskedLM(BertConfig(vocab_size=100, **SIZES)),
        GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2)),
        ModernBertForMaskedLM(ModernBertConfig(vocab_size=100, pad_token_id=0, **SIZES)),
    ],
    ids=lambda model: model.config.model_type,
)
@pytest.mark.parametrize("saved", [False, True], ids=["without", "with"])
def test_a_checkpoint_without_a_tokenizer_is_refused(tokenizer, tmp_path, model, saved):
    folder = save(model, tmp_path)
    if saved:
        tokenizer.save_pretrained(folder)
        assert len(load_tokenizer(folder, False, ["mask"])) == 100
        return
    with pytest.raises(UserError, match=r"holds no tokenizer; save one beside it or give --tokenizer_name\.$"):
        load_tokenizer(folder, False, ["mask"])


def test_a_tokenizer_is_of_the_checkpoint_s_revision(tokenizer, monkeypatch):
    asked = []

    def from_pretrained(name, revision, **options):
        asked.append((name, revision))
        return tokenizer

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", from_pretrained)
    origin: dict[str, Any] = {"model_name_or_path": "owner/model", "model_revision": "v1"}
    load_text_tokenizer(CheckpointArguments(**origin))
    load_text_tokenizer(CheckpointArguments(**origin, tokenizer_name="owner/words"))
    assert asked == [("owner/model", "v1"), ("owner/words", "main")]


def test_labels_are_of_the_checkpoint_s_revision(monkeypatch):
    asked = []

    def from_pretrained(name, revision, **options):
        asked.append((name, revision))
        return SKTformerConfig()

    monkeypatch.setattr(checkpoints.AutoConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(checkpoints, "find_adapter_config_file", lambda *args, **options: None)
    load_trained_config(CheckpointArguments(model_name_or_path="owner/model", model_revision="v1"))
    assert asked == [("owner/model", "v1")]


def test_a_tokenizer_of_special_tokens_is_none(tmp_path):
    BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path), False, [])


def test_a_longer_input_lengthens_model_and_tokenizer(tokenizer, tmp_path, caplog):
    folder = save_sktformer(tmp_path / "model")
    with caplog.at_level(logging.INFO):
        model = build(tokenizer, length=80, model_name_or_path=folder)
    lengthened = "lengthened from 32 to 80 tokens: new positions repeat the trained ones, "
    assert f"{lengthened}filters keep their lags, and inputs of at most 16 tokens keep their outputs" in caplog.text
    with caplog.at_level(logging.INFO):
        own = save_sktformer(tmp_path / "without", use_fourier_convolution=False)
        build(tokenizer, length=80, model_name_or_path=own)
    assert f"{lengthened}and inputs of at most 32 tokens keep their outputs" in caplog.text
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "lengthened")
    inputs = AutoTokenizer.from_pretrained(tmp_path / "lengthened")(
        "word1 " * 99, truncation=True, return_tensors="pt"
    )
    assert inputs["input_ids"].shape == (1, 80)
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "lengthened")(**inputs).logits.isfinite().all()


def test_the_tokenizer_is_as_long_as_the_model(tokenizer, tmp_path, caplog):
    folder = save_sktformer(tmp_path / "model")
    with caplog.at_level(logging.INFO):
        model = build(tokenizer, length=24, model_name_or_path=folder)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 32
    tokenizer.model_max_length = 512
    assert build(tokenizer, length=24).config.max_position_embeddings == tokenizer.model_max_length == 24
    assert "lengthened" not in caplog.text


def test_positions_behind_the_padding_are_counted(tokenizer):
    config = RobertaConfig(vocab_size=100, max_position_embeddings=34, pad_token_id=1, **SIZES)
    model = RobertaForMaskedLM(config)
    fit_length(model, tokenizer, 32)
    assert tokenizer.model_max_length == 32
    with pytest.raises(UserError, match="A roberta cannot read --max_seq_length 33 tokens: it takes at most 32"):
        fit_length(model, tokenizer, 33)


def test_rotary_positions_have_no_end(tokenizer, caplog):
    config = ModernBertConfig(vocab_size=100, max_position_embeddings=32, pad_token_id=0, **SIZES)
    with caplog.at_level(logging.INFO):
        fit_length(ModernBertForMaskedLM(config), tokenizer, 48)
    assert "made for 32 tokens" in caplog.text
    assert tokenizer.model_max_length == 48


def test_the_length_of_a_checkpoint_is_no_override(tokenizer, tmp_path):
    folder = save_sktformer(tmp_path)
    with pytest.raises(UserError, match="changed with --max_seq_length"):
        load(folder, config_overrides="max_position_embeddings=256")
    with pytest.raises(UserError, match="changed with --max_seq_length"):
        build(tokenizer, model_name_or_path=folder, config_overrides="max_position_embeddings=256")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)),
            "is of the architecture t5, an encoder and a decoder",
        ),
        (
            lambda: ViTModel(ViTConfig(**SIZES, image_size=4, patch_size=2)),
            "architecture vit, for which transformers has no sequence-classification model",
        ),
    ],
    ids=["t5", "vit"],
)
def test_checkpoints_that_are_no_classifiers_are_refused(tmp_path, model, message):
    with pytest.raises(UserError, match=message) as error:
        load(save(model(), tmp_path))
    assert "\n" not in str(error.value)


def test_broken_checkpoints_are_refused(tmp_path):
    folder = save_sktformer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be loaded as a classification model") as error:
        load(folder)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="nowhere cannot be loaded as a classification model"):
        load(str(tmp_path / "nowhere"))


def test_decoders_classify(tokenizer, tmp_path):
    folder = save(GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2)), tmp_path)
    model = load(folder)
    assert isinstance(model, GPT2ForSequenceClassification)
    fit_length(model, tokenizer, 32)


def test_words_of_a_head_are_compared_without_their_case(tmp_path):
    folder = save(load(save_sktformer(tmp_path / "base"), ["Bad", "Good"]), tmp_path / "head")
    assert load(folder, ["bad", "Good"], new_head=False).config.id2label == {0: "bad", 1: "Good"}
    with pytest.raises(UserError, match="answers with Bad, Good, and the task's classes are good, bad"):
        load(folder, ["good", "bad"], new_head=False)


def test_overrides_of_sktformers_are_left_out_of_checkpoints_of_others(tmp_path):
    recipe = load_recipe(CONFIGURATION / "classification" / "long_documents.yaml")
    changed = {"config_overrides": recipe["config_overrides"]}
    assert load(save_sktformer(tmp_path / "ours"), **changed).config.classifier_pooling == "mean_std"
    config = GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2)
    folder = save(GPT2LMHeadModel(config), tmp_path / "theirs")
    assert not hasattr(load(folder, **changed).config, "classifier_pooling")
    with pytest.raises(UserError, match="`pooling=mean` is not field=value with a field of GPT2Config"):
        load(folder, config_overrides="pooling=mean")


def test_what_a_masked_language_model_lends_a_head_is_no_trained_head(tmp_path):
    config = ModernBertConfig(vocab_size=100, pad_token_id=0, **SIZES)
    folder = save(ModernBertForMaskedLM(config), tmp_path / "base")
    mean = {"config_overrides": "classifier_pooling=mean"}
    model = load(folder, ["bad", "good"], **mean)
    assert model.has_new_head
    assert model.config.classifier_pooling == "mean"
    trained = save(model, tmp_path / "head")
    with pytest.raises(UserError, match="classifier_pooling=mean, not cls"):
        load(trained, ["bad", "good"], config_overrides="classifier_pooling=cls")


def test_a_head_reads_what_it_was_trained_on(tmp_path):
    folder = save(load(save_sktformer(tmp_path / "base"), ["bad", "good"]), tmp_path / "head")
    trained = load(folder, ["bad", "good"], new_head=False)
    for pooling in ("mean", "mean_std"):  # of the same width, and of another
        changed = {"config_overrides": f"classifier_pooling={pooling}"}
        with pytest.raises(UserError, match=f"classifier_pooling=cls, not {pooling}; leave the override out"):
            load(folder, ["bad", "good"], new_head=False, **changed)
        with pytest.raises(UserError, match=f"cls, not {pooling}; pass --ignore_mismatched_sizes to start with a new"):
            load(folder, ["bad", "good"], **changed)
        model = load(folder, ["bad", "good"], ignore_mismatched_sizes=True, **changed)
        assert model.has_new_head
        assert not torch.equal(model.classifier.output.weight, trained.classifier.output.weight)


def test_a_fingerprint_follows_weights_configuration_and_tokenizer(tokenizer, tmp_path):
    folder = save_sktformer(tmp_path)
    seen = [fingerprint_checkpoint(folder)]
    (tmp_path / "README.md").write_text("A card says nothing about the model.")
    assert fingerprint_checkpoint(folder, "other") == seen[0]
    tokenizer.save_pretrained(folder)
    seen.append(fingerprint_checkpoint(folder))
    save_sktformer(tmp_path, layer_norm_eps=1e-6)
    seen.append(fingerprint_checkpoint(folder))
    save_sktformer(tmp_path, layer_norm_eps=1e-6, landmark_seed=1)
    seen.append(fingerprint_checkpoint(folder))
    model = SKTformerForMaskedLM.from_pretrained(folder)
    model.get_input_embeddings().weight.data += 1  # the weights alone
    model.save_pretrained(folder)
    seen.append(fingerprint_checkpoint(folder))
    assert len(set(seen)) == 5
    assert fingerprint_checkpoint("owner/name", "v1") == "owner/name@v1"


def train_two_steps(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        ids = torch.randint(5, 100, (4, 40), generator=generator)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 1, 1, 0])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_a_new_model_is_described_by_what_is_not_the_default():
    """A field that a later version adds is at its default, and must not make another run of one cut short."""
    config = SKTformerConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, smoother_norm="batch_norm")
    described = describe_config(SKTformerForMaskedLM(config), SizedModelArguments())
    expected = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "smoother_norm": "batch_norm"}
    assert described == expected | {"model_type": "sktformer"}
    config.landmark_seed = 5
    own = (
        SizedModelArguments(config_overrides="landmark_seed=5"),
        SizedModelArguments(model_config='{"landmark_seed": 5}'),
    )
    for arguments in own:
        assert describe_config(SKTformerForMaskedLM(config), arguments) == described | {"landmark_seed": 5}
    assert describe_config(SKTformerForMaskedLM(config), SizedModelArguments()) == described


def test_a_model_whose_parameters_are_split_is_lengthened_whole(tokenizer, tmp_path, monkeypatch):
    """As with ZeRO-3, where a process holds parameters without elements but for the time that it asks for."""
    model = load(save_sktformer(tmp_path / "model"))
    expected = copy.deepcopy(model)
    expected.resize_position_embeddings(40)
    parts = [(parameter, parameter.data) for parameter in model.parameters()]

    @contextmanager
    def gather(parameters, modifier_rank=None):
        assert (modifier_rank, len(parameters)) == (0, len(parts))
        for parameter, whole in parts:
            parameter.data = whole
        yield

    for parameter, whole in parts:
        parameter.data = whole.new_empty(0)
    zero = types.SimpleNamespace(GatheredParameters=gather)
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(zero=zero))
    monkeypatch.setattr(models, "is_deepspeed_zero3_enabled", lambda: True)
    fit_length(model, tokenizer, 40)
    ids = torch.randint(5, 100, (2, 16))
    assert torch.equal(model.eval()(input_ids=ids).logits, expected.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("smoother_norm", ["batch_norm", "layer_norm"])
def test_merged_adapters_are_loaded_as_they_answered(tokenizer, tmp_path, smoother_norm):
    peft = pytest.importorskip("peft")
    start = save_sktformer(tmp_path / "base", smoother_norm=smoother_norm)
    base = load(start)
    fit_length(base, tokenizer, 40)
    statistics = {name: value.clone() for name, value in base.named_buffers() if "classifier" not in name}
    adapted = add_lora(base, LoraArguments(lora=True, lora_rank=2))
    (pooling,) = {module for name, module in adapted.named_modules() if name.endswith("default.pooling")}
    pooling.calibrate(2 + 3 * torch.randn(5, pooling.width))
    adapted = train_two_steps(adapted)
    trained = {name.split(".lora_")[0] for name, p in adapted.named_parameters() if p.requires_grad}
    assert not any("embeddings" in name or "filter" in name for name in trained)
    assert any("mlp.up_proj" in name for name in trained)
    assert any("classifier" in name and ".dense" in name for name in trained)
    after = dict(base.named_buffers())
    for name, value in statistics.items():
        assert torch.equal(after[name], value), name
    ids = torch.randint(5, 100, (3, 40))
    expected = adapted(input_ids=ids).logits
    merged = merge_adapters(adapted, tmp_path / "merged" / "adapter")
    loaded = load(save(merged, tmp_path / "merged"), new_head=False).eval()
    assert isinstance(loaded, SKTformerForSequenceClassification)
    assert loaded.config.id2label == {0: "negative", 1: "positive"}
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
    assert torch.equal(loaded.classifier.pooling.scale, pooling.scale)
    other = load(start)
    fit_length(other, tokenizer, 40)
    alone = peft.PeftModel.from_pretrained(other, tmp_path / "merged" / "adapter").eval()
    torch.testing.assert_close(alone(input_ids=ids).logits, expected)


def test_an_adapter_is_saved_for_peft_and_names_no_place(tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    # Its pooler counts to the encoder, and is not in the checkpoint of a masked language model.
    bert = save(BertForMaskedLM(BertConfig(vocab_size=100, **SIZES)), tmp_path / "base")
    adapted = train_two_steps(add_lora(load(bert, labels=[]), LoraArguments(lora=True)))
    ids = torch.randint(5, 100, (3, 40))
    expected, folder = adapted(input_ids=ids).logits, tmp_path / "merged" / "adapter"
    loaded = load(save(merge_adapters(adapted, folder), tmp_path / "merged"), labels=[], new_head=False).eval()
    assert (loaded.config.problem_type, loaded.config.id2label) == ("regression", {0: "score"})
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
    assert peft.PeftConfig.from_pretrained(folder).base_model_name_or_path == "base"
    other = peft.PeftModel.from_pretrained(load(bert, labels=[]), folder).eval()
    assert torch.equal(other(input_ids=ids).logits, expected)
    for new_head in (True, False):
        with pytest.raises(UserError, match="is an adapter: merge it"):
            load(folder, new_head=new_head)
    with pytest.raises(UserError, match="is an adapter: merge it"):
        load_trained_config(CheckpointArguments(model_name_or_path=str(folder)))


def test_adapters_without_peft_are_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "is_peft_available", lambda: False)
    with pytest.raises(UserError, match=r"pip install -e \"\.\[lora\]\""):
        add_lora(load(save_sktformer(tmp_path)), LoraArguments(lora=True))
    with pytest.raises(ValueError, match="--lora_rank is 0"):
        LoraArguments(lora=True, lora_rank=0)
    with pytest.raises(ValueError, match=r"--lora_dropout is 1\.5; it must be at least 0 and less than 1"):
        LoraArguments(lora=True, lora_dropout=1.5)
    with pytest.raises(ValueError, match="--lora_alpha is nan; it must be a positive number"):
        LoraArguments(lora=True, lora_alpha=float("nan"))
    with pytest.raises(UserError, match="--lora_dropout is for adapters; add --lora"):
        LoraArguments(lora_dropout=0.1)


def test_fields_that_sizes_have_are_taken_over_by_others():
    overrides = "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0,smoother_dropout_prob=0.0"
    for model_type, names in (
        ("bert", ("hidden_dropout_prob", "attention_probs_dropout_prob")),
        ("modernbert", ("embedding_dropout", "mlp_dropout", "attention_dropout")),
    ):
        plain = models.build_config(ModelArguments(model_type=model_type), 100, 32, 0, 0)
        still = models.build_config(ModelArguments(model_type=model_type, config_overrides=overrides), 100, 32, 0, 0)
        assert all(getattr(plain, name) == 0.1 and getattr(still, name) == 0.0 for name in names)
    with pytest.raises(UserError, match="`nothing=1` is not field=value with a field of BertConfig"):
        models.build_config(ModelArguments(model_type="bert", config_overrides="nothing=1"), 100, 32, 0, 0)
    own = models.build_config(ModelArguments(model_type="bert", config_overrides="layer_norm_eps=1e-3"), 100, 32, 0, 0)
    assert own.layer_norm_eps == 1e-3


def test_a_fingerprint_follows_weights_of_the_older_form(tmp_path):
    seen = set()
    for weights in (b"one", b"two"):
        (tmp_path / "pytorch_model.bin").write_bytes(weights)
        seen.add(fingerprint_checkpoint(str(tmp_path)))
    assert len(seen) == 2
