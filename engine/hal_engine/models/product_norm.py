"""A product that is added into the residual with the norm behind it, up to the size planned so."""

from __future__ import annotations

from typing import Any

import torch

from hal.binding import BoundOp
from hal_engine.models.build_context import BuildContext


class ProductNorm:
    """residual += x @ weight.T and the norm of it in one call, on one rank: see `product_joins`."""

    def __init__(
        self, context: BuildContext, site: str, projection: dict[str, Any], tensor: str
    ) -> None:
        """site: of the joined call. projection: weight and bias of the product, which the product's
        own call holds too where the plan has both. tensor: name of the norm's weight."""
        self._most = context.ops.most_tokens(site) if context.group is None else 0
        self._joined: BoundOp | None = None
        if self._most:
            norm = context.norm_arguments(tensor)
            self._joined = context.ops.bind(
                site, norm_weight=norm["weight"], eps=norm["eps"], **projection
            )

    def serves(self, n: int) -> bool:
        """Whether the plan has one call for n tokens."""
        return n <= self._most

    def __call__(
        self, n: int, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, features] before the product. Gives the normed rows and the residual."""
        if self._joined is None:
            raise RuntimeError(f"decoder: no call of the plan multiplies and norms {n} tokens")
        return self._joined(n, x, residual)  # type: ignore[no-any-return]  # a bound op's
