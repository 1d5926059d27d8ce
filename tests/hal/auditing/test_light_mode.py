"""Which steps the light mode observes, what it counts of them, and that it still finds losses."""

from __future__ import annotations

import pytest
import torch

import hal
from hal.auditing import steps
from hal.auditing.steps import StepWatch


class Watched:
    """A light watch whose observing costs what a test says, of a module whose calls it counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step_ns: int, cost_ns: int) -> None:
        self.now_ns = 0
        self.spent_ns = 0
        self.is_on = True
        self.seen: list[int] = []
        self.step_ns = step_ns
        self.cost_ns = cost_ns
        monkeypatch.setattr(steps, "perf_counter_ns", lambda: self.now_ns)
        self.watch = StepWatch(
            self.on, self.off, lambda: self.spent_ns, lambda: True, is_light=True
        )
        owner = self

        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return owner.step(x)

        self.model = Model()
        self.watch.found_module(self.model)  # as if the first op of the first call had run
        self.step(torch.ones(1))

    def on(self) -> None:
        self.is_on = True

    def off(self) -> None:
        self.is_on = False

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.now_ns += self.step_ns + self.cost_ns * self.is_on
        self.spent_ns += self.cost_ns * self.is_on
        self.seen.append(self.is_on)
        return x

    def run(self, shapes: list[tuple[int, ...]]) -> list[int]:
        """Numbers of the steps that were observed, the first being 0."""
        for shape in shapes:
            self.model(torch.ones(shape))
        self.watch.restore()
        return [number for number, is_on in enumerate(self.seen) if is_on]


def test_the_first_two_and_one_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = Watched(monkeypatch, step_ns=1000, cost_ns=10_000_000)
    shapes = [(1, 16)] * 3 + [(1, 1)] * 6 + [(1, 2)]
    assert dear.run(shapes) == [0, 1, 4]
    assert dear.watch.steps == dear.watch.num_observed == 3
    assert dear.watch.num_cycles == len(shapes) + 1


def test_what_was_always_observed_counts_into_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(monkeypatch, step_ns=1_000_000, cost_ns=1_000_000)
    observed = one.run([(1, 1)] * 999)
    assert observed[:2] == [0, 1]
    # Two steps and a third are three times the cost of one: after as much time as allows that.
    assert observed[2] >= 3 * steps._UNSEEN / steps.LIGHT_SHARE - 3
    assert len(observed) > 5
    assert one.spent_ns * steps._UNSEEN <= steps.LIGHT_SHARE * one.now_ns


def test_a_loss_of_each_step_is_found_among_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules ask what happens in every step, and must be told of the steps that were seen."""
    monkeypatch.setattr(steps, "LIGHT_SHARE", 0.0)  # the first two, however slow the machine is

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(96, 96, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.to(torch.float32)

    model = Model().eval()
    with hal.audit(mode="light") as report, torch.inference_mode():
        for _ in range(300):
            model(torch.randn(64, 96))
    note = next(note for note in report.result.notes if note.startswith("light mode"))
    assert note.startswith("light mode: 2 of 300 cycles")
    assert report.trace.steps == 2
    products = [op for op in report.trace.ops if op.op_class == "gemm"]
    assert sum(op.calls for op in products) == 2
    assert {finding.rule for finding in report.findings} >= {"cast-each-call"}


def _keys_are_settled() -> bool:
    """An op that has no tensor among its arguments fails if torch looks for a mode in vain."""
    return torch.empty(2).shape == (2,) and torch._C._len_torch_dispatch_stack() == 0


def test_the_end_of_inference_mode_leaves_no_key_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LIGHT_SHARE", 0.0)
    model = torch.nn.Linear(4, 4)
    end = torch.inference_mode.__exit__
    with hal.audit(mode="light") as report:
        with torch.inference_mode():
            for _ in range(5):
                model(torch.ones(1, 4))
        torch.ones(3)  # not observed, and not a failure
        model(torch.ones(1, 4))
    assert _keys_are_settled()
    assert report.trace.steps == 2
    assert torch.inference_mode.__exit__ is end


def test_an_audit_that_ends_within_inference_mode() -> None:
    end = torch.inference_mode.__exit__
    with hal.audit() as report, torch.inference_mode():
        torch.ones(2)
        report.finish()
        torch.ones(2)
    assert _keys_are_settled()
    assert torch.inference_mode.__exit__ is end


def test_a_cycle_that_begins_within_inference_mode_goes_on_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "LIGHT_SHARE", 0.0)
    model = torch.nn.Linear(4, 4)
    with hal.audit(mode="light") as report:
        for _ in range(4):
            model(torch.ones(1, 4))
        with torch.inference_mode():
            model(torch.ones(2, 4))  # another shape: observed from here on
        torch.ones(3) + 1
    added = [op for op in report.trace.ops if op.name == "aten::add"]
    assert [op.calls for op in added] == [1]
    assert report.trace.steps == 3


def test_nothing_comes_or_goes_within_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LIGHT_SHARE", 0.0)
    model = torch.nn.Linear(4, 4)
    with hal.audit(mode="light"):
        for _ in range(3):
            torch.vmap(model)(torch.ones(3, 4))
        torch.func.grad(lambda x: model(x).sum())(torch.ones(4))
        model(torch.ones(1, 4))
        torch.ones(3)
    assert _keys_are_settled()
