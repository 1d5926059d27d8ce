"""A plug-in is not asked about arguments of an op that are newer than itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from hal.candidates import KernelCandidate
from hal.ops import CATALOGUE
from hal.ops.request import OpFamily, OpRequest
from hal.plugins.newer_arguments import guarded, unknown_arguments
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier

VERSIONS = ("1.0", "1.1", "1.2")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest(OpRequest):
    """is_inverse came with 1.1, start with 1.2."""

    op: ClassVar[str] = "turn"

    dtype: str = "float32"
    is_inverse: bool = False
    start: int = 0


FAMILY = OpFamily(
    name="turn",
    request_type=TurnRequest,
    summary="",
    reference=lambda request: lambda x: x,
    flops=lambda request, tokens: 0.0,
    bytes_moved=lambda request, tokens: 0.0,
    tolerances={},
    added={"is_inverse": "1.1", "start": "1.2"},
)


def _float_only(request: TurnRequest) -> Sequence[Reason]:
    if request.dtype == "float32":
        return ()
    return (Reason(what="dtype", required="float32", found=request.dtype),)


CANDIDATE = KernelCandidate(
    name="acme.turn",
    op="turn",
    tier=Tier.TUNED,
    summary="",
    not_supported_reasons=_float_only,
    load=lambda: lambda request: lambda x: x,
)


@pytest.mark.parametrize(
    ("api_range", "unknown"),
    [
        (">=1.0,<2", {"is_inverse", "start"}),
        ("<2", {"is_inverse", "start"}),
        (">=1.1,<2", {"start"}),
        (">=1.2,<2", set()),
        (">1.1", set()),
        ("!=1.0", {"start"}),
        (">=3", set()),
    ],
)
def test_what_a_plugin_may_not_know(api_range: str, unknown: set[str]) -> None:
    assert set(unknown_arguments(FAMILY, api_range, VERSIONS)) == unknown


def test_an_old_plugin_serves_what_was_meant_before() -> None:
    old = guarded(CANDIDATE, FAMILY, ">=1.0,<2", VERSIONS)
    assert old.serves(TurnRequest())
    assert not old.serves(TurnRequest(is_inverse=True))
    reasons = old.not_supported_reasons(TurnRequest(is_inverse=True, start=4, dtype="int8"))
    assert [r.kind for r in reasons[1:]] == [ReasonKind.SOFTWARE] * 2
    assert reasons[0].what == "dtype"
    assert "is_inverse = True" in reasons[1].what
    assert "1.1" in reasons[1].required
    assert reasons[1].found == ">=1.0,<2"


def test_a_plugin_that_knows_them_is_asked() -> None:
    assert guarded(CANDIDATE, FAMILY, ">=1.2", VERSIONS) is CANDIDATE
    some = guarded(CANDIDATE, FAMILY, ">=1.1", VERSIONS)
    assert some.serves(TurnRequest(is_inverse=True))
    assert not some.serves(TurnRequest(start=1))


def test_a_newer_argument_needs_a_default() -> None:
    family = replace(CATALOGUE["rope"], added={"num_heads": "1.1"})
    with pytest.raises(TypeError, match="required a default of num_heads"):
        guarded(CANDIDATE, family, ">=1.0", VERSIONS)


def test_added_arguments_of_the_catalogue_exist() -> None:
    for family in CATALOGUE.values():
        assert family.added.keys() <= set(family.request_type.__dataclass_fields__)
