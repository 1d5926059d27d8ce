"""Every family's reference against an oracle from elsewhere, and its work against a real count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from gguf import GGMLQuantizationType, quants
from torch.utils.flop_counter import FlopCounterMode
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops import activation as activation_op
from hal.ops import attention as attention_op
from hal.ops import collective as collective_op
from hal.ops import collective_norm as collective_norm_op
from hal.ops import gemm as gemm_op
from hal.ops import norm as norm_op
from hal.ops.activation import GatedActivationRequest
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.collective import CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.formats import DTYPE_BYTES, FORMATS, QuantizedWeight, WeightFormat, torch_dtype
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest
from thread_group import ThreadGroup, on_threads

GGUF_TYPES = {
    "int4_g32": GGMLQuantizationType.Q4_0,
    "int4_g32_asym": GGMLQuantizationType.Q4_1,
    "int8_g32": GGMLQuantizationType.Q8_0,
}
# FP8 and FP4 are in test_ops_block_formats.py, with their own oracle.
INTEGERS = {name: f for name, f in FORMATS.items() if f.element == "int"}
QUANTISED = [name for name, fmt in INTEGERS.items() if not fmt.is_dense]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng() -> torch.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")  # shown when a test fails
    return torch.Generator().manual_seed(seed)


def normal(rng: torch.Generator, *shape: int, dtype: str = "float64") -> torch.Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(torch_dtype(dtype))


def assert_within(op: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """`want` in float64; the tolerance is the catalogue's for the dtype of `got`."""
    tolerance = CATALOGUE[op].tolerances[str(got.dtype).removeprefix("torch.")]
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=tolerance.rtol, atol=tolerance.atol)


def random_weight(rng: torch.Generator, fmt: WeightFormat, n: int, k: int) -> QuantizedWeight:
    if fmt.bits == 4:
        data = torch.randint(0, 256, (n, k // 2), generator=rng, dtype=torch.uint8)
    else:
        data = torch.randint(-128, 128, (n, k), generator=rng, dtype=torch.int8)
    groups = (n, k // fmt.group_size) if fmt.group_size else (n,)
    dtype = torch_dtype(fmt.scale_dtype)
    scale = (torch.rand(groups, generator=rng) * 0.1 + 0.01).to(dtype)
    minimum = None if fmt.is_symmetric else (torch.rand(groups, generator=rng) - 0.5).to(dtype)
    return QuantizedWeight(format=fmt, data=data, scale=scale, minimum=minimum)


def nbytes(*tensors: torch.Tensor | QuantizedWeight | None) -> int:
    total = 0
    for tensor in tensors:
        if isinstance(tensor, QuantizedWeight):
            total += nbytes(tensor.data, tensor.scale, tensor.minimum)
        elif tensor is not None:
            total += tensor.nbytes
    return total


# --- attention ------------------------------------------------------------------------------------


def attention_request(**changes: Any) -> AttentionRequest:
    arguments: dict[str, Any] = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 24,
        "v_head_dim": 24,
        "block_size": 16,
        "dtype": "float64",
        "kv_dtype": "float64",
        "phase": "prefill",
    }
    return AttentionRequest(**(arguments | changes))


Paged = tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, list[Any]]


def paged_batch(
    rng: torch.Generator, request: AttentionRequest, lengths: Sequence[tuple[int, int]]
) -> Paged:
    """q, k_cache, v_cache, metadata of (query_len, seq_len) sequences on shuffled blocks, and the
    contiguous keys and values. Unused slots hold NaN: reading one is seen."""
    block, heads = request.block_size, request.num_kv_heads
    per_sequence = [-(-seq_len // block) for _, seq_len in lengths]
    free = torch.randperm(sum(per_sequence) + 3, generator=rng).tolist()
    shape = (len(free), block, heads)
    dtype = torch_dtype(request.kv_dtype)
    k_cache = torch.full((*shape, request.head_dim), float("nan"), dtype=dtype)
    v_cache = torch.full((*shape, request.v_head_dim), float("nan"), dtype=dtype)
    table = torch.zeros((len(lengths), max(per_sequence)), dtype=torch.int32)
    starts, plain = [0], []
    for i, (query_len, seq_len) in enumerate(lengths):
        keys = normal(rng, seq_len, heads, request.head_dim, dtype=request.kv_dtype)
        values = normal(rng, seq_len, heads, request.v_head_dim, dtype=request.kv_dtype)
        blocks = [free.pop() for _ in range(per_sequence[i])]
        table[i, : len(blocks)] = torch.tensor(blocks)
        for at in range(seq_len):
            k_cache[blocks[at // block], at % block] = keys[at]
            v_cache[blocks[at // block], at % block] = values[at]
        starts.append(starts[-1] + query_len)
        plain.append((keys, values))
    q = normal(rng, starts[-1], request.num_heads * request.head_dim, dtype=request.dtype)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([s for _, s in lengths], dtype=torch.int32),
        block_table=table,
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=max(s for _, s in lengths),
    )
    return q, k_cache, v_cache, meta, plain


def allowed(request: AttentionRequest, query_len: int, seq_len: int) -> torch.Tensor:
    mask = torch.zeros(query_len, seq_len, dtype=torch.bool)
    for i in range(query_len):
        position = seq_len - query_len + i
        last = position if request.is_causal else seq_len - 1
        first = max(0, position - request.window + 1) if request.window else 0
        mask[i, first : last + 1] = True
    return mask


CASES = {
    "mha": attention_request(num_heads=2),
    "gqa3": attention_request(),
    "mqa": attention_request(num_kv_heads=1),
    "window5": attention_request(window=5),
    "window_is_1": attention_request(window=1),
    "window_of_all": attention_request(window=4096),
    "bidirectional": attention_request(is_causal=False),
    "narrow_values": attention_request(v_head_dim=8),
    "block1": attention_request(block_size=1),
    "block7": attention_request(block_size=7),
    "float32": attention_request(dtype="float32", kv_dtype="float32"),
    "bfloat16_kv": attention_request(dtype="float32", kv_dtype="bfloat16"),
    "bfloat16": attention_request(dtype="bfloat16", kv_dtype="bfloat16"),
}
LENGTHS = {
    "prefill": [(17, 17), (1, 1), (33, 33)],
    "chunks_after_a_prefix": [(5, 40), (16, 32), (1, 50)],
    "decode": [(1, 1), (1, 16), (1, 17), (1, 63)],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_attention_is_scaled_dot_product_attention_with_the_mask_spelt_out(
    rng: torch.Generator, request_: AttentionRequest, lengths: list[tuple[int, int]]
) -> None:
    q, k_cache, v_cache, meta, plain = paged_batch(rng, request_, lengths)
    scale = 0.37
    got = attention_op.reference(request_, scale=scale)(q, k_cache, v_cache, meta)
    start = 0
    for (query_len, seq_len), (keys, values) in zip(lengths, plain, strict=True):
        rows = q[start : start + query_len].double().view(query_len, request_.num_heads, -1)
        want = functional.scaled_dot_product_attention(
            rows.transpose(0, 1)[None],
            keys.double().transpose(0, 1)[None],
            values.double().transpose(0, 1)[None],
            attn_mask=allowed(request_, query_len, seq_len),
            scale=scale,
            enable_gqa=True,
        )
        want = want[0].transpose(0, 1).flatten(1)
        assert_within("attention", got[start : start + query_len], want)
        start += query_len


@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 6])
def test_attention_with_softcap_and_sinks_composed_by_hand(
    rng: torch.Generator, softcap: float, has_sinks: bool, window: int
) -> None:
    request = attention_request(softcap=softcap, has_sinks=has_sinks, window=window)
    lengths = [(9, 21), (1, 30)]
    q, k_cache, v_cache, meta, plain = paged_batch(rng, request, lengths)
    sinks = normal(rng, request.num_heads) if has_sinks else None
    got = attention_op.reference(request, scale=0.8, sinks=sinks)(q, k_cache, v_cache, meta)
    row = 0
    for (query_len, seq_len), (keys, values) in zip(lengths, plain, strict=True):
        mask = allowed(request, query_len, seq_len)
        for i in range(query_len):
            for head in range(request.num_heads):
                group = head // (request.num_heads // request.num_kv_heads)
                query = q[row].view(request.num_heads, -1)[head]
                score = 0.8 * (keys[mask[i], group] @ query)
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                weight = torch.exp(score)
                extra = torch.exp(sinks[head]) if sinks is not None else torch.zeros(())
                want = (weight @ values[mask[i], group]) / (weight.sum() + extra)
                assert_within("attention", got[row].view(request.num_heads, -1)[head], want)
            row += 1


def test_attention_takes_strided_rows_and_sequences_without_queries(rng: torch.Generator) -> None:
    request = attention_request()
    q, k_cache, v_cache, meta, _ = paged_batch(rng, request, [(4, 9), (3, 20)])
    wide = normal(rng, q.shape[0], q.shape[1] + 40)
    wide[:, 8 : 8 + q.shape[1]] = q
    kernel = attention_op.reference(request, scale=0.2)
    want = kernel(q, k_cache, v_cache, meta)
    torch.testing.assert_close(kernel(wide[:, 8:-32], k_cache, v_cache, meta), want)
    meta.query_start_loc = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    meta.seq_lens = torch.tensor([9, 12, 20], dtype=torch.int32)
    meta.block_table = meta.block_table[[0, 0, 1]]
    torch.testing.assert_close(kernel(q, k_cache, v_cache, meta), want)


def test_attention_refuses_what_its_request_does_not_say(rng: torch.Generator) -> None:
    with pytest.raises(ValueError, match="has_sinks=True"):
        attention_op.reference(attention_request(has_sinks=True), scale=1.0)
    with pytest.raises(ValueError, match="has_sinks=False"):
        attention_op.reference(attention_request(), scale=1.0, sinks=normal(rng, 6))
    with pytest.raises(RequestError, match="multiple of num_kv_heads"):
        attention_request(num_heads=5)
    with pytest.raises(RequestError, match="causal attention for a window"):
        attention_request(is_causal=False, window=4)
    with pytest.raises(RequestError, match="window >= 0"):
        attention_request(window=-1)


@pytest.mark.parametrize("window", [0, 5, 100])
@pytest.mark.parametrize("tokens", [1, 4, 19])
def test_attention_flops_count_only_the_pairs_that_are_seen(
    rng: torch.Generator, window: int, tokens: int
) -> None:
    prefill = attention_request(window=window)
    keys = normal(rng, 50, prefill.num_heads, prefill.head_dim)
    with FlopCounterMode(display=False) as counter:
        for position in range(tokens):  # one query at a time, over what it sees
            first = max(0, position - window + 1) if window else 0
            seen = keys[first : position + 1].transpose(0, 1)
            torch.bmm(torch.bmm(keys[:1].transpose(0, 1), seen.transpose(1, 2)), seen)
    assert attention_op.flops(prefill, tokens) == counter.get_total_flops()
    decode = attention_request(window=window, phase="decode", context_tokens=37)
    seen_by_each = min(37, window) if window else 37
    with FlopCounterMode(display=False) as counter:
        seen = keys[:seen_by_each].transpose(0, 1)
        for _ in range(tokens):
            torch.bmm(torch.bmm(keys[:1].transpose(0, 1), seen.transpose(1, 2)), seen)
    assert attention_op.flops(decode, tokens) == counter.get_total_flops()


def test_attention_flops_of_a_bidirectional_prompt() -> None:
    request = attention_request(is_causal=False)
    q, v = torch.zeros(6, 11, 24), torch.zeros(6, 11, 24)
    with FlopCounterMode(display=False) as counter:
        torch.bmm(torch.bmm(q, q.transpose(1, 2)), v)
    assert attention_op.flops(request, 11) == counter.get_total_flops()


def test_attention_bytes_are_those_of_the_tensors(rng: torch.Generator) -> None:
    decode = attention_request(
        phase="decode", dtype="float32", kv_dtype="bfloat16", context_tokens=40, v_head_dim=8
    )
    q, k_cache, v_cache, meta, plain = paged_batch(rng, decode, [(1, 40)] * 3)
    out = attention_op.reference(decode, scale=1.0)(q, k_cache, v_cache, meta)
    read = sum(nbytes(keys, values) for keys, values in plain)
    assert attention_op.bytes_moved(decode, 3) == nbytes(q, out) + read
    prefill = attention_request(dtype="float32", kv_dtype="bfloat16", v_head_dim=8)
    q, k_cache, v_cache, meta, plain = paged_batch(rng, prefill, [(13, 13)])
    out = attention_op.reference(prefill, scale=1.0)(q, k_cache, v_cache, meta)
    assert attention_op.bytes_moved(prefill, 13) == nbytes(q, out, *plain[0])


# --- matrix products ------------------------------------------------------------------------------


def independent_values(weight: QuantizedWeight) -> np.ndarray[Any, Any]:
    """The stored values in float64, element by element."""
    n, k = weight.shape
    data, scale = weight.data.numpy(), weight.scale.double().numpy()
    values = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            if weight.format.bits == 4:
                byte = int(data[row, column // 2])
                value = byte >> 4 if column % 2 else byte & 15
                value -= 8 if weight.format.is_symmetric else 0
            else:
                value = int(data[row, column])
            if weight.format.group_size:
                group: Any = (row, column // weight.format.group_size)
            else:
                group = row
            offset = 0.0 if weight.minimum is None else float(weight.minimum[group])
            if weight.format.has_zeros:
                values[row, column] = (value - offset) * scale[group]
            else:
                values[row, column] = value * scale[group] + offset
    return values


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """w8a8's rounding by numpy: symmetric, 127 steps to the largest value of a row."""
    rows = x.double().numpy()
    step = np.abs(rows).max(axis=1, keepdims=True) / 127
    step[step == 0] = 1
    return torch.from_numpy(np.rint(rows / step) * step)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("epilogue", ["none", "silu", "silu_gated"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_quantised_gemm_is_linear_with_the_stored_values(
    rng: torch.Generator, name: str, epilogue: Any, has_bias: bool
) -> None:
    n, k = 10, 384
    weight = random_weight(rng, FORMATS[name], n, k)
    values = torch.from_numpy(independent_values(weight))
    torch.testing.assert_close(weight.dequantize().double(), values, rtol=1e-6, atol=1e-7)
    bias = normal(rng, n) if has_bias else None
    request = GemmRequest(
        n=n,
        k=k,
        dtype="float64",
        weight_format=FORMATS[name],
        has_bias=has_bias,
        epilogue=epilogue,
    )
    x = normal(rng, 7, k)
    x[3] = 0.0
    rounded = round_rows(x) if FORMATS[name].activation == "int8_per_token" else x
    want = functional.linear(rounded, weight.dequantize().double(), bias)
    if epilogue == "silu":
        want = functional.silu(want)
    elif epilogue == "silu_gated":
        want = functional.silu(want[:, : n // 2]) * want[:, n // 2 :]
    assert_within("gemm", gemm_op.reference(request, weight=weight, bias=bias)(x), want)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (33, 65, 129)], ids=str)
def test_dense_gemm_is_linear(
    rng: torch.Generator, dtype: str, shape: tuple[int, int, int]
) -> None:
    t, n, k = shape
    fmt = FORMATS["float32" if dtype == "float64" else dtype]
    request = GemmRequest(n=n, k=k, dtype=dtype, weight_format=fmt, has_bias=True)
    x, weight = normal(rng, t, k, dtype=dtype), normal(rng, n, k, dtype=dtype)
    bias = normal(rng, n, dtype=dtype)
    got = gemm_op.reference(request, weight=weight, bias=bias)(x)
    want = functional.linear(x.double(), weight.double(), bias.double())
    assert got.dtype == x.dtype
    error = (got.double() - want).abs().max() / (1 + want.abs().max())
    assert error < CATALOGUE["gemm"].tolerances[dtype].rtol


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "")]
)
def test_gemm_answers_in_the_dtype_that_the_request_says(
    rng: torch.Generator, dtype: str, out_dtype: str
) -> None:
    request = GemmRequest(
        n=4, k=6, dtype=dtype, out_dtype=out_dtype, weight_format=FORMATS["float32"]
    )
    x, weight = normal(rng, 3, 6, dtype=dtype), normal(rng, 4, 6, dtype="float32")
    got = gemm_op.reference(request, weight=weight)(x)
    assert got.dtype == torch_dtype(out_dtype or dtype)
    assert_within("gemm", got, x.double() @ weight.double().T)


def test_gemm_refuses_weights_that_are_not_what_the_request_says(rng: torch.Generator) -> None:
    request = GemmRequest(n=4, k=64, dtype="float32", weight_format=FORMATS["int4_g32"])
    for wrong in (
        random_weight(rng, FORMATS["int8_g32"], 4, 64),
        random_weight(rng, FORMATS["int4_g32"], 5, 64),
        normal(rng, 4, 64),
    ):
        with pytest.raises(ValueError, match=r"weight: required int4_g32 \[4, 64\]"):
            gemm_op.reference(request, weight=wrong)
    right = random_weight(rng, FORMATS["int4_g32"], 4, 64)
    with pytest.raises(ValueError, match="has_bias=False"):
        gemm_op.reference(request, weight=right, bias=normal(rng, 4))


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_block_formats_hold_exactly_the_values_of_gguf(rng: torch.Generator, name: str) -> None:
    """Bytes of random blocks by GGUF's layout, taken apart here and by the gguf package."""
    kind, n, k = GGUF_TYPES[name], 6, 160
    weights = normal(rng, n, k, dtype="float32").numpy() * 3
    raw = quants.quantize(weights, kind)
    want = quants.dequantize(raw, kind)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = raw.reshape(n, k // 32, size)
    scale = torch.from_numpy(blocks[..., 0:2].copy().view(np.float16)[..., 0])
    minimum = None
    if name == "int4_g32_asym":
        minimum = torch.from_numpy(blocks[..., 2:4].copy().view(np.float16)[..., 0])
    if name == "int8_g32":
        data = torch.from_numpy(blocks[..., 2:].copy().view(np.int8).reshape(n, k))
    else:
        packed = blocks[..., 4:] if minimum is not None else blocks[..., 2:]
        values = np.concatenate((packed & 15, packed >> 4), axis=-1).reshape(n, k)
        data = torch.from_numpy((values[:, 0::2] | (values[:, 1::2] << 4)).astype(np.uint8))
    weight = QuantizedWeight(format=FORMATS[name], data=data, scale=scale, minimum=minimum)
    assert np.array_equal(weight.dequantize().numpy(), want)
    assert FORMATS[name].weight_bytes(n, k) == raw.nbytes == nbytes(weight)


def test_a_quantised_weight_whose_parts_do_not_fit_is_refused(rng: torch.Generator) -> None:
    fmt = FORMATS["int4_g32_asym"]
    good = random_weight(rng, fmt, 3, 64)
    for changes, message in (
        ({"minimum": None}, "a minimum for each scale"),
        ({"scale": good.scale[:, :1]}, "one scale per 32 columns"),
        ({"data": good.data[:, :20]}, "one scale per 32 columns"),
        ({"format": FORMATS["int4_g32"]}, "no minimum"),
        ({"format": FORMATS["float32"]}, "a quantised format"),
    ):
        parts: dict[str, Any] = {
            "format": fmt,
            "data": good.data,
            "scale": good.scale,
            "minimum": good.minimum,
        }
        with pytest.raises(ValueError, match=message):
            QuantizedWeight(**(parts | changes))


@pytest.mark.parametrize("name", INTEGERS)
def test_gemm_work_is_that_of_the_real_tensors(rng: torch.Generator, name: str) -> None:
    n, k, t = 12, 128, 9
    fmt = FORMATS[name]
    weight: Any = (
        random_weight(rng, fmt, n, k)
        if not fmt.is_dense
        else normal(rng, n, k).to(torch_dtype(name))
    )
    epilogue: Any
    for epilogue, out_dtype, has_bias in (
        ("none", "", True),
        ("silu_gated", "", False),
        ("none", "float32", False),
    ):
        request = GemmRequest(
            n=n,
            k=k,
            dtype="bfloat16",
            weight_format=fmt,
            epilogue=epilogue,
            out_dtype=out_dtype,
            has_bias=has_bias,
        )
        x = normal(rng, t, k, dtype="bfloat16")
        bias = normal(rng, n, dtype="bfloat16") if has_bias else None
        with FlopCounterMode(display=False) as counter:
            y = gemm_op.reference(request, weight=weight, bias=bias)(x)
        assert gemm_op.flops(request, t) == counter.get_total_flops()
        assert gemm_op.bytes_moved(request, t) == nbytes(weight, bias, x, y)


@pytest.mark.parametrize("name", ["float32", "int8_channel", "int8_channel_a8", "int4_g32_asym"])
@pytest.mark.parametrize("epilogue", ["none", "silu_gated"])
def test_grouped_gemm_is_a_loop_over_experts(
    rng: torch.Generator, name: str, epilogue: Any
) -> None:
    experts, n, k = 4, 6, 64
    fmt = FORMATS[name]
    request = GroupedGemmRequest(
        num_experts=experts,
        experts_per_token=2,
        n=n,
        k=k,
        dtype="float64",
        weight_format=fmt,
        epilogue=epilogue,
    )
    dense = normal(rng, experts, n, k)
    weights: Any = (
        dense if fmt.is_dense else [random_weight(rng, fmt, n, k) for _ in range(experts)]
    )
    exact = dense if fmt.is_dense else [w.dequantize().double() for w in weights]
    offsets = torch.tensor([0, 3, 3, 10, 11])  # one expert has no rows
    x = normal(rng, 11, k)
    got = gemm_op.grouped_reference(request, weight=weights)(x, offsets)
    expert_of = [0] * 3 + [2] * 7 + [3]
    for row, expert in enumerate(expert_of):
        line = x[row : row + 1]
        line = round_rows(line) if fmt.activation == "int8_per_token" else line
        want = functional.linear(line, exact[expert])
        if epilogue == "silu_gated":
            want = functional.silu(want[:, : n // 2]) * want[:, n // 2 :]
        assert_within("grouped_gemm", got[row : row + 1], want)
    with pytest.raises(ValueError, match="offsets from 0 to 11"):
        gemm_op.grouped_reference(request, weight=weights)(x, offsets - 1)


def test_grouped_gemm_work(rng: torch.Generator) -> None:
    """Expected traffic against a simulation of uniform routing."""
    request = GroupedGemmRequest(
        num_experts=8,
        experts_per_token=2,
        n=32,
        k=64,
        dtype="float32",
        weight_format=FORMATS["int4_g32"],
        epilogue="silu_gated",
    )
    tokens, tries = 5, 4000
    touched = 0
    for _ in range(tries):
        chosen = torch.rand(tokens, 8, generator=rng).topk(2, dim=1).indices
        touched += len(set(chosen.flatten().tolist()))
    weight = random_weight(rng, FORMATS["int4_g32"], 32, 64)
    rows = tokens * 2 * 4 * (64 + 16)
    want = touched / tries * nbytes(weight) + rows
    assert gemm_op.grouped_bytes_moved(request, tokens) == pytest.approx(want, rel=0.01)
    assert gemm_op.grouped_flops(request, tokens) == tokens * 2 * gemm_op.flops(
        GemmRequest(n=32, k=64, dtype="float32", weight_format=FORMATS["int4_g32"]), 1
    )


# --- norm, rope, activation, embedding, KV write --------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_residual", [False, True], ids=["", "residual"])
def test_norm_is_rms_norm(rng: torch.Generator, dtype: str, rows: int, has_residual: bool) -> None:
    hidden = 37
    request = RmsNormRequest(
        hidden_size=hidden, dtype=dtype, rows_per_token=rows, has_residual=has_residual
    )
    x, weight = normal(rng, 5, rows * hidden, dtype=dtype), normal(rng, hidden, dtype=dtype)
    residual = normal(rng, 5, rows * hidden, dtype=dtype)
    kernel = norm_op.reference(request, weight=weight, eps=1e-3)
    source = x
    if has_residual:
        got, total = kernel(x, residual)
        assert torch.equal(total, x + residual)
        source = total
    else:
        got = kernel(x)
    lines = source.double().view(5, rows, hidden)
    want = functional.rms_norm(lines, (hidden,), weight.double(), eps=1e-3).view(5, rows * hidden)
    assert got.dtype == x.dtype
    assert_within("norm.rms", got, want)
    written = (got, total) if has_residual else (got,)
    read = (x, residual) if has_residual else (x,)
    assert norm_op.bytes_moved(request, 5) == nbytes(*read, *written, weight)


def test_norm_rounds_to_int8_with_one_scale_a_token(rng: torch.Generator) -> None:
    request = RmsNormRequest(hidden_size=48, dtype="float32", quantize="int8_per_token")
    x, weight = normal(rng, 6, 48, dtype="float32"), normal(rng, 48, dtype="float32")
    q, scale = norm_op.reference(request, weight=weight, eps=1e-5)(x)
    want = functional.rms_norm(x.double(), (48,), weight.double(), eps=1e-5)
    assert q.dtype == torch.int8
    assert q.abs().amax(dim=1).tolist() == [127] * 6
    error = (q.double() * scale.double() - want).abs()
    assert bool((error <= scale.double() * 0.5001).all())
    assert norm_op.bytes_moved(request, 6) == nbytes(x, weight, q, scale)


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_rope_is_transformers_rotation(
    rng: torch.Generator, style: Any, dtype: str, rotary_dim: int
) -> None:
    t, heads, kv_heads, dim = 7, 4, 2, 16
    request = RopeRequest(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=rotary_dim,
        dtype=dtype,
        style=style,
    )
    angles = torch.rand(50, rotary_dim // 2, generator=rng, dtype=torch.float64) * 7
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    table = table if dtype == "float64" else table.float()
    positions = torch.randint(0, 50, (t,), generator=rng)
    # q and k are neighbouring columns of one projection, as in the engine.
    packed = normal(rng, t, (heads + kv_heads + 1) * dim, dtype=dtype)
    before = packed.clone()
    q, k = packed[:, : heads * dim], packed[:, heads * dim : (heads + kv_heads) * dim]
    CATALOGUE["rope"].reference(request, cos_sin_cache=table)(q, k, positions)
    chosen = angles[positions]
    if style == "half_split":
        rotate, angle = rotate_halves, torch.cat((chosen, chosen), dim=1)
    else:
        rotate, angle = rotate_interleaved, chosen.repeat_interleave(2, dim=1)
    for part, columns, count in ((q, slice(0, 64), heads), (k, slice(64, 96), kv_heads)):
        old = before[:, columns].double().view(1, t, count, dim)
        turned, _ = rotate(
            old[..., :rotary_dim], old[..., :rotary_dim], angle.cos()[None], angle.sin()[None], 2
        )
        want = torch.cat((turned.double(), old[..., rotary_dim:]), dim=-1).view(t, -1)
        # transformers' Cohere rotates in float32, whatever it is given.
        if dtype == "float64" and style == "interleaved":
            torch.testing.assert_close(part, want, rtol=2e-6, atol=2e-6)
        else:
            assert_within("rope", part, want)
    assert torch.equal(packed[:, 96:], before[:, 96:])


def test_rope_bytes_are_those_of_the_tensors(rng: torch.Generator) -> None:
    request = RopeRequest(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=16, dtype="bfloat16")
    q, k = normal(rng, 5, 64, dtype="bfloat16"), normal(rng, 5, 32, dtype="bfloat16")
    rows, positions = torch.zeros(5, 16), torch.zeros(5, dtype=torch.int64)
    assert CATALOGUE["rope"].bytes_moved(request, 5) == 2 * nbytes(q, k) + nbytes(rows, positions)
    half = RopeRequest(num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=8, dtype="bfloat16")
    assert CATALOGUE["rope"].flops(request, 5) == 2 * CATALOGUE["rope"].flops(half, 5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("clamp", [0.0, 0.7])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gated_activation(rng: torch.Generator, activation: Any, clamp: float, dtype: str) -> None:
    request = GatedActivationRequest(width=13, dtype=dtype, activation=activation, clamp=clamp)
    x = normal(rng, 6, 26, dtype=dtype)
    got = activation_op.reference(request)(x)
    gate, up = x.double().numpy()[:, :13], x.double().numpy()[:, 13:]
    if clamp:
        gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
    if activation == "silu":
        want = gate / (1 + np.exp(-gate)) * up
    else:
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        want = 0.5 * gate * (1 + np.tanh(inner)) * up
    assert_within("activation.gated", got, torch.from_numpy(want))
    assert activation_op.bytes_moved(request, 6) == nbytes(x, got)


def test_embedding_is_the_rows(rng: torch.Generator) -> None:
    request = EmbeddingRequest(vocab_size=31, hidden_size=9, dtype="bfloat16")
    weight = normal(rng, 31, 9, dtype="bfloat16")
    ids = torch.randint(0, 31, (12,), generator=rng)
    got = CATALOGUE["embedding"].reference(request, weight=weight)(ids)
    assert torch.equal(got, functional.embedding(ids, weight))
    assert CATALOGUE["embedding"].bytes_moved(request, 12) == 2 * nbytes(got) + nbytes(ids)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_kv_write_fills_its_slots_and_no_others(rng: torch.Generator, kv_dtype: str) -> None:
    request = KvWriteRequest(
        num_kv_heads=3, head_dim=8, v_head_dim=5, block_size=4, dtype="float32", kv_dtype=kv_dtype
    )
    packed = normal(rng, 7, 3 * 13 + 6, dtype="float32")
    k, v = packed[:, 2:26], packed[:, 28:43]
    caches = [normal(rng, 5, 4, 3, dim, dtype=kv_dtype) for dim in (8, 5)]
    before = [cache.clone() for cache in caches]
    slots = torch.randperm(20, generator=rng)[:7]
    CATALOGUE["kv_write"].reference(request)(k, v, *caches, slots)
    for cache, old, rows in zip(caches, before, (k, v), strict=True):
        for slot in range(20):
            found = cache[slot // 4, slot % 4]
            if slot in slots.tolist():
                row = rows[slots.tolist().index(slot)].to(cache.dtype).view(3, -1)
                assert torch.equal(found, row)
            else:
                assert torch.equal(found, old[slot // 4, slot % 4])
    stored = DTYPE_BYTES[kv_dtype] * 7 * 3 * 13
    want = nbytes(k.contiguous(), v.contiguous(), slots) + stored
    assert CATALOGUE["kv_write"].bytes_moved(request, 7) == want


# --- sampling -------------------------------------------------------------------------------------


def test_top_k_top_p_is_transformers_warpers(rng: torch.Generator) -> None:
    vocab = 203
    kernel = CATALOGUE["sample.top_k_top_p"].reference(TopKTopPRequest(vocab_size=vocab))
    settings = [(vocab, 1.0), (1, 1.0), (7, 1.0), (vocab, 0.9), (vocab, 0.05), (40, 0.5), (3, 0.99)]
    logits = (normal(rng, len(settings), vocab) * 3).float()
    top_k = torch.tensor([k for k, _ in settings])
    top_p = torch.tensor([p for _, p in settings])
    got = kernel(logits, top_k, top_p)
    for row, (k, p) in enumerate(settings):
        want = logits[row : row + 1].double()
        want = TopKLogitsWarper(k)(None, want) if k < vocab else want
        want = TopPLogitsWarper(p)(None, want) if p < 1 else want
        assert torch.equal(got[row].double(), want[0]), (k, p)


def test_top_k_top_p_keeps_the_lower_of_equals_and_never_nothing(rng: torch.Generator) -> None:
    kernel = CATALOGUE["sample.top_k_top_p"].reference(TopKTopPRequest(vocab_size=4))
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]] * 4)
    kept = kernel(logits, torch.tensor([2, 1, 0, 4]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert [torch.isfinite(row).nonzero().flatten().tolist() for row in kept] == [
        [1, 2],
        [1],
        [1],
        [1],
    ]
    top_k, top_p = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    want = nbytes(logits, kept, top_k, top_p)
    assert CATALOGUE["sample.top_k_top_p"].bytes_moved(TopKTopPRequest(vocab_size=4), 4) == want


# --- collectives ----------------------------------------------------------------------------------


def on_ranks(request: CollectiveRequest, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What each rank's reference returns; an error of a rank is raised."""

    def work(group: ThreadGroup) -> Any:
        kernel = collective_op.reference(request, group=group)
        return kernel() if request.kind == "barrier" else kernel(inputs[group.rank])

    return on_threads(len(inputs), work)


def collective(kind: Any, world: int, width: int, dtype: str = "float64") -> CollectiveRequest:
    return CollectiveRequest(kind=kind, world_size=world, width=width, dtype=dtype)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives_are_what_numpy_makes_of_all_ranks(rng: torch.Generator, world: int) -> None:
    width, rows = 12, 3 * world
    original = [normal(rng, rows, width) for _ in range(world)]
    whole = np.stack([x.numpy() for x in original])
    wanted: dict[str, Callable[[int], np.ndarray[Any, Any]]] = {
        "all_reduce": lambda rank: whole.sum(axis=0),
        "all_gather": lambda rank: np.concatenate(list(whole), axis=1),
        "reduce_scatter": lambda rank: np.split(whole.sum(axis=0), world, axis=1)[rank],
        "all_to_all": lambda rank: np.concatenate(
            [np.split(part, world, axis=0)[rank] for part in whole]
        ),
        "broadcast": lambda rank: whole[0],
    }
    for kind, want in wanted.items():
        inputs = [x.clone() for x in original]
        results = on_ranks(collective(kind, world, width), inputs)
        for rank in range(world):
            torch.testing.assert_close(results[rank], torch.from_numpy(want(rank)))
            in_place = kind in ("all_reduce", "broadcast")
            assert torch.equal(inputs[rank], results[rank] if in_place else original[rank])
    assert on_ranks(collective("barrier", world, 1), original) == [None] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_reduce_and_norm_is_both_one_after_the_other(rng: torch.Generator, world: int) -> None:
    parts = [normal(rng, 5, 12) for _ in range(world)]
    residual, weight = normal(rng, 5, 12), normal(rng, 12)
    total = np.stack([x.numpy() for x in parts]).sum(axis=0) + residual.numpy()
    want = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-3) * weight.numpy()
    request = AllReduceNormRequest(kind="all_reduce", world_size=world, width=12, dtype="float64")

    def work(group: ThreadGroup) -> Any:
        kernel = collective_norm_op.reference(request, group=group, weight=weight, eps=1e-3)
        return kernel(parts[group.rank].clone(), residual.clone())

    for y, added in on_threads(world, work):
        torch.testing.assert_close(y, torch.from_numpy(want))
        torch.testing.assert_close(added, torch.from_numpy(total))


def test_all_reduce_and_norm_is_of_all_reduces_only() -> None:
    with pytest.raises(RequestError, match="kind='all_reduce'"):
        AllReduceNormRequest(kind="all_gather", world_size=2, width=8, dtype="float32")


def test_all_reduce_of_integers_is_exact() -> None:
    inputs = [torch.tensor([[2**40 + 1, -(2**33)]]), torch.tensor([[2**24 + 1, 1]])]
    results = on_ranks(collective("all_reduce", 2, 2, "int64"), inputs)
    assert results[0].tolist() == [[2**40 + 2**24 + 2, 1 - 2**33]]


def test_collectives_refuse_shares_that_are_not_equal(rng: torch.Generator) -> None:
    with pytest.raises(RequestError, match="3 ranks share equally"):
        collective("reduce_scatter", 3, 8)
    with pytest.raises(ValueError, match="rows in 3 parts, found 4"):
        on_ranks(collective("all_to_all", 3, 8), [normal(rng, 4, 8) for _ in range(3)])
    with pytest.raises(ValueError, match="required 3 ranks, found 2"):
        on_ranks(collective("all_reduce", 3, 8), [normal(rng, 4, 8) for _ in range(2)])


@pytest.mark.parametrize("world", [1, 2, 5])
def test_collective_bytes_are_those_of_a_simulated_ring(world: int) -> None:
    """Each rank's data in `world` parts, passed on around a ring; counted for one rank."""
    tokens, width = 5, 40
    size = tokens * width * 4
    part = size / world
    sent = {
        "all_reduce": sum(part for _ in range(2 * (world - 1))),
        "reduce_scatter": sum(part for _ in range(world - 1)),
        "all_gather": sum(size for _ in range(world - 1)),
        "all_to_all": sum(part for _ in range(world - 1)),
        "broadcast": size if world > 1 else 0,
        "barrier": 0,
    }
    for kind, want in sent.items():
        got = collective_op.bytes_moved(collective(kind, world, width, "float32"), tokens)
        assert got == pytest.approx(want), kind
