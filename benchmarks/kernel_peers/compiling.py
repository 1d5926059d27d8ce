"""Compiles one problem on one target: ours and each peer's, read by the same reader.

Runs as a process of its own, `python -m kernel_peers.compiling` with six arguments, because a
compiler that is fed an unfit kernel may abort. They are WHEELS MODULE TARGET PATTERN FIRST
RESULT_FD. One line of JSON per contender.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hal.processes import ProcessEnd, run_bounded
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.compile_child import compile_variant, read_compiled, refusal
from hal_kernels.aot.evidence import Evidence, tier_of
from hal_kernels.aot.targets import Target, find_target
from kernel_peers.launches import Launch, Own, Problem, specialised
from kernel_peers.slicing import CutError, Cutter

DEADLINE_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one contender compiles to for one problem on one target."""

    problem: str
    contender: str
    evidence: Evidence
    moved_bytes: int = 0
    tried: int = 1


def contenders(module: str, target: Target, pattern: str) -> list[tuple[Problem, Launch | Own]]:
    """Ours first, problem by problem, but for the problems that a target has no instructions for.

    module: where `PROBLEMS` is declared. pattern: of the names of the problems that are wanted.
    """
    problems: Sequence[Problem] = importlib.import_module(module).PROBLEMS
    found: list[tuple[Problem, Launch | Own]] = []
    for problem in problems:
        if target.arch not in problem.skips and fnmatchcase(problem.name, pattern):
            peers = (peer for peer in problem.peers if target.arch not in peer.skips)
            found += [(problem, problem.own), *((problem, peer) for peer in peers)]
    return found


def compile_own(problem: Problem, own: Own, target: Target) -> Finding:
    """The variant of our catalogue. Raises LookupError if the target has none of that name."""
    kernel = find_kernel(own.kernel_on(target))
    config, dtype = own.config(target), own.dtype(target)
    for variant in kernel.variants(target):
        if (variant.config, variant.dtype) == (config, dtype):
            found = compile_variant(kernel, variant, target)
            return Finding(
                problem=problem.name,
                contender="halstack",
                evidence=found,
                moved_bytes=own.moves(variant.constants),
            )
    raise LookupError(f"{kernel.name} has no variant {config!r} {dtype!r} for {target.arch}")


def compile_peer(
    problem: Problem, launch: Launch, target: Target, wheels: Path, folder: Path
) -> Finding:
    """A peer's kernel. Of several configurations the one that spills least, then the one that
    needs the fewest registers: what a measurement would choose is not known here. folder: on the
    path of modules, where its code is cut to."""
    cutter = Cutter(wheels, folder, launch.given(target))
    found = [
        (_compile(problem, launch, target, cutter, configuration), configuration)
        for configuration in launch.configurations(target)
    ]
    best, configuration = min(found, key=lambda pair: _badness(pair[0]))
    return Finding(
        problem=problem.name,
        contender=launch.peer,
        evidence=best,
        moved_bytes=launch.moves({**launch.arguments(target), **configuration}),
        tried=len(found),
    )


def _badness(evidence: Evidence) -> tuple[Any, ...]:
    return bool(evidence.error), evidence.spills, evidence.registers


def _compile(
    problem: Problem,
    launch: Launch,
    target: Target,
    cutter: Cutter,
    configuration: Mapping[str, Any],
) -> Evidence:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    text = " ".join(f"{key}={value}" for key, value in configuration.items())
    failed = Evidence(target=target.arch, dtype=problem.dtype(target), config=text, tier="error")
    try:
        function = _function(cutter, launch)
    except (CutError, FileNotFoundError) as error:
        return dataclasses.replace(failed, error=f"not in this version: {error}")
    names = {parameter.name for parameter in function.params}
    tiles = {key: value for key, value in configuration.items() if key in names}
    options = {key: value for key, value in configuration.items() if key not in names}
    source = ASTSource(function, *specialised(function, {**launch.arguments(target), **tiles}))
    gpu = GPUTarget(target.backend, target.triton_arch, target.warp_size)
    try:
        with knobs.amd.scope():
            for knob, value in launch.amd_knobs(target).items():
                setattr(knobs.amd, knob, value)
            compiled = triton.compile(source, target=gpu, options=options)
    except Exception as error:  # noqa: BLE001 - the compiler's refusal, of any class, is the result
        return dataclasses.replace(failed, error=refusal(error))
    return _evidence(compiled, target, problem.dtype(target), text)


def _function(cutter: Cutter, launch: Launch) -> Any:
    module = cutter.cut(cutter.wheels / launch.wheel / launch.path, [launch.function])
    importlib.invalidate_caches()
    return getattr(importlib.import_module(module), launch.function)


def _evidence(compiled: Any, target: Target, dtype: str, text: str) -> Evidence:
    code = read_compiled(compiled, target)
    # A copy by descriptor is no thread's load; it moves 16 bytes at a time or more.
    copied = 16 if "cp.async.bulk.tensor" in compiled.asm.get("ptx", "") else 0
    return Evidence(
        target=target.arch,
        dtype=dtype,
        config=text,
        tier=tier_of(code, dtype=dtype, backend=target.backend, uses_matrix_unit=bool(dtype)),
        instruction=code.main_instruction,
        instruction_count=code.matrix.get(code.main_instruction, 0),
        registers=code.registers,
        spills=code.spills,
        shared_bytes=int(compiled.metadata.shared),
        num_warps=int(compiled.metadata.num_warps),
        widest_load_bytes=max(*code.load_bytes, copied, 0),
        code_bytes=code.code_bytes,
    )


def compile_all(module: str, target: Target, wheels: Path, pattern: str = "*") -> Iterator[Finding]:
    """Every contender on a target, in processes of their own; one that kills the compiler is an
    error of its own. Arguments as of `contenders`.

    Raises RuntimeError if a launch does not fit its kernel.
    """
    every = contenders(module, target, pattern)
    done = 0
    while done < len(every):
        lines, problem = _run_child(module, target, wheels, pattern, done)
        for line in lines:
            yield _finding(json.loads(line))
        done += len(lines)
        if done < len(every):
            of, contender = every[done]
            name = contender.peer if isinstance(contender, Launch) else "halstack"
            error = Evidence(
                target=target.arch, dtype="", config="", tier="error", error=problem or "it ended"
            )
            yield Finding(problem=of.name, contender=name, evidence=error)
            done += 1


def _finding(document: dict[str, Any]) -> Finding:
    return Finding(**document | {"evidence": Evidence(**document["evidence"])})


def _run_child(
    module: str, target: Target, wheels: Path, pattern: str, first: int
) -> tuple[list[str], str]:
    outcome = run_bounded(
        [
            sys.executable,
            "-m",
            "kernel_peers.compiling",
            str(wheels),
            module,
            target.arch,
            pattern,
            str(first),
            "{result_fd}",
        ],
        deadline_s=DEADLINE_S,
        environment={
            **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            "TRITON_DEFAULT_FP_FUSION": "1",
            "PYTHONPATH": os.pathsep.join(
                (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
            ),
        },
        result_limit_bytes=1 << 24,
        is_contained=True,
    )
    tail = " ".join(outcome.stderr.decode(errors="replace").strip().splitlines()[-1:])
    if outcome.end is ProcessEnd.EXITED and outcome.exit_code == 1:
        raise RuntimeError(f"{target.arch}: {tail}")
    return outcome.result.decode().splitlines(), f"{outcome.describe()} {tail}".strip()[:300]


def main() -> None:
    """Compiles the contenders in order, each reported as soon as it is done."""
    wheels, module, arch, pattern, first, descriptor = sys.argv[1:]
    warnings.simplefilter("ignore")
    target = find_target(arch)
    every = contenders(module, target, pattern)
    with (
        os.fdopen(int(descriptor), "w", encoding="utf-8") as channel,
        tempfile.TemporaryDirectory() as folder,
    ):
        sys.path.insert(0, folder)
        for problem, contender in every[int(first) :]:
            found = (
                compile_peer(problem, contender, target, Path(wheels), Path(folder))
                if isinstance(contender, Launch)
                else compile_own(problem, contender, target)
            )
            channel.write(json.dumps(dataclasses.asdict(found)) + "\n")
            channel.flush()


if __name__ == "__main__":
    main()
