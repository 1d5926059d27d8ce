"""What the plan of a routed model says of the model and of the versions it was made with."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any


def model_summary(model: Any) -> dict[str, Any]:
    """The model's class and configuration without paths, so that equal models have equal plans."""
    config = json.loads(model.config.to_json_string(use_diff=True))
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    return {"class": type(model).__name__, "config": config}


def routed_versions() -> dict[str, str]:
    """Of what decides: Python, torch, transformers, halstack."""
    names = ("halstack", "torch", "transformers")
    return {"python": platform.python_version(), **{n: metadata.version(n) for n in names}}
