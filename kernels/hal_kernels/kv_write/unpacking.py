"""Triton functions for tiles of packed rows on their way to a product in 16 bits."""

from __future__ import annotations

import triton
import triton.language as tl

_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def exact_bf16(wide):
    """float32 values that bfloat16 holds exactly, as bfloat16: their upper halves. Half of the
    devices have no instruction that rounds to bfloat16, and would spend several on each value."""
    upper = wide.to(tl.int32, bitcast=True) >> 16
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def unpacked_once(tile, REGISTERS: tl.constexpr):
    """The tile of 16-bit values itself, unpacked where it was loaded.

    Left alone, the compiler has the threads exchange the packed bytes instead, and every warp then
    unpacks the whole tile for itself, once as keys and once as values. No exchange moves across an
    instruction of the assembler's, even an empty one, whose result is its operand; the interpreter
    has none. REGISTERS: the target's constraints of such an instruction.
    """
    if _IS_COMPILED:
        tile = tl.inline_asm_elementwise(
            "", REGISTERS, [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    return tile
