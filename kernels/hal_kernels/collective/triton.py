"""Binds the collectives over peers' memory to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hal.device import DeviceSpec
from hal.ops.collective import CollectiveGroup, CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.formats import DTYPE_BYTES
from hal_kernels.collective import looped_norm_kernels
from hal_kernels.collective import triton_kernels as kernels
from hal_kernels.collective.layout import (
    BLOCK,
    LOOPED_BLOCK,
    WIRE_GROUP,
    Algorithm,
    BufferLayout,
    buffer_layout,
    norm_row_block,
    norm_warps,
    num_warps,
    part_elements,
)
from hal_kernels.collective.peer_buffers import PeerBuffers, symmetric_buffers
from hal_kernels.collective.triton_variants import MOST_NORM_WIDTH

# Polls of a flag before a peer is given up. Not measured: at the microsecond or so that a poll of
# one's own memory should take, some twenty seconds.
MAX_POLLS = 20_000_000
_WIRES = ("", "fp8_e4m3fn", "fp8_e4m3fnuz")

Kernel = Callable[..., Any]


def bind(
    request: CollectiveRequest,
    device: DeviceSpec,
    *,
    group: CollectiveGroup,
    algorithm: Algorithm,
    wire: str = "",
) -> Kernel:
    """As the op's reference: all_reduce(x) in place; reduce_scatter(x), all_gather(x) to a new
    tensor. Buffers are shared by the call sites of the group with the same largest message.

    Raises RuntimeError where the devices cannot map each other's memory.
    """
    elements = request.tokens.high * request.width
    layout = buffer_layout(
        algorithm,
        request.world_size,
        elements,
        element_bytes=DTYPE_BYTES[request.dtype],
        wire_bytes=1 if wire else 0,
    )
    return bind_to_buffers(
        _group_buffers(group, algorithm, layout, device),
        algorithm,
        is_push=request.transport == "pcie",
        wire=wire,
        **_device_options(device),
    )


def bind_norm(
    request: AllReduceNormRequest,
    device: DeviceSpec,
    *,
    group: CollectiveGroup,
    weight: torch.Tensor,
    eps: float,
) -> Kernel:
    """As the op's reference, but the residual is updated in place. Buffers as of `bind`.

    Raises RuntimeError where the devices cannot map each other's memory.
    """
    block = norm_row_block(request.width, MOST_NORM_WIDTH)
    layout = buffer_layout(
        "one_shot",
        request.world_size,
        request.tokens.high * block,
        element_bytes=DTYPE_BYTES[request.dtype],
        row_block=block,
    )
    return bind_all_reduce_norm(
        _group_buffers(group, "norm", layout, device),
        weight,
        eps,
        is_push=request.transport == "pcie",
        **_device_options(device),
    )


def _group_buffers(
    group: CollectiveGroup, use: str, layout: BufferLayout, device: DeviceSpec
) -> PeerBuffers:
    """The buffers of that use and layout, made with the first call site that needs them."""
    handle = group.process_group
    shared: dict[Any, PeerBuffers] = handle.__dict__.setdefault("hal_peer_buffers", {})
    key = (use, layout)
    if key not in shared:
        shared[key] = symmetric_buffers(handle, layout, torch.device(device.torch_device))
        group.add_check(shared[key].check)
    return shared[key]


def _device_options(device: DeviceSpec) -> dict[str, Any]:
    return {
        "warp_size": int(device.attributes.get("warp_size", 32)),
        "use_ptx": str(device.attributes.get("triton_target", "")).startswith("cuda"),
    }


def bind_to_buffers(
    buffers: PeerBuffers,
    algorithm: Algorithm,
    *,
    is_push: bool,
    wire: str = "",
    use_ptx: bool,
    warp_size: int = 32,
    max_polls: int = MAX_POLLS,
) -> Kernel:
    """The kernel over buffers that are there.

    is_push: write to the peers instead of reading from them. wire: "", "fp8_e4m3fn" or
    "fp8_e4m3fnuz". use_ptx: flags by PTX (NVIDIA), else by atomics. Raises ValueError for another
    wire.
    """
    if wire not in _WIRES:
        raise ValueError(f"collective: required a wire of {_WIRES}, found {wire!r}")
    group = WIRE_GROUP if wire else 0
    layout, world = buffers.layout, buffers.world_size
    shared = {"WORLD": world, "BLOCK": BLOCK, "IS_PUSH": is_push, "USE_PTX": use_ptx}
    rounding = {"WIRE_GROUP": group, "IS_FNUZ": wire.endswith("fnuz")}
    common = (buffers.addresses, buffers.epochs, buffers.status, buffers.rank)
    grid, warps = (layout.programs,), num_warps(warp_size)

    def all_reduce_one_shot(x: torch.Tensor) -> torch.Tensor:
        _check(x, layout.slot_elements, group or 8)
        kernels._all_reduce_one_shot_kernel[grid](
            x, x, *common, x.numel(), layout.slot_elements, layout.half_bytes,
            layout.scale_offset, layout.flag_offset, max_polls, **shared, **rounding,
            num_warps=warps,
        )  # fmt: skip
        return x

    def all_reduce_two_shot(x: torch.Tensor) -> torch.Tensor:
        _check(x, layout.slot_elements * world, group or 8)
        part = part_elements(x.numel(), world)
        kernels._all_reduce_two_shot_kernel[grid](
            x, x, *common, x.numel(), part, layout.slot_elements, layout.half_bytes,
            layout.scale_offset, layout.result_offset, layout.flag_offset, max_polls,
            **shared, **rounding, num_warps=warps,
        )  # fmt: skip
        return x

    def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
        _check(x, layout.slot_elements * world, group or 8)
        rows, width = x.shape[0], x.shape[1] // world
        y = x.new_empty((rows, width))
        kernels._reduce_scatter_kernel[grid](
            x, y, *common, rows, width, layout.slot_elements, layout.half_bytes,
            layout.scale_offset, layout.flag_offset, max_polls, **shared, **rounding,
            num_warps=warps,
        )  # fmt: skip
        return y

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        _check(x, layout.slot_elements, 1)
        y = x.new_empty((x.shape[0], x.shape[1] * world))
        kernels._all_gather_kernel[grid](
            x, y, *common, x.shape[0], x.shape[1], layout.slot_elements, layout.half_bytes,
            layout.flag_offset, max_polls, **shared, num_warps=warps,
        )  # fmt: skip
        return y

    return {
        "one_shot": all_reduce_one_shot,
        "two_shot": all_reduce_two_shot,
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
    }[algorithm]


def bind_all_reduce_norm(
    buffers: PeerBuffers,
    weight: torch.Tensor,
    eps: float,
    *,
    is_push: bool,
    use_ptx: bool,
    warp_size: int = 32,
    max_polls: int = MAX_POLLS,
) -> Kernel:
    """kernel(x[T, H], residual[T, H]) -> (y, residual): all-reduce, residual add and RMS norm in
    one kernel; the residual is updated in place. The layout needs the row_block of
    `norm_row_block`."""
    hidden = weight.numel()
    row = norm_row_block(hidden, MOST_NORM_WIDTH)
    is_looped = hidden > MOST_NORM_WIDTH
    block = LOOPED_BLOCK if is_looped else row
    constants = {
        "WORLD": buffers.world_size, "BLOCK": block, "IS_PUSH": is_push, "USE_PTX": use_ptx,
        "num_warps": norm_warps(block, warp_size),
    }  # fmt: skip

    def all_reduce_norm(
        x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = buffers.layout
        _check(x, layout.slot_elements // row * hidden, 1)
        y = torch.empty_like(x)
        operands = (x, residual, weight, y, buffers.addresses, buffers.epochs, buffers.status)
        sizes = (buffers.rank, x.shape[0], hidden, eps)
        offsets = (layout.slot_elements, layout.half_bytes, layout.flag_offset, max_polls)
        if is_looped:
            looped_norm_kernels._all_reduce_norm_looped_kernel[(layout.programs,)](
                *operands, *sizes, row, *offsets, **constants
            )
        else:
            kernels._all_reduce_norm_kernel[(layout.programs,)](
                *operands, *sizes, *offsets, **constants
            )
        return y, residual

    return all_reduce_norm


def _check(x: torch.Tensor, most: int, multiple: int) -> None:
    """What the kernels take for granted. The bound op has checked the number of tokens already."""
    if x.numel() > most or x.numel() % multiple or not x.is_contiguous():
        raise ValueError(
            f"collective over peers' memory: required a contiguous tensor of at most {most} "
            f"elements, a multiple of {multiple}, found {tuple(x.shape)} with strides {x.stride()}"
        )
