"""Collectives by torch.distributed, whatever library is behind the group: gloo, NCCL, HCCL, …"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel
from hal.ops.collective import CollectiveGroup, CollectiveRequest

if TYPE_CHECKING:
    import torch


def load_process_group() -> Bind:
    """The collectives of the group's process group, whatever library is behind it."""
    import torch
    import torch.distributed as dist

    # torch 2.13 renamed both and warns of the old names; vendors' builds are of older versions.
    gather_blocks = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_blocks = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def bind(request: CollectiveRequest, *, group: CollectiveGroup) -> Kernel:
        handle, world = group.process_group, group.world_size

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=handle)
            return x

        def all_gather(x: torch.Tensor) -> torch.Tensor:
            parts = x.new_empty((world * x.shape[0], *x.shape[1:]))
            gather_blocks(parts, x.contiguous(), group=handle)
            return torch.cat(parts.chunk(world), dim=-1)

        def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
            parts = torch.cat(x.chunk(world, dim=-1))
            out = x.new_empty((x.shape[0], x.shape[1] // world))
            reduce_blocks(out, parts, group=handle)
            return out

        def all_to_all(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x.contiguous(), group=handle)
            return out

        def broadcast(x: torch.Tensor) -> torch.Tensor:
            dist.broadcast(x, group_src=0, group=handle)
            return x

        def barrier() -> None:
            dist.barrier(group=handle)

        kernels: dict[str, Callable[..., Any]] = {
            "all_reduce": all_reduce,
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
            "all_to_all": all_to_all,
            "broadcast": broadcast,
            "barrier": barrier,
        }
        return kernels[request.kind]

    return bind
