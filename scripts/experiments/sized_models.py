"""Models that are made for a task: their sizes, as flags and as what decides a result."""

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from experiments.arguments import UserError, flag, one_line


@dataclass
class SizedModelArguments:
    """Sizes of a new model that is made for a task."""

    model_config: str | None = flag(None, "Fields of a new SKTformer, whose sizes others take: JSON, or a mapping.")
    config_overrides: str | None = flag(None, "Fields to change in the configuration, as field=value,field=value.")

    def fields(self) -> dict[str, Any]:
        """The fields of a new SKTformer."""
        try:
            fields = json.loads(self.model_config or "{}")
        except ValueError as error:
            raise UserError(f"--model_config is no JSON ({one_line(error)}).") from error
        if not isinstance(fields, dict):
            raise UserError("--model_config must be a mapping of fields to values.")
        return fields


def describe_config(model: PreTrainedModel, arguments: SizedModelArguments) -> dict[str, Any]:
    """The fields of a new model that are not the defaults; its landmarks are the seed's unless they have one."""
    has_own = "landmark_seed" in arguments.fields() or "landmark_seed=" in (arguments.config_overrides or "")
    unrelated = ("transformers_version", "architectures", "dtype", *([] if has_own else ["landmark_seed"]))
    # `to_diff_dict` has all fields of the class: one that is new in it would make another run of every one.
    fields, defaults = model.config.to_diff_dict(), model.config.default_config_fields()
    return {name: value for name, value in fields.items() if name not in unrelated and value != defaults.get(name)}
