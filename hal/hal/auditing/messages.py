"""Warnings and log records of a program while it is observed; the program sees them as before."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final

from hal.auditing.document import Location
from hal.auditing.observer_frames import FrameReader
from hal.auditing.own_frames import caller, is_ours, named_frame, warn_at
from hal.auditing.trace import Message

_MAX_MESSAGES: Final = 500
_MAX_TEXT: Final = 2000


class MessageWatch:
    """`warnings` that are shown, and records of WARNING and above that reach a handler."""

    def __init__(self, frames: FrameReader) -> None:
        self.num_dropped = 0
        self._frames = frames
        self._found: dict[Message, None] = {}
        self._local = threading.local()
        self._show: Any = None
        self._handle: Callable[[logging.Logger, logging.LogRecord], None] | None = None

    @property
    def messages(self) -> list[Message]:
        """In the order of their first appearance."""
        return list(self._found)

    def forget(self) -> None:
        """After a fork: the messages until now are the parent's."""
        self._found.clear()
        self.num_dropped = 0

    def install(self) -> None:
        """Before `warnings` shows and a logger handles. Not `showwarning`: a program that records
        warnings replaces it."""
        show = getattr(warnings, "_showwarnmsg", None)
        if show is not None:
            self._show = show
            warnings._showwarnmsg = self._warned  # type: ignore[attr-defined]
        handle = logging.Logger.callHandlers
        self._handle = handle

        def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                self._logged(record)
            handle(logger, record)

        logging.Logger.callHandlers = call_handlers  # type: ignore[assignment, method-assign]

    def restore(self) -> None:
        """Everything as it was."""
        if self._show is not None:
            warnings._showwarnmsg = self._show  # type: ignore[attr-defined]
            self._show = None
        if self._handle is not None:
            logging.Logger.callHandlers = self._handle  # type: ignore[assignment, method-assign]
            self._handle = None

    def _warned(self, message: Any) -> None:
        if is_ours(str(message.filename)):
            ours = named_frame(sys._getframe(1), str(message.filename), int(message.lineno or 0))
            program = caller(ours)
            if program is not None and not getattr(self._local, "is_moving", False):
                self._local.is_moving = True
                try:
                    warn_at(program, message, ours)  # comes back here with its own place
                finally:
                    self._local.is_moving = False
                return
        place = self._frames.location_of_line(str(message.filename), int(message.lineno or 0))
        self._note(str(message.message), message.category.__name__, place)
        self._show(message)

    def _logged(self, record: logging.LogRecord) -> None:
        if getattr(self._local, "is_busy", False):
            return  # a record made while a record is written
        self._local.is_busy = True
        try:
            text = record.getMessage()
        except (TypeError, ValueError, KeyError):
            text = str(record.msg)  # arguments that do not fit: the handler complains about them
        finally:
            self._local.is_busy = False
        place = self._frames.program_location(sys._getframe(2))
        if place is None:
            place = self._frames.location_of_line(record.pathname, record.lineno, record.funcName)
        self._note(text, f"{record.levelname} {record.name}", place)

    def _note(self, text: str, category: str, location: Location | None) -> None:
        message = Message(text=text[:_MAX_TEXT], category=category, location=location)
        if message in self._found or len(self._found) < _MAX_MESSAGES:
            self._found[message] = None
        else:
            self.num_dropped += 1
