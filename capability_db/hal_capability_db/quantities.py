"""Values as people read them: `467.8 TFLOPS`, `1.79 TB/s`, `99 KiB`."""

from __future__ import annotations

from typing import Any

from hal_capability_db.values import MATRIX_DTYPES, Fact

_RATES = {"FLOP/s": "FLOPS", "OP/s": "OPS"}


def value_text(value: Any, unit: str = "") -> str:
    """A value with its unit; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value), key=_dtype_rank)) or "none"
    if isinstance(value, tuple):
        return "; ".join(map(str, value)) or "none"
    if unit in _RATES:
        return f"{_number(value / 1e12)} T{_RATES[unit]}"
    if unit == "B":
        return _bytes_text(round(value))
    if unit == "B/s":
        return f"{_number(value / 1e12)} TB/s" if value >= 1e12 else f"{_number(value / 1e9)} GB/s"
    if unit == "s":
        return f"{_number(value * 1e6)} µs"
    return str(value)


def fact_text(fact: Fact[Any]) -> str:
    """The value of a fact; `not public` without one."""
    return value_text(fact.value, fact.unit) if fact.is_known else "not public"


def _dtype_rank(name: str) -> tuple[int, str]:
    """Dtypes in the order of the vocabulary, other names after them."""
    known = name in MATRIX_DTYPES
    return (MATRIX_DTYPES.index(name) if known else len(MATRIX_DTYPES), name)


def _bytes_text(count: int) -> str:
    if count < 1 << 20:
        return f"{_number(count / 1024)} KiB"
    if count % (1 << 30) == 0:
        return f"{count >> 30} GiB"
    if count % 1e6 == 0:
        return f"{_number(count / 1e9)} GB"
    if count < 1 << 30:
        return f"{_number(count / (1 << 20))} MiB"
    return f"{_number(count / (1 << 30))} GiB"


def _number(value: float) -> str:
    return f"{value:.5g}"
