"""Model cards for checkpoints that the scripts train."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from experiments.results import format_table, write_atomically
from modeling_sktformer import available_presets


_CARD = """---
{card_data}
---

# {title}

{description}

## Use

```python
{use}
```

## Result

{results}

On {evaluated_on}.{chosen} All of it is in `metrics.json`, with the versions and the machine it was made on.

{shown_picture}## Training

With `scripts/{script}` of SKTformer and these arguments; those that name places on a machine are left out:

```yaml
{arguments}```
"""
# Arguments that name places of the machine the model was trained on, or are nobody's business.
_LOCAL = re.compile(
    r"hub_.*|.*(_dir|_file|_name_or_path|_checkpoint)|run_name"
    r"|deepspeed|(fsdp|accelerator|parallelism)_config"
)
# Arguments that may name a place, or what is on the Hub or shipped, which is nobody's secret.
_NAMES = ("datasets", "dataset_name", "config_name", "tokenizer_name")
_PIPELINE = "from transformers import pipeline\n\n"
_USES = {
    "fill-mask": _PIPELINE + 'fill_mask = pipeline("fill-mask", model="{title}"{remote})\nprint(fill_mask({example}))',
    "text-classification": _PIPELINE
    + 'classify = pipeline("text-classification", model="{title}"{remote}, truncation=True)\n'
    "print(classify({example}))",
}


@dataclass(frozen=True)
class CardFacts:
    """What a card says of a checkpoint."""

    script: str  # the entry point that has trained it
    pipeline_tag: str
    description: str  # in sentences: what it is and what it was trained on
    # What the pipeline is called with, as Python code. Where a tag has no pipeline it is all of the code, in which
    # {title} stands for the model's name and {remote} for what lets its own code run.
    example: str
    scores: Mapping[str, float]  # by their names
    results: str  # the scores in Markdown, beside what they have to be compared with
    evaluated_on: str
    picture: str = "curve.png"  # beside the card, if there is one
    picture_title: str = "Loss and score"
    datasets: tuple[str, ...] = ()  # ids of the Hub
    base_model: str | None = None  # what training started from
    tags: tuple[str, ...] = ()


def write_card(folder: str | Path, facts: CardFacts, metrics: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Write `README.md` beside a checkpoint from the facts, the contents of `metrics.json` and the run's arguments."""
    model_type, title = metrics["model_type"], str(arguments.get("hub_model_id") or Path(folder).absolute().name)
    data = ModelCardData(
        model_name=title,
        license=arguments.get("license", "apache-2.0"),
        language=None if facts.pipeline_tag == "time-series-forecasting" else arguments.get("language", "en"),
        library_name="transformers",
        pipeline_tag=facts.pipeline_tag,
        tags=[model_type, *facts.tags],
        datasets=list(facts.datasets) or None,
        # A folder of this machine is no name that anybody could follow.
        base_model=None if _is_place(facts.base_model) else facts.base_model,
        eval_results=[
            EvalResult(
                task_type=facts.pipeline_tag,
                dataset_type=facts.datasets[0] if facts.datasets else "local",
                dataset_name=facts.evaluated_on,
                metric_type=name,
                metric_value=round(value, 6),
            )
            for name, value in facts.scores.items()
        ],
    )
    local = {name for name in arguments if _LOCAL.fullmatch(name)}
    local |= {name for name in _NAMES if _names_place(arguments.get(name))}
    if local & {"datasets", "train_file"}:
        local.add("probabilities")  # of which there is one for each
    portable = {name: value for name, value in arguments.items() if name not in local}
    remote = ", trust_remote_code=True" if model_type == "sktformer" else ""
    picture = f"![{facts.picture_title}]({facts.picture})\n\n" if Path(folder, facts.picture).is_file() else ""
    content = _CARD.format(
        shown_picture=picture,
        chosen=" Its training's best evaluation on these counts, which flatters it." * bool(metrics.get("is_best")),
        title=title,
        card_data=data.to_yaml(),
        use=_USES.get(facts.pipeline_tag, facts.example).format(title=title, remote=remote, example=facts.example),
        arguments=yaml.safe_dump(portable, sort_keys=False, allow_unicode=True),
        **vars(facts),
    )
    ModelCard(content, ignore_metadata_errors=True).save(Path(folder) / "README.md")


def name_in_card(folder: str | Path, name: str) -> None:
    """Let the card in a run's folder name the repository that it goes to, in its title, its code and its results."""
    file = Path(folder, "README.md")
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    known = ModelCard(text, ignore_metadata_errors=True).data.get("model_name")
    forms = ["\n# {}\n", "- name: {}\n", "- name: '{}'\n"]
    forms += ['model="{}"', 'from_pretrained("{}"', '--model_name_or_path "{}"']
    for form in forms if known else []:
        text = text.replace(form.format(known), form.format(name))
    write_atomically(file, text)


def public_name(place: str) -> str:
    """The id of what is on the Hub, and of a folder of this machine its name alone."""
    return Path(place).expanduser().resolve().name if _is_place(place) else place


def _names_place(value: Any) -> bool:
    """Whether an argument is a place, or a list with one, in the spelling of --datasets; a preset's name is none."""
    each = value if isinstance(value, list) else [] if value in available_presets() else [value]
    return any(_is_place(name) or _is_place(re.split("[:@]", str(name))[0]) for name in each)


def _is_place(value: Any) -> bool:
    """Whether a value names a folder or file of this machine, as a data set may."""
    return isinstance(value, str) and os.path.exists(os.path.expanduser(value))


def write_classifier_card(
    folder: Path, metrics: dict, arguments: dict, learned: str, answers: str, scores: dict, others: dict, **facts: Any
) -> None:
    """
    Write the card of a trial: what it has `learned` from and `answers` with, in words, and the scores of `others` that
    its own have to be compared with; `facts` are those of [`CardFacts`] that only the script knows.
    """
    rows = {"this model": scores, **others}
    trained = f"fine-tuned on {learned} with seed {metrics['seed']}"
    if arguments.get("fit_head"):
        trained = f"as it was, below a head that was computed from {learned} without a step of training"
    card = CardFacts(
        pipeline_tag="text-classification",
        description=f"`{metrics['started_from']}`, a model of type `{metrics['model_type']}` with "
        f"{metrics['parameters']:,} parameters, {trained}. It answers with {answers}.",
        scores=scores,
        results=format_scores(rows),
        **facts,
    )
    write_card(folder, card, metrics, arguments)


def format_scores(rows: Mapping[str, Mapping[str, float]], form: str = ".4f") -> str:
    """A small Markdown table: a row for each model and part, a column for each of its metrics."""
    names = list(dict.fromkeys(name for values in rows.values() for name in values))
    cells = [
        [title, *(format(values[name], form) if name in values else "" for name in names)]
        for title, values in rows.items()
    ]
    return "\n".join(format_table(["", *names], cells))


def example_input(columns: tuple[str, ...]) -> str:
    """What a pipeline is called with to classify a text or a pair of texts, as Python code."""
    return '"One text."' if len(columns) == 1 else '{"text": "One text.", "text_pair": "Another text."}'
