"""Intel GPUs: steps run eagerly, and mechanisms of NVIDIA's and AMD's chips are disabled."""

from __future__ import annotations

from hal.device import EAGER, DevicePolicy, DeviceSpec
from hal_backends.gpu.policies import FOREIGN_MECHANISMS


def device_policy(device: DeviceSpec) -> DevicePolicy:
    return DevicePolicy(
        forced_features={EAGER: "graph capture is off by default on XPU (vLLM platforms/xpu.py)"},
        disabled={glob: f"{why}, not Intel's" for glob, why in FOREIGN_MECHANISMS.items()},
    )
