"""Collectives over peers' memory: the kernels themselves, ranks as processes with shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_devices import gpu
from hal.ops.collective import CollectiveRequest
from hal.ops.request import TokenRange
from hal_backends.torch_group import TorchGroup
from hal_kernels.collective import triton as triton_collective
from hal_kernels.collective.layout import (
    BLOCK,
    Algorithm,
    BufferLayout,
    buffer_layout,
    norm_row_block,
    part_elements,
)
from hal_kernels.collective.peer_buffers import PeerBuffers, PeerTimeoutError
from hal_kernels.collective.triton import bind_all_reduce_norm, bind_to_buffers
from hal_kernels.collective.triton_variants import MOST_NORM_WIDTH
from peer_ranks import run_ranks

_CALLS = 3  # both halves of the buffers, and one of them again


def messages(world: int, shape: tuple[int, int], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """[call][rank]: of several magnitudes, one with infinities nowhere and zeros in a group."""
    seed = torch.seed() % 2**31
    generator = torch.Generator().manual_seed(seed)
    calls = []
    for call in range(_CALLS):
        scale = (1.0, 1e-3, 300.0)[call]
        calls.append(
            [(torch.randn(shape, generator=generator) * scale).to(dtype) for _ in range(world)]
        )
    calls[0][0].view(-1)[: min(128, calls[0][0].numel())] = 0
    return calls


def exact_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """In rank order and float32, as the kernels promise: compared bit for bit."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def run(
    algorithm: Algorithm,
    calls: list[list[torch.Tensor]],
    *,
    is_push: bool,
    wire: str = "",
) -> list[list[torch.Tensor]]:
    """[rank][call] results."""
    world, first = len(calls[0]), calls[0][0]
    layout = buffer_layout(
        algorithm,
        world,
        first.numel(),
        element_bytes=first.element_size(),
        wire_bytes=1 if wire else 0,
    )

    def work(buffers: PeerBuffers) -> list[Any]:
        kernel = bind_to_buffers(buffers, algorithm, is_push=is_push, wire=wire, use_ptx=False)
        results = [kernel(call[buffers.rank].clone()) for call in calls]
        buffers.check()
        return [result.view(torch.uint8).numpy() for result in results]

    return [
        [torch.from_numpy(np.array(r)).view(first.dtype) for r in rank]
        for rank in run_ranks(world, layout, work)
    ]


CASES = [(2, (1, 8)), (2, (2, 3 * BLOCK)), (3, (5, 1000))]
SIDES = pytest.mark.parametrize("is_push", [True, False], ids=["push", "pull"])


@SIDES
@pytest.mark.parametrize(("world", "shape"), CASES, ids=str)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_all_reduce(
    algorithm: Algorithm, shape: tuple[int, int], world: int, is_push: bool
) -> None:
    calls = messages(world, shape, torch.bfloat16)
    results = run(algorithm, calls, is_push=is_push)
    for number, parts in enumerate(calls):
        for rank in range(world):
            assert torch.equal(results[rank][number].view(shape), exact_sum(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_all_reduce_of_other_dtypes(algorithm: Algorithm, dtype: torch.dtype) -> None:
    calls = [[part / 4 for part in call] for call in messages(2, (4, 264), dtype)]
    results = run(algorithm, calls, is_push=True)
    for number, parts in enumerate(calls):
        assert torch.equal(results[1][number].view(4, 264), exact_sum(parts))


@SIDES
@pytest.mark.parametrize("world", [3])
def test_reduce_scatter(world: int, is_push: bool) -> None:
    shape = (5, 136 * world)
    calls = messages(world, shape, torch.bfloat16)
    results = run("reduce_scatter", calls, is_push=is_push)
    for number, parts in enumerate(calls):
        wanted = exact_sum(parts).chunk(world, dim=-1)
        for rank in range(world):
            assert torch.equal(results[rank][number].view(5, 136), wanted[rank])


@SIDES
@pytest.mark.parametrize("world", [3])
def test_all_gather_is_bit_exact(world: int, is_push: bool) -> None:
    calls = messages(world, (5, 72), torch.bfloat16)
    results = run("all_gather", calls, is_push=is_push)
    for number, parts in enumerate(calls):
        for rank in range(world):
            assert torch.equal(results[rank][number].view(5, -1), torch.cat(parts, dim=-1))


@SIDES
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "reduce_scatter"])
def test_a_rounded_wire_is_within_e4m3(algorithm: Algorithm, is_push: bool) -> None:
    """Half a step of e4m3 is 2^-4 of a value, and at least 2^-10 of the group's largest / 448."""
    world, shape = 2, (4, 1024)
    calls = messages(world, shape, torch.bfloat16)
    results = run(algorithm, calls, is_push=is_push, wire="fp8_e4m3fn")
    for number, parts in enumerate(calls):
        bound = torch.zeros(shape)
        for part in parts:
            wide = part.float()
            step = wide.view(-1, 128).abs().amax(dim=-1, keepdim=True) / 448 * 2**-10
            bound += torch.maximum(wide.abs() * 2**-4, step.expand(-1, 128).reshape(shape))
        total = torch.stack([p.double() for p in parts]).sum(dim=0)
        for rank in range(world):
            want, limit = total, bound
            if algorithm == "reduce_scatter":
                want, limit = (t.chunk(world, dim=-1)[rank] for t in (total, bound))
            error = (results[rank][number].view(want.shape).double() - want).abs()
            # And the rounding of the result to bfloat16.
            assert (error <= limit * 1.01 + want.abs() * 2**-7).all()
    if algorithm != "reduce_scatter":
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))


@SIDES
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "reduce_scatter"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_rounded_wire_keeps_what_is_not_finite(
    value: float, algorithm: Algorithm, is_push: bool
) -> None:
    """As NaN, in the whole group of 128: the scale has no other way to say it."""
    world, shape = 2, (4, 1024)
    calls = messages(world, shape, torch.bfloat16)
    place = int(torch.randint(4 * 1024, ()))
    calls[0][1].view(-1)[place] = value
    results = run(algorithm, calls, is_push=is_push, wire="fp8_e4m3fn")
    is_nan = torch.zeros(shape, dtype=torch.bool)
    is_nan.view(-1, 128)[place // 128] = True
    for rank in range(world):
        want = is_nan
        if algorithm == "reduce_scatter":
            want = is_nan.chunk(world, dim=-1)[rank]
        assert torch.equal(results[rank][0].view(want.shape).isnan(), want)
        assert results[rank][1].isfinite().all()


@SIDES
@pytest.mark.parametrize(
    ("hidden", "block"),
    [(128, 128), (576, 1024), (8192, 8192), (8200, 5 * 2048), (12_288, 6 * 2048)],
)
def test_all_reduce_norm(hidden: int, block: int, is_push: bool) -> None:
    """Rows of more than 8,192 values go tile by tile. block: a power of two, or whole tiles."""
    world, rows, eps = 2, 5, 1e-5
    calls = messages(world, (rows, hidden), torch.bfloat16)
    weight = torch.rand(hidden).to(torch.bfloat16)
    residual = torch.randn(rows, hidden).to(torch.bfloat16)
    assert norm_row_block(hidden, MOST_NORM_WIDTH) == block
    layout = buffer_layout("one_shot", world, rows * block, element_bytes=2, row_block=block)

    def work(buffers: PeerBuffers) -> list[Any]:
        kernel = bind_all_reduce_norm(buffers, weight, eps, is_push=is_push, use_ptx=False)
        results = [kernel(call[buffers.rank].clone(), residual.clone()) for call in calls]
        buffers.check()
        return [[t.view(torch.uint8).numpy() for t in result] for result in results]

    for rank in run_ranks(world, layout, work):
        for parts, found in zip(calls, rank, strict=True):
            y, added = (torch.from_numpy(np.array(a)).view(torch.bfloat16) for a in found)
            want = (exact_sum(parts).float() + residual.float()).to(torch.bfloat16)
            assert torch.equal(added.view(rows, hidden), want)
            wide = want.double()
            norm = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()
            assert torch.allclose(y.view(rows, hidden).double(), norm, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "reduce_scatter", "all_gather"])
def test_a_rank_that_does_not_come_is_named_and_nothing_looks_right(algorithm: Algorithm) -> None:
    world, shape = 3, (2, 24)
    layout = buffer_layout(algorithm, world, 48, element_bytes=4)

    def work(buffers: PeerBuffers) -> tuple[Any, str]:
        kernel = bind_to_buffers(buffers, algorithm, is_push=True, use_ptx=False, max_polls=2000)
        result = kernel(torch.ones(shape))
        with pytest.raises(PeerTimeoutError) as raised:
            buffers.check()
        buffers.check()  # told once
        return result.numpy(), str(raised.value)

    found = run_ranks(world, layout, work, absent=(1,))
    for rank in (0, 2):
        values, message = found[rank]
        assert np.isnan(values).any()
        assert f"rank {rank} of 3: required rank 1 to come" in message


def test_a_group_checks_the_buffers_of_its_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once however many call sites share them: see `CollectiveGroup.check`."""
    made: list[PeerBuffers] = []

    def local_buffers(_: Any, layout: BufferLayout, device: torch.device) -> PeerBuffers:
        made.append(
            PeerBuffers(
                rank=0,
                world_size=2,
                layout=layout,
                addresses=torch.zeros(2, dtype=torch.int64),
                epochs=torch.zeros(layout.programs, dtype=torch.int32),
                status=torch.zeros(1, dtype=torch.int32),
            )
        )
        return made[-1]

    monkeypatch.setattr(triton_collective, "symmetric_buffers", local_buffers)
    group = TorchGroup(0, 2, SimpleNamespace())
    device = gpu("sm_90")
    for tokens in (8, 8, 1024):
        request = CollectiveRequest(
            kind="all_reduce", world_size=2, width=64, dtype="float32", transport="pcie",
            tokens=TokenRange(1, tokens),
        )  # fmt: skip
        triton_collective.bind(request, device, group=group, algorithm="one_shot")
    assert len(made) == 2
    group.check()
    made[1].status.fill_(2)
    with pytest.raises(PeerTimeoutError, match="required rank 1 to come"):
        group.check()


def test_epochs_may_wrap_around() -> None:
    """After 2^31 calls a counter turns negative; the ranks still wait for each other."""
    layout = buffer_layout("one_shot", 2, 64, element_bytes=4)

    def work(buffers: PeerBuffers) -> Any:
        buffers.epochs.fill_(2**31 - 2)
        flags = buffers.memory[buffers.rank][layout.flag_offset :].view(torch.int32)
        flags.fill_(2**31 - 2)
        kernel = bind_to_buffers(buffers, "one_shot", is_push=True, use_ptx=False)
        results = [kernel(torch.full((8, 8), float(buffers.rank + n))) for n in range(4)]
        buffers.check()
        return [result.numpy() for result in results], buffers.epochs.tolist()

    for results, epochs in run_ranks(2, layout, work):
        assert [r.flat[0] for r in results] == [1.0, 3.0, 5.0, 7.0]
        assert epochs == [-(2**31) + 2] * layout.programs


def test_what_the_kernels_take_for_granted_is_checked() -> None:
    layout = buffer_layout("one_shot", 2, 4096, element_bytes=4)
    buffers = PeerBuffers(
        rank=0, world_size=2, layout=layout, addresses=torch.zeros(2, dtype=torch.int64),
        epochs=torch.zeros(layout.programs, dtype=torch.int32),
        status=torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    kernel = bind_to_buffers(buffers, "one_shot", is_push=True, use_ptx=False)
    for wrong in (torch.ones(3, 4096), torch.ones(8, 16).t(), torch.ones(1, 7)):
        with pytest.raises(ValueError, match="required a contiguous tensor"):
            kernel(wrong)
    with pytest.raises(ValueError, match="required a wire"):
        bind_to_buffers(buffers, "one_shot", is_push=True, wire="int4", use_ptx=False)


@given(
    world=st.integers(2, 8),
    elements=st.integers(1, 1 << 20),
    element_bytes=st.sampled_from([2, 4]),
    wire_bytes=st.sampled_from([0, 1]),
    algorithm=st.sampled_from(["one_shot", "two_shot", "reduce_scatter", "all_gather"]),
)
def test_layouts_hold_what_is_written_into_them(
    world: int, elements: int, element_bytes: int, wire_bytes: int, algorithm: Algorithm
) -> None:
    layout = buffer_layout(
        algorithm, world, elements, element_bytes=element_bytes, wire_bytes=wire_bytes
    )
    held = part_elements(elements, world) if algorithm == "two_shot" else -(-elements // world)
    if algorithm in ("one_shot", "all_gather"):
        held = elements
    assert layout.slot_elements >= held
    assert part_elements(elements, world) * world >= elements
    slots = layout.slot_elements * world
    assert layout.scale_offset >= slots * (wire_bytes or element_bytes)
    assert layout.result_offset >= layout.scale_offset + (slots // 128 * 4 if wire_bytes else 0)
    results = slots * element_bytes if algorithm == "two_shot" else 0
    assert layout.half_bytes >= layout.result_offset + results
    assert layout.flag_offset == 2 * layout.half_bytes
    assert layout.total_bytes >= layout.flag_offset + 2 * layout.programs * world * 4
    aligned = (layout.scale_offset, layout.result_offset, layout.half_bytes, layout.flag_offset)
    assert not any(value % 16 for value in aligned)
