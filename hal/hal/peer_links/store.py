"""Where outcomes of link checks are kept between runs: one file per host, beside measured rates.

A file belongs to this machine with this kernel and these kernel parameters, an outcome in it to two
devices with the driver that they had. Another host, a recorded one included, never gets them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hal.device import Confidence, DeviceSpec, Evidence
from hal.errors import HostReadError
from hal.host import HostProbe, LocalHost
from hal.host_recording import RecordingHost
from hal.measurements import measurements_folder
from hal.peer_links.outcome import VERDICTS, PairOutcome
from hal.text_files import read_regular_text, write_user_text

_SCHEMA = "halstack.peer-links/1"
# Firmware tables of a machine change with a reboot, the identity of a container does not last.
_IDENTITIES = ("/etc/machine-id", "/var/lib/dbus/machine-id", "/proc/sys/kernel/random/boot_id")
_KERNEL = ("/proc/sys/kernel/osrelease", "/proc/cmdline")
_KEPT = ("verified", "wrong", "none")
SOURCE = "written and compared on this host (hal devices --verify-links)"


def links_file(host: HostProbe, folder: Path | None = None) -> Path | None:
    """The file of a host; None for one that is not this machine or cannot be told from others."""
    own = host.inner if isinstance(host, RecordingHost) else host
    if not isinstance(own, LocalHost):
        return None
    identity = next((text for path in _IDENTITIES if (text := _text(own, path))), "")
    if not identity:
        return None
    parts = [identity, *(_text(own, path) for path in _KERNEL)]
    name = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
    return (measurements_folder() if folder is None else folder) / f"links-{name}.json"


def save_links(
    outcomes: Sequence[PairOutcome],
    specs: Iterable[DeviceSpec],
    host: HostProbe,
    folder: Path | None = None,
) -> Path | None:
    """Keeps the outcomes in place of earlier ones of the same pairs; None if the host has no file.

    Raises:
        HostReadError: the file cannot be written.
    """
    file = links_file(host, folder)
    if file is None:
        return None
    ends = {spec.device_id: _end(spec) for spec in specs}
    checked = {frozenset((item.first, item.second)) for item in outcomes}
    kept = [row for row in _read(file) if frozenset((row["first"], row["second"])) not in checked]
    kept += [
        asdict(item) | {"ends": [ends[item.first], ends[item.second]]}
        for item in outcomes
        if item.verdict in _KEPT
    ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_user_text(file, json.dumps({"schema": _SCHEMA, "pairs": kept}, indent=1))
    except OSError as error:
        raise HostReadError(
            "outcomes of the link checks",
            f"a folder that can be written: {file.parent}",
            f"{type(error).__name__}: {error.strerror or error}",
            "set XDG_CACHE_HOME to another folder and check again",
        ) from error
    return file


def with_links(
    specs: Sequence[DeviceSpec], host: HostProbe, folder: Path | None = None
) -> list[DeviceSpec]:
    """The devices of a host with what is known of their pairs: `p2p_verified_peers` and
    `p2p_refuted_peers`. As they are where nothing is kept; a damaged file counts as none."""
    file = links_file(host, folder)
    rows = [] if file is None else _read(file)
    by_id = {spec.device_id: spec for spec in specs}
    rows = [row for row in rows if _is_of(row, by_id)]
    return [_with(spec, rows) for spec in specs]


def _with(spec: DeviceSpec, rows: Sequence[dict[str, Any]]) -> DeviceSpec:
    own = [row for row in rows if spec.device_id in (row["first"], row["second"])]
    attributes, evidence = dict(spec.attributes), dict(spec.evidence)
    for name, verdicts in (
        ("p2p_verified_peers", ("verified",)),
        ("p2p_refuted_peers", ("wrong", "none")),
    ):
        of_these = [row for row in own if row["verdict"] in verdicts]
        if of_these:
            peers = [r["second"] if r["first"] == spec.device_id else r["first"] for r in of_these]
            attributes[name] = " ".join(sorted(peers))
            found = "; ".join(
                f"{peer}: {row['detail']}" for peer, row in zip(peers, of_these, strict=True)
            )
            evidence[f"attributes.{name}"] = Evidence(
                source=SOURCE, found=found, confidence=Confidence.MEASURED
            )
    return replace(spec, attributes=attributes, evidence=evidence) if own else spec


def _is_of(row: dict[str, Any], specs: dict[str, DeviceSpec]) -> bool:
    """Whether both devices are here and are what they were."""
    names = (row["first"], row["second"])
    return all(name in specs for name in names) and row["ends"] == [
        _end(specs[name]) for name in names
    ]


def _end(spec: DeviceSpec) -> list[str]:
    driver = str(spec.attributes.get("driver_version", ""))
    return [spec.device_id, spec.backend, spec.name, spec.arch, driver]


def _text(host: LocalHost, path: str) -> str:
    try:
        return (host.read_text(path) or "").strip()
    except HostReadError:  # not for this user
        return ""


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        document = json.loads(read_regular_text(file))
        rows = document["pairs"] if document.get("schema") == _SCHEMA else []
        return [row for row in rows if _is_sound(row)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _is_sound(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(key), str) for key in ("first", "second", "detail"))
        and row.get("verdict") in VERDICTS
        and isinstance(row.get("ends"), list)
    )
