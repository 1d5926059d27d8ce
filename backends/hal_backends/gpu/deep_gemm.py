"""DeepGEMM: FP8 products with block scales, per expert too, and indexer scores over paged keys.

Limits after github.com/deepseek-ai/DeepGEMM (README, csrc/apis/{gemm,attention}.hpp): Hopper takes
float32 scales, Blackwell powers of two only, so float32 scales are rounded there. Kernels for
sm_12x are in the library's main branch and in no documented release, so they count as claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, SemanticNote
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest, GroupedGemmRequest, apply_epilogue
from hal.ops.index_logits import IndexLogitsRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import (
    claimed_architecture,
    gather,
    multiple,
    one_of,
    scope,
    software,
)
from hal_backends.gpu.offers import NOT_RUN, Offer, on_device
from hal_backends.gpu.paged import positions_of_tokens
from hal_backends.gpu.semantics import SCALES_TO_POWERS_OF_TWO
from hal_backends.gpu.torch_gemm_loaders import finished

if TYPE_CHECKING:
    import torch

_ARCHS = ("sm_90", "sm_100", "sm_103")
_BLACKWELL = ("sm_100", "sm_103", "sm_120")
_CLAIMED = ("sm_120",)
_BLOCKS = ("fp8_block128_a8", "fp8_block128_ue8m0_a8")
_INSTALL = "build github.com/deepseek-ai/DeepGEMM"
_REQUIRES = ("deep-gemm>=2.1",)
# Query heads that the indexer's kernels are written for, by architecture.
_INDEX_HEADS = {"sm_90": (32, 64), "sm_120": (16, 32, 64)}
_INDEX_HEADS_SM100 = (16, 32, 64, 128)


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    offers = (_dense(device), _grouped(device), _grouped_fp4(device), _logits(device))
    return on_device(offers, op, device)


def _installed(device: DeviceSpec) -> list[Reason]:
    return software(device, "deep-gemm", ">=2.1", install=_INSTALL)


def _arch(device: DeviceSpec, why: str) -> list[Reason]:
    return claimed_architecture(device, _ARCHS, _CLAIMED, why=why)


def _product(r: GemmRequest | GroupedGemmRequest, formats: Sequence[str]) -> list[Reason]:
    return gather(
        scope("weight format", r.weight_format.name, formats),
        scope("dtype", r.dtype, ("bfloat16",)),
        multiple("K", r.k, 128),
        multiple("N", r.n, 64),
    )


def _scale_notes(device: DeviceSpec, r: Any) -> Sequence[SemanticNote]:
    rounds = device.arch in _BLACKWELL and r.weight_format.scale_dtype == "float32"
    return (SCALES_TO_POWERS_OF_TWO,) if rounds else ()


def _dense(device: DeviceSpec) -> Offer:
    return Offer(
        op="gemm",
        implementation="deep_gemm",
        tier=Tier.NATIVE,
        summary=f"DeepGEMM's FP8 product with 128x128 blocks, compiled at run time; {NOT_RUN}",
        check=lambda r: gather(
            _product(r, _BLOCKS), _arch(device, "wgmma or tcgen05"), _installed(device)
        ),
        load=_load_dense,
        leaf=(Leaf(kind="kernel", name="fp8_gemm"),),
        notes=lambda r: _scale_notes(device, r),
        requires=_REQUIRES,
        is_graph_safe=True,
    )


def _grouped(device: DeviceSpec) -> Offer:
    return Offer(
        op="grouped_gemm",
        implementation="deep_gemm",
        tier=Tier.NATIVE,
        summary=f"DeepGEMM's FP8 product per expert, rows padded to its tiles; {NOT_RUN}",
        check=lambda r: gather(
            _product(r, _BLOCKS), _arch(device, "wgmma or tcgen05"), _installed(device)
        ),
        load=_load_grouped(fp4=False),
        leaf=(Leaf(kind="kernel", name="m_grouped_contiguous"),),
        notes=lambda r: _scale_notes(device, r),
        requires=_REQUIRES,
    )


def _grouped_fp4(device: DeviceSpec) -> Offer:
    return Offer(
        op="grouped_gemm",
        implementation="deep_gemm_fp8_fp4",
        tier=Tier.NATIVE,
        summary=f"DeepGEMM's product of FP8 rows and FP4 experts; {NOT_RUN}",
        check=lambda r: gather(
            _product(r, ("mxfp4_a8",)),
            claimed_architecture(
                device, ("sm_100", "sm_103"), _CLAIMED, why="mixed FP8 and FP4 of tcgen05"
            ),
            software(device, "deep-gemm", ">=2.4", install=_INSTALL),
        ),
        load=_load_grouped(fp4=True),
        leaf=(Leaf(kind="kernel", name="fp8_fp4"),),
        requires=("deep-gemm>=2.4",),
    )


def _logits(device: DeviceSpec) -> Offer:
    heads = _INDEX_HEADS.get(device.arch, _INDEX_HEADS_SM100)

    def check(r: IndexLogitsRequest) -> list[Reason]:
        return gather(
            scope("key_format", r.key_format, ("fp8_132",)),
            scope("dtype", r.dtype, ("float8_e4m3fn",)),
            scope("phase", r.phase, ("decode",)),
            _arch(device, "wgmma or tcgen05"),
            one_of("num_heads", r.num_heads, heads),
            one_of("head_dim", r.head_dim, (128,)),
            one_of("block_size", r.block_size, (64,)),
            _installed(device),
        )

    return Offer(
        op="index_logits",
        implementation="deep_gemm",
        tier=Tier.NATIVE,
        summary=f"DeepGEMM's FP8 scores over paged keys, without intermediates; {NOT_RUN}",
        check=check,
        load=_load_logits,
        leaf=(Leaf(kind="kernel", name="paged_mqa_logits"),),
        requires=_REQUIRES,
        is_graph_safe=True,
    )


def _load_dense() -> Bind:
    import deep_gemm

    from hal.ops.low_precision import decode_scale, quantize_groups

    def bind(
        request: GemmRequest, *, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> Kernel:
        kind = "ue8m0" if request.weight_format.scale_dtype == "ue8m0" else "float32"
        blocks = decode_scale(weight.scale, kind)

        def product(x: torch.Tensor) -> torch.Tensor:
            values, scales = quantize_groups(
                x, group_size=128, element="fp8_e4m3fn", scale_kind=kind
            )
            out = x.new_empty((x.shape[0], request.n))
            deep_gemm.fp8_gemm_nt((values, decode_scale(scales, kind)), (weight.data, blocks), out)
            return out

        return finished(request, product, bias)

    return bind


def padded_segments(
    expert_offsets: torch.Tensor, rows: int, align: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(position of each row int64 [rows], expert of each padded row int32 [P], -1 where none).

    Each expert's rows begin at a multiple of `align`; P bounds every distribution of the rows, so
    nothing waits for the counts.
    """
    import torch

    counts = expert_offsets.diff()
    ends = ((counts + align - 1) // align * align).cumsum(0)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    row = torch.arange(rows, device=expert_offsets.device)
    expert = torch.searchsorted(expert_offsets[1:].contiguous(), row, right=True)
    position = begins[expert] + row - expert_offsets[expert]
    total = -(-(rows + counts.shape[0] * (align - 1)) // align) * align
    owner = torch.full((total,), -1, dtype=torch.int32, device=row.device)
    owner[position] = expert.int()
    return position, owner


def _load_grouped(*, fp4: bool) -> Any:
    def load() -> Bind:
        import deep_gemm
        import torch

        from hal.ops.low_precision import decode_scale, quantize_groups

        def bind(request: GroupedGemmRequest, *, weight: Sequence[QuantizedWeight]) -> Kernel:
            kind = weight[0].format.scale_dtype
            stored = torch.stack([w.data for w in weight])
            scales = torch.stack([decode_scale(w.scale, kind) for w in weight])
            group_size, row_kind = (32, "ue8m0") if fp4 else (128, kind)
            align = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
            operator = (
                deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
                if fp4
                else deep_gemm.m_grouped_fp8_gemm_nt_contiguous
            )
            more = {"recipe_a": (1, 32), "recipe_b": (1, 32)} if fp4 else {}
            right = (stored.view(torch.int8) if fp4 else stored, scales)

            def kernel(x: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
                position, owner = padded_segments(expert_offsets, x.shape[0], align)
                rows = x.new_zeros((owner.shape[0], x.shape[1]))
                rows[position] = x
                values, row_scales = quantize_groups(
                    rows, group_size=group_size, element="fp8_e4m3fn", scale_kind=row_kind
                )
                out = x.new_empty((owner.shape[0], request.n))
                left = (values, decode_scale(row_scales, row_kind))
                operator(left, right, out, owner, **more)
                return apply_epilogue(request.epilogue, out[position], request.clamp)

            return kernel

        return bind

    return load


def _load_logits() -> Bind:
    import deep_gemm
    import torch

    def bind(request: IndexLogitsRequest, *, scale: float) -> Kernel:
        ratio = request.compress_ratio

        def kernel(
            q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, meta: AttentionMetadata
        ) -> torch.Tensor:
            entries = meta.max_seq_len // ratio
            seen = ((positions_of_tokens(meta, q.shape[0]) + 1) // ratio).int()
            rows = q.view(-1, 1, request.num_heads, request.head_dim)
            pages = key_cache.view(-1, request.block_size, 1, request.head_dim + 4)
            schedule = deep_gemm.get_paged_mqa_logits_metadata(
                seen, request.block_size, deep_gemm.get_num_sms()
            )
            logits: torch.Tensor = deep_gemm.fp8_paged_mqa_logits(
                rows, pages, weights * scale, seen, meta.block_table, schedule, entries, True
            )
            columns = torch.arange(entries, device=q.device)
            hidden = columns[None, :] >= seen[:, None]
            return logits[:, :entries].masked_fill(hidden, float("-inf"))

        return kernel

    return bind
