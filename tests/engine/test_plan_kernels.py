"""Compiled kernels in the table of a plan and beside the leaf of an audit's row."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from absent_plans import plan, profile
from hal.auditing.document import LeafCheck
from hal.candidates import KernelUse
from hal.decided_notes import decided_notes
from hal.errors import SelectionError, SettingsError
from hal.kernel_uses import planned_uses
from hal.plan import Plan, PlannedOp
from hal_engine.audit.rows import with_machine_code
from hal_engine.cli.plan_kernels import print_kernels


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configurations of whoever runs the test."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan("deepseek-v4.1-flash", profile("rtx-pro-6000-blackwell-ws"), 8)


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_the_table_fits_and_names_code_and_configuration(found: Plan, columns: int) -> None:
    out = io.StringIO()
    print_kernels(found, Console(file=out, width=columns, highlight=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= columns
    words = " ".join(text.split())
    assert "native:" in words
    assert "default" in words
    assert "hal kernels tune" in words
    for op in found.ops:
        for use in planned_uses(op):
            assert use.kernel in text


def test_a_plan_without_compiled_kernels_has_no_table() -> None:
    out = io.StringIO()
    bare = plan("qwen3-30b-a3b", profile("ascend-910b2"), 1)
    assert not any(planned_uses(op) for op in bare.ops)
    print_kernels(bare, Console(file=out, width=100))
    assert out.getvalue() == ""


def test_a_row_of_an_audit_says_what_the_machine_code_of_its_kernels_is(found: Plan) -> None:
    op = next(o for o in found.ops if "gemm.triton" in o.choice.name)
    seen = LeafCheck(declared=("k",), state="not-observed", proof="not looked at here")
    checked = with_machine_code(seen, op)
    assert checked.proof.startswith("not looked at here; machine code of its kernels: gemm.")
    assert "native: " in checked.proof
    assert "0 spills" in checked.proof
    assert (checked.state, checked.declared) == (seen.state, seen.declared)
    silent = next(o for o in found.ops if "torch" in o.choice.name)
    assert with_machine_code(seen, silent) is seen


def with_uses(op: PlannedOp, *uses: object) -> PlannedOp:
    choice = dataclasses.replace(op.choice, kernel_uses=lambda _: uses)  # type: ignore[arg-type, return-value]
    return dataclasses.replace(op, decision=dataclasses.replace(op.decision, choice=choice))


def test_a_configuration_that_was_measured_is_not_called_unmeasured(found: Plan) -> None:
    op = next(o for o in found.ops if o.choice.untuned)

    def is_noted(*bases: str) -> bool:
        uses = [KernelUse(kernel=f"k{basis}", basis=basis) for basis in bases]
        notes = decided_notes([with_uses(op, *uses)])
        return any("not measured on" in note for note in notes)

    assert is_noted("default")
    assert is_noted("modelled", "measured")
    assert is_noted("fixed")
    assert is_noted()
    assert not is_noted("measured", "fixed")


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("gemm", "required KernelUse, found str"),
        (KernelUse(kernel=5), "required kernel of a KernelUse as text"),  # type: ignore[arg-type]
        (KernelUse(kernel="k", loss=1.5), "required a loss of 0 to 1"),
        (KernelUse(kernel="k", loss=math.nan), "required a loss of 0 to 1"),
    ],
)
def test_nonsense_of_a_plug_in_is_named(found: Plan, use: object, told: str) -> None:
    op = with_uses(found.ops[0], use)
    with pytest.raises(SelectionError, match=told) as raised:
        planned_uses(op)
    assert op.choice.name in str(raised.value)


def test_a_file_of_configurations_that_is_wrong_is_named_by_the_plan(
    found: Plan, data_home: Path
) -> None:
    op = next(o for o in found.ops if any(use.shape for use in planned_uses(o)))
    kernel = next(use.kernel for use in planned_uses(op) if use.shape)
    device = str(found.devices[0]["attributes"]["profile"])
    path = data_home / "halstack" / "kernel_configurations" / device / f"{kernel}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": "halstack.kernel-configurations/1", "entries": 5}))
    with pytest.raises(SettingsError, match="entries") as raised:
        planned_uses(op)
    assert str(path) in str(raised.value)
