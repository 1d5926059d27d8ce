"""Writes SVG: shapes and texts with classes, escaped, and the style sheet of the pictures."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from hal.topology.layout import printable

# Of a wide font: text must not leave its box where a narrower one is missing.
_CHARACTER_EM = 0.66
_STYLE = """
text { font-family: ui-sans-serif, system-ui, "Helvetica Neue", Arial, sans-serif; fill: #1d2530; }
.page { fill: #f6f8fa; } .panel { fill: #ffffff; stroke: #d5dbe3; }
.node { fill: #34445c; } .switch { fill: #e8edf4; stroke: #9aa8bb; } .card { stroke: #b9c4d2; }
.card { fill: #fbfcfe; } .absent { fill: #fff4f2; stroke: #d9534f; stroke-dasharray: 5 4; }
.title { font-size: 20px; font-weight: 600; } .head { font-size: 14px; font-weight: 600; }
.name { font-size: 13px; font-weight: 600; } .small { font-size: 11px; } .cell { font-size: 11px; }
.quiet { fill: #66758a; } .light { fill: #ffffff; } .bad-text { fill: #c0392b; }
.ok { stroke: #2a9d6f; } .warning { stroke: #e0a100; } .bad { stroke: #d64541; }
.unknown { stroke: #a9b4c2; } .lost { stroke: #d64541; stroke-opacity: 0.25; }
.fabric { fill: #0b7a53; } .PIX { fill: #3aa655; } .PXB { fill: #86b13b; } .PHB { fill: #3d8fd1; }
.NODE { fill: #e0a100; } .SYS { fill: #d9653b; } .none { fill: #a9b4c2; } .self { fill: #e8edf4; }
.badge { fill: #2a9d6f; } .badge-warning { fill: #e0a100; } .badge-bad { fill: #d64541; }
@media (prefers-color-scheme: dark) {
 text { fill: #e6ebf2; } .page { fill: #12171f; } .panel { fill: #1a212c; stroke: #303b4b; }
 .node { fill: #7f95b5; } .switch { fill: #263140; stroke: #4b5b72; } .self { fill: #263140; }
 .card { fill: #202936; stroke: #3b485b; } .absent { fill: #33211f; } .quiet { fill: #94a3b8; }
 .light { fill: #ffffff; } .bad-text { fill: #ff8f80; }
}
"""


class SvgCanvas:
    """Collects the parts of one picture; coordinates are in pixels."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, style: str, radius: float = 6
    ) -> None:
        """A rounded rectangle."""
        self._parts.append(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius:g}"/>'
        )

    def line(self, x1: float, x2: float, y: float, style: str, thickness: float) -> None:
        """A level line."""
        self._parts.append(
            f'<line class="{style}" x1="{x1:g}" y1="{y:g}" x2="{x2:g}" y2="{y:g}" '
            f'stroke-width="{thickness:g}"/>'
        )

    def text(self, x: float, y: float, text: str, style: str, anchor: str = "start") -> None:
        """One line of text."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{style}" {place}>{_clean(text)}</text>')

    def hint(self, text: str) -> None:
        """What a viewer shows when the pointer rests on the part added last."""
        part = self._parts.pop()
        start, tag = part.removesuffix("/>"), part[1:].split(" ", 1)[0]
        self._parts.append(f"{start}><title>{_clean(text)}</title></{tag}>")

    def to_svg(self, width: float, height: float, label: str) -> str:
        """The document."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img" aria-label={quoteattr(label)}>\n'
            f"<style>{_STYLE}</style>\n"
            f'<rect class="page" width="{width:g}" height="{height:g}"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def fitted(text: str, width: float, font_px: float) -> str:
    """The text, cut with an ellipsis where it would be wider than `width` pixels."""
    most = max(1, int(width / (font_px * _CHARACTER_EM)))
    return text if len(text) <= most else text[: most - 1] + "…"


def _clean(text: str) -> str:
    """Escaped, without what XML cannot hold."""
    return escape(printable(text))
