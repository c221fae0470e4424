"""A head that is computed: what it answers, how it is written into a model, and what a run of it leaves."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, FNetConfig, FNetForSequenceClassification
from transformers import default_data_collator as collate

from experiments import fitted_head
from experiments.arguments import UserError
from experiments.fitted_head import (
    LinearClassifier,
    Standardised,
    fit_classifier,
    fit_head,
    mean_and_deviation,
    predict_frozen,
    write_classifier,
)
from modeling_sktformer import SKTformerForSequenceClassification, SKTformerForSequenceMatching
from support.builders import make_config


ARGS: Any = SimpleNamespace(
    per_device_eval_batch_size=8, device=torch.device("cpu"), disable_tqdm=True, should_log=False
)


def make_groups(seed, shift=3.0):
    """
    Features of two sources of each of three labels. Labels differ a little in the first column; in the second each
    source has a place of its own, far from the others.
    """
    numbers = np.random.default_rng(seed)
    labels = np.repeat([0, 1, 2], 80)
    features = numbers.normal(size=(240, 6))
    features[:, 0] = 0.2 * features[:, 0] + labels
    features[:, 1] += shift * np.repeat(numbers.normal(size=6), 40)
    return features, labels


def make_examples(count):
    """Sequences of which each label has its own tokens, some of them with a neighbour."""
    choose, labels = random.Random(0), [n % 3 for n in range(count)]
    rows = [[choose.randrange(1 + 8 * label, 13 + 8 * label) for _ in range(8)] for label in labels]
    return Dataset.from_dict({"input_ids": rows, "label": labels})


def standardise(features):
    return (features - features.mean(axis=0)) / features.std(axis=0)


def answers(classifier: LinearClassifier, features):
    return (features @ classifier.weight.T + classifier.bias).argmax(axis=1)


def test_what_varies_within_labels_has_little_weight():
    features, labels = make_groups(1)
    classifier = fit_classifier(standardise(features), labels, 3)
    weights = np.abs(classifier.weight[0] - classifier.weight[2])
    assert weights[0] > 10 * weights[1:].max()
    others, expected = make_groups(2)
    assert (answers(classifier, standardise(others)) == expected).mean() > 0.95


def test_directions_that_are_constant_or_the_same_do_no_harm():
    features, labels = make_groups(1)
    features = np.column_stack([standardise(features), np.zeros(240), standardise(features)[:, 0]])
    classifier = fit_classifier(features, labels, 3)
    assert np.isfinite(classifier.weight).all()
    assert (answers(classifier, features) == labels).mean() > 0.95


@pytest.mark.parametrize("present", [[0, 2], [1, 2, 4]])
def test_labels_without_an_example_are_never_answered(present):
    features, labels = make_groups(1)
    rows = labels < len(present)
    features, labels = standardise(features[rows]), np.array(present)[labels[rows]]
    classifier = fit_classifier(features, labels, 5)
    assert (answers(classifier, features) == labels).mean() > 0.95
    scores = features @ classifier.weight.T + classifier.bias
    absent = [label for label in range(5) if label not in present]
    assert (scores[:, absent].max(axis=1) < scores[:, present].max(axis=1)).all()


def test_rare_labels_have_the_weight_of_others():
    numbers = np.random.default_rng(0)
    labels = np.repeat([0, 1], [400, 10])
    features = numbers.normal(size=(410, 1)) + labels[:, None]
    found = answers(fit_classifier(features, labels, 2), features)
    assert (found[labels == 1] == 1).mean() > 0.5


def test_two_labels_are_told_apart_as_surely_as_they_differ():
    generator = np.random.default_rng(0)
    features = np.concatenate([generator.normal(mean, 1, (4000, 1)) for mean in (-1, 1)])
    classifier = fit_classifier(features, np.repeat([0, 1], 4000), 2)
    # The logarithm of the odds of N(1, 1) against N(-1, 1) is 2 x.
    assert classifier.weight[1, 0] - classifier.weight[0, 0] == pytest.approx(2, rel=0.15)


def test_what_varies_by_rounding_alone_is_not_blown_up():
    features = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    features[:, 1] = 1 + 1e-9 * features[:, 1]
    assert Standardised.of(features).std[1] == 1


def test_fewer_examples_than_features_give_what_all_features_would(monkeypatch):
    numbers = np.random.default_rng(0)
    labels = np.arange(40) % 4
    features = standardise(numbers.normal(size=(40, 60)) + 0.5 * numbers.normal(size=(4, 60))[labels])
    reduced = fit_classifier(features, labels, 4)
    monkeypatch.setattr(np.linalg, "svd", lambda given, full_matrices: (None, None, np.eye(60)))
    whole = fit_classifier(features, labels, 4)
    np.testing.assert_allclose(features @ reduced.weight.T, features @ whole.weight.T, atol=1e-2)
    np.testing.assert_allclose(reduced.bias, whole.bias, atol=1e-2)


def test_one_example_of_each_label_is_enough():
    features = standardise(np.random.default_rng(0).normal(size=(3, 8)))
    for copies in (1, 2):
        rows, labels = np.repeat(features, copies, axis=0), np.repeat(np.arange(3), copies)
        assert answers(fit_classifier(rows, labels, 3), rows).tolist() == labels.tolist()


def test_features_that_are_not_finite_are_an_error_for_people():
    with pytest.raises(UserError, match="not finite everywhere: its training has diverged"):
        fit_classifier(np.array([[1.0, 2.0], [np.nan, 1.0]]), np.array([0, 1]), 2)


def test_a_single_label_is_refused():
    with pytest.raises(UserError, match="have a single label; leave out --fit_head and --baseline frozen"):
        fit_classifier(np.ones((4, 2)), np.ones(4, dtype=int), 2)


@pytest.mark.parametrize("num_labels", [2, 3, 12])
def test_a_head_gives_what_the_classifier_does(num_labels):
    torch.manual_seed(0)
    model = SKTformerForSequenceClassification(make_config(classifier_pooling="layers", num_labels=num_labels))
    head = model.double().eval().classifier
    features = torch.randn(200, head.dense.in_features, dtype=torch.float64)
    numbers = np.random.default_rng(0)
    weight = 0.3 * numbers.normal(size=(num_labels, features.shape[1]))
    classifier = LinearClassifier(weight, numbers.normal(size=num_labels))
    write_classifier(head, classifier, features)
    got = head.output(torch.tanh(head.dense(features))).softmax(dim=-1)
    expected = (features @ torch.from_numpy(weight).T + torch.from_numpy(classifier.bias)).softmax(dim=-1)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)


def test_a_quantised_head_keeps_its_answers():
    torch.manual_seed(0)
    model = SKTformerForSequenceClassification(make_config(classifier_pooling="layers", num_labels=3))
    head = model.eval().classifier
    nn.init.normal_(head.dense.weight)  # the rows that are not written are far larger
    features = torch.randn(200, head.dense.in_features, dtype=torch.float64)
    weight = np.random.default_rng(0).normal(size=(3, features.shape[1]))
    write_classifier(head, LinearClassifier(weight, np.zeros(3)), features)
    assert head.dense.weight[2:].abs().min() > 0  # which learn if it is trained on
    scale = head.dense.weight.abs().max() / 127
    quantised = (head.dense.weight / scale).round() * scale
    got = head.output(torch.tanh(features.float() @ quantised.mT)).argmax(dim=-1)
    assert (got == (features @ torch.from_numpy(weight).T).argmax(dim=-1)).double().mean() > 0.95


def test_examples_that_are_all_alike_give_a_head_that_tells_nothing():
    model = SKTformerForSequenceClassification(make_config(classifier_pooling="layers", num_labels=3))
    examples = Dataset.from_dict({"input_ids": [[5] * 4] * 6, "label": [0, 1, 2] * 2})
    fit_head(model, examples, collate, ARGS)
    chances = model.eval()(**collate(list(examples))).logits.softmax(dim=-1)
    torch.testing.assert_close(chances, torch.full((6, 3), 1 / 3), rtol=0, atol=1e-3)


def test_labels_beyond_the_head_s_width_share_its_strongest_directions():
    torch.manual_seed(0)
    model = SKTformerForSequenceClassification(make_config(classifier_pooling="layers", num_labels=20))
    head = model.double().eval().classifier
    assert head.dense.out_features < 19
    features = torch.randn(300, head.dense.in_features, dtype=torch.float64)
    first, second = (np.linalg.qr(np.random.default_rng(n).normal(size=(72, 20)))[0] for n in range(2))
    weight = first[:20] * 0.6 ** np.arange(20) @ second.T
    write_classifier(head, LinearClassifier(weight, np.zeros(20)), features)
    got = head.output(torch.tanh(head.dense(features))).argmax(dim=-1)
    assert (got == (features @ torch.from_numpy(weight).T).argmax(dim=-1)).double().mean() > 0.7


@pytest.mark.parametrize("pooling", ["cls", "mean_std", "layers"])
def test_a_head_is_computed_and_the_encoder_stays(pooling):
    torch.manual_seed(0)
    model = SKTformerForSequenceClassification(make_config(classifier_pooling=pooling, num_labels=3))
    before = {name: values.clone() for name, values in model.sktformer.state_dict().items()}
    examples = make_examples(120)
    fit_head(model, examples, collate, ARGS)
    assert all(torch.equal(values, before[name]) for name, values in model.sktformer.state_dict().items())
    batch = collate(list(examples))
    right = (model(**batch).logits.argmax(dim=-1) == batch["labels"]).double().mean()
    assert right > {"cls": 0.6, "mean_std": 0.9, "layers": 0.95}[pooling]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_frozen_encoder_answers_as_the_head_that_is_computed():
    torch.manual_seed(0)
    model = SKTformerForSequenceClassification(make_config(classifier_pooling="layers", num_labels=3))
    splits = {"train": make_examples(120), "test": make_examples(31).remove_columns("label")}
    chances = predict_frozen(model, splits, collate, ARGS)
    assert chances.keys() == {"test"}
    fit_head(model, splits["train"], collate, ARGS)
    with torch.no_grad():
        expected = model(**collate(list(splits["test"]))).logits.softmax(dim=-1)
    np.testing.assert_allclose(chances["test"], expected.numpy(), atol=0.01)


def test_any_encoder_is_read_without_its_padding():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "num_labels": 3}
    bert: Any = BertForSequenceClassification(BertConfig(num_attention_heads=2, **sizes))
    examples = make_examples(90)

    def padded(rows):
        batch = collate(rows)
        filler = torch.zeros(len(rows), 3, dtype=torch.long)
        mask = torch.cat([torch.ones_like(batch["input_ids"]), filler], dim=1)
        return batch | {"input_ids": torch.cat([batch["input_ids"], filler + 7], dim=1), "attention_mask": mask}

    plain, filled = (
        predict_frozen(bert, {"train": examples, "test": examples}, make, ARGS)["test"] for make in (collate, padded)
    )
    np.testing.assert_allclose(filled, plain, atol=1e-3)
    assert (plain.argmax(axis=1) == examples["label"]).mean() > 0.9


def test_states_that_an_encoder_fills_up_are_cut_and_shorter_ones_refused():
    states, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    mean, deviation = mean_and_deviation(states, mask)
    torch.testing.assert_close(mean[0], states[0, :3].mean(dim=0).double())
    torch.testing.assert_close(deviation[1], states[1, :4].double().std(dim=0, correction=0))
    with pytest.raises(UserError, match="has states of 2 tokens for inputs of 4; leave it out"):
        mean_and_deviation(states[:, :2], mask)


def test_heads_of_pairs_are_refused():
    pairs = SKTformerForSequenceMatching(make_config(num_labels=3))
    with pytest.raises(UserError, match="this one reads two; leave it out"):
        fit_head(pairs, make_examples(8), collate, ARGS)


def test_of_other_heads_the_last_layer_is_computed():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_labels": 3}
    bert: Any = BertForSequenceClassification(BertConfig(num_attention_heads=2, **sizes))
    before = {name: values.clone() for name, values in bert.state_dict().items()}
    examples = make_examples(120)
    fit_head(bert, examples, collate, ARGS)
    changed = {name for name, values in bert.state_dict().items() if not torch.equal(values, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    batch = collate(list(examples))
    assert (bert(**batch).logits.argmax(dim=-1) == batch["labels"]).double().mean() > 0.6
    bert.classifier = torch.nn.Linear(16, 3, bias=False)
    with pytest.raises(UserError, match="a linear layer with a bias, and BertForSequenceClassification ends in none"):
        fit_head(bert, examples, collate, ARGS)


def test_a_head_of_numbers_is_refused():
    model = SKTformerForSequenceClassification(make_config(problem_type="regression", num_labels=1))
    with pytest.raises(UserError, match="--fit_head is for single labels, not regression; leave it out"):
        fit_head(model, make_examples(8), collate, ARGS)


def test_examples_may_have_no_label_of_a_class():
    model = SKTformerForSequenceClassification(make_config(num_labels=4))
    examples = Dataset.from_dict(
        {"input_ids": [[n % 3 + 5] * 4 for n in range(30)], "label": [n % 3 for n in range(30)]}
    )
    fit_head(model, examples, collate, ARGS)
    assert model(**collate(list(examples))).logits.argmax(dim=-1).tolist() == examples["label"]


def test_a_head_s_earlier_bias_is_gone():
    torch.manual_seed(0)
    model = SKTformerForSequenceClassification(make_config(classifier_pooling="layers", num_labels=3))
    head: Any = model.double().eval().classifier
    nn.init.ones_(head.dense.bias)  # as a head that was trained may have it
    features = torch.randn(200, head.dense.in_features, dtype=torch.float64)
    classifier = LinearClassifier(0.3 * np.random.default_rng(0).normal(size=(3, features.shape[1])), np.zeros(3))
    write_classifier(head, classifier, features)
    got = head.output(torch.tanh(head.dense(features))).softmax(dim=-1)
    expected = (features @ torch.from_numpy(classifier.weight).T).softmax(dim=-1)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)


def test_padding_that_no_mask_tells_of_is_known_by_its_number(monkeypatch):
    """As that of FNet, whose tokenizer makes no mask."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_labels": 3}
    fnet: Any = FNetForSequenceClassification(FNetConfig(pad_token_id=3, **sizes))
    masks: list[torch.Tensor] = []

    def pooled(states, mask):
        masks.append(mask)
        return mean_and_deviation(states, mask)

    monkeypatch.setattr(fitted_head, "mean_and_deviation", pooled)

    def padded(rows):
        batch = collate(rows)
        filler = torch.full((len(rows), 2), 3)
        return batch | {"input_ids": torch.cat([batch["input_ids"].clamp(min=4), filler], dim=1)}

    examples = make_examples(30)
    predict_frozen(fnet, {"train": examples, "test": examples}, padded, ARGS)
    assert masks
    for mask in masks:
        assert mask[:, :-2].all()
        assert not mask[:, -2:].any()


def test_what_an_encoder_gives_for_other_parts_is_finite():
    model: Any = SKTformerForSequenceClassification(make_config(classifier_pooling="layers", num_labels=3))
    with torch.no_grad():
        model.get_input_embeddings().weight[29] = torch.nan
    splits = {"train": make_examples(30), "test": Dataset.from_dict({"input_ids": [[29] * 8]})}
    with pytest.raises(UserError, match="not finite everywhere"):
        predict_frozen(model, splits, collate, ARGS)


def test_labels_without_an_example_have_no_chance():
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 2], 80)
    features = generator.normal(size=(160, 3)) + labels[:, None] / 2
    classifier = fit_classifier(features, labels, 3)
    scores = features @ classifier.weight.T + classifier.bias
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    assert chances[:, 1].max() < 1e-3
