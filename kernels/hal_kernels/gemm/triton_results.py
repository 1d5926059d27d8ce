"""Where a Triton product stores what, and with which of the steps that `epilogues` has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hal.ops.formats import torch_dtype
from hal.ops.fused_gemm import FusedGemmRequest, check_residual
from hal.ops.gemm import GemmRequest
from hal.ops.low_precision import LARGEST

EPILOGUES = {"none": 0, "silu": 1, "silu_gated": 2}
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    """What one call stores: y [M, N], scales [M, groups] (y itself where y has none), and the
    residual that is added (y itself where there is none). A pair where y has scales."""

    y: torch.Tensor
    scale: torch.Tensor
    residual: torch.Tensor

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.y, self.scale, self.residual

    @property
    def strides(self) -> tuple[int, int]:
        return self.y.stride(0), self.residual.stride(0)

    @property
    def rows(self) -> Rows:
        return self.y if self.scale is self.y else (self.y, self.scale)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows the product of a request. constants: as the kernels name them. bias: [N], where
    the kernel adds it as a residual whose rows are all the same."""

    request: GemmRequest
    bias: torch.Tensor | None = None

    @property
    def constants(self) -> Mapping[str, Any]:
        fused = self.request if isinstance(self.request, FusedGemmRequest) else None
        group = 0 if fused is None else fused.out_group_size
        return {
            "EPILOGUE": EPILOGUES[self.request.epilogue],
            "CLAMP": 0.0 if fused is None else float(fused.clamp),
            "HAS_RESIDUAL": self.has_residual or self.bias is not None,
            "OUT_GROUP": group,
            "OUT_LARGEST": LARGEST[self.request.out_dtype] if group else 0.0,
            "OUT_UE8M0": bool(fused is not None and group and fused.out_scale_dtype == "ue8m0"),
        }

    @property
    def has_residual(self) -> bool:
        return isinstance(self.request, FusedGemmRequest) and self.request.has_residual

    def result(self, rows: int, device: torch.device, residual: torch.Tensor | None) -> Result:
        """Memory for so many rows. Raises ValueError for a residual that the request does not name,
        or the reverse, or that is not of the result's rows. A plain product has none."""
        request = self.request
        shape = (rows, request.out_features)
        if isinstance(request, FusedGemmRequest):
            check_residual(request, residual)
            if residual is not None and (residual.shape != shape or residual.stride(1) != 1):
                raise ValueError(
                    f"fused_gemm: required a residual {list(shape)} whose rows have no gaps, "
                    f"found {list(residual.shape)} with strides {residual.stride()}; "
                    "pass residual.contiguous() of the product's own rows"
                )
        elif residual is not None:
            raise ValueError(
                f"{request.label}: required no residual, which the op gemm does not add, "
                f"found {list(residual.shape)}; ask for a FusedGemmRequest with has_residual=True"
            )
        if self.bias is not None:
            residual = self.bias.expand(shape)
        name = request.out_dtype or request.dtype
        group = request.out_group_size if isinstance(request, FusedGemmRequest) else 0
        if not group:
            y = torch.empty(shape, dtype=torch_dtype(name), device=device)
            return Result(y, y, y if residual is None else residual)
        y = torch.empty(shape, dtype=eight_bits(name), device=device)
        scale_dtype = torch.uint8 if self.constants["OUT_UE8M0"] else torch.float32
        groups = (rows, request.out_features // group)
        scale = torch.empty(groups, dtype=scale_dtype, device=device)
        return Result(y, scale, y if residual is None else residual)


def wide_rows(x: Rows, *, op: str) -> torch.Tensor:
    """x of a product whose rows stay as they are. Raises ValueError for rounded rows."""
    if isinstance(x, torch.Tensor):
        return x
    raise ValueError(
        f"{op}: required rows [M, K] as they are, which this product does not round, found "
        "values and scales; pass x before it is rounded"
    )


def eight_bits(name: str) -> torch.dtype:
    """The torch dtype of "fp8_e4m3fn" or "fp8_e4m3fnuz"."""
    dtype: torch.dtype = getattr(torch, name.replace("fp8", "float8"))
    return dtype
