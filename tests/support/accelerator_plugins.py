"""The accelerators' plug-ins as the host process sees them, and one look at a recorded host."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hal.device import DetectedDevice, DeviceSpec, MissingDependency
from hal.errors import PluginError
from hal.host import RecordedHost
from hal.plugins.calls import Plugin
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import register_plugin

BACKENDS = (
    *("nvidia", "amd", "ascend", "cambricon", "moore_threads", "metax", "iluvatar", "hygon"),
    *("kunlunxin", "thead", "enflame", "biren", "tecorigin", "intel_xpu", "gaudi"),
)


def entry(backend: str) -> PluginEntry:
    return PluginEntry("halstack", backend, f"hal_backends.{backend}.plugin:plugin", "0")


def plugin(backend: str) -> Plugin:
    module = importlib.import_module(f"hal_backends.{backend}.plugin")
    return Plugin(register_plugin(entry(backend), module.plugin))


@dataclass
class Found:
    """What the plug-ins found on one host. Anything but a PluginError comes out as it is."""

    devices: dict[str, tuple[DetectedDevice, ...]] = field(default_factory=dict)
    specs: dict[str, DeviceSpec] = field(default_factory=dict)
    undescribed: dict[str, PluginError] = field(default_factory=dict)
    missing: dict[str, tuple[MissingDependency, ...]] = field(default_factory=dict)
    refused: dict[str, PluginError] = field(default_factory=dict)

    def products(self) -> dict[str, dict[str, int]]:
        """Backend -> product -> number, as in the catalogue's expectations."""
        return {
            backend: dict(Counter(self._product(device) for device in devices))
            for backend, devices in self.devices.items()
        }

    def _product(self, device: DetectedDevice) -> str:
        spec = self.specs.get(device.device_id)
        if spec is None:
            return "unknown"
        return str(spec.attributes["profile"] or f"arch:{spec.arch}")


def look_at(host: RecordedHost, backends: Iterable[str] = BACKENDS) -> Found:
    """Every hook about hardware of every plug-in, in the order given."""
    found = Found()
    for backend in backends:
        one = plugin(backend)
        missing = one.missing_dependencies(host)
        if missing:
            found.missing[backend] = missing
        try:
            devices = one.detect_devices(host)
        except PluginError as error:
            found.refused[backend] = error
            continue
        if devices:
            found.devices[backend] = devices
        for device in devices:
            try:
                found.specs[device.device_id] = one.describe_device(device, host)
            except PluginError as error:
                found.undescribed[device.device_id] = error
    return found
