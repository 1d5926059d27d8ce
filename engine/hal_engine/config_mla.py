"""Configurations of latent attention: `deepseek_v3`, `deepseek_v32` and `glm_moe_dsa`."""

from __future__ import annotations

from typing import Literal

from hal_engine.config import Family, ModelConfig, said
from hal_engine.config_fields import read_dtype, read_hidden_act, read_special_ids
from hal_engine.config_moe import read_grouped_moe
from hal_engine.config_parts import IndexerConfig, MlaConfig, RopeStyle
from hal_engine.config_quantization import read_quantization
from hal_engine.config_rope import read_rope
from hal_engine.config_values import MAX_LAYERS, MAX_POSITIONS, StrictValues, check_head_dim

MlaFamily = Literal["deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
MAX_HEADS = 2**16
# Names that published configurations give to a layer whose attention has an indexer.
_INDEXED_LAYER = ("indexed_attention", "deepseek_sparse_attention")
_FULL, _SHARED = "full", "shared"


def read_mla_config(values: StrictValues, family: Family) -> tuple[ModelConfig, list[StrictValues]]:
    """The model, and the values of which every key must have been read. Raises ConfigError."""
    layers = values.integer("num_hidden_layers", most=MAX_LAYERS)
    positions = values.integer("max_position_embeddings", most=MAX_POSITIONS)
    vocab_size = values.integer("vocab_size")
    heads = values.integer("num_attention_heads", most=MAX_HEADS)
    kv_heads = values.integer("num_key_value_heads", most=MAX_HEADS, default=heads)
    if kv_heads != heads:
        raise values.error(
            "num_key_value_heads", f"num_attention_heads ({heads}), by latent attention", kv_heads
        )
    mla = _read_mla(values)
    has_bias = values.boolean("attention_bias", default=False)
    values.fixed("mlp_bias", False)
    values.fixed("ep_size", 1)
    bos, eos = read_special_ids(values, vocab_size)
    config = ModelConfig(
        source=str(values.file),
        source_format="huggingface",
        family=family,
        hidden_size=values.integer("hidden_size"),
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=mla.qk_dim,
        intermediate_size=values.integer("intermediate_size"),
        vocab_size=vocab_size,
        rms_norm_eps=values.number("rms_norm_eps", most=1.0),
        rope=read_rope(values, positions),
        max_position_embeddings=positions,
        sliding_windows=(None,) * layers,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=values.boolean("tie_word_embeddings", default=False),
        hidden_act=read_hidden_act(values),
        dtype=read_dtype(values),
        bos_token_id=bos,
        eos_token_ids=eos,
        mla=mla,
        indexer=None if family == "deepseek_v3" else _read_indexer(values, family, layers, mla),
        moe=read_grouped_moe(values, layers),
        quantization=read_quantization(values),
        num_draft_layers=values.integer("num_nextn_predict_layers", least=0, default=0),
    )
    return config, [values]


def _read_mla(values: StrictValues) -> MlaConfig:
    rope_dim = values.integer("qk_rope_head_dim")
    check_head_dim(values, "qk_rope_head_dim", rope_dim)
    mla = MlaConfig(
        q_lora_rank=0 if values.is_null("q_lora_rank") else values.integer("q_lora_rank"),
        kv_lora_rank=values.integer("kv_lora_rank"),
        nope_dim=values.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=values.integer("v_head_dim"),
        rope_style=_style(values, "rope_interleave", default=True),
    )
    values.fixed("qk_head_dim", mla.qk_dim)
    # Of no effect here: some releases put the rotated size there, others the other one.
    if values.raw("head_dim") not in (None, mla.rope_dim, mla.nope_dim, mla.qk_dim):
        raise values.error(
            "head_dim",
            f"one of the sizes of a head ({mla.rope_dim}, {mla.nope_dim}, {mla.qk_dim})",
            values.raw("head_dim"),
        )
    return mla


def _style(values: StrictValues, key: str, *, default: bool) -> RopeStyle:
    return "interleaved" if values.boolean(key, default=default) else "half_split"


def _read_indexer(
    values: StrictValues, family: Family, layers: int, mla: MlaConfig
) -> IndexerConfig:
    values.choices("layer_types", layers, _INDEXED_LAYER)
    if not mla.q_lora_rank:
        raise values.error("q_lora_rank", "a query latent, which the indexer reads", said("null"))
    head_dim = values.integer("index_head_dim")
    if head_dim < mla.rope_dim:
        raise values.error(
            "index_head_dim", f"at least qk_rope_head_dim ({mla.rope_dim})", head_dim
        )
    values.raw("index_share_for_mtp_iteration")  # of the draft layers, which do not run here
    return IndexerConfig(
        num_heads=values.integer("index_n_heads", most=MAX_HEADS),
        head_dim=head_dim,
        top_k=values.integer("index_topk"),
        rope_dim=mla.rope_dim,
        layers=_indexer_layers(values, layers),
        rope_style=_style(values, "indexer_rope_interleave", default=family == "glm_moe_dsa"),
    )


def _indexer_layers(values: StrictValues, layers: int) -> tuple[int, ...]:
    """Layers that choose keys themselves: listed, or by pattern, or every n-th after some."""
    types = values.choices("indexer_types", layers, (_FULL, _SHARED))
    pattern = values.raw("index_topk_pattern")
    step = values.integer("index_topk_freq", most=MAX_LAYERS, default=1)
    offset = values.integer("index_skip_topk_offset", least=0, most=MAX_LAYERS, default=2)
    by_rule = [i for i in range(layers) if max(i - offset + 1, 0) % step == 0]
    rule = f"index_topk_freq ({step}) and index_skip_topk_offset ({offset})"
    if pattern is not None:
        by_rule, rule = _by_pattern(values, pattern, layers), "index_topk_pattern"
    is_ruled = pattern is not None or "index_topk_freq" in values
    chosen = by_rule if types is None else [i for i, t in enumerate(types) if t == _FULL]
    if types is not None and is_ruled and chosen != by_rule:
        raise values.error(
            "indexer_types", f"the layers of {rule}", said(f"{len(chosen)} full layers")
        )
    if not chosen or chosen[0] != 0:
        raise values.error("indexer_types[0]", "'full': nothing chose keys before it", _SHARED)
    return tuple(chosen)


def _by_pattern(values: StrictValues, pattern: object, layers: int) -> list[int]:
    if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - {"F", "S"}:
        raise values.error("index_topk_pattern", f"{layers} letters F or S", pattern)
    return [i for i, letter in enumerate(pattern) if letter == "F"]
