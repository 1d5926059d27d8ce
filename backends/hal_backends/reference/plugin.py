"""The plain-torch reference of every op as a candidate, for any device. Hook implementations only.

It is the last tier: right everywhere, fast nowhere, and an error in a plan unless it is waived.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal import hookimpl
from hal.candidates import Bind, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.hookspecs import BackendInfo
from hal.ops import CATALOGUE
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
            leaf=(Leaf(kind="symbol", name=family.reference.__module__),),
        ),
    )
