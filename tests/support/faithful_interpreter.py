"""Makes Triton's interpreter round and multiply as the hardware does.

The interpreter (seen in 3.6 to 3.9) keeps bfloat16 as 16-bit integers: it multiplies and adds those
integers, and it cuts where hardware rounds to nearest, ties to even. Here conversions between
floating-point types are torch's, products of bfloat16 are of their values, and any other arithmetic
on bfloat16 is an error, so that a kernel has to widen first, as it should anyway.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from older_interpreter import repair


def install() -> None:
    """Patches the interpreter of this process. Must run before a kernel is defined."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float16: (torch.float16, np.float16),
        tl.float32: (torch.float32, np.float32),
        tl.float64: (torch.float64, np.float64),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
        tl.float8e4b8: (torch.float8_e4m3fnuz, np.uint8),
        tl.float8e5: (torch.float8_e5m2, np.uint8),
    }
    largest = {tl.float8e4nv: 448.0, tl.float8e4b8: 240.0, tl.float8e5: 57344.0}
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.dtype.itemsize}").copy())
        values = bits.view(views[data.dtype.itemsize]).view(types[source][0])
        if target in largest:
            # cvt.rn.satfinite: what is too large becomes the largest, NaN stays.
            wide = values.float()
            values = wide.clamp(-largest[target], largest[target])
        torch_type, numpy_type = types[target]
        result = values.to(torch_type).view(views[torch.empty((), dtype=torch_type).itemsize])
        unsigned = result.numpy().view(f"u{result.element_size()}")
        return unsigned.view(numpy_type).reshape(data.shape)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar in types and handle.dtype.scalar is not tl.float64:
            return convert(handle.data, handle.dtype.scalar, tl.float32, None)
        return handle.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(widened(a), widened(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    plain_binary_op = interpreter.InterpreterBuilder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise TypeError("arithmetic on bfloat16: the kernel must widen to float32 first")
        return plain_binary_op(self, lhs, rhs, op)

    repair(interpreter)
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.binary_op = binary_op
