"""Where measured rates of devices are kept between runs: one file per kind of device.

`hal devices --measure` writes; planning reads. A file belongs to the device's fingerprint (vendor,
name, architecture, features, cores), so another machine's figures are never taken.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hal.device import Confidence, DeviceSpec, Evidence
from hal.errors import HostReadError
from hal.text_files import read_regular_text

_SCHEMA = "halstack.measurements/1"


def measurements_folder(environment: Mapping[str, str] | None = None) -> Path:
    """$XDG_CACHE_HOME/halstack/measurements, or ~/.cache/halstack/measurements."""
    values = os.environ if environment is None else environment
    base = values.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "halstack" / "measurements"


def fingerprint(device: DeviceSpec) -> str:
    """16 hexadecimal digits that name this kind of device with this many cores."""
    parts = [device.vendor, device.name, device.arch, str(device.num_cores), device.device_id]
    parts += sorted(device.features)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def save_measurements(device: DeviceSpec, folder: Path | None = None) -> Path:
    """Writes the measured rates of `device`. Raises HostReadError if that is not possible."""
    folder = measurements_folder() if folder is None else folder
    file = folder / f"{fingerprint(device)}.json"
    measured = {
        name: {"source": item.source, "found": item.found}
        for name, item in device.evidence.items()
        if item.confidence is Confidence.MEASURED
    }
    document = {
        "schema": _SCHEMA,
        "device": device.name,
        "memory_bandwidth": device.memory_bandwidth,
        "peak_flops": dict(device.peak_flops),
        "evidence": measured,
    }
    partial = file.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise HostReadError(
            f"measurements of {device.device_id}",
            f"a folder that can be written: {folder}",
            f"{type(error).__name__}: {error.strerror or error}",
            "set XDG_CACHE_HOME to another folder and measure again",
        ) from error
    return file


def with_measurements(device: DeviceSpec, folder: Path | None = None) -> DeviceSpec:
    """`device` with the rates that were measured on it before; unchanged if there are none.

    A file that is damaged counts as none: it is a cache, and measuring again repairs it.
    """
    folder = measurements_folder() if folder is None else folder
    document = _read(folder / f"{fingerprint(device)}.json")
    if document is None:
        return device
    evidence = dict(device.evidence)
    for name, item in document["evidence"].items():
        evidence[name] = Evidence(
            source=str(item["source"]), found=str(item["found"]), confidence=Confidence.MEASURED
        )
    return replace(
        device,
        memory_bandwidth=document["memory_bandwidth"],
        peak_flops=document["peak_flops"],
        evidence=evidence,
    )


def _read(file: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(read_regular_text(file))
    except (OSError, ValueError, RecursionError):
        return None
    is_sound = (
        isinstance(document, dict)
        and document.get("schema") == _SCHEMA
        and _is_rate(document.get("memory_bandwidth"))
        and isinstance(document.get("peak_flops"), dict)
        and all(_is_rate(rate) for rate in document["peak_flops"].values())
        and isinstance(document.get("evidence"), dict)
        and all(
            isinstance(item, dict) and {"source", "found"} <= item.keys()
            for item in document["evidence"].values()
        )
    )
    return document if is_sound else None


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-3 <= value < 1e18
