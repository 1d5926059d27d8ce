"""Compares the ops of an OpenCL CPU device with the CPU backend: processor time of one core.

One thread each, and not time on the clock: other load on the machine hardly changes it. The shapes
are those of SmolLM2-135M. Prints a Markdown table: `python compare.py [device]`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"POCL_MAX_PTHREAD_COUNT": "1", "OMP_NUM_THREADS": "1"}  # read once, at import

import torch

from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest, TokenRange
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.selection import SelectionRules, select

ROUNDS = 8
CALLS = 5  # a round; a clock of processes may be coarse
HIDDEN, FEED_FORWARD, VOCABULARY = 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16

Case = tuple[str, OpRequest, dict[str, Any], tuple[Any, ...]]


def cases() -> Iterator[Case]:
    """Name, request, arguments of the binding, arguments of a call."""
    for rows in (1, 4, 512):
        for what, n, k, epilogue in (
            ("gate, up", 2 * FEED_FORWARD, HIDDEN, "silu_gated"),
            ("down", HIDDEN, FEED_FORWARD, "none"),
        ):
            gemm = GemmRequest(
                n=n,
                k=k,
                dtype="float32",
                weight_format=FORMATS["float32"],
                epilogue=epilogue,
                tokens=TokenRange(rows, rows),
            )
            yield (
                f"gemm {what}, {rows}",
                gemm,
                {"weight": torch.randn(n, k)},
                (torch.randn(rows, k),),
            )
    head = GemmRequest(n=VOCABULARY, k=HIDDEN, dtype="float32", weight_format=FORMATS["float32"])
    weight = torch.randn(VOCABULARY, HIDDEN)
    yield "gemm head, 1", head, {"weight": weight}, (torch.randn(1, HIDDEN),)
    for new, context in ((1, 128), (1, 2048), (512, 512)):
        yield _attention(new, context)
    for rows in (1, 512):
        norm = RmsNormRequest(
            hidden_size=HIDDEN, dtype="float32", has_residual=True, tokens=TokenRange(rows, rows)
        )
        x = torch.randn(rows, HIDDEN)
        yield f"norm, {rows}", norm, {"weight": torch.ones(HIDDEN), "eps": 1e-5}, (x, x.clone())
        rope = RopeRequest(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rotary_dim=HEAD_DIM,
            dtype="float32",
            tokens=TokenRange(rows, rows),
        )
        q, k = torch.randn(rows, HEADS * HEAD_DIM), torch.randn(rows, KV_HEADS * HEAD_DIM)
        table = torch.ones(512, HEAD_DIM) / 2**0.5
        yield f"rope, {rows}", rope, {"cos_sin_cache": table}, (q, k, torch.arange(rows))
    sampling = TopKTopPRequest(vocab_size=VOCABULARY)
    logits = (torch.randn(1, VOCABULARY), torch.tensor([50]), torch.tensor([0.9]))
    yield "top-k, top-p, 1", sampling, {}, logits


def _attention(new: int, context: int) -> Case:
    request = AttentionRequest(
        phase="decode" if new == 1 else "prefill",
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        block_size=BLOCK,
        dtype="float32",
        kv_dtype="float32",
        tokens=TokenRange(new, new),
    )
    blocks = context // BLOCK
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, new], dtype=torch.int32),
        seq_lens=torch.tensor([context], dtype=torch.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        max_query_len=new,
        max_seq_len=context,
    )
    caches = (torch.randn(blocks, BLOCK, KV_HEADS, HEAD_DIM) for _ in range(2))
    call = (torch.randn(new, HEADS * HEAD_DIM), *caches, meta)
    return f"attention {new} of {context}", request, {"scale": HEAD_DIM**-0.5}, call


def bound(registry: BackendRegistry, device: DeviceSpec, case: Case) -> Callable[[], object]:
    """The chosen kernel of a device with its arguments."""
    _, request, static, arguments = case
    rules = SelectionRules(explicit={})
    choice = select(request, registry.candidates(request.op, device), rules).choice
    kernel = choice.load()(request, **static)
    return lambda: kernel(*arguments)


def main(device_id: str) -> None:
    registry = load_backends()
    devices = [registry.describe(name) for name in (device_id, "cpu:0")]
    for device in devices:
        registry.create_runtime(device)
    torch.set_num_threads(1)
    print("| op, tokens | OpenCL, µs | CPU backend, µs | ratio |")
    print("| --- | --- | --- | --- |")
    for case in cases():
        opencl, cpu = (1e6 * seconds(bound(registry, device, case)) for device in devices)
        print(f"| {case[0]} | {opencl:.0f} | {cpu:.0f} | {opencl / cpu:.1f} |", flush=True)


def seconds(call: Callable[[], object]) -> float:
    """Processor time of one call, the best of several rounds."""
    call()  # compiles
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        best = min(best, (time.process_time() - start) / CALLS)
    return best


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "opencl:0")
