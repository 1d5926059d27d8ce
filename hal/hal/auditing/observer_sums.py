"""What an audit sums: per op, per torch function, per thread. Plain records, without a lock."""

from __future__ import annotations

from typing import Any, Final

from hal.auditing.observer_facts import Fact
from hal.auditing.observer_frames import Stack
from hal.auditing.observer_ops import KernelInfo, OpInfo
from hal.auditing.observer_settings import Settings
from hal.auditing.trace import Region

MAX_ENTRIES: Final = 50_000
"""Of a thread; what comes after is summed by op and place."""
_OPEN: Final = frozenset({"backward", "grad"})


class FunctionEntry:
    """All calls of a torch function with equal arguments from one place."""

    __slots__ = (
        "arguments",
        "calls",
        "is_attention",
        "leaves",
        "module",
        "name",
        "settings",
        "stack",
        "time_ns",
    )

    def __init__(self, name: str, arguments: Any, stack: Stack, settings: Any, module: str) -> None:
        self.name = name
        self.is_attention = name == "scaled_dot_product_attention"
        self.arguments = arguments
        self.stack = stack
        self.settings = settings
        self.module = module
        self.leaves: dict[str, int] = {}
        self.calls = 0
        self.time_ns = 0


class OpEntry:
    """All calls of an op with equal arguments from one place, within one function call."""

    __slots__ = (
        "bytes",
        "calls",
        "flops",
        "function",
        "inputs",
        "name",
        "op_class",
        "outputs",
        "region",
        "repeats",
        "shared_inputs",
        "stack",
        "time_ns",
        "values",
    )

    def __init__(
        self,
        info: OpInfo | KernelInfo,
        inputs: tuple[Fact, ...],
        outputs: tuple[Fact, ...],
        values: tuple[tuple[str, Any], ...],
        stack: Stack,
        region: Region,
        function: FunctionEntry | None,
    ) -> None:
        self.name = info.name
        self.op_class = info.op_class
        self.inputs = inputs
        self.outputs = outputs
        self.values = values
        self.stack = stack
        self.region = region
        self.function = function
        self.calls = 0
        self.time_ns = 0
        self.flops = 0.0
        self.bytes = 0.0
        self.repeats = 0
        self.shared_inputs = 0


class FunctionFrame:
    """A torch function that is running. is_open: code of the program may run within it, so that its
    ops are not all from one place."""

    __slots__ = (
        "args",
        "children_ns",
        "entry",
        "func",
        "is_open",
        "kwargs",
        "num_fused",
        "num_ops",
        "settings",
        "stack",
    )

    def __init__(self, func: Any, args: Any, kwargs: Any, settings: Settings) -> None:
        self.settings = settings
        self.is_open = getattr(func, "__name__", "") in _OPEN
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.entry: FunctionEntry | None = None
        self.stack: tuple[Stack, Region] | None = None
        self.children_ns = 0
        self.num_fused = 0
        self.num_ops = 0


class ThreadSums:
    """What one thread did. inner_ns: time of nested ops within the op that runs, with what
    observing them took. overhead_ns: what observing took in all. is_busy: the observer itself calls
    torch, which nobody counts."""

    __slots__ = (
        "frames",
        "function_calls",
        "functions",
        "inner_ns",
        "is_busy",
        "is_inside_dynamo",
        "last_error",
        "last_storage",
        "name",
        "num_calls",
        "num_products",
        "ops",
        "overhead_ns",
        "script_depth",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: dict[Any, OpEntry] = {}
        self.functions: dict[Any, FunctionEntry] = {}
        self.function_calls: dict[Any, FunctionEntry] = {}  # by keys that are quickly made
        self.frames: list[FunctionFrame] = []
        self.last_storage: dict[Any, tuple[int, int]] = {}  # memory, products until then
        self.inner_ns = 0
        self.overhead_ns = 0
        self.num_calls = 0
        self.num_products = 0
        self.script_depth = 0
        self.is_busy = False
        self.is_inside_dynamo = False
        self.last_error = 0
