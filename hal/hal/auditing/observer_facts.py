"""Facts of arguments: shapes, dtypes and origins of tensors, other values as plain data.

Facts are tuples while the audit runs, so that equal arguments have equal keys; they become
`TensorFact` in the trace.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Final

import torch

from hal.auditing.observer_ops import OpInfo
from hal.auditing.observer_storages import StorageFacts, Storages
from hal.auditing.trace import TensorFact

FactKey = tuple[Any, ...]
_MAX_MASK: Final = 16 << 20
_NO_NAMES: Final[frozenset[str]] = frozenset()
_MANY: Final = 64
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


class ArgumentFacts:
    """Of one call of an op. keys: facts of its tensors. identity: a number that only a call with
    the same op, values and unmodified tensors has; None where a second call is no waste.
    first_variable: memory of the first tensor that is not constant."""

    __slots__ = ("first_variable", "identity", "keys", "storages", "tensors", "values", "written")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.keys: tuple[FactKey, ...] = ()
        self.storages: list[StorageFacts] = []
        self.written: list[StorageFacts] = []
        self.values: tuple[tuple[str, Any], ...] = ()
        self.identity: int | None = None
        self.first_variable: int | None = None


class FactReader:
    """Reads facts of arguments; what it learns of functions is kept."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._names: dict[Any, tuple[str, ...]] = {}
        self._function_names: dict[Any, str] = {}

    def read(self, info: OpInfo, args: Any, kwargs: Any) -> ArgumentFacts:
        """Facts of an op's arguments."""
        facts = ArgumentFacts()
        values: list[tuple[str, Any]] = []
        names = info.argument_names
        written: list[torch.Tensor] = []
        for index, value in enumerate(args):
            name = names[index] if index < len(names) else str(index)
            self._take(facts, values, name, value, written if name in info.written else None)
        for name, value in kwargs.items():
            self._take(facts, values, name, value, written if name in info.written else None)
        if info.is_view:
            facts.keys = tuple(self.key(tensor)[0] for tensor in facts.tensors[:1])
            return facts
        keys = []
        for position, tensor in enumerate(facts.tensors):
            key, storage = self.key(tensor)
            keys.append(key)
            if storage is not None:
                facts.storages.append(storage)
                is_variable = not storage.is_constant and not isinstance(tensor, torch.nn.Parameter)
                if info.adds_first and position == 0:
                    is_variable = False  # a bias: what a loop shares is a factor
                if facts.first_variable is None and is_variable:
                    facts.first_variable = storage.uid
        facts.keys = tuple(keys)
        for tensor in written:
            storage = self._storages.of(tensor)
            if storage is not None:
                facts.written.append(storage)
        if not (info.is_mutable or info.is_random) and len(facts.storages) == len(facts.tensors):
            facts.identity = self._identity(info, facts, tuple(values))
        if info.drops_numbers:
            values = [pair for pair in values if isinstance(pair[1], bool | str)]
        facts.values = tuple(values)
        return facts

    def _take(
        self,
        facts: ArgumentFacts,
        values: list[tuple[str, Any]],
        name: str,
        value: Any,
        written: list[torch.Tensor] | None,
    ) -> None:
        """Sorts an argument into tensors and values."""
        if isinstance(value, torch.Tensor):
            facts.tensors.append(value)
            if written is not None:
                written.append(value)
        elif isinstance(value, list | tuple) and (parts := self.tensors_of(value)):
            facts.tensors += parts
            if written is not None:
                written += parts
        elif value is not None:
            values.append((name, plain(value)))

    def _identity(
        self, info: OpInfo, facts: ArgumentFacts, values: tuple[tuple[str, Any], ...]
    ) -> int | None:
        if all(tensor.numel() <= 1 for tensor in facts.tensors):
            return None
        parts: list[Any] = [info.func, values]
        for tensor, storage in zip(facts.tensors, facts.storages, strict=True):
            if tensor.layout is not torch.strided:
                return None
            # A tensor of inference mode has no version; writes that were seen are counted anyway.
            version = -1 if tensor.is_inference() else tensor._version
            # A number that torch made a tensor of, as in where(mask, x, -1.0), is the same again.
            name = storage.uid if storage.literal is None else storage.literal
            parts += (name, storage.version, version, tensor.storage_offset())
            parts += (tensor.shape, tensor.stride(), tensor.dtype)
        return hash(tuple(parts))

    def key(self, tensor: torch.Tensor) -> tuple[FactKey, StorageFacts | None]:
        """A tensor as a tuple, in the order of `tensor_fact`, and its memory."""
        if tensor.is_nested:
            dtype = self._storages.dtype_name(tensor.dtype)
            names = frozenset((dtype,)), frozenset((tensor.device.type,))
            flags = (False, tensor.requires_grad, False, 1, True, "")
            return ((), dtype, tensor.device.type, *flags, *names), None
        storage = self._storages.of(tensor)
        is_strided = tensor.layout is torch.strided
        shape = tensor.shape
        last = tensor.stride(-1) if is_strided and len(shape) else 1
        device = tensor.device.type
        dtypes, devices = _NO_NAMES, _NO_NAMES
        if storage is not None:
            dtypes = self._storages.origins(tensor, storage)
            devices = self._storages.origin_devices(tensor, storage)
        key = (
            shape,
            self._storages.dtype_name(tensor.dtype),
            device,
            is_strided and tensor.is_contiguous(),
            tensor.requires_grad,
            storage is not None and storage.is_constant,
            last,
            False,
            "",
            dtypes,
            devices,
        )
        return key, storage

    def tensors_of(self, result: Any) -> list[torch.Tensor]:
        """The tensors of a result."""
        if isinstance(result, torch.Tensor):
            return [result]
        if isinstance(result, tuple | list):
            found: list[torch.Tensor] = []
            for part in result:
                if isinstance(part, torch.Tensor):
                    found.append(part)
                elif isinstance(part, list | tuple):
                    found += self.tensors_of(part)
            return found
        return []

    def function_name(self, func: Any) -> str:
        """ "linear" of F.linear, "matmul" of Tensor.__matmul__; "" for what is not recorded."""
        name = self._function_names.get(func)
        if name is None:
            name = self._function_names[func] = _function_name(func)
        return name

    def arguments_of(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Name and arguments of a torch function."""
        name = self.function_name(func)
        names = self._names.get(func)
        if names is None:
            names = self._names[func] = _parameter_names(func, name)
        is_varying = name in _VARYING
        found: list[tuple[str, Any]] = []
        if len(args) > 1 and all(type(value) is int for value in args):
            args = (args,)  # sizes, given one by one
        for index, value in enumerate(args):
            label = names[index] if index < len(names) else str(index)
            if name == "to" and index:
                label = _label_of_to(value, index)
            self._argument(found, label, value, is_varying)
        for label, value in kwargs.items():
            self._argument(found, label, value, is_varying)
        return name, tuple(found)

    def _argument(
        self, found: list[tuple[str, Any]], name: str, value: Any, is_varying: bool
    ) -> None:
        if isinstance(value, torch.Tensor):
            found.append((name, ("tensor", self.key(value)[0])))
        elif isinstance(value, list | tuple) and any(isinstance(x, torch.Tensor) for x in value):
            keys = [
                ("tensor", self.key(part)[0]) if isinstance(part, torch.Tensor) else plain(part)
                for part in value[:_MANY]
            ]
            found.append((name, ("tensors", tuple(keys))))
        elif not is_varying or isinstance(value, bool | str):
            found.append((name, ("value", plain(value))))

    def with_patterns(
        self, func: Any, name: str, call: Any, arguments: tuple[tuple[str, Any], ...]
    ) -> tuple[tuple[str, Any], ...]:
        """The same with the pattern of an attention mask, which is looked at once."""
        if name != "scaled_dot_product_attention":
            return arguments
        mask = call.kwargs.get("attn_mask")
        if mask is None and len(call.args) > 3:
            mask = call.args[3]
        if not isinstance(mask, torch.Tensor) or mask.numel() > _MAX_MASK:
            return arguments
        pattern = mask_pattern(mask)
        found = []
        for label, value in arguments:
            if label == "attn_mask" and value[0] == "tensor":
                key = value[1]
                value = ("tensor", (*key[:8], pattern, *key[9:]))
            found.append((label, value))
        return tuple(found)


def mask_pattern(mask: torch.Tensor) -> str:
    """ "all-true", "causal" or "": of a mask whose last dimensions are queries and keys."""
    if mask.dim() < 2 or mask.device.type == "meta" or mask.is_sparse or not mask.numel():
        return ""
    import numpy

    values = mask.detach().to("cpu")
    values = values if values.dtype is torch.bool else values.float()
    array = values.numpy()
    is_bool = array.dtype == numpy.bool_
    allowed = array if is_bool else array == 0
    if allowed.all():
        return "all-true"
    lower = numpy.tril(numpy.ones(array.shape[-2:], dtype=numpy.bool_))
    if not (allowed == lower).all():
        return ""
    rest = numpy.broadcast_to(~lower, array.shape)
    return "causal" if is_bool or (array[rest] <= -1e4).all() else ""


def tensor_fact(key: FactKey) -> TensorFact:
    """The fact of a key."""
    shape, dtype, device, contiguous, grad, constant, last, nested, pattern, dtypes, devices = key
    return TensorFact(
        shape=tuple(int(size) for size in shape),
        dtype=dtype,
        device=device,
        is_contiguous=contiguous,
        requires_grad=grad,
        is_constant=constant,
        last_stride=int(last),
        is_nested=nested,
        pattern=pattern,
        origin_dtypes=dtypes,
        origin_devices=devices,
    )


def plain(value: Any) -> Any:
    """A value as something hashable that JSON has, or its short text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        # Symbolic numbers of a tracer have no value yet.
        return value if type(value) in (int, float) else str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, list | tuple):
        return tuple(plain(part) for part in value[:_MANY])
    if isinstance(value, torch.memory_format | torch.layout):
        return str(value).removeprefix("torch.")
    return type(value).__name__


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
