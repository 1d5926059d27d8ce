"""A kernel that does not compile is found before the server is ready, named, and replaced by a
slower one only where a waiver allows it; and nothing interprets kernels unasked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

import tiny_models
from absent_plans import reference_candidates
from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal.errors import BindingError, KernelBuildError, PlanError, WaiverError
from hal.ops import CATALOGUE
from hal.ops.norm import RmsNormRequest
from hal.plugins.manager import load_backends
from hal.waivers import WaiverBook, load_waivers
from hal_backends.gpu import build_failures, triton_kernels
from hal_backends.gpu.build_failures import naming_failures
from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.building import build_rank
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model
from hal_engine.rehearsal import rehearse
from hal_engine.scheduler import SchedulerConfig
from hal_engine.serving import start_engine
from hal_engine.tokenizer import load_tokenizer
from interpreted_backend import InterpretedRegistry, interpreted_device

NORM = "test.norm.rms.triton"


def _too_much_kernel(x_ptr):  # type: ignore[no-untyped-def]  # Triton's
    # The name is looked up before anything of Triton's language is called, which the interpreter
    # may have replaced in this process.
    tl.store(x_ptr, missing_name)  # noqa: F821 - it is what fails


def compile_for_hopper(*args: Any) -> Any:
    """What a first call of a kernel does on a device, with the real compiler; it raises."""
    source = ASTSource(JITFunction(_too_much_kernel), {"x_ptr": "*fp32"}, {})
    return compile(source, target=GPUTarget("cuda", 90, 32))


class Registry(InterpretedRegistry):
    """With the references behind the Triton kernels, of which one does not compile."""

    def candidates(self, op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        own = [broken(c) if c.name == NORM else c for c in super().candidates(op, device)]
        return (*own, *reference_candidates(op, device))

    def create_runtime(self, device: DeviceSpec) -> Any:
        return SimpleNamespace(free_memory_bytes=lambda: 1 << 30)


class WorkingRegistry(InterpretedRegistry):
    """The same with kernels that all work."""

    def candidates(self, op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        return (*super().candidates(op, device), *reference_candidates(op, device))

    def create_runtime(self, device: DeviceSpec) -> Any:
        return SimpleNamespace(free_memory_bytes=lambda: 1 << 30)


def broken(candidate: KernelCandidate, *, beyond: int = 0) -> KernelCandidate:
    """The candidate, whose kernel does not compile for more than so many rows."""

    def load() -> Any:
        bind_working = candidate.load()

        def bind(request: Any, **static: Any) -> Any:
            working = bind_working(request, **static)

            def call(*args: Any) -> Any:
                is_too_much = args[0].shape[0] > beyond
                return compile_for_hopper(*args) if is_too_much else working(*args)

            return naming_failures(call, candidate.name, request, interpreted_device())

        return bind

    return dataclasses.replace(candidate, load=load)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    tiny_models.make_tiny_model("llama", made, seed=torch.seed() % 2**31, num_layers=1)
    return made


def planned(folder: Path, waivers: WaiverBook | None = None) -> PlannedModel:
    registry: Any = Registry()
    options = EngineOptions(
        precision="bf16", max_num_batched_tokens=96, max_num_seqs=4, num_blocks=16
    )
    device = interpreted_device()
    book = waivers or WaiverBook()
    return plan_model(folder, options, registry, book, device=device, must_run=True)


def test_the_rehearsal_names_kernel_device_error_and_the_way_on(folder: Path) -> None:
    plan = planned(folder)
    runner, _ = build_rank(plan, 0, None, 16)  # nothing is compiled yet
    with pytest.raises(KernelBuildError) as raised:
        rehearse(runner, load_tokenizer(plan.config), SchedulerConfig())
    error = raised.value
    assert error.implementation == NORM
    assert error.who == f"{NORM} for norm.rms"
    assert "_too_much_kernel for sm_90 (gpu:0)" in error.required
    assert "NameError" in error.found
    assert "missing_name" in error.found
    assert "--use norm.rms=NAME" in error.remedy
    assert error.__cause__ is not None


def test_the_reference_serves_instead_by_waiver_only(folder: Path, tmp_path: Path) -> None:
    registry: Any = Registry()
    with pytest.raises(PlanError) as raised:
        start_engine(planned(folder), registry)
    text = str(raised.value)
    assert "reference.norm.rms is reference" in text
    assert f"{NORM} enabled" in text or NORM in text
    assert "_too_much_kernel for sm_90 (gpu:0) does not compile: " in text
    assert isinstance(raised.value.__context__, KernelBuildError)
    path = tmp_path / "waivers.toml"
    path.write_text(waivers_of(text), encoding="utf-8")
    # A waiver is not needed before it is: the first plan has the fast kernel still.
    first = planned(folder, load_waivers(path))
    assert not first.plan.waivers_in_use()
    assert first.plan.pending_waivers
    engine = start_engine(first, registry, waivers=path)
    try:
        plan = engine.plan_json()
        chosen = {op["site"]: op["choice"] for op in plan["ops"]}
        assert any("does not compile" in note for note in plan["notes"])
    finally:
        asyncio.run(engine.close())
    assert chosen["final_norm"] == "reference.norm.rms"
    assert chosen["lm_head"] == "test.gemm.triton"


class LongPromptsRegistry(WorkingRegistry):
    """Of which one kernel compiles for few rows only."""

    def candidates(self, op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        return [
            broken(c, beyond=85) if c.name == NORM else c for c in super().candidates(op, device)
        ]


def test_a_kernel_that_fails_for_many_rows_only_is_found_before_the_server_is_ready(
    folder: Path, tmp_path: Path
) -> None:
    registry: Any = LongPromptsRegistry()
    with pytest.raises(PlanError, match="_too_much_kernel for sm_90") as raised:
        start_engine(planned(folder), registry)
    path = tmp_path / "waivers.toml"
    path.write_text(waivers_of(str(raised.value)), encoding="utf-8")
    engine = start_engine(planned(folder, load_waivers(path)), registry, waivers=path)
    try:
        chosen = {op["site"]: op["choice"] for op in engine.plan_json()["ops"]}
        long = GenerationRequest(
            request_id="a",
            prompt_token_ids=tuple(range(90)),
            sampling=SamplingParams(max_tokens=2, ignore_eos=True),
        )
        events = asyncio.run(_all_of(engine, long))
    finally:
        asyncio.run(engine.close())
    assert chosen["final_norm"] == "reference.norm.rms"
    assert len(events) == 2


async def _all_of(engine: Any, request: GenerationRequest) -> list[Any]:
    return [event async for event in engine.generate(request)]


def test_a_waiver_for_kernels_that_do_compile_is_an_error(folder: Path, tmp_path: Path) -> None:
    """It may be needed until every kernel was compiled, and is judged then."""
    path = tmp_path / "waivers.toml"
    path.write_text(
        """[[waiver]]
op = "norm.rms"
component = "final_norm"
device = "*"
kind = "tier"
reason = "a test"
owner = "the test suite"
expires = 2099-01-01
max_call_share = 1.0
"""
    )
    registry: Any = WorkingRegistry()
    options = EngineOptions(
        precision="bf16", max_num_batched_tokens=96, max_num_seqs=4, num_blocks=16
    )
    plan = plan_model(
        folder, options, registry, load_waivers(path), device=interpreted_device(), must_run=True
    )
    with pytest.raises(WaiverError, match="a waiver that is needed"):
        start_engine(plan, registry, waivers=path)


def waivers_of(text: str) -> str:
    """The waivers that an error proposes, signed."""
    lines = text[text.index("[[waiver]]") :].splitlines()
    kept = [line for line in lines if line.strip() == "[[waiver]]" or " = " in line]
    signed = "\n".join(kept).replace("<why this is acceptable, and until what happens>", "a test")
    return signed.replace("<who answers for it>", "the test suite")


def test_other_errors_of_a_call_go_on_as_they_are() -> None:
    def fail(x: int) -> None:
        raise ValueError(f"required 1, found {x}")

    request = RmsNormRequest(hidden_size=16, dtype="float32")
    kernel = naming_failures(fail, NORM, request, interpreted_device())
    with pytest.raises(ValueError, match="required 1, found 7"):
        kernel(7)
    assert naming_failures(lambda x: x + 1, NORM, request, interpreted_device())(2) == 3


@pytest.mark.parametrize("op", ["norm.rms", "index_logits", "gemm"])
def test_kernels_for_an_accelerator_are_never_interpreted(op: str) -> None:
    """These tests interpret them, which memory of the host allows."""
    on_host = interpreted_device()
    on_card = dataclasses.replace(on_host, torch_device="cuda:0")
    for candidate in triton_kernels.candidates(op, on_host):
        candidate.load()
    for candidate in triton_kernels.candidates(op, on_card):
        with pytest.raises(BindingError, match="TRITON_INTERPRET=1") as raised:
            candidate.load()
        assert raised.value.who == candidate.name


def test_the_cpu_offers_no_triton_kernel_interpreted_or_not() -> None:
    """TRITON_INTERPRET is set in this process, and changes nothing of what the CPU has."""
    registry = load_backends()
    device = registry.describe("cpu:0")
    assert build_failures  # the module that would refuse is not even asked
    for op in CATALOGUE:
        for candidate in registry.candidates(op, device):
            assert "triton" not in candidate.name
            assert not any(".triton" in module for module in candidate.modules)
            assert all(leaf.kind != "kernel" for leaf in candidate.leaf), candidate.name
