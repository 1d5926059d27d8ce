"""Finds and describes the host's CPU from /proc and sysfs; imports no framework."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hal.device import (
    GRAPH_CAPTURE,
    Confidence,
    DetectedDevice,
    DeviceSpec,
    Evidence,
    MissingDependency,
)
from hal.errors import DetectionError
from hal.host import HostProbe

CPUINFO = "/proc/cpuinfo"
MEMINFO = "/proc/meminfo"
CPU_FOLDER = "/sys/devices/system/cpu"
NODE_FOLDER = "/sys/devices/system/node"

# Flags of /proc/cpuinfo (Linux arch/x86 and arch/arm64) that a candidate may test.
_FEATURES = frozenset(
    {
        *("avx", "avx2", "fma", "f16c", "avx_vnni"),
        *(
            "avx512f",
            "avx512bw",
            "avx512dq",
            "avx512vl",
            "avx512_vnni",
            "avx512_bf16",
            "avx512_fp16",
        ),
        *("amx_tile", "amx_int8", "amx_bf16"),
        *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
    }
)
# Best first: the level that names the architecture of this CPU.
_ARCH_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86_64_amx", frozenset({"amx_tile", "amx_int8", "amx_bf16"})),
    ("x86_64_avx512_vnni", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"})),
    ("x86_64_avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    ("x86_64_avx2_vnni", frozenset({"avx2", "fma", "avx_vnni"})),
    ("x86_64_avx2", frozenset({"avx2", "fma"})),
    ("arm64_sve2", frozenset({"sve2"})),
    ("arm64_neon", frozenset({"asimd"})),
)
# What ATen reports or is told through ATEN_CPU_CAPABILITY, best first.
ATEN_LEVELS = ("avx512", "avx2", "default")


def detect_devices(host: HostProbe) -> Sequence[DetectedDevice]:
    """One device, "cpu:0", for the whole host. Raises DetectionError if /proc tells nothing."""
    text = host.read_text(CPUINFO)
    if text is None:
        return ()
    flags = cpu_flags(text)
    if not flags:
        raise DetectionError(
            CPUINFO,
            "a 'flags' or 'Features' line",
            "none",
            "check that /proc is the kernel's own and not masked by a container",
        )
    name = cpu_name(text)
    arch = arch_of(flags)
    evidence = (Evidence(source=CPUINFO, found=f"{name}; {' '.join(sorted(flags & _FEATURES))}"),)
    return (
        DetectedDevice(
            device_id="cpu:0", vendor=_vendor(text), name=name, arch=arch, evidence=evidence
        ),
    )


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Instruction-set flags that every listed CPU has (a hybrid host is as good as its worst)."""
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    sets = [frozenset(line.split()) for line in lines]
    return frozenset.intersection(*sets) if sets else frozenset()


def cpu_name(cpuinfo: str) -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else "CPU"


def arch_of(flags: Iterable[str]) -> str:
    have = frozenset(flags)
    for arch, needed in _ARCH_LEVELS:
        if needed <= have:
            return arch
    return "generic"


def _vendor(cpuinfo: str) -> str:
    found = re.search(r"^vendor_id\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    names = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon"}
    return names.get(found.group(1).strip(), "cpu") if found else "cpu"


def describe_device(device: DetectedDevice, host: HostProbe) -> DeviceSpec:
    """The specification, each field with the file it was read from."""
    text = host.read_text(CPUINFO) or ""
    flags = cpu_flags(text)
    evidence: dict[str, Evidence] = {}
    cores = _usable_cores(host, text, evidence)
    memory = _usable_memory(host, evidence)
    forced = _forced_levels(host, evidence)
    features = _within(flags & _FEATURES, forced) | {GRAPH_CAPTURE}
    evidence["features"] = Evidence(source=CPUINFO, found=" ".join(sorted(features)))
    attributes: dict[str, str | int | float] = {
        "numa_nodes": _numa_nodes(host, evidence),
        **_caches(host, evidence),
        **forced,
    }
    return DeviceSpec(
        device_id=device.device_id,
        vendor=device.vendor,
        backend="cpu",
        name=device.name,
        arch=arch_of(features),
        torch_device="cpu",
        features=features,
        num_cores=cores,
        memory_bytes=memory,
        attributes=attributes,
        evidence=evidence,
    )


def _usable_cores(host: HostProbe, cpuinfo: str, evidence: dict[str, Evidence]) -> int:
    """CPUs this process may use: the affinity mask, lowered by a cgroup quota."""
    status = host.read_text("/proc/self/status") or ""
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    if allowed:
        cores = len(parse_cpu_list(allowed.group(1)))
        evidence["num_cores"] = Evidence(source="/proc/self/status", found=allowed.group(1))
    else:
        cores = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or 1
        evidence["num_cores"] = Evidence(source=CPUINFO, found=str(cores))
    quota = host.read_text("/sys/fs/cgroup/cpu.max")
    if quota and not quota.startswith("max"):
        limit, period = quota.split()[:2]
        by_quota = max(1, int(limit) // int(period))
        if by_quota < cores:
            cores = by_quota
            evidence["num_cores"] = Evidence(source="/sys/fs/cgroup/cpu.max", found=quota.strip())
    return cores


def parse_cpu_list(text: str) -> list[int]:
    """ "0-3,8" -> [0, 1, 2, 3, 8]."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def _usable_memory(host: HostProbe, evidence: dict[str, Evidence]) -> int:
    """Bytes of memory: the host's, lowered by a cgroup limit."""
    text = host.read_text(MEMINFO) or ""
    total = re.search(r"^MemTotal:\s*(\d+) kB", text, re.MULTILINE)
    memory = int(total.group(1)) * 1024 if total else 0
    evidence["memory_bytes"] = Evidence(source=MEMINFO, found=f"{memory} B")
    limit = (host.read_text("/sys/fs/cgroup/memory.max") or "max").strip()
    if limit != "max" and (memory == 0 or int(limit) < memory):
        memory = int(limit)
        evidence["memory_bytes"] = Evidence(source="/sys/fs/cgroup/memory.max", found=limit)
    return memory


def _numa_nodes(host: HostProbe, evidence: dict[str, Evidence]) -> int:
    names = [n for n in host.list_dir(NODE_FOLDER) or () if re.fullmatch(r"node\d+", n)]
    evidence["numa_nodes"] = Evidence(source=NODE_FOLDER, found=" ".join(names) or "none listed")
    return max(1, len(names))


def _caches(host: HostProbe, evidence: dict[str, Evidence]) -> dict[str, str | int | float]:
    """Data caches of the first CPU: {"l1d_bytes": …, "l2_bytes": …, "l3_bytes": …}."""
    folder = f"{CPU_FOLDER}/cpu0/cache"
    found: dict[str, str | int | float] = {}
    for name in host.list_dir(folder) or ():
        level = (host.read_text(f"{folder}/{name}/level") or "").strip()
        kind = (host.read_text(f"{folder}/{name}/type") or "").strip()
        size = (host.read_text(f"{folder}/{name}/size") or "").strip()
        parsed = re.fullmatch(r"(\d+)([KMG]?)", size)
        if not level or kind == "Instruction" or parsed is None:
            continue
        scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[parsed.group(2)]
        key = f"l{level}{'d' if level == '1' else ''}_bytes"
        found[key] = int(parsed.group(1)) * scale
        evidence[key] = Evidence(source=f"{folder}/{name}/size", found=size)
    return found


# Environment variables by which torch, oneDNN, MKL or numba run below the CPU's instruction set.
_LEVEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "NUMBA_CPU_NAME",
)
_AVX2_VALUES = frozenset({"avx2", "avx2_vnni", "default", "sse41", "sse4_2", "avx", "haswell"})


def _forced_levels(host: HostProbe, evidence: dict[str, Evidence]) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {}
    for variable in _LEVEL_VARIABLES:
        value = host.environ(variable)
        if value:
            found[variable.lower()] = value.lower()
            evidence[variable.lower()] = Evidence(
                source=f"environment {variable}", found=value, confidence=Confidence.DECLARED
            )
    return found


def _within(features: frozenset[str], forced: Mapping[str, str | int | float]) -> frozenset[str]:
    """The features that are left when some library is told to stay at AVX2 or below."""
    if not any(value in _AVX2_VALUES for value in forced.values()):
        return features
    return frozenset(f for f in features if not f.startswith(("avx512", "amx", "avx_vnni")))


def missing_dependencies(host: HostProbe) -> Sequence[MissingDependency]:
    """Packages without which the fast paths of this CPU cannot run."""
    remedies = {"torch": "pip install torch", "numba": "pip install numba"}
    return tuple(
        MissingDependency(
            hardware="CPU",
            software=package,
            remedy=remedy,
            evidence=(Evidence(source=f"installed version of {package}", found="none"),),
        )
        for package, remedy in remedies.items()
        if host.package_version(package) is None
    )
