"""Recorded hosts: NVIDIA cards with something missing, broken, hidden or contradictory."""

from __future__ import annotations

import host_parts as parts
import tool_outputs as tools
from host_registry import Expected, one, recorded_host
from recorded_hosts import HostBuilder


@recorded_host(
    "nvidia-unknown-product", "an NVIDIA card whose PCI id nobody listed, of a known capability"
)
def _unknown_product(host: HostBuilder) -> Expected:
    card = host.device("10de:2bff", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA RTX PRO 9000 Blackwell", mib=98304, capability="12.0")
    parts.cuda_torch(host)
    return one("nvidia", "arch:sm_120", 1)


@recorded_host("nvidia-unknown-architecture", "an NVIDIA card of a capability that nobody listed")
def _unknown_architecture(host: HostBuilder) -> Expected:
    card = host.device("10de:3fff", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA R100", mib=294912, capability="13.0")
    parts.cuda_torch(host)
    return one("nvidia", "unknown", 1)


@recorded_host(
    "nvidia-container-2-of-8", "a container that sees 8 cards in sysfs and was given two"
)
def _container(host: HostBuilder) -> Expected:
    cards = host.devices(8, "10de:26b9", driver="nvidia", link="4.0 x16")
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9", given=[2, 5])
    parts.cuda_torch(host)
    host.environ(NVIDIA_VISIBLE_DEVICES="2,5")
    return one("nvidia", "l40s", 2, missing={"nvidia": ("device node", "and 2 more", "container")})


@recorded_host("nvidia-container-none", "a container that sees 4 cards in sysfs and was given none")
def _container_none(host: HostBuilder) -> Expected:
    host.devices(4, "10de:2684", driver="nvidia", link="4.0 x16")
    parts.cuda_torch(host)
    return Expected(missing={"nvidia": ("/dev/nvidiactl missing", "container")})


@recorded_host(
    "nvidia-sysfs-hidden", "a sandbox without /sys/bus/pci: only nvidia-smi knows the cards"
)
def _sysfs_hidden(host: HostBuilder) -> Expected:
    addresses = ["0000:17:00.0", "0000:65:00.0"]
    host.node("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1", parts.CUDA_LIBRARY)
    host.command(tools.NVIDIA_SMI, tools.nvidia_smi("NVIDIA L4", addresses, 23034, "8.9"))
    parts.cuda_torch(host)
    return one("nvidia", "l4", 2)


@recorded_host("nvidia-wsl", "an RTX 4090 of a Windows host, in its Linux subsystem")
def _wsl(host: HostBuilder) -> Expected:
    host.device("1414:008e", pci_class="0x030200", link="", driver="dxgkrnl")
    host.node("/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1")
    printed = tools.nvidia_smi(
        "NVIDIA GeForce RTX 4090", ["0000:01:00.0"], 24564, "8.9", ecc="[N/A]", mig="[N/A]"
    )
    host.command(tools.NVIDIA_SMI, printed)
    parts.cuda_torch(host)
    return one("nvidia", "rtx-4090", 1)


@recorded_host("nvidia-mig", "two H200, one of them cut into MIG instances")
def _mig(host: HostBuilder) -> Expected:
    cards = host.devices(2, "10de:2335", driver="nvidia")
    parts.nvidia(host, cards, "NVIDIA H200", mib=143771, capability="9.0")
    printed = [
        tools.nvidia_smi("NVIDIA H200", [card], 143771, "9.0", mig=mig, first=n)
        for n, (card, mig) in enumerate(zip(cards, ("Disabled", "Enabled"), strict=True))
    ]
    host.command(tools.NVIDIA_SMI, "".join(printed))
    parts.cuda_torch(host)
    missing = {"nvidia": (cards[1], "MIG instances", "partitioning")}
    return one("nvidia", "h200-sxm", 1, missing=missing)


@recorded_host(
    "nvidia-no-library", "the kernel driver of an NVIDIA card without its user libraries"
)
def _no_library(host: HostBuilder) -> Expected:
    cards = host.devices(2, "10de:2331", driver="nvidia")
    parts.nvidia(
        host,
        cards,
        "NVIDIA H100 PCIe",
        mib=81559,
        capability="9.0",
        has_tool=False,
        has_library=False,
    )
    parts.cuda_torch(host)
    return Expected(missing={"nvidia": ("libcuda.so.1", "driver")})


@recorded_host("nvidia-library-mismatch", "user libraries newer than the loaded kernel driver")
def _library_mismatch(host: HostBuilder) -> Expected:
    cards = host.devices(2, "10de:2331", driver="nvidia")
    parts.nvidia(host, cards, "NVIDIA H100 PCIe", mib=81559, capability="9.0", has_tool=False)
    host.command(
        tools.NVIDIA_SMI,
        "Failed to initialize NVML: Driver/library version mismatch\n"
        "NVML library version: 580.105\n",
        exit_code=18,
    )
    parts.cuda_torch(host)
    return Expected(missing={"nvidia": ("version mismatch", "reboot")})


@recorded_host("nvidia-off-the-bus", "8 cards on PCI, of which nvidia-smi lists 7")
def _off_the_bus(host: HostBuilder) -> Expected:
    cards = host.devices(8, "10de:2bb5", driver="nvidia")
    parts.nvidia(host, cards, parts.RTX_PRO, mib=97887, capability="12.0")
    listed = [*cards[:3], *cards[4:]]
    host.command(tools.NVIDIA_SMI, tools.nvidia_smi(parts.RTX_PRO, listed, 97887, "12.0"))
    parts.cuda_torch(host)
    missing = {"nvidia": (cards[3], "does not list it", "reset")}
    return one("nvidia", "rtx-pro-6000-blackwell-server", 7, missing=missing)


@recorded_host("nvidia-hung-tool", "nvidia-smi does not come to an end")
def _hung(host: HostBuilder) -> Expected:
    cards = host.devices(1, "10de:26b9", driver="nvidia")
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9", has_tool=False)
    host.hung_command(tools.NVIDIA_SMI)
    parts.cuda_torch(host)
    return Expected(refused={"nvidia": ("nvidia-smi", "does not end", "hung")})


@recorded_host("nvidia-nouveau", "an NVIDIA card held by nouveau")
def _nouveau(host: HostBuilder) -> Expected:
    host.device("10de:2684", pci_class="0x030000", driver="nouveau")
    parts.cuda_torch(host)
    return Expected(missing={"nvidia": ("nouveau holds the card", "install NVIDIA's driver")})


@recorded_host("nvidia-vfio", "two cards, one of them reserved for a virtual machine")
def _vfio(host: HostBuilder) -> Expected:
    card = host.device("10de:26b9", driver="nvidia")
    host.device("10de:26b9", driver="vfio-pci")
    parts.nvidia(host, [card], "NVIDIA L40S", mib=46068, capability="8.9")
    parts.cuda_torch(host)
    return one("nvidia", "l40s", 1, missing={"nvidia": ("vfio-pci", "virtual machine")})


@recorded_host("nvidia-cpu-torch", "an RTX 5090 beside a CPU build of torch")
def _cpu_torch(host: HostBuilder) -> Expected:
    card = host.device("10de:2b85", pci_class="0x030000", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA GeForce RTX 5090", mib=32607, capability="12.0")
    parts.torch(host, "2.11.0+cpu")
    return one("nvidia", "rtx-5090", 1, missing={"nvidia": ("CPUs only", "CUDA build of torch")})


@recorded_host("nvidia-half-torch", "torch is registered, its files are gone")
def _half_torch(host: HostBuilder) -> Expected:
    card = host.device("10de:2b85", pci_class="0x030000", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA GeForce RTX 5090", mib=32607, capability="12.0")
    host.package("torch", "2.9.0+cu128")
    return one("nvidia", "rtx-5090", 1, missing={"nvidia": ("torch/version.py", "reinstall")})


@recorded_host("nvidia-hidden", "CUDA_VISIBLE_DEVICES gives two of four cards, in another order")
def _hidden(host: HostBuilder) -> Expected:
    cards = host.devices(4, "10de:26b9", driver="nvidia", link="4.0 x16")
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9")
    parts.cuda_torch(host)
    host.environ(CUDA_VISIBLE_DEVICES=f"3,{tools.uuid_of(1)}")
    return one("nvidia", "l40s", 4)


@recorded_host("nvidia-wrong-visible", "CUDA_VISIBLE_DEVICES names a card that is not there")
def _wrong_visible(host: HostBuilder) -> Expected:
    cards = host.devices(2, "10de:26b9", driver="nvidia")
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9")
    parts.cuda_torch(host)
    host.environ(CUDA_VISIBLE_DEVICES="0,2")
    return Expected(refused={"nvidia": ("CUDA_VISIBLE_DEVICES", "0, 1", "'2'")})


@recorded_host("nvidia-metax-torch", "an NVIDIA card, and a torch that MetaX built; no MetaX card")
def _nvidia_metax_torch(host: HostBuilder) -> Expected:
    card = host.device("10de:26b9", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA L40S", mib=46068, capability="8.9")
    parts.metax_torch(host)
    return Expected(refused={"nvidia": ("PCI says nvidia", "says metax", "+metax")})


@recorded_host("nvidia-other-name", "the PCI id of one product, the name of another")
def _other_name(host: HostBuilder) -> Expected:
    card = host.device("10de:2bb5", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA GeForce RTX 4090", mib=24564, capability="8.9")
    parts.cuda_torch(host)
    words = ("rtx-pro-6000-blackwell-server", "rtx-4090")
    return Expected(refused={"nvidia": words})


@recorded_host("nvidia-one-unknown", "an L40S beside a card of a capability that nobody listed")
def _one_unknown(host: HostBuilder) -> Expected:
    known = host.device("10de:26b9", driver="nvidia")
    unknown = host.device("10de:3fff", driver="nvidia")
    parts.nvidia(host, [known], "NVIDIA L40S", mib=46068, capability="8.9")
    host.node("/dev/nvidia1")
    listed = [
        tools.nvidia_smi("NVIDIA L40S", [known], 46068, "8.9"),
        tools.nvidia_smi("NVIDIA R100", [unknown], 294912, "13.0", first=1),
    ]
    host.command(tools.NVIDIA_SMI, "".join(listed))
    parts.cuda_torch(host)
    return Expected(devices={"nvidia": {"l40s": 1, "unknown": 1}})
