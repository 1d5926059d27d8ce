"""Binds the Triton rounding kernel to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.quantize import QuantizeRequest
from hal_kernels.quantize.code_kernels import _quantize_codes_kernel
from hal_kernels.quantize.row_kernels import _quantize_row_looped_kernel
from hal_kernels.quantize.triton_kernels import _quantize_fp4_kernel, _quantize_groups_kernel
from hal_kernels.quantize.triton_variants import (
    FP4,
    GROUPS,
    LARGEST,
    converts_in_integers,
    group_block,
    launch_warps,
    looped_constants,
    looped_warps,
)

Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def bind_quantize_groups(*, group: int, out_dtype: str, is_ue8m0: bool) -> Quantizer:
    """kernel(x[T, K]) -> (values [T, K], scales [T, K / group], float32 or uint8 codes)."""
    dtype: torch.dtype = getattr(torch, out_dtype.replace("fp8", "float8"))

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        size = group or triton.next_power_of_2(width)
        groups = -(-width // size)
        block = group_block(size, groups)
        y = torch.empty((rows, width), dtype=dtype, device=x.device)
        scale_dtype = torch.uint8 if is_ue8m0 else torch.float32
        scale = torch.empty((rows, groups), dtype=scale_dtype, device=x.device)
        if rows:
            _quantize_groups_kernel[(rows, -(-groups // block))](
                x, y, scale, x.stride(0), y.stride(0), width, groups,
                GROUP=size, BLOCK_G=block, LARGEST=LARGEST[out_dtype],
                IS_INTEGER=out_dtype == "int8", IS_UE8M0=is_ue8m0,
                num_warps=launch_warps(size, block),
            )  # fmt: skip
        return y, scale

    return kernel


def bind_quantize_codes(*, group: int, is_ue8m0: bool) -> Quantizer:
    """As `bind_quantize_groups` to e4m3fn, where Triton does not convert to it."""

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        size = group or triton.next_power_of_2(width)
        groups = -(-width // size)
        block = group_block(size, groups)
        y = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
        scale_dtype = torch.uint8 if is_ue8m0 else torch.float32
        scale = torch.empty((rows, groups), dtype=scale_dtype, device=x.device)
        if rows:
            _quantize_codes_kernel[(rows, -(-groups // block))](
                x, y, scale, x.stride(0), y.stride(0), width, groups,
                GROUP=size, BLOCK_G=block, IS_UE8M0=is_ue8m0, num_warps=launch_warps(size, block),
            )  # fmt: skip
        return y.view(torch.float8_e4m3fn), scale

    return kernel


def bind_quantize_looped(arch: str, warp_size: int, *, out_dtype: str) -> Quantizer:
    """As `bind_quantize_groups` with one scale a row, for rows that no program's registers hold."""
    constants = looped_constants(out_dtype, arch)
    dtype: torch.dtype = getattr(torch, out_dtype.replace("fp8", "float8"))

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        y = torch.empty((rows, width), dtype=dtype, device=x.device)
        scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
        if rows:
            stored = y.view(torch.uint8) if constants["IS_BITS"] else y
            _quantize_row_looped_kernel[(rows,)](
                x, stored, scale, x.stride(0), y.stride(0), width,
                **constants, num_warps=looped_warps(warp_size),
            )  # fmt: skip
        return y, scale

    return kernel


def bind_quantize_rows(arch: str, *, group: int, out_dtype: str, is_ue8m0: bool) -> Quantizer:
    """Rounding to eight bits by the kernel of an architecture."""
    if converts_in_integers(arch, out_dtype):
        return bind_quantize_codes(group=group, is_ue8m0=is_ue8m0)
    return bind_quantize_groups(group=group, out_dtype=out_dtype, is_ue8m0=is_ue8m0)


def bind_quantize_fp4(*, group: int, is_ue8m0: bool) -> Quantizer:
    """kernel(x[T, K]) -> (uint8 [T, K / 2], scales [T, K / group]: uint8 codes or e4m3 values)."""

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        groups = width // group
        block = group_block(group, groups)
        y = torch.empty((rows, width // 2), dtype=torch.uint8, device=x.device)
        scale = torch.empty((rows, groups), dtype=torch.uint8, device=x.device)
        if rows:
            _quantize_fp4_kernel[(rows, -(-groups // block))](
                x, y, scale, x.stride(0), width, groups,
                GROUP=group, BLOCK_G=block, IS_UE8M0=is_ue8m0,
            )  # fmt: skip
        return y, scale if is_ue8m0 else scale.view(torch.float8_e4m3fn)

    return kernel


def bind(request: QuantizeRequest, device: DeviceSpec) -> Quantizer:
    """The kernel of a request that `triton_limits` has nothing against."""
    if request.out_dtype in FP4:
        return bind_quantize_fp4(group=request.group_size, is_ue8m0=request.scale_dtype == "ue8m0")
    if not request.group_size and request.width > GROUPS["wide-row"]:
        warp_size = int(device.attributes.get("warp_size", 32))
        return bind_quantize_looped(device.arch, warp_size, out_dtype=request.out_dtype)
    return bind_quantize_rows(
        device.arch,
        group=request.group_size,
        out_dtype=request.out_dtype,
        is_ue8m0=request.scale_dtype == "ue8m0",
    )
