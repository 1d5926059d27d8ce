"""The Triton Engram: rows exactly as the reference's, the mix against float64."""

from __future__ import annotations

import pytest
import torch

import hal_kernels.engram.triton as triton_engram
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.engram import EngramRequest, reference
from hal_kernels.engram.triton_limits import not_supported_reasons

STEP = CATALOGUE["engram"].largest_errors


def gather_request(heads: int, ngram: int, width: int, dtype: str) -> EngramRequest:
    return EngramRequest(
        kind="gather", num_heads=heads, max_ngram=ngram, row_width=width, hidden_size=32,
        num_streams=2, dtype=dtype,
    )  # fmt: skip


def static_of(request: EngramRequest) -> dict[str, torch.Tensor]:
    """A table of every byte (NaN among them) for hashes that leave the 64 bits."""
    grams = (request.max_ngram - 1, request.num_heads)
    primes = torch.tensor([5, 7, 11, 13])[torch.randint(0, 4, grams)]
    offsets = primes.flatten().cumsum(0).view(grams) - primes
    table = torch.randint(0, 256, (int(primes.sum()), request.row_bytes), dtype=torch.uint8)
    # Scales around 1, but for one of each row that is anything.
    table[:, request.row_width + 1 :] = torch.randint(
        110, 140, table[:, request.row_width + 1 :].shape
    )
    multipliers = torch.randint(-(2**62), 2**62, (request.max_ngram,)) | 1
    return {"table": table, "multipliers": multipliers, "primes": primes, "offsets": offsets}


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize(
    ("heads", "ngram", "width"), [(8, 4, 64), (3, 2, 96), (1, 3, 32)], ids=["8", "3", "1"]
)
def test_gather_is_exact(heads: int, ngram: int, width: int, dtype: str) -> None:
    request = gather_request(heads, ngram, width, dtype)
    static = static_of(request)
    kernel = triton_engram.bind(request, gpu("sm_90"), **static)
    for tokens in (0, 1, 7):
        ids = torch.randint(0, 2**40, (tokens, ngram))
        found, want = kernel(ids), reference(request, **static)(ids)
        assert found.dtype == want.dtype
        assert found.shape == want.shape
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize(("streams", "hidden"), [(4, 72), (1, 1100)])
def test_mix(streams: int, hidden: int, dtype: str) -> None:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = EngramRequest(
        kind="mix", num_heads=2, max_ngram=3, row_width=32, hidden_size=hidden,
        num_streams=streams, dtype=dtype,
    )  # fmt: skip
    weights = [torch.rand(streams, hidden).to(torch_dtype) + 0.5 for _ in range(2)]
    static = {"query_weight": weights[0], "key_weight": weights[1], "eps": 1e-6}
    kernel = triton_engram.bind(request, gpu("sm_90"), **static)
    for tokens in (0, 3):
        sizes = torch.logspace(-2, 2, 3)[:tokens]
        x = (torch.randn(tokens, streams, hidden) * sizes[:, None, None]).to(torch_dtype)
        kv = torch.randn(tokens, (streams + 1) * hidden + 8).to(torch_dtype)[:, :-8]
        kv[1:2, : streams * hidden] = x[1:2].flatten(1)  # a key as its stream: the gate is open
        exact = reference(request, **static)(x.double(), kv.double())
        found = kernel(x, kv)
        assert found.dtype == torch_dtype
        # The gate's root turns what float32 loses of the dot product, d, into up to sqrt(d) / 4.
        value = kv[:, None, streams * hidden :].double().abs()
        bound = STEP[dtype] * exact.abs() + 1e-3 * value + 1e-6 * x.double().abs()
        assert ((found.double() - exact).abs() <= bound).all()


def test_a_row_that_the_table_lacks_is_not_a_number_and_what_is_refused() -> None:
    request = gather_request(2, 2, 32, "float32")
    static = static_of(request)
    static["offsets"] = static["offsets"] + torch.tensor([[0, 1000]])
    rows = triton_engram.bind(request, gpu("sm_90"), **static)(torch.tensor([[3, 4]]))
    assert rows[0, 32:].isnan().all()
    with pytest.raises(ValueError, match="required table, multipliers"):
        triton_engram.bind(request, gpu("sm_90"))
    with pytest.raises(ValueError, match="required a contiguous table"):
        triton_engram.bind(request, gpu("sm_90"), **{**static, "table": static["table"][:, ::2]})
    wide = gather_request(64, 2, 256, "bfloat16")
    assert [r.what for r in not_supported_reasons(wide, gpu("sm_90"))] == [
        "engram.gather: num_heads * row_width, each padded to a power of two"
    ]
