"""Tiers: how good an implementation is for the device it runs on, worst to best."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Ordered: a larger tier is better.

    NATIVE: the device's own instructions for that dtype, tuned. TUNED: measured and tuned, but not
    the device's best unit. PORTABLE: right, slower. REFERENCE: plain torch, the golden.
    """

    REFERENCE = 0
    PORTABLE = 1
    TUNED = 2
    NATIVE = 3

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> Tier:
        """Raises KeyError if no tier has that label."""
        return cls[label.upper()]
