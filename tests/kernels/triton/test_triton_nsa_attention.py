"""Triton native sparse attention in the interpreter: its choice and its result against float64.

Which of two blocks of almost the same importance is chosen is left to the rounding. So the choice
is judged by the exact importances, and the result by the exact attention over what was chosen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import hal_kernels.nsa_attention.triton as triton_nsa
import hal_kernels.nsa_attention.triton_variants as variants
from block_lists import fill_pages, list_metadata, starts_of
from gpu_devices import gpu
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.attention import reference as plain_attention
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest
from hal.ops.block_sparse_attention import reference as listed_attention
from hal.ops.kv_compressor import CompressorMetadata, KvCompressorRequest
from hal.ops.kv_compressor import reference as compressor
from hal.ops.nsa_attention import NsaAttentionRequest, NsaCaches, NsaMetadata, reference
from hal_kernels.nsa_attention.triton_limits import not_supported_reasons
from kernel_errors import assert_exact

SCALE = 0.3


def request_of(**fields: Any) -> NsaAttentionRequest:
    defaults: dict[str, Any] = {
        "phase": "prefill",
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 24,
        "v_head_dim": 20,
        "block_size": 16,
        "dtype": "bfloat16",
        "compress_length": 8,
        "compress_stride": 4,
        "select_size": 16,
        "num_selected": 4,
        "num_initial": 1,
        "num_local": 1,
        "window": 24,
        "publishes_blocks": True,
    }
    return NsaAttentionRequest(**(defaults | fields))


def caches_of(
    request: NsaAttentionRequest, lengths: list[int]
) -> tuple[NsaCaches, torch.Tensor, torch.Tensor]:
    """(caches, table of positions, table of entries): shuffled pages, NaN where unwritten."""

    def pair(counts: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        pages = sum(-(-count // request.block_size) for count in counts) + 2
        free = torch.randperm(pages).tolist()
        dtype: torch.dtype = getattr(torch, request.dtype)
        shape = (pages, request.block_size, request.num_kv_heads)
        both = [
            torch.full((*shape, dim), float("nan"), dtype=dtype)
            for dim in (request.head_dim, request.v_head_dim)
        ]
        for cache in both:
            table = fill_pages(cache, counts, list(free))
        return both, table

    entries, entry_table = pair([request.entries_at(length) for length in lengths])
    selected, table = pair(lengths)
    window = [torch.where(c.isnan(), c, torch.randn_like(c)) for c in selected]
    return NsaCaches(*entries, *selected, *window), table, entry_table


Case = tuple[torch.Tensor, torch.Tensor, NsaCaches, NsaMetadata]


def case_of(
    request: NsaAttentionRequest, lengths: list[tuple[int, int]], magnitude: float = 1.0
) -> Case:
    """Inputs of one batch of (context with the new tokens, new tokens)."""
    caches, table, entry_table = caches_of(request, [length for length, _ in lengths])
    caches.entry_keys *= magnitude
    meta = NsaMetadata(
        query_start_loc=starts_of([new for _, new in lengths]),
        seq_lens=torch.tensor([length for length, _ in lengths], dtype=torch.int32),
        block_table=table,
        entry_block_table=entry_table,
        max_query_len=max(new for _, new in lengths),
        max_seq_len=max(length for length, _ in lengths),
    )
    tokens, width = sum(new for _, new in lengths), request.num_heads * request.head_dim
    dtype: torch.dtype = getattr(torch, request.dtype)
    q = torch.randn(tokens, width + 16).to(dtype)[:, 8:-8]
    gates = 2 * torch.randn(tokens, request.num_heads, 3).to(dtype)
    return q, gates, caches, meta


def widened(caches: NsaCaches) -> NsaCaches:
    return NsaCaches(*(getattr(caches, f.name).double() for f in dataclasses.fields(caches)))


def in_float64(request: NsaAttentionRequest, case: Case, blocks: torch.Tensor) -> torch.Tensor:
    """The exact result for a given choice: branches from the references of other ops."""
    q, gates, caches, meta = case
    wide = widened(caches)
    closed = gates.double().clone()
    closed[..., 1:] = float("-inf")  # the compressed branch alone
    compressed, _ = reference(request, scale=SCALE)(q.double(), closed, wide, meta)
    lengths = list(zip(meta.seq_lens.tolist(), meta.query_start_loc.diff().tolist(), strict=True))
    shape: dict[str, Any] = {
        "num_heads": request.num_heads,
        "num_kv_heads": request.num_kv_heads,
        "head_dim": request.head_dim,
        "v_head_dim": request.v_head_dim,
        "block_size": request.block_size,
        "dtype": "float64",
    }
    listed = BlockSparseAttentionRequest(
        **shape,
        query_block=1,
        key_block=request.select_size,
        num_selected=request.num_selected,
    )
    selected = listed_attention(listed, scale=SCALE)(
        q.double(),
        wide.selected_keys,
        wide.selected_values,
        blocks,
        list_metadata(lengths, meta.block_table, 1),
    )
    near = AttentionRequest(**shape, kv_dtype="float64", window=request.window)
    sliding = plain_attention(near, scale=SCALE)(
        q.double(),
        wide.window_keys,
        wide.window_values,
        AttentionMetadata(
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            meta.max_query_len,
            meta.max_seq_len,
        ),
    )
    weights = gates.double().sigmoid().repeat_interleave(request.v_head_dim, dim=1)
    exact: torch.Tensor = compressed + selected * weights[..., 1] + sliding * weights[..., 2]
    return exact


def check_choice(request: NsaAttentionRequest, case: Case, blocks: torch.Tensor) -> None:
    """Each list has as many blocks as it can, the forced ones, and of the others those of the
    largest importance, up to what float32 can tell apart."""
    q, gates, caches, meta = case
    all_blocks = dataclasses.replace(request, num_selected=1 << 12)  # all, in their order
    wide = widened(caches)
    _, ranked = reference(all_blocks, scale=SCALE)(q.double(), gates.double(), wide, meta)
    starts = meta.query_start_loc.tolist()
    for i, length in enumerate(meta.seq_lens.tolist()):
        new = starts[i + 1] - starts[i]
        for row in range(new):
            at = length - new + row
            for head in range(request.num_kv_heads):
                found = blocks[starts[i] + row, head].tolist()
                exact = [b for b in ranked[starts[i] + row, head].tolist() if b >= 0]
                check_list(request, at, found, exact)
                scores = importances(request, case, i, starts[i] + row, at, head)
                chosen = [b for b in found if b >= 0]
                best = exact[: len(chosen)]
                missed, instead = sorted(set(best) - set(chosen)), sorted(set(chosen) - set(best))
                least = min((scores[b] for b in missed), default=0.0)
                assert all(scores[b] >= least - 1e-5 for b in instead), (at, found, exact)


def check_list(request: NsaAttentionRequest, at: int, found: list[int], exact: list[int]) -> None:
    own = at // request.select_size
    chosen = [block for block in found if block >= 0]
    assert found == chosen + [-1] * (len(found) - len(chosen))
    assert len(set(chosen)) == len(chosen) == min(request.num_selected, own + 1)
    assert len(exact) == own + 1
    assert set(range(min(request.num_initial, own + 1))) <= set(chosen)
    assert set(range(max(0, own - request.num_local + 1), own + 1)) <= set(chosen)


def importances(
    request: NsaAttentionRequest, case: Case, sequence: int, row: int, at: int, head: int
) -> list[float]:
    """Exact importance of each block for one query and cached head, entry by entry."""
    q, _, caches, meta = case
    stride, size = request.compress_stride, request.select_size
    entries = [
        e for e in range(at + 1) if e * stride + request.compress_length <= at + 1
    ]  # those that lie before the query
    scores = [0.0] * (at // size + 1)
    if not entries:
        return scores
    places = torch.tensor(entries)
    pages = meta.entry_block_table[sequence].long()[places // request.block_size]
    keys = caches.entry_keys[pages, places % request.block_size, head].double()
    groups = request.num_heads // request.num_kv_heads
    heads = q[row].double().view(-1, request.head_dim)[head * groups : (head + 1) * groups]
    shares = (heads @ keys.T * SCALE).softmax(dim=1).sum(dim=0)
    for entry, share in zip(entries, shares.tolist(), strict=True):
        for part in range(0, request.compress_length, stride):
            block = (entry * stride + part) // size
            if block < len(scores):
                scores[block] += share
    return scores


def check(
    request: NsaAttentionRequest,
    lengths: list[tuple[int, int]],
    *,
    arch: str = "sm_90",
    magnitude: float = 1.0,
) -> None:
    case = case_of(request, lengths, magnitude)
    q = case[0]
    found, blocks = triton_nsa.bind(request, gpu(arch), scale=SCALE)(*case)
    assert found.dtype == q.dtype
    assert blocks.dtype == torch.int32
    check_choice(request, case, blocks)
    exact = in_float64(request, case, blocks)
    assert_exact("nsa_attention", found, exact)


PREFILL = [(3, 3), (120, 2), (40, 0), (1, 1)]
DECODE = [(1, 1), (130, 1)]


TWO = {"num_heads": 6, "num_kv_heads": 2}


@pytest.mark.parametrize("fields", [TWO, {"dtype": "float16"}], ids=("bfloat16", "float16"))
def test_prefill(fields: dict[str, Any]) -> None:
    check(request_of(**fields), PREFILL)


@pytest.mark.parametrize("fields", [{}, TWO | {"dtype": "float16"}], ids=("bfloat16", "float16"))
def test_decode(fields: dict[str, Any]) -> None:
    check(request_of(**fields, phase="decode"), DECODE)


@pytest.mark.parametrize(
    ("fields", "arch"),
    [
        ({"num_heads": 5, "num_kv_heads": 1, "head_dim": 136}, "gfx1100"),
        ({"num_heads": 2, "num_kv_heads": 2, "compress_length": 4, "num_local": 0}, "gfx942"),
        ({"compress_length": 16, "num_initial": 0, "num_selected": 20}, "sm_80"),
        ({"select_size": 32, "compress_length": 32, "compress_stride": 32, "window": 1}, "sm_120"),
        ({"select_size": 64, "compress_length": 12, "num_local": 3, "block_size": 10}, "gfx1201"),
    ],
)
def test_blocks_strides_and_heads(fields: dict[str, Any], arch: str) -> None:
    check(request_of(**fields), [(90, 2), (3, 1)], arch=arch)


def test_more_than_one_split_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("SPLIT_ENTRIES", 64), ("SPLIT_KEYS", 32), ("SPLIT_BLOCKS", 5)):
        monkeypatch.setattr(triton_nsa, name, size)
    check(request_of(phase="decode", num_selected=5, window=50), [(200, 1), (5, 1)])


@pytest.mark.parametrize("magnitude", [1e-4, 50.0])
def test_importances_that_are_all_alike_and_all_of_one_entry(magnitude: float) -> None:
    check(request_of(num_heads=2), [(100, 1)], magnitude=magnitude)


def test_equal_importances_fall_to_the_lower_block() -> None:
    """A cache of one entry again and again has the same importance for all whole blocks."""
    request = request_of(compress_length=4, num_local=1, num_selected=3)
    case = case_of(request, [(160, 1)])
    case[2].entry_keys[:] = case[2].entry_keys[case[3].entry_block_table[0, 0], 0]
    _, blocks = triton_nsa.bind(request, gpu("sm_90"), scale=SCALE)(*case)
    assert blocks.sort(dim=-1).values.tolist() == [[[0, 1, 9]]]


def test_the_whole_of_it_against_the_reference() -> None:
    """Where every block is chosen there is no tie to break."""
    request = request_of(num_selected=9, publishes_blocks=False)
    case = case_of(request, [(130, 2), (20, 1)])
    found = triton_nsa.bind(request, gpu("sm_90"), scale=SCALE)(*case)
    q, gates, caches, meta = case
    exact = reference(request, scale=SCALE)(q.double(), gates.double(), widened(caches), meta)
    assert_exact("nsa_attention", found, exact)


def test_a_sequence_alone_and_in_a_batch_is_the_same_to_the_bit() -> None:
    request = request_of(phase="decode")
    q, gates, caches, meta = case_of(request, [(300, 1), (40, 1)])
    kernel = triton_nsa.bind(request, gpu("sm_90"), scale=SCALE)
    together, _ = kernel(q, gates, caches, meta)
    meta.query_start_loc, meta.seq_lens = meta.query_start_loc[:2], meta.seq_lens[1:]
    meta.block_table, meta.entry_block_table = meta.block_table[1:], meta.entry_block_table[1:]
    meta.max_seq_len = 40
    alone, _ = kernel(q[1:], gates[1:], caches, meta)
    assert torch.equal(alone[0], together[1])


@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_any_sizes(data: st.DataObject) -> None:
    stride = data.draw(st.sampled_from((4, 8, 16)))
    ratio = data.draw(st.sampled_from((1, 2, 4)).filter(lambda r: stride * r % 16 == 0))
    initial, local = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    request = request_of(
        phase=data.draw(st.sampled_from(("prefill", "decode"))),
        num_heads=2,
        num_kv_heads=data.draw(st.sampled_from((1, 2))),
        compress_stride=stride,
        compress_length=stride * data.draw(st.integers(1, ratio)),
        select_size=stride * ratio,
        num_selected=data.draw(st.integers(max(1, initial + local), 6)),
        num_initial=initial,
        num_local=local,
        window=data.draw(st.integers(1, 40)),
        block_size=data.draw(st.integers(1, 40)),
    )
    lengths = []
    for _ in range(data.draw(st.integers(1, 2))):
        length = data.draw(st.integers(1, 120))
        new = 1 if request.phase == "decode" else data.draw(st.integers(1, min(length, 2)))
        lengths.append((length, new))
    check(request, lengths)


def test_entries_of_the_compressor_are_means_of_overlapping_blocks() -> None:
    """Op kv_compressor with no gate, both halves the keys, is mean pooling with l = 2 * d; its
    first entry is of half a block."""
    request = KvCompressorRequest(
        phase="prefill", ratio=4, head_dim=24, is_overlapping=True, has_norm=False, dtype="float64"
    )
    keys = torch.randn(30, 24, dtype=torch.float64)
    meta = CompressorMetadata(
        starts_of([30]),
        torch.tensor([30], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        starts_of([7]),
    )
    state = torch.zeros(1, 8, 2, 48, dtype=torch.float64)
    both = torch.cat((keys, keys), dim=1)
    entries = compressor(request)(both, torch.zeros_like(both), state, meta)[1:]
    means = torch.stack([keys[i : i + 8].mean(dim=0) for i in range(0, 23, 4)])
    assert len(means) == request_of().entries_at(30)
    torch.testing.assert_close(entries, means)


def test_no_queries() -> None:
    found, blocks = triton_nsa.bind(request_of(), gpu("sm_90"), scale=1.0)(
        *case_of(request_of(), [(9, 0)])
    )
    assert found.shape == (0, 3 * 20)
    assert blocks.shape == (0, 1, 4)


def test_gates_of_another_shape() -> None:
    q, gates, caches, meta = case_of(request_of(), [(9, 2)])
    with pytest.raises(ValueError, match=r"\[2, 3, 3\], found \[2, 2, 3\]"):
        triton_nsa.bind(request_of(), gpu("sm_90"), scale=1.0)(q, gates[:, :2], caches, meta)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"head_dim": 257}, "head_dim"),
        ({"num_heads": 17}, "heads of a cached head"),
        ({"num_selected": 33}, "num_selected"),
        ({"select_size": 24}, "select_size"),
        ({"select_size": 48}, "select_size / compress_stride"),
        ({"select_size": 128}, "select_size / compress_stride"),
    ],
)
def test_what_the_kernels_do_not_take(fields: dict[str, Any], what: str) -> None:
    reasons = not_supported_reasons(request_of(**fields), gpu("sm_90"))
    assert any(reason.what.startswith(what) or what in reason.what for reason in reasons)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_papers_form_is_native(phase: Any) -> None:
    request = NsaAttentionRequest(
        phase=phase,
        num_heads=64,
        num_kv_heads=4,
        head_dim=192,
        v_head_dim=128,
        block_size=64,
        dtype="bfloat16",
    )
    assert not not_supported_reasons(request, gpu("sm_90"))
    assert variants.padded(request.head_dim, variants.HEAD_DIMS) == 256
