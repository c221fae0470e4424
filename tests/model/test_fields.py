"""Fields of the configuration, each where it is read."""

from typing import Any

import pytest
import torch
from torch import nn

from modeling_sktformer import SKTformerForMaskedLM, SKTformerForSequenceClassification, SKTformerModel
from modeling_sktformer.attention import token_weights
from modeling_sktformer.sequences import draw_permutation
from support.builders import make_config


@pytest.mark.parametrize(("classifier_dropout", "expected"), [(0.0, 0.0), (None, 0.1)])
def test_every_dropout_has_its_own_probability(classifier_dropout, expected):
    probabilities = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "smoother_dropout_prob": 0.3}
    config = make_config(**probabilities, classifier_dropout=classifier_dropout)
    model = SKTformerForSequenceClassification(config)
    found = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    places = {"attention.dropout": 0.2, "convolution_stem.dropout": 0.3, "classifier.dropout": expected}
    for name, probability in found.items():
        assert probability == next((value for place, value in places.items() if name.endswith(place)), 0.1), name
    assert {*found.values()} == {0.1, 0.2, 0.3, expected}


@pytest.mark.parametrize("model_class", [SKTformerModel, SKTformerForMaskedLM])
def test_every_layer_norm_has_the_configured_floor(model_class):
    model = model_class(make_config(smoother_norm="layer_norm", layer_norm_eps=0.1))
    assert {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)} == {0.1}


def test_the_embedding_of_padding_is_zero():
    embeddings: Any = SKTformerModel(make_config(pad_token_id=3)).get_input_embeddings()
    assert embeddings.padding_idx == 3
    assert not embeddings.weight[3].any()
    assert embeddings.weight[4].any()


def test_landmarks_of_a_seed_are_the_same_in_every_release():
    assert draw_permutation(8, 0, 1, "landmark_order").tolist() == [2, 0, 6, 1, 3, 4, 7, 5]
    one, other = (draw_permutation(50, *of, "landmark_order") for of in ((1, 11), (11, 1)))
    assert not torch.equal(one, other)


def test_a_softmax_over_no_landmark_is_zero():
    mask = torch.tensor([[True, True, False], [False] * 3])
    weights = token_weights(torch.randn(2, 2, 3, 4), mask)
    assert not weights[1].any()
    assert not weights[0, :, 2].any()
    torch.testing.assert_close(weights[0].sum(dim=1), torch.ones(2, 4))
