"""Rendering chats: messages in, text and the places where users' special-token text stands out.

What a user typed must never become a special token. A template may do anything with a message, so
the origin of a character cannot be read off its output. Instead, text in messages that looks like
a special token (or like a part of one, at its ends) is replaced by an unguessable placeholder
before rendering; special tokens are then found in the output, and placeholders are put back only
inside the stretches between them, which are tokenised as plain text.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from hal_engine.child_processes import end_child
from hal_engine.tokenizer_errors import ChatTemplateError

logger = logging.getLogger(__name__)

RENDER_DEADLINE_S = 5.0
START_DEADLINE_S = 60.0  # a busy machine may take long to start a process
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_MAX_ANSWER_BYTES = 256 * 2**20


class ChatTemplate:
    """One template, rendered in a process of its own that is ended at the deadline.

    Raises ChatTemplateError for a template that does not compile. Thread-safe; one at a time.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start()

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of one chat. Raises ChatTemplateError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            merged = {**self._variables, **variables}
            return self._ask({"variables": merged}, RENDER_DEADLINE_S)

    def close(self) -> None:
        """Ends the process. A later render starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hal_engine.chat_template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's interrupt is for the server, which drains first
        )
        try:
            self._ask({"template": self._source}, START_DEADLINE_S)
        except BaseException:  # an interrupt, too: nobody would end the process
            self._stop()
            raise

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if not end_child(process, 0.0):
            logger.error("chat template: its process %d outlives being killed", process.pid)

    def _ask(self, request: Mapping[str, Any], deadline_s: float) -> str:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ChatTemplateError("chat template: its process is not running")
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise ChatTemplateError(f"chat template: messages are not JSON: {error}") from error
        answer = _exchange(process.stdin, process.stdout, line, deadline_s)
        if answer is None:
            self._stop()
            raise ChatTemplateError(
                f"chat template: required a result within {deadline_s:g} s, found none or the end "
                "of its process; it loops, nests or grows without bound"
            )
        result = json.loads(answer)
        if "error" in result:
            raise ChatTemplateError(f"chat template: {result['error']}")
        text: str = result["text"]
        return text


def _exchange(stdin: IO[bytes], stdout: IO[bytes], line: bytes, deadline_s: float) -> bytes | None:
    """Sends `line`, returns the line that comes back, or None at the deadline or the end."""
    end = time.monotonic() + deadline_s
    os.set_blocking(stdin.fileno(), False)
    os.set_blocking(stdout.fileno(), False)
    unsent, received = memoryview(line), bytearray()
    while not received.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0 or len(received) > _MAX_ANSWER_BYTES:
            return None
        writable = [stdin] if unsent else []
        ready = select.select([stdout], writable, [], left)
        try:
            if ready[1]:
                unsent = unsent[os.write(stdin.fileno(), unsent[:65536]) :]
            if ready[0]:
                chunk = os.read(stdout.fileno(), 2**20)
                if not chunk:
                    return None
                received += chunk
        except BlockingIOError:
            continue
        except BrokenPipeError:
            return None
    return bytes(received)


class SpecialTextGuard:
    """Hides special-token text of one request's messages behind placeholders, and puts it back."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        ordered = sorted(special_tokens, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        # Parts that could become a special token together with what the template writes around.
        self._heads = {token[:n] for token in ordered for n in range(1, len(token))}
        self._tails = {token[n:] for token in ordered for n in range(1, len(token))}
        self._longest = max((len(token) for token in ordered), default=0)

    def begin(self) -> HiddenText:
        return HiddenText(self)

    def whole_matches(self, text: str) -> Iterable[re.Match[str]]:
        """Special tokens in `text`, leftmost and longest first."""
        return self._whole.finditer(text) if self._whole is not None else ()

    def hide(self, text: str, hidden: HiddenText) -> str:
        if self._whole is None or not text:
            return text
        text = self._whole.sub(lambda match: hidden.placeholder(match[0]), text)
        body = text.strip()  # templates strip
        start = text.index(body) if body else 0
        end = start + len(body)
        tail = next(
            (n for n in range(min(self._longest, len(body)), 0, -1) if body[-n:] in self._heads), 0
        )
        if tail:
            text = text[: end - tail] + hidden.placeholder(text[end - tail : end]) + text[end:]
            end -= tail
        available = min(self._longest, end - start)
        head = next(
            (n for n in range(available, 0, -1) if text[start : start + n] in self._tails), 0
        )
        if head:
            part = text[start : start + head]
            text = text[:start] + hidden.placeholder(part) + text[start + head :]
        return text


class HiddenText:
    """The placeholders of one request."""

    def __init__(self, guard: SpecialTextGuard) -> None:
        self._guard = guard
        self._nonce = secrets.token_hex(12)
        self._originals: list[str] = []
        self._pattern = re.compile(f"x{self._nonce}n([0-9]+)x")

    @property
    def is_empty(self) -> bool:
        return not self._originals

    def placeholder(self, original: str) -> str:
        """Letters and digits only: they pass through JSON and HTML escapes unchanged."""
        self._originals.append(original)
        return f"x{self._nonce}n{len(self._originals) - 1}x"

    def hide(self, value: Any) -> Any:
        """`value` with every string in it made harmless; keys of objects too."""
        if isinstance(value, str):
            return self._guard.hide(value, self)
        if isinstance(value, Mapping):
            return {
                self._hide_key(key): item if self._is_role(key, item) else self.hide(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def _is_role(self, key: Any, item: Any) -> bool:
        """Templates compare roles and may build special tokens of them; the names are fixed."""
        return key == "role" and item in ROLES

    def _hide_key(self, key: Any) -> Any:
        # Field names are what templates ask for; only a whole special token in one is hidden.
        is_special = isinstance(key, str) and any(True for _ in self._guard.whole_matches(key))
        return self._guard.hide(key, self) if is_special else key

    def restore(self, text: str) -> str:
        """Puts the originals back. Raises ChatTemplateError where the template broke one up."""
        restored = self._pattern.sub(lambda match: self._originals[int(match[1])], text)
        if self._nonce[:8] in restored.lower():
            raise ChatTemplateError(
                "chat template: a message holds the text of a special token and the template "
                "changes the letters of messages, so the two cannot be told apart; remove that text"
            )
        return restored


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content as one string, tool arguments as objects.

    OpenAI's content parts of type text are joined by line feeds; other parts (images, audio) are
    refused with ChatTemplateError.
    """
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:  # some templates write it between the brackets of a special token
        required = f"one of {', '.join(ROLES)}"
        raise ChatTemplateError(f"messages[{index}].role: required {required}, found {role!r:.80}")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _plain_content(index, message.get("content"))
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    where = f"messages[{index}].content"
    if not isinstance(content, list):
        raise ChatTemplateError(
            f"{where}: required a string or a list of parts, found {type(content).__name__}"
        )
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise ChatTemplateError(
                f"{where}[{number}]: required a part of type 'text' with a text, found {kind!r} "
                "(this model takes text only)"
            )
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: Any) -> Any:
    """A tool call with its arguments parsed: OpenAI sends a JSON string, templates want objects."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # not JSON: the template shows the string as it is
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
