"""What implementations of an op were measured to take on a device, by shape class: how a range of
tokens in a plan comes from measurement.

`hal kernels tune --measure` times every candidate that could serve a class, once the kernel's
configurations are tried, and keeps the times beside them, in a file per device and op, schema
"halstack.candidate-times/1". A time holds for the source of our kernels and the versions of the
libraries that it was measured with.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hal.device import DeviceSpec
from hal.errors import SettingsError
from hal.ops.request import OpRequest, TokenRange
from hal.text_files import write_user_text
from hal_kernels.located_documents import modified_at, read_document
from hal_kernels.tuning.shapes import ShapeClass
from hal_kernels.tuning.store import code_hash, configuration_path, device_key, user_store
from hal_kernels.tuning.tunable_kernels import classes_of

_REMEDY = "correct the file, or move it away: `hal kernels tune --measure` begins a new one"
LIBRARIES = ("torch", "triton")
"""Whose versions a time holds for."""

Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class CandidateTime(_Part):
    """Microseconds of one call by a candidate; none where it failed, and then `error` says why."""

    candidate: Name
    us: Annotated[float, Field(gt=0, le=1e12)] | None = None
    error: Annotated[str, Field(max_length=400)] = ""


class TimesEntry(_Part):
    """Times of one class of calls. kernel, shape: the class, as configurations are kept for it.
    code: 16 digits over that kernel's source. versions: of libraries at the time."""

    kernel: Annotated[str, Field(pattern=r"^[a-z0-9_.]{3,80}$")]
    shape: Annotated[str, Field(min_length=1, max_length=400)]
    code: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    versions: dict[str, Annotated[str, Field(max_length=60)]]
    made: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    times: list[CandidateTime]

    @model_validator(mode="after")
    def _judge(self) -> TimesEntry:
        names = [time.candidate for time in self.times]
        if len(set(names)) != len(names):
            raise ValueError("required each candidate once")
        return self


class TimesFile(_Part):
    """device: id of its profile in the database, or its name. arch: as Triton's targets."""

    schema_: Literal["halstack.candidate-times/1"] = Field(
        alias="schema", default="halstack.candidate-times/1"
    )
    device: Annotated[str, Field(min_length=1, max_length=200)]
    arch: Annotated[str, Field(pattern=r"^[a-z0-9_]{3,20}$")]
    op: Annotated[str, Field(pattern=r"^[a-z0-9_.]{3,80}$")]
    entries: list[TimesEntry] = Field(default_factory=list)

    @model_validator(mode="after")
    def _judge(self) -> TimesFile:
        keys = [(entry.kernel, entry.shape) for entry in self.entries]
        if len(set(keys)) != len(keys):
            raise ValueError("required each shape class once")
        return self


def times_path(store: Path, key: str, op: str) -> Path:
    """The file of a device and an op."""
    return configuration_path(store, key, f"times-of-{op}")


def save_times(store: Path, key: str, arch: str, op: str, entry: TimesEntry) -> Path:
    """Keeps an entry in place of an older one of its class.

    Raises SettingsError for a file that is not right or cannot be written.
    """
    path = times_path(store, key, op)
    found = _load(path) or TimesFile(device=key, arch=arch, op=op)
    if (found.device, found.arch, found.op) != (key, arch, op):
        raise SettingsError(
            f"file {path}", f"times of {op} on {key} ({arch})",
            f"{found.op} on {found.device} ({found.arch})", _REMEDY,
        )  # fmt: skip
    others = [e for e in found.entries if (e.kernel, e.shape) != (entry.kernel, entry.shape)]
    document = found.model_copy(update={"entries": [*others, entry]})
    text = json.dumps(document.model_dump(by_alias=True), indent=1, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_user_text(path, text + "\n")
    except OSError as error:
        raise SettingsError(
            f"file {path}", "a place that can be written",
            f"{type(error).__name__}: {error.strerror or error}", "free or permit it",
        ) from error  # fmt: skip
    return path


def measured_time(
    candidate: str, op: str, request: OpRequest, tokens: int, device: DeviceSpec
) -> tuple[float, str] | None:
    """Microseconds of one call at a number of tokens, and when they were measured; None where
    nothing that still holds was. Raises SettingsError for a file that is not right."""
    found = _load(times_path(user_store(), device_key(device), op))
    if found is None or found.arch != device.arch:
        return None
    known = class_of(op, request.with_tokens(TokenRange(tokens, tokens)), device)
    for entry in found.entries if known is not None else ():
        if (entry.kernel, entry.shape) == known and _is_current(entry, device):
            us = next((t.us for t in entry.times if t.candidate == candidate), None)
            return None if us is None else (us, entry.made)
    return None


def class_of(op: str, request: Any, device: DeviceSpec) -> tuple[str, str] | None:
    """Kernel and class that the times of a request are kept under: of an op that launches several
    kernels those of the first."""
    known: tuple[tuple[str, ShapeClass], ...] = classes_of(op, request, device)
    return (known[0][0], str(known[0][1])) if known else None


def versions_of(device: DeviceSpec) -> dict[str, str]:
    """Of the libraries beside a device, of which a time depends."""
    return {name: device.software[name] for name in LIBRARIES if device.software.get(name)}


def _is_current(entry: TimesEntry, device: DeviceSpec) -> bool:
    """Whether our kernel and the libraries are those that were measured; of a library that nothing
    is known of here it is taken so."""
    beside: Mapping[str, str] = versions_of(device)
    same = all(beside.get(name, version) == version for name, version in entry.versions.items())
    return same and entry.code == code_hash(entry.kernel)


def _load(path: Path) -> TimesFile | None:
    modified = modified_at(path, _REMEDY)
    return None if modified is None else _read(path, modified)


@functools.lru_cache(maxsize=64)
def _read(path: Path, modified: int) -> TimesFile:
    return read_document(TimesFile, path, _REMEDY)
