"""Waivers: the only way to allow a slower tier or a change of meaning.

A waiver file is TOML with one `[[waiver]]` table each:

    [[waiver]]
    op = "attention.decode"            # glob over the op, or op.phase
    component = "layers.*.attention"   # glob over the call site; layers.3.attention is one layer
    device = "cpu:*"                   # glob over device id, arch or name
    kind = "tier"                      # or "semantic"; of an audit also what it gates
    reason = "the fast kernel lacks head_dim 80, see our ticket 12"
    owner = "serving team"
    expires = 2027-01-31               # the last day it holds
    max_call_share = 0.1               # the largest share of all call sites it may cover

One that is expired, unused or broader than it says is an error of a plan. An audit shows it as what
it is, and does not let it count; its waivers may be of the further kinds "unrouted",
"leaf-mismatch", "unverified" and "ignored-setting", which plans pass over.
"""

import datetime
import json
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hal.auditing.trace import OpClass
from hal.device import DeviceSpec
from hal.errors import WaiverError
from hal.model_errors import describe_first_error
from hal.ops import CATALOGUE
from hal.ops.request import OpRequest
from hal.suggestions import did_you_mean
from hal.text_files import read_regular_text

WaiverKind = Literal[
    "tier", "semantic", "unrouted", "leaf-mismatch", "unverified", "ignored-setting"
]
PLAN_KINDS: tuple[WaiverKind, ...] = ("tier", "semantic")
"""What a plan can lose. The other kinds are of audits: classes of findings, see `hal.auditing`."""
_PROPOSED_DAYS = 30
_REASON_TO_FILL_IN = "<why this is acceptable, and until what happens>"
_OWNER_TO_FILL_IN = "<who answers for it>"
# Call sites that only a glob for every site has in common.
_UNLIKE_SITES = ("embed", "lm_head", "layers.0.input_norm", "sampler.top_k_top_p")


class Waiver(BaseModel):
    """One allowed fallback."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    op: str = Field(min_length=1, description="glob over the op, or op.phase")
    component: str = Field(min_length=1, description="glob over the call site")
    device: str = Field(min_length=1, description="glob over device id, arch or name")
    kind: WaiverKind = Field(
        description='"tier" or "semantic"; of audits also "unrouted", "leaf-mismatch", '
        '"unverified", "ignored-setting"'
    )
    reason: str = Field(min_length=1, description="why the fallback is acceptable")
    owner: str = Field(min_length=1, description="who answers for it")
    expires: datetime.date = Field(description="the last day it holds, as a TOML date")
    max_call_share: float = Field(
        gt=0, le=1, description="the largest share of all call sites it may cover, in (0, 1]"
    )

    @field_validator("reason", "owner")
    @classmethod
    def _is_filled_in(cls, value: str) -> str:
        if not value.strip() or (value.startswith("<") and value.endswith(">")):
            raise ValueError("must be filled in by the person who allows the fallback")
        return value

    def describe(self) -> str:
        """The waiver in one line, as a plan shows it."""
        return (
            f"{self.kind} waiver for {self.op} at {self.component} on {self.device}: "
            f"{self.reason} (owner {self.owner}, until {self.expires.isoformat()}, "
            f"at most {self.max_call_share:.0%} of call sites)"
        )

    def covers_site(self, request: OpRequest, site: str) -> bool:
        """Whether the op and the call site are within the globs."""
        is_op = fnmatchcase(request.label, self.op) or fnmatchcase(request.op, self.op)
        return is_op and fnmatchcase(site, self.component)

    def covers_device(self, device: DeviceSpec) -> bool:
        """Whether the device's id, arch or name is within the glob."""
        names = (device.device_id, device.arch, device.name)
        return any(fnmatchcase(name, self.device) for name in names)


class WaiverBook:
    """The waivers of one run, and which of them were used.

    is_lenient: an audit's, which shows what is unused or over-broad instead of failing for it.
    """

    def __init__(
        self,
        waivers: Sequence[Waiver] = (),
        source: str = "waivers",
        *,
        is_lenient: bool = False,
    ) -> None:
        self.waivers = tuple(waivers)
        self.source = source
        self.is_lenient = is_lenient
        self._used: set[int] = set()
        self._applicable: set[int] = set()

    def match(
        self, request: OpRequest, site: str, device: DeviceSpec, kind: WaiverKind
    ) -> Waiver | None:
        """The first waiver of that kind that covers the call site, marked as used; None if none
        does."""
        return self._look(request, site, device, kind, is_use=True)

    def find(
        self, request: OpRequest, site: str, device: DeviceSpec, kind: WaiverKind
    ) -> Waiver | None:
        """The same without a use: whether a waiver would allow the call is not yet a need of it."""
        return self._look(request, site, device, kind, is_use=False)

    def _look(
        self, request: OpRequest, site: str, device: DeviceSpec, kind: WaiverKind, *, is_use: bool
    ) -> Waiver | None:
        found = None
        for index, waiver in enumerate(self.waivers):
            if not waiver.covers_device(device):
                continue
            self._applicable.add(index)
            if found is None and waiver.kind == kind and waiver.covers_site(request, site):
                if is_use:
                    self._used.add(index)
                found = waiver
        return found

    def covering(self, request: OpRequest, site: str, device: DeviceSpec) -> tuple[int, ...]:
        """Which waivers cover the call site. Sites with equal answers can be decided together."""
        return tuple(
            index
            for index, waiver in enumerate(self.waivers)
            if waiver.covers_device(device) and waiver.covers_site(request, site)
        )

    def check_after_planning(
        self,
        sites: Sequence[tuple[str, OpRequest]],
        compiled: Sequence[tuple[str, OpRequest]] = (),
    ) -> list[WaiverError]:
        """Judge the waivers for the planned device once every call site is decided.

        compiled: call sites whose kernels are compiled when they are first called: what allows a
        slower tier there may be needed yet. Returned is what to raise once all of them compiled.

        Raises:
            WaiverError: one was not needed, or covers more of the call sites than it says.
        """
        pending: list[WaiverError] = []
        for index in sorted(self._applicable):
            waiver = self.waivers[index]
            if self.is_lenient or waiver.kind not in PLAN_KINDS:
                continue
            if index not in self._used:
                if waiver.kind == "tier" and any(waiver.covers_site(r, s) for s, r in compiled):
                    pending.append(self._unused(index, sites))
                    continue
                raise self._unused(index, sites)
            covered = sum(waiver.covers_site(request, site) for site, request in sites)
            share = covered / len(sites) if sites else 0.0
            if share > waiver.max_call_share:
                raise WaiverError(
                    self._who(index),
                    f"at most {waiver.max_call_share:.1%} of the call sites (max_call_share)",
                    f"{covered} of {len(sites)} call sites, {share:.1%}",
                    "narrow op or component, or raise max_call_share knowingly",
                )
        return pending

    def _unused(self, index: int, sites: Sequence[tuple[str, OpRequest]]) -> WaiverError:
        waiver = self.waivers[index]
        if any(waiver.covers_site(request, site) for site, request in sites):
            found = self._why_not_needed(index, sites)
        else:
            names = {site for site, _ in sites} | {request.label for _, request in sites}
            wanted = waiver.component if "*" not in waiver.component else waiver.op
            found = f"no call site matches; {did_you_mean(wanted, names)}"
        return WaiverError(
            self._who(index),
            "a waiver that is needed",
            found,
            "correct it or remove it" if "no call site" in found else "remove it from the file",
        )

    def _why_not_needed(self, index: int, sites: Sequence[tuple[str, OpRequest]]) -> str:
        waiver = self.waivers[index]
        covered = [(s, request) for s, request in sites if waiver.covers_site(request, s)]
        for other in sorted(self._used):
            earlier = self.waivers[other]
            if earlier.kind == waiver.kind and any(earlier.covers_site(r, s) for s, r in covered):
                return f"waiver {other + 1}, which comes before it, allows its calls"
        return "its calls have the best tier without it"

    def _who(self, index: int) -> str:
        waiver = self.waivers[index]
        return f"{self.source}, waiver {index + 1} ({waiver.op} at {waiver.component})"


def load_waivers(path: Path | str, *, today: datetime.date | None = None) -> WaiverBook:
    """Read and check a waiver file.

    Args:
        path: the TOML file.
        today: the date that expiry is judged by; the local date by default.

    Raises:
        WaiverError: the file is missing, malformed, or has an expired or over-broad waiver.
    """
    source, text = read_waiver_text(path)
    return parse_waivers(text, source, today=today)


def read_waiver_text(path: Path | str) -> tuple[str, str]:
    """What errors call the file, and its text. Raises WaiverError if it cannot be read."""
    source = f"waiver file {path}"
    try:
        return source, read_regular_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise WaiverError(
            source, "a readable text file", str(error), "correct the path or the permissions"
        ) from error


def parse_waivers(text: str, source: str, *, today: datetime.date | None = None) -> WaiverBook:
    """The same for the text of a waiver file; `source` names it in errors."""
    date = datetime.date.today() if today is None else today
    waivers = parse_waiver_tables(text, source)
    for number, waiver in enumerate(waivers, 1):
        problem = problem_alone(waiver, f"{source}, waiver {number}", date)
        if problem is not None:
            raise problem
    return WaiverBook(waivers, source)


def parse_waiver_tables(text: str, source: str) -> list[Waiver]:
    """The waivers of a text, whatever their dates and breadth. Raises WaiverError for another form,
    and for an op that there is not."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number too long, of too many levels
        raise WaiverError(source, "TOML", str(error), "correct the syntax") from error
    unknown = sorted(set(document) - {"waiver"})
    if unknown:
        raise WaiverError(
            source,
            "only [[waiver]] tables",
            f"the unknown key {unknown[0]!r}",
            did_you_mean(unknown[0], ["waiver"]),
        )
    tables = document.get("waiver", [])
    if not isinstance(tables, list):
        raise WaiverError(source, "[[waiver]] tables", "[waiver]", "write double brackets")
    return [_waiver(table, f"{source}, waiver {n}") for n, table in enumerate(tables, 1)]


def _waiver(table: Any, who: str) -> Waiver:
    try:
        waiver = Waiver.model_validate(table)
    except ValidationError as error:
        key, required, found, remedy = describe_first_error(error, Waiver)
        raise WaiverError(f"{who}, key {key}", required, found, remedy) from error
    _check_op(waiver, who)
    return waiver


def problem_alone(waiver: Waiver, who: str, today: datetime.date) -> WaiverError | None:
    """Why a well-formed waiver may not count whatever it is used for: expired, or over-broad."""
    if waiver.expires < today:
        return WaiverError(
            who,
            f"a waiver that holds today, {today.isoformat()}",
            f"expired on {waiver.expires.isoformat()}",
            f"remove the fallback, or ask {waiver.owner} to renew it",
        )
    is_every_site = all(fnmatchcase(site, waiver.component) for site in _UNLIKE_SITES)
    if is_every_site and all(fnmatchcase(op, waiver.op) for op in CATALOGUE):
        return WaiverError(
            who,
            "a waiver that names what it allows",
            f"op {waiver.op!r} at component {waiver.component!r}, which is everything",
            "name the op or the component",
        )
    return None


def _check_op(waiver: Waiver, who: str) -> None:
    """Against the catalogue, and the classes that an audit puts the ops of any program into."""
    names = {label for family in CATALOGUE.values() for label in family.labels()}
    names |= set(get_args(OpClass))
    if not any(fnmatchcase(name, waiver.op) for name in names):
        raise WaiverError(
            who, "an op of the catalogue", repr(waiver.op), did_you_mean(waiver.op, names)
        )


def waiver_text(
    request: OpRequest,
    site: str,
    device: DeviceSpec,
    kind: WaiverKind,
    *,
    reason: str = _REASON_TO_FILL_IN,
    owner: str = _OWNER_TO_FILL_IN,
    max_call_share: float = 1.0,
    today: datetime.date | None = None,
) -> str:
    """The TOML of the waiver that would allow one fallback.

    As rendered it is not accepted: a person has to fill in reason and owner.
    """
    date = datetime.date.today() if today is None else today
    values = {
        "op": request.label,
        "component": site,
        "device": device.device_id,
        "kind": kind,
        "reason": reason,
        "owner": owner,
    }
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    expires = date + datetime.timedelta(days=_PROPOSED_DAYS)
    return "\n".join(
        [
            "[[waiver]]",
            *lines,
            f"expires = {expires.isoformat()}",
            f"max_call_share = {max_call_share}",
        ]
    )
