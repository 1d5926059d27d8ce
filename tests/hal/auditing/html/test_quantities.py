"""Figures of the page: units, digits, and nothing that is not 0 written as 0."""

from __future__ import annotations

import random

import pytest

from hal.auditing.html.quantities import count, duration, power_of_ten, quantity, ratio, share


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "–"),
        (0.0, "0 µs"),
        (0.0005, "0.500 ns"),
        (0.0123, "0.0123 µs"),
        (9.999, "10.0 µs"),
        (999.4, "999 µs"),
        (999.6, "1.00 ms"),
        (1234.0, "1.23 ms"),
        (45_600_000.0, "45.6 s"),
        (192_000_000.0, "3 min 12 s"),
        (7_200_000_000.0, "120 min 0 s"),
    ],
)
def test_durations(us: float | None, text: str) -> None:
    assert duration(us) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "– B"),
        (0.0, "0 B"),
        (999.0, "999 B"),
        (999_999.0, "1.00 MB"),
        (21.44e9, "21.4 GB"),
        (1e300, f"{1e282:,.0f} EB"),
        (1e-9, "<0.000001 B"),
    ],
)
def test_quantities(value: float | None, text: str) -> None:
    assert quantity(value, "B") == ("–" if value is None else text)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (None, "–"),
        (0.0, "0.0%"),
        (1e-9, "<0.1%"),
        (0.1234, "12.3%"),
        (0.9999, ">99.9%"),
        (1.0, "100%"),
        (12.0, "1,200%"),
    ],
)
def test_shares(part: float | None, text: str) -> None:
    assert share(part) == text


def test_others() -> None:
    assert count(1234567) == "1,234,567"
    assert ratio(1.837) == "1.84×"
    assert [power_of_ten(n) for n in (-3, 0, 1, 24)] == ["10⁻³", "1", "10", "10²⁴"]


def test_what_is_read_back_is_within_a_digit() -> None:
    units = {"ns": 1e-3, "µs": 1.0, "ms": 1e3, "s": 1e6}
    rng = random.Random()
    for _ in range(500):
        us = 10 ** rng.uniform(-2.9, 7.9)
        number, unit = duration(us).split()
        assert float(number.replace(",", "")) * units[unit] == pytest.approx(us, rel=5.1e-3)
