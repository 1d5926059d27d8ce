"""What a torch function call asks for, in the terms of an op: operands, weight, what comes after.

A call that no op family means (a convolution that is no cutting into patches, a product written
into an `out`) has a refusal instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hal.integrations.attention_places import AttentionCall
from hal.integrations.free_calls import (
    ADDED,
    ATTENTION,
    CONVOLUTION,
    EINSUM,
    EMBEDDING,
    LINEAR,
    PRODUCT,
)

# The parameter or buffer of the model that a tensor is, or is the transpose of; None for any other.
FindOwned = Callable[[Any], "torch.Tensor | None"]


def _same(y: torch.Tensor) -> torch.Tensor:
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """kind: LINEAR, PRODUCT, EMBEDDING or ATTENTION. weight: of the model; matrix: it as [N, K].
    finish: from the op's result to the function's. refusal: why none of this holds, "" if it does.
    """

    kind: str = ""
    operands: tuple[torch.Tensor, ...] = ()
    weight: torch.Tensor | None = None
    matrix: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    equation: str = ""
    attention: AttentionCall | None = None
    finish: Callable[[torch.Tensor], torch.Tensor] = _same
    refusal: str = ""


def read_call(
    kind: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find_owned: FindOwned
) -> Reading:
    """The reading of one call of `free_calls.FUNCTIONS`."""
    if kwargs.get("out") is not None:
        return Reading(refusal="it writes into a tensor that is given (out=)")
    return _READERS[kind](func, args, kwargs, find_owned)


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], at: int, names: tuple[str, ...], default: Any
) -> Any:
    if len(args) > at:
        return args[at]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _linear(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find_owned: FindOwned
) -> Reading:
    x = _argument(args, kwargs, 0, ("input",), None)
    weight = _argument(args, kwargs, 1, ("weight",), None)
    bias = _argument(args, kwargs, 2, ("bias",), None)
    if _own_matrix(weight, find_owned) is not weight:
        product = (x, weight.transpose(-1, -2) if weight.dim() > 1 else weight)
        return Reading(kind=PRODUCT, operands=product, finish=_adding(bias))
    if bias is not None and find_owned(bias) is None:
        return Reading(
            kind=LINEAR, operands=(x,), weight=weight, matrix=weight, finish=_adding(bias)
        )
    return Reading(kind=LINEAR, operands=(x,), weight=weight, matrix=weight, bias=bias)


def _own_matrix(tensor: Any, find_owned: FindOwned) -> torch.Tensor | None:
    """The model's own matrix that an operand is, or is the transpose of."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
        return None
    return find_owned(tensor)


def _adding(bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return _same if bias is None else lambda y: y + bias


def _product(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find_owned: FindOwned
) -> Reading:
    a = _argument(args, kwargs, 0, ("input", "self"), None)
    b = _argument(args, kwargs, 1, ("other", "mat2", "tensor2"), None)
    weight = _own_matrix(b, find_owned)
    if weight is not None and a.dim() >= 2:
        return Reading(
            kind=LINEAR, operands=(a,), weight=weight, matrix=weight.T if weight is b else weight
        )
    return Reading(kind=PRODUCT, operands=(a, b))


def _einsum(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find_owned: FindOwned
) -> Reading:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return Reading(refusal="an einsum of other than an equation and two operands")
    return Reading(kind=PRODUCT, operands=tuple(operands), equation=equation)


def _added(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find_owned: FindOwned
) -> Reading:
    bias = _argument(args, kwargs, 0, ("input", "self"), None)
    a = _argument(args, kwargs, 1, ("mat1", "batch1"), None)
    b = _argument(args, kwargs, 2, ("mat2", "batch2"), None)
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    weight = _own_matrix(b, find_owned)
    is_plain = beta == alpha == 1 and bias.dim() == 1 and find_owned(bias) is not None
    if weight is not None and is_plain:
        matrix = weight.T if weight is b else weight
        return Reading(kind=LINEAR, operands=(a,), weight=weight, matrix=matrix, bias=bias)

    def finish(y: torch.Tensor) -> torch.Tensor:
        scaled = y if alpha == 1 else alpha * y
        return scaled if beta == 0 else scaled + (bias if beta == 1 else beta * bias)

    return Reading(kind=PRODUCT, operands=(a, b), finish=finish)


def _embedding(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find_owned: FindOwned
) -> Reading:
    ids = _argument(args, kwargs, 0, ("input",), None)
    weight = _argument(args, kwargs, 1, ("weight",), None)
    if _argument(args, kwargs, 3, ("max_norm",), None) is not None:
        return Reading(refusal="an embedding with max_norm, which writes into its table")
    if _own_matrix(weight, find_owned) is not weight:
        return Reading(refusal="a gather from a table that the model does not hold")
    return Reading(kind=EMBEDDING, operands=(ids,), weight=weight, matrix=weight)


def _attention(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find_owned: FindOwned
) -> Reading:
    q, k, v = (
        _argument(args, kwargs, i, (n,), None) for i, n in enumerate(("query", "key", "value"))
    )
    mask = _argument(args, kwargs, 3, ("attn_mask",), None)
    is_causal = bool(_argument(args, kwargs, 5, ("is_causal",), False))
    if _argument(args, kwargs, 4, ("dropout_p",), 0.0):
        return Reading(refusal="attention with dropout")
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape[0] != k.shape[0]:
        return Reading(refusal="attention over other than [batch, heads, tokens, head_dim]")
    if is_causal and q.shape[2] > k.shape[2]:
        return Reading(refusal="causal attention of more queries than keys")
    if is_causal and q.shape[2] < k.shape[2]:  # torch aligns to the first key
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    if mask is not None and mask.dim() < 4:
        mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
    call = AttentionCall(
        q=q,
        k=k,
        v=v,
        mask=mask,
        scale=_argument(args, kwargs, 6, ("scale",), None),
        is_causal=is_causal,
    )
    return Reading(kind=ATTENTION, attention=call, finish=lambda y: y.transpose(1, 2))


def _convolution(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], find_owned: FindOwned
) -> Reading:
    """A convolution whose stride is its kernel cuts its input into patches: one product each."""
    x = _argument(args, kwargs, 0, ("input",), None)
    weight = _argument(args, kwargs, 1, ("weight",), None)
    bias = _argument(args, kwargs, 2, ("bias",), None)
    sizes = tuple(weight.shape[2:])
    stride = _sizes(_argument(args, kwargs, 3, ("stride",), 1), len(sizes))
    padding = _argument(args, kwargs, 4, ("padding",), 0)
    dilation = _sizes(_argument(args, kwargs, 5, ("dilation",), 1), len(sizes))
    groups = _argument(args, kwargs, 6, ("groups",), 1)
    is_unpadded = padding == "valid" or (
        not isinstance(padding, str) and not any(_sizes(padding, len(sizes)))
    )
    plain = is_unpadded and groups == 1 and set(dilation) == {1} and x.dim() == len(sizes) + 2
    if not plain or stride != sizes or find_owned(weight) is None:
        return Reading(
            refusal=f"a convolution of kernel {sizes}, stride {stride}, padding {padding}, "
            f"{groups} groups; only one that cuts into patches is a product"
        )
    rows, spatial = _patches(x, sizes)

    def finish(y: torch.Tensor) -> torch.Tensor:
        return y.view(x.shape[0], *spatial, weight.shape[0]).movedim(-1, 1).contiguous()

    return Reading(
        kind=LINEAR,
        operands=(rows,),
        weight=weight,
        matrix=weight.flatten(1),
        bias=bias,
        finish=finish,
    )


def _sizes(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def _patches(x: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """x [B, C, spatial…] as rows [patches, C * patch], and the number of patches by dimension."""
    for at, size in enumerate(sizes):
        x = x.unfold(2 + at, size, size)
    spatial = tuple(x.shape[2 : 2 + len(sizes)])
    rows = x.movedim(1, 1 + len(sizes))  # [B, spatial…, C, patch…]
    return rows.reshape(-1, x.shape[1] * torch.Size(sizes).numel()), spatial


_READERS: Mapping[str, Callable[[Any, Sequence[Any], Mapping[str, Any], FindOwned], Reading]] = {
    LINEAR: _linear,
    PRODUCT: _product,
    EINSUM: _einsum,
    ADDED: _added,
    EMBEDDING: _embedding,
    ATTENTION: _attention,
    CONVOLUTION: _convolution,
}
