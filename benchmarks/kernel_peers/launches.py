"""What is compiled: a peer's kernel as its own launcher calls it, and ours for the same problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hal_kernels.aot.targets import Target

Arguments = Mapping[str, Any]
TileBytes = Callable[[Mapping[str, Any]], int]


@dataclass(frozen=True, slots=True)
class TritonType:
    """A dtype of `triton.language` as the value of an argument."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel of a peer.

    path: inside the wheel. arguments: what the launcher passes, by name: "*bf16" is a pointer to
    it, None nothing, a number what Triton would specialise for, a constant of the kernel its value.
    configurations: tiles and options of the launcher on a target; several where it measures and
    chooses itself. given: see `Cutter`. amd_knobs: settings of `triton.knobs.amd` that the launcher
    makes around the call. moves: bytes of the problem that a configuration moves.
    source: where in the package the configuration is decided. skips: architecture -> why its
    launcher takes no such call there.
    """

    peer: str
    wheel: str
    path: str
    function: str
    arguments: Callable[[Target], Arguments]
    configurations: Callable[[Target], Sequence[Mapping[str, Any]]]
    moves: TileBytes
    source: str
    given: Callable[[Target], Mapping[str, str]] = lambda _: {}
    amd_knobs: Callable[[Target], Mapping[str, bool]] = lambda _: {}
    note: str = ""
    skips: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """Our kernel for the problem: the variant of the catalogue that a call of this size runs.

    instead: architecture -> the kernel that runs there in place of `kernel`.
    """

    kernel: str
    config: Callable[[Target], str]
    dtype: Callable[[Target], str]
    moves: TileBytes
    instead: Mapping[str, str] = field(default_factory=dict)

    def kernel_on(self, target: Target) -> str:
        """The kernel of the catalogue that runs on a target."""
        return self.instead.get(target.arch, self.kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One op at one size. dtype: whose matrix instruction is wanted; "" without a product.
    formula: how the bytes are estimated."""

    name: str
    what: str
    dtype: Callable[[Target], str]
    own: Own
    peers: tuple[Launch, ...]
    formula: str
    skips: Mapping[str, str] = field(default_factory=dict)


def always(**configuration: Any) -> Callable[[Target], Sequence[Mapping[str, Any]]]:
    """The same configuration on every target."""
    return lambda _: (configuration,)


def no_product(_: Target) -> str:
    """The dtype of a kernel without a matrix product."""
    return ""


def row_kernel(kernel: str, config: str, moved: int, dtype: str = "") -> Own:
    """Ours without a product, whose bytes no tile changes. dtype: of the catalogue's variant."""
    return Own(kernel=kernel, config=lambda _: config, dtype=lambda _: dtype, moves=lambda _: moved)


def has_early_launch(target: Target) -> bool:
    """Whether launchers let a kernel begin before the one in front of it has ended."""
    return target.arch in ("sm_90", "sm_100", "sm_103", "sm_120")


def specialised(function: Any, arguments: Arguments) -> tuple[Any, ...]:
    """Signature, constants and alignment of a call, as Triton's launcher specialises it.

    A number that is 1 becomes a constant and one that 16 divides is known to be, unless the kernel
    says `do_not_specialize`; pointers are aligned to 16 bytes. Raises ValueError for an argument
    that the kernel does not have, or that is missing.
    """
    names = {parameter.name for parameter in function.params}
    if set(arguments) - names:
        raise ValueError(f"{function.__name__} has no {sorted(set(arguments) - names)}")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(function.params):
        if parameter.name not in arguments and not parameter.has_default:
            raise ValueError(f"{function.__name__} needs {parameter.name}")
        value = arguments.get(parameter.name, parameter.default)
        kind, is_divisible = _kind(parameter, value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = _constant(value)
        if is_divisible:
            aligned[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned


def _kind(parameter: Any, value: Any) -> tuple[str, bool]:
    if parameter.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, str):
        return value, value.startswith("*")
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, float):
        return "fp32", False
    if parameter.do_not_specialize:
        return parameter.annotation_type or "i32", False
    if value == 1 and not parameter.annotation_type:
        return "constexpr", False
    return parameter.annotation_type or "i32", value % 16 == 0


def _constant(value: Any) -> Any:
    if isinstance(value, TritonType):
        import triton.language as tl

        return getattr(tl, value.name)
    return value
