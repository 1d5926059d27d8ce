"""Traces of children: what `trace_to_json` writes comes back, and nothing else is taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hal.auditing.trace import Trace
from hal.auditing.trace_json import trace_from_json, trace_to_json
from observed import observe


@pytest.fixture(scope="module")
def trace() -> Trace:
    layer = torch.nn.Linear(3, 3)

    def program() -> None:
        layer(torch.randn(2, 3).double().float()).sum().backward()
        torch.cat([torch.ones(1), torch.ones(2)])
        torch.use_deterministic_algorithms(True)
        try:
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        except RuntimeError:
            torch.use_deterministic_algorithms(False)

    return observe(program)


def test_a_trace_survives(trace: Trace) -> None:
    again, extra = trace_from_json(trace_to_json(trace, {"a": [1]}))
    assert extra == {"a": [1]}
    for name in ("machine", "functions", "swallowed", "settings_places", "settings", "wall_us"):
        assert getattr(again, name) == getattr(trace, name), name
    assert [op.inputs for op in again.ops] == [op.inputs for op in trace.ops]
    assert again.settings_places
    assert again.swallowed


def test_numbers_that_are_none_come_back_as_text() -> None:
    program = observe(lambda: torch.full((2, 2), float("-inf")))
    again, _ = trace_from_json(trace_to_json(program))
    (call,) = [call for call in again.functions if call.name == "full"]
    assert call.arguments["fill_value"] == "-inf"


Change = Callable[[dict[str, Any]], object]


def _replace_first_shape(document: dict[str, Any]) -> None:
    op = next(op for op in document["ops"] if op["inputs"])
    document["ops"].insert(0, op)
    op["inputs"][0]["shape"] = [2, "3"]


def _spoil_an_argument(document: dict[str, Any]) -> None:
    call = next(call for call in document["functions"] if call["name"] == "linear")
    call["arguments"]["weight"]["tensor fact"]["device"] = 3


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_replace_first_shape, "ops[0].inputs[0].shape[1]: "),
        (_spoil_an_argument, "device: "),
        (lambda d: d["ops"][1].update(calls=-1), "ops[1].calls: "),
        (lambda d: d["ops"][1].update(calls=True), "ops[1].calls: "),
        (lambda d: d["ops"][0].update(time_us="1"), "ops[0].time_us: "),
        (lambda d: d["ops"][0].update(op_class="magic"), "ops[0].op_class: "),
        (lambda d: d["ops"][0].update(region=None), "ops[0].region: "),
        (lambda d: d["ops"][0].update(further=1), "ops[0].further: "),
        (lambda d: d["ops"][0].update(call=9999), "ops[0].call: 9999"),
        (lambda d: d["ops"].append("an op"), "ops["),
        (
            lambda d: d["functions"][0].update(location={"file": "x"}),
            "functions[0].location.line: ",
        ),
        (lambda d: d["functions"][0]["leaves"].update(x="many"), "functions[0].leaves.x: "),
        (lambda d: d["settings"].update(mkldnn=False), "settings.mkldnn: "),
        (lambda d: d["graph_breaks"].update(reason=-1), "graph_breaks.reason: "),
        (lambda d: d["swallowed"][0].pop("text"), "swallowed[0].text: "),
        (lambda d: d.update(processes=0), "processes: "),
        (lambda d: d["machine"].update(label=3), "machine.label: "),
        (lambda d: d.pop("ops") and d.update(opps=[]), "opps: "),
    ],
)
def test_what_is_wrong_is_found_and_located(trace: Trace, change: Change, where: str) -> None:
    document = json.loads(trace_to_json(trace))
    change(document["trace"])
    with pytest.raises(ValueError, match=r".") as caught:
        trace_from_json(json.dumps(document))
    assert str(caught.value).startswith(where)


@pytest.mark.parametrize("text", ["", "[]", '"x"', "{", "[" * 100_000, '{"extra": {}}', "null"])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(ValueError, match=r": "):
        trace_from_json(text)
