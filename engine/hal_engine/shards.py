"""How tensor parallelism cuts a model: which heads, features and vocabulary rows a rank holds.

Attention is cut by key-value groups and the feed-forward by blocks of 64 features, as evenly as
they go: ranks may differ by one unit, so three key-value heads run on two ranks. The vocabulary is
cut in equal parts (the last one padded), because its parts are gathered.
(Megatron-LM, https://arxiv.org/abs/1909.08053.)
"""

from __future__ import annotations

from dataclasses import dataclass

from hal.errors import PlanError
from hal_engine.config import ModelConfig

# A multiple of every group size of the quantised formats, so that no scale group is cut.
FEATURE_UNIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds. Slices are half-open (first, last) pairs."""

    rank: int
    world_size: int
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    features: tuple[int, int]  # of the feed-forward's intermediate size
    vocab: tuple[int, int]  # beyond vocab_size only in padding
    vocab_rows: int  # rows of every rank's part

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def num_features(self) -> int:
        return self.features[1] - self.features[0]


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """The index-th of `parts` consecutive ranges over `total`; the first ones take the rest."""
    size, rest = divmod(total, parts)
    first = index * size + min(index, rest)
    return first, first + size + (1 if index < rest else 0)


def shard_model(config: ModelConfig, rank: int, world_size: int) -> Shard:
    """Raises PlanError if some rank would hold no head or no feature."""
    groups = config.num_key_value_heads
    unit = FEATURE_UNIT if config.intermediate_size % FEATURE_UNIT == 0 else 1
    blocks = config.intermediate_size // unit
    if world_size > min(groups, blocks):
        raise PlanError(
            f"tensor parallelism of {config.source}",
            f"at most {min(groups, blocks)} ranks ({groups} key-value heads)",
            f"--tp {world_size}",
            "use fewer ranks",
        )
    kv_heads = split_evenly(groups, world_size, rank)
    per_group = config.num_attention_heads // groups
    features = split_evenly(blocks, world_size, rank)
    rows = -(-config.vocab_size // world_size)
    return Shard(
        rank=rank,
        world_size=world_size,
        heads=(kv_heads[0] * per_group, kv_heads[1] * per_group),
        kv_heads=kv_heads,
        features=(features[0] * unit, features[1] * unit),
        vocab=(rank * rows, (rank + 1) * rows),
        vocab_rows=rows,
    )
