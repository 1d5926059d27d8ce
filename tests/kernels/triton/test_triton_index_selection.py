"""The Triton indexer in one call, in the interpreter: lists that no float64 score contradicts,
exact ties, and memory that does not grow with the context."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hal_kernels.index_logits.triton as triton_index_logits
import hal_kernels.index_selection.triton as triton_index_selection
import hal_kernels.index_top_k.triton as triton_index_top_k
from gpu_devices import gpu
from hal.ops.attention import AttentionMetadata
from hal.ops.index_logits import reference as score
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.low_precision import encode_fp8
from hal.ops.request import TokenRange
from hal_kernels.index_selection.pieces import (
    SCORE_BYTES,
    SMALLEST_PIECE,
    piece_size,
    workspace_bytes,
)
from sparse_cases import metadata, paged_rows

NAN, POISON = float("nan"), -77
Lengths = list[tuple[int, int]]
# Two sequences with prompts' tails, one without a query, one of a token, one that fills a piece.
PREFILL: Lengths = [(150, 9), (33, 0), (1, 1), (71, 3), (64, 2)]
DECODE: Lengths = [(150, 1), (1, 1), (64, 1), (65, 1), (20, 1)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 entries, so that short contexts have several."""
    monkeypatch.setattr(triton_index_selection, "piece_size", lambda tokens, entries: 64)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated holds values that would be chosen, or no entries at all."""
    empty = torch.empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(POISON if made.dtype == torch.int32 else float("inf"))

    monkeypatch.setattr(triton_index_selection.torch, "empty", poisoned_empty)


def request_of(phase: Any = "prefill", **more: Any) -> IndexSelectionRequest:
    arguments: dict[str, Any] = {
        "num_heads": 5,
        "head_dim": 40,
        "key_format": "bf16",
        "block_size": 16,
        "dtype": "bfloat16",
        "top_k": 16,
    }
    return IndexSelectionRequest(phase=phase, **{**arguments, **more})


class Inputs:
    """One batch of (context with the new tokens, new tokens), two rows that belong to no sequence
    behind it."""

    def __init__(self, request: IndexSelectionRequest, lengths: Lengths, *, ties: bool = False):
        entries = [length // request.compress_ratio for length, _ in lengths]
        cache, table = paged_rows(request.key_format, entries, request.head_dim, request.block_size)
        self.lengths, self.meta = lengths, metadata(lengths, table)
        tokens = sum(new for _, new in lengths) + 2
        q = torch.randn(tokens, request.num_heads * request.head_dim)
        if ties:  # small integers, whose sums are exact in any order
            cache = cache.nan_to_num(0.0).sign().where(~cache.isnan(), NAN)
            q = q.sign() * (torch.rand_like(q) < 0.1)
        is_fp8 = request.dtype == "float8_e4m3fn"
        self.q = encode_fp8(q, "fp8_e4m3fn") if is_fp8 else q.to(getattr(torch, request.dtype))
        weights = torch.randn(tokens, request.num_heads)
        self.weights = weights.sign() if ties else weights
        self.cache = cache
        seen = [
            (length - new + i + 1) // request.compress_ratio
            for length, new in lengths
            for i in range(new)
        ]
        self.seen = [*seen, 0, 0]

    @property
    def args(self) -> tuple[Any, ...]:
        return self.q, self.weights, self.cache, self.meta


def in_one_go(
    request: IndexSelectionRequest, arch: str, inputs: Inputs, candidates: torch.Tensor | None
) -> Any:
    """By the kernels of the two ops, through a matrix of all scores."""
    logits = triton_index_logits.bind(request.logits, gpu(arch), scale=0.3)(*inputs.args)
    units = request.compress_ratio // request.pool_size
    visible = torch.zeros(len(inputs.q), dtype=torch.int32)
    row = 0
    for length, new in inputs.lengths:
        for i in range(new):
            visible[row] = (length - new + i + 1) // units
            row += 1
    return triton_index_top_k.bind(request.choice, gpu(arch))(logits, visible, candidates)


def candidates_of(request: IndexSelectionRequest, inputs: Inputs) -> torch.Tensor:
    """Lists of some blocks that a query sees, in no order, padded between and behind."""
    rows = []
    for seen in inputs.seen:
        row = torch.full((request.candidate_blocks,), -1, dtype=torch.int32)
        most = max(1, request.candidate_blocks - 2)
        blocks = torch.randperm(-(-seen // 8))[:most].to(torch.int32)
        row[: len(blocks)] = blocks
        rows.append(row[torch.randperm(len(row))])
    return torch.stack(rows)


def check(request: IndexSelectionRequest, lengths: Lengths, arch: str = "sm_90") -> None:
    """Against float64: no entry that is left out is clearly above one that is chosen."""
    inputs = Inputs(request, lengths)
    limited = candidates_of(request, inputs) if request.is_limited else None
    kernel = triton_index_selection.bind(request, gpu(arch), scale=0.3)
    found = kernel(*inputs.args, limited)
    exact = score(request.logits, scale=0.3)(inputs.q.double(), *inputs.args[1:])
    most = score(request.logits, scale=0.3)(
        inputs.q.double(), inputs.weights.abs(), *inputs.args[2:]
    )
    lists = found[0] if request.publishes_candidates else found
    assert (lists.dtype, lists.shape) == (torch.int32, (len(inputs.q), request.width))
    for row, seen in enumerate(inputs.seen):
        allowed = set(range(seen))
        if limited is not None:
            named = set(limited[row].tolist()) - {-1}
            allowed = {entry for entry in allowed if entry // 8 in named}
        chosen = [entry for entry in lists[row].tolist() if entry >= 0]
        assert set(lists[row].tolist()[len(chosen) :]) <= {-1}
        assert len(set(chosen)) == len(chosen) == min(request.top_k, len(allowed))
        assert set(chosen) <= allowed
        left = sorted(allowed - set(chosen))
        if chosen and left:
            slack = 1e-4 * most[row, sorted(allowed)].max()
            assert exact[row, chosen].min() >= exact[row, left].max() - slack
    assert same(found, in_one_go(request, arch, inputs, limited))


def same(found: Any, other: Any) -> bool:
    """The same sets, of each list."""
    if isinstance(found, tuple):
        return all(same(a, b) for a, b in zip(found, other, strict=True))
    return torch.equal(found.sort(dim=1).values, other.sort(dim=1).values)


@pytest.mark.parametrize(
    ("key_format", "dtype", "arch"),
    [
        ("bf16", "bfloat16", "sm_90"),
        ("fp16", "float16", "gfx1100"),
        ("fp8_132", "bfloat16", "sm_80"),
        ("fp8_132", "float8_e4m3fn", "sm_120"),
        ("fp8_132", "float8_e4m3fn", "gfx942"),  # e4m3fnuz
        ("fp8_132", "float8_e4m3fn", "gfx90a"),  # widened
        ("fp4_68", "bfloat16", "sm_100"),
        ("fp4_68", "float8_e4m3fn", "sm_120"),
        ("fp4_68", "float8_e4m3fn", "gfx942"),
    ],
)
def test_formats_of_keys(key_format: str, dtype: str, arch: str) -> None:
    head_dim = 40 if KV_FORMATS[key_format].is_plain else 128
    more = {"key_format": key_format, "dtype": dtype, "head_dim": head_dim}
    check(request_of(**more), PREFILL, arch)
    for blocks in (0, 6):
        check(request_of("decode", candidate_blocks=blocks, **more), DECODE, arch)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"compress_ratio": 4},
        {"compress_ratio": 4, "pool_size": 4},
        {"compress_ratio": 12, "pool_size": 3, "top_k": 9},
        {"candidate_blocks": 6},
        {"candidate_blocks": 6, "publishes_candidates": True},
        {"candidate_blocks": 3, "publishes_candidates": True, "compress_ratio": 2},
        {"top_k": 100},
    ],
)
def test_forms_of_the_choice(phase: str, more: dict[str, Any]) -> None:
    request = request_of(phase, **more)
    if request.pool_size > 1:  # the lists name tokens of pools, which the two ops judge
        inputs = Inputs(request, PREFILL)
        kernel = triton_index_selection.bind(request, gpu("sm_90"), scale=0.3)
        assert same(kernel(*inputs.args), in_one_go(request, "sm_90", inputs, None))
    elif request.candidate_blocks * 8 >= request.top_k or not request.candidate_blocks:
        check(request, PREFILL if phase == "prefill" else DECODE)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("more", [{}, {"candidate_blocks": 6}])
def test_equal_scores(phase: str, more: dict[str, Any]) -> None:
    """Of equal scores the lower index, wherever a piece ends: exactly what one search chooses."""
    request = request_of(phase, top_k=40, **more)
    inputs = Inputs(
        request, [(400, 1)] * 3 if phase == "decode" else [(400, 5), (90, 3)], ties=True
    )
    limited = candidates_of(request, inputs) if more else None
    kernel = triton_index_selection.bind(request, gpu("sm_90"), scale=1.0)
    scores = score(request.logits, scale=0.3)(inputs.q.double(), *inputs.args[1:])
    assert len(scores[0, :300].unique()) < 150
    assert same(kernel(*inputs.args, limited), in_one_go(request, "sm_90", inputs, limited))


def test_a_score_that_is_not_a_number_is_never_chosen() -> None:
    request = request_of("decode", top_k=100)
    inputs = Inputs(request, [(130, 1)])
    page = inputs.meta.block_table[0, 5]
    inputs.cache[page, 3] = NAN  # entry 83, of the second piece
    kernel = triton_index_selection.bind(request, gpu("sm_90"), scale=0.3)
    found = kernel(*inputs.args)[0].tolist()
    assert 83 not in found
    assert sum(entry >= 0 for entry in found) == 100


def test_nothing_to_choose_from() -> None:
    request = request_of("decode", top_k=8)
    none = torch.zeros(1, dtype=torch.int32)
    meta = AttentionMetadata(none, none[:0], none[:0, None], 0, 0)
    cache = torch.zeros(1, 16, 40).bfloat16()
    kernel = triton_index_selection.bind(request, gpu("sm_90"), scale=1.0)
    empty = kernel(torch.zeros(0, 200).bfloat16(), torch.zeros(0, 5), cache, meta)
    assert empty.shape == (0, 8)
    padding = kernel(torch.zeros(3, 200).bfloat16(), torch.zeros(3, 5), cache, meta)
    assert padding.tolist() == [[-1] * 8] * 3


def test_candidates_that_the_request_does_not_have() -> None:
    request = request_of(candidate_blocks=6)
    inputs = Inputs(request, PREFILL)
    kernel = triton_index_selection.bind(request, gpu("sm_90"), scale=1.0)
    with pytest.raises(ValueError, match="required candidates, found none"):
        kernel(*inputs.args)


class Allocations:
    """The largest tensor that kernels of this project allocated, in elements, and the bytes of all.
    Those of the interpreter, which copies operands, are none of theirs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most, self.bytes = 0, 0
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, self._counted(getattr(torch, name)))

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = function(*args, **kwargs)
            if sys._getframe(1).f_globals["__name__"].startswith("hal_kernels."):
                self.most = max(self.most, made.numel())
                self.bytes += made.numel() * made.element_size()
            return made

        return counted


@pytest.mark.parametrize(
    ("phase", "more"),
    [
        ("prefill", {}),
        ("prefill", {"candidate_blocks": 6}),
        ("prefill", {"candidate_blocks": 6, "publishes_candidates": True}),
        ("decode", {}),
        ("decode", {"candidate_blocks": 6}),
    ],
)
def test_memory_does_not_grow_with_the_context(phase: str, more: dict[str, Any]) -> None:
    """What a call allocates is the same at a context four times as long, no tensor has a score of
    every pair, and it is what the plan says."""
    request = request_of(phase, **more)
    made = []
    for length in (300, 1200):
        inputs = Inputs(request, [(length, 1 if phase == "decode" else 4)])
        limited = candidates_of(request, inputs) if request.is_limited else None
        kernel = triton_index_selection.bind(request, gpu("sm_90"), scale=1.0)
        with pytest.MonkeyPatch.context() as patch:
            allocations = Allocations(patch)
            kernel(*inputs.args, limited)
        assert allocations.bytes > 0
        assert allocations.most < len(inputs.q) * length
        made.append(allocations.bytes)
    assert made[0] == made[1]


def test_planned_memory_is_what_a_call_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_index_selection, "piece_size", piece_size)
    for phase, length, new in (("prefill", 10_000, 2), ("decode", 3000, 1)):
        for more in ({}, {"candidate_blocks": 6}):
            request = request_of(phase, head_dim=16, num_heads=1, context_tokens=length, **more)
            inputs = Inputs(request, [(length, new)])
            limited = candidates_of(request, inputs) if request.is_limited else None
            kernel = triton_index_selection.bind(request, gpu("sm_90"), scale=1.0)
            with pytest.MonkeyPatch.context() as patch:
                allocations = Allocations(patch)
                found = kernel(*inputs.args, limited)
            tokens = len(inputs.q)
            whole: Any = request.with_tokens(TokenRange(1, tokens))
            planned = workspace_bytes(whole, length)
            assert allocations.bytes == planned + found.numel() * 4
            assert planned <= workspace_bytes(whole)  # what a plan says


@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(0, 20_000), entries=st.integers(0, 2_000_000))
def test_pieces(tokens: int, entries: int) -> None:
    """Pieces are whole tiles and blocks, cover the context, and keep to the budget where there is
    more than the smallest piece."""
    size = piece_size(tokens, entries)
    pieces = -(-max(1, entries) // size)
    assert size % 1024 == 0
    assert pieces * size >= entries > (pieces - 1) * size or entries == 0
    assert tokens * size * 4 <= SCORE_BYTES or size == SMALLEST_PIECE
    assert size >= min(SMALLEST_PIECE, entries)


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 6).map(lambda n: 8 * n),
    lengths=st.lists(
        st.tuples(st.integers(1, 120), st.integers(0, 4)).map(lambda x: (x[0], min(x))),
        min_size=1,
        max_size=3,
    ),
    top_k=st.integers(1, 70),
    ratio=st.integers(1, 3),
    form=st.sampled_from(["plain", "limited", "publishing"]),
)
def test_any_pieces_choose_what_one_search_does(
    size: int, lengths: Lengths, top_k: int, ratio: int, form: str
) -> None:
    blocks = 0 if form == "plain" else -(-top_k // 8)
    request = request_of(
        top_k=top_k, compress_ratio=ratio, head_dim=16, num_heads=1, candidate_blocks=blocks,
        publishes_candidates=form == "publishing",
    )  # fmt: skip
    inputs = Inputs(request, lengths)
    limited = candidates_of(request, inputs) if form == "limited" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_index_selection, "piece_size", lambda tokens, entries: size)
        found = triton_index_selection.bind(request, gpu("sm_90"), scale=0.3)(*inputs.args, limited)
    assert same(found, in_one_go(request, "sm_90", inputs, limited))
