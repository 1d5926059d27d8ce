"""Implementations that are not what they say: each is found and named, at its call site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hal.auditing.gates import GateClass
from hal.candidates import Kernel
from hal.ops import CATALOGUE
from hal_engine.audit.running import AuditOptions
from hal_engine.runner import LocalRunner
from model_audits import Auditor, of_rule

VERIFY_ALL = AuditOptions(measure=False, verify=1.0)
NORM = "cpu.norm.rms.jit"
DECODE = "cpu.attention.decode.jit"


def test_wrong_by_a_bit(auditor: Auditor) -> None:
    """A norm of layer 3 whose results are off by a few units in the 14th bit."""

    def off(number: int, request: Any, kernel: Kernel) -> Kernel:
        # Two norms a layer: of the input and of the attention's output.
        return (lambda *args: _scaled(kernel(*args), 1.0 + 2**-13)) if number == 7 else kernel

    auditor.changed[NORM] = off
    report = auditor.run(VERIFY_ALL)
    (finding,) = of_rule(report, "diverges-from-reference")
    assert finding.gate is GateClass.SEMANTIC
    assert finding.site == "layers.3.post_norm"
    assert report.verification is not None
    assert report.verification.first_divergence == "layers.3.post_norm"
    assert report.verification.worst_site == "layers.3.post_norm"
    assert report.verification.worst is not None
    assert report.verification.worst > 1


def _scaled(result: Any, factor: float) -> Any:
    if isinstance(result, tuple):
        return (result[0] * factor, *result[1:])
    return result * factor


def test_a_wrapper_that_branches_by_head_dim(auditor: Auditor) -> None:
    """For this head_dim it takes torch's matrix products, whatever its leaf says."""

    def branching(number: int, request: Any, kernel: Kernel) -> Kernel:
        slow = CATALOGUE["attention"].reference(request, scale=request.head_dim**-0.5)
        return slow if request.head_dim == 32 else kernel

    auditor.changed[DECODE] = branching
    report = auditor.run()
    (finding,) = of_rule(report, "leaf-mismatch")
    assert finding.gate is GateClass.LEAF_MISMATCH
    assert finding.op == "attention.decode"
    assert finding.site == "layers.0–8.attention"
    assert "aten::bmm" in finding.evidence[0].found
    states = {row.leaf.state for row in report.rows if row.implementation == DECODE}
    assert states == {"other"}


def test_a_wrapper_that_branches_in_some_calls_only(auditor: Auditor) -> None:
    """Elementwise torch ops in place of the kernel, for one size, in one layer."""

    def branching(number: int, request: Any, kernel: Kernel) -> Kernel:
        def call(x: torch.Tensor) -> Any:
            gate, up = x.chunk(2, dim=-1)
            return gate * torch.sigmoid(gate) * up if x.shape[0] == 1 else kernel(x)

        return call if number == 4 else kernel

    name = "cpu.activation.gated.jit"
    auditor.changed[name] = branching
    report = auditor.run()
    if not any(row.implementation == name for row in report.rows):
        pytest.skip("this model's activation is fused into a product")
    (finding,) = of_rule(report, "leaf-mismatch")
    assert finding.site == "layers.4.activation"


def test_nan_at_layer_7(auditor: Auditor) -> None:
    def poisoned(number: int, request: Any, kernel: Kernel) -> Kernel:
        def call(*args: Any) -> Any:
            result = kernel(*args)
            result[0, 0] = float("nan")
            return result

        return call if number == 7 else kernel

    auditor.changed[DECODE] = poisoned
    report = auditor.run()
    (finding,) = of_rule(report, "non-finite-result")
    assert finding.site == "layers.7.attention"
    assert "NaN" in finding.title
    assert report.verification is not None
    assert report.verification.first_non_finite == "layers.7.attention"


def test_a_host_read_inside(auditor: Auditor) -> None:
    def reading(number: int, request: Any, kernel: Kernel) -> Kernel:
        def call(*args: Any) -> Any:
            if args[0].sum().item() == 12345.0:  # a value that the host waits for
                raise AssertionError("never so")
            return kernel(*args)

        return call if number == 2 else kernel

    auditor.changed["cpu.rope.jit"] = reading
    report = auditor.run()
    found = of_rule(report, "host-op-in-call")
    assert {f.site for f in found} == {"layers.2.rope"}
    assert found[0].op == "rope"
    assert found[0].location is not None
    assert Path(found[0].location.file).name == Path(__file__).name
    assert report.coverage["host"].calls > 0


def test_a_product_outside_every_bound_op(
    auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = LocalRunner.execute
    matrix = torch.ones(4, 4)

    def escaping(runner: LocalRunner, batch: Any) -> torch.Tensor:
        torch.mm(matrix, matrix)
        return execute(runner, batch)

    monkeypatch.setattr(LocalRunner, "execute", escaping)
    report = auditor.run()
    (finding,) = of_rule(report, "unrouted")
    assert finding.gate is GateClass.UNROUTED
    assert finding.op == "aten::mm"
    assert finding.location is not None
    assert Path(finding.location.file).name == Path(__file__).name
    assert report.coverage["outside"].flops >= 2 * 4**3 * finding.calls
