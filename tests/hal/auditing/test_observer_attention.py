"""Attention takes the backend under an audit that it takes without: torch's profiler is the judge.

The profiler runs without any mode; math is what no fused kernel's name shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from hal.auditing.op_classes import FUSED_ATTENTION
from observed import function_named, observe

Arguments = dict[str, Any]


def _qkv(
    *, dtype: torch.dtype = torch.float32, dim: int = 16, keys: int = 9, grad: bool = False
) -> tuple[torch.Tensor, ...]:
    sizes = ((2, 4, 9, dim), (2, 4, keys, dim), (2, 4, keys, dim))
    return tuple(torch.randn(size).to(dtype).requires_grad_(grad) for size in sizes)


CASES: dict[str, tuple[Callable[[], tuple[torch.Tensor, ...]], Arguments]] = {
    "plain": (_qkv, {}),
    "causal": (_qkv, {"is_causal": True}),
    "bool mask": (_qkv, {"attn_mask": torch.rand(9, 9) < 0.7}),
    "additive mask": (_qkv, {"attn_mask": torch.randn(2, 1, 9, 9)}),
    "mask of three dimensions": (_qkv, {"attn_mask": torch.randn(4, 9, 9)}),
    "dropout": (_qkv, {"dropout_p": 0.2}),
    "scale": (_qkv, {"scale": 0.3}),
    "float64": (lambda: _qkv(dtype=torch.float64), {}),
    "bfloat16": (lambda: _qkv(dtype=torch.bfloat16), {}),
    "float16 with a mask": (
        lambda: _qkv(dtype=torch.float16),
        {"attn_mask": torch.randn(9, 9, dtype=torch.float16)},
    ),
    "other number of keys": (lambda: _qkv(keys=13), {}),
    "head_dim 7": (lambda: _qkv(dim=7), {}),
    "head_dim 320": (lambda: _qkv(dim=320), {}),
    "training": (lambda: _qkv(grad=True), {}),
    "training with a mask": (lambda: _qkv(grad=True), {"attn_mask": torch.randn(9, 9)}),
    "three dimensions": (lambda: tuple(torch.randn(4, 9, 16) for _ in range(3)), {}),
    "last stride 2": (lambda: tuple(torch.randn(2, 4, 9, 32)[..., ::2] for _ in range(3)), {}),
    "grouped queries": (
        lambda: (torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)),
        {"enable_gqa": True},
    ),
    "another size of values": (
        lambda: (torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 24)),
        {},
    ),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "math only": lambda: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_backend_is_that_of_a_run_without_audit(case: str, mode: str) -> None:
    make, arguments = CASES[case]
    if mode == "inference" and "training" in case:
        pytest.skip("inference mode does not train")
    query, key, value = make()

    def program() -> torch.Tensor:
        with MODES[mode]():
            return F.scaled_dot_product_attention(query, key, value, **arguments)

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        program()
    expected = {event.key for event in profiled.key_averages()} & FUSED_ATTENTION
    call = function_named(observe(program), "scaled_dot_product_attention")
    assert call.leaves.keys() & FUSED_ATTENTION == expected
    assert len(expected) == 1


def test_math_counts_once_and_shows_its_parts() -> None:
    q = torch.randn(1, 2, 5, 8)

    def program() -> None:
        for _ in range(3):
            with sdpa_kernel(SDPBackend.MATH):
                F.scaled_dot_product_attention(q, q, q)

    trace = observe(program)
    leaves = function_named(trace, "scaled_dot_product_attention").leaves
    assert leaves["aten::_scaled_dot_product_attention_math"] == 3
    assert leaves["aten::bmm"] == 6
    (math,) = [op for op in trace.ops if "attention_math" in op.name]
    assert (math.calls, math.op_class, math.flops) == (3, "attention", 0)
    products = sum(op.flops for op in trace.ops if op.name == "aten::bmm")
    assert products == 3 * 2 * (2 * 2 * 5 * 5 * 8)


def test_attention_within_a_module_of_torch() -> None:
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 6, 16)
    trace = observe(lambda: attention(x, x, x, need_weights=False))
    call = function_named(trace, "scaled_dot_product_attention")
    assert call.module == "MultiheadAttention"
    assert call.leaves.keys() == {"aten::_scaled_dot_product_flash_attention_for_cpu"}
