"""Libraries' all-reduces over peers' memory: FlashInfer's over PCIe, torch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, Leaf
from hal.device import DeviceSpec
from hal.ops.collective import CollectiveGroup, CollectiveRequest
from hal.ops.formats import DTYPE_BYTES, torch_dtype
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import architecture, feature, gather, one_of, scope, software
from hal_backends.gpu.offers import NOT_RUN, Offer
from hal_backends.gpu.peer_limits import MIB, MOST_BYTES, one_shot_most_bytes, peers, size

if TYPE_CHECKING:
    import torch

# Hopper and data-centre Blackwell behind NVSwitch; vLLM's tables have no sm_12x.
_PCIE_IPC = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_SYMMETRIC = ("sm_90", "sm_100", "sm_103")


def library_offers(device: DeviceSpec) -> tuple[Offer, ...]:
    """What NVIDIA's platform has beside its collective library."""
    return (_flashinfer_pcie(device), *_symmetric_memory(device))


def _flashinfer_pcie(device: DeviceSpec) -> Offer:
    """flashinfer/comm/pcie_ipc_ar.py and pcie_ipc_policy.py of 0.7.4."""

    def check(r: CollectiveRequest) -> list[Reason]:
        pack = 16 // DTYPE_BYTES[r.dtype]
        return gather(
            scope("dtype", r.dtype, ("bfloat16", "float16", "float32")),
            peers(r, ("pcie",)),
            one_of("world_size", r.world_size, (2, 4, 8)),
            size(r, 0, MOST_BYTES),
            scope("width in packs of 16 bytes", r.width % pack, (0,)),
            architecture(device, _PCIE_IPC, why="FlashInfer is compiled for them"),
            software(device, "flashinfer-python", ">=0.7.4"),
        )

    return Offer(
        op="collective",
        implementation="flashinfer_pcie_ipc",
        tier=Tier.NATIVE,
        summary=f"FlashInfer's all-reduce over CUDA IPC and PCIe; {NOT_RUN}",
        check=check,
        load=_load_flashinfer_pcie,
        leaf=(Leaf(kind="kernel", name="pcie_ipc"),),
        requires=("flashinfer-python>=0.7.4",),
    )


def _load_flashinfer_pcie() -> Bind:
    from flashinfer.comm.pcie_ipc_ar import PcieIpcAllReduceWorkspace

    def bind(request: CollectiveRequest, *, group: CollectiveGroup) -> Kernel:
        workspace = PcieIpcAllReduceWorkspace(
            group.process_group,
            request.tokens.high * request.width,
            dtype=torch_dtype(request.dtype),
        )

        def all_reduce(x: torch.Tensor) -> torch.Tensor:
            return x.copy_(workspace.all_reduce(x))

        return all_reduce

    return bind


def _symmetric_memory(device: DeviceSpec) -> tuple[Offer, ...]:
    """torch's symmetric memory: the message is copied into a buffer that all ranks have mapped."""

    def check(r: CollectiveRequest) -> list[Reason]:
        return gather(
            scope("dtype", r.dtype, ("bfloat16", "float16", "float32")),
            peers(r, ("nvlink",)),
            architecture(device, _SYMMETRIC, why="torch's symmetric memory over NVLink"),
        )

    def offer(
        name: str, summary: str, more: Callable[[CollectiveRequest], Sequence[Reason]]
    ) -> Offer:
        return Offer(
            op="collective",
            implementation=f"torch_symmetric_{name}",
            tier=Tier.NATIVE,
            summary=f"torch's symmetric memory: {summary}; {NOT_RUN}",
            check=lambda r: gather(check(r), more(r)),
            load=_load_symmetric(name),
            leaf=(Leaf(kind="aten_op", name=f"symm_mem::{_SYMMETRIC_OPS[name]}"),),
            is_graph_safe=True,
        )

    return (
        offer("one_shot", "one step", lambda r: size(r, 0, one_shot_most_bytes(r))),
        offer("two_shot", "two steps", lambda r: size(r, one_shot_most_bytes(r), MOST_BYTES)),
        offer(
            "multimem",
            "reduced by the switch",
            lambda r: gather(size(r, 0, 64 * MIB), feature(device, "multicast")),
        ),
    )


_SYMMETRIC_OPS = {
    "one_shot": "one_shot_all_reduce",
    "two_shot": "two_shot_all_reduce_",
    "multimem": "multimem_all_reduce_",
}


def _load_symmetric(name: str) -> Callable[[], Bind]:
    def load() -> Bind:
        import torch
        import torch.distributed._symmetric_memory as symmetric

        operator: Any = getattr(torch.ops.symm_mem, _SYMMETRIC_OPS[name])

        def bind(request: CollectiveRequest, *, group: CollectiveGroup) -> Kernel:
            handle = group.process_group
            buffer = symmetric.empty(
                request.tokens.high * request.width,
                dtype=torch_dtype(request.dtype),
                device=torch.device("cuda", torch.cuda.current_device()),
            )
            symmetric.rendezvous(buffer, handle)

            def all_reduce(x: torch.Tensor) -> torch.Tensor:
                shared = buffer[: x.numel()].copy_(x.view(-1))
                return x.copy_(operator(shared, "sum", handle.group_name).view_as(x))

            return all_reduce

        return bind

    return load
