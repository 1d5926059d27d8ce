"""Section `database` of the settings: where a user's own devices are."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class DatabaseSettings(BaseModel):
    """Section `database`. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    overlays: tuple[Path, ...] = Field(
        default=(), description="files or folders of devices of your own; later ones win"
    )
