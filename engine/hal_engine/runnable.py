"""Whether a model that can be planned can also be run, asked before anything of it is loaded."""

from __future__ import annotations

from hal.errors import PlanError
from hal_engine.config import RUNNABLE_FAMILIES, ModelConfig
from hal_engine.preset_files import preset_of


def check_runnable(config: ModelConfig) -> None:
    """Raises PlanError for a preset, which has no weights, and for a family without layers here."""
    preset = preset_of(config.source)
    if preset is not None:
        raise PlanError(
            f"model {preset.name}",
            "a folder with weights",
            "a preset: a configuration to plan with",
            f"download {preset.repository} and give its folder; `hal plan {preset.name}` works",
        )
    if not config.is_runnable:
        raise PlanError(
            f"model {config.source}",
            f"a family whose layers the engine has ({', '.join(sorted(RUNNABLE_FAMILIES))})",
            config.family,
            "`hal plan` shows every op of it; running it is not implemented yet",
        )
