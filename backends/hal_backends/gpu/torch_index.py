"""The sparse-attention indexer in torch: scores of all entries as one intermediate, and topk.

Right everywhere, and the reason why some stacks are slow without saying so: the product of T
queries, H heads and S entries is written to memory in full before it is summed over the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_logits import flops as logits_flops
from hal.ops.index_top_k import IndexTopKRequest
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import gather, limit, scope
from hal_backends.gpu.offers import Offer, on_device, work_of
from hal_backends.gpu.semantics import UNSTABLE_TIES

if TYPE_CHECKING:
    import torch

_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz")


def _load_reference(op: str) -> Any:
    def load() -> Bind:
        from hal.ops import CATALOGUE

        return CATALOGUE[op].reference

    return load


def _logits_work(r: IndexLogitsRequest, tokens: int) -> Work:
    """Each query-entry pair has one float32 per head: written, read by the ReLU, written and read
    again by the sum. The keys are widened to float32 first."""
    pairs = logits_flops(r, tokens) / (2.0 * r.num_heads * (r.head_dim + 1))
    keys = 4.0 * pairs * r.head_dim if r.phase == "decode" else 4.0 * tokens * r.head_dim
    return work_of(r, tokens, unit="float32", more_bytes=16.0 * pairs * r.num_heads + 2.0 * keys)


def _top_k(r: IndexTopKRequest) -> list[Reason]:
    return gather(
        limit("pool_size", r.pool_size, "1", is_met=r.pool_size == 1),
        limit("candidate_blocks", r.candidate_blocks, "0", is_met=r.candidate_blocks == 0),
    )


def _load_top_k() -> Bind:
    import torch
    import torch.nn.functional as functional

    def bind(request: IndexTopKRequest) -> Kernel:
        def kernel(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
            columns = torch.arange(logits.shape[1], device=logits.device)
            hidden = (columns[None, :] >= visible[:, None]) | logits.isnan()
            scores = logits.masked_fill(hidden, float("-inf"))
            values, indices = scores.topk(min(request.top_k, scores.shape[1]), dim=-1)
            chosen = indices.masked_fill(values == float("-inf"), -1).int()
            return functional.pad(chosen, (0, request.top_k - chosen.shape[1]), value=-1)

        return kernel

    return bind


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    return on_device(_OFFERS, op, device)


_OFFERS: tuple[Offer, ...] = (
    Offer(
        op="index_logits",
        implementation="torch_einsum",
        tier=Tier.PORTABLE,
        summary="plain torch in float32, with one score per head, query and entry in memory",
        check=lambda r: gather(scope("dtype", r.dtype, _DTYPES)),
        load=_load_reference("index_logits"),
        leaf=(Leaf(kind="aten_op", name="aten::bmm"),),
        work=_logits_work,
    ),
    Offer(
        op="index_top_k",
        implementation="torch_topk",
        tier=Tier.PORTABLE,
        summary="torch.topk over masked scores",
        check=_top_k,
        load=_load_top_k,
        leaf=(Leaf(kind="aten_op", name="aten::topk"),),
        notes=lambda r: (UNSTABLE_TIES,),
    ),
)
