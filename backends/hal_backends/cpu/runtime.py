"""The CPU runtime: threads, memory, and process groups over gloo on the loopback interface."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from hal.device import DeviceSpec
from hal.errors import DetectionError
from hal.host import LocalHost
from hal.ops.collective import CollectiveGroup
from hal_backends.torch_group import TorchGroup
from hal_kernels.cpu_capture import CapturedStep, SharedMemory, capture
from hal_kernels.openmp_runtime import parallel_runtime

# A rank that is silent for this long counts as dead: its peers' collectives raise.
COLLECTIVE_TIMEOUT_S = 10.0
# The ranks start at different times and each imports torch.
RENDEZVOUS_TIMEOUT_S = 120.0


class CpuRuntime:
    """The host's CPU with one thread per usable core."""

    def __init__(self, device: DeviceSpec) -> None:
        """Raises DetectionError if the compiled kernels would run on one of several cores only."""
        self._num_threads = max(1, device.num_cores)
        runtime, why = parallel_runtime()
        if runtime is None and self._num_threads > 1:
            raise DetectionError(
                f"CPU runtime of {device.device_id}",
                f"torch's OpenMP threads, for kernels on {self._num_threads} cores",
                why,
                "install a torch build with OpenMP, or give the process one core",
            )
        torch.set_num_threads(self._num_threads)
        self._captures = SharedMemory()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def create_group(self, rank: int, world_size: int, rendezvous: str) -> CollectiveGroup:
        """Joins `world_size` processes of this host. `rendezvous`: path of a file not yet there.

        A file store and the loopback interface: nothing listens where another host could reach it.
        Raises RuntimeError if the ranks do not meet in time.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # The ranks share the cores.
        self._num_threads = max(1, self._num_threads // world_size)
        torch.set_num_threads(self._num_threads)
        store = FileStore(rendezvous, world_size)
        store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        return TorchGroup(rank, world_size, dist.group.WORLD)

    def free_memory_bytes(self) -> int:
        """MemAvailable, lowered to what a cgroup limit leaves."""
        host = LocalHost()
        meminfo = host.read_text("/proc/meminfo") or ""
        found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
        free = int(found.group(1)) * 1024 if found else 0
        limit = (host.read_text("/sys/fs/cgroup/memory.max") or "max").strip()
        used = (host.read_text("/sys/fs/cgroup/memory.current") or "0").strip()
        return free if limit == "max" else min(free, max(0, int(limit) - int(used)))

    def capture(
        self, step: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> CapturedStep:
        """See `hal_kernels.cpu_capture.capture`. The results of all captures share memory."""
        return capture(step, inputs, self._captures)

    def synchronize(self) -> None:
        """Nothing is asynchronous on this device."""
