"""An opened OpenCL device of this process: context, queue, compiled programs. One a device id.

Candidates and runtime share it by device id: halstack binds kernels without handing them a runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

import pyopencl as cl

from hal.device import DeviceSpec
from hal.errors import DetectionError

_INCLUDE = '#include "vector.h"'


class OpenClDevice:
    """The device that a spec describes, ready for kernels. Not safe from several threads."""

    def __init__(self, platform: str, version: str, index: int, name: str) -> None:
        """Raises DetectionError if the device is not what was detected."""
        devices = [
            device
            for found in cl.get_platforms()
            if (found.name, found.version) == (platform, version)
            for device in found.get_devices()
        ]
        if index >= len(devices) or devices[index].name != name:
            raise DetectionError(
                "OpenCL device",
                f"{name!r} as device {index} of platform {platform!r}, {version}",
                ", ".join(device.name for device in devices) or "no device",
                "start again; `hal doctor` shows the devices",
            )
        self.device = devices[index]
        self.context = cl.Context([self.device])
        self.queue = cl.CommandQueue(self.context)
        self._programs: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}

    def kernel(self, file: str, name: str, defines: Mapping[str, int] | None = None) -> Any:
        """A kernel object of its own (arguments are its state) of a program that is built once.

        Raises pyopencl.RuntimeError with the compiler's log.
        """
        key = (file, tuple(sorted((defines or {}).items())))
        if key not in self._programs:
            options = [f"-D{macro}={value}" for macro, value in key[1]]
            program = cl.Program(self.context, _source(file))
            self._programs[key] = program.build(options=options)
        return cl.Kernel(self._programs[key], name)


@functools.cache
def _source(file: str) -> str:
    folder = resources.files("hal_opencl") / "kernels"
    shared = (folder / "vector.h").read_text(encoding="utf-8")
    return (folder / file).read_text(encoding="utf-8").replace(_INCLUDE, shared)


@functools.cache
def _opened(platform: str, version: str, index: int, name: str) -> OpenClDevice:
    return OpenClDevice(platform, version, index, name)


def open_device(spec: DeviceSpec) -> OpenClDevice:
    """The opened device of a spec; the same one for equal specs. Raises DetectionError."""
    platform, version = (str(spec.attributes[key]) for key in ("platform", "platform_version"))
    return _opened(platform, version, int(spec.attributes["platform_index"]), spec.name)
