"""How values of a dense cache become those that a product takes, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_rows import decode_e4m3


@triton.jit
def of_cached(x, dtype: tl.constexpr):
    """x in dtype, of 16 bits, which holds every value of eight bits: nothing is rounded. uint8 is
    the bits of e4m3fn, where the compiler knows no such type."""
    y = x
    if x.dtype == tl.uint8:
        y = tl.where((x & 0x7F) == 0x7F, float("nan"), decode_e4m3(x))
    return y.to(dtype)
