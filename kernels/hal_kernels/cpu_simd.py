"""Vectors of 16 fp32 lanes for numba kernels.

Loops written with these do not depend on LLVM's auto-vectoriser. A vector is one zmm register on
AVX-512 and two ymm registers on AVX2; ``vector_fma`` becomes ``vfmadd231ps``. Memory holds fp32 or
bf16; arithmetic is always fp32. ``kind`` is ``FP32`` or ``BF16`` and must be a constant of the
kernel.

bf16 is read by shifting (exact) and written by rounding to nearest even; a NaN stays a NaN.
Addresses are int64, indices count elements; no alignment beyond the element's own is needed. The
order of a sum is the one written here, never LLVM's choice, so that a row's result does not depend
on what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from hal_kernels.cpu_intrinsics import intrinsic

LANES = 16
FP32 = 0
BF16 = 1
ELEMENT_BYTES = (4, 2)

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INT_VECTOR = ir.VectorType(ir.IntType(32), LANES)
_HALF_VECTOR = ir.VectorType(ir.IntType(16), LANES)
_BYTE_VECTOR = ir.VectorType(ir.IntType(8), LANES)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_ELEMENTS = (_VECTOR, _HALF_VECTOR)

# Fusing a*b+c is allowed, reordering is not. (numba adds the kernel's own fastmath flags only to
# instructions that have none.)
FLAGS = ("contract",)

# Minimax fit of exp(r) = 1 + r + r^2 (c0 + c1 r + ...) on |r| <= ln(2)/2, relative error 3e-9.
_EXP_COEFFICIENTS = (
    0.4999999403953552,
    0.1666652113199234,
    0.04166838899254799,
    0.00836874544620514,
    0.0013814540579915047,
)
_LOG2_E = 1.4426950408889634
# ln(2) in two parts: n * _LN2_HIGH is exact for |n| < 2**9.
_LN2_HIGH = 0.693145751953125
_LN2_LOW = 1.42860682030941723212e-6
_EXP_MIN = -86.6
_EXP_MAX = 89.0


def element_kind(dtype: torch.dtype) -> int:
    """The ``kind`` of a tensor's elements.

    Raises:
        ValueError: neither float32 nor bfloat16.
    """
    kinds = {torch.float32: FP32, torch.bfloat16: BF16}
    if dtype not in kinds:
        raise ValueError(f"CPU kernels hold float32 or bfloat16, not {dtype}")
    return kinds[dtype]


# numba is partly annotated, and by version: its classes are taken as Any.
_Type: Any = types.Type


class Float32x16(_Type):  # type: ignore[misc, unused-ignore]
    """numba's type of a vector of 16 fp32."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


_new_type: Any = Float32x16
float32x16: Any = _new_type()


_PrimitiveModel: Any = models.PrimitiveModel


class _Float32x16Model(_PrimitiveModel):  # type: ignore[misc, unused-ignore]
    def __init__(self, data_model_manager: Any, frontend_type: Any) -> None:
        super().__init__(data_model_manager, frontend_type, _VECTOR)


_register: Any = register_model
_register(Float32x16)(_Float32x16Model)


# --- pieces of generated code ---------------------------------------------------------------------


def splat(builder: Any, scalar: Any) -> Any:
    """A vector with ``scalar`` in each lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, _INT32(0))
    return builder.shuffle_vector(first, undefined, int_constant(0))


def constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def int_constant(value: int) -> Any:
    return ir.Constant(_INT_VECTOR, [value] * LANES)


def call_llvm(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call one of LLVM's intrinsic functions."""
    insert: Any = cgutils.get_or_insert_function
    function_type = ir.FunctionType(result, [argument.type for argument in args])
    return builder.call(insert(builder.module, function_type, name), args)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(builder, "llvm.fma.v16f32", _VECTOR, [a, b, c])


def emit_add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=FLAGS)


def emit_max(builder: Any, a: Any, b: Any) -> Any:
    """The larger; ``b`` where either is a NaN (vmaxps)."""
    return builder.select(builder.fcmp_ordered(">", a, b, flags=FLAGS), a, b)


def emit_min(builder: Any, a: Any, b: Any) -> Any:
    """The smaller; ``b`` where either is a NaN (vminps)."""
    return builder.select(builder.fcmp_ordered("<", a, b, flags=FLAGS), a, b)


def emit_load(builder: Any, address: Any, index: Any, kind: int) -> Any:
    pointer = _element_pointer(builder, address, index, kind)
    return _widen(builder, builder.load(pointer, align=ELEMENT_BYTES[kind]), kind)


def emit_store(builder: Any, address: Any, index: Any, value: Any, kind: int) -> None:
    pointer = _element_pointer(builder, address, index, kind)
    builder.store(_narrow(builder, value, kind), pointer, align=ELEMENT_BYTES[kind])


def emit_lanes_below(builder: Any, count: Any) -> Any:
    """Mask of the lanes whose number is below ``count`` (int64)."""
    lanes = ir.Constant(_INT_VECTOR, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, _INT32)))


def fold_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine the lanes by halves (8 with 8, 4 with 4, ...) into a scalar."""
    width = LANES
    while width > 1:
        half = width // 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        indices = ir.VectorType(_INT32, half)
        low = ir.Constant(indices, list(range(half)))
        high = ir.Constant(indices, list(range(half, width)))
        vector = combine(
            builder,
            builder.shuffle_vector(vector, undefined, low),
            builder.shuffle_vector(vector, undefined, high),
        )
        width = half
    return builder.extract_element(vector, _INT32(0))


def emit_exp(builder: Any, x: Any) -> Any:
    """exp of each lane, within 1.01 ulp (seen over every float32 of the range: 1.0086).

    Below 2**-125 the result is 0, above the range infinity.

    exp(x) = 2**n * exp(r) with n = round(x / ln 2), so |r| <= ln(2) / 2.
    """
    clamped = emit_max(builder, emit_min(builder, x, constant(_EXP_MAX)), constant(_EXP_MIN))
    scaled = builder.fmul(clamped, constant(_LOG2_E), flags=FLAGS)
    n = call_llvm(builder, "llvm.rint.v16f32", _VECTOR, [scaled])
    r = emit_fma(builder, n, constant(-_LN2_HIGH), clamped)
    r = emit_fma(builder, n, constant(-_LN2_LOW), r)
    polynomial = constant(_EXP_COEFFICIENTS[-1])
    for coefficient in reversed(_EXP_COEFFICIENTS[:-1]):
        polynomial = emit_fma(builder, polynomial, r, constant(coefficient))
    r_squared = builder.fmul(r, r, flags=FLAGS)
    value = builder.fadd(emit_fma(builder, polynomial, r_squared, r), constant(1.0), flags=FLAGS)
    # 2**n as 2**(n-1) * 2: n reaches 128, whose exponent field would be that of infinity.
    exponent = builder.add(builder.fptosi(n, _INT_VECTOR), int_constant(126))
    power = builder.bitcast(builder.shl(exponent, int_constant(23)), _VECTOR)
    value = builder.fmul(builder.fmul(value, power, flags=FLAGS), constant(2.0), flags=FLAGS)
    is_tiny = builder.fcmp_ordered("<", x, constant(_EXP_MIN), flags=FLAGS)
    value = builder.select(is_tiny, constant(0.0), value)
    is_nan = builder.fcmp_unordered("uno", x, x, flags=FLAGS)
    return builder.select(is_nan, x, value)


def _element_pointer(builder: Any, address: Any, index: Any, kind: int) -> Any:
    offset = builder.mul(index, _INT64(ELEMENT_BYTES[kind]))
    return builder.inttoptr(builder.add(address, offset), _ELEMENTS[kind].as_pointer())


def _widen(builder: Any, raw: Any, kind: int) -> Any:
    if kind == FP32:
        return raw
    shifted = builder.shl(builder.zext(raw, _INT_VECTOR), int_constant(16))
    return builder.bitcast(shifted, _VECTOR)


def _narrow(builder: Any, value: Any, kind: int) -> Any:
    if kind == FP32:
        return value
    bits = builder.bitcast(value, _INT_VECTOR)
    odd = builder.and_(builder.lshr(bits, int_constant(16)), int_constant(1))
    rounded = builder.add(builder.add(bits, int_constant(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value, flags=FLAGS)
    kept = builder.select(is_nan, builder.or_(bits, int_constant(0x00400000)), rounded)
    return builder.trunc(builder.lshr(kept, int_constant(16)), _HALF_VECTOR)


# --- what kernels call ----------------------------------------------------------------------------


def _elementwise(emit: Callable[..., Any], num_operands: int) -> Any:
    """An intrinsic of ``num_operands`` vectors that returns a vector."""
    signature = float32x16(*[float32x16] * num_operands)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    if num_operands == 1:
        return intrinsic(lambda typing_context, a: (signature, codegen))
    if num_operands == 2:
        return intrinsic(lambda typing_context, a, b: (signature, codegen))
    return intrinsic(lambda typing_context, a, b, c: (signature, codegen))


vector_add = _elementwise(emit_add, 2)
vector_sub = _elementwise(lambda builder, a, b: builder.fsub(a, b, flags=FLAGS), 2)
vector_mul = _elementwise(lambda builder, a, b: builder.fmul(a, b, flags=FLAGS), 2)
vector_div = _elementwise(lambda builder, a, b: builder.fdiv(a, b, flags=FLAGS), 2)
vector_max = _elementwise(emit_max, 2)
vector_min = _elementwise(emit_min, 2)
vector_fma = _elementwise(emit_fma, 3)
vector_exp = _elementwise(emit_exp, 1)
vector_abs = _elementwise(
    lambda builder, a: call_llvm(builder, "llvm.fabs.v16f32", _VECTOR, [a]), 1
)
vector_swap_pairs = _elementwise(
    lambda builder, a: builder.shuffle_vector(
        a, a, ir.Constant(_INT_VECTOR, [lane ^ 1 for lane in range(LANES)])
    ),
    1,
)

vector_alternate_sign = _elementwise(
    lambda builder, a: builder.fmul(
        a, ir.Constant(_VECTOR, [-1.0, 1.0] * (LANES // 2)), flags=FLAGS
    ),
    1,
)


@intrinsic
def vector_of(typing_context: Any, value: Any) -> Any:
    """A vector with ``value`` in each lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[0])

    return float32x16(types.float32), codegen


@intrinsic
def vector_sum(typing_context: Any, vector: Any) -> Any:
    """Sum of the lanes as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fold_lanes(builder, args[0], emit_add)

    return types.float32(float32x16), codegen


@intrinsic
def vector_largest(typing_context: Any, vector: Any) -> Any:
    """The largest lane as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fold_lanes(builder, args[0], emit_max)

    return types.float32(float32x16), codegen


@intrinsic
def vector_load(typing_context: Any, address: Any, index: Any, kind: Any) -> Any:
    """16 elements from ``index`` on."""
    element = kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, args[0], args[1], element)

    return float32x16(types.int64, types.int64, kind), codegen


@intrinsic
def vector_store(typing_context: Any, address: Any, index: Any, value: Any, kind: Any) -> Any:
    """Write 16 elements from ``index`` on."""
    element = kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_store(builder, args[0], args[1], args[2], element)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, float32x16, kind), codegen


@intrinsic
def vector_load_first(
    typing_context: Any, address: Any, index: Any, kind: Any, count: Any, rest: Any
) -> Any:
    """``count`` elements from ``index`` on; the other lanes are ``rest``, their memory unread."""
    element = kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = emit_lanes_below(builder, args[3])
        pointer = _element_pointer(builder, args[0], args[1], element)
        raw_type = _ELEMENTS[element]
        name = f"llvm.masked.load.{'v16f32' if element == FP32 else 'v16i16'}.p0"
        nothing = ir.Constant(raw_type, None)
        raw = call_llvm(
            builder, name, raw_type, [pointer, _INT32(ELEMENT_BYTES[element]), mask, nothing]
        )
        return builder.select(mask, _widen(builder, raw, element), splat(builder, args[4]))

    return float32x16(types.int64, types.int64, kind, types.int64, types.float32), codegen


@intrinsic
def vector_store_first(
    typing_context: Any, address: Any, index: Any, value: Any, kind: Any, count: Any
) -> Any:
    """Write the first ``count`` lanes from ``index`` on."""
    element = kind.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = emit_lanes_below(builder, args[4])
        pointer = _element_pointer(builder, args[0], args[1], element)
        name = f"llvm.masked.store.{'v16f32' if element == FP32 else 'v16i16'}.p0"
        raw = _narrow(builder, args[2], element)
        align = _INT32(ELEMENT_BYTES[element])
        call_llvm(builder, name, ir.VoidType(), [raw, pointer, align, mask])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, float32x16, kind, types.int64), codegen


@intrinsic
def vector_load_doubled(typing_context: Any, address: Any, index: Any) -> Any:
    """8 fp32 from ``index`` on, each in two neighbouring lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        eight = ir.VectorType(ir.FloatType(), LANES // 2)
        offset = builder.mul(args[1], _INT64(4))
        pointer = builder.inttoptr(builder.add(args[0], offset), eight.as_pointer())
        loaded = builder.load(pointer, align=4)
        lanes = ir.Constant(_INT_VECTOR, [lane // 2 for lane in range(LANES)])
        return builder.shuffle_vector(loaded, loaded, lanes)

    return float32x16(types.int64, types.int64), codegen


@intrinsic
def vector_keep_below(typing_context: Any, count: Any, vector: Any, other: Any) -> Any:
    """``vector`` in the lanes below ``count``, ``other`` in the rest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(emit_lanes_below(builder, args[0]), args[1], args[2])

    return float32x16(types.int64, float32x16, float32x16), codegen


@intrinsic
def vector_store_rounded_bytes(
    typing_context: Any, address: Any, index: Any, value: Any, offset: Any
) -> Any:
    """Write round-to-nearest-even(value) + offset as bytes; the caller keeps it in range."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = call_llvm(builder, "llvm.rint.v16f32", _VECTOR, [args[2]])
        whole = builder.fptosi(rounded, _INT_VECTOR)
        shifted = builder.add(whole, splat(builder, builder.trunc(args[3], _INT32)))
        pointer = builder.inttoptr(builder.add(args[0], args[1]), _BYTE_VECTOR.as_pointer())
        builder.store(builder.trunc(shifted, _BYTE_VECTOR), pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, float32x16, types.int64), codegen
