"""A PCIe link: what it was trained to, what its two ends can do, and what that carries."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}
_MAX_WIDTH = 32
_RESTING_SPEED = 2.5


def generation_of(gt_per_s: float) -> int:
    """The PCIe generation of a transfer rate; 0 for a rate that is none of PCIe's."""
    return _GENERATIONS.get(gt_per_s, 0)


def lane_bytes_per_s(gt_per_s: float) -> float:
    """What one lane carries in one direction after line coding: 8b/10b up to 5 GT/s, 128b/130b up
    to 32 GT/s, flits with 236 of 256 bytes of payload above (PCI Express Base Specification 6)."""
    if gt_per_s <= 5.0:
        coding = 8 / 10
    elif gt_per_s <= 32.0:
        coding = 128 / 130
    else:
        coding = 236 / 256
    return gt_per_s * 1e9 * coding / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """The link between a function and the port above it. Speeds in GT/s, 0 for not known.

    Attributes:
        speed, width: as trained now.
        max_speed, max_width: what the function can do.
        port_max_speed, port_max_width: what the port above can do.
    """

    speed: float = 0.0
    width: int = 0
    max_speed: float = 0.0
    max_width: int = 0
    port_max_speed: float = 0.0
    port_max_width: int = 0

    @property
    def best_speed(self) -> float:
        """What both ends can do."""
        return _least(self.max_speed, self.port_max_speed)

    @property
    def best_width(self) -> int:
        """What both ends can do."""
        return int(_least(self.max_width, self.port_max_width))

    @property
    def bytes_per_s(self) -> float:
        """What the link carries in one direction at its present width and the speed that both ends
        can do, as cards lower the speed when idle; 0 if not known."""
        speed = max(self.speed, self.best_speed)
        return lane_bytes_per_s(speed) * (self.width or self.best_width)

    @property
    def is_narrow(self) -> bool:
        """Trained with fewer lanes than both ends have: a bad contact, or shared lanes."""
        return 0 < self.width < self.best_width

    @property
    def is_slow(self) -> bool:
        """Slower now than both ends can do, and not merely resting."""
        return _RESTING_SPEED < self.speed < self.best_speed

    @property
    def is_resting(self) -> bool:
        """At the lowest speed, as cards are when they have nothing to do."""
        return self.speed == _RESTING_SPEED < self.best_speed

    @property
    def is_limited_by_port(self) -> bool:
        """The port above, a slot or a switch, can do less than the card."""
        return 0 < self.port_max_width < self.max_width or (
            0 < self.port_max_speed < self.max_speed
        )

    def describe(self) -> str:
        """`gen5 x16`: its width now, and the generation that both ends can do."""
        speed = max(self.speed, self.best_speed)
        generation = generation_of(speed)
        width = self.width or self.best_width
        text = f"gen{generation}" if generation else f"{speed:g} GT/s" if speed else ""
        return f"{text} x{width}".strip() if width else text

    def findings(self) -> tuple[str, ...]:
        """What is less than it could be, in words."""
        found = []
        if self.is_narrow:
            found.append(f"trained to x{self.width}, both ends can do x{self.best_width}")
        if self.is_slow or self.is_resting:
            why = ", as a card without work is: look again under load" if self.is_resting else ""
            found.append(
                f"at {self.speed:g} GT/s now, both ends can do {self.best_speed:g} GT/s{why}"
            )
        if 0 < self.port_max_width < self.max_width:
            found.append(
                f"the port above has x{self.port_max_width}, the card could do x{self.max_width}"
            )
        if 0 < self.port_max_speed < self.max_speed:
            found.append(
                f"the port above does {self.port_max_speed:g} GT/s, "
                f"the card could do {self.max_speed:g} GT/s"
            )
        return tuple(found)


def _least(first: float, second: float) -> float:
    known = [value for value in (first, second) if value > 0]
    return min(known, default=0)


def parse_speed(text: str | None) -> float:
    """`32.0 GT/s PCIe` -> 32.0; 0 for "Unknown" and anything else."""
    found = re.match(r"\s*(\d{1,3}(?:\.\d)?) GT/s", text or "")
    return float(found.group(1)) if found else 0.0


def parse_width(text: str | None) -> int:
    """`16` -> 16; 0 for what is no width: sysfs has 0, 63 or 255 where there is no link."""
    text = (text or "").strip()
    width = int(text) if re.fullmatch(r"\d{1,3}", text) else 0
    return width if width <= _MAX_WIDTH else 0
