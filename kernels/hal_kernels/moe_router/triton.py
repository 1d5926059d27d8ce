"""Binds the Triton choice of experts to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.formats import DTYPE_BYTES
from hal.ops.moe_router import MoeRouterRequest
from hal_kernels.moe_router.triton_kernels import _moe_router_hash_kernel, _moe_router_kernel
from hal_kernels.moe_router.triton_variants import HASH_TOKENS, SCORINGS, program_shape

Choice = tuple[torch.Tensor, torch.Tensor]


def bind(
    request: MoeRouterRequest,
    device: DeviceSpec,
    *,
    bias: torch.Tensor | None = None,
    expert_table: torch.Tensor | None = None,
) -> Callable[..., Choice]:
    """As the op's reference: kernel(logits[T, E], token_ids=None) -> (weights float32 [T, top_k],
    ids int32 [T, top_k]). Raises ValueError as the reference, and for a table of other experts."""
    _check_given("bias", bias, request.has_bias)
    _check_given("an expert table", expert_table, request.scoring == "hash")
    if expert_table is not None:
        return _bind_hash(request, expert_table)
    shift = None if bias is None else bias.contiguous()
    warp_size = int(device.attributes.get("warp_size", 32))
    logit_bytes = DTYPE_BYTES[request.dtype]
    shape = program_shape(request.num_experts, logit_bytes, device.arch, warp_size)

    def choose(logits: torch.Tensor, token_ids: torch.Tensor | None = None) -> Choice:
        _check_given("token ids", token_ids, False)
        logits, weights, ids = _with_results(request, logits)
        tokens = logits.shape[0]
        if tokens:
            _moe_router_kernel[(-(-tokens // shape["T"]),)](
                logits, logits if shift is None else shift, weights, ids, logits.stride(0),
                tokens, request.num_experts, request.top_k, request.route_scale,
                SCORING=SCORINGS[request.scoring], HAS_BIAS=request.has_bias,
                NORMALIZES=request.normalizes, G=request.num_groups,
                PICKED=request.num_groups_picked, **shape,
            )  # fmt: skip
        return weights, ids

    return choose


def _bind_hash(request: MoeRouterRequest, expert_table: torch.Tensor) -> Callable[..., Choice]:
    table = expert_table.contiguous()
    least, most = (int(v) for v in table.aminmax())
    if least < 0 or most >= request.num_experts:
        raise ValueError(
            f"moe_router: required experts 0 to {request.num_experts - 1} in the expert table, "
            f"found {least} to {most}"
        )

    def look_up(logits: torch.Tensor, token_ids: torch.Tensor | None = None) -> Choice:
        _check_given("token ids", token_ids, True)
        logits, weights, ids = _with_results(request, logits)
        tokens = logits.shape[0]
        if tokens:
            _moe_router_hash_kernel[(-(-tokens // HASH_TOKENS),)](
                logits, token_ids, table, weights, ids,
                logits.stride(0), tokens, request.route_scale,
                BLOCK_T=HASH_TOKENS, TOP_K=request.top_k,
                BLOCK_K=triton.next_power_of_2(request.top_k), NORMALIZES=request.normalizes,
                num_warps=1,
            )  # fmt: skip
        return weights, ids

    return look_up


def _with_results(
    request: MoeRouterRequest, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits whose columns are adjacent, and room for weights and ids."""
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    shape = (rows.shape[0], request.top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=rows.device)
    return rows, weights, torch.empty(shape, dtype=torch.int32, device=rows.device)


def _check_given(what: str, found: torch.Tensor | None, is_wanted: bool) -> None:
    if (found is not None) != is_wanted:
        raise ValueError(
            f"moe_router: required {what if is_wanted else f'not {what}'}, "
            f"found {'none' if found is None else list(found.shape)}"
        )
