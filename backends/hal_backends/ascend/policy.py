"""Huawei Ascend NPUs: sparse attention is forced on, mechanisms of other vendors' chips are off."""

from __future__ import annotations

from hal.device import DevicePolicy, DeviceSpec
from hal_backends.gpu.policies import foreign_platform_policy


def device_policy(device: DeviceSpec) -> DevicePolicy:
    return foreign_platform_policy(
        device,
        vendor="Ascend",
        source="vllm-ascend platform.py",
        disables={
            "*.attention.flash_attention*": "Ascend's own fused attention serves instead",
        },
    )
