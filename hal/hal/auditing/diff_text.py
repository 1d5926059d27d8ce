"""A diff as tables and as Markdown."""

from __future__ import annotations

import re
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.auditing.changes import Change, ChangeKind, Diff
from hal.auditing.markdown import MAX_CHARACTERS
from hal.auditing.markdown_text import markdown_code, markdown_text
from hal.auditing.quantities import number_runs, plural

MAX_SHOWN: Final = 60
_STYLES: Final = {
    ChangeKind.SEMANTICS: "bold red",
    ChangeKind.SLOWER: "red",
    ChangeKind.DEVICE: "red",
    ChangeKind.FASTER: "green",
    ChangeKind.RENAMED: "dim",
    ChangeKind.REASONS: "dim",
}
_MAX_SITES = 4
_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")


def print_diff(diff: Diff, console: Console) -> None:
    """The worst first; of many, the first and how many more."""
    console.print(Text(f"{diff.subject} {diff.old or '?'} → {diff.new or '?'}", style="bold"))
    if not diff.changes:
        console.print(Text("Nothing differs.", style="green"))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("change", no_wrap=True)
    for name in ("what", "from", "to"):
        table.add_column(name, overflow="fold")
    for change in diff.changes[:MAX_SHOWN]:
        what = Text(change.what)
        for note in (sites_text(change), change.detail):
            what.append(f"\n{note}" if note else "", style="dim")
        kind = Text(change.kind.value, style=_STYLES.get(change.kind, "yellow"))
        table.add_row(kind, what, Text(change.old), Text(change.new))
    console.print(table)
    if len(diff.changes) > MAX_SHOWN:
        rest = plural(len(diff.changes) - MAX_SHOWN, "more change")
        console.print(Text(f"… and {rest}: see --json", style="dim"))
    console.print(Text(summary(diff)))


def summary(diff: Diff) -> str:
    """`2 slower, 1 version. The worst: slower.`"""
    if diff.worst is None:
        return "Nothing differs."
    counts = ", ".join(f"{count} {kind}" for kind, count in diff.counts().items())
    return f"{counts}. The worst: {diff.worst}."


def sites_text(change: Change) -> str:
    """`at layers.0–29.attention, lm_head and 28 more`: sites of layers together."""
    if not change.where:
        return ""
    names = _grouped(change.where)
    rest = len(names) - _MAX_SITES
    return f"at {', '.join(names[:_MAX_SITES])}" + (f" and {rest} more" if rest > 0 else "")


def _grouped(sites: tuple[str, ...]) -> list[str]:
    """Names that differ in one layer number only, as one with the runs of numbers."""
    layers: dict[str, list[int]] = {}
    for site in sites:
        parts = _LAYER.split(site, maxsplit=1)
        pattern = site if len(parts) == 1 else f"{parts[0]}*{parts[2]}"
        found = layers.setdefault(pattern, [])
        if len(parts) > 1:
            found.append(int(parts[1]))
    return [pattern.replace("*", number_runs(numbers, ",")) for pattern, numbers in layers.items()]


def render_diff_markdown(diff: Diff) -> str:
    """The diff for a pull request, under the 65,536 characters that hosts take."""
    names = " → ".join(markdown_code(name or "?", 60) for name in (diff.old, diff.new))
    lines = [
        f"<!-- hal diff -->\n### hal diff: {diff.worst or 'nothing differs'}",
        "",
        f"{diff.subject} {names}: {markdown_text(summary(diff))}",
    ]
    if diff.changes:
        lines += ["", "| change | what | from | to |", "| --- | --- | --- | --- |"]
    left = MAX_CHARACTERS - sum(len(line.encode()) + 1 for line in lines) - 200
    for number, change in enumerate(diff.changes):
        notes = "; ".join(note for note in (sites_text(change), change.detail) if note)
        what = markdown_text(change.what, 200) + (f": {markdown_text(notes, 400)}" if notes else "")
        cells = (
            change.kind.value,
            what,
            markdown_text(change.old, 200),
            markdown_text(change.new, 200),
        )
        line = f"| {' | '.join(cells)} |"
        left -= len(line.encode()) + 1
        if left < 0:
            lines += ["", f"…and {plural(len(diff.changes) - number, 'more change')}: see --json."]
            break
        lines.append(line)
    return "\n".join(lines) + "\n"
