"""Cases of latent, compressed and sparse attention, and of what chooses its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu_cases.case import FP8_RATE, Bench, Case, CaseMaker, reference_case
from gpu_cases.paging import lists_of, metadata, page_table, paged_rows, starts_of
from hal.ops.compressed_attention import CompressedAttentionMetadata, CompressedAttentionRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_logits import reference as index_logits_reference
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.index_top_k import IndexTopKRequest
from hal.ops.kv_compressor import CompressorMetadata, KvCompressorRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal_kernels.compressed_attention import triton as compressed_attention
from hal_kernels.index_logits import triton as index_logits
from hal_kernels.index_selection import triton as index_selection
from hal_kernels.index_top_k import triton as index_top_k
from hal_kernels.kv_compressor import triton as kv_compressor
from hal_kernels.mla_attention import triton as mla_attention

_TOLERANCE = 2.0**-6
_FLOAT32 = 1e-4
# Sums of FP8 products: Hopper's matrix unit keeps about 14 bits of them, where the addition is not
# moved to float32 registers, and Triton does not move it there (`max_num_imprecise_acc`). A score
# of 128 products loses up to about 2^-11 of its largest partial sum, and heads are summed then.
_FP8_SUMS = 2.0**-8
_PAGE = 64


def makers() -> Iterator[CaseMaker]:
    yield from _latent_makers()
    yield from _compressed_makers()
    yield from _indexer_makers()
    yield from _compressor_makers()


def _latent_makers() -> Iterator[CaseMaker]:
    for kv_format in ("bf16", "fp8_656"):
        for name, heads, kernel in (("16", 16, "paged"), ("64", 64, "wide")):
            yield CaseMaker(
                name=f"latent attention, decode, {name} heads, {kv_format}",
                kernels=(f"mla_attention.{kernel}", "mla_attention.merge"),
                make=lambda b, f=kv_format, h=heads: mla_case(b, f, h, "decode", 0),
            )
    yield CaseMaker(
        name="latent attention, decode, 32 heads a program, bf16",
        kernels=("mla_attention.paged", "mla_attention.merge"),
        make=lambda b: mla_case(b, "bf16", 32, "decode", 0),
    )
    yield CaseMaker(
        name="latent attention by lists, decode, 16 heads, fp8_656",
        kernels=("mla_attention.paged", "mla_attention.merge"),
        make=lambda b: mla_case(b, "fp8_656", 16, "decode", b.size(1024, 64)),
    )
    yield CaseMaker(
        name="latent attention by lists, prefill, 64 heads, fp8_656",
        kernels=("mla_attention.wide",),
        make=lambda b: mla_case(b, "fp8_656", 64, "prefill", b.size(512, 64)),
        share=2.0,
    )


def _compressed_makers() -> Iterator[CaseMaker]:
    for name, main, kernel in (
        ("bf16", "bf16", "paged"),
        ("v4_584", "v4_584", "paged"),
        ("v41_528", "fp4_288", "v41"),
    ):
        for phase in ("decode", "prefill"):
            yield CaseMaker(
                name=f"compressed attention, {phase}, {name} and {main}",
                kernels=(f"compressed_attention.{kernel}",),
                make=lambda b, n=name, m=main, p=phase: compressed_case(b, n, m, p),
            )
        # Of all entries a program sees a part, of a list of one split all.
        yield CaseMaker(
            name=f"compressed attention, decode, all entries, {name} and {main}",
            kernels=(f"compressed_attention.{kernel}", "compressed_attention.merge"),
            make=lambda b, n=name, m=main: compressed_case(b, n, m, "decode", has_lists=False),
        )


def _indexer_makers() -> Iterator[CaseMaker]:
    for keys, dtype, kernel in (
        ("bf16", "bfloat16", "paged"),
        ("fp8_132", "float8_e4m3fn", "paged"),
        ("fp4_68", "float8_e4m3fn", "fp4"),
    ):
        for phase in ("decode", "prefill"):
            yield CaseMaker(
                name=f"indexer scores, {phase}, keys {keys}",
                kernels=(f"index_logits.{kernel}",),
                make=lambda b, k=keys, d=dtype, p=phase: index_logits_case(b, k, d, p),
            )
    yield CaseMaker(
        name="choice of entries",
        kernels=("index_top_k.radix",),
        make=lambda b: index_top_k_case(b, 0),
    )
    yield CaseMaker(
        name="choice of entries and of blocks",
        kernels=("index_top_k.radix", "index_top_k.block_maxima"),
        make=lambda b: index_top_k_case(b, b.size(512, 8)),
    )

    for name, phase, blocks, publishes, choice in (
        ("all entries", "decode", 0, False, ("merge",)),
        ("all entries", "prefill", 0, False, ("merge",)),
        ("all entries, blocks published", "decode", 2048, True, ("merge", "maxima")),
        ("candidate blocks", "decode", 2048, False, ()),
        ("candidate blocks", "prefill", 2048, False, ("mark", "merge")),
    ):
        kernels = tuple(f"index_selection.{kernel}" for kernel in ("visible", *choice))
        yield CaseMaker(
            name=f"indexer in one call, {phase}, {name}",
            kernels=("index_logits.paged", *kernels, *(() if choice else ("index_top_k.radix",))),
            make=lambda b, n=blocks, p=publishes, f=phase: index_selection_case(b, n, p, f),
        )


def _compressor_makers() -> Iterator[CaseMaker]:
    for name, ratio, is_overlapping in (("overlapping", 4, True), ("plain", 128, False)):
        yield CaseMaker(
            name=f"compressor, {name} windows of {ratio}",
            kernels=("kv_compressor.pool", "kv_compressor.state"),
            make=lambda b, r=ratio, o=is_overlapping: compressor_case(b, r, o),
        )
    yield CaseMaker(
        name="compressor, in a captured graph",
        kernels=("kv_compressor.pool", "kv_compressor.state"),
        make=lambda b: compressor_case(b, 4, True, "graph"),
    )


def mla_case(bench: Bench, kv_format: Any, heads: int, phase: Any, top_k: int) -> Case:
    is_decode, rank, rope = phase == "decode", 512, 64
    sequences, context = bench.size(16 if is_decode else 2, 2), bench.size(2048, 80)
    new = 1 if is_decode else bench.size(256, 2)
    table = page_table(bench, sequences, context, _PAGE)
    cache = paged_rows(bench, kv_format, table, context, rank + rope, _PAGE)
    q = bench.bf16(sequences * new, heads * (rank + rope))
    request = MlaAttentionRequest(
        phase=phase, num_heads=heads, kv_lora_rank=rank, rope_dim=rope, block_size=_PAGE,
        dtype="bfloat16", kv_format=kv_format, top_k=top_k, context_tokens=context,
    )  # fmt: skip
    lists = lists_of(bench, sequences * new, context, top_k) if top_k else None
    return reference_case(
        f"latent attention {phase} {kv_format} {sequences}x{new} of {top_k or context}, {heads}",
        request,
        mla_attention.bind,
        bench,
        (q, cache, metadata(bench, table, context, new, sequences), lists),
        tokens=sequences * new,
        tolerance=_TOLERANCE,
        # Programs of 64 heads are Hopper's: elsewhere they are checked as well, and no fast path.
        spec=bench.as_arch("sm_90") if heads == 64 else None,
        static={"scale": (rank + rope) ** -0.5},
    )


def compressed_case(
    bench: Bench, window_format: Any, main_format: Any, phase: Any, *, has_lists: bool = True
) -> Case:
    is_decode, dim, ratio = phase == "decode", 512, 4
    heads, window = bench.size(64, 16), bench.size(128, 20)
    top_k = bench.size(512, 64) if has_lists else 0
    sequences, context = bench.size(16 if is_decode else 2, 2), bench.size(8192, 300)
    new = 1 if is_decode else bench.size(256, 2)
    tables = [page_table(bench, sequences, rows, _PAGE) for rows in (context, context // ratio)]
    caches = [
        paged_rows(bench, name, table, rows, dim, _PAGE)
        for name, table, rows in zip(
            (window_format, main_format), tables, (context, context // ratio), strict=True
        )
    ]
    request = CompressedAttentionRequest(
        phase=phase, num_heads=heads, head_dim=dim, rope_dim=64, window=window, top_k=top_k,
        compress_ratio=ratio, has_sinks=True, window_format=window_format,
        main_format=main_format, block_size=_PAGE, dtype="bfloat16", context_tokens=context,
    )  # fmt: skip
    plain = metadata(bench, tables[0], context, new, sequences)
    meta = CompressedAttentionMetadata(
        query_start_loc=plain.query_start_loc, seq_lens=plain.seq_lens,
        window_block_table=tables[0], main_block_table=tables[1], max_query_len=new,
        max_seq_len=context,
    )  # fmt: skip
    q = bench.bf16(sequences * new, heads * dim)
    # Only entries that the first query sees: later ones see them too.
    seen = (context - new) // ratio
    lists = lists_of(bench, sequences * new, seen, top_k) if has_lists else None
    return reference_case(
        f"compressed attention {phase} {window_format}, {main_format} {sequences}x{new}"
        f" of {window} and {top_k or seen}",
        request,
        compressed_attention.bind,
        bench,
        (q, *caches, meta, lists),
        tokens=sequences * new,
        tolerance=_TOLERANCE,
        static={"scale": dim**-0.5, "sinks": bench.randn(heads)},
    )


def index_logits_case(bench: Bench, key_format: Any, dtype: str, phase: Any) -> Case:
    """The exact result sums in float64; a row cancels, so sums in float32, or in what an FP8
    product has, are compared with it in units of the row's largest score."""
    is_decode, heads, dim = phase == "decode", bench.size(64, 16), 128
    sequences, context = bench.size(16 if is_decode else 2, 2), bench.size(8192, 90)
    new = 1 if is_decode else bench.size(512, 3)
    table = page_table(bench, sequences, context, _PAGE)
    cache = paged_rows(bench, key_format, table, context, dim, _PAGE)
    q = bench.randn(sequences * new, heads * dim).to(getattr(torch, dtype))
    request = IndexLogitsRequest(
        phase=phase, num_heads=heads, head_dim=dim, key_format=key_format, block_size=_PAGE,
        dtype=dtype, context_tokens=context,
    )  # fmt: skip
    return reference_case(
        f"indexer scores {phase} {key_format} {sequences}x{new} of {context}",
        request,
        index_logits.bind,
        bench,
        (q, bench.randn(sequences * new, heads), cache,
         metadata(bench, table, context, new, sequences)),
        tokens=sequences * new,
        tolerance=_FP8_SUMS if "float8" in dtype else _FLOAT32,
        static={"scale": dim**-0.5},
        rate=FP8_RATE if "float8" in dtype else 1.0,
    )  # fmt: skip


def index_top_k_case(bench: Bench, blocks: int) -> Case:
    """Judged by the scores that were chosen: lists have no order, and equal scores no preference
    in what they are worth."""
    tokens, entries, top_k = bench.size(64, 3), bench.size(32768, 200), bench.size(2048, 32)
    logits = bench.randn(tokens, entries)
    visible = torch.randint(1, entries + 1, (tokens,), device=bench.device).int()
    visible[0] = entries
    request = IndexTopKRequest(
        top_k=top_k, context_tokens=entries, candidate_blocks=blocks,
        publishes_candidates=blocks > 0,
    )  # fmt: skip
    peaks = torch.nn.functional.pad(logits, (0, -entries % 8), value=float("-inf"))
    peaks = peaks.unflatten(1, (-1, 8)).amax(dim=2)

    def worth(result: Any) -> tuple[torch.Tensor, ...]:
        lists = (result,) if isinstance(result, torch.Tensor) else result
        sources = (logits, peaks)
        return tuple(
            torch.where(one < 0, -99.0, source.gather(1, one.clamp(min=0).long()))
            .sort(dim=1)
            .values
            for one, source in zip(lists, sources, strict=False)
        )

    def judge(found: Any, exact: Any) -> float:
        pairs = zip(worth(found), worth(exact), strict=True)
        # The newest block is always published; unseen entries may be in it, so its worth is not
        # compared: the lists name it in both.
        return max(float((a - b).abs().max()) for a, b in pairs)

    return reference_case(
        f"choice of {top_k} of {entries}" + (f" and of {blocks} blocks" if blocks else ""),
        request,
        index_top_k.bind,
        bench,
        (logits, visible),
        tokens=tokens,
        tolerance=0.0,
        judge=judge,
        theirs=lambda: logits.topk(top_k, dim=1),
        library="topk, of all entries",
    )


def index_selection_case(bench: Bench, blocks: int, publishes: bool, phase: Any) -> Case:
    """Judged by the exact scores of what was chosen, in units of the row's largest: rounding may
    order two that are all but equal in either way."""
    is_decode, heads, dim = phase == "decode", bench.size(64, 16), 128
    sequences, context = bench.size(16 if is_decode else 2, 2), bench.size(65536, 200)
    new, top_k = 1 if is_decode else bench.size(512, 3), bench.size(2048, 32)
    blocks = blocks and bench.size(blocks, 8)
    table = page_table(bench, sequences, context, _PAGE)
    cache = paged_rows(bench, "fp8_132", table, context, dim, _PAGE)
    q = bench.randn(sequences * new, heads * dim).to(torch.float8_e4m3fn)
    weights, meta = (
        bench.randn(sequences * new, heads),
        metadata(bench, table, context, new, sequences),
    )
    request = IndexSelectionRequest(
        phase=phase, num_heads=heads, head_dim=dim, key_format="fp8_132", block_size=_PAGE,
        dtype="float8_e4m3fn", top_k=top_k, context_tokens=context, candidate_blocks=blocks,
        publishes_candidates=publishes,
    )  # fmt: skip
    scores = index_logits_reference(request.logits, scale=dim**-0.5)(
        q.double(), weights.double(), cache, meta
    )
    seen = (context - new) // 8
    lists = [torch.randperm(seen, device=bench.device)[:blocks].int() for _ in range(len(q))]
    candidates = torch.stack(lists) if request.is_limited else None

    def worth(result: Any) -> torch.Tensor:
        lists = result if isinstance(result, torch.Tensor) else result[0]
        chosen = scores.gather(1, lists.clamp(min=0).long())
        return torch.where(lists < 0, 0.0, chosen).sort(dim=1).values

    def judge(found: Any, exact: Any) -> float:
        most = scores.where(scores.isfinite(), 0.0).abs().amax()
        return float((worth(found) - worth(exact)).abs().max() / most)

    return reference_case(
        f"indexer in one call {phase} {sequences}x{new} of {context}, {top_k} of "
        + (f"{blocks} blocks" if request.is_limited else "all"),
        request,
        index_selection.bind,
        bench,
        (q, weights, cache, meta, candidates),
        tokens=sequences * new,
        tolerance=_FP8_SUMS,
        judge=judge,
        static={"scale": dim**-0.5},
        rate=FP8_RATE,
    )


def compressor_case(
    bench: Bench, ratio: int, is_overlapping: bool, graph_mode: Any = "eager"
) -> Case:
    """A prompt beside decodes, of which some close a window."""
    dim = bench.size(512, 40)
    request = KvCompressorRequest(
        phase="prefill", ratio=ratio, head_dim=dim, is_overlapping=is_overlapping,
        dtype="bfloat16", graph_mode=graph_mode,
    )  # fmt: skip
    prompt = bench.size(4096, 2 * ratio + 3)
    pieces = [(prompt, prompt), (1, 4 * ratio), (1, 5 * ratio + 1), (3, 2 * ratio + 1)]
    tokens = sum(new for new, _ in pieces)
    kv, gate = (bench.bf16(tokens, request.width) for _ in range(2))
    state = bench.randn(len(pieces) + 2, request.state_rows, 2, request.width)
    meta = CompressorMetadata(
        query_start_loc=starts_of(bench, [new for new, _ in pieces]),
        seq_lens=bench.on(torch.tensor([n for _, n in pieces], dtype=torch.int32)),
        state_slots=bench.on(torch.randperm(len(pieces) + 2)[: len(pieces)].int()),
        entry_start_loc=starts_of(bench, [n // ratio - (n - new) // ratio for new, n in pieces]),
    )
    return reference_case(
        f"compressor of {ratio}, {tokens} tokens of {request.width}, {graph_mode}",
        request,
        kv_compressor.bind,
        bench,
        (kv, gate, state, meta),
        tokens=tokens,
        tolerance=2.0**-6,
        is_captured=graph_mode == "graph",
        written=(2,),
        static={
            "norm_weight": (bench.randn(dim).abs() + 0.5), "eps": 1e-6,
            "position_bias": bench.randn(ratio, request.width),
        },
    )  # fmt: skip
