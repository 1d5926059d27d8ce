"""The link of a plan's device group: as this host shows it, else as the device's profile promises.

One decision: which devices of the host a group of so many is made of, and so what links them.
"""

from __future__ import annotations

from hal.device import DeviceSpec
from hal.device_group import GroupLink, group_link_of
from hal.peer_links.store import with_links
from hal.plugins.registry import BackendRegistry


def link_of_group(
    registry: BackendRegistry, device: DeviceSpec, world_size: int
) -> GroupLink | None:
    """None for one device. Devices of a host are taken in the order of their ids, beginning with
    those of the kind of `device`; a host that has not so many says nothing about a group of them.
    """
    if world_size == 1:
        return None
    link = group_link_of(device, world_size)
    present = {found.device_id for found in registry.devices}
    if device.device_id not in present or device.torch_device == "cpu":
        return link
    specs = with_links([registry.describe(name) for name in sorted(present)], registry.host)
    alike = [spec for spec in specs if _kind(spec) == _kind(device)]
    if len(alike) < world_size:
        return link
    from hal.topology import detect_topology
    from hal.topology.group import link_on_host

    group = [device.device_id]
    group += [spec.device_id for spec in alike if spec.device_id != device.device_id]
    topology = detect_topology(registry.host, specs)
    return link_on_host(link, topology, group[:world_size])


def _kind(spec: DeviceSpec) -> tuple[str, str, str]:
    return spec.backend, spec.arch, spec.name
