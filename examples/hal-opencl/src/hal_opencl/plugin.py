"""The hooks; what they decide stands in the other modules.

Nothing here imports pyopencl or torch at the top: a probe and a plan need neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal import hookimpl
from hal.candidates import KernelCandidate
from hal.device import DetectedDevice, DeviceSpec, MissingDependency, SelfTestResult
from hal.hookspecs import BackendInfo, Runtime
from hal.host import HostProbe


@hookimpl
def hal_backend_info() -> BackendInfo:
    return BackendInfo(name="opencl", vendor="khronos", api_range=">=1.0,<2")


@hookimpl
def hal_detect_devices(host: HostProbe) -> Sequence[DetectedDevice]:
    from hal_opencl.detection import detect_devices

    return detect_devices(host)


@hookimpl
def hal_describe_device(device: DetectedDevice, host: HostProbe) -> DeviceSpec:
    from hal_opencl.detection import describe_device

    return describe_device(device, host)


@hookimpl
def hal_missing_dependencies(host: HostProbe) -> Sequence[MissingDependency]:
    from hal_opencl.detection import missing_dependencies

    return missing_dependencies(host)


@hookimpl
def hal_kernel_candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    from hal_opencl.candidates import candidates_for

    return candidates_for(op, device)


@hookimpl
def hal_create_runtime(device: DeviceSpec) -> Runtime:
    from hal_opencl.runtime import OpenClRuntime

    return OpenClRuntime(device)


@hookimpl
def hal_measure_device(device: DeviceSpec) -> DeviceSpec:
    from hal_opencl.measurement import measure_device

    return measure_device(device)


@hookimpl
def hal_self_test(runtime: Runtime) -> Sequence[SelfTestResult]:
    from hal_opencl.self_test import run_self_test

    return run_self_test(runtime)
