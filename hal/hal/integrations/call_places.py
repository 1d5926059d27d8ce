"""Where a model calls an op: its name in the plan, its requests, and how a call reaches a bound op.

A place is made from what a rehearsal saw or from a module's shapes; `sites` are its requests for
the plan, `bind` takes the bound ops of that plan, `call` runs them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hal.binding import BoundOp, BoundOps
from hal.errors import BindingError, RoutingError
from hal.ops.batched_gemm import BatchedGemmRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.request import OpRequest, TokenRange

_FLOATS = "float32, bfloat16 or float16"
_LAYER = re.compile(r"(^|\.)(\d+)(?=\.|$)")

Site = tuple[str, int | None, int, OpRequest]  # pattern, layer, rank, request: of `group_sites`


class Place(Protocol):
    """What every place has. widest: rows of a call per token of the model's own input."""

    name: str
    widest: int

    def sites(self, max_tokens: int) -> Iterator[Site]: ...

    def bind(self, ops: BoundOps) -> None: ...


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def site_of(name: str, request: OpRequest) -> Site:
    """The first number of a module's path is its layer: equal layers share a line of the plan."""
    found = _LAYER.search(name)
    if found is None:
        return name, None, 0, request
    pattern = f"{name[: found.start(2)]}*{name[found.end(2) :]}"
    return pattern, int(found[2]), 0, request


def token_range(max_tokens: int, widest: int) -> TokenRange:
    return TokenRange(1, max_tokens * widest)


def widest_of(rows: int, tokens: int, before: int) -> int:
    return max(before, math.ceil(rows / max(tokens, 1)))


def refuse_gradients(name: str, *tensors: torch.Tensor | None) -> None:
    """Raises RoutingError where autograd would be asked for what kernels do not give."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RoutingError(
            name,
            "a call without gradients: the kernels have no backward pass",
            "gradients enabled, and a tensor that requires them",
            "call the model under torch.inference_mode() or torch.no_grad(); undo() to train",
        )


def run_bound(name: str, op: BoundOp, tokens: int, *args: Any) -> Any:
    """The call of a bound op. Raises RoutingError beyond the planned number of tokens."""
    try:
        return op(tokens, *args)
    except BindingError as error:
        raise RoutingError(
            name, error.required, f"{tokens} tokens", "route it with a larger max_tokens"
        ) from error


@dataclass(frozen=True, slots=True)
class WeightState:
    """What a weight was when it was bound: kernels may hold a packed copy of it."""

    address: int
    version: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightState:
        return cls(weight.data_ptr(), -1 if weight.is_inference() else weight._version)

    def check(self, name: str, weight: torch.Tensor) -> None:
        """Raises RoutingError if the weight was moved, replaced or written to since."""
        version = -1 if self.version < 0 else weight._version
        if weight.data_ptr() != self.address or version != self.version:
            raise RoutingError(
                name,
                "the weight that was bound",
                "one that was moved or changed since",
                "undo(), change the model, and route it again",
            )


@dataclass(slots=True, kw_only=True, eq=False)
class LinearPlace:
    """y = x @ weight.T + bias with a weight that is there when the model is loaded."""

    name: str
    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None = None
    source: torch.Tensor | None = None  # the parameter that `weight` is made from
    widest: int = 1
    _op: BoundOp | None = field(default=None, init=False)
    _state: WeightState | None = field(default=None, init=False)

    def sites(self, max_tokens: int) -> Iterator[Site]:
        dtype = dtype_name(self.weight.dtype)
        if dtype not in FORMATS:
            raise RoutingError(
                self.name, f"a weight of {_FLOATS}", dtype, "convert the model: model.float()"
            )
        request = GemmRequest(
            n=self.weight.shape[0],
            k=self.weight.shape[1],
            dtype=dtype,
            weight_format=FORMATS[dtype],
            has_bias=self.bias is not None,
            tokens=token_range(max_tokens, self.widest),
        )
        yield site_of(self.name, request)

    def bind(self, ops: BoundOps) -> None:
        bias = None if self.bias is None else self.bias.detach()
        self._op = ops.bind(self.name, weight=self.weight.detach(), bias=bias)
        self._state = WeightState.of(self.weight if self.source is None else self.source)

    def call(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]. Raises RoutingError for another dtype or a changed weight."""
        weight = self.weight
        if self._op is None or self._state is None:
            raise _not_bound(self.name)
        self._state.check(self.name, weight if self.source is None else self.source)
        refuse_gradients(self.name, x, weight)
        if x.dtype != weight.dtype:
            raise _other_dtype(self.name, weight.dtype, x.dtype)
        rows = x.reshape(-1, weight.shape[1])
        if not len(rows):
            return x.new_empty((*x.shape[:-1], weight.shape[0]))
        y: torch.Tensor = run_bound(self.name, self._op, len(rows), rows.contiguous())
        return y.view(*x.shape[:-1], weight.shape[0])


@dataclass(slots=True, kw_only=True, eq=False)
class EmbeddingPlace:
    """Rows of a table [V, H] by ids."""

    name: str
    weight: torch.Tensor
    widest: int = 1
    _op: BoundOp | None = field(default=None, init=False)
    _state: WeightState | None = field(default=None, init=False)

    def sites(self, max_tokens: int) -> Iterator[Site]:
        request = EmbeddingRequest(
            vocab_size=self.weight.shape[0],
            hidden_size=self.weight.shape[1],
            dtype=dtype_name(self.weight.dtype),
            tokens=token_range(max_tokens, self.widest),
        )
        yield site_of(self.name, request)

    def bind(self, ops: BoundOps) -> None:
        self._op = ops.bind(self.name, weight=self.weight.detach())
        self._state = WeightState.of(self.weight)

    def call(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int [...] -> [..., H]. Raises what the kernel does for an id outside the table."""
        if self._op is None or self._state is None:
            raise _not_bound(self.name)
        self._state.check(self.name, self.weight)
        refuse_gradients(self.name, self.weight)
        flat = ids.reshape(-1).long().contiguous()
        if not len(flat):
            return self.weight.new_empty((*ids.shape, self.weight.shape[1]))
        rows: torch.Tensor = run_bound(self.name, self._op, len(flat), flat)
        return rows.view(*ids.shape, self.weight.shape[1])


@dataclass(slots=True, kw_only=True, eq=False)
class ProductPlace:
    """A product of two activations. sizes: every (N, K) that the rehearsal saw."""

    name: str
    dtype: torch.dtype
    equation: str = ""
    widest: int = 1
    sizes: set[tuple[int, int]] = field(default_factory=set)
    _op: BoundOp | None = field(default=None, init=False)

    def sites(self, max_tokens: int) -> Iterator[Site]:
        widths, depths = ({size[i] for size in self.sizes} for i in (0, 1))
        request = BatchedGemmRequest(
            n=widths.pop() if len(widths) == 1 else 0,
            k=depths.pop() if len(depths) == 1 else 0,
            dtype=dtype_name(self.dtype),
            equation=self.equation,
            tokens=token_range(max_tokens, self.widest),
        )
        yield site_of(self.name, request)

    def bind(self, ops: BoundOps) -> None:
        self._op = ops.bind(self.name)

    def call(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The product. Raises RoutingError for another dtype than the plan's."""
        if self._op is None:
            raise _not_bound(self.name)
        refuse_gradients(self.name, a, b)
        for operand in (a, b):
            if operand.dtype != self.dtype:
                raise _other_dtype(self.name, self.dtype, operand.dtype)
        if not a.numel() or not b.numel():  # of no rows, or sums of nothing
            return torch.einsum(self.equation, a, b) if self.equation else torch.matmul(a, b)
        rows, _, _ = product_sizes(a, b, self.equation)
        y: torch.Tensor = run_bound(self.name, self._op, rows, a, b)
        return y


def product_sizes(a: torch.Tensor, b: torch.Tensor, equation: str) -> tuple[int, int, int]:
    """(rows, N, K): rows of the result (of an equation: of a), its columns, and what is summed."""
    if equation:
        return _equation_sizes(a, b, equation)
    depth = a.shape[-1]
    if b.dim() < 2 or a.dim() < 2:
        columns = 1 if b.dim() < 2 else b.shape[-1]
        other = a if a.dim() > 1 else b[..., 0]
        return (other.numel() // max(1, other.shape[-1]) or 1), columns, depth
    dims = max(a.dim(), b.dim()) - 2
    sizes = [[1] * (dims + 2 - x.dim()) + list(x.shape[:-2]) for x in (a, b)]
    batch = math.prod(max(pair) for pair in zip(*sizes, strict=True))  # as torch broadcasts
    return batch * a.shape[-2], b.shape[-1], depth


def _equation_sizes(a: torch.Tensor, b: torch.Tensor, equation: str) -> tuple[int, int, int]:
    left, _, right = equation.replace(" ", "").partition(",")
    right, _, out = right.partition("->")
    if "." in equation or not out:
        return a.numel() // max(1, a.shape[-1]), b.shape[-1], a.shape[-1]
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    depth = math.prod(sizes[s] for s in set(left) & set(right) - set(out))
    rows = max(1, a.numel() // max(1, depth))
    return rows, max(1, math.prod(sizes[s] for s in out) // rows), depth


def _not_bound(name: str) -> RoutingError:
    return RoutingError(name, "a call after routing", "nothing is bound to it", "report it")


def _other_dtype(name: str, planned: torch.dtype, found: torch.dtype) -> RoutingError:
    return RoutingError(
        name,
        f"{dtype_name(planned)}, which was planned",
        dtype_name(found),
        "route the model in the dtype that it runs in, without autocast",
    )
