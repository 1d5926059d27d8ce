"""How the page writes a quantity: SI units, three significant digits, thousands separated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

UNKNOWN: Final = "–"
_PREFIXES: Final = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def count(value: int | None) -> str:
    """`12,345`."""
    return UNKNOWN if value is None else f"{value:,}"


def significant(value: float) -> str:
    """Three significant digits without an exponent: `0.0123`, `1.23`, `123`, `1,230`.

    What is not 0 is never written as 0: below a millionth it is `<0.000001`.
    """
    if value == 0:
        return "0"
    if value < 0:
        return f"−{significant(-value)}"
    if value < 1e-6:
        return "<0.000001"
    decimals = 2 - math.floor(math.log10(value))
    rounded = round(value, decimals)
    # Rounding may have carried into another digit: 9.999 is 10.0, not 10.00.
    decimals = 2 - math.floor(math.log10(rounded))
    return f"{rounded:,.{max(0, decimals)}f}"


def quantity(value: float | None, unit: str) -> str:
    """`1.23 GFLOP`; `–` for nothing known."""
    if value is None:
        return UNKNOWN
    # The prefix of the rounded value: 999,999 is 1.00 M, not 1,000 k.
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale * 0.9995:
            return f"{significant(value / scale)} {prefix}{unit}"
    return f"{significant(value)} {unit}"


def duration(us: float | None) -> str:
    """Microseconds as `12.3 µs`, `4.56 ms`, `7.89 s` or `3 min 12 s`."""
    if us is None:
        return UNKNOWN
    if us >= 119.5e6:
        seconds = round(us / 1e6)
        return f"{seconds // 60:,} min {seconds % 60} s"
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= scale * 0.9995:
            return f"{significant(us / scale)} {unit}"
    return f"{significant(us)} µs" if us >= 0.01 or us == 0 else f"{significant(us * 1e3)} ns"


def share(part: float | None) -> str:
    """A share of 1 as `12.3%`. What is not 0 is never written as 0, nor a part as the whole."""
    if part is None:
        return UNKNOWN
    percent = part * 100
    if 0 < percent < 0.05:
        return "<0.1%"
    if 99.95 <= percent < 100:
        return ">99.9%"
    return f"{percent:.1f}%" if percent < 99.95 else f"{percent:,.0f}%"


def ratio(value: float | None) -> str:
    """`1.84×`."""
    return UNKNOWN if value is None else f"{significant(value)}×"


def power_of_ten(exponent: int) -> str:
    """`10⁻³`, as the ticks of a logarithmic axis are written."""
    return {0: "1", 1: "10"}.get(exponent, f"10{str(exponent).translate(_SUPERSCRIPTS)}")


def total(values: Iterable[float | None]) -> float | None:
    """Sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
