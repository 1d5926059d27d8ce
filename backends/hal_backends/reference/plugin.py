"""The plain-torch reference of every op as a candidate, for any device. Hook implementations only.

It is the last tier: right everywhere, fast nowhere, and an error in a plan unless it is waived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hal import hookimpl
from hal.candidates import Bind, KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.hookspecs import BackendInfo
from hal.ops import CATALOGUE, OpFamily, OpRequest
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.tiers import Tier


@hookimpl
def hal_backend_info() -> BackendInfo:
    return BackendInfo(
        name="reference",
        vendor="halstack",
        api_range=">=1.0,<2",
        provides=frozenset({"candidates"}),
    )


@hookimpl
def hal_kernel_candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    family = CATALOGUE.get(op)
    if family is None:
        return ()

    def load() -> Bind:
        return family.reference

    return (
        KernelCandidate(
            name=f"reference.{op}",
            op=op,
            tier=Tier.REFERENCE,
            summary=f"{family.summary}: plain torch, the golden",
            not_supported_reasons=lambda request: (),
            load=load,
            work=lambda request, tokens: _work(family, request, tokens),
            leaf=(Leaf(kind="symbol", name=family.reference.__module__),),
        ),
    )


def _work(family: OpFamily, request: OpRequest, tokens: int) -> Work:
    """It computes in float32, with weights that were dequantised to float32 at binding."""
    if isinstance(request, GemmRequest | GroupedGemmRequest):
        request = dataclasses.replace(request, weight_format=FORMATS["float32"])
    return Work(
        flops=family.flops(request, tokens),
        bytes=family.bytes_moved(request, tokens),
        unit="float32",
    )
