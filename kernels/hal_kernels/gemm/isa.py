"""What this CPU can do for a matrix product: vector width, integer dot products, bfloat16."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import llvmlite.binding as llvm
from numba.core import config

# A CPU name given by NUMBA_CPU_NAME stands for itself, not for the machine it runs on.
_AVX2_ONLY_CPUS = frozenset({"haswell", "broadwell", "skylake", "x86-64-v3", "znver1", "znver2"})

_AVX2_FLAGS = ("avx2", "fma", "f16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class VectorIsa:
    """The instruction set that generated kernels use.

    lanes: float32 values of a vector register. registers: number of them. has_vnni: there is a
    vpdpbusd of that width (u8 x s8, four products added into an int32 lane, no saturation).
    """

    cpu_name: str
    features: str
    lanes: int
    registers: int
    has_vnni: bool


def missing_flags(required: tuple[str, ...]) -> list[str]:
    """Which of the named ISA flags (LLVM's names) kernels on this process may not use."""
    return [flag for flag in required if flag not in cpu_flags()]


def jit_requirements() -> list[tuple[str, str, str]]:
    """Why generated kernels cannot run here: (what, required, found); empty if they can."""
    missing = missing_flags(_AVX2_FLAGS)
    if not missing:
        return []
    return [("cpu flags", " ".join(_AVX2_FLAGS), f"without {' '.join(missing)}")]


@functools.cache
def cpu_flags() -> frozenset[str]:
    """ISA flags by LLVM's names. NUMBA_CPU_NAME, if set, limits them to that CPU's."""
    host = frozenset(name for name, is_set in llvm.get_host_cpu_features().items() if is_set)
    if _named_cpu() in _AVX2_ONLY_CPUS:
        return frozenset(f for f in host if not f.startswith(("avx512", "amx", "avxvnni", "avx10")))
    return host


@functools.cache
def vector_isa() -> VectorIsa:
    """The widest instruction set that generated kernels may use in this process.

    Raises:
        RuntimeError: the CPU has no AVX2 with FMA and F16C.
    """
    if reasons := jit_requirements():
        _, required, found = reasons[0]
        raise RuntimeError(
            f"generated GEMM kernels: required cpu flags {required}, found a CPU {found}; "
            "choose one of torch's GEMM implementations instead"
        )
    name = _named_cpu() or llvm.get_host_cpu_name()
    if not missing_flags(_AVX512_FLAGS):
        # Without the negation LLVM splits 512-bit vectors on CPUs it tunes for 256 bits.
        features = f"{_feature_string()},-prefer-256-bit"
        return VectorIsa(name, features, 16, 32, not missing_flags(("avx512vnni",)))
    return VectorIsa(name, _feature_string(), 8, 16, not missing_flags(("avxvnni",)))


def _named_cpu() -> str:
    return str(getattr(config, "CPU_NAME", None) or "")


def _feature_string() -> str:
    """For LLVM: a named CPU brings its own features."""
    if _named_cpu() in _AVX2_ONLY_CPUS:
        return ""
    return str(llvm.get_host_cpu_features().flatten())
