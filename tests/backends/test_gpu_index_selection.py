"""Plans of sparse models: where an indexer's scores and choice are one call, and what it takes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from absent_plans import plan, profile, sites
from hal.plan import Plan
from hal_kernels.index_selection.pieces import SCORE_BYTES

SITE = "indexer.selection"
APART = ("indexer.logits", "indexer.top_k")


@functools.cache
def planned(preset: str, device: str) -> Plan:
    return plan(preset, profile(device), 8)


@pytest.mark.parametrize("device", ["rtx-pro-6000-blackwell-server", "mi300x", "rtx-4090"])
@pytest.mark.parametrize(
    "preset", ["deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5"]
)
def test_no_model_has_scores_of_every_pair(preset: str, device: str) -> None:
    found = planned(preset, device)
    for phase in ("decode", "prefill"):
        joined = sites(found, SITE, phase)
        assert joined
        assert all("triton" in op.choice.name for op in joined)
    assert not [op for op in found.ops if op.site.site.endswith(APART)]
    for op in found.to_dict()["ops"]:
        if op["op"] == "index_selection":
            taken = max(use["workspace_bytes"] for use in op["kernels"])
            assert 0 < taken < 2 * SCORE_BYTES
    assert [note for note in found.notes if "beside its operands and results" in note]


def test_layers_that_choose_among_candidates_are_joined_apart_from_the_others() -> None:
    found = planned("deepseek-v4.1-flash", "mi300x")
    forms: dict[tuple[int, ...], Any] = {
        op.site.layers: op.site.request for op in sites(found, SITE, "decode")
    }
    assert forms[24, 28, 32, 36].is_limited
    assert forms[20,].publishes_candidates
    assert forms[2, 8, 14].candidate_blocks == 0
