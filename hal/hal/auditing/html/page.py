"""Assembles the page: views of a report, templates, styles and scripts into one document.

The page is complete without its scripts, which only sort, filter, explain and switch themes. Its
content security policy allows nothing but the styles and scripts that are in it, by their hashes;
styles therefore are never set in markup.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hal.auditing.document import AuditReport
from hal.auditing.html import quantities
from hal.auditing.html.comparison import compare, counts_of
from hal.auditing.html.condensed import condensed
from hal.auditing.html.finding_cards import open_cards, waived_cards
from hal.auditing.html.heat_map import heat_map
from hal.auditing.html.losers import leaf_groups, loser_list
from hal.auditing.html.palette import palette_css
from hal.auditing.html.roofline_plot import roofline_plot
from hal.auditing.html.row_table import row_table
from hal.auditing.html.shown_text import embedded_json, shown_text
from hal.auditing.html.tier_marks import TIER_MARKS
from hal.auditing.html.time_shares import NUM_FIRST, coverage_of, op_groups, op_segments
from hal.auditing.html.verdict import judge_report
from hal.auditing.quantities import number_runs, plural
from hal.auditing.row_matching import MIN_SHARE, NOISE
from hal.auditing.summary import observed_time_us

MAX_SHOWN: Final = 300
"""Cards, groups and changes of one list; the JSON has all of them."""
_STYLES: Final = ("layout.css", "charts.css", "table.css", "narrow.css", "print.css")
_EARLY_SCRIPTS: Final = ("theme.js",)
_SCRIPTS: Final = ("tooltip.js", "marks.js", "rows.js", "document.js")


def render_html(report: AuditReport, previous: AuditReport | None = None) -> str:
    """The page of `report`, with what changed since `previous` where there is one.

    The same reports give the same text. Nothing in a report, however hostile, becomes markup,
    script or style, or reaches a network.
    """
    whole_us = observed_time_us(report)
    losers = loser_list(report)
    inside = condensed(report)
    loser_of = [
        next((n for n in map(losers.group_of.__getitem__, numbers) if n and n <= MAX_SHOWN), None)
        for numbers in inside.sources
    ]
    comparison = None if previous is None else compare(report, previous)
    style = palette_css() + _joined(_STYLES)
    early, late = _joined(_EARLY_SCRIPTS), _joined(_SCRIPTS)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            verdict=judge_report(report),
            coverage=coverage_of(report),
            segments=op_segments(report, whole_us),
            groups=op_groups(report, whole_us),
            num_first=NUM_FIRST,
            most=MAX_SHOWN,
            left_out=inside.note,
            heat=heat_map(report, whole_us),
            plot=roofline_plot(inside.report, whole_us),
            table=row_table(inside, whole_us, loser_of),
            losers=losers.groups,
            leaves=leaf_groups(report),
            findings=open_cards(report),
            waived=waived_cards(report),
            previous=previous,
            comparison=comparison,
            change_counts=[] if comparison is None else counts_of(comparison),
            noise=NOISE,
            min_share=MIN_SHARE,
            whole_us=whole_us,
            marks=TIER_MARKS,
            policy=_policy(style, early, late),
            style=Markup(style),
            early_script=Markup(early),
            script=Markup(late),
            data=Markup(embedded_json(inside.report.model_dump_json(by_alias=True))),
        )
    )


def _policy(style: str, *scripts: str) -> str:
    """The content security policy: nothing is loaded, and only what is here may act."""
    allowed = " ".join(_hash_source(script) for script in scripts)
    return (
        f"default-src 'none'; style-src {_hash_source(style)}; script-src {allowed}; "
        "img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash_source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _joined(names: tuple[str, ...]) -> str:
    folder = resources.files(__package__) / "static"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


@cache
def _environment() -> Environment:
    """Escapes everything, and shows what cannot be seen: no template can forget either."""
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters.update(
        count=quantities.count,
        quantity=quantities.quantity,
        duration=quantities.duration,
        share=quantities.share,
        ratio=quantities.ratio,
        percent=_percent,
        plural=plural,
        runs=number_runs,
    )
    return environment


def _finalize(value: Any) -> Any:
    """Every value that a template writes goes through here, before it is escaped."""
    if type(value) is not str:
        return value  # numbers, and `Markup`: what this package has made itself
    return shown_text(value)


def _percent(value: float) -> str:
    """A coordinate: `12.34%`."""
    return f"{value:.2f}%"
