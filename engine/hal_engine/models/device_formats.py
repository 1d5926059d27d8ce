"""In which FP8 encoding calls hand rounded rows on: the one that the matrix unit takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hal.device import DeviceSpec
from hal.ops.quantize import QuantizeRequest
from hal.plan import OpSite

# The indexer's queries meet keys that the cache stores in e4m3fn whatever the device.
_STORED_AS_CACHED = ("indexer.q_quantize",)


def with_fp8_of(sites: Iterable[OpSite], device: DeviceSpec) -> list[OpSite]:
    """The sites with the rounding of products' inputs in the FP8 type that the device multiplies.

    e4m3fnuz where the device multiplies that and no e4m3fn (gfx94x); as they are elsewhere. What is
    stored in e4m3fn keeps its values: weights are used as e4m3fnuz exactly, with twice the scale.
    """
    known = device.features | device.unverified_features
    if "matrix.fp8_e4m3fn" in known or "matrix.fp8_e4m3fnuz" not in known:
        return list(sites)
    return [_in_fnuz(site) for site in sites]


def _in_fnuz(site: OpSite) -> OpSite:
    request = site.request
    if not isinstance(request, QuantizeRequest) or request.out_dtype != "fp8_e4m3fn":
        return site
    if site.site.endswith(_STORED_AS_CACHED):
        return site
    return replace(site, request=replace(request, out_dtype="fp8_e4m3fnuz"))
