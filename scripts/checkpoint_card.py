"""Model cards for checkpoints that the scripts train."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData


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


# Arguments that name places of the machine the model was trained on.
_PATHS = {"train_file", "validation_file", "cache_dir", "output_dir", "tokenizer_name", "model_name_or_path"}


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
    sktformer = metrics["model_type"] == "sktformer"
    data = ModelCardData(library_name="transformers", pipeline_tag="fill-mask", tags=[metrics["model_type"]])
    content = _PRETRAINING_CARD.format(
        card_data=data.to_yaml(),
        title=title,
        corpus=corpus,
        remote=", trust_remote_code=True" if sktformer else "",
        example=example.replace('"', "'"),
        arguments=yaml.safe_dump({k: v for k, v in arguments.items() if k not in _PATHS}, sort_keys=False),
        **metrics,
    )
    ModelCard(content.strip() + "\n", ignore_metadata_errors=True).save(Path(folder) / "README.md")
