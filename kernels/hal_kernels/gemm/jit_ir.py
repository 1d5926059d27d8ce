"""Emits LLVM IR for vector kernels, and compiles it: the few building blocks the GEMM kernels need.

The kernels are written here rather than in numba because a register-blocked product depends on
which vectors live in which registers; here each one is named.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from hal_kernels.cpu_jit import CompiledWorker, cache_directory
from hal_kernels.gemm.isa import VectorIsa

Value = Any  # an llvmlite IR value

VOID = ir.VoidType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
HALF = ir.HalfType()
F32 = ir.FloatType()
POINTER = ir.PointerType()

# Taylor series of exp(r), r**0..r**7: on |r| <= ln(2)/2 the rest is below 6e-9.
_EXP_POLYNOMIAL = (1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4


class Emitter:
    """An IR builder with typed loads, vectors and counted loops."""

    def __init__(self, module: ir.Module, function: ir.Function) -> None:
        self.module = module
        self.function = function
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))

    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def at(self, pointer: Value, index: Value, element: Any) -> Value:
        """Address of ``pointer[index]`` for elements of that type."""
        index = self.i64(index) if isinstance(index, int) else index
        return self.builder.gep(pointer, [index], inbounds=True, source_etype=element)

    def load(self, pointer: Value, type_: Any, align: int = 1) -> Value:
        return self.builder.load(pointer, typ=type_, align=align)

    def store(self, value: Value, pointer: Value, align: int = 1) -> None:
        self.builder.store(value, pointer, align=align)

    def splat(self, value: Value, lanes: int) -> Value:
        vector = ir.VectorType(value.type, lanes)
        first = self.builder.insert_element(
            ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0)
        )
        mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)

    def constant(self, element: Any, value: float, lanes: int) -> Value:
        return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)

    def variable(self, type_: Any, value: Value, align: int | None = None) -> Value:
        """A stack slot, which LLVM turns into a register where it can."""
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(type_)
        if align:
            slot.align = align
        self.builder.store(value, slot)
        return slot

    @contextmanager
    def loop(self, begin: Value, end: Value, step: int = 1) -> Iterator[Value]:
        """``for index in range(begin, end, step)``; yields the index."""
        builder = self.builder
        counter = self.variable(I64, begin)
        head = self.function.append_basic_block("loop")
        body = self.function.append_basic_block("body")
        done = self.function.append_basic_block("done")
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.load(counter, typ=I64)
        builder.cbranch(builder.icmp_signed("<", index, end), body, done)
        builder.position_at_end(body)
        yield index
        builder.store(builder.add(index, self.i64(step)), counter)
        builder.branch(head)
        builder.position_at_end(done)

    def intrinsic(self, name: str, result: Any, *arguments: Value) -> Value:
        function = self.module.globals.get(name)
        if function is None:
            signature = ir.FunctionType(result, [a.type for a in arguments])
            function = ir.Function(self.module, signature, name)
        return self.builder.call(function, arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.intrinsic(f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)

    def prefetch(self, pointer: Value) -> None:
        """Into the second-level cache: what is asked for this early would not stay in the first."""
        arguments = [ir.Constant(I32, v) for v in (0, 2, 1)]
        self.intrinsic("llvm.prefetch.p0", VOID, pointer, *arguments)

    def exp(self, x: Value, lanes: int) -> Value:
        """e**x of a float32 vector; x is clamped to the range of finite results."""

        def const(value: float) -> Value:
            return self.constant(F32, value, lanes)

        name = _suffix(x.type)
        x = self.intrinsic(f"llvm.minnum.{name}", x.type, x, const(88.3762626647949))
        x = self.intrinsic(f"llvm.maxnum.{name}", x.type, x, const(-87.3365478515625))
        n = self.intrinsic(f"llvm.rint.{name}", x.type, self.builder.fmul(x, const(_LOG2_E)))
        r = self.fma(n, const(-_LN2_HIGH), x)
        r = self.fma(n, const(-_LN2_LOW), r)
        result = const(_EXP_POLYNOMIAL[-1])
        for coefficient in reversed(_EXP_POLYNOMIAL[:-1]):
            result = self.fma(result, r, const(coefficient))
        integers = ir.VectorType(I32, lanes)
        exponent = self.builder.add(
            self.builder.fptosi(n, integers), self.constant(I32, 127, lanes)
        )
        power = self.builder.shl(exponent, self.constant(I32, 23, lanes))
        return self.builder.fmul(result, self.builder.bitcast(power, x.type))

    def silu(self, x: Value, lanes: int) -> Value:
        """x / (1 + e**-x), by a function of its own: inlined it would dominate compile time."""
        function = self.module.globals.get("silu")
        if function is None:
            function = _emit_silu(self.module, lanes)
        return self.builder.call(function, [x])


def _emit_silu(module: ir.Module, lanes: int) -> ir.Function:
    vector = ir.VectorType(F32, lanes)
    function = ir.Function(module, ir.FunctionType(vector, [vector]), "silu")
    function.linkage = "internal"
    function.attributes.add("noinline")
    emitter = Emitter(module, function)
    x = function.args[0]
    negated = emitter.builder.fsub(emitter.constant(F32, -0.0, lanes), x)
    one = emitter.constant(F32, 1.0, lanes)
    denominator = emitter.builder.fadd(one, emitter.exp(negated, lanes))
    emitter.builder.ret(emitter.builder.fdiv(x, denominator))
    return function


def _suffix(type_: Any) -> str:
    """LLVM's mangling of a float32 vector type."""
    return f"v{type_.count}f32" if isinstance(type_, ir.VectorType) else "f32"


@dataclass(frozen=True, slots=True)
class GeneratedWorker(CompiledWorker):
    """A worker compiled from emitted IR."""

    emit_assembly: Callable[[], str]
    data: bytes

    @property
    def symbol(self) -> str:
        """Package and name, dotted."""
        return f"hal_kernels.gemm.{self.name}"

    def object_code(self) -> bytes:
        """The ELF object that was linked."""
        return self.data

    def assembly(self) -> str:
        """The machine code as text, to check which instructions the leaf contains."""
        return self.emit_assembly()


def compile_worker_ir(
    name: str, isa: VectorIsa, build: Callable[[ir.Module], ir.Function]
) -> GeneratedWorker:
    """Compile the worker ``build`` adds to a module: ``void(i64 arguments, begin, end, thread)``.

    The object code is kept in `cpu_jit.cache_directory`, keyed by the sources of this package,
    the name, the CPU and its features. ``build`` names the function "worker".

    Raises:
        OSError: the cache directory cannot be made or written.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    key = "\n".join((_sources_digest(), name, isa.cpu_name, isa.features))
    path = cache_directory() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.o"
    try:
        code = path.read_bytes()
    except FileNotFoundError:
        machine, module = _compile(name, isa, build)
        code = bytes(machine.emit_object(module))
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(code)
        partial.replace(path)

    def emit_assembly() -> str:
        machine, module = _compile(name, isa, build)
        return str(machine.emit_assembly(module))

    symbols = llvm.JITLibraryBuilder().add_object_img(code).export_symbol("worker")
    tracker = symbols.link(_linker(), f"{path.stem}-{next(_link_counter)}")
    return GeneratedWorker(name, int(tracker["worker"]), tracker, emit_assembly, code)


def _compile(
    name: str, isa: VectorIsa, build: Callable[[ir.Module], ir.Function]
) -> tuple[Any, Any]:
    """The target machine and the optimised module."""
    module = ir.Module(name)
    module.triple = llvm.get_process_triple()
    build(module)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=isa.cpu_name, features=isa.features, opt=3, reloc="pic", codemodel="jitdefault"
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = False  # unrolled by hand where it pays; more only costs registers
    options.loop_vectorization = False
    options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine, parsed


_link_counter = itertools.count()


@functools.cache
def _linker() -> Any:
    return llvm.create_lljit_compiler()


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256(repr(llvm.llvm_version_info).encode())
    for path in sorted(Path(__file__).parent.glob("jit_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
