"""The OpenCL devices of this machine; without one the kernel tests are skipped, with the reason."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from hal.device import DeviceSpec
from hal.host import LocalHost
from hal_opencl.detection import describe_device, detect_devices, missing_dependencies

SEED_BYTES = 4


@pytest.fixture(scope="session")
def device() -> DeviceSpec:
    """The first device, as detection describes it."""
    host = LocalHost()
    detected = detect_devices(host)
    if not detected:
        reasons = [f"{item.software}: {item.remedy}" for item in missing_dependencies(host)]
        pytest.skip(f"no OpenCL device: {'; '.join(reasons) or 'neither pyopencl nor a platform'}")
    return describe_device(detected[0], host)


@pytest.fixture(params=["in place", "copied"])
def any_memory(request: pytest.FixtureRequest, device: DeviceSpec) -> DeviceSpec:
    """The device as it is, and as one that has memory of its own."""
    if request.param == "copied":
        return replace(device, features=device.features - {"memory.shared"})
    if "memory.shared" not in device.features:
        pytest.skip(f"{device.name} has memory of its own")
    return device


@pytest.fixture
def generator() -> torch.Generator:
    seed = int.from_bytes(os.urandom(SEED_BYTES), "big")
    print(f"seed {seed}")  # shown when the test fails
    return torch.Generator().manual_seed(seed)
