"""The hooks of a plug-in: all there is between halstack and an accelerator.

A plug-in is a module, or an object in one (`package.module:name`), named by an entry point of the
group `hal.backends`; it implements hooks with `hal.hookimpl`. Every hook takes keyword arguments
and is called through one typed wrapper (`hal.plugins.calls`), which checks what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import pluggy

if TYPE_CHECKING:
    import torch
    import typer

    from hal.candidates import KernelCandidate
    from hal.device import (
        DetectedDevice,
        DevicePolicy,
        DeviceSpec,
        MissingDependency,
        SelfTestResult,
    )
    from hal.host import HostProbe
    from hal.ops.collective import CollectiveGroup
    from hal.selection import Decision

PROJECT = "hal"
ENTRY_POINT_GROUP = "hal.backends"
PLUGIN_API_VERSIONS = ("1.0",)
"""Every version there was, the present one last. A further argument of an op is a new one."""
PLUGIN_API = tuple(int(part) for part in PLUGIN_API_VERSIONS[-1].split("."))

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Provides = Literal["devices", "candidates", "commands"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """Who a plug-in is. api_range: a version specifier for the plug-in API, e.g. ">=1.0,<2". A
    plug-in is not asked about arguments of an op that are newer than the oldest version in it.

    provides: "devices" (it detects devices), "candidates" (it offers implementations for any
    device, not only its own), "commands" (it adds commands to the CLI).
    """

    name: str
    vendor: str
    api_range: str
    provides: frozenset[Provides] = frozenset({"devices"})


class Runtime(Protocol):
    """A device made usable in this process."""

    @property
    def torch_device(self) -> torch.device: ...
    @property
    def num_threads(self) -> int: ...
    def create_group(self, rank: int, world_size: int, rendezvous: str) -> CollectiveGroup:
        """Joins the ranks; `rendezvous` is a file path on this host. Raises RuntimeError."""
        ...

    def free_memory_bytes(self) -> int: ...
    def synchronize(self) -> None: ...


class CapturedStep(Protocol):
    """A step that can be run again as one call, on new values in the same tensors."""

    @property
    def output(self) -> torch.Tensor:
        """The result of the step, and of the last replay of it; another capture or replay of the
        same runtime may write over it."""
        ...

    @property
    def num_launches(self) -> int:
        """Kernels that a replay launches; 0 where the platform does not say."""
        ...

    @property
    def replay(self) -> Callable[[], None]: ...


@runtime_checkable
class CapturingRuntime(Runtime, Protocol):
    """A runtime of a device with the feature "graph_capture" (`hal.device.GRAPH_CAPTURE`)."""

    def capture(
        self, step: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> CapturedStep:
        """Runs `step` and records it. inputs: the tensors that it reads and writes beside those
        that it makes. Raises CaptureError if it cannot be replayed."""
        ...


@hookspec(firstresult=True)
def hal_backend_info() -> BackendInfo:  # type: ignore[empty-body]
    """Name, vendor and API range. Touches no hardware; called before any other hook."""


@hookspec(firstresult=True)
def hal_detect_devices(host: HostProbe) -> Sequence[DetectedDevice]:  # type: ignore[empty-body]
    """The devices of this plug-in on `host`; empty if there are none.

    Runs in a child process and again on recorded hosts: reads only `host`, imports no vendor
    framework. Raises an error if hardware is present but unreadable.
    """


@hookspec(firstresult=True)
def hal_describe_device(device: DetectedDevice, host: HostProbe) -> DeviceSpec:  # type: ignore[empty-body]
    """What the device can do, each field with its evidence."""


@hookspec(firstresult=True)
def hal_device_profiles() -> Sequence[DeviceSpec]:  # type: ignore[empty-body]
    """The devices that this plug-in knows and that need not be here, to plan for them.

    `device_id` is the name that users plan by (`hal plan MODEL --device NAME`)."""


@hookspec(firstresult=True)
def hal_kernel_candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:  # type: ignore[empty-body]
    """The implementations of one op for one device, those that cannot run here included: their
    reasons are what a plan shows."""


@hookspec(firstresult=True)
def hal_device_policy(device: DeviceSpec) -> DevicePolicy:  # type: ignore[empty-body]
    """Features forced on and implementations disabled, each with its reason."""


@hookspec(firstresult=True)
def hal_create_runtime(device: DeviceSpec) -> Runtime:  # type: ignore[empty-body]
    """Makes the device usable in this process: loads vendor libraries, sets threads or streams."""


@hookspec(firstresult=True)
def hal_self_test(runtime: Runtime) -> Sequence[SelfTestResult]:  # type: ignore[empty-body]
    """Golden-value checks on the device."""


@hookspec(firstresult=True)
def hal_measure_device(device: DeviceSpec) -> DeviceSpec:  # type: ignore[empty-body]
    """The same device with measured bandwidth and rates, each marked as measured."""


@hookspec(firstresult=True)
def hal_missing_dependencies(host: HostProbe) -> Sequence[MissingDependency]:  # type: ignore[empty-body]
    """Hardware seen on `host` whose software is missing, and what to install."""


@hookspec
def hal_register_commands(cli: typer.Typer) -> None:
    """Adds commands to `hal`. Called only when a command that is not a core one is asked for."""


@hookspec
def hal_decision_made(decision: Decision) -> None:
    """Observes each decision as it is made."""
