"""Tile sizes of attention over a window and entries in packed rows of v41_528 and fp4_288. Free of
torch and triton.
"""

from __future__ import annotations

from typing import Any

from hal_kernels.aot.targets import Target

UNPACKING = "hal_kernels.kv_write.unpacking"
# How each assembler says that the result of an instruction is its operand.
REGISTERS = {"cuda": "=r,0", "hip": "=v,0"}


def packed_tiles(target: Target) -> dict[str, Any]:
    """Tile sizes and launch options of rows in eight and four bits, which become 16 bits in
    registers, so many columns at a time. RDNA has registers for 16 keys and 128 columns, CDNA gains
    nothing from more keys, and tensor cores share out 32 better among their warps."""
    if target.backend == "hip":
        is_cdna = target.warp_size == 64
        return {
            "BLOCK_H": 16,
            "CHUNK": 512 if is_cdna else 128,
            "BLOCK_N": 16,
            "RELOADS_Q": not is_cdna,
            "REGISTERS": REGISTERS["hip"],
            "num_warps": 4 if is_cdna else 8,
            "num_stages": 1,
        }
    return {
        "BLOCK_H": 16,
        "CHUNK": 256,
        "BLOCK_N": 32,
        "RELOADS_Q": False,
        "REGISTERS": REGISTERS["cuda"],
        "num_warps": 8,
        "num_stages": 2,
    }
