"""Facts of arguments: shapes, dtypes and origins of tensors, other values as plain data.

While the audit runs, equal tensors have one `Fact`, so that it is compared and hashed by what it
is and not by what is in it; facts become `TensorFact` in the trace. Every op of a program comes
through here: what can be said later is not said here.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from hal.auditing.observer_ops import OpInfo
from hal.auditing.observer_storages import StorageFacts, Storages
from hal.auditing.trace import TensorFact

PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
SCALARS: Final = frozenset({int, float, bool, str, type(None), torch.dtype})
MANY: Final = 64
_MAX_FACTS: Final = 500_000
_NO_NAMES: Final[frozenset[Any]] = frozenset()
_Tensor: Final = torch.Tensor
_strided: Final = torch.strided


class Fact:
    """A tensor's shape, dtype, device, is_contiguous, requires_grad, is_constant, last stride,
    is_nested, pattern, dtypes and devices that it came from, in that order."""

    __slots__ = ("content",)

    def __init__(self, content: tuple[Any, ...]) -> None:
        self.content = content


class ArgumentFacts:
    """Of one call of an op. facts: of its tensors. identity: a number that only a call with
    the same op, values and unmodified tensors has; None where a second call is no waste.
    first_variable: memory of the first tensor that is not constant. is_meta: a tensor has no data.
    """

    __slots__ = (
        "facts",
        "first_variable",
        "identity",
        "is_meta",
        "storages",
        "tensors",
        "values",
        "written",
    )

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.facts: tuple[Fact, ...] = ()
        self.storages: list[StorageFacts] = []
        self.written: list[StorageFacts] = []
        self.values: tuple[tuple[str, Any], ...] = ()
        self.identity: int | None = None
        self.first_variable: int | None = None
        self.is_meta = False


class FactReader:
    """Reads facts of arguments."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._facts: dict[tuple[Any, ...], Fact] = {}

    def read(self, info: OpInfo, args: Any, kwargs: Any) -> ArgumentFacts:
        """Facts of an op's arguments."""
        found = ArgumentFacts()
        values: list[tuple[str, Any]] = []
        written: list[torch.Tensor] = []
        for name, value in zip(info.argument_names, args, strict=False):
            if value is not None:
                self._take(found.tensors, values, name, value)
                if name in info.written:
                    written += self.tensors_of(value)
        for name, value in kwargs.items():
            if value is not None:
                self._take(found.tensors, values, name, value)
                if name in info.written:
                    written += self.tensors_of(value)
        is_asked = not (info.is_mutable or info.is_random)
        self._read_tensors(info, found, tuple(values), is_asked=is_asked)
        for tensor in written:
            storage = self._storages.of(tensor)
            if storage is not None:
                found.written.append(storage)
        if info.drops_numbers:
            values = [pair for pair in values if isinstance(pair[1], bool | str)]
        found.values = tuple(values)
        return found

    @staticmethod
    def _take(
        tensors: list[torch.Tensor], values: list[tuple[str, Any]], name: str, value: Any
    ) -> None:
        """Sorts an argument into tensors and values."""
        kind = type(value)
        if kind in PLAIN_TENSORS:
            tensors.append(value)
        elif kind in SCALARS:
            values.append((name, value))
        elif isinstance(value, _Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple) and (parts := FactReader.tensors_of(value)):
            tensors += parts
        else:
            values.append((name, plain(value)))

    def _read_tensors(
        self,
        info: OpInfo,
        found: ArgumentFacts,
        values: tuple[tuple[str, Any], ...],
        *,
        is_asked: bool,
    ) -> None:
        """Facts of all tensors; is_asked: and what tells the call from others."""
        storages = found.storages
        parts: list[Any] = [info, values]
        facts = []
        has_many = False
        is_bias = info.adds_first  # what a loop shares is a factor
        for tensor in found.tensors:
            storage = self._storages.of(tensor)
            facts.append(self._fact_of(tensor, storage, ""))
            if tensor.is_meta:
                found.is_meta = True
            if storage is None:
                is_asked = False
                continue
            storages.append(storage)
            if found.first_variable is None and not (
                is_bias or storage.is_constant or _is_parameter(tensor)
            ):
                found.first_variable = storage.uid
            is_bias = False
            if is_asked:
                is_asked = tensor.layout is _strided and not tensor.is_nested
                if not is_asked:
                    continue
                has_many = has_many or tensor.numel() > 1
                # A tensor of inference mode has no version; writes that were seen are counted
                # anyway. A number that torch made a tensor of, as in where(mask, x, -1.0), is the
                # same again.
                version = -1 if tensor.is_inference() else tensor._version
                name = storage.uid if storage.literal is None else storage.literal
                parts += (name, storage.version, version, tensor.storage_offset())
                parts += (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        found.facts = tuple(facts)
        if is_asked and has_many:
            found.identity = hash(tuple(parts))

    def fact(self, tensor: torch.Tensor, pattern: str = "") -> Fact:
        """The fact of a tensor; pattern: of an attention mask that was looked at."""
        return self._fact_of(tensor, self._storages.of(tensor), pattern)

    def _fact_of(self, tensor: torch.Tensor, storage: StorageFacts | None, pattern: str) -> Fact:
        device = "cpu" if tensor.is_cpu else tensor.device.type
        dtype = tensor.dtype
        content: tuple[Any, ...]
        if tensor.is_nested:
            origins = (frozenset((dtype,)), frozenset((device,)))
            content = ((), dtype, device, False, tensor.requires_grad, False, 1, True, "", *origins)
        else:
            is_strided = tensor.layout is _strided
            shape = tuple(tensor.shape)
            dtypes, devices, is_constant = _NO_NAMES, _NO_NAMES, False
            if storage is not None:
                is_constant = storage.is_constant
                dtypes, devices = storage.dtypes, storage.devices
                if dtype not in dtypes:
                    dtypes = storage.dtypes = dtypes | {dtype}
                if device not in devices:
                    devices = storage.devices = devices | {device}
            content = (
                shape,
                dtype,
                device,
                is_strided and tensor.is_contiguous(),
                tensor.requires_grad,
                is_constant,
                tensor.stride()[-1] if is_strided and shape else 1,
                False,
                pattern,
                dtypes,
                devices,
            )
        fact = self._facts.get(content)
        if fact is None:
            if len(self._facts) >= _MAX_FACTS:
                self._facts.clear()  # those in use stay; equal ones will be others
            fact = self._facts.setdefault(content, Fact(content))
        return fact

    @staticmethod
    def tensors_of(result: Any) -> list[torch.Tensor]:
        """The tensors of a result."""
        if type(result) in PLAIN_TENSORS or isinstance(result, _Tensor):
            return [result]
        if isinstance(result, tuple | list):
            found: list[torch.Tensor] = []
            for part in result:
                if isinstance(part, _Tensor):
                    found.append(part)
                elif isinstance(part, list | tuple):
                    found += FactReader.tensors_of(part)
            return found
        return []


def is_tensor(value: Any) -> bool:
    """Quickly: most are of three types."""
    return type(value) in PLAIN_TENSORS or isinstance(value, _Tensor)


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Quickly: torch asks the instance."""
    kind = type(tensor)
    return kind is not _Tensor and (
        kind is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter)
    )


def tensor_fact(fact: Fact) -> TensorFact:
    """A fact as the trace has it."""
    shape, dtype, device, contiguous, grad, constant, last, nested, pattern, *origins = fact.content
    dtypes, devices = origins
    return TensorFact(
        shape=tuple(int(size) for size in shape),
        dtype=_dtype_name(dtype),
        device=device,
        is_contiguous=contiguous,
        requires_grad=grad,
        is_constant=constant,
        last_stride=int(last),
        is_nested=nested,
        pattern=pattern,
        origin_dtypes=frozenset(_dtype_name(origin) for origin in dtypes),
        origin_devices=devices,
    )


def _dtype_name(dtype: Any) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def plain(value: Any) -> Any:
    """A value as something hashable that JSON has, or its short text."""
    kind = type(value)
    if value is None or kind in (bool, str, int, float):
        return value
    if isinstance(value, list | tuple):
        return tuple(plain(part) for part in value[:MANY])
    if isinstance(value, bool | str | int | float):
        # Symbolic numbers of a tracer have no value yet; numbers of enumerations have their name.
        return value if isinstance(value, bool | str) else str(value)
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    return kind.__name__
