"""
Matching two sequences that one encoder reads by themselves: the head of Retrieval in the Long Range Arena.

"Long Range Arena: A Benchmark for Efficient Transformers", Section 2.2.3 (byte-level document retrieval).
"""

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from .configuration_sktformer import SKTformerConfig
from .modeling_sktformer import SKTformerForSequenceClassification, SKTformerHeadModel, classifier_dropout
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


class SKTformerForSequenceMatching(SKTformerHeadModel):
    """
    SKTformer with a matching head: says how two sequences belong together, for instance whether one cites the other.

    The encoder reads each of them by itself and `config.classifier_pooling` pools it (`"mean"` is recommended). No
    Auto class is made for this; it is registered with `AutoModelForNextSentencePrediction`, transformers' own for two
    sequences and a yes or no. Inputs and labels are those of multiple choice with two choices, not that class's:
    `(batch_size, 2, sequence_length)`, and `(batch_size, 2, sequence_length, hidden_size)` for `inputs_embeds`;
    others are a `ValueError`. In hidden states and attentions the sequences are rows of the batch, first and second in
    turn: `(batch_size * 2, ...)`.

    `labels` and `logits` are as in [`SKTformerForSequenceClassification`], of the pairs.
    """

    _auto_class = "AutoModelForNextSentencePrediction"
    output_class = SequenceClassifierOutput
    takes_choices = True
    _loss = SKTformerForSequenceClassification._loss

    def __init__(self, config: SKTformerConfig):
        super().__init__(config)
        self.classifier = SKTformerMatchingHead(config.hidden_size, self.num_labels, classifier_dropout(config))
        self.post_init()

    def _flatten_choices(self, *inputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        for name, values, num_axes in (("input_ids", inputs[0], 3), ("inputs_embeds", inputs[-1], 4)):
            if values is not None and (values.dim() != num_axes or values.shape[1] != 2):
                raise ValueError(
                    f"`{name}` has shape {tuple(values.shape)}, this model reads pairs of sequences: (batch_size, 2, "
                    f"sequence_length{', hidden_size' if num_axes == 4 else ''})."
                )
        return super()._flatten_choices(*inputs)

    def _score(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        pooled = pool_tokens(hidden_states, attention_mask, self.config.classifier_pooling)  # (B, 2, d)
        return self.classifier(*pooled.unbind(dim=1))
