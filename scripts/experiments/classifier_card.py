"""The model card of a model that classifies texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.model_card import CardFacts, format_scores, write_card


def write_classifier_card(
    folder: Path, metrics: dict, arguments: dict, learned: str, answers: str, scores: dict, others: dict, **facts: Any
) -> None:
    """
    Write the card of a trial that has left `metrics`, by a run with these `arguments`.

    `learned` is what it was fine-tuned on, and `answers` what it answers with, in words; `others` are the scores that
    its own have to be compared with, and `facts` those of [`CardFacts`] that only the script knows.
    """
    rows = {"this model": scores, **others}
    card = CardFacts(
        title=str(arguments.get("hub_model_id") or folder.resolve().name),
        pipeline_tag="text-classification",
        description=f"`{metrics['started_from']}`, a model of type `{metrics['model_type']}` with "
        f"{metrics['parameters']:,} parameters, fine-tuned on {learned} with seed {metrics['seed']}. It answers with "
        f"{answers}.",
        scores=scores,
        results=format_results(rows),
        picture="curve.png",
        picture_title="Loss and score",
        **facts,
    )
    write_card(folder, card, metrics, arguments)


def format_results(results: Mapping[str, Mapping[str, float]]) -> str:
    """A table of metrics: a row for each model and part."""
    return format_scores({row: {key: f"{value:.4f}" for key, value in of.items()} for row, of in results.items()})


def example_input(columns: tuple[str, ...]) -> str:
    """What a pipeline is called with to classify a text or a pair of texts, as Python code."""
    return '"One text."' if len(columns) == 1 else '{"text": "One text.", "text_pair": "Another text."}'
