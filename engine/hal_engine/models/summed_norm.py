"""The norm behind a sublayer whose rows are spread over ranks, in one call or in two."""

from __future__ import annotations

import torch

from hal_engine.models.build_context import BuildContext


class SummedNorm:
    """The sum over ranks of a sublayer's rows, added into the residual, and the norm of it.

    One call up to the size for which the plan has one (see `joined_sites`), else two; with one rank
    the norm alone. Tokens of any number are served, as the plan's ranges follow each other.
    """

    def __init__(
        self, context: BuildContext, tensor: str, *, norm: str, reduce: str, joined: str
    ) -> None:
        ops, group = context.ops, context.group
        self._norm = context.norm(norm, tensor) if ops.most_tokens(norm) else None
        self._reduce = self._joined = None
        self._most_joined = ops.most_tokens(joined) if group is not None else 0
        if self._most_joined:
            arguments = context.norm_arguments(tensor)
            self._joined = ops.bind(joined, group=group, **arguments)
        if group is not None and ops.most_tokens(reduce):
            self._reduce = ops.bind(reduce, group=group)

    def __call__(
        self, n: int, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, hidden] of this rank. Gives the normed rows and the residual."""
        if self._joined is not None and n <= self._most_joined:
            return self._joined(n, x, residual)  # type: ignore[no-any-return]  # a bound op's
        if self._reduce is not None:
            x = self._reduce(n, x)
        if self._norm is None:
            raise RuntimeError(f"decoder: no call of the plan norms {n} tokens")
        return self._norm(n, x, residual)  # type: ignore[no-any-return]  # as above
