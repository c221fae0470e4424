"""Masking, metrics and step times of masked language modelling."""

import math

import pytest
import torch
from datasets import Dataset
from transformers import BertTokenizer, EvalPrediction

from experiments.text.masked_lm import IGNORE_INDEX, MaskingCollator, mask_once, sum_token_losses, token_metrics
from experiments.text.packing import unigram_cross_entropy
from experiments.training import StepTimer


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(995))]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def make_blocks(lengths):
    generator = torch.Generator().manual_seed(0)
    rows = [[2, *torch.randint(5, 1000, (length - 2,), generator=generator).tolist(), 3] for length in lengths]
    return Dataset.from_dict({"input_ids": rows})


def test_masking_follows_the_recipe(tokenizer):
    blocks = make_blocks([128] * 200)
    batch = MaskingCollator(tokenizer=tokenizer, mlm_probability=0.15, seed=0)(list(blocks))
    original = torch.tensor(blocks["input_ids"][:])
    predicted = batch["labels"] != IGNORE_INDEX
    assert torch.equal(batch["labels"][predicted], original[predicted])
    assert not predicted[:, [0, -1]].any()
    assert abs(predicted[:, 1:-1].float().mean() - 0.15) < 0.01
    seen = batch["input_ids"][predicted]
    assert abs((seen == 4).float().mean() - 0.8) < 0.03
    assert abs((seen == original[predicted]).float().mean() - 0.1) < 0.03
    assert torch.equal(batch["input_ids"][~predicted], original[~predicted])
    assert "attention_mask" not in batch


def test_shorter_blocks_are_padded_and_masked_out(tokenizer):
    batch = MaskingCollator(tokenizer=tokenizer, seed=0)(list(make_blocks([12, 5])))
    assert batch["attention_mask"].tolist() == [[1] * 12, [1] * 5 + [0] * 7]
    assert (batch["labels"][1, 5:] == IGNORE_INDEX).all()


def test_evaluation_masks_do_not_depend_on_the_batch(tokenizer):
    blocks = make_blocks([16, 16, 9, 16])
    masked, again = (mask_once(blocks, tokenizer, 0.15, seed=0) for _ in range(2))
    assert masked["labels"][:] == again["labels"][:]
    assert masked["labels"][:] != mask_once(blocks, tokenizer, 0.15, seed=1)["labels"][:]
    assert [len(row) for row in masked["input_ids"]] == [16, 16, 9, 16]
    batch = MaskingCollator(tokenizer=tokenizer)([masked[1], masked[2]])
    assert batch["labels"][1].tolist() == masked["labels"][2] + [IGNORE_INDEX] * 7
    assert batch["input_ids"][1].tolist() == masked["input_ids"][2] + [0] * 7


def test_metrics_weigh_tokens_equally(tokenizer):
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 6, 11), torch.randint(11, (4, 6))
    labels[0, 1:] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    sums = torch.cat([sum_token_losses((logits[part],), labels[part]) for part in (slice(0, 1), slice(1, 4))])
    metrics = token_metrics(EvalPrediction(predictions=sums.numpy(), label_ids=labels.numpy()))
    assert metrics["predicted_tokens"] == 13
    assert metrics["token_loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected.item()), rel=1e-6)
    right = (logits.argmax(-1) == labels).sum().item()
    assert metrics["accuracy"] == pytest.approx(right / 13)


def test_no_predicted_token_is_no_division_by_zero():
    sums = sum_token_losses(torch.randn(2, 3, 5), torch.full((2, 3), IGNORE_INDEX))
    assert token_metrics(EvalPrediction(predictions=sums.numpy(), label_ids=sums.numpy()))["token_loss"] == 0


def test_unigram_loss_is_the_loss_of_constant_logits(tokenizer):
    """The baseline beside the perplexity is what a model that outputs log frequencies everywhere would score."""
    train, evaluation = make_blocks([64] * 50), make_blocks([32] * 10)
    counts = torch.ones(1000)
    for row in train["input_ids"]:
        counts += torch.bincount(torch.tensor(row), minlength=1000)
    counts[:5] = 0
    tokens = torch.tensor([token for row in evaluation["input_ids"] for token in row[1:-1]])
    expected = torch.nn.functional.cross_entropy(counts.log().clamp(min=-1e9).expand(len(tokens), -1), tokens)
    assert unigram_cross_entropy(train, evaluation, 1000, range(5)) == pytest.approx(expected.item(), rel=1e-5)


def test_step_timer():
    timer = StepTimer()
    assert timer.metrics() == {}
    for _ in range(8):
        timer.on_step_begin()
        sum(range(20_000))
        timer.on_step_end()
    metrics = timer.metrics()
    assert 0 < metrics["step_time_ms"] < 1000
    assert 0 < metrics["step_cpu_time_ms"] < 1000
