"""Model cards for checkpoints that the scripts train."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from experiments.glue.tasks import SIMILARITY_RANGE, GlueTask


_PRETRAINING_CARD = """
---
{card_data}
---

# {title}

A masked language model of type `{model_type}` with {parameters:,} parameters, trained by `scripts/pretrain_mlm.py` of
SKTformer on {corpus}.

## Use

```python
from transformers import pipeline

fill_mask = pipeline("fill-mask", model="{title}"{remote})
print(fill_mask("{example}"))
```

## Result

| evaluation | loss (nats per masked token) | perplexity | accuracy |
|---|---|---|---|
| this model | {eval_loss:.4f} | {eval_perplexity:.2f} | {eval_accuracy:.1%} |
| unigram frequencies of the training text | {unigram_loss:.4f} | {unigram_perplexity:.2f} | |

![Loss curve](loss.png)

All of it is in `metrics.json`, with the versions and the machine it was made on.

## Training

`arguments.yaml` gives the run again as `--recipe`; without the paths of its data it says:

```yaml
{arguments}```
"""


_CLASSIFICATION_CARD = """
---
{card_data}
---

# {started_from} fine-tuned on {task_title}

`{started_from}`, a model of type `{model_type}` with {parameters:,} parameters, fine-tuned on {task_title} by
`scripts/run_glue.py` of SKTformer. It answers with {labels}.

## Use

```python
from transformers import pipeline

classify = pipeline("text-classification", model="{title}"{remote})
print(classify({example}, truncation=True))
```

## Result

| {metric_names} |
|{rule}|
| {metric_values} |

On the evaluation part of {task_title}, with seed {seed}. All of it is in `metrics.json`, with the versions and the
machine it was made on.

![Loss and score](curve.png)

## Training

`arguments.yaml` gives the run again as `--recipe`; without the paths of its data it says:

```yaml
{arguments}```
"""


# Arguments that name places of the machine the model was trained on.
_PATHS = {
    "cache_dir",
    "data_dir",
    "mnli_checkpoint",
    "model_name_or_path",
    "output_dir",
    "test_file",
    "tokenizer_name",
    "train_file",
    "validation_file",
}


def write_pretraining_card(
    folder: str | Path, title: str, corpus: str, metrics: dict[str, Any], arguments: dict[str, Any], example: str
) -> None:
    """
    Write `README.md` beside a pre-trained checkpoint.

    Args:
        folder (`str` or `Path`): The checkpoint's folder.
        title (`str`): Name of the model.
        corpus (`str`): What it was trained on, in words.
        metrics (`dict`): Contents of `metrics.json`.
        arguments (`dict`): Contents of `arguments.yaml`.
        example (`str`): A sentence with a mask.
    """
    data = ModelCardData(library_name="transformers", pipeline_tag="fill-mask", tags=[metrics["model_type"]])
    content = _PRETRAINING_CARD.format(
        card_data=data.to_yaml(),
        title=title,
        corpus=corpus,
        remote=_remote_code_argument(metrics["model_type"]),
        example=example.replace('"', "'"),
        arguments=_format_arguments(arguments),
        **metrics,
    )
    _save_card(content, folder)


def write_classification_card(
    folder: str | Path, task: GlueTask, metrics: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """
    Write `README.md` beside a checkpoint fine-tuned on a GLUE task.

    Args:
        folder (`str` or `Path`): The checkpoint's folder.
        task ([`GlueTask`]): The task.
        metrics (`dict`): Contents of `metrics.json`.
        arguments (`dict`): Contents of `arguments.yaml`.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=[metrics["model_type"], "glue"],
        datasets=["nyu-mll/glue"],
    )
    pair = '{"text": "One text.", "text_pair": "Another text."}'
    values = {name: f"{metrics[f'eval_{name}']:.4f}" for name in task.metrics}
    if "eval_mismatched_accuracy" in metrics:
        values = {"matched accuracy": values["accuracy"]}
        values["mismatched accuracy"] = f"{metrics['eval_mismatched_accuracy']:.4f}"
    _save_card(
        _CLASSIFICATION_CARD.format(
            card_data=data.to_yaml(),
            title=str(arguments.get("hub_model_id") or Path(folder).resolve().name),
            # A name, not where it lay on this machine.
            started_from=Path(metrics["started_from"]).name,
            model_type=metrics["model_type"],
            parameters=metrics["parameters"],
            task_title=task.title,
            labels=" or ".join(f"`{word}`" for word in task.labels)
            or f"a similarity from {SIMILARITY_RANGE[0]:g} to {SIMILARITY_RANGE[1]:g}",
            remote=_remote_code_argument(metrics["model_type"]),
            example=pair if len(task.columns) == 2 else '"One text."',
            metric_names=" | ".join(name.replace("_", " ") for name in values),
            rule="---|" * (len(values) - 1) + "---",
            metric_values=" | ".join(values.values()),
            seed=metrics["seed"],
            arguments=_format_arguments(arguments),
        ),
        folder,
    )


def _remote_code_argument(model_type: str) -> str:
    return ", trust_remote_code=True" if model_type == "sktformer" else ""


def _format_arguments(arguments: dict[str, Any]) -> str:
    return yaml.safe_dump({name: value for name, value in arguments.items() if name not in _PATHS}, sort_keys=False)


def _save_card(content: str, folder: str | Path) -> None:
    ModelCard(content.strip() + "\n", ignore_metadata_errors=True).save(Path(folder) / "README.md")
