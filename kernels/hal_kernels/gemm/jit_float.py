"""Generated GEMM kernels with float32 activations: float32, bfloat16, float16, int8, int4 weights.

One work item is a panel: 2 vectors of output channels, all rows, the whole of K. The weight is
packed so that a panel is one contiguous stream, read once from memory; the rows are handled in
blocks whose accumulators stay in registers. Narrow weights become float32 in registers, value *
scale (+ minimum), so the result is that of the stored weight and only float32 sums are rounded.

Two workers a kernel. "direct", for few rows, converts the weights as it multiplies. "batch", for
many, expands a panel into float32 once, in the thread's cache. Rows of x come packed by
`pack_rows`, in the same blocks.

Packed layouts, VL = float32 lanes, P = panels of 2*VL channels:
    float32, bfloat16, float16, int8: [P][K][2*VL]
    int4: [P][K/2][2*VL] bytes (low nibble: even k)
    scale: [P][2*VL] float32 per channel, or [P][K/32][2*VL] float16 a group; minimum like it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from hal_kernels.gemm.isa import VectorIsa
from hal_kernels.gemm.jit_ir import (
    F32,
    HALF,
    I8,
    I16,
    I32,
    POINTER,
    VOID,
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

WeightStorage = Literal["float32", "bfloat16", "float16", "int8", "int4"]

_ELEMENTS = {"float32": F32, "bfloat16": I16, "float16": HALF, "int8": I8, "int4": I8}
_ELEMENT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}


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


def direct_block_rows(isa: VectorIsa, kernel: FloatKernel) -> int:
    """Most rows of a block of the direct worker: what fits beside weights and scales."""
    if kernel.weight == "float32":
        return batch_block_rows(isa)
    return 12 if isa.registers == 32 else 4


def batch_block_rows(isa: VectorIsa) -> int:
    """Most rows of a block of the batch worker."""
    return 14 if isa.registers == 32 else 6


def compile_direct_worker(isa: VectorIsa, kernel: FloatKernel) -> GeneratedWorker:
    """For few rows. Its arguments are those of `jit_panel`; x is packed."""

    def build(module: ir.Module) -> ir.Function:
        blocks = [
            _BlockEmitter(
                module,
                declare_block(module, rows),
                isa,
                kernel,
                rows,
                scales_after=kernel.has_channel_scales,
            ).emit()
            for rows in range(1, direct_block_rows(isa, kernel) + 1)
        ]
        return emit_panel_worker(module, isa, blocks, kernel.epilogue, expand=None)

    return compile_worker_ir(kernel.name(isa, "direct"), isa, build)


def compile_batch_worker(isa: VectorIsa, kernel: FloatKernel) -> GeneratedWorker:
    """For many rows. Its arguments are those of `jit_panel`; x is packed."""

    def build(module: ir.Module) -> ir.Function:
        expand = None
        if kernel.weight != "float32":
            expand = _ExpandEmitter(module, isa, kernel).emit()
        dense = FloatKernel("float32", kernel.epilogue)
        blocks = [
            _BlockEmitter(
                module,
                declare_block(module, rows),
                isa,
                dense,
                rows,
                scales_after=kernel.has_channel_scales,
            ).emit()
            for rows in range(1, batch_block_rows(isa) + 1)
        ]
        return emit_panel_worker(module, isa, blocks, kernel.epilogue, expand=expand)

    return compile_worker_ir(kernel.name(isa, "batch"), isa, build)


class _WeightEmitter(Emitter):
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


class _BlockEmitter(_WeightEmitter):
    """The product of a few rows with one panel."""

    def __init__(
        self,
        module: ir.Module,
        function: ir.Function,
        isa: VectorIsa,
        kernel: FloatKernel,
        rows: int,
        *,
        scales_after: bool,
    ) -> None:
        super().__init__(module, function, isa, kernel)
        self.rows = rows
        self.scales_after = scales_after
        (self.x, self.x_stride, self.panel, self.scale, self.minimum) = function.args[:5]
        (self.k, self.y, self.y_stride, self.bias) = function.args[5:9]
        self.prefetch_base, self.prefetch_step = function.args[9:]
        zero = self.constant(F32, 0.0, self.lanes)
        # One chain of additions along k, however many rows: the bits of a row's result do not
        # depend on how many other rows there are.
        self.sums = [[self.variable(self.vector, zero) for _ in range(2)] for _ in range(rows)]

    def emit(self) -> ir.Function:
        if self.kernel.group_size:
            self._emit_groups()
        else:
            self._emit_plain()
        sums = [[self.load(slot, self.vector, 64) for slot in slots] for slots in self.sums]
        if self.scales_after:
            scales = [self.load_vector(self.scale, half) for half in range(2)]
            sums = [[self.builder.fmul(s[h], scales[h]) for h in range(2)] for s in sums]
        bias = [self.load_vector(self.bias, half) for half in range(2)]
        sums = [[self.builder.fadd(s[h], bias[h]) for h in range(2)] for s in sums]
        store_block(self, self.kernel.epilogue, sums, self.y, self.y_stride, self.lanes)
        self.builder.ret_void()
        return self.function

    def _emit_plain(self) -> None:
        """Weights without scales inside the sum: any k, four at a time."""
        unroll = 4
        main_end = self.builder.and_(self.k, self.i64(-unroll))
        with self.loop(self.i64(0), main_end, unroll) as k:
            self._emit_steps(k, unroll)
        with self.loop(main_end, self.k) as k:
            self._accumulate(k, self.load_weights(k))

    def _emit_steps(self, first: Value, count: int) -> None:
        bits = 2 * self.lanes * _ELEMENT_BITS[self.kernel.weight]  # of a step
        for step in range(count):
            k = self.builder.add(first, self.i64(step))
            if (step * bits) % 512 == 0:
                self._prefetch(k, max(bits // 512, 1))
            self._accumulate(k, self.load_weights(k))

    def _accumulate(self, k: Value, weights: list[Value]) -> None:
        for row in range(self.rows):
            value = self.load(self._x_address(row, k), F32, 4)
            broadcast = self.splat(value, self.lanes)
            for half in range(2):
                slot = self.sums[row][half]
                total = self.fma(broadcast, weights[half], self.load(slot, self.vector, 64))
                self.store(total, slot, 64)

    def _x_address(self, row: int, k: Value) -> Value:
        index = self.builder.mul(k, self.i64(self.rows))
        return self.at(self.x, self.builder.add(index, self.i64(row)), F32)

    def _prefetch(self, k: Value, lines: int) -> None:
        """Ask for the weights of a later step, ``prefetch_step`` bytes per k."""
        address = self.at(self.prefetch_base, self.builder.mul(k, self.prefetch_step), I8)
        for line in range(lines):
            self.prefetch(self.at(address, 64 * line, I8))

    def _emit_groups(self) -> None:
        """Weights whose scale belongs to 32 values of k."""
        groups = self.builder.sdiv(self.k, self.i64(GROUP_SIZE))
        with self.loop(self.i64(0), groups) as group:
            scales, minima = self.load_group_scales(group)
            first = self.builder.mul(group, self.i64(GROUP_SIZE))
            with self.loop(self.i64(0), self.i64(GROUP_SIZE), 4) as offset:
                k = self.builder.add(first, offset)
                if self.kernel.weight == "int4":
                    self._emit_int4_steps(k, scales, minima)
                else:
                    self._emit_int8_steps(k, scales)

    def _emit_int8_steps(self, first: Value, scales: list[Value]) -> None:
        self._prefetch(first, self.lanes // 8)
        for step in range(4):
            k = self.builder.add(first, self.i64(step))
            weights = [
                self.builder.fmul(w, s) for w, s in zip(self.load_weights(k), scales, strict=True)
            ]
            self._accumulate(k, weights)

    def _emit_int4_steps(self, first: Value, scales: list[Value], minima: list[Value]) -> None:
        self._prefetch(first, 1)
        for pair in range(2):
            k = self.builder.add(first, self.i64(2 * pair))
            for odd, values in enumerate(self.load_nibble_pairs(k)):
                weights = [self.fma(values[h], scales[h], minima[h]) for h in range(2)]
                self._accumulate(self.builder.add(k, self.i64(odd)), weights)


class _ExpandEmitter(_WeightEmitter):
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
