"""Generated GEMM kernels with int8 activations (one scale a row): int8 and int4 weights.

Products and sums are integers, exact on every ISA, so the result of a row is the same bits
whatever its neighbours, the number of threads or the CPU's dot-product instruction (the float32
scaling at the end is one fixed sequence). Three ways to form the dot product of 4 bytes:

- VNNI: vpdpbusd, u8 x s8 into int32. int8 weights: the activations are stored with 128 added, and
  128 * (sum of the channel's weights) is subtracted. int4: the weights are the unsigned operand.
- without, int8 weights: vpmaddubsw of |w| and x*sign(w). |w| <= 128 and |x| <= 127 keep the sum of
  two products within int16, so nothing saturates.
- without, int4 weights: vpmaddubsw of w (0..15) and x. Eight of them fit int16: a group of 32.

Packed layouts, VL = int32 lanes, P = panels of 2*VL channels (made by `packing`):
    int8 [P][K/4][2*VL][4], scale [P][2*VL] float32, and with VNNI the correction int32 beside it
    int4 [P][K/8][2*VL][4] (low nibbles: k 0..3, high nibbles: 4..7), scale, minimum as in jit_float
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llvmlite import ir

from hal_kernels.gemm.isa import VectorIsa
from hal_kernels.gemm.jit_ir import (
    F32,
    HALF,
    I8,
    I16,
    I32,
    Emitter,
    GeneratedWorker,
    Value,
    compile_worker_ir,
)
from hal_kernels.gemm.jit_panel import (
    PanelEpilogue,
    declare_block,
    emit_panel_worker,
    store_block,
)

GROUP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Int8Kernel:
    """Which kernel to generate; int4 weights have groups of 32 along K."""

    weight: Literal["int8", "int4"]
    epilogue: PanelEpilogue
    has_minimum: bool = False

    def name(self, isa: VectorIsa) -> str:
        suffix = "_asym" if self.has_minimum else ""
        dot = "vnni" if isa.has_vnni else "madd"
        return f"gemm_{self.weight}{suffix}_a8_{self.epilogue}_{dot}_v{isa.lanes}"


def dot_isa(isa: VectorIsa) -> VectorIsa:
    """The instruction set of the integer kernels: 512 bits only with VNNI."""
    if isa.lanes == 16 and not isa.has_vnni:
        return VectorIsa(isa.cpu_name, isa.features, 8, 16, False)
    return isa


def block_rows(isa: VectorIsa, kernel: Int8Kernel) -> int:
    """Most rows of a block: its accumulators stay in registers."""
    if isa.registers == 32:
        return 12 if kernel.weight == "int8" else 8
    return 5 if kernel.weight == "int8" and isa.has_vnni else 4


def activation_offset(isa: VectorIsa, kernel: Int8Kernel) -> int:
    """What is added to stored activations: 128 where they are the unsigned operand."""
    return 128 if kernel.weight == "int8" and isa.has_vnni else 0


def compile_int8_worker(isa: VectorIsa, kernel: Int8Kernel) -> GeneratedWorker:
    """The worker; arguments as in `jit_panel`, x as `quantize_rows` stores it."""

    def build(module: ir.Module) -> ir.Function:
        blocks = [
            _BlockEmitter(module, declare_block(module, rows), isa, kernel, rows).emit()
            for rows in range(1, block_rows(isa, kernel) + 1)
        ]
        return emit_panel_worker(module, isa, blocks, kernel.epilogue, expand=None)

    return compile_worker_ir(kernel.name(isa), isa, build)


class _BlockEmitter(Emitter):
    """The product of a few rows with one panel.

    A row of x is: float32 scale at byte 0, then from byte 64 the int8 values, K padded to 64 bytes,
    then (int4) float32 sums of each group of 32 values.
    """

    def __init__(
        self,
        module: ir.Module,
        function: ir.Function,
        isa: VectorIsa,
        kernel: Int8Kernel,
        rows: int,
    ) -> None:
        super().__init__(module, function)
        self.isa, self.kernel, self.rows, self.lanes = isa, kernel, rows, isa.lanes
        self.floats = ir.VectorType(F32, isa.lanes)
        self.integers = ir.VectorType(I32, isa.lanes)
        self.shorts = ir.VectorType(I16, 2 * isa.lanes)
        self.bytes = ir.VectorType(I8, 4 * isa.lanes)
        (self.x, self.x_stride, self.panel, self.scale, self.minimum) = function.args[:5]
        (self.k, self.y, self.y_stride, self.bias) = function.args[5:9]
        self.prefetch_base, self.prefetch_step = function.args[9:]
        self.x_rows = [
            self.at(self.x, self.builder.mul(self.x_stride, self.i64(row)), I8)
            for row in range(rows)
        ]

    def emit(self) -> ir.Function:
        sums = self._emit_int8() if self.kernel.weight == "int8" else self._emit_int4()
        bias = [self._load_floats(self.bias, half) for half in range(2)]
        for row in range(self.rows):
            scale = self.splat(self.load(self.x_rows[row], F32, 4), self.lanes)
            sums[row] = [self.fma(sums[row][h], scale, bias[h]) for h in range(2)]
        store_block(self, self.kernel.epilogue, sums, self.y, self.y_stride, self.lanes)
        self.builder.ret_void()
        return self.function

    def _load_floats(self, pointer: Value, half: int) -> Value:
        return self.load(self.at(pointer, half * self.lanes, F32), self.floats, 4)

    def _grid(self, type_: ir.VectorType, element: ir.Type) -> list[list[Value]]:
        zero = ir.Constant(type_, [ir.Constant(element, 0)] * type_.count)
        return [[self.variable(type_, zero) for _ in range(2)] for _ in range(self.rows)]

    def _activation(self, row: int, k: Value) -> Value:
        """Bytes k..k+3 of a row in every lane."""
        address = self.at(self.at(self.x_rows[row], 64, I8), k, I8)
        return self.builder.bitcast(self.splat(self.load(address, I32, 4), self.lanes), self.bytes)

    def _prefetch(self, k: Value, lines: int) -> None:
        address = self.at(self.prefetch_base, self.builder.mul(k, self.prefetch_step), I8)
        for line in range(lines):
            self.prefetch(self.at(address, 64 * line, I8))

    def _dot_vnni(self, total: Value, unsigned: Value, signed: Value) -> Value:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
        return self.intrinsic(name, self.integers, total, unsigned, signed)

    def _dot_pairs(self, unsigned: Value, signed: Value) -> Value:
        return self.intrinsic("llvm.x86.avx2.pmadd.ub.sw", self.shorts, unsigned, signed)

    def _add_pairs(self, shorts: Value) -> Value:
        ones = self.constant(I16, 1, 2 * self.lanes)
        return self.intrinsic("llvm.x86.avx2.pmadd.wd", self.integers, shorts, ones)

    def _emit_int8(self) -> list[list[Value]]:
        """One scale a channel: a single integer sum over all of K."""
        totals = self._grid(self.integers, I32)
        quads_end = self.builder.mul(
            self.builder.sdiv(self.builder.add(self.k, self.i64(3)), self.i64(4)), self.i64(4)
        )
        with self.loop(self.i64(0), quads_end, 4) as k:
            self._prefetch(k, 2 * self.lanes * 4 // 64)
            row = self.at(self.panel, self.builder.mul(k, self.i64(2 * self.lanes)), I8)
            weights = [
                self.load(self.at(row, half * 4 * self.lanes, I8), self.bytes) for half in range(2)
            ]
            self._accumulate_int8(k, totals, weights)
        scales = [self._load_floats(self.scale, half) for half in range(2)]
        results = []
        for row_totals in totals:
            values = [self.load(slot, self.integers, 64) for slot in row_totals]
            if self.isa.has_vnni:
                values = [self.builder.sub(v, self._correction(h)) for h, v in enumerate(values)]
            as_floats = [self.builder.sitofp(value, self.floats) for value in values]
            results.append([self.builder.fmul(f, scales[h]) for h, f in enumerate(as_floats)])
        return results

    def _correction(self, half: int) -> Value:
        """128 * sum of the channel's weights, stored where other kernels have the minimum."""
        return self.load(self.at(self.minimum, half * self.lanes, I32), self.integers, 4)

    def _accumulate_int8(self, k: Value, totals: list[list[Value]], weights: list[Value]) -> None:
        name = "llvm.abs." + f"v{4 * self.lanes}i8"
        keep_minimum = ir.Constant(ir.IntType(1), 0)  # |-128| is 128 unsigned, not poison
        sizes = []
        if not self.isa.has_vnni:
            sizes = [self.intrinsic(name, self.bytes, w, keep_minimum) for w in weights]
        for row in range(self.rows):
            x = self._activation(row, k)
            for half, weight in enumerate(weights):
                slot = totals[row][half]
                total = self.load(slot, self.integers, 64)
                if self.isa.has_vnni:
                    total = self._dot_vnni(total, x, weight)
                else:
                    signed = self.intrinsic("llvm.x86.avx2.psign.b", self.bytes, x, weight)
                    pairs = self._dot_pairs(sizes[half], signed)
                    total = self.builder.add(total, self._add_pairs(pairs))
                self.store(total, slot, 64)

    def _emit_int4(self) -> list[list[Value]]:
        """A scale for 32 values of k: an integer sum in the group, a float32 sum of groups."""
        results = self._grid(self.floats, F32)
        groups = self.builder.sdiv(self.k, self.i64(GROUP_SIZE))
        sums_offset = self.builder.and_(self.builder.add(self.k, self.i64(127)), self.i64(-64))
        with self.loop(self.i64(0), groups) as group:
            totals = self._emit_int4_group(self.builder.mul(group, self.i64(GROUP_SIZE)))
            offset = self.builder.mul(group, self.i64(2 * self.lanes))
            for half in range(2):
                index = self.builder.add(offset, self.i64(half * self.lanes))
                scale = self._load_halves(self.scale, index)
                if self.kernel.has_minimum:
                    minimum = self._load_halves(self.minimum, index)
                else:
                    minimum = self.builder.fmul(scale, self.constant(F32, -8.0, self.lanes))
                for row in range(self.rows):
                    sums = self.at(self.x_rows[row], sums_offset, I8)
                    group_sum = self.splat(self.load(self.at(sums, group, F32), F32, 4), self.lanes)
                    as_float = self.builder.sitofp(totals[row][half], self.floats)
                    slot = results[row][half]
                    result = self.fma(minimum, group_sum, self.load(slot, self.floats, 64))
                    self.store(self.fma(as_float, scale, result), slot, 64)
        return [[self.load(slot, self.floats, 64) for slot in slots] for slots in results]

    def _load_halves(self, pointer: Value, index: Value) -> Value:
        stored = self.load(self.at(pointer, index, HALF), ir.VectorType(HALF, self.lanes), 2)
        return self.builder.fpext(stored, self.floats)

    def _emit_int4_group(self, first: Value) -> list[list[Value]]:
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
