"""Reading a device's memory back to the host, which a captured graph cannot do, made an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

# What gives the host a value, or a size that depends on one.
_READS = (
    "item", "tolist", "cpu", "nonzero", "argwhere", "unique", "masked_select", "__bool__",
    "__int__", "__float__", "__index__", "equal", "is_nonzero",
)  # fmt: skip


@contextmanager
def no_reading_back() -> Iterator[None]:
    """Within it, reading a tensor's values is an AssertionError, but for Triton's interpreter,
    which runs kernels on the host."""

    def refused(name: str, plain: Any) -> Any:
        def read(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            assert caller.startswith("triton."), f"{caller} reads a tensor back: {name}"
            return plain(self, *args, **options)

        return read

    with ExitStack() as stack:
        for name in _READS:
            plain = getattr(torch.Tensor, name)
            stack.enter_context(patch.object(torch.Tensor, name, refused(name, plain)))
        yield
