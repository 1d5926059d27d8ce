"""Options that several commands share: declared once, as the parameters of a reader.

A reader is a function whose parameters are options or arguments as typer has them, and which makes
one value of theirs. A command names the value; typer sees the reader's parameters in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def takes(
    **readers: Callable[..., Any],
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorates a command whose parameters of these names are each made by a reader.

    Readers run in the order of the command's parameters, before the command.

    Raises:
        TypeError: a reader of no parameter, or two parameters of one name.
    """

    def decorate(command: Callable[..., _Result]) -> Callable[..., _Result]:
        own = inspect.signature(command, eval_str=True).parameters
        if unknown := readers.keys() - own.keys():
            raise TypeError(f"{command.__name__} has no parameter {', '.join(sorted(unknown))}")
        parts = {name: inspect.signature(read, eval_str=True) for name, read in readers.items()}
        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            found = parts[name].parameters.values() if name in parts else (parameter,)
            parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in found]

        def run(**given: Any) -> _Result:
            for name in (name for name in own if name in readers):
                read = {key: given.pop(key) for key in parts[name].parameters}
                given[name] = readers[name](**read)
            return command(**given)

        names = [parameter.name for parameter in parameters]
        if len(set(names)) < len(names):
            raise TypeError(f"{command.__name__} has two parameters of one name: {names}")
        run.__name__, run.__doc__, run.__module__ = (
            command.__name__,
            command.__doc__,
            command.__module__,
        )
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
