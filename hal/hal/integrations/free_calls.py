"""Products, gathers and attention that a module calls as functions, without a module of their own.

A router multiplies by its own parameter, an indexer by another activation, a vision tower cuts
patches by a convolution. Each such call is told by the module it is in and the lines it comes
from; a torch function mode, on only while such a module runs, leads it to its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode

_TORCH = str(torch.__path__[0])
_OWN = __file__.rpartition("/")[0]

Lines = tuple[tuple[str, int], ...]

LINEAR, PRODUCT, EINSUM = "linear", "matmul", "einsum"
ADDED, EMBEDDING, ATTENTION, CONVOLUTION = "addmm", "embedding", "attention", "convolution"

FUNCTIONS: Mapping[Any, str] = {
    functional.linear: LINEAR,
    torch.matmul: PRODUCT,
    torch.Tensor.matmul: PRODUCT,
    torch.Tensor.__matmul__: PRODUCT,
    torch.bmm: PRODUCT,
    torch.Tensor.bmm: PRODUCT,
    torch.mm: PRODUCT,
    torch.Tensor.mm: PRODUCT,
    torch.einsum: EINSUM,
    torch.addmm: ADDED,
    torch.Tensor.addmm: ADDED,
    torch.baddbmm: ADDED,
    torch.Tensor.baddbmm: ADDED,
    functional.embedding: EMBEDDING,
    functional.scaled_dot_product_attention: ATTENTION,
    functional.conv1d: CONVOLUTION,
    functional.conv2d: CONVOLUTION,
    functional.conv3d: CONVOLUTION,
    torch.conv1d: CONVOLUTION,
    torch.conv2d: CONVOLUTION,
    torch.conv3d: CONVOLUTION,
}
CONVERSIONS = frozenset(
    {
        torch.Tensor.to,
        torch.Tensor.type,
        torch.Tensor.float,
        torch.Tensor.half,
        torch.Tensor.bfloat16,
        torch.Tensor.double,
        torch.Tensor.type_as,
    }
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The innermost module of the model whose forward runs, and the lines that led to the call."""

    module: torch.nn.Module | None
    lines: Lines

    @property
    def location(self) -> str:
        """file:line of the innermost frame that is neither torch's nor ours."""
        return ":".join(map(str, self.lines[0])) if self.lines else "unknown"


def caller(names: Mapping[torch.nn.Module, str]) -> Caller:
    """Who calls the torch function that a mode is handling. names: the modules of the model."""
    lines: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _OWN)):
            lines.append((file, frame.f_lineno))
        if frame.f_code.co_name == "forward":
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module) and module in names:
                return Caller(module, tuple(lines))
        frame = frame.f_back
    return Caller(None, tuple(lines))


Handle = Callable[[str, Any, Sequence[Any], Mapping[str, Any]], Any]


class CallMode(TorchFunctionMode):
    """Shows calls of `FUNCTIONS` and `CONVERSIONS` to a handler, unless a bound op is running."""

    def __init__(self, handle: Handle, is_inside: Callable[[], bool]) -> None:
        super().__init__()
        self._handle = handle
        self._is_inside = is_inside

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = FUNCTIONS.get(func, "convert" if func in CONVERSIONS else "")
        if not kind or self._is_inside():
            return func(*args, **(kwargs or {}))
        return self._handle(kind, func, args, kwargs or {})
