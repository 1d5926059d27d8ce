"""What a plan remarks on configurations: said until they were measured on the device."""

from __future__ import annotations

from typing import Any

import pytest

from hal.candidates import KernelUse
from hal.decided_notes import decided_notes
from hal.device import DevicePolicy, DeviceSpec
from hal.ops.request import TokenRange
from hal.plan import OpSite
from hal.planner import PlanInputs, plan_ops
from hal.waivers import WaiverBook

_DEFAULT = "configuration not measured on this device: one (read in machine code)"
_RANKED = "configuration ranked by a model for this device, and not measured on it: one"


@pytest.mark.parametrize(
    ("bases", "said"),
    [
        ((), [_DEFAULT]),
        (("default",), [_DEFAULT]),
        (("modelled",), [_RANKED]),
        (("modelled", "fixed"), [_RANKED]),
        (("modelled", "measured"), [_RANKED]),
        (("modelled", "default"), [_RANKED, _DEFAULT]),
        (("fixed",), [_DEFAULT]),
        (("measured",), []),
        (("measured", "fixed"), []),
        (("measured", "default"), [_DEFAULT]),
    ],
)
def test_a_configuration_that_nobody_measured_is_said(
    device: DeviceSpec, candidate: Any, gemm: Any, bases: tuple[str, ...], said: list[str]
) -> None:
    uses = tuple(KernelUse(kernel=f"k{i}", basis=basis) for i, basis in enumerate(bases))
    chosen = candidate("one", untuned="read in machine code", kernel_uses=lambda _: uses)
    inputs = PlanInputs(
        sites=[OpSite(site="proj", request=gemm())],
        device=device,
        policy=DevicePolicy(),
        candidates=lambda op, _: [chosen],
        waivers=WaiverBook(),
    )
    assert decided_notes(plan_ops(inputs).ops) == said


def test_workspace_is_said_at_its_most(device: DeviceSpec, candidate: Any, gemm: Any) -> None:
    def uses(request: Any) -> tuple[KernelUse, ...]:
        return (KernelUse(kernel="k", workspace_bytes=1000 * request.tokens.high),)

    inputs = PlanInputs(
        sites=[OpSite(site="proj", request=gemm(tokens=TokenRange(1, 64)))],
        device=device,
        policy=DevicePolicy(),
        candidates=lambda op, _: [candidate("one", kernel_uses=uses)],
        waivers=WaiverBook(),
    )
    said = "one takes up to 64,000 bytes beside its operands and results, at 64 tokens"
    assert decided_notes(plan_ops(inputs).ops) == [said]
