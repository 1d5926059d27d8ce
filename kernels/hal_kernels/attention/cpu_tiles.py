"""Unrolled tiles of the CPU attention kernels, emitted as straight-line vector code.

``head_dim`` is a multiple of 16 and, like the strides and the element kind, a constant of the
kernel that uses a tile. ``D`` below is head_dim, a vector holds 16 lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from hal_kernels.cpu_intrinsics import intrinsic
from hal_kernels.cpu_jit import codegen_features
from hal_kernels.cpu_simd import (
    ELEMENT_BYTES,
    FP32,
    LANES,
    call_llvm,
    emit_add,
    emit_fma,
    emit_load,
    emit_store,
    float32x16,
    splat,
)

_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
# Totals that add_weighted_tile works on together.
TILE_TOTALS = 4
# Accumulators that fit beside the operands in the 16 registers of AVX2 (two a vector).
_ACCUMULATORS = 4


@intrinsic
def dot_rows(
    typing_context: Any, query: Any, rows: Any, stride: Any, head_dim: Any, kind: Any
) -> Any:
    """Dot products of one fp32 vector [D] with 16 rows [16, D], as the lanes of a vector.

    ``query`` and ``rows`` are addresses, ``stride`` the elements from a row to the next. Per row
    D/16 fused multiply-adds; the 16 partial vectors are then summed and transposed together.
    """
    num_vectors = head_dim.literal_value // LANES
    row_stride, element = stride.literal_value, kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        query_vectors = [
            emit_load(builder, args[0], _INT64(LANES * i), FP32) for i in range(num_vectors)
        ]
        sums = []
        for row in range(LANES):
            total = None
            for i, query_vector in enumerate(query_vectors):
                values = emit_load(builder, args[1], _INT64(row * row_stride + LANES * i), element)
                if total is None:
                    total = builder.fmul(query_vector, values, flags=("contract",))
                else:
                    total = emit_fma(builder, query_vector, values, total)
            sums.append(total)
        return _sum_each(builder, sums)

    return float32x16(types.int64, types.int64, stride, head_dim, kind), codegen


@intrinsic
def add_weighted_rows(
    typing_context: Any,
    total: Any,
    weights: Any,
    rows: Any,
    stride: Any,
    head_dim: Any,
    kind: Any,
    num_rows: Any,
) -> Any:
    """total[D] += sum of weights[r] * rows[r, D] over ``num_rows`` rows, in their order.

    ``total`` and ``weights`` are addresses of fp32. One broadcast and D/16 fused multiply-adds a
    row.
    """
    num_vectors = head_dim.literal_value // LANES
    row_stride, element = stride.literal_value, kind.literal_value
    count = num_rows.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weight_vectors = [_broadcast_load(builder, args[1], row) for row in range(count)]
        for first in range(0, num_vectors, _ACCUMULATORS):
            vectors = range(first, min(first + _ACCUMULATORS, num_vectors))
            sums = [emit_load(builder, args[0], _INT64(LANES * i), FP32) for i in vectors]
            for row in range(count):
                for position, i in enumerate(vectors):
                    values = emit_load(
                        builder, args[2], _INT64(row * row_stride + LANES * i), element
                    )
                    sums[position] = emit_fma(builder, weight_vectors[row], values, sums[position])
            for position, i in enumerate(vectors):
                emit_store(builder, args[0], _INT64(LANES * i), sums[position], FP32)
        return context.get_dummy_value()

    signature = types.void(types.int64, types.int64, types.int64, stride, head_dim, kind, num_rows)
    return signature, codegen


@intrinsic
def add_weighted_tile(
    typing_context: Any,
    totals: Any,
    totals_stride: Any,
    weights: Any,
    weights_stride: Any,
    rows: Any,
    width: Any,
    num_rows: Any,
) -> Any:
    """``add_weighted_rows`` for 4 neighbouring totals and weights, all fp32.

    totals[t, width] += weights[t, r] * rows[r, width]. A loaded row serves the four; their 4 to
    16 independent sums hide the latency of the multiply-add.
    """
    num_vectors = width.literal_value // LANES
    total_stride, weight_stride = totals_stride.literal_value, weights_stride.literal_value
    count = num_rows.literal_value
    vectors_per_pass = max(1, _tile_accumulators() // TILE_TOTALS)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for first in range(0, num_vectors, vectors_per_pass):
            vectors = range(first, min(first + vectors_per_pass, num_vectors))
            slots = [(t, i) for t in range(TILE_TOTALS) for i in vectors]
            sums = {
                (t, i): emit_load(builder, args[0], _INT64(t * total_stride + LANES * i), FP32)
                for t, i in slots
            }
            for row in range(count):
                values = {
                    i: emit_load(
                        builder, args[2], _INT64(row * num_vectors * LANES + LANES * i), FP32
                    )
                    for i in vectors
                }
                for t in range(TILE_TOTALS):
                    weight = _broadcast_load(builder, args[1], t * weight_stride + row)
                    for i in vectors:
                        sums[t, i] = emit_fma(builder, weight, values[i], sums[t, i])
            for t, i in slots:
                index = _INT64(t * total_stride + LANES * i)
                emit_store(builder, args[0], index, sums[t, i], FP32)
        return context.get_dummy_value()

    signature = types.void(
        types.int64, totals_stride, types.int64, weights_stride, types.int64, width, num_rows
    )
    return signature, lambda context, builder, sig, args: codegen(
        context, builder, sig, (args[0], args[2], args[4])
    )


@intrinsic
def widen_rows(
    typing_context: Any, target: Any, rows: Any, stride: Any, head_dim: Any, kind: Any
) -> Any:
    """Copy 16 rows [16, D] to fp32 at the address ``target``, without gaps."""
    num_vectors = head_dim.literal_value // LANES
    row_stride, element = stride.literal_value, kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for row in range(LANES):
            for i in range(num_vectors):
                source = _INT64(row * row_stride + LANES * i)
                values = emit_load(builder, args[1], source, element)
                index = _INT64(LANES * (row * num_vectors + i))
                emit_store(builder, args[0], index, values, FP32)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, stride, head_dim, kind), codegen


@intrinsic
def transpose_rows(
    typing_context: Any,
    target: Any,
    rows: Any,
    stride: Any,
    head_dim: Any,
    kind: Any,
    target_stride: Any,
) -> Any:
    """Write 16 rows [16, D] as fp32 columns [D, 16]; ``target_stride`` elements from one d to
    the next."""
    num_vectors = head_dim.literal_value // LANES
    row_stride, element = stride.literal_value, kind.literal_value
    column_stride = target_stride.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i in range(num_vectors):
            square = [
                emit_load(builder, args[1], _INT64(row * row_stride + LANES * i), element)
                for row in range(LANES)
            ]
            for distance in (1, 2, 4, 8):
                square = _exchange(builder, square, distance)
            for lane, column in enumerate(square):
                index = _INT64((LANES * i + lane) * column_stride)
                emit_store(builder, args[0], index, column, FP32)
        return context.get_dummy_value()

    signature = types.void(types.int64, types.int64, stride, head_dim, kind, target_stride)
    return signature, codegen


@intrinsic
def prefetch_rows(typing_context: Any, rows: Any, stride: Any, head_dim: Any, kind: Any) -> Any:
    """Ask for the cache lines of 16 rows [16, D] (prefetcht0)."""
    element_bytes = ELEMENT_BYTES[kind.literal_value]
    row_stride, row_bytes = (
        stride.literal_value * element_bytes,
        head_dim.literal_value * element_bytes,
    )

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        hints = [_INT32(0), _INT32(3), _INT32(1)]  # read, keep in all levels, data
        for row in range(LANES):
            for offset in range(0, row_bytes, 64):
                address = builder.add(args[0], _INT64(row * row_stride + offset))
                pointer = builder.inttoptr(address, byte_pointer)
                call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hints])
        return context.get_dummy_value()

    return types.void(types.int64, stride, head_dim, kind), codegen


def _tile_accumulators() -> int:
    """Vectors that fit in half the registers: 32 of one vector (AVX-512) or 16 of half a one."""
    features = codegen_features()
    return 16 if "+avx512f" in features else 4


def _broadcast_load(builder: Any, address: Any, index: int) -> Any:
    pointer = builder.inttoptr(builder.add(address, _INT64(4 * index)), ir.FloatType().as_pointer())
    return splat(builder, builder.load(pointer, align=4))


def _sum_each(builder: Any, vectors: list[Any]) -> Any:
    """One vector whose lane r is the sum of the lanes of ``vectors[r]``, for 16 vectors.

    Four rounds of pairwise adds, first inside the 128-bit parts (two rounds), then across them.
    """
    inside = [4 * part + lane for part in range(4) for lane in (0, 2)]
    across = [4 * part + lane for part in (0, 2) for lane in range(4)]
    for even, odd_offset, layout in (
        (inside, 1, "parts"),
        (inside, 1, "parts"),
        (across, 4, "halves"),
        (across, 4, "halves"),
    ):
        odd = [lane + odd_offset for lane in even]
        vectors = [
            emit_add(
                builder,
                _shuffle_pair(builder, first, second, even, layout),
                _shuffle_pair(builder, first, second, odd, layout),
            )
            for first, second in zip(vectors[0::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _shuffle_pair(builder: Any, first: Any, second: Any, lanes: list[int], layout: str) -> Any:
    """The chosen 8 lanes of both: interleaved by 128-bit part, or one half after the other."""
    other = [lane + LANES for lane in lanes]
    if layout == "parts":
        order = [
            lane
            for part in range(4)
            for source in (lanes, other)
            for lane in source[2 * part :][:2]
        ]
    else:
        order = lanes + other
    mask = ir.Constant(ir.VectorType(_INT32, LANES), order)
    return builder.shuffle_vector(first, second, mask)


def _exchange(builder: Any, rows: list[Any], distance: int) -> list[Any]:
    """Swap the off-diagonal blocks of ``distance`` lanes between rows ``distance`` apart."""
    first_mask = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
    second_mask = [
        lane + distance if not lane & distance else LANES + lane for lane in range(LANES)
    ]
    indices = ir.VectorType(_INT32, LANES)
    result = list(rows)
    for row in range(LANES):
        if row & distance:
            continue
        first, second = rows[row], rows[row + distance]
        result[row] = builder.shuffle_vector(first, second, ir.Constant(indices, first_mask))
        result[row + distance] = builder.shuffle_vector(
            first, second, ir.Constant(indices, second_mask)
        )
    return result
