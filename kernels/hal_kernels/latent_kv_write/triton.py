"""Binds the pass over queries and one row a token to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal.device import DeviceSpec
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal_kernels.kv_write.triton import packed_places
from hal_kernels.latent_kv_write.triton_kernels import _latent_kv_write_kernel
from hal_kernels.latent_kv_write.triton_variants import launch_constants, program_warps


def bind(
    request: LatentKvWriteRequest,
    device: DeviceSpec,
    *,
    cos_sin_cache: torch.Tensor,
    row_weight: torch.Tensor | None = None,
    row_bias: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Callable[..., torch.Tensor | None]:
    """kernel(q or None, rows, positions, cache, slot_mapping) -> q, in place; rows stay as they
    were. Rows of q and of rows may be strided; pages are contiguous, and so is the whole cache of
    rows in a floating dtype.

    Raises ValueError without the weight of a norm that the request has.
    """
    if request.norm_dim and row_weight is None:
        raise ValueError("latent_kv_write: required row_weight with norm_dim")
    if request.norm_dim and request.row_norm_kind == "layer" and row_bias is None:
        raise ValueError("latent_kv_write: required row_bias for a layer norm")
    if request.has_q_norm and q_weight is None:
        raise ValueError("latent_kv_write: required q_weight with has_q_norm")
    form = KV_FORMATS[request.kv_format]
    table = cos_sin_cache.float().contiguous()
    warps = program_warps(request, int(device.attributes.get("warp_size", 32)))
    constants = launch_constants(request)
    blocks = -(-request.num_heads // constants["BLOCK_H"])

    def kernel(
        q: torch.Tensor | None,
        rows: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor | None:
        tokens = slot_mapping.shape[0]
        if not tokens:
            return q
        parts: tuple[torch.Tensor, torch.Tensor] = (cache, cache)
        places: tuple[int, ...] = (cache.stride(0), request.row_dim, *(0,) * 6)
        if not form.is_plain:
            parts, places = packed_places(form, request.block_size, cache)
        queries = rows if q is None else q
        _latent_kv_write_kernel[(tokens, blocks + 1)](
            queries, rows, rows if q_weight is None else q_weight,
            rows if row_weight is None else row_weight, rows if row_bias is None else row_bias,
            positions, table, cache, *parts, slot_mapping,
            queries.stride(0), rows.stride(0), *places, eps,
            num_warps=warps, **constants,
        )  # fmt: skip
        return q

    return kernel
