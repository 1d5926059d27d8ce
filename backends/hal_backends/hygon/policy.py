"""Hygon DCUs: sparse attention is forced on, mechanisms of other vendors' chips are off."""

from __future__ import annotations

from hal.device import DevicePolicy, DeviceSpec
from hal_backends.gpu.policies import foreign_platform_policy

# AITER is built for this one of Hygon's architectures (vllm_hcu platforms/hcu.py).
_AITER_ARCHS = ("gfx938",)


def device_policy(device: DeviceSpec) -> DevicePolicy:
    return foreign_platform_policy(
        device,
        vendor="Hygon",
        source="sglang-das recipes",
        sparse="its recipes choose sparse attention by hand (--attention-backend nsa, "
        "VLLM_DISABLE_DSA=0); left alone, a sparse model runs dense",
        allows=("*.aiter*",) if device.arch in _AITER_ARCHS else (),
        disables={
            "*_mxfp4*": "MXFP4 is removed from the supported formats (vllm_hcu platforms/hcu.py)",
        },
    )
