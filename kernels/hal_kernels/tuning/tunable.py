"""What tuning needs to know of a kernel: its shape classes, its configurations, one call of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hal.device import DeviceSpec
from hal.ops.request import OpRequest
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import KernelVariant
from hal_kernels.tuning.performance_model import Footprint
from hal_kernels.tuning.shapes import ShapeClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """What is launched without tuning: the name of the catalogue's variant and its constants."""

    config: str
    configuration: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a bound op: `bind(request, device, **static)(*args)`."""

    request: OpRequest
    static: Mapping[str, Any]
    args: tuple[Any, ...]


def _is_launched(target: Target, shape: ShapeClass, units: int | None) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunableKernel:
    """A kernel whose launch has constants to choose.

    kernel: of the catalogue. module: whose `bind` launches it. size_names: of a class. forms,
    dtypes: that a target has. shape_of: class of a request with so many tokens; None for a request
    that another kernel of the package serves. space: configurations worth a trial. call: random
    operands on a torch device; imports torch. default_of_units: of kernels whose default depends on
    the number of the device's multiprocessors, 0 where it is not known. launch_only: what a
    configuration has beside constants of the kernel, as the number of programs of its grid.
    why_never: why no launch is of a class, "" where one is; with the number of multiprocessors,
    None where no device is meant.
    """

    kernel: str
    module: str
    size_names: tuple[str, ...]
    forms: tuple[str, ...]
    dtypes: Callable[[Target], Sequence[str]]
    default: Callable[[Target, ShapeClass], Default]
    space: Callable[[Target, ShapeClass], Sequence[Mapping[str, int]]]
    footprint: Callable[[ShapeClass, Mapping[str, int]], Footprint]
    call: Callable[[ShapeClass, Any], Call]
    default_of_units: Callable[[Target, ShapeClass, int], Default] | None = None
    launch_only: frozenset[str] = frozenset()
    why_never: Callable[[Target, ShapeClass, int | None], str] = _is_launched

    def default_on(self, target: Target, shape: ShapeClass, device: DeviceSpec) -> Default:
        """What is launched on a device: `default`, or what its multiprocessors decide."""
        if self.default_of_units is None:
            return self.default(target, shape)
        return self.default_of_units(target, shape, int(device.attributes.get("compute_units", 0)))

    def configurations(
        self, target: Target, shape: ShapeClass, device: DeviceSpec | None = None
    ) -> list[dict[str, int]]:
        """The default first, then the others of the space, each once. device: None for the default
        of the architecture."""
        if device is None:
            default = self.default(target, shape).configuration
        else:
            default = self.default_on(target, shape, device).configuration
        found = [dict(default), *(dict(default) | dict(c) for c in self.space(target, shape))]
        return [c for index, c in enumerate(found) if c not in found[:index]]

    def variant(
        self,
        variants: Sequence[KernelVariant],
        target: Target,
        shape: ShapeClass,
        configuration: Mapping[str, int],
    ) -> KernelVariant:
        """The catalogue's variant for the class with other constants. Raises KeyError for a class
        that the catalogue has no variant for."""
        wanted = self.default(target, shape).config
        found = next((v for v in variants if (v.dtype, v.config) == (shape.dtype, wanted)), None)
        if found is None:
            raise KeyError(f"{self.kernel}: no variant {wanted} of {shape.dtype} on {target.arch}")
        constants = {n: v for n, v in configuration.items() if n not in self.launch_only}
        warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
        return dataclasses.replace(
            found,
            config=configuration_name(configuration),
            constants={**found.constants, **constants},
            num_warps=warps,
            num_stages=stages,
        )


_SHORT = {
    "BLOCK_M": "m",
    "BLOCK_N": "n",
    "BLOCK_K": "k",
    "SPLIT_K": "split",
    "num_warps": "w",
    "num_stages": "s",
}


def configuration_name(configuration: Mapping[str, int]) -> str:
    """ "m64 n128 k64 w4 s3": what a reader compares; groups of tiles and the like are left out."""
    parts = [
        f"{short}{configuration[name]}"
        for name, short in _SHORT.items()
        if name in configuration and not (name == "SPLIT_K" and configuration[name] == 1)
    ]
    return " ".join(parts)
