"""Compiled functions stay compiled under an audit, as they were, and are said to be so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from observed import calls_of, observe, ops_named


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before or after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class CountingBackend:
    """Runs the graph as it is, and counts compilations."""

    def __init__(self) -> None:
        self.compilations = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compilations += 1
        forward: Callable[..., Any] = graph.forward
        return forward


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())


def test_compiled_before_is_not_compiled_again() -> None:
    backend = CountingBackend()
    compiled = torch.compile(_model(), backend=backend)
    x = torch.randn(3, 8)
    expected = compiled(x)
    trace = observe(lambda: compiled(x))
    assert backend.compilations == 1
    assert {op.region for op in trace.ops} == {"compiled"}
    assert torch.equal(compiled(x), expected)
    assert backend.compilations == 1
    assert trace.steps == 1


@pytest.mark.parametrize("backend", ["counting", "aot_eager"])
def test_compiled_within_and_used_after(backend: str) -> None:
    counting = CountingBackend()
    compiled = torch.compile(_model(), backend=counting if backend == "counting" else backend)
    x = torch.randn(3, 8)

    def program() -> None:
        for _ in range(3):
            compiled(x)

    trace = observe(program)
    assert {op.region for op in ops_named(trace, "addmm")} == {"compiled"}
    assert calls_of(trace)["addmm"] == 3
    assert trace.graph_breaks == {}
    assert trace.fallbacks == []
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(x)


def test_training_step_compiled() -> None:
    compiled = torch.compile(_model(), backend="aot_eager")
    trace = observe(lambda: compiled(torch.randn(3, 8)).sum().backward())
    assert {op.region for op in trace.ops if op.name == "aten::gelu_backward"} == {"compiled"}


def test_multihead_attention_compiled_before_keeps_its_guards() -> None:
    backend = CountingBackend()
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    compiled = torch.compile(layer, backend=backend)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = compiled(x)
        before = backend.compilations
        with_audit: list[torch.Tensor] = []
        observe(lambda: with_audit.append(compiled(x)))
    assert backend.compilations == before
    assert torch.equal(with_audit[0], expected)


def test_graph_break_with_its_place() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print(end="")
        return F.softmax(y.cos() @ y.t(), -1)

    backend = CountingBackend()
    compiled = torch.compile(program, backend=backend)
    x = torch.randn(4, 4)
    trace = observe(lambda: compiled(x))
    assert backend.compilations == 2
    (reason,) = trace.graph_breaks
    assert "print" in reason
    (event,) = trace.compile_events
    assert event.kind == "graph-break"
    assert any(name.startswith("program") for name in trace.compiled)
    assert {op.region for op in trace.ops if op.name == "aten::mm"} == {"compiled"}


def test_errors_of_the_compiler_that_are_suppressed() -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    compiled = torch.compile(program, backend=refuse)
    with torch._dynamo.config.patch(suppress_errors=True):
        trace = observe(lambda: compiled(torch.randn(4)))
    assert any("no such kernel" in reason for reason in trace.fallbacks)
    assert {event.kind for event in trace.compile_events} == {"eager"}
    assert {op.region for op in trace.ops if op.name == "aten::sin"} == {"eager"}


def test_recompile_limit() -> None:
    def program(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n if n % 2 else x + n

    compiled = torch.compile(program, backend=CountingBackend(), dynamic=False)

    def many() -> None:
        for n in range(6):
            compiled(torch.ones(2), n)

    with torch._dynamo.config.patch(recompile_limit=3):
        trace = observe(many)
    events = [event for event in trace.compile_events if event.kind == "recompile-limit"]
    assert len(events) == 1
    assert events[0].function == "program"


def test_stance_that_says_eager() -> None:
    compiled = torch.compile(lambda x: x.sin(), backend=CountingBackend())
    with torch.compiler.set_stance("force_eager"):
        trace = observe(lambda: compiled(torch.ones(3)))
    assert [event.kind for event in trace.compile_events] == ["eager"]
    assert "force_eager" in trace.fallbacks[0]


def test_disabled_part_is_observed_as_python() -> None:
    @torch._dynamo.disable
    def apart(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, -1)

    def program(x: torch.Tensor) -> torch.Tensor:
        return apart(x.sin()).cos()

    compiled = torch.compile(program, backend="aot_eager")
    trace = observe(lambda: compiled(torch.randn(2, 3)))
    regions = {op.name: op.region for op in trace.ops}
    assert regions["aten::sin"] == "compiled"
    assert regions["aten::_softmax"] == "eager"
    assert regions["aten::cos"] == "compiled"


def test_graph_breaks_are_at_the_lines_that_broke_the_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print(end="")
        z = y.cos()
        print(end="")
        return z + 1

    compiled = torch.compile(program, backend="aot_eager")
    trace = observe(lambda: compiled(torch.randn(4)))
    first = program.__code__.co_firstlineno
    places = [event.location for event in trace.compile_events]
    assert sorted(place.line for place in places if place) == [first + 2, first + 4]
    assert {event.kind for event in trace.compile_events} == {"graph-break"}


@pytest.mark.parametrize("when", ["within", "before"])
def test_a_backend_that_runs_the_graph_as_python(when: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def ask() -> Callable[..., Any]:
        return torch.compile(program, backend="eager")

    early = ask()

    def run() -> None:
        compiled = ask() if when == "within" else early
        for _ in range(2):
            compiled(torch.ones(3))

    (event,) = observe(run).compile_events
    assert (event.kind, event.calls) == ("eager", 2)
    assert "eager" in event.reason
    assert event.location is not None
    asked, called = ask.__code__.co_firstlineno + 1, run.__code__.co_firstlineno + 3
    assert event.location.line == (asked if when == "within" else called)


def test_a_compiler_that_is_switched_off() -> None:
    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
    with torch._dynamo.config.patch(disable=True):
        trace = observe(lambda: compiled(torch.ones(3)))
    assert [event.kind for event in trace.compile_events] == ["eager"]
    assert "disable" in trace.fallbacks[0]


def test_a_backend_of_the_program_is_no_loss_whatever_its_name() -> None:
    def eager(graph: Any, inputs: Any) -> Callable[..., Any]:
        forward: Callable[..., Any] = graph.forward
        return forward

    asked = torch._dynamo.optimize

    def run() -> None:
        torch._dynamo.optimize(eager)(lambda x: x.sin())(torch.ones(3))

    assert observe(run).compile_events == []
    assert torch._dynamo.optimize is asked
    assert torch._dynamo.eval_frame.optimize is asked


def test_kernels_that_the_compiler_generated_are_counted() -> None:
    """By inductor for the processor: one fused kernel, and the product that it calls."""

    @torch.compile
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight).softmax(-1) + 1

    x, weight = torch.randn(32, 64), torch.randn(64, 48)

    def run() -> None:
        for _ in range(3):
            program(x, weight)

    trace = observe(run)
    generated = [op for op in trace.ops if op.name.startswith("inductor::cpp_fused")]
    assert sum(op.calls for op in generated) == 3
    assert {op.region for op in generated} == {"compiled"}
    assert all(op.time_us > 0 and op.bytes >= 2 * 4 * 32 * 48 for op in generated)
    assert all(op.location is not None for op in generated)
    assert calls_of(trace)["mm"] == 3
    again = observe(run)  # loaded before this audit
    assert sum(op.calls for op in again.ops if op.name.startswith("inductor::")) == 3
    before = calls_of(again)
    program(x, weight)
    assert calls_of(again) == before
