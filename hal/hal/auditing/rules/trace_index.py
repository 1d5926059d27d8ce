"""A trace, grouped the ways in which rules look at it: by line, by function, by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable
from functools import cached_property
from statistics import median
from typing import Final, TypeVar

from hal.auditing.document import Location
from hal.auditing.trace import FunctionCall, ObservedOp, Trace
from hal.device import DeviceSpec

Place = tuple[str, int]
"""(file, line)"""
Frame = tuple[str, str]
"""(file, function)"""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

_COMPREHENSION: Final = re.compile(r"(?:\.<locals>)?\.?<(?:genexpr|(?:list|set|dict)comp)>")
PRODUCTS: Final = ("gemm", "convolution", "attention")
HOST_DEVICES: Final = frozenset({"cpu", "meta"})


class TraceIndex:
    """Read-only views of a trace, made once for all rules. spec: of the device, if it is known."""

    def __init__(self, trace: Trace, spec: DeviceSpec | None = None) -> None:
        self.trace = trace
        self.spec = spec

    @cached_property
    def by_place(self) -> dict[Place, list[ObservedOp]]:
        """Ops of each line of the program."""
        return _grouped((place_of(op.location), op) for op in self.trace.ops)

    @cached_property
    def by_frame(self) -> dict[Frame, list[ObservedOp]]:
        """Ops of each function of the program, those of functions that it calls not included."""
        return _grouped((frame_of(op.location), op) for op in self.trace.ops)

    @cached_property
    def by_op_name(self) -> dict[str, list[ObservedOp]]:
        return _grouped((bare_name(op.name), op) for op in self.trace.ops)

    @cached_property
    def functions(self) -> dict[str, list[FunctionCall]]:
        """Calls of each torch function, by its bare name."""
        return _grouped((bare_name(call.name), call) for call in self.trace.functions)

    @cached_property
    def is_training(self) -> bool:
        """Whether gradients were computed: a backward pass was seen."""
        return "backward" in self.functions or any("backward" in op.name for op in self.trace.ops)

    @cached_property
    def accelerators(self) -> frozenset[str]:
        """Device types other than the host's that tensors were seen on."""
        facts = (fact for op in self.trace.ops for fact in (*op.inputs, *op.outputs))
        return frozenset(fact.device for fact in facts) - HOST_DEVICES

    @cached_property
    def num_steps(self) -> int:
        """Repetitions of the program's main loop; 1 if it has none. Where modules do not say, how
        often a line of products usually ran: too many where there are layers, which finds less.
        """
        if self.trace.steps > 1:
            return self.trace.steps
        lines = [
            sum(op.calls for op in ops if op.op_class in PRODUCTS) for ops in self.by_place.values()
        ]
        return max(1, int(median([calls for calls in lines if calls] or [1])))

    def is_repeated(self, calls: int) -> bool:
        """Whether that many calls from one line are work of each step, and not of setting up."""
        return calls >= max(2, self.trace.steps)

    def setting_place(self, name: str, value: str) -> Location | None:
        """Where the program gave a torch setting that value; else its first call under it."""
        known = self.trace.settings_places.get(name)
        calls = (call for call in self.trace.functions if call.settings.get(name) == value)
        return known or next((call.location for call in calls if call.location), None)

    def rank_of(self, seen: ObservedOp | FunctionCall) -> int | None:
        """Rank of an observation, where there are several."""
        return seen.rank if self.trace.processes > 1 else None

    def rate(self, dtype: str) -> float | None:
        """Peak operations/s of the device in a dtype; None where nobody knows."""
        rates = self.trace.machine.peak_flops
        if dtype not in rates and self.spec is not None:
            rates = self.spec.peak_flops
        return rates.get(dtype) or None


def bare_name(name: str) -> str:
    """ "mm" of "aten::mm", "softmax" of "torch.nn.functional.softmax"."""
    return name.rpartition("::")[2].rpartition(".")[2]


def place_of(location: Location | None) -> Place:
    return ("", 0) if location is None else (location.file, location.line)


def frame_of(location: Location | None) -> Frame:
    """A comprehension belongs to the function that it stands in."""
    if location is None:
        return ("", "")
    return (location.file, _COMPREHENSION.sub("", location.function) or "<module>")


def _grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    groups: defaultdict[_Key, list[_Value]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)
