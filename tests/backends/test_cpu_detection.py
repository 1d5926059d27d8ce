"""The CPU backend on recorded hosts: what it finds, what limits it, what it refuses."""

from __future__ import annotations

import pytest

from hal.errors import DetectionError
from hal.host import RecordedHost
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.request import TokenRange
from hal.reasons import ReasonKind
from hal_backends.cpu.candidates import candidates_for
from hal_backends.cpu.detection import (
    describe_device,
    detect_devices,
    missing_dependencies,
    parse_cpu_list,
)

AVX2 = "fpu sse4_2 avx avx2 fma f16c"
AMX = (
    f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16"
)


def _cpuinfo(flags: str, count: int = 2, name: str = "Test CPU @ 2.1GHz") -> str:
    return "\n".join(
        f"processor\t: {i}\nvendor_id\t: GenuineIntel\nmodel name\t: {name}\nflags\t\t: {flags}\n"
        for i in range(count)
    )


def _host(flags: str = AVX2, **files: str) -> RecordedHost:
    base = {
        "/proc/cpuinfo": _cpuinfo(flags),
        "/proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:   8000000 kB\n",
        "/proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-1\n",
    }
    return RecordedHost(files={**base, **files}, packages={"torch": "2.13.0", "numba": "0.68.1"})


@pytest.mark.parametrize(
    ("flags", "arch"),
    [
        (AMX, "x86_64_amx"),
        (AMX.replace("amx_bf16", ""), "x86_64_avx512_vnni"),
        (AVX2 + " avx_vnni", "x86_64_avx2_vnni"),
        (AVX2, "x86_64_avx2"),
        ("fpu sse4_2", "generic"),
    ],
)
def test_architecture_from_flags(flags: str, arch: str) -> None:
    host = _host(flags)
    device = detect_devices(host)[0]
    assert device.device_id == "cpu:0"
    assert device.vendor == "intel"
    assert describe_device(device, host).arch == arch


def test_every_decided_field_has_its_evidence() -> None:
    spec = describe_device(detect_devices(_host())[0], _host())
    for field in ("features", "num_cores", "memory_bytes"):
        assert spec.evidence[field].source.startswith("/")


def test_a_hybrid_host_has_what_all_cores_have() -> None:
    text = _cpuinfo(AMX, 1) + "\n" + _cpuinfo(AVX2, 1)
    host = _host(**{"/proc/cpuinfo": text})
    assert "avx512f" not in describe_device(detect_devices(host)[0], host).features


def test_cgroup_limits_lower_cores_and_memory() -> None:
    host = _host(
        **{
            "/proc/self/status": "Cpus_allowed_list:\t0-7\n",
            "/sys/fs/cgroup/cpu.max": "300000 100000\n",
            "/sys/fs/cgroup/memory.max": "1073741824\n",
        }
    )
    spec = describe_device(detect_devices(host)[0], host)
    assert spec.num_cores == 3
    assert spec.memory_bytes == 1 << 30
    assert spec.evidence["num_cores"].source == "/sys/fs/cgroup/cpu.max"


def test_numa_nodes_and_data_caches() -> None:
    cache = "/sys/devices/system/cpu/cpu0/cache"
    indices = [
        ("1", "Data", "48K"),
        ("1", "Instruction", "64K"),
        ("2", "Unified", "2048K"),
        ("3", "Unified", "105M"),
    ]
    files = {
        f"{cache}/index{i}/{name}": f"{value}\n"
        for i, values in enumerate(indices)
        for name, value in zip(("level", "type", "size"), values, strict=True)
    }
    nodes = {f"/sys/devices/system/node/node{i}/cpulist": f"{i}\n" for i in (0, 1)}
    host = _host(**files, **nodes, **{"/sys/devices/system/node/possible": "0-1\n"})
    spec = describe_device(detect_devices(host)[0], host)
    found = {key: spec.attributes[key] for key in spec.attributes if key.endswith("_bytes")}
    assert found == {"l1d_bytes": 48 << 10, "l2_bytes": 2 << 20, "l3_bytes": 105 << 20}
    assert spec.attributes["numa_nodes"] == 2
    assert spec.evidence["l3_bytes"].source == f"{cache}/index3/size"
    assert spec.evidence["numa_nodes"].found == "node0 node1"


def test_a_forced_level_hides_wider_instructions() -> None:
    host = RecordedHost(
        files={"/proc/cpuinfo": _cpuinfo(AMX)}, environment={"ONEDNN_MAX_CPU_ISA": "AVX2"}
    )
    spec = describe_device(detect_devices(host)[0], host)
    assert spec.arch == "x86_64_avx2"
    assert spec.evidence["onednn_max_cpu_isa"].source == "environment ONEDNN_MAX_CPU_ISA"


def test_no_flags_is_an_error_and_no_proc_is_no_device() -> None:
    with pytest.raises(DetectionError, match="flags"):
        detect_devices(RecordedHost(files={"/proc/cpuinfo": "processor : 0\n"}))
    assert detect_devices(RecordedHost(files={})) == ()


def test_missing_software_is_named() -> None:
    host = RecordedHost(files={"/proc/cpuinfo": _cpuinfo(AVX2)}, packages={"torch": "2.13.0"})
    assert [missing.software for missing in missing_dependencies(host)] == ["numba"]


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8, 10-11\n") == [0, 1, 2, 3, 8, 10, 11]


def test_bfloat16_needs_a_unit_and_says_so() -> None:
    """AVX2 emulates bfloat16 products five to ten times slower than float32: never offered."""
    host = _host(AVX2)
    spec = describe_device(detect_devices(host)[0], host)
    request = GemmRequest(
        n=64,
        k=64,
        dtype="bfloat16",
        weight_format=FORMATS["bfloat16"],
        tokens=TokenRange(1, 8),
    )
    for candidate in candidates_for("gemm", spec):
        reasons = candidate.not_supported_reasons(request)
        assert reasons, candidate.name
        if candidate.name.endswith("_bf16"):
            assert [r.kind for r in reasons] == [ReasonKind.HARDWARE]
            assert "avx512_bf16" in reasons[0].required


def test_without_vnni_int8_activations_of_torch_are_out() -> None:
    request = GemmRequest(
        n=64,
        k=64,
        dtype="float32",
        weight_format=FORMATS["int8_channel_a8"],
        tokens=TokenRange(1, 8),
    )
    able = {}
    for flags in (AVX2, AMX):
        host = _host(flags)
        spec = describe_device(detect_devices(host)[0], host)
        able[flags] = {c.name for c in candidates_for("gemm", spec) if c.serves(request)}
    assert able[AVX2] == {"cpu.gemm.jit_int8", "cpu.gemm.fbgemm_int7"}
    assert able[AMX] >= {"cpu.gemm.jit_int8", "cpu.gemm.onednn_int8", "cpu.gemm.fbgemm_int8"}


@pytest.mark.parametrize("flags", [AVX2, AMX], ids=["avx2", "amx"])
def test_int8_weights_in_groups_have_one_product_for_int8_activations(flags: str) -> None:
    host = _host(flags)
    spec = describe_device(detect_devices(host)[0], host)

    def reasons(k: int) -> dict[str, list[str]]:
        request = GemmRequest(
            n=64,
            k=k,
            dtype="float32",
            weight_format=FORMATS["int8_g32_a8"],
            tokens=TokenRange(1, 8),
        )
        found = {c: c.not_supported_reasons(request) for c in candidates_for("gemm", spec)}
        return {c.name: [r.what for r in why] for c, why in found.items()}

    able = [name for name, why in reasons(96).items() if not why]
    assert able == ["cpu.gemm.jit_int8"]
    (chosen,) = (c for c in candidates_for("gemm", spec) if c.name == able[0])
    assert chosen.is_graph_safe
    assert reasons(100)["cpu.gemm.jit_int8"] == ["K"]
