"""Packs activation rows into blocks, so that a generated kernel reads them as one stream."""

from __future__ import annotations

import functools
from collections.abc import Callable

from hal_kernels.cpu_intrinsics import pointer_float32, pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_worker


def _make_pack_worker() -> Callable[[int, int, int, int], None]:
    def pack_rows(arguments: int, begin: int, end: int, thread: int) -> None:
        args = pointer_int64(arguments)
        x, packed = pointer_float32(args[0]), pointer_float32(args[1])
        num_rows, stride, num_blocks, k = args[2], args[3], args[4], args[5]
        for block in range(begin, end):
            first = num_rows * block // num_blocks
            rows = num_rows * (block + 1) // num_blocks - first
            out = first * k
            for column in range(k):
                for row in range(rows):
                    packed[out + column * rows + row] = x[(first + row) * stride + column]

    return pack_rows


@functools.cache
def pack_rows_worker() -> CompiledWorker:
    """Worker over row blocks: x [T, K] (stride in floats) -> [blocks][K][rows of the block].

    Arguments: x, packed, T, stride, number of blocks, K (the blocks are T*b/n .. T*(b+1)/n).
    """
    return compile_worker(_make_pack_worker())
