"""Norms, rope, KV write, gated activation on the CPU: kernels that numba compiles here, and torch's
layer norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.formats import torch_dtype
from hal.ops.kv_write import KvWriteRequest
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.rope import RopeRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.cpu.limits import gather, limit, scope, vector_unit

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16")
# A vector of the kernels: 16 float32 values.
_LANES = 16


def _leaf(kernel: str, instruction: str = "vfmadd") -> tuple[Leaf, ...]:
    return (
        Leaf(kind="symbol", name=f"hal_kernels.{kernel}"),
        Leaf(kind="instruction", name=instruction),
    )


def _load_norm() -> Bind:
    from hal_kernels.norm.cpu import bind_rms_norm

    def bind(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Kernel:
        # A norm over heads is called with one row per head: rows_per_token is about the estimate.
        return bind_rms_norm(
            hidden_size=request.hidden_size,
            dtype=torch_dtype(request.dtype),
            weight=weight,
            eps=eps,
            has_residual=request.has_residual,
            quantize=request.quantize,
        )

    return bind


def norm_candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    def reasons(r: RmsNormRequest) -> list[Reason]:
        return gather(
            scope("dtype", r.dtype, _DTYPES),
            vector_unit(device),
            limit(
                "hidden_size with int8 rounding",
                r.hidden_size,
                f"a multiple of {_LANES}",
                is_met=r.quantize == "none" or r.hidden_size % _LANES == 0,
            ),
        )

    return (
        KernelCandidate(
            name="cpu.norm.rms.jit",
            op="norm.rms",
            tier=Tier.NATIVE,
            summary="one pass, vectorised; residual added in place",
            not_supported_reasons=reasons,
            load=_load_norm,
            is_graph_safe=True,
            leaf=_leaf("norm"),
        ),
    )


def _load_layer_norm() -> Bind:
    import torch.nn.functional as functional

    def bind(
        request: LayerNormRequest,
        *,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
    ) -> Kernel:
        shape = [request.hidden_size]

        def norm(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(*x.shape[:-1], -1, request.hidden_size)
            return functional.layer_norm(rows, shape, weight, bias, eps).flatten(-2)

        return norm

    return bind


def layer_norm_candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.layer_norm.torch",
            op="layer_norm",
            tier=Tier.TUNED,
            summary="torch's fused layer norm, vectorised for the CPU",
            not_supported_reasons=lambda r: gather(
                scope("dtype", r.dtype, ("float32", "bfloat16", "float16"))
            ),
            load=_load_layer_norm,
            leaf=(Leaf(kind="aten_op", name="aten::native_layer_norm"),),
        ),
    )


def _load_rope() -> Bind:
    from hal_kernels.rope.cpu import bind_rope

    def bind(request: RopeRequest, *, cos_sin_cache: torch.Tensor) -> Kernel:
        return bind_rope(
            num_heads=request.num_heads,
            num_kv_heads=request.num_kv_heads,
            head_dim=request.head_dim,
            rotary_dim=request.rotary_dim,
            dtype=torch_dtype(request.dtype),
            cos_sin_cache=cos_sin_cache,
            style=request.style,
        )

    return bind


def rope_candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    def reasons(r: RopeRequest) -> list[Reason]:
        return gather(
            scope("dtype", r.dtype, _DTYPES),
            scope("rotary_start", r.rotary_start, (0,)),
            scope("inverse rotation", r.is_inverse, (False,)),
            vector_unit(device),
            limit("num_kv_heads", r.num_kv_heads, "at least 1", is_met=r.num_kv_heads > 0),
            limit(
                "rotary_dim when interleaved",
                r.rotary_dim,
                f"a multiple of {_LANES}",
                is_met=r.style == "half_split" or r.rotary_dim % _LANES == 0,
            ),
        )

    return (
        KernelCandidate(
            name="cpu.rope.jit",
            op="rope",
            tier=Tier.NATIVE,
            summary="in place on strided rows, vectorised",
            not_supported_reasons=reasons,
            load=_load_rope,
            is_graph_safe=True,
            leaf=_leaf("rope"),
        ),
    )


def _load_kv_write() -> Bind:
    from hal_kernels.kv_write.cpu import bind_kv_write

    def bind(request: KvWriteRequest) -> Kernel:
        return bind_kv_write(
            num_kv_heads=request.num_kv_heads,
            head_dim=request.head_dim,
            v_head_dim=request.v_head_dim,
            dtype=torch_dtype(request.dtype),
            kv_dtype=torch_dtype(request.kv_dtype),
        )

    return bind


def kv_write_candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.kv_write.jit",
            op="kv_write",
            tier=Tier.NATIVE,
            summary="whole rows to their slots, converted on the way",
            not_supported_reasons=lambda r: gather(
                scope("dtype", r.dtype, _DTYPES),
                scope("kv_dtype", r.kv_dtype, _DTYPES),
                scope("row format", r.kv_format or "keys and values", ("keys and values",)),
                vector_unit(device),
            ),
            load=_load_kv_write,
            is_graph_safe=True,
            leaf=_leaf("kv_write", "vmovup|vmovdq"),
        ),
    )


def _load_activation() -> Bind:
    from hal_kernels.activation.cpu import bind_gated_activation

    def bind(request: GatedActivationRequest) -> Kernel:
        return bind_gated_activation(
            width=request.width,
            dtype=torch_dtype(request.dtype),
            activation=request.activation,
            clamp=request.clamp,
        )

    return bind


def activation_candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.activation.gated.jit",
            op="activation.gated",
            tier=Tier.NATIVE,
            summary="one pass with a vectorised exponential",
            not_supported_reasons=lambda r: gather(
                scope("dtype", r.dtype, _DTYPES), vector_unit(device)
            ),
            load=_load_activation,
            is_graph_safe=True,
            leaf=_leaf("activation"),
        ),
    )
