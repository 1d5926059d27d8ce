"""What the machine fails at while kernels are compiled is no evidence about them."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from triton.compiler.errors import CompilationError
from triton.runtime.errors import PTXASError

from gpu_devices import gpu
from hal.errors import KernelCompilerError, KernelSourceError
from hal.processes import ProcessEnd, ProcessOutcome
from hal_kernels.aot import compiler_process, compiling
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.compile_child import refusal
from hal_kernels.aot.compiler_process import (
    MACHINE_EXIT_CODE,
    CompilerRun,
    machine_failure,
    run_compiler,
)
from hal_kernels.aot.compiling import compile_kernel
from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.targets import find_target
from hal_kernels.tuning.shapes import shape_class
from hal_kernels.tuning.trial_compiling import compile_trial
from hal_kernels.tuning.tunable_kernels import find_tunable

KERNEL, TARGET = "embedding.gather", "sm_120"


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "is_of_machine"),
    [
        (PermissionError(13, "Permission denied", "/cache"), True),
        (OSError(28, "No space left on device"), True),
        (MemoryError(), True),
        (chained(RuntimeError("translation"), OSError(28, "No space left on device")), True),
        (PTXASError("`ptxas` failed with error code -9"), True),
        (PTXASError("`ptxas` failed with error code 137"), True),
        (PTXASError("`ptxas` failed with error code 1\nptxas fatal   : Could not open x"), True),
        (PTXASError("Internal Triton PTX codegen error\nptxas fatal: No space left"), True),
        (
            PTXASError("Internal Triton PTX codegen error\nfatal : Failed to write to outp file"),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("Could not create or locate cache dir"), True),
        (ValueError("nobody knows where this came from"), True),
        (PTXASError("Internal Triton PTX codegen error\nptxas fatal : (C7600) registers"), False),
        (PTXASError("`ptxas` raised SIGSEGV"), False),
        (RuntimeError("PassManager::run failed"), False),
        (chained(CompilationError("x", None), TypeError("fp8e4nv not supported")), False),
    ],
    ids=str,
)
def test_refusals_are_told_from_failures_of_the_machine(
    error: Exception, is_of_machine: bool
) -> None:
    assert bool(machine_failure(error)) is is_of_machine


def ended(
    monkeypatch: pytest.MonkeyPatch,
    end: ProcessEnd = ProcessEnd.EXITED,
    code: int | None = 0,
    stderr: str = "",
) -> CompilerRun:
    outcome = ProcessOutcome(end, code, b"", stderr.encode(), b"", 1.0)
    monkeypatch.setattr(compiler_process, "run_bounded", lambda *_, **__: outcome)
    return run_compiler("module", (), what="k for sm_90", deadline_s=1.0)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXFSZ, signal.SIGBUS],
)
def test_a_compiler_that_was_killed_says_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KernelCompilerError, match=rf"k for sm_90[\s\S]*{number.name}"):
        ended(monkeypatch, code=-number)


def test_a_compiler_that_dies_by_itself_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (signal.SIGABRT, signal.SIGSEGV):
        run = ended(monkeypatch, code=-number, stderr="LLVM ERROR: Cannot select: intrinsic")
        assert "Cannot select" in run.refusal
        assert number.name in run.refusal
    with pytest.raises(KernelCompilerError, match="bad_alloc"):
        ended(monkeypatch, code=-signal.SIGABRT, stderr="what(): std::bad_alloc")


def test_other_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch) == CompilerRun(())
    assert ended(monkeypatch, ProcessEnd.DEADLINE, None).is_late
    for end in (ProcessEnd.LOST, ProcessEnd.OUTPUT_LIMIT):
        with pytest.raises(KernelCompilerError):
            ended(monkeypatch, end, None)
    with pytest.raises(KernelCompilerError, match="No space left"):
        ended(monkeypatch, code=MACHINE_EXIT_CODE, stderr="OSError: No space left")
    with pytest.raises(KernelSourceError, match="NameError"):
        ended(monkeypatch, code=1, stderr="Traceback (most recent call last)\nNameError: x")


def test_a_refusal_is_the_line_that_says_why() -> None:
    text = (
        "Internal Triton PTX codegen error\n`ptxas` stderr:\n"
        "ptxas /tmp/tmpab1.ptx, line 9; error   : Unknown modifier\n"
        "ptxas fatal   : Ptx assembly aborted due to errors\n\n"
        "Repro command: /usr/bin/ptxas -v /tmp/tmpab1.ptx -o /tmp/tmpab1.o"
    )
    assert refusal(PTXASError(text)) == "PTXASError: ptxas …, line 9; error   : Unknown modifier"


@pytest.fixture
def cache_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place of Triton's cache that not even root can make: below a file."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file / "cache"))


@pytest.mark.usefixtures("cache_that_cannot_be")
def test_a_cache_that_cannot_be_written_takes_no_kernel_away() -> None:
    with pytest.raises(KernelCompilerError, match=rf"{KERNEL} for {TARGET}[\s\S]*NotADirectory"):
        compile_kernel(find_kernel(KERNEL), find_target(TARGET))


def test_nor_does_no_name_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Triton refuses with an error of no class of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    with pytest.raises(KernelCompilerError, match="cache dir"):
        compile_kernel(find_kernel(KERNEL), find_target(TARGET))


@pytest.mark.usefixtures("cache_that_cannot_be")
def test_nor_a_configuration() -> None:
    tunable, target = find_tunable("gemm.dense"), find_target("sm_90")
    shape = shape_class("bfloat16", tunable.forms[0], 16, {"n": 1024, "k": 1024})
    configuration = tunable.default_on(target, shape, gpu("sm_90")).configuration
    with pytest.raises(KernelCompilerError, match="NotADirectory"):
        compile_trial("gemm.dense", target, shape, configuration)


def test_the_deadline_ends_a_process_and_not_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, target = find_kernel(KERNEL), find_target(TARGET)
    variants = kernel.variants(target)
    assert len(variants) > 1
    lines = [
        json.dumps(
            {
                "evidence": asdict(
                    Evidence(target=TARGET, dtype=v.dtype, config=v.config, tier="native")
                ),
                "seconds": 1.0,
            }
        )
        for v in variants
    ]
    begun: list[int] = []

    def one_at_a_time(_: str, arguments: tuple[str, ...], **__: object) -> CompilerRun:
        begun.append(int(arguments[3]))
        is_last = begun[-1] == len(lines) - 1
        return CompilerRun((lines[begun[-1]],), is_late=not is_last)

    monkeypatch.setattr(compiling, "run_compiler", one_at_a_time)
    found = compile_kernel(kernel, target)
    assert begun == list(range(len(variants)))
    assert {v.tier for v in found.variants} == {"native"}
    monkeypatch.setattr(compiling, "run_compiler", lambda *_, **__: CompilerRun((), is_late=True))
    with pytest.raises(KernelCompilerError, match="no variant was compiled within"):
        compile_kernel(kernel, target)
