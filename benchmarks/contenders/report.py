"""Medians, ratios and spread of a comparison, as data and as Markdown tables."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders.catalogue import OWN

Document = dict[str, Any]


def best_peer(
    contenders: Mapping[str, Any], precision_class: str, row: str, *, smallest: bool = False
) -> str | None:
    """The right peer (not ours) of a class with the highest (or the smallest) median in a row."""
    found = {
        name: statistics.median(rates(contender, row))
        for name, contender in contenders.items()
        if not is_own(name)
        and contender["precision_class"] == precision_class
        and contender.get("check", {}).get("is_right", True)
        and rates(contender, row)
    }
    if not found:
        return None
    return (min if smallest else max)(found, key=found.__getitem__)


def is_own(name: str) -> bool:
    return name.startswith(f"{OWN}-")


def rates(contender: Mapping[str, Any], row: str) -> list[float]:
    """One rate per finished round."""
    return [turn[row] for turn in contender["rounds"] if row in turn]


def ratios(ours: Mapping[str, Any], peer: Mapping[str, Any], row: str) -> list[float]:
    """ours / peer, round by round: what disturbed a round disturbed both."""
    return [
        a[row] / b[row]
        for a, b in zip(ours["rounds"], peer["rounds"], strict=False)
        if row in a and row in b
    ]


def compare(
    contenders: Mapping[str, Any],
    rows: Sequence[str],
    goals: Mapping[str, Mapping[str, float]],
    *,
    smallest: bool = False,
) -> list[dict[str, Any]]:
    """Per contender of ours and row: the best peer, the ratio, its spread and the goal.

    goals: precision class -> row -> ratio to reach. smallest: smaller values are better.
    """
    found: list[dict[str, Any]] = []
    for name, ours in contenders.items():
        if not is_own(name):
            continue
        precision_class = ours["precision_class"]
        for row in rows:
            peer = best_peer(contenders, precision_class, row, smallest=smallest)
            if peer is None:
                continue
            values = ratios(ours, contenders[peer], row)
            if not values:
                continue
            goal = goals.get(precision_class, {}).get(row)
            ratio = statistics.median(values)
            found.append(
                {
                    "contender": name,
                    "row": row,
                    "best_peer": peer,
                    "ratio": round(ratio, 3),
                    "ratios": [round(v, 3) for v in values],
                    "goal": goal,
                    "is_met": _is_met(ratio, goal, smallest=smallest),
                }
            )
    return found


def _is_met(ratio: float, goal: float | None, *, smallest: bool) -> bool | None:
    if goal is None:
        return None
    return ratio <= goal if smallest else ratio >= goal


def markdown(document: Document, rows: Sequence[str], unit: str) -> str:
    """The document as tables for people."""
    contenders = document["contenders"]
    lines = [
        f"# {document['title']}, {document['date']}",
        "",
        _machine_line(document),
        "",
        f"Medians of the rounds ({unit}), with the smallest and the largest. {document['method']}",
        "",
        "| contender | " + " | ".join(rows) + " | check |",
        "|---|" + "---|" * (len(rows) + 1),
    ]
    for name, contender in contenders.items():
        cells = [_cell(rates(contender, row)) for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {_check_text(contender)} |")
    lines += _ratio_table(document)
    failed = {n: c["error"] for n, c in contenders.items() if c.get("error")}
    if failed:
        lines += ["", "Did not run:", ""]
        lines += [f"- {name}: {reason}" for name, reason in failed.items()]
    if document.get("left_out"):
        lines += ["", f"Known and not in this run, by choice: {', '.join(document['left_out'])}."]
    lines += ["", "Versions:", ""]
    lines += [
        f"- {name}: " + ", ".join(f"{k} {v}" for k, v in contender["versions"].items())
        for name, contender in contenders.items()
        if contender.get("versions")
    ]
    return "\n".join(lines) + "\n"


def _machine_line(document: Document) -> str:
    machine = document["machine"]
    others = document.get("others_busy") or [0.0]
    return (
        f"{machine['cpu']} ({', '.join(machine['flags'])}), {machine['cores']} cores, "
        f"{document['threads']} threads; others kept the processors busy to "
        f"{statistics.median(others):.0%} (median; at most {max(others):.0%}) before each turn."
    )


def _ratio_table(document: Document) -> list[str]:
    compared = document.get("ratios") or []
    if not compared:
        return []
    lines = ["", "Ratios to the best right peer of the same class, median of the rounds:", ""]
    lines += ["| contender | row | best peer | ratio | goal | met |", "|---|---|---|---|---|---|"]
    for item in compared:
        spread = f"{item['ratio']:.2f} ({min(item['ratios']):.2f}–{max(item['ratios']):.2f})"
        goal = "" if item["goal"] is None else f"{item['goal']:g}"
        met = {None: "", True: "yes", False: "no"}[item["is_met"]]
        lines.append(
            f"| {item['contender']} | {item['row']} | {item['best_peer']} | {spread} "
            f"| {goal} | {met} |"
        )
    return lines


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    median = statistics.median(values)
    return f"{_short(median)} ({_short(min(values))}–{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.2g}"


def _check_text(contender: Mapping[str, Any]) -> str:
    check = contender.get("check")
    if not check:
        return "not checked" if not contender.get("error") else "did not run"
    text: str = check["text"]
    return text if check["is_right"] else f"**wrong**: {text}"


def write(document: Document, text: str, folder: Path, name: str) -> tuple[Path, Path]:
    """`<date>-<name>.json` and `.md` in the folder; a later run of the day replaces them."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{document['date']}-{name}.json"
    table = data.with_suffix(".md")
    data.write_text(json.dumps(document, indent=1) + "\n")
    table.write_text(text)
    return data, table


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
