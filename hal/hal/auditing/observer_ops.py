"""What is known of each op of the dispatcher: read once from its schema and tags."""

from __future__ import annotations

from typing import Any, Final

import torch

from hal.auditing.op_classes import ATTENTION_MATH, COLLECTIVE_NAMESPACES, classify
from hal.auditing.op_classes import LIBRARY_NAMESPACES as _LIBRARIES
from hal.auditing.trace import OpClass

_OF_TORCH: Final = frozenset(
    {"aten", "prims", "prim", "inductor", "profiler", "debugprims", "rngprims", "sparse", "fbgemm"}
    | {"static_runtime", "mkldnn_prepacked", "prepacked", "xnnpack", "debug_mode_ops", "rocm"}
    | {"higher_order"}
    | COLLECTIVE_NAMESPACES
    | _LIBRARIES
)
_RESETS: Final[frozenset[OpClass]] = frozenset(
    {"gemm", "attention", "convolution", "reduction", "norm", "sampling", "collective"}
)
_SCALARS_VARY: Final[frozenset[OpClass]] = frozenset({"elementwise", "other", "copy", "sampling"})
_UNSTABLE: Final = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "lift_fresh")
) | {"aten::new_empty_strided", "aten::set_", "aten::resize_", "aten::from_file"}
_NUMBERS: Final = tuple(map(str, range(64)))
"""Names of the arguments of a higher-order op, which has no schema."""

# Their schema says that they make something new; their result is their input's memory.
_HIDDEN_VIEWS: Final = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})


class OpInfo:
    """An op overload.

    is_view: its results are its inputs' memory. is_mutable: it writes to inputs, those at
    `written`. is_random: two calls differ. carries: its results have its inputs' values in another
    form. is_composite: made of other ops, which the dispatcher shows one by one unless it is
    called below autograd. is_foreign: of an extension, whose inside is looked into. drops_numbers:
    numbers among its arguments vary from step to step (positions, scalars) and are left out.
    is_grouped: a product of rows with one of several matrices each (experts).
    makes_literal: it makes a tensor of one number, its first argument.
    run: calls it. is_run_whole: by nothing but `run`.
    adds_first: a product whose first argument is what is added to it.
    """

    __slots__ = (
        "adds_first",
        "argument_names",
        "carries",
        "drops_numbers",
        "func",
        "is_collective",
        "is_composite",
        "is_foreign",
        "is_gather",
        "is_grouped",
        "is_mutable",
        "is_random",
        "is_run_whole",
        "is_view",
        "makes_constants",
        "makes_literal",
        "name",
        "op_class",
        "run",
        "written",
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.name = _name_of(func)
        namespace, _, base = self.name.partition("::")
        schema = getattr(func, "_schema", None)
        tags = getattr(func, "tags", ())
        self.op_class = classify(self.name, is_pointwise=torch.Tag.pointwise in tags)
        arguments = () if schema is None else tuple(schema.arguments)
        names = _NUMBERS if schema is None else (argument.name for argument in arguments)
        self.argument_names = tuple(names)
        self.is_mutable = bool(schema is not None and schema.is_mutable)
        self.written = frozenset(
            argument.name
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        returns = () if schema is None else tuple(schema.returns)
        self.is_view = not self.is_mutable and (
            self.name in _HIDDEN_VIEWS or any(r.alias_info is not None for r in returns)
        )
        self.is_random = torch.Tag.nondeterministic_seeded in tags or self.name in _UNSTABLE
        self.makes_constants = not self.is_random and namespace in _OF_TORCH
        self.makes_literal = self.name == "aten::scalar_tensor"
        self.carries = self.op_class not in _RESETS
        self.is_foreign = schema is not None and namespace not in _OF_TORCH
        self.is_collective = namespace in COLLECTIVE_NAMESPACES
        self.is_gather = self.op_class == "embedding" or base in ("index", "index_select", "gather")
        self.is_grouped = base in ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
        self.drops_numbers = self.op_class in _SCALARS_VARY
        self.is_composite = schema is not None and _is_composite(func)
        self.is_run_whole = not (self.is_composite or self.is_foreign)
        # What the overload calls: without a frame of torch's own in between.
        self.run = func._op if isinstance(func, torch._ops.OpOverload) else func
        self.adds_first = base in ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation")

    @property
    def is_shown_whole(self) -> bool:
        """Whether it is recorded itself although its parts are: the math path of attention."""
        return self.name == ATTENTION_MATH


class KernelInfo:
    """A kernel that the compiler generated: of several ops, so of no class."""

    __slots__ = ("name", "op_class")

    def __init__(self, name: str) -> None:
        self.name = f"inductor::{name}"
        self.op_class: OpClass = "other"


def _name_of(func: Any) -> str:
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    bare = str(name).partition(".")[0]
    return bare if "::" in bare else f"higher_order::{bare}"


def _is_composite(func: Any) -> bool:
    name = func.name()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel(name, "CompositeImplicitAutograd"):
        return False
    # A backend with a kernel of its own runs that one, not the parts.
    return not any(has_kernel(name, key) for key in ("CPU", "CUDA", "MPS", "XPU", "PrivateUse1"))
