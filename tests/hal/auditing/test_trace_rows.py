"""Rows of a program: grouping, tiers by the stated rule, bounds on the machine's rates."""

from __future__ import annotations

import dataclasses

import pytest

from hal.auditing.trace import ObservedOp
from hal.auditing.trace_rows import rows_of
from traces import CPU, attention, line, op, product, tensor, trace

RATED = CPU.model_copy(update={"peak_flops": {"float32": 1e12}, "memory_bandwidth": 1e9})


def _inside(seen: ObservedOp, number: int = 0) -> ObservedOp:
    return dataclasses.replace(seen, function="scaled_dot_product_attention", call=number)


def test_parts_of_the_math_path_are_one_row_of_attention() -> None:
    scores = tensor(8, 64, 64)
    parts = [
        op("bmm", [tensor(8, 64, 32), tensor(8, 32, 64)], scores, at=line(20), flops=5.0),
        op("_softmax", [scores], scores, at=line(20)),
        op("bmm", [scores, tensor(8, 64, 32)], tensor(8, 64, 32), at=line(20), flops=5.0),
    ]
    seen = trace(*map(_inside, parts), functions=[attention(tensor(2, 4, 64, 32))])
    (row,) = rows_of(seen)
    assert (row.op, row.implementation, row.tier) == ("attention", "sdpa: math", "portable")
    assert (row.calls, row.flops, row.time_us) == (4, 10.0, pytest.approx(120.0))
    assert row.location == line(20)


def test_a_row_per_line_and_implementation() -> None:
    ops = [
        product(tensor(8, 64), tensor(64, 64)),
        product(tensor(16, 64), tensor(64, 64)),
        product(tensor(8, 64), tensor(64, 64), at=line(11)),
        op("mul", [tensor(8)], tensor(8)),
    ]
    rows = rows_of(trace(*ops))
    assert [(row.op, row.calls) for row in rows[:1]] == [("gemm", 8)]
    assert {(row.op, row.tier) for row in rows} == {("gemm", "native"), ("elementwise", "unknown")}
    assert "1 more" in rows[0].arguments


def test_tiers() -> None:
    widened = product(tensor(8, 64), tensor(64, 64, made_from=["bfloat16"]))
    assert rows_of(trace(widened))[0].tier == "portable"
    there = tensor(64, 64, device="cuda")
    seen = trace(product(there, there), product(tensor(8, 64), tensor(64, 64), at=line(12)))
    assert {row.location: row.tier for row in rows_of(seen)} == {
        line(10): "native",
        line(12): "portable",
    }
    gloo = op("all_reduce_", [there], values={"backend": "gloo"})
    assert rows_of(trace(gloo))[0].tier == "portable"


def test_bounds() -> None:
    heavy = product(tensor(64, 64), tensor(64, 64), flops=4e9, bytes=1e3)
    light = product(tensor(64, 64), tensor(64, 64), flops=4e3, bytes=4e6, at=line(11))
    rows = {row.location: row for row in rows_of(trace(heavy, light, machine=RATED))}
    assert (rows[line(10)].bound_by, rows[line(10)].bound_us) == ("compute", pytest.approx(4e3))
    assert (rows[line(11)].bound_by, rows[line(11)].bound_us) == ("memory", pytest.approx(4e3))
    assert rows_of(trace(heavy))[0].bound_us is None
