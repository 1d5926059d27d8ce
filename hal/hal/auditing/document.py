"""The report of an audit as data: "halstack.audit/1". Every view and every gate reads this.

One document for both kinds of audit: of a model in our engine (rows are planned call sites) and of
any PyTorch program (rows are what was observed, by source line). Numbers are finite, counts and
amounts not negative and not beyond what can be, shares between 0 and 1; that totals hold what their
rows do is `totals_problem`, which readers of files ask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from hal.auditing.gates import GateClass, Severity

SCHEMA: Final = "halstack.audit/1"

LeafState = Literal["seen", "other", "not-observed", "not-declared"]
RowState = Literal["planned", "never-exercised", "not-planned", "observed"]

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
TimeUs = Annotated[float, Field(ge=0, le=1e18)]
"""µs; a thousand processes for thirty years."""
Amount = Annotated[float, Field(ge=0, le=1e36)]
"""FLOPs, bytes, and either a second."""
Share = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    """A piece of the document: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Location(Part):
    """A line of source. file: as the program was found, relative to the working directory if in
    it. line: 0 is the file as a whole."""

    file: str
    line: Count
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Evidence(Part):
    """One fact behind a finding or a rejection: what, the value that is required, and the found."""

    what: str
    required: str
    found: str


class Work(Part):
    """What ran, summed. time_us: wall time inside the calls; None where nobody measured."""

    calls: Count = 0
    flops: Amount = 0.0
    bytes: Amount = 0.0
    time_us: TimeUs | None = None


class Finding(Part):
    """One loss: what, where, what it costs, how it is known, what to change.

    rule: id of the rule that found it. op: op family ("attention", "gemm") or call of the plan.
    site: call site of a plan, "" outside one. time_us, time_share: of the calls concerned; share
    of all observed time. cost_us: at least so much would be saved; None where nobody can say.
    waiver: the waiver that allows it, as text. rank: of a process group, where they differ.
    """

    rule: str
    gate: GateClass
    severity: Severity
    title: str
    op: str = ""
    site: str = ""
    location: Location | None = None
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
    calls: Count = 0
    time_us: TimeUs | None = None
    time_share: Share | None = None
    cost_us: TimeUs | None = None
    waiver: str | None = None
    rank: Count | None = None

    @property
    def where(self) -> str:
        """Call site or file:line, for people."""
        return self.site or ("" if self.location is None else str(self.location))

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stay the same while lines move: for diffs and for SARIF."""
        place = self.site
        if not place and self.location is not None:
            place = f"{self.location.file}#{self.location.function}"
        facts = [self.rule, self.op, place, *(f"{e.what}={e.required}" for e in self.evidence)]
        return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()


class LeafCheck(Part):
    """What a row was to end in, and what was seen. state: "seen" (a declared leaf ran), "other"
    (others ran instead), "not-observed" (nothing here can see it), "not-declared"."""

    declared: tuple[str, ...] = ()
    seen: Mapping[str, Count] = Field(default_factory=dict)
    state: LeafState = "not-declared"
    proof: str = ""


class Loser(Part):
    """A better-ranked implementation that did not run. gain_us: estimated, for all calls of the
    row; None where unknown."""

    name: str
    tier: str
    reasons: tuple[Evidence, ...] = ()
    gain_us: TimeUs | None = None
    unlock: tuple[str, ...] = ()


class Row(Part):
    """One implementation at one place. site: call site with its layer, or "" for a program, whose
    place is `location`. arguments: shapes and dtypes, short. bound_us: roofline time of all its
    calls on the device's measured rates; bound_by: "memory", "compute" or "link"."""

    op: str
    phase: str = "any"
    site: str = ""
    layer: Count | None = None
    tokens: tuple[Count, Count] | None = None
    arguments: str = ""
    implementation: str
    tier: str = "unknown"
    state: RowState = "observed"
    calls: Count = 0
    flops: Amount = 0.0
    bytes: Amount = 0.0
    time_us: TimeUs | None = None
    bound_us: TimeUs | None = None
    bound_by: str | None = None
    leaf: LeafCheck = LeafCheck()
    losers: tuple[Loser, ...] = ()
    location: Location | None = None

    @property
    def achieved(self) -> float | None:
        """Roofline time over observed time: 1 is the bound. None where either is unknown."""
        if not self.time_us or self.bound_us is None:
            return None
        return self.bound_us / self.time_us


class Machine(Part):
    """The device that it ran on. Rates in operations/s by dtype, bandwidth in bytes/s; measured:
    whether they were measured here, or come from a database."""

    label: str
    device_id: str = ""
    arch: str = ""
    peak_flops: Mapping[str, Amount] = Field(default_factory=dict)
    memory_bandwidth: Amount | None = None
    is_measured: bool = False


class Variable(Part):
    """A variable of the environment that changes a decision or makes it slow. source: whose."""

    name: str
    value: str
    effect: str
    changes_decision: bool = False
    is_slow: bool = False
    source: str = ""


class Refusal(Part):
    """An error of ours that refused something. swallowed: the program went on in spite of it."""

    who: str
    required: str
    found: str
    remedy: str = ""
    location: Location | None = None
    is_swallowed: bool = False


class WaiverUse(Part):
    """A waiver and whether it was needed. state: "used", "unused", "expired", "over-broad"."""

    text: str
    state: Literal["used", "unused", "expired", "over-broad"]
    calls: Count = 0


class Verification(Part):
    """Sampled calls run again with the reference. worst: largest error over its tolerance; above
    1 is a divergence. first_divergence, first_non_finite: the first call site, in call order."""

    share: Share
    compared_calls: Count
    skipped_calls: Count = 0
    worst: Annotated[float, Field(ge=0)] | None = None
    worst_site: str | None = None
    first_divergence: str | None = None
    first_non_finite: str | None = None


class AuditReport(Part):
    """A whole audit.

    kind: "model" or "program". subject: model or command line. mode: "light" (counters and
    sampled steps) or "full" (every op seen, slow). coverage: work by tier, "outside" for what ran
    outside bound ops, "host" for host ops and copies within a step. time_us: observed, in all.
    """

    schema_version: Literal["halstack.audit/1"] = Field(default=SCHEMA, alias="schema")
    kind: Literal["model", "program"]
    subject: str
    created: str
    mode: Literal["light", "full"] = "full"
    machine: Machine
    versions: Mapping[str, str] = Field(default_factory=dict)
    plan_hash: str | None = None
    time_us: TimeUs | None = None
    coverage: Mapping[str, Work] = Field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    variables: tuple[Variable, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    waivers: tuple[WaiverUse, ...] = ()
    verification: Verification | None = None
    processes: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1
    notes: tuple[str, ...] = ()

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True
    )

    def to_json(self) -> str:
        """The document, indented, keys as in the schema."""
        return self.model_dump_json(by_alias=True, indent=1)

    def open_findings(self) -> list[Finding]:
        """Findings that no waiver allows, worst first: errors, then by what they cost."""
        order = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
        waiting = [finding for finding in self.findings if finding.waiver is None]
        return sorted(
            waiting,
            key=lambda f: (order[f.severity], -(f.cost_us or 0.0), -(f.time_us or 0.0), f.rule),
        )
