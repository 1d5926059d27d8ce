"""An accelerator made usable in this process, through torch's device of its platform.

The vendor's torch extension is imported here and nowhere else, when a device of it is asked for;
torch's own loading of extensions is off. Nothing falls back: a platform that does not answer, an
ambiguous device and a missing collective backend are errors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from hal.device import DeviceSpec
from hal.errors import DetectionError
from hal.ops.collective import CollectiveGroup
from hal_backends.torch_group import TorchGroup

# Backend -> the module that gives torch its device type; elsewhere torch itself has it.
EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {
        "ascend": "torch_npu",
        "biren": "torch_supa",
        "cambricon": "torch_mlu",
        "enflame": "torch_gcu",
        "gaudi": "habana_frameworks.torch",
        "kunlunxin": "torch_xmlir",
        "moore_threads": "torch_musa",
        "tecorigin": "torch_sdaa",
    }
)
# A rank that is silent for this long counts as dead: its peers' collectives raise.
COLLECTIVE_TIMEOUT_S = 60.0
# The ranks start at different times, and each loads the vendor's libraries.
RENDEZVOUS_TIMEOUT_S = 300.0
_WARM_UP_RUNS = 2


def create_runtime(device: DeviceSpec) -> TorchRuntime:
    """Loads what the device needs. Raises DetectionError if the platform does not answer."""
    return TorchRuntime(device, load_accelerator(device))


def load_accelerator(device: DeviceSpec) -> Any:
    """The namespace of the device's type in torch (`torch.cuda`, `torch.npu`, …), once it works."""
    who = f"runtime of {device.device_id} ({device.backend})"
    extension = EXTENSIONS.get(device.backend)
    if extension is not None:
        try:
            importlib.import_module(extension)
        except ImportError as error:
            raise DetectionError(
                who,
                f"the vendor's torch extension {extension}",
                f"{type(error).__name__}: {error}",
                f"install {extension} in the version that matches torch {torch.__version__}",
            ) from error
    kind = device.torch_device.partition(":")[0]
    accelerator = getattr(torch, kind, None)
    if accelerator is None or not accelerator.is_available():
        raise DetectionError(
            who,
            f"torch.{kind} with a device",
            "torch has no such device type" if accelerator is None else "is_available() is False",
            f"install a torch {torch.__version__} built for {device.backend}, and its driver",
        )
    return accelerator


class TorchRuntime:
    """One device of an accelerator's platform, current in this process.

    accelerator: the namespace of its type in torch, as `load_accelerator` gives it.
    """

    def __init__(self, device: DeviceSpec, accelerator: Any) -> None:
        """Raises DetectionError if it is not clear which of torch's devices it is."""
        self._device = device
        self._accelerator = accelerator
        kind = device.torch_device.partition(":")[0]
        self._torch_device = torch.device(kind, torch_index(device, accelerator))
        accelerator.set_device(self._torch_device)

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    @property
    def num_threads(self) -> int:
        """Threads of the host beside the device."""
        return torch.get_num_threads()

    def create_group(self, rank: int, world_size: int, rendezvous: str) -> CollectiveGroup:
        """Joins `world_size` processes of this host. `rendezvous`: path of a file not yet there.

        Raises DetectionError if no name of the platform's library is known to torch.distributed,
        RuntimeError if the ranks do not meet in time.
        """
        backend = str(self._device.attributes.get("torch_backend", ""))
        if not backend:
            raise DetectionError(
                f"collectives of {self._device.device_id} ({self._device.backend})",
                "the name that the platform's library has in torch.distributed",
                "none is known",
                "run on one device, or add the name to the capability database",
            )
        store = FileStore(rendezvous, world_size)
        store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        return TorchGroup(rank, world_size, dist.group.WORLD)

    def free_memory_bytes(self) -> int:
        """What the driver says is free, never more than the device is known to have: one platform
        answers with the host's memory."""
        free = int(self._accelerator.mem_get_info(self._torch_device)[0])
        return min(free, self._device.memory_bytes) if self._device.memory_bytes else free

    def synchronize(self) -> None:
        self._accelerator.synchronize(self._torch_device)

    def reaches(self, peer: torch.device) -> bool | None:
        """What the platform says of peer access; None where its torch has no such question."""
        ask = getattr(self._accelerator, "can_device_access_peer", None)
        return None if ask is None else bool(ask(self._torch_device, peer))

    def copy_to_peer(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """torch copies directly where the platform claims peer access, which it enables."""
        destination.copy_(source)

    def create_stream(self) -> Any:
        """A stream of the device beside the current one."""
        return self._accelerator.Stream(device=self._torch_device)

    def capture(
        self, step: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> CapturedGraph:
        """See `hal.hookspecs.CapturingRuntime`; `step` runs several times.

        Raises DetectionError if the device has no verified graph capture.
        """
        if "graph_capture" not in self._device.features:
            raise DetectionError(
                f"graph capture on {self._device.device_id} ({self._device.arch})",
                "graph_capture, verified",
                "not among the device's features",
                "run eagerly",
            )
        side = self.create_stream()
        side.wait_stream(self._accelerator.current_stream(self._torch_device))
        with self._accelerator.stream(side):
            for _ in range(_WARM_UP_RUNS):
                step()
        self._accelerator.current_stream(self._torch_device).wait_stream(side)
        graph = _graph_type(self._accelerator)()
        with self._accelerator.graph(graph):
            output = step()
        captured = CapturedGraph(output=output, replay=graph.replay, inputs=tuple(inputs))
        captured.replay()  # capturing launches nothing
        return captured


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """See `hal.hookspecs.CapturedStep`. inputs: kept alive, as the graph reads their memory."""

    output: torch.Tensor
    replay: Callable[[], None]
    inputs: tuple[torch.Tensor, ...]
    num_launches: int = 0


def _graph_type(accelerator: Any) -> Any:
    """`CUDAGraph`, or what the platform calls it ("NPUGraph", "MUSAGraph", "XPUGraph")."""
    names = [name for name in dir(accelerator) if name.endswith("Graph") and name[0].isupper()]
    if not names:
        raise DetectionError(
            "graph capture", "a graph type of the platform's torch", "none", "run eagerly"
        )
    return getattr(accelerator, names[0])


def torch_index(device: DeviceSpec, accelerator: Any) -> int:
    """Which of torch's devices it is: as detection saw, by PCI address, or the only one."""
    _, _, ordinal = device.torch_device.partition(":")
    if ordinal:
        return int(ordinal)
    count = int(accelerator.device_count())
    if count == 1:
        return 0
    addresses = [_pci_address(accelerator.get_device_properties(i)) for i in range(count)]
    if addresses.count(device.device_id) == 1:
        return addresses.index(device.device_id)
    raise DetectionError(
        f"runtime of {device.device_id} ({device.backend})",
        "one of torch's devices with that address",
        f"{count} devices: {', '.join(a or 'address not told' for a in addresses)}",
        "make one device visible",
    )


def _pci_address(properties: Any) -> str:
    """ "0000:3b:00.0" of torch's device properties, "" where they do not tell."""
    parts = [getattr(properties, f"pci_{p}_id", None) for p in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return ""
    domain, bus, slot = (int(part) for part in parts if part is not None)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
