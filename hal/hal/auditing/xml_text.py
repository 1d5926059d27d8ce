"""Text of others inside XML 1.0, which has no way to write most control characters."""

from __future__ import annotations

import re

# https://www.w3.org/TR/xml/#charsets: what no document may hold, not even as a reference. Marks of
# direction and Unicode's line ends are legal, and hide or break what is written all the same.
_ILLEGAL = re.compile(
    "[^\x09\x0a\x0d\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
    "|[\u200e\u200f\u061c\u2028-\u202e\u2066-\u2069]"
)


def legal_text(text: str) -> str:
    """`text` with every character that may not stand there as its escape in Python."""
    return _ILLEGAL.sub(lambda match: ascii(match.group())[1:-1], text)
