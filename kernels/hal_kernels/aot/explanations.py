"""Why machine code is not native where a kernel claims a dtype: every such cell of the matrix has
its reason here, as data (`explanations.json`), each with what the reason rests on.

cause: "instruction set" (it lacks the matrix instruction, so the compiler widens the operands
without a word, or refuses the type), "compiler" (Triton does not emit what the instruction set
has), "registers" (the tiles need more of them than there are).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hal_kernels.aot.evidence import Evidence, EvidenceTier
from hal_kernels.aot.triton_versions import REFERENCE
from hal_kernels.located_documents import read_document

_FILE = Path(__file__).with_name("explanations.json")
Pattern = Annotated[str, Field(min_length=1, max_length=80)]


class Explanation(BaseModel):
    """kernels, configs, dtypes: patterns with *. targets: architectures. spills: of variants that
    spill alone (true), or do not (false); null: either. source: what the reason rests on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kernels: Annotated[list[Pattern], Field(min_length=1)]
    targets: Annotated[list[Pattern], Field(min_length=1)]
    dtypes: list[str] = ["*"]
    configs: list[Pattern] = ["*"]
    tier: EvidenceTier
    spills: bool | None = None
    cause: Literal["instruction set", "compiler", "registers"]
    text: Annotated[str, Field(min_length=20, max_length=400)]
    source: Annotated[str, Field(min_length=10, max_length=200)]

    def covers(self, kernel: str, found: Evidence) -> bool:
        """Whether it is the reason of this cell."""
        return (
            found.tier == self.tier
            and self.spills in (None, found.spills > 0)
            and found.target in self.targets
            and any(fnmatchcase(kernel, pattern) for pattern in self.kernels)
            and any(fnmatchcase(found.dtype, pattern) for pattern in self.dtypes)
            and any(fnmatchcase(found.config, pattern) for pattern in self.configs)
        )


class _ExplanationFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal["halstack.kernel-explanations/1"] = Field(alias="schema")
    explanations: tuple[Explanation, ...]


@cache
def explanations() -> tuple[Explanation, ...]:
    """Raises SettingsError for a file that is not right."""
    return read_document(_ExplanationFile, _FILE).explanations


def find_explanation(kernel: str, found: Evidence) -> Explanation | None:
    """The first that covers the cell; None for a native cell, and for one without a reason."""
    if found.tier == "native":
        return None
    return next((e for e in explanations() if e.covers(kernel, found)), None)


def explain(kernel: str, found: Evidence, reference: Evidence | None = None) -> str | None:
    """The reason in a sentence; None for a native cell. reference: the same cell as the reference
    version of Triton compiles it, for evidence of another version."""
    if found.tier == "native":
        return None
    known = find_explanation(kernel, found)
    if known is not None:
        return f"{found.tier} ({known.cause}): {known.text} ({known.source})"
    if reference is not None and reference.tier == "native":
        return f"{found.tier} (compiler): triton {REFERENCE} compiles the same source as native"
    return f"{found.tier}: nobody has explained it"
