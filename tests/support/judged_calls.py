"""Whether a bound call did what its op's reference does in float64: its results, and what it wrote
into caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hal.ops import CATALOGUE, index_logits
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.kv_formats import KV_FORMATS, read_rows, write_rows
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal.ops.low_precision import decode_scale, dequantize_groups

Pair = tuple[torch.Tensor, torch.Tensor]  # found, exact
# Arguments that a call writes beside what it returns: plain caches.
_WRITTEN: Mapping[str, Sequence[int]] = MappingProxyType({"rope_kv_write": (4, 5)})
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_SCALE_ERROR = 2.0**-7  # a scale follows from a largest value that is rounded to 16 bits first
_STEP = 2.0**-3 + _SCALE_ERROR  # of e4m3, as a share of a value
_SCORE_ERROR = 2.0**-14  # of the largest: float32 sums of products that are exact


def wider(value: Any) -> Any:
    """A copy of a tensor, in float64 if it is floating: in that the references then compute. Rows
    that come rounded, with their scales, are the values that they stand for."""
    if _is_rounded(value):
        values, scales = value
        kind = "ue8m0" if scales.dtype == torch.uint8 else "float32"
        return dequantize_groups(
            values, scales, element="fp8_e4m3fn", scale_kind=kind, dtype=torch.float64
        )
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(torch.float64, copy=True) if value.is_floating_point() else value.clone()


def _is_rounded(value: Any) -> bool:
    """Whether the value is rows in eight bits with their scales."""
    first = value[0] if isinstance(value, tuple) and value else None
    return isinstance(first, torch.Tensor) and first.dtype in _EIGHT_BITS


def check_call(
    request: Any,
    static: Mapping[str, Any],
    found: tuple[Sequence[Any], Any],
    exact: tuple[Sequence[Any], Any],
) -> None:
    """found, exact: the arguments after the call and what it returned, of the kernel and of the
    reference. Raises AssertionError for what is beyond the op's tolerance."""
    (args, result), (copies, wanted) = found, exact
    if isinstance(request, IndexSelectionRequest):
        _check_lists(request, static, result, (copies, wanted))
        return
    if isinstance(request, LatentKvWriteRequest):
        _check_cached_rows(request, args, copies)
    if result is None:  # what writes in place returns nothing: all that it was given is compared
        result, wanted = args, copies
    for got, want in _in_units_of_scales(result, wanted):
        bound = CATALOGUE[request.op].tolerances["fp8_e4m3fn"]
        torch.testing.assert_close(got, want, rtol=bound.rtol + _SCALE_ERROR, atol=bound.atol)
        scales, exact_scales = result[1].double(), wanted[1].double()
        torch.testing.assert_close(scales, exact_scales, rtol=_SCALE_ERROR, atol=0.0)
    pairs = [*_pairs(result, wanted), *((args[i], copies[i]) for i in _WRITTEN.get(request.op, ()))]
    for got, want in pairs:
        if request.op == "index_top_k":  # a list is in any order
            got, want = got.sort(1).values, want.sort(1).values
        _check_pair(request.op, got, want, str(got.dtype).removeprefix("torch."))


def _check_pair(op: str, got: torch.Tensor, want: torch.Tensor, dtype: str) -> None:
    bound = CATALOGUE[op].tolerances.get(dtype)
    rtol, atol = (bound.rtol, bound.atol) if bound else (0.0, 0.0)
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


def _in_units_of_scales(found: Any, exact: Any) -> Iterator[Pair]:
    """Rounded rows, if the result begins with such, in units of the exact scales."""
    if _is_rounded(found):
        kind = "ue8m0" if exact[1].dtype == torch.uint8 else "float32"
        unit = decode_scale(exact[1], kind).double()
        unit = unit.repeat_interleave(exact[0].shape[1] // unit.shape[1], dim=1)
        yield wider(found[:2]) / unit, wider(exact[:2]) / unit


def _pairs(found: Any, exact: Any) -> Iterator[Pair]:
    """The tensors of a result, but rounded values and their scales, which are compared as what they
    stand for."""
    first = 2 if _is_rounded(found) else 0
    yield from zip(_tensors(found)[first:], _tensors(exact)[first:], strict=True)


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _check_cached_rows(
    request: LatentKvWriteRequest, args: Sequence[Any], copies: Sequence[Any]
) -> None:
    """The rows of the call's slots within one step of the format, all other bytes as they were."""
    got, want, slots = args[3].clone(), copies[3].clone(), args[4]
    name, size = request.kv_format, request.block_size
    rows = read_rows(name, got, size, slots, torch.float64)
    exact = read_rows(name, want, size, slots, torch.float64)
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    # A rotated value is a difference of two that are rounded to 16 bits first.
    torch.testing.assert_close(rows, exact, rtol=_STEP, atol=largest * 2.0**-8)
    if not KV_FORMATS[name].is_plain:
        for cache in (got, want):
            _forget(name, cache, size, slots)
        assert torch.equal(got, want), "bytes beside the rows were written"


def _forget(name: str, cache: torch.Tensor, block_size: int, slots: torch.Tensor) -> None:
    """Overwrites the rows of the slots, so that caches can be compared without them."""
    write_rows(name, cache, block_size, slots, torch.zeros(len(slots), KV_FORMATS[name].dim))


def _check_lists(
    request: IndexSelectionRequest,
    static: Mapping[str, Any],
    found: torch.Tensor,
    exact: tuple[Sequence[Any], torch.Tensor],
) -> None:
    """As many entries as the reference chose, each once, with scores as high as those have: which
    of two nearly equal ones is chosen is open."""
    (q, weights, keys, meta), wanted = exact
    score = index_logits.reference(request.logits, scale=static["scale"])
    logits = score(q, weights, keys, meta).double()
    bound = float(logits[logits.isfinite()].abs().max()) * _SCORE_ERROR
    for got, want, scores in zip(found.long(), wanted.long(), logits, strict=True):
        got, want = got[got >= 0], want[want >= 0]
        assert len(set(got.tolist())) == len(got) == len(want)
        high, low = scores[want].sort().values, scores[got].sort().values
        torch.testing.assert_close(low, high, rtol=0.0, atol=bound)
