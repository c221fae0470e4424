"""Heads of masked language models that compute logits only where something is predicted."""

from typing import Any

import torch
from transformers import PreTrainedModel

from modeling_sktformer.losses import IGNORE_INDEX


def score_labelled_only(model: PreTrainedModel) -> None:
    """
    Let a masked language model compute logits only where there are labels, whenever it is given labels.

    At a small width the head over a vocabulary is most of the work, whatever encodes the text. SKTformer and
    ModernBERT can do so themselves (`config.sparse_prediction`). The head of another architecture is handed labelled
    tokens alone, and its loss their labels; loss and gradients stay what they are.
    """
    if hasattr(model.config, "sparse_prediction"):
        model.config.sparse_prediction = True
        if hasattr(model, "sparse_prediction"):  # ModernBERT's, read from its configuration when it was made
            model.sparse_prediction = True  # type: ignore[assignment]
        return
    places: list[torch.Tensor] = []  # of the forward pass that is under way

    def take_labels(module: torch.nn.Module, arguments: tuple, keywords: dict[str, Any]) -> tuple:
        places.clear()
        if keywords.get("labels") is None:
            return arguments, keywords
        places.append(keywords["labels"] != IGNORE_INDEX)
        return arguments, keywords | {"labels": keywords["labels"][places[0]]}

    def select(module: torch.nn.Module, arguments: tuple) -> tuple:
        return (arguments[0][places[0]], *arguments[1:]) if places else arguments

    output = model.get_output_embeddings()
    head = next(child for child in model.children() if any(part is output for part in child.modules()))
    model.register_forward_pre_hook(take_labels, with_kwargs=True)
    head.register_forward_pre_hook(select)
