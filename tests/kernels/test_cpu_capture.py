"""Captured steps on the CPU: replays compute what the step does, and what cannot be replayed is
refused by name."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import CaptureError
from hal.ops.attention import AttentionMetadata
from hal.ops.formats import FORMATS, QuantizedWeight
from hal_kernels.attention.cpu_decode import bind_attention_decode
from hal_kernels.cpu_capture import CapturedStep, SharedMemory, capture
from hal_kernels.cpu_memory_plan import ALIGNMENT, Lifetime, place
from hal_kernels.embedding.cpu import bind_embedding
from hal_kernels.gemm.cpu_generated import bind_generated
from hal_kernels.gemm.cpu_generated_int8 import bind_generated_int8
from hal_kernels.norm.cpu import bind_rms_norm
from hal_kernels.quantize.cpu import bind_quantize_rows

HIDDEN, WIDE, VOCAB = 96, 224, 50
NORMS = 3


def int8_weight() -> QuantizedWeight:
    data = torch.randint(-127, 128, (HIDDEN, WIDE), dtype=torch.int8)
    return QuantizedWeight(
        format=FORMATS["int8_channel_a8"], data=data, scale=torch.rand(HIDDEN, 1) / 1000
    )


def make_step(tokens: int) -> tuple[Callable[[], torch.Tensor], torch.Tensor, torch.Tensor]:
    """(step, ids, table): embedding, then norms with a residual and products, wide and narrow."""
    ids = torch.randint(0, VOCAB, (tokens,))
    table = torch.randn(VOCAB, HIDDEN)
    embed = bind_embedding(weight=table)
    layers = [
        (
            bind_rms_norm(
                hidden_size=HIDDEN,
                dtype=torch.float32,
                weight=torch.rand(HIDDEN),
                eps=1e-5,
                has_residual=True,
            ),
            bind_generated(torch.randn(2 * WIDE, HIDDEN) / HIDDEN**0.5, epilogue="silu_gated"),
            bind_generated_int8(int8_weight()),
        )
        for _ in range(NORMS)
    ]
    zeros = torch.zeros(tokens, HIDDEN)

    def step() -> torch.Tensor:
        x, residual = zeros, embed(ids)
        for norm, up, down in layers:
            normed, residual = norm(x, residual)
            x = down(up(normed))
        return layers[0][0](x, residual)[0]

    return step, ids, zeros


def captured(
    step: Callable[[], torch.Tensor], *inputs: torch.Tensor, shared: SharedMemory | None = None
) -> CapturedStep:
    with torch.inference_mode():
        return capture(step, inputs, shared or SharedMemory())


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_a_replay_gives_the_bits_of_the_step_on_new_inputs(tokens: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        step, ids, zeros = make_step(tokens)
        taken = captured(step, ids, zeros)
        first = taken.output.clone()
        assert torch.equal(first, step())
        for _ in range(3):
            ids.copy_(torch.randint(0, VOCAB, (tokens,)))
            expected = step()
            scramble = torch.full((1 << 18,), float("nan"))  # in what the allocator gives next
            del scramble
            gc.collect()
            taken.replay()
            assert torch.equal(taken.output, expected)
            assert not torch.equal(taken.output, first)
    finally:
        torch.set_num_threads(before)


def test_the_result_does_not_rest_on_what_the_shared_memory_held() -> None:
    shared = SharedMemory()
    step, ids, zeros = make_step(5)
    taken = captured(step, ids, zeros, shared=shared)
    with torch.inference_mode():
        shared.take(0).fill_(255)  # NaN, as float32
    taken.replay()
    assert torch.equal(taken.output, step())


def test_captures_of_several_sizes_share_memory_and_stay_right() -> None:
    shared = SharedMemory()
    steps = [make_step(tokens) for tokens in (3, 40, 1, 17)]
    takens = [captured(step, ids, zeros, shared=shared) for step, ids, zeros in steps]
    for _ in range(2):
        for (step, ids, _), taken in zip(steps, takens, strict=True):
            ids.copy_(torch.randint(0, VOCAB, ids.shape))
            taken.replay()
            assert torch.equal(taken.output, step())


def test_intermediate_tensors_share_memory() -> None:
    shared = SharedMemory()
    step, ids, zeros = make_step(40)
    captured(step, ids, zeros, shared=shared)
    one_layer = 4 * 40 * (2 * HIDDEN + WIDE + 2 * HIDDEN)
    assert 0 < shared.take(0).numel() < 2 * one_layer < 4 * 40 * NORMS * (2 * HIDDEN + WIDE)


def test_attention_over_pages_is_replayed_for_longer_contexts_and_other_blocks() -> None:
    heads, kv_heads, dim, block, batch = 6, 2, 32, 16, 3
    attend = bind_attention_decode(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=block,
        dtype=torch.float32,
        scale=dim**-0.5,
    )
    k_cache, v_cache = (torch.randn(40, block, kv_heads, dim) for _ in range(2))
    q = torch.randn(batch, heads * dim)
    lengths = torch.tensor([5, 17, 130], dtype=torch.int32)
    table = torch.stack([torch.randperm(40, dtype=torch.int32)[:16] for _ in range(batch)])
    meta = AttentionMetadata(
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32),
        seq_lens=lengths,
        block_table=table,
        max_query_len=1,
        max_seq_len=256,
    )
    inputs = [k_cache, v_cache, q, lengths, table, meta.query_start_loc]
    taken = captured(lambda: attend(q, k_cache, v_cache, meta), *inputs)
    for new in ([1, 256, 40], [129, 128, 127]):
        lengths.copy_(torch.tensor(new))
        table.copy_(torch.stack([torch.randperm(40, dtype=torch.int32)[:16] for _ in new]))
        q.normal_()
        taken.replay()
        for row, length in enumerate(new):
            keys, values = (
                c[table[row].long()].flatten(0, 1)[:length].double().repeat_interleave(3, dim=1)
                for c in (k_cache, v_cache)
            )
            query = q[row].double().view(heads, dim)
            weights = (torch.einsum("hd,lhd->hl", query, keys) * dim**-0.5).softmax(-1)
            exact = torch.einsum("hl,lhd->hd", weights, values).flatten()
            assert (taken.output[row] - exact).abs().max() < 2e-6


def test_an_op_of_torch_in_the_step_is_refused_by_name() -> None:
    embed = bind_embedding(weight=torch.randn(VOCAB, HIDDEN))
    ids = torch.randint(0, VOCAB, (4,))
    with pytest.raises(CaptureError, match=r"aten::mul, called 2 times"):
        captured(lambda: embed(ids) * 2 * 3, ids)
    with pytest.raises(CaptureError, match=r"aten::(item|_local_scalar_dense)"):
        captured(lambda: embed(ids[: max(1, min(3, int(ids[0])))]), ids)


READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "__array__": np.asarray,
    "__dlpack__": np.from_dlpack,
}


@pytest.mark.parametrize("name", READERS)
def test_values_that_leave_torch_are_refused_by_name(name: str) -> None:
    """A replay would go on with what was read when it was captured."""
    embed = bind_embedding(weight=torch.randn(VOCAB, HIDDEN))
    ids = torch.randint(0, VOCAB, (4,))

    def step() -> torch.Tensor:
        READERS[name](ids)
        return embed(ids)

    with pytest.raises(CaptureError, match=rf"Tensor\.{name}"):
        captured(step, ids)


def test_a_capture_keeps_no_more_than_a_step_that_is_called() -> None:
    norm = bind_rms_norm(
        hidden_size=HIDDEN, dtype=torch.float32, weight=torch.rand(HIDDEN), eps=1e-5
    )
    x = torch.randn(3, HIDDEN)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def step() -> torch.Tensor:
        y = x
        for _ in range(5):
            y = norm(y)
            made.append(weakref.ref(y))
            alive.append(sum(one() is not None for one in made))
        return y

    taken = captured(step, x)
    assert alive == [1] * 5
    x.normal_()
    taken.replay()
    assert torch.equal(taken.output, step())


def test_memory_that_nothing_keeps_is_refused() -> None:
    embed = bind_embedding(weight=torch.randn(VOCAB, HIDDEN))
    ids = torch.randint(0, VOCAB, (4,))
    with pytest.raises(CaptureError, match="in none of them"):
        captured(lambda: embed(ids))


def test_a_strided_result_and_a_capture_within_another_are_refused() -> None:
    embed = bind_embedding(weight=torch.randn(VOCAB, HIDDEN))
    ids = torch.randint(0, VOCAB, (4,))
    with pytest.raises(CaptureError, match="contiguous"):
        captured(lambda: embed(ids)[:, 1:], ids)
    with pytest.raises(RuntimeError, match="one recording at a time"):
        captured(lambda: captured(lambda: embed(ids), ids).output, ids)
    assert captured(lambda: embed(ids), ids).num_launches == 1  # and nothing was left behind


def test_a_replay_raises_for_an_index_out_of_range_and_the_next_is_right() -> None:
    embed = bind_embedding(weight=torch.randn(VOCAB, HIDDEN))
    ids = torch.randint(0, VOCAB, (4,))
    taken = captured(lambda: embed(ids), ids)
    ids[2] = VOCAB + 7
    with pytest.raises(IndexError, match=f"token id {VOCAB + 7} is outside the {VOCAB}"):
        taken.replay()
    ids[2] = 3
    taken.replay()
    assert torch.equal(taken.output, embed(ids))


def test_faults_of_several_launches_are_forgotten_with_the_first() -> None:
    """One bad index in every layer is one error, and the next step is none."""
    embeds = [bind_embedding(weight=torch.randn(VOCAB, HIDDEN)) for _ in range(3)]
    ids = torch.randint(0, VOCAB, (4,))

    def step() -> torch.Tensor:
        return [embed(ids) for embed in embeds][-1]

    taken = captured(step, ids)
    ids[1] = -1
    with pytest.raises(IndexError, match="token id -1"):
        taken.replay()
    ids[1] = 2
    taken.replay()
    assert torch.equal(taken.output, step())


def test_launches_that_do_not_say_what_is_an_address_are_refused() -> None:
    quantize = bind_quantize_rows(features=HIDDEN, dtype=torch.float32)
    x = torch.randn(4, HIDDEN)
    with pytest.raises(CaptureError, match="which of their arguments are addresses"):
        captured(lambda: quantize(x)[0], x)


def test_large_scratch_of_many_calls_is_one_memory() -> None:
    """Beyond what a thread keeps, each call makes its own: in a replay they share it."""
    wide = 9 * 2**20 // (4 * 40)
    products = [bind_generated(torch.randn(64, wide) / wide) for _ in range(4)]
    x, shared = torch.randn(40, wide), SharedMemory()

    def step() -> torch.Tensor:
        return [product(x) for product in products][-1]

    taken = captured(step, x, shared=shared)
    assert shared.take(0).numel() < 2 * 4 * 40 * wide
    taken.replay()
    assert torch.equal(taken.output, step())


def test_launches_of_other_threads_are_not_recorded() -> None:
    embed = bind_embedding(weight=torch.randn(VOCAB, HIDDEN))
    other = bind_embedding(weight=torch.randn(VOCAB, HIDDEN))
    ids = torch.randint(0, VOCAB, (4,))

    def step() -> torch.Tensor:
        thread = threading.Thread(target=lambda: other(ids))
        thread.start()
        thread.join()
        return embed(ids)

    assert captured(step, ids).num_launches == 1


def test_the_step_is_not_kept_alive_by_what_it_was_captured_from() -> None:
    """Only what the replay needs stays: the step's tensors give their memory back."""
    step, ids, zeros = make_step(3)
    taken = captured(step, ids, zeros)
    expected = step()
    del step
    gc.collect()
    taken.replay()
    assert torch.equal(taken.output, expected)


LIFETIMES = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 30)), max_size=40
)


@given(LIFETIMES)
def test_memory_in_use_never_overlaps(drawn: list[tuple[int, int, int]]) -> None:
    lifetimes = [Lifetime(num_bytes=size, first=min(a, b), last=max(a, b)) for size, a, b in drawn]
    offsets, total = place(lifetimes)
    ends = [offset + one.num_bytes for offset, one in zip(offsets, lifetimes, strict=True)]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert total >= max(ends, default=0)
    for i, one in enumerate(lifetimes):
        for j in range(i):
            other = lifetimes[j]
            if one.first <= other.last and other.first <= one.last:
                assert ends[i] <= offsets[j] or ends[j] <= offsets[i]


def test_one_after_the_other_takes_the_memory_of_one() -> None:
    sizes = [random.randint(1, 900) for _ in range(20)]
    lifetimes = [Lifetime(num_bytes=n, first=2 * i, last=2 * i + 1) for i, n in enumerate(sizes)]
    assert place(lifetimes)[1] == -(-max(sizes) // ALIGNMENT) * ALIGNMENT
