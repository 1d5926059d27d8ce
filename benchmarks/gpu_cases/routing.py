"""Cases of experts' routing and of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu_cases.case import Bench, Case, CaseMaker, reference_case
from gpu_cases.judging import error_of
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.ops.moe_router import MoeRouterRequest
from hal.ops.sampling import TopKTopPRequest
from hal_kernels.moe_dispatch import triton as moe_dispatch
from hal_kernels.moe_router import triton as moe_router
from hal_kernels.sampling import triton as sampling

_FLOAT32 = 1e-4
_OTHERS = 1e-4  # share of logits that a sum in float32 may keep or drop otherwise


def makers() -> Iterator[CaseMaker]:
    for scoring in ("softmax", "sigmoid", "sqrt_softplus"):
        yield CaseMaker(
            name=f"choice of experts by {scoring}",
            kernels=("moe_router.scored",),
            make=lambda b, s=scoring: router_case(b, s),
        )
    yield CaseMaker(
        name="choice of experts by hash", kernels=("moe_router.hash",), make=hash_router_case
    )
    yield CaseMaker(
        name="rows sorted by expert",
        kernels=("moe_dispatch.places", "moe_dispatch.spread"),
        make=lambda b: permute_case(b, "eager"),
    )
    yield CaseMaker(
        name="rows sorted by expert, in a captured graph",
        kernels=("moe_dispatch.places", "moe_dispatch.spread"),
        make=lambda b: permute_case(b, "graph"),
    )
    yield CaseMaker(
        name="rows of experts summed",
        kernels=("moe_dispatch.invert", "moe_dispatch.combine"),
        make=lambda b: combine_case(b, "eager"),
    )
    yield CaseMaker(
        name="rows of experts summed, in a captured graph",
        kernels=("moe_dispatch.invert", "moe_dispatch.combine"),
        make=lambda b: combine_case(b, "graph"),
    )
    yield CaseMaker(name="top-k and top-p", kernels=("sampling.top_k_top_p",), make=sampling_case)


def _distinct_logits(bench: Bench, rows: int, experts: int) -> torch.Tensor:
    """No two of a row so near that float32 and float64 could order them differently."""
    order = torch.rand(rows, experts, device=bench.device).argsort(dim=1)
    return order.float() * (8.0 / experts) - 4.0


def router_case(bench: Bench, scoring: Any) -> Case:
    experts, top_k, rows = bench.size(256, 16), bench.size(8, 3), bench.size(4096, 5)
    request = MoeRouterRequest(
        scoring=scoring, num_experts=experts, top_k=top_k, route_scale=2.5,
        num_groups=4 if scoring == "sigmoid" else 1,
        num_groups_picked=2 if scoring == "sigmoid" else 1,
    )  # fmt: skip
    # Groups are picked by a sum of two scores: of few rows, so that none are equal by chance.
    rows = bench.size(256, 5) if scoring == "sigmoid" else rows
    logits = _distinct_logits(bench, rows, experts)
    return reference_case(
        f"choice of {top_k} of {experts} experts by {scoring}, {rows} rows",
        request,
        moe_router.bind,
        bench,
        (logits,),
        tokens=rows,
        tolerance=_FLOAT32,
    )


def hash_router_case(bench: Bench) -> Case:
    experts, top_k, rows, vocabulary = (
        bench.size(256, 16),
        bench.size(6, 3),
        bench.size(4096, 5),
        999,
    )
    request = MoeRouterRequest(scoring="hash", num_experts=experts, top_k=top_k)
    table = torch.rand(vocabulary, experts, device=bench.device).argsort(dim=1)[:, :top_k]
    ids = torch.randint(0, vocabulary, (rows,), device=bench.device)
    return reference_case(
        f"choice of {top_k} of {experts} experts by hash, {rows} rows",
        request,
        moe_router.bind,
        bench,
        (bench.randn(rows, experts), ids),
        tokens=rows,
        tolerance=_FLOAT32,
        static={"expert_table": table.contiguous()},
    )


def _choices(bench: Bench, rows: int, experts: int, top_k: int) -> torch.Tensor:
    """int32 [rows, top_k] of distinct experts, some of another rank."""
    ids = torch.rand(rows, experts, device=bench.device).argsort(dim=1)[:, :top_k].int()
    return ids.masked_fill(torch.rand(rows, top_k, device=bench.device) < 0.25, -1)


def _dispatch(bench: Bench, kind: Any, graph_mode: Any = "eager") -> MoeDispatchRequest:
    return MoeDispatchRequest(
        kind=kind, num_experts=bench.size(256, 8), top_k=bench.size(8, 3),
        hidden_size=bench.size(7168, 96), dtype="bfloat16", graph_mode=graph_mode,
    )  # fmt: skip


def permute_case(bench: Bench, graph_mode: Any) -> Case:
    request, rows = _dispatch(bench, "permute", graph_mode), bench.size(2048, 7)
    x = bench.bf16(rows, request.hidden_size)
    ids = _choices(bench, rows, request.num_experts, request.top_k)

    def judge(found: Any, exact: Any) -> float:
        """What rows after the last offset hold is free."""
        count = int(exact[1][-1])
        return error_of((found[0][:count], *found[1:]), (exact[0][:count].contiguous(), *exact[1:]))

    def theirs() -> torch.Tensor:
        order = ids.flatten().argsort(stable=True)
        return x[order // request.top_k]

    return reference_case(
        f"{rows} rows of {request.hidden_size} sorted by {request.num_experts} experts, "
        + graph_mode,
        request,
        moe_dispatch.bind,
        bench,
        (x, ids),
        tokens=rows,
        tolerance=0.0,
        judge=judge,
        is_captured=graph_mode == "graph",
        theirs=theirs,
        library="argsort and gather",
    )


def combine_case(bench: Bench, graph_mode: Any) -> Case:
    """In a graph there is a row for every choice: those after the last have no source and are not
    numbers, so that one that is not passed over is seen."""
    request, rows = _dispatch(bench, "combine", graph_mode), bench.size(2048, 7)
    ids = _choices(bench, rows, request.num_experts, request.top_k).flatten()
    source = torch.where(ids < 0, request.num_experts, ids).argsort(stable=True).int()
    count = int((ids >= 0).sum())
    if graph_mode == "graph":
        source[count:] = -1
    else:
        source = source[:count]
    y = bench.bf16(len(source), request.hidden_size)
    y[count:] = float("nan")
    weights = torch.rand(rows, request.top_k, device=bench.device)
    return reference_case(
        f"{count} of {len(source)} rows of experts summed to {rows} of {request.hidden_size}, "
        + graph_mode,
        request,
        moe_dispatch.bind,
        bench,
        (y, source, weights),
        tokens=rows,
        tolerance=2.0**-7,
        is_captured=graph_mode == "graph",
    )


def sampling_case(bench: Bench) -> Case:
    """Judged by the share of logits that are kept or dropped otherwise than in float64: the border
    of top-p moves with the rounding of its sum."""
    vocabulary, rows = bench.size(131072, 300), bench.size(64, 4)
    logits = 3.0 * bench.randn(rows, vocabulary)
    top_k = torch.randint(1, vocabulary, (rows,), device=bench.device)
    top_p = torch.rand(rows, device=bench.device) * 0.5 + 0.5

    def judge(found: Any, exact: Any) -> float:
        both = found.isfinite() & exact.isfinite()
        if not torch.equal(found[both], exact[both].float()):
            return float("inf")
        return float((found.isfinite() != exact.isfinite()).float().mean())

    return reference_case(
        f"top-k and top-p of {rows}x{vocabulary}",
        TopKTopPRequest(vocab_size=vocabulary),
        sampling.bind,
        bench,
        (logits, top_k, top_p),
        tokens=rows,
        tolerance=max(_OTHERS, 1.5 / (rows * vocabulary)),
        judge=judge,
        theirs=lambda: logits.sort(dim=-1, descending=True),
        library="the sort that a filter by torch begins with",
    )
