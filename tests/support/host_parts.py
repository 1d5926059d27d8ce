"""Parts of recorded hosts: torch as each vendor builds it, and each family's cards with driver,
nodes and tool, so that a host of the catalogue is a few lines."""

from __future__ import annotations

from collections.abc import Sequence

import tool_outputs as tools
from recorded_hosts import HostBridge, HostBuilder, Port

CUDA_LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def torch(host: HostBuilder, version: str, **variables: str) -> None:
    """torch with torch/version.py; variables: cuda="12.8", hip="6.4.43482", maca=…"""
    names = dict.fromkeys(("cuda", "hip", "xpu")) | variables
    lines = [
        "from typing import Optional",
        "__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']",
        f"__version__ = '{version}'",
        "debug = False",
        *(f"{name}: Optional[str] = {value!r}" for name, value in names.items()),
        "git_version = '0fabc3ba44823f257e70ce397d989c8de5e362c1'",
    ]
    host.package(
        "torch", version, modules=["torch"], files={"torch/version.py": "\n".join(lines) + "\n"}
    )
    host.package("numba", "0.62.1", modules=["numba"])  # for the host's CPU


def cuda_torch(host: HostBuilder) -> None:
    torch(host, "2.9.0+cu128", cuda="12.8")
    host.package("triton", "3.5.0", modules=["triton"])


def nvidia(
    host: HostBuilder,
    addresses: Sequence[str],
    name: str,
    *,
    mib: int,
    capability: str,
    ecc: str = "Enabled",
    given: Sequence[int] | None = None,
    has_tool: bool = True,
    has_library: bool = True,
) -> None:
    """The driver's side of NVIDIA cards. given: the positions that this process was given."""
    given = range(len(addresses)) if given is None else given
    host.node("/dev/nvidiactl", "/dev/nvidia-uvm")
    host.file(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
    )
    for minor in given:
        host.node(f"/dev/nvidia{minor}")
        host.file(
            f"/proc/driver/nvidia/gpus/{addresses[minor]}/information",
            f"Model: \t\t {name}\nIRQ:   \t\t 211\nGPU UUID: \t {tools.uuid_of(minor)}\n"
            f"Bus Type: \t PCIe\nBus Location: \t {addresses[minor]}\nDevice Minor: \t {minor}\n"
            "GPU Excluded:\t No\n",
        )
    if has_library:
        host.node(CUDA_LIBRARY)
    if has_tool:
        listed = [addresses[minor] for minor in given]
        previous = host.commands.get(tools.NVIDIA_SMI)
        before = previous.stdout if previous is not None else ""
        first = before.count("\n")
        printed = tools.nvidia_smi(name, listed, mib, capability, ecc=ecc, first=first)
        host.command(tools.NVIDIA_SMI, before + printed)


def amd(
    host: HostBuilder,
    addresses: Sequence[str],
    *,
    version: int,
    device: str,
    memory_bytes: int,
    units: int,
    hive: int = 0,
    module: str = "amdgpu",
    vendor: int = 4098,
) -> None:
    """The compute driver's side of AMD's or Hygon's cards, with their render nodes."""
    host.node("/dev/kfd")
    host.kernel_module(module, "6.14.14")
    taken = sum(path.startswith("/sys/class/kfd") for path in host.files)
    for number, address in enumerate(addresses, taken):
        domain, bus, slot = address.split(":")
        location = int(bus, 16) << 8 | int(slot.split(".")[0], 16) << 3
        host.device_node(address, f"/dev/dri/card{number + 1}", subsystem="drm")
        host.device_node(address, f"/dev/dri/renderD{128 + number}", subsystem="drm")
        host.file(f"{host.path_of(address)}/mem_info_vram_total", f"{memory_bytes}\n")
        host.file(
            f"/sys/class/kfd/kfd/topology/nodes/{number + 1}/properties",
            f"cpu_cores_count 0\nsimd_count {units * 4}\nmem_banks_count 1\nwave_front_size 64\n"
            f"simd_per_cu 4\ngfx_target_version {version}\nvendor_id {vendor}\n"
            f"device_id {int(device, 16)}\nlocation_id {location}\ndomain {int(domain, 16)}\n"
            f"drm_render_minor {128 + number}\nhive_id {hive}\n",
        )


def render_nodes(
    host: HostBuilder,
    addresses: Sequence[str],
    *,
    first: int = 0,
    given: Sequence[int] | None = None,
) -> None:
    """A render node for each card."""
    given = range(len(addresses)) if given is None else given
    for number, address in enumerate(addresses):
        node = f"/dev/dri/renderD{128 + first + number}"
        host.device_node(address, node, subsystem="drm", is_given=number in given)


def metax(host: HostBuilder, addresses: Sequence[str], name: str = "MetaX C550") -> None:
    host.node("/dev/mxcd", "/opt/mxdriver/lib/libmxsml.so", "/opt/maca/lib/libmxsml.so")
    render_nodes(host, addresses)
    host.command("mx-smi", tools.mx_smi(name, addresses, 65536))


def metax_torch(host: HostBuilder) -> None:
    torch(host, "2.8.0+metax3.3.0.2", cuda="11.6", maca="3.3.0.2")
    host.package("triton", "3.0.0+metax3.3.0.2", modules=["triton"])


def ascend(host: HostBuilder, count: int, *, given: Sequence[int] | None = None) -> None:
    """The driver's side of Ascend NPUs."""
    host.node("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
    host.node("/usr/local/Ascend/driver/lib64/driver/libascend_hal.so")
    for number in range(count) if given is None else given:
        host.node(f"/dev/davinci{number}")


def ascend_torch(host: HostBuilder) -> None:
    torch(host, "2.7.1+cpu")
    host.package("torch_npu", "2.7.1.post1", modules=["torch_npu"])
    host.package("triton-ascend", "3.2.0", modules=["triton"])


def kunpeng_functions(host: HostBuilder) -> None:
    """What a Kunpeng server shows of PCI vendor 19e5 besides NPUs: ZIP and crypto engines of class
    "processing accelerator", the management controller's display, network and storage."""
    host.device("19e5:a250", pci_class="0x120000", link="", driver="hisi_zip")
    host.device("19e5:a258", pci_class="0x100000", link="", driver="hisi_hpre")
    host.device("19e5:1711", pci_class="0x030000", link="1.0 x1", driver="hibmc-drm")
    host.device("19e5:a222", pci_class="0x020000", link="", driver="hns3")


def numa_pairs(
    host: HostBuilder, ids: str, *, per_socket: int = 4, sockets: int = 2, **options: str
) -> list[str]:
    """Cards spread over sockets, each with a root port of its own."""
    found: list[str] = []
    for numa in range(sockets):
        found += host.devices(per_socket, ids, numa=numa, **options)  # type: ignore[arg-type]
    return found


def under_card_switch(host: HostBuilder, ids: str, *, numa: int = 0, link: str = "5.0 x8") -> str:
    """An Intel card: its own switch, below which the function reads 2.5 GT/s x1 whatever the slot
    does."""
    root: Port | HostBridge = host.root_port(numa=numa, link=link)
    switch = host.switch(behind=root, link=link, ids="8086:e2ff")
    card = host.device(
        ids, behind=switch, pci_class="0x030000", link="1.0 x1", driver="xe", subsystem="8086:1100"
    )
    port = host.path_of(card).rsplit("/", 1)[0]
    host.file(f"{port}/vendor", "0x8086\n")
    host.file(f"{port}/device", "0xe2f0\n")
    return card
