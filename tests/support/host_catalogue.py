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


def compose(name: str) -> tuple[RecordedHost, Expected]:
    """The host of that name and what must be found on it."""
    description, composer = CATALOGUE[name]
    builder = HostBuilder(description)
    expected = composer(builder)
    return builder.build(), expected


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
