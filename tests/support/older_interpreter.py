"""What Triton 3.6's interpreter lacks and its compiler has: the one place where tests know of it.

Of no effect on a later interpreter, which has all of it. It does not know float8_e4m3fnuz, its
complement of unsigned integers overflows in numpy 2, and numpy 2.4 refuses arrays of one element
that are taken for numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def repair(interpreter: Any) -> None:
    """Patches `triton.runtime.interpreter` of this process."""
    builder = interpreter.InterpreterBuilder
    plain_ones = builder.get_all_ones_value
    plain_core, plain_tensor = interpreter._patch_lang_core, interpreter._patch_lang_tensor

    def all_ones(self: Any, type: Any) -> Any:
        numpy_type = interpreter._get_np_dtype(type)
        if not np.issubdtype(numpy_type, np.unsignedinteger):
            return plain_ones(self, type)
        ones = np.full(1, np.iinfo(numpy_type).max, dtype=numpy_type)
        return interpreter.TensorHandle(ones, type.scalar)

    def patch_core(language: Any, *scope: Any) -> None:
        plain_core(language, *scope)
        known = language.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            is_fnuz = self.name == "fp8e4b8"
            return builder.get_fp8e4b8_ty() if is_fnuz else known(self, builder)

        language.dtype.to_ir = to_ir

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        plain_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    builder.get_all_ones_value = all_ones
    interpreter._patch_lang_core = patch_core
    interpreter._patch_lang_tensor = patch_tensor
