"""torch's own kernels for norms, activations, rope, gathers, KV writes and sampling.

Where torch has one fused kernel that reads and writes what the op needs, it is `tuned`. Where the
op takes several launches with intermediates in memory, it is `portable`, and `work` says how many
bytes more it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.rope import RopeRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import flag, gather, limit, scope
from hal_backends.gpu.offers import Offer, on_device, work_of

if TYPE_CHECKING:
    import torch

_DTYPES = ("bfloat16", "float16", "float32")


def _aten(*names: str) -> tuple[Leaf, ...]:
    return tuple(Leaf(kind="aten_op", name=f"aten::{name}") for name in names)


def _norm(r: RmsNormRequest, *, has_residual: bool) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _DTYPES),
        flag("residual", r.has_residual, required=has_residual),
        limit("quantize", r.quantize, "none", is_met=r.quantize == "none"),
    )


def _sum_bytes(r: RmsNormRequest, tokens: int) -> float:
    """The sum with the residual is read once more by the norm."""
    return float(tokens * r.rows_per_token * r.hidden_size * DTYPE_BYTES[r.dtype])


def _load_norm() -> Bind:
    import torch.nn.functional as functional

    def bind(request: RmsNormRequest, *, weight: torch.Tensor, eps: float) -> Kernel:
        shape = [request.hidden_size]

        def norm(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(*x.shape[:-1], -1, request.hidden_size)
            return functional.rms_norm(rows, shape, weight, eps).flatten(-2)

        def norm_residual(
            x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            total = x + residual
            return norm(total), total

        return norm_residual if request.has_residual else norm

    return bind


def _load_layer_norm() -> Bind:
    import torch.nn.functional as functional

    def bind(
        request: Any, *, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None
    ) -> Kernel:
        shape = [request.hidden_size]

        def norm(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(*x.shape[:-1], -1, request.hidden_size)
            return functional.layer_norm(rows, shape, weight, bias, eps).flatten(-2)

        return norm

    return bind


def _activation(r: GatedActivationRequest) -> list[Reason]:
    return scope("dtype", r.dtype, _DTYPES)


def _activation_work(r: GatedActivationRequest, tokens: int) -> Work:
    """The activated half is written and read again; a clamp does that to both halves first."""
    half = float(tokens * r.width * DTYPE_BYTES[r.dtype])
    return work_of(r, tokens, unit=r.dtype, more_bytes=half * (2 + (4 if r.clamp else 0)))


def _load_activation() -> Bind:
    import torch.nn.functional as functional

    def bind(request: GatedActivationRequest) -> Kernel:
        def kernel(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, dim=-1)
            if request.clamp:
                gate, up = gate.clamp(max=request.clamp), up.clamp(-request.clamp, request.clamp)
            if request.activation == "silu":
                return functional.silu(gate).mul_(up)
            return functional.gelu(gate, approximate="tanh").mul_(up)

        return kernel

    return bind


def _rope(r: RopeRequest) -> list[Reason]:
    return scope("dtype", r.dtype, _DTYPES)


def _rope_work(r: RopeRequest, tokens: int) -> Work:
    """Four products and two sums in float32, each a pass, and one copy back."""
    values = tokens * (r.num_heads + r.num_kv_heads) * r.rotary_dim
    return work_of(r, tokens, unit="float32", more_bytes=float(values * 4 * 8))


def _load_reference(op: str) -> Callable[[], Bind]:
    """The op's definition in torch, which on this device is a few launches."""

    def load() -> Bind:
        from hal.ops import CATALOGUE

        return CATALOGUE[op].reference

    return load


def _load_embedding() -> Bind:
    import torch

    def bind(request: EmbeddingRequest, *, weight: torch.Tensor) -> Kernel:
        def kernel(ids: torch.Tensor) -> torch.Tensor:
            return torch.index_select(weight, 0, ids)

        return kernel

    return bind


def _kv_write(r: KvWriteRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _DTYPES),
        scope("kv_dtype", r.kv_dtype, _DTYPES),
        scope("kv_format", getattr(r, "kv_format", "") or "dense", ("dense",)),
    )


def _load_kv_write() -> Bind:
    def bind(request: KvWriteRequest) -> Kernel:
        def kernel(
            k: torch.Tensor,
            v: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
        ) -> None:
            for rows, cache, dim in (
                (k, k_cache, request.head_dim),
                (v, v_cache, request.v_head_dim),
            ):
                slots = cache.view(-1, request.num_kv_heads, dim)
                slots.index_copy_(0, slot_mapping, rows.reshape(-1, *slots.shape[1:]).to(cache))

        return kernel

    return bind


def _sort_work(r: Any, tokens: int) -> Work:
    """A stable sort, a softmax, a running sum and a scatter over the whole vocabulary, each in
    float32 with int64 positions: about ten passes."""
    return work_of(r, tokens, unit="float32", more_bytes=float(tokens * r.vocab_size * 4 * 10))


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    return on_device(_OFFERS, op, device)


_OFFERS: tuple[Offer, ...] = (
    Offer(
        op="norm.rms",
        implementation="torch_rms_norm",
        tier=Tier.TUNED,
        summary="torch's fused RMSNorm",
        check=lambda r: _norm(r, has_residual=False),
        load=_load_norm,
        leaf=_aten("_fused_rms_norm"),
        is_graph_safe=True,
    ),
    Offer(
        op="norm.rms",
        implementation="torch_add_rms_norm",
        tier=Tier.PORTABLE,
        summary="a sum, then torch's fused RMSNorm: two launches",
        check=lambda r: _norm(r, has_residual=True),
        load=_load_norm,
        leaf=_aten("add", "_fused_rms_norm"),
        work=lambda r, tokens: work_of(r, tokens, unit="float32", more_bytes=_sum_bytes(r, tokens)),
        is_graph_safe=True,
    ),
    Offer(
        op="layer_norm",
        implementation="torch_layer_norm",
        tier=Tier.TUNED,
        summary="torch's fused LayerNorm",
        check=lambda r: scope("dtype", r.dtype, _DTYPES),
        load=_load_layer_norm,
        leaf=_aten("native_layer_norm"),
        is_graph_safe=True,
    ),
    Offer(
        op="activation.gated",
        implementation="torch_gated",
        tier=Tier.PORTABLE,
        summary="activation and product as two launches",
        check=_activation,
        load=_load_activation,
        leaf=_aten("mul"),
        work=_activation_work,
        is_graph_safe=True,
    ),
    Offer(
        op="rope",
        implementation="torch_rope",
        tier=Tier.PORTABLE,
        summary="products and sums in float32, about eight launches",
        check=_rope,
        load=_load_reference("rope"),
        leaf=_aten("mul"),
        work=_rope_work,
        is_graph_safe=True,
    ),
    Offer(
        op="embedding",
        implementation="torch_index_select",
        tier=Tier.TUNED,
        summary="torch.index_select: copies rows, bound by memory",
        check=lambda r: (),
        load=_load_embedding,
        leaf=_aten("index_select"),
        is_graph_safe=True,
    ),
    Offer(
        op="kv_write",
        implementation="torch_index_copy",
        tier=Tier.PORTABLE,
        summary="one index_copy_ for the keys and one for the values",
        check=_kv_write,
        load=_load_kv_write,
        leaf=_aten("index_copy_"),
        is_graph_safe=True,
    ),
    Offer(
        op="sample.top_k_top_p",
        implementation="torch_sort",
        tier=Tier.PORTABLE,
        summary="sorts the whole vocabulary",
        check=lambda r: (),
        load=_load_reference("sample.top_k_top_p"),
        leaf=_aten("sort"),
        work=_sort_work,
    ),
)
