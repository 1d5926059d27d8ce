"""LLVM building blocks that numba does not offer: raw pointers, stack arrays, atomics, calls.

Kernels get every argument as an int64 (an address or a number) and turn addresses into typed
pointers with ``pointer_float32`` and its siblings. A pointer is indexed like an array (``p[i]``)
without bounds check, wrap-around of negative indices or reference counting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

_INT64 = ir.IntType(64)

_insert_function: Any = cgutils.get_or_insert_function


def intrinsic(function: Callable[..., Any]) -> Any:
    """``numba.extending.intrinsic``; a kernel calls the result without the typing context.

    Constants arrive as literal types, so that the code can depend on them.
    """
    return _numba_intrinsic(prefer_literal=True)(function)


def _make_pointer_intrinsic(element: Any) -> Any:
    """An intrinsic that reads an int64 address as a pointer to ``element``."""

    @intrinsic
    def as_pointer(typing_context: Any, address: types.Type) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        pointer: Any = types.CPointer
        return pointer(element)(types.int64), codegen

    return as_pointer


pointer_float32 = _make_pointer_intrinsic(types.float32)
pointer_float64 = _make_pointer_intrinsic(types.float64)
pointer_uint16 = _make_pointer_intrinsic(types.uint16)
pointer_int32 = _make_pointer_intrinsic(types.int32)
pointer_uint32 = _make_pointer_intrinsic(types.uint32)
pointer_int64 = _make_pointer_intrinsic(types.int64)
pointer_int8 = _make_pointer_intrinsic(types.int8)
pointer_uint8 = _make_pointer_intrinsic(types.uint8)


@intrinsic
def stack_bytes(typing_context: Any, size: Any) -> Any:
    """Address (int64) of ``size`` bytes on this call's stack, 64-byte aligned.

    ``size`` must be a literal or a constant of the kernel's closure.
    """
    if not isinstance(size, types.IntegerLiteral):
        return None
    num_bytes = size.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            block = builder.alloca(ir.ArrayType(ir.IntType(8), num_bytes))
            block.align = 64
        return builder.ptrtoint(block, _INT64)

    return types.int64(size), codegen


@intrinsic
def atomic_fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add ``value`` to the int64 at ``address`` atomically, return the value before."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def call_worker(
    typing_context: Any, function: Any, arguments: Any, begin: Any, end: Any, thread: Any
) -> Any:
    """Call ``void(int64 arguments, int64 begin, int64 end, int64 thread)`` by its address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [_INT64] * 4)
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def call_int(typing_context: Any, function: Any) -> Any:
    """Call ``int32(void)`` by its address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.IntType(32), [])
        result = builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [])
        return builder.sext(result, _INT64)

    return types.int64(types.int64), codegen


@intrinsic
def call_void(typing_context: Any, function: Any) -> Any:
    """Call ``void(void)`` by its address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def call_parallel(
    typing_context: Any, parallel: Any, function: Any, data: Any, num_threads: Any
) -> Any:
    """Call ``GOMP_parallel(function, data, num_threads, 0)`` by its address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        int32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [_INT64, _INT64, int32, int32])
        builder.call(
            builder.inttoptr(args[0], function_type.as_pointer()),
            [args[1], args[2], builder.trunc(args[3], int32), int32(0)],
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at ``address`` (prefetcht0)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        int32 = ir.IntType(32)
        byte_pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        function = _insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(
            function,
            [builder.inttoptr(args[0], byte_pointer), int32(0), int32(3), int32(1)],
        )
        return context.get_dummy_value()

    return types.void(types.int64), codegen
