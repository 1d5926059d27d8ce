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


@pytest.mark.parametrize(
    ("bases", "is_said"),
    [
        ((), True),
        (("default",), True),
        (("modelled",), True),
        (("fixed",), True),
        (("measured",), False),
        (("measured", "fixed"), False),
        (("measured", "default"), True),
    ],
)
def test_a_configuration_that_nobody_measured_is_said(
    device: DeviceSpec, candidate: Any, gemm: Any, bases: tuple[str, ...], is_said: bool
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
    said = "configuration not measured on this device: one (read in machine code)"
    assert decided_notes(plan_ops(inputs).ops) == ([said] if is_said else [])


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
