"""Token ids to text, one token at a time, without ever taking a character back.

Text is released once it is certain: bytes of an incomplete UTF-8 character are held back, and so
is a tail that could still grow into a stop string. All released text together equals the decoding
of all bytes (invalid ones replaced by U+FFFD, as in WHATWG's UTF-8 decoder), cut before the stop.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
    """Of one sequence. `token_bytes` gives a token's bytes, b"" for one that adds no text."""

    __slots__ = ("_decoder", "_held", "_longest", "_stop_strings", "_token_bytes", "stopped")

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop_strings: Sequence[str] = ()
    ) -> None:
        if not all(stop_strings):
            raise ValueError("stop strings: a string that is not empty is required, found ''")
        self._token_bytes = token_bytes
        self._stop_strings = tuple(stop_strings)
        self._longest = max((len(stop) for stop in stop_strings), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False  # a stop string was found: all text is out

    def append(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that became certain with this token.

        With `may_stop` false (min_tokens not reached) no stop string is looked for, and text up to
        here takes no part in a later match.
        """
        text = self._decoder.decode(self._token_bytes(token_id))
        if not self._longest:
            return text
        if not may_stop:
            text, self._held = self._held + text, ""
            return text
        return self._release(text)

    def finish(self) -> str:
        """The text still held back, when no stop string ended the sequence."""
        if self.stopped:
            return ""
        text = self._decoder.decode(b"", True)
        if self._longest:
            text = self._release(text)
            if not self.stopped:
                text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        stop = self._find_stop(text)
        if stop is not None:
            self.stopped = True
            self._held = ""
            return text[:stop]
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find_stop(self, text: str) -> int | None:
        """Where the stop string that is complete first begins (of two, the longer).

        By its end, not its start: the cut then does not depend on where token borders are.
        """
        best: tuple[int, int] | None = None
        for stop in self._stop_strings:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _held_length(self, text: str) -> int:
        """Length of the longest tail that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0
