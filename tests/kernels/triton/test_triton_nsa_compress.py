"""The Triton compression of blocks in the interpreter, against plain torch in float64.

Caches are NaN wherever nothing was written, those of the entries altogether: an entry that is read
from a row off by one, written where it does not belong or left out shows in the result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

import hal_kernels.nsa_attention.triton as triton_nsa
import hal_kernels.nsa_compress.triton as triton_compress
import hal_kernels.nsa_compress.triton_variants as variants
from block_lists import paged_heads, starts_of
from gpu_devices import gpu
from hal.ops.nsa_attention import NsaAttentionRequest, NsaCaches, NsaMetadata
from hal.ops.nsa_compress import NsaCompressRequest, NsaCompressWeights, reference
from hal_kernels.aot.catalogue import CATALOGUE as KERNELS
from hal_kernels.gemm.triton import target_of
from hal_kernels.nsa_compress.triton_limits import not_supported_reasons
from kernel_errors import assert_exact
from read_backs import no_reading_back
from recorded_launches import compiled, recorded

Batch = list[tuple[int, int]]  # (context with the new tokens, new tokens) of each sequence
FEW = settings(
    max_examples=25, deadline=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
PREFILL: Batch = [(45, 45), (7, 7), (30, 0), (41, 3), (8, 1), (0, 0)]


def request_of(**fields: Any) -> NsaCompressRequest:
    defaults: dict[str, Any] = {
        "phase": "prefill",
        "num_kv_heads": 3,
        "head_dim": 24,
        "hidden_size": 40,
        "block_size": 10,
        "dtype": "bfloat16",
        "compress_length": 8,
        "compress_stride": 4,
    }
    return NsaCompressRequest(**(defaults | fields))


def weights_of(
    request: NsaCompressRequest, *, has_bias: bool = True, magnitude: float = 1.0
) -> NsaCompressWeights:
    length, dim, hidden = request.compress_length, request.head_dim, request.hidden_size
    dtype: torch.dtype = getattr(torch, request.dtype)
    width = length * dim
    return NsaCompressWeights(
        w1=(torch.randn(hidden, width) * width**-0.5).to(dtype),
        w2=(torch.randn(dim, hidden) * hidden**-0.5).to(dtype),
        position=(torch.randn(length, dim) * magnitude).to(dtype),
        b1=torch.randn(hidden).to(dtype) if has_bias else None,
        b2=torch.randn(dim).to(dtype) if has_bias else None,
    )


def caches_of(
    request: NsaCompressRequest, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, NsaMetadata]:
    """(rows, entries, metadata): shuffled pages, those of the entries of nothing but NaN."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    lengths = [length for length, _ in batch]
    shape = (request.num_kv_heads, request.head_dim, request.block_size, dtype)
    rows, table = paged_heads(lengths, *shape)
    entries, entry_table = paged_heads([request.entries_at(n) for n in lengths], *shape)
    meta = NsaMetadata(
        query_start_loc=starts_of([new for _, new in batch]),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        entry_block_table=entry_table,
        max_query_len=max((new for _, new in batch), default=0),
        max_seq_len=max(lengths, default=0),
    )
    return rows, torch.full_like(entries, float("nan")), meta


def in_float64(
    request: NsaCompressRequest,
    weights: NsaCompressWeights,
    rows: torch.Tensor,
    like: torch.Tensor,
    meta: NsaMetadata,
) -> torch.Tensor:
    """The cache of entries as it has to be, entry by entry, from the formulas alone."""
    size, length = request.block_size, request.compress_length
    exact = torch.full_like(like, float("nan"), dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    b1, b2 = (zero if b is None else b.double() for b in (weights.b1, weights.b2))
    for i, count in enumerate(meta.seq_lens.tolist()):
        new = int(meta.query_start_loc[i + 1] - meta.query_start_loc[i])
        for entry in range(count):
            first, end = entry * request.compress_stride, entry * request.compress_stride + length
            if not count - new < end <= count:
                continue  # complete before the step, or not yet
            for head in range(request.num_kv_heads):
                block = [
                    rows[meta.block_table[i, p // size], p % size, head].double()
                    for p in range(first, end)
                ]
                flat = (torch.stack(block) + weights.position.double()).flatten()
                hidden = weights.w1.double() @ flat + b1
                hidden = hidden / (1 + (-hidden).exp())
                place = (meta.entry_block_table[i, entry // size], entry % size, head)
                exact[place] = weights.w2.double() @ hidden + b2
    return exact


def check(
    request: NsaCompressRequest,
    batch: Batch,
    *,
    arch: str = "sm_90",
    has_bias: bool = True,
    magnitude: float = 1.0,
    floor: float = 0.0,
) -> None:
    """floor: of the error, as a share of the terms that an entry is summed from."""
    weights = weights_of(request, has_bias=has_bias, magnitude=magnitude)
    rows, entries, meta = caches_of(request, batch)
    rows *= magnitude
    exact = in_float64(request, weights, rows, entries, meta)
    if floor:
        terms = dataclasses.replace(weights, w2=weights.w2.abs(), b2=None)
        sums = in_float64(request, terms, rows, entries, meta).nan_to_num()
        floor *= max(1.0, float(sums.abs().max()) if sums.numel() else 0.0)
    triton_compress.bind(request, gpu(arch), weights=weights)(rows, entries, meta)
    written = ~exact.isnan()
    assert torch.equal(~entries.isnan(), written), "an entry is left out, or one too many written"
    is_row = written.all(dim=-1)
    assert_exact("nsa_compress", entries[is_row], exact[is_row], floor=floor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_prompts_and_pieces_of_them(dtype: str, has_bias: bool) -> None:
    check(request_of(dtype=dtype), PREFILL, has_bias=has_bias)


@pytest.mark.parametrize("arch", ["sm_80", "gfx942", "gfx1100"])
def test_decodes_of_which_some_complete_an_entry(arch: str) -> None:
    check(request_of(phase="decode"), [(n, 1) for n in (1, 7, 8, 9, 11, 12, 28, 31)], arch=arch)


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 64, "hidden_size": 64, "num_kv_heads": 1},
        {"head_dim": 80, "hidden_size": 129, "num_kv_heads": 1},
        {"head_dim": 7, "hidden_size": 1, "block_size": 1},
        {"compress_length": 4, "compress_stride": 4},
        {"compress_length": 9, "compress_stride": 3, "block_size": 64},
        {"compress_length": 1, "compress_stride": 1, "num_kv_heads": 2},
    ],
    ids=lambda fields: ",".join(map(str, fields.values())),
)
def test_sizes_that_fill_tiles_and_such_that_do_not(fields: dict[str, Any]) -> None:
    check(request_of(**fields), [(19, 19), (14, 2)], arch="gfx1201")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("magnitude", [1e-4, 50.0])
def test_tiny_and_large_rows(phase: Any, magnitude: float) -> None:
    new = 12 if phase == "prefill" else 1
    batch = [(12, new), (20, new)]
    check(request_of(phase=phase), batch, magnitude=magnitude, has_bias=magnitude > 1.0)


def test_rows_of_zeros_have_the_entry_of_the_positions() -> None:
    request = request_of(num_kv_heads=1)
    weights = weights_of(request)
    rows, entries, meta = caches_of(request, [(8, 8)])
    exact = in_float64(request, weights, torch.zeros_like(rows), entries, meta)
    rows.zero_()
    triton_compress.bind(request, gpu("sm_90"), weights=weights)(rows, entries, meta)
    page = meta.entry_block_table[0, 0]
    assert_exact("nsa_compress", entries[page, 0], exact[page, 0])
    other = weights_of(request)
    triton_compress.bind(request, gpu("sm_90"), weights=other)(rows, entries, meta)
    assert not torch.allclose(entries[page, 0].double(), exact[page, 0], rtol=0.05)


@FEW
@given(st.data())
def test_any_sizes(data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, 6))
    phase = data.draw(st.sampled_from(("prefill", "decode")))
    request = request_of(
        phase=phase,
        num_kv_heads=data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.integers(1, 70)),
        hidden_size=data.draw(st.integers(1, 80)),
        block_size=data.draw(st.integers(1, 24)),
        compress_stride=stride,
        compress_length=stride * data.draw(st.integers(1, 3)),
    )
    batch = []
    for _ in range(data.draw(st.integers(1, 3))):
        length = data.draw(st.integers(1, 40))
        new = 1 if phase == "decode" else data.draw(st.integers(0, length))
        batch.append((length, new))
    arch = data.draw(st.sampled_from(("sm_90", "sm_120", "gfx942", "gfx1100")))
    # An entry of one value or two may cancel, of terms whose hidden values are rounded.
    check(request, batch, arch=arch, floor=2.0**-7)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 200), st.integers(0, 200))
def test_no_tokens_complete_more_entries_than_there_is_room_for(
    stride: int, ratio: int, before: int, new: int
) -> None:
    request = request_of(compress_stride=stride, compress_length=stride * ratio)
    completed = request.entries_at(before + new) - request.entries_at(before)
    assert completed <= request.most_entries(new)
    assert request.entries_at(new) == sum(
        entry * stride + stride * ratio <= new for entry in range(new)
    )


def test_entries_do_not_depend_on_pieces_or_batches() -> None:
    """To the bit: of a prompt at once, of the same in pieces, and beside others."""
    request = request_of()
    weights = weights_of(request)
    kernel = triton_compress.bind(request, gpu("sm_90"), weights=weights)
    rows, whole, meta = caches_of(request, [(45, 45), (31, 31)])
    kernel(rows, whole, meta)
    pieces = torch.full_like(whole, float("nan"))
    for sequence, end in ((0, 45), (1, 31)):
        for start in range(0, end, 6):
            length = min(start + 6, end)
            one = NsaMetadata(
                query_start_loc=starts_of([length - start]),
                seq_lens=torch.tensor([length], dtype=torch.int32),
                block_table=meta.block_table[sequence:],
                entry_block_table=meta.entry_block_table[sequence:],
                max_query_len=length - start,
                max_seq_len=length,
            )
            kernel(rows, pieces, one)
    assert torch.equal(whole.isnan(), pieces.isnan())
    assert torch.equal(whole.nan_to_num(), pieces.nan_to_num())


def test_more_items_than_hidden_values_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of one tile each, of decodes and of a prompt beside nothing."""
    monkeypatch.setattr(variants, "MOST_HIDDEN_BYTES", 1)
    tiles = variants.product_tiles(target_of(gpu("sm_90")), "few", "hidden")
    assert variants.items_at_once(40, tiles) == 16
    monkeypatch.undo()
    assert variants.items_at_once(512, tiles) == (64 << 20) // 1024
    monkeypatch.setattr(variants, "MOST_HIDDEN_BYTES", 1)
    check(request_of(phase="decode"), [(n, 1) for n in (8, 9, 12, 16, 3, 20, 24)])
    check(request_of(), [(3, 0), (190, 190), (20, 20)])


def test_caches_whose_rows_have_others_between() -> None:
    request = request_of()
    weights = weights_of(request)
    rows, entries, meta = caches_of(request, [(30, 30)])
    exact = in_float64(request, weights, rows, entries, meta)
    wide, held = (torch.full((*t.shape[:3], 2 * 24), 3.0).to(t.dtype) for t in (rows, entries))
    wide[..., 24:], held[..., 24:] = rows, entries
    kernel = triton_compress.bind(request, gpu("sm_90"), weights=weights)
    with no_reading_back():
        kernel(wide[..., 24:], held[..., 24:], meta)
    assert (held[..., :24] == 3.0).all()
    is_row = ~exact.isnan().any(dim=-1)
    assert_exact("nsa_compress", held[..., 24:][is_row], exact[is_row])


def test_no_sequences_and_no_new_tokens() -> None:
    request = request_of()
    kernel = triton_compress.bind(request, gpu("sm_90"), weights=weights_of(request))
    for batch in ([], [(9, 0), (30, 0)], [(3, 3)]):
        rows, entries, meta = caches_of(request, batch)
        kernel(rows, entries, meta)
        assert entries.isnan().all()


def dense_nsa(
    request: NsaAttentionRequest,
    q: torch.Tensor,
    gates: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """[H, Dv] of the last position over whole keys and values in float64, (entries, rows): every
    block is selected."""

    def attended(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = request.num_heads // request.num_kv_heads
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        weights = (torch.einsum("hd,khd->hk", q.double(), k) * scale).softmax(dim=1)
        return torch.einsum("hk,khd->hd", weights, v)

    near = slice(-request.window, None)
    branches = (
        attended(keys[0], values[0]),
        attended(keys[1], values[1]),
        attended(keys[1][near], values[1][near]),
    )
    return torch.stack(branches, dim=-1).mul(gates.double().sigmoid()[:, None]).sum(dim=-1)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_with_the_attention_over_the_entries(phase: Any) -> None:
    """Compression and attention through the kernels, beside all of it dense in float64. The entries
    are rounded in between, so their distance from the exact ones is in the result too."""
    shape: dict[str, Any] = {"compress_length": 8, "compress_stride": 4, "block_size": 16}
    length, scale = 45, 0.3
    new = length if phase == "prefill" else 1
    attention = NsaAttentionRequest(
        phase=phase, num_heads=4, num_kv_heads=2, head_dim=24, v_head_dim=20, dtype="bfloat16",
        select_size=16, num_selected=4, num_local=1, window=24, **shape,
    )  # fmt: skip
    caches, exact = [], []
    for dim in (attention.head_dim, attention.v_head_dim):
        request = request_of(num_kv_heads=2, head_dim=dim, **shape)
        rows, entries, meta = caches_of(request, [(length, length)])
        weights = weights_of(request)
        # The prompt was compressed as it came; in a decode only the last token is new.
        triton_compress.bind(request, gpu("sm_90"), weights=weights)(rows, entries, meta)
        compressed = in_float64(request, weights, rows, entries, meta)
        places, numbers = torch.arange(length), torch.arange(request.entries_at(length))
        tables = (meta.entry_block_table[0].long(), meta.block_table[0].long())
        exact.append(
            (
                compressed[tables[0][numbers // 16], numbers % 16],
                rows[tables[1][places // 16], places % 16].double(),
            )
        )
        caches.append((entries, rows, meta))
    # Both caches share the block tables of the keys.
    (key_entries, key_rows, meta), (value_entries, value_rows, other) = caches
    value_entries = _moved(value_entries, other.entry_block_table, meta.entry_block_table)
    value_rows = _moved(value_rows, other.block_table, meta.block_table)
    held = NsaCaches(key_entries, value_entries, key_rows, value_rows, key_rows, value_rows)
    meta.query_start_loc, meta.max_query_len = starts_of([new]), new
    q, gates = torch.randn(new, 4 * 24).bfloat16(), torch.randn(new, 4, 3).bfloat16()
    found = triton_nsa.bind(attention, gpu("sm_90"), scale=scale)(q, gates, held, meta)
    want = dense_nsa(attention, q[-1].view(4, 24), gates[-1], exact[0], exact[1], scale)
    assert_exact("nsa_attention", found[-1].view(4, 20), want, times=2.0)


def _moved(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The pages of the first sequence where the other table has them."""
    moved = torch.full_like(cache, float("nan"))
    pages = int((source[0] >= 0).sum())
    moved[target[0, :pages].long()] = cache[source[0, :pages].long()]
    return moved


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
def test_what_is_launched_is_what_was_compiled(
    arch: str, phase: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded(monkeypatch, (triton_compress,), "_nsa_hidden_kernel", "_nsa_project_kernel")
    request = request_of(
        phase=phase, num_kv_heads=4, head_dim=192, hidden_size=64, block_size=64,
        compress_length=32, compress_stride=16,
    )  # fmt: skip
    weights = weights_of(request)
    triton_compress.bind(request, gpu(arch), weights=weights)(*caches_of(request, [(40, 1)]))
    form = "few" if phase == "decode" else "many"
    for name in ("hidden", "project"):
        (launched,) = found[f"_nsa_{name}_kernel"]
        variant = compiled(f"nsa_compress.{name}", arch, "bfloat16", form)
        assert {k: launched[k] for k in variant.constants} == dict(variant.constants)
        assert launched["num_warps"] == variant.num_warps
        assert launched["num_stages"] == variant.num_stages
        for pointer, dtype in variant.pointers.items():
            assert str(launched[pointer].dtype) == f"torch.{dtype}", pointer


@pytest.mark.parametrize("name", ["w1", "w2", "position", "b1", "b2"])
def test_weights_of_other_sizes(name: str) -> None:
    request = request_of()
    weights = weights_of(request)
    setattr(weights, name, torch.zeros(3, 3))
    with pytest.raises(ValueError, match=rf"required {name} \[.*\], found \[3, 3\]"):
        triton_compress.bind(request, gpu("sm_90"), weights=weights)
    with pytest.raises(ValueError, match=rf"required {name} \["):
        reference(request, weights=weights)


def test_caches_of_other_sizes() -> None:
    request = request_of()
    kernel = triton_compress.bind(request, gpu("sm_90"), weights=weights_of(request))
    rows, entries, meta = caches_of(request, [(9, 2)])
    with pytest.raises(ValueError, match=r"required rows \[blocks, 10, 3, 24\]"):
        kernel(rows[:, :9], entries, meta)
    with pytest.raises(ValueError, match=r"required entries .* strides"):
        kernel(rows, entries.transpose(2, 3).contiguous().transpose(2, 3), meta)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn"])
def test_caches_of_another_dtype(dtype: str) -> None:
    request = request_of()
    kernel = triton_compress.bind(request, gpu("sm_90"), weights=weights_of(request))
    rows, entries, meta = caches_of(request, [(9, 2)])
    other: torch.dtype = getattr(torch, dtype)
    for name in ("rows", "entries"):
        caches = {"rows": rows, "entries": entries}
        caches[name] = caches[name].to(other)
        with pytest.raises(ValueError, match=rf"required {name} in bfloat16, found {dtype};"):
            kernel(caches["rows"], caches["entries"], meta)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hidden_values_up_to_the_largest_of_the_dtype(phase: Any, dtype: str) -> None:
    """As a torch module of the dtype: float16 ends at 65,504, and says so by what is not finite."""
    request = request_of(phase=phase, dtype=dtype, num_kv_heads=1, compress_stride=8)
    dim, wide = request.head_dim, getattr(torch, dtype)
    width = request.compress_length * dim
    weights = weights_of(request, has_bias=False)
    weights.w1, weights.w2 = torch.ones_like(weights.w1), torch.rand(dim, 40).to(wide) * 1e-3
    weights.position.zero_()
    new = 8 if phase == "prefill" else 1
    for value, is_held in ((0.99 * 65504 / width, True), (1.1 * 65504 / width, dtype != "float16")):
        rows, entries, meta = caches_of(request, [(8, new)])
        rows.fill_(value)
        exact = in_float64(request, weights, rows, entries, meta)
        triton_compress.bind(request, gpu("sm_90"), weights=weights)(rows, entries, meta)
        place = (meta.entry_block_table[0, 0], 0, 0)
        flat = torch.full((1, width), value).to(wide)
        module = silu(flat @ weights.w1.T) @ weights.w2.T
        assert bool(module.isfinite().all()) == is_held
        if is_held:
            assert_exact("nsa_compress", entries[place], exact[place])
        else:
            assert torch.equal(entries[place], module[0])


def test_what_the_kernels_do_not_take() -> None:
    (reason,) = not_supported_reasons(request_of(dtype="float32"), gpu("sm_90"))
    assert reason.what == "nsa_compress: dtype"


def test_each_form_is_compiled_for_every_dtype() -> None:
    for name in ("nsa_compress.hidden", "nsa_compress.project"):
        found = KERNELS[name].variants(target_of(gpu("sm_90")))
        assert {v.config for v in found} == set(variants.FORMS)
        assert {v.dtype for v in found} == {"bfloat16", "float16"}
