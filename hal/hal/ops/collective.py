"""Collectives over the processes of a device group.

The group passed at binding is the runtime's communicator: an object with the torch.distributed
calls of the same names (`CollectiveGroup`), so that no engine code reaches torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from hal.errors import RequestError
from hal.ops.formats import DTYPE_BYTES
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

PeerAccess = Literal["none", "unknown", "claimed", "verified"]  # worst to best
CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"
]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
)


class CollectiveGroup(Protocol):
    """What a runtime gives for a group of processes: exchange of raw tensors with every peer."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, in rank order: the one primitive the reference collectives need."""
        ...

    @property
    def process_group(self) -> Any:
        """The torch.distributed process group (or the vendor's), for real implementations."""
        ...

    def add_check(self, check: Callable[[], None]) -> None:
        """For an implementation whose kernels cannot raise: `check` raises what they left behind,
        such as the rank that did not come. It may wait for the device."""
        ...

    def check(self) -> None:
        """Calls every check. The engine does so once a step on each rank, when it needs the step's
        results anyway. Raises what they raise, a RuntimeError."""
        ...

    def close(self) -> None:
        """Leaves the group; the same process may join another one afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest(OpRequest):
    """One collective over `world_size` ranks of x[T, width].

    Raises RequestError if reduce_scatter cannot share the width equally.
    """

    op: ClassVar[str] = "collective"

    kind: CollectiveKind
    world_size: int
    width: int
    dtype: str
    transport: str = "host"  # what links the ranks: host, pcie, nvlink, xgmi, …
    p2p: PeerAccess = "none"
    is_full_mesh: bool = True  # every pair of ranks is linked directly by the transport
    distance: str = ""  # of the farthest pair: PIX, PXB, PHB, NODE or SYS; "" if not known

    def __post_init__(self) -> None:
        if self.kind == "reduce_scatter" and self.width % self.world_size:
            raise RequestError(
                "reduce_scatter request",
                f"a width that {self.world_size} ranks share equally",
                str(self.width),
                "pad the width",
            )

    @property
    def label(self) -> str:
        return f"collective.{self.kind}"


def reference(request: CollectiveRequest, *, group: CollectiveGroup) -> Callable[..., Any]:
    """Golden collectives by full exchange, summed in rank order in float32 (integers in int64).

    all_reduce(x) -> sum, in place; all_gather(x[T, W]) -> [T, W * world]; reduce_scatter(x[T, W])
    -> [T, W / world]; all_to_all(x[T, W]) -> T split in world parts, part i from rank i;
    broadcast(x) -> rank 0's x, in place; barrier() -> None. all_to_all raises ValueError if the
    ranks cannot share T equally; all raise it if the group is not of the request's size.
    """
    import torch

    rank, world = group.rank, group.world_size
    if world != request.world_size:
        raise ValueError(f"collective: required {request.world_size} ranks, found {world}")

    def total(x: torch.Tensor) -> torch.Tensor:
        parts = group.exchange(x)
        exact = torch.int64 if not x.dtype.is_floating_point else torch.float32
        dtype = torch.float64 if x.dtype == torch.float64 else exact
        return torch.stack([p.to(dtype) for p in parts]).sum(dim=0).to(x.dtype)

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(total(x))

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(group.exchange(x), dim=-1)

    def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
        return total(x).chunk(world, dim=-1)[rank].contiguous()

    def all_to_all(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % world:
            raise ValueError(f"all_to_all: required rows in {world} parts, found {x.shape[0]}")
        return torch.cat([p.chunk(world, dim=0)[rank] for p in group.exchange(x)], dim=0)

    def broadcast(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(group.exchange(x)[0])

    def barrier() -> None:
        group.exchange(torch.ones(1))

    kernels: dict[str, Callable[..., Any]] = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
        "barrier": barrier,
    }
    return kernels[request.kind]


def flops(request: CollectiveRequest, tokens: int) -> float:
    reduces = request.kind in ("all_reduce", "reduce_scatter")
    return float(tokens * request.width * (request.world_size - 1)) if reduces else 0.0


def bytes_moved(request: CollectiveRequest, tokens: int) -> float:
    """Bytes that each rank must send, by the ring bound of the collective."""
    if request.kind == "barrier" or request.world_size == 1:
        return 0.0
    size = float(tokens * request.width * DTYPE_BYTES[request.dtype])
    share = (request.world_size - 1) / request.world_size
    factor = {"all_reduce": 2 * share, "all_gather": request.world_size * share, "broadcast": 1.0}
    return size * factor.get(request.kind, share)


FAMILY = OpFamily(
    name="collective",
    request_type=CollectiveRequest,
    summary="all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    kinds=COLLECTIVE_KINDS,
)
