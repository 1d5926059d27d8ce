"""Where a product may store what the calls behind it would: a sum with its norm, rounded rows.

On one rank the residual is added where the product is stored, and the norm follows in the same
call. Between two FP8 products the activation and the rounding are part of the first one's store,
and between two products of experts a clamped activation is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from hal.joins import JoinedPart, JoinedSite
from hal.ops.activation import GatedActivationRequest
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.gemm_norm import GemmNormRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.quantize import QuantizeRequest
from hal.ops.request import OpRequest
from hal.plan import OpSite

O_PROJ_NORM, DOWN_PROJ_NORM = "o_proj_norm", "down_proj_norm"
# The joined call, the product, the norm, how many layers behind it is, and the sum over ranks that
# must not be between.
_PRODUCTS_WITH_NORM = (
    (O_PROJ_NORM, "o_proj", "post_norm", 0, "o_all_reduce"),
    (DOWN_PROJ_NORM, "down_proj", "input_norm", 1, "down_all_reduce"),
)
_EXPERTS = "layers.*.experts."
_FEED_FORWARDS = ("", "shared.")  # before the names of the calls of a gated feed-forward
_EIGHT_BITS = ("fp8_e4m3fn", "fp8_e4m3fnuz")


def product_joins(sites: Sequence[OpSite]) -> Iterator[JoinedSite]:
    """Every one that a model's sites allow, the ones that join more calls first."""
    for name, product, norm, shift, reduce in _PRODUCTS_WITH_NORM:
        behind = JoinedPart(site=f"layers.*.{norm}", shift=shift)
        yield from _with_norm(sites, name, f"layers.*.{product}", behind, f"layers.*.{reduce}")
    for prefix in _FEED_FORWARDS:
        yield from _gated(sites, f"layers.*.{prefix}")
    yield from _gated_experts(sites)


def _with_norm(
    sites: Sequence[OpSite], name: str, product: str, norm: JoinedPart, reduce: str
) -> Iterator[JoinedSite]:
    for site in sites:
        request = site.request
        if site.site != product or not isinstance(request, GemmRequest) or not _is_plain(request):
            continue
        layers = tuple(
            layer
            for layer in site.layers
            if _adds(_request_at(sites, norm.site, layer + norm.shift, site.ranks), request)
            and _request_at(sites, reduce, layer, site.ranks) is None
        )
        if layers:
            joined = GemmNormRequest(
                n=request.n,
                k=request.k,
                dtype=request.dtype,
                weight_format=request.weight_format,
                has_bias=request.has_bias,
                tokens=request.tokens,
            )
            parts = (JoinedPart(site=product), norm)
            yield _join(
                replace(site, site=f"layers.*.{name}", request=joined, layers=layers), parts
            )


def _is_plain(request: GemmRequest) -> bool:
    """Whether a product, not one of the ops that are more, stores its sums as they are."""
    return (
        request.op == GemmRequest.op
        and request.phase == "any"
        and request.epilogue == "none"
        and not request.out_dtype
    )


def _adds(norm: OpRequest | None, product: GemmRequest) -> bool:
    """Whether a norm adds the rows of a product into the residual."""
    return (
        isinstance(norm, RmsNormRequest)
        and norm.has_residual
        and norm.quantize == "none"
        and (norm.rows_per_token, norm.hidden_size) == (1, product.n)
    )


def _gated(sites: Sequence[OpSite], stem: str) -> Iterator[JoinedSite]:
    """The gated product of a feed-forward with a clamped activation, with rounding, or both."""
    for site in sites:
        request = site.request
        if site.site != f"{stem}gate_up_proj" or type(request) is not GemmRequest:
            continue
        groups: dict[tuple[OpRequest | None, OpRequest | None], list[int]] = {}
        for layer in site.layers:
            activation = _request_at(sites, f"{stem}activation", layer, site.ranks)
            rounding = _request_at(sites, f"{stem}down_quantize", layer, site.ranks)
            groups.setdefault((activation, rounding), []).append(layer)
        for (activation, rounding), layers in groups.items():
            place = replace(site, layers=tuple(layers))
            yield from _gated_with(place, request, stem, activation, rounding)


def _gated_with(
    site: OpSite,
    request: GemmRequest,
    stem: str,
    activation: OpRequest | None,
    rounding: OpRequest | None,
) -> Iterator[JoinedSite]:
    parts = [JoinedPart(site=site.site)]
    clamp = 0.0
    if isinstance(activation, GatedActivationRequest):
        if activation.activation != "silu" or request.epilogue != "none":
            return
        clamp = activation.clamp
        parts.append(JoinedPart(site=f"{stem}activation"))
    elif request.epilogue != "silu_gated":
        return
    if isinstance(rounding, QuantizeRequest) and _is_stored(rounding):
        joined = _fused(
            request,
            clamp,
            out_dtype=rounding.out_dtype,
            out_group_size=rounding.group_size,
            out_scale_dtype=rounding.scale_dtype,
        )
        place = replace(site, site=f"{stem}gate_up_quantize", request=joined)
        yield _join(place, (*parts, JoinedPart(site=f"{stem}down_quantize")))
    if len(parts) > 1:
        place = replace(site, site=f"{stem}gate_up_activation", request=_fused(request, clamp))
        yield _join(place, tuple(parts))


def _gated_experts(sites: Sequence[OpSite]) -> Iterator[JoinedSite]:
    """The gated product of all experts with a clamped activation: the same op, gated."""
    for site in sites:
        product = site.request
        if site.site != f"{_EXPERTS}gate_up_proj" or not isinstance(product, GroupedGemmRequest):
            continue
        layers: dict[float, list[int]] = {}
        for layer in site.layers:
            behind = _request_at(sites, f"{_EXPERTS}activation", layer, site.ranks)
            if product.epilogue == "none" and _activates(behind, product):
                layers.setdefault(behind.clamp, []).append(layer)
        for clamp, of_clamp in layers.items():
            gated = replace(product, epilogue="silu_gated", clamp=clamp)
            name = f"{_EXPERTS}gate_up_activation"
            place = replace(site, site=name, request=gated, layers=tuple(of_clamp))
            yield _join(
                place, (JoinedPart(site=site.site), JoinedPart(site=f"{_EXPERTS}activation"))
            )


def _activates(
    behind: OpRequest | None, product: GroupedGemmRequest
) -> TypeGuard[GatedActivationRequest]:
    """Whether a gated SiLU takes all rows of a product per expert."""
    return (
        isinstance(behind, GatedActivationRequest)
        and behind.activation == "silu"
        and behind.dtype == product.dtype
        and (behind.rows_per_token, 2 * behind.width) == (product.experts_per_token, product.n)
    )


def _is_stored(rounding: QuantizeRequest) -> bool:
    """Whether a product may store rows rounded like this: in eight bits, in groups."""
    is_fp8 = rounding.out_dtype in _EIGHT_BITS and rounding.scale_dtype in ("float32", "ue8m0")
    return is_fp8 and rounding.group_size > 0


def _fused(request: GemmRequest, clamp: float, **fields: Any) -> FusedGemmRequest:
    return FusedGemmRequest(
        n=request.n,
        k=request.k,
        dtype=request.dtype,
        weight_format=request.weight_format,
        has_bias=request.has_bias,
        epilogue="silu_gated",
        clamp=clamp,
        tokens=request.tokens,
        **fields,
    )


def _join(site: OpSite, parts: tuple[JoinedPart, ...]) -> JoinedSite:
    return JoinedSite(site=site, parts=parts, needs_gain=False)


def _request_at(
    sites: Sequence[OpSite], name: str, layer: int, ranks: tuple[int, ...]
) -> OpRequest | None:
    """The request of a site of that layer and these ranks, None if there is none."""
    for site in sites:
        if site.site == name and layer in site.layers and site.ranks == ranks:
            return site.request
    return None
