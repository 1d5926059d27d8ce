"""Intel Gaudi: mechanisms of NVIDIA's and AMD's chips are disabled."""

from __future__ import annotations

from hal.device import DevicePolicy, DeviceSpec
from hal_backends.gpu.policies import FOREIGN_MECHANISMS


def device_policy(device: DeviceSpec) -> DevicePolicy:
    return DevicePolicy(
        disabled={glob: f"{why}, not Gaudi's" for glob, why in FOREIGN_MECHANISMS.items()}
    )
