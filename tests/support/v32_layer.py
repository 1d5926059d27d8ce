"""A decoder layer of DeepSeek-V3.2 put together from the call sites that the engine plans for it.

The engine has the calls of this family and not yet the layer that makes them; this is the order of
the calls, for tests. Between calls it only moves memory, but for the two sums that no op has:
an index query's scale goes into its weights, and the shared expert is added to the routed ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hal.ops.attention import AttentionMetadata
from hal.ops.formats import FORMATS, QuantizedWeight
from hal.ops.quantized_weight import quantize_weight

HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK = 4, 64, 64, 64, 512, 128
HIDDEN, EXPERTS, EXPERT_WIDTH, INDEX_HEADS, TOP_K = 256, 8, 128, 16, 64
CONFIG: Mapping[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "moe_intermediate_size": EXPERT_WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
    "kv_lora_rank": RANK,
    "q_lora_rank": Q_RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "index_topk": TOP_K,
    "index_head_dim": 128,
    "index_n_heads": INDEX_HEADS,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
# Parameter of transformers' layer -> whether the checkpoint stores it in FP8 blocks.
MATRICES: Mapping[str, bool] = {
    "self_attn.q_a_proj.weight": True,
    "self_attn.kv_a_proj_with_mqa.weight": True,
    "self_attn.q_b_proj.weight": True,
    "self_attn.kv_b_proj.weight": False,  # absorbed: in the activations' dtype
    "self_attn.o_proj.weight": True,
    "self_attn.indexer.wq_b.weight": True,
    "self_attn.indexer.wk.weight": True,
    "self_attn.indexer.weights_proj.weight": False,
    "mlp.gate.weight": False,
    "mlp.shared_experts.gate_proj.weight": True,
    "mlp.shared_experts.up_proj.weight": True,
    "mlp.shared_experts.down_proj.weight": True,
    "mlp.experts.gate_up_proj": True,
    "mlp.experts.down_proj": True,
}
FP8 = FORMATS["fp8_block128"]


def write_config(folder: Path) -> Path:
    """A folder that can be planned, with nothing but the configuration."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def stored(weight: torch.Tensor, *, is_fp8: bool) -> torch.Tensor:
    """The values that the checkpoint would keep of a weight, or of a stack of them, in float32."""
    if not is_fp8:
        return weight.bfloat16().float()
    if weight.dim() == 3:
        return torch.stack([stored(part, is_fp8=True) for part in weight])
    return quantize_weight(weight, FP8).dequantize()


class Binder(Protocol):
    """What binds a call site: `BoundOps`, or the references."""

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
    """What a call of the layer gives: the layer's output, and what it chose on the way."""

    out: torch.Tensor
    logits: torch.Tensor
    lists: torch.Tensor
    router_logits: torch.Tensor
    experts: torch.Tensor


class V32Layer:
    """parameters: those of transformers' layer, by their names, as the checkpoint keeps them.
    dtype: of activations and of what is not quantised."""

    def __init__(
        self, binder: Binder, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        self._binder, self._parameters, self._dtype = binder, parameters, dtype
        self._ops: dict[tuple[str, str], Callable[..., Any]] = {}
        self._bind_attention()
        self._bind_feed_forward()

    def _of(self, name: str) -> torch.Tensor:
        return self._parameters[name].to(self._dtype).contiguous()

    def _fp8(self, *names: str) -> QuantizedWeight:
        """The weight as stored: rounding values that are rounded already changes none of them."""
        return quantize_weight(torch.cat([self._parameters[name] for name in names]), FP8)

    def _bind(self, site: str, *phases: str, **static: Any) -> None:
        for phase in phases or ("any",):
            bound = self._binder.bind(f"layers.0.{site}", phase, **static)
            self._ops[site, phase] = bound

    def _call(self, site: str, n: int, *args: Any, phase: str = "any") -> Any:
        return self._ops[site, phase](n, *args)

    def _norm(self, site: str, name: str) -> None:
        self._bind(site, weight=self._of(name), eps=CONFIG["rms_norm_eps"])

    def _bind_attention(self) -> None:
        own = "self_attn."
        self._norm("input_norm", "input_layernorm.weight")
        latents = (own + "q_a_proj.weight", own + "kv_a_proj_with_mqa.weight")
        self._bind("qkv_a_proj", weight=self._fp8(*latents), bias=None)
        self._norm("kv_a_norm", own + "kv_a_layernorm.weight")
        self._norm("q_a_norm", own + "q_a_layernorm.weight")
        self._bind("q_b_proj", weight=self._fp8(own + "q_b_proj.weight"), bias=None)
        table = rope_table()
        for site in ("q_rope", "k_rope", "indexer.rope"):
            self._bind(site, cos_sin_cache=table)
        self._bind("kv_write")
        heads = self._of(own + "kv_b_proj.weight").view(HEADS, NOPE + VALUE, RANK)
        self._bind("q_absorb", weight=heads[:, :NOPE].transpose(1, 2).contiguous())
        self._bind("v_absorb", weight=heads[:, NOPE:].contiguous())
        phases = ("prefill", "decode")
        self._bind("attention", *phases, scale=(NOPE + ROPE) ** -0.5)
        self._bind("o_proj", weight=self._fp8(own + "o_proj.weight"), bias=None)
        own += "indexer."
        self._bind("indexer.k_proj", weight=self._fp8(own + "wk.weight"), bias=None)
        weight, bias = (self._of(f"{own}k_norm.{part}") for part in ("weight", "bias"))
        self._bind("indexer.k_norm", weight=weight, bias=bias, eps=1e-6)
        self._bind("indexer.q_proj", weight=self._fp8(own + "wq_b.weight"), bias=None)
        self._bind("indexer.weights_proj", weight=self._of(own + "weights_proj.weight"), bias=None)
        self._bind("indexer.q_quantize")
        self._bind("indexer.kv_write")
        self._bind("indexer.logits", *phases, scale=(128 * INDEX_HEADS) ** -0.5)
        self._bind("indexer.top_k", *phases)

    def _bind_feed_forward(self) -> None:
        self._norm("post_norm", "post_attention_layernorm.weight")
        self._bind("router_proj", weight=self._of("mlp.gate.weight"), bias=None)
        bias = self._parameters["mlp.gate.e_score_correction_bias"]
        self._bind("router", bias=bias, expert_table=None)
        self._bind("experts.permute")
        for site, name in (("gate_up_proj", "gate_up_proj"), ("down_proj", "down_proj")):
            stack = self._parameters[f"mlp.experts.{name}"]
            self._bind(f"experts.{site}", weight=[quantize_weight(part, FP8) for part in stack])
        self._bind("experts.combine")
        own = "mlp.shared_experts."
        both = (own + "gate_proj.weight", own + "up_proj.weight")
        self._bind("shared.gate_up_proj", weight=self._fp8(*both), bias=None)
        self._bind("shared.down_proj", weight=self._fp8(own + "down_proj.weight"), bias=None)

    def __call__(self, rows: Rows, kv_cache: torch.Tensor, index_cache: torch.Tensor) -> Step:
        n = rows.x.shape[0]
        normed = self._call("input_norm", n, rows.x)
        attended, logits, lists = self._attention(n, normed, rows, kv_cache, index_cache)
        normed, residual = self._call("post_norm", n, attended, rows.x)
        out, router_logits, experts = self._feed_forward(n, normed)
        return Step(residual + out, logits, lists, router_logits, experts)

    def _attention(
        self,
        n: int,
        x: torch.Tensor,
        rows: Rows,
        kv_cache: torch.Tensor,
        index_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        latents = self._call("qkv_a_proj", n, x)
        q_latent, kv = torch.split_with_sizes(latents, (Q_RANK, RANK + ROPE), 1)
        kv_normed = self._call("kv_a_norm", n, kv[:, :RANK])
        row = torch.cat((kv_normed, kv[:, RANK:]), dim=1)
        self._call("k_rope", n, row, None, rows.positions)
        self._call("kv_write", n, row, kv_cache, rows.slots)
        q_latent = self._call("q_a_norm", n, q_latent)
        logits, lists = self._choose(n, x, q_latent, rows, index_cache)
        q = self._call("q_b_proj", n, q_latent)
        self._call("q_rope", n, q, None, rows.positions)
        query = self._absorbed(n, q.view(n, HEADS, NOPE + ROPE))
        out = self._call("attention", n, query, kv_cache, rows.meta, lists, phase=rows.phase)
        latent = by_head(out.view(n, HEADS, RANK))
        values = self._call("v_absorb", n, latent, starts_of_heads(n))
        merged = values.view(HEADS, n, VALUE).transpose(0, 1).reshape(n, HEADS * VALUE)
        return self._call("o_proj", n, merged), logits, lists

    def _absorbed(self, n: int, q: torch.Tensor) -> torch.Tensor:
        """Queries of all heads in the latent space, with their rotated parts behind."""
        latent = self._call("q_absorb", n, by_head(q[..., :NOPE]), starts_of_heads(n))
        latent = latent.view(HEADS, n, RANK).transpose(0, 1)
        return torch.cat((latent, q[..., NOPE:]), dim=2).reshape(n, HEADS * (RANK + ROPE))

    def _choose(
        self, n: int, x: torch.Tensor, q_latent: torch.Tensor, rows: Rows, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = self._call("indexer.k_norm", n, self._call("indexer.k_proj", n, x))
        query = self._call("indexer.q_proj", n, q_latent)
        weights = self._call("indexer.weights_proj", n, x)
        self._call("indexer.rope", n, query, key, rows.positions)
        self._call("indexer.kv_write", n, key, cache, rows.slots)
        values, scales = self._call("indexer.q_quantize", n, query)
        weights = weights * scales
        phase = rows.phase
        logits = self._call("indexer.logits", n, values, weights, cache, rows.meta, phase=phase)
        visible = (rows.positions + 1).to(torch.int32)
        return logits, self._call("indexer.top_k", n, logits, visible, phase=phase)

    def _feed_forward(
        self, n: int, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._call("router_proj", n, x)
        weights, experts = self._call("router", n, logits)
        sorted_rows, offsets, source = self._call("experts.permute", n, x, experts)
        hidden = self._call("experts.gate_up_proj", n, sorted_rows, offsets)
        hidden = self._call("experts.down_proj", n, hidden, offsets)
        routed = self._call("experts.combine", n, hidden, source, weights)
        shared = self._call("shared.gate_up_proj", n, x)
        return routed + self._call("shared.down_proj", n, shared), logits, experts


def by_head(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, width] as the rows of a grouped product, those of a head together."""
    return x.transpose(0, 1).reshape(-1, x.shape[2])


def starts_of_heads(n: int) -> torch.Tensor:
    return torch.arange(0, (HEADS + 1) * n, n)


def rope_table() -> torch.Tensor:
    """float32 [positions, ROPE]: cosines, then sines."""
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, ROPE, 2).float() / ROPE)
    angles = torch.arange(CONFIG["max_position_embeddings"]).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)
