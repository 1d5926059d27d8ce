"""Collectives by our kernels that read and write the peers' memory, for the sizes they win at."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.collective import CollectiveGroup, CollectiveKind, CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.tiers import Tier
from hal_backends.gpu.collectives_vendor import library_offers
from hal_backends.gpu.limits import feature, gather
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device
from hal_backends.gpu.peer_limits import FABRICS, MOST_BYTES, one_shot_most_bytes, peers, size
from hal_backends.gpu.semantics import ROUNDED_WIRE
from hal_kernels.collective.layout import Algorithm
from hal_kernels.collective.triton_limits import norm_not_supported_reasons, not_supported_reasons

_KERNEL = "hal_kernels.collective.triton"
# Who asks for a rounded wire has it for every step; larger ones would hold buffers of 200 MiB.
_MOST_ROUNDED_BYTES = 8 * MOST_BYTES
_UNTUNED = "pushed over PCIe, pulled over a fabric, tiles of 2,048 elements: reasoned, not measured"


def peer_candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    offers = []
    if "triton" in device.features | device.unverified_features:
        offers += [_one_shot(device), _two_shot(device), *_parts(device), _with_norm(device)]
        offers += _rounded(device)
    if device.backend == "nvidia":
        offers += library_offers(device)
    return on_device(offers, op, device)


def _triton(device: DeviceSpec, algorithm: Algorithm, wire: str = "") -> Callable[[], Bind]:
    def load() -> Bind:
        module = importlib.import_module(_KERNEL)

        def bind(request: CollectiveRequest, *, group: CollectiveGroup) -> Kernel:
            kernel: Kernel = module.bind(
                request, device, group=group, algorithm=algorithm, wire=wire
            )
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
            peers(r, ("pcie", *FABRICS)),
            size(r, 0, one_shot_most_bytes(r)),
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
            peers(r, ("pcie", *FABRICS)),
            size(r, one_shot_most_bytes(r), MOST_BYTES),
            feature(device, "triton"),
            not_supported_reasons(r, device, "two_shot"),
        ),
        load=_triton(device, "two_shot"),
        leaf=(Leaf(kind="kernel", name="_all_reduce_two_shot_kernel"),),
        requires=("triton",),
        is_graph_safe=True,
    )


def _rounded(device: DeviceSpec) -> list[Offer]:
    """The sums with half of the bytes on the wire: other numbers, so for those who ask for them. Of
    a message that is small enough for one shot, bytes are not what it waits for."""
    wire = "fp8_e4m3fnuz" if device.arch.startswith("gfx94") else "fp8_e4m3fn"

    def offer(kind: CollectiveKind, algorithm: Algorithm, function: str) -> Offer:
        return Offer(
            op="collective",
            implementation=f"triton_{algorithm}_fp8",
            tier=Tier.NATIVE,
            summary=f"as triton_{algorithm}, sent in e4m3 with scales of 128 values; {NOT_RUN}",
            untuned=_UNTUNED,
            check=lambda r: gather(
                peers(r, ("pcie", *FABRICS), kind),
                size(r, 0, _MOST_ROUNDED_BYTES, kind),
                feature(device, "triton"),
                not_supported_reasons(r, device, algorithm, has_fp8_wire=True),
            ),
            notes=lambda r: (ROUNDED_WIRE,),
            load=_triton(device, algorithm, wire),
            leaf=(Leaf(kind="kernel", name=function),),
            requires=("triton",),
            is_graph_safe=True,
        )

    return [
        offer("all_reduce", "two_shot", "_all_reduce_two_shot_kernel"),
        offer("reduce_scatter", "reduce_scatter", "_reduce_scatter_kernel"),
    ]


def _with_norm(device: DeviceSpec) -> Offer:
    """For the sizes at which one shot is meant: the sum is then normed where it was summed."""

    def load() -> Bind:
        module = importlib.import_module(_KERNEL)

        def bind(request: AllReduceNormRequest, **static: Any) -> Kernel:
            kernel: Kernel = module.bind_norm(request, device, **static)
            return kernel

        return bind

    return Offer(
        op="all_reduce_norm",
        implementation="triton_one_shot",
        tier=Tier.NATIVE,
        summary=f"the one-shot all-reduce, residual and norm in one kernel; {NOT_RUN}",
        untuned=_UNTUNED,
        check=lambda r: gather(
            peers(r, ("pcie", *FABRICS)),
            size(r, 0, one_shot_most_bytes(r)),
            feature(device, "triton"),
            norm_not_supported_reasons(r, device),
        ),
        load=load,
        leaf=(Leaf(kind="kernel", name="_all_reduce_norm_kernel|_all_reduce_norm_looped_kernel"),),
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
                peers(r, ("pcie", *FABRICS), kind),
                size(r, 0, MOST_BYTES, kind),
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
