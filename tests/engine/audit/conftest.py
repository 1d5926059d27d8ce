"""Tiny models to audit: of nine layers, and of two where it is not about which one it was."""

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


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-layers")
    tiny_models.make_tiny_model("qwen2", folder, seed=torch.seed() % 2**31, num_layers=2)
    return folder


@pytest.fixture
def shallow_auditor(shallow_folder: Path) -> Auditor:
    return Auditor(shallow_folder)


@pytest.fixture
def auditor(tiny_folder: Path) -> Auditor:
    return Auditor(tiny_folder)
