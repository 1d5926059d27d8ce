"""Where a row or a finding is, without its layer: what is equal in many layers is shown once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from hal.auditing.document import Row
from hal.auditing.quantities import number_runs

_LAYER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


def site_pattern(site: str, layer: int | None = None) -> str:
    """The call site with "*" for its layer: "layers.3.qkv_proj" is "layers.*.qkv_proj"."""
    if layer is not None:
        return re.sub(rf"(?<=\.){layer}(?=\.|$)", "*", site, count=1)
    return _LAYER.sub("*", site, count=1)


def layer_of(site: str) -> int | None:
    """The layer that a call site names, as it is written in it."""
    found = _LAYER.search(site)
    return int(found.group()) if found and len(found.group()) < 10 else None


def short_site(site: str, layer: int | None = None) -> str:
    """The pattern without what every layer's site begins with: "qkv_proj"."""
    pattern = site_pattern(site, layer)
    _, star, tail = pattern.partition("*.")
    return tail if star and tail else pattern


def place_of(row: Row) -> str:
    """Call site or file:line, for people."""
    if row.site:
        return row.site
    return "" if row.location is None else str(row.location)


def group_place(row: Row) -> str:
    """The place of a row without its layer."""
    return site_pattern(row.site, row.layer) if row.site else place_of(row)


def layers_text(layers: Iterable[int]) -> str:
    """`layers 0–29`, `layer 3`; "" for none."""
    distinct = set(layers)
    if not distinct:
        return ""
    return f"layer{'' if len(distinct) == 1 else 's'} {number_runs(distinct)}"


def tokens_text(tokens: tuple[int, int] | None) -> str:
    """`1 token`, `2–512 tokens`; "" where it does not matter."""
    if tokens is None:
        return ""
    low, high = tokens
    if low == high:
        return f"{low:,} token{'' if low == 1 else 's'}"
    return f"{low:,}–{high:,} tokens"
