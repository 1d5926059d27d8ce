"""Launches Stream-K products where the wave model of a device prefers them to whole tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal.device import DeviceSpec
from hal.ops.gemm import GemmRequest
from hal_kernels.aot.limits import evidence_of
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.stream_k_kernels import _gemm_stream_k_kernel, _stream_k_fix_up_kernel
from hal_kernels.gemm.stream_k_schedule import Schedule, stream_k
from hal_kernels.gemm.stream_k_variants import FIX_UP_ROWS, PROGRAMS_PER_UNIT, tiles_of
from hal_kernels.gemm.triton_limits import FEW_ROWS, dense_suffix, size_of
from hal_kernels.gemm.triton_results import EPILOGUES
from hal_kernels.gemm.triton_variants import configurations

Attempt = Callable[[torch.Tensor, torch.Tensor], bool]


def bind_stream_k(
    request: GemmRequest,
    device: DeviceSpec,
    target: Target,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Attempt | None:
    """attempt(x[M, K], y[M, N]) -> whether y was written; False where the model prefers whole
    tiles. None for results in another dtype, where nothing is known of how many programs run at a
    time, or no machine code shows that the kernel is a fast path here.

    For up to FEW_ROWS rows a row does not depend on the others; for more, the number of tiles
    decides where K is cut, and with it the rounding of float32 sums.
    """
    if request.out_dtype not in ("", request.dtype):
        return None  # compiled for results in the rows' own type
    units = int(device.attributes.get("compute_units", 0))
    usable = {
        size
        for size in PROGRAMS_PER_UNIT
        if units and _is_native(device, request.dtype, size + dense_suffix(request))
    }
    if not usable:
        return None
    table = "gemm_gated" if request.epilogue == "silu_gated" else "gemm"
    features, k = request.out_features, request.k

    def attempt(x: torch.Tensor, y: torch.Tensor) -> bool:
        rows = x.shape[0]
        size = "small" if rows <= FEW_ROWS else "large"
        if size not in usable:
            return False
        config = tiles_of(target, table, size)
        tiles = -(-rows // config["BLOCK_M"]) * -(-features // config["BLOCK_N"])
        splits = configurations(table, target)[size_of(rows, k)]["SPLIT_K"]
        slots = units * PROGRAMS_PER_UNIT[size]
        schedule = stream_k(tiles, -(-k // config["BLOCK_K"]), slots, splits=splits)
        if schedule is None:
            return False
        _launch(request, schedule, config, (x, weight, bias, y))
        return True

    return attempt


def _is_native(device: DeviceSpec, dtype: str, config: str) -> bool:
    found = evidence_of("gemm.stream_k", device, dtype, config)
    return found is not None and found.tier == "native"


def _launch(
    request: GemmRequest,
    schedule: Schedule,
    config: dict[str, int],
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
) -> None:
    x, weight, bias, y = operands
    rows, features = x.shape[0], request.out_features
    halves = 2 if request.epilogue == "silu_gated" else 1
    size = 2 * schedule.programs * halves * config["BLOCK_M"] * config["BLOCK_N"]
    part = torch.empty((size,), dtype=torch.float32, device=x.device)
    form = {"HAS_BIAS": bias is not None, "EPILOGUE": EPILOGUES[request.epilogue]}
    bias_or_any = weight if bias is None else bias
    _gemm_stream_k_kernel[(schedule.programs,)](
        x, weight, bias_or_any, y, part, rows, features, request.k,
        x.stride(0), weight.stride(0), y.stride(0), **form, **config,
    )  # fmt: skip
    tile = {name: config[name] for name in ("BLOCK_M", "BLOCK_N", "GROUP_M")}
    _stream_k_fix_up_kernel[(schedule.tiles, config["BLOCK_M"] // FIX_UP_ROWS)](
        part, bias_or_any, y, rows, features, schedule.steps, schedule.programs, y.stride(0),
        ROWS=FIX_UP_ROWS, **form, **tile,
    )  # fmt: skip
