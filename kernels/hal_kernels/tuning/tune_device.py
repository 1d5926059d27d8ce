"""The device of a tuning: a live one, one that a plug-in knows, or Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hal.device import DeviceSpec
from hal.errors import DeviceNotFoundError, SettingsError
from hal.measurements import with_measurements
from hal_kernels.aot.targets import Target, find_target
from hal_kernels.compute_units import compute_units

if TYPE_CHECKING:
    from hal.plugins.registry import BackendRegistry

INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneDevice:
    """is_live: whether kernels run on it here. key: what its configurations are kept under."""

    spec: DeviceSpec
    target: Target
    is_live: bool
    key: str


def tune_device(registry: BackendRegistry, name: str, *, is_measured: bool) -> TuneDevice:
    """The device of that name, or the only accelerator of this host.

    Raises DeviceNotFoundError for a device that nothing knows, for none where none was named, and
    with `is_measured` for one that is not here; SettingsError for an architecture that kernels are
    not compiled for.
    """
    here = {device.device_id for device in registry.devices}
    live = [spec for i in sorted(here) if (spec := registry.describe(i)).torch_device != "cpu"]
    if not name and len(live) != 1:
        raise DeviceNotFoundError(
            "choice of a device to tune for",
            "one accelerator of this host, or --device",
            ", ".join(spec.device_id for spec in live) or "no accelerator",
            "name one with --device: of one that is not here (`hal db list`) configurations are "
            "ranked by a model",
        )
    is_live = name in here or not name
    spec = live[0] if not name else registry.describe(name) if is_live else registry.profile(name)
    if is_measured and not is_live:
        raise DeviceNotFoundError(
            f"device {name!r}",
            "a device of this host, as --measure says",
            f"here: {', '.join(sorted(here)) or 'nothing'}",
            "leave --measure out: without the device a model ranks the configurations",
        )
    profile = str(spec.attributes.get("profile") or spec.name)
    return TuneDevice(
        spec=with_compute_units(with_measurements(spec)) if is_live else spec,
        target=find_target(spec.arch),
        is_live=is_live and spec.torch_device != "cpu",
        key=profile,
    )


def interpreted(device: TuneDevice) -> TuneDevice:
    """The device as Triton's interpreter on this host plays it: its times say nothing of the
    device, so they are kept apart."""
    spec = replace(device.spec, torch_device="cpu", name=INTERPRETER)
    return replace(device, spec=spec, is_live=True, key=f"{INTERPRETER}-{device.target.arch}")


def with_compute_units(device: DeviceSpec) -> DeviceSpec:
    """With the number of multiprocessors that torch reports of a live device."""
    if device.attributes.get("compute_units") or device.torch_device != "cuda":
        return device
    units = compute_units(device)
    if not units:
        import torch

        raise SettingsError(
            f"device {device.device_id}",
            "a torch that can use it",
            f"torch {torch.__version__} without a usable device",
            "install the build of torch for it; `hal doctor` says which",
        )
    return replace(device, attributes={**device.attributes, "compute_units": units})
