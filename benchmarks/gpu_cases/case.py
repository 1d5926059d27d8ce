"""What a case is, the device it runs on, and how one is made from an op's reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.formats import QuantizedWeight
from hal.ops.request import OpRequest

Call = Callable[[], Any]
BF16 = torch.bfloat16
FP8_RATE = 2.0  # of bfloat16's, on every device that multiplies FP8
ANY = 0.0  # tolerance of a result that is to be equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison of one call.

    ours, exact: the result of the kernel and the float64 result, tensors or tuples of them.
    tolerance: of the largest value of a row; integers and bytes are to be equal. judge: (found,
    exact) -> error, where values alone do not say what is right. is_captured: what is judged on a
    GPU is a replay of `ours` captured in a graph, whose results share no memory with its arguments.
    timed: what is timed, where that is not `ours`; is_timed: whether a time would say anything.
    theirs: the call of torch's libraries that does the same, named in `library`. flops,
    bytes_moved: of the call, for the roofline; rate: its matrix unit's speed, in bfloat16's.
    """

    name: str
    ours: Call
    exact: Call
    tolerance: float
    judge: Callable[[Any, Any], float] | None = None
    is_captured: bool = False
    timed: Call | None = None
    is_timed: bool = True
    theirs: Call | None = None
    library: str = ""
    flops: float = 0.0
    bytes_moved: float = 0.0
    rate: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseMaker:
    """A case before its tensors are made, so that one that fails costs only itself.

    kernels: names of the catalogue that the case launches, which a run checks. share: of the time
    that is left, in units of a plain case.
    """

    name: str
    kernels: tuple[str, ...]
    make: Callable[[Bench], Case]
    share: float = 1.0


class Bench:
    """The device, the sizes and the random numbers of a run.

    is_dry: tiny, interpreted on the CPU, as if for sm_90.
    """

    def __init__(self, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.spec = device_spec(is_dry)

    def size(self, real: int, dry: int) -> int:
        return dry if self.is_dry else real

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device)

    def bf16(self, *shape: int) -> torch.Tensor:
        return self.randn(*shape).to(BF16)

    def on(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device)

    def with_units(self, units: int) -> DeviceSpec:
        """The device with so many multiprocessors, which some launches depend on."""
        return dataclasses.replace(
            self.spec, attributes={**self.spec.attributes, "compute_units": units}
        )

    def without_units(self) -> DeviceSpec:
        """The device as if nobody knew how many multiprocessors it has: products are of whole tiles
        or split ones, whatever the model of waves would prefer."""
        return self.with_units(0)

    def as_arch(self, arch: str) -> DeviceSpec:
        """The device as if it were of another architecture: that one's kernel and tiles."""
        return dataclasses.replace(self.spec, arch=arch)


def device_spec(is_dry: bool) -> DeviceSpec:
    """Of the GPU that torch sees, or of an H200 that is interpreted. compute_units: its
    multiprocessors, which decide on stream-K, on splits of keys and on passes."""
    arch, name, warp, units = "sm_90", "interpreter", 32, 132
    if not is_dry:
        major, minor = torch.cuda.get_device_capability()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        arch, name = f"sm_{major}{minor}", torch.cuda.get_device_name()
        units = properties.multi_processor_count
        if torch.version.hip:
            arch, warp = properties.gcnArchName.split(":")[0], properties.warp_size
    return DeviceSpec(
        device_id="gpu:0", vendor="gpu", backend="gpu", name=name, arch=arch,
        torch_device="cuda", features=frozenset({"triton"}),
        attributes={"warp_size": warp, "compute_units": units},
    )  # fmt: skip


def widened(value: Any) -> Any:
    """The same in float64, through tuples, lists and dataclasses of tensors; integers, bytes and
    quantised weights as they are."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(widened(one) for one in value)
    if isinstance(value, dict):
        return {name: widened(one) for name, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type | QuantizedWeight):
        fields = {f.name: widened(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    return value


def copied(args: Sequence[Any], written: Sequence[int]) -> list[Any]:
    """The arguments of a call, with copies of those that it writes to."""
    return [arg.clone() if place in written else arg for place, arg in enumerate(args)]


def reference_case(
    name: str,
    request: OpRequest,
    bind: Callable[..., Callable[..., Any]],
    bench: Bench,
    args: Sequence[Any],
    *,
    tokens: int,
    tolerance: float,
    written: Sequence[int] = (),
    spec: DeviceSpec | None = None,
    **more: Any,
) -> Case:
    """A case whose exact result is the op's reference in float64.

    bind: as of a module `triton`. args: of a call. written: places of the arguments that the call
    writes to, which are results too. spec: the device, if it is to be another than the bench's.
    more: `static`, the arguments of binding by name, and fields of the case.
    """
    static: dict[str, Any] = more.pop("static", {})
    kernel = bind(request, spec or bench.spec, **static)
    family = CATALOGUE[request.op]
    golden = family.reference(request, **widened(static))

    def run(call: Callable[..., Any], given: Sequence[Any]) -> Any:
        own = copied(given, written)
        result = call(*own)
        return (result, *(own[place] for place in written)) if written else result

    return Case(
        name=name,
        ours=lambda: run(kernel, args),
        exact=lambda: run(golden, widened(tuple(args))),
        tolerance=tolerance,
        timed=lambda: kernel(*args),
        flops=family.flops(request, tokens),
        bytes_moved=family.bytes_moved(request, tokens),
        **more,
    )
