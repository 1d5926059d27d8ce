"""Every implementation for a CPU names the leaf that an audit has to see, in words to look up."""

from __future__ import annotations

import re

import pytest

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.plugins.manager import load_backends

SHOWN_BY = {"aten_op", "symbol", "instruction"}  # of kinds that an audit of a CPU can show
NAMES = {
    "aten_op": r"[a-z]\w*::\w+",
    "symbol": r"hal(_kernels)?\.[\w.]+",
    "instruction": r"[a-z][a-z0-9]*(\|[a-z][a-z0-9]*)*",
}


def cpu_candidates() -> list[KernelCandidate]:
    registry = load_backends()
    device: DeviceSpec = registry.describe("cpu:0")
    return [c for op in CATALOGUE for c in registry.candidates(op, device)]


CANDIDATES = {c.name: c for c in cpu_candidates()}


@pytest.mark.parametrize("name", CANDIDATES)
def test_it_names_its_leaf(name: str) -> None:
    candidate = CANDIDATES[name]
    if candidate.distribution != "halstack":
        pytest.skip("another distribution's")
    assert candidate.leaf, "an audit could not tell it from anything else"
    kinds = {leaf.kind for leaf in candidate.leaf}
    assert kinds & SHOWN_BY or not name.startswith(("cpu.", "reference."))
    for leaf in candidate.leaf:
        if leaf.kind in NAMES and name.startswith(("cpu.", "reference.")):
            assert re.fullmatch(NAMES[leaf.kind], leaf.name), leaf


def test_machine_code_of_ours_is_told_by_symbol_and_instruction() -> None:
    generated = [c for c in CANDIDATES.values() if re.fullmatch(r"cpu\..*\.jit\w*", c.name)]
    assert len(generated) >= 8
    for candidate in generated:
        assert {leaf.kind for leaf in candidate.leaf} == {"symbol", "instruction"}, candidate.name
