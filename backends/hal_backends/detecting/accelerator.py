"""The hooks that every accelerator's plug-in has. A vendor's own parts are looked up by name when a
hook needs them: `hal_backends.<backend>.detection.RULES`, `.candidates.candidates_for` and
`.policy.device_policy`; so that a host without its hardware imports none of them but the rules."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal import hookimpl
from hal.device import (
    DetectedDevice,
    DevicePolicy,
    DeviceSpec,
    MissingDependency,
    SelfTestResult,
)
from hal.hookspecs import BackendInfo, Runtime
from hal.host import HostProbe

if TYPE_CHECKING:
    from hal.candidates import KernelCandidate
    from hal_backends.detecting.rules import FamilyRules


class AcceleratorPlugin:
    """The plug-in of one family of accelerators."""

    def __init__(self, backend: str, vendor: str) -> None:
        self._info = BackendInfo(name=backend, vendor=vendor, api_range=">=1.0,<2")

    @hookimpl
    def hal_backend_info(self) -> BackendInfo:
        return self._info

    @hookimpl
    def hal_detect_devices(self, host: HostProbe) -> Sequence[DetectedDevice]:
        from hal_backends.detecting.describing import detect_devices

        return detect_devices(host, self._rules())

    @hookimpl
    def hal_missing_dependencies(self, host: HostProbe) -> Sequence[MissingDependency]:
        from hal_backends.detecting.describing import missing_dependencies

        return missing_dependencies(host, self._rules())

    @hookimpl
    def hal_describe_device(self, device: DetectedDevice, host: HostProbe) -> DeviceSpec:
        from hal_backends.detecting.describing import describe_device

        return describe_device(device, host, self._rules())

    @hookimpl
    def hal_device_profiles(self) -> Sequence[DeviceSpec]:
        from hal_backends.detecting.describing import device_profiles

        return device_profiles(self._rules())

    @hookimpl
    def hal_kernel_candidates(self, op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        found: Sequence[KernelCandidate] = self._part("candidates").candidates_for(op, device)
        return found

    @hookimpl
    def hal_device_policy(self, device: DeviceSpec) -> DevicePolicy:
        policy: DevicePolicy = self._part("policy").device_policy(device)
        return policy

    @hookimpl
    def hal_create_runtime(self, device: DeviceSpec) -> Runtime:
        runtime: Runtime = importlib.import_module("hal_backends.gpu.runtime").create_runtime(
            device
        )
        return runtime

    @hookimpl
    def hal_self_test(self, runtime: Runtime) -> Sequence[SelfTestResult]:
        found: Sequence[SelfTestResult] = importlib.import_module(
            "hal_backends.gpu.self_test"
        ).run_self_test(runtime)
        return found

    def _rules(self) -> FamilyRules:
        rules: FamilyRules = self._part("detection").RULES
        return rules

    def _part(self, name: str) -> Any:
        return importlib.import_module(f"hal_backends.{self._info.name}.{name}")
