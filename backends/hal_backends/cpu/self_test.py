"""Golden-value checks of the CPU backend: each chosen kernel against float64, on random input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hal.device import SelfTestResult
from hal.hookspecs import Runtime


def run_self_test(runtime: Runtime) -> Sequence[SelfTestResult]:
    """Compares a product, a norm and an activation with float64; never raises for a mismatch."""
    checks: tuple[tuple[str, Callable[[], float]], ...] = (
        ("gemm float32", _gemm_error),
        ("norm.rms float32", _norm_error),
        ("activation.gated float32", _activation_error),
    )
    results = []
    for name, check in checks:
        error = check()
        results.append(
            SelfTestResult(
                name=name, passed=error < 2e-5, detail=f"largest relative error {error:.1e}"
            )
        )
    return results


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def _gemm_error() -> float:
    from hal_kernels.gemm.cpu_generated import bind_generated

    x, weight = torch.randn(5, 160), torch.randn(96, 160)
    return _relative(bind_generated(weight)(x), x.double() @ weight.double().T)


def _norm_error() -> float:
    from hal_kernels.norm.cpu import bind_rms_norm

    x, weight = torch.randn(3, 160), torch.randn(160)
    got = bind_rms_norm(hidden_size=160, dtype=torch.float32, weight=weight, eps=1e-5)(x)
    exact = x.double()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
    return _relative(got, exact * scale * weight.double())


def _activation_error() -> float:
    from hal_kernels.activation.cpu import bind_gated_activation

    x = torch.randn(3, 192)
    got = bind_gated_activation(width=96, dtype=torch.float32)(x)
    gate, up = x.double().chunk(2, dim=-1)
    return _relative(got, torch.nn.functional.silu(gate) * up)
