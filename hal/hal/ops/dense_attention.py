"""Attention over dense keys and values with any mask: what a model outside our engine asks for.

Grouped-query heads without expansion (https://arxiv.org/abs/2305.13245), a boolean mask or an added
bias, per-head sinks (https://arxiv.org/abs/2309.17453, as a logit in the denominator), soft-capped
scores (https://arxiv.org/abs/2408.00118) and lists of keys that an indexer chose
(https://arxiv.org/abs/2512.02556). The engine's own models use `attention`, over a paged cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.checks import entries_read, one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

MaskKind = Literal["none", "bool", "bias"]
MASK_KINDS: tuple[MaskKind, ...] = ("none", "bool", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseAttentionRequest(OpRequest):
    """Attention of `num_heads` query heads over `num_kv_heads` heads of keys and values.

    is_causal: a query sees no later key. Without a mask the kernel sees to it, the last query at
    the last key; a mask ("bool": True is seen; "bias": added to the scores) holds it already.
    window: keys that a query sees at most, which the mask holds already; 0 is all. list_width:
    most entries of a query's list of distinct keys, on top of the mask; 0 is no list. softcap: c of
    c*tanh(s/c); 0 is none. context_tokens: what estimates assume. Raises RequestError if
    inconsistent.
    """

    op: ClassVar[str] = "dense_attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    mask: MaskKind = "none"
    is_causal: bool = True
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    list_width: int = 0
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        heads = f"{self.num_heads} and {self.num_kv_heads}"
        least = f"{self.window}, {self.softcap} and {self.list_width}"
        require(
            "dense_attention request",
            *positive(
                num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, v_head_dim=self.v_head_dim
            ),
            (
                "num_heads a multiple of num_kv_heads",
                heads,
                self.num_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            ),
            one_of("mask", self.mask, MASK_KINDS),
            (
                "window, softcap and list_width >= 0",
                least,
                min(self.window, self.softcap, self.list_width) >= 0,
            ),
            ("a mask for a window", self.mask, not self.window or self.mask != "none"),
        )


def reference(
    request: DenseAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    """Golden attention: kernel(q [B, H, Q, D], k [B, Hk, S, D], v [B, Hk, S, Dv], mask, lists) ->
    [B, Q, H, Dv], in float32 (float64 for float64 inputs).

    mask: bool or float, broadcast to [B, H, Q, S]; lists: int [B, Q, list_width], where what is out
    of range is padding; both None where the request has none. A query that sees no key gets zeros.
    Raises ValueError if sinks, mask or lists are not what the request says.
    """
    check_sinks(request, sinks)

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        lists: torch.Tensor | None = None,
    ) -> torch.Tensor:
        import torch

        check_call(request, mask, lists)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        groups = request.num_heads // request.num_kv_heads
        keys = k.to(dtype).repeat_interleave(groups, dim=1)
        values = v.to(dtype).repeat_interleave(groups, dim=1)
        scores = torch.einsum("bhqd,bhkd->bhqk", q.to(dtype), keys) * scale
        if request.softcap:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        if request.mask == "bias" and mask is not None:
            scores = scores + mask
        hidden = hidden_keys(request, q.shape[2], k.shape[2], mask, lists, q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("bhqk,bhkd->bqhd", _weights(scores, sinks), values).to(q.dtype)

    return kernel


def check_sinks(request: DenseAttentionRequest, sinks: torch.Tensor | None) -> None:
    """Raises ValueError if there are sinks and the request has none, or the reverse."""
    if (sinks is not None) != request.has_sinks:
        raise ValueError(
            f"dense_attention: required sinks as has_sinks={request.has_sinks} says, "
            f"found {'none' if sinks is None else list(sinks.shape)}"
        )


def check_call(
    request: DenseAttentionRequest, mask: torch.Tensor | None, lists: torch.Tensor | None
) -> None:
    """Raises ValueError if mask or lists are not of the kind that the request says."""
    kind = "none"
    if mask is not None:
        kind = "bias" if mask.is_floating_point() else "bool"
    if kind != request.mask:
        raise ValueError(f"dense_attention: required mask {request.mask!r}, found {kind!r}")
    width = 0 if lists is None else lists.shape[-1]
    if width > request.list_width or bool(width) != bool(request.list_width):
        raise ValueError(
            f"dense_attention: required lists of {request.list_width} keys, found {width}"
        )


def hidden_keys(
    request: DenseAttentionRequest,
    queries: int,
    keys: int,
    mask: torch.Tensor | None,
    lists: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """bool, True where a query does not see a key, broadcast to [B, H, Q, S]; None: it sees all."""
    import torch

    hidden = None
    if request.mask == "bool" and mask is not None:
        hidden = ~mask
    elif request.mask == "none" and request.is_causal and queries > 1:
        query_at = torch.arange(keys - queries, keys, device=device)[:, None]
        hidden = torch.arange(keys, device=device)[None, :] > query_at
    if lists is not None:
        others = ~listed_keys(lists, keys)
        hidden = others if hidden is None else hidden | others
    return hidden


def listed_keys(lists: torch.Tensor, keys: int) -> torch.Tensor:
    """bool [B, 1, Q, S]: which keys the lists [B, Q, K] name; out of range is padding."""
    import torch

    is_key = (lists >= 0) & (lists < keys)
    named = torch.zeros((*lists.shape[:2], keys + 1), dtype=torch.bool, device=lists.device)
    named.scatter_(2, torch.where(is_key, lists, keys).long(), True)
    return named[:, None, :, :keys]


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    import torch

    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1)
        extra = extra.expand(scores.shape[0], -1, scores.shape[2], 1)
        return torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
    seen = (scores != float("-inf")).any(dim=-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)


def pairs(request: DenseAttentionRequest, tokens: int) -> float:
    """Query-key pairs of one call: decode sees the context, prefill is one whole prompt."""
    most = min((n for n in (request.window, request.list_width) if n), default=0)
    if request.is_causal or request.phase == "decode":
        return entries_read(request.phase, tokens, request.context_tokens, most=most)
    return float(tokens * (min(tokens, most) if most else tokens))


def flops(request: DenseAttentionRequest, tokens: int) -> float:
    return (
        2.0 * request.num_heads * (request.head_dim + request.v_head_dim) * pairs(request, tokens)
    )


def bytes_moved(request: DenseAttentionRequest, tokens: int) -> float:
    size = DTYPE_BYTES[request.dtype]
    kv_row = request.num_kv_heads * (request.head_dim + request.v_head_dim)
    rows = pairs(request, tokens) if request.phase == "decode" else float(tokens)
    q_and_out = tokens * request.num_heads * (request.head_dim + request.v_head_dim)
    return (kv_row * rows + q_and_out) * size


FAMILY = OpFamily(
    name="dense_attention",
    request_type=DenseAttentionRequest,
    summary="Attention over dense keys and values with a mask, for models outside the engine",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
