"""The dtypes that activations have: row kernels are compiled for each. Free of torch."""

from __future__ import annotations

ACTIVATION_DTYPES = ("bfloat16", "float16", "float32")
