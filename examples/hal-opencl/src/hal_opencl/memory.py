"""How kernels get at tensors, which are host memory: in place where the device shares it, copied
where not. The two classes have the same two methods."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyopencl as cl
import torch

from hal.device import DeviceSpec
from hal_opencl.opencl_device import OpenClDevice, open_device

_FLAGS = cl.mem_flags


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor that a kernel changes in place: two arguments, buffer and first element."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fresh:
    """A new contiguous tensor that a kernel writes whole: one argument, the buffer."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that stays as it is, such as a weight, and its buffer: both live while this does."""

    tensor: torch.Tensor
    buffer: Any


# A plain tensor is read: two arguments, buffer and first element. Numbers: int32 and float32.
Argument = torch.Tensor | Changed | Fresh | int | float


class Memory(Protocol):
    """One device's way to tensors."""

    device: OpenClDevice

    def constant(self, tensor: torch.Tensor) -> Constant:
        """A contiguous tensor at the start of its storage, for any number of kernels."""
        ...

    def launch(
        self, launcher: Launcher, size: tuple[int, ...], arguments: Sequence[Argument]
    ) -> None:
        """Sets the arguments behind the constants, runs `size` work-items, waits for them."""
        ...


class Launcher:
    """A kernel object with its constants: the first arguments, set once and kept alive here, as a
    kernel object keeps nothing alive itself."""

    __slots__ = ("_kept", "_memory", "_numbers", "first", "kernel")

    def __init__(self, memory: Memory, kernel: Any, *constants: Constant) -> None:
        self._memory, self.kernel, self.first = memory, kernel, len(constants)
        self._kept = constants
        self._numbers: dict[int, int | float] = {}
        for number, constant in enumerate(constants):
            kernel.set_arg(number, constant.buffer)

    def set_number(self, number: int, value: float) -> None:
        """An int32 or float32 argument. Most stay as they are from call to call, and pyopencl
        takes almost as long to set one as a small kernel takes to run."""
        if self._numbers.get(number) != value:
            kind = np.int32 if isinstance(value, int) else np.float32
            self.kernel.set_arg(number, kind(value))
            self._numbers[number] = value

    def __call__(self, size: tuple[int, ...], *arguments: Argument) -> None:
        """Runs `size` work-items with the further arguments, and waits for them."""
        self._memory.launch(self, size, arguments)


def memory_of(spec: DeviceSpec) -> Memory:
    device = open_device(spec)
    return SharedMemory(device) if "memory.shared" in spec.features else CopiedMemory(device)


class SharedMemory:
    """A CPU device: its buffers are the tensors themselves."""

    def __init__(self, device: OpenClDevice) -> None:
        self.device = device

    def constant(self, tensor: torch.Tensor) -> Constant:
        return Constant(tensor, self._buffer(tensor.untyped_storage()))

    def launch(
        self, launcher: Launcher, size: tuple[int, ...], arguments: Sequence[Argument]
    ) -> None:
        kernel, number = launcher.kernel, launcher.first
        # Two buffers over one storage would be undefined: q, k and v are parts of one tensor.
        buffers: dict[int, Any] = {}
        for argument in arguments:
            if isinstance(argument, int | float):
                launcher.set_number(number, argument)
                number += 1
                continue
            tensor = argument if isinstance(argument, torch.Tensor) else argument.tensor
            storage = tensor.untyped_storage()
            at = storage.data_ptr()
            if at not in buffers:
                buffers[at] = self._buffer(storage)
            kernel.set_arg(number, buffers[at])
            number += 1
            if not isinstance(argument, Fresh):
                launcher.set_number(number, int(tensor.storage_offset()))
                number += 1
        # A CPU device works on the memory itself: once it is done there is nothing to map.
        cl.enqueue_nd_range_kernel(self.device.queue, kernel, size, (1,) * len(size)).wait()

    def _buffer(self, storage: torch.UntypedStorage) -> Any:
        block = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        return cl.Buffer(
            self.device.context, _FLAGS.READ_WRITE | _FLAGS.USE_HOST_PTR, hostbuf=block
        )


class CopiedMemory:
    """A device with memory of its own: weights stay there, all else travels with each call."""

    def __init__(self, device: OpenClDevice) -> None:
        self.device = device

    def constant(self, tensor: torch.Tensor) -> Constant:
        storage = tensor.untyped_storage()
        flags = _FLAGS.READ_ONLY | _FLAGS.COPY_HOST_PTR
        values = _flat(storage, 0, tensor.numel() * tensor.element_size())
        return Constant(tensor, cl.Buffer(self.device.context, flags, hostbuf=values))

    def launch(
        self, launcher: Launcher, size: tuple[int, ...], arguments: Sequence[Argument]
    ) -> None:
        kernel, number = launcher.kernel, launcher.first
        spans = _spans(arguments)
        buffers = {
            at: cl.Buffer(
                self.device.context,
                _FLAGS.READ_WRITE | _FLAGS.COPY_HOST_PTR,
                hostbuf=_flat(storage, low, high),
            )
            for at, (storage, low, high, _) in spans.items()
        }
        for argument in arguments:
            if isinstance(argument, int | float):
                launcher.set_number(number, argument)
                number += 1
                continue
            tensor = argument if isinstance(argument, torch.Tensor) else argument.tensor
            at = tensor.untyped_storage().data_ptr()
            kernel.set_arg(number, buffers[at])
            number += 1
            if not isinstance(argument, Fresh):
                begin = tensor.storage_offset() - spans[at][1] // tensor.element_size()
                launcher.set_number(number, int(begin))
                number += 1
        queue = self.device.queue
        cl.enqueue_nd_range_kernel(queue, kernel, size, (1,) * len(size))
        for at, (storage, low, high, is_written) in spans.items():
            if is_written:
                cl.enqueue_copy(queue, _flat(storage, low, high), buffers[at])
        queue.finish()


Span = tuple[Any, int, int, bool]  # storage, first byte, byte after the last, whether written


def _spans(arguments: Sequence[Argument]) -> dict[int, Span]:
    """What a call touches of each storage: one range, as interleaved parts cannot be told apart."""
    spans: dict[int, Span] = {}
    for argument in arguments:
        if isinstance(argument, int | float):
            continue
        is_written = not isinstance(argument, torch.Tensor)
        tensor = argument.tensor if isinstance(argument, Changed | Fresh) else argument
        storage = tensor.untyped_storage()
        at, size = storage.data_ptr(), tensor.element_size()
        low = int(tensor.storage_offset()) * size
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        high = low + (1 + sum(int(n - 1) * int(stride) for n, stride in steps)) * size
        if at in spans:
            _, other_low, other_high, was_written = spans[at]
            low, high = min(low, other_low), max(high, other_high)
            is_written = is_written or was_written
        spans[at] = (storage, low, high, is_written)
    return spans


def _flat(storage: torch.UntypedStorage, low: int, high: int) -> Any:
    """The bytes of a storage from `low` to `high` as an array, without a copy."""
    block = (ctypes.c_byte * (high - low)).from_address(storage.data_ptr() + low)
    return np.ctypeslib.as_array(block)
