"""How torch's products are bound: the layouts of weights and scales that each call wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel
from hal.device import DeviceSpec
from hal.ops.formats import QuantizedWeight, WeightFormat, torch_dtype
from hal.ops.gemm import GemmRequest, GroupedGemmRequest, apply_epilogue, quantize_rows
from hal.ops.low_precision import round_activations
from hal_backends.gpu.formats import fp8_kind

if TYPE_CHECKING:
    import torch

    Weight = torch.Tensor | QuantizedWeight

Product = Callable[["torch.Tensor"], "torch.Tensor"]


def finished(request: GemmRequest, product: Product, bias: torch.Tensor | None) -> Kernel:
    """The product with bias, activation and result dtype after it."""
    out = torch_dtype(request.out_dtype or request.dtype)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = product(x)
        if bias is not None:
            y = y + bias
        return apply_epilogue(request.epilogue, y).to(out)

    return kernel


def load_linear() -> Bind:
    import torch.nn.functional as functional

    def bind(
        request: GemmRequest, *, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Kernel:
        return finished(request, lambda x: functional.linear(x, weight, bias), None)

    return bind


def _as(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias.to(dtype)


def load_dequantize_linear() -> Bind:
    import torch
    import torch.nn.functional as functional

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        # In the operands' dtype a product is rounded to it, whatever the result's is.
        is_wide = request.out_dtype == "float32"

        def product(x: torch.Tensor) -> torch.Tensor:
            wide = torch.float32 if is_wide else x.dtype
            rows = _rounded(x, weight.format).to(wide)
            return functional.linear(rows, weight.dequantize().to(wide), _as(bias, wide))

        return finished(request, product, None)

    return bind


def _rounded(x: torch.Tensor, stored: WeightFormat) -> torch.Tensor:
    """The activations as the format rounds them, in their own dtype."""
    if stored.activation == "float":
        return x
    if stored.activation == "int8_per_token":
        values, scale = quantize_rows(x.float())
        return (values * scale).to(x.dtype)
    return round_activations(x, stored.activation).to(x.dtype)


def load_int_mm() -> Bind:
    import torch

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        columns, scale = weight.data.t(), weight.scale.view(1, -1)

        def product(x: torch.Tensor) -> torch.Tensor:
            rows, row_scale = quantize_rows(x.float())
            padded = _padded_rows(rows, 32)  # cuBLASLt takes more than 16 rows
            y = torch._int_mm(padded, columns)[: rows.shape[0]]
            return (y * row_scale * scale).to(x.dtype)

        return finished(request, product, bias)

    return bind


def _padded_rows(x: torch.Tensor, least: int) -> torch.Tensor:
    import torch.nn.functional as functional

    short = max(0, least - x.shape[0])
    return functional.pad(x, (0, 0, 0, short)) if short else x


def as_kind(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, float]:
    """e4m3fn values in the encoding of the device, and the factor that their scales take.

    The same bits mean half the value in e4m3fnuz, so nothing is rounded; only minus zero, which is
    that encoding's NaN, becomes zero.
    """
    import torch

    if kind == "fp8_e4m3fn":
        return values.view(torch.float8_e4m3fn), 1.0
    bits = values.view(torch.uint8)
    return bits.masked_fill(bits == 0x80, 0).view(torch.float8_e4m3fnuz), 2.0


def load_scaled_rowwise(device: DeviceSpec) -> Callable[[], Bind]:
    kind = fp8_kind(device)

    def load() -> Bind:
        from torch.nn.functional import ScalingType, scaled_mm

        from hal.ops.low_precision import quantize_groups

        def bind(
            request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
        ) -> Kernel:
            stored, factor = as_kind(weight.data, kind)
            columns, scale = stored.t(), (weight.scale.float() * factor).view(1, -1)

            def product(x: torch.Tensor) -> torch.Tensor:
                rounded, row_scale = quantize_groups(
                    x, group_size=0, element="fp8_e4m3fn", scale_kind="float32"
                )
                rows, row_factor = as_kind(rounded, kind)
                return scaled_mm(
                    rows,
                    columns,
                    row_scale * row_factor,
                    ScalingType.RowWise,
                    scale,
                    ScalingType.RowWise,
                    output_dtype=x.dtype,
                )

            return finished(request, product, bias)

        return bind

    return load


def load_scaled_block128() -> Bind:
    """cuBLAS wants the activations' scales with the rows innermost, a multiple of 4 of them, and
    the weight's scales with the blocks along K padded to a multiple of 4."""
    import torch.nn.functional as functional
    from torch.nn.functional import ScalingType, scaled_mm

    from hal.ops.low_precision import decode_scale, quantize_groups

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        stored = weight.format
        columns = as_kind(weight.data, "fp8_e4m3fn")[0].t()
        blocks = decode_scale(weight.scale, stored.scale_dtype)
        blocks = functional.pad(blocks, (0, -blocks.shape[1] % 4)).t()
        kind = "ue8m0" if stored.activation.endswith("ue8m0") else "float32"

        def product(x: torch.Tensor) -> torch.Tensor:
            rows = functional.pad(x, (0, 0, 0, -x.shape[0] % 4))
            values, scales = quantize_groups(
                rows, group_size=128, element="fp8_e4m3fn", scale_kind=kind
            )
            row_scales = decode_scale(scales, kind).t().contiguous().t()
            y = scaled_mm(
                values,
                columns,
                row_scales,
                ScalingType.BlockWise1x128,
                blocks,
                ScalingType.BlockWise128x128,
                output_dtype=x.dtype,
            )
            return y[: x.shape[0]]

        return finished(request, product, bias)

    return bind


def swizzled_scales(scales: torch.Tensor) -> torch.Tensor:
    """[R, C] scales in cuBLAS's tiles of 128 rows by 4 columns (SWIZZLE_32_4_4), flat.

    Of https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout: within a tile, the
    scale of row r and column c stands at (r % 32) * 16 + (r // 32) * 4 + c.
    """
    import torch.nn.functional as functional

    rows, columns = scales.shape
    padded = functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def load_scaled_mx(device: DeviceSpec) -> Callable[[], Bind]:
    is_swizzled = device.backend == "nvidia"

    def load() -> Bind:
        import torch
        from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

        from hal.ops.low_precision import quantize_groups

        swizzle = SwizzleType.SWIZZLE_32_4_4 if is_swizzled else SwizzleType.NO_SWIZZLE

        def laid_out(codes: torch.Tensor) -> torch.Tensor:
            flat = swizzled_scales(codes) if is_swizzled else codes.contiguous()
            return flat.view(torch.float8_e8m0fnu)

        def bind(
            request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
        ) -> Kernel:
            columns = as_kind(weight.data, "fp8_e4m3fn")[0].t()
            per_row = weight.scale.repeat_interleave(weight.format.block_n, dim=0)[: request.n]
            scale = laid_out(per_row)

            def product(x: torch.Tensor) -> torch.Tensor:
                values, codes = quantize_groups(
                    x, group_size=32, element="fp8_e4m3fn", scale_kind="ue8m0"
                )
                return scaled_mm(
                    values,
                    columns,
                    laid_out(codes),
                    ScalingType.BlockWise1x32,
                    scale,
                    ScalingType.BlockWise1x32,
                    swizzle_a=swizzle,
                    swizzle_b=swizzle,
                    output_dtype=x.dtype,
                )

            return finished(request, product, bias)

        return bind

    return load


def load_scaled_nvfp4() -> Bind:
    import torch
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    from hal.ops.low_precision import quantize_groups

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        columns = weight.data.view(torch.float4_e2m1fn_x2).t()
        scale = swizzled_scales(weight.scale.view(torch.float8_e4m3fn))

        def product(x: torch.Tensor) -> torch.Tensor:
            values, scales = quantize_groups(
                x, group_size=16, element="fp4_e2m1", scale_kind="e4m3"
            )
            return scaled_mm(
                values.view(torch.float4_e2m1fn_x2),
                columns,
                swizzled_scales(scales.view(torch.float8_e4m3fn)),
                ScalingType.BlockWise1x16,
                scale,
                ScalingType.BlockWise1x16,
                swizzle_a=SwizzleType.SWIZZLE_32_4_4,
                swizzle_b=SwizzleType.SWIZZLE_32_4_4,
                output_dtype=x.dtype,
            )

        return finished(request, product, bias)

    return bind


def load_grouped_mm() -> Bind:
    import torch

    def bind(request: GroupedGemmRequest, *, weight: torch.Tensor) -> Kernel:
        columns = weight.transpose(-2, -1)

        def kernel(x: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
            y = torch._grouped_mm(x, columns, offs=expert_offsets[1:].int())
            return apply_epilogue(request.epilogue, y, request.clamp)

        return kernel

    return bind


def load_per_expert() -> Bind:
    import torch.nn.functional as functional

    def bind(
        request: GroupedGemmRequest, *, weight: torch.Tensor | Sequence[QuantizedWeight]
    ) -> Kernel:
        def kernel(x: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
            offsets = expert_offsets.tolist()
            rows = _rounded(x, request.weight_format)
            out = x.new_empty((x.shape[0], request.out_features))
            for expert in range(request.num_experts):
                low, high = offsets[expert], offsets[expert + 1]
                if low == high:
                    continue
                y = functional.linear(rows[low:high], _widened(weight[expert], x.dtype))
                out[low:high] = apply_epilogue(request.epilogue, y, request.clamp)
            return out

        return kernel

    return bind


def _widened(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    exact = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    wide: torch.Tensor = exact.to(dtype)
    return wide
