"""What is compiled: a Triton kernel with its types and constants, and what it claims to run on."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hal_kernels.aot.targets import Target

# Triton's names of the dtypes that halstack names as torch does.
TRITON_DTYPES: Mapping[str, str] = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
    "fp8_e4m3fn": "fp8e4nv",
    "fp8_e4m3fnuz": "fp8e4b8",
    "fp8_e5m2": "fp8e5",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariant:
    """One specialisation of a kernel.

    dtype: the operand type that it claims; "" for a kernel without a matrix product. config: the
    name of its constants. pointers: argument -> dtype of what it points at. scalars: argument ->
    Triton type. divisible: scalars that are multiples of 16 where this variant is used (all
    pointers are aligned to 16 bytes). constants: the constexpr arguments.
    """

    dtype: str
    config: str
    pointers: Mapping[str, str]
    scalars: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 2


VariantsOf = Callable[[Target], Sequence[KernelVariant]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonKernel:
    """One kernel of the catalogue.

    name: `<op>.<implementation>`. module, function: where it is. variants: those that a target is
    meant to run; none where the architecture lacks what the kernel is for. uses_matrix_unit:
    whether its products must end in matrix instructions. sources: further modules whose code it
    calls, for the hash. caveat: when something else runs in its place, in the words of a plan.
    """

    name: str
    op: str
    module: str
    function: str
    variants: VariantsOf
    uses_matrix_unit: bool
    sources: tuple[str, ...] = field(default=())
    caveat: str = ""

    def load(self) -> Any:
        """The `triton.jit` function. Imports triton and torch."""
        return getattr(importlib.import_module(self.module), self.function)

    def source_hash(self, target: Target) -> str:
        """16 hexadecimal digits over the text of the modules that the kernel is made of and the
        variants that the target is meant to run."""
        digest = self._digest()
        for variant in self.variants(target):
            digest.update(json.dumps(_plain(variant), sort_keys=True).encode())
        return digest.hexdigest()

    def code_hash(self) -> str:
        """As `source_hash`, of the modules alone: what a configuration was tried with."""
        return self._digest().hexdigest()

    def _digest(self) -> hashlib.blake2b:
        digest = hashlib.blake2b(digest_size=8)
        for name in (self.module, *self.sources):
            digest.update(_source_of(name))
        return digest


def _plain(variant: KernelVariant) -> dict[str, Any]:
    return asdict(variant) | {"divisible": sorted(variant.divisible)}


def _source_of(name: str) -> bytes:
    """The file of a module, which is not imported: that would define its kernels."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"required the module {name}, found none", name=name)
    return Path(spec.origin).read_bytes()


def signature(function: Any, variant: KernelVariant) -> dict[str, str]:
    """Argument -> Triton type in the order of the kernel, as `ASTSource` takes it.

    Raises ValueError if the variant and the kernel have different arguments.
    """
    names = list(function.arg_names)
    types = {
        **{name: f"*{TRITON_DTYPES[dtype]}" for name, dtype in variant.pointers.items()},
        **variant.scalars,
        **dict.fromkeys(variant.constants, "constexpr"),
    }
    if set(types) != set(names):
        raise ValueError(
            f"variant {variant.config} of {function.__name__}: required the arguments {names}, "
            f"found {sorted(types)}"
        )
    return {name: types[name] for name in names}


def alignment(function: Any, variant: KernelVariant) -> dict[tuple[int, ...], list[list[Any]]]:
    """Which arguments are multiples of 16, as `ASTSource` takes it."""
    aligned = variant.divisible | frozenset(variant.pointers)
    return {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name in aligned
    }
