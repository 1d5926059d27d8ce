"""Binds the Triton hyper-connections to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.hyper_connection import HyperConnectionRequest
from hal_kernels.hyper_connection.triton_kernels import (
    _hyper_connection_collapse_kernel,
    _hyper_connection_expand_kernel,
    _hyper_connection_mixes_kernel,
)
from hal_kernels.hyper_connection.triton_variants import (
    BLOCK_D,
    BLOCK_T,
    PARTS,
    collapse_warps,
    expand_launch,
    mixes_constants,
    mixes_warps,
)

_OWN, _PREVIOUS, _FIRST = 0, 1, 2  # SOURCE of the collapse


def bind(
    request: HyperConnectionRequest,
    device: DeviceSpec,
    *,
    projection: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    eps: float = 0.0,
) -> Callable[..., Any]:
    """As the op's reference. Raises ValueError if a tensor that the kind needs is missing."""
    if request.kind == "post":
        return _bind_expand(request, device.arch, _warp_size(device))
    if request.kind == "head" and request.is_lagged:
        return _bind_collapse(request, _warp_size(device))
    if projection is None or base is None or scale is None:
        raise ValueError("hyper_connection: required projection, base and scale, found None")
    return _bind_weights(request, projection, base, scale, norm_eps, eps, device)


def _warp_size(device: DeviceSpec) -> int:
    return int(device.attributes.get("warp_size", 32))


def bfloat16_terms(x: torch.Tensor) -> torch.Tensor:
    """float32 [W, C] -> bfloat16 [3, W, C] whose sum is x, to its last bit or the one before."""
    rest, terms = x.float(), []
    for _ in range(3):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    return torch.stack(terms)


def _bind_weights(
    request: HyperConnectionRequest,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    device: DeviceSpec,
) -> Callable[..., Any]:
    n, hidden = request.num_streams, request.hidden_size
    constants = mixes_constants(request.dtype, request.num_mixes)
    width, warp_size = constants["BLOCK_W"], _warp_size(device)
    num_warps = mixes_warps(request.dtype, request.num_mixes, device.arch, warp_size)
    terms, base, scale = bfloat16_terms(projection), base.float(), scale.float()

    def run(streams: torch.Tensor, source: int, previous: torch.Tensor | None) -> list[Any]:
        flat, tokens = _flat(streams), streams.shape[0]

        def room(*shape: int) -> torch.Tensor:
            return torch.empty((tokens, *shape), dtype=torch.float32, device=streams.device)

        partial, pre, post, comb = room(PARTS, width), room(n), room(n), room(n, n)
        x = torch.empty((tokens, hidden), dtype=streams.dtype, device=streams.device)
        if tokens:
            _hyper_connection_mixes_kernel[(-(-tokens // BLOCK_T), PARTS)](
                flat, terms, partial, flat.stride(0), tokens, n * hidden, request.num_mixes,
                **constants, num_warps=num_warps,
            )  # fmt: skip
            _hyper_connection_collapse_kernel[(tokens,)](
                flat, partial, base, scale, pre if previous is None else previous,
                x, pre, post, comb, flat.stride(0), hidden, norm_eps, eps,
                N=n, W=request.num_mixes, BLOCK_W=width, S=PARTS,
                ITERATIONS=request.sinkhorn_iterations, BLOCK_D=_columns(hidden), SOURCE=source,
                num_warps=collapse_warps(warp_size),
            )  # fmt: skip
        return [x, post, comb, pre]

    def head(streams: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = run(streams, _OWN, None)[0]
        return x

    def pre(streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(run(streams, _OWN, None)[:3])

    def lagged_pre(
        streams: torch.Tensor, previous_pre: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        if previous_pre is None:
            return tuple(run(streams, _FIRST, None))
        return tuple(run(streams, _PREVIOUS, previous_pre.contiguous()))

    if request.kind == "head":
        return head
    return lagged_pre if request.is_lagged else pre


def _bind_collapse(request: HyperConnectionRequest, warp_size: int) -> Callable[..., torch.Tensor]:
    n, hidden = request.num_streams, request.hidden_size

    def lagged_head(streams: torch.Tensor, previous_pre: torch.Tensor) -> torch.Tensor:
        flat, given = _flat(streams), previous_pre.contiguous()
        x = torch.empty((len(flat), hidden), dtype=streams.dtype, device=streams.device)
        if len(flat):
            _hyper_connection_collapse_kernel[(len(flat),)](
                flat, given, given, given, given, x, given, given, given,
                flat.stride(0), hidden, 0.0, 0.0,
                N=n, W=0, BLOCK_W=16, S=PARTS, ITERATIONS=1, BLOCK_D=_columns(hidden),
                SOURCE=_PREVIOUS, num_warps=collapse_warps(warp_size),
            )  # fmt: skip
        return x

    return lagged_head


def _bind_expand(
    request: HyperConnectionRequest, arch: str, warp_size: int
) -> Callable[..., torch.Tensor]:
    n, hidden = request.num_streams, request.hidden_size
    launch = expand_launch(request.dtype, arch, warp_size)

    def expand(
        y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        flat = _flat(streams)
        y = y if y.stride(1) == 1 else y.contiguous()
        out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
        if len(flat):
            _hyper_connection_expand_kernel[(len(flat), -(-hidden // launch["BLOCK_D"]))](
                y, flat, post.contiguous(), comb.contiguous(), out,
                y.stride(0), flat.stride(0), hidden, N=n, **launch,
            )  # fmt: skip
        return out

    return expand


def _flat(streams: torch.Tensor) -> torch.Tensor:
    """[T, N, D] as [T, N * D]; a view where a token's streams are adjacent."""
    flat = streams.flatten(1)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _columns(hidden: int) -> int:
    return min(BLOCK_D, int(triton.next_power_of_2(hidden)))
