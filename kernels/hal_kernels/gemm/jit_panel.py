"""What all generated GEMM workers share: the loop over panels and row blocks, and the epilogue."""

from __future__ import annotations

from typing import Literal

from llvmlite import ir

from hal_kernels.gemm.isa import VectorIsa
from hal_kernels.gemm.jit_ir import F32, I8, I64, POINTER, VOID, Emitter, Value

PanelEpilogue = Literal["none", "silu", "silu_gated"]

# The worker's arguments. Strides are in bytes. ``scratch``: scratch_bytes for each thread, where
# panels are expanded. ``tail``: output columns of the last panel.
PANEL_ARGUMENTS = ("x", "y", "rows", "scratch")
PANEL_ADDRESSES = (0, 1, 3)  # of them; scratch may be 0
PANEL_CONSTANTS = (
    "panels",
    "scale",
    "minimum",
    "bias",
    "k",
    "x_stride",
    "y_stride",
    "panel_bytes",
    "scale_bytes",
    "num_panels",
    "tail",
    "scratch_bytes",
)


# Bytes ahead of the current ones when a panel is read once: the time in which a block of 14 rows
# multiplies this much is longer than a load from memory takes.
_PREFETCH_DISTANCE = 4096


def declare_block(module: ir.Module, rows: int) -> ir.Function:
    """void(x, x_stride, panel, scale, minimum, k, y, y_stride, bias, prefetch, prefetch_step).

    prefetch: address of the weights to ask for at k = 0; prefetch_step: bytes further for each k.
    """
    arguments = [POINTER, I64, POINTER, POINTER, POINTER, I64, POINTER, I64, POINTER, POINTER, I64]
    function = ir.Function(module, ir.FunctionType(VOID, arguments), f"block_{rows}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function


def store_block(
    emitter: Emitter,
    epilogue: PanelEpilogue,
    sums: list[list[Value]],
    y: Value,
    y_stride: Value,
    lanes: int,
) -> None:
    """Apply the epilogue to [rows][2 vectors] and store them. Gated: vector 0 gates vector 1."""
    for row, (first, second) in enumerate(sums):
        out = emitter.at(y, emitter.builder.mul(y_stride, emitter.i64(row)), I8)
        if epilogue == "silu_gated":
            gated = emitter.builder.fmul(emitter.silu(first, lanes), second)
            emitter.store(gated, out, 4)
            continue
        for half, value in enumerate((first, second)):
            result = emitter.silu(value, lanes) if epilogue == "silu" else value
            emitter.store(result, emitter.at(out, half * lanes, F32), 4)


def emit_panel_worker(
    module: ir.Module,
    isa: VectorIsa,
    blocks: list[ir.Function],
    epilogue: PanelEpilogue,
    expand: ir.Function | None,
) -> ir.Function:
    """void(arguments, begin, end, thread): panels begin..end, rows in even blocks.

    ``blocks[r-1]`` computes r rows. ``expand``, if given, first writes the panel as float32 into
    the thread's part of ``scratch``: void(panel, scale, minimum, k, out).
    """
    signature = ir.FunctionType(VOID, [I64, I64, I64, I64])
    worker = ir.Function(module, signature, "worker")
    return _WorkerEmitter(module, worker, isa, blocks, epilogue, expand).emit()


class _WorkerEmitter(Emitter):
    """The loops of a worker over its panels and over blocks of rows."""

    def __init__(
        self,
        module: ir.Module,
        worker: ir.Function,
        isa: VectorIsa,
        blocks: list[ir.Function],
        epilogue: PanelEpilogue,
        expand: ir.Function | None,
    ) -> None:
        super().__init__(module, worker)
        self.isa, self.blocks, self.expand = isa, blocks, expand
        self.width = isa.lanes if epilogue == "silu_gated" else 2 * isa.lanes
        base = self.builder.inttoptr(worker.args[0], POINTER)
        self.a = {
            name: self.load(self.at(base, index, I64), I64, 8)
            for index, name in enumerate((*PANEL_ARGUMENTS, *PANEL_CONSTANTS))
        }
        self.spill = self.builder.alloca(ir.ArrayType(F32, len(blocks) * self.width))
        self.spill.align = 64
        most = self.i64(len(blocks) - 1)
        self.num_blocks = self.builder.sdiv(
            self.builder.add(self.a["rows"], most), self.i64(len(blocks))
        )

    def emit(self) -> ir.Function:
        _, begin, end, thread = self.function.args
        scratch = self.builder.add(
            self.a["scratch"], self.builder.mul(thread, self.a["scratch_bytes"])
        )
        with self.loop(begin, end) as panel:
            here = self._offset("panels", panel, "panel_bytes")
            scale = self._offset("scale", panel, "scale_bytes")
            minimum = self._offset("minimum", panel, "scale_bytes")
            if self.expand is not None:
                expanded = self.builder.inttoptr(scratch, POINTER)
                self.builder.call(self.expand, [here, scale, minimum, self.a["k"], expanded])
                here = expanded
            with self.loop(self.i64(0), self.num_blocks) as block:
                self._emit_block(panel, block, [here, scale, minimum])
        self.builder.ret_void()
        return self.function

    def _offset(self, base: str, index: Value, stride: str) -> Value:
        offset = self.builder.mul(index, self.a[stride])
        return self.builder.inttoptr(self.builder.add(self.a[base], offset), POINTER)

    def _emit_block(self, panel: Value, block: Value, weights: list[Value]) -> None:
        builder, a = self.builder, self.a
        first = builder.sdiv(builder.mul(a["rows"], block), self.num_blocks)
        following = builder.mul(a["rows"], builder.add(block, self.i64(1)))
        count = builder.sub(builder.sdiv(following, self.num_blocks), first)
        out = builder.add(
            builder.add(a["y"], builder.mul(first, a["y_stride"])),
            builder.mul(panel, self.i64(4 * self.width)),
        )
        # The last panel may be wider than what is left of y: its results take a detour.
        is_partial = builder.and_(
            builder.icmp_signed("==", panel, builder.sub(a["num_panels"], self.i64(1))),
            builder.icmp_signed("<", a["tail"], self.i64(self.width)),
        )
        target = builder.select(is_partial, builder.ptrtoint(self.spill, I64), out)
        bias = builder.add(a["bias"], builder.mul(panel, self.i64(8 * self.isa.lanes)))
        arguments = [
            self._offset("x", first, "x_stride"),
            a["x_stride"],
            *weights,
            a["k"],
            builder.inttoptr(target, POINTER),
            builder.select(is_partial, self.i64(4 * self.width), a["y_stride"]),
            builder.inttoptr(bias, POINTER),
            *self._prefetch_arguments(panel, block),
        ]
        self._emit_call(count, arguments)
        with builder.if_then(is_partial):
            self._emit_partial_copy(out, count)

    def _prefetch_arguments(self, panel: Value, block: Value) -> list[Value]:
        """One block: a little ahead in the panel. More: each asks for a share of the next panel."""
        builder, a = self.builder, self.a
        share = builder.sdiv(a["panel_bytes"], self.num_blocks)
        here = builder.mul(panel, a["panel_bytes"])
        ahead = builder.add(here, self.i64(_PREFETCH_DISTANCE))
        following = builder.add(builder.add(here, a["panel_bytes"]), builder.mul(block, share))
        is_single = builder.icmp_signed("==", self.num_blocks, self.i64(1))
        offset = builder.select(is_single, ahead, following)
        step = builder.sdiv(share, a["k"])
        return [builder.inttoptr(builder.add(a["panels"], offset), POINTER), step]

    def _emit_call(self, count: Value, arguments: list[Value]) -> None:
        done = self.function.append_basic_block("called")
        switch = self.builder.switch(count, done)
        for rows, function in enumerate(self.blocks, start=1):
            case = self.function.append_basic_block(f"rows_{rows}")
            switch.add_case(ir.Constant(I64, rows), case)
            self.builder.position_at_end(case)
            self.builder.call(function, arguments)
            self.builder.branch(done)
        self.builder.position_at_end(done)

    def _emit_partial_copy(self, out: Value, rows: Value) -> None:
        builder = self.builder
        with self.loop(self.i64(0), rows) as row:
            start = builder.add(out, builder.mul(row, self.a["y_stride"]))
            target = builder.inttoptr(start, POINTER)
            source = builder.mul(row, self.i64(self.width))
            with self.loop(self.i64(0), self.a["tail"]) as column:
                address = self.at(self.spill, builder.add(source, column), F32)
                self.store(self.load(address, F32, 4), self.at(target, column, F32), 4)
