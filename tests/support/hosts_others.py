"""Recorded hosts: vendors with a device type of their own in torch."""

from __future__ import annotations

import host_parts as parts
import tool_outputs as tools
from host_registry import Expected, one, recorded_host
from recorded_hosts import HostBuilder


@recorded_host("ascend-910b-x8", "8 Ascend 910B3 in a Kunpeng server; NPU order is not PCI order")
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
    host.command("npu-smi info -t topo", tools.npu_topology(8, 2))
    parts.ascend_torch(host)
    host.environ(ASCEND_RT_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    return one("ascend", "ascend-910b3", 8)


@recorded_host("ascend-910c", "one 910C package: two NPUs")
def _ascend_910c(host: HostBuilder) -> Expected:
    dies = host.devices(2, "19e5:d803", pci_class="0x120000", driver="devdrv_device_driver")
    parts.ascend(host, 2)
    rows = [(0, chip, "Ascend910", address) for chip, address in enumerate(dies)]
    host.command("npu-smi info", tools.npu_smi(rows, 65536, has_physical_ids=True))
    parts.ascend_torch(host)
    return one("ascend", "ascend-910c", 2)


@recorded_host("ascend-first-910", "the first Ascend 910, which npu-smi calls 910B")
def _ascend_first(host: HostBuilder) -> Expected:
    card = host.device("19e5:d801", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    host.command("npu-smi info", tools.npu_smi([(0, 0, "910B", card)], 32768))
    parts.ascend_torch(host)
    return one("ascend", "arch:ascend-910a", 1)


@recorded_host("ascend-wrong-generation", "PCI says the first 910, npu-smi says 910B3")
def _ascend_wrong(host: HostBuilder) -> Expected:
    card = host.device("19e5:d801", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    host.command("npu-smi info", tools.npu_smi([(0, 0, "910B3", card)], 65536))
    parts.ascend_torch(host)
    return Expected(refused={"ascend": ("19e5:d801", "910B3")})


@recorded_host("ascend-310p", "two chips of a 310P card, which share a bus id")
def _ascend_310p(host: HostBuilder) -> Expected:
    card = host.device("19e5:d500", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 2)
    rows = [(1, chip, "310P3", card) for chip in range(2)]
    host.command("npu-smi info", tools.npu_smi_310p(rows, 44280))
    parts.ascend_torch(host)
    return one("ascend", "ascend-310p", 2)


@recorded_host("ascend-no-tool", "a container with NPUs and without npu-smi: torch tells the SoC")
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


@recorded_host(
    "ascend-half-broken", "torch_npu is registered without its module, and for another torch"
)
def _ascend_half(host: HostBuilder) -> Expected:
    card = host.device("19e5:d802", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    host.command("npu-smi info", tools.npu_smi([(0, 0, "910B2", card)], 65536))
    parts.torch(host, "2.9.0+cpu")
    host.package("torch_npu", "2.7.1")
    missing = {"ascend": ("all of torch_npu", "2.7.1", "reinstall")}
    return one("ascend", "ascend-910b2", 1, missing=missing)


@recorded_host("ascend-other-torch", "torch_npu 2.7 beside torch 2.9")
def _ascend_other_torch(host: HostBuilder) -> Expected:
    card = host.device("19e5:d802", pci_class="0x120000", link="4.0 x16")
    parts.ascend(host, 1)
    host.command("npu-smi info", tools.npu_smi([(0, 0, "910B1", card)], 65536))
    parts.torch(host, "2.9.0+cpu")
    host.package("torch_npu", "2.7.1", modules=["torch_npu"])
    missing = {"ascend": ("torch_npu for torch 2.9.0", "another torch")}
    return one("ascend", "ascend-910b1", 1, missing=missing)


@recorded_host("mlu370-x8", "two MLU370-X8 cards: four chips")
def _mlu370(host: HostBuilder) -> Expected:
    chips = host.devices(
        4, "cabc:0370", pci_class="0x120000", link="4.0 x16", driver="cambricon-drv"
    )
    host.node("/dev/cambricon_ctl", *(f"/dev/cambricon_dev{n}" for n in range(4)))
    host.command("cnmon", tools.cnmon("MLU370-X8", chips, 23374))
    parts.torch(host, "2.5.0+cpu")
    host.package("torch_mlu", "1.24.1+torch2.5.0", modules=["torch_mlu"])
    return one("cambricon", "mlu370-x8", 4)


@recorded_host("mtt-s5000-x8", "8 Moore Threads S5000")
def _s5000(host: HostBuilder) -> Expected:
    host.sockets(2, cpus_each=4)
    cards = parts.numa_pairs(host, "1ed5:0400", pci_class="0x030200", driver="mtgpu")
    host.node(*(f"/dev/mtgpu.{n}" for n in range(8)))
    host.command("mthreads-gmi", tools.mthreads_gmi("MTT S5000", cards, 81920))
    parts.torch(host, "2.9.0+musa5.2.0", musa="5.2.0")
    host.package("torch_musa", "2.9.1", modules=["torch_musa"])
    return one("moore_threads", "mtt-s5000", 8)


@recorded_host("enflame-s60-x2", "2 Enflame S60")
def _s60(host: HostBuilder) -> Expected:
    cards = host.devices(2, "1e36:c035", pci_class="0x120000", driver="enflame")
    host.node("/dev/gcuctl", "/dev/gcu0", "/dev/gcu1")
    host.command("efsmi", tools.efsmi("Enflame S60", cards, 49120))
    parts.torch(host, "2.6.0+cpu")
    host.package("torch_gcu", "2.6.0", modules=["torch_gcu"])
    return one("enflame", "enflame-s60", 2)


@recorded_host("biren-br166-x2", "2 Biren 166, whose PCI vendor no list has")
def _biren(host: HostBuilder) -> Expected:
    cards = host.devices(2, "1ee0:0166", pci_class="0x120000", driver="biren")
    host.node("/dev/biren/card_0", "/dev/biren/card_1")
    host.command(tools.BRSMI, tools.brsmi("BR166", cards, 65536))
    parts.torch(host, "2.9.0+cpu")
    host.package("torch_supa", "2.9.0", modules=["torch_supa"])
    return one("biren", "biren-br166", 2)


@recorded_host("tecorigin-t1", "one Tecorigin T1 card: four devices at one bus id")
def _tecorigin(host: HostBuilder) -> Expected:
    card = host.device("1f48:0001", pci_class="0x120000", driver="tcaicard")
    host.node("/dev/tcaicard0")
    host.command("teco-smi", tools.teco_smi("TECO_AICARD_01", [card] * 4, 16384))
    parts.torch(host, "2.4.0+cpu")
    host.package("torch_sdaa", "2.1.0", modules=["torch_sdaa"])
    return one("tecorigin", "tecorigin-t1", 4)


@recorded_host(
    "arc-b60-x4", "4 Arc Pro B60, whose functions read 2.5 GT/s x1, beside a CPU's graphics"
)
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


@recorded_host("gaudi3-x8", "8 Gaudi 3 modules, whose module ids are in another order")
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
