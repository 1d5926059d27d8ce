"""Mixture-of-experts modules that follow transformers' experts interface, as grouped products.

What lies between the two products (gate, activation, biases) stays the module's own code, so that
each model keeps its meaning: two products are routed, and nothing is fused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hal.binding import BoundOp, BoundOps
from hal.errors import RoutingError
from hal.integrations.call_places import (
    Site,
    WeightState,
    dtype_name,
    refuse_gradients,
    run_bound,
    site_of,
    token_range,
    widest_of,
)
from hal.ops.formats import FORMATS
from hal.ops.gemm import GroupedGemmRequest


def is_experts(module: torch.nn.Module) -> bool:
    """Whether the module is one that transformers dispatches by `_experts_implementation`."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate"))


@dataclass(slots=True, kw_only=True, eq=False)
class ExpertsPlace:
    """Up and down products of one experts module. module: with weights [E, N, K], or [E, K, N]."""

    name: str
    module: Any
    experts_per_token: int = 1
    widest: int = 1
    _up: BoundOp | None = field(default=None, init=False)
    _down: BoundOp | None = field(default=None, init=False)
    _states: tuple[WeightState, ...] = field(default=(), init=False)

    def note(self, hidden: torch.Tensor, ids: torch.Tensor, tokens: int) -> None:
        """Takes one call of the rehearsal into account."""
        self.experts_per_token = max(self.experts_per_token, ids.shape[-1])
        self.widest = widest_of(len(hidden), tokens, self.widest)

    @property
    def _parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        up = self.module.gate_up_proj if self.module.has_gate else self.module.up_proj
        return up, self.module.down_proj

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as [E, N, K], without a copy."""
        up, down = self._parameters
        if self.module.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        return up, down

    def sites(self, max_tokens: int) -> Iterator[Site]:
        if getattr(self.module, "_is_expert_parallel", False):
            raise RoutingError(
                self.name,
                "all experts in this process",
                "experts shared out over ranks",
                "load the model without expert parallelism",
            )
        for part, weight in zip(("up", "down"), self._matrices(), strict=True):
            dtype = dtype_name(weight.dtype)
            if dtype not in FORMATS:
                raise RoutingError(
                    self.name,
                    "experts of float32, bfloat16 or float16",
                    dtype,
                    "convert the model: model.float()",
                )
            request = GroupedGemmRequest(
                num_experts=weight.shape[0],
                experts_per_token=self.experts_per_token,
                n=weight.shape[1],
                k=weight.shape[2],
                dtype=dtype,
                weight_format=FORMATS[dtype],
                tokens=token_range(max_tokens, self.widest),
            )
            yield site_of(f"{self.name}.{part}", request)

    def bind(self, ops: BoundOps) -> None:
        up, down = self._matrices()
        self._up = ops.bind(f"{self.name}.up", weight=up.detach())
        self._down = ops.bind(f"{self.name}.down", weight=down.detach())
        self._states = tuple(WeightState.of(weight) for weight in self._parameters)

    def call(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, K], ids int [T, top_k], weights [T, top_k] -> [T, K].

        Raises RoutingError for changed weights, gradients, or more tokens than planned.
        """
        if self._up is None or self._down is None:
            raise RoutingError(self.name, "a call after routing", "nothing bound", "report it")
        for state, weight in zip(self._states, self._parameters, strict=True):
            state.check(self.name, weight)
        refuse_gradients(self.name, hidden, *self._parameters)
        module, top_k = self.module, ids.shape[-1]
        if not len(hidden):
            return torch.zeros_like(hidden)
        expert_of, order = torch.sort(ids.reshape(-1))
        counts = torch.bincount(expert_of, minlength=len(self._parameters[0]))
        if len(counts) > len(self._parameters[0]):
            raise RoutingError(
                self.name,
                f"experts below {len(self._parameters[0])}",
                f"expert {int(expert_of[-1])}",
                "route this model without expert parallelism",
            )
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        rows = hidden[order // top_k]
        y = run_bound(f"{self.name}.up", self._up, len(hidden), rows, offsets)
        if module.has_bias:
            bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
            y = y + bias[expert_of]
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        y = run_bound(f"{self.name}.down", self._down, len(hidden), y.contiguous(), offsets)
        if module.has_bias:
            y = y + module.down_proj_bias[expert_of]
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        y = y * weights.reshape(-1)[order].unsqueeze(-1)
        placed = torch.empty_like(y)
        placed[order] = y
        summed = placed.view(len(hidden), top_k, -1).sum(dim=1)
        return summed.to(hidden.dtype)


Arranged = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def arranger(module: torch.nn.Module) -> Callable[[Sequence[Any], Mapping[str, Any]], Arranged]:
    """The three arguments of an experts module's forward, whatever it calls them."""
    names = list(inspect.signature(type(module).forward).parameters)[1:4]

    def arrange(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arranged:
        given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]
        return given[0], given[1], given[2]

    return arrange


def calling(
    place: ExpertsPlace, arrange: Callable[[Sequence[Any], Mapping[str, Any]], Arranged]
) -> Callable[..., Any]:
    """A forward of the module that calls its place."""

    def called(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return place.call(*arrange(args, kwargs))

    return called
