"""Recorded hosts: NVIDIA cards that are well, and those that stand beside others."""

from __future__ import annotations

import host_parts as parts
import tool_outputs as tools
from host_registry import Expected, one, recorded_host
from recorded_hosts import HostBuilder


@recorded_host("rtx-pro-6000-x8", "8 RTX PRO 6000 Server on two sockets, four root ports each")
def _rtx_pro(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4, memory_gib_each=768)
    cards = parts.numa_pairs(host, "10de:2bb5", subsystem="10de:204e", driver="nvidia")
    parts.nvidia(host, cards, parts.RTX_PRO, mib=97887, capability="12.0")
    parts.cuda_torch(host)
    host.package("flashinfer-python", "0.7.4")
    return one("nvidia", "rtx-pro-6000-blackwell-server", 8)


@recorded_host(
    "rtx-4090-x8", "8 RTX 4090 on two sockets; one in a slot that gives it 4 of 16 lanes"
)
def _rtx_4090(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    options = {"subsystem": "1043:889b", "pci_class": "0x030000", "driver": "nvidia"}
    cards = host.devices(4, "10de:2684", link="4.0 x16", **options)  # type: ignore[arg-type]
    cards += host.devices(3, "10de:2684", numa=1, link="4.0 x16", **options)  # type: ignore[arg-type]
    cards.append(
        host.device("10de:2684", numa=1, link="4.0 x4", max_link="4.0 x16", **options)  # type: ignore[arg-type]
    )
    parts.nvidia(host, cards, "NVIDIA GeForce RTX 4090", mib=24564, capability="8.9", ecc="[N/A]")
    parts.cuda_torch(host)
    return one("nvidia", "rtx-4090", 8)


@recorded_host("l40s-x4-switch", "4 L40S behind one PCIe switch, asleep at 2.5 GT/s")
def _l40s(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    switch = host.switch(numa=0, link="4.0 x16")
    cards = host.devices(
        4,
        "10de:26b9",
        behind=switch,
        subsystem="10de:1851",
        link="1.0 x16",
        max_link="4.0 x16",
        driver="nvidia",
    )
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9")
    parts.cuda_torch(host)
    return one("nvidia", "l40s", 4)


@recorded_host("h200-x8-nvlink", "8 H200 SXM with four NVSwitches")
def _h200(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    cards = parts.numa_pairs(host, "10de:2335", subsystem="10de:18be", driver="nvidia")
    for numa in (0, 1):
        host.devices(
            2, "10de:22a3", numa=numa, pci_class="0x068000", link="2.0 x2", driver="nvidia"
        )
    host.node("/dev/nvidia-nvswitchctl", *(f"/dev/nvidia-nvswitch{n}" for n in range(4)))
    parts.nvidia(host, cards, "NVIDIA H200", mib=143771, capability="9.0")
    parts.cuda_torch(host)
    links = [[18 * (row != column) for column in range(8)] for row in range(8)]
    host.command("nvidia-smi topo -m", tools.nvidia_topology(links))
    host.package("flash-attn", "2.8.3")
    host.package("deep-gemm", "2.1.1")
    return one("nvidia", "h200-sxm", 8)


@recorded_host("h100-nvl-x4-bridges", "4 H100 NVL, two of them with an NVLink bridge")
def _bridges(host: HostBuilder) -> Expected:
    cards = host.devices(4, "10de:2321", driver="nvidia")
    parts.nvidia(host, cards, "NVIDIA H100 NVL", mib=95830, capability="9.0")
    links = [[0] * 4 for _ in range(4)]
    links[0][1] = links[1][0] = 12
    host.command("nvidia-smi topo -m", tools.nvidia_topology(links))
    parts.cuda_torch(host)
    return one("nvidia", "h100-nvl", 4)


@recorded_host("mixed-nvidia-metax", "an L40S and a C500; the torch is MetaX's")
def _mixed_metax(host: HostBuilder) -> Expected:
    nvidia = host.device("10de:26b9", driver="nvidia")
    metax = host.device("9999:0a01", pci_class="0x038000", driver="metax")
    parts.nvidia(host, [nvidia], "NVIDIA L40S", mib=46068, capability="8.9")
    parts.metax(host, [metax], "MetaX C500")
    parts.metax_torch(host)
    return Expected(
        devices={"nvidia": {"l40s": 1}, "metax": {"metax-c500": 1}},
        missing={"nvidia": ("built for the metax card", "CUDA build of torch")},
    )


@recorded_host("mixed-nvidia-models", "an RTX 4090 and an RTX 5090: CUDA's order is not PCI's")
def _mixed_models(host: HostBuilder) -> Expected:
    options = {"pci_class": "0x030000", "driver": "nvidia"}
    first = host.device("10de:2684", link="4.0 x16", **options)  # type: ignore[arg-type]
    second = host.device("10de:2b85", **options)  # type: ignore[arg-type]
    parts.nvidia(host, [first], "NVIDIA GeForce RTX 4090", mib=24564, capability="8.9")
    host.node("/dev/nvidia1")
    information = host.files[f"/proc/driver/nvidia/gpus/{first}/information"] or ""
    host.file(
        f"/proc/driver/nvidia/gpus/{second}/information",
        information.replace("4090", "5090").replace("Minor: \t 0", "Minor: \t 1"),
    )
    printed = host.commands[tools.NVIDIA_SMI]
    assert printed is not None
    more = tools.nvidia_smi("NVIDIA GeForce RTX 5090", [second], 32607, "12.0", first=1)
    host.command(tools.NVIDIA_SMI, printed.stdout + more)
    parts.cuda_torch(host)
    return Expected(devices={"nvidia": {"rtx-4090": 1, "rtx-5090": 1}})


@recorded_host("mixed-nvidia-amd", "an RTX 5090 and a W7900; the torch is NVIDIA's")
def _mixed_amd(host: HostBuilder) -> Expected:
    nvidia = host.device("10de:2b85", pci_class="0x030000", driver="nvidia")
    amd = host.device("1002:7448", pci_class="0x030000", link="4.0 x16", driver="amdgpu")
    parts.nvidia(host, [nvidia], "NVIDIA GeForce RTX 5090", mib=32607, capability="12.0")
    parts.amd(host, [amd], version=110000, device="7448", memory_bytes=48301604864, units=96)
    parts.cuda_torch(host)
    return Expected(
        devices={"nvidia": {"rtx-5090": 1}, "amd": {"radeon-pro-w7900": 1}},
        missing={"amd": ("NVIDIA CUDA", "ROCm build of torch")},
    )


@recorded_host(
    "cpu-only", "a server without accelerators: a management controller's display, NICs, NVMe"
)
def _cpu_only(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    host.device("1a03:2000", pci_class="0x030000", link="2.0 x1", driver="ast")
    host.device("8086:1592", pci_class="0x020000", link="4.0 x16", driver="ice")
    host.device("19e5:1822", pci_class="0x020000", link="3.0 x8", driver="hinic")
    host.device("144d:a80a", pci_class="0x010802", link="4.0 x4", driver="nvme")
    parts.torch(host, "2.11.0+cpu")
    return Expected()
