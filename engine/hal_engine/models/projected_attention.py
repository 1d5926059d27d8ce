"""Attention over the cache and the output projection behind it, in one call or in two."""

from __future__ import annotations

from typing import Any

import torch

from hal.binding import BoundOp
from hal_engine.models.build_context import BuildContext
from hal_engine.models.joined_sites import ATTENTION_PROJECTION
from hal_engine.models.step_inputs import StepInputs


class ProjectedAttention:
    """The rows of a step through attention and output projection.

    Decoding rows take one call up to the number for which the plan has one (see `joined_sites`),
    all others attention by phase and one product for all of them. The bound calls hold the weight
    that is read once.
    """

    def __init__(
        self, context: BuildContext, site: str, scale: float, projection: dict[str, Any]
    ) -> None:
        """site: up to the layer's number. projection: weight and bias of the product."""
        ops, static = context.ops, {"scale": scale, "sinks": None}
        joined, attention, output = (
            site + name for name in (ATTENTION_PROJECTION, "attention", "o_proj")
        )
        self._most_joined = ops.most_tokens(joined, "decode")
        self._joined: BoundOp | None = None
        if self._most_joined:
            weight = projection["weight"]
            self._joined = ops.bind(joined, "decode", weight=weight, **static)
        self._attend = {
            phase: ops.bind(attention, phase, **static)
            for phase in ("prefill", "decode")
            if ops.most_tokens(attention, phase)
        }
        self._project = {
            phase: ops.bind(output, phase, **projection)
            for phase in ("any", "prefill", "decode")
            if ops.most_tokens(output, phase)
        }

    def __call__(
        self, q: torch.Tensor, step: StepInputs, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """q: [T, heads * head_dim] -> [T, hidden] of this rank, decoding rows first."""
        first, rest = step.num_decode_tokens, step.num_tokens - step.num_decode_tokens
        if self._joined is None or step.decode is None or first > self._most_joined:
            rows = self.attended(q, step, k_cache, v_cache)
            return self._output(rows.shape[0], rows, "prefill" if rest else "decode")
        done = self._joined(first, q if rest == 0 else q[:first], k_cache, v_cache, step.decode)
        if step.prefill is None:
            return done  # type: ignore[no-any-return]  # a bound op's
        rows = self._attend["prefill"](rest, q[first:], k_cache, v_cache, step.prefill)
        return torch.cat([done, self._output(rest, rows, "prefill")])

    def attended(
        self, q: torch.Tensor, step: StepInputs, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """As a call, without the projection: [T, heads * v_head_dim]."""
        first, rest = step.num_decode_tokens, step.num_tokens - step.num_decode_tokens
        done: list[torch.Tensor] = []
        if step.decode is not None:
            rows = q if rest == 0 else q[:first]
            done.append(self._attend["decode"](first, rows, k_cache, v_cache, step.decode))
        if step.prefill is not None:
            rows = q if first == 0 else q[first:]
            done.append(self._attend["prefill"](rest, rows, k_cache, v_cache, step.prefill))
        return done[0] if len(done) == 1 else torch.cat(done)

    def _output(self, n: int, rows: torch.Tensor, phase: str) -> torch.Tensor:
        """The product of rows of a step; a plan that joins nothing has one for every phase."""
        project = self._project.get("any") or self._project[phase]
        return project(n, rows)  # type: ignore[no-any-return]  # a bound op's
