"""Does every Triton kernel take 1 for each of its integers? Prints what does not, a line each.

A launch makes a constant of an integer argument that is 1 (one row, one split, a stride of one),
and a constant has no methods: a kernel that calls one compiles for every size but this one. Only
the front end runs, for one architecture. Not under the interpreter, which makes no constants.

All integers together for every form of a kernel; each alone for its first form, or with `--all` for
every one.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.targets import find_target
from hal_kernels.aot.variant import KernelVariant, TritonKernel, alignment, signature

TARGET = find_target("sm_120")
# What no launch can give 1, with the limit that says so.
NEVER_ONE = {
    ("grouped_gemm.mxfp4", "K"): "k: required a multiple of 32",
    ("grouped_gemm.split_k", "K"): "split_k_schedule: parts of at least 512 columns",
}


def forms(kernel: TritonKernel) -> list[KernelVariant]:
    """One variant for each set of the flags that choose code."""
    found: dict[tuple[Any, ...], KernelVariant] = {}
    for variant in kernel.variants(TARGET):
        flags = (
            (name, value)
            for name, value in variant.constants.items()
            if isinstance(value, bool | str) or value in (0, 1, 2)
        )
        found.setdefault(tuple(sorted(flags)), variant)
    return list(found.values())


def failures(kernel: TritonKernel, *, of_all: bool) -> Iterator[str]:
    function = kernel.load()
    for number, variant in enumerate(forms(kernel)):
        integers = [
            name
            for name, kind in variant.scalars.items()
            if kind.startswith("i") and (kernel.name, name) not in NEVER_ONE
        ]
        alone = [[name] for name in integers] if of_all or number == 0 else []
        for ones in (*alone, integers):
            try:
                _front_end(function, variant, ones)
            except Exception as error:  # noqa: BLE001 - the compiler's refusal is the result
                cause: BaseException = error
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                yield f"{kernel.name} {variant.config}, {', '.join(ones)} = 1: {cause}"


def _front_end(function: Any, variant: KernelVariant, ones: list[str]) -> None:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget(TARGET.backend, TARGET.triton_arch, TARGET.warp_size)
    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    types = signature(function, variant) | dict.fromkeys(ones, "constexpr")
    aligned = dataclasses.replace(variant, divisible=variant.divisible - set(ones))
    constants = {**variant.constants, **dict.fromkeys(ones, 1)}
    source = ASTSource(function, types, constants, alignment(function, aligned))
    options = backend.parse_options(
        {
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            **source.parse_options(),
        }
    )
    generators = backend.get_codegen_implementation(options)
    source.make_ir(target, options, generators, backend.get_module_map(), context)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for catalogued in CATALOGUE.values():
        for line in failures(catalogued, of_all="--all" in sys.argv):
            print(line)
