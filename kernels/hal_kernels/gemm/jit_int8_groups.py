"""Blocks of the int8 GEMM kernels whose weights have a scale for 32 values along K.

An integer sum in the group, a float32 sum of groups. Of int8 weights that sum is
total * scale; of int4 ones, stored unsigned, also (sum of the group's activations) * minimum.
"""

from __future__ import annotations

from llvmlite import ir

from hal_kernels.gemm.jit_int8_block import Int8BlockEmitter
from hal_kernels.gemm.jit_ir import F32, HALF, I8, I16, I32, Value
from hal_kernels.gemm.jit_quantize import GROUP_SIZE


class GroupBlockEmitter(Int8BlockEmitter):
    """A float16 scale for 32 values of k."""

    def _emit_sums(self) -> list[list[Value]]:
        is_int4 = self.kernel.weight == "int4"
        results = self._grid(self.floats, F32)
        groups = self.builder.sdiv(self.k, self.i64(GROUP_SIZE))
        with self.loop(self.i64(0), groups) as group:
            first = self.builder.mul(group, self.i64(GROUP_SIZE))
            group_totals = self._emit_int4_group if is_int4 else self._emit_int8_group
            totals = group_totals(group, first)
            offset = self.builder.mul(group, self.i64(2 * self.lanes))
            for half in range(2):
                index = self.builder.add(offset, self.i64(half * self.lanes))
                scale = self._load_halves(self.scale, index)
                minimum = self._minimum(scale, index) if is_int4 else None
                for row in range(self.rows):
                    as_float = self.builder.sitofp(totals[row][half], self.floats)
                    slot = results[row][half]
                    result = self.load(slot, self.floats, 64)
                    if minimum is not None:
                        group_sum = self.splat(self._group_value(row, group, F32), self.lanes)
                        result = self.fma(minimum, group_sum, result)
                    self.store(self.fma(as_float, scale, result), slot, 64)
        return [[self.load(slot, self.floats, 64) for slot in slots] for slots in results]

    def _minimum(self, scale: Value, index: Value) -> Value:
        """Of int4 values 0..15; a symmetric format means q - 8."""
        if self.kernel.has_minimum:
            return self._load_halves(self.minimum, index)
        return self.builder.fmul(scale, self.constant(F32, -8.0, self.lanes))

    def _group_value(self, row: int, group: Value, type_: ir.Type) -> Value:
        """What the quantiser stored of a row's group."""
        offset = self.builder.and_(self.builder.add(self.k, self.i64(127)), self.i64(-64))
        return self.load(self.at(self.at(self.x_rows[row], offset, I8), group, type_), type_, 4)

    def _emit_int8_group(self, group: Value, first: Value) -> list[list[Value]]:
        """Integer dot products of 32 values of k, as values (not slots)."""
        has_vnni = self.isa.has_vnni
        zero = self.constant(I32, 0, self.lanes)
        totals = []
        for row in range(self.rows):
            start = self._group_value(row, group, I32) if has_vnni else None
            totals.append([zero if start is None else self.splat(start, self.lanes)] * 2)
        for quad in range(GROUP_SIZE // 4):
            k = self.builder.add(first, self.i64(4 * quad))
            self._prefetch(k, 2 * self.lanes * 4 // 64)
            address = self.at(self.panel, self.builder.mul(k, self.i64(2 * self.lanes)), I8)
            weights = [
                self.load(self.at(address, half * 4 * self.lanes, I8), self.bytes)
                for half in range(2)
            ]
            sizes = [] if has_vnni else self._sizes(weights)
            for row in range(self.rows):
                x = self._activation(row, k)
                for half, weight in enumerate(weights):
                    total = totals[row][half]
                    totals[row][half] = (
                        self._dot_vnni(total, weight, x)
                        if has_vnni
                        else self._dot_signed(total, x, weight, sizes[half])
                    )
        return totals

    def _load_halves(self, pointer: Value, index: Value) -> Value:
        stored = self.load(self.at(pointer, index, HALF), ir.VectorType(HALF, self.lanes), 2)
        return self.builder.fpext(stored, self.floats)

    def _emit_int4_group(self, group: Value, first: Value) -> list[list[Value]]:
        """Integer dot products of 32 values of k, as values (not slots)."""
        zero_type, element = (self.integers, I32) if self.isa.has_vnni else (self.shorts, I16)
        zero = self.constant(element, 0, zero_type.count)
        totals = [[zero, zero] for _ in range(self.rows)]
        for octet in range(GROUP_SIZE // 8):
            k = self.builder.add(first, self.i64(8 * octet))
            self._prefetch(k, 2 * self.lanes * 4 // 64)
            row_address = self.at(self.panel, self.builder.mul(k, self.i64(self.lanes)), I8)
            low, high = self._load_nibbles(row_address)
            for row in range(self.rows):
                for weights, shift in ((low, 0), (high, 4)):
                    x = self._activation(row, self.builder.add(k, self.i64(shift)))
                    for half in range(2):
                        total = totals[row][half]
                        if self.isa.has_vnni:
                            total = self._dot_vnni(total, weights[half], x)
                        else:
                            total = self.builder.add(total, self._dot_pairs(weights[half], x))
                        totals[row][half] = total
        if self.isa.has_vnni:
            return totals
        return [[self._add_pairs(total) for total in row_totals] for row_totals in totals]

    def _load_nibbles(self, address: Value) -> tuple[list[Value], list[Value]]:
        mask = self.constant(I8, 15, 4 * self.lanes)
        low, high = [], []
        for half in range(2):
            packed = self.load(self.at(address, half * 4 * self.lanes, I8), self.bytes)
            low.append(self.builder.and_(packed, mask))
            words = self.builder.bitcast(packed, self.shorts)
            shifted = self.builder.lshr(words, self.constant(I16, 4, 2 * self.lanes))
            high.append(self.builder.and_(self.builder.bitcast(shifted, self.bytes), mask))
        return low, high
