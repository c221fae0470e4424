"""Masking, metrics and examples of masked language modelling."""

import copy
import hashlib
import math
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    EvalPrediction,
    ModernBertConfig,
    TrainerState,
    TrainingArguments,
)

from experiments.text import examples, masked_lm
from experiments.text.blocks import Blocks
from experiments.text.examples import choose_words, show_predictions
from experiments.text.masked_lm import (
    MaskedLMTrainer,
    MaskingCollator,
    MaskNumbering,
    mask_once,
    predicted_logits,
    sum_token_losses,
    token_metrics,
)
from experiments.text.packing import count_tokens, unigram_cross_entropy
from experiments.text.sparse_prediction import score_labelled_only
from experiments.training import RunArguments
from modeling_sktformer import load_preset
from modeling_sktformer.losses import IGNORE_INDEX


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(995))]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def make_blocks(lengths):
    generator = torch.Generator().manual_seed(0)
    rows = [[2, *torch.randint(5, 1000, (length - 2,), generator=generator).tolist(), 3] for length in lengths]
    return Dataset.from_dict({"input_ids": rows})


def test_a_tokenizer_need_not_make_a_mask(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "model_input_names", ["input_ids", "token_type_ids"])
    blocks = make_blocks([8, 12, 12])
    evaluation = mask_once(blocks, tokenizer, 0.5, seed=0)
    for rows in (blocks, evaluation):
        batch = MaskingCollator(tokenizer=tokenizer, mlm_probability=0.5, seed=0)(list(rows))
        assert batch.keys() == {"input_ids", "labels"}
        assert batch["input_ids"].shape == (3, 12)


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


def test_a_batch_of_few_tokens_has_one_masked(tokenizer):
    blocks, chosen = list(make_blocks([5, 4])), set()
    collator = MaskingCollator(tokenizer=tokenizer, mlm_probability=1e-6, seed=0)
    for _ in range(100):
        batch = collator(blocks)
        ((row, column),) = (batch["labels"] != IGNORE_INDEX).nonzero().tolist()
        assert batch["labels"][row, column] == blocks[row]["input_ids"][column]
        assert batch["input_ids"][row, column] == tokenizer.mask_token_id
        chosen.add((row, column))
    assert chosen == {(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)}
    # Where there is nothing to predict nothing is.
    batch = collator([{"input_ids": [2, 1, 3]}])
    assert bool((batch["labels"] == IGNORE_INDEX).all())


def test_shorter_blocks_are_padded_and_masked_out(tokenizer):
    batch = MaskingCollator(tokenizer=tokenizer, seed=0)(list(make_blocks([12, 5])))
    assert batch["attention_mask"].tolist() == [[1] * 12, [1] * 5 + [0] * 7]
    assert (batch["labels"][1, 5:] == IGNORE_INDEX).all()


def test_evaluation_masks_do_not_depend_on_the_batch(tokenizer, monkeypatch):
    blocks = make_blocks([16, 16, 9, 16])
    masked, again = (mask_once(blocks, tokenizer, 0.15, seed=0) for _ in range(2))
    assert masked["labels"][:] == again["labels"][:]
    assert masked["labels"][:] != mask_once(blocks, tokenizer, 0.15, seed=1)["labels"][:]
    assert [len(row) for row in masked["input_ids"]] == [16, 16, 9, 16]
    assert masked._fingerprint == again._fingerprint
    with monkeypatch.context() as context:  # of masks that are drawn in another way
        context.setattr(masked_lm, "MASKING_VERSION", "next")
        assert mask_once(blocks, tokenizer, 0.15, seed=0)._fingerprint != masked._fingerprint
    batch = MaskingCollator(tokenizer=tokenizer)([masked[1], masked[2]])
    assert batch["labels"][1].tolist() == masked["labels"][2] + [IGNORE_INDEX] * 7
    assert batch["input_ids"][1].tolist() == masked["input_ids"][2] + [0] * 7


def test_equal_blocks_of_an_evaluation_are_masked_in_other_places(tokenizer, monkeypatch):
    monkeypatch.setattr(masked_lm, "_MASKED_ROWS", 2)
    masked = mask_once(Dataset.from_dict({"input_ids": make_blocks([64])["input_ids"][:] * 6}), tokenizer, 0.3, seed=0)
    assert len({tuple(labels) for labels in masked["labels"]}) == 6


def test_evaluation_masks_do_not_depend_on_the_side_of_padding(tokenizer):
    blocks, left = make_blocks([16, 9]), copy.deepcopy(tokenizer)
    left.padding_side = "left"
    ours, others = (mask_once(blocks, each, 0.15, seed=0) for each in (tokenizer, left))
    assert [len(row) for row in others["input_ids"]] == [16, 9]
    for masked in (ours, others):
        for row, ids, labels in zip(masked["input_ids"], blocks["input_ids"], masked["labels"], strict=True):
            assert [ids[place] if label == IGNORE_INDEX else label for place, label in enumerate(labels)] == ids
            assert {row[0], row[-1]} == {2, 3}


def test_masks_follow_the_seed_and_the_number_of_the_batch_alone(tokenizer):
    """The seed of a batch is made of `seed/number`: another way to make it gives every recorded run other masks."""
    rows = list(make_blocks([16] * 8))
    collator = MaskingCollator(tokenizer=tokenizer, seed=3)
    batches = [collator(rows)["labels"] for _ in range(3)]
    for number, batch in enumerate(batches):
        seed = int.from_bytes(hashlib.sha256(f"3/{number}".encode()).digest()[:7], "big")
        plain = DataCollatorForLanguageModeling(tokenizer)
        plain.generator = torch.Generator().manual_seed(seed)
        plain.seed = 0  # so that it uses the generator
        plain.__dict__["_generator_pid"] = os.getpid()  # and newer releases this very one
        assert torch.equal(batch, plain(rows)["labels"])
    collator.start_at(1)
    assert torch.equal(collator(rows)["labels"], batches[1])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_processes_mask_what_one_process_would(tokenizer, accumulation):
    """Two processes draw the masks of one process with twice the accumulation, in a run that is resumed, too."""
    blocks = make_blocks([16] * 32)

    def masked(process: int, processes: int, step: int) -> dict[int, list[int]]:
        collator = MaskingCollator(
            tokenizer=tokenizer, seed=3, process_index=process, num_processes=processes, mlm_probability=0.5
        )
        arguments: Any = SimpleNamespace(gradient_accumulation_steps=2 * accumulation // processes)
        MaskNumbering(collator).on_epoch_begin(arguments, TrainerState(global_step=step), None)
        sampler = BatchSamplerShard(BatchSampler(SequentialSampler(blocks), 4, False), processes, process)
        batches = [(rows, collator([blocks[row] for row in rows])["labels"].tolist()) for rows in sampler]
        return {row: labels for rows, batch in batches for row, labels in zip(rows, batch, strict=True)}

    for step in (0, 3):
        assert masked(0, 1, step) == masked(0, 2, step) | masked(1, 2, step)
        assert masked(0, 2, step) != masked(0, 2, step + 1)


def make_trainer(folder, tokenizer, model, **flags):
    collator = MaskingCollator(tokenizer=tokenizer, seed=0)
    arguments = {"train_dataset": flags.pop("train_dataset", None), "eval_dataset": flags.pop("eval_dataset", None)}
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "use_cpu": True}
    training = TrainingArguments(str(folder), disable_tqdm=True, logging_steps=1, **options, **flags)
    return MaskedLMTrainer(
        model=model,
        args=training,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[MaskNumbering(collator)],
        **arguments,
    )


def make_model(tokenizer, seed=0):
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes))


def test_a_resumed_stream_is_masked_as_if_it_had_not_been_cut(tmp_path, tokenizer):
    stream = make_blocks([16] * 64).to_iterable_dataset()
    losses = []
    for folder, starts in (("whole", [6]), ("cut", [3, 6])):
        for steps in starts:
            flags = {"max_steps": steps, "save_steps": 3, "lr_scheduler_type": "constant"}
            trainer = make_trainer(tmp_path / folder, tokenizer, make_model(tokenizer), train_dataset=stream, **flags)
            trainer.train(
                resume_from_checkpoint=str(tmp_path / folder / "checkpoint-3") if steps != starts[0] else None
            )
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_metrics_weigh_tokens_equally(tokenizer):
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 6, 11), torch.randint(11, (4, 6))
    labels[0, 1:] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    sums = torch.cat([sum_token_losses((logits[part],), labels[part]) for part in (slice(0, 1), slice(1, 4))])
    metrics = token_metrics(EvalPrediction(predictions=sums.numpy(), label_ids=labels.numpy()))
    assert metrics["predicted_tokens"] == 13
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected.item()), rel=1e-6)
    right = (logits.argmax(-1) == labels).sum().item()
    assert metrics["accuracy"] == pytest.approx(right / 13)


def test_accumulated_batches_do_not_multiply_a_loss(tmp_path, tokenizer):
    """BERT takes the number of items of a step, and does not divide by it."""
    blocks, found = make_blocks([16] * 32), []
    for batches in (1, 4):
        options: dict[str, Any] = {"gradient_accumulation_steps": batches, "max_steps": 1, "learning_rate": 0.0}
        options |= {"eval_strategy": "no", "save_strategy": "no", "max_grad_norm": 1e9}
        trainer = make_trainer(tmp_path, tokenizer, make_model(tokenizer), train_dataset=blocks, **options)
        trainer.train()
        found.append(next(entry for entry in trainer.state.log_history if "grad_norm" in entry))
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=0.2)
    assert found[1]["grad_norm"] < 1.5 * found[0]["grad_norm"]


def test_no_predicted_token_is_no_division_by_zero():
    sums = sum_token_losses(torch.randn(2, 3, 5), torch.full((2, 3), IGNORE_INDEX))
    assert token_metrics(EvalPrediction(predictions=sums.numpy(), label_ids=sums.numpy()))["loss"] == 0


def test_unigram_loss_is_the_loss_of_constant_logits(tokenizer):
    """The baseline beside the perplexity is what a model that outputs log frequencies everywhere would score."""
    train, evaluation = make_blocks([64] * 50), make_blocks([32] * 10)
    counts = torch.ones(1000)
    for row in train["input_ids"]:
        counts += torch.bincount(torch.tensor(row), minlength=1000)
    counts[:5] = 0
    tokens = torch.tensor([token for row in evaluation["input_ids"] for token in row[1:-1]])
    expected = torch.nn.functional.cross_entropy(counts.log().clamp(min=-1e9).expand(len(tokens), -1), tokens)
    loss = unigram_cross_entropy(count_tokens(train, 1000), count_tokens(evaluation, 1000), range(5))
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_heads_may_give_labelled_places_alone(tmp_path, tokenizer):
    """As ModernBERT trains: its logits are `(num_labelled, vocab_size)` then."""
    evaluation = mask_once(make_blocks([16] * 5 + [9]), tokenizer, 0.3, seed=0)
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        config = ModernBertConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            sparse_prediction=sparse,
            pad_token_id=0,
            cls_token_id=2,
            sep_token_id=3,
        )
        trainer = make_trainer(tmp_path, tokenizer, AutoModelForMaskedLM.from_config(config), eval_dataset=evaluation)
        metrics = trainer.evaluate()
        results.append([metrics[key] for key in ("eval_loss", "eval_accuracy", "eval_predicted_tokens")])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize(
    "model_type", ["bert", "fnet", "longformer", "modernbert", "nystromformer", "roberta", "sktformer"]
)
def test_scoring_labelled_tokens_alone_changes_neither_loss_nor_gradients(tokenizer, model_type):
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    special = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    others = {
        "longformer": {"attention_window": 8},
        "nystromformer": {"segment_means_seq_len": 8, "num_landmarks": 8},
        "sktformer": {"num_landmark_tokens": 4, "num_landmark_features": 4, "sparse_prediction": False},
    }
    config = AutoConfig.for_model(model_type, **sizes, **special, num_attention_heads=2, **others.get(model_type, {}))
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(5, len(tokenizer), (3, 8), generator=generator)}
    labels = torch.where(torch.rand(3, 8, generator=generator) < 0.3, batch["input_ids"], IGNORE_INDEX)

    def measure():
        model.zero_grad()
        outputs = model(**batch, labels=labels)
        outputs.loss.backward()
        return outputs, [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    model.train(model_type == "sktformer")  # which by itself is sparse in training alone
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    before, gradients = measure()
    score_labelled_only(model)
    after, sparse_gradients = measure()
    assert after.loss.item() == pytest.approx(before.loss.item(), rel=1e-6)
    for one, other in zip(gradients, sparse_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    assert after.logits.shape == (int((labels != IGNORE_INDEX).sum()), len(tokenizer))
    torch.testing.assert_close(predicted_logits(after.logits, labels), predicted_logits(before.logits, labels))
    assert model(**batch).logits.shape == (3, 8, len(tokenizer))  # without labels all tokens are scored
    assert sum_token_losses(after.logits, labels)[:, 2].sum() == len(after.logits)


@pytest.mark.parametrize("sparse", [True, False])
def test_an_evaluation_scores_labelled_tokens_alone(tmp_path, tokenizer, sparse):
    """Logits of all tokens of a batch would take more memory than the training."""
    config = load_preset(
        "sktformer-tiny", vocab_size=len(tokenizer), max_position_embeddings=16, sparse_prediction=sparse
    )
    model, sizes = AutoModelForMaskedLM.from_config(config), []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: sizes.append(logits.shape))
    collator = MaskingCollator(tokenizer=tokenizer, seed=0)
    trainer = MaskedLMTrainer(
        model=model,
        args=RunArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], per_device_eval_batch_size=4),
        eval_dataset=mask_once(make_blocks([9, 8, 7, 6]), tokenizer, 0.3, seed=0),
        data_collator=collator,
    )
    metrics = trainer.evaluate()
    labelled = int(metrics["eval_predicted_tokens"])
    assert sizes == [(labelled, len(tokenizer)) if sparse else (4, 9, len(tokenizer))]
    assert 0 < labelled < 30


PROSE = "the old clock . the {} of the house was in the garden , and {} was there . the x"


def make_prose() -> tuple[Blocks, BertTokenizer]:
    """Blocks with a full sentence in each, in which one word is neither a function word nor rare."""
    nouns = ["doctor", "window", "winter", "letter", "sister", "summer", "table"]
    sentences = [PROSE.format(noun, "he" if number % 2 else "it") for number, noun in enumerate(nouns)]
    words = sorted({word for sentence in sentences for word in sentence.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, "##s", "rare"]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)})
    blocks = Dataset.from_dict({"input_ids": tokenizer(sentences)["input_ids"]})
    counts = count_tokens(blocks, len(tokenizer))
    return Blocks(blocks, blocks, 1.0, counts, ""), tokenizer


def test_examples_are_words_that_a_person_can_judge(monkeypatch):
    monkeypatch.setattr(examples, "_SHOWN_RANKS", slice(8, 100))  # the, was, and, house, garden, there, old, clock
    blocks, tokenizer = make_prose()
    chosen = choose_words(blocks, tokenizer, 6)
    words = [tokenizer.decode(word.block[word.place]) for word in chosen]
    assert words == ["doctor", "window", "winter", "letter", "sister", "summer"]
    for word, name in zip(chosen, words, strict=True):
        sentence = str(tokenizer.decode(word.block[word.sentence]))
        assert sentence.startswith(f"the {name} of the house was in the garden, and")
        assert sentence.endswith("was there.")


def test_parts_of_words_and_short_words_are_no_examples(monkeypatch):
    monkeypatch.setattr(examples, "_SHOWN_RANKS", slice(8, 100))
    blocks, tokenizer = make_prose()
    text = PROSE.format("doctors", "it").replace("table", "it")
    blocks.evaluation = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"]]})
    (word,) = choose_words(blocks, tokenizer, 6)
    assert str(tokenizer.decode(word.block[word.place])) not in ("doctor", "##s", "it"), (
        "a word of no sentence at worst"
    )


class Engine(torch.nn.Module):
    """What DeepSpeed wraps a model in: a module whose `eval` returns nothing."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def eval(self):
        self.train(False)

    def forward(self, **inputs):
        assert not self.module.training
        return self.module(**inputs)


def test_predictions_are_shown_with_their_sentences(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(examples, "_SHOWN_RANKS", slice(8, 100))
    blocks, tokenizer = make_prose()
    model = make_model(tokenizer)
    trainer = make_trainer(tmp_path, tokenizer, model)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)  # nothing is done in one process alone
    trainer.model_wrapped = Engine(model)
    sentences = show_predictions(trainer, blocks)
    assert len(sentences) == 6
    assert sentences[0] == "the [MASK] of the house was in the garden, and it was there."
    assert all(f"  {sentence}\n" in caplog.text for sentence in sentences)
    assert "was: doctor; guessed: " in caplog.text
    masked = torch.tensor([blocks.evaluation["input_ids"][0]])
    masked[0, 6] = tokenizer.mask_token_id
    with torch.no_grad():
        best = model.eval()(masked).logits[0, 6].softmax(dim=-1).max(dim=-1)
    assert f"was: doctor; guessed: {tokenizer.decode(best.indices)} ({best.values:.0%}), " in caplog.text


@pytest.mark.parametrize(("model_type", "divides"), [("sktformer", True), ("modernbert", True), ("bert", False)])
def test_losses_are_divided_by_the_tokens_of_a_whole_step_where_the_head_does_so(
    tmp_path, tokenizer, model_type, divides
):
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    own = {"num_landmark_features": 4} if model_type == "sktformer" else {}
    config = AutoConfig.for_model(model_type, **sizes, **special, num_attention_heads=2, **own)
    trainer = make_trainer(tmp_path, tokenizer, AutoModelForMaskedLM.from_config(config))
    assert trainer.model_accepts_loss_kwargs is divides


def test_workers_mask_what_one_process_would(tokenizer, monkeypatch):
    rows = [{"input_ids": [2, *range(5, 65), 3]}]

    def collate(collator, worker=None):
        info = None if worker is None else SimpleNamespace(id=worker, num_workers=2)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: info)
        return collator(rows)["labels"].tolist()

    alone = MaskingCollator(tokenizer=tokenizer, seed=3)
    workers = [MaskingCollator(tokenizer=tokenizer, seed=3) for _ in range(2)]
    for number in range(6):
        assert collate(workers[number % 2], number % 2) == collate(alone)


def test_the_perplexity_of_a_huge_loss_is_finite():
    sums = np.array([[3000.0, 0.0, 3.0]])
    assert np.isfinite(token_metrics(EvalPrediction(predictions=sums, label_ids=sums))["perplexity"])
