"""Topology: where the accelerators of a host are, what lies between them, what is less than it
could be. `building` puts it together from sysfs and what plug-ins know; `terminal` and `svg` draw.
"""

from hal.topology.building import detect_topology
from hal.topology.model import (
    Accelerator,
    DevicePair,
    Distance,
    NumaNode,
    Obstacle,
    PciFunction,
    PciKind,
    Topology,
)
from hal.topology.pci_link import PciLink

__all__ = [
    "Accelerator",
    "DevicePair",
    "Distance",
    "NumaNode",
    "Obstacle",
    "PciFunction",
    "PciKind",
    "PciLink",
    "Topology",
    "detect_topology",
]
