"""What was observed of a program: plain data between the observer and the rules.

The observer (torch's modes and profiler) fills it; a rule reads it and nothing else, so that rules
are tested on traces without a program, and a trace of another rank is merged like our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from hal.auditing.document import Location, Machine, Refusal, Variable

OpClass = Literal[
    "attention",
    "gemm",
    "convolution",
    "collective",
    "norm",
    "activation",
    "embedding",
    "sampling",
    "copy",
    "elementwise",
    "reduction",
    "other",
]
Region = Literal["eager", "compiled", "script"]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_STRICT: Final = ConfigDict(extra="forbid", strict=True)
"""For traces of other processes: no key and no type but those that stand here."""

SETTING_DEFAULTS: Final[Mapping[str, str]] = {
    "grad_enabled": "True",
    "inference_mode": "False",
    "autocast": "",
    "flash_sdp": "True",
    "mem_efficient_sdp": "True",
    "cudnn_sdp": "True",
    "math_sdp": "True",
    "deterministic_algorithms": "False",
    "anomaly_mode": "False",
    "float32_matmul_precision": "highest",
    "cudnn": "True",
    "cudnn_benchmark": "False",
    "mkldnn": "True",
    "num_threads": "",
}
"""Torch's own defaults of the settings that decide or slow what runs; values are `str()` of
Python's. autocast: the dtype while it is on. num_threads: threads within an op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFact:
    """A tensor argument or result. dtype without "torch.", device type without index.

    origin_dtypes, origin_devices: of the tensors that copies and elementwise ops made this one
    from since the audit began, itself included (a float32 weight out of an int8 one has both).
    is_constant: it existed before the audit, or is a parameter or buffer, or was made from such
    tensors alone: computing it again each call is work that need not be done. last_stride: of the
    last dimension. pattern: of an attention mask, where it was looked at: "all-true" (or all zeros
    added), "causal" (lower triangle, aligned top left), else "".
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    shape: tuple[Count, ...]
    dtype: str
    device: str = "cpu"
    is_contiguous: bool = True
    requires_grad: bool = False
    is_constant: bool = False
    last_stride: int = 1
    is_nested: bool = False
    pattern: str = ""
    origin_dtypes: frozenset[str] = frozenset()
    origin_devices: frozenset[str] = frozenset()

    @property
    def num_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(slots=True, kw_only=True)
class ObservedOp:
    """All calls of one op with equal arguments from one place. Times in µs, wall, this op alone.

    name: as torch's dispatcher has it, without overload ("aten::mm"); a kernel's name for what
    only the profiler saw. inputs, outputs: tensors in order (of lists too). values: the other
    arguments by name, where they matter (is_causal, dropout_p, scale, transposes…), as JSON types.
    location: innermost frame of the program (not of torch, of halstack or of the standard
    library); stack: the frames of the program outwards, at most 8. function: the torch function
    that the program called and that this op is a part of ("scaled_dot_product_attention",
    "linear"), "" for an op called directly. call: number of that function call in
    `Trace.functions`. repeats: calls whose inputs were the same tensors, unchanged, as those of an
    earlier call. shared_inputs: calls, no repeats, whose first input that is not constant has the
    memory of that of the call before from this place, with few products between: a loop over parts
    of one tensor, or over experts for one.
    rank: of a process group, else 0.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    op_class: OpClass
    inputs: tuple[TensorFact, ...] = ()
    outputs: tuple[TensorFact, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    location: Location | None = None
    stack: tuple[Location, ...] = ()
    function: str = ""
    call: Count | None = None
    region: Region = "eager"
    thread: str = "MainThread"
    rank: Count = 0
    calls: Count = 0
    time_us: Amount = 0.0
    flops: Amount = 0.0
    bytes: Amount = 0.0
    repeats: Count = 0
    shared_inputs: Count = 0


@dataclass(slots=True, kw_only=True)
class FunctionCall:
    """All calls of one torch function with equal arguments from one place.

    arguments: by parameter name; tensors as `TensorFact`, the rest as JSON types or its repr.
    leaves: dispatcher ops seen inside with their counts: for attention, the backend that really
    ran. module: dotted path and class of the innermost nn.Module around it, "" if unknown.
    settings: keys of `Trace.settings` that are not at their defaults during the calls.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    location: Location | None = None
    stack: tuple[Location, ...] = ()
    leaves: Mapping[str, int] = field(default_factory=dict)
    module: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    rank: Count = 0
    calls: Count = 0
    time_us: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A warning (`warnings`, `logging` of WARNING and above) that the program produced."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    text: str
    category: str
    location: Location | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwallowedError:
    """An exception of torch or of a kernel library that the program caught and went on from.

    kind: class of the exception. text: its message. raised_by: the torch function, op or module
    whose call or import raised it ("flash_attn", "torch.ops.mine.attention"). location: the line
    of the program that made the call or the import.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: str
    text: str
    raised_by: str = ""
    location: Location | None = None
    calls: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileEvent:
    """Why something that was to be compiled ran as Python: "graph-break", "eager" (all of it) or
    "recompile-limit". function: that was to be compiled; reason: as the compiler gave it."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: Literal["graph-break", "eager", "recompile-limit"]
    reason: str
    function: str = ""
    location: Location | None = None
    calls: Count = 1


@dataclass(slots=True, kw_only=True)
class Trace:
    """Everything observed. steps: repetitions of the program's main loop as far as it is known
    (calls of the outermost nn.Module), 0 if there is none. wall_us: from start to end of the audit.
    compiled: names of functions that torch compiled; graph_breaks: reasons dynamo gave, with
    their counts; fallbacks: "asked for compiled, ran eager" with the reason; compile_events: the
    same with places, where they are known.
    settings: torch settings that were seen in force at any time and change what runs, by the keys
    of `SETTING_DEFAULTS`; settings_places: where the program set one. variables: of the
    environment. refusals: of ours. swallowed: errors that the program caught.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    machine: Machine
    ops: list[ObservedOp] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    steps: Count = 0
    wall_us: Amount = 0.0
    compiled: list[str] = field(default_factory=list)
    graph_breaks: dict[str, Count] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    settings_places: dict[str, Location] = field(default_factory=dict)
    compile_events: list[CompileEvent] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    swallowed: list[SwallowedError] = field(default_factory=list)
    processes: Annotated[int, Field(ge=1)] = 1

    @property
    def time_us(self) -> float:
        """Sum over all ops, of all ranks and threads."""
        return sum(op.time_us for op in self.ops)
