"""MetaX GPUs: sparse attention is forced on, mechanisms of other vendors' chips are off."""

from __future__ import annotations

from hal.device import DevicePolicy, DeviceSpec
from hal_backends.gpu.policies import foreign_platform_policy


def device_policy(device: DeviceSpec) -> DevicePolicy:
    return foreign_platform_policy(
        device,
        vendor="MetaX",
        source="vLLM-metax platform.py",
        disables={
            "*.gemm.*fp8*": "FP8 is off unless asked for: no FP8 matrix unit is published",
        },
    )
