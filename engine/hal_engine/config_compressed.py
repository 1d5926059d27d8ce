"""Configurations of compressed attention: `deepseek_v4` and `deepseek_v41`.

V4 compresses the cache of every layer itself; in V4.1 a few layers fill a cache that the layers
after them read, and the whole text model stands under `text_config`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal_engine.config import Family, ModelConfig, said
from hal_engine.config_compressed_rope import read_two_ropes
from hal_engine.config_fields import read_dtype, read_hidden_act, read_special_ids
from hal_engine.config_moe import read_hashed_moe
from hal_engine.config_parts import (
    CompressedAttentionConfig,
    EngramConfig,
    HyperConnectionConfig,
    IndexerConfig,
    RopeConfig,
)
from hal_engine.config_quantization import read_quantization
from hal_engine.config_values import MAX_LAYERS, MAX_POSITIONS, StrictValues, check_head_dim

_WINDOW, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_DEFAULT_RATES = {_SPARSE: 4, _HEAVY: 128}
_MAX_RATIO = 2**16
# Of the draft layers, which are not planned.
_DRAFT_KEYS = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)


def read_compressed_config(
    values: StrictValues, family: Family
) -> tuple[ModelConfig, list[StrictValues]]:
    """The model, and the values of which every key must have been read. Raises ConfigError."""
    text = values
    if family == "deepseek_v41":
        values.mapping("vision_config")  # text only: images are not planned
        values.raw("image_token_id")
        nested = values.mapping("text_config")
        if nested is None:
            raise values.error("text_config", "the text model's settings", said("nothing"))
        nested.fixed("model_type", "deepseek_v41_text")
        text = nested
    config = _build(values, text, family)
    return config, [values] if text is values else [values, text]


def _build(values: StrictValues, text: StrictValues, family: Family) -> ModelConfig:
    is_v41 = family == "deepseek_v41"
    layers = text.integer("num_hidden_layers", most=MAX_LAYERS)
    positions = text.integer("max_position_embeddings", most=MAX_POSITIONS)
    vocab_size = text.integer("vocab_size")
    head_dim = text.integer("head_dim")
    check_head_dim(text, "head_dim", head_dim)
    text.fixed("num_key_value_heads", 1)
    text.fixed("attention_bias", False)
    text.fixed("mlp_bias", False)
    rope_dim = _rope_dim(text, head_dim)
    rope, compress_rope = read_two_ropes(text, positions, rope_dim / head_dim)
    attention = _read_attention(text, layers, rope_dim, compress_rope, is_v41=is_v41)
    moe = read_hashed_moe(text, layers, default_hash_layers=0 if is_v41 else 3)
    bos, eos = read_special_ids(values, vocab_size)
    for key in _DRAFT_KEYS:
        text.raw(key)
    return ModelConfig(
        source=str(values.file),
        source_format="huggingface",
        family=family,
        hidden_size=text.integer("hidden_size"),
        num_layers=layers,
        num_attention_heads=_heads(text, attention.o_groups),
        num_key_value_heads=1,
        head_dim=head_dim,
        intermediate_size=moe.shared_intermediate_size or moe.intermediate_size,
        vocab_size=vocab_size,
        rms_norm_eps=text.number("rms_norm_eps", most=1.0),
        rope=rope,
        max_position_embeddings=positions,
        sliding_windows=(attention.window,) * layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=attention.has_query_norm,
        tie_word_embeddings=text.boolean("tie_word_embeddings", default=False),
        hidden_act=read_hidden_act(text),
        dtype=read_dtype(values),
        bos_token_id=bos,
        eos_token_ids=eos,
        indexer=_read_indexer(text, layers, attention, is_v41=is_v41),
        moe=moe,
        compressed=attention,
        hyper_connections=_read_hyper_connections(text, is_lagged=is_v41),
        engram=_read_engram(text, layers) if is_v41 else None,
        quantization=read_quantization(values),
        num_draft_layers=text.integer("num_nextn_predict_layers", least=0, default=0),
    )


def _rope_dim(values: StrictValues, head_dim: int) -> int:
    """Of `qk_rope_head_dim` or `partial_rotary_factor`; 64 of 512 where neither is given."""
    share = values.number("partial_rotary_factor", most=1.0, default=64 / 512)
    by_share = int(head_dim * share)
    rope_dim = values.integer("qk_rope_head_dim", most=head_dim, default=by_share)
    if "partial_rotary_factor" in values and rope_dim != by_share:
        raise values.error(
            "qk_rope_head_dim", f"partial_rotary_factor of head_dim ({by_share})", rope_dim
        )
    check_head_dim(values, "qk_rope_head_dim", rope_dim)
    return rope_dim


def _heads(values: StrictValues, groups: int) -> int:
    heads = values.integer("num_attention_heads", most=2**16)
    if heads % groups:
        raise values.error("o_groups", f"a divisor of num_attention_heads ({heads})", groups)
    return heads


def _read_attention(
    values: StrictValues, layers: int, rope_dim: int, compress_rope: RopeConfig, *, is_v41: bool
) -> CompressedAttentionConfig:
    ratios = _ratios(values, layers, is_v41=is_v41)
    sources = _sources(values, ratios) if is_v41 else tuple(range(layers))
    candidates = _read_candidates(values, layers) if is_v41 else None
    if "window_size" in values:
        values.fixed("window_size", values.raw("sliding_window"))
    return CompressedAttentionConfig(
        q_lora_rank=values.integer("q_lora_rank"),
        rope_dim=rope_dim,
        window=values.integer("sliding_window", most=MAX_POSITIONS),
        ratios=ratios,
        sources=sources,
        o_groups=values.integer("o_groups", most=2**16),
        o_lora_rank=values.integer("o_lora_rank"),
        compress_rope=compress_rope,
        overlapping_ratios=() if is_v41 else (_rates(values)[_SPARSE],),
        has_query_norm=not is_v41,
        candidate_source=None if candidates is None else candidates[0],
        candidate_blocks=0 if candidates is None else candidates[1],
        candidate_block_size=1 if candidates is None else candidates[2],
    )


def _rates(values: StrictValues) -> dict[str, int]:
    """Tokens per compressed row of V4's two kinds of compressing layers."""
    rates = dict(_DEFAULT_RATES)
    block = values.mapping("compress_rates")
    for kind, key in ((_SPARSE, "compress_rate_csa"), (_HEAVY, "compress_rate_hca")):
        if block is not None:
            rates[kind] = block.integer(kind, most=_MAX_RATIO, default=rates[kind])
        rates[kind] = values.integer(key, most=_MAX_RATIO, default=rates[kind])
    return rates


def _ratios(values: StrictValues, layers: int, *, is_v41: bool) -> tuple[int, ...]:
    """The ratio of each layer. Releases list those of draft layers behind them."""
    listed = values.integers("compress_ratios", most=_MAX_RATIO)
    if listed is not None and len(listed) < layers:
        raise values.error(
            "compress_ratios", f"at least {layers} entries, one a layer", said(f"{len(listed)}")
        )
    by_ratio = None if listed is None else listed[:layers]
    if is_v41:
        if by_ratio is None:
            raise values.error("compress_ratios", f"{layers} integers", said("nothing"))
        return by_ratio
    rates = _rates(values)
    types = values.choices("layer_types", layers, (_WINDOW, _SPARSE, _HEAVY))
    by_type = None if types is None else tuple(rates.get(kind, 0) for kind in types)
    if by_type is not None and by_ratio is not None and by_type != by_ratio:
        raise values.error("layer_types", "the layers of compress_ratios", said("other ones"))
    chosen = by_type if by_ratio is None else by_ratio
    if chosen is None:
        raise values.error("compress_ratios", f"{layers} integers, or layer_types", said("nothing"))
    unknown = set(chosen) - {0, *rates.values()}
    if unknown:
        known = ", ".join(str(rate) for rate in (0, *rates.values()))
        raise values.error("compress_ratios", f"one of {known} each", min(unknown))
    return chosen


def _sources(values: StrictValues, ratios: Sequence[int]) -> tuple[int, ...]:
    """The layer whose compressed cache each layer reads: the last source at or before it."""
    filling = _layer_ids(values, "kv_source_layer_ids", len(ratios))
    sources: list[int] = []
    current = -1
    for layer, ratio in enumerate(ratios):
        if layer in filling:
            current = layer
        if ratio and (current < 0 or ratios[current] != ratio):
            raise values.error(
                f"compress_ratios[{layer}]",
                "the ratio of the last of kv_source_layer_ids at or before it",
                ratio,
            )
        if not ratio and layer in filling:
            raise values.error("kv_source_layer_ids", "layers with a compress_ratio", layer)
        sources.append(current if ratio else layer)
    return tuple(sources)


def _layer_ids(values: StrictValues, key: str, layers: int) -> tuple[int, ...]:
    ids = values.integers(key, most=layers - 1)
    if ids is None or list(ids) != sorted(set(ids)):
        raise values.error(key, "layer numbers in rising order", values.raw(key))
    return ids


def _read_candidates(values: StrictValues, layers: int) -> tuple[int, int, int] | None:
    if "candidate_source_layer_id" not in values:
        return None
    return (
        values.integer("candidate_source_layer_id", least=0, most=layers - 1),
        values.integer("candidate_topk_blocks"),
        values.integer("candidate_block_size"),
    )


def _read_indexer(
    values: StrictValues, layers: int, attention: CompressedAttentionConfig, *, is_v41: bool
) -> IndexerConfig:
    if is_v41:
        own = _layer_ids(values, "index_source_layer_ids", layers)
        missing = [i for i in range(layers) if attention.compresses(i) and i not in own]
        if missing:
            raise values.error(
                "index_source_layer_ids",
                "every layer of kv_source_layer_ids",
                said(f"no {missing[0]}"),
            )
    else:
        sparse = _rates(values)[_SPARSE]
        own = tuple(i for i in range(layers) if attention.ratios[i] == sparse)
    if attention.candidate_source not in (None, *own):
        raise values.error(
            "candidate_source_layer_id", f"one of the indexers {own}", attention.candidate_source
        )
    head_dim = values.integer("index_head_dim")
    if head_dim < attention.rope_dim:
        raise values.error(
            "index_head_dim", f"at least qk_rope_head_dim ({attention.rope_dim})", head_dim
        )
    return IndexerConfig(
        num_heads=values.integer("index_n_heads", most=2**16),
        head_dim=head_dim,
        top_k=values.integer("index_topk"),
        rope_dim=attention.rope_dim,
        layers=own,
        rope_style="interleaved",
        is_rope_last=True,
    )


def _read_hyper_connections(values: StrictValues, *, is_lagged: bool) -> HyperConnectionConfig:
    return HyperConnectionConfig(
        num_streams=values.integer("hc_mult", most=64),
        sinkhorn_iterations=values.integer("hc_sinkhorn_iters", most=1024),
        eps=values.number("hc_eps", most=1.0),
        is_lagged=is_lagged,
    )


def _read_engram(values: StrictValues, layers: int) -> EngramConfig | None:
    ids = _layer_ids(values, "engram_layer_ids", layers)
    rows = values.integers("engram_num_embeddings", length=len(ids), least=1, most=2**40)
    keys = ("engram_vocab_size", "engram_head_dim", "engram_n_heads", "engram_max_ngram_size")
    if not ids:
        for key in (*keys, "engram_pad_token_id", "engram_compressed_vocab_size"):
            values.raw(key)
        return None
    values.integer("engram_vocab_size", most=2**40)  # rows of a head before they become primes
    return EngramConfig(
        layers=ids,
        rows=rows or (),
        num_heads=values.integer("engram_n_heads", most=2**16),
        max_ngram=values.integer("engram_max_ngram_size", least=2, most=64),
        row_width=values.integer("engram_head_dim"),
        pad_token_id=values.integer("engram_pad_token_id", least=0),
        compressed_vocab_size=values.integer("engram_compressed_vocab_size"),
    )
