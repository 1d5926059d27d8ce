"""Strict reading of single values out of a configuration: type, finiteness and range."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hal_engine.config import ABSENT, ConfigError, said

MAX_SIZE = 2**24  # elements of one dimension: 100 times the largest width or vocabulary in use
MAX_LAYERS = 4096
MAX_POSITIONS = 2**31 - 1


class StrictValues:
    """A mapping whose values are read by type and range; remembers which keys were read."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file = file
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Present and not null; null means "not set" in configuration files."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Present with the value null, where that means something else than absence."""
        return key in self._values and self.raw(key) is None

    def unread_keys(self) -> list[str]:
        return sorted(set(self._values) - self._read)

    def error(self, key: str, required: str, found: object, remedy: str = "") -> ConfigError:
        return ConfigError(self.file, self._prefix + key, required, found, remedy)

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return self._values.get(key)

    def integer(
        self, key: str, *, least: int = 1, most: int = MAX_SIZE, default: int | None = None
    ) -> int:
        """An int in [least, most]; bool, float, str, and absence without default are refused."""
        required = f"an integer in {least}..{most}"
        value = self._present(key, required, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, required, value)
        return value

    def number(
        self, key: str, *, above: float = 0.0, most: float = 1e15, default: float | None = None
    ) -> float:
        """A finite number in (above, most]. bool and str are refused."""
        required = f"a finite number above {above:g} and at most {most:g}"
        value = self._present(key, required, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, required, value)
        if not math.isfinite(value) or not above < value <= most:
            raise self.error(key, required, value)
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._present(key, "true or false", default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def string(self, key: str, *, default: str | None = None) -> str:
        value = self._present(key, "a string", default)
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def integers(
        self, key: str, *, length: int | None = None, least: int = 0, most: int = MAX_SIZE
    ) -> tuple[int, ...] | None:
        """A list of ints in [least, most], `length` of them if given; None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        count = "" if length is None else f"{length} "
        required = f"a list of {count}integers in {least}..{most}"
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise self.error(key, required, value)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not least <= item <= most:
                raise self.error(key, required, value)
        return tuple(value)

    def choices(self, key: str, length: int, known: Collection[str]) -> tuple[str, ...] | None:
        """A list of `length` of the known words; None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, f"a list of {length} names, one a layer", value)
        for index, item in enumerate(value):
            if item not in known:
                raise self.error(f"{key}[{index}]", f"one of {', '.join(sorted(known))}", item)
        return tuple(value)

    def fixed(self, key: str, required: Any) -> None:
        """A setting that may be absent and otherwise has the one value that is implemented."""
        value = self.raw(key)
        if value is not None and value != required:
            raise self.error(key, repr(required), value)

    def mapping(self, key: str) -> StrictValues | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return StrictValues(self.file, value, prefix=f"{self._prefix}{key}.")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them, each within the vocabulary; () if absent."""
        value = self.raw(key)
        if value is None:
            return ()
        required = f"token ids in 0..{vocab_size - 1}"
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self.error(key, required, value)
            if not 0 <= token_id < vocab_size:
                raise self.error(key, required, value)
        return tuple(dict.fromkeys(ids))

    def _present(self, key: str, required: str, default: Any) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            found = said("null") if key in self._values else ABSENT
            raise self.error(key, required, found)
        return default


def check_head_counts(
    values: StrictValues, heads_key: str, heads: int, kv_heads_key: str, kv_heads: int
) -> None:
    """Query heads must be a whole multiple of key/value heads (grouped-query attention)."""
    if kv_heads > heads or heads % kv_heads:
        raise values.error(
            kv_heads_key, f"a divisor of {heads_key} ({heads})", kv_heads, "check both head counts"
        )


def check_head_dim(values: StrictValues, key: str, head_dim: int) -> None:
    """Rotary embedding pairs the two halves of a head, so its size is even."""
    if head_dim % 2 or not 2 <= head_dim <= 1024:
        raise values.error(key, "an even head size in 2..1024", head_dim)
