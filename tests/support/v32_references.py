"""The layer of `v32_layer` by the reference ops, with the choices of another run of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hal.ops import CATALOGUE
from hal.ops.quantize import QuantizeRequest
from hal.plan import OpSite
from v32_model import CONFIG


@dataclass
class Choices:
    """What another run of the same steps chose, in the order of the calls."""

    lists: list[torch.Tensor]
    experts: list[torch.Tensor]


class References:
    """Binds the reference of each call, none of them joined, with the choices of entries and of
    experts given: two nearly equal candidates would otherwise make two different layers. What
    rounds rows for a product is left out: the reference of the product rounds them."""

    def __init__(self, sites: Sequence[OpSite], choices: Choices) -> None:
        self._requests = {
            (name, site.request.phase): site.request
            for site in sites
            if not isinstance(site.request, QuantizeRequest) or site.site.endswith("q_quantize")
            for name in site.names()
        }
        self._lists, self._experts = iter(choices.lists), iter(choices.experts)

    def most_tokens(self, site: str, phase: str = "any") -> int:
        request = self._requests.get((site, phase))
        return 0 if request is None else request.tokens.high

    def bind(self, site: str, phase: str = "any", **static: Any) -> Callable[..., Any]:
        request: Any = self._requests[site, phase]
        golden = CATALOGUE[request.op].reference(request, **static)
        if site.endswith("indexer.top_k"):
            return lambda n, *args: next(self._lists)
        if site.endswith(".router"):
            return lambda n, logits: weighted(logits, next(self._experts))
        return lambda n, *args: golden(*args)


def weighted(logits: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the router says of these experts."""
    scores = logits.sigmoid().gather(1, experts.long())
    scale: float = CONFIG["routed_scaling_factor"]
    return scores / scores.sum(1, keepdim=True) * scale, experts
