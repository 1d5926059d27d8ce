"""The CPU as a plug-in. Hook implementations only; what they decide stands in the other files."""

from __future__ import annotations

from collections.abc import Sequence

from hal import hookimpl
from hal.candidates import KernelCandidate
from hal.device import DetectedDevice, DevicePolicy, DeviceSpec, MissingDependency, SelfTestResult
from hal.hookspecs import BackendInfo, Runtime
from hal.host import HostProbe

# Steps of SmolLM2-135M (about 240 calls) take 4.2 ms less at one sequence in float32 and 5.6 ms at
# 16 in w8a8 than call by call (benchmarks/results/2026-11-30-decode-profile*.md), part of which is
# work that other changes saved: a little over half of it, so as not to promise too much.
CAPTURE_SAVES_US = 10.0


@hookimpl
def hal_backend_info() -> BackendInfo:
    return BackendInfo(name="cpu", vendor="cpu", api_range=">=1.0,<2")


@hookimpl
def hal_detect_devices(host: HostProbe) -> Sequence[DetectedDevice]:
    from hal_backends.cpu.detection import detect_devices

    return detect_devices(host)


@hookimpl
def hal_describe_device(device: DetectedDevice, host: HostProbe) -> DeviceSpec:
    from hal_backends.cpu.detection import describe_device

    return describe_device(device, host)


@hookimpl
def hal_kernel_candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    from hal_backends.cpu.candidates import candidates_for

    return candidates_for(op, device)


@hookimpl
def hal_device_policy(device: DeviceSpec) -> DevicePolicy:
    return DevicePolicy(capture_saves_us=CAPTURE_SAVES_US)


@hookimpl
def hal_create_runtime(device: DeviceSpec) -> Runtime:
    from hal_backends.cpu.runtime import CpuRuntime

    return CpuRuntime(device)


@hookimpl
def hal_measure_device(device: DeviceSpec) -> DeviceSpec:
    from hal_backends.cpu.measurement import measure_device

    return measure_device(device)


@hookimpl
def hal_self_test(runtime: Runtime) -> Sequence[SelfTestResult]:
    from hal_backends.cpu.self_test import run_self_test

    return run_self_test(runtime)


@hookimpl
def hal_missing_dependencies(host: HostProbe) -> Sequence[MissingDependency]:
    from hal_backends.cpu.detection import missing_dependencies

    return missing_dependencies(host)
