"""Launches Stream-K products where the wave model of a device prefers them to whole tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from hal.device import DeviceSpec
from hal.ops.gemm import GemmRequest
from hal_kernels.gemm.stream_k_kernels import _gemm_stream_k_kernel, _stream_k_fix_up_kernel
from hal_kernels.gemm.stream_k_limits import bind_schedule
from hal_kernels.gemm.stream_k_schedule import Schedule
from hal_kernels.gemm.stream_k_variants import FIX_UP_ROWS
from hal_kernels.gemm.triton_results import EPILOGUES

_KEPT_SHARES = 32  # numbers of rows of a call site: decodes come again and again
Attempt = Callable[[torch.Tensor, torch.Tensor], bool]


def bind_stream_k(
    request: GemmRequest, device: DeviceSpec, *, weight: torch.Tensor, bias: torch.Tensor | None
) -> Attempt | None:
    """attempt(x[M, K], y[M, N]) -> whether y was written; False where the model prefers whole
    tiles. None where `stream_k_limits` has no schedule for the request.

    For up to FEW_ROWS rows a row does not depend on the others; for more, the number of tiles
    decides where K is cut, and with it the rounding of float32 sums.
    """
    bound = bind_schedule(request, device)
    if bound is None:
        return None
    share_of = lru_cache(maxsize=_KEPT_SHARES)(bound.share)

    def attempt(x: torch.Tensor, y: torch.Tensor) -> bool:
        share = share_of(x.shape[0])
        if share is None:
            return False
        _launch(request, share.schedule, share.tiles, (x, weight, bias, y))
        return True

    return attempt


def _launch(
    request: GemmRequest,
    schedule: Schedule,
    config: Mapping[str, int],
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
