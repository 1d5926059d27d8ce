"""FlashInfer's attention over pages: decode and prefill wrappers that are planned once a step.

Limits after flashinfer-python 0.7.4: decode.py, prefill.py, mla/_core.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.formats import torch_dtype
from hal.ops.kv_write import check_scales
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import (
    architecture,
    flag,
    gather,
    limit,
    one_of,
    scope,
    software,
)
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device
from hal_backends.gpu.paged import page_lists

if TYPE_CHECKING:
    import torch

REQUIREMENT = "flashinfer-python>=0.6"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_WORKSPACE_BYTES = 128 << 20
_HEAD_DIMS = (64, 128, 256)
_KV_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def installed(device: DeviceSpec, versions: str = ">=0.6") -> list[Reason]:
    return software(device, "flashinfer-python", versions)


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    return on_device((_offer(device, "decode"), _offer(device, "prefill")), op, device)


def _offer(device: DeviceSpec, phase: str) -> Offer:
    def check(r: AttentionRequest) -> list[Reason]:
        return gather(
            scope("phase", r.phase, (phase,)),
            scope("dtype", r.dtype, ("bfloat16", "float16")),
            one_of("kv_dtype", r.kv_dtype, (r.dtype, "float8_e4m3fn")),
            architecture(device, ARCHS, why="FlashInfer's kernels are compiled for them"),
            one_of("head_dim", r.head_dim, _HEAD_DIMS),
            limit(
                "v_head_dim",
                r.v_head_dim,
                f"head_dim ({r.head_dim})",
                is_met=r.v_head_dim == r.head_dim,
            ),
            flag("sinks", r.has_sinks, required=False),
            installed(device),
        )

    return Offer(
        op="attention",
        implementation=f"flashinfer_{phase}",
        tier=Tier.NATIVE,
        summary=f"FlashInfer's {phase} over pages; {NOT_RUN}",
        check=check,
        load=_load_decode if phase == "decode" else _load_prefill,
        leaf=(Leaf(kind="kernel", name="BatchDecode" if phase == "decode" else "BatchPrefill"),),
        requires=(REQUIREMENT,),
    )


def _planned(
    request: AttentionRequest,
    wrapper: Callable[[torch.Tensor], Any],
    plan: Callable[..., None],
    scales: Mapping[str, float],
) -> Kernel:
    """The kernel over a wrapper that is made at the first call and planned at each new step."""
    check_scales("attention", request.has_kv_scales, **scales)
    given = scales if request.has_kv_scales else {}
    made: list[Any] = []
    step: list[AttentionMetadata] = []

    def kernel(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        if not made:
            made.append(wrapper(q.new_empty(_WORKSPACE_BYTES, dtype=_byte())))
        if not step or step[0] is not meta:
            plan(made[0], meta)
            step[:] = [meta]
        rows = q.reshape(-1, request.num_heads, request.head_dim)
        out: torch.Tensor = made[0].run(rows, (k_cache, v_cache), **given)
        return out.flatten(1)

    return kernel


def _byte() -> torch.dtype:
    import torch

    return torch.uint8


def _options(request: AttentionRequest, scale: float) -> dict[str, Any]:
    return {
        "window_left": request.window - 1 if request.window else -1,
        "logits_soft_cap": request.softcap or None,
        "sm_scale": scale,
        "q_data_type": torch_dtype(request.dtype),
        "kv_data_type": torch_dtype(request.kv_dtype),
    }


def _load_decode() -> Bind:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    def bind(
        request: AttentionRequest,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Kernel:
        # One query per sequence fills the matrix unit only with the heads of a group.
        has_groups = request.num_heads // request.num_kv_heads >= 4

        def wrapper(workspace: torch.Tensor) -> Any:
            return BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=has_groups)

        def plan(made: Any, meta: AttentionMetadata) -> None:
            made.plan(
                *page_lists(meta, request.block_size),
                request.num_heads,
                request.num_kv_heads,
                request.head_dim,
                request.block_size,
                **_options(request, scale),
            )

        return _planned(request, wrapper, plan, {"k_scale": k_scale, "v_scale": v_scale})

    return bind


def _load_prefill() -> Bind:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    def bind(
        request: AttentionRequest,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Kernel:
        def wrapper(workspace: torch.Tensor) -> Any:
            return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

        def plan(made: Any, meta: AttentionMetadata) -> None:
            made.plan(
                meta.query_start_loc,
                *page_lists(meta, request.block_size),
                request.num_heads,
                request.num_kv_heads,
                request.head_dim,
                request.block_size,
                causal=request.is_causal,
                **_options(request, scale),
            )

        return _planned(request, wrapper, plan, {"k_scale": k_scale, "v_scale": v_scale})

    return bind
