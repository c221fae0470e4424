"""What the models return: transformers' outputs, with the matrices of both branches of the attention."""

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import BaseModelOutput, QuestionAnsweringModelOutput, SequenceClassifierOutput


@dataclass
class SkeletonMatrices:
    """
    What every output has besides the fields of its kind, whose `attentions` are the token branch's matrices, each
    `(batch_size, num_heads, sequence_length, num_landmarks)`; none where that branch is off or
    `attn_implementation="sdpa"` computes it. They and `hidden_states` stand in the order of the input, and have
    gradients where nothing had to be moved for that: without padding, or with all of it on the right.

    Args:
        landmark_positions (`tuple` of `torch.LongTensor` of shape `(batch_size, num_landmarks)`, *optional*):
            With the attentions of each layer, the places in the input that their last axis stands for; -1 where a
            short sequence has no further landmark.
        feature_attentions (`tuple` of `torch.Tensor`, *optional*):
            The feature branch's matrices, each `(batch_size, num_heads, head_dim, num_landmark_features)`.
    """

    landmark_positions: tuple[torch.Tensor, ...] | None = None
    feature_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class SKTformerModelOutput(SkeletonMatrices, BaseModelOutput):
    """Of the encoder."""


@dataclass
class SKTformerHeadOutput(SkeletonMatrices, SequenceClassifierOutput):
    """Of a head; those of transformers have the same fields, `loss` and `logits`, whatever they are of."""


@dataclass
class SKTformerSpanOutput(SkeletonMatrices, QuestionAnsweringModelOutput):
    """Of the span head."""
