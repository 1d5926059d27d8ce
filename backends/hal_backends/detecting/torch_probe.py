"""The child process of the last question: `-m hal_backends.detecting.torch_probe TYPE [MODULE]`.

Imports torch, and MODULE where a vendor's extension is needed, and prints one line of JSON: whether
a device of TYPE is available and what the devices call themselves. A crash or a hang of a vendor's
library ends here, not in the process that asked. Evidence number five.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hal.host import PYTHON, HostProbe
from hal_backends.detecting.tools import one_line

TORCH_DEADLINE_S = 15.0
"""Importing torch alone takes seconds on a cold disk, and a driver may have to wake up."""
MARK = "HALSTACK_TORCH "


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchReport:
    """What torch says in a process of its own. problem: why it says nothing; "" if it does."""

    names: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    problem: str = ""
    was_asked: bool = False
    details: Mapping[str, str] = field(default_factory=dict)


def torch_probe_argv(torch_device: str, module: str) -> tuple[str, ...]:
    argv = (PYTHON, "-m", "hal_backends.detecting.torch_probe", torch_device)
    return (*argv, module) if module else argv


def ask_torch(host: HostProbe, torch_device: str, module: str) -> TorchReport:
    """Run this module on `host`.

    Raises:
        HostReadError: torch did not come to an end, which on a live host means a hung device.
    """
    output = host.run_command(torch_probe_argv(torch_device, module), TORCH_DEADLINE_S)
    if output is None:
        return TorchReport()
    marked = re.search(rf"^{MARK}(.*)$", output.stdout, re.MULTILINE)
    try:
        document: Any = json.loads(marked.group(1)) if marked else None
        if output.exit_code == 0 and isinstance(document, dict):
            devices = document["devices"]
            return TorchReport(
                names=tuple(str(device["name"]) for device in devices),
                capabilities=tuple(str(device["capability"]) for device in devices),
                addresses=tuple(str(device["address"]) for device in devices),
                problem=str(document["problem"]),
                was_asked=True,
            )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return TorchReport(problem=f"answer not understood: {one_line(str(error))}", was_asked=True)
    said = _last_line(output.stderr) or _last_line(output.stdout) or "nothing"
    return TorchReport(problem=f"exit code {output.exit_code}: {said}", was_asked=True)


def _last_line(text: str) -> str:
    """Of a traceback, the exception."""
    return one_line(next((line for line in reversed(text.splitlines()) if line.strip()), ""))


def main(arguments: list[str]) -> int:
    """Ask torch in this process and print what it says."""
    # Only the extension that is asked for may load; another vendor's could take the device type.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    torch_device, *modules = arguments
    torch = importlib.import_module("torch")
    for module in modules:
        importlib.import_module(module)
    backend = getattr(torch, torch_device, None)
    devices: list[dict[str, str]] = []
    problem = ""
    if backend is None:
        problem = f"torch has no device type {torch_device!r}"
    elif not backend.is_available():
        problem = f"torch.{torch_device}.is_available() is False"
    else:
        devices = [_device(backend, ordinal) for ordinal in range(backend.device_count())]
    sys.stdout.write(f"\n{MARK}{json.dumps({'devices': devices, 'problem': problem})}\n")
    return 0


def _device(backend: Any, ordinal: int) -> dict[str, str]:
    properties = backend.get_device_properties(ordinal)
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    bus = getattr(properties, "pci_bus_id", None)
    address = ""
    if isinstance(bus, int):
        domain = getattr(properties, "pci_domain_id", 0)
        address = f"{domain:04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"
    arch = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    return {
        "name": str(backend.get_device_name(ordinal)),
        "capability": arch or ("" if major is None else f"{major}.{minor}"),
        "address": address,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
