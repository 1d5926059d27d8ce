"""A decoder layer of DeepSeek-V3.2 put together from the call sites that the engine plans for it.

The engine has the calls of this family and not yet the layer that makes them; this is the order of
the calls, for tests. Where the plan has one call for several up to some size, that one is made, as
the engine's own layers do. Between calls it moves memory, and does what no op has: the scale of an
index query goes into its weights, and the experts, the shared one and the residual are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hal.ops.attention import AttentionMetadata
from hal.ops.formats import QuantizedWeight
from hal.ops.quantized_weight import quantize_weight
from v32_model import (
    CONFIG,
    FP8,
    HEADS,
    INDEX_HEADS,
    NOPE,
    Q_RANK,
    RANK,
    ROPE,
    VALUE,
    rope_table,
)

PHASES = ("prefill", "decode")
INDEX_EPS = 1e-6


class Binder(Protocol):
    """What binds a call site: `BoundOps`, or the references."""

    def most_tokens(self, site: str, phase: str = "any") -> int: ...

    def bind(self, site: str, phase: str = "any", **static: Any) -> Callable[..., Any]: ...


@dataclass(slots=True)
class Rows:
    """The tokens of one phase. slots: int64. Tables of `meta` serve both caches."""

    phase: str
    x: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    meta: AttentionMetadata


@dataclass(slots=True)
class Step:
    """What a call of the layer gives: the layer's output, and what it chose on the way. logits: of
    the indexer, None where the choice is made without storing them."""

    out: torch.Tensor
    logits: torch.Tensor | None
    lists: torch.Tensor
    experts: torch.Tensor


@dataclass(slots=True)
class Normed:
    """Rows behind a norm. rounded: as the products behind take them, values with their scales
    unless these round by themselves. rows: as they are; None where nothing reads them."""

    rounded: Any
    rows: torch.Tensor | None
    residual: torch.Tensor | None


class V32Layer:
    """parameters: those of transformers' layer, by their names, as the checkpoint keeps them.
    dtype: of activations and of what is not quantised."""

    def __init__(
        self, binder: Binder, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        self._binder, self._parameters, self._dtype = binder, parameters, dtype
        self._ops: dict[tuple[str, str], Callable[..., Any]] = {}
        self._most: dict[tuple[str, str], int] = {}
        self._bind_attention()
        self._bind_indexer()
        self._bind_feed_forward()

    def _of(self, name: str) -> torch.Tensor:
        return self._parameters[name].to(self._dtype).contiguous()

    def _fp8(self, *names: str) -> QuantizedWeight:
        """The weight as stored: rounding values that are rounded already changes none of them."""
        return quantize_weight(torch.cat([self._parameters[name] for name in names]), FP8)

    def _bind(self, site: str, *phases: str, **static: Any) -> None:
        """Of the call sites that the plan has: one that another does the work of at every size is
        not there, nor is one for several that the plan did not take."""
        for phase in phases or ("any",):
            name = f"layers.0.{site}"
            most = self._binder.most_tokens(name, phase)
            if most:
                self._ops[site, phase] = self._binder.bind(name, phase, **static)
                self._most[site, phase] = most

    def _serves(self, site: str, n: int, phase: str = "any") -> bool:
        return n <= self._most.get((site, phase), 0)

    def _call(self, site: str, n: int, *args: Any, phase: str = "any") -> Any:
        return self._ops[site, phase](n, *args)

    def _bind_norm(self, site: str, name: str, rounding: str = "") -> None:
        static = {"weight": self._of(name), "eps": CONFIG["rms_norm_eps"]}
        self._bind(site, **static)
        if rounding:
            self._bind(f"{site}_quantize", **static)
            self._bind(rounding)

    def _bind_attention(self) -> None:
        own = "self_attn."
        self._bind_norm("input_norm", "input_layernorm.weight", "attention_input_quantize")
        latents = (own + "q_a_proj.weight", own + "kv_a_proj_with_mqa.weight")
        self._bind("qkv_a_proj", weight=self._fp8(*latents), bias=None)
        self._bind_norm("q_a_norm", own + "q_a_layernorm.weight", "q_a_quantize")
        self._bind("q_b_proj", weight=self._fp8(own + "q_b_proj.weight"), bias=None)
        self._bind_norm("kv_a_norm", own + "kv_a_layernorm.weight")
        table = rope_table()
        for site in ("q_rope", "k_rope"):
            self._bind(site, cos_sin_cache=table)
        self._bind("kv_write")
        weight = self._of(own + "kv_a_layernorm.weight")
        eps = CONFIG["rms_norm_eps"]
        self._bind("latent_kv_write", cos_sin_cache=table, row_weight=weight, eps=eps)
        heads = self._of(own + "kv_b_proj.weight").view(HEADS, NOPE + VALUE, RANK)
        self._bind("q_absorb", weight=heads[:, :NOPE].transpose(1, 2).contiguous())
        self._bind("v_absorb", weight=heads[:, NOPE:].contiguous())
        self._bind("attention", *PHASES, scale=(NOPE + ROPE) ** -0.5)
        self._bind("o_quantize")
        output = {"weight": self._fp8(own + "o_proj.weight"), "bias": None}
        self._bind("o_proj", **output)
        norm = self._of("post_attention_layernorm.weight")
        self._bind("o_proj_norm", norm_weight=norm, eps=eps, **output)

    def _bind_indexer(self) -> None:
        own, table = "self_attn.indexer.", rope_table()
        self._bind("indexer.k_proj", weight=self._fp8(own + "wk.weight"), bias=None)
        self._bind("indexer.q_proj", weight=self._fp8(own + "wq_b.weight"), bias=None)
        self._bind("indexer.weights_proj", weight=self._of(own + "weights_proj.weight"), bias=None)
        weight, bias = (self._of(f"{own}k_norm.{part}") for part in ("weight", "bias"))
        self._bind("indexer.k_norm", weight=weight, bias=bias, eps=INDEX_EPS)
        self._bind("indexer.rope", cos_sin_cache=table)
        self._bind("indexer.kv_write")
        self._bind(
            "indexer.rope_kv_write",
            cos_sin_cache=table,
            row_weight=weight,
            row_bias=bias,
            eps=INDEX_EPS,
        )
        self._bind("indexer.q_quantize")
        scale = (128 * INDEX_HEADS) ** -0.5
        self._bind("indexer.logits", *PHASES, scale=scale)
        self._bind("indexer.top_k", *PHASES)
        self._bind("indexer.selection", *PHASES, scale=scale)

    def _bind_feed_forward(self) -> None:
        self._bind_norm("post_norm", "post_attention_layernorm.weight", "shared.input_quantize")
        self._bind("router_proj", weight=self._of("mlp.gate.weight"), bias=None)
        bias = self._parameters["mlp.gate.e_score_correction_bias"]
        self._bind("router", bias=bias, expert_table=None)
        self._bind("experts.permute")
        for site, name in (("gate_up_proj", "gate_up_proj"), ("down_proj", "down_proj")):
            stack = self._parameters[f"mlp.experts.{name}"]
            self._bind(f"experts.{site}", weight=[quantize_weight(part, FP8) for part in stack])
        self._bind("experts.combine")
        own = "mlp.shared_experts."
        both = self._fp8(own + "gate_proj.weight", own + "up_proj.weight")
        for site in ("shared.gate_up_proj", "shared.gate_up_quantize"):
            self._bind(site, weight=both, bias=None)
        self._bind("shared.down_quantize")
        self._bind("shared.down_proj", weight=self._fp8(own + "down_proj.weight"), bias=None)

    def __call__(self, rows: Rows, kv_cache: torch.Tensor, index_cache: torch.Tensor) -> Step:
        n = rows.x.shape[0]
        normed = self._normed("input_norm", "attention_input_quantize", n, rows.x)
        attended, logits, lists = self._attention(n, normed, rows, kv_cache, index_cache)
        normed = self._projected(n, attended, rows.x)
        out, experts = self._feed_forward(n, normed)
        assert normed.residual is not None
        return Step(normed.residual + out, logits, lists, experts)

    def _normed(self, norm: str, rounding: str, n: int, *rows: torch.Tensor) -> Normed:
        """rows: x, and the residual that it is added into where the norm has one."""
        has_residual = len(rows) == 2
        if self._serves(f"{norm}_quantize", n):
            values, scales, *others = self._call(f"{norm}_quantize", n, *rows)
            residual = others.pop() if has_residual else None
            return Normed((values, scales), others[0] if others else None, residual)
        found = self._call(norm, n, *rows)
        y, residual = found if has_residual else (found, None)
        return Normed(self._rounded(rounding, n, y), y, residual)

    def _rounded(self, site: str, n: int, x: torch.Tensor) -> Any:
        return self._call(site, n, x) if self._serves(site, n) else x

    def _attention(
        self,
        n: int,
        normed: Normed,
        rows: Rows,
        kv_cache: torch.Tensor,
        index_cache: torch.Tensor,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor]:
        """What the output projection takes, and the choice as `_choose` gives it."""
        latents = self._call("qkv_a_proj", n, normed.rounded)
        q_latent, row = torch.split_with_sizes(latents, (Q_RANK, RANK + ROPE), 1)
        latent = self._normed("q_a_norm", "q_a_quantize", n, q_latent).rounded
        q = self._keep_row(n, self._call("q_b_proj", n, latent), row, rows, kv_cache)
        logits, lists = self._choose(n, normed, latent, rows, index_cache)
        query = self._absorbed(n, q.view(n, HEADS, NOPE + ROPE))
        out = self._call("attention", n, query, kv_cache, rows.meta, lists, phase=rows.phase)
        values = self._call("v_absorb", n, by_head(out.view(n, HEADS, RANK)), starts_of_heads(n))
        merged = values.view(HEADS, n, VALUE).transpose(0, 1).reshape(n, HEADS * VALUE)
        return self._rounded("o_quantize", n, merged), logits, lists

    def _projected(self, n: int, attended: Any, residual: torch.Tensor) -> Normed:
        """The output projection, its sum with the residual, and the norm behind it."""
        if self._serves("o_proj_norm", n):
            y, total = self._call("o_proj_norm", n, attended, residual)
            return Normed(self._rounded("shared.input_quantize", n, y), y, total)
        out = self._call("o_proj", n, attended)
        return self._normed("post_norm", "shared.input_quantize", n, out, residual)

    def _keep_row(
        self, n: int, q: torch.Tensor, row: torch.Tensor, rows: Rows, cache: torch.Tensor
    ) -> torch.Tensor:
        """q, rotated; the row of each token is normed, rotated and in the cache then."""
        positions, slots = rows.positions, rows.slots
        if self._serves("latent_kv_write", n):
            joined: torch.Tensor = self._call("latent_kv_write", n, q, row, positions, cache, slots)
            return joined
        normed = self._call("kv_a_norm", n, row[:, :RANK])
        row = torch.cat((normed, row[:, RANK:]), dim=1)
        self._call("k_rope", n, row, None, positions)
        self._call("kv_write", n, row, cache, slots)
        self._call("q_rope", n, q, None, positions)
        return q

    def _absorbed(self, n: int, q: torch.Tensor) -> torch.Tensor:
        """Queries of all heads in the latent space, with their rotated parts behind."""
        latent = self._call("q_absorb", n, by_head(q[..., :NOPE]), starts_of_heads(n))
        latent = latent.view(HEADS, n, RANK).transpose(0, 1)
        return torch.cat((latent, q[..., NOPE:]), dim=2).reshape(n, HEADS * (RANK + ROPE))

    def _choose(
        self, n: int, normed: Normed, latent: Any, rows: Rows, cache: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The scores of the indexer, unless nothing stores them, and the entries chosen by them."""
        key = self._call("indexer.k_proj", n, normed.rounded)
        query = self._call("indexer.q_proj", n, latent)
        weights = self._call("indexer.weights_proj", n, normed.rows)
        positions, phase = rows.positions, rows.phase
        if self._serves("indexer.rope_kv_write", n):
            query = self._call("indexer.rope_kv_write", n, query, key, positions, cache, rows.slots)
        else:
            key = self._call("indexer.k_norm", n, key)
            self._call("indexer.rope", n, query, key, positions)
            self._call("indexer.kv_write", n, key, cache, rows.slots)
        values, scales = self._call("indexer.q_quantize", n, query)
        scored = (values, weights * scales, cache, rows.meta)
        if self._serves("indexer.selection", n, phase):
            return None, self._call("indexer.selection", n, *scored, phase=phase)
        logits = self._call("indexer.logits", n, *scored, phase=phase)
        visible = (positions + 1).to(torch.int32)
        return logits, self._call("indexer.top_k", n, logits, visible, phase=phase)

    def _feed_forward(self, n: int, normed: Normed) -> tuple[torch.Tensor, torch.Tensor]:
        x = normed.rows
        weights, experts = self._call("router", n, self._call("router_proj", n, x))
        sorted_rows, offsets, source = self._call("experts.permute", n, x, experts)
        hidden = self._call("experts.gate_up_proj", n, sorted_rows, offsets)
        hidden = self._call("experts.down_proj", n, hidden, offsets)
        routed = self._call("experts.combine", n, hidden, source, weights)
        if self._serves("shared.gate_up_quantize", n):
            shared = self._call("shared.gate_up_quantize", n, normed.rounded)
        else:
            shared = self._call("shared.gate_up_proj", n, normed.rounded)
            shared = self._rounded("shared.down_quantize", n, shared)
        return routed + self._call("shared.down_proj", n, shared), experts


def by_head(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, width] as the rows of a grouped product, those of a head together."""
    return x.transpose(0, 1).reshape(-1, x.shape[2])


def starts_of_heads(n: int) -> torch.Tensor:
    return torch.arange(0, (HEADS + 1) * n, n)
