"""Models for the scripts, by preset, architecture or checkpoint."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, GPT2Config, GPT2LMHeadModel

from experiments.arguments import UserError
from experiments.models import ModelArguments, build_masked_lm
from modeling_sktformer import SKTformerForMaskedLM


SIZES: dict = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}

EMBEDDINGS = "bert.embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(95))]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def build(tokenizer, length=32, seed=0, **arguments):
    return build_masked_lm(ModelArguments(**arguments), tokenizer, length, seed)


def test_a_preset_is_made_for_the_length_vocabulary_and_seed(tokenizer):
    model = build(tokenizer, seed=7)
    assert isinstance(model, SKTformerForMaskedLM)
    config = model.config
    assert (config.vocab_size, config.max_position_embeddings, config.landmark_seed) == (100, 32, 7)
    assert (config.hidden_size, config.num_hidden_layers) == (128, 2)


@pytest.mark.parametrize(
    "model_type",
    ["bert", "fnet", "nystromformer", "modernbert", "roberta", "albert", "electra", "distilbert", "mpnet", "yoso"],
)
def test_other_architectures_have_the_same_sizes_and_learn(tokenizer, model_type):
    model = build(tokenizer, model_type=model_type)
    config = model.config
    assert config.model_type == model_type
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (128, 2, 100)
    if model_type != "fnet":
        assert config.num_attention_heads == 2
    assert {getattr(config, name, 512) for name in ("intermediate_size", "hidden_dim")} == {512}
    ids = torch.randint(5, 100, (2, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [parameter.grad for parameter in model.get_input_embeddings().parameters()]
    assert gradients[0] is not None
    assert gradients[0].any()


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
        ({"config_overrides": "num_landmark_token=3"}, "`num_landmark_token=3` is not field=value"),
        ({"config_overrides": "num_segments"}, "is not field=value"),
        ({"config_overrides": "smoother_norm=none"}, "smoother_norm"),
        ({"model_type": "reformer"}, "No model can be made"),
        ({"model_type": "nonsense"}, "No model can be made"),
    ],
)
def test_models_that_cannot_be_made_are_explained(tokenizer, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        build(tokenizer, **arguments)
    assert "\n" not in str(error.value)


def test_a_checkpoint_and_a_new_architecture_exclude_each_other():
    with pytest.raises(ValueError, match="--model_type"):
        ModelArguments(model_name_or_path="x", model_type="bert")


def test_checkpoints(tokenizer, tmp_path):
    bert = BertForMaskedLM(BertConfig(vocab_size=100, max_position_embeddings=32, **SIZES))
    bert.save_pretrained(tmp_path / "bert")
    loaded = build(tokenizer, model_name_or_path=str(tmp_path / "bert"))
    assert torch.equal(loaded.state_dict()[EMBEDDINGS], bert.state_dict()[EMBEDDINGS])

    GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="cannot be loaded as a masked-LM model"):
        build(tokenizer, model_name_or_path=str(tmp_path / "gpt2"))
    with pytest.raises(UserError, match="cannot be loaded as a masked-LM model"):
        build(tokenizer, model_name_or_path=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="--max_seq_length 33 is more"):
        build(tokenizer, length=33, model_name_or_path=str(tmp_path / "bert"))
    BertForMaskedLM(BertConfig(vocab_size=99, **SIZES)).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match="has 100 tokens, the model embeds 99"):
        build(tokenizer, model_name_or_path=str(tmp_path / "small"))


def test_weights_of_another_architecture_are_refused(tokenizer, tmp_path):
    BertForMaskedLM(BertConfig(vocab_size=100, max_position_embeddings=32, **SIZES)).save_pretrained(tmp_path)
    config = build(tokenizer).config
    config.update({**SIZES, "num_segments": 4})
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="another architecture"):
        build(tokenizer, model_name_or_path=str(tmp_path))
