"""Golden values: each kernel on inputs whose results are known without computing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hal.device import DeviceSpec, SelfTestResult
from hal.hookspecs import Runtime
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest
from hal_opencl.attention import load_attention
from hal_opencl.gemm import load_gemm
from hal_opencl.runtime import OpenClRuntime
from hal_opencl.small_ops import load_norm, load_rope, load_top_k_top_p

TOLERANCE = 2e-6


def run_self_test(runtime: Runtime) -> Sequence[SelfTestResult]:
    """A result a check; a wrong number is a failed check and never an exception."""
    if not isinstance(runtime, OpenClRuntime):
        raise TypeError(f"opencl self-test: required an OpenClRuntime, found {type(runtime)}")
    checks: tuple[tuple[str, Callable[[DeviceSpec], tuple[torch.Tensor, torch.Tensor]]], ...] = (
        ("gemm", _gemm),
        ("norm.rms", _norm),
        ("rope", _rope),
        ("attention.decode", _attention),
        ("sample.top_k_top_p", _sampling),
    )
    results = []
    for name, check in checks:
        got, want = check(runtime.spec)
        error = float((got - want).abs().nan_to_num().max())
        same = bool((got.isfinite() == want.isfinite()).all())
        results.append(
            SelfTestResult(
                name=name,
                passed=same and error <= TOLERANCE,
                detail=f"largest error {error:.1e}, {TOLERANCE:.0e} allowed",
            )
        )
    return results


def _gemm(device: DeviceSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Row i of x is i + 1 times (0, 1, 2, …, 32); row j of the weight is a one at column j."""
    request = GemmRequest(n=33, k=33, dtype="float32", weight_format=FORMATS["float32"])
    steps = torch.arange(33.0)
    x = torch.stack([steps * (i + 1) for i in range(3)])
    return load_gemm(device)(request, weight=torch.eye(33))(x), x


def _norm(device: DeviceSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """3 and 4 by turns have a mean square of 12.5: 0.8485281 and 1.1313708."""
    request = RmsNormRequest(hidden_size=34, dtype="float32")
    x = torch.tensor([3.0, 4.0] * 17)[None]
    want = torch.tensor([0.848528137, 1.131370850] * 17)[None]
    return load_norm(device)(request, weight=torch.ones(34), eps=0.0)(x), want


def _rope(device: DeviceSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """A quarter turn takes (1, 0) to (0, 1)."""
    request = RopeRequest(num_heads=1, num_kv_heads=1, head_dim=2, rotary_dim=2, dtype="float32")
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    load_rope(device)(request, cos_sin_cache=table)(q, k, torch.tensor([1]))
    return torch.cat((q, k)), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])


def _attention(device: DeviceSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal keys have equal weights: the result is the mean of the values, 1 to 20."""
    request = AttentionRequest(
        phase="decode",
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        v_head_dim=16,
        block_size=16,
        dtype="float32",
        kv_dtype="float32",
    )
    keys, values = torch.ones(2, 16, 1, 16), torch.zeros(2, 16, 1, 16)
    values.view(32, 16)[:20] = torch.arange(1.0, 21.0)[:, None]
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([20], dtype=torch.int32),
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
        max_query_len=1,
        max_seq_len=20,
    )
    q = torch.ones(1, 32)
    return load_attention(device)(request, scale=0.25)(q, keys, values, meta), q * 10.5


def _sampling(device: DeviceSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ln(8), ln(4), ln(2), ln(1), ln(1): half of the mass is the first alone, three quarters
    the first two; the two last are equal, and the lower index stays."""
    logs = [2.0794415, 1.3862944, 0.6931472, 0.0, 0.0]
    rows, infinite = torch.tensor([logs] * 3), float("-inf")
    want = rows.clone()
    want[0, 1:] = want[1, 2:] = want[2, 4:] = infinite
    request = TopKTopPRequest(vocab_size=5)
    kernel = load_top_k_top_p(device)(request)
    got = kernel(rows, torch.tensor([5, 5, 4]), torch.tensor([0.49, 0.74, 1.0]))
    return got, want
