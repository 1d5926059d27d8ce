"""From machine code to the model's time: of a trial, and of what is launched without tuning."""

from __future__ import annotations

from collections.abc import Mapping

from hal.device import DeviceSpec
from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.targets import Target
from hal_kernels.tuning.configuration_files import Trial
from hal_kernels.tuning.performance_model import (
    Prediction,
    Resources,
    device_rates,
    predict,
)
from hal_kernels.tuning.shapes import ShapeClass
from hal_kernels.tuning.trial_compiling import trial_of
from hal_kernels.tuning.tunable import TunableKernel

LAUNCH_US = 2.0
"""Assumed time of a launch beside the work, so that a second kernel is not free."""


OLDER_RATE = 0.6
"""Assumed share of the peak rate that the instruction of older architectures reaches, where an
architecture has one of its own for its matrix unit."""
_FASTEST = {"sm_90": "wgmma", "sm_100": "tcgen05", "sm_103": "tcgen05"}


def estimate(
    tunable: TunableKernel, shape: ShapeClass, trial: Trial, device: DeviceSpec
) -> Prediction | str:
    """What the model says of a compiled configuration, or why it cannot."""
    if trial.error:
        return trial.error
    rates = device_rates(device)
    if isinstance(rates, str):
        return f"not known of the device: {rates}"
    configuration = trial.configuration
    most = device.attributes.get("shared_memory_per_block_bytes")
    if most is not None and trial.shared_bytes > int(most):
        return f"needs {trial.shared_bytes:,} bytes of shared memory, a block has {int(most):,}"
    is_older = not trial.instruction.startswith(_FASTEST.get(rates.arch, ""))
    used = Resources(
        registers=trial.registers,
        shared_bytes=trial.shared_bytes,
        num_warps=configuration["num_warps"],
        stages=configuration["num_stages"],
        unit=_unit(shape, trial),
        unit_share=OLDER_RATE if trial.instruction and is_older else 1.0,
    )
    return predict(tunable.footprint(shape, configuration), used, rates)


def estimate_default(
    tunable: TunableKernel,
    shape: ShapeClass,
    target: Target,
    evidence: Evidence | None,
    device: DeviceSpec,
) -> Prediction | str:
    """As `estimate`, of the configuration that is launched where none is kept, from the stored
    evidence of its machine code."""
    if evidence is None:
        return "no stored machine code of the configuration"
    configuration = tunable.default_on(target, shape, device).configuration
    return estimate(tunable, shape, trial_of(evidence, configuration), device)


def least_us(
    tunable: TunableKernel, shape: ShapeClass, configuration: Mapping[str, int], device: DeviceSpec
) -> float | str:
    """What a configuration takes at least by the model, whatever its machine code is: as if it
    needed no registers and no shared memory. Why it cannot be said where a rate is not known."""
    rates = device_rates(device)
    if isinstance(rates, str):
        return f"not known of the device: {rates}"
    is_eight = shape.dtype.startswith("fp8") and "fp8" in rates.peak_flops
    wide = "bfloat16" if shape.dtype.startswith("fp8") else shape.dtype
    used = Resources(
        registers=1,
        shared_bytes=0,
        num_warps=configuration["num_warps"],
        stages=configuration["num_stages"],
        unit="fp8" if is_eight else wide,
    )
    found = predict(tunable.footprint(shape, configuration), used, rates)
    return found if isinstance(found, str) else modelled_us(found, configuration)


def possible_loss(
    tunable: TunableKernel,
    shape: ShapeClass,
    target: Target,
    configuration: Mapping[str, int],
    found: Prediction,
    device: DeviceSpec,
) -> float:
    """The share of a configuration's time that another one that could be chosen would save at
    most, by the model. found: of that configuration."""
    us = modelled_us(found, configuration)
    tried = tunable.configurations(target, shape, device)
    others = (least_us(tunable, shape, c, device) for c in tried)
    return max(0.0, 1.0 - min((o for o in others if not isinstance(o, str)), default=us) / us)


def modelled_us(found: Prediction, configuration: Mapping[str, int]) -> float:
    """The time by which configurations are ranked: with the launch, and that of the kernel which
    sums the parts of a split."""
    launches = 2 if configuration.get("SPLIT_K", 1) > 1 else 1
    return found.us + LAUNCH_US * launches


def _unit(shape: ShapeClass, trial: Trial) -> str:
    """Whose rate: the claimed dtype's, or the 16-bit one where operands are widened."""
    if shape.dtype.startswith("fp8"):
        return "fp8" if trial.tier in ("native", "spilled") else "bfloat16"
    return shape.dtype
