"""Collectives between processes of one host: gloo over the loopback interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.candidates import KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.collective import COLLECTIVE_KINDS
from hal.tiers import Tier
from hal_backends.cpu.limits import gather, limit, scope
from hal_backends.process_group import load_process_group

if TYPE_CHECKING:
    pass

# What torch.distributed calls through the dispatcher: a call ends in one of them.
_DISPATCHED = (
    "c10d::allreduce_",
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "c10d::alltoall_base_",
    "c10d::broadcast_",
    "c10d::barrier",
)
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8")


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
            load=load_process_group,
            leaf=tuple(Leaf(kind="aten_op", name=name) for name in _DISPATCHED),
        ),
    )
