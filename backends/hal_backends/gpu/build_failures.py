"""Kernels that cannot be compiled where they are first called: which one, for what device, and why.

A kernel is compiled when it is first called with arguments of a new kind, which the rehearsal does
before the server says that it is ready. The compiler's own error names a line of Triton; this one
names the implementation, and what lets the model run without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from hal.candidates import Kernel
from hal.device import DeviceSpec
from hal.errors import BindingError, KernelBuildError
from hal.ops.request import OpRequest

# Packages that only run while a kernel is compiled and loaded, never while it is launched.
_COMPILER = ("triton.compiler.", "triton.backends.")
_MOST_TEXT = 400


def naming_failures(kernel: Kernel, name: str, request: OpRequest, device: DeviceSpec) -> Kernel:
    """`kernel`, whose calls raise KernelBuildError where its code cannot be compiled or loaded.

    Any other error of a call goes on as it is. name: the candidate's.
    """

    def call(*args: Any) -> Any:
        try:
            return kernel(*args)
        except Exception as error:
            frames = [f for f in _frames(error) if _module(f).startswith(_COMPILER)]
            if not frames:
                raise
            raise KernelBuildError(
                f"{name} for {request.label}",
                f"machine code of {_kernel_of(frames)} for {device.arch} ({device.device_id})",
                _said_by(error),
                f"report it with the versions of `hal doctor`; to run meanwhile, choose another "
                f"with --use {request.label}=NAME",
            ) from error

    return call


def check_compiled(name: str, device: DeviceSpec) -> None:
    """Raises BindingError where Triton is told to interpret kernels for an accelerator: right, and
    in Python, without a word. It is for debugging, with memory of the host."""
    from triton import knobs

    if knobs.runtime.interpret and device.torch_device != "cpu":
        raise BindingError(
            name,
            f"kernels compiled for {device.arch}",
            "TRITON_INTERPRET=1: Triton runs them in Python",
            "unset TRITON_INTERPRET",
        )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """The frames that an error and its causes came through, outermost first."""
    at: BaseException | None = error
    while at is not None:
        trace = at.__traceback__
        while trace is not None:
            yield trace.tb_frame
            trace = trace.tb_next
        at = at.__cause__


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _kernel_of(frames: list[FrameType]) -> str:
    """The function that was being compiled, as the compiler's entry has it."""
    for frame in frames:
        name = getattr(frame.f_locals.get("src"), "name", None)
        if isinstance(name, str):
            return name
    return "its kernel"


def _said_by(error: BaseException) -> str:
    """The last line of the innermost error: the outer ones show where it was in the source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip(" ^") for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:_MOST_TEXT]
