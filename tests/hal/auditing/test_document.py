"""A stored report says nothing that cannot be: located errors name the field."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from audit_reports import finding, random_report, report
from hal.auditing.document import AuditReport, Loser, Verification, WaiverUse
from hal.auditing.report_files import read_report
from hal.auditing.totals import totals_problem
from hal.cli.diff import diff_files
from hal.errors import DocumentError
from layered_reports import changed_report, model_report, program_report

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def document() -> dict[str, Any]:
    full = report(
        findings=(finding(rank=1),),
        waivers=(WaiverUse(text="w", state="used", calls=3),),
        verification=Verification(share=0.01, compared_calls=12, worst=0.4),
    )
    row = full.rows[0].model_copy(
        update={
            "layer": 3,
            "tokens": (1, 64),
            "losers": (Loser(name="better", tier="native", gain_us=3.0),),
        }
    )
    document: dict[str, Any] = json.loads(full.model_copy(update={"rows": (row,)}).to_json())
    document["machine"]["peak_flops"] = {"float32": 1e12}
    document["machine"]["memory_bandwidth"] = 1e11
    return document


def _located(document: dict[str, Any], folder: Path) -> str:
    path = folder / "m.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DocumentError) as raised:
        read_report(path)
    return str(raised.value)


AMOUNTS = (
    ("rows", 0, "calls"),
    ("rows", 0, "flops"),
    ("rows", 0, "bytes"),
    ("rows", 0, "time_us"),
    ("rows", 0, "bound_us"),
    ("rows", 0, "layer"),
    ("rows", 0, "losers", 0, "gain_us"),
    ("rows", 0, "location", "line"),
    ("findings", 0, "calls"),
    ("findings", 0, "time_us"),
    ("findings", 0, "time_share"),
    ("findings", 0, "cost_us"),
    ("findings", 0, "rank"),
    ("coverage", "outside", "calls"),
    ("coverage", "outside", "flops"),
    ("coverage", "outside", "bytes"),
    ("coverage", "outside", "time_us"),
    ("machine", "peak_flops", "float32"),
    ("machine", "memory_bandwidth"),
    ("verification", "share"),
    ("verification", "compared_calls"),
    ("verification", "worst"),
    ("waivers", 0, "calls"),
    ("time_us",),
    ("processes",),
)


def _key(path: tuple[str | int, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


def _set(document: Any, path: tuple[str | int, ...], value: object) -> None:
    for part in path[:-1]:
        document = document[part]
    assert path[-1] in document, path
    document[path[-1]] = value


@pytest.mark.parametrize("path", AMOUNTS, ids=_key)
def test_no_amount_is_negative(
    path: tuple[str | int, ...], document: dict[str, Any], tmp_path: Path
) -> None:
    _set(document, path, random.randrange(-(10**6), 0))
    text = _located(document, tmp_path)
    assert f"m.json, key {_key(path)}\n" in text
    assert "greater than or equal to" in text


@pytest.mark.parametrize("path", [p for p in AMOUNTS if p[-1] != "worst"], ids=_key)
def test_no_amount_is_beyond_what_can_be(
    path: tuple[str | int, ...], document: dict[str, Any], tmp_path: Path
) -> None:
    _set(document, path, 10**40)
    assert f"m.json, key {_key(path)}\n" in _located(document, tmp_path)


@pytest.mark.parametrize("share", [1.5, -0.1, 100])
@pytest.mark.parametrize("path", [("findings", 0, "time_share"), ("verification", "share")])
def test_shares(
    path: tuple[str | int, ...], share: float, document: dict[str, Any], tmp_path: Path
) -> None:
    _set(document, path, share)
    assert f"key {_key(path)}\n" in _located(document, tmp_path)


def _twice_the_rows(document: dict[str, Any]) -> None:
    document["rows"] *= 2
    document["coverage"]["outside"].update(calls=6, flops=6e6, bytes=2e6)
    document["time_us"] = 2999.0


TOTALS: dict[str, tuple[str, Change]] = {
    "the whole is less than its rows": ("time_us", _twice_the_rows),
    "the whole is less than what was covered": (
        "time_us",
        lambda d: d["coverage"].update(host={"calls": 1, "time_us": 2250.1}),
    ),
    "a row of more than all": ("rows[0].time_us", lambda d: d["rows"][0].update(time_us=3751.0)),
    "more calls than were covered": ("coverage", lambda d: d["rows"][0].update(calls=4)),
    "more flops than were covered": ("coverage", lambda d: d["rows"][0].update(flops=3.1e6)),
    "more bytes than were covered": ("coverage", lambda d: d["rows"][0].update(bytes=1.1e6)),
    "calls of what was never exercised": (
        "rows[0].calls",
        lambda d: d["rows"][0].update(state="never-exercised"),
    ),
    "the ends of a range": ("rows[0].tokens", lambda d: d["rows"][0].update(tokens=[64, 1])),
}


@pytest.mark.parametrize("name", TOTALS)
def test_totals_hold_their_rows(name: str, document: dict[str, Any], tmp_path: Path) -> None:
    key, change = TOTALS[name]
    change(document)
    text = _located(document, tmp_path)
    assert f"m.json, key {key}\n" in text
    assert "write it anew" in text


def test_reports_as_they_are_written_hold(tmp_path: Path) -> None:
    layered = model_report(seed=random.randrange(1 << 30))
    whole: list[AuditReport] = [
        layered,
        changed_report(layered),
        program_report(seed=random.randrange(1 << 30)),
        *(random_report(random.randrange(1 << 30)) for _ in range(20)),
    ]
    for audited in whole:
        assert totals_problem(audited) is None
        path = tmp_path / "r.json"
        path.write_text(audited.to_json())
        assert read_report(path) == audited


def test_two_kinds_of_files(tmp_path: Path) -> None:
    one, other = tmp_path / "m.json", tmp_path / "l.json"
    one.write_text(report().to_json())
    other.write_text(json.dumps({"schema": "halstack.lock/1"}))
    with pytest.raises(DocumentError, match=r"m\.json is an audit report, .*l\.json a lock"):
        diff_files(one, other)
