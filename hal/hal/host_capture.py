"""Captures a host for a recording: asks what every host is asked, and writes what was answered."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import pwd
import socket
from pathlib import Path

from hal.errors import HostReadError
from hal.host_probe import HostProbe
from hal.host_recorded import RecordedHost
from hal.host_recording import RecordingHost
from hal.host_scrubbing import Identity, scrubbed
from hal.text_files import write_user_text
from hal.topology import detect_topology
from hal.topology.pci_tree import PCI_DEVICES

# What decides in many places what a device can run; plug-ins ask for their own beyond these.
_DISTRIBUTIONS = (
    *("halstack", "torch", "triton", "numpy", "numba", "transformers", "safetensors"),
    *("flash-attn", "flashinfer-python", "deep-gemm", "xformers", "vllm", "sglang"),
)
_FUNCTION_FILES = ("revision", "local_cpulist", "enable", "power_state")


def ask_usual_questions(host: HostProbe) -> None:
    """Ask a host, and so record, what every recording has: NUMA nodes, the PCI tree above its
    accelerators with links and drivers, and the versions of some Python distributions.

    Raises:
        HostReadError: the folders of sysfs are there and cannot be read.
    """
    topology = detect_topology(host)
    for address, function in topology.functions.items():
        for name in _FUNCTION_FILES:
            with contextlib.suppress(HostReadError):  # the recording then says so itself
                host.read_text(f"{PCI_DEVICES}/{address}/{name}")
        if function.driver:
            host.read_text(f"/sys/module/{function.driver}/version")
    for name in _DISTRIBUTIONS:
        host.package_version(name)


def identity_of_this_machine() -> Identity:
    """The names that a recording of this machine must not have."""
    hosts = {socket.gethostname(), platform.node(), os.environ.get("HOSTNAME", "")}
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    homes = {os.environ.get("HOME", ""), os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # a user that the system has no entry for
        entry = pwd.getpwuid(os.getuid())
        users.add(entry.pw_name)
        homes.add(entry.pw_dir)
    return Identity(frozenset(hosts - {""}), frozenset(users - {""}), frozenset(homes - {""}))


def save_recording(recorder: RecordingHost, path: Path) -> RecordedHost:
    """Write what was recorded of this machine, scrubbed, and return it.

    Raises:
        HostReadError: the file cannot be written.
    """
    version = importlib.metadata.version("halstack")
    recorded = recorder.recorded(f"recorded by halstack {version}")
    clean = scrubbed(recorded, identity_of_this_machine())
    try:
        write_user_text(path, clean.to_json())
    except OSError as error:
        raise HostReadError(
            f"host recording {path}",
            "a file that can be written",
            f"{type(error).__name__}: {error.strerror or error}",
            "name another file",
        ) from error
    return clean
