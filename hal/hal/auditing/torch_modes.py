"""Torch's two modes that observe a program: one sees the torch functions that it calls, one the ops
of the dispatcher that really run.

Neither changes an argument or a result. Three things keep them out of the program's way:
- The dispatch mode says that it ignores what the compiler does, so that compiled functions stay
  compiled; the function mode is taken off while a compiled function runs (`torch_modes_compile`).
- Below autograd (inference mode) an op made of others arrives whole; its own kernel is run with the
  mode on, so that the same parts run and are seen.
- Tensor subclasses with a dispatch of their own come first: their plain ops are seen, not theirs.
"""

from __future__ import annotations

import sys
from time import perf_counter_ns
from types import FrameType, FunctionType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hal.auditing.mode_stack import pop_dispatch, pop_function, take_off
from hal.auditing.observer import Observer
from hal.auditing.observer_facts import PLAIN_TENSORS
from hal.auditing.observer_ops import OpInfo
from hal.auditing.observer_sums import FunctionFrame, ThreadSums
from hal.auditing.own_frames import without_ours

_C: Final = torch._C
_redispatch: Final = getattr(torch.overrides, "redispatch_function", None)
_CALLING: Final = frozenset({"torch.nn.functional", "torch.functional", "torch.autograd"})
_COMPOSITE: Final = _C.DispatchKey.CompositeImplicitAutograd
_set_eval_frame: Final = _C._dynamo.eval_frame.set_eval_frame
_BELOW_PYTHON: Final = _C._dispatch_keyset_full_after(_C.DispatchKey.Python)


class ObservedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Sees every op of the dispatcher in the threads that it is pushed in."""

    supports_higher_order_operators = True

    def __init__(self, observer: Observer, functions: ObservedFunctions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._observer = observer
        self._functions = functions

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leaves `torch.compile` at work: without it compiled functions would run as Python."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would wrap the method in `torch._disable_dynamo`, which imports the compiler into
        # every program. The handler is skipped by its code instead (`torch_modes_compile`).
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        observer = self._observer
        try:
            if not observer.is_active:
                return func(*args, **kwargs)
            if types and not PLAIN_TENSORS.issuperset(types):
                return _with_subclass(func, types, args, kwargs)
            sums = observer.sums()
            if sums.is_busy:
                return func(*args, **kwargs)
            entry_ns = perf_counter_ns()
            had_functions = take_off(self._functions)
            callback = _set_eval_frame(None) if sums.is_inside_dynamo else None
            try:
                return self._observe(sums, func, args, kwargs, entry_ns)
            finally:
                if callback is not None:
                    _set_eval_frame(callback)
                if had_functions:
                    _C._push_on_torch_function_stack(self._functions)
        except BaseException as error:
            error.__traceback__ = without_ours(error.__traceback__)
            raise  # without another entry for this frame

    def _observe(self, sums: ThreadSums, func: Any, args: Any, kwargs: Any, entry_ns: int) -> Any:
        observer = self._observer
        info = observer.info(func)
        is_made_of_others = info.is_composite and not _has_nested(args)
        if is_made_of_others and not info.is_shown_whole:
            return self._run_parts(info, args, kwargs)
        try:
            before = observer.before(info, args, kwargs)
        except Exception as error:  # noqa: BLE001  # the program goes on whatever observing does
            observer.trouble(error)
            return func(*args, **kwargs)
        outer_ns, sums.inner_ns = sums.inner_ns, 0
        start_ns = perf_counter_ns()
        try:
            if info.is_run_whole or (info.is_composite and not is_made_of_others):
                result = info.run(*args, **kwargs)
            else:
                result = self._run(info, args, kwargs, before.tensors)
        except BaseException as error:
            sums.inner_ns = outer_ns + perf_counter_ns() - entry_ns
            observer.note_error(error, info.name, sys._getframe(2))
            raise
        run_ns = perf_counter_ns() - start_ns
        self_ns = run_ns - sums.inner_ns
        try:
            observer.record(
                sums, info, before, args, kwargs, result, max(self_ns, 0), sys._getframe(2)
            )
        except Exception as error:  # noqa: BLE001  # as above
            observer.trouble(error)
        total_ns = perf_counter_ns() - entry_ns
        sums.inner_ns = outer_ns + total_ns
        sums.overhead_ns += total_ns - run_ns
        return result

    def _run(self, info: OpInfo, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """The op itself; with the mode on inside an op of an extension, and inside one that is
        shown whole although it has parts."""
        if info.is_composite:
            return self._run_parts(info, args, kwargs)
        if not tensors:
            return info.run(*args, **kwargs)
        keys = _C._dispatch_keys(tensors[0])
        for tensor in tensors[1:]:
            keys = keys | _C._dispatch_keys(tensor)
        keys = keys & _BELOW_PYTHON
        _C._push_on_torch_dispatch_stack(self)
        try:
            return info.func.redispatch(keys, *args, **kwargs)
        finally:
            pop_dispatch(self)

    def _run_parts(self, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """The kernel that the dispatcher itself would run, with the mode on for its parts."""
        _C._push_on_torch_dispatch_stack(self)
        try:
            return info.func._op_dk(_COMPOSITE, *args, **kwargs)
        finally:
            pop_dispatch(self)


class ObservedFunctions(TorchFunctionMode):
    """Sees the torch functions that a program calls, with their arguments."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        observer = self._observer
        try:
            if not observer.is_active or not observer.calls.reader.name(func):
                return func(*args, **kwargs)
            sums = observer.sums()
            if sums.is_busy:
                return func(*args, **kwargs)
            return self._observe(sums, func, types, args, kwargs)
        except BaseException as error:
            error.__traceback__ = without_ours(error.__traceback__)
            raise  # without another entry for this frame

    def _observe(self, sums: ThreadSums, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        observer = self._observer
        running = observer.calls.enter(sums, func, args, kwargs)
        overhead_ns = sums.overhead_ns
        start_ns = perf_counter_ns()
        try:
            if type(func) is FunctionType:
                result = self._call(func, types, args, kwargs)
            else:
                result = func(*args, **kwargs)
        except BaseException as error:
            sums.frames.pop()
            observer.note_error(error, observer.calls.reader.name(func), sys._getframe(2))
            raise
        end_ns = perf_counter_ns()
        total_ns = end_ns - start_ns - (sums.overhead_ns - overhead_ns)
        entry = running.entry
        if entry is not None and not entry.is_attention:  # the usual: nothing else to be done
            entry.calls += 1
            entry.time_ns += max(total_ns, 0)
            sums.frames.pop()
        else:
            self._leave(sums, running, max(total_ns, 0), result, sys._getframe(2))
        sums.overhead_ns += perf_counter_ns() - end_ns
        return result

    def _call(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The function; torch functions that are Python call others, which are seen as well unless
        a subclass has its own idea of the function."""
        if _redispatch is None or not _calls_others(func) or not PLAIN_TENSORS.issuperset(types):
            return func(*args, **kwargs)
        _C._push_on_torch_function_stack(self)
        try:
            return _redispatch(func, types, args, kwargs)
        finally:
            pop_function(self)

    def _leave(
        self, sums: ThreadSums, frame: FunctionFrame, total_ns: int, result: Any, python: FrameType
    ) -> None:
        sums.is_busy = True
        had_functions = take_off(self)
        try:
            self._observer.calls.leave(sums, frame, total_ns, result, python)
        except Exception as error:  # noqa: BLE001  # the program goes on whatever observing does
            self._observer.trouble(error)
        finally:
            if had_functions:
                _C._push_on_torch_function_stack(self)
            sums.is_busy = False
            sums.frames.pop()


def _calls_others(func: Any) -> bool:
    """Functional torch in Python, and backward, in which the program's own code may run. Methods of
    tensors call themselves again, one level down."""
    return func.__module__ in _CALLING or func.__name__ == "backward"


def _has_nested(args: Any) -> bool:
    """Whether a tensor is nested: such tensors have kernels of their own for whole ops."""
    return any(isinstance(value, torch.Tensor) and value.is_nested for value in args)


def _with_subclass(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Fake tensors compute nothing: passed on. Other subclasses handle the op themselves, and the
    plain ops that they make of it come back here."""
    from torch._subclasses.fake_tensor import FakeTensor

    if any(issubclass(kind, FakeTensor) for kind in types):
        return func(*args, **kwargs)
    return NotImplemented
