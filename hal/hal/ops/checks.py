"""Checks that requests share: what an argument must be, and the number of keys that queries see."""

from __future__ import annotations

from hal.errors import RequestError

Check = tuple[str, object, bool]


def require(who: str, *checks: Check) -> None:
    """Raises RequestError for the first (required, found, is_met) that is not met."""
    for required, found, is_met in checks:
        if not is_met:
            raise RequestError(who, required, str(found), "correct the request")


def one_of(name: str, found: str, allowed: tuple[str, ...]) -> Check:
    """The check that a named argument is one of the allowed words."""
    return f"{name} one of {', '.join(map(repr, allowed))}", repr(found), found in allowed


def positive(**values: int) -> tuple[Check, ...]:
    """A check for each named argument that it is at least 1."""
    return tuple((f"{name} >= 1", value, value >= 1) for name, value in values.items())


def seen_entries(tokens: int, ratio: int = 1, most: int = 0) -> float:
    """Query-entry pairs of one whole prompt of `tokens` queries.

    Query p sees the entries that are complete at p, (p + 1) // ratio, and of them at most `most`
    (0: all).
    """
    if tokens <= 0:
        return 0.0
    capped = 0 if not most or tokens < ratio * most else tokens - ratio * most + 1
    whole, rest = divmod(tokens - capped, ratio)
    return ratio * whole * (whole - 1) / 2 + whole * (rest + 1.0) + capped * most


def entries_read(
    phase: str, tokens: int, context_tokens: int, ratio: int = 1, most: int = 0
) -> float:
    """Query-entry pairs of one call: decode sees the context, anything else is one whole prompt."""
    if phase != "decode":
        return seen_entries(tokens, ratio, most)
    entries = max(context_tokens, 1) // ratio
    return float(tokens * (min(entries, most) if most else entries))
