"""Small CPU ops: our kernels beside torch's in one run, on SmolLM2-135M's shapes.

    python benchmarks/cpu_kernels.py [--threads 2] [--repeats 7] [--json FILE]

Times are the best of the repeats, in microseconds a call, kernels taking turns within a repeat.
"torch" is the plain torch expression of the same op, F.scaled_dot_product_attention for attention
(its gathering of the paged context included).
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as functional

from hal.ops.attention import AttentionMetadata
from hal_kernels.activation.cpu import bind_gated_activation
from hal_kernels.attention.cpu_decode import bind_attention_decode
from hal_kernels.attention.cpu_prefill import bind_attention_prefill
from hal_kernels.embedding.cpu import bind_embedding
from hal_kernels.kv_write.cpu import bind_kv_write
from hal_kernels.norm.cpu import bind_rms_norm
from hal_kernels.quantize.cpu import bind_quantize_rows
from hal_kernels.rope.cpu import bind_rope
from hal_kernels.sampling.cpu import bind_top_k_top_p

HIDDEN, INTERMEDIATE, VOCAB = 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
SCALE = HEAD_DIM**-0.5
TOKENS = (1, 8, 16, 128, 512)
# Cycling through this much memory keeps a layer's cache cold, as the other layers would.
COLD_BYTES = 256 * 2**20

Call = Callable[[], object]


def measure(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Best microseconds of each call; the calls take turns so that noise meets all alike."""
    best = dict.fromkeys(calls, float("inf"))
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        best[name] = time.perf_counter() - start
    counts = {name: max(1, min(1000, int(0.02 / seconds))) for name, seconds in best.items()}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / counts[name])
    return {name: seconds * 1e6 for name, seconds in best.items()}


def norm_calls(tokens: int) -> dict[str, Call]:
    x, residual = torch.randn(2, tokens, HIDDEN)
    weight = torch.rand(HIDDEN) + 0.5
    kernel = bind_rms_norm(
        hidden_size=HIDDEN, dtype=torch.float32, weight=weight, eps=1e-5, has_residual=True
    )
    x *= 1e-3  # the residual grows by x in each call

    def torch_norm() -> object:
        residual.add_(x)
        return functional.rms_norm(residual, (HIDDEN,), weight, 1e-5)

    return {"ours": lambda: kernel(x, residual), "torch": torch_norm}


def quantize_calls(tokens: int) -> dict[str, Call]:
    x = torch.randn(tokens, HIDDEN)
    kernel = bind_quantize_rows(features=HIDDEN, dtype=torch.float32)

    def torch_quantize() -> object:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return torch.round(x / scale).to(torch.int8), scale

    return {"ours": lambda: kernel(x), "torch": torch_quantize}


def rope_calls(tokens: int) -> dict[str, Call]:
    angles = torch.rand(2048, HEAD_DIM // 2)
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    q, k, _ = qkv.split(sizes, dim=1)
    positions = torch.arange(tokens)
    kernel = bind_rope(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rotary_dim=HEAD_DIM,
        dtype=torch.float32,
        cos_sin_cache=cache,
    )

    def torch_rope() -> object:
        rows = cache[positions]
        cos, sin = rows[:, None, : HEAD_DIM // 2], rows[:, None, HEAD_DIM // 2 :]
        for x, heads in ((q, HEADS), (k, KV_HEADS)):
            view = x.view(tokens, heads, HEAD_DIM)
            a, b = view.chunk(2, dim=-1)
            view.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        return None

    return {"ours": lambda: kernel(q, k, positions), "torch": torch_rope}


def kv_write_calls(tokens: int) -> dict[str, Call]:
    caches = torch.zeros(2, tokens // BLOCK + 2, BLOCK, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = caches
    k, v = torch.randn(2, tokens, KV_HEADS * HEAD_DIM)
    slots = torch.randperm(caches.shape[1] * BLOCK)[:tokens]
    kernel = bind_kv_write(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)

    def torch_write() -> object:
        k_cache.view(-1, KV_HEADS * HEAD_DIM)[slots] = k
        v_cache.view(-1, KV_HEADS * HEAD_DIM)[slots] = v
        return None

    return {"ours": lambda: kernel(k, v, k_cache, v_cache, slots), "torch": torch_write}


def activation_calls(tokens: int) -> dict[str, Call]:
    x = torch.randn(tokens, 2 * INTERMEDIATE)
    kernel = bind_gated_activation(width=INTERMEDIATE, dtype=torch.float32)

    def torch_silu() -> object:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return {"ours": lambda: kernel(x), "torch": torch_silu}


def embedding_calls(tokens: int) -> dict[str, Call]:
    weight = torch.randn(VOCAB, HIDDEN)
    ids = torch.randint(0, VOCAB, (tokens,))
    kernel = bind_embedding(weight=weight)
    return {"ours": lambda: kernel(ids), "torch": lambda: functional.embedding(ids, weight)}


def sampling_calls(rows: int, top_k: int, top_p: float) -> dict[str, Call]:
    logits = torch.randn(rows, VOCAB) * 3
    k, p = torch.full((rows,), top_k), torch.full((rows,), top_p)
    kernel = bind_top_k_top_p(vocab_size=VOCAB)

    def torch_sort() -> object:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(VOCAB)[None, :]
        values = values.masked_fill(rank >= k[:, None], float("-inf"))
        weights = values.softmax(-1)
        outside = (weights.cumsum(-1) - weights >= p[:, None]) & (p[:, None] < 1)
        values = values.masked_fill(outside, float("-inf"))
        return torch.full_like(logits, float("-inf")).scatter(-1, order, values)

    return {"ours": lambda: kernel(logits, k, p), "torch": torch_sort}


class PagedCases:
    """Enough caches of ``batch`` sequences that each call finds its own one cold."""

    def __init__(self, batch: int, queries: int, context: int) -> None:
        blocks = -(-context // BLOCK)
        floats = 2 * batch * blocks * BLOCK * KV_HEADS * HEAD_DIM
        self.copies = max(2, min(64, COLD_BYTES // (4 * floats)))
        shape = (self.copies, batch * blocks, BLOCK, KV_HEADS, HEAD_DIM)
        self.k, self.v = torch.randn(shape), torch.randn(shape)
        self.q = torch.randn(batch * queries, HEADS * HEAD_DIM)
        self.table = torch.randperm(batch * blocks).view(batch, blocks)
        self.meta = AttentionMetadata(
            torch.arange(0, batch * queries + 1, queries, dtype=torch.int32),
            torch.full((batch,), context, dtype=torch.int32),
            self.table.to(torch.int32),
            queries,
            context,
        )
        self.batch, self.queries, self.context = batch, queries, context
        self.mask: torch.Tensor | None = None
        if 1 < queries < context:
            seen = torch.ones(queries, context, dtype=torch.bool)
            self.mask = seen.tril(context - queries)

    def torch_attention(self, copy: int) -> torch.Tensor:
        def gather(cache: torch.Tensor) -> torch.Tensor:
            rows = cache[self.table].view(self.batch, -1, KV_HEADS, HEAD_DIM)[:, : self.context]
            return rows.transpose(1, 2)

        q = self.q.view(self.batch, self.queries, HEADS, HEAD_DIM).transpose(1, 2)
        out = functional.scaled_dot_product_attention(
            q,
            gather(self.k[copy]),
            gather(self.v[copy]),
            attn_mask=self.mask,
            is_causal=self.queries == self.context,
            scale=SCALE,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(self.batch * self.queries, -1)


def attention_calls(phase: str, batch: int, queries: int, context: int) -> dict[str, Call]:
    cases = PagedCases(batch, queries, context)
    bind = bind_attention_decode if phase == "decode" else bind_attention_prefill
    kernel = bind(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK,
        dtype=torch.float32,
        scale=SCALE,
    )
    turn = itertools.cycle(range(cases.copies))

    def ours() -> torch.Tensor:
        copy = next(turn)
        return kernel(cases.q, cases.k[copy], cases.v[copy], cases.meta)

    difference = (
        kernel(cases.q, cases.k[0], cases.v[0], cases.meta) - cases.torch_attention(0)
    ).abs()
    if not bool(difference.max() <= 1e-4):
        raise SystemExit(f"attention {phase} differs from torch by {difference.max():.2e}")
    return {"ours": ours, "torch": lambda: cases.torch_attention(next(turn))}


def rows_to_run() -> list[tuple[str, Callable[[], dict[str, Call]]]]:
    rows: list[tuple[str, Callable[[], dict[str, Call]]]] = []
    for name, make in (
        ("norm.rms + residual", norm_calls),
        ("quantise rows", quantize_calls),
        ("rope", rope_calls),
        ("kv_write", kv_write_calls),
        ("activation.gated silu", activation_calls),
        ("embedding", embedding_calls),
    ):
        rows += [(f"{name}, {n} tokens", lambda m=make, n=n: m(n)) for n in TOKENS]
    for context in (192, 1024):
        for batch in (1, 8, 16):
            rows.append(
                (
                    f"attention decode, {batch} x context {context}",
                    lambda b=batch, c=context: attention_calls("decode", b, 1, c),
                )
            )
    for queries, context in ((128, 128), (512, 512), (128, 1024)):
        rows.append(
            (
                f"attention prefill, {queries} of context {context}",
                lambda q=queries, c=context: attention_calls("prefill", 1, q, c),
            )
        )
    for batch, top_k, top_p in ((1, 50, 1.0), (1, VOCAB, 0.95), (8, 50, 0.95)):
        rows.append(
            (
                f"sampling, {batch} x {VOCAB}, top-k {top_k}, top-p {top_p}",
                lambda b=batch, k=top_k, p=top_p: sampling_calls(b, k, p),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    print(f"{'op':58}{'ours µs':>11}{'torch µs':>11}{'torch/ours':>12}")
    for name, make in rows_to_run():
        if options.only not in name:
            continue
        times = measure(make(), options.repeats)
        ratio = times["torch"] / times["ours"]
        print(f"{name:58}{times['ours']:11.1f}{times['torch']:11.1f}{ratio:12.2f}", flush=True)
        results.append({"op": name, "ours_us": times["ours"], "torch_us": times["torch"]})
    if options.json:
        header = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": options.threads,
            "repeats": options.repeats,
        }
        options.json.write_text(json.dumps({**header, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
