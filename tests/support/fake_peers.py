"""Runtimes of devices that reach each other's memory, or say so, as checks of links see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FakeRuntime:
    """A device whose memory is the host's. damage: what a copy to a peer does to the words."""

    torch_device = torch.device("cpu")
    num_threads = 1

    def __init__(
        self, *, claim: bool | None = True, damage: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self.claim, self.damage = claim, damage

    def create_group(self, rank: int, world_size: int, rendezvous: str) -> Any:
        raise NotImplementedError

    def free_memory_bytes(self) -> int:
        return 1 << 30

    def synchronize(self) -> None:
        pass

    def reaches(self, peer: torch.device) -> bool | None:
        return self.claim

    def copy_to_peer(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)
        if self.damage is not None:
            self.damage(destination)


class OldRuntime:
    """A runtime of a plug-in that knows nothing of peers."""

    torch_device = torch.device("cpu")
    num_threads = 1

    def create_group(self, rank: int, world_size: int, rendezvous: str) -> Any:
        raise NotImplementedError

    def free_memory_bytes(self) -> int:
        return 1 << 30

    def synchronize(self) -> None:
        pass
