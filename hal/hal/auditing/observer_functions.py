"""Torch functions that a program calls: their names, their arguments by name, which of their calls
are equal.

A call is recognised by the facts of its arguments; names of parameters are looked up once for each
entry.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Final

import torch

from hal.auditing.observer_facts import MANY, SCALARS, FactReader, is_tensor, plain
from hal.auditing.observer_masks import MaskReader

Arguments = tuple[tuple[str, Any], ...]
_SIGNATURES: Final[dict[str, tuple[str, ...]]] = {
    "scaled_dot_product_attention": (
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ),
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "bmm": ("input", "mat2"),
    "mm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "addmm": ("input", "mat1", "mat2"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
    "log_softmax": ("input", "dim", "_stacklevel", "dtype"),
    "dropout": ("input", "p", "training", "inplace"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "cat": ("tensors", "dim"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "conv1d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv3d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "einsum": ("equation", "operands"),
    "to": ("self",),
    "contiguous": ("self", "memory_format"),
}
_VARYING: Final = frozenset({"getitem", "setitem", "add", "sub", "mul", "div", "select", "narrow"})
# Asked of a tensor all the time, and nothing runs.
_METADATA: Final = frozenset(
    {"dim", "size", "stride", "numel", "nelement", "element_size", "is_contiguous", "len", "hash"}
    | {"is_floating_point", "is_complex", "is_signed", "data_ptr", "storage_offset", "get_device"}
    | {"untyped_storage", "storage", "ndimension", "is_inference", "is_pinned", "is_conj"}
    | {"is_neg", "is_set_to", "register_hook", "requires_grad_", "is_same_size", "is_tensor"}
    | {"broadcast_shapes", "result_type", "can_cast", "promote_types", "class_getitem", "repr"}
    | {"format", "reduce_ex", "deepcopy", "dir", "is_nonzero", "is_shared", "delattr"}
    | {"device", "Generator", "Stream", "Event"}
)
_DUNDERS: Final = {"rmatmul": "matmul", "iadd": "add", "radd": "add", "rmul": "mul", "imul": "mul"}


_SDPA: Final = "scaled_dot_product_attention"
_SKIPPED: Final = object()


class FunctionReader:
    """Reads calls of torch functions; what it learns of functions is kept."""

    def __init__(self, facts: FactReader, masks: MaskReader) -> None:
        self._facts = facts
        self._masks = masks
        self._names: dict[Any, str] = {}
        self._parameters: dict[Any, tuple[str, ...]] = {}

    def name(self, func: Any) -> str:
        """ "linear" of F.linear, "matmul" of Tensor.__matmul__; "" for what is not recorded."""
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = _function_name(func)
        return name

    def key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Equal for calls with equal `arguments`."""
        name = self._names[func]
        part = self._varying_part if name in _VARYING else self._part
        found = [func]
        for value in args:
            content = part(value)
            if content is not _SKIPPED:
                found.append(content)
        for label, value in kwargs.items():
            found += (label, part(value))
        if name == _SDPA:
            found.append(self._masks.pattern(mask_of(args, kwargs)))
        return tuple(found)

    def _part(self, value: Any) -> Any:
        if is_tensor(value):
            return self._facts.fact(value)
        if type(value) in SCALARS:
            return value
        if isinstance(value, list | tuple):
            return tuple(self._facts.fact(x) if is_tensor(x) else plain(x) for x in value[:MANY])
        return plain(value)

    def _varying_part(self, value: Any) -> Any:
        """Numbers and indices vary from call to call, and say nothing."""
        if is_tensor(value) or isinstance(value, bool | str):
            return self._part(value)
        if isinstance(value, list | tuple) and any(is_tensor(x) for x in value):
            return self._part(value)
        return _SKIPPED

    def arguments(self, func: Any, args: Any, kwargs: Any) -> Arguments:
        """Arguments of a call by name: ("tensor", fact), ("tensors", …) or ("value", …)."""
        name = self.name(func)
        names = self._parameters.get(func)
        if names is None:
            names = self._parameters[func] = _parameter_names(func, name)
        is_varying = name in _VARYING
        found: list[tuple[str, Any]] = []
        mask = mask_of(args, kwargs) if name == _SDPA else None
        if len(args) > 1 and all(type(value) is int for value in args):
            args = (args,)  # sizes, given one by one
        for index, value in enumerate(args):
            label = names[index] if index < len(names) else str(index)
            if name == "to" and index:
                label = _label_of_to(value, index)
            self._argument(found, label, value, is_varying)
        for label, value in kwargs.items():
            self._argument(found, label, value, is_varying)
        if mask is not None:
            fact = self._facts.fact(mask, self._masks.pattern(mask))
            is_mask = (pair[0] == "attn_mask" for pair in found)
            found = [
                ("attn_mask", ("tensor", fact)) if is_it else pair
                for is_it, pair in zip(is_mask, found, strict=True)
            ]
        return tuple(found)

    def _argument(
        self, found: list[tuple[str, Any]], name: str, value: Any, is_varying: bool
    ) -> None:
        if is_tensor(value):
            found.append((name, ("tensor", self._facts.fact(value))))
        elif isinstance(value, list | tuple) and any(is_tensor(x) for x in value):
            keys = [
                ("tensor", self._facts.fact(part)) if is_tensor(part) else plain(part)
                for part in value[:MANY]
            ]
            found.append((name, ("tensors", tuple(keys))))
        elif not is_varying or isinstance(value, bool | str):
            found.append((name, ("value", plain(value))))


def mask_of(args: Any, kwargs: Any) -> torch.Tensor | None:
    """The mask of a call of torch's attention."""
    mask = kwargs.get("attn_mask") if len(args) < 4 else args[3]
    return mask if is_tensor(mask) else None


def _label_of_to(value: Any, index: int) -> str:
    if isinstance(value, torch.dtype):
        return "dtype"
    if isinstance(value, torch.device | str):
        return "device"
    return "other" if isinstance(value, torch.Tensor) else str(index)


def _function_name(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return ""
    name = str(getattr(func, "__name__", ""))
    if name in ("__get__", "__set__", "__delete__", "wrapper") or not name:
        return ""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return "" if name in _METADATA else _DUNDERS.get(name, name)


def _parameter_names(func: Any, name: str) -> tuple[str, ...]:
    known = _SIGNATURES.get(name)
    if known is not None:
        return known
    if isinstance(func, FunctionType):
        try:
            return tuple(inspect.signature(func).parameters)
        except ValueError:  # wraps a builtin, which has none (Tensor.__pow__)
            return ()
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return ("self",)
    overload = getattr(packet, packet.overloads()[0])
    return tuple(argument.name for argument in overload._schema.arguments)
