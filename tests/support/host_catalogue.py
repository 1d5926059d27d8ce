"""The recorded hosts of tests/fixtures/hosts, composed from parts, with what detection must find.

`python tests/support/host_catalogue.py` writes the files; a test compares them with what is
composed here: a host is reviewed as a few lines and stored as what a recording looks like.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hosts_lookalikes
import hosts_nvidia
import hosts_nvidia_trouble
import hosts_others
from hal.host import RecordedHost
from host_registry import CATALOGUE, Expected
from recorded_hosts import HostBuilder

FOLDER = Path(__file__).parents[1] / "fixtures" / "hosts"
__all__ = ["CATALOGUE", "FOLDER", "compose"]
# Importing them registers their hosts.
_PARTS = (hosts_nvidia, hosts_nvidia_trouble, hosts_lookalikes, hosts_others)


# PCI ids of cards for which no source of the capability database has one.
STAND_INS = frozenset(
    {
        "1d22:3688",  # Kunlunxin P800
        "1d94:54b7",  # Hygon Z100
        "1ded:6001",  # T-Head PPU
        "1e3e:0002",  # Iluvatar BI-V150
        "1ed5:0400",  # Moore Threads S5000
        "1ee0:0166",  # Biren, whose vendor id no list has either
        "1f48:0001",  # Tecorigin, likewise
        "9999:4083",  # MetaX C550
    }
)


def compose(name: str) -> tuple[RecordedHost, Expected]:
    """The host of that name and what must be found on it. Its description says that it is
    constructed, and which of its PCI ids are stand-ins."""
    description, composer = CATALOGUE[name]
    builder = HostBuilder("")
    expected = composer(builder)
    used = sorted(_pci_ids(builder) & STAND_INS)
    builder.description = f"{description}. Constructed, not captured" + (
        f"; stand-in for a PCI id that no source has: {', '.join(used)}" if used else ""
    )
    return builder.build(), expected


def _pci_ids(builder: HostBuilder) -> set[str]:
    vendors = {
        path.removesuffix("/vendor"): text.strip().removeprefix("0x")
        for path, text in builder.files.items()
        if path.endswith("/vendor") and text is not None
    }
    return {
        f"{vendor}:{(builder.files.get(f'{folder}/device') or '').strip().removeprefix('0x')}"
        for folder, vendor in vendors.items()
    }


def main() -> int:
    """Write every host, and remove files of hosts that are gone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path.stem not in CATALOGUE:
            path.unlink()
    for name in CATALOGUE:
        (FOLDER / f"{name}.json").write_text(compose(name)[0].to_json() + "\n")
    print(f"{len(CATALOGUE)} hosts in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
