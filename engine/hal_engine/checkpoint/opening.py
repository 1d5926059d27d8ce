"""Opening the checkpoint that belongs to a configuration."""

from __future__ import annotations

from pathlib import Path

from hal_engine.checkpoint.gguf_reader import GGUFCheckpoint
from hal_engine.checkpoint.protocol import Checkpoint
from hal_engine.checkpoint.safetensors_reader import SafetensorsCheckpoint
from hal_engine.config import ModelConfig


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """The weights beside `config.source`. Raises CheckpointError; reads headers only."""
    source = Path(config.source)
    if config.source_format == "gguf":
        return GGUFCheckpoint(source)
    return SafetensorsCheckpoint(source.parent)
