"""Iluvatar CoreX GPUs: sparse attention is forced on, other vendors' mechanisms are off."""

from __future__ import annotations

from hal.device import DevicePolicy, DeviceSpec
from hal_backends.gpu.policies import foreign_platform_policy


def device_policy(device: DeviceSpec) -> DevicePolicy:
    return foreign_platform_policy(
        device,
        vendor="Iluvatar",
        source="DeepSparkInference recipes",
        eager="recipes run eagerly (--enforce-eager)",
    )
