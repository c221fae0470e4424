"""What the matching head does that no other head does; the laws that hold for all are tested with the others."""

import pytest
import torch

from modeling_sktformer import SKTformerForSequenceMatching
from support.builders import Batch, assert_equal, in_pairs, make_batch, make_model


BATCH = make_batch([12, 3, 7, 16])


@pytest.mark.parametrize("pooling", ["cls", "mean", "mean_std"])
def test_a_pair_is_two_sequences_read_alone_and_the_head_on_what_they_are_pooled_to(pooling):
    model = make_model(SKTformerForSequenceMatching, classifier_pooling=pooling)
    head = model.classifier
    pooled = []
    for tokens, types in zip(BATCH.sequences, BATCH.token_types, strict=True):
        (states,) = model.sktformer(**Batch([tokens], [types]).inputs()).last_hidden_state
        read = states[:1] if pooling == "cls" else states.mean(0, keepdim=True)
        if pooling == "mean_std":
            read = torch.cat([read, states.std(0, correction=0, keepdim=True)], dim=1)
        pooled.append((read - head.pooling.center) / head.pooling.scale)
    pairs = [torch.cat([a, b, a * b, a - b], dim=1) for a, b in (pooled[:2], pooled[2:])]
    expected = head.output(torch.tanh(head.dense(torch.cat(pairs))))
    assert_equal(model(**in_pairs(BATCH.inputs("left"))).logits, expected)


@pytest.mark.parametrize("other", [0, 1], ids=["first", "second"])
def test_either_sequence_and_its_mask_count(other):
    model = make_model(SKTformerForSequenceMatching, classifier_pooling="mean")
    inputs = in_pairs(BATCH.inputs())
    logits = model(**inputs).logits
    for name in ("input_ids", "attention_mask"):
        changed = inputs[name].clone()
        changed[0, other, 1] = 1 - changed[0, other, 1] if name == "attention_mask" else 29 - changed[0, other, 1]
        got = model(**{**inputs, name: changed}).logits
        assert not torch.allclose(got[0], logits[0])
        assert_equal(got[1], logits[1])


def test_hidden_states_and_attentions_have_a_row_for_each_sequence():
    model = make_model(SKTformerForSequenceMatching)
    inputs = BATCH.inputs("holes")
    output = model(**in_pairs(inputs), output_hidden_states=True, output_attentions=True)
    expected = model.sktformer(**inputs, output_hidden_states=True, output_attentions=True)
    assert [states.shape for states in output.hidden_states] == [(4, 16, 12)] * 3
    assert [attentions.shape for attentions in output.attentions] == [(4, 2, 16, 5)] * 2
    assert_equal(output.hidden_states, expected.hidden_states)
    assert_equal(output.attentions, expected.attentions)


def test_embeddings_and_position_ids_come_in_pairs():
    model = make_model(SKTformerForSequenceMatching)
    inputs = in_pairs(BATCH.inputs())
    positions = torch.arange(16).flip(0).expand(2, 2, 16)
    expected = model(**inputs, position_ids=positions).logits
    assert not torch.allclose(model(**inputs).logits, expected)
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert_equal(model(**inputs, inputs_embeds=embeddings, position_ids=positions).logits, expected)


@pytest.mark.parametrize(
    ("num_labels", "labels", "loss"),
    [
        (1, torch.tensor([0.5, -2.0]), torch.nn.functional.mse_loss),
        (2, torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.nn.functional.binary_cross_entropy_with_logits),
        (3, torch.tensor([2, 0]), torch.nn.functional.cross_entropy),
    ],
    ids=["regression", "multi-label", "single label"],
)
def test_the_labels_say_which_loss(num_labels, labels, loss):
    output = make_model(SKTformerForSequenceMatching, num_labels=num_labels)(**in_pairs(BATCH.inputs()), labels=labels)
    targets = labels.double() if labels.is_floating_point() else labels
    assert_equal(output.loss, loss(output.logits.squeeze(-1), targets))


def test_mistakes_are_named():
    model = make_model(SKTformerForSequenceMatching)
    ids = torch.ones(6, 5, dtype=torch.long)
    for shape in ((6, 5), (2, 3, 5), (6, 1, 5)):
        with pytest.raises(ValueError, match=rf"`input_ids` has shape \({shape[0]}, .*\(batch_size, 2, seq"):
            model(ids.view(shape))
    with pytest.raises(ValueError, match=r"`inputs_embeds` has shape \(3, 2, 60\).*sequence_length, hidden_size\)"):
        model(inputs_embeds=torch.ones(3, 2, 60, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"`attention_mask` has shape \(3, 5\).*\(batch_size, 2, sequence_length\)"):
        model(ids.view(3, 2, 5), attention_mask=torch.ones(3, 5))
    with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
        model(attention_mask=ids.view(3, 2, 5))
    for labels, message in (
        (
            torch.zeros(6).long(),
            r"labels of shape \(6,\) and type torch.int64 do not fit logits of shape \(3, 3\).*one class",
        ),
        (torch.zeros(3, 3).long(), "single_label_classification problem.*multi_label_classification"),
        (torch.zeros(3), 'multi_label_classification problem; set `config.problem_type="single.*, which are integers'),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids.view(3, 2, 5), labels=labels)
    model.config.problem_type = "single_label_classification"
    with pytest.raises(ValueError, match=r"type torch.float32 do not fit.*give one class index, an integer"):
        model(ids.view(3, 2, 5), labels=torch.zeros(3))
    model.config.problem_type = "Regression"
    with pytest.raises(ValueError, match="`problem_type` is 'Regression'; it must be one of regression, single_label"):
        model(ids.view(3, 2, 5), labels=torch.zeros(3))
