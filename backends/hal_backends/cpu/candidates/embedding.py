"""Embedding gather on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.embedding import EmbeddingRequest
from hal.tiers import Tier
from hal_backends.cpu.limits import gather, scope, vector_unit

if TYPE_CHECKING:
    import torch


def _load_jit() -> Bind:
    from hal_kernels.embedding.cpu import bind_embedding

    def bind(request: EmbeddingRequest, *, weight: torch.Tensor) -> Kernel:
        return bind_embedding(weight=weight)

    return bind


def _load_index_select() -> Bind:
    import torch

    def bind(request: EmbeddingRequest, *, weight: torch.Tensor) -> Kernel:
        def rows(ids: torch.Tensor) -> torch.Tensor:
            return torch.index_select(weight, 0, ids)

        return rows

    return bind


def candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.embedding.jit",
            op="embedding",
            tier=Tier.NATIVE,
            summary="copies rows with vector moves",
            not_supported_reasons=lambda r: gather(
                scope("dtype", r.dtype, ("float32", "bfloat16")), vector_unit(device)
            ),
            load=_load_jit,
            is_graph_safe=True,
            leaf=(
                Leaf(kind="symbol", name="hal_kernels.embedding"),
                Leaf(kind="instruction", name="vmovup|vmovdq"),
            ),
        ),
        KernelCandidate(
            name="cpu.embedding.index_select",
            op="embedding",
            # A gather is bound by memory, and index_select copies whole rows.
            tier=Tier.TUNED,
            summary="torch.index_select: copies rows",
            not_supported_reasons=lambda request: (),
            load=_load_index_select,
            leaf=(Leaf(kind="aten_op", name="aten::index_select"),),
        ),
    )
