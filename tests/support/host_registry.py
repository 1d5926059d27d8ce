"""What a recorded host of the catalogue is: how it is composed, and what must be found on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from recorded_hosts import HostBuilder


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What detection must find on a host.

    devices: backend -> (profile, number of devices) in all; profile "arch:<id>" where only the
    architecture is known, "unknown" where not even that. missing: words that the missing
    dependencies of a backend must have, each in some entry. refused: words of a backend's refusal.
    """

    devices: dict[str, dict[str, int]] = field(default_factory=dict)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)


Composer = Callable[[HostBuilder], Expected]
CATALOGUE: dict[str, tuple[str, Composer]] = {}


def recorded_host(name: str, description: str) -> Callable[[Composer], Composer]:
    """Add a host to the catalogue."""

    def register(compose: Composer) -> Composer:
        CATALOGUE[name] = (description, compose)
        return compose

    return register


def one(backend: str, profile: str, count: int, **others: dict[str, tuple[str, ...]]) -> Expected:
    """One vendor's devices of one product."""
    return Expected(devices={backend: {profile: count}}, **others)
