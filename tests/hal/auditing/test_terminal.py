"""The tables of a report: within 100 columns, readable at 80, colour on terminals only."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from audit_reports import finding, random_report, report
from fresh_draws import fresh_seeds
from hal.auditing.document import Evidence, Location, Refusal, Row, WaiverUse, Work
from hal.auditing.finding_text import evidence_text
from hal.auditing.gates import GateClass
from hal.auditing.quantities import format_bytes, format_count, format_share, format_time, plural
from hal.auditing.terminal import MAX_ROWS, print_report
from hal.auditing.terminal_findings import MAX_FINDINGS
from hal.cli.output import VisibleConsole

LOST = frozenset({GateClass.LOST_FAST_PATH})


def console(columns: int, *, is_terminal: bool = False) -> Console:
    return VisibleConsole(
        width=columns,
        file=io.StringIO(),
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
        markup=False,
        highlight=False,
        emoji=False,
    )


def printed(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("seed", fresh_seeds(10))
def test_every_line_fits_and_nothing_moves_the_cursor(seed: int, columns: int) -> None:
    out = console(columns)
    print_report(random_report(seed), LOST, out)
    text = printed(out)
    assert max(len(line) for line in text.splitlines()) <= columns
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)


def test_names_make_no_lines_of_their_own() -> None:
    bad = "x\nPassed: nothing\r::add-mask::y\u2028z"
    row = Row(op=bad, implementation=bad, calls=1, time_us=1.0)
    found = finding(title=bad, op=bad, location=Location(file=bad, line=1, function=bad))
    refusal = Refusal(who=bad, required="a", found="b", location=Location(file=bad, line=1))
    rows = (row, Row(op="", implementation="", calls=1, time_us=1.0))
    out = console(100)
    print_report(
        report(subject=bad, rows=rows, findings=(found,), refusals=(refusal,), notes=(bad,)),
        LOST,
        out,
    )
    assert not re.search(r"(?m)^ *(Passed|::|z)", printed(out))


@pytest.mark.parametrize("columns", [80, 100])
def test_a_person_finds_what_to_do(columns: int) -> None:
    out = console(columns)
    names = ["attention", "gemm.qkv"]
    rows = tuple(
        Row(
            op=op,
            phase="decode",
            site=f"layers.{n}.{op}",
            implementation="nvidia.attention.flash_attention_3",
            tier="native",
            calls=1000,
            time_us=2e6,
            bound_us=1e6,
            arguments="",
        )
        for n in range(3)
        for op in names
    )
    audited = report(
        rows=rows,
        time_us=12e6,
        findings=(finding(),),
        waivers=(WaiverUse(text="tier waiver for rope", state="over-broad", calls=7),),
        coverage={"native": Work(calls=6000, flops=3e12, bytes=4e9, time_us=12e6)},
    )
    print_report(audited, LOST, out)
    text = printed(out)
    flat = re.sub(r"\s+", " ", text)
    for part in (
        "attention.decode",
        "3,000",
        "6.00 s",
        "50%",
        "warning lost-fast-path (fails the gate) attention ran unfused",
        "where: model.py:12 in forward (attention)",
        "cost: at least 900 µs to gain, 1.50 ms observed, 40% of all, 3 calls",
        "found: attn_mask: required none, found dense",
        "remedy: pass is_causal=True",
        "over-broad",
        "3.0 T (100%)",
        "Failed: 1 lost-fast-path.",
    ):
        assert part in flat, (part, text)
    assert text.rstrip().endswith("Failed: 1 lost-fast-path.")


def test_colour_is_for_terminals() -> None:
    plain, coloured = console(100), console(100, is_terminal=True)
    for out in (plain, coloured):
        print_report(report(findings=(finding(),)), LOST, out)
    assert "\x1b" not in printed(plain)
    assert "\x1b[1;31m" in printed(coloured)
    assert re.sub("\x1b\\[[0-9;]*m", "", printed(coloured)) == printed(plain)


def test_long_lists_end_with_how_many_more() -> None:
    rows = tuple(
        Row(op=f"op{n}", implementation=f"i{n}", calls=1, time_us=10.0) for n in range(MAX_ROWS + 5)
    )
    findings = tuple(finding(rule=f"r{n}") for n in range(MAX_FINDINGS + 7))
    out = console(100)
    print_report(report(rows=rows, findings=findings), frozenset(), out)
    text = printed(out)
    assert "… and 5 more rows: see --json" in text
    assert "… and 7 more findings: see --json" in text
    assert f"No gate. {MAX_FINDINGS + 7} findings: {MAX_FINDINGS + 7} lost-fast-path." in text


def test_quantities_read_well() -> None:
    assert [format_time(us) for us in (None, 0, 0.5, 1, 999.4, 12_345, 3.2e6, -5)] == [
        "", "0 ns", "500 ns", "1.00 µs", "999 µs", "12.3 ms", "3.20 s", "-5.00 µs",
    ]  # fmt: skip
    assert [format_share(share) for share in (None, 0, 0.0004, 0.004, 0.0994, 0.41, 1.0)] == [
        "", "0%", "<0.1%", "0.4%", "9.9%", "41%", "100%",
    ]  # fmt: skip
    assert [format_count(n) for n in (0, 1204, 3.1e6, 2.4e9, 5e12)] == [
        "0", "1,204", "3.1 M", "2.4 G", "5.0 T",
    ]  # fmt: skip
    assert [format_bytes(n) for n in (0, 1023, 2048, 3 << 30)] == [
        "0 B", "1,023 B", "2.0 KiB", "3.0 GiB",
    ]  # fmt: skip
    assert (plural(1, "call"), plural(1204, "call")) == ("1 call", "1,204 calls")


def test_what_takes_next_to_nothing_outside_bound_ops_is_counted_only() -> None:
    rows = (
        Row(op="gemm", implementation="acme.gemm", tier="native", calls=1, time_us=0.1),
        Row(op="aten::view", implementation="aten::view", tier="outside", calls=1, time_us=0.1),
        Row(op="aten::cat", implementation="aten::cat", tier="outside", calls=1, time_us=900.0),
    )
    out = console(100)
    print_report(report(rows=rows, time_us=1000.0), frozenset(), out)
    text = printed(out)
    assert "acme.gemm" in text
    assert "aten::cat" in text
    assert "aten::view" not in text
    assert "… and 1 more row: see --json" in text


def test_a_finding_of_several_lines_of_one_function_is_printed_once() -> None:
    places = [Location(file="lib/cache.py", line=n, function="update") for n in (136, 137)]
    elsewhere = Location(file="lib/cache.py", line=140, function="other")
    findings = tuple(
        finding(rule="kv-cache-concatenated", title="a cache that grows", location=place)
        for place in (*places, elsewhere)
    )
    out = console(100)
    print_report(report(findings=findings), frozenset(), out)
    text = printed(out)
    assert text.count("a cache that grows") == 2
    assert "also: cache.py:137:" in text
    assert "No gate. 3 findings" in text


def test_what_nothing_is_required_of_is_only_told() -> None:
    assert evidence_text(Evidence(what="arguments", required="any", found="x")) == "arguments: x"
    assert evidence_text(Evidence(what="p", required="0", found="1")) == "p: required 0, found 1"
