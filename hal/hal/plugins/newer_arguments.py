"""Keeps plug-ins from serving requests whose meaning they cannot see.

An op may get a further argument, with a default that means what was meant before. A plug-in that
accepts an API from before that argument does not look at it, and would serve a request with another
value of it as if it had the default. So it is not asked: the limit is added to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from types import MappingProxyType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hal.candidates import KernelCandidate
from hal.hookspecs import PLUGIN_API_VERSIONS
from hal.ops.request import OpFamily, OpRequest
from hal.reasons import Reason, ReasonKind


def unknown_arguments(
    family: OpFamily, api_range: str, versions: Sequence[str] = PLUGIN_API_VERSIONS
) -> Mapping[str, str]:
    """Argument -> version that added it, of those that a plug-in of that range may not know: the
    range contains a version from before them."""
    accepted = [
        Version(v) for v in versions if SpecifierSet(api_range).contains(v, prereleases=True)
    ]
    oldest = min(accepted, default=None)
    return MappingProxyType(
        {
            name: since
            for name, since in family.added.items()
            if oldest is not None and oldest < Version(since)
        }
    )


def guarded(
    candidate: KernelCandidate,
    family: OpFamily,
    api_range: str,
    versions: Sequence[str] = PLUGIN_API_VERSIONS,
) -> KernelCandidate:
    """The candidate, with a reason against any request whose newer arguments are in use."""
    unknown = unknown_arguments(family, api_range, versions)
    if not unknown:
        return candidate
    own, newer = candidate.not_supported_reasons, _newer(family, unknown, api_range)

    def reasons(request: OpRequest) -> Sequence[Reason]:
        # Its own predicate is asked as well: an answer that fails must be seen.
        return [*own(request), *newer(request)]

    return replace(candidate, not_supported_reasons=reasons)


def _newer(
    family: OpFamily, unknown: Mapping[str, str], api_range: str
) -> Callable[[OpRequest], list[Reason]]:
    defaults = {f.name: _default(family, f) for f in fields(family.request_type)}

    def reasons(request: OpRequest) -> list[Reason]:
        return [
            Reason(
                what=f"plug-in API, for {name} = {getattr(request, name)!r}",
                required=f"a plug-in written for {since} or later",
                found=api_range,
                kind=ReasonKind.SOFTWARE,
            )
            for name, since in unknown.items()
            if getattr(request, name) != defaults[name]
        ]

    return reasons


def _default(family: OpFamily, argument: Any) -> object:
    """Raises TypeError for a newer argument without a default: nobody could leave it out."""
    if argument.default is not MISSING:
        return argument.default
    if argument.name in family.added:
        raise TypeError(f"op {family.name}: required a default of {argument.name}, found none")
    return None
