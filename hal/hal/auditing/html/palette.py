"""The colours of the page, light and dark, and which of them lie upon which.

Good tiers are pale and bad ones strong, so that losses stand out; `-mark` is a pale tier where
it is small. Tiers differ by letter, pattern and the shape of their points as well: colour alone
tells nothing. A test computes the contrast of every pair here against WCAG AA
(https://www.w3.org/TR/WCAG22/#contrast-minimum, https://www.w3.org/TR/WCAG22/#non-text-contrast).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Colour:
    """One colour by its role. light, dark: `#rrggbb`."""

    light: str
    dark: str


PALETTE: Final[dict[str, Colour]] = {
    "page": Colour("#f6f6f3", "#101317"),
    "surface": Colour("#ffffff", "#181c21"),
    "raised": Colour("#eef0f2", "#22272e"),
    "ink": Colour("#1a1f26", "#e8ebef"),
    "muted": Colour("#525b67", "#a5afbb"),
    "line": Colour("#dde0e4", "#2d333b"),
    "border": Colour("#818a96", "#737d8a"),
    "accent": Colour("#0b5a94", "#82c0f2"),
    "on-accent": Colour("#ffffff", "#08192a"),
    "good": Colour("#0b5f50", "#62d2b8"),
    "good-ground": Colour("#e2f2ee", "#12302a"),
    "bad": Colour("#a02716", "#ffa291"),
    "bad-ground": Colour("#fcebe8", "#3a1b16"),
    "warn": Colour("#744900", "#f2c065"),
    "warn-ground": Colour("#fcf2dc", "#34270f"),
    "calm-ground": Colour("#e9eff5", "#1c2936"),
    "native": Colour("#a5d3c7", "#1e5a4e"),
    "on-native": Colour("#06362d", "#dcf5ee"),
    "native-mark": Colour("#12705f", "#3fb89f"),
    "tuned": Colour("#c3daee", "#27486a"),
    "on-tuned": Colour("#0d3354", "#dcebf9"),
    "tuned-mark": Colour("#2b6ca8", "#79b4e8"),
    "portable": Colour("#f0b548", "#d99c33"),
    "on-portable": Colour("#362400", "#241700"),
    "reference": Colour("#b4321f", "#e2644e"),
    "on-reference": Colour("#ffffff", "#270601"),
    "unknown": Colour("#c8cdd5", "#4b5460"),
    "unknown-mark": Colour("#6a7583", "#98a3b0"),
    "on-unknown": Colour("#252b34", "#f0f3f6"),
    "outside": Colour("#6a4fb3", "#a590e6"),
    "on-outside": Colour("#ffffff", "#160c36"),
    "host": Colour("#97386f", "#d584b8"),
    "on-host": Colour("#ffffff", "#2d0720"),
}

TEXT_PAIRS: Final = (
    *((ink, ground) for ink in ("ink", "muted", "accent") for ground in ("page", "surface")),
    *((ink, "raised") for ink in ("ink", "muted", "accent", "good", "bad", "warn")),
    *((ink, "surface") for ink in ("good", "bad", "warn")),
    *((ink, "page") for ink in ("good", "bad", "warn")),
    *((ink, f"{kind}-ground") for kind in ("good", "bad", "warn") for ink in (kind, "ink")),
    ("ink", "calm-ground"),
    ("muted", "calm-ground"),
    ("on-accent", "accent"),
    *(
        (f"on-{tier}", tier)
        for tier in (
            "native",
            "tuned",
            "portable",
            "reference",
            "unknown",
            "outside",
            "host",
        )
    ),
)
"""(text, what it lies on): at least 4.5 to 1."""

EDGE_PAIRS: Final = (
    ("border", "surface"),
    ("border", "page"),
    ("accent", "surface"),
    ("native-mark", "surface"),
    ("native-mark", "raised"),
    ("tuned-mark", "surface"),
    ("tuned-mark", "raised"),
    ("unknown-mark", "surface"),
    ("unknown-mark", "raised"),
)
"""(line of a control or a mark, what it lies on): at least 3 to 1."""


def palette_css() -> str:
    """The custom properties of both themes. Paper is always light."""
    light = _properties({name: colour.light for name, colour in PALETTE.items()})
    dark = _properties({name: colour.dark for name, colour in PALETTE.items()})
    return (
        f":root{{color-scheme:light;{light}}}\n"
        "@media screen and (prefers-color-scheme:dark){"
        f':root:not([data-theme="light"]){{color-scheme:dark;{dark}}}}}\n'
        f'@media screen{{:root[data-theme="dark"]{{color-scheme:dark;{dark}}}}}\n'
    )


def _properties(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def contrast(first: str, second: str) -> float:
    """Contrast of two `#rrggbb`, 1 to 21, as WCAG 2 defines it."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
