"""One look at one family on one host: what is there, and which product each device is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hal.errors import HalError
from hal.host import HostProbe
from hal_backends.detecting.fabric import Fabric, Member
from hal_backends.detecting.rules import FamilyRules
from hal_backends.detecting.survey import FamilySurvey, survey_family, with_torch

if TYPE_CHECKING:
    from hal_backends.detecting.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A family on a host, looked at once."""

    host: HostProbe
    survey: FamilySurvey
    identities: Mapping[str, Identity]
    fabric: Fabric | None = None


_looks: dict[str, Look] = {}


def look_at_family(host: HostProbe, rules: FamilyRules) -> Look:
    """What is on `host`. Kept for as long as the same host is asked about: the hooks of one plug-in
    come one after the other, and a tool takes seconds."""
    kept = _looks.get(rules.backend)
    if kept is not None and kept.host is host:
        return kept
    survey = survey_family(host, rules)
    identities: Mapping[str, Identity] = {}
    if survey.cards and survey.error is None:
        survey, identities = _identified(host, survey)
    fabric: Fabric | None = None
    if identities and rules.fabric is not None and any(map(_may_be_linked, identities.values())):
        try:
            members = [
                Member(device_id=c.device_id, sighting=c.sighting, details=identity.details)
                for c in survey.cards
                for identity in [identities[c.device_id]]
            ]
            fabric = rules.fabric(host, members)
        except HalError as error:
            survey, identities = replace(survey, cards=(), error=error), {}
    look = Look(host=host, survey=survey, identities=identities, fabric=fabric)
    _looks[rules.backend] = look
    return look


def _may_be_linked(identity: Identity) -> bool:
    """Whether the product has a fabric, or nobody knows."""
    return identity.profile is None or identity.profile.fabric.value != "none"


def _identified(
    host: HostProbe, survey: FamilySurvey
) -> tuple[FamilySurvey, Mapping[str, Identity]]:
    from hal.errors import UserError
    from hal_backends.detecting.identity import identify
    from hal_capability_db import load_database

    try:
        database = load_database()
        found = {c.device_id: identify(host, survey.rules, c, database) for c in survey.cards}
        # Without a tool only torch knows the name; it is asked only if the PCI id is not enough.
        is_open = any(i.profile is None for i in found.values()) and not survey.report.devices
        if is_open and survey.build is not None and not survey.missing:
            survey = with_torch(host, survey)
            found = {c.device_id: identify(host, survey.rules, c, database) for c in survey.cards}
    except UserError as error:
        return replace(survey, cards=(), error=error), {}
    return survey, found
