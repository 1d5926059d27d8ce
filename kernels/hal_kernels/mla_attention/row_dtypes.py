"""Which rows of a cache are read for queries of which dtype. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Collection

from hal.ops.kv_formats import KV_FORMATS
from hal.reasons import Reason
from hal_kernels.aot.limits import not_written

_PLAIN = {"bfloat16": "bf16", "float16": "fp16"}


def dtype_reasons(kernel: str, dtype: str, formats: Collection[str]) -> list[Reason]:
    """Why rows of these formats are not read for queries of a dtype; empty if they are.

    Plain rows have the dtype of the queries, since the matrix unit multiplies operands of one.
    Packed rows are bfloat16 by definition: their values times their scales go beyond 65504, the
    largest number of float16.
    """
    plain = _PLAIN.get(dtype)
    if plain is None:
        return [not_written(kernel, "dtype", " or ".join(_PLAIN), dtype)]
    packed = {name for name, form in KV_FORMATS.items() if not form.is_plain}
    if {plain, *(packed if dtype == "bfloat16" else ())}.issuperset(formats):
        return []
    required = "bf16 or packed rows"
    if dtype == "float16":
        required = "fp16: packed rows are bfloat16, with values beyond the range of float16"
    found = " and ".join(sorted(formats))
    return [not_written(kernel, f"rows for {dtype} queries", required, found)]
