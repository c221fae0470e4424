"""Small models and batches that the tests are run on."""

from dataclasses import dataclass

import torch

from modeling_sktformer import (
    SKTformerConfig,
    SKTformerForMaskedLM,
    SKTformerForMultipleChoice,
    SKTformerForQuestionAnswering,
    SKTformerForSequenceClassification,
    SKTformerForSequenceMatching,
    SKTformerForTokenClassification,
    SKTformerModel,
)


HEADS = [
    SKTformerForMaskedLM,
    SKTformerForSequenceClassification,
    SKTformerForTokenClassification,
    SKTformerForQuestionAnswering,
    SKTformerForMultipleChoice,
    SKTformerForSequenceMatching,
]
MODELS = [SKTformerModel, *HEADS]
# Heads whose inputs have an axis of two sequences: two choices, or the two that are matched.
PAIR_HEADS = (SKTformerForMultipleChoice, SKTformerForSequenceMatching)
VOCAB_SIZE = 30


def make_config(**overrides) -> SKTformerConfig:
    """A configuration in which no two sizes are equal, so that swapped axes show, and without dropout."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 16,
        "num_segments": 3,
        "num_landmark_tokens": 5,
        "num_landmark_features": 4,
        "smoother_norm": "batch_norm",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "smoother_dropout_prob": 0.0,
        "num_labels": 3,
    }
    return SKTformerConfig(**{**fields, **overrides})


def make_model(model_class, seed: int = 0, **overrides):
    """
    A float64 model in evaluation mode whose every parameter and statistic is random.

    Norms start at scale 1 and shift 0 and biases at 0, which would hide a term that is left out.
    """
    torch.manual_seed(seed)
    model = model_class(make_config(**overrides)).double().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                noise = torch.randn_like(tensor)
                if name.endswith(("running_var", "pooling.scale")):
                    tensor.copy_(noise.exp())
                elif name.endswith("norm.weight"):
                    tensor.copy_(1 + 0.3 * noise)
                else:
                    tensor.copy_(0.4 * noise)
    return model


@dataclass
class Batch:
    """Sequences of real tokens, and how a head is called with them."""

    sequences: list[list[int]]
    token_types: list[list[int]]

    def inputs(self, side: str = "right", width: int | None = None, seed: int = 1) -> dict[str, torch.Tensor]:
        """
        The sequences as padded tensors.

        Padding is on the `"right"`, on the `"left"` or in `"holes"`, and filled with random tokens: what stands there
        must not matter.
        """
        generator = torch.Generator().manual_seed(seed)
        width = width or max(len(tokens) for tokens in self.sequences)
        shape = (len(self.sequences), width)
        inputs = {
            "input_ids": torch.randint(VOCAB_SIZE, shape, generator=generator),
            "token_type_ids": torch.randint(2, shape, generator=generator),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
        }
        for row, places in enumerate(self.places(side, width)):
            inputs["input_ids"][row, places] = torch.tensor(self.sequences[row], dtype=torch.long)
            inputs["token_type_ids"][row, places] = torch.tensor(self.token_types[row], dtype=torch.long)
            inputs["attention_mask"][row, places] = 1
        return inputs

    def places(self, side: str, width: int) -> list[torch.Tensor]:
        """Where each sequence's tokens stand in a padded row."""
        generator = torch.Generator().manual_seed(width)
        places = []
        for tokens in self.sequences:
            length = len(tokens)
            if side == "right":
                places.append(torch.arange(length))
            elif side == "left":
                places.append(torch.arange(width - length, width))
            else:
                places.append(torch.randperm(width, generator=generator)[:length].sort().values)
        return places

    def labels(self, model_class, side: str = "right", width: int | None = None) -> dict[str, torch.Tensor]:
        """Labels for a head, at the places where the tokens stand; the same for every padding."""
        width = width or max(len(tokens) for tokens in self.sequences)
        places = self.places(side, width)
        if model_class is SKTformerModel:
            return {}
        if model_class is SKTformerForQuestionAnswering:
            # Empty sequences have no answer: a position outside is not counted.
            ends = [(int(place[0]), int(place[-1])) if len(place) else (width, width) for place in places]
            return {
                "start_positions": torch.tensor([start for start, _ in ends]),
                "end_positions": torch.tensor([end for _, end in ends]),
            }
        if model_class in (SKTformerForMaskedLM, SKTformerForTokenClassification):
            num_classes = VOCAB_SIZE if model_class is SKTformerForMaskedLM else 3
            labels = torch.full((len(self.sequences), width), -100)
            for row, place in enumerate(places):
                targets = torch.tensor([(7 * token + 3) % num_classes for token in self.sequences[row]])
                targets[1::3] = -100
                labels[row, place] = targets.long()
            return {"labels": labels}
        num_rows = len(self.sequences) // 2 if model_class in PAIR_HEADS else len(self.sequences)
        return {"labels": torch.arange(num_rows) % (2 if model_class is SKTformerForMultipleChoice else 3)}


def make_batch(lengths: list[int], seed: int = 2) -> Batch:
    """Random sequences of the given lengths; without the padding token, whose embedding has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths],
        [torch.randint(2, (length,), generator=generator).tolist() for length in lengths],
    )


def call(model, inputs: dict[str, torch.Tensor], **labels):
    """Call any model; heads of pairs get consecutive sequences as the two."""
    return model(**(in_pairs(inputs) if isinstance(model, PAIR_HEADS) else inputs), **labels)


def in_pairs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Consecutive sequences as pairs, `(batch_size / 2, 2, ...)`."""
    return {name: values.unflatten(0, (-1, 2)) for name, values in inputs.items()}


def token_outputs(output) -> list[torch.Tensor]:
    """What a model says about each token, `(batch_size, sequence_length, ...)`; empty for heads that pool."""
    if "start_logits" in output:
        return [output.start_logits, output.end_logits]
    if "last_hidden_state" in output:
        return [output.last_hidden_state]
    return [output.logits] if output.logits.dim() == 3 else []


def gradients(model) -> dict[str, torch.Tensor]:
    """A copy of the gradients of all parameters."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(actual, expected, name: str = "") -> None:
    """Equal up to rounding in float64; of containers, all they hold."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda message: f"{name} {message}".strip())
