"""Candidates and devices whose every answer a test decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import pytest

from hal.candidates import KernelCandidate, SemanticNote
from hal.device import DeviceSpec
from hal.ops import TokenRange
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier


class MakeCandidate(Protocol):
    def __call__(
        self,
        name: str,
        tier: Tier = ...,
        *,
        us: float | Callable[[int], float | None] | None = ...,
        unmet: Sequence[ReasonKind] = ...,
        notes: Sequence[str] = ...,
        op: str = ...,
        **fields: Any,
    ) -> KernelCandidate: ...


def _candidate(
    name: str,
    tier: Tier = Tier.TUNED,
    *,
    us: float | Callable[[int], float | None] | None = None,
    unmet: Sequence[ReasonKind] = (),
    notes: Sequence[str] = (),
    op: str = "gemm",
    **fields: Any,
) -> KernelCandidate:
    reasons = tuple(
        Reason(what=f"{kind} limit", required="more", found="less", kind=kind) for kind in unmet
    )
    defaults: dict[str, Any] = {
        "not_supported_reasons": lambda request: reasons,
        "load": lambda: lambda request, **static: lambda *args: (name, *args),
        "estimate_us": (lambda request, tokens: us(tokens)) if callable(us) else lambda r, t: us,
        "semantic_notes": lambda request: tuple(SemanticNote(name=n, text=f"{n}!") for n in notes),
        "is_graph_safe": True,
    }
    return KernelCandidate(
        name=name, op=op, tier=tier, summary=f"{name} for tests", **(defaults | fields)
    )


@pytest.fixture
def candidate() -> MakeCandidate:
    """A factory: us is the estimate, or one as a function of tokens; unmet the kinds of reasons."""
    return _candidate


class MakeGemm(Protocol):
    def __call__(self, **changes: Any) -> GemmRequest: ...


@pytest.fixture
def gemm() -> MakeGemm:
    def make(**changes: Any) -> GemmRequest:
        arguments: Mapping[str, Any] = {
            "n": 64,
            "k": 32,
            "dtype": "float32",
            "weight_format": FORMATS["float32"],
            "tokens": TokenRange(1, 64),
        }
        return GemmRequest(**{**arguments, **changes})

    return make


@pytest.fixture
def device() -> DeviceSpec:
    return DeviceSpec(
        device_id="toy:0",
        vendor="Toys",
        backend="toy",
        name="Toy One",
        arch="toy_1",
        torch_device="cpu",
        features=frozenset({"fast", "int4"}),
        num_cores=2,
        memory_bytes=2**30,
        memory_bandwidth=1e9,
        peak_flops={"float32": 1e10},
    )
