"""Generated kernel that rounds rows of activations to int8, one symmetric scale a row."""

from __future__ import annotations

import functools
from typing import Literal

from llvmlite import ir

from hal_kernels.gemm.isa import VectorIsa
from hal_kernels.gemm.jit_ir import (
    F32,
    I8,
    I32,
    I64,
    Emitter,
    GeneratedWorker,
    Value,
    compile_worker_ir,
)

GROUP_SIZE = 32

# What is stored for each group of 32 values beside them: nothing, their sum as float32, or
# -128 * their sum as int32.
GroupSums = Literal["none", "float32", "minus_128"]

# The worker's arguments, one item a row of x: addresses, K, and strides in bytes from row to row.
QUANTIZE_ARGUMENTS = ("x", "x_stride", "values", "scales", "sums")
QUANTIZE_ADDRESSES = (0, 2, 3, 4)  # of them
QUANTIZE_CONSTANTS = ("k", "values_stride", "scales_stride", "sums_stride")


@functools.cache
def compile_quantize_worker(isa: VectorIsa, offset: int, sums: GroupSums) -> GeneratedWorker:
    """Worker over rows: x float32 -> rows as `_BlockEmitter` reads them.

    Arguments are `QUANTIZE_ARGUMENTS`, then `QUANTIZE_CONSTANTS`. ``offset`` is added to the
    stored values: 128 makes them unsigned. Without it ``sums`` are written too.
    """

    def build(module: ir.Module) -> ir.Function:
        signature = ir.FunctionType(ir.VoidType(), [I64, I64, I64, I64])
        function = ir.Function(module, signature, "worker")
        return _QuantizeEmitter(module, function, isa.lanes, offset, sums).emit()

    name = f"quantize_rows_{offset}_{sums}_v{isa.lanes}"
    return compile_worker_ir(name, isa, build)


class _QuantizeEmitter(Emitter):
    """The values of `hal.ops.gemm.quantize_rows`: scale = max|x| / 127 (1 for a zero row), and
    x / scale rounded half to even."""

    def __init__(
        self,
        module: ir.Module,
        function: ir.Function,
        lanes: int,
        offset: int,
        sums: GroupSums,
    ) -> None:
        super().__init__(module, function)
        self.lanes, self.offset, self.sums = lanes, offset, sums
        base = self.builder.inttoptr(function.args[0], ir.PointerType())
        self.a = {
            name: self.load(self.at(base, index, I64), I64, 8)
            for index, name in enumerate((*QUANTIZE_ARGUMENTS, *QUANTIZE_CONSTANTS))
        }
        self.k = self.a["k"]

    def emit(self) -> ir.Function:
        builder = self.builder
        _, begin, end, _ = self.function.args
        vector_end = builder.and_(self.k, self.i64(-self.lanes))
        with self.loop(begin, end) as row:
            x = self._row("x", row)
            values = self._row("values", row)
            peak = self._emit_peak(x, vector_end)
            is_zero = builder.fcmp_ordered("==", peak, ir.Constant(F32, 0.0))
            quotient = builder.fdiv(peak, ir.Constant(F32, 127.0))
            scale = builder.select(is_zero, ir.Constant(F32, 1.0), quotient)
            self.store(scale, self._row("scales", row), 4)
            with self.loop(self.i64(0), vector_end, self.lanes) as k:
                vector = self.load(self.at(x, k, F32), ir.VectorType(F32, self.lanes), 4)
                self.store(self._round(vector, scale), self.at(values, k, I8))
            with self.loop(vector_end, self.k) as k:
                vector = self.splat(self.load(self.at(x, k, F32), F32, 4), self.lanes)
                rounded = self._round(vector, scale)
                first = builder.extract_element(rounded, ir.Constant(I32, 0))
                self.store(first, self.at(values, k, I8))
            if self.sums != "none":
                self._emit_sums(self._row("sums", row), values)
        builder.ret_void()
        return self.function

    def _row(self, name: str, row: Value) -> Value:
        offset = self.builder.mul(row, self.a[f"{name}_stride"])
        return self.builder.inttoptr(self.builder.add(self.a[name], offset), ir.PointerType())

    def _emit_peak(self, x: Value, vector_end: Value) -> Value:
        """max|x| of the row."""
        name = f"v{self.lanes}f32"
        vector = ir.VectorType(F32, self.lanes)
        slot = self.variable(vector, self.constant(F32, 0.0, self.lanes))

        def update(value: Value) -> None:
            size = self.intrinsic(f"llvm.fabs.{name}", vector, value)
            largest = self.load(slot, vector, 64)
            self.store(self.intrinsic(f"llvm.maxnum.{name}", vector, size, largest), slot, 64)

        self.store(self.constant(F32, 0.0, self.lanes), slot, 64)
        with self.loop(self.i64(0), vector_end, self.lanes) as k:
            update(self.load(self.at(x, k, F32), vector, 4))
        with self.loop(vector_end, self.k) as k:
            update(self.splat(self.load(self.at(x, k, F32), F32, 4), self.lanes))
        return self.intrinsic(f"llvm.vector.reduce.fmax.{name}", F32, self.load(slot, vector, 64))

    def _round(self, vector: Value, scale: Value) -> Value:
        quotient = self.builder.fdiv(vector, self.splat(scale, self.lanes))
        rounded = self.intrinsic(f"llvm.rint.v{self.lanes}f32", vector.type, quotient)
        integers = self.builder.fptosi(rounded, ir.VectorType(I32, self.lanes))
        if self.offset:
            integers = self.builder.add(integers, self.constant(I32, self.offset, self.lanes))
        return self.builder.trunc(integers, ir.VectorType(I8, self.lanes))

    def _emit_sums(self, sums: Value, values: Value) -> None:
        groups = self.builder.sdiv(self.k, self.i64(GROUP_SIZE))
        wide = ir.VectorType(I32, GROUP_SIZE)
        with self.loop(self.i64(0), groups) as group:
            address = self.at(values, self.builder.mul(group, self.i64(GROUP_SIZE)), I8)
            stored = self.load(address, ir.VectorType(I8, GROUP_SIZE))
            total = self.intrinsic(
                f"llvm.vector.reduce.add.v{GROUP_SIZE}i32", I32, self.builder.sext(stored, wide)
            )
            if self.sums == "float32":
                value = self.builder.sitofp(total, F32)
            else:
                value = self.builder.mul(total, ir.Constant(I32, -128))
            self.store(value, self.at(sums, group, value.type), 4)
