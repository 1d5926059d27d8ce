"""Sees every torch op of a step: inside bound ops which they are, outside where and how long.

An op made of others is looked into, so that the leaf is what is named, and so that a wrapper that
takes another way inside is seen.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hal.auditing.document import Location
from hal.dispatch_spy import is_tracked
from hal_engine.audit.observer import CallObserver, caller_location

# Ops that make the host wait for a value, or whose result's size depends on one.
HOST_OPS = frozenset(
    {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
)
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
_OWN_FOLDER = str(Path(__file__).parent) + os.sep


@dataclass(slots=True, kw_only=True)
class OutsideOp:
    """All calls of one torch op outside of bound ops from one line. is_product: a matrix product,
    attention, collective or gather, which has to be a bound op. is_host: it waits for a value or
    crosses devices. in_forward: within the model, not in scheduling or sampling."""

    name: str
    location: Location
    is_product: bool
    is_host: bool
    in_forward: bool
    calls: int = 0
    ns: int = 0
    flops: float = 0.0
    bytes: float = 0.0


class StepMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """A context manager around steps whose calls of bound ops `observer` watches."""

    def __init__(self, observer: CallObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.outside: dict[tuple[str, Location, bool], OutsideOp] = {}
        self.num_products = 0  # products and the like, inside and outside
        self.product_names: set[str] = set()  # of them and of what they are made of
        self.in_forward = False
        self._observer = observer
        self._names: dict[Any, str] = {}
        self._whole: set[Any] = set()  # ops that are not made of others
        self._product: str | None = None  # the one that is looked into at the moment

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Without this mode, for calls whose time counts. It must be the innermost mode."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = func.name().partition(".")[0]
        outer = self._product
        if is_tracked(name):
            self.product_names.add(name)
            if outer is None:
                self._product = name
                self.num_products += 1
        try:
            if func not in self._whole:
                with self:
                    result = func.decompose(*args, **named)
                if result is not NotImplemented:
                    if self._observer.evidence is not None:
                        self._observer.evidence.composites[name] += 1
                    return result
                self._whole.add(func)
            begin = perf_counter_ns()
            result = func(*args, **named)
            self._note(func, name, args, result, perf_counter_ns() - begin)
            return result
        finally:
            self._product = outer

    def _note(self, func: Any, name: str, args: Sequence[Any], result: Any, ns: int) -> None:
        observer = self._observer
        is_host = name in HOST_OPS or (name in _COPIES and _crosses_devices(args, result))
        if observer.evidence is not None and observer.record is not None:
            observer.evidence.ops[name] += 1
            if is_host:
                observer.record.host_ops[(name, _location())] += 1
            return
        key = (self._product or name, _location(), self.in_forward)
        seen = self.outside.get(key)
        if seen is None:
            seen = self.outside[key] = OutsideOp(
                name=key[0],
                location=key[1],
                is_product=self._product is not None,
                is_host=is_host,
                in_forward=self.in_forward,
            )
        seen.calls += 1
        seen.ns += ns
        seen.flops += _flops(func, args, result)
        seen.bytes += sum(t.nbytes for t in _tensors((args, result)))


def _flops(func: Any, args: Sequence[Any], result: Any) -> float:
    formula = flop_registry.get(func.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, out_val=result))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _crosses_devices(args: Sequence[Any], result: Any) -> bool:
    """Whether a copy has its source on one device and its target on another."""
    devices = {t.device.type for t in _tensors((args, result))}
    return len(devices - {"meta"}) > 1


def _location() -> Location:
    """The innermost frame that is neither torch's nor the audit's, relative to the working
    directory if in it."""
    found = caller_location(lambda file: file.startswith((_TORCH_FOLDER, _OWN_FOLDER)))
    return found.model_copy(update={"file": _relative(found.file)})


@functools.cache
def _relative(file: str) -> str:
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return file
