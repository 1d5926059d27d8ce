"""Implementations that are not what they say: each is found and named, at its call site."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.auditing.document import AuditReport
from hal.auditing.gates import GateClass
from hal.candidates import Kernel
from hal.ops import CATALOGUE
from hal_engine.audit.running import AuditOptions
from hal_engine.runner import LocalRunner
from model_audits import Auditor, of_rule

NORM = "cpu.norm.rms.jit"
DECODE = "cpu.attention.decode.jit"


def test_wrong_by_a_bit(auditor: Auditor) -> None:
    """A norm of layer 3 whose results are off in their 13th bit."""

    def off(number: int, request: Any, kernel: Kernel) -> Kernel:
        # Two norms a layer: of the input and of the attention's output.
        return (lambda *args: _scaled(kernel(*args), 1.0 + 2**-13)) if number == 7 else kernel

    auditor.changed[NORM] = off
    report = auditor.run(AuditOptions(measure=False, verify=1.0))
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


# ---- several at once: none hides another ----


def _branching_by_head_dim(number: int, request: Any, kernel: Kernel) -> Kernel:
    """Takes torch's matrix products for this head_dim, whatever its leaf says."""
    slow = CATALOGUE["attention"].reference(request, scale=request.head_dim**-0.5)
    return slow if request.head_dim == 32 else kernel


def _branching_for_one_row(number: int, request: Any, kernel: Kernel) -> Kernel:
    """In one layer elementwise torch ops in place of the kernel, and only for one token."""

    def call(x: torch.Tensor, residual: torch.Tensor) -> Any:
        if x.shape[0] > 1:
            return kernel(x, residual)
        residual += x
        return residual * torch.rsqrt(residual.square().mean(dim=-1, keepdim=True)), residual

    return call if number == 9 else kernel


def _reading(number: int, request: Any, kernel: Kernel) -> Kernel:
    """Waits for a value of the device."""

    def call(*args: Any) -> Any:
        if args[0].sum().item() == 12345.0:
            raise AssertionError("never so")
        return kernel(*args)

    return call if number == 2 else kernel


@pytest.fixture(scope="module")
def sabotaged(tiny_folder: Path) -> AuditReport:
    execute = LocalRunner.execute
    matrix = torch.ones(4, 4)

    def escaping(runner: LocalRunner, batch: Any) -> torch.Tensor:
        torch.mm(matrix, matrix)
        return execute(runner, batch)

    auditor = Auditor(tiny_folder)
    auditor.changed = {
        DECODE: _branching_by_head_dim,
        NORM: _branching_for_one_row,
        "cpu.rope_kv_write.jit": _reading,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalRunner, "execute", escaping)
        return auditor.run()


def test_a_wrapper_that_branches_by_head_dim(sabotaged: AuditReport) -> None:
    (finding,) = [f for f in of_rule(sabotaged, "leaf-mismatch") if f.op != "norm.rms"]
    assert finding.gate is GateClass.LEAF_MISMATCH
    assert finding.op == "attention.decode"
    assert finding.site == "layers.0–8.attention"
    assert "aten::bmm" in finding.evidence[0].found
    states = {row.leaf.state for row in sabotaged.rows if row.implementation == DECODE}
    assert states == {"other"}


def test_a_wrapper_that_branches_in_some_calls_only(sabotaged: AuditReport) -> None:
    (finding,) = [f for f in of_rule(sabotaged, "leaf-mismatch") if f.op == "norm.rms"]
    assert finding.site == "layers.4.post_norm"
    assert "aten::rsqrt" in finding.evidence[0].found
    assert "first with 1 tokens" in finding.title


def test_a_host_read_inside(sabotaged: AuditReport) -> None:
    found = of_rule(sabotaged, "host-op-in-call")
    assert {f.site for f in found} == {"layers.2.rope_kv_write"}
    assert found[0].op == "rope_kv_write"
    assert found[0].location is not None
    assert Path(found[0].location.file).name == Path(__file__).name
    assert sabotaged.coverage["host"].calls > 0


def test_a_product_outside_every_bound_op(sabotaged: AuditReport) -> None:
    (finding,) = of_rule(sabotaged, "unrouted")
    assert finding.gate is GateClass.UNROUTED
    assert finding.op == "aten::mm"
    assert finding.location is not None
    assert Path(finding.location.file).name == Path(__file__).name
    assert sabotaged.coverage["outside"].flops >= 2 * 4**3 * finding.calls


def test_a_product_on_a_thread_of_its_own(shallow_auditor: Auditor) -> None:
    """The dispatch mode is of the thread that steps; the profiler sees the others'."""
    matrix = torch.ones(4, 4)

    def handing_over(number: int, request: Any, kernel: Kernel) -> Kernel:
        def call(*args: Any) -> Any:
            thread = threading.Thread(target=torch.mm, args=(matrix, matrix))
            thread.start()
            thread.join()
            return kernel(*args)

        return call if number == 1 else kernel

    shallow_auditor.changed["cpu.rope_kv_write.jit"] = handing_over
    (finding,) = of_rule(shallow_auditor.run(), "unrouted")
    assert finding.op == "aten::mm"
    assert finding.location is None
    assert "only torch's profiler" in finding.evidence[0].what
