"""What kinds of changes a diff knows, how bad each is, and which exit code says so.

Exit codes of `hal diff`, the worst kind that was found: 0 nothing; 10 renamed; 11 reasons; 12
faster; 13 version; 14 environment; 15 setting; 16 kernel-source; 17 profile; 18 implementation; 19
site-added; 20 site-removed; 21 model; 22 device; 23 slower; 24 semantics. With `--fail-on` it is 1
if one of those was found, else 0. 2 is a user's mistake, 130 an interrupt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from hal.auditing.gate import NO_GATE
from hal.errors import UsageError
from hal.suggestions import did_you_mean

DIFF_SCHEMA: Final = "halstack.diff/1"
Subject = Literal["lock", "plan", "report"]
_FIRST_CODE = 10


class ChangeKind(StrEnum):
    """From harmless to worst.

    RENAMED: another name, the same code. REASONS: only who lost and why, or what could be verified.
    FASTER, SLOWER: a better or worse tier; within a tier, by estimate, else by roofline. VERSION:
    of a distribution. ENVIRONMENT: a variable. SETTING: what the user asked for, waivers included.
    KERNEL_SOURCE: the code or the evidence of a kernel that kept its name. PROFILE: what the device
    is said to be able to, or its policy. IMPLEMENTATION: another one of the same tier; nobody can
    say which is faster. MODEL: other calls or another configuration. DEVICE: another device or
    number of them. SEMANTICS: other numbers, beyond rounding.
    """

    RENAMED = "renamed"
    REASONS = "reasons"
    FASTER = "faster"
    VERSION = "version"
    ENVIRONMENT = "environment"
    SETTING = "setting"
    KERNEL_SOURCE = "kernel-source"
    PROFILE = "profile"
    IMPLEMENTATION = "implementation"
    SITE_ADDED = "site-added"
    SITE_REMOVED = "site-removed"
    MODEL = "model"
    DEVICE = "device"
    SLOWER = "slower"
    SEMANTICS = "semantics"

    @property
    def exit_code(self) -> int:
        """10 for the most harmless, up to 24."""
        return _FIRST_CODE + list(ChangeKind).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference. what: a variable, a distribution, an op…; old, new: "" for none. where: call
    sites that share it. detail: why it is of that kind, in words."""

    kind: ChangeKind
    what: str
    old: str = ""
    new: str = ""
    where: tuple[str, ...] = ()
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "what": self.what,
            "old": self.old,
            "new": self.new,
            "where": list(self.where),
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """All changes between two documents of one kind, the worst first."""

    subject: Subject
    old: str
    new: str
    changes: tuple[Change, ...] = field(default=())

    @property
    def worst(self) -> ChangeKind | None:
        """The kind that decides the exit code."""
        return self.changes[0].kind if self.changes else None

    def exit_code(self, fail_on: frozenset[ChangeKind] | None = None) -> int:
        """Of the worst kind; with `fail_on` 1 if one of those was found, else 0."""
        if fail_on is not None:
            return int(any(change.kind in fail_on for change in self.changes))
        return 0 if self.worst is None else self.worst.exit_code

    def counts(self) -> Mapping[str, int]:
        """kind -> number of changes, the worst first."""
        found: dict[str, int] = {}
        for change in self.changes:
            found[change.kind.value] = found.get(change.kind.value, 0) + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": DIFF_SCHEMA,
            "subject": self.subject,
            "old": self.old,
            "new": self.new,
            "worst": None if self.worst is None else self.worst.value,
            "exit_code": self.exit_code(),
            "counts": dict(self.counts()),
            "changes": [change.to_dict() for change in self.changes],
        }


def sorted_changes(changes: Iterable[Change]) -> tuple[Change, ...]:
    """The worst first, equal ones as one with all their places."""
    merged: dict[tuple[str, ...], Change] = {}
    for change in changes:
        key = (change.kind.value, change.what, change.old, change.new, change.detail)
        earlier = merged.get(key)
        where = change.where if earlier is None else (*earlier.where, *change.where)
        merged[key] = Change(
            kind=change.kind,
            what=change.what,
            old=change.old,
            new=change.new,
            detail=change.detail,
            where=tuple(dict.fromkeys(where)),
        )
    return tuple(sorted(merged.values(), key=lambda c: (-c.kind.exit_code, c.what, c.old, c.new)))


def parse_change_kinds(text: str | None) -> frozenset[ChangeKind] | None:
    """The kinds of `--fail-on`; "none" alone for none, None where the option is not given.

    Raises:
        UsageError: an unknown word, with the nearest known one.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if words == [NO_GATE]:
        return frozenset()
    known = [kind.value for kind in ChangeKind]
    for word in words:
        if word not in known:
            raise UsageError(
                "option --fail-on",
                f"kinds of changes, comma separated: {', '.join(known)}; or {NO_GATE} alone",
                f"the unknown word {word!r}" if word else "an empty word",
                did_you_mean(word, [*known, NO_GATE]),
            )
    return frozenset(ChangeKind(word) for word in words)


def key_changes(
    kind: ChangeKind, old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterable[Change]:
    """A change for each key of two mappings that has another value."""
    for key in sorted({*old, *new}):
        before, after = value_text(old, key), value_text(new, key)
        if old.get(key) != new.get(key) or (key in old) != (key in new):
            yield Change(kind=kind, what=f"{prefix}{key}", old=before, new=after)


def value_text(mapping: Mapping[str, Any], key: str) -> str:
    """A value for people; "unset" for none at all."""
    if key not in mapping:
        return "unset"
    value = mapping[key]
    return value if isinstance(value, str) else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "none"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(_plain(item) if not isinstance(item, str) else item for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(item)}" for key, item in value.items()) or "nothing"
    return str(value)
