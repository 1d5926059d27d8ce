"""Checkpoints in one GGUF file: float tensors, and blocks of 32 kept as they are stored.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0,
block_q4_1, block_q8_0). Files of the architecture "llama" hold the rows of the query and key
projections interleaved for a rotation of neighbouring pairs; they are put back here into the order
of a rotation of halves, which is what every model of this engine computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hal_engine.checkpoint.gguf_header import GGUFError, GGUFTensor, read_gguf_header
from hal_engine.checkpoint.gguf_names import huggingface_name, stored_format
from hal_engine.checkpoint.protocol import CheckpointError

if TYPE_CHECKING:
    import torch

    from hal.ops.formats import QuantizedWeight

_GROUP = 32
_FLOAT_TYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_HEADS_KEY = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


class GGUFCheckpoint:
    """The tensors of `path`. Raises CheckpointError for a damaged file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            header = read_gguf_header(path)
        except GGUFError as error:
            raise CheckpointError(path, [str(error)]) from error
        self._tensors: dict[str, GGUFTensor] = {
            huggingface_name(tensor.name) or tensor.name: tensor
            for tensor in header.tensors.values()
        }
        self._heads_of_rows = _interleaved_heads(header.metadata)
        self._bytes: np.ndarray[Any, Any] = np.memmap(path, dtype=np.uint8, mode="r")

    @property
    def path(self) -> Path:
        return self._path

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored_format(self, name: str) -> str:
        return stored_format(self._tensors[name].type_name)

    def size_bytes(self, name: str) -> int:
        return self._tensors[name].size_bytes

    def read_float(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        import torch

        tensor = self._tensors[name]
        if cols is not None and len(tensor.shape) == 1:
            raise IndexError(f"{self._path}: {name}: columns of a vector were asked for")
        if tensor.type_name in _BLOCK_BYTES:
            values = self.read_blocks(name, rows=rows).dequantize()
            return values if cols is None else values[:, cols].contiguous()
        if tensor.type_name in _FLOAT_TYPES:
            stored = self._rows(tensor, rows).view(_FLOAT_TYPES[tensor.type_name])
            values = torch.from_numpy(stored[..., cols] if cols is not None else stored)
            if tensor.type_name == "BF16":
                values = values.view(torch.bfloat16)
        else:
            values = torch.from_numpy(_dequantize(self._rows(tensor, rows), tensor.type_name))
            values = values[..., cols] if cols is not None else values
        return (values[:, 0] if len(tensor.shape) == 1 else values).contiguous()

    def read_blocks(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> QuantizedWeight:
        import torch

        from hal.ops.formats import FORMATS, QuantizedWeight

        tensor = self._tensors[name]
        kind = tensor.type_name
        if kind not in _BLOCK_BYTES:
            required = f"one of {', '.join(_BLOCK_BYTES)}"
            raise CheckpointError(self._path, [f"{name}: required {required}, found {kind}"])
        raw = self._rows(tensor, rows)
        blocks = torch.from_numpy(raw.reshape(raw.shape[0], -1, _BLOCK_BYTES[kind]))
        if cols is not None:
            blocks = blocks[:, self._whole_groups(name, tensor, cols)]
        scale = blocks[:, :, 0:2].contiguous().view(torch.float16)[:, :, 0]
        minimum = None
        if kind == "Q4_1":
            minimum = blocks[:, :, 2:4].contiguous().view(torch.float16)[:, :, 0].contiguous()
        if kind == "Q8_0":
            data = blocks[:, :, 2:].contiguous().view(torch.int8).reshape(raw.shape[0], -1)
        else:
            data = _neighbouring_nibbles(blocks[:, :, 4 if kind == "Q4_1" else 2 :])
        return QuantizedWeight(
            format=FORMATS[stored_format(kind)],
            data=data,
            scale=scale.contiguous(),
            minimum=minimum,
        )

    def close(self) -> None:
        """Drops the mapping. Tensors that were read hold copies."""
        self._bytes = np.empty(0, dtype=np.uint8)

    def _rows(self, tensor: GGUFTensor, rows: slice | None) -> np.ndarray[Any, Any]:
        """A copy of the rows' bytes [rows, bytes per row], in Hugging Face's row order."""
        count = tensor.shape[0]
        end = tensor.offset_bytes + tensor.size_bytes
        stored = self._bytes[tensor.offset_bytes : end].reshape(count, -1)
        heads = self._heads_of_rows.get(_kind_of(tensor.name))
        if heads is None:
            return np.array(stored[rows] if rows is not None else stored)
        order = _halves_order(count, heads)
        return np.array(stored[order[rows] if rows is not None else order])

    def _whole_groups(self, name: str, tensor: GGUFTensor, cols: slice) -> slice:
        start, stop, step = cols.indices(tensor.shape[-1])
        if step != 1 or start % _GROUP or stop % _GROUP:
            required = f"columns in whole groups of {_GROUP}"
            raise CheckpointError(self._path, [f"{name}: required {required}, found {cols}"])
        return slice(start // _GROUP, stop // _GROUP)


def _kind_of(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    return parts[2] if len(parts) == 4 else ""


def _interleaved_heads(metadata: Any) -> dict[str, int]:
    """`attn_q`, `attn_k` -> number of heads, for architectures whose rows are interleaved."""
    if metadata.get("general.architecture") != "llama":
        return {}
    heads = metadata.get("llama.attention.head_count", 0)
    counts = {kind: metadata.get(f"llama.{key}", heads) for kind, key in _HEADS_KEY.items()}
    return {kind: count for kind, count in counts.items() if isinstance(count, int) and count > 0}


def _halves_order(rows: int, heads: int) -> np.ndarray[Any, Any]:
    """Index of the stored row for each row: within a head, stored pairs (2i, 2i+1) are the rows
    i and i + head_dim/2."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _neighbouring_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[N, blocks, 16] with column i in low and column i+16 in high nibbles -> uint8 [N, K/2] with
    columns 2j and 2j+1 in byte j."""
    import torch

    values = torch.cat((packed & 0xF, packed >> 4), dim=2)
    paired = values[:, :, 0::2] | (values[:, :, 1::2] << 4)
    return paired.reshape(packed.shape[0], -1).contiguous()


def _dequantize(raw: np.ndarray[Any, Any], type_name: str) -> np.ndarray[Any, Any]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values: np.ndarray[Any, Any] = dequantize(raw, GGMLQuantizationType[type_name])
    return values
