"""What stands between the projection of q, k and v and the attention, in one call or in several."""

from __future__ import annotations

from typing import Any

import torch

from hal.binding import BoundOp
from hal_engine.models.build_context import BuildContext
from hal_engine.models.rotary_joins import ROPE_KV_WRITE
from hal_engine.models.step_inputs import StepInputs


class RotaryWrite:
    """Norms of q and k where the model has them, rotation of both, and the write of k and v.

    One call up to the size for which the plan has one (see `joined_sites`), else one for each.
    """

    def __init__(self, context: BuildContext, site: str, attention: str) -> None:
        """site: prefix of the layer's call sites. attention: of its tensors' names."""
        ops, config = context.ops, context.config
        self._head_dim = config.head_dim
        self._most_joined = ops.most_tokens(site + ROPE_KV_WRITE)
        self._joined: BoundOp | None = None
        self._rope: BoundOp | None = None
        self._write: BoundOp | None = None
        self._norms: list[BoundOp] = []
        tensors = {name: f"{attention}.{name}.weight" for name in ("q_norm", "k_norm")}
        if self._most_joined:
            arguments: dict[str, Any] = {"cos_sin_cache": context.cos_sin_cache}
            if config.qk_norm:
                q, k = (context.norm_arguments(tensor) for tensor in tensors.values())
                arguments |= {"q_weight": q["weight"], "k_weight": k["weight"], "eps": q["eps"]}
            self._joined = ops.bind(site + ROPE_KV_WRITE, **arguments)
        if ops.most_tokens(site + "rope"):
            if config.qk_norm:
                self._norms = [context.norm(site + name, t) for name, t in tensors.items()]
            self._rope = ops.bind(site + "rope", cos_sin_cache=context.cos_sin_cache)
            self._write = ops.bind(site + "kv_write")

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: StepInputs,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """q [T, heads * head_dim] as the attention takes it; k and v are in the cache then."""
        n, positions, slots = step.num_tokens, step.positions, step.slot_mapping
        if self._joined is not None and n <= self._most_joined:
            joined: torch.Tensor = self._joined(n, q, k, v, positions, k_cache, v_cache, slots)
            return joined
        if self._rope is None or self._write is None:
            raise RuntimeError(f"decoder: no call of the plan rotates {n} tokens")
        if self._norms:
            dim = self._head_dim
            q = self._norms[0](n, q.reshape(-1, dim)).view(n, -1)
            k = self._norms[1](n, k.reshape(-1, dim)).view(n, -1)
        self._rope(n, q, k, positions)
        self._write(n, k, v, k_cache, v_cache, slots)
        return q
