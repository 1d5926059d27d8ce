"""Collectives between processes of one host: gloo over the loopback interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.collective import COLLECTIVE_KINDS, CollectiveGroup, CollectiveRequest
from hal.tiers import Tier
from hal_backends.cpu.limits import gather, limit, scope

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8")


def _load() -> Bind:
    import torch
    import torch.distributed as dist

    def bind(request: CollectiveRequest, *, group: CollectiveGroup) -> Kernel:
        ranks, handle, world = group.rank, group.process_group, group.world_size

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=handle)
            return x

        def all_gather(x: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(parts, x.contiguous(), group=handle)
            return torch.cat(parts, dim=-1)

        def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
            parts = [part.contiguous() for part in x.chunk(world, dim=-1)]
            out = torch.empty_like(parts[ranks])
            dist.reduce_scatter(out, parts, group=handle)
            return out

        def all_to_all(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x.contiguous(), group=handle)
            return out

        def broadcast(x: torch.Tensor) -> torch.Tensor:
            dist.broadcast(x, src=0, group=handle)
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


def candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.collective.gloo",
            op="collective",
            tier=Tier.TUNED,
            summary="gloo: ranks of one host over the loopback interface",
            not_supported_reasons=lambda r: gather(
                scope("transport", r.transport, ("host",)),
                scope("kind", r.kind, COLLECTIVE_KINDS),
                limit("dtype", r.dtype, ", ".join(_DTYPES), is_met=r.dtype in _DTYPES),
            ),
            load=_load,
            leaf=(Leaf(kind="symbol", name="c10d::ProcessGroupGloo"),),
        ),
    )
