"""A model runs where the engine can put its tensors, or not at all: never on the CPU instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny_models
from hal.errors import PlanError
from hal.host import load_recorded_host
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook
from hal_engine.building import build_rank, build_runner
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model
from hal_engine.worker_starting import WorkerOrder

HOST = Path(__file__).resolve().parent.parent / "fixtures" / "hosts" / "l40s-x4-switch.json"
DEVICE = "0000:03:00.0"
REFUSED = "torch device 'cuda:0': the engine keeps weights"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.make_tiny_model("llama", folder, seed=torch.seed() % 2**31)
    return folder


@pytest.fixture(scope="module")
def registry() -> BackendRegistry:
    return load_backends(load_recorded_host(HOST))


def planned(
    registry: BackendRegistry, folder: Path, *, device: str = DEVICE, must_run: bool = False
) -> PlannedModel:
    options = EngineOptions(device=device)
    return plan_model(folder, options, registry, WaiverBook(), is_strict=False, must_run=must_run)


def test_what_is_to_run_is_refused_before_it_is_planned(
    registry: BackendRegistry, tiny_folder: Path
) -> None:
    assert planned(registry, tiny_folder).plan.ops  # a plan alone is fine
    with pytest.raises(PlanError, match=REFUSED) as raised:
        planned(registry, tiny_folder, must_run=True)
    assert "--device cpu:0" in raised.value.remedy


def test_nothing_is_built_for_it_by_another_way(
    registry: BackendRegistry, tiny_folder: Path
) -> None:
    given = planned(registry, tiny_folder)
    with pytest.raises(PlanError, match=REFUSED):
        build_rank(given, 0, None, 16)
    order = WorkerOrder(model=str(tiny_folder), options={}, use={}, waivers="", disabled_plugins=())
    with pytest.raises(PlanError, match=REFUSED):
        build_runner(given, registry, order)
