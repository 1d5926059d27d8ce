"""Binds the Triton Engram to requests."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.engram import EngramRequest
from hal.ops.formats import torch_dtype
from hal_kernels.engram.triton_kernels import _engram_gather_kernel, _engram_mix_kernel
from hal_kernels.engram.triton_variants import BLOCK_D, mix_warps


def bind(
    request: EngramRequest,
    device: DeviceSpec,
    *,
    table: torch.Tensor | None = None,
    multipliers: torch.Tensor | None = None,
    primes: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Callable[..., torch.Tensor]:
    """As the op's reference: gather(ids) or mix(streams, kv). Raises ValueError if a tensor that
    the kind needs is missing. A row that the table lacks is NaN."""
    if request.kind == "gather":
        if table is None or multipliers is None or primes is None or offsets is None:
            raise ValueError(
                "engram: required table, multipliers, primes and offsets, found None among them"
            )
        return _bind_gather(request, table, multipliers, primes, offsets)
    if query_weight is None or key_weight is None:
        raise ValueError("engram: required query_weight and key_weight, found None among them")
    num_warps = mix_warps(request.dtype, int(device.attributes.get("warp_size", 32)))
    return _bind_mix(request, query_weight, key_weight, eps, num_warps)


def _bind_gather(
    request: EngramRequest,
    table: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
) -> Callable[[torch.Tensor], torch.Tensor]:
    # Not the table: it is as large as the memory, and a copy would be made without a word.
    if not table.is_contiguous():
        raise ValueError(f"engram: required a contiguous table, found strides {table.stride()}")
    multipliers, primes, offsets = (t.contiguous() for t in (multipliers, primes, offsets))
    width, dtype = request.row_width, torch_dtype(request.dtype)

    def gather(ids: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[0]
        y = torch.empty(
            (tokens, request.rows_per_token * width), dtype=dtype, device=table.device
        )  # fmt: skip
        if tokens:
            _engram_gather_kernel[(tokens, request.max_ngram - 1)](
                ids.contiguous(), multipliers, primes, offsets, table, y, table.shape[0],
                S=request.max_ngram, H=request.num_heads,
                BLOCK_H=triton.next_power_of_2(request.num_heads),
                WIDTH=width, BLOCK_W=triton.next_power_of_2(width),
            )  # fmt: skip
        return y

    return gather


def _bind_mix(
    request: EngramRequest,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    num_warps: int,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    n, hidden = request.num_streams, request.hidden_size
    query_weight, key_weight = query_weight.contiguous(), key_weight.contiguous()

    def mix(streams: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        flat = streams.flatten(1)
        flat, kv = (t if t.stride(1) == 1 else t.contiguous() for t in (flat, kv))
        out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
        if len(flat):
            _engram_mix_kernel[(len(flat), n)](
                flat, kv, query_weight, key_weight, out, flat.stride(0), kv.stride(0),
                hidden, 1.0 / math.sqrt(hidden), eps,
                N=n, BLOCK_D=BLOCK_D, num_warps=num_warps,
            )  # fmt: skip
        return out

    return mix
