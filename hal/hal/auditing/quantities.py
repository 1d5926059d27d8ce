"""How times, shares and counts read in reports for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_MAX_RUNS: Final = 8
_NUM_FIRST_RUNS: Final = 5


def format_time(us: float | None) -> str:
    """`830 ns`, `12.4 µs`, `3.1 ms`, `2.4 s`; empty for what nobody measured."""
    if us is None:
        return ""
    if us < 0:
        return f"-{format_time(-us)}"
    for limit, factor, unit in ((1, 1e3, "ns"), (1e3, 1, "µs"), (1e6, 1e-3, "ms")):
        if us < limit:
            return f"{_three_digits(us * factor)} {unit}"
    return f"{_three_digits(us / 1e6)} s"


def _three_digits(value: float) -> str:
    if value >= 99.95 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def format_share(share: float | None) -> str:
    """`41%`, `0.3%`, `<0.1%`; empty for what nobody knows."""
    if share is None:
        return ""
    percent = 100 * share
    if 0 < percent < 0.1:
        return "<0.1%"
    return f"{percent:.1f}%" if 0 < percent < 9.95 else f"{percent:.0f}%"


def format_count(count: float) -> str:
    """`0`, `1,204`, `3.1 M`, `2.4 G`, `5.0 T`."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= limit:
            return f"{count / limit:,.1f} {unit}"
    return f"{count:,.0f}"


def format_bytes(count: float) -> str:
    """`0 B`, `31.3 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """`1 call`, `1,204 calls`."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def number_runs(numbers: Iterable[int], separator: str = ", ") -> str:
    """`0–4, 7, 9–11`; of very many runs the first ones and the last."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    texts = ["–".join(map(str, run)) for run in runs]
    if len(texts) > _MAX_RUNS:
        texts[_NUM_FIRST_RUNS:-1] = ["…"]
    return separator.join(texts)
