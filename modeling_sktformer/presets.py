"""The published sizes, `sktformer-base` down to `sktformer-tiny`, by name."""

import json
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from .configuration_sktformer import SKTformerConfig


def available_presets() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(Path(entry.name).stem for entry in _preset_folder().iterdir() if entry.name.endswith(".json"))


def load_preset(name: str, **overrides: Any) -> SKTformerConfig:
    """
    Make the configuration of a preset.

    Args:
        name (`str`): One of [`available_presets`].
        overrides: Fields of [`SKTformerConfig`] to set to other values.

    Raises:
        ValueError: if there is no such preset, or a field that no configuration has.
    """
    if name not in available_presets():
        raise ValueError(f"There is no preset `{name}`; the presets are {', '.join(available_presets())}.")
    config = SKTformerConfig(**(json.loads((_preset_folder() / f"{name}.json").read_text("utf-8")) | overrides))
    others = ("attn_implementation", "num_labels", "output_attentions")
    if unknown := overrides.keys() - {*config.__dataclass_fields__, *others}:
        raise ValueError(f"SKTformerConfig has no field `{min(unknown)}`; see its docstring for those that it has.")
    return config


def _preset_folder() -> Traversable:
    # An installed package carries the folder as `modeling_sktformer/preset_files`; in a source tree, where the files
    # are edited, it stands beside the package.
    installed = resources.files(__package__) / "preset_files"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "configuration" / "models"
