"""Text of a report made fit for a page: shown as what it is, however hostile, and not endless.

Names in a report come from model files, plug-ins and programs of others. HTML's own characters are
the template's concern (it escapes); here it is what an escape does not stop: characters that turn
the order of letters round or that cannot be seen, and strings of megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from markupsafe import Markup, escape

from hal.visible_text import visible_json, visible_text

LIMIT: Final = 400
"""Characters of one string that the page shows; the report inside the page has all of them."""

# Beyond what a terminal obeys: soft hyphens, joiners and spaces without width, fillers that look
# like nothing, variation selectors and tags. Two names that look alike would be told apart by
# nothing.
_UNSEEN = re.compile(
    "[\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065\u206a-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
# More marks on one letter than any script uses: they are drawn over the lines around.
_PILED_MARKS = re.compile(
    "([\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff]{3})"
    "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff]+"
)


def shown_text(text: str, limit: int = LIMIT) -> str:
    """`text` with every unfit or unseen character as its escape, cut at `limit` characters with
    a remark that says how many there were."""
    head = text[:limit]
    if head.isascii() and head.isprintable():  # most of a report; nothing to look for
        return head if len(text) <= limit else f"{head} … [{len(text):,} characters]"
    visible = _UNSEEN.sub(lambda match: ascii(match.group())[1:-1], visible_text(head))
    visible = _PILED_MARKS.sub(lambda match: f"{match.group(1)}…", visible)
    return visible if len(text) <= limit else f"{visible} … [{len(text):,} characters]"


def one_line(text: str, limit: int = 160) -> str:
    """`shown_text` without line ends: a line of a tooltip that no name can add lines to."""
    return shown_text(" ".join(text.split()), limit)


def tooltip(lines: Iterable[str]) -> Markup:
    """Lines as an attribute's value, each of them shown and escaped, in all as long as they are."""
    return escape("\n".join(map(one_line, lines)))


def embedded_json(text: str) -> str:
    """A JSON document as the content of a `<script>` element: nothing in it can end the element,
    open a comment or an entity, and it means what it meant."""
    visible = visible_json(text)
    for character in "<>&":
        visible = visible.replace(character, f"\\u{ord(character):04x}")
    return visible
