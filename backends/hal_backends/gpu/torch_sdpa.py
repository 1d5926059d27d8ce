"""torch's scaled-dot-product attention over the paged cache, by copying the keys and values first.

torch has no attention over a block table, so each sequence's blocks are gathered into one tensor
and its attention is one call of the library. Right, and slower than a paged kernel by the copy and
by one launch per sequence: never more than `portable`.

Limits after pytorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (hardware ranges, head
sizes, masks). Each variant is called by its own name, so torch cannot take another one instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.formats import DTYPE_BYTES
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal_backends.gpu.limits import architecture, at_most, flag, gather, limit, multiple, scope
from hal_backends.gpu.offers import Offer, on_device, work_of

if TYPE_CHECKING:
    import torch

_HALF = ("bfloat16", "float16")
_FLOAT = ("bfloat16", "float16", "float32")
# check_flash_attention_hardware_support: sm80 to sm121. The members, not the range.
_FLASH_CUDA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
# check_prefer_cudnn_attention and the frontend's own tables; consumer Blackwell is not among them.
_CUDNN_CUDA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103")
# AOTriton's compiled architectures, and those that it calls experimental.
_FLASH_HIP = ("gfx90a", "gfx942", "gfx950")
_FLASH_HIP_EXPERIMENTAL = ("gfx1100", "gfx1201")

Attend = Callable[..., "torch.Tensor"]


def _keys_and_values(r: AttentionRequest, tokens: int) -> float:
    """Bytes of the copied keys and values: each is written once and read once more."""
    keys = float(r.context_tokens * tokens if r.phase == "decode" else tokens)
    row = r.num_kv_heads * (r.head_dim + r.v_head_dim)
    return 2.0 * keys * row * DTYPE_BYTES[r.dtype]


def _work(r: AttentionRequest, tokens: int) -> Work:
    return work_of(r, tokens, unit=r.dtype, more_bytes=_keys_and_values(r, tokens))


def _math_work(r: AttentionRequest, tokens: int) -> Work:
    """The scores are written and read twice in float32: once for the softmax, once for the sum."""
    pairs = tokens * r.context_tokens if r.phase == "decode" else tokens * tokens
    scores = 4.0 * 4.0 * r.num_heads * pairs
    return work_of(r, tokens, unit=r.dtype, more_bytes=_keys_and_values(r, tokens) + scores)


def _common(r: AttentionRequest, dtypes: Sequence[str]) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, dtypes),
        limit("kv_dtype", r.kv_dtype, f"dtype ({r.dtype})", is_met=r.kv_dtype == r.dtype),
        flag("sinks", r.has_sinks, required=False),
        limit("softcap", r.softcap, "0", is_met=r.softcap == 0),
    )


def _flash(device: DeviceSpec) -> Callable[[AttentionRequest], Sequence[Reason]]:
    def check(r: AttentionRequest) -> list[Reason]:
        return gather(
            _common(r, _HALF),
            _flash_hardware(device),
            limit("window", r.window, "0", is_met=r.window == 0),
            limit(
                "v_head_dim",
                r.v_head_dim,
                f"head_dim ({r.head_dim})",
                is_met=r.v_head_dim == r.head_dim,
            ),
            at_most("head_dim", r.head_dim, 256),
            multiple("head_dim", r.head_dim, 8),
        )

    return check


def _flash_hardware(device: DeviceSpec) -> list[Reason]:
    if device.backend == "nvidia":
        return architecture(device, _FLASH_CUDA, why="torch's flash kernels are compiled for them")
    if device.arch in _FLASH_HIP_EXPERIMENTAL:
        return [
            Reason(
                what="AOTriton",
                required=f"support of {device.arch} that is not experimental",
                found="experimental, enabled by TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1",
                kind=ReasonKind.UNVERIFIED,
            )
        ]
    return architecture(device, _FLASH_HIP, why="AOTriton's kernels are compiled for them")


def _efficient(device: DeviceSpec) -> Callable[[AttentionRequest], Sequence[Reason]]:
    def check(r: AttentionRequest) -> list[Reason]:
        align = 4 if r.dtype == "float32" else 8
        return gather(
            _common(r, _FLOAT),
            architecture(device, _FLASH_CUDA, why="torch's CUTLASS kernels are compiled for them"),
            multiple("head_dim", r.head_dim, align),
            multiple("v_head_dim", r.v_head_dim, align),
        )

    return check


def _cudnn(device: DeviceSpec) -> Callable[[AttentionRequest], Sequence[Reason]]:
    def check(r: AttentionRequest) -> list[Reason]:
        return gather(
            _common(r, _HALF),
            architecture(device, _CUDNN_CUDA, why="cuDNN's fused attention"),
            limit("window", r.window, "0", is_met=r.window == 0),
            at_most("head_dim", r.head_dim, 128),
            at_most("v_head_dim", r.v_head_dim, 128),
            multiple("head_dim", r.head_dim, 8),
            multiple("v_head_dim", r.v_head_dim, 8),
        )

    return check


def _any(r: AttentionRequest) -> list[Reason]:
    return _common(r, _FLOAT)


def _aten(name: str) -> tuple[Leaf, ...]:
    return (Leaf(kind="aten_op", name=f"aten::{name}"),)


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """The variants that torch has for the platform; elsewhere what its own torch dispatches to."""
    if device.backend == "nvidia":
        names: tuple[str, ...] = ("flash", "efficient", "cudnn", "math")
    elif device.backend == "amd":
        names = ("flash", "math")
    else:
        names = ("platform",)
    offers = _offers(device)
    return on_device((offers[name] for name in names), op, device)


def _offers(device: DeviceSpec) -> dict[str, Offer]:
    def offer(
        name: str,
        summary: str,
        check: Callable[[Any], Sequence[Reason]],
        leaf: str,
        work: Callable[[Any, int], Work],
    ) -> Offer:
        return Offer(
            op="attention",
            implementation=f"torch_sdpa_{name}",
            tier=Tier.PORTABLE,
            summary=f"copies keys and values out of their blocks, then {summary}",
            check=check,
            load=_loader(name),
            leaf=_aten(leaf),
            work=work,
        )

    return {
        "flash": offer(
            "flash",
            "torch's FlashAttention kernel",
            _flash(device),
            "_scaled_dot_product_flash_attention",
            _work,
        ),
        "efficient": offer(
            "efficient",
            "torch's memory-efficient kernel (CUTLASS)",
            _efficient(device),
            "_scaled_dot_product_efficient_attention",
            _work,
        ),
        "cudnn": offer(
            "cudnn",
            "cuDNN's fused kernel",
            _cudnn(device),
            "_scaled_dot_product_cudnn_attention",
            _work,
        ),
        "math": offer(
            "math",
            "two products and a softmax in torch",
            _any,
            "_scaled_dot_product_attention_math",
            _math_work,
        ),
        "platform": offer(
            "platform",
            "what this platform's torch dispatches SDPA to",
            _any,
            "scaled_dot_product_attention",
            _work,
        ),
    }


def _loader(variant: str) -> Callable[[], Bind]:
    def load() -> Bind:
        def bind(
            request: AttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
        ) -> Kernel:
            return _paged(request, _attend(variant, request, scale))

        return bind

    return load


def bind_platform(request: AttentionRequest, *, scale: float) -> Kernel:
    """Attention over pages by whatever torch dispatches to on the tensors' device."""
    return _paged(request, _attend("platform", request, scale))


def _paged(request: AttentionRequest, attend: Attend) -> Kernel:
    """`kernel(q, k_cache, v_cache, meta) -> out` over one sequence after the other."""

    def kernel(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        out = q.new_empty((q.shape[0], request.num_heads * request.v_head_dim))
        starts = meta.query_start_loc.tolist()
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            start, end = starts[i], starts[i + 1]
            if end == start:
                continue
            blocks = meta.block_table[i, : -(-seq_len // request.block_size)].long()
            rows = q[start:end].reshape(1, end - start, request.num_heads, request.head_dim)
            keys = k_cache[blocks].flatten(0, 1)[None, :seq_len].transpose(1, 2)
            values = v_cache[blocks].flatten(0, 1)[None, :seq_len].transpose(1, 2)
            result = attend(rows.transpose(1, 2), keys, values)
            out[start:end] = result.transpose(1, 2).reshape(end - start, -1)
        return out

    return kernel


def _attend(variant: str, request: AttentionRequest, scale: float) -> Attend:
    """`attend(q [1, H, Q, D], k [1, Hk, S, D], v) -> [1, H, Q, Dv]` by one variant of torch's."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # This operator aligns a causal mask to the last key, which is what a context needs.
        attended: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, request.is_causal and q.shape[2] > 1, scale=scale
        )[0]
        return attended

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        mask = _mask(request, q.shape[2], k.shape[2], q.device)
        if backend is None:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    if variant == "flash":
        return flash
    backend = {
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }.get(variant)
    return masked


def _mask(
    request: AttentionRequest, queries: int, keys: int, device: torch.device
) -> torch.Tensor | None:
    """True where a query sees a key; None where it sees all of them."""
    import torch

    if not request.is_causal or (queries == 1 and not request.window):
        return None
    query_at = torch.arange(keys - queries, keys, device=device)[:, None]
    key_at = torch.arange(keys, device=device)[None, :]
    seen = key_at <= query_at
    return seen & (key_at > query_at - request.window) if request.window else seen
