"""How a library declares its candidates: names, and what their implementations do for one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hal.candidates import Bind, KernelCandidate, KernelUse, Leaf, SemanticNote, Work
from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.request import OpRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_kernels.tuning.candidate_times import measured_time

Check = Callable[[Any], Sequence[Reason]]
Library = Callable[[str, DeviceSpec], Sequence[KernelCandidate]]

NOT_RUN = "not run on hardware by this project"
"""The mark in the summary of an implementation that is written from the library's signatures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A candidate before it belongs to a device.

    implementation: the last part of the name. check: limits beyond those of the library, asked
    with the request. uses: the compiled kernels that it launches for one. work: what it really
    does for one call, where that is not what the op needs.
    """

    op: str
    implementation: str
    tier: Tier
    summary: str
    check: Check
    load: Callable[[], Bind]
    leaf: tuple[Leaf, ...]
    notes: Callable[[Any], Sequence[SemanticNote]] | None = None
    work: Callable[[Any, int], Work | None] | None = None
    uses: Callable[[Any], Sequence[KernelUse]] | None = None
    requires: tuple[str, ...] = ()
    untuned: str = ""
    modules: tuple[str, ...] = ()
    is_graph_safe: bool = False

    def on(self, device: DeviceSpec) -> KernelCandidate:
        return KernelCandidate(
            name=f"{device.backend}.{self.op}.{self.implementation}",
            op=self.op,
            tier=self.tier,
            summary=self.summary,
            not_supported_reasons=self.check,
            estimate_us=self._estimate(device),
            estimate_source=self._source(device),
            load=self.load,
            semantic_notes=self.notes or _nothing,
            work=self.work or _as_the_op_needs,
            kernel_uses=self.uses or _nothing,
            requires_software=self.requires,
            untuned=self.untuned,
            modules=self.modules,
            leaf=self.leaf,
            weight_layout=f"{device.backend}.{self.op}.{self.implementation}",
            is_graph_safe=self.is_graph_safe,
        )

    def _estimate(self, device: DeviceSpec) -> Callable[[Any, int], float | None]:
        measured = self._measured(device)

        def estimate_us(request: Any, tokens: int) -> float | None:
            found = measured(request, tokens)
            return None if found is None else found[0]

        return estimate_us

    def _source(self, device: DeviceSpec) -> Callable[[Any, int], str]:
        measured = self._measured(device)

        def source(request: Any, tokens: int) -> str:
            found = measured(request, tokens)
            return "" if found is None else f"measured {found[1]}"

        return source

    def _measured(self, device: DeviceSpec) -> Callable[[Any, int], tuple[float, str] | None]:
        """What `hal kernels tune --measure` kept of the implementation on such a device."""
        name = f"{device.backend}.{self.op}.{self.implementation}"
        return lambda request, tokens: measured_time(name, self.op, request, tokens, device)


def _nothing(request: Any) -> tuple[()]:
    return ()


def _as_the_op_needs(request: Any, tokens: int) -> Work | None:
    return None


def on_device(offers: Iterable[Offer], op: str, device: DeviceSpec) -> tuple[KernelCandidate, ...]:
    """The offers for one op as candidates of a device."""
    return tuple(offer.on(device) for offer in offers if offer.op == op)


def from_libraries(
    libraries: Sequence[Library], op: str, device: DeviceSpec
) -> tuple[KernelCandidate, ...]:
    """What all libraries of a platform offer for one op."""
    return tuple(candidate for library in libraries for candidate in library(op, device))


def work_of(
    request: OpRequest,
    tokens: int,
    *,
    unit: str,
    flops: float | None = None,
    more_bytes: float = 0.0,
) -> Work:
    """The op's own work on `unit`, with other operations or more bytes where given."""
    family = CATALOGUE[request.op]
    return Work(
        flops=family.flops(request, tokens) if flops is None else flops,
        bytes=family.bytes_moved(request, tokens) + more_bytes,
        unit=unit,
    )
