"""Which collectives the kernels over peers' memory serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hal.device import DeviceSpec
from hal.ops.collective import CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.formats import DTYPE_BYTES
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.collective.layout import WIRE_GROUP, Algorithm
from hal_kernels.collective.triton_variants import (
    NO_FP8_WIRE,
    config_of,
    norm_config_of,
    norm_kernel_of,
)

_ADDED = "bfloat16"
_KERNELS: Mapping[Algorithm, str] = MappingProxyType(
    {
        "one_shot": "collective.all_reduce_one_shot",
        "two_shot": "collective.all_reduce_two_shot",
        "reduce_scatter": "collective.reduce_scatter",
        "all_gather": "collective.all_gather",
    }
)


def not_supported_reasons(
    request: CollectiveRequest,
    device: DeviceSpec,
    algorithm: Algorithm,
    *,
    has_fp8_wire: bool = False,
) -> Sequence[Reason]:
    """Empty if the kernel of the algorithm serves. Rows are read 16 bytes at a time.

    has_fp8_wire: what is sent is rounded to e4m3, with a scale of `WIRE_GROUP` values.
    """
    part = request.width
    if algorithm == "reduce_scatter":
        part //= request.world_size
    kernel = _KERNELS[algorithm]
    config = config_of(algorithm, request.world_size, request.transport, has_fp8_wire=has_fp8_wire)
    if has_fp8_wire and device.arch in NO_FP8_WIRE:
        reasons = [_no_fp8_wire(device.arch)]
    elif algorithm == "all_gather":  # moves rows of any dtype, which the others add
        reasons = evidence_reasons(kernel, device, dtype=request.dtype, config=config)
    else:
        reasons = _dtype_reasons(kernel, request) or evidence_reasons(
            kernel, device, dtype="", config=config
        )
    pack = WIRE_GROUP if has_fp8_wire else 16 // DTYPE_BYTES[request.dtype]
    return [*reasons, *_width_reasons(part, pack)]


def _no_fp8_wire(arch: str) -> Reason:
    return Reason(
        what="wire of e4m3",
        required="an architecture that converts to e4m3 and has registers for it beside the sums",
        found=arch,
        kind=ReasonKind.HARDWARE,
    )


def norm_not_supported_reasons(
    request: AllReduceNormRequest, device: DeviceSpec
) -> Sequence[Reason]:
    """Empty if the kernel that norms the sum as well serves. A row is one tile of it, or several
    where registers do not hold it."""
    kernel = norm_kernel_of(request.width)
    config = norm_config_of(request.world_size, request.width, request.transport)
    return [
        *(
            _dtype_reasons(kernel, request)
            or evidence_reasons(kernel, device, dtype="", config=config)
        ),
        *_width_reasons(request.width, 16 // DTYPE_BYTES[request.dtype]),
    ]


def _dtype_reasons(kernel: str, request: CollectiveRequest) -> list[Reason]:
    """Of a kernel that adds: sums are compiled of one dtype."""
    if request.dtype == _ADDED:
        return []
    return [not_written(kernel, "dtype", _ADDED, request.dtype)]


def _width_reasons(part: int, pack: int) -> list[Reason]:
    """Of a part of a row that has to begin at 16 bytes, or where a scale does."""
    if part % pack == 0:
        return []
    return [
        Reason(
            what="width of a rank's part",
            required=f"a multiple of {pack} ({'a scale' if pack == WIRE_GROUP else '16 bytes'})",
            found=str(part),
            kind=ReasonKind.ARGUMENT,
        )
    ]
