"""Products of 16-bit operands whose result is wanted in float32: a router's scores, logits.

F.linear rounds its result to the operands' dtype, so that these have to be asked for in another
way: the bits that a later cast to float32 cannot bring back choose another expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.formats import DTYPE_BYTES
from hal.ops.gemm import GemmRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import gather, scope, software
from hal_backends.gpu.offers import NOT_RUN, Offer, work_of
from hal_backends.gpu.torch_gemm_loaders import finished

if TYPE_CHECKING:
    import torch

_HALF = ("bfloat16", "float16")
_LEAF = (Leaf(kind="aten_op", name="aten::mm"),)


def offers(device: DeviceSpec, blas_tier: Callable[[DeviceSpec], Tier]) -> list[Offer]:
    """cuBLAS's own float32 result where torch has it, and a product in float32 everywhere."""
    found = [_in_float32()]
    return [*found, _mm_to_float32(device, blas_tier(device))] if _has_mm(device) else found


def _has_mm(device: DeviceSpec) -> bool:
    """torch documents `out_dtype` of torch.mm for CUDA."""
    return device.backend == "nvidia"


def _check(r: GemmRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _HALF),
        scope("weight format", r.weight_format.name, (r.dtype,)),
        scope("out_dtype", r.out_dtype or r.dtype, ("float32",)),
    )


def _mm_to_float32(device: DeviceSpec, tier: Tier) -> Offer:
    return Offer(
        op="gemm",
        implementation="torch_mm_float32",
        tier=tier,
        summary=f"cuBLAS through torch.mm(out_dtype=float32): nothing is rounded; {NOT_RUN}",
        check=lambda r: gather(_check(r), software(device, "torch", ">=2.8")),
        load=_load_mm_to_float32,
        leaf=_LEAF,
        requires=("torch>=2.8",),
        is_graph_safe=True,
    )


def _in_float32() -> Offer:
    def work(r: GemmRequest, tokens: int) -> Work:
        wider = (DTYPE_BYTES["float32"] - DTYPE_BYTES[r.dtype]) * r.n * r.k
        more = wider + 2.0 * tokens * r.k * DTYPE_BYTES["float32"]
        return work_of(r, tokens, unit="float32", more_bytes=more)

    return Offer(
        op="gemm",
        implementation="torch_linear_in_float32",
        tier=Tier.PORTABLE,
        summary="both operands widened, the weight once and for all, then F.linear in float32",
        check=_check,
        load=_load_in_float32,
        leaf=_LEAF,
        work=work,
        is_graph_safe=True,
    )


def _load_mm_to_float32() -> Bind:
    import torch

    def bind(
        request: GemmRequest, *, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Kernel:
        columns = weight.t()

        def product(x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, columns, out_dtype=torch.float32)

        return finished(request, product, None if bias is None else bias.float())

    return bind


def _load_in_float32() -> Bind:
    import torch.nn.functional as functional

    def bind(
        request: GemmRequest, *, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Kernel:
        wide, wide_bias = weight.float(), None if bias is None else bias.float()
        return finished(request, lambda x: functional.linear(x.float(), wide, wide_bias), None)

    return bind
