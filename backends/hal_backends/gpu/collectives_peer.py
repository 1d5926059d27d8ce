"""All-reduce by kernels that read and write the peers' memory, for the sizes at which they win.

Each has a size up to which it is meant: beyond it the platform's library is better, so a larger
message is out of scope and nothing is lost by it. Thresholds: vLLM's custom all-reduce (8 MiB;
one-shot below 512 KiB for up to 4 ranks, 256 KiB for up to 8), and measurements on PCIe (one-shot
loses to the library from about 48 KiB among 8 devices of two sockets).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.collective import CollectiveGroup, CollectiveKind, CollectiveRequest
from hal.ops.formats import DTYPE_BYTES, torch_dtype
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal_backends.gpu.limits import (
    architecture,
    feature,
    gather,
    one_of,
    scope,
    software,
)
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device
from hal_kernels.collective.layout import Algorithm
from hal_kernels.collective.triton_limits import not_supported_reasons

if TYPE_CHECKING:
    import torch

_KIB, _MIB = 1 << 10, 1 << 20
_MOST_BYTES = 8 * _MIB
_WORLDS = (2, 4, 6, 8)
_DTYPES = ("bfloat16", "float16", "float32")
_KERNEL = "hal_kernels.collective.triton"
_FABRICS = ("nvlink", "xgmi")
_UNTUNED = "pushed over PCIe, pulled over a fabric, tiles of 2,048 elements: reasoned, not measured"
# Hopper and data-centre Blackwell behind NVSwitch; vLLM's tables have no sm_12x.
_PCIE_IPC = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_SYMMETRIC = ("sm_90", "sm_100", "sm_103")


def peer_candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    offers = []
    if "triton" in device.features | device.unverified_features:
        offers += [_one_shot(device), _two_shot(device), *_parts(device)]
    if device.backend == "nvidia":
        offers += [_flashinfer_pcie(device), *_symmetric_memory(device)]
    return on_device(offers, "collective", device)


def message_bytes(r: CollectiveRequest) -> int:
    """Of the largest message of the request's token range."""
    return r.tokens.high * r.width * DTYPE_BYTES[r.dtype]


def one_shot_most_bytes(r: CollectiveRequest) -> int:
    """Up to which every rank reads all of every other rank's message."""
    if r.world_size <= 2:
        return _MOST_BYTES
    if r.transport == "pcie" and r.world_size > 4 and r.distance == "SYS":
        return 48 * _KIB
    return 512 * _KIB if r.world_size <= 4 else 256 * _KIB


def _size(
    r: CollectiveRequest, low: int, high: int, kind: CollectiveKind = "all_reduce"
) -> list[Reason]:
    """The sizes are those of one kind; other kinds are out of scope at any."""
    found = message_bytes(r)
    if r.kind != kind or low < found <= high:
        return []
    bounds = f"at most {high} bytes" if low == 0 else f"more than {low}, at most {high} bytes"
    return [
        Reason(
            what="message",
            required=f"{bounds} (beyond that another algorithm wins)",
            found=f"{found} bytes",
            kind=ReasonKind.SCOPE,
        )
    ]


def _peers(
    r: CollectiveRequest, transports: Sequence[str], kind: CollectiveKind = "all_reduce"
) -> list[Reason]:
    """A collective of devices that all reach each other's memory, as verified on this host."""
    reasons = gather(
        scope("kind", r.kind, (kind,)),
        scope("dtype", r.dtype, _DTYPES),
        scope("transport", r.transport, transports),
        one_of("world_size", r.world_size, _WORLDS),
    )
    if r.transport in _FABRICS and r.world_size > 2 and not r.is_full_mesh:
        reasons.append(
            Reason(
                what="fabric",
                required=f"{r.transport} between every pair",
                found="not every pair is linked directly",
                kind=ReasonKind.HARDWARE,
            )
        )
    if r.p2p != "verified":
        reasons.append(
            Reason(
                what="peer access (P2P)",
                required="verified on this host (hal devices --verify-links)",
                found={"claimed": "claimed, not verified", "unknown": "not known"}.get(
                    r.p2p, "none"
                ),
                kind=ReasonKind.HARDWARE if r.p2p == "none" else ReasonKind.UNVERIFIED,
            )
        )
    return reasons


def _triton(device: DeviceSpec, algorithm: Algorithm) -> Callable[[], Bind]:
    def load() -> Bind:
        module = importlib.import_module(_KERNEL)

        def bind(request: CollectiveRequest, *, group: CollectiveGroup) -> Kernel:
            kernel: Kernel = module.bind(request, device, group=group, algorithm=algorithm)
            return kernel

        return bind

    return load


def _one_shot(device: DeviceSpec) -> Offer:
    return Offer(
        op="collective",
        implementation="triton_one_shot",
        tier=Tier.NATIVE,
        summary=f"every rank reads every other rank's message, for small messages; {NOT_RUN}",
        untuned=_UNTUNED,
        check=lambda r: gather(
            _peers(r, ("pcie", *_FABRICS)),
            _size(r, 0, one_shot_most_bytes(r)),
            feature(device, "triton"),
            not_supported_reasons(r, device, "one_shot"),
        ),
        load=_triton(device, "one_shot"),
        leaf=(Leaf(kind="kernel", name="_all_reduce_one_shot_kernel"),),
        requires=("triton",),
        is_graph_safe=True,
    )


def _two_shot(device: DeviceSpec) -> Offer:
    return Offer(
        op="collective",
        implementation="triton_two_shot",
        tier=Tier.NATIVE,
        summary=f"each rank sums a share, all read the shares, for larger messages; {NOT_RUN}",
        untuned=_UNTUNED,
        check=lambda r: gather(
            _peers(r, ("pcie", *_FABRICS)),
            _size(r, one_shot_most_bytes(r), _MOST_BYTES),
            feature(device, "triton"),
            not_supported_reasons(r, device, "two_shot"),
        ),
        load=_triton(device, "two_shot"),
        leaf=(Leaf(kind="kernel", name="_all_reduce_two_shot_kernel"),),
        requires=("triton",),
        is_graph_safe=True,
    )


def _parts(device: DeviceSpec) -> list[Offer]:
    """Reduce-scatter and all-gather: one exchange each, the halves of a two-shot all-reduce."""

    def offer(kind: CollectiveKind, algorithm: Algorithm, summary: str) -> Offer:
        return Offer(
            op="collective",
            implementation=f"triton_{kind}",
            tier=Tier.NATIVE,
            summary=f"{summary}; {NOT_RUN}",
            check=lambda r: gather(
                _peers(r, ("pcie", *_FABRICS), kind),
                _size(r, 0, _MOST_BYTES, kind),
                feature(device, "triton"),
                not_supported_reasons(r, device, algorithm),
            ),
            load=_triton(device, algorithm),
            leaf=(Leaf(kind="kernel", name=f"_{kind}_kernel"),),
            requires=("triton",),
            untuned=_UNTUNED,
            is_graph_safe=True,
        )

    return [
        offer("reduce_scatter", "reduce_scatter", "each rank sums its columns of all messages"),
        offer("all_gather", "all_gather", "every rank copies every other rank's columns"),
    ]


def _flashinfer_pcie(device: DeviceSpec) -> Offer:
    """flashinfer/comm/pcie_ipc_ar.py and pcie_ipc_policy.py of 0.7.4."""

    def check(r: CollectiveRequest) -> list[Reason]:
        pack = 16 // DTYPE_BYTES[r.dtype]
        return gather(
            scope("dtype", r.dtype, ("bfloat16", "float16", "float32")),
            _peers(r, ("pcie",)),
            one_of("world_size", r.world_size, (2, 4, 8)),
            _size(r, 0, _MOST_BYTES),
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
            _peers(r, ("nvlink",)),
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
        offer("one_shot", "one step", lambda r: _size(r, 0, one_shot_most_bytes(r))),
        offer("two_shot", "two steps", lambda r: _size(r, one_shot_most_bytes(r), _MOST_BYTES)),
        offer(
            "multimem",
            "reduced by the switch",
            lambda r: gather(_size(r, 0, 64 * _MIB), feature(device, "multicast")),
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
