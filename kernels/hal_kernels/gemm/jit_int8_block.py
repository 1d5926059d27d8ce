"""What blocks of the int8 GEMM kernels share: which kernel, rows of x, dot products of 4 bytes.

How the dot product is formed, and the layouts of weights, are `jit_int8`'s.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal

from llvmlite import ir

from hal_kernels.gemm.isa import VectorIsa
from hal_kernels.gemm.jit_ir import F32, I8, I16, I32, Emitter, Value
from hal_kernels.gemm.jit_panel import PanelEpilogue, store_block

Int8Weight = Literal["int8", "int8_g32", "int4"]


@dataclass(frozen=True, slots=True)
class Int8Kernel:
    """Which kernel to generate; int8 weights have a scale per channel, others per 32 along K."""

    weight: Int8Weight
    epilogue: PanelEpilogue
    has_minimum: bool = False

    def name(self, isa: VectorIsa) -> str:
        suffix = "_asym" if self.has_minimum else ""
        dot = "vnni" if isa.has_vnni else "madd"
        return f"gemm_{self.weight}{suffix}_a8_{self.epilogue}_{dot}_v{isa.lanes}"


class Int8BlockEmitter(Emitter, abc.ABC):
    """The product of a few rows with one panel.

    A row of x is: float32 scale at byte 0, then from byte 64 the int8 values, K padded to 64 bytes,
    then 4 bytes for each group of 32 values (`jit_quantize`), where the kernel has groups.
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
        sums = self._emit_sums()
        bias = [self._load_floats(self.bias, half) for half in range(2)]
        for row in range(self.rows):
            scale = self.splat(self.load(self.x_rows[row], F32, 4), self.lanes)
            sums[row] = [self.fma(sums[row][h], scale, bias[h]) for h in range(2)]
        store_block(self, self.kernel.epilogue, sums, self.y, self.y_stride, self.lanes)
        self.builder.ret_void()
        return self.function

    @abc.abstractmethod
    def _emit_sums(self) -> list[list[Value]]:
        """The product in units of the row's scale, as float32 [rows][2 vectors]."""

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

    def _sizes(self, weights: list[Value]) -> list[Value]:
        """|w| of signed bytes as unsigned ones."""
        keep_minimum = ir.Constant(ir.IntType(1), 0)  # |-128| is 128 unsigned, not poison
        name = f"llvm.abs.v{4 * self.lanes}i8"
        return [self.intrinsic(name, self.bytes, w, keep_minimum) for w in weights]

    def _dot_signed(self, total: Value, x: Value, weight: Value, size: Value) -> Value:
        """total + x . weight of signed bytes, without VNNI; size: |weight|."""
        signed = self.intrinsic("llvm.x86.avx2.psign.b", self.bytes, x, weight)
        return self.builder.add(total, self._add_pairs(self._dot_pairs(size, signed)))
