"""What limits judge is what is launched, of rotations and writes into caches: all constants, warps
and types of tensors of the form that a limit names, at the sizes that it was compiled for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import hal_kernels.kv_write.triton as kv_write
import hal_kernels.latent_kv_write.triton as latent
import hal_kernels.rope.triton as rope
import hal_kernels.rope_kv_write.triton as rope_kv_write
from gpu_devices import gpu
from hal.errors import RequestError
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS
from hal.ops.kv_write import KvWriteRequest
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal.ops.rope import RopeRequest
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal_backends.gpu.triton_kernels import op_limits
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import TARGETS, find_target
from hal_kernels.aot.variant import TRITON_DTYPES, KernelVariant
from hal_kernels.latent_kv_write.triton_variants import ROWS, launch_constants, program_warps
from recorded_launches import compiled, recorded

ARCHES = [target.arch for target in TARGETS]
DTYPES = ("bfloat16", "float16", "float32")
STYLES = ("half_split", "interleaved")
TOKENS, PAGE = 3, 64
TABLE = torch.ones(4, 512)


def variant_of(request: Any, arch: str) -> KernelVariant | None:
    """That by which the limits judge a request; None where it is refused."""
    limits, device = op_limits(request.op), gpu(arch)
    assert limits is not None
    if limits(request, device):
        return None
    (query,) = evidence_asked(limits, request, device)
    return compiled(query.kernel, arch, query.dtype, query.config)


def check(launched: dict[str, Any], variant: KernelVariant) -> None:
    for name, value in variant.constants.items():
        assert launched[name] == value, name
    assert launched.get("num_warps", 4) == variant.num_warps
    for name, dtype in variant.pointers.items():
        found = str(launched[name].dtype).removeprefix("torch.").replace("float8", "fp8")
        assert TRITON_DTYPES[found] == TRITON_DTYPES[dtype] or _is_unused(name, variant), name


def _is_unused(name: str, variant: KernelVariant) -> bool:
    """Whether a form has no such tensor, and takes another in its place."""
    constants = variant.constants
    unused = {
        "q_weight_D_ptr": not constants.get("HAS_NORM", constants.get("HAS_Q_NORM")),
        "k_weight_D_ptr": not constants.get("HAS_NORM"),
        "tails_ptr": not constants.get("PLAIN"),
        "scales_ptr": not constants.get("SCALES"),
    }
    return bool(unused.get(name))


def valid(make: Any, forms: Iterator[dict[str, Any]]) -> Iterator[Any]:
    """The requests of those forms that there are."""
    for form in forms:
        try:
            yield make(**form)
        except RequestError:
            continue


def caches_of(dtype: str) -> tuple[str, ...]:
    return (dtype, "float8_e4m3fn", "float8_e4m3fnuz")


def passes() -> Iterator[RopeKvWriteRequest]:
    forms = (
        {
            "head_dim": dim, "v_head_dim": dim, "rotary_dim": dim, "dtype": dtype, "style": style,
            "has_qk_norm": has_norm, "kv_dtype": kv, "has_kv_scales": has_scales,
        }
        for dtype in DTYPES
        for dim, style, has_norm, kv, has_scales in itertools.product(
            (64, 128), STYLES, (False, True), caches_of(dtype), (False, True)
        )
        if dim == 128 or style == "half_split"  # neighbours were compiled of the larger head
    )  # fmt: skip
    make = functools.partial(RopeKvWriteRequest, num_heads=32, num_kv_heads=8, block_size=PAGE)
    yield from valid(make, forms)


def dense_writes() -> Iterator[KvWriteRequest]:
    forms = (
        {"dtype": dtype, "kv_dtype": kv, "has_scales": has_scales}
        for dtype in DTYPES
        for kv, has_scales in itertools.product(caches_of(dtype), (False, True))
    )
    make = functools.partial(
        KvWriteRequest, num_kv_heads=8, head_dim=128, v_head_dim=128, block_size=PAGE
    )
    yield from valid(make, forms)


def latent_requests() -> Iterator[LatentKvWriteRequest]:
    for name, style, (has_q_norm, kind) in itertools.product(
        ROWS, STYLES, ((False, "rms"), (True, "rms"), (False, "layer"))
    ):
        row_dim, row_start, norm_dim, head_dim, q_start = ROWS[name]
        yield LatentKvWriteRequest(
            num_heads=16, head_dim=head_dim, row_dim=row_dim, rotary_dim=64,
            q_rotary_start=q_start, row_rotary_start=row_start, norm_dim=norm_dim,
            block_size=PAGE, dtype="float16" if name == "fp16" else "bfloat16",
            kv_format=KV_FORMATS[name].name, has_q_norm=has_q_norm, style=style,  # type: ignore[arg-type]
            row_norm_kind=kind,  # type: ignore[arg-type]
        )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHES)
def test_rows_with_their_queries(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = 0
    for request in latent_requests():
        variant = variant_of(request, arch)
        if variant is None:
            continue
        served += 1
        with monkeypatch.context() as patch:
            found = recorded(patch, [latent], "_latent_kv_write_kernel")
            dtype = getattr(torch, request.dtype)
            form = KV_FORMATS[request.kv_format]
            size = (2, PAGE, request.row_dim) if form.is_plain else (2, form.page_bytes(PAGE))
            weights = {
                "row_weight": torch.ones(request.norm_dim, dtype=dtype),
                "row_bias": torch.ones(request.norm_dim, dtype=dtype),
            }
            if request.has_q_norm:
                weights["q_weight"] = torch.ones(request.head_dim, dtype=dtype)
            kernel = latent.bind(request, gpu(arch), cos_sin_cache=TABLE[:, :64], **weights)
            kernel(
                torch.ones(TOKENS, 16 * request.head_dim, dtype=dtype),
                torch.ones(TOKENS, request.row_dim, dtype=dtype),
                torch.zeros(TOKENS, dtype=torch.int64),
                torch.zeros(size, dtype=dtype if form.is_plain else torch.uint8),
                torch.arange(TOKENS),
            )
            (launched,) = found["_latent_kv_write_kernel"]
            check(launched, variant)
    assert served == 40


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("row_dim", [64, 128, 512, 576])
def test_narrow_rows_have_the_warps_that_are_judged(arch: str, row_dim: int) -> None:
    """The queries beside them are as many as those beside wide ones."""
    request = LatentKvWriteRequest(
        num_heads=16, head_dim=192, row_dim=row_dim, rotary_dim=64, q_rotary_start=128,
        row_rotary_start=0, norm_dim=row_dim, block_size=PAGE, dtype="bfloat16", kv_format="bf16",
    )  # fmt: skip
    variant = variant_of(request, arch)
    assert variant is not None
    warps = program_warps(request, find_target(arch).warp_size)
    constants = launch_constants(request)
    assert warps == variant.num_warps
    assert constants["BLOCK_H"] * constants["BLOCK_D"] == 512
    assert constants["BLOCK_G"] <= variant.constants["BLOCK_G"]


@pytest.mark.parametrize("arch", ARCHES)
def test_the_pass_from_projection_to_cache(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = set()
    for request in passes():
        variant = variant_of(request, arch)
        if variant is None:
            continue
        served.add((variant.dtype, variant.config))
        with monkeypatch.context() as patch:
            found = recorded(patch, [rope_kv_write], "_rope_kv_write_kernel")
            dtype, dim = getattr(torch, request.dtype), request.head_dim
            weights = {}
            if request.has_qk_norm:
                weights = {n: torch.ones(dim, dtype=dtype) for n in ("q_weight", "k_weight")}
            static = {"cos_sin_cache": TABLE[:, :dim], **weights}
            kernel = rope_kv_write.bind(request, gpu(arch), **static)
            rows = [torch.ones(TOKENS, heads * dim, dtype=dtype) for heads in (32, 8, 8)]
            kv = getattr(torch, request.kv_dtype)
            caches = [torch.zeros(2, PAGE, 8, dim).to(kv) for _ in range(2)]
            slots = torch.arange(TOKENS)
            kernel(*rows, torch.zeros_like(slots), *caches, slots)
            (launched,) = found["_rope_kv_write_kernel"]
            check(launched, variant)
    assert served == {(v.dtype, v.config) for v in all_of("rope_kv_write.pass", arch)}


def all_of(kernel: str, arch: str) -> Sequence[KernelVariant]:
    return CATALOGUE[kernel].variants(find_target(arch))


@pytest.mark.parametrize("arch", ARCHES)
def test_dense_writes(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = set()
    for request in dense_writes():
        variant = variant_of(request, arch)
        if variant is None:
            continue
        served.add((variant.dtype, variant.config))
        with monkeypatch.context() as patch:
            found = recorded(patch, [kv_write], "_kv_write_kernel")
            dtype, kv = getattr(torch, request.dtype), getattr(torch, request.kv_dtype)
            rows = [torch.ones(TOKENS, 1024, dtype=dtype) for _ in range(2)]
            caches = [torch.zeros(2, PAGE, 8, 128).to(kv) for _ in range(2)]
            kv_write.bind(request, gpu(arch))(*rows, *caches, torch.arange(TOKENS))
            (launched,) = found["_kv_write_kernel"]
            check(launched, variant)
    narrow = [v for v in all_of("kv_write.dense", arch) if v.config.startswith("row1024")]
    assert served == {(v.dtype, v.config) for v in narrow}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", [name for name in KV_FORMATS if name not in PLAIN_FORMATS])
def test_packed_writes(name: Any, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = KV_FORMATS[name]
    request = KvWriteRequest(
        num_kv_heads=1, head_dim=form.dim, v_head_dim=0, block_size=PAGE, dtype="bfloat16",
        kv_dtype="uint8", kv_format=name,
    )  # fmt: skip
    variant = variant_of(request, arch)
    assert variant is not None
    names = ("_kv_write_packed_kernel", "_kv_write_fp4_kernel")
    found = recorded(monkeypatch, [kv_write], *names)
    cache = torch.zeros(2, form.page_bytes(PAGE), dtype=torch.uint8)
    rows = torch.ones(TOKENS, form.dim).bfloat16()
    kv_write.bind(request, gpu(arch))(rows, cache, torch.arange(TOKENS))
    (launched,) = [launch for launches in found.values() for launch in launches]
    check(launched, variant)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations(arch: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forms: tuple[dict[str, Any], ...] = (
        {"head_dim": 64, "rotary_dim": 64},
        {"head_dim": 128, "rotary_dim": 128},
        {"head_dim": 512, "rotary_dim": 64, "rotary_start": 448, "style": "interleaved"},
        {"head_dim": 512, "rotary_dim": 64, "rotary_start": 448, "style": "interleaved",
         "is_inverse": True},
    )  # fmt: skip
    for form in forms:
        request = RopeRequest(num_heads=32, num_kv_heads=8, dtype=dtype, **form)
        variant = variant_of(request, arch)
        assert variant is not None
        with monkeypatch.context() as patch:
            found = recorded(patch, [rope], "_rope_kernel")
            kernel = rope.bind(request, gpu(arch), cos_sin_cache=TABLE[:, : request.rotary_dim])
            q, k = (
                torch.ones(TOKENS, heads * request.head_dim, dtype=getattr(torch, dtype))
                for heads in (32, 8)
            )
            kernel(q, k, torch.zeros(TOKENS, dtype=torch.int64))
            (launched,) = found["_rope_kernel"]
            check(launched, variant)
