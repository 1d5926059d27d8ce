"""The rotation of a pair of values by an angle on the CPU: for whoever turns halves of a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hal_kernels.cpu_intrinsics import intrinsic
from hal_kernels.cpu_simd import FLAGS, emit_fma, float32x16


def _first(builder: Any, a: Any, b: Any, cosine: Any, sine: Any) -> Any:
    turned = builder.fmul(b, sine, flags=FLAGS)
    return builder.fsub(builder.fmul(a, cosine, flags=FLAGS), turned, flags=FLAGS)


def _second(builder: Any, a: Any, b: Any, cosine: Any, sine: Any) -> Any:
    return emit_fma(builder, b, cosine, builder.fmul(a, sine, flags=FLAGS))


def _of_pairs(emit: Callable[..., Any]) -> Any:
    """An intrinsic of 16 pairs (a, b) with their cosines and sines."""
    signature = float32x16(*[float32x16] * 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    return intrinsic(lambda typing_context, a, b, cosine, sine: (signature, codegen))


# a * cosine - b * sine, and b * cosine + a * sine.
vector_turned_first = _of_pairs(_first)
vector_turned_second = _of_pairs(_second)
