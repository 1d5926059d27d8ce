"""Which classes a tuning is about: those that are named, or those of a model's plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from hal.errors import SettingsError, UsageError
from hal.processes import ProcessEnd, run_bounded
from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.targets import Target
from hal_kernels.tuning.shapes import ShapeClass, parse_shape
from hal_kernels.tuning.tunable import TunableKernel
from hal_kernels.tuning.tunable_kernels import TUNABLE

_PLAN_DEADLINE_S = 300.0
_PLAN_BYTES = 64 << 20
_COMMAND = "from hal.cli import main; main()"

Classes = list[tuple[TunableKernel, ShapeClass]]


def named_classes(
    kernels: Sequence[TunableKernel],
    texts: Sequence[str],
    target: Target,
    units: int | None = None,
) -> Classes:
    """Each text as a class of each kernel. units: multiprocessors of the device, 0 where they are
    not known; None where no device is meant. Raises UsageError for a text that is none, or of a
    class that no launch asks for."""
    return [(kernel, _named(kernel, text, target, units)) for kernel in kernels for text in texts]


def _named(
    kernel: TunableKernel, text: str, target: Target, units: int | None = None
) -> ShapeClass:
    dtypes = tuple(kernel.dtypes(target))
    try:
        shape = parse_shape(text, size_names=kernel.size_names, forms=kernel.forms, dtypes=dtypes)
        _check_is_compiled(kernel, shape, target)
        if why := kernel.why_never(target, shape, units):
            raise ValueError(why)
        return shape
    except ValueError as error:
        example = ",".join(f"{name}=4096" for name in kernel.size_names)
        raise UsageError(
            f"option --shape {text}",
            f"a class of {kernel.kernel}",
            str(error),
            f"write it as {example},rows=16; forms: {', '.join(kernel.forms)}; dtypes: "
            + ", ".join(dtypes),
        ) from error


def _check_is_compiled(kernel: TunableKernel, shape: ShapeClass, target: Target) -> None:
    """Not every kernel is of every target, nor every form of every dtype: raises ValueError before
    the work if this is not."""
    compiled = {(one.dtype, one.config) for one in find_kernel(kernel.kernel).variants(target)}
    if not compiled:
        raise ValueError(
            f"required an architecture that {kernel.kernel} is compiled for, found {target.arch}, "
            "which has other kernels for it (`hal kernels list`)"
        )
    try:
        is_there = (shape.dtype, kernel.default(target, shape).config) in compiled
    except KeyError:
        is_there = False
    if not is_there:
        raise ValueError(
            f"required a dtype and a form that {target.arch} has a variant of, found {shape.dtype} "
            f"with {shape.form}"
        )


def classes_of_model(
    model: str, device: str, kernels: Sequence[TunableKernel], target: Target
) -> Classes:
    """The classes of a model's calls on a device, from its plan: each once, in its order.

    Raises SettingsError if there is no plan, or none of these kernels in it.
    """
    plan = _plan(model, device)
    names = {kernel.kernel for kernel in kernels}
    found: dict[tuple[str, str], None] = {}
    for op in plan.get("ops", []):
        for use in op.get("kernels", []):
            if use["kernel"] in names and use["shape"]:
                found[use["kernel"], use["shape"]] = None
    if not found:
        raise SettingsError(
            f"plan of {model} for {device}",
            f"calls of {', '.join(sorted(names))}",
            "none",
            "`hal plan MODEL --device NAME` shows which kernels it has",
        )
    return [(TUNABLE[name], _named(TUNABLE[name], text, target)) for name, text in found]


def _plan(model: str, device: str) -> dict[str, list[dict[str, list[dict[str, str]]]]]:
    """`hal plan MODEL --device DEVICE --json -`, in a process of its own: plans are the engine's,
    which kernels know nothing of."""
    outcome = run_bounded(
        [sys.executable, "-c", _COMMAND, "plan", model, "--device", device, "--json", "-"],
        deadline_s=_PLAN_DEADLINE_S,
        environment=dict(os.environ),
        output_limit_bytes=_PLAN_BYTES,
    )
    try:
        if outcome.end is not ProcessEnd.EXITED:
            raise ValueError(outcome.describe())
        document = json.loads(outcome.stdout)
    except ValueError as error:
        told = outcome.stderr.decode(errors="replace").strip()
        raise SettingsError(
            f"plan of {model} for {device}",
            "a plan (`hal plan`)",
            told or str(error),
            "correct what it says",
        ) from error
    return dict(document)
