"""How many multiprocessors a device has: one answer for what is launched and for what tunes it.

Free of torch until it is asked.
"""

from __future__ import annotations

from hal.device import DeviceSpec


def compute_units(device: DeviceSpec) -> int:
    """What is stated of the device, else what torch reports of the one that this process uses; 0
    where neither says: kernels run elsewhere than on a device of torch's CUDA or ROCm."""
    stated = int(device.attributes.get("compute_units") or 0)
    if stated or device.torch_device != "cuda":
        return stated
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
