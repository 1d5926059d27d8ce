"""The parts of detection, each on its own: addresses, links, builds of torch, tools' layouts."""

from __future__ import annotations

import importlib

import pytest

import host_parts
from accelerator_plugins import BACKENDS
from hal.errors import DetectionError, HostReadError
from hal.host import CommandOutput, RecordedHost
from hal_backends.ascend.detection import parse_npu_smi
from hal_backends.detecting.kfd import kfd_details
from hal_backends.detecting.pci import link_text, normalised_address, scan_pci
from hal_backends.detecting.rules import FamilyRules
from hal_backends.detecting.software import masquerade_claims, torch_build
from hal_backends.detecting.tools import run_tools
from hal_backends.detecting.verdict import KNOWN_PCI
from hal_capability_db import load_database
from recorded_hosts import HostBuilder


def _rules(backend: str) -> FamilyRules:
    rules: FamilyRules = importlib.import_module(f"hal_backends.{backend}.detection").RULES
    return rules


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:41:00.0", "0000:41:00.0"),
        ("41:00.0", "0000:41:00.0"),
        ("00:2E:00.0", "0000:2e:00.0"),
        ("10000:E1:1F.7", "10000:e1:1f.7"),
        ("| 0000:0f:00.0        |", "0000:0f:00.0"),
        ("12:34:56.78", ""),
        ("09:24:11.132", ""),
        ("no address", ""),
        ("0000:41:00.8", ""),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert normalised_address(text) == address


def test_families_agree_with_the_database() -> None:
    families = load_database().families
    rules = [_rules(backend) for backend in BACKENDS]
    assert {rule.family for rule in rules} == set(families)
    for rule in rules:
        family = families[rule.family]
        assert rule.pci_vendor == (family.pci_vendor or "")
        assert rule.torch_device == family.torch_device
        assert rule.vendor == family.vendor
        assert rule.software.module == (family.torch_module or "").split(".")[0]
        if rule.pci_vendor:
            assert KNOWN_PCI[rule.pci_vendor] == rule.backend
        variables = {name for layer in rule.visible.layers for name in layer}
        assert variables & set(family.detection.visible_devices_variables) or not (
            family.detection.visible_devices_variables
        )


def test_scan_reads_links_of_slot_and_card() -> None:
    host = HostBuilder("a fast card in a slow slot")
    host.device("10de:2bb5", link="4.0 x8", max_link="5.0 x16", port_max_link="4.0 x16")
    host.device("10de:2bb5", link="5.0 x16", has_numa_node=False)
    slow, fast = scan_pci(host.build(), "0x10de")
    assert slow.link is not None
    assert link_text(slow.link.best_speed, slow.link.best_width) == "PCIe 4.0 x16"
    assert slow.link.is_narrow
    assert not slow.link.is_slow
    assert fast.link is not None
    assert link_text(fast.link.speed, fast.link.width) == "PCIe 5.0 x16"
    assert not fast.link.findings()
    assert fast.numa_node == -1


@pytest.mark.parametrize("text", ["Unknown\n", "", "255\n", "0\n", "garbage"])
def test_a_link_that_sysfs_does_not_know_is_none(text: str) -> None:
    host = HostBuilder("no link")
    address = host.device("10de:2bb5")
    host.file(f"{host.path_of(address)}/current_link_width", text)
    assert scan_pci(host.build(), "0x10de")[0].link is None


def test_what_is_no_identity_is_an_error() -> None:
    host = HostBuilder("masked sysfs")
    address = host.device("10de:2bb5")
    host.file(f"{host.path_of(address)}/vendor", "not a number\n")
    with pytest.raises(DetectionError, match="hexadecimal"):
        scan_pci(host.build(), "0x10de")
    host.unreadable(f"{host.path_of(address)}/vendor")
    with pytest.raises(HostReadError):
        scan_pci(host.build(), "0x10de")


@pytest.mark.parametrize(
    ("version", "variables", "flavour"),
    [
        ("2.9.0+cu128", {"cuda": "12.8"}, "cuda"),
        ("2.9.0", {"cuda": "12.8"}, "cuda"),
        ("2.9.0+rocm6.4", {"hip": "6.4.43484"}, "hip"),
        ("2.11.0+cpu", {}, "cpu"),
        ("2.9.0", {}, "cpu"),
        ("2.9.0+xpu", {"xpu": "20250302"}, "xpu"),
        ("2.8.0+metax3.3.0.2", {"cuda": "11.6", "maca": "3.3.0.2"}, "metax"),
        ("2.8.0", {"cuda": "11.6", "maca": "3.3.0.2"}, "metax"),
        ("2.7.1+corex.4.3.0", {"cuda": "10.2"}, "iluvatar"),
        ("2.5.1+das.opt1.dtk25041", {"hip": "6.1.25045"}, "hygon"),
        ("2.6.0", {"cuda": "12.4", "sail": "1.5.0"}, "thead"),
        ("2.9.0+musa5.2.0", {"musa": "5.2.0"}, "moore_threads"),
    ],
)
def test_builds_of_torch(version: str, variables: dict[str, str], flavour: str) -> None:
    host = HostBuilder("torch")
    host_parts.torch(host, version, **variables)
    build = torch_build(host.build())
    assert build is not None
    assert build.flavour == flavour
    assert version in build.evidence.found


def test_two_builds_over_each_other_are_refused() -> None:
    host = HostBuilder("two builds")
    host_parts.torch(host, "2.7.1+corex.4.3.0", maca="3.3.0.2")
    with pytest.raises(DetectionError) as caught:
        torch_build(host.build())
    assert "iluvatar" in str(caught.value)
    assert "metax" in str(caught.value)


def test_claims_besides_pci() -> None:
    host = HostBuilder("claims")
    host_parts.torch(host, "2.9.0+cu129", cuda="12.9")
    host.python_modules("torch_xmlir")
    host.environ(PPU_SDK="/usr/local/PPU_SDK")
    recorded = host.build()
    claims = masquerade_claims(recorded, torch_build(recorded))
    assert [claim.backend for claim in claims] == ["kunlunxin", "thead"]


@pytest.mark.parametrize(
    ("version", "arch"),
    [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (90500, "gfx950"), (0, None)],
)
def test_architectures_of_the_compute_driver(version: int, arch: str | None) -> None:
    host = HostBuilder("one card")
    address = host.device("1002:74a1", pci_class="0x120000", driver="amdgpu")
    host_parts.amd(host, [address], version=version, device="74a1", memory_bytes=1 << 34, units=10)
    recorded = host.build()
    found = kfd_details(recorded, scan_pci(recorded, "0x1002")[0])
    assert found.get("arch") == arch
    assert found["num_cores"] == "10"
    assert found["memory_bytes"] == str(1 << 34)


# Rows as other versions of the tools lay them out: (backend, text, [(name, address, MiB), …]).
_LAYOUTS = [
    (
        "enflame",
        "+2024-12-06, 11:33:56 CST------+\n|EFSMI    V1.2.0.301   Driver Ver: 1.2.0.301 |\n"
        "| 0      S60         | 33.6.2          | 00:01:00.0  Disable       |\n"
        "| 39 C   Sleep    105W  300W | 49120MiB Disable|   0.0%    XXXX |\n",
        [("S60", "0000:01:00.0", 49120)],
    ),
    (
        "metax",
        "| MX-SMI 2.1.6         Kernel Mode Driver Version: 2.5.014         |\n"
        "| 0           MXC550                 | 0000:2a:00.0        | 0%    |\n"
        "| 31C         44W                    | 810/65536 MiB       |       |\n",
        [("MXC550", "0000:2a:00.0", 65536)],
    ),
    (
        "iluvatar",
        "|  IX-ML: 4.4.0      Driver Version: 4.4.0      CUDA Version: 10.2  |\n"
        "| 0    Iluvatar MR-V100 DUO   | 00000000:35:00.0  | 500MHz  1600MHz |\n"
        "| N/A  37C   P0     N/A / N/A | 68MiB / 32768MiB  | 0%      Default |\n",
        [("Iluvatar MR-V100 DUO", "0000:35:00.0", 32768)],
    ),
    (
        "moore_threads",
        "    mthreads-gmi:1.14.0          Driver Version:2.7.0\n"
        "0    MTT S80        |00000000:04:00.0    |0%    2MiB(16384MiB)\n"
        "     Physical       |4x(16x)             |49C   YES\n",
        [("MTT S80", "0000:04:00.0", 16384)],
    ),
    (
        "cambricon",
        "| CNMON v6.5.26                       Driver v6.5.26 |\n"
        "| 0     /   MLU590-M9DG   v1.1.1 |   0000:63:00.0 | 0%       0 |\n"
        "|  0%   35C        105 W/ 550 W |  0 MiB/ 81920 MiB | FULL Default |\n",
        [("MLU590-M9DG", "0000:63:00.0", 81920)],
    ),
    (
        "nvidia",
        "0, NVIDIA L4, 00000000:65:00.0, 23034, GPU-1, 580.95.05, 8.9, Enabled, [N/A]\n"
        "a line of another shape\n",
        [("NVIDIA L4", "0000:65:00.0", 23034)],
    ),
]


@pytest.mark.parametrize(("backend", "text", "rows"), _LAYOUTS)
def test_layouts_of_tools(backend: str, text: str, rows: list[tuple[str, str, int]]) -> None:
    rules = _rules(backend)
    command = " ".join(rules.tools[0].argv)
    host = RecordedHost(commands={command: CommandOutput(0, text, "")})
    report = run_tools(host, rules.tools)
    assert not report.problem
    found = [(d.name, d.address, d.memory_bytes >> 20) for d in report.devices]
    assert found == rows


def test_npu_smi_of_two_chips() -> None:
    text = (
        "| npu-smi 26.0.rc2                            Version: 26.0.rc2         |\n"
        "| NPU   Name                | Health        | Power(W)  Temp(C)        |\n"
        "| Chip  Phy-ID              | Bus-Id        | AICore(%) HBM-Usage(MB)  |\n"
        "| 7     Ascend910           | OK            | 172.0       53    0 / 0  |\n"
        "| 0     14                  | 0000:81:00.0  | 0   0    / 0  15503/ 65536 |\n"
        "| 7     Ascend910           | Warning       | -           52    0 / 0  |\n"
        "| 1     15                  | 0000:83:00.0  | 0   0    / 0  15242/ 65536 |\n"
        "| NPU     Chip              | Process id    | Process name             |\n"
        "| 0       0                 | 692318        | python3       | 12417    |\n"
    )
    found = parse_npu_smi(text)
    assert [(d.index, d.address) for d in found] == [(14, "0000:81:00.0"), (15, "0000:83:00.0")]
    assert {d.memory_bytes for d in found} == {65536 << 20}
    assert [d.details["health"] for d in found] == ["OK", "Warning"]


def test_a_tool_that_fails_says_why_and_the_next_is_asked() -> None:
    rules = _rules("hygon")
    first, second = (" ".join(tool.argv) for tool in rules.tools)
    failed = CommandOutput(1, "", "hy-smi: error while loading libhydmi.so\n")
    report = run_tools(RecordedHost(commands={first: failed}), rules.tools)
    assert "libhydmi.so" in report.problem
    good = CommandOutput(0, '{"card0": {"PCI Bus": "0000:9F:00.0", "Card Series": "BW1000"}}', "")
    report = run_tools(RecordedHost(commands={first: failed, second: good}), rules.tools)
    assert [device.name for device in report.devices] == ["BW1000"]
    assert not run_tools(RecordedHost(), rules.tools).command
