"""The header of a GGUF file: metadata and the tensor table, without tensor data.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
Every count and length is checked against the bytes that are left before it is believed, so a
damaged file is an error within milliseconds and never a long loop or a large allocation.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal.errors import UserError
from hal_engine.strict_json import JsonFileError, regular_file_size

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 4
_STRING_TYPE, _ARRAY_TYPE, _BOOL_TYPE = 8, 9, 7

# Metadata value types: number -> struct code.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    10: "Q",
    11: "q",
    12: "d",
}


class GGUFError(UserError, ValueError):
    """A GGUF file is damaged or of an unsupported version. Names the file, required and found."""

    def __init__(self, path: Path, what: str, required: str, found: object) -> None:
        super().__init__(f"{path}: {what}: required {required}, found {found}")
        self.path = path
        self.what = what
        self.required = required
        self.found = found


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is in row-major order (rows first): [N, K]."""

    name: str
    shape: tuple[int, ...]
    type_name: str  # ggml's name: "F32", "Q4_1", …
    offset_bytes: int  # from the start of the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


class _Cursor:
    """Reads little-endian values one after the other, never beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._data = data
        self._size = len(data)
        self.position = 0

    def require(self, count: int, size_bytes: int, what: str) -> None:
        if count * size_bytes > self._size - self.position:
            raise GGUFError(
                self.path,
                what,
                f"{count * size_bytes} bytes at offset {self.position}",
                f"{self._size - self.position} (the file is truncated or damaged)",
            )

    def unpack(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        self.require(1, layout.size, what)
        values = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return values

    def one(self, code: str, what: str) -> Any:
        return self.unpack(code, 1, what)[0]

    def text(self, what: str) -> str:
        length = self.one("Q", f"{what} (length)")
        self.require(length, 1, what)
        raw = self._data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(self.path, what, "UTF-8 text", error) from error

    def boolean(self, what: str) -> bool:
        value = self.one("B", what)
        if value > 1:
            raise GGUFError(self.path, what, "0 or 1 for a bool", value)
        return bool(value)


def read_gguf_header(path: Path) -> GGUFHeader:
    """Metadata and tensor table of `path`. Raises GGUFError."""
    try:
        size = regular_file_size(path)
    except JsonFileError as error:
        found = str(error).removeprefix(f"{path}: required a regular file, found ")
        raise GGUFError(path, "(file)", "a regular file", found) from error
    if size < 24:
        raise GGUFError(path, "(file)", "a GGUF header of 24 bytes", f"{size} bytes")
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _parse(path, data)
    except OSError as error:
        raise GGUFError(path, "(file)", "a readable file", error.strerror or error) from error


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(path, data)
    magic = bytes(cursor.unpack("B", 4, "magic"))
    if magic != MAGIC:
        raise GGUFError(path, "magic", repr(MAGIC), repr(magic))
    version = cursor.one("I", "version")
    if version not in SUPPORTED_VERSIONS:
        raise GGUFError(path, "version", "2 or 3 (little-endian)", version)
    tensor_count = cursor.one("Q", "tensor count")
    if tensor_count > MAX_TENSORS:
        raise GGUFError(path, "tensor count", f"at most {MAX_TENSORS}", tensor_count)
    metadata = _parse_metadata(cursor, cursor.one("Q", "metadata count"))
    entries = [_parse_tensor(cursor) for _ in range(tensor_count)]
    return GGUFHeader(path, metadata, _place_tensors(cursor, entries, metadata, len(data)))


def _parse_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    cursor.require(count, 12, "metadata count")  # a key length and a type are 12 bytes
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("metadata key")
        if key in metadata:
            raise GGUFError(cursor.path, key, "each metadata key once", "it twice")
        metadata[key] = _parse_value(cursor, cursor.one("I", key), key)
    return metadata


def _parse_value(cursor: _Cursor, type_number: int, key: str) -> Any:
    if type_number == _STRING_TYPE:
        return cursor.text(key)
    if type_number == _BOOL_TYPE:
        return cursor.boolean(key)
    if type_number in _SCALARS:
        return cursor.one(_SCALARS[type_number], key)
    if type_number == _ARRAY_TYPE:
        return _parse_array(cursor, key)
    raise GGUFError(cursor.path, key, "a value type in 0..12", type_number)


def _parse_array(cursor: _Cursor, key: str) -> list[Any]:
    type_number = cursor.one("I", key)
    count = cursor.one("Q", f"{key} (length)")
    read_one: Callable[[str], Any]
    if type_number == _STRING_TYPE:
        cursor.require(count, 8, key)
        read_one = cursor.text
    elif type_number == _BOOL_TYPE:
        cursor.require(count, 1, key)
        read_one = cursor.boolean
    elif type_number in _SCALARS:
        code = _SCALARS[type_number]
        cursor.require(count, struct.calcsize(f"<{code}"), key)
        return list(cursor.unpack(code, count, key))
    else:  # arrays of arrays occur in no model file and could nest without end
        raise GGUFError(cursor.path, key, "an array of scalars or strings", type_number)
    return [read_one(key) for _ in range(count)]


def _parse_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("tensor name")
    dimensions = cursor.one("I", f"{name} (dimensions)")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise GGUFError(cursor.path, name, f"1..{MAX_DIMENSIONS} dimensions", dimensions)
    shape = tuple(reversed(cursor.unpack("Q", dimensions, f"{name} (shape)")))
    if any(not 1 <= size <= 2**40 for size in shape):
        raise GGUFError(cursor.path, name, "sizes of at least 1", shape)
    type_number = cursor.one("I", f"{name} (type)")
    return name, shape, type_number, cursor.one("Q", f"{name} (offset)")


def _place_tensors(
    cursor: _Cursor,
    entries: list[tuple[str, tuple[int, ...], int, int]],
    metadata: Mapping[str, Any],
    file_size: int,
) -> dict[str, GGUFTensor]:
    path = cursor.path
    alignment = metadata.get("general.alignment", 32)
    if (
        isinstance(alignment, bool)
        or not isinstance(alignment, int)
        or alignment % 8
        or not alignment
    ):
        raise GGUFError(path, "general.alignment", "a multiple of 8", alignment)
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_number, offset in entries:
        if name in tensors:
            raise GGUFError(path, name, "each tensor once", "it twice in the tensor table")
        if offset % alignment:
            raise GGUFError(path, name, f"an offset divisible by {alignment}", offset)
        type_name, size = _sized(path, name, shape, type_number)
        start = data_start + offset
        if start + size > file_size:
            found = f"{file_size} (the file is truncated)"
            raise GGUFError(path, name, f"a file of at least {start + size} bytes", found)
        tensors[name] = GGUFTensor(name, shape, type_name, start, size)
    _refuse_overlap(path, tensors)
    return tensors


def _sized(path: Path, name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
    """The type's name and the tensor's size in bytes; rows hold whole blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise GGUFError(path, name, "a known tensor type", type_number) from error
    if shape[-1] % block:
        required = f"rows of a multiple of {block} elements ({kind.name})"
        raise GGUFError(path, name, required, shape[-1])
    elements = 1
    for size in shape:
        elements *= size
    return kind.name, elements // block * block_bytes


def _refuse_overlap(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda entry: entry.offset_bytes):
        if tensor.offset_bytes < end:
            found = f"{tensor.name} and {last} overlapping"
            raise GGUFError(path, tensor.name, "tensors with their own bytes", found)
        end, last = tensor.offset_bytes + tensor.size_bytes, tensor.name
