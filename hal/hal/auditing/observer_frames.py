"""Where in the program an op was called: its own frames, its modules, and whether it is compiled.

A frame belongs to the program unless its module is torch's, halstack's or the standard library's.
Frames are judged once per code object; a place is kept as code and instruction, and becomes file
and line when the trace is made.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from enum import IntEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from hal.auditing.document import Location
from hal.auditing.trace import Region

MAX_STACK: Final = 8
_MAX_WALK: Final = 400
_NOT_THE_PROGRAM: Final = frozenset(
    {"hal", "hal_engine", "hal_kernels", "hal_backends", "hal_capability_db"}
    | {"torch", "functorch", "torchgen", "pytest", "_pytest", "pluggy"}
)
_COMPILED_FILES: Final = ("/torch/_functorch/_aot_autograd/", "/torch/_inductor/output_code.py")
BOUNDARY: Final = "_run_audited_program"
"""Name of the function that runs a whole program: frames outside of it are nobody's."""


class Kind(IntEnum):
    """What a frame is. MODULE: torch's call of an nn.Module. COMPILED: runs compiled code.
    TRACED: code of an fx graph. DYNAMO: the door into or out of the compiler."""

    SKIPPED = 0
    PROGRAM = 1
    MODULE = 2
    COMPILED = 3
    TRACED = 4
    DYNAMO = 5
    BOUNDARY = 6


class Stack:
    """Frames of the program, innermost first: pairs of a code's id and its instruction."""

    __slots__ = ("places",)

    def __init__(self, places: tuple[int, ...]) -> None:
        self.places = places


class FrameReader:
    """Walks frames; one for a whole audit. Not locked: two threads at worst judge a code twice.

    Code objects are looked up by id, because their hash reads all of the code; they are kept here,
    so that an id stays theirs.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, Kind] = {}
        self._codes: dict[int, CodeType] = {}
        self._stacks: dict[tuple[int, ...], Stack] = {}
        self._locations: dict[tuple[int, int], Location] = {}
        self._folder = os.path.join(os.getcwd(), "")
        self._standard = _standard_folders()

    def stack(self, frame: FrameType | None) -> tuple[Stack, Region]:
        """The program's innermost frames from `frame` outwards, at most 8, and the region."""
        kinds = self._kinds
        found: list[int] = []
        region: Region = "eager"
        is_traced = False
        while frame is not None:
            code = frame.f_code
            try:
                kind = kinds[id(code)]
            except KeyError:
                kind = self._judge(frame)
            if kind:
                if kind is Kind.PROGRAM:
                    found += (id(code), frame.f_lasti)
                    if len(found) == 2 * MAX_STACK:
                        break
                elif kind is Kind.BOUNDARY:
                    break
                elif not found:
                    if kind is Kind.COMPILED or (is_traced and kind is Kind.DYNAMO):
                        region = "compiled"
                    elif kind is Kind.TRACED:
                        is_traced = True
            frame = frame.f_back
        places = tuple(found)
        stack = self._stacks.get(places)
        if stack is None:
            stack = self._stacks.setdefault(places, Stack(places))
        return stack, region

    def modules(self, frame: FrameType | None) -> list[Any]:
        """The nn.Modules that are being called around `frame`, innermost first."""
        found: list[Any] = []
        for _ in range(_MAX_WALK):
            if frame is None:
                break
            kind = self._kinds.get(id(frame.f_code))
            if kind is None:
                kind = self._judge(frame)
            if kind is Kind.BOUNDARY:
                break
            if kind is Kind.MODULE:
                module = frame.f_locals.get("self")
                if module is not None and (not found or found[-1] is not module):
                    found.append(module)
            frame = frame.f_back
        return found

    def locations(self, stack: Stack) -> tuple[Location, ...]:
        """Files and lines of a stack, innermost first."""
        places = stack.places
        return tuple(self._location(places[i], places[i + 1]) for i in range(0, len(places), 2))

    def location_of_line(self, file: str, line: int, function: str = "") -> Location:
        """A place that somebody else names."""
        return Location(file=self._shown(file), line=max(line, 0), function=function)

    def importer_location(self, frame: FrameType | None) -> Location | None:
        """The line of this very frame, if it is the program's."""
        if frame is None:
            return None
        kind = self._kinds.get(id(frame.f_code)) or self._judge(frame)
        return self._location(id(frame.f_code), frame.f_lasti) if kind is Kind.PROGRAM else None

    def program_location(self, frame: FrameType | None) -> Location | None:
        """The program's innermost line from `frame` outwards."""
        places = self.stack(frame)[0].places
        return self._location(places[0], places[1]) if places else None

    def _location(self, code_id: int, instruction: int) -> Location:
        known = self._locations.get((code_id, instruction))
        if known is None:
            code = self._codes[code_id]
            known = self.location_of_line(
                code.co_filename, _line_of(code, instruction), code.co_qualname
            )
            self._locations[code_id, instruction] = known
        return known

    def _shown(self, file: str) -> str:
        path = file if file.startswith("<") else os.path.abspath(file)
        return path.removeprefix(self._folder)

    def _judge(self, frame: FrameType) -> Kind:
        code = frame.f_code
        kind = self._kind_of(code, str(frame.f_globals.get("__name__", "")))
        self._codes[id(code)] = code
        self._kinds[id(code)] = kind
        return kind

    def _kind_of(self, code: CodeType, module: str) -> Kind:
        file = code.co_filename
        package = module.partition(".")[0]
        if code.co_name == BOUNDARY:
            return Kind.BOUNDARY
        if file.startswith("<eval_with_key>"):
            return Kind.TRACED
        if "torchinductor_" in file or any(part in file for part in _COMPILED_FILES):
            return Kind.COMPILED
        if package in _NOT_THE_PROGRAM:
            if module == "torch.nn.modules.module" and code.co_name == "_call_impl":
                return Kind.MODULE
            return Kind.DYNAMO if module == "torch._dynamo.eval_frame" else Kind.SKIPPED
        if file.startswith("<frozen "):
            return Kind.SKIPPED
        if file.startswith(self._standard) and f"{os.sep}site-packages{os.sep}" not in file:
            return Kind.SKIPPED
        # Code that the standard library generates: dataclasses, named tuples.
        is_generated = file.startswith("<") and package in sys.stdlib_module_names
        is_generated = is_generated and module != "__main__"
        return Kind.SKIPPED if is_generated else Kind.PROGRAM


def _standard_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    real = {str(Path(path).resolve()) for path in paths if path}
    plain = {path for path in paths if path}
    return tuple(os.path.join(path, "") for path in real | plain)


def _line_of(code: CodeType, instruction: int) -> int:
    """Line of the instruction; the function's first one, if the compiler left it out."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno
