"""The Triton compressor in the interpreter against float64, whole and in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hal_kernels.kv_compressor.triton as triton_compressor
from gpu_devices import gpu
from hal.errors import BindingError
from hal.ops import CATALOGUE
from hal.ops.kv_compressor import CompressorMetadata, KvCompressorRequest, reference
from hal_kernels.kv_compressor.triton_limits import not_supported_reasons
from read_backs import no_reading_back

# Of the result, which is rounded once; and of float32 sums.
TOLERANCE = CATALOGUE["kv_compressor"].largest_errors
SLOTS = 4


def request_of(ratio: int, is_overlapping: bool, dtype: str, **fields: Any) -> KvCompressorRequest:
    return KvCompressorRequest(
        phase="prefill",
        ratio=ratio,
        head_dim=40,
        is_overlapping=is_overlapping,
        dtype=dtype,
        **fields,
    )


def metadata(request: KvCompressorRequest, pieces: list[tuple[int, int, int]]) -> Any:
    """Of (new tokens, context with them, slot) for each sequence."""

    def starts(counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)

    ratio = request.ratio
    return CompressorMetadata(
        query_start_loc=starts([new for new, _, _ in pieces]),
        seq_lens=torch.tensor([length for _, length, _ in pieces], dtype=torch.int32),
        state_slots=torch.tensor([slot for _, _, slot in pieces], dtype=torch.int32),
        entry_start_loc=starts([n // ratio - (n - new) // ratio for new, n, _ in pieces]),
    )


STEPS = [
    [(5, 5, 2), (17, 17, 0), (0, 0, 1)],
    [(1, 6, 2), (1, 18, 0), (3, 3, 1)],
    [(2, 8, 2), (14, 32, 0), (1, 4, 1)],
    [(9, 13, 1)],
]


@pytest.mark.parametrize(
    ("dtype", "arch"), [("bfloat16", "sm_90"), ("float32", "gfx942"), ("float16", "sm_80")]
)
@pytest.mark.parametrize(
    ("ratio", "is_overlapping", "has_norm", "has_bias"),
    [
        (4, True, True, True),
        (3, False, False, False),
        (1, False, True, False),
        (16, False, True, True),
        (16, True, False, True),
    ],
)
def test_entries_and_state(
    ratio: int, is_overlapping: bool, has_norm: bool, has_bias: bool, dtype: str, arch: str
) -> None:
    request = request_of(ratio, is_overlapping, dtype, has_norm=has_norm)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    weight = torch.randn(request.head_dim) if has_norm else None
    bias = torch.randn(ratio, request.width) if has_bias else None
    static = {"norm_weight": weight, "eps": 1e-3, "position_bias": bias}
    kernel = triton_compressor.bind(request, gpu(arch), **static)
    golden = reference(request, **static)
    shape = (SLOTS, request.state_rows, 2, request.width)
    state = torch.full(shape, float("nan"))
    exact_state = state.double()
    for pieces in STEPS:
        tokens = sum(new for new, _, _ in pieces)
        kv, gate = (
            torch.randn(tokens, request.width + 8).to(torch_dtype)[:, : request.width]
            for _ in range(2)
        )
        meta = metadata(request, pieces)
        found = kernel(kv, gate, state, meta)
        exact = golden(kv.double(), gate.double(), exact_state, meta)
        assert found.dtype == torch_dtype
        assert found.shape == exact.shape
        assert torch.allclose(
            found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 8
        )
        assert torch.equal(state.isnan(), exact_state.isnan())
        difference = (state - exact_state).nan_to_num().abs().max()
        assert difference <= 1e-6 * exact_state.nan_to_num().abs().max()


def test_gates_of_any_size() -> None:
    request = request_of(4, False, "float32", has_norm=False)
    kv, gate = torch.randn(8, 40), torch.randn(8, 40) * 1e4
    gate[1] = float("-inf")
    state = torch.zeros(1, 4, 2, 40)
    meta = metadata(request, [(8, 8, 0)])
    found = triton_compressor.bind(request, gpu("sm_90"))(kv, gate, state.clone(), meta)
    exact = reference(request)(kv.double(), gate.double(), state.double(), meta)
    assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_a_weight_that_does_not_fit_the_request() -> None:
    with pytest.raises(BindingError, match="norm_weight"):
        triton_compressor.bind(request_of(4, False, "float32"), gpu("sm_90"))


@pytest.mark.parametrize(("ratio", "is_overlapping"), [(4, True), (3, False), (1, False)])
def test_of_a_captured_graph_nothing_is_read_back(ratio: int, is_overlapping: bool) -> None:
    """All steps of one size, whatever they complete: entries, then zeros, and the same state."""
    eager = request_of(ratio, is_overlapping, "float32")
    graph = request_of(ratio, is_overlapping, "float32", graph_mode="graph")
    assert not not_supported_reasons(graph, gpu("sm_90"))
    static = {"norm_weight": torch.randn(40), "eps": 1e-3}
    kernels = [triton_compressor.bind(one, gpu("sm_90"), **static) for one in (graph, eager)]
    state = torch.full((SLOTS, graph.state_rows, 2, graph.width), float("nan"))
    states, exact_state = [state.clone(), state.clone()], state.double()
    for pieces in (
        [(9, 9, 2), (3, 3, 0)],
        [(6, 15, 2), (6, 9, 0)],
        [(12, 27, 2), (0, 9, 0)],
        [(11, 20, 0), (1, 28, 2)],
    ):
        meta = metadata(graph, pieces)
        kv, gate = torch.randn(12, graph.width), torch.randn(12, graph.width)
        with no_reading_back():
            found = kernels[0](kv, gate, states[0], meta)
        assert torch.equal(found[: meta.entry_start_loc[-1]], kernels[1](kv, gate, states[1], meta))
        assert torch.equal(states[0].nan_to_num(), states[1].nan_to_num())
        with pytest.raises(AssertionError, match="reads a tensor back"), no_reading_back():
            kernels[1](kv, gate, states[1].clone(), meta)
        exact = reference(graph, **static)(kv.double(), gate.double(), exact_state, meta)
        assert found.shape == exact.shape == (graph.most_entries(12, 2), 40)
        assert torch.allclose(found.double(), exact, rtol=2e-5, atol=3e-6)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1), st.integers(1, 8))
def test_no_step_has_more_entries_than_there_is_room_for(
    pieces: list[tuple[int, int]], ratio: int
) -> None:
    """Of (context before, new tokens) for each sequence; and some step has as many."""
    request = request_of(ratio, False, "float32")
    entries = sum((old + new) // ratio - old // ratio for old, new in pieces)
    tokens = sum(new for _, new in pieces)
    assert entries <= request.most_entries(tokens, len(pieces)) <= tokens
    # As many as possible: each sequence has its new tokens where they complete the most windows.
    even = [new for _, new in pieces if new % ratio == 1 or ratio == 1]
    if len(even) == len(pieces):
        most = sum(-(-new // ratio) for new in even)
        assert most == request.most_entries(tokens, len(pieces))


def test_no_tokens_of_a_captured_graph() -> None:
    request = request_of(4, True, "bfloat16", has_norm=False, graph_mode="graph")
    meta = metadata(request, [(0, 5, 0)])
    rows = torch.empty(0, request.width, dtype=torch.bfloat16)
    state = torch.zeros(1, request.state_rows, 2, request.width)
    assert triton_compressor.bind(request, gpu("sm_90"))(rows, rows, state, meta).shape == (0, 40)
