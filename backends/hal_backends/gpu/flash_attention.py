"""FlashAttention 2 and 3 over the paged cache, and the vendors' builds of it.

Limits after the libraries' flash_api.cpp: 2 takes pages of a multiple of 256 tokens, 3 is written
with Hopper's instructions and takes any page. A vendor's build has the vendor's tag in its version,
and what it takes beyond the original is that vendor's own code's word.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal_backends.gpu.limits import (
    architecture,
    at_most,
    build_tag,
    flag,
    gather,
    limit,
    multiple,
    one_of,
    scope,
    software,
)
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device

if TYPE_CHECKING:
    import torch

_DTYPES = ("bfloat16", "float16")
# setup.py's FLASH_ATTN_CUDA_ARCHS: 80, 90, 100, 120. 86 and 89 run the code of 80, 103 that of 100.
_FA2_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
_FA3_ARCHS = ("sm_90",)
_PAGE_MULTIPLE = 256  # tokens of a page in the original's version 2


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorBuild:
    """A vendor's own build of FlashAttention, or its library with the same functions.

    distribution, tag: what its version looks like ("+metax"; "" for a library of the vendor's
    own). module: where its function is imported from, interface: whose arguments it takes, those of
    the original's version 2 ("fa2", "vllm" for vLLM's form of it) or 3 ("fa3"). page_multiple: of
    tokens, as the vendor's serving plug-in uses it; 0 if nobody says, then the original's rule is
    known to hold and anything else is claimed at best. install: where it comes from. archs: that
    it is written for, all of the vendor's if none are named.
    """

    distribution: str
    tag: str
    install: str
    module: str = "flash_attn"
    interface: Literal["fa2", "vllm", "fa3"] = "fa2"
    page_multiple: int = 0
    archs: tuple[str, ...] = ()


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """The original library, on NVIDIA."""
    return on_device((_fa2(device), _fa3(device)), op, device)


def vendor_build(build: VendorBuild) -> Callable[[str, DeviceSpec], Sequence[KernelCandidate]]:
    """The library of candidates of one vendor's build."""

    def of_vendor(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        return on_device((_vendor(device, build),), op, device)

    return of_vendor


def _common(r: AttentionRequest) -> list[Reason]:
    return gather(
        scope("dtype", r.dtype, _DTYPES),
        limit("kv_dtype", r.kv_dtype, f"dtype ({r.dtype})", is_met=r.kv_dtype == r.dtype),
        flag("sinks", r.has_sinks, required=False),
        at_most("head_dim", r.head_dim, 256),
        multiple("head_dim", r.head_dim, 8),
    )


def _same_head_dims(r: AttentionRequest) -> list[Reason]:
    return limit(
        "v_head_dim", r.v_head_dim, f"head_dim ({r.head_dim})", is_met=r.v_head_dim == r.head_dim
    )


def _fa2(device: DeviceSpec) -> Offer:
    return Offer(
        op="attention",
        implementation="flash_attention_2",
        # Hopper's and data-centre Blackwell's own instructions are left unused by version 2.
        tier=Tier.NATIVE if device.arch in ("sm_80", "sm_86", "sm_89", "sm_120") else Tier.TUNED,
        summary=f"FlashAttention 2 over pages; {NOT_RUN}",
        check=lambda r: gather(
            _common(r),
            _same_head_dims(r),
            architecture(device, _FA2_ARCHS, why="the library's kernels are compiled for them"),
            multiple("block_size", r.block_size, _PAGE_MULTIPLE),
            software(device, "flash-attn", ">=2.7,<3"),
        ),
        load=_load_2,
        leaf=(Leaf(kind="kernel", name="flash_fwd"),),
        requires=("flash-attn>=2.7,<3",),
        is_graph_safe=True,
    )


def _vendor(device: DeviceSpec, build: VendorBuild) -> Offer:
    def installed() -> list[Reason]:
        if build.tag:
            return build_tag(device, build.distribution, build.tag, install=build.install)
        return software(device, build.distribution, install=build.install)

    return Offer(
        op="attention",
        implementation="vendor_flash_attention",
        tier=Tier.NATIVE,
        summary=f"{build.distribution}, the vendor's FlashAttention over pages; {NOT_RUN}",
        check=lambda r: gather(
            _common(r),
            _same_head_dims(r),
            limit("softcap", r.softcap, "0", is_met=r.softcap == 0),
            _vendor_pages(r, build),
            architecture(device, build.archs, why="the build's own") if build.archs else (),
            installed(),
        ),
        load=_loader(build),
        leaf=(Leaf(kind="kernel", name="flash_fwd"),),
        requires=(build.distribution,),
        is_graph_safe="graph_capture" in device.features,
    )


def _vendor_pages(r: AttentionRequest, build: VendorBuild) -> list[Reason]:
    if build.page_multiple:
        return multiple("block_size", r.block_size, build.page_multiple)
    if r.block_size % _PAGE_MULTIPLE == 0:
        return []
    return [
        Reason(
            what="block_size",
            required=f"a multiple of {_PAGE_MULTIPLE} as in the original, or this size verified",
            found=f"{r.block_size}, about which {build.distribution} says nothing public",
            kind=ReasonKind.UNVERIFIED,
        )
    ]


def _fa3(device: DeviceSpec) -> Offer:
    def head_dims(r: AttentionRequest) -> list[Reason]:
        if r.v_head_dim == r.head_dim:
            return []
        return one_of("head_dim and v_head_dim", (r.head_dim, r.v_head_dim), ((192, 128),))

    return Offer(
        op="attention",
        implementation="flash_attention_3",
        tier=Tier.NATIVE,
        summary=f"FlashAttention 3 on Hopper's warp-group matrix instructions; {NOT_RUN}",
        check=lambda r: gather(
            _common(r),
            head_dims(r),
            architecture(device, _FA3_ARCHS, why="wgmma and TMA of Hopper"),
            software(
                device,
                "flash-attn-3",
                ">=3.0.0b1",
                install="build hopper/ of github.com/Dao-AILab/flash-attention",
            ),
        ),
        load=_load_3,
        leaf=(Leaf(kind="kernel", name="flash_fwd"), Leaf(kind="instruction", name="wgmma")),
        requires=("flash-attn-3",),
        is_graph_safe=True,
    )


def _window(request: AttentionRequest) -> tuple[int, int]:
    """The library counts the keys before a query's own; -1 is all of them."""
    return (request.window - 1, 0) if request.window else (-1, -1)


def _loader(build: VendorBuild) -> Callable[[], Bind]:
    return lambda: _bound(build.module, build.interface)


def _load_2() -> Bind:
    return _bound("flash_attn", "fa2")


def _load_3() -> Bind:
    return _bound("flash_attn_interface", "fa3")


def _bound(module: str, interface: str) -> Bind:
    library = importlib.import_module(module)
    name = "flash_attn_with_kvcache" if interface == "fa3" else "flash_attn_varlen_func"
    function = getattr(library, name)

    def bind(
        request: AttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        options = {
            "softmax_scale": scale,
            "causal": request.is_causal,
            "window_size": _window(request),
        }
        if request.softcap:
            options["softcap"] = request.softcap

        def kernel(
            q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
        ) -> torch.Tensor:
            result: Any = function(
                q.reshape(-1, request.num_heads, request.head_dim),
                k_cache,
                v_cache,
                **options,
                **_lengths(interface, meta),
            )
            out: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return out.flatten(1)

        return kernel

    return bind


def _lengths(interface: str, meta: AttentionMetadata) -> dict[str, Any]:
    """The step's metadata by the names that each interface has for it."""
    queries = {"cu_seqlens_q": meta.query_start_loc, "max_seqlen_q": meta.max_query_len}
    if interface == "fa3":
        return queries | {"cache_seqlens": meta.seq_lens, "page_table": meta.block_table}
    keys = {"max_seqlen_k": meta.max_seq_len, "block_table": meta.block_table}
    if interface == "vllm":
        return queries | keys | {"seqused_k": meta.seq_lens}
    return queries | keys | {"cu_seqlens_k": _ends(meta.seq_lens)}


def _ends(seq_lens: torch.Tensor) -> torch.Tensor:
    """int32 [B+1]: running sums of the lengths, from 0."""
    import torch

    ends = torch.zeros(seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
    ends[1:] = seq_lens.cumsum(0)
    return ends
