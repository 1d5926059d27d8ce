"""Every kernel with tiles can be tuned, or says why not."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from hal.errors import SettingsError
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.variant import TritonKernel
from hal_kernels.tuning.fixed_kernels import BY_PARTS, BY_SIZES, BY_TILES, FIXED, why_fixed
from hal_kernels.tuning.tunable_kernels import TUNABLE, find_tunable


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_kernel_can_be_tuned_or_says_why_not(name: str) -> None:
    """A kernel that is added is to be one of both."""
    if name in TUNABLE:
        assert name not in FIXED
        assert find_tunable(name).kernel == name
        return
    reason = why_fixed(name)
    assert len(reason) > 20
    with pytest.raises(SettingsError) as raised:
        find_tunable(name)
    assert reason in str(raised.value)
    assert name in FIXED or reason in {BY_SIZES, BY_TILES, BY_PARTS}


def test_reasons_are_of_kernels_that_multiply() -> None:
    multiplying = {name for name, kernel in CATALOGUE.items() if kernel.uses_matrix_unit}
    assert multiplying == (TUNABLE.keys() & multiplying) | FIXED.keys()
    assert TUNABLE.keys() <= CATALOGUE.keys()


def loops_of(kernel: TritonKernel) -> Iterator[ast.Call]:
    """Each `range(…)` that the source of a kernel and of what it calls goes through."""
    functions: dict[str, ast.FunctionDef] = {}
    for module in (kernel.module, *kernel.sources):
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        for one in body:
            if isinstance(one, ast.FunctionDef):
                functions.setdefault(one.name, one)
    called, seen = [kernel.function], set[str]()
    while called:
        name = called.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
                yield node.iter
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.append(node.func.id)


@pytest.mark.parametrize("name", [n for n, k in CATALOGUE.items() if not k.uses_matrix_unit])
def test_the_reason_of_a_kernel_without_matrix_unit_is_what_its_source_does(name: str) -> None:
    """One that goes on by blocks reads in tiles; one that goes through parts adds them up."""
    loops = [loop for loop in loops_of(CATALOGUE[name]) if ast.unparse(loop.func) == "range"]
    by_blocks = [loop for loop in loops if len(loop.args) == 3 and "BLOCK" in ast.unparse(loop)]
    tiled = [loop for loop in by_blocks if "BLOCK" in ast.unparse(loop.args[2])]
    assert (why_fixed(name) == BY_TILES) == bool(tiled)
    through_parts = [
        loop
        for loop in loops
        if ast.unparse(loop.args[-1]) in {"num_splits", "groups", "SPLIT_K", "SPLITS", "last + 1"}
    ]
    is_list = name == "nsa_attention.lists"  # takes the best of what parts have found
    expected = (bool(through_parts) and not is_list) or name == "nsa_attention.merge"
    assert (why_fixed(name) == BY_PARTS) == expected
