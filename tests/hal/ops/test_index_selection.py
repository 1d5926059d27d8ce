"""The indexer in one call: lists by Python's own sort over scores of the formula, request, work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.errors import RequestError
from hal.ops.index_selection import (
    IndexSelectionRequest,
    bytes_moved,
    flops,
    reference,
    scored_pairs,
)
from hal.ops.request import TokenRange
from op_inputs import metadata, normal, paged

MIXED = [(5, 41), (1, 1), (0, 20), (3, 3), (1, 50), (17, 17)]  # queries, length


def request_of(**more: Any) -> IndexSelectionRequest:
    given: dict[str, Any] = {
        "num_heads": 3,
        "head_dim": 12,
        "key_format": "bf16",
        "block_size": 8,
        "dtype": "float64",
        "phase": "prefill",
        "top_k": 6,
    }
    return IndexSelectionRequest(**(given | more))


def one_query(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, seen: int
) -> dict[int, float]:
    """Scores of the entries that a query sees, one dot at a time."""
    found = {}
    for entry in range(seen):
        dots = q.double().view(len(weights), -1) @ keys[entry].double()
        found[entry] = float((dots.clamp(min=0) * weights.double()).sum())
    return found


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("form", ["all", "limited", "publishing"])
def test_lists_against_a_sort_of_single_dots(form: str, ratio: int, rng: torch.Generator) -> None:
    request = request_of(
        compress_ratio=ratio,
        candidate_blocks=0 if form == "all" else 2,
        publishes_candidates=form == "publishing",
    )
    keys = [normal(rng, length // ratio, 12) for _, length in MIXED]
    cache, table = paged(rng, "bf16", keys, 8)
    tokens = sum(new for new, _ in MIXED)
    q, weights = normal(rng, tokens + 1, 36), normal(rng, tokens + 1, 3)
    candidates = torch.tensor([[1, 0]] * (tokens + 1), dtype=torch.int32)
    candidates[0] = torch.tensor([-1, 2])
    found = reference(request, scale=1.0)(
        q, weights, cache, metadata(MIXED, table), *([candidates] if form == "limited" else [])
    )
    lists, blocks = found if form == "publishing" else (found, None)
    row = 0
    for (new, length), stored in zip(MIXED, keys, strict=True):
        for i in range(new):
            seen = (length - new + i + 1) // ratio
            scores = one_query(q[row], weights[row], stored, seen)
            if form == "limited":
                allowed = set(candidates[row].tolist())
                scores = {e: s for e, s in scores.items() if e // 8 in allowed}
            best = sorted(scores, key=lambda e: (-scores[e], e))[:6]
            assert lists[row].tolist() == best + [-1] * (6 - len(best))
            if blocks is not None:
                peaks = {e // 8: max(scores[x] for x in scores if x // 8 == e // 8) for e in scores}
                peaks |= {(seen - 1) // 8: float("inf")} if seen else {}
                most = sorted(peaks, key=lambda b: (-peaks[b], b))[:2]
                assert blocks[row].tolist() == most + [-1] * (2 - len(most))
            row += 1
    assert lists[row].tolist() == [-1] * 6  # a row that belongs to no sequence


@pytest.mark.parametrize(
    ("more", "required"),
    [
        ({"compress_ratio": 4, "pool_size": 3, "top_k": 6}, "a multiple of pool_size 3"),
        ({"top_k": 0}, "top_k >= 1"),
        ({"num_heads": 0}, "num_heads >= 1"),
        ({"publishes_candidates": True}, "candidate_blocks to publish"),
    ],
)
def test_inconsistent_requests_are_refused(more: dict[str, Any], required: str) -> None:
    with pytest.raises(RequestError, match=required):
        request_of(**more)


def test_work_of_a_limited_choice_does_not_grow_with_the_context() -> None:
    for phase, tokens in (("decode", 4), ("prefill", 4096)):
        work = []
        for context in (65_536, 131_072):
            limited = request_of(
                phase=phase, tokens=TokenRange(1, tokens), context_tokens=context,
                candidate_blocks=64, dtype="bfloat16",
            )  # fmt: skip
            work.append((flops(limited, tokens), bytes_moved(limited, tokens)))
            assert scored_pairs(limited, tokens) <= tokens * 512
        assert work[0] == work[1]
    everything = request_of(phase="decode", context_tokens=65_536, dtype="bfloat16")
    assert scored_pairs(everything, 4) == 4 * 65_536
    # q and weights, the keys, and a list: no score.
    expected = 4 * (3 * (12 * 2 + 4) + 6 * 4) + 4 * 65_536 * 12 * 2
    assert bytes_moved(everything, 4) == expected
