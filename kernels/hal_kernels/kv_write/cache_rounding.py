"""How a value becomes one of a dense cache of keys or of values, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_kernels import encode_e4m3


@triton.jit
def of_cache(x, scale, dtype: tl.constexpr, HAS_SCALES: tl.constexpr):
    """x in the dtype of a cache. One of eight bits holds x / scale with HAS_SCALES, x without, and
    saturates; a NaN stays one. Compilers differ in what a cast alone makes of what is too large.
    uint8 is the bits of e4m3fn, where the compiler knows no such type."""
    y = x
    if dtype.primitive_bitwidth == 8:
        y = x.to(tl.float32)
        if HAS_SCALES:
            y = tl.div_rn(y, tl.zeros(y.shape, tl.float32) + scale)
        if dtype == tl.uint8:
            y = encode_e4m3(y)
        else:
            largest: tl.constexpr = 240.0 if dtype == tl.float8e4b8 else 448.0
            y = tl.where(y == y, tl.minimum(tl.maximum(y, -largest), largest), y)
    return y.to(dtype)
