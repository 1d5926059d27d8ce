"""Binds the Triton decode attention with the output projection to requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.attention import AttentionMetadata
from hal.ops.attention_projection import AttentionProjectionRequest, check_residual
from hal_kernels.aot.targets import Target
from hal_kernels.attention.triton_kernels import _attention_decode_kernel
from hal_kernels.attention.triton_variants import SPLIT_KEYS, decode_tiles
from hal_kernels.attention_projection.launch_model import (
    UNKNOWN_UNITS,
    groups_of_heads,
    pieces_of_one_pass,
    prefers_one_pass,
)
from hal_kernels.attention_projection.triton_kernels import (
    _attention_merge_project_kernel,
    _attention_project_kernel,
    _projection_sum_kernel,
)
from hal_kernels.attention_projection.triton_limits import has_one_pass
from hal_kernels.attention_projection.triton_variants import (
    SUM_COLUMNS,
    merge_tiles,
    one_pass_tiles,
)
from hal_kernels.gemm.triton import target_of

AttentionProjection = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The tensors of one call."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: AttentionMetadata
    residual: torch.Tensor | None
    y: torch.Tensor

    @property
    def sequences(self) -> int:
        return int(self.meta.seq_lens.shape[0])

    @property
    def cache_strides(self) -> tuple[int, ...]:
        return (*self.k_cache.stride()[:3], *self.v_cache.stride()[:3])

    @property
    def residual_or_any(self) -> torch.Tensor:
        return self.y if self.residual is None else self.residual


def bind(
    request: AttentionProjectionRequest,
    device: DeviceSpec,
    *,
    scale: float,
    weight: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> AttentionProjection:
    """kernel(q[T, H*D], k_cache[N, P, K, D], v_cache[N, P, K, DV], meta, residual[T, Y] | None) ->
    y[T, Y] for weight [Y, H*DV].

    Rows of q that belong to no sequence keep whatever was in the memory of the result. A row's
    float32 sums have one order within each of the two ways; which way a call goes depends on the
    batch, see `launch_model`. Raises BindingError for what `triton_limits` rejects.
    """
    shape = (request.hidden_size, request.num_heads * request.v_head_dim)
    for what, required, found in (
        ("phase", "decode", request.phase),
        ("weight", str(list(shape)), str(list(weight.shape))),
        ("sinks", str(request.has_sinks), str(sinks is not None)),
    ):
        if required != found:
            raise BindingError(
                f"Triton kernel for {request.label}: {what}", required, found, "select another"
            )
    ways = _Ways(request, device, scale, weight.contiguous(), sinks)

    def kernel(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_residual(request, residual)
        y = q.new_empty((q.shape[0], request.hidden_size))
        call = _Call(q=q, k_cache=k_cache, v_cache=v_cache, meta=meta, residual=residual, y=y)
        if call.sequences:
            pieces = ways.pieces_of(call)
            if pieces:
                ways.one_pass(call, pieces)
            else:
                ways.split_keys(call)
        return y

    return kernel


class _Ways:
    """What does not change between calls, and the two ways of a call."""

    def __init__(
        self,
        request: AttentionProjectionRequest,
        device: DeviceSpec,
        scale: float,
        weight: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        self._request, self._scale = request, scale
        self._weight, self._sinks = weight, sinks
        self._target: Target = target_of(device)
        self._units = int(device.attributes.get("compute_units", UNKNOWN_UNITS))
        self._has_one_pass = has_one_pass(request, device)
        self._group = request.num_heads // request.num_kv_heads
        self._block_d = max(16, triton.next_power_of_2(request.head_dim))
        self._block_dv = max(16, triton.next_power_of_2(request.v_head_dim))
        widest = max(self._block_d, self._block_dv)
        self._one_pass = one_pass_tiles(self._target, widest)
        self._decode = decode_tiles(self._target, widest)
        self._merge = {
            is_one: merge_tiles(self._target, widest, is_one=is_one) for is_one in (True, False)
        }
        self._attention: dict[str, Any] = {
            "GROUP": self._group,
            "BLOCK_H": max(16, triton.next_power_of_2(self._group)),
            "HEAD_DIM": request.head_dim,
            "V_HEAD_DIM": request.v_head_dim,
            "BLOCK_D": self._block_d,
            "BLOCK_DV": self._block_dv,
            "PAGE": request.block_size,
            "WINDOW": request.window,
            "SOFTCAP": request.softcap,
        }

    def pieces_of(self, call: _Call) -> int:
        """Pieces of the result in one pass; 0 where the keys are better split."""
        if not self._has_one_pass:
            return 0
        request = self._request
        tiles = -(-request.hidden_size // self._one_pass["BLOCK_Y"])
        pieces = pieces_of_one_pass(request, self._units, tiles, call.sequences)
        longest = call.meta.max_seq_len
        return pieces if prefers_one_pass(request, pieces, call.sequences, longest) else 0

    def one_pass(self, call: _Call, pieces: int) -> None:
        """Attends and multiplies in one launch, in parts by cached head, and sums the parts."""
        request, width = self._request, self._request.hidden_size
        tiles = -(-width // self._one_pass["BLOCK_Y"])
        tokens, heads = call.q.shape[0], request.num_kv_heads
        part = call.q.new_empty((heads, tokens, width), dtype=torch.float32)
        tiles_each = -(-tiles // pieces)
        grid = (-(-tiles // tiles_each), heads, call.sequences)
        _attention_project_kernel[grid](
            call.q, call.k_cache, call.v_cache, self._weight, part, self._sinks_or(call.q),
            call.meta.query_start_loc, call.meta.seq_lens, call.meta.block_table,
            self._scale, tokens, width, tiles_each,
            call.q.stride(0), self._weight.stride(0), call.meta.block_table.stride(0),
            *call.cache_strides,
            HAS_SINKS=self._sinks is not None, **self._attention, **self._one_pass,
        )  # fmt: skip
        self._sum(call, part)

    def split_keys(self, call: _Call) -> None:
        """Attends by splits of the keys, then merges, multiplies and adds in one launch."""
        request, width = self._request, self._request.hidden_size
        heads, tokens = request.num_heads, call.q.shape[0]
        splits = max(1, -(-call.meta.max_seq_len // SPLIT_KEYS))
        shape = (call.sequences, heads, splits)
        attended = call.q.new_empty((*shape, request.v_head_dim), dtype=torch.float32)
        peak = call.q.new_empty(shape, dtype=torch.float32)
        total = torch.empty_like(peak)
        _attention_decode_kernel[(splits, request.num_kv_heads, call.sequences)](
            call.q, call.k_cache, call.v_cache, attended, peak, total,
            call.meta.query_start_loc, call.meta.seq_lens, call.meta.block_table,
            self._scale, heads, splits, call.q.stride(0), call.meta.block_table.stride(0),
            *call.cache_strides, SPLIT=SPLIT_KEYS, **self._attention, **self._decode,
        )  # fmt: skip
        merge = self._merge[splits == 1]
        tiles, blocks = -(-width // merge["BLOCK_Y"]), -(-call.sequences // merge["ROWS"])
        groups = groups_of_heads(request, self._units, tiles)
        part = attended
        if groups > 1:
            part = call.q.new_empty((groups, tokens, width), dtype=torch.float32)
        _attention_merge_project_kernel[(tiles, groups, blocks)](
            attended, peak, total, self._weight, call.y, part, call.residual_or_any,
            self._sinks_or(call.q), call.meta.query_start_loc,
            call.sequences, heads, splits, tokens, width,
            self._weight.stride(0), call.y.stride(0), call.residual_or_any.stride(0),
            V_HEAD_DIM=request.v_head_dim, BLOCK_DV=self._block_dv, GROUPS=groups,
            IS_ONE=splits == 1, HAS_SINKS=self._sinks is not None,
            HAS_RESIDUAL=call.residual is not None, **merge,
        )  # fmt: skip
        if groups > 1:
            self._sum(call, part)

    def _sum(self, call: _Call, part: torch.Tensor) -> None:
        width = self._request.hidden_size
        _projection_sum_kernel[(-(-width // SUM_COLUMNS), call.sequences)](
            part, call.y, call.residual_or_any, call.meta.query_start_loc,
            part.shape[0], call.q.shape[0], width, call.y.stride(0),
            call.residual_or_any.stride(0),
            BLOCK_Y=SUM_COLUMNS, HAS_RESIDUAL=call.residual is not None, num_warps=2,
        )  # fmt: skip

    def _sinks_or(self, other: torch.Tensor) -> torch.Tensor:
        return other if self._sinks is None else self._sinks
