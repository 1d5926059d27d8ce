"""One typed wrapper per hook: nothing untyped gets past this file.

Every wrapper calls one plug-in, turns whatever it raises into a `PluginError` that names the
plug-in and the hook, and checks the answer down to the type of each field.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from hal.candidates import KernelCandidate
from hal.device import (
    DetectedDevice,
    DevicePolicy,
    DeviceSpec,
    MissingDependency,
    SelfTestResult,
)
from hal.errors import PluginError
from hal.hookspecs import BackendInfo, Runtime
from hal.host import HostProbe
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import RegisteredPlugin, answer_error, call_error
from hal.plugins.validation import (
    checked_candidates,
    checked_devices,
    checked_measured,
    checked_policy,
    checked_profiles,
    checked_runtime,
    checked_sequence,
    checked_spec,
)
from hal.plugins.watchdog import HookWatchdog, watched_candidate

if TYPE_CHECKING:
    import typer

    from hal.selection import Decision

_Answer = TypeVar("_Answer")


class Plugin:
    """One registered plug-in, callable hook by hook.

    Every method raises `PluginError` if the hook raises or answers with another type. A hook
    that a plug-in does not implement answers with nothing where nothing is an answer
    (no devices, no candidates, no policy), and raises where it is not.
    """

    def __init__(self, registered: RegisteredPlugin, watchdog: HookWatchdog | None = None) -> None:
        """watchdog: watches every hook called in this process; None where nobody does."""
        self._registered = registered
        self._watchdog = watchdog

    @property
    def entry(self) -> PluginEntry:
        """The entry point it was loaded from."""
        return self._registered.entry

    @property
    def info(self) -> BackendInfo:
        """What `hal_backend_info` answered."""
        return self._registered.info

    def __repr__(self) -> str:
        return f"Plugin({self.entry.key})"

    def detect_devices(self, host: HostProbe) -> tuple[DetectedDevice, ...]:
        """`hal_detect_devices`: this plug-in's devices on `host`, sorted by id."""
        return self._optional(
            "hal_detect_devices",
            {"host": host},
            lambda answer: checked_devices(checked_sequence(DetectedDevice, answer)),
            (),
        )

    def missing_dependencies(self, host: HostProbe) -> tuple[MissingDependency, ...]:
        """`hal_missing_dependencies`: hardware seen on `host` whose software is missing."""
        return self._optional(
            "hal_missing_dependencies",
            {"host": host},
            lambda answer: checked_sequence(MissingDependency, answer),
            (),
        )

    def describe_device(self, device: DetectedDevice, host: HostProbe) -> DeviceSpec:
        """`hal_describe_device`: what the device can do, each field with its evidence."""
        return self._required(
            "hal_describe_device",
            {"device": device, "host": host},
            lambda answer: checked_spec(answer, device, self.info.name),
        )

    def device_profiles(self) -> tuple[DeviceSpec, ...]:
        """`hal_device_profiles`: devices to plan for that need not be here, sorted by id."""
        return self._optional(
            "hal_device_profiles",
            {},
            lambda answer: checked_profiles(answer, self.info.name),
            (),
        )

    def measure_device(self, device: DeviceSpec) -> DeviceSpec:
        """`hal_measure_device`: the same device with measured rates; as it is without the hook."""
        return self._optional(
            "hal_measure_device",
            {"device": device},
            checked_measured,
            device,
        )

    def kernel_candidates(self, op: str, device: DeviceSpec) -> tuple[KernelCandidate, ...]:
        """`hal_kernel_candidates`: this plug-in's implementations of `op`, sorted by name."""
        found: tuple[KernelCandidate, ...] = self._optional(
            "hal_kernel_candidates",
            {"op": op, "device": device},
            lambda answer: checked_candidates(answer, op, self.info.name, self.entry.distribution),
            (),
        )
        if self._watchdog is None:
            return found
        return tuple(watched_candidate(self._watchdog, self.entry, item) for item in found)

    def device_policy(self, device: DeviceSpec) -> DevicePolicy:
        """`hal_device_policy`: features forced on and implementations disabled."""
        return self._optional(
            "hal_device_policy",
            {"device": device},
            checked_policy,
            DevicePolicy(),
        )

    def create_runtime(self, device: DeviceSpec) -> Runtime:
        """`hal_create_runtime`: the device made usable in this process."""
        return self._required("hal_create_runtime", {"device": device}, checked_runtime)

    def self_test(self, runtime: Runtime) -> tuple[SelfTestResult, ...]:
        """`hal_self_test`: golden-value checks on the device."""
        return self._optional(
            "hal_self_test",
            {"runtime": runtime},
            lambda answer: checked_sequence(SelfTestResult, answer),
            (),
        )

    def register_commands(self, cli: "typer.Typer") -> None:
        """`hal_register_commands`: add this plug-in's commands to `cli`."""
        self._call("hal_register_commands", {"cli": cli})

    def decision_made(self, decision: "Decision") -> None:
        """`hal_decision_made`: show the plug-in a decision; it cannot change it."""
        self._call("hal_decision_made", {"decision": decision})

    def _call(self, hook: str, arguments: dict[str, object]) -> object:
        watch = nullcontext() if self._watchdog is None else self._watchdog.watch(self.entry, hook)
        try:
            with watch:
                answer: object = getattr(self._registered.manager.hook, hook)(**arguments)
        except (Exception, SystemExit) as error:
            raise call_error(self.entry, f"hook {hook}", error) from error
        return answer

    def _required(
        self, hook: str, arguments: dict[str, object], check: Callable[[object], _Answer]
    ) -> _Answer:
        if not self._registered.implements(hook):
            raise PluginError(
                f"{self.entry}, hook {hook}",
                "an implementation, as the plug-in has devices",
                "none",
                f"upgrade {self.entry.distribution}, or report it to its authors",
            )
        answer = self._call(hook, arguments)
        try:
            return check(answer)
        except (TypeError, ValueError) as error:
            raise answer_error(self.entry, hook, error) from error

    def _optional(
        self,
        hook: str,
        arguments: dict[str, object],
        check: Callable[[object], _Answer],
        default: _Answer,
    ) -> _Answer:
        if not self._registered.implements(hook):
            return default
        return self._required(hook, arguments, check)
