"""What the parts of a layer share when they list their calls: sizes, formats, collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hal.device_group import GroupLink
from hal.ops.collective import CollectiveRequest
from hal.ops.formats import WeightFormat
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.quantize import QuantizeRequest
from hal.ops.request import OpRequest, Phase
from hal.ops.rope import RopeRequest
from hal_engine.config import ModelConfig
from hal_engine.models.family_shards import FamilyShard
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import Precision

Call = tuple[str, OpRequest]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
HOST_LINK = GroupLink(kind="host")
_LAYER = "model.layers.{}.{}"

_Rounded = Literal["fp8_e4m3fn", "int8", "mxfp4", "nvfp4"]
_Scale = Literal["float32", "ue8m0", "e4m3"]
# How the activations of a product are rounded before it: type, values a scale, type of the scale.
_ROUNDINGS: dict[str, tuple[_Rounded, int, _Scale]] = {
    "int8_per_token": ("int8", 0, "float32"),
    "fp8_per_token": ("fp8_e4m3fn", 0, "float32"),
    "fp8_group128": ("fp8_e4m3fn", 128, "float32"),
    "fp8_group128_ue8m0": ("fp8_e4m3fn", 128, "ue8m0"),
    "fp8_group32": ("fp8_e4m3fn", 32, "float32"),
    "mxfp8_group32": ("fp8_e4m3fn", 32, "ue8m0"),
    "mxfp4_group32": ("mxfp4", 32, "ue8m0"),
    "nvfp4_group16": ("nvfp4", 16, "e4m3"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteParts:
    """The calls of one rank, made from a configuration. Names of calls are those of one layer."""

    config: ModelConfig
    precision: Precision
    limits: StepLimits
    shard: FamilyShard
    link: GroupLink = HOST_LINK

    def format_of(
        self, layer: int | None, tensors: Iterable[str], *, rounds_activations: bool = True
    ) -> WeightFormat:
        """Of a product whose weight is made of these tensors, with or without a layer before."""
        names = [t if layer is None else _LAYER.format(layer, t) for t in tensors]
        return self.precision.weight_format(
            self.config, names, rounds_activations=rounds_activations
        )

    def norm(self, width: int, *, rows: int = 1, has_residual: bool = False) -> RmsNormRequest:
        return RmsNormRequest(
            hidden_size=width,
            dtype=self.precision.dtype,
            rows_per_token=rows,
            has_residual=has_residual,
            tokens=self.limits.all_tokens,
        )

    def linear(
        self,
        layer: int | None,
        tensors: Iterable[str],
        n: int,
        k: int,
        *,
        has_bias: bool = False,
        is_gated: bool = False,
        out_dtype: str = "",
    ) -> GemmRequest:
        return GemmRequest(
            n=n,
            k=k,
            dtype=self.precision.dtype,
            weight_format=self.format_of(layer, tensors),
            has_bias=has_bias,
            epilogue="silu_gated" if is_gated else "none",
            out_dtype=out_dtype,
            tokens=self.limits.all_tokens,
        )

    def per_group(self, groups: int, n: int, k: int, weight: WeightFormat) -> GroupedGemmRequest:
        """A product for each group of a token's values: every token goes through all of them."""
        return GroupedGemmRequest(
            num_experts=groups,
            experts_per_token=groups,
            n=n,
            k=k,
            dtype=self.precision.dtype,
            weight_format=weight,
            tokens=self.limits.all_tokens,
        )

    def quantize(self, name: str, width: int, *weights: WeightFormat) -> Iterator[Call]:
        """The rounding that these products need of their common input, none for float products."""
        for activation in dict.fromkeys(w.activation for w in weights if w.activation != "float"):
            out_dtype, group, scale = _ROUNDINGS[activation]
            yield (
                name,
                QuantizeRequest(
                    group_size=group,
                    out_dtype=out_dtype,
                    scale_dtype=scale,
                    width=width,
                    dtype=self.precision.dtype,
                    tokens=self.limits.all_tokens,
                ),
            )

    def rope(
        self,
        num_heads: int,
        head_dim: int,
        rotary_dim: int,
        *,
        start: int,
        style: Literal["half_split", "interleaved"],
        num_kv_heads: int = 0,
        is_inverse: bool = False,
    ) -> RopeRequest:
        return RopeRequest(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rotary_start=start,
            style=style,
            is_inverse=is_inverse,
            dtype=self.precision.dtype,
            tokens=self.limits.all_tokens,
        )

    def write_rows(self, width: int, row_format: str) -> KvWriteRequest:
        """One row a token into a cache of that format."""
        kind = KV_FORMATS[row_format]
        return KvWriteRequest(
            num_kv_heads=1,
            head_dim=width,
            v_head_dim=0,
            block_size=self.limits.block_size,
            dtype=self.precision.dtype,
            kv_dtype=kind.element if kind.is_plain else "uint8",
            kv_format=row_format,  # type: ignore[arg-type]  # checked by the request
            tokens=self.limits.all_tokens,
        )

    def all_reduce(self, name: str, width: int = 0) -> Iterator[Call]:
        """The sum over ranks of a sublayer's rows; nothing with one rank."""
        if self.shard.world_size > 1:
            dtype = self.precision.dtype
            yield name, self.collective("all_reduce", width or self.config.hidden_size, dtype)

    def collective(
        self, kind: Literal["all_reduce", "all_gather"], width: int, dtype: str
    ) -> CollectiveRequest:
        return CollectiveRequest(
            kind=kind,
            world_size=self.shard.world_size,
            width=width,
            dtype=dtype,
            transport=self.link.kind,
            p2p=self.link.p2p,
            is_full_mesh=self.link.is_full_mesh,
            distance=self.link.distance,
            tokens=self.limits.all_tokens,
        )
