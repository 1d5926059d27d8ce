"""Text of others, made fit for a terminal: what would move the cursor, change a window's title or
turn the order of letters round is shown by its escape, as \\x1b, instead of taking effect.
"""

from __future__ import annotations

import re

# Control characters but line ends and tabs; marks of direction (they hide what is written); line
# ends of Unicode; halves of pairs, which names of files that are no UTF-8 become and which no
# stream can write.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible_text(text: str) -> str:
    """`text` with every unfit character as its escape in Python; line ends and tabs stay."""
    return _UNFIT.sub(lambda match: ascii(match.group())[1:-1], text)


def visible_json(text: str) -> str:
    """The same for a JSON document: the escapes are JSON's, so that it means what it meant."""
    return _UNFIT.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
