"""Torch's stacks of modes, of a thread each: ours put on and taken off, wherever they are among the
program's own.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_C: Final = torch._C


def push_modes(ops: TorchDispatchMode, functions: TorchFunctionMode) -> None:
    """Both modes on, in this thread. Not by `with`: torch's own flags for that are of the process,
    and threads that begin and end in another order would leave them wrong."""
    _C._push_on_torch_dispatch_stack(ops)
    _C._push_on_torch_function_stack(functions)


def pop_modes(ops: TorchDispatchMode, functions: TorchFunctionMode) -> None:
    """Both off again, wherever they are among the program's own."""
    take_function_mode(functions)
    above: list[Any] = []
    while _C._len_torch_dispatch_stack():
        mode = _C._get_dispatch_stack_at(_C._len_torch_dispatch_stack() - 1)
        _pop_any_dispatch(mode)
        if mode is ops:
            break
        above.append(mode)
    for mode in reversed(above):
        _C._push_on_torch_dispatch_stack(mode)


def is_observing(ops: TorchDispatchMode) -> bool:
    """Whether the calling thread has it on its stack. Torch puts whole stacks back at times, so
    that what was done last does not tell."""
    return any(_C._get_dispatch_stack_at(i) is ops for i in range(_C._len_torch_dispatch_stack()))


def can_change() -> bool:
    """Whether modes may come and go here: not within a transform, whose end puts the keys of modes
    back as they were at its begin."""
    return torch._C._functorch.peek_interpreter_stack() is None


def settle_keys(mode: TorchDispatchMode) -> None:
    """Makes torch's key of modes say whether there are any; mode: one to do it with."""
    _C._push_on_torch_dispatch_stack(mode)
    modes: list[Any] = []
    while _C._len_torch_dispatch_stack():  # the key goes off with the last one
        modes.append(_C._get_dispatch_stack_at(_C._len_torch_dispatch_stack() - 1))
        _pop_any_dispatch(modes[-1])
    for kept in reversed(modes[1:]):  # and on with the first
        _C._push_on_torch_dispatch_stack(kept)


def take_function_mode(functions: TorchFunctionMode) -> int | None:
    """Takes the function mode off; its position from the bottom, or None if it was not on."""
    size = _C._len_torch_function_stack()
    position = next((i for i in range(size) if _C._get_function_stack_at(i) is functions), None)
    if position is None:
        return None
    above = [_C._pop_torch_function_stack() for _ in range(size - position)]
    for mode in reversed(above[:-1]):
        _C._push_on_torch_function_stack(mode)
    return position


def put_function_mode(functions: TorchFunctionMode, position: int) -> None:
    """Puts the function mode back where it was."""
    size = _C._len_torch_function_stack()
    above = [_C._pop_torch_function_stack() for _ in range(max(size - position, 0))]
    for mode in (functions, *reversed(above)):
        _C._push_on_torch_function_stack(mode)


def take_off(functions: TorchFunctionMode) -> bool:
    """Takes the function mode off if it is the uppermost, so that reading a tensor's facts does not
    come back as calls of torch functions."""
    size = _C._len_torch_function_stack()
    if size and _C._get_function_stack_at(size - 1) is functions:
        _C._pop_torch_function_stack()
        return True
    return False


def pop_function(functions: TorchFunctionMode) -> None:
    if not take_off(functions):
        take_function_mode(functions)


def pop_dispatch(ops: TorchDispatchMode) -> None:
    size = _C._len_torch_dispatch_stack()
    if size and _C._get_dispatch_stack_at(size - 1) is ops:
        _C._pop_torch_dispatch_stack(None)


def _pop_any_dispatch(mode: Any) -> None:
    _C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))
