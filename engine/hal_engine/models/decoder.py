"""The decoder of the Llama family, built from parts: embedding, layers, norm, head.

Every arithmetic step is a bound op; this file only says in which order they are called. A later
family adds a part (another attention, another feed-forward) and its requests in `sites.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal.binding import BoundOp, BoundOps
from hal.ops.collective import CollectiveGroup
from hal.ops.formats import torch_dtype
from hal_engine.checkpoint.protocol import Checkpoint
from hal_engine.config import ModelConfig
from hal_engine.models.build_context import BuildContext
from hal_engine.models.family_sites import EMBED_TENSOR
from hal_engine.models.feed_forward_sites import DOWN_TENSOR, GATE_UP_TENSORS
from hal_engine.models.product_joins import DOWN_PROJ_NORM, O_PROJ_NORM
from hal_engine.models.product_norm import ProductNorm
from hal_engine.models.projected_attention import ProjectedAttention
from hal_engine.models.rotary_write import RotaryWrite
from hal_engine.models.sites import OUTPUT_TENSOR, QKV_TENSORS, head_tensor
from hal_engine.models.step_inputs import StepInputs
from hal_engine.models.summed_norm import SummedNorm
from hal_engine.precision import Precision
from hal_engine.rope_table import rope_cos_sin
from hal_engine.shards import Shard
from hal_engine.weights import Part

POST_NORM_TENSOR = "post_attention_layernorm.weight"
Progress = Callable[[int, int], None]  # (parts done, parts in all)


class AttentionBlock:
    """Grouped-query attention with rotary positions over the paged cache of one layer, with the sum
    over ranks, the addition into the residual and the norm behind it."""

    def __init__(self, context: BuildContext, layer: int) -> None:
        config, shard = context.config, context.shard
        name = f"model.layers.{layer}.self_attn"
        dim = config.head_dim
        q_size, kv_size = shard.num_heads * dim, shard.num_kv_heads * dim
        self._qkv_sizes = (q_size, kv_size, kv_size)
        q_rows = (shard.heads[0] * dim, shard.heads[1] * dim)
        kv_rows = (shard.kv_heads[0] * dim, shard.kv_heads[1] * dim)
        rows = (q_rows, kv_rows, kv_rows)
        stem = f"model.layers.{layer}."
        parts = [Part(name=stem + t, rows=r) for t, r in zip(QKV_TENSORS, rows, strict=True)]
        biases = [
            Part(name=stem + t.removesuffix("weight") + "bias", rows=r)
            for t, r in zip(QKV_TENSORS, rows, strict=True)
        ]
        site = f"layers.{layer}."
        self._qkv_proj = context.gemm(site + "qkv_proj", parts, biases if config.qkv_bias else [])
        self._rotary_write = RotaryWrite(context, site, name)
        bias = config.output_bias and shard.rank == 0
        projection = context.gemm_arguments(
            [Part(name=stem + OUTPUT_TENSOR, columns=q_rows if shard.world_size > 1 else None)],
            [Part(name=f"{name}.o_proj.bias")] if bias else [],
        )
        self._attend = ProjectedAttention(context, site, dim**-0.5, projection)
        self._output_norm = ProductNorm(
            context, site + O_PROJ_NORM, projection, stem + POST_NORM_TENSOR
        )
        self._post_norm = SummedNorm(
            context,
            stem + POST_NORM_TENSOR,
            norm=site + "post_norm",
            reduce=site + "o_all_reduce",
            joined=site + "o_reduce_norm",
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        step: StepInputs,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: normed rows. Gives the normed input of the feed-forward and the residual."""
        n = step.num_tokens
        qkv = self._qkv_proj(n, x)
        # The function, not the method: Tensor.split is a Python wrapper around it.
        q, k, v = torch.split_with_sizes(qkv, self._qkv_sizes, 1)
        q = self._rotary_write(q, k, v, step, k_cache, v_cache)
        if self._output_norm.serves(n):
            return self._output_norm(n, self._attend.attended(q, step, k_cache, v_cache), residual)
        return self._post_norm(n, self._attend(q, step, k_cache, v_cache), residual)


class GatedFeedForward:
    """SwiGLU: down(silu(gate x) * up x); the sum over ranks is left to who calls it, and so is the
    norm of the next layer where the plan has no call that does it."""

    def __init__(self, context: BuildContext, layer: int) -> None:
        shard, config = context.shard, context.config
        stem, site = f"model.layers.{layer}.", f"layers.{layer}."
        parts = [Part(name=stem + t, rows=shard.features) for t in GATE_UP_TENSORS]
        biases = [
            Part(name=stem + t.removesuffix("weight") + "bias", rows=shard.features)
            for t in GATE_UP_TENSORS
        ]
        self._gate_up_proj = context.gemm(
            site + "gate_up_proj", parts, biases if config.mlp_bias else []
        )
        columns = shard.features if shard.world_size > 1 else None
        bias = config.mlp_bias and shard.rank == 0
        projection = context.gemm_arguments(
            [Part(name=stem + DOWN_TENSOR, columns=columns)],
            [Part(name=f"{stem}mlp.down_proj.bias")] if bias else [],
        )
        self._down_proj: BoundOp | None = None
        if context.ops.most_tokens(site + "down_proj"):
            self._down_proj = context.ops.bind(site + "down_proj", **projection)
        # The norm is the first of the layer behind; there is none that adds behind the last one.
        self._down_norm = ProductNorm(
            context,
            site + DOWN_PROJ_NORM,
            projection,
            f"model.layers.{layer + 1}.input_layernorm.weight",
        )

    def __call__(
        self, n: int, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """(rows, residual, whether the rows are in the residual and normed already)."""
        inner = self._gate_up_proj(n, x)
        if self._down_norm.serves(n):
            return *self._down_norm(n, inner, residual), True
        if self._down_proj is None:
            raise RuntimeError(f"decoder: no call of the plan projects {n} tokens down")
        return self._down_proj(n, inner), residual, False


class DecoderLayer:
    """Pre-norm attention and feed-forward; the residual is added inside the next norm, and the rows
    that it returns are this rank's, summed inside the next layer's first norm; or they are summed
    and normed already, where the plan has one call for that."""

    def __init__(self, context: BuildContext, layer: int) -> None:
        name, site = f"model.layers.{layer}", f"layers.{layer}."
        norm, tensor = site + "input_norm", f"{name}.input_layernorm.weight"
        self._first_norm: BoundOp | None = None
        if layer == 0:
            self._first_norm = context.norm(norm, tensor)
        else:
            below = f"layers.{layer - 1}.down_"
            self._input_norm = SummedNorm(
                context,
                tensor,
                norm=norm,
                reduce=below + "all_reduce",
                joined=below + "reduce_norm",
            )
        self._attention = AttentionBlock(context, layer)
        self._feed_forward = GatedFeedForward(context, layer)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        step: StepInputs,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        is_normed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """is_normed: of x, and in the result of the rows that the next layer is given."""
        normed, residual = self.attend(x, residual, step, k_cache, v_cache, is_normed=is_normed)
        return self.feed_forward(step.num_tokens, normed, residual)

    def attend(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        step: StepInputs,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        is_normed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first half: the normed input of `feed_forward`, and the residual."""
        n = step.num_tokens
        normed = x
        if self._first_norm is not None:
            normed, residual = self._first_norm(n, x), x
        elif not is_normed:
            normed, residual = self._input_norm(n, x, residual)
        return self._attention(normed, residual, step, k_cache, v_cache)

    def feed_forward(
        self, n: int, normed: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The second half, of `n` rows; see the call."""
        return self._feed_forward(n, normed, residual)


class Decoder:
    """A decoder-only model on one rank. `forward` gives fp32 logits of the rows asked for."""

    def __init__(self, context: BuildContext, progress: Progress | None = None) -> None:
        config = context.config
        self._config = config
        self._shard = context.shard
        dtype = torch_dtype(context.precision.dtype)
        embedding = context.weights.read_float(EMBED_TENSOR).to(dtype).contiguous()
        self._embed = context.ops.bind("embed", weight=embedding)
        self._layers = []
        for layer in range(config.num_layers):
            self._layers.append(DecoderLayer(context, layer))
            if progress is not None:
                progress(layer + 1, config.num_layers + 1)
        self._last_all_reduce: BoundOp | None = None
        if context.group is not None:
            last = f"layers.{config.num_layers - 1}.down_all_reduce"
            self._last_all_reduce = context.ops.bind(last, group=context.group)
        self._final_norm = context.norm("final_norm", "model.norm.weight")
        rows = context.shard.vocab
        rows = (min(rows[0], config.vocab_size), min(rows[1], config.vocab_size))
        whole = context.shard.world_size == 1
        self._lm_head = context.gemm(
            "lm_head",
            [Part(name=head_tensor(config), rows=None if whole else rows)],
            [],
            pad_rows_to=context.shard.vocab_rows,
        )
        self._gather = None
        if context.group is not None:
            self._gather = context.ops.bind("lm_head_all_gather", group=context.group)
        if progress is not None:
            progress(config.num_layers + 1, config.num_layers + 1)

    def forward(
        self, step: StepInputs, caches: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """fp32 logits [R, vocab_size].

        caches: a layer's (k, v), each [num_blocks, block_size, num_kv_heads, head_dim].
        """
        hidden: torch.Tensor = self._embed(step.num_tokens, step.token_ids)
        residual, is_normed = hidden, False
        *layers, last = self._layers
        for layer, (k_cache, v_cache) in zip(layers, caches[:-1], strict=True):
            hidden, residual, is_normed = layer(
                hidden, residual, step, k_cache, v_cache, is_normed=is_normed
            )
        hidden, residual = last.attend(hidden, residual, step, *caches[-1], is_normed=is_normed)
        # Of the other rows nobody reads more than the keys and values, which are written now.
        n = step.num_logit_rows
        if n == 0:
            return hidden.new_empty((0, self._config.vocab_size), dtype=torch.float32)
        if step.logit_rows is not None:
            hidden, residual = hidden[step.logit_rows], residual[step.logit_rows]
        hidden, residual, _ = last.feed_forward(n, hidden, residual)
        if self._last_all_reduce is not None:
            hidden = self._last_all_reduce(n, hidden)
        normed, _ = self._final_norm(n, hidden, residual)
        logits: torch.Tensor = self._lm_head(n, normed)
        if self._gather is not None:
            gathered: torch.Tensor = self._gather(n, logits)
            return gathered[:, : self._config.vocab_size].contiguous()
        return logits


def build_decoder(
    *,
    config: ModelConfig,
    precision: Precision,
    shard: Shard,
    ops: BoundOps,
    weights: Checkpoint,
    group: CollectiveGroup | None,
    max_model_len: int,
    progress: Progress | None = None,
) -> Decoder:
    """Reads and binds everything. Raises CheckpointError and BindingError."""
    context = BuildContext(
        config=config,
        precision=precision,
        shard=shard,
        ops=ops,
        weights=weights,
        group=group,
        cos_sin_cache=rope_cos_sin(config, max_model_len),
    )
    return Decoder(context, progress)
