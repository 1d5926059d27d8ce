"""Cases of residual streams and n-gram embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu_cases.case import Bench, Case, CaseMaker, reference_case
from hal.ops.engram import EngramRequest
from hal.ops.hyper_connection import HyperConnectionRequest
from hal_kernels.engram import triton as engram
from hal_kernels.hyper_connection import triton as hyper_connection

_BF16 = 2.0**-7
_GATE = 2e-2  # the root in the gate turns what float32 loses near zero into more


def makers() -> Iterator[CaseMaker]:
    weighted = ("hyper_connection.mixes", "hyper_connection.collapse")
    for kind, kernels in (
        ("pre", weighted), ("head", weighted), ("post", ("hyper_connection.expand",)),
    ):  # fmt: skip
        yield CaseMaker(
            name=f"hyper-connection {kind}",
            kernels=kernels,
            make=lambda b, k=kind: hyper_connection_case(b, k),
        )
    yield CaseMaker(name="engram gather", kernels=("engram.gather",), make=engram_gather_case)
    yield CaseMaker(name="engram mix", kernels=("engram.mix",), make=engram_mix_case)


def hyper_connection_case(bench: Bench, kind: Any) -> Case:
    n, hidden, rows = 4, bench.size(4096, 80), bench.size(4096, 3)
    request = HyperConnectionRequest(
        kind=kind, num_streams=n, hidden_size=hidden, sinkhorn_iterations=bench.size(20, 4),
        dtype="bfloat16",
    )  # fmt: skip
    streams = bench.bf16(rows, n, hidden)
    static: dict[str, Any] = {}
    args: tuple[torch.Tensor, ...] = (streams,)
    if kind == "post":
        post, comb = (torch.rand(rows, *shape, device=bench.device) for shape in ((n,), (n, n)))
        args = (bench.bf16(rows, hidden), streams, post, comb)
    else:
        columns = n * hidden
        static = {
            "projection": bench.randn(request.num_mixes, columns) / columns**0.5,
            "base": bench.randn(request.num_mixes),
            "scale": torch.rand(1 if kind == "head" else 3, device=bench.device) + 0.5,
            "norm_eps": 1e-6,
            "eps": 1e-6,
        }
    return reference_case(
        f"hyper-connection {kind} {rows}x{n}x{hidden}",
        request,
        hyper_connection.bind,
        bench,
        args,
        tokens=rows,
        tolerance=_BF16,
        static=static,
    )


def engram_gather_case(bench: Bench) -> Case:
    heads, ngram, width, rows = bench.size(8, 2), 3, bench.size(512, 64), bench.size(4096, 5)
    request = EngramRequest(
        kind="gather", num_heads=heads, max_ngram=ngram, row_width=width, hidden_size=64,
        num_streams=2, dtype="bfloat16",
    )  # fmt: skip
    shape = (ngram - 1, heads)
    primes = torch.tensor([10007, 10009, 10037, 10039])[torch.randint(0, 4, shape)]
    offsets = primes.flatten().cumsum(0).view(shape) - primes
    table = torch.randint(0, 256, (int(primes.sum()), request.row_bytes), dtype=torch.uint8)
    table[:, :width] = table[:, :width] % 0x7F  # no NaN, which equals nothing
    table[:, width:] = table[:, width:] % 20 + 117  # scales around 1
    static = {
        "table": table, "primes": primes, "offsets": offsets,
        "multipliers": torch.randint(-(2**62), 2**62, (ngram,)) | 1,
    }  # fmt: skip
    ids = torch.randint(0, 2**40, (rows, ngram), device=bench.device)
    return reference_case(
        f"engram gather {rows} of {request.rows_per_token} rows of {width}",
        request,
        engram.bind,
        bench,
        (ids,),
        tokens=rows,
        tolerance=0.0,
        static={name: bench.on(tensor) for name, tensor in static.items()},
    )


def engram_mix_case(bench: Bench) -> Case:
    n, hidden, rows = 4, bench.size(4096, 72), bench.size(4096, 3)
    request = EngramRequest(
        kind="mix", num_heads=2, max_ngram=3, row_width=32, hidden_size=hidden, num_streams=n,
        dtype="bfloat16",
    )  # fmt: skip
    weights = [(torch.rand(n, hidden, device=bench.device) + 0.5).bfloat16() for _ in range(2)]
    return reference_case(
        f"engram mix {rows}x{n}x{hidden}",
        request,
        engram.bind,
        bench,
        (bench.bf16(rows, n, hidden), bench.bf16(rows, (n + 1) * hidden)),
        tokens=rows,
        tolerance=_GATE,
        static={"query_weight": weights[0], "key_weight": weights[1], "eps": 1e-6},
    )
