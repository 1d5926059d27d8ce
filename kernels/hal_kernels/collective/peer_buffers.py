"""The buffers of a group as one rank sees them: addresses, counters, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hal.errors import UserError
from hal_kernels.collective.layout import BufferLayout


class PeerTimeoutError(UserError, RuntimeError):
    """A peer did not come to a collective within the limit."""


@dataclass(slots=True, kw_only=True)
class PeerBuffers:
    """One rank's view. addresses: int64 [world], where this device has every rank's buffer mapped.
    epochs: int32 [programs], zeros at first. status: int32 [1], 0, or 1 + the rank that did not
    come. memory: whatever keeps the buffers alive."""

    rank: int
    world_size: int
    layout: BufferLayout
    addresses: torch.Tensor
    epochs: torch.Tensor
    status: torch.Tensor
    memory: Any = None

    def check(self) -> None:
        """Raises PeerTimeoutError if a peer has not come since the last check. Waits for the
        device, so for the end of a step."""
        missing = int(self.status.item())
        if missing:
            self.status.zero_()
            raise PeerTimeoutError(
                f"collective over peers' memory, rank {self.rank} of {self.world_size}: required "
                f"rank {missing - 1} to come within the limit, found that it did not; the result "
                "is NaN. End the group; see whether that rank has ended or calls in another order"
            )


def symmetric_buffers(
    process_group: Any, layout: BufferLayout, device: torch.device
) -> PeerBuffers:
    """Buffers of torch's symmetric memory, flags at zero. Every rank of the group must call it.

    Raises RuntimeError where the devices cannot map each other's memory.
    """
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(layout.total_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, process_group)
    memory.zero_()
    torch.accelerator.synchronize(device)
    dist.barrier(group=process_group)  # nobody raises a flag that a slower rank zeroes afterwards
    return PeerBuffers(
        rank=handle.rank,
        world_size=handle.world_size,
        layout=layout,
        addresses=torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device),
        epochs=torch.zeros(layout.programs, dtype=torch.int32, device=device),
        status=torch.zeros(1, dtype=torch.int32, device=device),
        memory=(memory, handle),
    )
