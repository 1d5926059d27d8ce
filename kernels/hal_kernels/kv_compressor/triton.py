"""Binds the Triton compressor to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.kv_compressor import CompressorMetadata, KvCompressorRequest
from hal_kernels.kv_compressor.triton_kernels import (
    _compressor_state_kernel,
    _kv_compressor_kernel,
)
from hal_kernels.kv_compressor.triton_variants import state_warps, tiles

KvCompressor = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, CompressorMetadata], torch.Tensor
]


def bind(
    request: KvCompressorRequest,
    device: DeviceSpec,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    position_bias: torch.Tensor | None = None,
) -> KvCompressor:
    """kernel(kv[T, W], gate[T, W], state, meta) -> entries [N, head_dim]; the state is brought up
    to date. N is read back from the device, unless the request is of a captured graph: then it is
    the request's `most_entries`, and the rows after the entries are zero. Rows of kv and gate may
    be strided, a slot of the state is contiguous.

    Raises BindingError for a norm_weight where the request has no norm, or the reverse.
    """
    if (norm_weight is not None) != request.has_norm:
        raise BindingError(
            f"Triton compressor for {request.label}",
            f"a norm_weight as has_norm={request.has_norm} says",
            "none" if norm_weight is None else f"norm_weight {list(norm_weight.shape)}",
            "correct the request or the weights",
        )
    bias = None if position_bias is None else position_bias.contiguous()
    pool = {
        "DIM": request.head_dim,
        "RATIO": request.ratio,
        "IS_OVERLAPPING": request.is_overlapping,
        "HAS_BIAS": bias is not None,
        "HAS_NORM": norm_weight is not None,
        **tiles(request.ratio, request.head_dim, request.dtype, device.arch),
    }
    keep = {
        "WIDTH": request.width,
        "BLOCK_W": triton.next_power_of_2(request.width),
        "RATIO": request.ratio,
        "STATE_ROWS": request.state_rows,
        "HAS_BIAS": bias is not None,
        "num_warps": state_warps(request.width, int(device.attributes.get("warp_size", 32))),
    }

    def kernel(
        kv: torch.Tensor, gate: torch.Tensor, state: torch.Tensor, meta: CompressorMetadata
    ) -> torch.Tensor:
        sequences = meta.seq_lens.shape[0]
        if request.graph_mode == "graph":
            entries = request.most_entries(kv.shape[0], sequences)
        else:
            entries = int(meta.entry_start_loc[-1])
        out = kv.new_empty((entries, request.head_dim))
        bias_or_any = kv if bias is None else bias
        where = (meta.query_start_loc, meta.seq_lens, meta.state_slots)
        strides = (kv.stride(0), gate.stride(0), state.stride(0))
        if entries:
            _kv_compressor_kernel[(entries,)](
                kv, gate, state, bias_or_any, kv if norm_weight is None else norm_weight, out,
                *where, meta.entry_start_loc, sequences, sequences.bit_length(), eps, *strides,
                **pool,
            )  # fmt: skip
        if kv.shape[0] and sequences:
            # After the pooling, which reads what is overwritten here.
            _compressor_state_kernel[(request.state_rows, sequences)](
                kv, gate, state, bias_or_any, *where, *strides, **keep
            )
        return out

    return kernel
