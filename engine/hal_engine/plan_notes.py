"""What a plan says about a model beside its ops: what is left out, chosen, or not verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.plan import OpSite
from hal_engine.config import ModelConfig
from hal_engine.preset_files import preset_of


def model_notes(config: ModelConfig, world_size: int) -> list[str]:
    """Remarks for people, in the order in which they matter."""
    notes: list[str] = []
    preset = preset_of(config.source)
    if preset is not None and preset.is_unverified:
        notes.append(f"sizes of {preset.name} are unverified: {preset.note}")
    if not config.is_runnable:
        notes.append(f"the engine has no layers of {config.family} yet: this is a plan only")
    if config.num_draft_layers:
        notes.append(f"{config.num_draft_layers} layer(s) for speculative decoding are not planned")
    if config.mla is not None:
        notes.append(
            "latent attention is planned absorbed, for prompts too; kv_b_proj is held in the "
            "activations' dtype"
        )
    if world_size > 1:
        notes += _sharing_notes(config, world_size)
    return notes


def _sharing_notes(config: ModelConfig, world_size: int) -> list[str]:
    notes: list[str] = []
    if config.moe is not None:
        notes.append(
            f"experts are cut by width: each of {world_size} ranks holds a part of every expert "
            "and routes all tokens; expert parallelism is not planned"
        )
    if config.mla is not None or config.compressed is not None:
        notes.append("each rank keeps the whole cache and runs the whole indexer")
    elif world_size > config.num_key_value_heads:
        copies = world_size // config.num_key_value_heads
        notes.append(f"each key-value head is kept by {copies} ranks")
    if config.engram is not None:
        notes.append("Engram tables are cut by hash head, in device memory")
    return notes


def device_notes(device: DeviceSpec, world_size: int) -> list[str]:
    """How many cards a group is, where a card is more than one device."""
    per_card = int(device.attributes.get("devices_per_card", 1))
    if per_card == 1:
        return []
    cards = -(-world_size // per_card)
    return [
        f"one card of {device.name} is {per_card} devices: {world_size} of them are {cards} "
        f"card{'s' if cards > 1 else ''}, and memory and rates are those of a device"
    ]


def call_notes(sites: Sequence[OpSite]) -> list[str]:
    """Faster forms of a model's calls that no op of the catalogue has, so that no candidate for
    them can be among the losers."""
    note = _short_prompts(sites)
    return [note] if note else []


def _short_prompts(sites: Sequence[OpSite]) -> str:
    """Where the lists of a short prompt hold all its keys, dense attention is the same model."""
    lists: list[Any] = [
        site.request
        for site in sites
        if site.request.op in ("mla_attention", "compressed_attention")
    ]
    tokens = [r.top_k * getattr(r, "compress_ratio", 1) for r in lists if r.top_k]
    if not tokens:
        return ""
    return (
        f"prompts of at most {min(tokens):,} tokens go through the indexer as well, although its "
        "lists hold all their keys: dense attention for them is not planned on any device"
    )
