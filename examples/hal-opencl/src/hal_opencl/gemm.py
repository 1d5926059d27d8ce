"""Binds the matrix product: packs the weight once, chooses a tile by the number of rows a call."""

from __future__ import annotations

import torch

from hal.candidates import Bind, Kernel
from hal.device import DeviceSpec
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal_opencl.memory import Fresh, Launcher, memory_of

PANEL = 32
# Rows of a register tile. A tile of one reads the weight once for one row: decode.
TILES = (1, 2, 4, 8)
# Rows that one work-item takes through its panel, while the panel is in the cache.
ROWS_EACH = 64


def pack_weight(weight: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """weight [N, K] as [panels, K, 32], zero beyond N; gated: 16 of the gate, the 16 of the other
    half."""
    parts = weight.chunk(2) if is_gated else (weight,)
    width = PANEL // len(parts)
    panels = -(-parts[0].shape[0] // width)
    packed = weight.new_zeros((panels, weight.shape[1], PANEL))
    for number, part in enumerate(parts):
        padded = weight.new_zeros((panels * width, weight.shape[1]))
        padded[: part.shape[0]] = part
        columns = slice(number * width, (number + 1) * width)
        packed[:, :, columns] = padded.view(panels, width, -1).transpose(1, 2)
    return packed


def load_gemm(device: DeviceSpec) -> Bind:
    memory = memory_of(device)

    def bind(
        request: GemmRequest,
        *,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None = None,
    ) -> Kernel:
        if isinstance(weight, QuantizedWeight) or weight.dtype != torch.float32:
            raise ValueError("opencl gemm: required a float32 weight, found another format")
        if (bias is not None) != request.has_bias or tuple(weight.shape) != (request.n, request.k):
            raise ValueError(f"opencl gemm: required the tensors of {request.arguments()}")
        is_gated = request.epilogue == "silu_gated"
        packed = pack_weight(weight, is_gated=is_gated)
        packed_bias = packed.new_zeros(1)
        if bias is not None:
            packed_bias = pack_weight(bias[:, None], is_gated=is_gated).reshape(-1)
        defines = {
            "GATED": int(is_gated),
            "SILU": int(request.epilogue == "silu"),
            "HAS_BIAS": int(request.has_bias),
        }
        constants = memory.constant(packed), memory.constant(packed_bias)
        # All tiles now: what does not compile must fail when the model is built.
        launchers = {
            tile: Launcher(
                memory,
                memory.device.kernel("gemm.cl", "gemm", defines | {"TILE_ROWS": tile}),
                *constants,
            )
            for tile in TILES
        }

        def product(x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            tile = next((size for size in TILES if size >= rows), TILES[-1])
            y = x.new_empty((rows, request.out_features))
            sizes = (rows, ROWS_EACH, request.k, request.out_features)
            groups = (packed.shape[0], -(-rows // ROWS_EACH))
            launchers[tile](groups, x, x.stride(0), Fresh(y), *sizes)
            return y

        return product

    return bind
