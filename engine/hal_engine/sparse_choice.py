"""Whether a model with sparse attention may attend to all keys instead: a change of meaning.

Never a default: `engine.sparse_attention = "off"` asks for it, and besides the name of the change
must be in `engine.allow_semantics`, or a semantic waiver must cover every attention call. Where the
device's backend forces sparse attention on, it is refused whatever the user allows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from hal.device import SPARSE_ATTENTION, DevicePolicy, DeviceSpec
from hal.errors import PlanError
from hal.plan import OpSite
from hal.waivers import WaiverBook, waiver_text
from hal_engine.config import ModelConfig

CHANGE = "dense_attention_for_sparse"  # also the name of the candidates' note
_OPS = ("mla_attention", "compressed_attention")


def check_sparse_off(config: ModelConfig, policy: DevicePolicy, device: DeviceSpec) -> None:
    """Raises PlanError where "off" means nothing, or where the device forces sparse attention."""
    who = f"engine.sparse_attention=off for {config.source}"
    if config.indexer is None:
        raise PlanError(
            who, "a model whose attention chooses its keys", config.family, "leave it at model"
        )
    reason = policy.forced_features.get(SPARSE_ATTENTION)
    if reason is not None:
        raise PlanError(
            who,
            f"sparse attention, which {device.backend} forces on for {device.name}: {reason}",
            "off",
            "leave it at model, or plan for another device",
        )


def allow_dense_attention(
    sites: Sequence[OpSite],
    device: DeviceSpec,
    waivers: WaiverBook,
    allowed: Collection[str],
) -> list[str]:
    """Notes of a plan whose sites attend to all keys. Raises PlanError if nothing allows that."""
    text = (
        f"{CHANGE}: attention reads all keys where the model was trained to choose some, and the "
        "indexer does not run; outputs differ from the model's"
    )
    if any(fnmatchcase(CHANGE, pattern) for pattern in allowed):
        return [text]
    attention = [site for site in sites if site.request.op in _OPS]
    missing = [s for s in attention if waivers.find(s.request, s.site, device, "semantic") is None]
    if missing:
        stanzas = dict.fromkeys(
            waiver_text(s.request, s.site, device, kind="semantic") for s in missing
        )
        raise PlanError(
            "engine.sparse_attention=off",
            f"{CHANGE} in engine.allow_semantics, or a semantic waiver for every attention call",
            f"neither for {missing[0].site} ({missing[0].request.label})",
            "leave it at model; or allow it in the waiver file:\n" + "\n\n".join(stanzas),
        )
    used = [waivers.match(s.request, s.site, device, "semantic") for s in attention]
    return [text, *dict.fromkeys(w.describe() for w in used if w is not None)]
