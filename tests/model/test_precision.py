"""Half precision: what would overflow, vanish or be rounded away."""

import pytest
import torch

from modeling_sktformer import SKTformerModel
from modeling_sktformer.attention import SkeletonAttention
from modeling_sktformer.losses import classification_loss, cross_entropy
from modeling_sktformer.position_batch_norm import PositionBatchNorm
from modeling_sktformer.sequences import Sequences
from support.builders import make_config


padded_or_not = pytest.mark.parametrize("has_mask", [False, True])


def full_sequences(batch_size: int, length: int, has_mask: bool, dtype: torch.dtype) -> Sequences:
    """Sequences of real tokens alone, with a mask that says so or without."""
    mask = torch.ones(batch_size, length, dtype=torch.bool) if has_mask else None
    return Sequences.from_mask(length, mask, dtype)


@padded_or_not
def test_sums_over_long_sequences_fit_into_float16(has_mask):
    length = 2**15
    fields = {"max_position_embeddings": length, "use_token_attention": False, "kernels": "eager"}
    torch.manual_seed(0)
    attention = SkeletonAttention(make_config(**fields), 0).eval()
    states = 4 + torch.randn(1, length, 12)
    with torch.no_grad():
        for projection in (attention.query, attention.key):
            projection.bias.fill_(3.0)
        expected, *_ = attention(states, full_sequences(1, length, has_mask, torch.float32))
        half, *_ = attention.half()(states.half(), full_sequences(1, length, has_mask, torch.float16))
    torch.testing.assert_close(half.float(), expected, rtol=0, atol=0.05)


def test_the_scale_of_a_long_sequence_is_no_zero_in_float16():
    scale = full_sequences(1, 70_000, True, torch.float16).column_scale
    assert scale is not None
    assert scale[0, 0, 0].item() == pytest.approx(70_000**-0.5, rel=1e-3)


def test_losses_of_half_precision_are_computed_in_float32():
    torch.manual_seed(0)
    logits, labels, targets = torch.randn(64, 1000).bfloat16(), torch.arange(64), torch.rand(64, 1000)
    loss = cross_entropy(logits, labels)
    torch.testing.assert_close(loss, cross_entropy(logits.double(), labels).float())
    for problem in ("regression", "multi_label_classification"):
        loss = classification_loss(logits, targets, problem)
        torch.testing.assert_close(loss, classification_loss(logits.double(), targets.double(), problem).float())


@padded_or_not
def test_a_batch_norm_in_bfloat16_moves_its_statistics(has_mask):
    torch.manual_seed(0)
    norm = PositionBatchNorm(make_config()).bfloat16().train()
    states = (8 + torch.randn(3, 6, 12)).bfloat16()
    norm(states, full_sequences(3, 6, has_mask, torch.bfloat16))
    expected = 0.1 * states.float().mean(dim=(0, 2))
    torch.testing.assert_close(norm.running_mean[:6].float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_models_made_in_half_precision_are_those_loaded_in_it(tmp_path, dtype, kept):
    """Filters and running statistics stay in float32 at least."""
    made = SKTformerModel._from_config(make_config(smoother_norm="batch_norm"), dtype=dtype)
    made.save_pretrained(tmp_path)
    loaded = SKTformerModel.from_pretrained(tmp_path, dtype=dtype)
    types = {name: value.dtype for name, value in made.state_dict().items()}
    assert types == {name: value.dtype for name, value in loaded.state_dict().items()}
    others = {name: types[name] for name in types if types[name].is_floating_point and types[name] != dtype}
    names = ("filter", "running_mean", "running_var")
    assert {types[name] for name in types if name.endswith(names)} == {kept}
    assert all(name.endswith(names) for name in others)
