"""Steps of a program: calls of its outermost nn.Modules; and which steps the light mode observes.

Modules are counted by the calls of their class, wrapped when the first op within one was seen.
Hooks would be slower in every module, and dynamo would trace into them. The light mode observes
whole cycles, from one call of an outermost module to the next call of it, so that what a program
does between two steps is seen too. Always observed are the first two, because what is done again
shows in the second, and the first one with a first argument of another shape than the second's: a
decode step behind prompts. All cost counts: a further cycle is observed when everything until then
has taken less than a fixed share of the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Final

import torch

from hal.auditing.own_frames import without_ours

LIGHT_SHARE: Final = 0.02
"""What observing may add to the running time in light mode."""
_FIRST_CYCLES: Final = 2
_Shape = tuple[int, ...]
_CALLS: Final = ("__call__", "_call_impl")
"""Both: a program may have taken the bound `__call__` before, which looks `_call_impl` up."""
_set_eval_frame: Final = torch._C._dynamo.eval_frame.set_eval_frame
_UNSEEN: Final = 1.6
"""Observing takes so much more than the observer can measure of itself: torch calls it."""


class _Sampling:
    """Of one thread. owner: the module whose call began the cycle that is observed. usual: shape
    of the first argument of the second cycle. has_other: whether one of another was observed."""

    __slots__ = ("begin_ns", "has_other", "num_observed", "owner", "usual")

    def __init__(self, owner: int) -> None:
        self.begin_ns = perf_counter_ns()
        self.owner: int | None = owner
        self.num_observed = 1
        self.usual: _Shape | None = None
        self.has_other = False

    def is_new(self, shape: _Shape | None) -> bool:
        """Whether this cycle is to be observed whatever it costs."""
        if self.num_observed < _FIRST_CYCLES:
            self.usual = shape
            return True
        if self.has_other or shape == self.usual:
            return False
        self.has_other = True
        return True


class StepWatch:
    """Counts calls; in light mode it turns the observation of the calling thread on and off."""

    def __init__(
        self,
        on: Callable[[], None],
        off: Callable[[], None],
        spent_ns: Callable[[], int],
        can_change: Callable[[], bool],
        *,
        is_light: bool,
    ) -> None:
        """on, off: of the calling thread. spent_ns: what observing it has taken so far.
        can_change: whether it may be turned on and off here."""
        self._can_change = can_change
        self._on = on
        self._off = off
        self._spent_ns = spent_ns
        self._is_light = is_light
        self._local = threading.local()
        self._classes: dict[type, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self.num_calls: dict[int, int] = {}
        self.num_cycles = 0
        self.num_observed = 0

    @property
    def steps(self) -> int:
        """Calls of the outermost module that was called most often, of those that were observed."""
        return max(self.num_calls.values(), default=0)

    def found_module(self, module: Any) -> None:
        """An op ran within this outermost module: from now on its calls are counted."""
        kind = type(module)
        with self._lock:
            if kind in self._classes:
                return
            self._classes[kind] = {name: vars(kind).get(name) for name in _CALLS}
            for name in _CALLS:
                setattr(kind, name, self._counting(getattr(kind, name)))
        self._begin(module, None)  # the call that is running

    def forget(self) -> None:
        """After a fork: counts anew, with a lock that no thread of the parent holds."""
        self._lock = threading.Lock()
        self.num_calls.clear()
        self.num_cycles = self.num_observed = 0

    def restore(self) -> None:
        """The classes as they were."""
        for kind, own in self._classes.items():
            for name, original in own.items():
                if original is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, original)
        self._classes.clear()

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        local = self._local

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(local, "is_inside", False):
                try:
                    return original(module, *args, **kwargs)
                except BaseException as error:
                    error.__traceback__ = without_ours(error.__traceback__)
                    raise
            local.is_inside = True
            # Called within a compiled function, nothing that happens here is dynamo's to compile.
            callback = _set_eval_frame(None)
            try:
                self._begin(module, _first_shape(args, kwargs))
            finally:
                _set_eval_frame(callback)
            try:
                return original(module, *args, **kwargs)
            except BaseException as error:
                error.__traceback__ = without_ours(error.__traceback__)
                raise
            finally:
                local.is_inside = False

        return __call__

    def _begin(self, module: Any, shape: _Shape | None) -> None:
        key = id(module)
        if not self._is_light or self._sample(key, shape):
            self.num_calls[key] = self.num_calls.get(key, 0) + 1

    def _sample(self, key: int, shape: _Shape | None) -> bool:
        """Light mode: ends the cycle that is observed, and begins one if it can be afforded.
        Returns whether this call is observed."""
        state: _Sampling | None = getattr(self._local, "sampling", None)
        self.num_cycles += 1
        if state is None:  # what this thread did until now was observed
            self._local.sampling = _Sampling(key)
            self.num_observed += 1
            return True
        if state.owner is not None and state.owner != key:
            return True
        if not self._can_change():
            return state.owner is not None
        elapsed = perf_counter_ns() - state.begin_ns
        wants = state.is_new(shape) or self._can_afford(elapsed, state.num_observed)
        if wants:
            state.num_observed += 1
            self.num_observed += 1
            if state.owner is None:
                self._on()
        elif state.owner is not None:
            self._off()
        state.owner = key if wants else None
        return wants

    def _can_afford(self, elapsed_ns: int, num_observed: int) -> bool:
        """Whether one more cycle, as dear as the others were, stays within the share."""
        expected_ns = self._spent_ns() * (1.0 + 1.0 / num_observed)
        return expected_ns * _UNSEEN < LIGHT_SHARE * elapsed_ns


def _first_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Shape | None:
    """Of the first tensor among the arguments of a call."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return None if value.is_nested else tuple(value.shape)  # a nested one has no shape
    return None
