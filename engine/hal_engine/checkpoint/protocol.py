"""What every kind of checkpoint offers, and the error that gathers what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hal.errors import UserError

if TYPE_CHECKING:
    import torch

    from hal.ops.formats import QuantizedWeight

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, tensor name)."""

_MAX_SHOWN_PROBLEMS = 20


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be served. `problems` holds one line each: who, required, found."""

    def __init__(self, path: Path | str, problems: Sequence[str]) -> None:
        shown = list(problems[:_MAX_SHOWN_PROBLEMS])
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        super().__init__(f"checkpoint {path} is refused:\n  - " + "\n  - ".join(shown))
        self.path = str(path)
        self.problems = tuple(problems)


class Checkpoint(Protocol):
    """Weights on disk, read one tensor at a time. Names are Hugging Face's.

    `rows` and `cols` are slices with step 1 over the first and the last dimension: what a tensor
    parallel rank needs. A name that is not in `names()` is a KeyError, columns of a vector are an
    IndexError.
    """

    @property
    def path(self) -> Path: ...
    def names(self) -> tuple[str, ...]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def stored_format(self, name: str) -> str:
        """A name of hal.ops.formats, or another one (`gguf_q6_k`, `safetensors_f8_e4m3`)."""
        ...

    def size_bytes(self, name: str) -> int:
        """Bytes of the tensor in the file."""
        ...

    def read_float(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        """The tensor in the dtype it is stored in; block formats as the exact float32 values."""
        ...

    def read_blocks(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> QuantizedWeight:
        """A matrix as it is stored in groups. `cols` must be whole groups.

        CheckpointError where the tensor is not stored in a group format of hal.ops.formats.
        """
        ...

    def close(self) -> None: ...
