"""Fake distributions with plug-ins, put into a folder on the import path."""

from __future__ import annotations

import textwrap
from pathlib import Path

from hal.plugins.listing import PluginEntry, list_plugins

GOOD = """
from hal.device import DetectedDevice
from hal.hookspecs import BackendInfo, hookimpl

@hookimpl
def hal_backend_info():
    return BackendInfo(name={name!r}, vendor="Acme", api_range={api!r})

@hookimpl
def hal_detect_devices(host):
    return [DetectedDevice(device_id={device!r}, vendor="Acme", name="Acme One", arch="acme1")]
"""


class Site:
    """A folder on the import path into which fake distributions are put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self, name: str, source: str, *, distribution: str | None = None, version: str = "1.0"
    ) -> PluginEntry:
        distribution = distribution or f"acme-{name}"
        module = f"fake_{distribution}_{name}".replace("-", "_")
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[hal.backends]\n{name} = {module}\n")
        return next(e for e in self.entries() if e.name == name and e.distribution == distribution)

    def add_good(self, name: str, device: str, api: str = ">=1.0,<2") -> PluginEntry:
        return self.add(name, GOOD.format(name=name, device=device, api=api))

    def entries(self) -> tuple[PluginEntry, ...]:
        return list_plugins([str(self.folder)])
