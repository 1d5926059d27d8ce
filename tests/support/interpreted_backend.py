"""A device whose every op is served by this project's Triton kernels, which the interpreter runs.

The candidates are those of the accelerators' plug-ins with the limits that the stored machine code
gives them; only the memory is the host's. Needs `faithful_interpreter.install()` before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpu_devices import gpu
from hal.binding import Binding, BoundOp
from hal.candidates import Kernel, KernelCandidate
from hal.device import DetectedDevice, DevicePolicy, DeviceSpec
from hal.ops import CATALOGUE
from hal.plugins.states import PluginState
from hal.selection import Decision
from hal_backends.gpu import triton_kernels
from judged_calls import check_call, wider

MATRIX_UNITS = ("bfloat16", "float16", "fp8_e4m3fn")
# What moves or names memory and computes nothing.
_MOVES = (
    "_to_copy _unsafe_view alias arange as_strided cat clone copy_ detach detach_ empty empty_like "
    "empty_strided expand full index lift_fresh new_empty new_zeros permute select slice "
    "split_with_sizes t transpose unbind unsqueeze view zeros"
)
MOVES = frozenset(f"aten::{name}" for name in _MOVES.split())


def interpreted_device(arch: str = "sm_90") -> DeviceSpec:
    """Of that architecture, with matrix units for 16 and 8 bits, and memory of the host."""
    features = frozenset({"triton", *(f"matrix.{unit}" for unit in MATRIX_UNITS)})
    return dataclasses.replace(gpu(arch), features=features, software={"triton": "3.9.0"})


class InterpretedRegistry:
    """What `plan_model` asks of a registry, for the one device."""

    states: Sequence[PluginState] = ()
    devices: Sequence[DetectedDevice] = ()

    def candidates(self, op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        """This project's Triton kernels and nothing else."""
        return triton_kernels.candidates(op, device)

    def policy(self, device: DeviceSpec) -> DevicePolicy:
        return DevicePolicy()

    def decision_made(self, decision: Decision) -> None: ...


class PlainTorchOps(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """As a context manager: counts every torch op of this thread that is not the interpreter's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.counts: Counter[str] = Counter()
        self.num_launches = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().partition(".")[0]
        # In inference mode an op made of others arrives whole: what it is made of is what ran.
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[PlainTorchOps]:
        """Counts within the block, without what the interpreter itself does with torch."""
        from triton.runtime.interpreter import GridExecutor

        run = GridExecutor.__call__

        def apart(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_launches += 1
            with _disable_current_modes():
                return run(executor, *args, **kwargs)

        GridExecutor.__call__ = apart
        try:
            with self:
                yield self
        finally:
            GridExecutor.__call__ = run


def computed(ops: PlainTorchOps) -> dict[str, int]:
    """The ops that did more than move memory, with how often they ran."""
    return {name: count for name, count in ops.counts.items() if name not in MOVES}


class CheckedCalls:
    """Computes every call again by the op's reference in float64, on copies of its arguments.

    `observe` is for `BoundOps`. seen: label of an op -> how many of its calls were compared.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def observe(self, binding: Binding, kernel: Kernel) -> BoundOp:
        """A call that raises AssertionError where the result is beyond the op's tolerance."""
        request = binding.planned.site.request
        static = {name: wider(value) for name, value in binding.static.items()}
        golden = CATALOGUE[request.op].reference(request, **static)

        def call(num_tokens: int, *args: Any) -> Any:
            with _disable_current_modes():
                copies = [wider(arg) for arg in args]
                exact = golden(*copies)
            found = kernel(*args)
            with _disable_current_modes():
                try:
                    check_call(request, static, (args, found), (copies, exact))
                except AssertionError as error:
                    raise AssertionError(f"{binding.site}: {error}") from error
            self.seen[request.label] += 1
            return found

        return call


def largest_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of an element, as a share of the largest exact one."""
    assert found.shape == exact.shape
    assert found.isfinite().all()
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max())


def rms_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of all elements, as a share of the exact ones' root mean square."""
    assert found.shape == exact.shape
    assert found.isfinite().all()
    error = found.double() - exact.double()
    return float(error.square().mean().sqrt() / exact.double().square().mean().sqrt())
