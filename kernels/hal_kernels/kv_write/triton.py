"""Binds the Triton KV writes to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal.device import DeviceSpec
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS, KvFormat
from hal.ops.kv_write import KvWriteRequest, check_scales
from hal_kernels.kv_write.cache_dtypes import as_compiled
from hal_kernels.kv_write.fp4_kernels import _kv_write_fp4_kernel
from hal_kernels.kv_write.packed_kernels import _kv_write_packed_kernel
from hal_kernels.kv_write.triton_kernels import _kv_write_kernel
from hal_kernels.kv_write.triton_variants import (
    dense_launch,
    fp4_constants,
    packed_constants,
    row_warps,
)


def bind(
    request: KvWriteRequest, device: DeviceSpec, *, k_scale: float = 1.0, v_scale: float = 1.0
) -> Callable[..., None]:
    """kernel(k, v, k_cache, v_cache, slot_mapping), or (rows, cache, slot_mapping) with a
    kv_format. Rows of k, v and rows may be strided; pages are contiguous, and so is the whole cache
    of dense rows.

    Raises ValueError for scales that the request does not have.
    """
    check_scales("kv_write", request.has_scales, k_scale, v_scale)
    warp_size = int(device.attributes.get("warp_size", 32))
    if request.kv_format in ("", *PLAIN_FORMATS):
        return _bind_dense(request, device.arch, warp_size, (k_scale, v_scale))
    form = KV_FORMATS[request.kv_format]
    return (_bind_fp4 if form.element == "fp4_e2m1" else _bind_packed)(
        request, form, row_warps(form, warp_size)
    )


def _bind_dense(
    request: KvWriteRequest, arch: str, warp_size: int, scales: tuple[float, float]
) -> Callable[..., None]:
    k_width = request.num_kv_heads * request.head_dim
    v_width = request.num_kv_heads * request.v_head_dim
    widest = max(k_width, v_width)
    block, warps = dense_launch(widest, request.dtype, warp_size)

    def kernel(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        tokens = slot_mapping.shape[0]
        k_cache, v_cache = (as_compiled(cache, arch) for cache in (k_cache, v_cache))
        if tokens:
            _kv_write_kernel[(tokens, -(-widest // block))](
                k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), *scales,
                K_WIDTH=k_width, V_WIDTH=v_width, BLOCK=block, HAS_SCALES=request.has_scales,
                num_warps=warps,
            )  # fmt: skip

    def kernel_rows(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        kernel(rows, rows, cache, cache, slot_mapping)  # of the values no column is written

    return kernel_rows if request.kv_format else kernel


def packed_places(
    form: KvFormat, block_size: int, cache: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, ...]]:
    """Of a cache of packed rows what the kernels take beside it: its scales and its plain tails as
    tensors of their dtype, and strides of pages and rows and starts, of values, scales, tails."""
    row_bytes = form.data_bytes if form.is_split_page else form.row_bytes(0)
    scale_bytes = form.scale_bytes - form.padding
    tail_start = form.quantized_dim + (scale_bytes if form.has_scales_before_plain else 0)
    scale_start, scale_row = form.quantized_dim, row_bytes
    if form.is_split_page:
        scale_start, scale_row = block_size * form.data_bytes, form.scale_bytes
    scales = cache.view(torch.float32) if form.scale == "float32" else cache
    tails = cache.view(torch.bfloat16) if form.plain_dim else cache
    unit, tail_unit = scales.element_size(), tails.element_size()
    places = (
        cache.stride(0), row_bytes, scales.stride(0), scale_row // unit, scale_start // unit,
        tails.stride(0), row_bytes // tail_unit, tail_start // tail_unit,
    )  # fmt: skip
    return (scales, tails), places


def _bind_packed(request: KvWriteRequest, form: KvFormat, warps: int) -> Callable[..., None]:
    constants = packed_constants(form, request.block_size)

    def kernel(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        tokens = slot_mapping.shape[0]
        if tokens:
            parts, places = packed_places(form, request.block_size, cache)
            _kv_write_packed_kernel[(tokens,)](
                rows, cache, *parts, slot_mapping, rows.stride(0), *places,
                num_warps=warps, **constants,
            )  # fmt: skip

    return kernel


def _bind_fp4(request: KvWriteRequest, form: KvFormat, warps: int) -> Callable[..., None]:
    constants = fp4_constants(form, request.block_size)
    scale_start = request.block_size * form.data_bytes

    def kernel(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        tokens = slot_mapping.shape[0]
        if tokens:
            _kv_write_fp4_kernel[(tokens,)](
                rows, cache, slot_mapping, rows.stride(0), cache.stride(0), scale_start,
                num_warps=warps, **constants,
            )  # fmt: skip

    return kernel
