"""Recorded hosts: AMD, and those whose torch shows CUDA or HIP devices of another vendor."""

from __future__ import annotations

import host_parts as parts
import tool_outputs as tools
from host_registry import Expected, one, recorded_host
from recorded_hosts import HostBuilder


@recorded_host("mi300x-x8", "8 MI300X, every pair linked by xGMI")
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


@recorded_host(
    "rx-7900-gre", "an RX 7900 GRE, which has the XTX's PCI id, beside a CPU's own graphics"
)
def _rx_7900_gre(host: HostBuilder) -> Expected:
    card = host.device(
        "1002:744c", pci_class="0x030000", link="4.0 x16", driver="amdgpu", revision="0xce"
    )
    host.device("1002:164e", pci_class="0x030000", link="4.0 x16", driver="amdgpu", revision="0xcb")
    parts.amd(host, [card], version=110000, device="744c", memory_bytes=17163091968, units=80)
    parts.torch(host, "2.9.0+rocm6.4", hip="6.4.43484-123eb5128")
    return one("amd", "arch:gfx1100", 1)


@recorded_host("rx-7900-xtx", "an RX 7900 XTX beside a stock CUDA torch")
def _rx_7900_xtx(host: HostBuilder) -> Expected:
    card = host.device(
        "1002:744c", pci_class="0x030000", link="4.0 x16", driver="amdgpu", revision="0xc8"
    )
    parts.amd(host, [card], version=110000, device="744c", memory_bytes=25753026560, units=96)
    parts.cuda_torch(host)
    missing = {"amd": ("NVIDIA CUDA", "ROCm build of torch")}
    return one("amd", "rx-7900-xtx", 1, missing=missing)


@recorded_host("amd-mi50", "an MI50: gfx906, as Hygon's Z100, but AMD's by PCI")
def _mi50(host: HostBuilder) -> Expected:
    card = host.device("1002:66a1", pci_class="0x038000", link="4.0 x16", driver="amdgpu")
    parts.amd(host, [card], version=90006, device="66a1", memory_bytes=17163091968, units=60)
    parts.torch(host, "2.4.1+rocm6.0", hip="6.0.32830-d62f6a171")
    return one("amd", "arch:gfx906", 1)


@recorded_host("metax-c550-x8", "8 MetaX C550 modules")
def _metax(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    cards = parts.numa_pairs(
        host, "9999:4083", subsystem="9999:4083", pci_class="0x038000", driver="metax"
    )
    parts.metax(host, cards)
    parts.metax_torch(host)
    return one("metax", "metax-c550", 8)


@recorded_host("metax-stock-torch", "a MetaX C500 beside a stock CUDA torch")
def _metax_stock(host: HostBuilder) -> Expected:
    card = host.device("9999:0a01", pci_class="0x038000", driver="metax")
    parts.metax(host, [card], "MetaX C500")
    parts.cuda_torch(host)
    return one("metax", "metax-c500", 1, missing={"metax": ("NVIDIA CUDA", "+metax")})


@recorded_host("bi-v150-x8", "8 BI-V150 cards: 16 devices of 32 GiB, two behind each card's switch")
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


@recorded_host("hygon-k100-ai-x8", "8 Hygon K100_AI in a server with Hygon CPUs")
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


@recorded_host("hygon-z100", "a Hygon Z100: gfx906, as AMD's MI50, but Hygon's by PCI")
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


@recorded_host("kunlunxin-p800-x8", "8 Kunlunxin P800 modules, whose torch is a stock CUDA build")
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


@recorded_host(
    "kunlunxin-no-extension", "Kunlunxin cards beside a stock CUDA torch, without torch_xmlir"
)
def _kunlunxin_bare(host: HostBuilder) -> Expected:
    cards = host.devices(2, "1d22:3688", pci_class="0x078000", driver="kunlun")
    host.node("/dev/xpuctrl", "/dev/xpu0", "/dev/xpu1")
    host.command("xpu-smi", tools.xpu_smi_kunlun("P800 OAM", cards, 98304))
    parts.torch(host, "2.9.0+cu129", cuda="12.9")
    missing = {"kunlunxin": ("torch_xmlir", "xpytorch")}
    return one("kunlunxin", "kunlunxin-p800", 2, missing=missing)


@recorded_host(
    "kunlunxin-torch-says-nvidia", "PCI says Kunlunxin, torch in a child process says NVIDIA"
)
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


@recorded_host(
    "thead-ppu-x4", "4 T-Head PPUs beside Alibaba's network functions of the same PCI vendor"
)
def _thead(host: HostBuilder) -> Expected:
    host.device("1ded:107f", pci_class="0x020000", driver="erdma")
    cards = host.devices(4, "1ded:6001", pci_class="0x120000", driver="alixpu")
    host.node("/dev/alixpu", "/dev/alixpu_ctl", *(f"/dev/alixpu_ppu{n}" for n in range(4)))
    host.node("/usr/local/PPU_SDK/lib/libhgml.so")
    host.environ(PPU_SDK="/usr/local/PPU_SDK")
    host.command(tools.PPU_SMI, tools.ppu_smi("PPU-ZW810E", cards, 98304))
    parts.torch(host, "2.6.0+ppu1.5.0", cuda="12.4", sail="1.5.0")
    return one("thead", "unknown", 4)
