"""
Matching two sequences that one encoder reads by themselves: the head of Retrieval in the Long Range Arena.

"Long Range Arena: A Benchmark for Efficient Transformers", Section 2.2.3 (byte-level document retrieval).
"""

from typing import cast

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils.generic import can_return_tuple

from .configuration_sktformer import SKTformerConfig
from .losses import classification_loss
from .modeling_sktformer import (
    SKTformerKwargs,
    SKTformerModel,
    SKTformerPreTrainedModel,
    classifier_dropout,
    flatten_choices,
)
from .sequences import pool_tokens


class SKTformerMatchingHead(nn.Module):
    """
    Scores of a pair of pooled sequences a and b, of any encoder: linear, tanh, linear of [a, b, a * b, a - b].

    Args:
        hidden_size (`int`): Width d of a and b, and of the layer between.
        num_labels (`int`): Number of scores.
        dropout (`float`): Dropout before the last linear.
    """

    def __init__(self, hidden_size: int, num_labels: int, dropout: float):
        super().__init__()
        self.dense = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size, num_labels)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Score a and b, both of shape `(batch_size, hidden_size)`: `(batch_size, num_labels)`."""
        pair = torch.cat([first, second, first * second, first - second], dim=-1)
        return self.output(self.dropout(torch.tanh(self.dense(pair))))


class SKTformerForSequenceMatching(SKTformerPreTrainedModel):
    """
    SKTformer with a matching head: says how two sequences belong together, for instance whether one cites the other.

    The encoder reads each of them by itself and `config.classifier_pooling` pools it (`"mean"` is recommended). No
    Auto class is made for this; it is registered with `AutoModelForNextSentencePrediction`, transformers' own for two
    sequences and a yes or no. Inputs and labels are those of multiple choice with two choices, not that class's.
    """

    _auto_class = "AutoModelForNextSentencePrediction"

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)
        self.sktformer = SKTformerModel(config)
        self.classifier = SKTformerMatchingHead(config.hidden_size, self.num_labels, classifier_dropout(config))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[SKTformerKwargs],
    ) -> SequenceClassifierOutput:
        """
        Match pairs. Inputs as in [`SKTformerModel.forward`] with an axis of the two sequences after the batch:
        `(batch_size, 2, sequence_length)`, and `(batch_size, 2, sequence_length, hidden_size)` for `inputs_embeds`.

        Args:
            labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
                Classes or targets of the pairs, as in [`SKTformerForSequenceClassification.forward`].

        Returns:
            `SequenceClassifierOutput` with `logits` of shape `(batch_size, num_labels)`; in hidden states and
            attentions the sequences are rows of the batch, first and second in turn: `(batch_size * 2, ...)`.

        Raises:
            ValueError: if the inputs are not pairs, or the labels do not fit the logits.
        """
        for name, values, num_axes in (("input_ids", input_ids, 3), ("inputs_embeds", inputs_embeds, 4)):
            if values is not None and (values.dim() != num_axes or values.shape[1] != 2):
                raise ValueError(
                    f"`{name}` has shape {tuple(values.shape)}, this model reads pairs of sequences: (batch_size, 2, "
                    f"sequence_length{', hidden_size' if num_axes == 4 else ''})."
                )
        inputs = flatten_choices(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.sktformer(*inputs, return_dict=True, **kwargs)
        pooled = pool_tokens(outputs.last_hidden_state, inputs[1], self.config.classifier_pooling)
        logits = self.classifier(*pooled.unflatten(0, (-1, 2)).unbind(dim=1))
        loss = None
        if labels is not None:
            problem_type = self.config.problem_type
            loss = classification_loss(logits, labels, problem_type, kwargs.get("num_items_in_batch"))
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = ["SKTformerForSequenceMatching", "SKTformerMatchingHead"]
