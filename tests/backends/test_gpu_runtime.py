"""The accelerators' runtime on a platform that is not there, and on a fake one; the self-test."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hal.device import DeviceSpec
from hal.errors import DetectionError
from hal.hookspecs import CapturingRuntime, Runtime
from hal_backends.gpu import self_test
from hal_backends.gpu.runtime import (
    EXTENSIONS,
    TorchRuntime,
    create_runtime,
    torch_index,
)

DEVICE = DeviceSpec(
    device_id="0000:3b:00.0",
    vendor="fake",
    backend="nvidia",
    name="Fake",
    arch="sm_90",
    torch_device="cpu",
    memory_bytes=1 << 30,
    attributes={"torch_backend": "gloo"},
)


def address(bus: int) -> SimpleNamespace:
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


class FakeAccelerator:
    """As much of `torch.cuda` as the runtime uses."""

    def __init__(self, buses: list[int], free_bytes: int = 1 << 20) -> None:
        self.buses, self.free_bytes, self.current = buses, free_bytes, None

    def device_count(self) -> int:
        return len(self.buses)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return address(self.buses[index])

    def set_device(self, device: torch.device) -> None:
        self.current = device

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free_bytes, 2 * self.free_bytes


def test_the_device_is_found_by_its_address() -> None:
    accelerator = FakeAccelerator([0x1A, 0x3B, 0x5C])
    assert torch_index(DEVICE, accelerator) == 1
    known = dataclasses.replace(DEVICE, torch_device="cpu:2")
    assert torch_index(known, accelerator) == 2
    assert torch_index(DEVICE, FakeAccelerator([0x77])) == 0


@pytest.mark.parametrize("buses", [[0x1A, 0x5C], [0x3B, 0x3B]], ids=["absent", "twice"])
def test_an_ambiguous_device_is_an_error(buses: list[int]) -> None:
    with pytest.raises(DetectionError, match="one of torch's devices") as caught:
        torch_index(DEVICE, FakeAccelerator(buses))
    assert "0000:3b:00.0" in str(caught.value)


def test_memory_is_never_more_than_the_device_has() -> None:
    """One platform answers with the host's memory."""
    for free, want in ((1 << 20, 1 << 20), (1 << 40, 1 << 30)):
        runtime = TorchRuntime(DEVICE, FakeAccelerator([0x3B], free))
        assert runtime.free_memory_bytes() == want


def test_it_is_a_runtime() -> None:
    runtime = TorchRuntime(DEVICE, FakeAccelerator([0x3B]))
    members = [name for name in vars(Runtime) if not name.startswith("_")]
    assert all(hasattr(runtime, name) for name in members)
    assert runtime.torch_device == torch.device("cpu", 0)


def test_a_group_of_one_process_meets_over_a_file(tmp_path: Path) -> None:
    runtime = TorchRuntime(DEVICE, FakeAccelerator([0x3B]))
    group = runtime.create_group(0, 1, str(tmp_path / "rendezvous"))
    try:
        x = torch.randn(5)
        (back,) = group.exchange(x)
        assert torch.equal(back, x)
    finally:
        group.close()


def test_a_platform_without_a_known_collective_backend_refuses(tmp_path: Path) -> None:
    device = dataclasses.replace(DEVICE, attributes={})
    runtime = TorchRuntime(device, FakeAccelerator([0x3B]))
    with pytest.raises(DetectionError, match="none is known"):
        runtime.create_group(0, 1, str(tmp_path / "rendezvous"))


def test_no_graph_without_the_verified_feature() -> None:
    runtime = TorchRuntime(DEVICE, FakeAccelerator([0x3B]))
    with pytest.raises(DetectionError, match="graph_capture"):
        runtime.capture(lambda: torch.zeros(1), [])


class GraphingAccelerator(FakeAccelerator):
    """With graphs that note what is done to them."""

    def __init__(self) -> None:
        super().__init__([0x3B])
        self.log: list[str] = []
        log = self.log

        class FakeGraph:
            def replay(self) -> None:
                log.append("replay")

        self.CUDAGraph = FakeGraph

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.log.append("begin")
        yield
        self.log.append("end")


def test_a_captured_graph_has_run_once_and_keeps_its_inputs() -> None:
    accelerator = GraphingAccelerator()
    device = dataclasses.replace(DEVICE, features=frozenset({"graph_capture"}))
    runtime = TorchRuntime(device, accelerator)
    assert isinstance(runtime, CapturingRuntime)
    x = torch.randn(3)

    def step() -> torch.Tensor:
        accelerator.log.append("step")
        return x * 2

    captured = runtime.capture(step, [x])
    # Warmed up on another stream, captured, which launches nothing, then run.
    assert accelerator.log[-4:] == ["begin", "step", "end", "replay"]
    assert set(accelerator.log[:-4]) == {"step"}
    assert torch.equal(captured.output, 2 * x)
    assert any(tensor is x for tensor in captured.inputs)
    captured.replay()
    assert accelerator.log[-1] == "replay"


@pytest.mark.parametrize("backend", sorted(EXTENSIONS))
def test_a_missing_extension_is_named(backend: str) -> None:
    device = dataclasses.replace(DEVICE, backend=backend, torch_device="npu")
    with pytest.raises(DetectionError, match=EXTENSIONS[backend]):
        create_runtime(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_torch_without_the_device_is_an_error() -> None:
    with pytest.raises(DetectionError, match="is_available"):
        create_runtime(dataclasses.replace(DEVICE, torch_device="cuda"))
    with pytest.raises(DetectionError, match="no such device type"):
        create_runtime(dataclasses.replace(DEVICE, torch_device="nonesuch"))


def test_extensions_are_those_of_the_database() -> None:
    from hal_capability_db import load_database

    modules = {f.torch_module for f in load_database().families.values() if f.torch_module}
    assert modules == set(EXTENSIONS.values())


def test_self_test_passes_on_a_device_that_computes_right() -> None:
    runtime = TorchRuntime(DEVICE, FakeAccelerator([0x3B]))
    results = self_test.run_self_test(runtime)
    assert len(results) >= 7
    assert not [r for r in results if not r.passed], results


@pytest.mark.parametrize("fault", ["linear", "rms_norm", "silu", "scaled_dot_product_attention"])
def test_self_test_finds_a_wrong_operator(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(torch.nn.functional, fault)

    def wrong(x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        result: torch.Tensor = right(x, *args, **more)
        return result if x.dtype == torch.float64 else result * 1.1

    monkeypatch.setattr(torch.nn.functional, fault, wrong)
    results = self_test.run_self_test(TorchRuntime(DEVICE, FakeAccelerator([0x3B])))
    assert [r.name for r in results if not r.passed]
