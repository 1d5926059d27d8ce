"""What locks and diffs read of a plan as JSON, checked: a file may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hal.auditing.document import Count, TimeUs
from hal.auditing.report_files import located_error, parse_document, read_document_text, shown
from hal.errors import DocumentError
from hal.plan import SCHEMA as PLAN_SCHEMA
from hal.tiers import Tier

LOCK_SCHEMA: Final = "halstack.lock/1"
_Document = TypeVar("_Document", bound=BaseModel)


class _Part(BaseModel):
    # A plan may have more than this reads: what is added to it later is not an error.
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class SemanticNoteDocument(_Part):
    """How numbers differ from what was asked for."""

    name: str
    text: str = ""


class LeafDocument(_Part):
    """What a call ends in."""

    kind: str
    name: str


class LoserDocument(_Part):
    """A candidate that was not chosen, and why."""

    name: str
    reasons: tuple[Mapping[str, Any], ...] = ()


class PlanOpDocument(_Part):
    """One call site and range of tokens with its decision. Times in µs of one call."""

    site: str
    layers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)
    op: str
    phase: str = "any"
    tokens: tuple[Count, Count]
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    choice: str
    tier: Literal["native", "tuned", "portable", "reference"]
    distribution: str = "halstack"
    is_explicit: bool = False
    estimate_us: TimeUs | None = None
    roofline_us: TimeUs | None = None
    leaf: tuple[LeafDocument, ...] = ()
    semantic_notes: tuple[SemanticNoteDocument, ...] = ()
    lost: Mapping[str, Any] | None = None
    waiver: str | None = None
    rejected: tuple[LoserDocument, ...] = ()

    @property
    def rank(self) -> Tier:
        """Its tier, to compare."""
        return Tier.from_label(self.tier)

    @property
    def label(self) -> str:
        """`attention.decode`; ops of every phase without one."""
        return self.op if self.phase == "any" else f"{self.op}.{self.phase}"

    def sites(self) -> tuple[str, ...]:
        """The names of the single call sites."""
        if not self.layers:
            return (self.site,)
        return tuple(self.site.replace("*", str(layer)) for layer in self.layers)


class PlanDocument(_Part):
    """A plan. devices: specifications of the group's devices as plain data."""

    model: Mapping[str, Any] = Field(default_factory=dict)
    device: str = ""
    devices: tuple[Mapping[str, Any], ...] = ()
    settings: Mapping[str, Any] = Field(default_factory=dict)
    versions: Mapping[str, str] = Field(default_factory=dict)
    policy: Mapping[str, Mapping[str, str]] = Field(default_factory=dict)
    ops: tuple[PlanOpDocument, ...] = ()
    hash: str = ""


class KernelDocument(_Part):
    """Hashes of a candidate's source; see `kernel_sources.KernelSource`."""

    distribution: str = "halstack"
    modules: tuple[str, ...] = ()
    source: str = ""
    evidence: str = ""
    record: str = ""


class LockDocument(_Part):
    """A lock: a plan with everything that it depends on. devices: device id -> profile hash."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal["halstack.lock/1"] = Field(alias="schema")
    model: str
    plan_hash: str
    versions: Mapping[str, str] = Field(default_factory=dict)
    environment: Mapping[str, str] = Field(default_factory=dict)
    devices: Mapping[str, str] = Field(default_factory=dict)
    kernels: Mapping[str, KernelDocument] = Field(default_factory=dict)
    settings: Mapping[str, Any] = Field(default_factory=dict)
    plan: PlanDocument


def plan_from(document: Mapping[str, Any], path: Path) -> PlanDocument:
    """The plan in parsed JSON.

    Raises:
        DocumentError: names file, key, required and found.
    """
    return _checked(PlanDocument, document, path)


def lock_from(document: Mapping[str, Any], path: Path) -> LockDocument:
    """The lock in parsed JSON. Raises DocumentError, also for another plan schema inside."""
    lock = _checked(LockDocument, document, path)
    inner = document["plan"].get("schema")
    if inner != PLAN_SCHEMA:
        raise DocumentError(
            f"{path}, key plan.schema", f'"{PLAN_SCHEMA}"', shown(inner), "write the lock anew"
        )
    return lock


def _checked(model: type[_Document], document: Mapping[str, Any], path: Path) -> _Document:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise located_error(error, path) from error


def read_lock(path: Path) -> LockDocument:
    """The lock in a file. Raises DocumentError."""
    document = parse_document(read_document_text(path), path)
    if document.get("schema") != LOCK_SCHEMA:
        found = shown(document.get("schema")) if "schema" in document else "no schema"
        raise DocumentError(
            f"{path}, key schema", f'"{LOCK_SCHEMA}"', found, "write it with `hal lock`"
        )
    return lock_from(document, path)
