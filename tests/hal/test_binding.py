"""Bound ops: exact counters, exact borders, and no call that the plan does not cover."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import hal.planner
from hal.binding import BoundOps, CallCount, CallCounter
from hal.candidates import KernelCandidate
from hal.errors import BindingError
from hal.ops import OpRequest, TokenRange
from hal.ops.attention import AttentionRequest
from hal.plan import OpSite, Plan, PlannedOp
from hal.selection import SelectionRules, select

Bind = Callable[..., BoundOps]


def planned(site: OpSite, parts: Sequence[tuple[int, int, KernelCandidate]]) -> list[PlannedOp]:
    """One planned op per (low, high, candidate)."""
    ops = []
    for low, high, chosen in parts:
        tokens = TokenRange(low, high)
        decision = select(site.request.with_tokens(tokens), [chosen], SelectionRules(explicit={}))
        ops.append(PlannedOp(site=site, tokens=tokens, decision=decision))
    return ops


def plan_of(ops: Sequence[PlannedOp]) -> Plan:
    return Plan(model={}, devices=[], settings={}, kv_bytes_per_token=1, ops=ops)


def rows(ops: BoundOps) -> list[tuple[str, str, str, int]]:
    return [(c.site, c.implementation, str(c.tokens), c.calls) for c in ops.counts()]


BORDERS = {
    "1": [(1, 64)],
    "1 that starts at 5": [(5, 64)],
    "2": [(1, 8), (9, 64)],
    "2 of single sizes": [(1, 1), (2, 2)],
    "3": [(1, 1), (2, 16), (17, 64)],
    "3 that start at 4": [(4, 8), (9, 9), (10, 12)],
    "5": [(1, 1), (2, 2), (3, 8), (9, 32), (33, 64)],
}


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
def test_ranges_dispatch_exactly_and_count_exactly(
    candidate: Any, gemm: Any, borders: list[tuple[int, int]]
) -> None:
    site = OpSite(site="x", request=gemm())
    parts = [(low, high, candidate(f"c{i}")) for i, (low, high) in enumerate(borders)]
    # The order of the plan's ops must not matter.
    ops = BoundOps(plan_of(planned(site, parts)[::-1]))
    op = ops.bind("x")
    want = [0] * len(borders)
    for tokens in range(borders[0][0], borders[-1][1] + 1):
        index = next(i for i, (low, high) in enumerate(borders) if low <= tokens <= high)
        assert op(tokens, "x", tokens) == (f"c{index}", "x", tokens)
        want[index] += 1
    low, high = borders[0][0], borders[-1][1]
    for beyond in (high + 1, high + 1000, low - 1, 0, -1):
        with pytest.raises(BindingError) as raised:
            op(beyond, "x")
        assert raised.value.who == "binding of x"
        assert f"{low} to {high} tokens" in raised.value.required
        assert raised.value.found == str(beyond)
    assert [c.calls for c in ops.counts()] == want
    assert [(c.tokens.low, c.tokens.high) for c in ops.counts()] == borders


@pytest.mark.parametrize("num_ranges", [1, 2, 3, 4])
def test_counters_are_exact_under_threads(candidate: Any, gemm: Any, num_ranges: int) -> None:
    width = 64 // num_ranges
    sizes = width * num_ranges
    parts = [(i * width + 1, (i + 1) * width, candidate(f"c{i}")) for i in range(num_ranges)]
    ops = BoundOps(plan_of(planned(OpSite(site="x", request=gemm()), parts)))
    op = ops.bind("x")
    start = threading.Barrier(8)

    def call() -> None:
        start.wait()
        for i in range(10_000):
            op(i % sizes + 1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    of_one_thread = [
        sum((i % sizes) // width == r for i in range(10_000)) for r in range(num_ranges)
    ]
    assert [c.calls for c in ops.counts()] == [8 * n for n in of_one_thread]


def test_reading_a_counter_does_not_count() -> None:
    counter = CallCounter()
    assert (counter.value, counter.value) == (0, 0)
    for _ in range(3):
        counter.tick()
    assert (counter.value, counter.value) == (3, 3)


def test_a_call_that_fails_is_counted(candidate: Any, gemm: Any) -> None:
    def fail(*args: Any) -> None:
        raise ArithmeticError("the kernel's own error")

    broken = candidate("c", load=lambda: lambda request: fail)
    ops = BoundOps(plan_of(planned(OpSite(site="x", request=gemm()), [(1, 8, broken)])))
    with pytest.raises(ArithmeticError, match="the kernel's own error"):
        ops.bind("x")(3)
    assert [c.calls for c in ops.counts()] == [1]


def test_counts_have_a_row_per_layer_phase_and_range(candidate: Any, gemm: Any) -> None:
    a, b = candidate("a"), candidate("b")
    projection = OpSite(site="l.*.proj", request=gemm(), layers=(0, 1))
    arguments = {
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "v_head_dim": 4,
        "block_size": 4,
        "dtype": "float32",
        "kv_dtype": "float32",
    }
    phases = [
        OpSite(site="l.*.attn", request=AttentionRequest(phase=phase, **arguments), layers=(0,))  # type: ignore[arg-type]  # by name
        for phase in ("prefill", "decode")
    ]
    ops = BoundOps(
        plan_of(
            [
                *planned(projection, [(1, 4, a), (5, 64, b)]),
                *(op for site in phases for op in planned(site, [(1, 1, a)])),
            ]
        )
    )
    assert ops.unbound_sites() == [
        "l.0.attn (decode)",
        "l.0.attn (prefill)",
        "l.0.proj (any)",
        "l.1.proj (any)",
    ]
    first, second = ops.bind("l.0.proj"), ops.bind("l.1.proj")
    decode, _ = ops.bind("l.0.attn", "decode"), ops.bind("l.0.attn", "prefill")
    assert ops.unbound_sites() == []
    first(3)
    first(5)
    first(6)
    second(64)
    decode(1)
    assert rows(ops) == [
        ("l.0.proj", "a", "1-4", 1),
        ("l.0.proj", "b", "5-64", 2),
        ("l.1.proj", "a", "1-4", 0),
        ("l.1.proj", "b", "5-64", 1),
        ("l.0.attn", "a", "1", 1),
        ("l.0.attn", "a", "1", 0),
    ]
    assert list(ops.counts())[4] == CallCount(
        site="l.0.attn",
        op="attention",
        phase="decode",
        implementation="a",
        tier="tuned",
        tokens=TokenRange(1, 1),
        calls=1,
    )


def test_a_rank_binds_only_its_sites(candidate: Any, gemm: Any) -> None:
    sites = [
        OpSite(site="all", request=gemm(), ranks=(0, 1)),
        OpSite(site="split", request=gemm(n=30), ranks=(0,)),
        OpSite(site="split", request=gemm(n=34), ranks=(1,)),
        OpSite(site="sampler", request=gemm(), ranks=(0,)),
    ]
    seen: list[Any] = []

    def bind(request: Any) -> Callable[[], None]:
        seen.append(request.n)
        return lambda: None

    chosen = candidate("a", load=lambda: bind)
    plan = plan_of([op for site in sites for op in planned(site, [(1, 1, chosen)])])
    for rank, n in ((0, 30), (1, 34)):
        ops = BoundOps(plan, rank)
        ops.bind("split")
        assert seen.pop() == n
    assert ops.unbound_sites() == ["all (any)"]
    with pytest.raises(BindingError, match="no such site"):
        ops.bind("sampler")


def test_binding_twice_and_unknown_sites_are_errors(candidate: Any, gemm: Any) -> None:
    ops = BoundOps(plan_of(planned(OpSite(site="x", request=gemm()), [(1, 1, candidate("a"))])))
    with pytest.raises(BindingError, match=r"no such site\n.*known: \['x \(any\)'\]"):
        ops.bind("y")
    with pytest.raises(BindingError, match="binding of x \\(decode\\)"):
        ops.bind("x", "decode")
    ops.bind("x")
    with pytest.raises(BindingError, match="bound already"):
        ops.bind("x")
    assert len(rows(ops)) == 1


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libfast.so.3"),
        OSError("libfast.so.3: cannot open shared object file"),
        KeyError("packing"),
        ValueError("K=7"),
        MemoryError("no room to pack"),
    ],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("when", ["load", "bind"])
def test_a_chosen_candidate_that_cannot_be_bound_is_named_and_not_replaced(
    candidate: Any, gemm: Any, when: str, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    chosen = candidate("acme.fast", load=fail if when == "load" else lambda: fail)
    chosen = dataclasses.replace(chosen, distribution="acme-halstack")
    ops = BoundOps(plan_of(planned(OpSite(site="x", request=gemm()), [(1, 1, chosen)])))
    with pytest.raises(BindingError) as raised:
        ops.bind("x", weight=1)
    assert raised.value.__cause__ is error
    assert "acme.fast" in raised.value.required
    assert type(error).__name__ in raised.value.found
    assert "acme-halstack" in raised.value.remedy
    assert "--use gemm=NAME" in raised.value.remedy
    assert ops.unbound_sites() == ["x (any)"]
    assert rows(ops) == []


@pytest.mark.parametrize("static", [{"weigth": 1}, {}], ids=["misspelt", "missing"])
def test_static_arguments_that_the_op_does_not_have_are_named(
    candidate: Any, gemm: Any, static: dict[str, Any]
) -> None:
    def bind(request: OpRequest, *, weight: int) -> Callable[[], int]:
        return lambda: weight

    chosen = candidate("a", load=lambda: bind)
    ops = BoundOps(plan_of(planned(OpSite(site="x", request=gemm()), [(1, 1, chosen)])))
    with pytest.raises(BindingError, match="weig"):
        ops.bind("x", **static)


def test_what_is_not_a_kernel_is_refused_at_binding(candidate: Any, gemm: Any) -> None:
    chosen = candidate("a", load=lambda: lambda request: None)
    ops = BoundOps(plan_of(planned(OpSite(site="x", request=gemm()), [(1, 1, chosen)])))
    with pytest.raises(BindingError, match="required a callable kernel, found NoneType"):
        ops.bind("x")


def test_ranges_of_one_choice_share_one_packing(candidate: Any, gemm: Any) -> None:
    """Ranges may differ in what their losers lacked only; the weight is then held once."""
    packed: list[tuple[str, str]] = []
    loads: list[str] = []

    def loader(name: str) -> Callable[[], Any]:
        def bind(request: OpRequest, *, weight: str) -> Callable[[], str]:
            packed.append((name, str(request.tokens)))
            return lambda: name + weight

        def load() -> Any:
            loads.append(name)
            return bind

        return load

    a, b = (candidate(name, load=loader(name)) for name in "ab")
    site = OpSite(site="l.*.x", request=gemm(), layers=(0, 1))
    ops = BoundOps(plan_of(planned(site, [(1, 4, a), (5, 8, a), (9, 16, b), (17, 64, a)])))
    op = ops.bind("l.0.x", weight="!")
    ops.bind("l.1.x", weight="?")
    assert packed == [("a", "1-64"), ("b", "9-16")] * 2
    assert loads == ["a", "b"]
    assert [op(tokens) for tokens in (1, 5, 9, 17)] == ["a!", "a!", "b!", "a!"]
    assert [c.calls for c in ops.counts()] == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("first", "second", "n"), [((1, 8), (8, 64), 64), ((1, 8), (10, 64), 64), ((1, 8), (9, 64), 65)]
)
def test_a_plan_whose_ranges_overlap_leave_gaps_or_mix_requests_is_refused(
    candidate: Any, gemm: Any, first: tuple[int, int], second: tuple[int, int], n: int
) -> None:
    ops = BoundOps(
        plan_of(
            [
                *planned(OpSite(site="x", request=gemm()), [(*first, candidate("a"))]),
                *planned(OpSite(site="x", request=gemm(n=n)), [(*second, candidate("b"))]),
            ]
        )
    )
    with pytest.raises(BindingError, match="token ranges follow each other"):
        ops.bind("x")


@pytest.mark.parametrize("num_ranges", [1, 2, 3])
def test_an_audit_s_wrapper_sees_every_call_of_every_range(
    candidate: Any, gemm: Any, num_ranges: int
) -> None:
    seen: list[tuple[str, str]] = []

    def wrap(site: str, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append((site, name))
            return kernel(*args)

        return call

    parts = [(i + 1, i + 1, candidate(f"c{i}")) for i in range(num_ranges)]
    ops = BoundOps(plan_of(planned(OpSite(site="x", request=gemm()), parts)), wrap=wrap)
    op = ops.bind("x")
    for tokens in range(1, num_ranges + 1):
        op(tokens)
    assert seen == [("x", f"c{i}") for i in range(num_ranges)]
    assert [c.calls for c in ops.counts()] == [1] * num_ranges


# --- a new family ---------------------------------------------------------------------------------

NEW_FAMILY = '''
"""A family that a developer adds: y = x + a."""

from dataclasses import dataclass
from typing import ClassVar

from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftRequest(OpRequest):
    op: ClassVar[str] = "toy.shift"

    width: int


def reference(request, *, amount):
    return lambda x: [value + amount for value in x]


FAMILY = OpFamily(
    name="toy.shift",
    request_type=ShiftRequest,
    summary="Shift",
    reference=reference,
    flops=lambda request, tokens: tokens * request.width,
    bytes_moved=lambda request, tokens: 16 * tokens * request.width,
    tolerances=FLOAT_TOLERANCES,
)
'''

USE_OF_IT = """
import sys
from hal.binding import BoundOps
from hal.device import DevicePolicy, DeviceSpec
from hal.ops.shift import ShiftRequest
from hal.plan import OpSite
from hal.planner import PlanInputs, create_plan
from hal.waivers import parse_waivers
from hal_backends.reference import plugin

device = DeviceSpec(
    device_id="t:0", vendor="t", backend="t", name="t", arch="t", torch_device="cpu"
)
waivers = parse_waivers('''
[[waiver]]
op = "toy.shift"
component = "layers.*.shift"
device = "t:0"
kind = "tier"
reason = "new"
owner = "us"
expires = 2999-01-01
max_call_share = 1.0
''', "waivers")
inputs = PlanInputs(
    sites=[OpSite(site="layers.*.shift", request=ShiftRequest(width=3), layers=(0, 1))],
    device=device,
    policy=DevicePolicy(),
    candidates=lambda op, device: plugin.hal_kernel_candidates(op=op, device=device),
    waivers=waivers,
)
plan = create_plan(inputs, model={}, settings={}, kv_bytes_per_token=1)
ops = BoundOps(plan)
op = ops.bind("layers.1.shift", amount=5)
print(op(1, [1, 2, 3]), [(c.op, c.implementation, c.calls) for c in ops.counts()])
"""


def test_a_new_family_is_one_file_and_its_registration(tmp_path: Path) -> None:
    """In a copy of the package: add the file, name it in the catalogue, plan, bind and call it."""
    package = tmp_path / "hal"
    shutil.copytree(
        Path(hal.planner.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "ops" / "shift.py").write_text(NEW_FAMILY, encoding="utf-8")
    catalogue = package / "ops" / "__init__.py"
    text = catalogue.read_text(encoding="utf-8")
    registered = text.replace("    sampling,\n)", "    sampling,\n    shift,\n)").replace(
        "    sampling.FAMILY,\n", "    sampling.FAMILY,\n    shift.FAMILY,\n"
    )
    assert registered.count("shift") == 2
    catalogue.write_text(registered, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", USE_OF_IT],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "[6, 7, 8] [('toy.shift', 'reference.toy.shift', 1)]\n"
