"""Sees every torch op of a thread, and says which of the important ones ran outside a bound op.

Kernels that are not torch ops (generated machine code) do not pass torch's dispatcher; they can
only be reached through the candidate that loads them.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hal.candidates import Kernel

# Dispatcher names (namespace::name, without overload) of matrix products, attention, collectives.
_PRODUCTS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "addmv",
    "mv",
    "dot",
    "vdot",
    "linear",
    "matmul",
    "einsum",
    "_int_mm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_weight_int8pack_mm",
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_dyn_quant_matmul_4bit",
    "mkldnn_linear",
    "convolution",
    "_trilinear",
    "_cdist_forward",
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "embedding",
)
TRACKED_OPS = frozenset(f"aten::{name}" for name in _PRODUCTS)
TRACKED_NAMESPACES = frozenset({"c10d", "mkldnn", "mkl", "onednn", "quantized", "_quantized"})


@dataclass(frozen=True, slots=True)
class EscapedCall:
    """A tracked op that ran outside every bound op: its name and the innermost of our frames."""

    op: str
    location: str


class DispatchSpy(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Use as a context manager around the calls; give `wrap` to `BoundOps`.

    leaf_ops: (site, implementation) -> torch ops seen inside it. escaped: tracked ops outside.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.leaf_ops: dict[tuple[str, str], Counter[str]] = {}
        self.escaped: list[EscapedCall] = []
        self.num_tracked = 0
        self._inside: list[tuple[str, str]] = []

    def wrap(self, site: str, implementation: str, kernel: Kernel) -> Kernel:
        """`kernel`, marked as the inside of a bound op."""
        key = (site, implementation)
        self.leaf_ops.setdefault(key, Counter())

        def marked(*args: Any) -> Any:
            self._inside.append(key)
            try:
                return kernel(*args)
            finally:
                self._inside.pop()

        return marked

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().partition(".")[0]
        if self._inside:
            self.leaf_ops[self._inside[-1]][name] += 1
        if is_tracked(name):
            self.num_tracked += 1
            if not self._inside:
                self.escaped.append(EscapedCall(name, _location()))
            return func(*args, **(kwargs or {}))
        # In inference mode an op made of others (inner, tensordot, …) arrives whole: look inside.
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def is_tracked(name: str) -> bool:
    """Whether an op is a matrix product, attention, a gather of embeddings or a collective."""
    return name in TRACKED_OPS or name.partition("::")[0] in TRACKED_NAMESPACES


def _location() -> str:
    """file:line of the innermost frame that is neither torch's nor of what leads calls to ops."""
    not_callers = (torch.__path__[0], __file__, f"{__file__.rpartition('/')[0]}/integrations/")
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(not_callers):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
