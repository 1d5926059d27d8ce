"""Contrast of everything that lies on something else, in both themes, against WCAG AA."""

from __future__ import annotations

import itertools

import pytest

from hal.auditing.html.palette import EDGE_PAIRS, PALETTE, TEXT_PAIRS, contrast, palette_css


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    ("least", "above", "below"),
    [(4.5, *pair) for pair in TEXT_PAIRS] + [(3.0, *pair) for pair in EDGE_PAIRS],
)
def test_contrast(theme: str, least: float, above: str, below: str) -> None:
    value = contrast(getattr(PALETTE[above], theme), getattr(PALETTE[below], theme))
    assert value >= least, f"{above} on {below}, {theme}: {value:.2f}"


def test_the_formula_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=0.001)  # WebAIM's checker


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_tiers_differ_from_each_other(theme: str) -> None:
    tiers = ("native", "tuned", "portable", "reference", "unknown", "outside", "host")
    colours = [getattr(PALETTE[tier], theme) for tier in tiers]
    for first, second in itertools.combinations(colours, 2):
        assert first != second


def test_paper_is_light() -> None:
    _, *dark = palette_css().splitlines()
    assert all(line.startswith("@media screen") for line in dark)
