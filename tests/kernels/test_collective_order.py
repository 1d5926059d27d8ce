"""What a block of threads stored is seen before its flag: on AMD a barrier alone does not do it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

_COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.targets import find_target
from hal_kernels.aot.variant import alignment, signature

kernel, target = find_kernel("collective.all_gather"), find_target(sys.argv[1])
variant = next(v for v in kernel.variants(target) if "push" in v.config)
function = kernel.load()
source = ASTSource(
    function, signature(function, variant), dict(variant.constants), alignment(function, variant)
)
gpu = GPUTarget(target.backend, target.triton_arch, target.warp_size)
options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
print(triton.compile(source, target=gpu, options=options).asm["amdgcn"])
"""
# A wave's wait for what it has stored, by the name that each generation has for it.
_WAITS = {
    "gfx942": r"s_waitcnt vmcnt\(0\)",
    "gfx1100": r"s_waitcnt_vscnt null, 0x0",
    "gfx1201": r"s_wait_storecnt 0x0",
}


def code_of(arch: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, arch],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=environment | {"TRITON_DEFAULT_FP_FUSION": "1"},
    )
    return done.stdout


@pytest.mark.parametrize("arch", _WAITS)
def test_each_wave_waits_for_its_stores_before_the_barrier_of_a_flag(arch: str) -> None:
    code = code_of(arch)
    flag = re.search(r"(global|flat)_atomic_swap", code)
    assert flag is not None
    before = code[: flag.start()]
    barrier = max(
        before.rfind("s_barrier "), before.rfind("s_barrier\n"), before.rfind("s_barrier_")
    )
    assert barrier > 0
    settled = [m.start() for m in re.finditer(r"(global|flat)_atomic_add", before[:barrier])]
    assert settled, "no wave releases before the barrier"
    stored = [m.start() for m in re.finditer(r"(global|flat|buffer)_store", before)]
    assert stored
    assert max(stored) < settled[0]
    assert re.search(_WAITS[arch], before[max(stored) : settled[0]])
