"""A tiny model of nine layers to audit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny_models
from model_audits import NUM_LAYERS, Auditor


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nine-layers")
    seed = torch.seed() % 2**31
    tiny_models.make_tiny_model("qwen2", folder, seed=seed, num_layers=NUM_LAYERS)
    return folder


@pytest.fixture
def auditor(tiny_folder: Path) -> Auditor:
    return Auditor(tiny_folder)
