"""KV write: the new keys and values of a step into their slots of the paged cache.

Dense rows of keys and of values, or one row per token (latent, window, index key) in a packed
format of `hal.ops.kv_formats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops.checks import Check, one_of, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import KV_FORMATS, write_rows
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

RowFormat = Literal[
    "", "bf16", "fp16", "fp8_656", "v4_584", "v41_528", "fp4_288", "fp8_132", "fp4_68"
]


_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWriteRequest(OpRequest):
    """k, v [T, num_kv_heads * head_dim] into [num_blocks, block_size, num_kv_heads, head_dim].

    kv_format: "" for these; otherwise rows[T, head_dim] go into one cache of that format, and there
    are no values (num_kv_heads 1, v_head_dim 0). has_scales: dense caches of FP8 hold what is
    written divided by a scale of the keys, and of the values. Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "kv_write"

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    dtype: str
    kv_dtype: str
    kv_format: RowFormat = ""
    has_scales: bool = False

    def __post_init__(self) -> None:
        require("kv_write request", scales_of_fp8(self.kv_dtype, self.has_scales))
        if not self.kv_format:
            return
        require(
            "kv_write request",
            one_of("kv_format", self.kv_format, ("", *KV_FORMATS)),
            (
                "num_kv_heads 1 and v_head_dim 0 for rows of one kind",
                f"{self.num_kv_heads} and {self.v_head_dim}",
                (self.num_kv_heads, self.v_head_dim) == (1, 0),
            ),
            (
                "no has_scales: rows of a format have their own",
                self.has_scales,
                not self.has_scales,
            ),
        )
        dim = KV_FORMATS[self.kv_format].dim
        require(
            "kv_write request",
            (f"head_dim {dim} for {self.kv_format}", self.head_dim, dim in (0, self.head_dim)),
        )


def scales_of_fp8(kv_dtype: str, has_scales: bool) -> Check:
    """That only a cache of FP8 has scales."""
    required = "kv_dtype float8_e4m3fn or float8_e4m3fnuz for scales"
    return required, kv_dtype, not has_scales or kv_dtype in _FLOAT8


def check_scales(who: str, has_scales: bool, k_scale: float, v_scale: float) -> None:
    """Raises ValueError for scales that a request does not have or that nobody can divide by."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not 0.0 < scale < math.inf or (scale != 1.0 and not has_scales):
            required = "a positive number" if has_scales else "1.0, as has_scales=False says"
            raise ValueError(f"{who}: required {name} {required}, found {scale}")


def rounded_to_cache(rows: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Rows as a dense cache holds them: one of FP8 rows / scale in float32, saturated; a NaN stays
    one."""
    import torch

    if dtype.itemsize > 1:
        return rows.to(dtype)
    most = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-most, most).to(dtype)


def reference(
    request: KvWriteRequest, *, k_scale: float = 1.0, v_scale: float = 1.0
) -> Callable[..., None]:
    """Golden write. slot = block * block_size + offset; no slot appears twice in one call.

    With a kv_format the kernel is (rows[T, head_dim], cache, slot_mapping) -> None. Scales: with
    has_scales. Raises ValueError for others.
    """
    check_scales("kv_write", request.has_scales, k_scale, v_scale)

    def kernel_rows(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        write_rows(request.kv_format, cache, request.block_size, slot_mapping, rows)

    def kernel(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        k_rows = k_cache.view(-1, request.num_kv_heads, request.head_dim)
        v_rows = v_cache.view(-1, request.num_kv_heads, request.v_head_dim)
        for rows, given, scale in ((k_rows, k, k_scale), (v_rows, v, v_scale)):
            whole = given.reshape(-1, *rows.shape[1:])
            rows[slot_mapping] = rounded_to_cache(whole, rows.dtype, scale)

    return kernel_rows if request.kv_format else kernel


def flops(request: KvWriteRequest, tokens: int) -> float:
    return 0.0


def bytes_moved(request: KvWriteRequest, tokens: int) -> float:
    if request.kv_format:
        row = KV_FORMATS[request.kv_format].row_bytes(request.head_dim)
        return float(tokens * (request.head_dim * DTYPE_BYTES[request.dtype] + row + 8))
    values = tokens * request.num_kv_heads * (request.head_dim + request.v_head_dim)
    slots = tokens * 8
    return float(slots + values * (DTYPE_BYTES[request.dtype] + DTYPE_BYTES[request.kv_dtype]))


FAMILY = OpFamily(
    name="kv_write",
    request_type=KvWriteRequest,
    summary="Write of new keys and values into the paged cache",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
