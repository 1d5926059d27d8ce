"""Weights of the float kernels: which there are, and how a panel's become float32 in registers.

The layouts are those that `jit_float` states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from hal_kernels.gemm.isa import VectorIsa
from hal_kernels.gemm.jit_ir import F32, HALF, I8, I16, I32, POINTER, VOID, Emitter, Value
from hal_kernels.gemm.jit_panel import PanelEpilogue

GROUP_SIZE = 32

WeightStorage = Literal["float32", "bfloat16", "float16", "int8", "int4"]

_ELEMENTS = {"float32": F32, "bfloat16": I16, "float16": HALF, "int8": I8, "int4": I8}
ELEMENT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class FloatKernel:
    """Which kernel to generate. group_size 0: no scale, or (int8) one a channel, after the sum."""

    weight: WeightStorage
    epilogue: PanelEpilogue
    group_size: int = 0
    has_minimum: bool = False

    @property
    def has_channel_scales(self) -> bool:
        """Whether the sum over K is multiplied by a scale of the channel."""
        return self.weight == "int8" and not self.group_size

    def name(self, isa: VectorIsa, kind: str) -> str:
        group = f"_g{self.group_size}" if self.group_size else ""
        suffix = "_asym" if self.has_minimum else ""
        return f"gemm_{self.weight}{group}{suffix}_{self.epilogue}_{kind}_v{isa.lanes}"


class WeightEmitter(Emitter):
    """Reads weights of a panel as float32 vectors."""

    panel: Value
    scale: Value
    minimum: Value

    def __init__(
        self, module: ir.Module, function: ir.Function, isa: VectorIsa, kernel: FloatKernel
    ) -> None:
        super().__init__(module, function)
        self.kernel = kernel
        self.lanes = isa.lanes
        self.vector = ir.VectorType(F32, isa.lanes)
        self.integers = ir.VectorType(I32, isa.lanes)

    def load_vector(self, pointer: Value, half: int) -> Value:
        return self.load(self.at(pointer, half * self.lanes, F32), self.vector, 4)

    def load_weights(self, k: Value) -> list[Value]:
        """The two vectors of column k; int8 unscaled, int4 not at all."""
        element = _ELEMENTS[self.kernel.weight]
        address = self.at(self.panel, self.builder.mul(k, self.i64(2 * self.lanes)), element)
        return [
            self._widen(
                self.load(
                    self.at(address, half * self.lanes, element),
                    ir.VectorType(element, self.lanes),
                )
            )
            for half in range(2)
        ]

    def _widen(self, value: Value) -> Value:
        match self.kernel.weight:
            case "float32":
                return value
            case "float16":
                return self.builder.fpext(value, self.vector)
            case "bfloat16":
                wide = self.builder.zext(value, self.integers)
                shifted = self.builder.shl(wide, self.constant(I32, 16, self.lanes))
                return self.builder.bitcast(shifted, self.vector)
            case _:
                return self.builder.sitofp(self.builder.sext(value, self.integers), self.vector)

    def load_nibble_pairs(self, k: Value) -> tuple[list[Value], list[Value]]:
        """int4 values 0..15 of columns k and k + 1, k even, as float32."""
        address = self.at(self.panel, self.builder.mul(k, self.i64(self.lanes)), I8)
        low, high = [], []
        for half in range(2):
            narrow = self.load(
                self.at(address, half * self.lanes, I8), ir.VectorType(I8, self.lanes)
            )
            wide = self.builder.zext(narrow, self.integers)
            first = self.builder.and_(wide, self.constant(I32, 15, self.lanes))
            second = self.builder.lshr(wide, self.constant(I32, 4, self.lanes))
            low.append(self.builder.sitofp(first, self.vector))
            high.append(self.builder.sitofp(second, self.vector))
        return low, high

    def load_group_scales(self, group: Value) -> tuple[list[Value], list[Value]]:
        """Scales and minima of a group; a symmetric int4 stores q + 8, so its minimum is -8."""
        offset = self.builder.mul(group, self.i64(2 * self.lanes))
        halves = ir.VectorType(HALF, self.lanes)

        def read(pointer: Value, half: int) -> Value:
            index = self.builder.add(offset, self.i64(half * self.lanes))
            stored = self.load(self.at(pointer, index, HALF), halves, 2)
            return self.builder.fpext(stored, self.vector)

        scales = [read(self.scale, half) for half in range(2)]
        if self.kernel.has_minimum:
            return scales, [read(self.minimum, half) for half in range(2)]
        eight = self.constant(F32, -8.0, self.lanes)
        return scales, [self.builder.fmul(scale, eight) for scale in scales]


class ExpandEmitter(WeightEmitter):
    """void(panel, scale, minimum, k, out): one panel as float32 [K][2*VL], group scales applied."""

    def __init__(self, module: ir.Module, isa: VectorIsa, kernel: FloatKernel) -> None:
        signature = ir.FunctionType(VOID, [POINTER, POINTER, POINTER, ir.IntType(64), POINTER])
        function = ir.Function(module, signature, "expand_panel")
        function.linkage = "internal"
        function.attributes.add("noinline")
        super().__init__(module, function, isa, kernel)
        self.panel, self.scale, self.minimum, self.k, self.out = function.args

    def emit(self) -> ir.Function:
        if self.kernel.group_size:
            groups = self.builder.sdiv(self.k, self.i64(GROUP_SIZE))
            with self.loop(self.i64(0), groups) as group:
                self._emit_group(group)
        else:
            with self.loop(self.i64(0), self.k) as k:
                self._write(k, self.load_weights(k), [])
        self.builder.ret_void()
        return self.function

    def _emit_group(self, group: Value) -> None:
        scales, minima = self.load_group_scales(group)
        first = self.builder.mul(group, self.i64(GROUP_SIZE))
        step = 2 if self.kernel.weight == "int4" else 1
        with self.loop(self.i64(0), self.i64(GROUP_SIZE), step) as offset:
            k = self.builder.add(first, offset)
            if self.kernel.weight == "int8":
                self._write(k, self.load_weights(k), scales)
            else:
                self._write_nibbles(k, scales, minima)

    def _write_nibbles(self, k: Value, scales: list[Value], minima: list[Value]) -> None:
        for odd, values in enumerate(self.load_nibble_pairs(k)):
            weights = [self.fma(values[h], scales[h], minima[h]) for h in range(2)]
            self._write(self.builder.add(k, self.i64(odd)), weights, [])

    def _write(self, k: Value, weights: list[Value], scales: list[Value]) -> None:
        row = self.at(self.out, self.builder.mul(k, self.i64(2 * self.lanes)), F32)
        for half, weight in enumerate(weights):
            value: Any = self.builder.fmul(weight, scales[half]) if scales else weight
            self.store(value, self.at(row, half * self.lanes, F32), 4)
