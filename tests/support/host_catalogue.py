"""The recorded hosts of tests/fixtures/hosts, composed from parts, with what detection must find.

`python tests/support/host_catalogue.py` writes the files; a test compares them with what is
composed here: a host is reviewed as a few lines and stored as what a recording looks like.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import host_parts as parts
import tool_outputs as tools
from hal.host import RecordedHost
from recorded_hosts import HostBuilder

FOLDER = Path(__file__).parents[1] / "fixtures" / "hosts"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What detection must find on a host.

    devices: backend -> (profile, number of devices) in all; profile "arch:<id>" where only the
    architecture is known, "unknown" where not even that. missing: words that the missing
    dependencies of a backend must have, each in some entry. refused: words of a backend's refusal.
    """

    devices: dict[str, dict[str, int]] = field(default_factory=dict)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)


Composer = Callable[[HostBuilder], Expected]
CATALOGUE: dict[str, tuple[str, Composer]] = {}


def _host(name: str, description: str) -> Callable[[Composer], Composer]:
    def register(compose: Composer) -> Composer:
        CATALOGUE[name] = (description, compose)
        return compose

    return register


def compose(name: str) -> tuple[RecordedHost, Expected]:
    """The host of that name and what must be found on it."""
    description, composer = CATALOGUE[name]
    builder = HostBuilder(description)
    expected = composer(builder)
    return builder.build(), expected


def one(backend: str, profile: str, count: int, **others: dict[str, tuple[str, ...]]) -> Expected:
    return Expected(devices={backend: {profile: count}}, **others)


# NVIDIA

_RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@_host("rtx-pro-6000-x8", "8 RTX PRO 6000 Server on two sockets, four root ports each")
def _rtx_pro(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4, memory_gib_each=768)
    cards = parts.numa_pairs(host, "10de:2bb5", subsystem="10de:204e", driver="nvidia")
    parts.nvidia(host, cards, _RTX_PRO, mib=97887, capability="12.0")
    parts.cuda_torch(host)
    host.package("flashinfer-python", "0.7.4")
    return one("nvidia", "rtx-pro-6000-blackwell-server", 8)


@_host("rtx-4090-x8", "8 RTX 4090 on two sockets; one in a slot that gives it 4 of 16 lanes")
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


@_host("l40s-x4-switch", "4 L40S behind one PCIe switch, asleep at 2.5 GT/s")
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


@_host("h200-x8-nvlink", "8 H200 SXM with four NVSwitches")
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
    host.package("flash-attn", "2.8.3")
    host.package("deep-gemm", "2.1.1")
    return one("nvidia", "h200-sxm", 8)


@_host("nvidia-unknown-product", "an NVIDIA card whose PCI id nobody listed, of a known capability")
def _unknown_product(host: HostBuilder) -> Expected:
    card = host.device("10de:2bff", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA RTX PRO 9000 Blackwell", mib=98304, capability="12.0")
    parts.cuda_torch(host)
    return one("nvidia", "arch:sm_120", 1)


@_host("nvidia-unknown-architecture", "an NVIDIA card of a capability that nobody listed")
def _unknown_architecture(host: HostBuilder) -> Expected:
    card = host.device("10de:3fff", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA R100", mib=294912, capability="13.0")
    parts.cuda_torch(host)
    return one("nvidia", "unknown", 1)


@_host("nvidia-container-2-of-8", "a container that sees 8 cards in sysfs and was given two")
def _container(host: HostBuilder) -> Expected:
    cards = host.devices(8, "10de:26b9", driver="nvidia", link="4.0 x16")
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9", given=[2, 5])
    parts.cuda_torch(host)
    host.environ(NVIDIA_VISIBLE_DEVICES="2,5")
    return one("nvidia", "l40s", 2, missing={"nvidia": ("device node", "and 2 more", "container")})


@_host("nvidia-container-none", "a container that sees 4 cards in sysfs and was given none")
def _container_none(host: HostBuilder) -> Expected:
    host.devices(4, "10de:2684", driver="nvidia", link="4.0 x16")
    parts.cuda_torch(host)
    return Expected(missing={"nvidia": ("/dev/nvidiactl missing", "container")})


@_host("nvidia-sysfs-hidden", "a sandbox without /sys/bus/pci: only nvidia-smi knows the cards")
def _sysfs_hidden(host: HostBuilder) -> Expected:
    addresses = ["0000:17:00.0", "0000:65:00.0"]
    host.node("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1", parts.CUDA_LIBRARY)
    host.command(tools.NVIDIA_SMI, tools.nvidia_smi("NVIDIA L4", addresses, 23034, "8.9"))
    parts.cuda_torch(host)
    return one("nvidia", "l4", 2)


@_host("nvidia-no-library", "the kernel driver of an NVIDIA card without its user libraries")
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


@_host("nvidia-library-mismatch", "user libraries newer than the loaded kernel driver")
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


@_host("nvidia-off-the-bus", "8 cards on PCI, of which nvidia-smi lists 7")
def _off_the_bus(host: HostBuilder) -> Expected:
    cards = host.devices(8, "10de:2bb5", driver="nvidia")
    parts.nvidia(host, cards, _RTX_PRO, mib=97887, capability="12.0")
    listed = [*cards[:3], *cards[4:]]
    host.command(tools.NVIDIA_SMI, tools.nvidia_smi(_RTX_PRO, listed, 97887, "12.0"))
    parts.cuda_torch(host)
    missing = {"nvidia": (cards[3], "does not list it", "reset")}
    return one("nvidia", "rtx-pro-6000-blackwell-server", 7, missing=missing)


@_host("nvidia-hung-tool", "nvidia-smi does not come to an end")
def _hung(host: HostBuilder) -> Expected:
    cards = host.devices(1, "10de:26b9", driver="nvidia")
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9", has_tool=False)
    host.hung_command(tools.NVIDIA_SMI)
    parts.cuda_torch(host)
    return Expected(refused={"nvidia": ("nvidia-smi", "does not end", "hung")})


@_host("nvidia-nouveau", "an NVIDIA card held by nouveau")
def _nouveau(host: HostBuilder) -> Expected:
    host.device("10de:2684", pci_class="0x030000", driver="nouveau")
    parts.cuda_torch(host)
    return Expected(missing={"nvidia": ("nouveau holds the card", "install NVIDIA's driver")})


@_host("nvidia-vfio", "two cards, one of them reserved for a virtual machine")
def _vfio(host: HostBuilder) -> Expected:
    card = host.device("10de:26b9", driver="nvidia")
    host.device("10de:26b9", driver="vfio-pci")
    parts.nvidia(host, [card], "NVIDIA L40S", mib=46068, capability="8.9")
    parts.cuda_torch(host)
    return one("nvidia", "l40s", 1, missing={"nvidia": ("vfio-pci", "virtual machine")})


@_host("nvidia-cpu-torch", "an RTX 5090 beside a CPU build of torch")
def _cpu_torch(host: HostBuilder) -> Expected:
    card = host.device("10de:2b85", pci_class="0x030000", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA GeForce RTX 5090", mib=32607, capability="12.0")
    parts.torch(host, "2.11.0+cpu")
    return one("nvidia", "rtx-5090", 1, missing={"nvidia": ("CPUs only", "CUDA build of torch")})


@_host("nvidia-half-torch", "torch is registered, its files are gone")
def _half_torch(host: HostBuilder) -> Expected:
    card = host.device("10de:2b85", pci_class="0x030000", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA GeForce RTX 5090", mib=32607, capability="12.0")
    host.package("torch", "2.9.0+cu128")
    return one("nvidia", "rtx-5090", 1, missing={"nvidia": ("torch/version.py", "reinstall")})


@_host("nvidia-hidden", "CUDA_VISIBLE_DEVICES gives two of four cards, in another order")
def _hidden(host: HostBuilder) -> Expected:
    cards = host.devices(4, "10de:26b9", driver="nvidia", link="4.0 x16")
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9")
    parts.cuda_torch(host)
    host.environ(CUDA_VISIBLE_DEVICES=f"3,{tools.uuid_of(1)}")
    return one("nvidia", "l40s", 4)


@_host("nvidia-wrong-visible", "CUDA_VISIBLE_DEVICES names a card that is not there")
def _wrong_visible(host: HostBuilder) -> Expected:
    cards = host.devices(2, "10de:26b9", driver="nvidia")
    parts.nvidia(host, cards, "NVIDIA L40S", mib=46068, capability="8.9")
    parts.cuda_torch(host)
    host.environ(CUDA_VISIBLE_DEVICES="0,2")
    return Expected(refused={"nvidia": ("CUDA_VISIBLE_DEVICES", "0, 1", "'2'")})


@_host("nvidia-metax-torch", "an NVIDIA card, and a torch that MetaX built; no MetaX card")
def _nvidia_metax_torch(host: HostBuilder) -> Expected:
    card = host.device("10de:26b9", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA L40S", mib=46068, capability="8.9")
    parts.metax_torch(host)
    return Expected(refused={"nvidia": ("PCI says nvidia", "says metax", "+metax")})


@_host("nvidia-other-name", "the PCI id of one product, the name of another")
def _other_name(host: HostBuilder) -> Expected:
    card = host.device("10de:2bb5", driver="nvidia")
    parts.nvidia(host, [card], "NVIDIA GeForce RTX 4090", mib=24564, capability="8.9")
    parts.cuda_torch(host)
    words = ("rtx-pro-6000-blackwell-server", "rtx-4090")
    return Expected(refused={"nvidia": words})


# AMD


@_host("mi300x-x8", "8 MI300X, every pair linked by xGMI")
def _mi300x(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    options = {"subsystem": "1002:74a1", "pci_class": "0x120000", "driver": "amdgpu"}
    cards = parts.numa_pairs(host, "1002:74a1", **options)
    parts.amd(
        host,
        cards,
        version=90402,
        device="74a1",
        memory_bytes=206141652992,
        units=304,
        hive=0xA185_00FE_4000,
    )
    parts.torch(host, "2.9.0+rocm6.4", hip="6.4.43484-123eb5128")
    host.package("triton", "3.5.0", modules=["triton"])
    host.package("amd-aiter", "0.1.7")
    return one("amd", "mi300x", 8)


@_host("rx-7900-gre", "an RX 7900 GRE, which has the XTX's PCI id, beside a CPU's own graphics")
def _rx_7900_gre(host: HostBuilder) -> Expected:
    card = host.device(
        "1002:744c", pci_class="0x030000", link="4.0 x16", driver="amdgpu", revision="0xce"
    )
    host.device("1002:164e", pci_class="0x030000", link="4.0 x16", driver="amdgpu", revision="0xcb")
    parts.amd(host, [card], version=110000, device="744c", memory_bytes=17163091968, units=80)
    parts.torch(host, "2.9.0+rocm6.4", hip="6.4.43484-123eb5128")
    return one("amd", "arch:gfx1100", 1)


@_host("rx-7900-xtx", "an RX 7900 XTX beside a stock CUDA torch")
def _rx_7900_xtx(host: HostBuilder) -> Expected:
    card = host.device(
        "1002:744c", pci_class="0x030000", link="4.0 x16", driver="amdgpu", revision="0xc8"
    )
    parts.amd(host, [card], version=110000, device="744c", memory_bytes=25753026560, units=96)
    parts.cuda_torch(host)
    missing = {"amd": ("NVIDIA CUDA", "ROCm build of torch")}
    return one("amd", "rx-7900-xtx", 1, missing=missing)


@_host("amd-mi50", "an MI50: gfx906, as Hygon's Z100, but AMD's by PCI")
def _mi50(host: HostBuilder) -> Expected:
    card = host.device("1002:66a1", pci_class="0x038000", link="4.0 x16", driver="amdgpu")
    parts.amd(host, [card], version=90006, device="66a1", memory_bytes=17163091968, units=60)
    parts.torch(host, "2.4.1+rocm6.0", hip="6.0.32830-d62f6a171")
    return one("amd", "arch:gfx906", 1)


# Look-alikes


@_host("metax-c550-x8", "8 MetaX C550 modules")
def _metax(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    cards = parts.numa_pairs(
        host, "9999:4083", subsystem="9999:4083", pci_class="0x038000", driver="metax"
    )
    parts.metax(host, cards)
    parts.metax_torch(host)
    return one("metax", "metax-c550", 8)


@_host("metax-stock-torch", "a MetaX C500 beside a stock CUDA torch")
def _metax_stock(host: HostBuilder) -> Expected:
    card = host.device("9999:0a01", pci_class="0x038000", driver="metax")
    parts.metax(host, [card], "MetaX C500")
    parts.cuda_torch(host)
    return one("metax", "metax-c500", 1, missing={"metax": ("NVIDIA CUDA", "+metax")})


@_host("bi-v150-x8", "8 BI-V150 cards: 16 devices of 32 GiB, two behind each card's switch")
def _bi_v150(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    devices: list[str] = []
    for numa in (0, 1):
        for _ in range(4):
            switch = host.switch(numa=numa, link="4.0 x16")
            devices += host.devices(
                2,
                "1e3e:0002",
                behind=switch,
                pci_class="0x120000",
                link="4.0 x16",
                driver="iluvatar",
            )
    host.node(*(f"/dev/iluvatar{n}" for n in range(16)), "/usr/local/corex/lib64/libixml.so")
    host.command("ixsmi", tools.ixsmi("Iluvatar BI-V150", devices, 32768))
    parts.torch(host, "2.7.1+corex.4.3.0", cuda="10.2")
    host.package("triton", "3.1.0+corex.4.3.0", modules=["triton"])
    return one("iluvatar", "bi-v150", 16)


@_host("hygon-k100-ai-x8", "8 Hygon K100_AI in a server with Hygon CPUs")
def _hygon(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4, cpu="Hygon C86 7490", cpu_vendor="HygonGenuine")
    host.device("1d94:1450", pci_class="0x060000", link="")
    host.device("1d94:1486", pci_class="0x108000", link="", driver="ccp")
    host.device("1d94:145c", pci_class="0x0c0330", link="", driver="xhci_hcd")
    cards = parts.numa_pairs(
        host,
        "1d94:6211",
        subsystem="1d94:6211",
        pci_class="0x0b4000",
        link="4.0 x16",
        driver="hydcu",
    )
    parts.amd(
        host,
        cards,
        version=90208,
        device="6211",
        memory_bytes=68702699520,
        units=120,
        module="hydcu",
        vendor=0x1D94,
    )
    host.node("/dev/mkfd")
    host.command(tools.HY_SMI, tools.hy_smi("K100_AI", cards, 68702699520))
    parts.torch(host, "2.5.1+das.opt1.dtk25041", hip="6.1.25045")
    return one("hygon", "hygon-k100-ai", 8)


@_host("hygon-z100", "a Hygon Z100: gfx906, as AMD's MI50, but Hygon's by PCI")
def _z100(host: HostBuilder) -> Expected:
    card = host.device("1d94:54b7", pci_class="0x038000", link="4.0 x16", driver="hydcu")
    parts.amd(
        host,
        [card],
        version=90006,
        device="54b7",
        memory_bytes=34342961152,
        units=60,
        module="hydcu",
        vendor=0x1D94,
    )
    host.node("/dev/mkfd")
    host.command(tools.HY_SMI, tools.hy_smi("Z100", [card], 34342961152))
    parts.torch(host, "2.4.1+das.opt1.dtk2504", hip="6.1.25045")
    return one("hygon", "hygon-z100", 1)


@_host("kunlunxin-p800-x8", "8 Kunlunxin P800 modules, whose torch is a stock CUDA build")
def _kunlunxin(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    cards = parts.numa_pairs(
        host, "1d22:3688", subsystem="1d22:3688", pci_class="0x120000", driver="kunlun"
    )
    host.node("/dev/xpuctrl", *(f"/dev/xpu{n}" for n in range(8)))
    host.command("xpu-smi", tools.xpu_smi_kunlun("P800 OAM", cards, 98304))
    parts.torch(host, "2.9.0+cu129", cuda="12.9")
    host.package("torch_xmlir", "20260801", modules=["torch_xmlir"])
    return one("kunlunxin", "kunlunxin-p800", 8)


@_host("kunlunxin-no-extension", "Kunlunxin cards beside a stock CUDA torch, without torch_xmlir")
def _kunlunxin_bare(host: HostBuilder) -> Expected:
    cards = host.devices(2, "1d22:3688", pci_class="0x078000", driver="kunlun")
    host.node("/dev/xpuctrl", "/dev/xpu0", "/dev/xpu1")
    host.command("xpu-smi", tools.xpu_smi_kunlun("P800 OAM", cards, 98304))
    parts.torch(host, "2.9.0+cu129", cuda="12.9")
    missing = {"kunlunxin": ("torch_xmlir", "xpytorch")}
    return one("kunlunxin", "kunlunxin-p800", 2, missing=missing)


@_host("kunlunxin-torch-says-nvidia", "PCI says Kunlunxin, torch in a child process says NVIDIA")
def _kunlunxin_nvidia(host: HostBuilder) -> Expected:
    host.device("1d22:3688", pci_class="0x120000", driver="kunlun")
    host.node("/dev/xpuctrl", "/dev/xpu0")
    parts.torch(host, "2.9.0+cu129", cuda="12.9")
    host.package("torch_xmlir", "20260801", modules=["torch_xmlir"])
    host.command(
        "{python} -m hal_backends.detecting.torch_probe cuda torch_xmlir",
        '\nHALSTACK_TORCH {"devices": [{"name": "NVIDIA A100-SXM4-80GB", "capability": "8.0", '
        '"address": ""}], "problem": ""}\n',
    )
    words = ("PCI says kunlunxin (1d22:3688)", "NVIDIA A100-SXM4-80GB")
    return Expected(refused={"kunlunxin": words})


@_host("thead-ppu-x4", "4 T-Head PPUs beside Alibaba's network functions of the same PCI vendor")
def _thead(host: HostBuilder) -> Expected:
    host.device("1ded:107f", pci_class="0x020000", driver="erdma")
    cards = host.devices(4, "1ded:6001", pci_class="0x120000", driver="alixpu")
    host.node("/dev/alixpu", "/dev/alixpu_ctl", *(f"/dev/alixpu_ppu{n}" for n in range(4)))
    host.node("/usr/local/PPU_SDK/lib/libhgml.so")
    host.environ(PPU_SDK="/usr/local/PPU_SDK")
    host.command(tools.PPU_SMI, tools.ppu_smi("PPU-ZW810E", cards, 98304))
    parts.torch(host, "2.6.0+ppu1.5.0", cuda="12.4", sail="1.5.0")
    return one("thead", "unknown", 4)


# The others


@_host("ascend-910b-x8", "8 Ascend 910B3 in a Kunpeng server; NPU order is not PCI order")
def _ascend_910b(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4, cpu="Kunpeng-920", cpu_vendor="HiSilicon")
    parts.kunpeng_functions(host)
    cards = parts.numa_pairs(
        host,
        "19e5:d802",
        subsystem="19e5:3005",
        pci_class="0x120000",
        link="4.0 x16",
        driver="devdrv_device_driver",
    )
    order = [*cards[4:], *cards[:4]]
    parts.ascend(host, 8)
    rows = [(n, 0, "910B3", address) for n, address in enumerate(order)]
    host.command("npu-smi info", tools.npu_smi(rows, 65536))
    parts.ascend_torch(host)
    host.environ(ASCEND_RT_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    return one("ascend", "ascend-910b3", 8)


@_host("ascend-910c", "one 910C package: two NPUs")
def _ascend_910c(host: HostBuilder) -> Expected:
    dies = host.devices(2, "19e5:d803", pci_class="0x120000", driver="devdrv_device_driver")
    parts.ascend(host, 2)
    rows = [(0, chip, "Ascend910", address) for chip, address in enumerate(dies)]
    host.command("npu-smi info", tools.npu_smi(rows, 65536, has_physical_ids=True))
    parts.ascend_torch(host)
    return one("ascend", "ascend-910c", 2)


@_host("ascend-first-910", "the first Ascend 910, which npu-smi calls 910B")
def _ascend_first(host: HostBuilder) -> Expected:
    card = host.device("19e5:d801", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    host.command("npu-smi info", tools.npu_smi([(0, 0, "910B", card)], 32768))
    parts.ascend_torch(host)
    return one("ascend", "arch:ascend-910a", 1)


@_host("ascend-wrong-generation", "PCI says the first 910, npu-smi says 910B3")
def _ascend_wrong(host: HostBuilder) -> Expected:
    card = host.device("19e5:d801", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    host.command("npu-smi info", tools.npu_smi([(0, 0, "910B3", card)], 65536))
    parts.ascend_torch(host)
    return Expected(refused={"ascend": ("19e5:d801", "910B3")})


@_host("ascend-310p", "two chips of a 310P card, which share a bus id")
def _ascend_310p(host: HostBuilder) -> Expected:
    card = host.device("19e5:d500", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 2)
    rows = [(1, chip, "310P3", card) for chip in range(2)]
    host.command("npu-smi info", tools.npu_smi_310p(rows, 44280))
    parts.ascend_torch(host)
    return one("ascend", "ascend-310p", 2)


@_host("ascend-no-tool", "a container with NPUs and without npu-smi: torch tells the SoC")
def _ascend_no_tool(host: HostBuilder) -> Expected:
    host.device("19e5:d802", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    parts.ascend_torch(host)
    host.command(
        "{python} -m hal_backends.detecting.torch_probe npu torch_npu",
        '\nHALSTACK_TORCH {"devices": [{"name": "Ascend910B4", "capability": "224", '
        '"address": ""}], "problem": ""}\n',
    )
    return one("ascend", "ascend-910b4", 1)


@_host("ascend-half-broken", "torch_npu is registered without its module, and for another torch")
def _ascend_half(host: HostBuilder) -> Expected:
    card = host.device("19e5:d802", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    host.command("npu-smi info", tools.npu_smi([(0, 0, "910B2", card)], 65536))
    parts.torch(host, "2.9.0+cpu")
    host.package("torch_npu", "2.7.1")
    missing = {"ascend": ("all of torch_npu", "2.7.1", "reinstall")}
    return one("ascend", "ascend-910b2", 1, missing=missing)


@_host("ascend-other-torch", "torch_npu 2.7 beside torch 2.9")
def _ascend_other_torch(host: HostBuilder) -> Expected:
    card = host.device("19e5:d802", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    host.command("npu-smi info", tools.npu_smi([(0, 0, "910B1", card)], 65536))
    parts.torch(host, "2.9.0+cpu")
    host.package("torch_npu", "2.7.1", modules=["torch_npu"])
    missing = {"ascend": ("torch_npu for torch 2.9.0", "another torch")}
    return one("ascend", "ascend-910b1", 1, missing=missing)


@_host("mlu370-x8", "two MLU370-X8 cards: four chips")
def _mlu370(host: HostBuilder) -> Expected:
    chips = host.devices(
        4, "cabc:0370", pci_class="0x120000", link="4.0 x16", driver="cambricon-drv"
    )
    host.node("/dev/cambricon_ctl", *(f"/dev/cambricon_dev{n}" for n in range(4)))
    host.command("cnmon", tools.cnmon("MLU370-X8", chips, 23374))
    parts.torch(host, "2.5.0+cpu")
    host.package("torch_mlu", "1.24.1+torch2.5.0", modules=["torch_mlu"])
    return one("cambricon", "mlu370-x8", 4)


@_host("mtt-s5000-x8", "8 Moore Threads S5000")
def _s5000(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    cards = parts.numa_pairs(host, "1ed5:0400", pci_class="0x030200", driver="mtgpu")
    host.node(*(f"/dev/mtgpu.{n}" for n in range(8)))
    host.command("mthreads-gmi", tools.mthreads_gmi("MTT S5000", cards, 81920))
    parts.torch(host, "2.9.0+musa5.2.0", musa="5.2.0")
    host.package("torch_musa", "2.9.1", modules=["torch_musa"])
    return one("moore_threads", "mtt-s5000", 8)


@_host("enflame-s60-x2", "2 Enflame S60")
def _s60(host: HostBuilder) -> Expected:
    cards = host.devices(2, "1e36:c035", pci_class="0x120000", driver="enflame")
    host.node("/dev/gcuctl", "/dev/gcu0", "/dev/gcu1")
    host.command("efsmi", tools.efsmi("Enflame S60", cards, 49120))
    parts.torch(host, "2.6.0+cpu")
    host.package("torch_gcu", "2.6.0", modules=["torch_gcu"])
    return one("enflame", "enflame-s60", 2)


@_host("biren-br166-x2", "2 Biren 166, whose PCI vendor no list has")
def _biren(host: HostBuilder) -> Expected:
    cards = host.devices(2, "1ee0:0166", pci_class="0x120000", driver="biren")
    host.node("/dev/biren/card_0", "/dev/biren/card_1")
    host.command(tools.BRSMI, tools.brsmi("BR166", cards, 65536))
    parts.torch(host, "2.9.0+cpu")
    host.package("torch_supa", "2.9.0", modules=["torch_supa"])
    return one("biren", "biren-br166", 2)


@_host("tecorigin-t1", "one Tecorigin T1 card: four devices at one bus id")
def _tecorigin(host: HostBuilder) -> Expected:
    card = host.device("1f48:0001", pci_class="0x120000", driver="tcaicard")
    host.node("/dev/tcaicard0")
    host.command("teco-smi", tools.teco_smi("TECO_AICARD_01", [card] * 4, 16384))
    parts.torch(host, "2.4.0+cpu")
    host.package("torch_sdaa", "2.1.0", modules=["torch_sdaa"])
    return one("tecorigin", "tecorigin-t1", 4)


@_host("arc-b60-x4", "4 Arc Pro B60, whose functions read 2.5 GT/s x1, beside a CPU's graphics")
def _b60(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4, cpu="INTEL(R) XEON(R) 6530", cpu_vendor="GenuineIntel")
    bridge = host.host_bridge()
    path = f"{bridge.path}/0000:{bridge.bus:02x}:02.0"
    host.link("/sys/bus/pci/devices/0000:00:02.0", path)
    for name, text in {"vendor": "0x8086", "device": "0xa780", "class": "0x030000"}.items():
        host.file(f"{path}/{name}", f"{text}\n")
    cards = [parts.under_card_switch(host, "8086:e211", numa=n % 2) for n in range(4)]
    parts.render_nodes(host, cards)
    host.node("/usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1")
    name = "Intel(R) Graphics [0xe211]"
    host.command("xpu-smi discovery -j", tools.xpu_smi_intel(name, cards))
    parts.torch(host, "2.9.0+xpu", xpu="20250302")
    return one("intel_xpu", "intel-arc-pro-b60", 4)


@_host("gaudi3-x8", "8 Gaudi 3 modules, whose module ids are in another order")
def _gaudi(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4, cpu="INTEL(R) XEON(R) 6530", cpu_vendor="GenuineIntel")
    cards = parts.numa_pairs(host, "1da3:1060", pci_class="0x120000", driver="habanalabs")
    for number, address in enumerate(cards):
        host.device_node(address, f"/dev/accel/accel{number}", subsystem="accel")
    modules = [6, 4, 0, 2, 3, 1, 7, 5]
    host.command(tools.HL_SMI, tools.hl_smi("HL-325L", cards, 131072, modules))
    parts.torch(host, "2.7.1+hpu.1.21.3")
    host.package("habana-torch-plugin", "1.21.3", modules=["habana_frameworks"])
    host.environ(HABANA_VISIBLE_MODULES="0,2,6")
    return one("gaudi", "intel-gaudi3", 8)


# Several vendors


@_host("mixed-nvidia-metax", "an L40S and a C500; the torch is MetaX's")
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


@_host("mixed-nvidia-models", "an RTX 4090 and an RTX 5090: CUDA's order is not PCI's")
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


@_host("mixed-nvidia-amd", "an RTX 5090 and a W7900; the torch is NVIDIA's")
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


@_host("cpu-only", "a server without accelerators: a management controller's display, NICs, NVMe")
def _cpu_only(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    host.device("1a03:2000", pci_class="0x030000", link="2.0 x1", driver="ast")
    host.device("8086:1592", pci_class="0x020000", link="4.0 x16", driver="ice")
    host.device("19e5:1822", pci_class="0x020000", link="3.0 x8", driver="hinic")
    host.device("144d:a80a", pci_class="0x010802", link="4.0 x4", driver="nvme")
    parts.torch(host, "2.11.0+cpu")
    return Expected()


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
