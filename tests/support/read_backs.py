"""Reading a device's memory back to the host, which a captured graph cannot do, made an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

_ATEN = torch.ops.aten
# PyTorch's own word for what gives the host a value, or a size that depends on values.
_READING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Without a tag, though they count what is not zero.
_READING = (_ATEN._to_sparse.default, _ATEN._to_sparse.sparse_dim)
# With tags, but only a mask of theirs or a size that is missing is read.
_INDEX, _REPEAT = _ATEN.index.Tensor, _ATEN.repeat_interleave.Tensor
_INDEX_PUT = (_ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)
# Of a tensor that is on the host, as those are that stand for a device's, these read memory without
# a kernel.
_READING_METHODS = frozenset({"cpu", "numpy", "tolist", "__array__", "__dlpack__"})


class _Launches:
    """How many launches of Triton's interpreter, which runs kernels on the host, are running."""

    def __init__(self) -> None:
        self.running = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        plain = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **options: Any) -> Any:
            if callable(executor.grid):  # the host computes it, on a device too
                executor.grid = self._outside(executor.grid)
            self.running += 1
            try:
                return plain(executor, *args, **options)
            finally:
                self.running -= 1

        with patch.object(GridExecutor, "__call__", launch):
            yield

    def _outside(self, grid: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def computed(args: Any) -> Any:
            before, self.running = self.running, 0
            try:
                return grid(args)
            finally:
                self.running = before

        return computed


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_filled(indices: Sequence[torch.Tensor | None], value: torch.Tensor) -> bool:
    """A number for one mask is filled in where the mask is, without counting."""
    given = [index for index in indices if index is not None]
    return len(given) == 1 and value.numel() == 1 and value.device.type == "cpu"


def _reads(func: Any, args: Sequence[Any], options: dict[str, Any]) -> bool:
    if func is _INDEX:
        return _has_mask(args[1])
    if func in _INDEX_PUT:
        return _has_mask(args[1]) and not _is_filled(args[1], args[2])
    if func is _REPEAT:
        return options.get("output_size") is None
    return func in _READING or any(tag in func.tags for tag in _READING_TAGS)


def _comes_to_the_host(func: Any, args: Sequence[Any], options: dict[str, Any]) -> bool:
    if func is _ATEN._to_copy.default:
        target = options.get("device")
        return target is not None and target.type == "cpu" and args[0].device.type != "cpu"
    if func in (_ATEN.copy_.default, _ATEN.copy.default):
        return bool(args[0].device.type == "cpu" and args[1].device.type != "cpu")
    return False


class _Kernels(TorchDispatchMode):
    def __init__(self, launches: _Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if not self._launches.running:
            is_read = _reads(func, args, options) or _comes_to_the_host(func, args, options)
            assert not is_read, f"reads a tensor back: {func}"
        return func(*args, **options)


class _Methods(TorchFunctionMode):
    def __init__(self, launches: _Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._launches.running:
            # A device that is named as text, not that of another tensor.
            is_moved = name == "to" and "cpu" in [
                value for value in (*args[1:], options.get("device")) if isinstance(value, str)
            ]
            is_read = is_moved or name in _READING_METHODS
            assert not is_read, f"reads a tensor back: {name}"
        return func(*args, **options)


@contextmanager
def no_reading_back() -> Iterator[None]:
    """Within it, reading a tensor's values is an AssertionError, but for Triton's interpreter,
    which runs kernels on the host.

    Not seen: what reads the memory of a tensor on the host by its address or through its storage.
    """
    launches = _Launches()
    with launches.counted(), _Methods(launches), _Kernels(launches):
        yield
