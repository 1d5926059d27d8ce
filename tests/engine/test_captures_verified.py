"""Captured decode steps that would replay something else are found before the first request."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.errors import CaptureError
from hal.plugins.manager import load_backends
from hal.waivers import WaiverBook
from hal_backends.cpu import candidates
from hal_backends.cpu.candidates import elementwise
from hal_engine.batch import ScheduledSequence
from hal_engine.building import build_rank
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.serving import open_engine
from hal_kernels.cpu_recording import hold


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    tiny_models.make_tiny_model("llama", made, seed=torch.seed() % 2**31)
    return made


def _by_an_op(x: torch.Tensor) -> torch.Tensor:
    return x + 0


def _by_a_list(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x) if x.tolist() is None else x


def _by_numpy(x: torch.Tensor) -> torch.Tensor:
    return x if x.numpy().size else torch.empty_like(x)


def _by_a_value(x: torch.Tensor) -> torch.Tensor:
    return x if float(x[0, 0]) < 1e9 else torch.empty_like(x)


def _by_address(x: torch.Tensor) -> torch.Tensor:
    """Rows that torch did not see being read: those of the first step, in every later one."""
    copied = torch.empty_like(x)
    ctypes.memmove(copied.data_ptr(), x.data_ptr(), x.nbytes)
    hold(copied)
    return copied


@pytest.mark.parametrize(
    ("misuse", "found"),
    [
        (_by_an_op, r"aten::add"),
        (_by_a_list, r"Tensor\.tolist"),
        (_by_numpy, r"Tensor\.numpy"),
        (_by_a_value, r"aten::(item|_local_scalar_dense)"),
        (_by_address, r"the same step, called[\s\S]*logits that differ by"),
    ],
)
def test_an_implementation_that_is_wrongly_called_safe_is_found_before_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch, misuse: Any, found: str
) -> None:
    offered = elementwise.norm_candidates

    def lying(device: DeviceSpec) -> list[KernelCandidate]:
        def load() -> Any:
            bind = offered(device)[0].load()

            def bound(*args: Any, **static: Any) -> Any:
                kernel = bind(*args, **static)
                return lambda x, *rest: kernel(misuse(x), *rest)

            return bound

        return [dataclasses.replace(offered(device)[0], load=load)]

    monkeypatch.setattr(candidates, "_OFFERS", {**candidates._OFFERS, "norm.rms": lying})
    with pytest.raises(CaptureError, match=found):
        open_engine(folder, precision="fp32")


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "sequences"), [(64, 16, 32), (2, 16, 1), (3, 16, 40), (9, 32, 7)]
)
def test_what_is_verified_has_other_tokens_positions_and_blocks(
    folder: Path, num_blocks: int, block_size: Any, sequences: int
) -> None:
    """A value that stayed as it was captured would show."""
    registry, seen = load_backends(), []
    options = EngineOptions(
        precision="fp32", num_blocks=num_blocks, block_size=block_size, max_num_seqs=sequences
    )
    planned = plan_model(folder, options, registry, WaiverBook())
    runtime = registry.create_runtime(planned.device)
    runner, _ = build_rank(planned, 0, None, num_blocks, runtime=runtime)
    assert runner._captured is not None
    write = runner._captured._inputs.write

    def observed(scheduled: Sequence[ScheduledSequence]) -> int:
        seen.append(list(scheduled))
        return write(scheduled)

    runner._captured._inputs.write = observed  # type: ignore[method-assign]
    runner.rehearse_captures()
    assert len(seen) >= 2
    for first, other in zip(seen[::2], seen[1::2], strict=True):
        places = [[(s.start, s.block_ids[0]) for s in group] for group in (first, other)]
        assert len(first) == len(other) == len(set(places[1]))
        for one, then in zip(first, other, strict=True):
            assert one.token_ids != then.token_ids
            assert one.start != then.start
            if num_blocks * block_size >= 2 * len(first) + block_size:
                assert one.block_ids != then.block_ids
            assert then.block_ids[0] < num_blocks
