"""Text of others inside Markdown: shown as it is, whatever it holds.

No table, emphasis, link, HTML, mention of a person or reference to an issue comes of it.
"""

from __future__ import annotations

import re

from hal.visible_text import visible_text

# Marks become entities, which CommonMark never takes for the mark that they stand for. Links are
# what code hosts make of @person, #12, GH-12 and addresses: a character of no width parts them.
_UNFIT = re.compile(
    r"(?P<link>@(?=\w)|#(?=\d)|(?<=[Gg][Hh])-(?=\d)|:(?=//)|(?<=\b[Ww]{3})\.)"
    r"|[&<>`*\[\]|\\~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<!\S)(?:[#+=-]|\d+[.)])(?=\s|$)"
)
_PARTED = "&#8203;"


def markdown_text(text: str, limit: int = 0) -> str:
    """One line of plain text for a cell or a sentence; cut at `limit` characters, 0 for never."""
    line = " ".join(visible_text(text).split())
    if limit and len(line) > limit:
        line = line[: limit - 1] + "…"
    return _UNFIT.sub(_replaced, line)


def _replaced(match: re.Match[str]) -> str:
    if match["link"]:
        return match.group() + _PARTED
    return "".join(c if c.isalnum() else f"&#{ord(c)};" for c in match.group())


def markdown_code(text: str, limit: int = 0) -> str:
    """The same as code, as far as it can be: a backtick or a bar inside makes it plain text."""
    line = " ".join(visible_text(text).split())
    if not line or "`" in line or "|" in line or (limit and len(line) > limit):
        return markdown_text(text, limit)
    return f"`{line}`"
