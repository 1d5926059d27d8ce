"""Contradictions: where two pieces of evidence name different vendors, detection refuses and names
both. PCI says what is plugged in; everything else may be installed for another machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hal.errors import DetectionError
from hal.host import HostProbe
from hal_backends.detecting.pci import PCI_FOLDER, PciFunction
from hal_backends.detecting.rules import FamilyRules, Sighting
from hal_backends.detecting.software import Claim
from hal_backends.detecting.tools import ToolReport

# PCI vendors of those whose devices torch shows as CUDA or HIP devices (pci.ids).
MASQUERADER_PCI: Mapping[str, str] = {
    "metax": "0x9999",
    "iluvatar": "0x1e3e",
    "hygon": "0x1d94",
    "kunlunxin": "0x1d22",
    "thead": "0x1ded",
}


KNOWN_PCI: Mapping[str, str] = {
    "0x10de": "nvidia",
    "0x1002": "amd",
    "0x19e5": "ascend",
    "0xcabc": "cambricon",
    "0x1ed5": "moore_threads",
    "0x1e36": "enflame",
    "0x8086": "intel_xpu",
    "0x1da3": "gaudi",
    **{vendor: backend for backend, vendor in MASQUERADER_PCI.items()},
}
"""PCI vendor -> backend, of every family whose vendor id is known."""


def refuse_foreign_claims(
    host: HostProbe, rules: FamilyRules, functions: Sequence[PciFunction], claims: Sequence[Claim]
) -> list[Claim]:
    """The claims of other vendors whose cards are here as well: those explain themselves.

    Raises:
        DetectionError: something says that this process's devices are another vendor's, and no
            card of that vendor is here.
    """
    foreign = [claim for claim in claims if claim.backend != rules.backend]
    unexplained = [c for c in foreign if not _has_vendor(host, MASQUERADER_PCI[c.backend])]
    if rules.torch_device == "cuda" and unexplained:
        claim = unexplained[0]
        hardware = f"a device node says {rules.backend} ({rules.nodes.vendor_node})"
        if functions:
            first = functions[0]
            hardware = f"PCI says {rules.backend} ({first.id} at {first.address})"
        raise DetectionError(
            f"{rules.hardware} of this host",
            "the hardware and the installed software to name one vendor",
            f"{hardware}, {claim.evidence.source} says {claim.backend} ({claim.evidence.found})",
            f"use an environment made for {rules.hardware}, or, if the card is a {claim.backend} "
            "one, look why PCI shows another vendor (a virtual machine may pass it through so)",
        )
    return foreign


def _has_vendor(host: HostProbe, vendor: str) -> bool:
    return any(
        (host.read_text(f"{PCI_FOLDER}/{address}/vendor") or "").strip().lower() == vendor
        for address in host.list_dir(PCI_FOLDER) or ()
    )


def refuse_foreign_names(rules: FamilyRules, sighting: Sighting) -> None:
    """Raises DetectionError if a device's name, as reported, is not one of this family's."""
    reported = [("the vendor's tool", sighting.tool.name if sighting.tool else "")]
    reported.append(("torch in a child process", sighting.torch_name))
    for source, name in reported:
        if name and not re.search(rules.name_pattern, name, re.IGNORECASE):
            raise DetectionError(
                f"{rules.hardware} {sighting.function.address}",
                f"PCI and {source} to name one vendor",
                f"PCI says {rules.backend} ({sighting.function.id}), {source} says {name!r}",
                "remove the software that is not this card's, or report the card's name if it is",
            )


def refuse_foreign_addresses(
    host: HostProbe, rules: FamilyRules, functions: Sequence[PciFunction], report: ToolReport
) -> None:
    """Raises DetectionError if the tool lists a device at a PCI address of another vendor."""
    known = {function.address for function in functions}
    for device in report.devices:
        if not device.address or device.address in known:
            continue
        text = host.read_text(f"{PCI_FOLDER}/{device.address}/vendor") or ""
        owner = KNOWN_PCI.get(text.strip().lower(), "")
        if not owner or owner == rules.backend:
            continue
        raise DetectionError(
            f"{rules.hardware} {device.address}",
            "PCI and the vendor's tool to name one vendor",
            f"PCI says {owner} (vendor {text.strip()}), `{report.command}` lists "
            f"{device.name!r} there",
            f"the tool is not {rules.backend}'s own, or another vendor's imitates it: remove it",
        )
