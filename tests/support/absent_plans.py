"""Plans and decisions for devices that are not here: profiles of the database, recorded hosts.

The plug-ins are asked in this process, without probes: a plan takes a second and not ten.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerator_plugins import BACKENDS, entry, look_at, plugin
from hal.candidates import KernelCandidate
from hal.device import DetectedDevice, DevicePolicy, DeviceSpec
from hal.host import RecordedHost
from hal.ops.request import OpRequest
from hal.plan import Plan, PlannedOp
from hal.plugins.calls import Plugin
from hal.plugins.loading import register_plugin
from hal.plugins.states import PluginState
from hal.reasons import Reason, ReasonKind
from hal.selection import Decision, SelectionRules, select
from hal.waivers import WaiverBook
from hal_backends.gpu.software import TESTED_VERSIONS, vendor_version
from hal_backends.reference import plugin as reference_plugin
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.preset_files import load_presets

PLAIN: Mapping[str, str] = {"torch": "2.13.0", "triton": "3.9.0"}


@functools.cache
def profiles() -> Mapping[str, DeviceSpec]:
    """Every device of the database with torch and triton beside it."""
    return {
        spec.device_id: dataclasses.replace(spec, software=PLAIN)
        for backend in BACKENDS
        for spec in plugin(backend).device_profiles()
    }


def profile(
    name: str, *, has_libraries: bool = False, **attributes: str | int | float
) -> DeviceSpec:
    """A device of the database. has_libraries: with every library that a candidate asks about.
    attributes: facts about a group that a profile cannot know, as `p2p="verified"`."""
    spec = profiles()[name]
    software = dict(PLAIN)
    if has_libraries:
        software |= {name: vendor_version(name, spec.backend) for name in TESTED_VERSIONS}
    return dataclasses.replace(
        spec, software=software, attributes={**spec.attributes, **attributes}
    )


@functools.cache
def _reference() -> Plugin:
    return Plugin(register_plugin(entry("reference"), reference_plugin))


def reference_candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """The references of one op, as their plug-in offers them for any device."""
    return _reference().kernel_candidates(op, device)


class ProfileRegistry:
    """What `plan_model` asks of a registry, for the devices of one recorded host or for none."""

    states: Sequence[PluginState] = ()

    def __init__(self, host: RecordedHost | None = None) -> None:
        self.host = host
        self._specs = {} if host is None else look_at(host).specs

    @property
    def devices(self) -> Sequence[DetectedDevice]:
        return [
            DetectedDevice(device_id=s.device_id, vendor=s.vendor, name=s.name, arch=s.arch)
            for s in self._specs.values()
        ]

    def describe(self, device_id: str) -> DeviceSpec:
        return self._specs[device_id]

    def candidates(self, op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        own = plugin(device.backend).kernel_candidates(op, device)
        return (*own, *reference_candidates(op, device))

    def policy(self, device: DeviceSpec) -> DevicePolicy:
        return plugin(device.backend).device_policy(device)

    def decision_made(self, decision: Decision) -> None: ...


def decide(
    device: DeviceSpec,
    request: OpRequest,
    *,
    allows: frozenset[str] = frozenset(),
    use: Mapping[str, str] | None = None,
) -> Decision:
    """What serves one request on a device, the device's policy considered."""
    registry = ProfileRegistry()
    rules = SelectionRules(
        explicit=use or {}, allowed_semantics=allows, policy=registry.policy(device)
    )
    return select(request, registry.candidates(request.op, device), rules)


def plan(
    preset: str,
    device: DeviceSpec,
    tp: int = 1,
    *,
    host: RecordedHost | None = None,
    use: Mapping[str, str] | None = None,
    **options: Any,
) -> Plan:
    """The report on a preset, or on the model of a folder, as `hal plan` makes it."""
    registry: Any = ProfileRegistry(host)
    presets = load_presets()
    return plan_model(
        presets[preset].path if preset in presets else Path(preset),
        EngineOptions(device=device.device_id, tp=tp, **options),
        registry,
        WaiverBook(),
        use,
        device=device,
        is_strict=False,
    ).plan


def sites(plan: Plan, name: str, phase: str = "") -> list[PlannedOp]:
    """Every range of a call site, named without its layers."""
    found = [
        op
        for op in plan.ops
        if op.site.site.removeprefix("layers.*.") == name and phase in ("", op.site.request.phase)
    ]
    assert found, f"no call site {name} {phase}"
    return found


def reasons(decision: Decision, implementation: str) -> dict[str, Reason]:
    """Why a candidate, named by the end of its name, was not chosen: what -> reason."""
    for loser in decision.rejected:
        if loser.name.endswith(f".{implementation}"):
            return {reason.what: reason for reason in loser.reasons}
    raise AssertionError(
        f"{implementation} is not among the losers of {decision.choice.name}: "
        f"{[loser.name for loser in decision.rejected]}"
    )


def kinds(decision: Decision, implementation: str) -> set[ReasonKind]:
    return {reason.kind for reason in reasons(decision, implementation).values()}
