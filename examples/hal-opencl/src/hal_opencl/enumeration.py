"""Run as a program: every OpenCL device as JSON on stdout. The only part of detection that loads
the vendors' libraries, and so it runs in a child process with a deadline, asked for through the
host probe: `{python} -m hal_opencl.enumeration`."""

from __future__ import annotations

import json
import sys
from typing import Any


def enumerate_devices() -> list[dict[str, Any]]:
    """One entry a device, in an order that does not depend on the order of the ICD files."""
    import pyopencl as cl

    found = [
        {
            "platform": platform.name,
            "platform_version": platform.version,
            "index": index,
            "name": device.name,
            "vendor": device.vendor,
            "version": device.version,
            "driver": device.driver_version,
            "kind": _kind(cl, device.type),
            "compute_units": device.max_compute_units,
            "memory_bytes": device.global_mem_size,
            "max_allocation_bytes": device.max_mem_alloc_size,
            "local_memory_bytes": device.local_mem_size,
            "shares_host_memory": bool(device.host_unified_memory),
            "is_little_endian": bool(device.endian_little),
            "is_available": bool(device.available and device.compiler_available),
            "extensions": sorted(device.extensions.split()),
        }
        for platform in _platforms(cl)
        for index, device in enumerate(platform.get_devices())
    ]
    return sorted(
        found, key=lambda entry: (entry["platform"], entry["platform_version"], entry["index"])
    )


def _kind(cl: Any, type_bits: int) -> str:
    """The one word for what a device is; other bits (default, all) may be set beside it."""
    for name in ("GPU", "ACCELERATOR", "CPU"):
        if type_bits & getattr(cl.device_type, name):
            return name.lower()
    return "custom"


def _platforms(cl: Any) -> list[Any]:
    try:
        platforms: list[Any] = cl.get_platforms()
    except cl.LogicError as error:
        if "PLATFORM_NOT_FOUND_KHR" in str(error):
            return []  # a loader without one platform says so by this error
        raise
    return platforms


if __name__ == "__main__":
    json.dump(enumerate_devices(), sys.stdout)
