"""Keeps the observer out of what a program's errors and warnings say: tracebacks without its
frames, warnings at the line that they would have without it.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

_FOLDER: Final = os.path.join(str(Path(__file__).parent), "")
_HANDING_OVER: Final = "handle_torch_function"
_REDISPATCH: Final = "redispatch_function"
_CALLED_FOR_US: Final = (os.path.join("torch", "overrides.py"), os.path.join("torch", "_ops.py"))
"""Files of torch's with a function through which the observer calls what it observes."""


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """The entries of the program and of torch. A bare `raise` after this adds none of its own.
    Torch's functions in Python that hand their call over stand there twice, as with any mode."""
    head = last = None
    is_behind_ours = False
    while traceback is not None:
        following = traceback.tb_next
        frame = traceback.tb_frame
        is_ours = _is_ours(frame) or (is_behind_ours and _is_called_for_us(frame))
        if not is_ours:
            if last is None:
                head = traceback
            else:
                last.tb_next = traceback
            last = traceback
        is_behind_ours = is_ours
        traceback = following
    if last is not None:
        last.tb_next = None
    return head


def is_ours(file: str) -> bool:
    """Whether a warning that names this file may be the program's, moved by the observer."""
    return file.startswith(_FOLDER) or file.endswith(_CALLED_FOR_US)


def named_frame(frame: FrameType | None, file: str, line: int) -> FrameType | None:
    """The frame from `frame` outwards that a warning names."""
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (file, line):
        frame = frame.f_back
    return frame


def caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from `frame` outwards that would be there without the observer; None if
    `frame` is none that the observer has put there."""
    has_ours = False
    while frame is not None and (_is_ours(frame) or _is_called_for_us(frame)):
        has_ours = has_ours or _is_ours(frame)
        frame = frame.f_back
    if frame is not None and has_ours and frame.f_code.co_name == _HANDING_OVER:
        # A function of torch's own in Python, which hands its call to the observer.
        frame = None if frame.f_back is None else frame.f_back.f_back
    return frame if has_ours else None


def warn_at(frame: FrameType, message: Any, ours: FrameType | None) -> None:
    """Warns again at the line where the program called torch, by the filters for that line.

    message: as `warnings` shows it. ours: the frame that was named instead. What was noted of that
    one is forgotten, so that the filters decide as if it had not been.
    """
    while ours is not None and ours is not frame:
        ours.f_globals.get("__warningregistry__", {}).clear()
        ours = ours.f_back
    text = str(message.message)
    getattr(warnings, "onceregistry", {}).pop((text, message.category), None)
    warnings.warn_explicit(
        message.message,
        message.category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=str(frame.f_globals.get("__name__", "<unknown>")),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
        source=message.source,
    )


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_FOLDER)


def _is_called_for_us(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.endswith(_CALLED_FOR_US) and (
        code.co_name == _REDISPATCH or code.co_name in ("__call__", "redispatch")
    )
