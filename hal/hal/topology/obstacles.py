"""Why accelerators that sysfs shows are not usable, as far as plug-ins say: by PCI address."""

from __future__ import annotations

from collections.abc import Mapping

from hal.plugins.survey import PluginSurvey
from hal.topology.model import Obstacle
from hal.topology.pci_tree import pci_addresses_in


def obstacles_of(survey: PluginSurvey) -> Mapping[str, Obstacle]:
    """PCI address -> what keeps the device from use: software that is missing beside it, or the
    failure of a plug-in whose reason names it."""
    found: dict[str, Obstacle] = {}
    for state in survey.states:
        if state.status.is_trouble:
            text = f"plug-in {state.entry.name} {state.status.value}: see `hal doctor`"
            for address in pci_addresses_in(state.reason):
                found[address] = Obstacle(backend=state.entry.name, text=text)
    for entry, item in survey.missing_dependencies():
        seen = " ".join(f"{part.source} {part.found}" for part in item.evidence)
        for address in pci_addresses_in(f"{item.hardware} {seen}"):
            text = f"{item.software} is missing: {item.remedy}"
            found[address] = Obstacle(backend=entry.name, text=text)
    return found
