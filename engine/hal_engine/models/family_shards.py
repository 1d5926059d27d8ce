"""How tensor parallelism cuts models with latent or compressed attention and with experts.

Heads go to ranks as evenly as they go (whole groups of them where the output is projected per
group), experts by the width of each of them, so that every rank holds a part of every expert and
one all-reduce a sublayer suffices. What is small or shared by all heads is on every rank: latents,
keys of one head, indexers, routers, norms, embeddings, residual streams. Engram tables are cut by
hash head.
"""

from __future__ import annotations

from dataclasses import dataclass

from hal.errors import PlanError
from hal_engine.config import ModelConfig
from hal_engine.shards import FEATURE_UNIT, Shard, shard_model, split_evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyShard:
    """Sizes that one rank holds: heads, groups of heads with their own output projection, features
    of dense, routed and shared feed-forwards, rows of the vocabulary, hash heads of Engram."""

    rank: int
    world_size: int
    num_heads: int
    num_groups: int
    dense_width: int
    expert_width: int
    shared_width: int
    vocab_rows: int
    engram_heads: int


def shard_family(config: ModelConfig, rank: int, world_size: int) -> FamilyShard:
    """Raises PlanError if some rank would hold nothing of what is cut."""
    groups = config.compressed.o_groups if config.compressed is not None else 0
    pieces = groups or config.num_attention_heads
    share = _share(config, "groups of heads" if groups else "heads", pieces, rank, world_size)
    moe, engram = config.moe, config.engram
    has_dense = moe is None or len(moe.layers) < config.num_layers

    def width(what: str, total: int) -> int:
        unit = feature_unit(config, total)
        return _share(config, what, total // unit, rank, world_size) * unit if total else 0

    return FamilyShard(
        rank=rank,
        world_size=world_size,
        num_heads=share * (config.num_attention_heads // pieces),
        num_groups=share if groups else 0,
        dense_width=width("features", config.intermediate_size) if has_dense else 0,
        expert_width=width("features of an expert", moe.intermediate_size if moe else 0),
        shared_width=width("shared features", moe.shared_intermediate_size if moe else 0),
        vocab_rows=-(-config.vocab_size // world_size),
        engram_heads=(
            _share(config, "hash heads of Engram", engram.num_heads, rank, world_size)
            if engram is not None
            else 0
        ),
    )


def shard_with_copies(config: ModelConfig, rank: int, world_size: int) -> Shard:
    """As `shard_model`, and with more ranks than key-value heads each head is kept by several.

    For plans only: the engine's own ranks each hold heads of their own. Raises PlanError.
    """
    groups = config.num_key_value_heads
    if world_size <= groups or world_size % groups or config.num_attention_heads % world_size:
        return shard_model(config, rank, world_size)
    own = rank * groups // world_size
    heads = config.num_attention_heads // world_size
    unit = feature_unit(config, config.intermediate_size)
    features = split_evenly(config.intermediate_size // unit, world_size, rank)
    rows = -(-config.vocab_size // world_size)
    return Shard(
        rank=rank,
        world_size=world_size,
        heads=(rank * heads, (rank + 1) * heads),
        kv_heads=(own, own + 1),
        features=(features[0] * unit, features[1] * unit),
        vocab=(rank * rows, (rank + 1) * rows),
        vocab_rows=rows,
    )


def feature_unit(config: ModelConfig, total: int) -> int:
    """Features that stay together: those that share a scale, else 64 as in dense models."""
    quantization = config.quantization
    units = (FEATURE_UNIT,) if quantization is None else (quantization.block_size, 32)
    return next((unit for unit in units if total % unit == 0), 1)


def _share(config: ModelConfig, what: str, pieces: int, rank: int, world_size: int) -> int:
    if world_size > pieces:
        raise PlanError(
            f"tensor parallelism of {config.source}",
            f"at most {pieces} ranks ({pieces} pieces of {what})",
            f"--tp {world_size}",
            "use fewer ranks",
        )
    first, last = split_evenly(pieces, world_size, rank)
    return last - first
