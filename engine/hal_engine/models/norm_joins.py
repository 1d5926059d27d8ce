"""Where a norm may round its rows for the FP8 or int8 product behind it, in one call.

The normed rows are kept beside the rounded ones where anything else reads them: a router, the
dispatch to experts, the weights of an indexer, a product that takes them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hal.joins import JoinedPart, JoinedSite
from hal.ops.gemm import GemmRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.norm_quantize import EIGHT_BITS, NormQuantizeRequest
from hal.ops.quantize import QuantizeRequest
from hal.plan import OpSite

# The joined call, the norm, the rounding, and what reads the norm's rows: the product that they are
# rounded for, then everything else.
_NORMS = (
    (
        "input_norm_quantize",
        "input_norm",
        "attention_input_quantize",
        (
            "qkv_a_proj",
            "indexer.weights_proj",
            "indexer.k_proj",
            "compressor.kv_gate_proj",
            "indexer.kv_gate_proj",
        ),
    ),
    ("q_a_norm_quantize", "q_a_norm", "q_a_quantize", ("q_b_proj", "indexer.q_proj")),
    ("post_norm_quantize", "post_norm", "input_quantize", ("gate_up_proj",)),
    (
        "post_norm_quantize",
        "post_norm",
        "shared.input_quantize",
        ("shared.gate_up_proj", "router_proj", "experts.permute"),
    ),
)


def norm_joins(sites: Sequence[OpSite]) -> Iterator[JoinedSite]:
    """Every one that a model's sites allow."""
    for name, norm, rounding, readers in _NORMS:
        parts = tuple(JoinedPart(site=f"layers.*.{part}") for part in (norm, rounding))
        for site in sites:
            if site.site != parts[0].site or not isinstance(site.request, RmsNormRequest):
                continue
            groups: dict[NormQuantizeRequest, list[int]] = {}
            for layer in site.layers:
                joined = _joined(sites, site, rounding, readers, layer)
                if joined is not None:
                    groups.setdefault(joined, []).append(layer)
            for request, layers in groups.items():
                whole = replace(
                    site, site=f"layers.*.{name}", request=request, layers=tuple(layers)
                )
                yield JoinedSite(site=whole, parts=parts)


def _joined(
    sites: Sequence[OpSite], site: OpSite, rounding: str, readers: Sequence[str], layer: int
) -> NormQuantizeRequest | None:
    """The one call of a layer; None where its rows are not rounded, in four bits or in two ways."""
    norm = site.request
    rounded = _requests(sites, rounding, layer, site.ranks)
    if len(rounded) != 1 or not isinstance(norm, RmsNormRequest):
        return None
    (quantize,) = rounded
    if not isinstance(quantize, QuantizeRequest) or not _in_eight_bits(quantize):
        return None
    if (norm.rows_per_token, norm.hidden_size, norm.quantize) != (1, quantize.width, "none"):
        return None
    read = [r for name in readers for r in _requests(sites, name, layer, site.ranks)]
    return NormQuantizeRequest(
        hidden_size=norm.hidden_size,
        dtype=norm.dtype,
        out_dtype=quantize.out_dtype,  # type: ignore[arg-type]  # one of EIGHT_BITS
        group_size=quantize.group_size,
        scale_dtype=quantize.scale_dtype,  # type: ignore[arg-type]  # as is checked above
        has_residual=norm.has_residual,
        keeps_rows=not _all_take(read),
        tokens=norm.tokens,
    )


def _in_eight_bits(quantize: QuantizeRequest) -> bool:
    return quantize.out_dtype in EIGHT_BITS and quantize.scale_dtype in ("float32", "ue8m0")


def _all_take(readers: Sequence[object]) -> bool:
    """Whether all are products of activations that are rounded as those of the first one are."""
    activations = {
        r.weight_format.activation if isinstance(r, GemmRequest) else "float" for r in readers
    }
    return len(activations) == 1 and "float" not in activations


def _requests(
    sites: Sequence[OpSite], name: str, layer: int, ranks: tuple[int, ...]
) -> list[object]:
    """The requests of that name in a layer on these ranks."""
    return [
        site.request
        for site in sites
        if site.site == f"layers.*.{name}" and layer in site.layers and site.ranks == ranks
    ]
