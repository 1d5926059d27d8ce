"""Golden-value checks of an accelerator: torch on the device against float64 on the host.

They find a device that answers and computes wrongly: products on each matrix dtype, a norm, an
activation, attention over pages, and that what was written is what is read back, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hal.device import SelfTestResult
from hal.hookspecs import Runtime
from hal.ops.attention import AttentionMetadata, AttentionRequest, reference
from hal_backends.gpu.torch_sdpa import bind_platform

# Largest error relative to the largest value: a rounding of the result and of the operands.
_BOUNDS = {"float32": 1e-3, "float16": 4e-3, "bfloat16": 3e-2}


def run_self_test(runtime: Runtime) -> Sequence[SelfTestResult]:
    """One result per check; never raises for a mismatch."""
    device = runtime.torch_device
    checks: list[tuple[str, float, Callable[[], float]]] = [
        ("memory, read back bit for bit", 0.0, lambda: _memory_error(device)),
        ("norm.rms float32", _BOUNDS["float32"], lambda: _norm_error(device)),
        ("activation.gated float32", _BOUNDS["float32"], lambda: _activation_error(device)),
        ("attention bfloat16", _BOUNDS["bfloat16"], lambda: _attention_error(device)),
    ]
    checks += [
        (f"gemm {name}", bound, partial(_gemm_error, device, getattr(torch, name)))
        for name, bound in _BOUNDS.items()
    ]
    return [_result(name, bound, check) for name, bound, check in checks]


def _result(name: str, bound: float, check: Callable[[], float]) -> SelfTestResult:
    error = check()
    return SelfTestResult(
        name=name, passed=error <= bound, detail=f"largest relative error {error:.1e} ({bound:g})"
    )


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    error = (got.cpu().double() - want).abs().max() / want.abs().max()
    return float(error) if bool(error.isfinite()) else float("inf")


def _memory_error(device: torch.device) -> float:
    """Share of words that differ after a round trip through the device."""
    words = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), dtype=torch.int32)
    back = words.to(device).clone().cpu()
    return float((back != words).double().mean())


def _gemm_error(device: torch.device, dtype: torch.dtype) -> float:
    x, weight = (torch.randn(s).to(dtype) for s in ((37, 256), (192, 256)))
    got = torch.nn.functional.linear(x.to(device), weight.to(device))
    return _relative(got, x.double() @ weight.double().T)


def _norm_error(device: torch.device) -> float:
    x, weight = torch.randn(5, 160), torch.rand(160) + 0.5
    got = torch.nn.functional.rms_norm(x.to(device), [160], weight.to(device), 1e-5)
    exact = x.double()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
    return _relative(got, exact * scale * weight.double())


def _activation_error(device: torch.device) -> float:
    x = torch.randn(5, 192)
    gate, up = x.to(device).chunk(2, dim=-1)
    exact_gate, exact_up = x.double().chunk(2, dim=-1)
    want = torch.nn.functional.silu(exact_gate) * exact_up
    return _relative(torch.nn.functional.silu(gate) * up, want)


def _attention_error(device: torch.device) -> float:
    """Two sequences over shuffled pages, one of them longer than its new tokens."""
    request = AttentionRequest(
        phase="prefill",
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        block_size=16,
        dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    order = torch.randperm(6).int()
    table = torch.stack((torch.cat((order[:1], order[:3] * 0)), order[1:5]))
    q = torch.randn(27, 4 * 64).bfloat16()
    caches = [torch.randn(6, 16, 2, 64).bfloat16() for _ in range(2)]

    def metadata(place: torch.device) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, 7, 27], dtype=torch.int32, device=place),
            seq_lens=torch.tensor([7, 60], dtype=torch.int32, device=place),
            block_table=table.to(place),
            max_query_len=20,
            max_seq_len=60,
        )

    host = metadata(torch.device("cpu"))
    there = metadata(device)
    want = reference(request, scale=0.125)(q.double(), *(c.double() for c in caches), host)
    kernel = bind_platform(request, scale=0.125)
    return _relative(kernel(q.to(device), *(c.to(device) for c in caches), there), want)
