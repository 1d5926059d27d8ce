"""AMD GPUs: mechanisms of NVIDIA's chips are disabled by name."""

from __future__ import annotations

from hal.device import DevicePolicy, DeviceSpec
from hal_backends.gpu.policies import PEER_MEMORY

_CUDA_ONLY = {
    "*.deep_gemm*": "DeepGEMM is compiled for Hopper's and Blackwell's matrix instructions",
    "*.flashinfer*": "FlashInfer is compiled for CUDA architectures",
    "*_cudnn*": "cuDNN runs on NVIDIA's chips",
    "*.collective.*symmetric*": "torch's symmetric memory over NVLink",
    "*.collective.*pcie_ipc*": "CUDA IPC handles",
}
# vLLM's platforms/rocm.py: custom all-reduce on gfx94x and gfx95x only; elsewhere RCCL.
_KNOWN_TO_WORK = ("gfx942", "gfx950")


def device_policy(device: DeviceSpec) -> DevicePolicy:
    disabled = dict(_CUDA_ONLY)
    if device.arch not in _KNOWN_TO_WORK:
        why = (
            "exchange through peers' memory is known to work on gfx942 and gfx950 only; "
            f"{device.arch} uses RCCL (vLLM platforms/rocm.py)"
        )
        disabled |= dict.fromkeys(PEER_MEMORY, why)
    return DevicePolicy(disabled=disabled)
