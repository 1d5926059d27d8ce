"""Bound ops: what the engine calls. A callable per call site with a counter per token range.

A call pays for one counter and one comparison with the planned sizes; selection happened long
before. Counters never miss a call: `next` of an `itertools.count` is one step of the
interpreter, so threads cannot lose one between reading and writing.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hal.candidates import Bind, Kernel
from hal.errors import BindingError
from hal.loaded_code import LoadedCode, recorded_code
from hal.ops.request import TokenRange
from hal.plan import Plan, PlannedOp

WrapKernel = Callable[[str, str, Kernel], Kernel]
BoundOp = Callable[..., Any]  # op(num_tokens, *args) -> what the kernel returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One call site and token range as it is bound, for an audit that looks inside calls.

    static: the load-time arguments. code: machine code that binding reported, see
    `hal.loaded_code`; shared by the ranges that share a kernel.
    """

    site: str
    planned: PlannedOp
    static: Mapping[str, Any]
    code: tuple[LoadedCode, ...]


Observe = Callable[[Binding, Kernel], BoundOp]


class CallCounter:
    """Counts calls; safe from several threads."""

    __slots__ = ("_count", "_repeats", "tick")

    def __init__(self) -> None:
        self._count = itertools.count()
        # Calls of repeats that have ended, and (repeats, calls of each) of the others: one tuple,
        # replaced whole, so that whoever reads sees no half of a change.
        self._repeats: tuple[int, tuple[tuple[CallCounter, int], ...]] = (0, ())
        self.tick: Callable[[], int] = self._count.__next__

    @property
    def value(self) -> int:
        ended, others = self._repeats
        return self.own + ended + sum(calls * repeats.own for repeats, calls in others)

    @property
    def own(self) -> int:
        """Ticks, without repeats."""
        # The only way to read an itertools.count without advancing it is its documented repr.
        return int(repr(self._count)[len("count(") : -1])

    def add_repeats(self, repeats: CallCounter, calls: int) -> None:
        """From now on each tick of `repeats` counts as so many calls."""
        ended, others = self._repeats
        self._repeats = (ended, (*others, (repeats, calls)))

    def end_repeats(self, repeats: CallCounter) -> None:
        """`repeats` will not tick any more: its calls so far become a number."""
        ended, others = self._repeats
        ended += sum(calls * repeats.own for one, calls in others if one is repeats)
        self._repeats = (ended, tuple(pair for pair in others if pair[0] is not repeats))


class RecordedCalls:
    """The calls of a step that can be run again as one: see `BoundOps.recorded_calls`."""

    __slots__ = ("_counters", "_repeats", "repeat")

    def __init__(self) -> None:
        self._counters: tuple[CallCounter, ...] = ()
        self._repeats = CallCounter()
        self.repeat: Callable[[], int] = self._repeats.tick
        """Counts every call of the step once more."""

    def record(self, calls: Mapping[CallCounter, int]) -> None:
        self._counters = tuple(calls)
        for counter, times in calls.items():
            counter.add_repeats(self._repeats, times)

    def end(self) -> None:
        """The step is not run again; what it counted stays counted."""
        for counter in self._counters:
            counter.end_repeats(self._repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCount:
    """Calls of one call site through one implementation in one token range."""

    site: str
    op: str
    phase: str
    implementation: str
    tier: str
    tokens: TokenRange
    calls: int


@dataclass(frozen=True, slots=True)
class _Bound:
    site: str
    planned: PlannedOp
    counter: CallCounter


class BoundOps:
    """Binds one rank's call sites of a plan in this process, and reports what was called."""

    def __init__(
        self,
        plan: Plan,
        rank: int = 0,
        *,
        wrap: WrapKernel | None = None,
        observe: Observe | None = None,
        is_looking: Callable[[], bool] | None = None,
    ) -> None:
        """All are for an audit, which looks inside calls: wrap(site, implementation, kernel) gives
        the kernel to call instead, observe(binding, kernel) a call that gets the number of tokens
        as well; is_looking says whether calls that are made now are looked at, without it all are.
        """
        self._plan = plan
        self._wrap, self._observe, self._is_looking = wrap, observe, is_looking
        self._bound: list[_Bound] = []
        self._loaded: dict[str, Bind] = {}
        self._by_site: dict[tuple[str, str], list[PlannedOp]] = {}
        for op in plan.ops:
            if rank not in op.site.ranks:
                continue
            for name in op.site.names():
                self._by_site.setdefault((name, op.site.request.phase), []).append(op)

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def is_replayable(self) -> bool:
        """Whether calls may be replayed as one now: nobody looks inside."""
        if self._is_looking is not None:
            return not self._is_looking()
        return self._wrap is None and self._observe is None

    @contextmanager
    def recorded_calls(self) -> Iterator[RecordedCalls]:
        """Notes which calls are made meanwhile, by one thread, so that `repeat` counts them again:
        for steps that are run as one call, whose kernels are those of these calls."""
        before = [bound.counter.own for bound in self._bound]
        recorded = RecordedCalls()
        yield recorded
        calls = {
            bound.counter: bound.counter.own - count
            for bound, count in zip(self._bound, before, strict=True)
        }
        recorded.record({counter: times for counter, times in calls.items() if times})

    def most_tokens(self, site: str, phase: str = "any") -> int:
        """The most tokens that the plan has a call site for, 0 if it has not: a site that a joined
        one replaces, or a joined one that the plan did not take (see `hal.joins`)."""
        ops = self._by_site.get((site, phase), ())
        return max((op.tokens.high for op in ops), default=0)

    def bind(self, site: str, phase: str = "any", **static: Any) -> BoundOp:
        """The callable of one call site.

        static: the load-time arguments of the op (weight, bias, scale, group…). Raises BindingError
        if the plan has no such site, the site is bound already, or the chosen implementation
        refuses the arguments: it never takes another one instead.
        """
        planned = sorted(self._by_site.get((site, phase), ()), key=lambda op: op.tokens)
        who = f"binding of {site}" + ("" if phase == "any" else f" ({phase})")
        if not planned:
            known = sorted({f"{n} ({p})" for n, p in self._by_site})
            raise BindingError(who, "a call site of the plan", "no such site", f"known: {known}")
        if any(b.site == site and b.planned.site.request.phase == phase for b in self._bound):
            raise BindingError(who, "one binding a site", "it is bound already", "bind it once")
        _check_ranges(who, planned)
        with recorded_code() as code:
            kernels = self._kernels(who, planned, static)
        if self._wrap is not None:
            kernels = [
                self._wrap(site, op.choice.name, kernel)
                for op, kernel in zip(planned, kernels, strict=True)
            ]
        counters = [CallCounter() for _ in planned]
        self._bound += [
            _Bound(site, op, counter) for op, counter in zip(planned, counters, strict=True)
        ]
        ranges = [op.tokens for op in planned]
        if self._observe is not None:
            parts = [
                Binding(site=site, planned=op, static=static, code=tuple(code)) for op in planned
            ]
            return _observed(who, ranges, list(map(self._observe, parts, kernels)), counters)
        if len(ranges) == 1:
            return _single(who, ranges[0], kernels[0], counters[0])
        if len(ranges) == 2:
            return _two(who, ranges, kernels, counters)
        if len(ranges) == 3:
            return _three(who, ranges, kernels, counters)
        return _several(who, ranges, kernels, counters)

    def _kernels(
        self, who: str, planned: Sequence[PlannedOp], static: Mapping[str, Any]
    ) -> list[Kernel]:
        """One kernel per range; ranges with the same choice share one, which packs once."""
        kernels: dict[str, Kernel] = {}
        for name in dict.fromkeys(op.choice.name for op in planned):
            parts = [op for op in planned if op.choice.name == name]
            tokens = TokenRange(parts[0].tokens.low, parts[-1].tokens.high)
            kernels[name] = self._load(who, parts[0], tokens, static)
        return [kernels[op.choice.name] for op in planned]

    def _load(
        self, who: str, planned: PlannedOp, tokens: TokenRange, static: Mapping[str, Any]
    ) -> Kernel:
        choice = planned.choice
        bind = self._loaded.get(choice.name)
        try:
            if bind is None:
                bind = self._loaded[choice.name] = choice.load()
            kernel = bind(planned.site.request.with_tokens(tokens), **static)
            if not callable(kernel):
                raise TypeError(f"required a callable kernel, found {type(kernel).__name__}")
            return kernel
        except Exception as error:
            raise BindingError(
                who,
                f"{choice.name} to load and take the arguments it said it supports",
                f"{type(error).__name__}: {error}",
                f"report it to {choice.distribution}; to run meanwhile, choose another candidate "
                f"with --use {planned.site.request.label}=NAME",
            ) from error

    def unbound_sites(self) -> list[str]:
        """Sites of the plan that nothing has bound (a plan and a model that disagree)."""
        bound = {(b.site, b.planned.site.request.phase) for b in self._bound}
        return sorted(f"{site} ({phase})" for site, phase in self._by_site.keys() - bound)

    def counts(self) -> Iterator[CallCount]:
        """Calls so far, one row per call site and token range."""
        for bound in self._bound:
            request, choice = bound.planned.site.request, bound.planned.choice
            yield CallCount(
                site=bound.site,
                op=request.label.removesuffix(f".{request.phase}"),
                phase=request.phase,
                implementation=choice.name,
                tier=choice.tier.label,
                tokens=bound.planned.tokens,
                calls=bound.counter.value,
            )


def _check_ranges(who: str, planned: Sequence[PlannedOp]) -> None:
    """Two requests under one name would hide each other; a gap would be a call without a plan."""
    for below, above in pairwise(planned):
        if below.site != above.site or below.tokens.high + 1 != above.tokens.low:
            raise BindingError(
                who,
                "one request whose token ranges follow each other",
                f"{below.tokens} and {above.tokens} tokens of {below.site.request.arguments()} "
                f"and {above.site.request.arguments()}",
                "give the call sites different names, or plan them again",
            )


def _beyond(who: str, low: int, high: int, num_tokens: int) -> BindingError:
    return BindingError(
        who,
        f"{low} to {high} tokens a call, which is what was planned",
        str(num_tokens),
        "plan with limits that cover it (max_num_batched_tokens, max_num_seqs)",
    )


def _single(who: str, tokens: TokenRange, kernel: Kernel, counter: CallCounter) -> BoundOp:
    tick, low, high = counter.tick, tokens.low, tokens.high

    def call(num_tokens: int, *args: Any) -> Any:
        if not low <= num_tokens <= high:
            raise _beyond(who, low, high, num_tokens)
        tick()
        return kernel(*args)

    return call


def _two(
    who: str,
    ranges: Sequence[TokenRange],
    kernels: Sequence[Kernel],
    counters: Sequence[CallCounter],
) -> BoundOp:
    low, border, high = ranges[0].low, ranges[0].high, ranges[1].high
    low_tick, high_tick = (counter.tick for counter in counters)
    low_kernel, high_kernel = kernels

    def call(num_tokens: int, *args: Any) -> Any:
        if low <= num_tokens <= border:
            low_tick()
            return low_kernel(*args)
        if border < num_tokens <= high:
            high_tick()
            return high_kernel(*args)
        raise _beyond(who, low, high, num_tokens)

    return call


def _three(
    who: str,
    ranges: Sequence[TokenRange],
    kernels: Sequence[Kernel],
    counters: Sequence[CallCounter],
) -> BoundOp:
    # Comparisons in place of a search: most plans have at most three ranges.
    low, first, second, high = ranges[0].low, ranges[0].high, ranges[1].high, ranges[2].high
    low_tick, middle_tick, high_tick = (counter.tick for counter in counters)
    low_kernel, middle_kernel, high_kernel = kernels

    def call(num_tokens: int, *args: Any) -> Any:
        if low <= num_tokens <= first:
            low_tick()
            return low_kernel(*args)
        if first < num_tokens <= second:
            middle_tick()
            return middle_kernel(*args)
        if second < num_tokens <= high:
            high_tick()
            return high_kernel(*args)
        raise _beyond(who, low, high, num_tokens)

    return call


def _several(
    who: str,
    ranges: Sequence[TokenRange],
    kernels: Sequence[Kernel],
    counters: Sequence[CallCounter],
) -> BoundOp:
    limits = [r.high for r in ranges]
    table = [(c.tick, kernel) for c, kernel in zip(counters, kernels, strict=True)]
    low, high = ranges[0].low, ranges[-1].high

    def call(num_tokens: int, *args: Any) -> Any:
        if not low <= num_tokens <= high:
            raise _beyond(who, low, high, num_tokens)
        tick, kernel = table[bisect_left(limits, num_tokens)]
        tick()
        return kernel(*args)

    return call


def _observed(
    who: str,
    ranges: Sequence[TokenRange],
    calls: Sequence[BoundOp],
    counters: Sequence[CallCounter],
) -> BoundOp:
    """As `_several`, with calls that get the number of tokens first."""
    limits = [r.high for r in ranges]
    table = [(c.tick, observed) for c, observed in zip(counters, calls, strict=True)]
    low, high = ranges[0].low, ranges[-1].high
    first_tick, first = table[0]

    def single(num_tokens: int, *args: Any) -> Any:
        if not low <= num_tokens <= high:
            raise _beyond(who, low, high, num_tokens)
        first_tick()
        return first(num_tokens, *args)

    def several(num_tokens: int, *args: Any) -> Any:
        if not low <= num_tokens <= high:
            raise _beyond(who, low, high, num_tokens)
        tick, observed = table[bisect_left(limits, num_tokens)]
        tick()
        return observed(num_tokens, *args)

    return single if len(ranges) == 1 else several
