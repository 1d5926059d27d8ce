"""An OpenCL device made usable in this process."""

from __future__ import annotations

import re
from typing import Any

import torch

from hal.device import DeviceSpec
from hal.host import LocalHost
from hal_opencl.opencl_device import open_device


class OpenClRuntime:
    """Opens the device; its kernels and its queue are shared with the bound kernels."""

    def __init__(self, spec: DeviceSpec) -> None:
        """Raises DetectionError if the device is no longer there."""
        self.spec = spec
        self._opened = open_device(spec)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_threads(self) -> int:
        return self.spec.num_cores

    def create_group(self, rank: int, world_size: int, rendezvous: str) -> Any:
        """Raises RuntimeError: OpenCL has no collectives."""
        raise RuntimeError(f"hal-opencl: one rank is required, found {world_size}; drop --tp")

    def free_memory_bytes(self) -> int:
        """Of the host, where the KV cache lives, within what a cgroup leaves, and not more than the
        device has: OpenCL has no query for what is free."""
        host = LocalHost()
        meminfo = host.read_text("/proc/meminfo") or ""
        found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
        available = int(found.group(1)) * 1024 if found else self.spec.memory_bytes
        limit = (host.read_text("/sys/fs/cgroup/memory.max") or "max").strip()
        if limit != "max":
            used = int(host.read_text("/sys/fs/cgroup/memory.current") or "0")
            available = min(available, max(0, int(limit) - used))
        return min(available, self.spec.memory_bytes)

    def synchronize(self) -> None:
        self._opened.queue.finish()
