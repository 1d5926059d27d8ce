"""What a request launches of this package's kernels, for plans and audits: code and configuration.

Free of torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hal.candidates import KernelUse
from hal.device import DeviceSpec
from hal.reasons import Reason
from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.explanations import explain
from hal_kernels.aot.limits import (
    EvidenceQuery,
    evidence_asked,
    evidence_caveat,
    evidence_of,
)
from hal_kernels.aot.targets import TARGETS, Target
from hal_kernels.tuning.configuration_files import Trial
from hal_kernels.tuning.estimating import (
    estimate,
    estimate_default,
    modelled_us,
    possible_loss,
)
from hal_kernels.tuning.performance_model import Prediction
from hal_kernels.tuning.shapes import ShapeClass
from hal_kernels.tuning.store import find_configuration, stale_configuration
from hal_kernels.tuning.tunable import TunableKernel, configuration_name
from hal_kernels.tuning.tunable_kernels import TUNABLE, classes_of

_TARGETS = {target.arch: target for target in TARGETS}


def kernel_uses(
    op: str, limits: Callable[..., Sequence[Reason]], request: Any, device: DeviceSpec
) -> tuple[KernelUse, ...]:
    """The kernels of a request, whether or not they may serve it.

    limits: of the op's package. Raises SettingsError for a file of configurations that is not
    right.
    """
    target = _TARGETS.get(device.arch)
    known = classes_of(op, request, device) if target is not None else ()
    uses = []
    for query in evidence_asked(limits, request, device):
        stored = evidence_of(query.kernel, device, query.dtype, query.config)
        tunable, shape = TUNABLE.get(query.kernel), _class_of(query, known)
        if target is None or tunable is None or shape is None:
            uses.append(_fixed(query, stored, device))
        else:
            uses.append(_tuned_or_default(tunable, shape, target, query, stored, device))
    return tuple(uses)


def _class_of(query: EvidenceQuery, known: Sequence[tuple[str, ShapeClass]]) -> ShapeClass | None:
    """The class that a query is about: of a kernel in several forms the one of its configuration's
    name."""
    found = [shape for kernel, shape in known if kernel == query.kernel]
    if len(found) < 2:
        return found[0] if found else None
    return next((shape for shape in found if shape.form == query.config), None)


def _fixed(query: EvidenceQuery, stored: Evidence | None, device: DeviceSpec) -> KernelUse:
    return KernelUse(
        kernel=query.kernel,
        config=_variant(query),
        code="" if stored is None else stored.brief(),
        caveat="" if stored is None else evidence_caveat(query.kernel, device),
        explanation=_explained(query, stored),
        note="" if stored is not None else "no machine code for this architecture is stored",
    )


def _tuned_or_default(
    tunable: TunableKernel,
    shape: ShapeClass,
    target: Target,
    query: EvidenceQuery,
    stored: Evidence | None,
    device: DeviceSpec,
) -> KernelUse:
    kept = find_configuration(tunable.kernel, device, str(shape))
    if kept is not None:
        found = estimate(tunable, shape, kept.trial, device)
        return KernelUse(
            kernel=query.kernel,
            config=_variant(query),
            code=_describe(kept.trial, target),
            configuration=configuration_name(kept.trial.configuration),
            basis=kept.basis,
            shape=str(shape),
            loss=round(kept.loss, 3),
            note=f"{kept.trial.us:,.1f} µs, {kept.basis} {kept.made}{_of_rates(found)}",
            explanation=_explained(query, _evidence_of_trial(kept.trial, query, target)),
        )
    found = estimate_default(tunable, shape, target, stored, device)
    configuration = tunable.default_on(target, shape, device).configuration
    loss, note = None, str(found)
    if not isinstance(found, str):
        loss = round(possible_loss(tunable, shape, target, configuration, found, device), 3)
        us = modelled_us(found, configuration)
        note = f"by the model {us:,.1f} µs: {found.by}{_of_rates(found)}"
    if stale := stale_configuration(tunable.kernel, device, str(shape)):
        note = f"{note}; kept: {stale}"
    return KernelUse(
        kernel=query.kernel,
        config=_variant(query),
        code="" if stored is None else stored.brief(),
        caveat="" if stored is None else evidence_caveat(query.kernel, device),
        explanation=_explained(query, stored),
        configuration=configuration_name(configuration),
        basis="default",
        shape=str(shape),
        loss=loss,
        note=note,
    )


def _explained(query: EvidenceQuery, found: Evidence | None) -> str:
    """Why machine code is not native; "" where it is, or where none is stored."""
    return "" if found is None else explain(query.kernel, found) or ""


def _evidence_of_trial(trial: Trial, query: EvidenceQuery, target: Target) -> Evidence:
    return Evidence(
        target=target.arch,
        dtype=query.dtype,
        config=query.config,
        tier=trial.tier,
        spills=trial.spills,
        error=trial.error,
    )


def _variant(query: EvidenceQuery) -> str:
    return " ".join(dict.fromkeys(filter(None, (query.dtype, query.config))))


def _of_rates(found: Prediction | str) -> str:
    """Beside what no kernel can be faster than; "" where that is not known."""
    return "" if isinstance(found, str) else f", where the rates allow {found.bound_us:,.1f} µs"


def _describe(trial: Trial, target: Target) -> str:
    return Evidence(
        target=target.arch,
        dtype="",
        config="",
        tier=trial.tier,
        instruction=trial.instruction,
        instruction_count=trial.instruction_count,
        registers=trial.registers,
        spills=trial.spills,
        shared_bytes=trial.shared_bytes,
    ).brief()
