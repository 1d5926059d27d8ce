"""Rounding of activations in groups along a row, in Triton.

Suffixes of tensor names: R rows, K width, G groups of a row. The rules are those of
`hal.ops.low_precision`: scale = amax / largest, 1 for a group of zeros; as ue8m0 the next power of
two that does not saturate.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _quantize_groups_kernel(
    x_RK_ptr, y_RK_ptr, scale_RG_ptr, stride_x, stride_y, K, num_groups,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Program (row, block of BLOCK_G groups of GROUP columns). GROUP is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_k = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = offs_k < K
    x = tl.load(x_RK_ptr + row * stride_x + offs_k, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), axis=1)
    scale = tl.where(peak > 0.0, peak / LARGEST, 1.0)
    groups = offs_g < num_groups
    scale_ptrs = scale_RG_ptr + row * num_groups + offs_g
    if IS_UE8M0:
        # The exponent, one more if there is any mantissa: rounded up to a power of two.
        bits = scale.to(tl.int32, bitcast=True)
        code = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) > 0).to(tl.int32), 254)
        scale = (code << 23).to(tl.float32, bitcast=True)
        tl.store(scale_ptrs, code.to(tl.uint8), mask=groups)
    else:
        tl.store(scale_ptrs, scale, mask=groups)
    y = tl.minimum(tl.maximum(x / scale[:, None], -LARGEST), LARGEST)
    if IS_INTEGER:
        y = (y + 12582912.0) - 12582912.0  # half to even: 1.5 * 2**23 rounds a float32
    tl.store(y_RK_ptr + row * stride_y + offs_k, y.to(y_RK_ptr.dtype.element_ty), mask=inside)
