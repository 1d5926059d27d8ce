"""Ranks of a collective as processes that share memory, as devices do: forked, so that a buffer
has one address in all of them. Each runs the very kernels, in Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import torch

from hal_kernels.collective.layout import BufferLayout
from hal_kernels.collective.peer_buffers import PeerBuffers

DEADLINE_S = 120


def shared_memory(world: int, layout: BufferLayout) -> list[torch.Tensor]:
    """A buffer a rank, filled with what looks like data and is not; flags at zero."""
    buffers = []
    for _ in range(world):
        memory = torch.full((layout.total_bytes,), 0x7F, dtype=torch.uint8)  # NaN in every dtype
        memory[layout.flag_offset :] = 0
        buffers.append(memory.share_memory_())
    return buffers


def view_of(rank: int, memory: list[torch.Tensor], layout: BufferLayout) -> PeerBuffers:
    return PeerBuffers(
        rank=rank,
        world_size=len(memory),
        layout=layout,
        addresses=torch.tensor([m.data_ptr() for m in memory], dtype=torch.int64),
        epochs=torch.zeros(layout.programs, dtype=torch.int32),
        status=torch.zeros(1, dtype=torch.int32),
        memory=memory,
    )


def run_ranks(
    world: int,
    layout: BufferLayout,
    work: Callable[[PeerBuffers], Any],
    absent: tuple[int, ...] = (),
) -> list[Any]:
    """`work(buffers)` in every rank but the absent ones; their results by rank (None: absent)."""
    memory = shared_memory(world, layout)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        try:
            queue.put((rank, work(view_of(rank, memory, layout)), None))
        except BaseException:  # noqa: BLE001  # told to the parent, which raises it
            queue.put((rank, None, traceback.format_exc()))

    present = [rank for rank in range(world) if rank not in absent]
    processes = [context.Process(target=rank_main, args=(rank,), daemon=True) for rank in present]
    for process in processes:
        process.start()
    results: list[Any] = [None] * world
    try:
        for _ in present:
            rank, result, error = queue.get(timeout=DEADLINE_S)
            if error is not None:
                raise RuntimeError(f"rank {rank}: {error}")
            results[rank] = result
    finally:
        for process in processes:
            process.terminate()
            process.join(10)
    return results
