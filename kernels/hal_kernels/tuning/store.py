"""Where configurations are kept, and which of them holds: a user's before this package's, measured
before modelled, and only those of the kernel's present source and of the Triton that is installed.

A user's are below $XDG_DATA_HOME/halstack/kernel_configurations (~/.local/share where it is not
set), in a folder per device and a file per kernel.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hal.device import DeviceSpec
from hal.errors import SettingsError
from hal.text_files import write_user_text
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.located_documents import modified_at, read_document
from hal_kernels.tuning.configuration_files import (
    Basis,
    ConfigurationFile,
    ShapeEntry,
    Trial,
)
from hal_kernels.tuning.shapes import ShapeClass, rows_class

PACKAGED = Path(__file__).resolve().parent.parent / "configurations"
_REMEDY = (
    "correct the file, or move it away: `hal kernels tune` begins a new one and never writes over "
    "a file that it cannot read"
)
_BASES: tuple[Basis, ...] = ("measured", "modelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedConfiguration:
    """What is kept for a shape class. loss: of its time, what the fastest that was tried saves."""

    basis: Basis
    trial: Trial
    made: str
    path: Path
    loss: float = 0.0


@dataclass(slots=True)
class Forced:
    """form: of the classes that it is for, "" for all; a call may launch a kernel in several.
    is_launched: whether the kernel asked for it, so whether it is what was measured."""

    kernel: str
    configuration: Mapping[str, int]
    form: str = ""
    is_launched: bool = False


class TunedRows:
    """The configurations of a call site by number of rows: one look-up a call."""

    __slots__ = ("_by_class", "_forced")

    def __init__(
        self, by_class: Mapping[int, Mapping[str, int]], forced: Forced | None = None
    ) -> None:
        self._by_class, self._forced = by_class, forced

    @property
    def is_forced(self) -> bool:
        """Whether configurations are being measured, and nothing else may be launched."""
        return self._forced is not None

    def covers(self, rows: int) -> bool:
        """Whether a configuration is kept for so many rows."""
        return self._forced is not None or rows_class(rows) in self._by_class

    def choose(self, rows: int, default: Mapping[str, int]) -> dict[str, int]:
        """The configuration for so many rows, `default` where none is kept.

        Raises SettingsError for one that has other constants than the kernel takes.
        """
        if self._forced is not None:
            self._forced.is_launched = True
            return dict(self._forced.configuration)
        found = self._by_class.get(rows_class(rows)) if self._by_class else None
        if found is None:
            return dict(default)
        if found.keys() != default.keys():
            raise SettingsError(
                "kept configuration of a kernel",
                f"the constants {', '.join(sorted(default))}",
                ", ".join(sorted(found)),
                "tune again: hal kernels tune",
            )
        return dict(found)


_NONE = TunedRows({})
_FORCED: ContextVar[Forced | None] = ContextVar("forced", default=None)


@contextmanager
def forced_configuration(
    kernel: str, configuration: Mapping[str, int], form: str = ""
) -> Iterator[Forced]:
    """What is bound inside launches this kernel so, whatever is kept: how tuning measures. form:
    only for classes of this one."""
    forced = Forced(kernel, configuration, form)
    token = _FORCED.set(forced)
    try:
        yield forced
    finally:
        _FORCED.reset(token)


def user_store(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of a user's configurations."""
    values = os.environ if environment is None else environment
    base = values.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "halstack" / "kernel_configurations"


def device_key(device: DeviceSpec) -> str:
    """What configurations of a device are kept under: its profile, else its name."""
    return str(device.attributes.get("profile") or device.name)


def configuration_path(store: Path, key: str, kernel: str) -> Path:
    """The file of a device and a kernel."""
    folder = re.sub(r"[^a-z0-9._-]+", "-", key.lower()).strip("-.") or "device"
    return store / folder / f"{kernel}.json"


def tuned_rows(known: tuple[str, ShapeClass] | None, device: DeviceSpec) -> TunedRows:
    """What a launcher asks when a call site is bound. known: the kernel and a class of the site,
    whatever its rows; None where no kernel serves."""
    if known is None:
        return _NONE
    kernel, shape = known
    forced = _FORCED.get()
    if forced is not None and forced.kernel == kernel and forced.form in ("", shape.form):
        return TunedRows({}, forced)
    site = str(shape).rpartition("rows=")[0]
    by_class = {
        int(text.rpartition("rows=")[2]): found.trial.configuration
        for text, found in _held(kernel, device).items()
        if text.rpartition("rows=")[0] == site
    }
    return TunedRows(by_class) if by_class else _NONE


def find_configuration(kernel: str, device: DeviceSpec, shape: str) -> TunedConfiguration | None:
    """What is kept for a class, and holds. Raises SettingsError for a file that is not right."""
    return _held(kernel, device).get(shape)


def _held(kernel: str, device: DeviceSpec) -> dict[str, TunedConfiguration]:
    found: dict[str, TunedConfiguration] = {}
    for basis in _BASES:
        for store in (user_store(), PACKAGED):
            path = configuration_path(store, device_key(device), kernel)
            document = load_configurations(path)
            if document is None or document.arch != device.arch:
                continue
            for entry in document.entries:
                best = entry.best() if entry.basis == basis and entry.is_complete else None
                if best is not None and is_current(
                    entry, kernel, device.software.get("triton", "")
                ):
                    kept = TunedConfiguration(
                        basis=basis, trial=best, made=entry.made, path=path, loss=entry.loss()
                    )
                    found.setdefault(entry.shape, kept)
    return found


def stale_configuration(kernel: str, device: DeviceSpec, shape: str) -> str:
    """What is kept for a class and does not hold, and why; "" if there is nothing of the kind."""
    for store in (user_store(), PACKAGED):
        document = load_configurations(configuration_path(store, device_key(device), kernel))
        entries = () if document is None or document.arch != device.arch else document.entries
        for entry in entries:
            if (
                entry.shape == shape
                and entry.is_complete
                and not is_current(entry, kernel, device.software.get("triton", ""))
            ):
                of = "source" if entry.code != code_hash(kernel) else f"Triton ({entry.triton})"
                return f"{entry.basis} {entry.made} for another {of} and not used"
    return ""


def is_current(entry: ShapeEntry, kernel: str, triton: str = "") -> bool:
    """Whether the trials are of the kernel as it is, compiled by this Triton.

    triton: the version beside a device; "" for the one that is installed here. A host without one
    cannot launch anything and takes the entry as it is.
    """
    version = triton or triton_version()
    return entry.code == code_hash(kernel) and version in ("", entry.triton)


@functools.cache
def triton_version() -> str:
    """ "" where it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def code_hash(kernel: str) -> str:
    """16 hexadecimal digits over the source of a kernel of the catalogue."""
    return CATALOGUE[kernel].code_hash()


def load_configurations(path: Path) -> ConfigurationFile | None:
    """The file; None if there is none. Raises SettingsError with the place of what is wrong."""
    modified = modified_at(path, _REMEDY)
    return None if modified is None else _read(path, modified)


@functools.lru_cache(maxsize=256)
def _read(path: Path, modified: int) -> ConfigurationFile:
    document = read_document(ConfigurationFile, path, _REMEDY)
    expected = (path.stem, configuration_path(path.parent.parent, document.device, "x").parent)
    if expected != (document.kernel, path.parent):
        raise SettingsError(
            f"file {path}",
            "configurations of the kernel and the device that it is named after",
            f"{document.kernel} on {document.device}",
            _REMEDY,
        )
    return document


def save_configurations(path: Path, document: ConfigurationFile) -> None:
    """Writes the file whole or not at all. Raises SettingsError if that is not possible."""
    text = json.dumps(document.model_dump(by_alias=True), indent=1, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_user_text(path, text + "\n")
    except OSError as error:
        raise SettingsError(
            f"file {path}",
            "a place that can be written",
            f"{type(error).__name__}: {error.strerror or error}",
            "free or permit it, or name another folder with --store",
        ) from error
