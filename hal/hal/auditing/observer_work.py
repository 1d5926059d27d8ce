"""How much work an op is: floating-point operations by torch's own formulas, bytes by its tensors.

Computed once for each set of arguments. What torch has no formula for and is a product or an
attention has one here; all else counts no operations, as its time is that of its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_SDPA = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)
_PRODUCTS_OF_TWO = (
    "aten::_int_mm",
    "aten::_weight_int8pack_mm",
    "aten::mkldnn_linear",
    "aten::_grouped_mm",
)
_PRODUCTS_WITH_A_MATRIX = ("aten::linear", "aten::matmul")


def flops_of(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> float:
    """2 per multiply and add; 0 where no formula is known."""
    if any(isinstance(arg, torch.Tensor) and arg.is_nested for arg in args):
        return _nested_flops(name, args, result)
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(func, "overloadpacket", None))
    if formula is not None:
        try:
            return float(formula(*args, **kwargs, out_val=result))
        except (AssertionError, ValueError, TypeError, IndexError, RuntimeError):
            return 0.0  # arguments that the formula does not know: counted as none, like torch does
    shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
    if name in _SDPA and len(shapes) >= 3:
        return _attention_flops(shapes[0], shapes[1], shapes[2])
    if name in _PRODUCTS_OF_TWO and len(shapes) >= 2:
        outputs = result.numel() if isinstance(result, torch.Tensor) else 0
        return 2.0 * outputs * shapes[0][-1]
    if name in ("aten::mv", "aten::dot", "aten::vdot") and shapes:
        return 2.0 * _product(shapes[0])
    if name == "aten::addmv" and len(shapes) >= 2:
        return 2.0 * _product(shapes[1])
    return 0.0


def _nested_flops(name: str, args: Sequence[Any], result: Any) -> float:
    """Of products of a nested tensor with a matrix: each of its rows with all of it."""
    if name not in _PRODUCTS_WITH_A_MATRIX or len(args) < 2 or not isinstance(result, torch.Tensor):
        return 0.0
    matrix = args[1]
    if not isinstance(matrix, torch.Tensor) or matrix.is_nested or matrix.dim() != 2:
        return 0.0
    return 2.0 * _num_elements(result) * matrix.shape[0 if name == "aten::matmul" else 1]


def _num_elements(tensor: torch.Tensor) -> int:
    """A nested tensor does not say; its memory is as large as all of its parts."""
    if tensor.is_nested:
        return tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.numel()


def _attention_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> float:
    if len(query) < 2 or len(key) < 2 or len(value) < 2:
        return 0.0
    return 2.0 * _product(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def bytes_of(
    tensors: Sequence[torch.Tensor],
    *,
    is_gather: bool = False,
    is_grouped: bool = False,
    num_inputs: int,
) -> float:
    """Bytes read and written: each tensor once, one that is expanded by its memory only. Of a
    gather's table only the rows that come out count, of experts' weights at most one expert a row.
    """
    sizes = [_bytes(tensor) for tensor in tensors]
    if is_gather and num_inputs and len(sizes) > num_inputs:
        written = sum(sizes[num_inputs:])
        sizes[0] = min(sizes[0], written)
    if is_grouped and num_inputs >= 2:
        rows, weights = tensors[0], tensors[1]
        if rows.dim() == 2 and weights.dim() == 3:
            share = min(1.0, rows.shape[0] / max(1, weights.shape[0]))
            sizes[1] = int(sizes[1] * share)
    return float(sum(sizes))


def _bytes(tensor: torch.Tensor) -> int:
    try:
        whole = _num_elements(tensor) * tensor.element_size()
        if tensor.layout is not torch.strided:
            return whole
        return min(whole, tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return 0
