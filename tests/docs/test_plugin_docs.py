"""docs/plugins.md documents every hook as it is, and its code works."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from document_blocks import ROOT, blocks_of, commands_of
from hal import hookspecs
from hal.device import Confidence, DeviceSpec
from hal.host import CommandOutput, LocalHost, RecordedHost
from hal.ops.attention import AttentionRequest
from hal.ops.gemm import GemmRequest
from hal.ops.request import TokenRange
from hal.ops.rope import RopeRequest
from hal.plugins.calls import Plugin
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import register_plugin
from hal.selection import SelectionRules, select
from hal.tiers import Tier

DOCUMENT = ROOT / "docs" / "plugins.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
HOST = RecordedHost(environment={"EXAMPLE_ACCELERATOR": "1"}, packages={"torch": "2"})


def test_every_hook_is_documented_with_its_arguments() -> None:
    documented = re.findall(r"^### `(hal_\w+\([^)]*\))`$", TEXT, re.MULTILINE)
    hooks = {name: value for name, value in vars(hookspecs).items() if name.startswith("hal_")}
    wanted = [f"{n}({', '.join(inspect.signature(h).parameters)})" for n, h in hooks.items()]
    assert sorted(documented) == sorted(wanted)


def test_every_hook_has_code() -> None:
    parts = re.split(r"^### (?=`hal_)", TEXT, flags=re.MULTILINE)[1:]
    for part in parts:
        name = re.match(r"`(\w+)", part)
        assert name is not None
        assert f"def {name[1]}(" in part, name[1]


@pytest.fixture(scope="module")
def plugin() -> Plugin:
    """All Python blocks of the first example, in order, as one plug-in."""
    found = (b for b in blocks_of(DOCUMENT) if b.language == "python")
    blocks = [block for block in found if block.directive[:1] != ("opencl",)]
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


def test_profiles(plugin: Plugin) -> None:
    (profile,) = plugin.device_profiles()
    assert profile.device_id == "example-accelerator-2"
    assert profile.evidence["memory_bytes"].confidence is Confidence.DATABASE


OPENCL = ROOT / "examples" / "hal-opencl" / "src"
OPENCL_BLOCKS = [block for block in blocks_of(DOCUMENT) if block.directive[:1] == ("opencl",)]


def _opencl_namespace(monkeypatch: pytest.MonkeyPatch, file: str) -> dict[str, Any]:
    """What a file of the OpenCL plug-in defines, with the document's code in place of its own."""
    monkeypatch.syspath_prepend(str(OPENCL))
    name = f"hal_opencl.{file.removesuffix('.py')}"
    if file in ("opencl_device.py", "small_ops.py"):
        pytest.importorskip("pyopencl", reason="pyopencl is not installed here")
    namespace = dict(vars(importlib.import_module(name)))
    for block in OPENCL_BLOCKS:
        if block.directive[1] == file:
            code = "from __future__ import annotations\n" + block.text
            exec(compile(code, f"{DOCUMENT}:{block.line}", "exec"), namespace)
    return namespace


def _acme_host(**changes: Any) -> RecordedHost:
    """A host with one GPU of OpenCL, as its platform would list it."""
    entry = {
        "platform": "Acme",
        "platform_version": "3",
        "index": 0,
        "name": "GPU",
        "vendor": "A",
        "version": "3",
        "driver": "1",
        "kind": "gpu",
        "compute_units": 8,
        "memory_bytes": 9,
        "max_allocation_bytes": 9,
        "local_memory_bytes": 9,
        "shares_host_memory": False,
        "is_little_endian": True,
        "is_available": True,
        "extensions": [],
    }
    parts: dict[str, Any] = {
        "files": {"/etc/OpenCL/vendors/acme.icd": "/opt/libacme.so"},
        "nodes": frozenset({"/opt/libacme.so"}),
        "modules": frozenset({"pyopencl"}),
        "commands": {
            "{python} -m hal_opencl.enumeration": CommandOutput(0, json.dumps([entry]), "")
        },
    }
    return RecordedHost(**(parts | changes))


def test_opencl_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    code = _opencl_namespace(monkeypatch, "detection.py")
    assert code["detect_devices"](RecordedHost()) == ()
    (device,) = code["detect_devices"](_acme_host())
    assert (device.device_id, device.arch) == ("opencl:0", "opencl-gpu")
    assert code["ENUMERATION_DEADLINE_S"] > 0
    spec = code["describe_device"](device, _acme_host())
    assert spec.evidence["num_cores"].found == "8"


def test_opencl_missing_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = _opencl_namespace(monkeypatch, "detection.py")["missing_dependencies"]
    assert missing(_acme_host()) == []
    assert [m.software for m in missing(_acme_host(modules=frozenset()))] == ["pyopencl"]
    assert len(missing(_acme_host(files={}))) == 1
    assert len(missing(_acme_host(nodes=frozenset()))) == 1


def test_opencl_limits_and_tiers(monkeypatch: pytest.MonkeyPatch, device: DeviceSpec) -> None:
    reasons = _opencl_namespace(monkeypatch, "candidates.py")["_attention"](device)
    request = AttentionRequest(
        phase="decode",
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        v_head_dim=32,
        block_size=16,
        dtype="float32",
        kv_dtype="float32",
    )
    assert reasons(request) == []
    assert [r.what for r in reasons(replace(request, head_dim=20))] == ["head_dim"]
    tier_of = _opencl_namespace(monkeypatch, "limits.py")["tier_of"]
    features = frozenset({"unit.cpu", "memory.shared"})
    assert tier_of(replace(device, features=features)) is Tier.TUNED
    assert tier_of(device) is Tier.PORTABLE


def test_opencl_kernel_on_a_shared_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first OpenCL device of this machine, if it has one."""
    import torch

    detection = _opencl_namespace(monkeypatch, "detection.py")
    small_ops = _opencl_namespace(monkeypatch, "small_ops.py")
    open_device = _opencl_namespace(monkeypatch, "opencl_device.py")["open_device"]
    monkeypatch.setenv("PYTHONPATH", str(OPENCL))
    devices = detection["detect_devices"](LocalHost())
    if not devices:
        pytest.skip("no OpenCL platform here")
    spec = detection["describe_device"](devices[0], LocalHost())
    assert open_device(spec) is open_device(spec)
    request = RopeRequest(num_heads=1, num_kv_heads=1, head_dim=2, rotary_dim=2, dtype="float32")
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    quarter = torch.tensor([[0.0, 1.0]])
    small_ops["load_rope"](spec)(request, cos_sin_cache=quarter)(q, k, torch.tensor([0]))
    assert (q.tolist(), k.tolist()) == ([[0.0, 1.0]], [[-1.0, 0.0]])


def test_every_opencl_block_is_one_that_is_run_here() -> None:
    files = {block.directive[1] for block in OPENCL_BLOCKS}
    assert files == {
        "detection.py",
        "candidates.py",
        "limits.py",
        "opencl_device.py",
        "small_ops.py",
    }


def test_new_plugin(tmp_path: Path, command_environment: dict[str, str]) -> None:
    """The commands of the document make a skeleton whose tests pass."""
    (block,) = [b for b in blocks_of(DOCUMENT) if b.directive == ("new",)]
    script = "\n".join(command.line for command in commands_of(block))
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env=command_environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
