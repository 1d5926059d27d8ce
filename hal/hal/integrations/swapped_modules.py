"""Modules whose class is exchanged for one of the same name that calls a place, and back again.

The exchanged class is a subclass, so `isinstance`, parameters, state_dict and hooks are as before;
a copy or a pickle of such a module is refused, for it would call the original's weights.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from hal.errors import RoutingError
from hal.integrations.call_places import EmbeddingPlace, LinearPlace

_PLACE, _MODE = "_hal_place", "_hal_mode"


class RoutedModule:
    """Marks an exchanged class; nothing of it may leave the model that was routed."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _no_copy(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _no_copy(self)


def _no_copy(module: object) -> RoutingError:
    return RoutingError(
        f"copy of a routed {type(module).__name__}",
        "a module of its own",
        "one whose calls belong to the model that was routed",
        "copy or save before routing, or undo() first; state_dict() and save_pretrained() work",
    )


def _forward_place(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    place: LinearPlace | EmbeddingPlace = self.__dict__[_PLACE]
    x = args[0] if args else kwargs["input"]
    if self.training:
        raise RoutingError(
            place.name, "a model in evaluation mode", "training mode", "model.eval(), or undo()"
        )
    return place.call(x)


def swap_place(module: torch.nn.Module, place: LinearPlace | EmbeddingPlace) -> Callable[[], None]:
    """The module calls its place from now on. Returns what undoes it."""
    return _swap(module, _PLACE, place, _forward_place)


def guard(module: torch.nn.Module, mode: Any) -> Callable[[], None]:
    """The module's forward runs under a torch function mode. Returns what undoes it."""
    before = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__[_MODE]:
            return before.forward(self, *args, **kwargs)

    return _swap(module, _MODE, mode, forward)


def swap_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """forward(module, *args, **kwargs) is the module's from now on. Returns what undoes it."""
    return _swap(module, _PLACE, None, forward)


def _swap(
    module: torch.nn.Module, key: str, value: object, forward: Callable[..., Any]
) -> Callable[[], None]:
    before = type(module)
    module.__dict__[key] = value
    try:
        module.__class__ = _routed_class(before, forward)
    except TypeError as error:
        del module.__dict__[key]
        raise RoutingError(
            f"module of class {before.__qualname__}",
            "a class that can be exchanged for a subclass",
            str(error),
            "leave it out of the model, or name its calls in allow",
        ) from error

    def undo() -> None:
        module.__class__ = before
        module.__dict__.pop(key, None)

    return undo


def _routed_class(before: type, forward: Callable[..., Any]) -> type:
    wrapped = functools.wraps(before.forward)(_fresh(forward))  # type: ignore[attr-defined]  # of modules
    wrapped.__signature__ = inspect.signature(before.forward)  # type: ignore[attr-defined]  # as above
    names = {
        "forward": wrapped,
        "__module__": before.__module__,
        "__qualname__": before.__qualname__,
        "__doc__": before.__doc__,
    }
    return type(before.__name__, (RoutedModule, before), names)


def _fresh(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own for each class, since the class's signature is written to it."""

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return called
