"""The pictures of the documents: a topology as `hal devices --svg` draws it."""

from __future__ import annotations

from pathlib import Path

from hal.host import load_recorded_host
from hal.plugins.manager import PluginLoader, load_backends
from hal.plugins.survey import survey_plugins
from hal.topology import detect_topology
from hal.topology.svg import draw_svg

HOST = Path(__file__).parents[1] / "tests" / "fixtures" / "hosts" / "rtx-pro-6000-x8.json"


def topology() -> str:
    """Eight cards on two sockets."""
    host = load_recorded_host(HOST)
    registry = load_backends(loader=PluginLoader(survey_plugins(host)))
    specs = [registry.describe(device.device_id) for device in registry.devices]
    return draw_svg(detect_topology(host, specs))
