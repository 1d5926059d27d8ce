"""What changed between two plans or two locks, each change of its kind and none told twice.

Call sites are compared one by one, at every number of tokens where either plan changes, so that
moved ranges and regrouped layers are not taken for more than they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from hal.auditing.changes import Change, ChangeKind, Diff, key_changes, sorted_changes, value_text
from hal.auditing.lock import RATES, profile_of
from hal.auditing.op_changes import Comparison, SameSource, op_changes
from hal.auditing.plan_documents import LockDocument, PlanDocument, PlanOpDocument

_IDENTITY: Final = ("device_id", "name", "arch", "vendor", "backend", "torch_device")
_MAX_SHOWN = 12

# (site, phase, ranks) -> its ops by range of tokens
Sites = Mapping[tuple[str, str, tuple[int, ...]], list[PlanOpDocument]]


def diff_plans(old: PlanDocument, new: PlanDocument) -> Diff:
    """Two plans."""
    return Diff(
        subject="plan",
        old=old.hash,
        new=new.hash,
        changes=sorted_changes(_with_hash(list(_plan_changes(old, new, None)), old, new)),
    )


def diff_locks(old: LockDocument, new: LockDocument) -> Diff:
    """Two locks: their plans, and what these depend on."""
    versions = {**_versions(old.plan), **old.versions}, {**_versions(new.plan), **new.versions}
    changes = [
        *key_changes(ChangeKind.VERSION, *versions),
        *key_changes(ChangeKind.ENVIRONMENT, old.environment, new.environment),
        *_kernel_changes(old, new),
        *_profile_hashes(old, new),
    ]
    same_source = frozenset(
        (one, other)
        for one, kernel in old.kernels.items()
        for other, found in new.kernels.items()
        if kernel.source and kernel.source == found.source
    )
    changes += [
        change
        for change in _plan_changes(old.plan, new.plan, same_source)
        if change.kind is not ChangeKind.VERSION
    ]
    return Diff(
        subject="lock",
        old=old.plan_hash,
        new=new.plan_hash,
        changes=sorted_changes(_with_hash(changes, old.plan, new.plan)),
    )


def _with_hash(changes: list[Change], old: PlanDocument, new: PlanDocument) -> list[Change]:
    """Two plans of different hashes are never called equal."""
    if not changes and old.hash != new.hash:
        detail = "the plans differ in what is neither called nor shown here"
        changes.append(
            Change(
                kind=ChangeKind.REASONS, what="plan hash", old=old.hash, new=new.hash, detail=detail
            )
        )
    return changes


def _plan_changes(
    old: PlanDocument, new: PlanDocument, same_source: SameSource | None
) -> Iterator[Change]:
    yield from key_changes(ChangeKind.VERSION, _versions(old), _versions(new))
    yield from key_changes(ChangeKind.SETTING, old.settings, new.settings)
    yield from key_changes(ChangeKind.MODEL, old.model, new.model)
    yield from _policy_changes(old, new)
    devices = list(_device_changes(old, new))
    yield from devices
    comparison = Comparison(
        same_source=same_source,
        is_other_device=any(change.kind is ChangeKind.DEVICE for change in devices),
    )
    yield from _site_changes(_sites(old), _sites(new), comparison)


def _versions(plan: PlanDocument) -> dict[str, str]:
    """Of the plan and of what is installed beside its devices."""
    versions = dict(plan.versions)
    for device in plan.devices:
        software = device.get("software")
        if isinstance(software, Mapping):
            versions |= {str(name): str(version) for name, version in software.items()}
    return versions


def _policy_changes(old: PlanDocument, new: PlanDocument) -> Iterator[Change]:
    for part in sorted({*old.policy, *new.policy}):
        before, after = old.policy.get(part, {}), new.policy.get(part, {})
        yield from key_changes(ChangeKind.PROFILE, before, after, prefix=f"policy {part} ")


def _device_changes(old: PlanDocument, new: PlanDocument) -> Iterator[Change]:
    if len(old.devices) != len(new.devices):
        yield Change(
            kind=ChangeKind.DEVICE,
            what="number of devices",
            old=str(len(old.devices)),
            new=str(len(new.devices)),
        )
    for before, after in zip(old.devices, new.devices, strict=False):
        changed = [key for key in _IDENTITY if before.get(key) != after.get(key)]
        if any(key in changed for key in ("name", "arch", "vendor")):
            yield Change(
                kind=ChangeKind.DEVICE,
                what="device",
                old=_device(before),
                new=_device(after),
            )
            continue
        for key in changed:
            yield Change(
                kind=ChangeKind.DEVICE,
                what=key,
                old=value_text(before, key),
                new=value_text(after, key),
            )
        yield from _profile_changes(profile_of(before), profile_of(after))


def _device(device: Mapping[str, Any]) -> str:
    return f"{device.get('name', '?')} ({device.get('arch', '?')})"


def _profile_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Field by field; of lists what is added and taken away, of mappings key by key."""
    for key in sorted({*before, *after} - set(_IDENTITY)):
        one, other = before.get(key), after.get(key)
        is_unknown = key in RATES and (key not in before or key not in after)
        if one == other or is_unknown:  # a rate is compared with one of its kind only
            continue
        if isinstance(one, list) and isinstance(other, list):
            gone = [str(item) for item in one if item not in other]
            added = [str(item) for item in other if item not in one]
            yield Change(
                kind=ChangeKind.PROFILE,
                what=key,
                old=", ".join(gone[:_MAX_SHOWN]),
                new=", ".join(added[:_MAX_SHOWN]),
                detail=f"{len(gone)} taken away, {len(added)} added",
            )
        elif isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from key_changes(ChangeKind.PROFILE, one, other, prefix=f"{key}.")
        else:
            yield Change(
                kind=ChangeKind.PROFILE,
                what=key,
                old=value_text(before, key),
                new=value_text(after, key),
            )


def _profile_hashes(old: LockDocument, new: LockDocument) -> Iterator[Change]:
    """A profile whose hash differs though the plan inside shows nothing: a lock that was edited."""
    if any(
        change.kind in (ChangeKind.PROFILE, ChangeKind.DEVICE)
        for change in _device_changes(old.plan, new.plan)
    ):
        return
    yield from key_changes(ChangeKind.PROFILE, old.devices, new.devices, prefix="profile hash of ")


def _kernel_changes(old: LockDocument, new: LockDocument) -> Iterator[Change]:
    """Of candidates that both locks chose. Another version of their distribution says it all."""
    for name in sorted({*old.kernels} & {*new.kernels}):
        before, after = old.kernels[name], new.kernels[name]
        if before.source != after.source or before.record != after.record:
            foreign = before.distribution
            is_another_version = old.versions.get(foreign) != new.versions.get(foreign)
            if foreign != "halstack" and is_another_version:
                continue
            gone = sorted({*before.modules} - {*after.modules})
            added = sorted({*after.modules} - {*before.modules})
            yield Change(
                kind=ChangeKind.KERNEL_SOURCE,
                what=name,
                old=before.source,
                new=after.source,
                detail="; ".join(
                    f"{word} {', '.join(names[:_MAX_SHOWN])}"
                    for word, names in (("without", gone), ("with", added))
                    if names
                ),
            )
        elif before.evidence != after.evidence:
            yield Change(
                kind=ChangeKind.KERNEL_SOURCE,
                what=f"evidence of {name}",
                old=before.evidence,
                new=after.evidence,
                detail="what its machine code proves on this architecture",
            )


def _sites(plan: PlanDocument) -> Sites:
    found: dict[tuple[str, str, tuple[int, ...]], list[PlanOpDocument]] = {}
    for op in plan.ops:
        for site in op.sites():
            found.setdefault((site, op.phase, op.ranks), []).append(op)
    return found


def _site_changes(old: Sites, new: Sites, comparison: Comparison) -> Iterator[Change]:
    gone = [key for key in old if key not in new]
    added = [key for key in new if key not in old]
    for key in list(gone):  # the same calls under another name
        twin = next((other for other in added if _same_calls(old[key], new[other])), None)
        if twin is not None:
            gone.remove(key)
            added.remove(twin)
            yield Change(
                kind=ChangeKind.RENAMED, what=f"call site {key[0]}", old=key[0], new=twin[0]
            )
    for kind, keys, ops in (
        (ChangeKind.SITE_REMOVED, gone, old),
        (ChangeKind.SITE_ADDED, added, new),
    ):
        for key in keys:
            first = ops[key][0]
            names = ", ".join(dict.fromkeys(op.choice for op in ops[key]))
            sides = {"old": names} if kind is ChangeKind.SITE_REMOVED else {"new": names}
            yield Change(kind=kind, what=first.label, where=(key[0],), **sides)
    for key in old:
        if key in new:
            for before, after, _ in _overlaps(old[key], new[key]):
                yield from op_changes(key[0], before, after, comparison)


def _same_calls(old: list[PlanOpDocument], new: list[PlanOpDocument]) -> bool:
    def facts(ops: Iterable[PlanOpDocument]) -> list[Any]:
        return [(op.label, op.tokens, dict(op.arguments), op.choice, op.ranks) for op in ops]

    return facts(old) == facts(new)


def _overlaps(
    old: list[PlanOpDocument], new: list[PlanOpDocument]
) -> Iterator[tuple[PlanOpDocument, PlanOpDocument, tuple[int, int]]]:
    """Pairs of ops with the numbers of tokens that both serve."""
    for before in old:
        for after in new:
            low = max(before.tokens[0], after.tokens[0])
            high = min(before.tokens[1], after.tokens[1])
            if low <= high:
                yield before, after, (low, high)
