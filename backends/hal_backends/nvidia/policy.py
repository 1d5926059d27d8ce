"""NVIDIA GPUs: nothing is forced; what a chip lacks, its candidates say themselves."""

from __future__ import annotations

from hal.device import DevicePolicy, DeviceSpec


def device_policy(device: DeviceSpec) -> DevicePolicy:
    return DevicePolicy()
