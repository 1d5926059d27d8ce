"""Embedding gather on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.embedding import EmbeddingRequest
from hal.tiers import Tier

if TYPE_CHECKING:
    import torch


def _load() -> Bind:
    import torch

    def bind(request: EmbeddingRequest, *, weight: torch.Tensor) -> Kernel:
        def gather(ids: torch.Tensor) -> torch.Tensor:
            return torch.index_select(weight, 0, ids)

        return gather

    return bind


def candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.embedding.index_select",
            op="embedding",
            # A gather is bound by memory, and index_select copies whole rows: nothing is left.
            tier=Tier.TUNED,
            summary="torch.index_select: copies rows",
            not_supported_reasons=lambda request: (),
            load=_load,
            leaf=(Leaf(kind="aten_op", name="aten::index_select"),),
        ),
    )
