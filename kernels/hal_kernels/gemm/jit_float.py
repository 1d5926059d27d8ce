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

from llvmlite import ir

from hal_kernels.gemm.isa import VectorIsa
from hal_kernels.gemm.jit_float_weights import (
    ELEMENT_BITS,
    GROUP_SIZE,
    ExpandEmitter,
    FloatKernel,
    WeightEmitter,
)
from hal_kernels.gemm.jit_ir import F32, I8, GeneratedWorker, Value, compile_worker_ir
from hal_kernels.gemm.jit_panel import declare_block, emit_panel_worker, store_block


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
            expand = ExpandEmitter(module, isa, kernel).emit()
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


class _BlockEmitter(WeightEmitter):
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
        bits = 2 * self.lanes * ELEMENT_BITS[self.kernel.weight]  # of a step
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
