"""Whether a model can be run on a device, and not only planned; asked before anything is loaded."""

from __future__ import annotations

from hal.device import DeviceSpec
from hal.errors import PlanError
from hal_engine.config import RUNNABLE_FAMILIES, ModelConfig
from hal_engine.preset_files import preset_of


def is_runnable_on(device: DeviceSpec) -> bool:
    """Whether tensors of the device are in the host's memory."""
    return device.torch_device == "cpu"


def check_runnable_on(device: DeviceSpec) -> None:
    """Raises PlanError for a device whose tensors are not in the host's memory.

    The runner makes its tensors there: on such a device the plan's implementations would be called
    with them, and torch's would run on the CPU without a word.
    """
    if not is_runnable_on(device):
        raise PlanError(
            f"device {device.device_id} ({device.name})",
            'a device whose tensors are in the host\'s memory (torch device "cpu")',
            f"torch device {device.torch_device!r}: the engine keeps weights, activations and KV "
            "cache in the host's memory yet",
            "`hal plan` shows what would run there; to run the model here, name another device, "
            "e.g. --device cpu:0",
        )


def check_runnable(config: ModelConfig) -> None:
    """Raises PlanError for a preset, which has no weights, and for a family without layers here."""
    preset = preset_of(config.source)
    if preset is not None:
        raise PlanError(
            f"model {preset.name}",
            "a folder with weights",
            "a preset: a configuration to plan with",
            f"download {preset.repository} and give its folder; `hal plan {preset.name}` works",
        )
    if not config.is_runnable:
        raise PlanError(
            f"model {config.source}",
            f"a family whose layers the engine has ({', '.join(sorted(RUNNABLE_FAMILIES))})",
            config.family,
            "`hal plan` shows every op of it; running it is not implemented yet",
        )
