"""Generated GEMM kernels with int8 activations (one scale a row): int8 and int4 weights.

Weights have one scale a channel (int8: here) or one for 32 values along K (`jit_int8_groups`).

Products and sums are integers, exact on every ISA, so the result of a row is the same bits
whatever its neighbours, the number of threads or the CPU's dot-product instruction (the float32
scaling at the end is one fixed sequence). Three ways to form the dot product of 4 bytes:

- VNNI: vpdpbusd, u8 x s8 into int32. int8 weights: the activations are stored with 128 added, and
  128 * (sum of the channel's weights) is subtracted. int8 in groups: the weights are stored with
  128 added, and the sum of a group starts at -128 * (sum of its activations). int4: the weights are
  the unsigned operand as they are.
- without, int8 weights: vpmaddubsw of |w| and x*sign(w). |w| <= 128 and |x| <= 127 keep the sum of
  two products within int16, so nothing saturates.
- without, int4 weights: vpmaddubsw of w (0..15) and x. Eight of them fit int16: a group of 32.

Packed layouts, VL = int32 lanes, P = panels of 2*VL channels (made by `packing`):
    int8 [P][K/4][2*VL][4], scale [P][2*VL] float32, and with VNNI the correction int32 beside it
    int8_g32 as int8, scale [P][K/32][2*VL] float16
    int4 [P][K/8][2*VL][4] (low nibbles: k 0..3, high nibbles: 4..7), scale, minimum as in jit_float
"""

from __future__ import annotations

from llvmlite import ir

from hal_kernels.gemm.isa import VectorIsa
from hal_kernels.gemm.jit_int8_block import Int8BlockEmitter, Int8Kernel
from hal_kernels.gemm.jit_int8_groups import GroupBlockEmitter
from hal_kernels.gemm.jit_ir import I8, I32, GeneratedWorker, Value, compile_worker_ir
from hal_kernels.gemm.jit_panel import declare_block, emit_panel_worker
from hal_kernels.gemm.jit_quantize import GroupSums


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


def group_sums(isa: VectorIsa, kernel: Int8Kernel) -> GroupSums:
    """What is stored beside the activations for each group of 32."""
    if kernel.weight == "int4":
        return "float32"
    return "minus_128" if kernel.weight == "int8_g32" and isa.has_vnni else "none"


def compile_int8_worker(isa: VectorIsa, kernel: Int8Kernel) -> GeneratedWorker:
    """The worker; arguments as in `jit_panel`, x as `quantize_rows` stores it."""

    def build(module: ir.Module) -> ir.Function:
        emitter = _ChannelBlockEmitter if kernel.weight == "int8" else GroupBlockEmitter
        blocks = [
            emitter(module, declare_block(module, rows), isa, kernel, rows).emit()
            for rows in range(1, block_rows(isa, kernel) + 1)
        ]
        return emit_panel_worker(module, isa, blocks, kernel.epilogue, expand=None)

    return compile_worker_ir(kernel.name(isa), isa, build)


class _ChannelBlockEmitter(Int8BlockEmitter):
    """One scale a channel."""

    def _emit_sums(self) -> list[list[Value]]:
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
        sizes = [] if self.isa.has_vnni else self._sizes(weights)
        for row in range(self.rows):
            x = self._activation(row, k)
            for half, weight in enumerate(weights):
                slot = totals[row][half]
                total = self.load(slot, self.integers, 64)
                if self.isa.has_vnni:
                    total = self._dot_vnni(total, x, weight)
                else:
                    total = self._dot_signed(total, x, weight, sizes[half])
                self.store(total, slot, 64)
