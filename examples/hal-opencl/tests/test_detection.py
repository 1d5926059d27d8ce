"""Detection on recorded hosts: what is there, what is missing, and what is broken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hal.errors import DetectionError
from hal.host import CommandOutput, RecordedHost
from hal_opencl.detection import (
    ENUMERATION,
    VENDORS,
    describe_device,
    detect_devices,
    missing_dependencies,
)

ICD = f"{VENDORS}/acme.icd"
LIBRARY = "/usr/lib/libacmecl.so.1"
LDCONFIG = "/sbin/ldconfig -p"
ENTRY = {
    "platform": "Acme OpenCL",
    "platform_version": "OpenCL 3.0 acme",
    "index": 0,
    "name": "Acme GPU",
    "vendor": "Acme",
    "version": "OpenCL 3.0",
    "driver": "1.2.3",
    "kind": "gpu",
    "compute_units": 48,
    "memory_bytes": 16 << 30,
    "max_allocation_bytes": 4 << 30,
    "local_memory_bytes": 65536,
    "shares_host_memory": False,
    "is_little_endian": True,
    "is_available": True,
    "extensions": ["cl_khr_fp16"],
}


def _host(*entries: dict[str, Any], stdout: str = "", **changes: Any) -> RecordedHost:
    output = CommandOutput(0, stdout or json.dumps(list(entries)), "")
    parts: dict[str, Any] = {
        "files": {ICD: "libacmecl.so.1\n"},
        "nodes": frozenset({LIBRARY}),
        "modules": frozenset({"pyopencl"}),
        "packages": {"pyopencl": "2026.1"},
        "commands": {
            " ".join(ENUMERATION): output,
            LDCONFIG: CommandOutput(0, f"1 libs\n\tlibacmecl.so.1 (libc6) => {LIBRARY}\n", ""),
        },
    }
    return RecordedHost(**(parts | changes))


def test_a_host_without_opencl_is_left_alone() -> None:
    host = RecordedHost()
    assert detect_devices(host) == ()
    assert missing_dependencies(host) == []


def test_devices_with_their_evidence() -> None:
    host = _host(ENTRY, ENTRY | {"index": 1}, ENTRY | {"index": 2, "is_available": False})
    devices = detect_devices(host)
    assert [device.device_id for device in devices] == ["opencl:0", "opencl:1"]
    assert devices[1].evidence[0].source == ICD
    assert "Acme OpenCL" in devices[1].evidence[1].source
    assert missing_dependencies(host) == []


def test_a_gpu_has_memory_of_its_own_even_where_it_says_unified() -> None:
    host = _host(ENTRY | {"shares_host_memory": True})
    spec = describe_device(detect_devices(host)[0], host)
    assert spec.features == {"unit.gpu", "little_endian"}
    assert "same_silicon_as" not in spec.attributes


def test_a_cpu_device_is_the_silicon_of_the_cpu() -> None:
    host = _host(ENTRY | {"kind": "cpu", "shares_host_memory": True, "extensions": ["cl_khr_fp64"]})
    spec = describe_device(detect_devices(host)[0], host)
    assert spec.features == {"unit.cpu", "memory.shared", "little_endian", "fp64"}
    assert spec.attributes["same_silicon_as"] == "cpu:0"
    assert {f"features.{name}" for name in spec.features} <= spec.evidence.keys()


def test_an_icd_without_pyopencl_is_missing_software() -> None:
    host = _host(ENTRY, modules=frozenset(), commands={})
    assert detect_devices(host) == ()
    (missing,) = missing_dependencies(host)
    assert (missing.software, missing.remedy) == ("pyopencl", "pip install pyopencl")
    assert ICD in missing.hardware


def test_pyopencl_without_an_icd_is_missing_software() -> None:
    host = _host(ENTRY, files={}, commands={})
    assert detect_devices(host) == ()
    (missing,) = missing_dependencies(host)
    assert "OpenCL platform" in missing.software


def test_an_icd_from_a_distribution_counts() -> None:
    packages = {"pyopencl": "2026.1", "pocl-binary-distribution": "3.0"}
    host = _host(ENTRY, files={}, packages=packages)
    assert len(detect_devices(host)) == 1
    assert missing_dependencies(host) == []


@pytest.mark.parametrize("text", ["libacmecl.so.2", "/opt/acme/libacmecl.so", ""])
def test_an_icd_without_its_library_is_a_half_removed_driver(text: str) -> None:
    host = _host(ENTRY, files={ICD: text})
    (missing,) = missing_dependencies(host)
    assert missing.remedy.endswith(ICD)
    assert text in missing.software


def test_a_library_that_nobody_can_look_for_counts_as_there() -> None:
    host = _host(ENTRY, files={ICD: "libother.so"}, environment={"LD_LIBRARY_PATH": "/opt/lib"})
    assert missing_dependencies(host) == []
    assert missing_dependencies(_host(ENTRY, files={ICD: "libother.so"}, commands={})) == []


def test_a_folder_of_icds_of_one_s_own() -> None:
    environment = {"OCL_ICD_VENDORS": "/opt/icds"}
    assert detect_devices(_host(ENTRY, environment=environment)) == ()
    host = _host(ENTRY, environment=environment, files={"/opt/icds/a.icd": LIBRARY})
    assert detect_devices(host)[0].evidence[0].source == "/opt/icds/a.icd"


@pytest.mark.parametrize(
    ("commands", "found"),
    [
        ({}, "no such command"),
        (
            {" ".join(ENUMERATION): CommandOutput(1, "", "Traceback\nLogicError: broken")},
            "LogicError: broken",
        ),
        ({" ".join(ENUMERATION): CommandOutput(0, "driver says hello", "")}, "JSONDecodeError"),
        ({" ".join(ENUMERATION): CommandOutput(0, '[{"name": "x"}]', "")}, "KeyError"),
    ],
)
def test_a_library_that_cannot_list_its_devices_is_an_error(
    commands: dict[str, CommandOutput], found: str
) -> None:
    with pytest.raises(DetectionError, match=found):
        detect_devices(_host(ENTRY, commands=commands))


def test_a_device_that_is_gone_is_an_error() -> None:
    (device,) = detect_devices(_host(ENTRY))
    with pytest.raises(DetectionError, match="Other GPU"):
        describe_device(device, _host(ENTRY | {"name": "Other GPU"}))
