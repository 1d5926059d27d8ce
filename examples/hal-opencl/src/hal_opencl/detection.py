"""Which OpenCL devices a host has, what they can do, and what is missing to use them.

Two stages. Files first, through the host probe: the ICD files, which name the vendors' libraries,
and pyopencl. Only where both are there a child process loads the libraries and lists the devices
(`hal_opencl.enumeration`); no vendor's library is ever loaded into this process by detection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hal.device import DetectedDevice, DeviceSpec, Evidence, MissingDependency
from hal.errors import DetectionError
from hal.host import PYTHON, HostProbe

VENDORS = "/etc/OpenCL/vendors"
ENUMERATION = (PYTHON, "-m", "hal_opencl.enumeration")
# The first start of a vendor's library may compile its own built-in kernels.
ENUMERATION_DEADLINE_S = 15.0
LDCONFIG_DEADLINE_S = 5.0
# Distributions that bring an ICD of their own, which pyopencl's loader finds beside itself.
ICD_DISTRIBUTIONS = ("pocl-binary-distribution",)


def installed_icds(host: HostProbe) -> list[Evidence]:
    """The vendors' libraries that a loader would try, each with the file that names it."""
    folder = host.environ("OCL_ICD_VENDORS") or VENDORS
    found = []
    for name in host.list_dir(folder) or ():
        if name.endswith(".icd"):
            text = host.read_text(f"{folder}/{name}")
            found.append(Evidence(source=f"{folder}/{name}", found=(text or "").strip()))
    for name in ICD_DISTRIBUTIONS:
        version = host.package_version(name)
        if version is not None:
            found.append(Evidence(source=f"distribution {name}", found=version))
    return found


def detect_devices(host: HostProbe) -> Sequence[DetectedDevice]:
    """The devices of every platform. Raises DetectionError if the libraries cannot list them."""
    icds = installed_icds(host)
    if not icds or not host.has_module("pyopencl"):
        return ()
    return [
        DetectedDevice(
            device_id=f"opencl:{number}",
            vendor="khronos",
            name=entry["name"],
            arch=f"opencl-{entry['kind']}",
            evidence=(
                *icds,
                Evidence(source=_source(entry), found=f"{entry['kind']}, {entry['version']}"),
            ),
        )
        for number, entry in enumerate(_enumerated(host))
    ]


def describe_device(device: DetectedDevice, host: HostProbe) -> DeviceSpec:
    """What clGetDeviceInfo says of it. Raises DetectionError if the device is no longer there."""
    entries = _enumerated(host)
    number = int(device.device_id.removeprefix("opencl:"))
    if number >= len(entries) or entries[number]["name"] != device.name:
        raise DetectionError(
            device.device_id,
            f"the device {device.name!r} that was detected",
            ", ".join(entry["name"] for entry in entries) or "no OpenCL device",
            "start again; a driver that loses devices between two calls is broken",
        )
    entry = entries[number]
    return DeviceSpec(
        device_id=device.device_id,
        vendor=device.vendor,
        backend="opencl",
        name=device.name,
        arch=device.arch,
        # The tensors are host memory: kernels use it in place, or copies of it.
        torch_device="cpu",
        features=_features(entry),
        num_cores=entry["compute_units"],
        memory_bytes=entry["memory_bytes"],
        attributes=_attributes(entry, host),
        software={"pyopencl": host.package_version("pyopencl") or ""},
        evidence=_evidence(entry),
    )


def missing_dependencies(host: HostProbe) -> Sequence[MissingDependency]:
    """An ICD without pyopencl, pyopencl without an ICD, an ICD without its library."""
    icds = installed_icds(host)
    has_pyopencl = host.has_module("pyopencl")
    missing = []
    if icds and not has_pyopencl:
        missing.append(
            MissingDependency(
                hardware=f"an OpenCL platform ({icds[0].source})",
                software="pyopencl",
                remedy="pip install pyopencl",
                evidence=tuple(icds),
            )
        )
    if has_pyopencl and not icds:
        missing.append(
            MissingDependency(
                hardware="pyopencl",
                software="an OpenCL platform (no ICD file, no distribution with one)",
                remedy="install your device's OpenCL driver, or `pip install "
                "pocl-binary-distribution` for the CPU",
                evidence=(Evidence(source=VENDORS, found="no *.icd"),),
            )
        )
    return [*missing, *_without_library(icds, host)]


def _without_library(icds: Sequence[Evidence], host: HostProbe) -> list[MissingDependency]:
    """ICD files whose library is not there: a half-removed driver."""
    missing = []
    for icd in icds:
        if not icd.source.endswith(".icd"):
            continue
        name = icd.found
        if not name or not _has_library(name, host):
            missing.append(
                MissingDependency(
                    hardware=f"an OpenCL platform ({icd.source})",
                    software=f"its library {name or '(the file is empty)'}",
                    remedy=f"install the driver again, or remove {icd.source}",
                    evidence=(icd,),
                )
            )
    return missing


def _has_library(name: str, host: HostProbe) -> bool:
    """A path is looked at. A bare name is the loader's to find: where its cache cannot be read
    nobody knows better, and the library counts as there."""
    if name.startswith("/"):
        return host.exists(name)
    cache = host.run_command(("/sbin/ldconfig", "-p"), LDCONFIG_DEADLINE_S)
    if cache is None or cache.exit_code != 0 or host.environ("LD_LIBRARY_PATH"):
        return True
    return any(line.split()[:1] == [name] for line in cache.stdout.splitlines())


def _enumerated(host: HostProbe) -> list[dict[str, Any]]:
    output = host.run_command(ENUMERATION, ENUMERATION_DEADLINE_S)
    command = " ".join(ENUMERATION)
    if output is None or output.exit_code != 0:
        found = "no such command" if output is None else f"exit code {output.exit_code}"
        lines = (output.stderr if output is not None else "").strip().splitlines()
        raise DetectionError(
            "OpenCL devices",
            f"a list of devices from `{command}`",
            f"{found}: {lines[-1]}" if lines else found,
            "run `clinfo`, or the command itself, to see what the vendor's library says",
        )
    try:
        entries: list[dict[str, Any]] = json.loads(output.stdout)
        return [entry for entry in entries if entry["is_available"]]
    except (ValueError, TypeError, KeyError) as error:
        raise DetectionError(
            "OpenCL devices",
            f"JSON from `{command}`",
            f"{type(error).__name__}: {error}",
            "a vendor's library may print to stdout: run the command to see what",
        ) from error


def _features(entry: Mapping[str, Any]) -> frozenset[str]:
    """What candidates test, in words that are about kernels."""
    features = {f"unit.{entry['kind']}"}
    # A CPU device uses the host's memory itself, whatever else a "unified" device may do with it.
    if entry["kind"] == "cpu" and entry["shares_host_memory"]:
        features.add("memory.shared")
    if "cl_khr_fp64" in entry["extensions"]:
        features.add("fp64")
    if entry["is_little_endian"]:
        features.add("little_endian")
    return frozenset(features)


def _attributes(entry: Mapping[str, Any], host: HostProbe) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "platform": entry["platform"],
        "platform_version": entry["platform_version"],
        "platform_index": entry["index"],
        "driver": entry["driver"],
        "opencl_version": entry["version"],
        "device_type": entry["kind"],
        "local_memory_bytes": entry["local_memory_bytes"],
        "max_allocation_bytes": entry["max_allocation_bytes"],
    }
    if entry["kind"] == "cpu":
        # The same cores as the CPU plug-in's device: to be used only where it is named.
        attributes["same_silicon_as"] = "cpu:0"
    return attributes


def _evidence(entry: Mapping[str, Any]) -> dict[str, Evidence]:
    seen = {
        "features.memory.shared": ("CL_DEVICE_HOST_UNIFIED_MEMORY", entry["shares_host_memory"]),
        "features.fp64": ("CL_DEVICE_EXTENSIONS", "cl_khr_fp64" in entry["extensions"]),
        "features.little_endian": ("CL_DEVICE_ENDIAN_LITTLE", entry["is_little_endian"]),
        f"features.unit.{entry['kind']}": ("CL_DEVICE_TYPE", entry["kind"]),
        "num_cores": ("CL_DEVICE_MAX_COMPUTE_UNITS", entry["compute_units"]),
        "memory_bytes": ("CL_DEVICE_GLOBAL_MEM_SIZE", entry["memory_bytes"]),
    }
    if entry["kind"] == "cpu":
        seen["attributes.same_silicon_as"] = ("CL_DEVICE_TYPE", entry["kind"])
    return {
        field: Evidence(source=f"{name} of {_source(entry)}", found=str(value))
        for field, (name, value) in seen.items()
    }


def _source(entry: Mapping[str, Any]) -> str:
    return f"OpenCL platform {entry['platform']!r}, device {entry['index']}"
