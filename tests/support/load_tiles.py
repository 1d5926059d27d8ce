"""What a compiled program reads from global memory at once: `python load_tiles.py KERNEL TARGET
CONFIG` prints the tile of each load of Triton's intermediate code, as JSON. In a process of its
own: the tests' process interprets kernels."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys

_LOAD = re.compile(
    r"(?:tt\.load|async_copy_global_to_local|buffer_load)\b.*?"
    r"(?:tensor<((?:\d+x)+)(?:!tt\.ptr<)?(\w+)|: !tt\.ptr<(\w+)>(?! ->))"
)
_BYTES = {"i64": 8, "i32": 4, "f32": 4, "bf16": 2, "f16": 2, "i8": 1}  # and FP8


def tiles_of(code: str) -> list[tuple[int, str]]:
    """(bytes, element type) of every load in TTGIR, of a tile or of one number."""
    found = []
    for line in code.splitlines():
        if match := _LOAD.search(line):
            shape, element = match[1] or "", match[2] or match[3]
            numbers = math.prod(int(size) for size in shape.split("x") if size)
            found.append((numbers * _BYTES.get(element, 1), element))
    return found


def load_tiles(kernel: str, target: str, config: str) -> list[tuple[int, str]]:
    """Of the first variant of that configuration."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"  # as evidence is compiled
    ended = subprocess.run(
        [sys.executable, __file__, kernel, target, config],
        capture_output=True, text=True, check=True, timeout=240, env=environment,
    )  # fmt: skip
    return [(size, element) for size, element in json.loads(ended.stdout)]


def main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hal_kernels.aot.catalogue import find_kernel
    from hal_kernels.aot.targets import find_target
    from hal_kernels.aot.variant import alignment, signature

    name, arch, config = sys.argv[1:]
    kernel, target = find_kernel(name), find_target(arch)
    variant = next(v for v in kernel.variants(target) if v.config == config)
    function = kernel.load()
    source = ASTSource(
        function,
        signature(function, variant),
        dict(variant.constants),
        alignment(function, variant),
    )
    gpu = GPUTarget(target.backend, target.triton_arch, target.warp_size)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=gpu, options=options)
    sys.stdout.write(json.dumps(tiles_of(compiled.asm["ttgir"])))


if __name__ == "__main__":
    main()
