"""Checkpoints in safetensors files: one file, or shards with an index.

Format: https://github.com/huggingface/safetensors#format. Files are memory-mapped; reading a slice
touches its pages only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from safetensors import SafetensorError, safe_open

from hal_engine.checkpoint.protocol import CheckpointError
from hal_engine.strict_json import JsonFileError, parse_json_object, read_json_object
from hal_engine.strict_json import regular_file_size as file_size

if TYPE_CHECKING:
    import torch

    from hal.ops.formats import QuantizedWeight

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_FORMATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    size_bytes: int


class SafetensorsCheckpoint:
    """The tensors of a Hugging Face folder. Raises CheckpointError with everything that is wrong
    with its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries, problems = _collect(folder)
        self._open: dict[Path, Any] = {}
        for file in sorted({entry.file for entry in self._entries.values()}):
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                problems.append(f"{file.name}: required a whole safetensors file, found: {error}")
        if problems:
            self.close()
            raise CheckpointError(folder, problems)

    @property
    def path(self) -> Path:
        return self._folder

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def stored_format(self, name: str) -> str:
        dtype = self._entries[name].dtype
        return _FORMATS.get(dtype, f"safetensors_{dtype.lower()}")

    def size_bytes(self, name: str) -> int:
        return self._entries[name].size_bytes

    def read_float(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> torch.Tensor:
        entry = self._entries[name]
        source = self._open[entry.file]
        tensor: torch.Tensor
        try:
            if rows is None and cols is None:
                tensor = source.get_tensor(name)
            elif cols is None:
                tensor = source.get_slice(name)[rows]
            else:
                tensor = source.get_slice(name)[rows or slice(None), cols or slice(None)]
        except SafetensorError as error:
            raise CheckpointError(self._folder, [f"{entry.file.name}: {name}: {error}"]) from error
        return tensor

    def read_blocks(
        self, name: str, *, rows: slice | None = None, cols: slice | None = None
    ) -> QuantizedWeight:
        found = self.stored_format(name)
        raise CheckpointError(
            self._folder, [f"{name}: required a group-quantised tensor, found {found}"]
        )

    def close(self) -> None:
        """Drops the mappings; tensors that were read keep theirs."""
        self._open.clear()


def _collect(folder: Path) -> tuple[dict[str, _Entry], list[str]]:
    """All tensors of the folder, and what is wrong with its files."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    has_single, has_index = _is_there(single), _is_there(index)
    if has_single and has_index:
        return {}, [
            f"required one of {SINGLE_FILE} and {INDEX_FILE}, found both; remove the stale one"
        ]
    if has_index:
        return _collect_shards(folder, index)
    if has_single:
        try:
            return read_header(single), []
        except JsonFileError as error:
            return {}, [str(error)]
    return {}, [_nothing_found(folder)]


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()  # a broken link is there, and broken


def _nothing_found(folder: Path) -> str:
    pickles = sorted({file.name for pattern in _PICKLE_PATTERNS for file in folder.glob(pattern)})
    if pickles:
        return (
            f"required safetensors, found pickle files ({', '.join(pickles[:3])}), which can run "
            "code when loaded; convert them: transformers' save_pretrained writes safetensors"
        )
    return f"required {SINGLE_FILE} or {INDEX_FILE}, found neither in {folder}"


def _collect_shards(folder: Path, index: Path) -> tuple[dict[str, _Entry], list[str]]:
    try:
        weight_map = read_json_object(index).get("weight_map")
    except JsonFileError as error:
        return {}, [str(error)]
    if not isinstance(weight_map, dict) or not weight_map:
        return {}, [f"{index.name}: weight_map: required an object, found {weight_map!r:.80}"]
    problems = [
        f"{index.name}: {name}: required a file name in this folder, found {file!r:.120}"
        for name, file in weight_map.items()
        if not _is_plain_name(file)
    ]
    if problems:
        return {}, problems
    entries: dict[str, _Entry] = {}
    for file_name in sorted(set(weight_map.values())):
        try:
            header = read_header(folder / file_name)
        except JsonFileError as error:
            problems.append(str(error))
            continue
        problems += _merge(entries, header, weight_map, file_name)
    return entries, problems


def _is_plain_name(file: object) -> bool:
    """A name inside the folder: an index must not reach for files elsewhere."""
    return isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")


def _merge(
    entries: dict[str, _Entry], header: Mapping[str, _Entry], weight_map: Any, file_name: str
) -> list[str]:
    problems = []
    for name, entry in header.items():
        if name in entries:
            found = f"{entries[name].file.name} and {file_name}"
            problems.append(f"{name}: required in one shard, found in {found}")
        elif name not in weight_map:
            problems.append(f"{name}: required in {INDEX_FILE}, found only in {file_name}")
        else:
            entries[name] = entry
    for name, file in weight_map.items():
        if file == file_name and name not in header:
            problems.append(f"{name}: required in {file_name} as indexed, found nothing")
    return problems


def read_header(file: Path) -> dict[str, _Entry]:
    """Names, shapes and dtypes in a safetensors file; JsonFileError where the header is damaged.

    Offsets against the file's size are checked by the safetensors library when it opens the file;
    what it does not see is a name that is there twice.
    """
    size = file_size(file)
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise JsonFileError(
                    f"{file}: required a header within the file's {size} bytes, found one of "
                    f"{length} (the file is truncated or damaged)"
                )
            raw = stream.read(length)
    except OSError as error:
        raise JsonFileError(f"{file}: cannot be read: {error.strerror or error}") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonFileError(f"{file}: required a UTF-8 header, found: {error}") from error
    header = parse_json_object(file, text)
    header.pop("__metadata__", None)
    return {name: _entry(file, name, value) for name, value in header.items()}


def _entry(file: Path, name: str, value: Any) -> _Entry:
    problem = (
        f"{file}: {name}: required dtype, shape and data_offsets, found {json.dumps(value):.120}"
    )
    if not isinstance(value, dict):
        raise JsonFileError(problem)
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets)):
        raise JsonFileError(problem)
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise JsonFileError(problem)
    return _Entry(file, tuple(shape), dtype, offsets[1] - offsets[0])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
