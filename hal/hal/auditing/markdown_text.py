"""Text of others inside Markdown: shown as it is, whatever it holds.

No table, emphasis, link, HTML, mention of a person or reference to an issue comes of it.
"""

from __future__ import annotations

import re

from hal.visible_text import visible_text

# Entities: CommonMark never takes one for the mark that it stands for.
_MARKS = re.compile(r"[&<>`*\[\]|\\~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<!\S)[#+=-](?=\s|$)")
# What code hosts make links of: @person, #12, GH-12, addresses. An empty character parts them.
_LINKS = re.compile(r"@(?=\w)|#(?=\d)|(?<=[Gg][Hh])-(?=\d)|:(?=//)|(?<=\bwww)\.", re.IGNORECASE)
_PARTED = "&#8203;"


def markdown_text(text: str, limit: int = 0) -> str:
    """One line of plain text for a cell or a sentence; cut at `limit` characters, 0 for never."""
    line = " ".join(visible_text(text).split())
    if limit and len(line) > limit:
        line = line[: limit - 1] + "…"
    line = _MARKS.sub(lambda match: f"&#{ord(match.group())};", line)
    return _LINKS.sub(lambda match: match.group() + _PARTED, line)


def markdown_code(text: str, limit: int = 0) -> str:
    """The same as code, as far as it can be: a backtick or a bar inside makes it plain text."""
    line = " ".join(visible_text(text).split())
    if not line or "`" in line or "|" in line or (limit and len(line) > limit):
        return markdown_text(text, limit)
    return f"`{line}`"
