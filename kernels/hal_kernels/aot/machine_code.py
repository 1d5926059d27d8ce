"""Reads what a compiled kernel really does: matrix instructions, registers, spills, load widths.

NVIDIA: PTX for the instructions, SASS resource usage for registers and spills. AMD: the amdgcn
assembly with its metadata. The instruction is the only proof of a native path: a product whose
operands were widened compiles without an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

_PTX_MATRIX = re.compile(
    r"^\s*(?:@!?\S+\s+)?((?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*)", re.M
)
_AMD_MATRIX = re.compile(r"^\s*(v_(?:mfma|wmma|smfmac|swmmac)_\w+)", re.M)
_PTX_LOAD = re.compile(r"^\s*(?:@!?\S+\s+)?(ld\.global[\w.:]*|cp\.async\.c[ag][\w.:]*)(.*)$", re.M)
_AMD_LOAD = re.compile(r"^\s*((?:global|buffer)_load_\w+)", re.M)
_SASS_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SASS_LOCAL = re.compile(r"\b(?:LDL|STL|ATOML)\b")
_AMD_META = re.compile(r"^\s*\.(\w+):\s+(\d+)\s*$", re.M)

# Operand dtype -> what its matrix instruction is called, by back end. PTX ISA 8.8 (mma, wgmma,
# tcgen05.mma kinds), AMD instruction set references of CDNA 2-4 and RDNA 3-4.
_PTX_NAMES: Mapping[str, re.Pattern[str]] = {
    "fp8_e4m3fn": re.compile(r"e4m3|kind::f8f6f4|kind::mxf8f6f4"),
    "fp8_e5m2": re.compile(r"e5m2|kind::f8f6f4|kind::mxf8f6f4"),
    "bfloat16": re.compile(r"\.bf16|kind::f16"),
    "float16": re.compile(r"\.f16\.f16|kind::f16"),
    "float32": re.compile(r"tf32"),
    "int8": re.compile(r"\.s8|kind::i8"),
}
_AMD_NAMES: Mapping[str, re.Pattern[str]] = {
    "fp8_e4m3fn": re.compile(r"fp8_fp8|f8f6f4"),
    "fp8_e4m3fnuz": re.compile(r"fp8_fp8"),
    "fp8_e5m2": re.compile(r"bf8_bf8|f8f6f4"),
    "bfloat16": re.compile(r"bf16"),
    "float16": re.compile(r"(?<!b)f16"),
    "float32": re.compile(r"x\d+_?x?f32$"),
    "int8": re.compile(r"i8|iu8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """What was found. matrix: instruction -> count. load_bytes: bytes of a load instruction of one
    thread from global memory -> count. Registers and spills are of one thread, in 32-bit units."""

    matrix: Mapping[str, int]
    load_bytes: Mapping[int, int]
    registers: int
    spills: int
    code_bytes: int

    @property
    def main_instruction(self) -> str:
        """The most frequent matrix instruction, "" if there is none."""
        return max(self.matrix, key=lambda name: (self.matrix[name], name), default="")

    def runs_on_unit_of(self, dtype: str, backend: str) -> bool:
        """Whether every matrix instruction multiplies operands of that dtype."""
        names = _PTX_NAMES if backend == "cuda" else _AMD_NAMES
        pattern = names.get(dtype)
        return (
            pattern is not None
            and bool(self.matrix)
            and all(pattern.search(name) for name in self.matrix)
        )


def has_frame(resource_usage: str) -> bool:
    """Whether a thread has memory for spills, by `cuobjdump -res-usage`: not that it is used."""
    usage = _SASS_USAGE.search(resource_usage)
    return usage is not None and any(int(usage[group]) for group in (2, 4))


def read_nvidia(ptx: str, resource_usage: str, code_bytes: int, sass: str = "") -> MachineCode:
    """From PTX and the output of `cuobjdump -res-usage` of the cubin.

    sass: the disassembled code of one that has a frame. A frame that nothing is stored to or loaded
    from spills nothing: compilers leave one of an array that they kept in registers after all.
    Raises ValueError if the resource usage is not in the output.
    """
    usage = _SASS_USAGE.search(resource_usage)
    if usage is None:
        raise ValueError(f"required resource usage of a cubin, found {resource_usage[:200]!r}")
    registers, stack, _, local = (int(value) for value in usage.groups())
    if sass and not _SASS_LOCAL.search(sass):
        stack = local = 0
    return MachineCode(
        matrix=dict(Counter(_PTX_MATRIX.findall(ptx))),
        load_bytes=dict(Counter(_ptx_load_bytes(*load) for load in _PTX_LOAD.findall(ptx))),
        registers=registers,
        spills=-(-(stack + local) // 4),
        code_bytes=code_bytes,
    )


def _ptx_load_bytes(name: str, operands: str) -> int:
    if name.startswith("cp.async"):
        sizes = re.findall(r",\s*(?:0x)?([0-9a-f]+)", operands)
        return int(sizes[0], 16 if "0x" in operands else 10) if sizes else 0
    count = re.search(r"\.v(\d)", name)
    bits = re.search(r"\.[bufs](\d+)$", name.rstrip("."))
    return (int(count[1]) if count else 1) * (int(bits[1]) // 8 if bits else 0)


_AMD_LOAD_BYTES = (
    ("dwordx4", 16), ("b128", 16), ("dwordx3", 12), ("b96", 12), ("dwordx2", 8), ("b64", 8),
    ("dword", 4), ("b32", 4), ("ushort", 2), ("short", 2), ("b16", 2), ("u16", 2), ("i16", 2),
    ("ubyte", 1), ("sbyte", 1), ("u8", 1), ("i8", 1),
)  # fmt: skip


def read_amd(amdgcn: str, code_bytes: int) -> MachineCode:
    """From amdgcn assembly. Raises ValueError if its metadata is not there."""
    meta: dict[str, int] = {}
    for name, value in _AMD_META.findall(amdgcn):
        meta.setdefault(name, int(value))
    if "vgpr_count" not in meta:
        raise ValueError("required .vgpr_count in the metadata of the assembly, found none")
    widths: Counter[int] = Counter()
    for name in _AMD_LOAD.findall(amdgcn):
        widths[next((n for suffix, n in _AMD_LOAD_BYTES if suffix in name), 0)] += 1
    return MachineCode(
        matrix=dict(Counter(_AMD_MATRIX.findall(amdgcn))),
        load_bytes=dict(widths),
        registers=meta["vgpr_count"] + meta.get("agpr_count", 0),
        spills=meta.get("vgpr_spill_count", 0) + meta.get("sgpr_spill_count", 0),
        code_bytes=code_bytes,
    )
