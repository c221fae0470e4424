"""What a pre-training run leaves beside its checkpoint: loss curve, model card and metrics."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.model_card import CardFacts, format_scores, public_name, write_card
from experiments.plots import plot_mean_curves
from experiments.results import write_json
from experiments.run_folder import METRICS_FILE
from experiments.text.corpus import Corpus
from experiments.text.masked_lm import MaskedLMTrainer


logger = logging.getLogger(__name__)

_SHOWN = {"loss": "loss (nats per masked token)", "perplexity": "perplexity", "accuracy": "accuracy"}


def write_report(
    trainer: MaskedLMTrainer, metrics: dict[str, Any], corpus: Corpus, example: str, arguments: Mapping[str, Any]
) -> None:
    """
    Write `loss.png`, the model card, `all_results.json` and `metrics.json` of what was measured, and show the losses.
    Where nothing was trained there is no new model to write a card of. `example` is a sentence with a mask.
    """
    folder = Path(str(trainer.args.output_dir))
    counted = "evaluation" if metrics["is_stream"] else "training"  # which is not known before its end
    rows = {
        title: {name: metrics[f"{kind}_{key}"] for key, name in _SHOWN.items() if f"{kind}_{key}" in metrics}
        for title, kind in (("this model", "eval"), (f"unigram frequencies of the {counted} text", "unigram"))
    }
    table = format_scores(rows, ".4g")
    if trainer.args.do_train:
        size, origin = f"{metrics['parameters']:,} parameters", arguments.get("model_name_or_path")
        history, level = metrics["history"], metrics["unigram_loss"]
        curves = {
            name: [[(entry["step"], entry[key]) for entry in history if key in entry]]
            for name, key in (("training", "loss"), ("evaluation", "eval_loss"))
        }
        known = {"unigram frequencies": [(0, level), (history[-1]["step"], level)]}
        plot_mean_curves(curves, folder / "loss.png", f"{metrics['model_type']}, {size}", references=known)
        facts = CardFacts(
            script="pretrain_mlm.py",
            pipeline_tag="fill-mask",
            description=f"A masked language model of type `{metrics['model_type']}` with {size}, "
            f"{f'going on from `{public_name(origin)}`, ' if origin else ''}trained on {corpus.description}.",
            example=json.dumps(" ".join(example.split()), ensure_ascii=False),
            scores={name: metrics[f"eval_{name}"] for name in _SHOWN},
            results=table,
            evaluated_on="the evaluation part of the text",
            picture="loss.png",
            picture_title="Loss against the step",
            datasets=corpus.hub_datasets,
            base_model=origin,
        )
        write_card(folder, facts, metrics, arguments)
    write_json(folder / "all_results.json", {k: v for k, v in metrics.items() if isinstance(v, int | float)})
    # Last, because a folder with metrics is a finished run.
    write_json(folder / METRICS_FILE, metrics)
    left = "Checkpoint, loss.png, README.md and metrics.json are" if trainer.args.do_train else "metrics.json is"
    logger.info("\n%s\n\n%s in %s.", table, left, folder)
