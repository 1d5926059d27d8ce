"""Looks at the numbers of watched calls: sampled ones again by the reference, all for NaN and Inf.

The reference computes on copies of what the call was given, in float64 where the op's meaning
allows, and writes into copies as well. The call's own result is what the model goes on with.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hal.binding import Binding
from hal.ops import CATALOGUE
from hal.ops.attention import AttentionRequest
from hal.ops.collective import CollectiveRequest
from hal.ops.gemm import GemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest, Tolerance
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest

_FALLBACK = Tolerance(2e-5, 2e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A compared call. ratio: largest error over its tolerance."""

    site: str
    op: str
    implementation: str
    ratio: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """A call with finite arguments whose result was not."""

    site: str
    op: str
    implementation: str
    text: str


@dataclass(slots=True)
class InspectedSite:
    """A binding whose calls are looked at."""

    binding: Binding
    is_first: bool = True


@dataclass(slots=True)
class HeldCall:
    """What a call was given, copied before it ran. compared: whether the reference runs too."""

    bound: InspectedSite
    copies: tuple[Any, ...]
    is_finite: bool
    is_compared: bool


@dataclass(slots=True)
class Inspector:
    """share: of calls that the reference runs again, 0 to 1; the first call of each site and
    range is always among them, if any are. seed: of the choice."""

    share: float = 0.0
    seed: int = 0
    num_compared: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> calls
    worst: Divergence | None = None
    divergences: list[Divergence] = field(default_factory=list)  # above tolerance, in call order
    non_finite: list[NonFinite] = field(default_factory=list)  # the same
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    def prepare(self, binding: Binding) -> InspectedSite:
        """What `before` wants to know; it holds the weights only if calls are compared."""
        return InspectedSite(binding if self.share else replace(binding, static={}))

    def before(self, bound: InspectedSite, args: Sequence[Any]) -> HeldCall:
        """Copies what the call is given."""
        request = bound.binding.planned.site.request
        compared = self._is_chosen(bound, request)
        copies = tuple(_copied(request, i, arg) for i, arg in enumerate(args)) if compared else ()
        return HeldCall(bound, copies, _all_finite(_inputs(request, args)), compared)

    def _is_chosen(self, bound: InspectedSite, request: OpRequest) -> bool:
        if not self.share:
            return False
        first, bound.is_first = bound.is_first, False
        if not first and self._random.random() >= self.share:
            return False
        if isinstance(request, CollectiveRequest):
            reason = "collectives: the other ranks would have to take part again"
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            return False
        return True

    def after(self, held: HeldCall, args: Sequence[Any], result: Any) -> None:
        """Looks at the result, and compares it if the call was chosen."""
        binding = held.bound.binding
        request, choice = binding.planned.site.request, binding.planned.choice
        outputs = _outputs(request, args, result)
        if held.is_finite and not _all_finite(outputs, has_infinities=_may_be_infinite(request)):
            found = "NaN" if any(bool(t.isnan().any()) for t in outputs) else "infinity"
            self.non_finite.append(
                NonFinite(
                    site=binding.site,
                    op=request.label,
                    implementation=choice.name,
                    text=f"{found} out of finite arguments",
                )
            )
        if not held.is_compared:
            return
        self.num_compared += 1
        wanted = _reference_outputs(binding, held.copies)
        found_ratio, text = _worst_ratio(request, outputs, wanted)
        divergence = Divergence(
            site=binding.site,
            op=request.label,
            implementation=choice.name,
            ratio=found_ratio,
            text=text,
        )
        if self.worst is None or divergence.ratio > self.worst.ratio:
            self.worst = divergence
        if divergence.ratio > 1.0:
            self.divergences.append(divergence)


def _copied(request: OpRequest, index: int, arg: Any) -> Any:
    """A copy of a tensor; caches, which are large, are read in place or made small later."""
    if not isinstance(arg, torch.Tensor) or _is_cache(request, index):
        return arg
    return arg.clone()


def _is_cache(request: OpRequest, index: int) -> bool:
    if isinstance(request, AttentionRequest):
        return index in (1, 2)
    if isinstance(request, KvWriteRequest):
        return index == 1 if request.kv_format else index in (2, 3)
    return False


def _inputs(request: OpRequest, args: Sequence[Any]) -> list[torch.Tensor]:
    """Floating tensors that are arguments, without the caches."""
    return [
        arg
        for index, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and arg.is_floating_point()
        if not _is_cache(request, index)
    ]


def _outputs(request: OpRequest, args: Sequence[Any], result: Any) -> list[torch.Tensor]:
    """Everything that a call produces: what it returns, and what it writes in place."""
    if isinstance(request, RopeRequest):
        return [arg for arg in args[:2] if isinstance(arg, torch.Tensor)]
    if isinstance(request, KvWriteRequest):
        return _written_rows(request, args)
    return _tensors(result)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in _tensors(part)]
    return []


def _written_rows(request: KvWriteRequest, args: Sequence[Any]) -> list[torch.Tensor]:
    if request.kv_format:
        return []
    _, _, k_cache, v_cache, slots = args
    return [
        cache.view(-1, request.num_kv_heads, dim)[slots]
        for cache, dim in ((k_cache, request.head_dim), (v_cache, request.v_head_dim))
    ]


def _may_be_infinite(request: OpRequest) -> bool:
    """A filter of logits marks what is left out with -inf."""
    return isinstance(request, TopKTopPRequest)


def _all_finite(tensors: Sequence[torch.Tensor], *, has_infinities: bool = False) -> bool:
    for tensor in tensors:
        if not tensor.is_floating_point():
            continue
        bad = tensor.isnan() if has_infinities else ~tensor.isfinite()
        if bool(bad.any()):
            return False
    return True


def _reference_outputs(binding: Binding, copies: Sequence[Any]) -> list[torch.Tensor]:
    request = binding.planned.site.request
    kernel = CATALOGUE[request.op].reference(request, **binding.static)
    args = [_widened(request, i, arg) for i, arg in enumerate(copies)]
    if isinstance(request, KvWriteRequest) and not request.kv_format:
        k, v, k_cache, v_cache, slots = args
        rows = len(slots)
        small = [cache.new_empty((rows, *cache.shape[2:])) for cache in (k_cache, v_cache)]
        kernel(k, v, *small, torch.arange(rows, device=slots.device))
        return [
            small[0].view(-1, request.num_kv_heads, request.head_dim),
            small[1].view(-1, request.num_kv_heads, request.v_head_dim),
        ]
    result = kernel(*args)
    return _outputs(request, args, result)


def _widened(request: OpRequest, index: int, arg: Any) -> Any:
    """float32 arguments as float64 where the reference is then more exact and means the same:
    rounding of activations to integers has to see the values that the kernel saw."""
    is_float = isinstance(arg, torch.Tensor) and arg.dtype is torch.float32
    if not is_float or _is_cache(request, index):
        return arg
    if isinstance(request, GemmRequest) and request.weight_format.activation != "float":
        return arg
    if isinstance(request, RmsNormRequest) and request.quantize != "none":
        return arg
    if isinstance(request, KvWriteRequest | TopKTopPRequest):
        return arg
    return arg.double()


def _worst_ratio(
    request: OpRequest, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> tuple[float, str]:
    """The largest error over its tolerance, and that error in words."""
    if [tuple(t.shape) for t in found] != [tuple(t.shape) for t in wanted]:
        shapes = [[list(t.shape) for t in part] for part in (found, wanted)]
        return float("inf"), f"shapes {shapes[0]}, of the reference {shapes[1]}"
    tolerances: Mapping[str, Tolerance] = CATALOGUE[request.op].tolerances
    tolerance = tolerances.get(str(getattr(request, "dtype", "float32")), _FALLBACK)
    worst, text = 0.0, "equal"
    for got, want in zip(found, wanted, strict=True):
        if not got.numel():
            continue
        ratio, error, where = _ratio(got.double(), want.double(), tolerance)
        if ratio > worst or ratio != ratio:
            worst = ratio if ratio == ratio else float("inf")
            text = f"error {error:.3g} at index {where} of {list(got.shape)}"
    return worst, text


def _ratio(
    got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance
) -> tuple[float, float, list[int]]:
    """Error over tolerance. The scale of a row is its largest value: a sum that cancels keeps the
    rounding of its terms."""
    same = (got == want) | (got.isnan() & want.isnan())
    finite = torch.where(want.isfinite(), want.abs(), torch.zeros_like(want))
    row = finite.amax(dim=-1, keepdim=True) if want.dim() else finite
    allowed = tolerance.atol + tolerance.rtol * torch.maximum(finite, row)
    error = torch.where(same, torch.zeros_like(got), (got - want).abs())
    error = torch.where(error.isnan(), torch.full_like(error, float("inf")), error)
    ratio = error / allowed
    flat = int(ratio.argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(flat), ratio.shape)]
    return float(ratio.flatten()[flat]), float(error.flatten()[flat]), where
