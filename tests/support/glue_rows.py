"""Tiny rows in the columns of GLUE, from which a small model can learn each task in seconds."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import BertTokenizer

from experiments.glue.tasks import DIAGNOSTICS, TASKS, GlueTask
from modeling_sktformer import SKTformerConfig, SKTformerForMaskedLM


# The word that gives the label away; a model of one layer learns it from a few rows.
CUES = ("zero", "one", "two", "three", "four", "five")
_FILLERS = ("the", "cat", "dog", "bird", "sees", "hears", "a", "river", "tree", "house", "often", "today", "slowly")
_SIZES = {"train": 24, "validation": 10, "test": 6}


def make_rows(task: GlueTask, split: str, count: int | None = None) -> list[dict]:
    """Rows of one split; its labels take turns, and test splits have -1 in their place, as on the Hub."""
    choose = random.Random(f"{task.name} {split}")
    num_labels = len(task.labels) or len(CUES)
    rows = []
    for idx in range(_SIZES[split.split("_")[0]] if count is None else count):
        label: float = idx % num_labels
        row: dict = {column: " ".join(choose.choices(_FILLERS, k=choose.randint(2, 9))) for column in task.columns}
        row[task.columns[-1]] += f" {CUES[idx % num_labels]} ."
        row["label"] = -1 if split in task.submission else float(label) if task.is_regression else label
        rows.append(row | {"idx": idx})
    return rows


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_tasks(folder: Path, tasks: Iterable[GlueTask] = (*TASKS.values(), DIAGNOSTICS)) -> Path:
    """Write a folder of tasks, as --data_dir takes it."""
    for task in tasks:
        train = [] if task is DIAGNOSTICS else ["train", *task.evaluation_splits]
        for split in [*train, *task.submission]:
            write_rows(folder / task.name / f"{split}.jsonl", make_rows(task, split))
    return folder


def make_tokenizer() -> BertTokenizer:
    """A tokenizer with every word of the rows."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_FILLERS, *CUES, "."]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)})


def save_checkpoint(folder: Path, **overrides: Any) -> Path:
    """Write a pre-trained checkpoint that knows every word of the rows, but for the pre-training."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"num_segments": 4, "num_landmark_tokens": 8, "num_landmark_features": 4, "max_position_embeddings": 64},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "smoother_dropout_prob": 0.0},
        **{"smoother_norm": "layer_norm", "initializer_range": 0.2},
    }
    config = SKTformerConfig(vocab_size=len(tokenizer), **{**sizes, **overrides})
    tokenizer.model_max_length = config.max_position_embeddings
    SKTformerForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read_metrics(folder) -> dict:
    """What a run has left in its folder."""
    return json.loads((Path(folder) / "metrics.json").read_text())


def files_below(folder) -> dict[Path, int]:
    """All files in a folder with the time of their last change."""
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*") if path.is_file()}
