"""From which source a kernel comes: found without importing it, and seen when it changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hal.auditing import kernel_sources
from hal.auditing.kernel_sources import KernelSource, kernel_source
from hal.candidates import Bind, KernelCandidate
from hal.device import DeviceSpec
from hal.tiers import Tier
from hal_backends.cpu.candidates import candidates_for
from hal_backends.gpu.triton_kernels import candidates as triton_candidates

OPS = ("gemm", "attention", "norm.rms", "rope", "kv_write", "activation.gated", "embedding")


def candidate(load: Callable[[], Bind], **fields: object) -> KernelCandidate:
    return KernelCandidate(
        name="acme.gemm.x",
        op="gemm",
        tier=Tier.TUNED,
        summary="for tests",
        not_supported_reasons=lambda request: (),
        load=load,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
def cpu() -> DeviceSpec:
    return DeviceSpec(
        device_id="cpu:0",
        vendor="x",
        backend="cpu",
        name="x",
        arch="x86_64_avx2",
        torch_device="cpu",
        features=frozenset({"avx2", "fma"}),
    )


@pytest.mark.parametrize("op", OPS)
def test_every_cpu_kernel_has_its_source(op: str, cpu: DeviceSpec) -> None:
    found = candidates_for(op, cpu)
    assert found
    for item in found:
        source = kernel_source(item, cpu.arch)
        folder = op.partition(".")[0]
        assert any(m.startswith(("hal_kernels.", "hal_backends.cpu")) for m in source.modules)
        if item.name.endswith(".jit"):
            assert any(m.startswith(f"hal_kernels.{folder}.cpu") for m in source.modules), source
        assert source.source
        assert source.record == ""
        assert source.evidence == ""


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_kernels_of_absent_devices_have_source_and_evidence(arch: str) -> None:
    spec = DeviceSpec(
        device_id="x",
        vendor="x",
        backend="nvidia",
        name="x",
        arch=arch,
        torch_device="cuda",
        features=frozenset({"triton"}),
    )
    for op in ("gemm", "attention", "norm.rms"):
        for item in triton_candidates(op, spec):
            source = kernel_source(item, arch)
            folder = op.partition(".")[0]
            assert {f"hal_kernels.{folder}.triton", f"hal_kernels.{folder}.triton_kernels"} <= set(
                source.modules
            )
            assert source.evidence
            assert source.evidence != kernel_source(item, "sm_80").evidence


def test_nothing_is_imported() -> None:
    program = (
        "import sys\n"
        "from hal.auditing.kernel_sources import kernel_source\n"
        "from hal.device import DeviceSpec\n"
        "from hal_backends.gpu.triton_kernels import candidates\n"
        "spec = DeviceSpec(device_id='x', vendor='x', backend='nvidia', name='x', arch='sm_90',\n"
        "    torch_device='cuda', features=frozenset({'triton'}))\n"
        "for item in candidates('gemm', spec):\n"
        "    assert kernel_source(item, 'sm_90').source\n"
        "print([m for m in ('torch', 'triton', 'numba', 'hal_kernels.gemm.triton')\n"
        "    if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """A plug-in's package: loaders, kernels, what these import, and data beside them."""
    name = f"acme_{abs(hash(request.node.name))}"
    root = tmp_path / name
    files = {
        "__init__.py": "",
        "loaders.py": (
            "def _helper():\n    from .ops import deep\n    return deep\n"
            "def load():\n    from .ops.kernel import bind\n    _helper()\n    return bind\n"
        ),
        "ops/__init__.py": "",
        "ops/kernel.py": "import math\nfrom . import shared\nfrom .. import top\nbind = None\n",
        "ops/shared.py": "x = 1\n",
        "ops/deep.py": "y = 1\n",
        "ops/unrelated.py": "z = 1\n",
        "ops/configs.json": "{}",
        "ops/notes.txt": "not source",
        "top.py": "",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def source_of(package: Path) -> KernelSource:
    for cached in (
        kernel_sources._file_of,
        kernel_sources._imports_in,
        kernel_sources._data_beside,
    ):
        cached.cache_clear()
    module = __import__(f"{package.name}.loaders", fromlist=["load"])
    return kernel_source(candidate(module.load, distribution="acme-not-installed"), "a1")


def test_what_changes_the_hash_and_what_does_not(package: Path) -> None:
    first = source_of(package)
    names = {module.removeprefix(f"{package.name}.") for module in first.modules}
    assert {"loaders", "ops.kernel", "ops.shared", "ops.deep", "top"} <= names
    assert "ops.unrelated" not in names
    assert "math" not in first.modules
    for path in ("ops/unrelated.py", "ops/notes.txt"):
        (package / path).write_text("changed = 1\n")
        assert source_of(package) == first
    seen = {first.source}
    for path in ("ops/kernel.py", "ops/shared.py", "ops/deep.py", "ops/configs.json", "loaders.py"):
        with (package / path).open("a") as stream:
            stream.write("\n")
        seen.add(source_of(package).source)
    assert len(seen) == 6


def test_an_installed_distribution_is_known_by_its_record() -> None:
    source = kernel_source(candidate(lambda: None, distribution="pluggy"), "a1")  # type: ignore[arg-type, return-value]
    assert len(source.record) == 16
    assert kernel_source(candidate(lambda: None, distribution="none"), "a1").record == ""  # type: ignore[arg-type, return-value]


def test_what_a_wrapper_of_halstack_wraps_is_found(package: Path) -> None:
    first = source_of(package)
    module = __import__(f"{package.name}.loaders", fromlist=["load"])
    load = module.load

    def wrapper() -> Bind:
        bind: Bind = load()
        return bind

    wrapper.__module__ = "hal.plugins.watchdog"
    found = kernel_source(candidate(wrapper, distribution="acme-not-installed"), "a1")
    assert found == first
