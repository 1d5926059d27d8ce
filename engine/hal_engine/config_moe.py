"""The experts of a Hugging Face configuration: how many, which layers, how tokens are routed."""

from __future__ import annotations

from hal_engine.config import said
from hal_engine.config_parts import MoeConfig, Scoring
from hal_engine.config_values import MAX_LAYERS, StrictValues

MAX_EXPERTS = 2**16
_SCORING: dict[str, Scoring] = {
    "sigmoid": "sigmoid",
    "softmax": "softmax",
    "sqrtsoftplus": "sqrt_softplus",
}


def read_qwen_moe(values: StrictValues, layers: int) -> MoeConfig:
    """Experts of `qwen3_moe`: softmax over all, the best k, in every n-th layer."""
    experts, picked = _counts(values, "num_experts")
    step = values.integer("decoder_sparse_step", most=MAX_LAYERS, default=1)
    dense = values.integers("mlp_only_layers", most=layers - 1) or ()
    sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    return MoeConfig(
        num_experts=experts,
        experts_per_token=picked,
        intermediate_size=values.integer("moe_intermediate_size"),
        layers=sparse,
        scoring="softmax",
        normalizes=values.boolean("norm_topk_prob", default=False),
    )


def read_grouped_moe(values: StrictValues, layers: int) -> MoeConfig:
    """Experts of DeepSeek-V3, V3.2 and GLM-5: sigmoid scores, groups, a bias for the choice."""
    experts, picked = _counts(values, "n_routed_experts")
    groups = values.integer("n_group", most=MAX_EXPERTS, default=1)
    if experts % groups:
        raise values.error("n_group", f"a divisor of n_routed_experts ({experts})", groups)
    groups_picked = values.integer("topk_group", most=MAX_EXPERTS, default=1)
    if groups_picked > groups:
        raise values.error("topk_group", f"at most n_group ({groups})", groups_picked)
    if picked > groups_picked * (experts // groups):
        raise values.error(
            "num_experts_per_tok",
            f"at most the {groups_picked * (experts // groups)} experts of topk_group groups",
            picked,
        )
    values.fixed("scoring_func", "sigmoid")
    values.fixed("topk_method", "noaux_tc")
    values.fixed("moe_router_dtype", "float32")
    width = values.integer("moe_intermediate_size")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=picked,
        intermediate_size=width,
        layers=_sparse_layers(values, layers),
        scoring="sigmoid",
        shared_intermediate_size=width * values.integer("n_shared_experts", least=0, default=0),
        has_bias=True,
        num_groups=groups,
        num_groups_picked=groups_picked,
        normalizes=values.boolean("norm_topk_prob", default=True),
        route_scale=values.number("routed_scaling_factor", default=1.0),
    )


def read_hashed_moe(values: StrictValues, layers: int, *, default_hash_layers: int) -> MoeConfig:
    """Experts of DeepSeek V4 and V4.1: in every layer, the first ones routed by token id."""
    experts, picked = _counts(values, "n_routed_experts")
    scoring = values.string("scoring_func", default="sqrtsoftplus")
    if scoring not in _SCORING:
        raise values.error("scoring_func", f"one of {', '.join(_SCORING)}", scoring)
    values.fixed("topk_method", "noaux_tc")
    values.fixed("first_k_dense_replace", 0)
    if not values.boolean("norm_topk_prob", default=True):
        raise values.error("norm_topk_prob", "true (the routed weights sum to one)", False)
    width = values.integer("moe_intermediate_size")
    return MoeConfig(
        num_experts=experts,
        experts_per_token=picked,
        intermediate_size=width,
        layers=tuple(range(layers)),
        scoring=_SCORING[scoring],
        shared_intermediate_size=width * values.integer("n_shared_experts", least=0, default=1),
        hash_layers=_hash_layers(values, layers, default_hash_layers),
        has_bias=True,
        route_scale=values.number("routed_scaling_factor", default=1.5),
        activation_clamp=values.number("swiglu_limit", above=-1e-9, default=10.0),
    )


def _counts(values: StrictValues, key: str) -> tuple[int, int]:
    """Experts, under the family's key or one of its other spellings, and those of a token."""
    aliases = [key, *(k for k in ("num_local_experts", "num_experts") if k != key)]
    given = {k: values.integer(k, most=MAX_EXPERTS) for k in aliases if k in values}
    experts = next(iter(given.values()), 0) or values.integer(key, most=MAX_EXPERTS)
    for alias, count in given.items():
        if count != experts:
            raise values.error(alias, f"{next(iter(given))} ({experts})", count)
    picked = values.integer("num_experts_per_tok", most=MAX_EXPERTS)
    if picked > experts:
        raise values.error("num_experts_per_tok", f"at most {key} ({experts})", picked)
    return experts, picked


def _sparse_layers(values: StrictValues, layers: int) -> tuple[int, ...]:
    """By `first_k_dense_replace` and `moe_layer_freq`, or by `mlp_layer_types`; not by both."""
    first = values.integer("first_k_dense_replace", least=0, most=MAX_LAYERS, default=3)
    step = values.integer("moe_layer_freq", most=MAX_LAYERS, default=1)
    by_rule = tuple(i for i in range(layers) if i >= first and i % step == 0)
    types = values.choices("mlp_layer_types", layers, ("dense", "sparse"))
    if types is None:
        return by_rule
    by_type = tuple(i for i, kind in enumerate(types) if kind == "sparse")
    if by_type != by_rule and "first_k_dense_replace" in values:
        raise values.error(
            "mlp_layer_types",
            f"the layers of first_k_dense_replace ({first})",
            said(f"experts in {len(by_type)} layers instead of {len(by_rule)}"),
        )
    return by_type


def _hash_layers(values: StrictValues, layers: int, default: int) -> tuple[int, ...]:
    types = values.choices("mlp_layer_types", layers, ("hash_moe", "moe"))
    has_count = "num_hash_layers" in values
    count = values.integer("num_hash_layers", least=0, most=MAX_LAYERS, default=default)
    by_count = tuple(range(min(count, layers)))
    if types is None:
        return by_count
    by_type = tuple(i for i, kind in enumerate(types) if kind == "hash_moe")
    if has_count and by_type != by_count:
        raise values.error(
            "mlp_layer_types", f"num_hash_layers ({count}) first", said(f"layers {list(by_type)}")
        )
    return by_type
