"""The OpenCL plug-in as its users have it: its wheel beside halstack's, and a model on its kernels.

Needs pyopencl and an OpenCL platform in the environment of the tests; `make setup` installs both
from PyPI where PyPI has them. Without them these tests are skipped, with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from document_blocks import ROOT
from hal.host import CommandOutput, RecordedHost
from hal_process import serving
from wheel_environment import WheelEnvironment, build_wheel, create_environment

EXAMPLE = ROOT / "examples" / "hal-opencl"
GENERATE = Path(__file__).parent / "generate_on_two_devices.py"
LIST_PLATFORMS = "import pyopencl; print(len(pyopencl.get_platforms()))"
PRECISION = ("--precision", "fp32")
ON_OPENCL = ("--device", "opencl:0", *PRECISION)
OPS_OF_A_DECODER = {
    "attention",
    "embedding",
    "gemm",
    "kv_write",
    "norm.rms",
    "rope",
    "sample.top_k_top_p",
}

pytestmark = pytest.mark.timeout(1800)  # compiles kernels, loads a model; on crowded machines too


@pytest.fixture(scope="module", autouse=True)
def platform() -> None:
    """Skips where OpenCL cannot be had."""
    if importlib.util.find_spec("pyopencl") is None:
        pytest.skip("pyopencl is not installed here: pip install 'pyopencl[pocl]'")
    done = subprocess.run(
        [sys.executable, "-c", LIST_PLATFORMS], capture_output=True, text=True, timeout=120
    )
    if done.returncode != 0 or int(done.stdout) == 0:
        lines = done.stderr.strip().splitlines()
        pytest.skip(f"no OpenCL platform here: {lines[-1] if lines else 'none is registered'}")


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory, build_options: list[str]
) -> Iterator[WheelEnvironment]:
    folder = tmp_path_factory.mktemp("opencl")
    wheels = [build_wheel(project, folder, build_options) for project in (ROOT, EXAMPLE)]
    yield create_environment(folder / "environment", wheels)
    shutil.rmtree(folder)


def _json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_wheel_holds_its_kernels(environment: WheelEnvironment) -> None:
    code = (
        "from importlib import resources; import hal, hal_opencl; print(hal.__file__); "
        "print(*[f.name for f in (resources.files('hal_opencl') / 'kernels').iterdir()])"
    )
    done = environment.run(environment.python, "-c", code)
    place, names = done.stdout.splitlines()
    assert place.startswith(str(environment.folder)), "halstack of the checkout"
    sources = EXAMPLE / "src" / "hal_opencl" / "kernels"
    assert set(names.split()) == {path.name for path in sources.iterdir()}


def test_its_own_tests_pass(environment: WheelEnvironment) -> None:
    """Every kernel against float64, on the installed wheels."""
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null")
    done = environment.run(
        *(environment.python, "-m", "pytest", *options, EXAMPLE / "tests"), timeout=1700
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_detection(environment: WheelEnvironment) -> None:
    devices = {
        d["device_id"]: d for d in _json(environment.run(environment.hal, "devices", "--json"))
    }
    device = devices["opencl:0"]
    assert device["backend"] == "opencl"
    assert device["num_cores"] >= 1
    assert device["memory_bytes"] > 0
    assert "unit.cpu" in device["features"] or "same_silicon_as" not in device["attributes"]
    for feature in device["features"]:
        assert f"features.{feature}" in device["evidence"]


def test_doctor_with_self_test(environment: WheelEnvironment) -> None:
    report = _json(environment.run(environment.hal, "doctor", "--self-test", "--json"))
    assert report["healthy"]
    assert report["missing_dependencies"] == []
    states = {p["distribution"]: p["status"] for p in report["plugins"]}
    assert states["hal-opencl"] == "loaded"
    checks = {c["name"]: c["passed"] for c in report["self_test"] if c["device"] == "opencl:0"}
    assert len(checks) >= 5
    assert all(checks.values())


def test_plan_is_of_its_kernels_alone(environment: WheelEnvironment, smollm2_gguf: Path) -> None:
    plan = _json(environment.run(environment.hal, "plan", smollm2_gguf, *ON_OPENCL, "--json", "-"))
    assert {op["op"] for op in plan["ops"]} == OPS_OF_A_DECODER
    for op in plan["ops"]:
        assert op["choice"].startswith(f"opencl.{op['op']}."), op["site"]
        assert op["distribution"] == "hal-opencl"
        assert op["waiver"] is None
        assert op["tier"] == "tuned"


def test_cpu_stays_the_device_that_nobody_names(
    environment: WheelEnvironment, smollm2_gguf: Path
) -> None:
    """An OpenCL device of type CPU is the silicon of cpu:0."""
    plan = _json(environment.run(environment.hal, "plan", smollm2_gguf, *PRECISION, "--json", "-"))
    assert {op["distribution"] for op in plan["ops"]} == {"halstack"}


def test_quantised_weights_are_refused(environment: WheelEnvironment, smollm2_gguf: Path) -> None:
    """The kernels are for float32: for weights as stored the plan has no fast path, and says so."""
    done = environment.run(environment.hal, "plan", smollm2_gguf, "--device", "opencl:0")
    assert done.returncode == 2
    assert "reference.gemm is reference; at least tuned is required" in done.stderr
    assert "(attention" not in done.stderr


def test_plan_for_a_gpu_that_is_not_here(
    environment: WheelEnvironment, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """Right there and not known to be fast: refused, unless the plug-in's waivers are taken."""
    recording = tmp_path / "host.json"
    recording.write_text(_host_with_gpu().to_json(), encoding="utf-8")
    command = (environment.hal, "plan", smollm2_gguf, *ON_OPENCL, "--host", recording)
    refused = environment.run(*command)
    assert refused.returncode == 2
    assert "opencl.gemm.panels is portable; at least tuned is required" in refused.stderr
    allowed = environment.run(*command, "--waivers", EXAMPLE / "waivers.toml", "--json", "-")
    plan = _json(allowed)
    assert all(op["waiver"] is not None for op in plan["ops"])
    references = {op["op"] for op in plan["ops"] if op["choice"].startswith("reference.")}
    assert references == {"kv_write", "sample.top_k_top_p"}


def _host_with_gpu() -> RecordedHost:
    entry = {
        "platform": "Acme OpenCL",
        "platform_version": "OpenCL 3.0",
        "index": 0,
        "name": "Acme GPU",
        "vendor": "Acme",
        "version": "OpenCL 3.0",
        "driver": "1.2.3",
        "kind": "gpu",
        "compute_units": 48,
        "memory_bytes": 16 << 30,
        "max_allocation_bytes": 4 << 30,
        "local_memory_bytes": 65536,
        "shares_host_memory": False,
        "is_little_endian": True,
        "is_available": True,
        "extensions": [],
    }
    enumeration = CommandOutput(0, json.dumps([entry]), "")
    return RecordedHost(
        files={"/etc/OpenCL/vendors/acme.icd": "/opt/acme/libacme.so"},
        nodes=frozenset({"/opt/acme/libacme.so"}),
        modules=frozenset({"pyopencl"}),
        commands={"{python} -m hal_opencl.enumeration": enumeration},
    )


@pytest.fixture(scope="module")
def both(environment: WheelEnvironment, smollm2_gguf: Path) -> dict[str, Any]:
    """SmolLM2 on the CPU backend and on OpenCL, prompt by prompt and all together."""
    command = (environment.python, "-P", GENERATE, smollm2_gguf, "cpu:0", "opencl:0")
    result: dict[str, Any] = _json(environment.run(*command, timeout=1700))
    return result


def test_tokens_are_those_of_the_cpu_backend(both: dict[str, Any]) -> None:
    """Greedy in float32. No position is a tie: the first logit leads by far more than the
    difference, so that equal tokens are no luck."""
    cpu, opencl = both["devices"]["cpu:0"], both["devices"]["opencl:0"]
    assert both["largest_difference"] <= 1e-4  # of 1 + |logit|
    assert both["smallest_lead"] > 1e-3
    assert opencl["tokens"] == cpu["tokens"]
    assert opencl["tokens_together"] == cpu["tokens_together"]


def test_its_kernels_ran_and_nothing_escaped(both: dict[str, Any]) -> None:
    opencl = both["devices"]["opencl:0"]
    ran = {name for name, calls in opencl["calls"].items() if calls}
    assert ran == set(opencl["choices"]) - {"opencl.sample.top_k_top_p.counting"}  # greedy
    assert opencl["escaped"] == []
    # Inside a bound op torch is asked for memory and for nothing else.
    assert all(
        op.startswith(("aten::empty", "aten::new_empty")) for op in opencl["torch_ops_inside"]
    )


def test_serves(environment: WheelEnvironment, smollm2_gguf: Path, both: dict[str, Any]) -> None:
    with serving(smollm2_gguf, *ON_OPENCL, command=(str(environment.hal),)) as server:
        client = server.openai()
        greedy, sampled = (
            client.completions.create(
                model=client.models.list().data[0].id,
                prompt=both["prompts"][0],
                max_tokens=len(both["devices"]["cpu:0"]["tokens"][0]),
                temperature=temperature,
                top_p=0.9,
            )
            for temperature in (0.0, 0.8)
        )
        calls = {
            re.sub(r'.*implementation="([^"]*)".*', r"\1", name): value
            for name, value in server.metrics().items()
            if 'implementation="' in name
        }
    assert greedy.choices[0].text == both["devices"]["cpu:0"]["text"]
    assert sampled.usage is not None
    assert sampled.usage.completion_tokens > 0
    assert calls["opencl.sample.top_k_top_p.counting"] > 0
    assert all(name.startswith("opencl.") for name, value in calls.items() if value)


@pytest.mark.long
def test_audit(environment: WheelEnvironment, smollm2_gguf: Path) -> None:
    audit = environment.run(environment.hal, "audit", smollm2_gguf, *ON_OPENCL, timeout=1700)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "0 outside a bound op" in " ".join(audit.stdout.split())
    assert "never called" not in audit.stdout
