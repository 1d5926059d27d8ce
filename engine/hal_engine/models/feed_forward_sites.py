"""The calls of feed-forwards: dense ones, and mixtures of experts with those shared by all tokens.

Experts are cut by width: each rank holds a part of every expert, routes every token itself, and
one all-reduce sums routed and shared experts together.
"""

from __future__ import annotations

from collections.abc import Iterator

from hal.ops.activation import GatedActivationRequest
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.ops.moe_router import MoeRouterRequest
from hal_engine.config_parts import MoeConfig
from hal_engine.models.site_parts import Call, SiteParts

GATE_UP_TENSORS = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
DOWN_TENSOR = "mlp.down_proj.weight"
SHARED_GATE_UP_TENSORS = (
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
)
SHARED_DOWN_TENSOR = "mlp.shared_experts.down_proj.weight"
ROUTER_TENSOR = "mlp.gate.weight"
EXPERT_GATE_UP_TENSORS = ("mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight")
EXPERT_DOWN_TENSOR = "mlp.experts.0.down_proj.weight"


def feed_forward_sites(parts: SiteParts, layer: int) -> Iterator[Call]:
    """From the normed input of a layer's feed-forward to its output, summed over ranks."""
    moe = parts.config.moe_of(layer)
    if moe is None:
        yield from _gated_sites(
            parts,
            layer,
            "",
            (GATE_UP_TENSORS, DOWN_TENSOR),
            parts.shard.dense_width,
            clamp=0.0,
            has_bias=parts.config.mlp_bias,
        )
        yield from parts.all_reduce("down_all_reduce")
        return
    yield from _routing(parts, layer, moe)
    yield from _experts(parts, layer, moe)
    if moe.shared_intermediate_size:
        tensors = (SHARED_GATE_UP_TENSORS, SHARED_DOWN_TENSOR)
        width = parts.shard.shared_width
        clamp = moe.activation_clamp
        yield from _gated_sites(parts, layer, "shared.", tensors, width, clamp=clamp)
    yield from parts.all_reduce("experts_all_reduce")


def _routing(parts: SiteParts, layer: int, moe: MoeConfig) -> Iterator[Call]:
    hidden, is_hashed = parts.config.hidden_size, layer in moe.hash_layers
    yield (
        "router_proj",
        parts.linear(layer, (ROUTER_TENSOR,), moe.num_experts, hidden, out_dtype="float32"),
    )
    yield (
        "router",
        MoeRouterRequest(
            scoring="hash" if is_hashed else moe.scoring,
            num_experts=moe.num_experts,
            top_k=moe.experts_per_token,
            num_groups=moe.num_groups,
            num_groups_picked=moe.num_groups_picked,
            has_bias=moe.has_bias and not is_hashed,
            normalizes=moe.normalizes,
            route_scale=moe.route_scale,
            tokens=parts.limits.all_tokens,
        ),
    )


def _experts(parts: SiteParts, layer: int, moe: MoeConfig) -> Iterator[Call]:
    hidden, width, per_token = (
        parts.config.hidden_size,
        parts.shard.expert_width,
        moe.experts_per_token,
    )
    up = _grouped(parts, layer, moe, EXPERT_GATE_UP_TENSORS, 2 * width, hidden, is_up=True)
    down = _grouped(parts, layer, moe, (EXPERT_DOWN_TENSOR,), hidden, width, is_up=False)
    yield "experts.permute", _dispatch(parts, moe, "permute")
    yield from parts.quantize("experts.input_quantize", per_token * hidden, up.weight_format)
    yield "experts.gate_up_proj", up
    if moe.activation_clamp:
        yield "experts.activation", _activation(parts, width, per_token, moe.activation_clamp)
    yield from parts.quantize("experts.down_quantize", per_token * width, down.weight_format)
    yield "experts.down_proj", down
    yield "experts.combine", _dispatch(parts, moe, "combine")


def _grouped(
    parts: SiteParts,
    layer: int,
    moe: MoeConfig,
    tensors: tuple[str, ...],
    n: int,
    k: int,
    *,
    is_up: bool,
) -> GroupedGemmRequest:
    is_gated = is_up and not moe.activation_clamp
    return GroupedGemmRequest(
        num_experts=moe.num_experts,
        experts_per_token=moe.experts_per_token,
        n=n,
        k=k,
        dtype=parts.precision.dtype,
        weight_format=parts.format_of(layer, tensors),
        epilogue="silu_gated" if is_gated else "none",
        tokens=parts.limits.all_tokens,
    )


def _dispatch(parts: SiteParts, moe: MoeConfig, kind: str) -> MoeDispatchRequest:
    return MoeDispatchRequest(
        kind="permute" if kind == "permute" else "combine",
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        hidden_size=parts.config.hidden_size,
        dtype=parts.precision.dtype,
        tokens=parts.limits.all_tokens,
    )


def _activation(
    parts: SiteParts, width: int, rows_per_token: int, clamp: float
) -> GatedActivationRequest:
    return GatedActivationRequest(
        width=width,
        dtype=parts.precision.dtype,
        rows_per_token=rows_per_token,
        clamp=clamp,
        tokens=parts.limits.all_tokens,
    )


def _gated_sites(
    parts: SiteParts,
    layer: int,
    prefix: str,
    tensors: tuple[tuple[str, ...], str],
    width: int,
    *,
    clamp: float,
    has_bias: bool = False,
) -> Iterator[Call]:
    """One gated feed-forward of `width` features that every token goes through."""
    hidden = parts.config.hidden_size
    up = parts.linear(layer, tensors[0], 2 * width, hidden, has_bias=has_bias, is_gated=not clamp)
    down = parts.linear(
        layer,
        (tensors[1],),
        hidden,
        width,
        has_bias=has_bias and parts.shard.rank == 0,
    )
    yield from parts.quantize(f"{prefix}input_quantize", hidden, up.weight_format)
    yield f"{prefix}gate_up_proj", up
    if clamp:
        yield f"{prefix}activation", _activation(parts, width, 1, clamp)
    yield from parts.quantize(f"{prefix}down_quantize", width, down.weight_format)
    yield f"{prefix}down_proj", down
