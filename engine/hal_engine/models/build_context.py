"""What the parts of a model are built from: the plan's bound ops, the checkpoint, the rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hal.binding import BoundOp, BoundOps
from hal.ops.collective import CollectiveGroup
from hal.ops.formats import torch_dtype
from hal_engine.checkpoint.protocol import Checkpoint
from hal_engine.config import ModelConfig
from hal_engine.precision import Precision
from hal_engine.shards import Shard
from hal_engine.weights import Part, read_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What the parts of a model are built from."""

    config: ModelConfig
    precision: Precision
    shard: Shard
    ops: BoundOps
    weights: Checkpoint
    group: CollectiveGroup | None
    cos_sin_cache: torch.Tensor

    def gemm(
        self, site: str, parts: list[Part], biases: list[Part], *, pad_rows_to: int = 0
    ) -> BoundOp:
        """Binds a matrix product. Its format is what the plan has for the site."""
        return self.ops.bind(site, **self.gemm_arguments(parts, biases, pad_rows_to=pad_rows_to))

    def gemm_arguments(
        self, parts: list[Part], biases: list[Part], *, pad_rows_to: int = 0
    ) -> dict[str, Any]:
        """The weight, in the format that the plan has for these tensors, and the bias."""
        target = self.precision.weight_format(self.config, [part.name for part in parts])
        weight = read_weight(self.weights, parts, target, pad_rows_to=pad_rows_to)
        bias = None
        if biases:
            dtype = torch_dtype(self.precision.dtype)
            rows = [self.weights.read_float(b.name).to(dtype) for b in biases]
            bias = torch.cat(
                [
                    r if b.rows is None else r[b.rows[0] : b.rows[1]]
                    for r, b in zip(rows, biases, strict=True)
                ]
            )
        return {"weight": weight, "bias": bias}

    def norm(self, site: str, tensor: str) -> BoundOp:
        return self.ops.bind(site, **self.norm_arguments(tensor))

    def norm_arguments(self, tensor: str) -> dict[str, Any]:
        weight = self.weights.read_float(tensor).to(torch_dtype(self.precision.dtype))
        return {"weight": weight.contiguous(), "eps": self.config.rms_norm_eps}
