"""The Triton layer norm in the interpreter against float64."""

from __future__ import annotations

import pytest
import torch

import hal_kernels.layer_norm.triton as triton_layer_norm
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.layer_norm import LayerNormRequest, reference
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import TARGETS
from hal_kernels.layer_norm.triton_limits import not_supported_reasons

EPS = 1e-6
STEP = CATALOGUE["layer_norm"].largest_errors


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("hidden", [1, 64, 576, 1100, 16384, 16385], ids=lambda h: f"h{h}")
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_layer_norm(dtype: str, hidden: int, has_bias: bool) -> None:
    """Several short rows share a program; the widest is walked in steps."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = LayerNormRequest(hidden_size=hidden, has_bias=has_bias, dtype=dtype)
    weight = (torch.rand(hidden) + 0.5).to(torch_dtype)
    static = {"weight": weight, "bias": torch.randn(hidden).to(torch_dtype) if has_bias else None}
    kernel = triton_layer_norm.bind(request, gpu("sm_90"), eps=EPS, **static)
    for shape in ((0, hidden), (1, hidden), (2, 3, hidden)):
        sizes = torch.logspace(-3, 2, max(shape[0], 1))[: shape[0]]
        # A common offset of the row's own size: it has to go away, and may take bits with it.
        x = torch.randn(shape) + 3.0 * torch.randn(*shape[:-1], 1)
        x = (x * sizes.view(-1, *[1] * (len(shape) - 1))).to(torch_dtype)
        exact = reference(request, eps=EPS, **static)(x.double())
        y = kernel(x)
        assert y.dtype == torch_dtype
        assert y.shape == x.shape
        # Of a row of size s the mean is wrong by about s * 2^-23; what is left has spread 1.
        centred = x.double() - x.double().mean(dim=-1, keepdim=True)
        spread = centred.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=EPS**0.5)
        carried = x.double().abs().amax(dim=-1, keepdim=True) / spread
        bound = STEP[dtype] * exact.abs() + 2.0**-20 * (1.0 + carried * (1.0 + exact.abs()))
        assert ((y.double() - exact).abs() <= bound).all()


def test_rows_of_a_wider_matrix() -> None:
    wide = LayerNormRequest(hidden_size=16400, has_bias=False, dtype="float32")
    kernel = triton_layer_norm.bind(wide, gpu("sm_90"), weight=torch.rand(16400), eps=EPS)
    x = torch.randn(3, 16408)[:, 8:]
    assert torch.equal(kernel(x), kernel(x.contiguous()))
    request = LayerNormRequest(hidden_size=32, has_bias=False, dtype="float32")
    kernel = triton_layer_norm.bind(request, gpu("sm_90"), weight=torch.ones(32), eps=EPS)
    x = torch.randn(5, 80)
    assert torch.equal(kernel(x[:, 7:39]), kernel(x[:, 7:39].contiguous()))
    assert torch.equal(kernel(x[:, :64:2]), kernel(x[:, :64:2].contiguous()))
    with pytest.raises(ValueError, match="required a bias as has_bias=False says"):
        triton_layer_norm.bind(
            request, gpu("sm_90"), weight=torch.ones(32), eps=EPS, bias=torch.ones(32)
        )


@pytest.mark.parametrize("arch", [target.arch for target in TARGETS])
@pytest.mark.parametrize("dtype", list(STEP))
def test_every_width_is_served(arch: str, dtype: str) -> None:
    for hidden in (64, 128, 8192, 16384, 16385, 53248):
        request = LayerNormRequest(hidden_size=hidden, has_bias=True, dtype=dtype)
        assert not not_supported_reasons(request, gpu(arch))
        (asked,) = evidence_asked(not_supported_reasons, request, gpu(arch))
        assert asked.kernel == ("layer_norm.looped" if hidden > 16384 else "layer_norm.rows")
