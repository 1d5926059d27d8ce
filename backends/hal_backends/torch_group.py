"""A group of processes over torch.distributed, whatever library is behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """See `hal.ops.collective.CollectiveGroup`."""

    rank: int
    world_size: int
    process_group: Any
    _checks: list[Callable[[], None]] = field(default_factory=list)

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x in rank order; ranks must pass equal shapes."""
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return parts

    def add_check(self, check: Callable[[], None]) -> None:
        """See `CollectiveGroup.add_check`."""
        self._checks.append(check)

    def check(self) -> None:
        """See `CollectiveGroup.check`."""
        for check in self._checks:
            check()

    def close(self) -> None:
        """Ends the connections. Peers that still wait for this rank get an error."""
        self._checks.clear()  # what they look at may be memory of peers that is gone
        dist.destroy_process_group(self.process_group)
