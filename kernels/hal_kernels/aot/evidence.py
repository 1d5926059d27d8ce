"""What machine code proves about a kernel, as stored data: one file per kernel and target.

The tier follows from the instructions, never from the kernel's name:
native: every matrix instruction multiplies the claimed dtype and nothing spills (for a kernel
without a product: nothing spills). emulated: matrix instructions of another, wider dtype. spilled:
as native, but registers spill to memory. scalar: a product without any matrix instruction. error:
it does not compile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hal.errors import PlanError
from hal.plugins.validation import from_document
from hal.text_files import read_regular_text, write_user_text
from hal_kernels.aot.machine_code import MachineCode

SCHEMA = "halstack.kernel-evidence/1"
STORE = Path(__file__).resolve().parent.parent / "evidence"

# What every instruction of a family has, and what says nothing about the operands.
_ORDINARY = re.compile(
    r"mma_async\.|\.sync|\.aligned|\.row\.col|\.cta_group::1|kind::|\.block_scale|\.scale_vec::\dX"
    r"|\.f32(?=\.|$)|^v_|f32_(?=\d)"
)
_COUNTS = (
    "instruction_count",
    "registers",
    "spills",
    "shared_bytes",
    "num_warps",
    "widest_load_bytes",
    "code_bytes",
)
_MOST = 1 << 30  # of any of them: what is more was read from no machine code
_TWICE = re.compile(r"([._])([a-z]+[0-9a-z]*)\1\2(?=$|\.ue)")  # both operands have the dtype

EvidenceTier = Literal["native", "emulated", "spilled", "scalar", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One variant on one target. instruction: the most frequent matrix instruction, with its count.
    registers, spills: of one thread, in 32-bit units. widest_load_bytes: of one thread from global
    memory. error: the compiler's message where it does not compile."""

    target: str
    dtype: str
    config: str
    tier: EvidenceTier
    instruction: str = ""
    instruction_count: int = 0
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    num_warps: int = 0
    widest_load_bytes: int = 0
    code_bytes: int = 0
    error: str = ""

    def describe(self) -> str:
        """For a plan: "native: 64× mma.sync e4m3, 0 spills, 99 KiB"."""
        if self.error:
            return f"does not compile for {self.target}: {self.error}"
        shared = f"{self.shared_bytes / 1024:.0f} KiB shared"
        product = self._product(self.instruction)
        return f"{self.tier}: {product}{self.registers} registers, {self.spills} spills, {shared}"

    def brief(self) -> str:
        """As `describe` with the instruction's short name, for tables."""
        if self.error:
            return f"does not compile: {self.error}"
        product = self._product(short_instruction(self.instruction))
        shared = f", {self.shared_bytes / 1024:.0f} KiB" if self.shared_bytes >= 512 else ""
        return f"{self.tier}: {product}{self.registers} registers, {self.spills} spills{shared}"

    def _product(self, instruction: str) -> str:
        return f"{self.instruction_count}× {instruction}, " if instruction else ""


def short_instruction(name: str) -> str:
    """`mma.m16n8k16.bf16` for `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`: the form and
    the operands; JSON has the whole name."""
    return _TWICE.sub(r"\1\2", _ORDINARY.sub("", name))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvidence:
    """All variants of one kernel on one target, and what they were compiled from and with."""

    kernel: str
    op: str
    target: str
    source_hash: str
    triton: str
    variants: tuple[Evidence, ...] = field(default=())

    def find(self, dtype: str, config: str = "") -> Evidence | None:
        """The variant of that dtype and configuration. Where no configuration is named, the worst
        of the dtype: whichever of them is launched, it is no worse than what is said."""
        found = [
            variant
            for variant in self.variants
            if variant.dtype == dtype and config in ("", variant.config)
        ]
        return max(found, key=_badness, default=None)


_ORDER: tuple[EvidenceTier, ...] = ("native", "spilled", "emulated", "scalar", "error")


def _badness(variant: Evidence) -> tuple[int, int, int, int]:
    """What makes one variant worse than another, the weightiest first."""
    return (
        _ORDER.index(variant.tier),
        variant.spills,
        variant.shared_bytes,
        variant.registers,
    )


def tier_of(code: MachineCode, *, dtype: str, backend: str, uses_matrix_unit: bool) -> EvidenceTier:
    """What the code is worth for the claim."""
    if uses_matrix_unit and not code.matrix:
        return "scalar"
    if uses_matrix_unit and not code.runs_on_unit_of(dtype, backend):
        return "emulated"
    return "spilled" if code.spills else "native"


def evidence_path(kernel: str, target: str, store: Path = STORE) -> Path:
    return store / target / f"{kernel}.json"


def write_evidence(found: KernelEvidence, store: Path = STORE) -> Path:
    """Writes one file; its form is stable, so that a change is a readable diff.

    Raises PlanError where it cannot be written.
    """
    path = evidence_path(found.kernel, found.target, store)
    document = {"schema": SCHEMA, **asdict(found)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_user_text(path, json.dumps(document, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise PlanError(
            f"evidence {path.name} of {found.target}",
            "a place that can be written",
            f"{type(error).__name__}: {error.strerror or error}",
            "check without --update, or update where the sources are your own: pip install -e",
        ) from error
    return path


@cache
def read_evidence(kernel: str, target: str, store: Path = STORE) -> KernelEvidence | None:
    """The stored evidence; None if there is none. Raises PlanError for a file that is not one."""
    path = evidence_path(kernel, target, store)
    if not path.exists():
        return None
    try:
        found = _parse(json.loads(read_regular_text(path)))
        _require_sound(found, kernel, target)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(
            f"kernel evidence {path.name} of {target}",
            f"a document of schema {SCHEMA}",
            f"{type(error).__name__}: {error}",
            f"make it anew: hal kernels check --kernel {kernel} --target {target} --update",
        ) from error


def _parse(document: Mapping[str, Any]) -> KernelEvidence:
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}")
    fields = {k: v for k, v in document.items() if k != "schema"}
    return from_document(KernelEvidence, fields)


def _require_sound(found: KernelEvidence, kernel: str, target: str) -> None:
    """Raises ValueError for evidence of another kernel or target than its place says, and for
    numbers that no reading of machine code makes."""
    if (found.kernel, found.target) != (kernel, target):
        raise ValueError(f"it is of {found.kernel} on {found.target}")
    if not found.variants:
        raise ValueError("it has no variants")
    seen: set[tuple[str, str]] = set()
    for variant in found.variants:
        name = f"variant {variant.dtype} {variant.config}".rstrip()
        if problem := _unsound(variant, target, seen):
            raise ValueError(f"{name}: {problem}")
        seen.add((variant.dtype, variant.config))


def _unsound(variant: Evidence, target: str, seen: Collection[tuple[str, str]]) -> str:
    if variant.target != target:
        return f"it is of {variant.target}"
    if (variant.dtype, variant.config) in seen:
        return "it is there twice"
    wrong = [name for name in _COUNTS if not 0 <= getattr(variant, name) <= _MOST]
    if wrong:
        return f"{wrong[0]} is not from 0 to {_MOST:,}"
    if (variant.tier == "error") != bool(variant.error):
        return f"tier {variant.tier} and error {variant.error!r}"
    if (variant.tier == "native" and variant.spills) or (
        variant.tier == "spilled" and not variant.spills
    ):
        return f"tier {variant.tier} and {variant.spills} spills"
    return ""


def stored_evidence(store: Path = STORE) -> Iterator[KernelEvidence]:
    """Everything stored, sorted by target and kernel."""
    for path in sorted(store.glob("*/*.json")):
        found = read_evidence(path.stem, path.parent.name, store)
        if found is not None:
            yield found
