"""Cases of what is done row by row: norms, activations, rotation, rounding, writes and gathers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional

from gpu_cases.case import Bench, Case, CaseMaker, reference_case
from gpu_cases.judging import decoded_error, differing_bytes, error_of
from gpu_cases.paging import PAGE
from hal.ops.activation import GatedActivationRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.kv_write import KvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.quantize import QuantizeRequest
from hal.ops.rope import RopeRequest
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal_kernels.activation import triton as activation
from hal_kernels.embedding import triton as embedding
from hal_kernels.kv_write import triton as kv_write
from hal_kernels.layer_norm import triton as layer_norm
from hal_kernels.norm import triton as norm
from hal_kernels.quantize import triton as quantize
from hal_kernels.rope import triton as rope
from hal_kernels.rope_kv_write import triton as rope_kv_write

_BF16 = 2.0**-7
_ONE_STEP = 0.08  # of e4m3 at its largest value, for a tie that fell to the other side
_TIES = 1e-3  # share of bytes


def makers() -> Iterator[CaseMaker]:
    for name, has_residual in (("rms norm", False), ("rms norm with residual", True)):
        yield CaseMaker(
            name=name, kernels=("norm.rms",), make=lambda b, r=has_residual: norm_case(b, r)
        )
    yield CaseMaker(name="layer norm", kernels=("layer_norm.rows",), make=layer_norm_case)
    yield CaseMaker(name="gated activation", kernels=("activation.gated",), make=activation_case)
    yield CaseMaker(name="embedding", kernels=("embedding.gather",), make=embedding_case)
    for style in ("half_split", "interleaved"):
        yield CaseMaker(
            name=f"rotation {style}",
            kernels=("rope.rotate",),
            make=lambda b, s=style: rope_case(b, s),
        )
    for style in ("half_split", "interleaved"):
        yield CaseMaker(
            name=f"norms, rotation {style} and write in one pass",
            kernels=("rope_kv_write.pass",),
            make=lambda b, s=style: rope_kv_write_case(b, s),
        )
    yield CaseMaker(
        name="write of keys and values", kernels=("kv_write.dense",), make=dense_write_case
    )
    for name, kernel in (
        ("fp8_656", "packed"), ("v4_584", "packed"), ("v41_528", "packed"), ("fp8_132", "packed"),
        ("fp4_288", "fp4"), ("fp4_68", "fp4"),
    ):  # fmt: skip
        yield CaseMaker(
            name=f"write of rows in {name}",
            kernels=(f"kv_write.{kernel}",),
            make=lambda b, n=name: packed_write_case(b, n),
        )
    for out_dtype, scale, group, kernel in (
        ("fp8_e4m3fn", "float32", 128, "groups"),
        ("fp8_e4m3fn", "ue8m0", 32, "groups"),
        ("int8", "float32", 0, "groups"),
        ("mxfp4", "ue8m0", 32, "fp4"),
        ("nvfp4", "e4m3", 16, "fp4"),
    ):
        yield CaseMaker(
            name=f"rounding to {out_dtype} in groups of {group or 'a row'}, scales {scale}",
            kernels=(f"quantize.{kernel}",),
            make=lambda b, o=out_dtype, s=scale, g=group: quantize_case(b, o, s, g),
        )


def norm_case(bench: Bench, has_residual: bool) -> Case:
    hidden, rows = bench.size(8192, 96), bench.size(4096, 5)
    weight, x = (bench.randn(hidden).abs() + 0.5).bfloat16(), bench.bf16(rows, hidden)
    request = RmsNormRequest(hidden_size=hidden, dtype="bfloat16", has_residual=has_residual)
    more: dict[str, Any] = {
        "theirs": lambda: functional.rms_norm(x, (hidden,), weight, 1e-6),
        "library": "rms_norm",
    }
    if has_residual:  # which the reference returns and leaves the one given as it was
        more = {"written": (1,), "judge": lambda found, exact: error_of(found[0], exact[0])}
    return reference_case(
        f"rms norm {rows}x{hidden}" + (" with residual" if has_residual else ""),
        request,
        norm.bind,
        bench,
        (x, bench.bf16(rows, hidden)) if has_residual else (x,),
        tokens=rows,
        tolerance=_BF16,
        static={"weight": weight, "eps": 1e-6},
        **more,
    )


def layer_norm_case(bench: Bench, hidden: int = 128, many: int = 65536) -> Case:
    rows = bench.size(many, 5)
    x, weight, bias = bench.bf16(rows, hidden), bench.bf16(hidden), bench.bf16(hidden)
    return reference_case(
        f"layer norm {rows}x{hidden}",
        LayerNormRequest(hidden_size=hidden, has_bias=True, dtype="bfloat16"),
        layer_norm.bind,
        bench,
        (x,),
        tokens=rows,
        tolerance=_BF16,
        static={"weight": weight, "eps": 1e-6, "bias": bias},
        theirs=lambda: functional.layer_norm(x, (hidden,), weight, bias, 1e-6),
        library="layer_norm",
    )


def activation_case(bench: Bench) -> Case:
    width, rows = bench.size(14336, 80), bench.size(4096, 5)
    x = 2.0 * bench.bf16(rows, 2 * width)
    return reference_case(
        f"gated activation {rows}x{width}",
        GatedActivationRequest(width=width, dtype="bfloat16", clamp=7.0),
        activation.bind,
        bench,
        (x,),
        tokens=rows,
        tolerance=_BF16,
        theirs=lambda: functional.silu(x[:, :width]) * x[:, width:],
        library="silu and product, without the clamp",
    )


def embedding_case(bench: Bench) -> Case:
    vocabulary, hidden, rows = bench.size(131072, 50), bench.size(4096, 96), bench.size(4096, 7)
    weight = bench.bf16(vocabulary, hidden)
    ids = torch.randint(0, vocabulary, (rows,), device=bench.device)
    return reference_case(
        f"embedding {rows}x{hidden}",
        EmbeddingRequest(vocab_size=vocabulary, hidden_size=hidden, dtype="bfloat16"),
        embedding.bind,
        bench,
        (ids,),
        tokens=rows,
        tolerance=0.0,
        static={"weight": weight},
        theirs=lambda: functional.embedding(ids, weight),
        library="embedding",
    )


def _rotation_table(bench: Bench, positions: int, dim: int) -> torch.Tensor:
    """Cosines, then sines."""
    angles = torch.rand(positions, dim // 2, device=bench.device) * 6.3
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rope_case(bench: Bench, style: Any) -> Case:
    heads, kv_heads, dim, rows = bench.size(32, 3), bench.size(8, 1), 128, bench.size(4096, 5)
    request = RopeRequest(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rotary_dim=64, dtype="bfloat16",
        style=style,
    )  # fmt: skip
    positions = torch.randint(0, 512, (rows,), device=bench.device)
    return reference_case(
        f"rotation {style} {rows}x{heads}+{kv_heads}x{dim}",
        request,
        rope.bind,
        bench,
        (bench.bf16(rows, heads * dim), bench.bf16(rows, kv_heads * dim), positions),
        tokens=rows,
        tolerance=_BF16,
        written=(0, 1),
        static={"cos_sin_cache": _rotation_table(bench, 512, 64)},
    )


def rope_kv_write_case(bench: Bench, style: Any) -> Case:
    heads, kv_heads, dim, rows = bench.size(32, 3), bench.size(8, 2), 128, bench.size(4096, 5)
    request = RopeKvWriteRequest(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim, rotary_dim=dim,
        block_size=PAGE, dtype="bfloat16", kv_dtype="bfloat16", has_qk_norm=True,
        style=style,
    )  # fmt: skip
    pages = -(-rows // PAGE) + 1
    slots = torch.randperm(pages * PAGE, device=bench.device)[:rows]
    caches = [bench.bf16(pages, PAGE, kv_heads, dim) for _ in range(2)]
    q, k, v = (bench.bf16(rows, count * dim) for count in (heads, kv_heads, kv_heads))
    positions = torch.randint(0, 512, (rows,), device=bench.device)
    weights = [(bench.randn(dim).abs() + 0.5).bfloat16() for _ in range(2)]
    return reference_case(
        f"norms, rotation {style} and write {rows}x{heads}+{kv_heads}x{dim}",
        request,
        rope_kv_write.bind,
        bench,
        (q, k, v, positions, *caches, slots),
        tokens=rows,
        tolerance=2.0**-6,
        written=(0, 4, 5),
        static={
            "cos_sin_cache": _rotation_table(bench, 512, dim), "q_weight": weights[0],
            "k_weight": weights[1], "eps": 1e-6,
        },
        judge=_last_three,
    )  # fmt: skip


def _last_three(found: Any, exact: Any) -> float:
    """The query that is returned and both caches: what became of the one given is free."""
    return error_of((found[0], *found[2:]), (exact[0], *exact[2:]))


def dense_write_case(bench: Bench) -> Case:
    heads, dim, rows = bench.size(8, 2), 128, bench.size(4096, 5)
    request = KvWriteRequest(
        num_kv_heads=heads, head_dim=dim, v_head_dim=dim, block_size=PAGE, dtype="bfloat16",
        kv_dtype="bfloat16",
    )  # fmt: skip
    pages = -(-rows // PAGE) + 1
    slots = torch.randperm(pages * PAGE, device=bench.device)[:rows]
    caches = [bench.bf16(pages, PAGE, heads, dim) for _ in range(2)]
    k, v = (bench.bf16(rows, heads * dim) for _ in range(2))
    flat = [cache.view(-1, heads * dim) for cache in caches]

    def theirs() -> None:
        flat[0][slots] = k
        flat[1][slots] = v

    return reference_case(
        f"write of keys and values {rows}x{heads}x{dim}",
        request,
        kv_write.bind,
        bench,
        (k, v, *caches, slots),
        tokens=rows,
        tolerance=0.0,
        written=(2, 3),
        theirs=theirs,
        library="two index_put_",
    )


def packed_write_case(bench: Bench, name: Any) -> Case:
    form, rows, page = KV_FORMATS[name], bench.size(4096, 5), 64
    request = KvWriteRequest(
        num_kv_heads=1, head_dim=form.dim, v_head_dim=0, block_size=page, dtype="bfloat16",
        kv_dtype="bfloat16", kv_format=name,
    )  # fmt: skip
    pages = -(-rows // page) + 1
    shape = (pages, form.page_bytes(page))
    cache = torch.randint(0, 256, shape, dtype=torch.uint8, device=bench.device)
    slots = torch.randperm(pages * page, device=bench.device)[:rows]
    return reference_case(
        f"write of {rows} rows in {name}",
        request,
        kv_write.bind,
        bench,
        (bench.bf16(rows, form.dim), cache, slots),
        tokens=rows,
        tolerance=_TIES,
        judge=differing_bytes,
        written=(1,),
    )


def quantize_case(bench: Bench, out_dtype: Any, scale: Any, group: int) -> Case:
    width, rows = bench.size(7168, 256), bench.size(4096, 5)
    request = QuantizeRequest(
        group_size=group, out_dtype=out_dtype, scale_dtype=scale, width=width, dtype="bfloat16"
    )
    is_fp4 = out_dtype in ("mxfp4", "nvfp4")
    return reference_case(
        f"rounding to {out_dtype} {rows}x{width} in groups of {group or 'a row'}, scales {scale}",
        request,
        quantize.bind,
        bench,
        (bench.bf16(rows, width),),
        tokens=rows,
        tolerance=_TIES if is_fp4 else _ONE_STEP,
        judge=differing_bytes if is_fp4 else decoded_error,
    )
