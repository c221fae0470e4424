"""What heads of sequences read of the tokens."""

import pytest
import torch

from modeling_sktformer import SKTformerForSequenceClassification
from modeling_sktformer.sequences import SequencePooling
from support.builders import assert_equal, gradients, make_batch, make_config, make_model


@pytest.mark.parametrize("pooling", ["mean", "mean_std"])
def test_what_is_pooled_of_a_long_sequence_fits_into_half_precision(pooling):
    states = torch.full((1, 16_384, 12), 5.0, dtype=torch.float16)
    states[:, ::2] = 255.0
    expected = torch.tensor([[130.0] * 12 + [125.0] * 12 * (pooling == "mean_std")])
    pool = SequencePooling(make_config(classifier_pooling=pooling))
    for mask in (torch.ones(1, 16_384, dtype=torch.long), None):
        torch.testing.assert_close(pool((states,), mask).float(), expected)


def test_calibration_standardises_what_heads_read_and_is_done_anew_alike():
    model = make_model(SKTformerForSequenceClassification, classifier_pooling="mean_std")
    model.load_state_dict(SKTformerForSequenceClassification(model.config).double().state_dict())
    pooling, inputs = model.classifier.pooling, make_batch([12, 5, 9, 7]).inputs()
    states = (model.sktformer(**inputs).last_hidden_state,)
    for _ in range(2):
        pooling.calibrate(pooling(states, inputs["attention_mask"]))
        pooled = pooling(states, inputs["attention_mask"])
        assert_equal(pooled.mean(0), torch.zeros(24, dtype=torch.float64))
        assert_equal(pooled.std(0, correction=0), torch.ones(24, dtype=torch.float64))
    scale = pooling.scale.clone()
    pooling.calibrate(pooled[:1])  # which says nothing of how texts differ
    assert_equal(pooling.scale, scale)
    assert_equal(pooling((states[0][:1],), inputs["attention_mask"][:1]), torch.zeros(1, 24, dtype=torch.float64))


def test_what_varies_by_rounding_alone_is_not_blown_up():
    pooling = SequencePooling(make_config(classifier_pooling="mean")).double()
    pooled = torch.randn(20, 12, dtype=torch.float64)
    pooled[:, 3] = 1 + 1e-9 * pooled[:, 3]
    pooling.calibrate(pooled)
    assert pooling.scale[3] == 1
    assert (pooling.scale != 1).sum() == 11


@pytest.mark.parametrize("asked", [False, True])
def test_hidden_states_that_a_head_reads_are_returned_where_they_are_asked_for(asked):
    model = make_model(SKTformerForSequenceClassification, classifier_pooling="layers")
    inputs = make_batch([4]).inputs()
    assert ("hidden_states" in model(**inputs, output_hidden_states=asked)) is asked
    model.config.output_hidden_states = asked
    assert ("hidden_states" in model(**inputs)) is asked


@pytest.mark.parametrize(("asked", "places"), [([0, -1, 7], [0, 2]), (1, [1]), ([], [])])
def test_hidden_states_that_are_selected_are_those_of_any_pooling(asked, places):
    for pooling in ("layers", "mean"):
        model = make_model(SKTformerForSequenceClassification, classifier_pooling=pooling)
        states = model(**make_batch([4]).inputs(), output_hidden_states=asked).get("hidden_states") or ()
        assert [place for place, state in enumerate(states) if state is not None] == places


def test_a_token_alone_has_a_deviation_without_infinite_slopes():
    model = make_model(SKTformerForSequenceClassification, classifier_pooling="mean_std").train()
    batch = make_batch([1, 1])
    model(**batch.inputs(), **batch.labels(SKTformerForSequenceClassification)).loss.backward()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values())


@pytest.mark.parametrize("pooling", ["cls", "mean", "mean_std", "layers"])
def test_a_sequence_without_a_token_spoils_no_batch(pooling):
    model = make_model(SKTformerForSequenceClassification, classifier_pooling=pooling).train()
    loss = model(**make_batch([9, 0, 4]).inputs(width=12), labels=torch.tensor([0, 1, 2])).loss
    loss.backward()
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
