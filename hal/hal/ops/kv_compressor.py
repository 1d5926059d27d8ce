"""Compression of a window of tokens into one entry by gated pooling (DeepSeek V4, V4.1).

Entry w = rms_norm(sum_j softmax_j(gate_j + position_bias_j) * kv_j), per channel, over the tokens
of window w. Overlapping: kv and gate have two halves [a | b], and entry w pools the a-halves of
window w-1 with the b-halves of window w.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.checks import positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.masking import accumulation_dtype
from hal.ops.request import FLOAT_TOLERANCES, ROUNDING_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCompressorRequest(OpRequest):
    """kv, gate [T, W] of the new tokens -> entries [N, head_dim] of the windows that they complete.

    W is head_dim, or 2 * head_dim where overlapping. Windows that are open at the end of a step
    live in a state in float32. has_norm False (GLM-5.3-Flash) leaves out the norm. graph_mode
    "graph": N is `most_entries`, which does not depend on what is on the device; the rows after the
    entries are zero. Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "kv_compressor"

    ratio: int
    head_dim: int
    is_overlapping: bool
    dtype: str
    has_norm: bool = True

    def __post_init__(self) -> None:
        require("kv_compressor request", *positive(ratio=self.ratio, head_dim=self.head_dim))

    @property
    def width(self) -> int:
        """Columns of kv and of gate."""
        return self.head_dim * (2 if self.is_overlapping else 1)

    @property
    def state_rows(self) -> int:
        """Tokens that the state of a sequence holds: a window, two where they overlap."""
        return self.ratio * (2 if self.is_overlapping else 1)

    def most_entries(self, tokens: int, sequences: int) -> int:
        """Entries that a step of so many tokens of so many sequences can complete: each sequence
        one for every `ratio` of its tokens, and one for what is left of them."""
        return min(tokens, (tokens + sequences * (self.ratio - 1)) // self.ratio)


@dataclass(slots=True)
class CompressorMetadata:
    """Which rows belong to which sequence, and where its state is. All int32, on the device.

    query_start_loc: [B+1], seq_lens: [B] (including the new tokens), state_slots: [B].
    entry_start_loc: [B+1], of the entries that the step completes: seq_len // ratio less those of
    the context before.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor
    entry_start_loc: torch.Tensor


def reference(
    request: KvCompressorRequest,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    position_bias: torch.Tensor | None = None,
) -> Callable[..., torch.Tensor]:
    """Golden pooling: kernel(kv, gate, state, meta) -> entries [N, head_dim], in float32 (float64
    for float64 kv); the state is brought up to date in place.

    norm_weight: [head_dim], where the request has a norm. position_bias: [ratio, W], added to the
    gate of a token by its place in its window. state: floating [slots, state_rows, 2, W], row
    p % state_rows holds kv and biased gate of position p. Rotation and storage of the entries are
    ops of their own.
    Raises ValueError if a norm_weight is given and the request has no norm, or the reverse.
    """
    import torch

    if (norm_weight is not None) != request.has_norm:
        raise ValueError(
            f"kv_compressor: required a norm_weight as has_norm={request.has_norm} says, "
            f"found {'none' if norm_weight is None else list(norm_weight.shape)}"
        )

    def kernel(
        kv: torch.Tensor, gate: torch.Tensor, state: torch.Tensor, meta: CompressorMetadata
    ) -> torch.Tensor:
        dtype = accumulation_dtype(kv)
        entries = []
        starts = meta.query_start_loc.tolist()
        for i, (seq_len, slot) in enumerate(
            zip(meta.seq_lens.tolist(), meta.state_slots.tolist(), strict=True)
        ):
            span = slice(starts[i], starts[i + 1])
            at = torch.arange(seq_len - (span.stop - span.start), seq_len, device=kv.device)
            if not len(at):
                continue
            new = torch.stack((kv[span], gate[span]), dim=1).to(dtype)
            if position_bias is not None:
                new[:, 1] += position_bias.to(dtype)[at % request.ratio]
            rows = _with_open_windows(request, new, state[slot].to(dtype), at)
            entries += _pooled(request, rows, at)
            last = slice(-request.state_rows, None)
            state[slot, at[last] % request.state_rows] = new[last].to(state.dtype)
        count = len(entries)
        if request.graph_mode == "graph":
            count = request.most_entries(kv.shape[0], meta.seq_lens.shape[0])
        out = kv.new_zeros((count, request.head_dim))
        if not entries:
            return out
        pooled = torch.stack(entries)
        if norm_weight is not None:
            variance = pooled.square().mean(dim=-1, keepdim=True)
            pooled = pooled * torch.rsqrt(variance + eps) * norm_weight.to(dtype)
        out[: len(entries)] = pooled.to(kv.dtype)
        return out

    return kernel


def _first_needed(request: KvCompressorRequest, position: int) -> int:
    """The first position of the window of `position`, or of the one before where they overlap."""
    window = position // request.ratio - (1 if request.is_overlapping else 0)
    return max(0, window * request.ratio)


def _with_open_windows(
    request: KvCompressorRequest, new: torch.Tensor, state: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """The new rows behind the older ones that their windows pool, from `_first_needed` on."""
    import torch

    first = int(at[0])
    older = torch.arange(_first_needed(request, first), first, device=new.device)
    return torch.cat((state[older % request.state_rows], new))


def _pooled(
    request: KvCompressorRequest, rows: torch.Tensor, at: torch.Tensor
) -> list[torch.Tensor]:
    """One [head_dim] for each window that is complete now and was not before, without the norm."""
    import torch

    ratio, dim = request.ratio, request.head_dim
    start = _first_needed(request, int(at[0]))
    entries = []
    for window in range(int(at[0]) // ratio, (int(at[-1]) + 1) // ratio):
        own = rows[window * ratio - start : (window + 1) * ratio - start]
        if request.is_overlapping:
            before = rows[max(0, (window - 1) * ratio - start) : window * ratio - start]
            own = torch.cat((before[..., :dim], own[..., dim:]))
        entries.append((own[:, 1].softmax(dim=0) * own[:, 0]).sum(dim=0))
    return entries


def flops(request: KvCompressorRequest, tokens: int) -> float:
    """Exponential, sum, product and sum per pooled value, and the norm of each entry."""
    entries = tokens / request.ratio
    return entries * request.head_dim * (5.0 * request.state_rows + 4.0)


def bytes_moved(request: KvCompressorRequest, tokens: int) -> float:
    """New rows in, entries out, and the state: written by each token in decode and read back when
    a window closes; a prompt only leaves its last rows in it."""
    row = 2 * request.width
    entries = tokens / request.ratio
    new = tokens * row * DTYPE_BYTES[request.dtype]
    out = entries * request.head_dim * DTYPE_BYTES[request.dtype]
    if request.phase == "decode":
        read = entries * request.state_rows * 2 * request.head_dim * 4
        return new + out + tokens * row * 4 + read
    return new + out + min(tokens, request.state_rows) * row * 4


FAMILY = OpFamily(
    name="kv_compressor",
    request_type=KvCompressorRequest,
    summary="Gated pooling of windows of tokens into compressed entries",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    largest_errors={**ROUNDING_ERRORS, "float32": 2e-5},
)
