"""Logits of every family against transformers, in prefill, chunks and decode, and batched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiny_models
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.building import build_rank
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.runner import LocalRunner

# Largest difference of a logit as a share of the largest logit, both in float32.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def registry() -> BackendRegistry:
    return load_backends()


@pytest.fixture(scope="module", params=list(tiny_models.FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_models.make_tiny_model(request.param, folder, seed=torch.seed() % 2**31)


@pytest.fixture(scope="module", params=["captured", "call-by-call"])
def runner(
    model: Any, registry: BackendRegistry, request: pytest.FixtureRequest
) -> Iterator[LocalRunner]:
    options = EngineOptions(precision="fp32", max_num_batched_tokens=128, num_blocks=96)
    planned = plan_model(model.folder, options, registry, WaiverBook())
    runtime = registry.create_runtime(planned.device) if request.param == "captured" else None
    built, _ = build_rank(planned, 0, None, 96, runtime=runtime)
    yield built
    assert (built.num_replays > 0) == (request.param == "captured")
    built.close()


def _oracle(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.oracle(torch.tensor([ids])).logits[0]
    return logits


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return float((got - want).abs().max() / want.abs().max())


def _tokens(count: int) -> list[int]:
    return torch.randint(2, tiny_models.VOCAB_SIZE, (count,)).tolist()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_prefill_logits_of_every_position(model: Any, runner: LocalRunner, length: int) -> None:
    ids = _tokens(length)
    blocks = torch.randperm(96)[:8].tolist()
    got = runner.execute(Batch(prefill=[ScheduledSequence(0, ids, 0, blocks, "all")]))
    assert _error(got, _oracle(model, ids)) <= TOLERANCE


def test_chunks_then_decode(model: Any, runner: LocalRunner) -> None:
    ids = _tokens(70)
    blocks = torch.randperm(96)[:5].tolist()
    parts = [
        runner.execute(Batch(prefill=[ScheduledSequence(0, ids[a:b], a, blocks, "all")]))
        for a, b in ((0, 7), (7, 39), (39, 48))
    ]
    parts += [
        runner.execute(Batch(decode=[ScheduledSequence(0, [ids[i]], i, blocks, "last")])).clone()
        for i in range(48, 70)
    ]
    assert _error(torch.cat(parts), _oracle(model, ids)) <= TOLERANCE


def test_neighbours_in_one_batch(model: Any, runner: LocalRunner) -> None:
    """Two decoding sequences and two prompts in one step; each as if it were alone."""
    prompts = [_tokens(n) for n in (33, 5, 20, 48)]
    free = torch.randperm(96).tolist()
    blocks = [free[4 * i : 4 * i + 4] for i in range(4)]
    for i in (0, 1):
        runner.execute(Batch(prefill=[ScheduledSequence(i, prompts[i][:-1], 0, blocks[i], "none")]))
    got = runner.execute(
        Batch(
            decode=[
                ScheduledSequence(i, prompts[i][-1:], len(prompts[i]) - 1, blocks[i], "last")
                for i in (0, 1)
            ],
            prefill=[
                ScheduledSequence(2, prompts[2], 0, blocks[2], "last"),
                ScheduledSequence(3, prompts[3], 0, blocks[3], "last"),
            ],
        )
    )
    want = torch.stack([_oracle(model, ids)[-1] for ids in prompts])
    assert _error(got, want) <= TOLERANCE
