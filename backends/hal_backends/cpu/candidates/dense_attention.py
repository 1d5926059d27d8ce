"""Dense attention on the CPU: torch's fused kernel with its limits, two products for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hal.candidates import Bind, KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.dense_attention import DenseAttentionRequest, bytes_moved, flops, pairs
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.cpu.limits import any_feature, gather, limit, scope, vector_unit

_FLASH = (Leaf(kind="aten_op", name="aten::_scaled_dot_product_flash_attention_for_cpu"),)
_BMM = (Leaf(kind="aten_op", name="aten::bmm"),)

Check = Callable[[DenseAttentionRequest], Sequence[Reason]]


def _load_flash() -> Bind:
    from hal_kernels.dense_attention.torch_flash import bind_flash

    return bind_flash


def _load_spans() -> Bind:
    from hal_kernels.dense_attention.torch_flash import bind_flash_spans

    return bind_flash_spans


def _load_lists() -> Bind:
    from hal_kernels.dense_attention.torch_flash import bind_flash_lists

    return bind_flash_lists


def _load_products() -> Bind:
    from hal_kernels.dense_attention.products import bind_products

    return bind_products


def _fused(device: DeviceSpec, r: DenseAttentionRequest) -> list[Reason]:
    """What holds for torch's fused kernel whatever is around it."""
    units = {"bfloat16": ("amx_bf16", "avx512_bf16"), "float16": ("amx_fp16", "avx512_fp16")}
    return gather(
        scope("dtype", r.dtype, ("float32", "bfloat16", "float16")),
        vector_unit(device),
        any_feature(device, *units[r.dtype]) if r.dtype in units else (),
        limit("softcap", r.softcap, "0", is_met=r.softcap == 0),
    )


def _head_sizes(r: DenseAttentionRequest, meant: str) -> list[Reason]:
    return scope("head sizes", "equal" if r.head_dim == r.v_head_dim else "unequal", (meant,))


def _whole(r: DenseAttentionRequest) -> list[Reason]:
    """No window and no list: each would leave most of what is read unused."""
    return gather(
        scope("window", "window" if r.window else "none", ("none",)),
        _lists(r, "none"),
    )


def _lists(r: DenseAttentionRequest, meant: str = "lists") -> list[Reason]:
    return scope("lists", "lists" if r.list_width else "none", (meant,))


def _as_the_op_needs(r: DenseAttentionRequest, tokens: int) -> Work | None:
    return None


def _every_key(r: DenseAttentionRequest, tokens: int) -> Work:
    """The pairs of all keys, listed or not."""
    whole = pairs(dataclasses.replace(r, list_width=0), tokens)
    share = max(1.0, whole / max(1.0, pairs(r, tokens)))
    return Work(flops=flops(r, tokens) * share, bytes=bytes_moved(r, tokens), unit=r.dtype)


def _scores(r: DenseAttentionRequest, tokens: int) -> Work:
    """Scores and weights in float32, written and read three times."""
    more = 4.0 * 6.0 * r.num_heads * pairs(r, tokens)
    return Work(flops=flops(r, tokens), bytes=bytes_moved(r, tokens) + more, unit=r.dtype)


def candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    def candidate(
        name: str,
        tier: Tier,
        summary: str,
        check: Check,
        load: Callable[[], Bind],
        leaf: tuple[Leaf, ...] = _FLASH,
        work: Callable[[DenseAttentionRequest, int], Work | None] = _as_the_op_needs,
    ) -> KernelCandidate:
        return KernelCandidate(
            name=f"cpu.dense_attention.{name}",
            op="dense_attention",
            tier=tier,
            summary=summary,
            not_supported_reasons=check,
            load=load,
            leaf=leaf,
            work=work,
        )

    return (
        candidate(
            "flash",
            Tier.NATIVE,
            "torch's fused kernel; grouped heads as they are, sinks by its denominators",
            lambda r: gather(_fused(device, r), _whole(r), _head_sizes(r, "equal")),
            _load_flash,
        ),
        candidate(
            "flash_padded",
            Tier.TUNED,
            "the fused kernel with zeros added to the smaller of head_dim and v_head_dim",
            lambda r: gather(
                _head_sizes(r, "unequal"),
                _fused(device, r),
                _whole(r),
            ),
            _load_flash,
        ),
        candidate(
            "flash_spans",
            Tier.NATIVE,
            "the fused kernel for each block of queries over the keys that its window shows",
            lambda r: gather(
                scope("window", "window" if r.window else "none", ("window",)),
                _fused(device, r),
                scope("mask", r.mask, ("bool",)),
                _lists(r, "none"),
            ),
            _load_spans,
        ),
        candidate(
            "flash_gathered",
            Tier.TUNED,
            "gathers the listed keys of the one query of each sequence, then the fused kernel",
            lambda r: gather(
                _lists(r),
                scope("phase", r.phase, ("decode",)),
                _fused(device, r),
            ),
            _load_lists,
        ),
        candidate(
            "flash_masked_lists",
            Tier.PORTABLE,
            "the fused kernel over every key; the lists only hide the others",
            lambda r: gather(_lists(r), _fused(device, r)),
            _load_lists,
            work=_every_key,
        ),
        candidate(
            "products",
            Tier.PORTABLE,
            "two batched products with scores in memory; softcap and all else",
            lambda r: gather(
                scope("dtype", r.dtype, ("float32", "bfloat16", "float16")), vector_unit(device)
            ),
            _load_products,
            _BMM,
            _scores,
        ),
    )
