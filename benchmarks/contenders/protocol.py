"""What an engine must offer to be compared. Implementations run in the engine's own environment."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TokenIds = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Where the prepared weights are and how much of the machine the engine may use.

    models: folder of `weights.py`. precision: as `catalogue.Entry.precision`. max_sequences,
    max_length: the most sequences at once and the most tokens of one (prompt and new tokens).
    """

    models: Path
    precision: str
    threads: int
    max_sequences: int
    max_length: int


class Contender(Protocol):
    """One engine with one set of weights.

    `generate` is all that is measured: prefill and decode rates are both derived from its
    durations (see `measurement.py`), in the same way for every engine.
    """

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that do the work, and what they say of the CPU."""
        ...

    def load(self, options: LoadOptions) -> None: ...

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts at once, `new_tokens` each, EOS ignored.

        The engine must not answer from a prefix cache: nothing of an earlier call is reused.
        """
        ...

    def close(self) -> None: ...


def package_versions(*names: str) -> dict[str, str]:
    """Installed versions of distributions, with Python's."""
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"python": platform.python_version()}
