"""The pass over queries and one row a token in the interpreter: norm, rotation, rounding, write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

import hal_kernels.latent_kv_write.triton as triton_latent
from gpu_devices import gpu
from hal.ops.kv_formats import KV_FORMATS, read_rows
from hal.ops.latent_kv_write import LatentKvWriteRequest, reference
from hal.reasons import ReasonKind
from hal_kernels.latent_kv_write.triton_limits import not_supported_reasons
from hal_kernels.latent_kv_write.triton_variants import LAYER_NORMED

EPS = 1e-6
PAGE, PAGES = 64, 3
STYLES = ("interleaved", "half_split")
# Two roundings, of a norm and of a rotation, each of half a step.
ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
# format -> (row_dim, row_rotary_start, norm_dim, head_dim, q_rotary_start)
ROWS = {
    "fp8_656": (576, 512, 512, 192, 128),
    "v4_584": (512, 448, 512, 512, 448),
    "v41_528": (512, 448, 512, 512, 448),
    "fp4_288": (512, 448, 512, 512, 448),
    "fp8_132": (128, 64, 128, 128, 64),
    "fp4_68": (128, 0, 128, 128, 0),
    "bf16": (576, 512, 512, 192, 128),
    "fp16": (576, 512, 512, 192, 128),
}


def request_of(name: str, **fields: Any) -> LatentKvWriteRequest:
    row_dim, start, norm_dim, head_dim, q_start = ROWS[name]
    given: dict[str, Any] = {
        "num_heads": 3, "head_dim": head_dim, "row_dim": row_dim, "rotary_dim": 64,
        "q_rotary_start": q_start, "row_rotary_start": start, "norm_dim": norm_dim,
        "block_size": PAGE, "dtype": "float16" if name == "fp16" else "bfloat16", "kv_format": name,
    }  # fmt: skip
    return LatentKvWriteRequest(**(given | fields))


def cache_of(request: LatentKvWriteRequest) -> torch.Tensor:
    """Of bytes that are NaN in every format."""
    form = KV_FORMATS[request.kv_format]
    if form.is_plain:
        dtype = getattr(torch, form.element)
        return torch.full((PAGES, request.block_size, request.row_dim), float("nan"), dtype=dtype)
    return torch.full((PAGES, form.page_bytes(request.block_size)), 0xFF, dtype=torch.uint8)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
    return x * scale * weight.double()


def layer_normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    args = (weight.double(), bias.double(), EPS)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], *args)


def rotated(x: torch.Tensor, start: int, table: torch.Tensor, style: str) -> torch.Tensor:
    """float64 [T, H, D]; table [T, R]: cosines, then sines."""
    cos, sin = (part[:, None, :] for part in table.double().chunk(2, dim=-1))
    half = cos.shape[-1]
    if style == "interleaved":
        first = slice(start, start + 2 * half, 2)
        second = slice(start + 1, start + 2 * half, 2)
    else:
        first, second = slice(start, start + half), slice(start + half, start + 2 * half)
    a, b = x[..., first], x[..., second]
    y = x.clone()
    y[..., first] = a * cos - b * sin
    y[..., second] = b * cos + a * sin
    return y


def inputs(request: LatentKvWriteRequest, tokens: int) -> dict[str, torch.Tensor]:
    """Rows of 1e-3 to 3e2 and one of zeros, all strided; slots in no order. Scales of e4m3 end at
    448, of values of four bits up to 6."""
    sizes = torch.logspace(-3, 2.5, max(tokens, 1))[:tokens, None]
    dtype = getattr(torch, request.dtype)
    rows = (torch.randn(tokens, request.row_dim + 16) * sizes).to(dtype)
    if tokens > 2:
        rows[2] = 0.0
    angles = torch.rand(50, request.rotary_dim // 2) * 6.3
    return {
        "q": torch.randn(tokens, max(request.num_heads, 1) * request.head_dim + 32).to(dtype),
        "rows": rows[:, : request.row_dim],
        "positions": torch.randint(0, 50, (tokens,)),
        "slots": torch.randperm(request.block_size * PAGES)[:tokens],
        "table": torch.cat((angles.cos(), angles.sin()), dim=1),
        "row_weight": (torch.rand(max(request.norm_dim, 1)) + 0.5).to(dtype),
        "row_bias": torch.randn(max(request.norm_dim, 1)).to(dtype),
        "q_weight": (torch.rand(request.head_dim) + 0.5).to(dtype),
    }


def bound(request: LatentKvWriteRequest, given: dict[str, torch.Tensor], bind: Any) -> Any:
    static: dict[str, Any] = {"cos_sin_cache": given["table"], "eps": EPS}
    if request.norm_dim:
        static["row_weight"] = given["row_weight"]
        if request.row_norm_kind == "layer":
            static["row_bias"] = given["row_bias"]
    if request.has_q_norm:
        static["q_weight"] = given["q_weight"]
    return bind(request, **static)


def ours(request: LatentKvWriteRequest, **static: Any) -> Any:
    return triton_latent.bind(request, gpu("sm_90"), **static)


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("has_q_norm", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_against_float64(
    name: str, has_q_norm: bool, has_norm: bool, style: str, tokens: int
) -> None:
    fields = {} if has_norm else {"norm_dim": 0}
    check(request_of(name, has_q_norm=has_q_norm, style=style, **fields), tokens)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", list(LAYER_NORMED))
@pytest.mark.parametrize("heads", [0, 5])
def test_index_keys_under_a_layer_norm(name: str, style: str, heads: int) -> None:
    """DeepSeek-V3.2's and GLM-5's: all 128 values are normed, the first 64 rotated."""
    fields = {"head_dim": 128, "q_rotary_start": 0, "row_dim": 128, "row_rotary_start": 0}
    check(
        request_of(
            name, num_heads=heads, style=style, norm_dim=128, row_norm_kind="layer", **fields
        ),
        6,
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("norm_dim", [0, 320, 576])
def test_rows_of_other_shapes(style: str, norm_dim: int) -> None:
    """Rotated values that are no power of two, in the middle of rows and heads."""
    fields = {"rotary_dim": 24, "q_rotary_start": 40, "row_rotary_start": 300, "head_dim": 80}
    for row_norm_kind in ("rms", "layer"):
        check(
            request_of(
                "bf16", style=style, norm_dim=norm_dim, row_norm_kind=row_norm_kind,
                has_q_norm=True, **fields,
            ),
            4,
        )  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@drawn(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_drawn_sizes(data: st.DataObject, seed: int) -> None:
    """Any place of the rotated values, of the norm, of pages: against float64 as above."""
    torch.manual_seed(seed)
    draw = data.draw
    style = draw(st.sampled_from(STYLES))
    step = 2 if style == "interleaved" else 1
    row_dim, head_dim = 64 * draw(st.integers(1, 9)), 2 * draw(st.integers(4, 60))
    rotary_dim = 2 * draw(st.integers(1, min(row_dim, head_dim) // 2))
    row_start = step * draw(st.integers(0, (row_dim - rotary_dim) // step))
    q_start = step * draw(st.integers(0, (head_dim - rotary_dim) // step))
    heads = draw(st.integers(0, 9))
    request = LatentKvWriteRequest(
        num_heads=heads,
        head_dim=head_dim,
        row_dim=row_dim,
        rotary_dim=rotary_dim,
        q_rotary_start=q_start,
        row_rotary_start=row_start,
        norm_dim=draw(st.integers(0, row_dim)),
        block_size=draw(st.sampled_from([1, 16, 48, 64])),
        dtype="bfloat16",
        kv_format="bf16",
        style=style,
        has_q_norm=heads > 0 and draw(st.booleans()),
        row_norm_kind=draw(st.sampled_from(["rms", "layer"])),
    )
    check(request, draw(st.integers(1, min(5, 3 * request.block_size))))


def check(request: LatentKvWriteRequest, tokens: int) -> None:
    """One call against float64."""
    name, has_norm = request.kv_format, request.norm_dim > 0
    given = inputs(request, tokens)
    heads, dim = request.num_heads, request.head_dim
    q, rows, cache = given["q"][:, : heads * dim], given["rows"], cache_of(request)
    table = given["table"][given["positions"]]
    want_q = q.double().reshape(tokens, heads, dim)
    if request.has_q_norm:
        want_q = normed(want_q, given["q_weight"])
    if heads:
        want_q = rotated(want_q, request.q_rotary_start, table, request.style)
    want = rows.double()
    if has_norm:
        size = request.norm_dim
        first = want[:, :size]
        if request.row_norm_kind == "layer":
            first = layer_normed(first, given["row_weight"], given["row_bias"])
        else:
            first = normed(first, given["row_weight"])
        want = torch.cat((first, want[:, size:]), dim=1)
    want = rotated(want[:, None], request.row_rotary_start, table, request.style)[:, 0]
    kept, untouched = rows.clone(), given["q"][:, heads * dim :].clone()
    before = cache.clone()

    kernel = bound(request, given, ours)
    returned = kernel(q, rows, given["positions"], cache, given["slots"])

    assert returned is q
    assert torch.equal(rows, kept)
    assert torch.equal(given["q"][:, heads * dim :], untouched)
    if heads:
        got_q = q.double().reshape(tokens, heads, dim)
        largest = want_q.abs().amax(dim=-1, keepdim=True)
        assert ((got_q - want_q).abs() <= ROUNDING[request.dtype] * largest).all()
    got = read_rows(name, cache, request.block_size, given["slots"], torch.float64)
    assert_rows(got, want, name, ROUNDING[request.dtype])
    # Nothing but the slots is written.
    others = torch.ones(request.block_size * PAGES, dtype=torch.bool)
    others[given["slots"]] = False
    for one in others.nonzero().flatten()[:20]:
        old, new = (read_rows(name, c, request.block_size, one[None]) for c in (before, cache))
        assert torch.equal(old.isnan(), new.isnan())


def assert_rows(got: torch.Tensor, want: torch.Tensor, name: str, rounding: float) -> None:
    form = KV_FORMATS[name]
    quantized = form.quantized_dim
    plain = want[:, quantized:]
    largest = want.abs().amax(dim=-1, keepdim=True)
    assert ((got[:, quantized:] - plain).abs() <= rounding * largest).all()
    if quantized:
        grouped = want[:, :quantized].reshape(len(want), -1, form.group_size)
        peak = grouped.abs().amax(dim=-1, keepdim=True)
        found = got[:, :quantized].reshape(grouped.shape)
        if form.element == "fp4_e2m1":
            # Half of the largest step is 1, of a scale up to twice as large as needed. One of e4m3
            # is rounded to nearest, in steps of 2**-9 at least: by as much six of it may lack.
            widest = peak / 6 * (2 if form.scale == "ue8m0" else 1)
            lacks = 0.0 if form.scale == "ue8m0" else (peak / 96).clamp(min=2.0**-10)
            allowed = widest + 6 * lacks
        else:
            step = peak / 448 * (2 if form.scale == "ue8m0" else 1) * 2.0**-9
            # e4m3 has three bits of mantissa: half a step.
            allowed = 2.0**-4 * grouped.abs() + step
        # And the two roundings to the activations' dtype before.
        assert ((found - grouped).abs() <= allowed + rounding * peak).all()


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("heads", [0, 5])
def test_bytes_are_those_of_the_parts(name: str, style: str, heads: int) -> None:
    """But for a value here and there at a tie of a rounding, as sums are in another order."""
    request = request_of(name, num_heads=heads, style=style)
    given = inputs(request, 5)
    q = given["q"][:, : heads * request.head_dim] if heads else None
    results = []
    for bind in (reference, ours):
        cache = cache_of(request)
        own = None if q is None else q.clone()
        kernel = bound(request, given, bind)
        own = kernel(own, given["rows"], given["positions"], cache, given["slots"])
        results.append((own, cache))
    (want_q, want), (got_q, got) = results
    assert (got.view(torch.uint8) != want.view(torch.uint8)).double().mean() < 1e-3
    if q is None:
        assert got_q is None
    else:
        assert (got_q.double() - want_q.double()).abs().max() <= 2.0**-7 * want_q.abs().max()


@pytest.mark.parametrize("style", STYLES)
def test_no_tokens_and_values_that_are_not_finite(style: str) -> None:
    request = request_of("fp8_656", style=style)
    given = inputs(request, 0)
    cache = cache_of(request)
    kernel = bound(request, given, ours)
    kernel(given["q"][:, :576], given["rows"], given["positions"], cache, given["slots"])
    assert (cache == 0xFF).all()
    given = inputs(request, 3)
    given["rows"][1, 530] = float("inf")  # of what is rotated: the latent values stay as they are
    given["rows"][0, 3] = float("nan")
    kernel = bound(request, given, ours)
    kernel(given["q"][:, :576], given["rows"], given["positions"], cache, given["slots"])
    got = read_rows("fp8_656", cache, PAGE, given["slots"])
    assert got[0, :512].isnan().all()
    assert got[0, 512:].isfinite().all()
    assert got[1, :512].isfinite().all()
    assert (~got[1, 512:].isfinite()).sum() == 2  # the pair
    assert got[2].isfinite().all()


@pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        ("fp8_656", {}, None),
        ("v4_584", {"has_q_norm": True}, None),
        ("bf16", {"num_heads": 0}, None),
        ("fp8_656", {"style": "half_split"}, None),
        ("v41_528", {"kv_format": "fp4_288"}, None),
        ("fp4_68", {}, None),
        ("fp16", {"style": "half_split", "has_q_norm": True}, None),
        ("fp8_132", {"row_norm_kind": "layer"}, None),
        ("v41_528", {"dtype": "float16"}, ReasonKind.MISSING),
        ("fp16", {"dtype": "bfloat16"}, ReasonKind.MISSING),
        ("v41_528", {"row_norm_kind": "layer"}, ReasonKind.MISSING),
        ("fp8_132", {"row_norm_kind": "layer", "has_q_norm": True}, ReasonKind.MISSING),
        ("bf16", {"row_dim": 560, "row_rotary_start": 496}, ReasonKind.MISSING),
        ("fp8_656", {"row_rotary_start": 480}, ReasonKind.MISSING),
        ("bf16", {"row_dim": 640}, ReasonKind.MISSING),
    ],
)
def test_what_is_offered(name: str, fields: dict[str, Any], kind: ReasonKind | None) -> None:
    for arch in ("sm_80", "sm_120", "gfx942", "gfx1100"):
        reasons = not_supported_reasons(request_of(name, **fields), gpu(arch))
        assert [reason.kind for reason in reasons] == ([] if kind is None else [kind])


def test_weights_of_norms_are_required() -> None:
    table = torch.ones(4, 64)
    with pytest.raises(ValueError, match="row_weight"):
        ours(request_of("bf16"), cos_sin_cache=table)
    for bind in (ours, reference):
        with pytest.raises(ValueError, match="row_bias"):
            bind(
                request_of("bf16", row_norm_kind="layer"),
                cos_sin_cache=table,
                row_weight=torch.ones(512),
            )
    request = request_of("bf16", norm_dim=0, has_q_norm=True)
    for bind in (ours, reference):
        with pytest.raises(ValueError, match="q_weight"):
            bind(request, cos_sin_cache=table)
