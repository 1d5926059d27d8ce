"""What follows a product in Triton where its tile is stored: bias, activation, residual, rounding.

Suffixes of tensor names: M rows (tokens), N output features, G groups of them that share a scale.
Every product of this package ends here, so that each of these is written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.quantize.triton_kernels import _inverse_of_ue8m0, _scale_of, _ue8m0_code

EPILOGUE_NONE = tl.constexpr(0)
EPILOGUE_SILU = tl.constexpr(1)
EPILOGUE_SILU_GATED = tl.constexpr(2)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _finish(
    acc, up, bias_N_ptr, offs_n, N,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Bias and activation on float32; `up` is the second product of a gated one, whose bias is
    behind the gate's. With a CLAMP (0 is none) the gate is capped from above and `up` on both
    sides, before."""
    if HAS_BIAS:
        inside = offs_n < N
        acc += tl.load(bias_N_ptr + offs_n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if EPILOGUE == EPILOGUE_SILU_GATED:
            up += tl.load(bias_N_ptr + N + offs_n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == EPILOGUE_SILU:
        acc = _silu(acc)
    elif EPILOGUE == EPILOGUE_SILU_GATED:
        if CLAMP > 0.0:
            acc = tl.minimum(acc, CLAMP, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -CLAMP, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, CLAMP, propagate_nan=tl.PropagateNan.ALL)
        acc = _silu(acc) * up
    return acc


@triton.jit
def _round_groups(y, LARGEST: tl.constexpr, IS_UE8M0: tl.constexpr):
    """(values, scales) of float32 groups along the last axis, by the rules of the op `quantize`;
    scales are float32 or, as int32, ue8m0 codes."""
    axis: tl.constexpr = len(y.shape) - 1
    is_finite = tl.min((tl.abs(y) < float("inf")).to(tl.int32), axis=axis)
    scale = _scale_of(tl.max(tl.abs(y), axis=axis), is_finite, LARGEST)
    if IS_UE8M0:
        scale = _ue8m0_code(scale)
        y = y * tl.expand_dims(_inverse_of_ue8m0(scale), axis)
    else:
        y = y / tl.expand_dims(scale, axis)
    return tl.where(y == y, tl.minimum(tl.maximum(y, -LARGEST), LARGEST), y), scale


@triton.jit
def _store_result(
    y, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr, offs_m, offs_n, M, N, stride_ym, stride_rm,
    HAS_RESIDUAL: tl.constexpr, OUT_GROUP: tl.constexpr, OUT_LARGEST: tl.constexpr,
    OUT_UE8M0: tl.constexpr,
):  # fmt: skip
    """Stores a float32 tile, rounded once. HAS_RESIDUAL: a tensor of the result's shape is added
    before. OUT_GROUP > 0: the tile is stored in eight bits whose largest value is OUT_LARGEST, with
    a scale per row and OUT_GROUP columns (scales are contiguous); tiles are whole groups wide, and
    so is N.
    """
    tile = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if HAS_RESIDUAL:
        at = residual_MN_ptr + offs_m.to(tl.int64)[:, None] * stride_rm + offs_n[None, :]
        y += tl.load(at, mask=tile, other=0.0).to(tl.float32)
    y_ptrs = y_MN_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    if OUT_GROUP > 0:
        rows: tl.constexpr = y.shape[0]
        columns: tl.constexpr = y.shape[1]
        groups: tl.constexpr = columns // OUT_GROUP
        if groups == 1:
            y, scale = _round_groups(y, OUT_LARGEST, OUT_UE8M0)
            scale = scale[:, None]
        else:
            apart, scale = _round_groups(
                tl.reshape(y, (rows, groups, OUT_GROUP)), OUT_LARGEST, OUT_UE8M0
            )
            y = tl.reshape(apart, (rows, columns))
        offs_g = tl.min(offs_n, axis=0) // OUT_GROUP + tl.arange(0, groups)
        scale_ptrs = y_scale_MG_ptr + offs_m.to(tl.int64)[:, None] * (N // OUT_GROUP)
        inside = (offs_m < M)[:, None] & (offs_g < N // OUT_GROUP)[None, :]
        tl.store(
            scale_ptrs + offs_g[None, :], scale.to(y_scale_MG_ptr.dtype.element_ty), mask=inside
        )
    tl.store(y_ptrs, y.to(y_MN_ptr.dtype.element_ty), mask=tile)
