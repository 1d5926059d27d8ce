"""docs/plugins.md documents every hook as it is, and its code works."""

from __future__ import annotations

import inspect
import os
import re
import types
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from document_blocks import ROOT, blocks_of
from hal import hookspecs
from hal.device import Confidence, DeviceSpec
from hal.host import RecordedHost
from hal.ops.gemm import GemmRequest
from hal.ops.request import TokenRange
from hal.plugins.calls import Plugin
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import register_plugin
from hal.selection import SelectionRules, select

DOCUMENT = ROOT / "docs" / "plugins.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
HOST = RecordedHost(environment={"EXAMPLE_ACCELERATOR": "1"}, packages={"torch": "2"})


def test_every_hook_is_documented_with_its_arguments() -> None:
    documented = re.findall(r"^### `(hal_\w+\([^)]*\))`$", TEXT, re.MULTILINE)
    hooks = {name: value for name, value in vars(hookspecs).items() if name.startswith("hal_")}
    wanted = [f"{n}({', '.join(inspect.signature(h).parameters)})" for n, h in hooks.items()]
    assert sorted(documented) == sorted(wanted)


def test_every_hook_has_code() -> None:
    parts = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    for part in parts:
        name = re.match(r"`(\w+)", part)
        assert name is not None
        assert f"def {name[1]}(" in part, name[1]


@pytest.fixture(scope="module")
def plugin() -> Plugin:
    """All Python blocks of the document, in order, as one plug-in."""
    blocks = [b for b in blocks_of(DOCUMENT) if b.language == "python"]
    future = "from __future__ import annotations\n"
    code = future + "\n\n".join(b.text.replace(future, "") for b in blocks)
    # `_norm` is the one part of the example that the document leaves out.
    code += (
        "\n\ndef _norm():\n    return replace(_gemm(), name='example.norm.rms', op='norm.rms')\n"
    )
    module = types.ModuleType("documented_example")
    exec(compile(code, str(DOCUMENT), "exec"), module.__dict__)
    entry = PluginEntry("hal-example", "example", "documented_example", "0.1.0")
    return Plugin(register_plugin(entry, module))


@pytest.fixture(scope="module")
def device(plugin: Plugin) -> DeviceSpec:
    (detected,) = plugin.detect_devices(HOST)
    return plugin.describe_device(detected, HOST)


def test_detects_only_what_is_there(plugin: Plugin) -> None:
    assert plugin.detect_devices(RecordedHost()) == ()
    assert [d.device_id for d in plugin.detect_devices(HOST)] == ["example:0"]


def test_candidate_computes_the_reference(plugin: Plugin, device: DeviceSpec) -> None:
    import torch

    from hal.ops.formats import FORMATS

    (candidate,) = plugin.kernel_candidates("gemm", device)
    request = GemmRequest(
        n=48, k=32, dtype="float32", weight_format=FORMATS["float32"], tokens=TokenRange(1, 8)
    )
    decision = select(request, [candidate], SelectionRules(explicit={}))
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
    x = torch.randn(5, 32, generator=generator)
    weight = torch.randn(48, 32, generator=generator)
    got = decision.choice.load()(request, weight=weight)(x)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)
    (reason,) = candidate.not_supported_reasons(replace(request, dtype="bfloat16"))
    assert (reason.what, reason.found) == ("dtype", "bfloat16")
    plugin.decision_made(decision)


def test_policy(plugin: Plugin, device: DeviceSpec) -> None:
    assert not plugin.device_policy(device).disabled
    old = replace(device, attributes={"driver": "1.0"})
    assert list(plugin.device_policy(old).disabled) == ["example.norm.*"]


def test_runtime_self_test_and_measurement(plugin: Plugin, device: DeviceSpec) -> None:
    runtime = plugin.create_runtime(device)
    assert runtime.torch_device.type == "cpu"
    assert [result.passed for result in plugin.self_test(runtime)] == [True]
    measured = plugin.measure_device(device)
    assert measured.memory_bandwidth is not None
    assert measured.memory_bandwidth > 1e6
    assert measured.evidence["memory_bandwidth"].confidence is Confidence.MEASURED


def test_missing_dependency(plugin: Plugin) -> None:
    assert plugin.missing_dependencies(HOST) == ()
    bare = RecordedHost(environment={"EXAMPLE_ACCELERATOR": "1"})
    assert [item.software for item in plugin.missing_dependencies(bare)] == ["torch"]


def test_command(plugin: Plugin) -> None:
    app: Any = typer.Typer()
    plugin.register_commands(app)
    app.callback()(lambda: None)  # with one command only, typer would not take its name
    result = CliRunner().invoke(app, ["example-hello"])
    assert result.output == "the example is here\n"
