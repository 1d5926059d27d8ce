"""Attention of a model as requests: which forms a call site can have, and which one a call is.

One site takes whole prompts and single tokens, with and without a mask, so each is planned for all
of these; what the rehearsal saw decides the heads, the sinks, the window and the lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.binding import BoundOp, BoundOps
from hal.errors import RoutingError
from hal.integrations.call_places import (
    Site,
    dtype_name,
    refuse_gradients,
    run_bound,
    site_of,
    token_range,
)
from hal.ops.dense_attention import DenseAttentionRequest, MaskKind
from hal.ops.request import Phase

_SUFFIX: dict[MaskKind, str] = {"none": "", "bool": ".masked", "bias": ".biased"}
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of one call, as every model passes them.

    q [B, H, Q, D], k [B, Hk, S, D], v [B, Hk, S, Dv]; mask bool or float, [B or 1, H or 1, Q, S];
    lists int [B, Q, K]; sinks [H].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    scale: float | None = None
    is_causal: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    lists: torch.Tensor | None = None

    @property
    def kind(self) -> MaskKind:
        if self.mask is None:
            return "none"
        return "bias" if self.mask.is_floating_point() else "bool"

    @property
    def phase(self) -> Phase:
        return "decode" if self.q.shape[2] == 1 else "prefill"

    @property
    def softmax_scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5 if self.scale is None else self.scale)


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionPlace:
    """One attention of the model. first: its first call in the rehearsal."""

    name: str
    first: AttentionCall
    widest: int = 1
    kinds: set[MaskKind] = field(default_factory=lambda: {"none", "bool"})
    is_causal: bool = False
    list_width: int = 0
    _ops: dict[tuple[MaskKind, Phase], BoundOp] = field(default_factory=dict, init=False)

    def note(self, call: AttentionCall) -> None:
        """Takes one call of the rehearsal into account. Raises RoutingError if it is another kind
        of attention than the first one."""
        if _facts(call) != _facts(self.first):
            raise _another(self.name, self.first, call)
        self.kinds.add(call.kind)
        self.is_causal = self.is_causal or call.is_causal
        width = 0 if call.lists is None else call.lists.shape[-1]
        self.list_width = max(self.list_width, width)

    def request(self, kind: MaskKind, phase: Phase, max_tokens: int) -> DenseAttentionRequest:
        first = self.first
        return DenseAttentionRequest(
            num_heads=first.q.shape[1],
            num_kv_heads=first.k.shape[1],
            head_dim=first.q.shape[3],
            v_head_dim=first.v.shape[3],
            dtype=dtype_name(first.q.dtype),
            mask=kind,
            is_causal=self.is_causal,
            window=first.window if kind != "none" else 0,
            softcap=first.softcap,
            has_sinks=first.sinks is not None,
            list_width=self.list_width,
            phase=phase,
            tokens=token_range(max_tokens, self.widest),
        )

    def sites(self, max_tokens: int) -> Iterator[Site]:
        for kind in sorted(self.kinds):
            for phase in _PHASES:
                yield site_of(self.name + _SUFFIX[kind], self.request(kind, phase, max_tokens))

    def bind(self, ops: BoundOps) -> None:
        sinks = self.first.sinks
        static: dict[str, Any] = {"scale": self.first.softmax_scale}
        if sinks is not None:
            static["sinks"] = sinks.detach()
        for kind in sorted(self.kinds):
            for phase in _PHASES:
                self._ops[kind, phase] = ops.bind(self.name + _SUFFIX[kind], phase, **static)

    def call(self, call: AttentionCall) -> torch.Tensor:
        """[B, Q, H, Dv]. Raises RoutingError for a call that the plan does not have."""
        refuse_gradients(self.name, call.q, call.k, call.v)
        if _facts(call) != _facts(self.first):
            raise _another(self.name, self.first, call)
        batch, _, queries, _ = call.q.shape
        if batch * queries == 0:
            return call.q.new_empty((batch, queries, call.q.shape[1], call.v.shape[3]))
        op = self._ops.get((call.kind, call.phase))
        if op is None:
            raise RoutingError(
                self.name,
                f"a mask of kind {' or '.join(sorted(self.kinds))}, which was planned",
                call.kind,
                "route with example_inputs that lead to it",
            )
        out: torch.Tensor = run_bound(
            self.name, op, batch * queries, call.q, call.k, call.v, call.mask, call.lists
        )
        return out


def _facts(call: AttentionCall) -> tuple[object, ...]:
    """What decides about kernels and does not change from call to call of one place."""
    return (
        call.q.shape[1],
        call.k.shape[1],
        call.q.shape[3],
        call.v.shape[3],
        dtype_name(call.q.dtype),
        call.softmax_scale,
        call.window,
        call.softcap,
        None if call.sinks is None else call.sinks.data_ptr(),
        call.lists is None,
    )


def _another(name: str, first: AttentionCall, call: AttentionCall) -> RoutingError:
    names = ("heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "scale", "window", "softcap")
    pairs = zip((*names, "sinks", "no lists"), _facts(first), _facts(call), strict=True)
    changed = [(what, one, other) for what, one, other in pairs if one != other]
    return RoutingError(
        name,
        "the attention that was planned: " + ", ".join(f"{w} {one}" for w, one, _ in changed),
        ", ".join(f"{what} {other}" for what, _, other in changed),
        "route the model again: it was changed, or this attention has several forms",
    )


class SeenMasks:
    """Masks of floats that only hide keys, as booleans. A model passes one mask to many layers, so
    the last few answers are kept as long as the masks live."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = []

    def as_boolean(self, mask: torch.Tensor) -> torch.Tensor:
        """The mask with True for what is seen; itself if it adds anything but 0 and "never"."""
        if not mask.is_floating_point():
            return mask if mask.dtype == torch.bool else mask != 0
        version = -1 if mask.is_inference() else mask._version
        for reference, seen_version, answer in self._known:
            if reference() is mask and seen_version == version:
                return answer
        seen = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min
        answer = seen if bool((seen | hidden).all()) else mask
        self._known = [(weakref.ref(mask), version, answer), *self._known[:3]]
        return answer


def request_of(call: AttentionCall) -> DenseAttentionRequest:
    """What one call asks for, exactly: for the rehearsal, which has no plan yet."""
    return DenseAttentionRequest(
        num_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1],
        head_dim=call.q.shape[3],
        v_head_dim=call.v.shape[3],
        dtype=dtype_name(call.q.dtype),
        mask=call.kind,
        is_causal=call.is_causal,
        softcap=call.softcap,
        has_sinks=call.sinks is not None,
        list_width=0 if call.lists is None else call.lists.shape[-1],
    )
