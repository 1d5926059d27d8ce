"""Why the widest load of a kernel is narrower than the 16 bytes that one instruction can take:
every such variant has its reason here, as data (`narrow_loads.json`).

cause: "tile" (what a program reads at once is less than 16 bytes for each of its threads),
"alignment" (rows begin, or end, at a multiple of less than 16 bytes), "tail" (it ends at any
element, so each has a predicate of its own), "list" (an address is read for each value or for a
few of them).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.explanations import Pattern
from hal_kernels.aot.triton_versions import REFERENCE
from hal_kernels.located_documents import read_document

WIDE_BYTES = 16
"""The most that a load instruction of a thread takes from global memory."""

_FILE = Path(__file__).with_name("narrow_loads.json")


class NarrowLoad(BaseModel):
    """kernels, configs: patterns with *. targets: architectures. widths: bytes of the widest load
    that it is the reason of. tile_bytes: for cause "tile", the most that a program reads at once,
    which together with the threads decides how much each of them can take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kernels: Annotated[list[Pattern], Field(min_length=1)]
    targets: Annotated[list[Pattern], Field(min_length=1)]
    configs: Annotated[list[Pattern], Field(min_length=1)] = ["*"]
    widths: Annotated[list[Literal[1, 2, 4, 8]], Field(min_length=1)]
    cause: Literal["tile", "alignment", "tail", "list"]
    tile_bytes: Annotated[int, Field(ge=1)] | None = None
    text: Annotated[str, Field(min_length=20, max_length=400)]

    @model_validator(mode="after")
    def _has_a_tile_by_its_cause(self) -> Self:
        if (self.tile_bytes is None) == (self.cause == "tile"):
            raise ValueError("required tile_bytes for the cause tile, and for no other")
        return self

    def covers(self, kernel: str, found: Evidence) -> bool:
        """Whether it is the reason of this variant."""
        return (
            found.widest_load_bytes in self.widths
            and found.target in self.targets
            and any(fnmatchcase(kernel, pattern) for pattern in self.kernels)
            and any(fnmatchcase(found.config, pattern) for pattern in self.configs)
        )


class _NarrowLoadFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal["halstack.narrow-loads/1"] = Field(alias="schema")
    loads: tuple[NarrowLoad, ...]


@cache
def narrow_loads() -> tuple[NarrowLoad, ...]:
    """Raises SettingsError for a file that is not right."""
    return read_document(_NarrowLoadFile, _FILE).loads


def is_narrow(found: Evidence) -> bool:
    """Whether the variant compiles, and none of its loads takes 16 bytes. Nothing is narrow about
    code that loads nothing."""
    return not found.error and 0 < found.widest_load_bytes < WIDE_BYTES


def find_narrow_load(kernel: str, found: Evidence) -> NarrowLoad | None:
    """The first reason that covers the variant; None for a wide one, and for one without."""
    if not is_narrow(found):
        return None
    return next((reason for reason in narrow_loads() if reason.covers(kernel, found)), None)


def explain_narrow_load(
    kernel: str, found: Evidence, reference: Evidence | None = None
) -> str | None:
    """The reason in a sentence; None for a variant that loads 16 bytes. reference: the same variant
    as the reference version of Triton compiles it, for evidence of another version."""
    if not is_narrow(found):
        return None
    said = f"loads of {found.widest_load_bytes} bytes at most"
    known = find_narrow_load(kernel, found)
    if known is not None:
        return f"{said} ({known.cause}): {known.text}"
    if reference is not None and reference.widest_load_bytes > found.widest_load_bytes:
        return f"{said}: triton {REFERENCE} loads {reference.widest_load_bytes} by the same source"
    return f"{said}: nobody has explained it"
