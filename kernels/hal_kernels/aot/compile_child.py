"""The compiling process: `python -m hal_kernels.aot.compile_child` with five arguments.

They are KERNEL TARGET ONLY FIRST RESULT_FD.

A compiler that is fed an unfit kernel may abort, so it never runs in the process that asks. One
line of JSON per variant, its evidence and the seconds that it took (null if it was cached), goes
to the result channel, beginning with variant number FIRST of those whose configuration is ONLY (""
for all).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.compiler_process import (
    MachineFailureError,
    leave_for_machine_failure,
    machine_failure,
)
from hal_kernels.aot.evidence import Evidence, tier_of
from hal_kernels.aot.machine_code import MachineCode, has_frame, read_amd, read_nvidia
from hal_kernels.aot.targets import Target, find_target
from hal_kernels.aot.variant import KernelVariant, TritonKernel, alignment, signature

_MAX_ERROR = 300
_SAID = re.compile(r"^ptxas (?:fatal|error)|^ptxas .*; error|^LLVM ERROR|^lld: error|: error:")
_PLACE = re.compile(r"(?:/[\w.+-]+)+/?")
_TOOL_DEADLINE_S = 120


def compile_variant(kernel: TritonKernel, variant: KernelVariant, target: Target) -> Evidence:
    """Compiles one variant and reads its machine code; a compiler's refusal is evidence too.

    Raises MachineFailureError where it is not the compiler that refused.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernel.load()
    source = ASTSource(
        function,
        signature(function, variant),
        dict(variant.constants),
        alignment(function, variant),
    )
    gpu = GPUTarget(target.backend, target.triton_arch, target.warp_size)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    try:
        compiled = triton.compile(source, target=gpu, options=options)
    except Exception as error:
        if failure := machine_failure(error):
            raise MachineFailureError(failure) from error
        return _failed(variant, target, error)
    try:
        code = read_compiled(compiled, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineFailureError(machine_failure(error)) from error
    return Evidence(
        target=target.arch,
        dtype=variant.dtype,
        config=variant.config,
        tier=tier_of(
            code,
            dtype=variant.dtype,
            backend=target.backend,
            uses_matrix_unit=kernel.uses_matrix_unit,
        ),
        instruction=code.main_instruction,
        instruction_count=code.matrix.get(code.main_instruction, 0),
        registers=code.registers,
        spills=code.spills,
        shared_bytes=int(compiled.metadata.shared),
        num_warps=variant.num_warps,
        widest_load_bytes=max(code.load_bytes, default=0),
        code_bytes=code.code_bytes,
    )


def _failed(variant: KernelVariant, target: Target, error: Exception) -> Evidence:
    return Evidence(
        target=target.arch,
        dtype=variant.dtype,
        config=variant.config,
        tier="error",
        error=refusal(error),
    )


def refusal(error: Exception) -> str:
    """What a compiler says in one line."""
    # The outer error shows the source line, the innermost one says what is wrong with it.
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip(" ^") for line in str(cause).splitlines() if line.strip(" ^")]
    # An assembler's command comes last, with names of files that are gone.
    said = [line for line in lines if _SAID.search(line) and not line.startswith("Repro")]
    line = _PLACE.sub("…", said[0]) if said else (lines or [""])[-1]
    return f"{type(cause).__name__}: {line}"[:_MAX_ERROR]


def read_compiled(compiled: Any, target: Target) -> MachineCode:
    """The machine code of what `triton.compile` returned."""
    if target.backend == "hip":
        return read_amd(compiled.asm["amdgcn"], len(compiled.asm["hsaco"]))
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _nvidia_tool("cuobjdump", "-res-usage", file.name)
        sass = _nvidia_tool("nvdisasm", "-c", file.name) if has_frame(usage) else ""
    return read_nvidia(compiled.asm["ptx"], usage, len(cubin), sass)


def _nvidia_tool(name: str, *arguments: str) -> str:
    """What a tool that comes with Triton prints."""
    import triton.backends.nvidia

    tool = Path(str(triton.backends.nvidia.__path__[0])) / "bin" / name
    ended = subprocess.run(
        [str(tool), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=_TOOL_DEADLINE_S,
    )
    return ended.stdout


def _watch_compilations() -> list[float]:
    """The seconds of each compilation from now on; one that Triton had cached adds nothing."""
    from triton import knobs

    taken: list[float] = []

    def listener(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            taken.append(round(times.total / 1e6, 3))

    knobs.compilation.listener = listener
    return taken


def main() -> None:
    """Compiles the variants in order, each reported as soon as it is done."""
    name, arch, only, first, descriptor = sys.argv[1:]
    warnings.simplefilter("ignore")
    kernel, target = find_kernel(name), find_target(arch)
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as channel:
        taken = _watch_compilations()
        chosen = [v for v in kernel.variants(target) if only in ("", v.config)]
        for variant in chosen[int(first) :]:
            taken.clear()
            try:
                found = compile_variant(kernel, variant, target)
            except MachineFailureError as failure:
                leave_for_machine_failure(failure)
            line = {"evidence": asdict(found), "seconds": sum(taken) if taken else None}
            channel.write(json.dumps(line) + "\n")
            channel.flush()


if __name__ == "__main__":
    main()
