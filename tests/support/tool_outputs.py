"""What the vendors' management tools print, as far as detection reads it; layouts as published."""

from __future__ import annotations

import json
from collections.abc import Sequence

NVIDIA_SMI = (
    "nvidia-smi --query-gpu=index,name,pci.bus_id,memory.total,uuid,driver_version,compute_cap,"
    "ecc.mode.current,mig.mode.current --format=csv,noheader,nounits"
)
PPU_SMI = (
    "ppu-smi --query-ppu=index,name,pci.bus_id,memory.total,uuid,driver_version"
    " --format=csv,noheader,nounits"
)
BRSMI = "brsmi gpu --query-gpu=index,name,pci.bus_id,memory.total --format=csv,noheader,nounits"
HL_SMI = "hl-smi -Q index,module_id,name,bus_id,memory.total,driver_version -f csv,noheader,nounits"
HY_SMI = "hy-smi --showbus --showproductname --showmeminfo vram --json"


def uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-1111-2222-3333-444444444444"


def nvidia_smi(
    name: str,
    addresses: Sequence[str],
    mib: int,
    capability: str,
    *,
    driver: str = "580.95.05",
    ecc: str = "Enabled",
    mig: str = "Disabled",
    first: int = 0,
) -> str:
    return "".join(
        f"{index}, {name}, 0000{address.upper()}, {mib}, {uuid_of(index)}, {driver}, {capability}, "
        f"{ecc}, {mig}\n"
        for index, address in enumerate(addresses, first)
    )


def nvidia_topology(links: Sequence[Sequence[int]]) -> str:
    """`nvidia-smi topo -m`; links[i][j]: NVLinks between two cards, 0 for PCIe."""
    numbers = range(len(links))
    header = ["", *(f"GPU{n}" for n in numbers), "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["\t".join(f"\x1b[4m{name}\x1b[0m" if name else "" for name in header)]
    for row in numbers:
        cells = [
            " X " if row == n else f"NV{links[row][n]}" if links[row][n] else "NODE"
            for n in numbers
        ]
        lines.append("\t".join([f"GPU{row}", *cells, "0-3", "0", "", "N/A"]))
    lines += ["", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing # NVLinks"]
    return "\n".join(lines) + "\n"


def ppu_smi(name: str, addresses: Sequence[str], mib: int) -> str:
    return "".join(
        f"{index}, {name}, 0000{address}, {mib}, PPU-{index:08x}-0000, 1.5.0\n"
        for index, address in enumerate(addresses)
    )


def brsmi(name: str, addresses: Sequence[str], mib: int) -> str:
    return "".join(f"{n}, {name}, {address}, {mib}\n" for n, address in enumerate(addresses))


def hl_smi(name: str, addresses: Sequence[str], mib: int, modules: Sequence[int]) -> str:
    return "".join(
        f"{n}, {modules[n]}, {name}, {address}, {mib}, 1.21.3-57ba9eb\n"
        for n, address in enumerate(addresses)
    )


def hy_smi(name: str, addresses: Sequence[str], memory_bytes: int) -> str:
    return json.dumps(
        {
            f"card{n}": {
                "PCI Bus": address.upper(),
                "Card Series": name,
                "Card Vendor": "Chengdu C-3000 IC Design Co., Ltd.",
                "vram Total Memory (B)": str(memory_bytes),
                "vram Total Used Memory (B)": "2097152",
            }
            for n, address in enumerate(addresses)
        }
    )


def xpu_smi_intel(name: str, addresses: Sequence[str]) -> str:
    listed = [
        {
            "device_id": n,
            "device_name": name,
            "device_type": "GPU",
            "drm_device": f"/dev/dri/card{n + 1}",
            "pci_bdf_address": address,
            "pci_device_id": "0xe211",
            "uuid": f"00000000-0000-{n:04x}-0000-0000e2118086",
            "vendor_name": "Intel(R) Corporation",
        }
        for n, address in enumerate(addresses)
    ]
    return json.dumps({"device_list": listed}, indent=4)


def npu_smi(
    chips: Sequence[tuple[int, int, str, str]], mib: int, *, has_physical_ids: bool = False
) -> str:
    """chips: (NPU, chip, name, address), the logical order of the chips."""
    rule = "+" + "-" * 96 + "+"
    double = "+" + "=" * 27 + "+" + "=" * 15 + "+" + "=" * 52 + "+"
    lines = [
        rule,
        f"| {'npu-smi 25.2.0                   Version: 25.2.0':<95}|",
        "+" + "-" * 27 + "+" + "-" * 15 + "+" + "-" * 52 + "+",
        "| NPU   Name                | Health        | Power(W)    Temp(C)           "
        "Hugepages-Usage(page)|",
        f"| {'Chip  Phy-ID' if has_physical_ids else 'Chip':<26}| Bus-Id        | AICore(%)   "
        "Memory-Usage(MB)  HBM-Usage(MB)        |",
        double,
    ]
    for number, (npu, chip, name, address) in enumerate(chips):
        physical = f"{chip:<6}{number}" if has_physical_ids else f"{chip}"
        lines += [
            f"| {npu:<6}{name:<20}| OK            | 91.3        33                0    / 0      "
            "       |",
            f"| {physical:<26}| {address.upper():<14}| 0           0    / 0          3197 / "
            f"{mib:<14}|",
            double,
        ]
    return "\n".join(lines) + "\n"


def npu_topology(count: int, nodes: int) -> str:
    """`npu-smi info -t topo` of NPUs that HCCS links each to each."""
    names = [f"NPU{n}" for n in range(count)]
    lines = ["".join(f"{name:<11}" for name in (*names, "CPU Affinity"))]
    for row, name in enumerate(names):
        cells = ["X" if column == row else "HCCS" for column in range(count)]
        cpus = f"{row * nodes // count * 24}-{row * nodes // count * 24 + 23}"
        lines.append("".join(f"{cell:<11}" for cell in (name, *cells, cpus)))
    legend = ["X    = Self", "PHB  = Path traversing PCIe and the PCIe host bridge of a CPU."]
    legend.append("HCCS = Connection traversing HCCS.")
    return "\n".join((*lines, "", "Legend:", *(f"  {text}" for text in legend))) + "\n"


def npu_smi_310p(chips: Sequence[tuple[int, int, str, str]], mib: int) -> str:
    """The layout without HBM: one memory, and "Device" for the logical order."""
    lines = [
        "+" + "-" * 104 + "+",
        "| npu-smi 24.1.rc2                                 Version: 24.1.rc2                    "
        "                 |",
        "| NPU     Name                  | Health          | Power(W)     Temp(C)           "
        "Hugepages-Usage(page) |",
        "| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)        "
        "                |",
    ]
    for number, (npu, chip, name, address) in enumerate(chips):
        lines += [
            f"| {npu:<8}{name:<22}| OK              | NA           59                0     / 0    "
            "         |",
            f"| {chip:<8}{number:<22}| {address.upper():<16}| 0            1397 / {mib:<32}|",
        ]
    return "\n".join(lines) + "\n"


def mx_smi(name: str, addresses: Sequence[str], mib: int) -> str:
    rule = "+------------------------------------+---------------------+----------------------+"
    lines = [
        "mx-smi  version: 2.2.4",
        "",
        "=================== MetaX System Management Interface Log ===================",
        "Timestamp                                         : Tue Jul 29 12:16:08 2025",
        "",
        f"Attached GPUs                                     : {len(addresses)}",
        "+---------------------------------------------------------------------------------+",
        "| MX-SMI 2.2.4                        Kernel Mode Driver Version: 2.15.9          |",
        "| MACA Version: 2.32.0.6              BIOS Version: 1.25.1.0                      |",
        "|------------------------------------+---------------------+----------------------|",
        "| GPU         NAME                   | Bus-id              | GPU-Util             |",
        "| Temp        Pwr:Usage/Cap          | Memory-Usage        | GPU-State            |",
        "|====================================+=====================+======================|",
    ]
    for n, address in enumerate(addresses):
        lines += [
            f"| {n:<12}{name:<23}| {address:<20}| 0%                   |",
            "| 29C         53W / 450W             "
            f"| {f'858/{mib} MiB':<20}| Available            |",
            rule,
        ]
    return "\n".join(lines) + "\n"


def ixsmi(name: str, addresses: Sequence[str], mib: int) -> str:
    rule = "+-------------------------------+----------------------+----------------------+"
    lines = [
        "Timestamp    Fri Dec 20 11:14:29 2024",
        "+-----------------------------------------------------------------------------+",
        "|  IX-ML: 4.3.8       Driver Version: 4.3.8       CUDA Version: 10.2          |",
        "|-------------------------------+----------------------+----------------------|",
        "| GPU  Name                     | Bus-Id               | Clock-SM  Clock-Mem  |",
        "| Fan  Temp  Perf  Pwr:Usage/Cap|      Memory-Usage    | GPU-Util  Compute M. |",
        "|===============================+======================+======================|",
    ]
    for n, address in enumerate(addresses):
        lines += [
            f"| {n:<5}{name:<25}| {'0000' + address.upper():<21}| 1500MHz   1600MHz    |",
            f"| 0%   32C   P0    N/A / N/A    | {f'116MiB / {mib}MiB':<21}| 0%        Default    |",
            rule,
        ]
    return "\n".join(lines) + "\n"


def cnmon(name: str, addresses: Sequence[str], mib: int) -> str:
    rule = "+-------------------------------+----------------------+-----------------------+"
    lines = [
        "Wed Nov  8 16:16:45 2023",
        "+------------------------------------------------------------------------------+",
        "| CNMON v5.10.22                                               Driver v5.10.22 |",
        rule,
        "| Card  VF  Name       Firmware |               Bus-Id | Util        Ecc-Error |",
        "| Fan   Temp      Pwr:Usage/Cap |         Memory-Usage | Mode     Compute-Mode |",
        "|===============================+======================+=======================|",
    ]
    for n, address in enumerate(addresses):
        lines += [
            f"| {n}     /   {name:<12} v1.1.6 |         {address.upper()} "
            "| 0%                  0 |",
            f"|  0%   28C        107 W/ 250 W |{f'0 MiB/ {mib} MiB':>21} | FULL          Default |",
            rule,
        ]
    return "\n".join(lines) + "\n"


def mthreads_gmi(name: str, addresses: Sequence[str], mib: int) -> str:
    rule = "+-------------------------------------------------------------------+"
    lines = [
        "Tue Jun 23 17:48:04 2026",
        "---------------------------------------------------------------------",
        "    mthreads-gmi:2.4.1           Driver Version:5.1.0-server",
        "---------------------------------------------------------------------",
        "ID   Name                 |PCIe                |%GPU  Mem",
        "     Device Type   Perf   |Pcie Lane Width     |Temp  MPC Capable",
        "                                               |      ECC Mode",
        rule,
    ]
    for n, address in enumerate(addresses):
        lines += [
            f"{n:<5}{name:<21}|{'0000' + address:<20}|0%    0MiB({mib}MiB)",
            "     Physical      P0     |16x(16x)            |48C   YES",
            "                                               |      On-die, EDC",
            rule,
        ]
    return "\n".join(lines) + "\n"


def efsmi(name: str, addresses: Sequence[str], mib: int) -> str:
    lines = [
        "-------------------------------------------------------------------------------",
        "--------------------- Enflame System Management Interface ---------------------",
        "--------- Enflame Tech, All Rights Reserved. 2024-2025 Copyright (C) ----------",
        "-------------------------------------------------------------------------------",
        "",
        "+2025-11-28, 10:50:14 CST-----------------------------------------------------+",
        "| EFSMI: 1.6.3.12          Driver Ver: 1.6.3.12                               |",
        "+-----------------------------+-------------------+---------------------------+",
        "| DEV    NAME                 | FW VER            | BUS-ID      ECC           |",
        "| TEMP   Lpm   Pwr(Usage/Cap) | Mem      GCU Virt | DUsed       SN            |",
        "|=============================================================================|",
    ]
    for n, address in enumerate(addresses):
        lines += [
            f"| {n:<7}{name:<21}| 33.6.2            "
            f"| {address.removeprefix('00'):<12}Disable       |",
            f"| 39     LP1     105W / 300W  | {f'{mib}MiB Disable':<18}"
            "| 0.0%        XXXXXXXXXXXXX |",
            "+-----------------------------+-------------------+---------------------------+",
        ]
    return "\n".join(lines) + "\n"


def teco_smi(name: str, addresses: Sequence[str], mb: int) -> str:
    lines = [
        "Mon Aug 31 18:04:46 2026",
        "+-----------------------------------------------------------------------------+",
        "|  TECO-SMI: 1.12.0        SDAADriver: 2.1.0        SDAARuntime: 2.1.0        |",
        "|-------------------------------+----------------------+----------------------|",
        "| Index  Name                   | Bus-Id               | Health      SPE-Util |",
        "|        Temp          Pwr Usage|          Memory-Usage|                      |",
        "|=============================================================================|",
    ]
    for n, address in enumerate(addresses):
        lines += [
            f"|   {n:<5}{name:<23}| {'0000' + address.upper():<21}| OK                0% |",
            f"|        35C               190W |{f'0MB / {mb}MB':>21} |                      |",
            "|-------------------------------+----------------------+----------------------|",
        ]
    return "\n".join(lines) + "\n"


def xpu_smi_kunlun(name: str, addresses: Sequence[str], mib: int) -> str:
    rule = "+-------------------------------+----------------------+----------------------+"
    lines = [
        "Mon Aug 24 21:19:00 2026       ",
        "+-----------------------------------------------------------------------------+",
        "| XPU-SMI               Driver Version: 515.58       XPU-RT Version: N/A      |",
        "|-------------------------------+----------------------+----------------------+",
        "| XPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | XPU-Util  Compute M. |",
        "|                               |             L3-Usage |            SR-IOV M. |",
        "|===============================+======================+======================|",
    ]
    for n, address in enumerate(addresses):
        lines += [
            f"|   {n}  {name:<18} N/A   | {'0000' + address.upper()} N/A |                    0 |",
            f"| N/A   39C  N/A     91W / 400W |{f'31058MiB / {mib}MiB':>21} "
            "|      0%      Default |",
            "|                               |      0MiB /    96MiB |             Disabled |",
            rule,
        ]
    return "\n".join(lines) + "\n"
