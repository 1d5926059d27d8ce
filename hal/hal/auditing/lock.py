"""A lock: a plan with everything that it depends on, "halstack.lock/1", and nothing that moves by
itself: no date, no host name, no measured rate that two runs would disagree on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from typing import Any, Final

from hal.auditing.foreign_variables import locked_environment
from hal.auditing.kernel_sources import kernel_source
from hal.auditing.plan_documents import LOCK_SCHEMA
from hal.plan import Plan

_STACK: Final = ("halstack", "torch", "triton", "numba", "numpy")
"""What plans, binds and computes; of it, what is installed."""
_NO_PROFILE: Final = frozenset({"evidence", "software"})
RATES: Final = frozenset({"memory_bandwidth", "peak_flops"})


def create_lock(
    plan: Plan,
    *,
    model: str,
    distributions: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The lock as a JSON-ready dictionary.

    model: its name for people. distributions: the plug-ins', name -> version. environment: of this
    process by default. Raises OSError if a kernel's source cannot be read.
    """
    document = plan.to_dict()
    arch = str(plan.devices[0]["arch"]) if plan.devices else ""
    chosen = {op.choice.name: op.choice for op in plan.ops}
    return {
        "schema": LOCK_SCHEMA,
        "model": model,
        "plan_hash": document["hash"],
        "versions": {**installed_versions(), **distributions, **document["versions"]},
        "environment": locked_environment(environment),
        "devices": {
            str(device["device_id"]): profile_hash(device) for device in document["devices"]
        },
        "kernels": {name: kernel_source(chosen[name], arch).to_dict() for name in sorted(chosen)},
        "settings": document["settings"],
        "plan": document,
    }


def installed_versions() -> dict[str, str]:
    """Python and the stack; what is not installed is left out."""
    versions = {"python": platform.python_version()}
    for name in _STACK:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def profile_of(device: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared of a device: without its software, which has versions of its own, and
    without rates that were measured, on which no two runs agree, or that nobody knows."""
    evidence = device.get("evidence") or {}
    left_out = {
        key
        for key in RATES
        if not device.get(key) or (isinstance(evidence, Mapping) and _is_measured(key, evidence))
    }
    return {key: value for key, value in device.items() if key not in _NO_PROFILE | left_out}


def _is_measured(key: str, evidence: Mapping[str, Any]) -> bool:
    """Whether its value, or one by dtype ("peak_flops.float32"), comes from a measurement."""
    entries = [v for k, v in evidence.items() if k == key or k.startswith(f"{key}.")]
    return any(isinstance(e, Mapping) and e.get("confidence") == "measured" for e in entries)


def profile_hash(device: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over `profile_of` without rates: measuring a device changes no hash."""
    profile = {key: value for key, value in profile_of(device).items() if key not in RATES}
    text = json.dumps(profile, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def distributions_of(entries: Iterable[tuple[str, str]]) -> dict[str, str]:
    """(name, version) of plug-ins' distributions, each once and sorted."""
    return dict(sorted(entries))
