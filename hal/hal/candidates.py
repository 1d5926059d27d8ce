"""A kernel candidate: one implementation of one op that a backend offers for a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hal.ops.request import OpRequest
from hal.reasons import Reason
from hal.tiers import Tier

Kernel = Callable[..., Any]
Bind = Callable[..., Kernel]  # bind(request, **static) -> kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticNote:
    """How the numbers differ, beyond rounding, from what the request says. Never a tier."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """What must be seen running when the candidate runs: the audit compares this with reality.

    kind: aten_op (name as the dispatcher has it), symbol (of a library or a compiled kernel),
    kernel (name of a device kernel), instruction (in the machine code). In the last two "|" stands
    between alternatives, of which a call ends in one or more.
    """

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an implementation really does for one call, as opposed to what the op needs.

    flops: operations. bytes: read and written, its own intermediates included. unit: the key of
    `DeviceSpec.peak_flops` whose rate bounds it: a widened FP8 product has "bfloat16" here.
    """

    flops: float
    bytes: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """A compiled kernel of an implementation, as a request would launch it.

    kernel: its name in the catalogue of its package. config: the name of its variant. code: what
    its machine code proves, as text: "native: 64× mma.sync e4m3, 0 spills, 99 KiB"; "" if nobody
    looked. explanation: why that is not what the hardware is best at; "" where it is. caveat: why
    `code` need not be what runs (another compiler is installed), "" if it is.
    configuration: the constants it is launched with, as text. basis: what they rest on:
    "measured" or "modelled" for this device, "default" of the kernel where neither is kept, "fixed"
    where there is nothing to choose. shape: the class that a configuration is kept for, "" if none.
    loss: the share of its time that another configuration would save at most, by a model; None
    where that is not known or nothing is to be chosen; note: why. workspace_bytes: what the call
    takes in device memory beside its operands and results, 0 where that is nothing or not said.
    """

    kernel: str
    config: str = ""
    code: str = ""
    caveat: str = ""
    configuration: str = ""
    basis: str = "fixed"
    shape: str = ""
    loss: float | None = None
    note: str = ""
    workspace_bytes: int = 0
    explanation: str = ""


def _nothing_to_note(request: Any) -> Sequence[SemanticNote]:
    return ()


def _no_kernels(request: Any) -> Sequence[KernelUse]:
    return ()


def _no_estimate(request: Any, tokens: int) -> float | None:
    return None


def _no_source(request: Any, tokens: int) -> str:
    return ""


def _no_own_work(request: Any, tokens: int) -> Work | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCandidate:
    """One implementation and its exact limits.

    name: unique, `<backend>.<op>.<implementation>`. not_supported_reasons: every unmet
    requirement of a request, empty if it can serve. load: imports what it needs and returns
    `bind(request, **static)`, which packs weights and returns the kernel; it is called once a call
    site, with a token range that spans all ranges of the candidate. estimate_us: time of one
    call at a number of tokens, from measurements; None where nothing was measured.
    estimate_source: of that time, as text for people: "measured 2026-11-30"; "" says nothing.
    weight_layout: candidates of one name pack a weight alike; ranges of a plan that differ in it
    hold the weight twice. work: what it does for one call at a number of tokens where that is not
    what the op needs on the unit of the request's dtype; None where it is. requires_software: what
    must be installed, as requirement strings ("flash-attn>=2.7"), for people to read. untuned: what
    its configuration rests on where nobody measured one on this device, "" where there is nothing
    to configure or it was measured; a plan says so of each that it chooses. modules: whose
    source is the kernel, where `load` imports them by computed names. kernel_uses: the compiled
    kernels that a request would launch, with what is known of their code; for people and tuning.
    is_graph_safe: a step with it may be captured and replayed on new values in the same tensors
    (`hal.hookspecs.CapturingRuntime`): nothing that it does depends on a value that the host read,
    and memory of its own outlives the capture. On the CPU all it computes are launches of
    `hal_kernels.cpu_launch`; what else it does is found when a step is captured, before ready.
    """

    name: str
    op: str
    tier: Tier
    summary: str
    not_supported_reasons: Callable[[Any], Sequence[Reason]]
    load: Callable[[], Bind]
    estimate_us: Callable[[Any, int], float | None] = _no_estimate
    estimate_source: Callable[[Any, int], str] = _no_source
    semantic_notes: Callable[[Any], Sequence[SemanticNote]] = _nothing_to_note
    work: Callable[[Any, int], Work | None] = _no_own_work
    kernel_uses: Callable[[Any], Sequence[KernelUse]] = _no_kernels
    requires_software: tuple[str, ...] = ()
    untuned: str = ""
    modules: tuple[str, ...] = ()
    leaf: tuple[Leaf, ...] = ()
    weight_layout: str = ""
    is_graph_safe: bool = False
    distribution: str = "halstack"

    def serves(self, request: OpRequest) -> bool:
        return not self.not_supported_reasons(request)
