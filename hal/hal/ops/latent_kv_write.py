"""What stands between the projections of latent attention and the attention itself, as one call.

Keys and values are one row a token (latent, window or index key). Its norm, the rotation of it and
of the queries, and its write into a paged cache in the rounding of its format: one pass over what
`norm.rms`, `rope` and `kv_write` go over one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from hal.ops import kv_write, layer_norm, norm, rope
from hal.ops.checks import one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.kv_write import KvWriteRequest, RowFormat
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest
from hal.ops.rope import RopeRequest

if TYPE_CHECKING:
    import torch

_WHO = "latent_kv_write request"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKvWriteRequest(OpRequest):
    """q[T, num_heads * head_dim] in place, rows[T, row_dim] into a cache of `kv_format`.

    Rotated are `rotary_dim` values of each query head from q_rotary_start on and of each row from
    row_rotary_start on, in pairs of `style`. norm_dim: values from a row's start that are normed
    first (0: none), by `row_norm_kind`, of which "layer" has a bias. has_q_norm: each query head is
    normed first, by the mean of its squares. num_heads 0: there are no queries.

    Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "latent_kv_write"

    num_heads: int
    head_dim: int
    row_dim: int
    rotary_dim: int
    q_rotary_start: int
    row_rotary_start: int
    norm_dim: int
    block_size: int
    dtype: str
    kv_format: RowFormat
    style: Literal["half_split", "interleaved"] = "interleaved"
    has_q_norm: bool = False
    row_norm_kind: Literal["rms", "layer"] = "rms"

    def __post_init__(self) -> None:
        row_end = self.row_rotary_start + self.rotary_dim
        require(
            _WHO,
            *positive(rotary_dim=self.rotary_dim, row_dim=self.row_dim),
            ("a kv_format", repr(self.kv_format), bool(self.kv_format)),
            (
                f"row_rotary_start + rotary_dim <= row_dim {self.row_dim}",
                f"{self.row_rotary_start} + {self.rotary_dim}",
                self.row_rotary_start >= 0 and row_end <= self.row_dim,
            ),
            (
                f"0 <= norm_dim <= row_dim {self.row_dim}",
                self.norm_dim,
                0 <= self.norm_dim <= self.row_dim,
            ),
            ("queries for has_q_norm", self.num_heads, self.num_heads > 0 or not self.has_q_norm),
            one_of("row_norm_kind", self.row_norm_kind, ("rms", "layer")),
        )
        self.kv_write()  # what is wrong with the row's format is said there
        if self.num_heads:
            self.q_rope()

    def row_norm(self) -> RmsNormRequest | LayerNormRequest:
        """The norm of a row as a request of its own."""
        if self.row_norm_kind == "layer":
            return LayerNormRequest(
                hidden_size=self.norm_dim, has_bias=True, dtype=self.dtype, tokens=self.tokens
            )
        return RmsNormRequest(hidden_size=self.norm_dim, dtype=self.dtype, tokens=self.tokens)

    def q_norm(self) -> RmsNormRequest:
        """The norm of each query head as a request of its own."""
        return RmsNormRequest(
            hidden_size=self.head_dim,
            dtype=self.dtype,
            rows_per_token=self.num_heads,
            tokens=self.tokens,
        )

    def q_rope(self) -> RopeRequest:
        """The rotation of the queries as a request of its own."""
        return self._rope(self.num_heads, self.head_dim, self.q_rotary_start)

    def row_rope(self) -> RopeRequest:
        """The rotation of the rows as a request of its own."""
        return self._rope(1, self.row_dim, self.row_rotary_start)

    def _rope(self, heads: int, head_dim: int, start: int) -> RopeRequest:
        return RopeRequest(
            num_heads=heads,
            num_kv_heads=0,
            head_dim=head_dim,
            rotary_dim=self.rotary_dim,
            rotary_start=start,
            style=self.style,
            dtype=self.dtype,
            tokens=self.tokens,
        )

    def kv_write(self) -> KvWriteRequest:
        """The write as a request of its own."""
        form = KV_FORMATS.get(self.kv_format)
        return KvWriteRequest(
            num_kv_heads=1,
            head_dim=self.row_dim,
            v_head_dim=0,
            block_size=self.block_size,
            dtype=self.dtype,
            kv_dtype=form.element if form is not None and form.is_plain else "uint8",
            kv_format=self.kv_format,
            tokens=self.tokens,
        )


def reference(
    request: LatentKvWriteRequest,
    *,
    cos_sin_cache: torch.Tensor,
    row_weight: torch.Tensor | None = None,
    row_bias: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Callable[..., torch.Tensor | None]:
    """kernel(q or None, rows, positions, cache, slot_mapping) -> q, by the references of the parts,
    each rounding to the activations' dtype. The q that is returned may be the one given, which may
    be overwritten; rows stay as they are.

    row_weight: [norm_dim] with norm_dim, row_bias: the same for a layer norm, q_weight: [head_dim]
    with has_q_norm. Raises ValueError without them.
    """
    import torch

    row_norm = q_norm = None
    if request.norm_dim:
        weight, part = _required("row_weight", row_weight), request.row_norm()
        if isinstance(part, LayerNormRequest):
            bias = _required("row_bias", row_bias)
            row_norm = layer_norm.reference(part, weight=weight, bias=bias, eps=eps)
        else:
            row_norm = norm.reference(part, weight=weight, eps=eps)
    if request.has_q_norm:
        weight = _required("q_weight", q_weight)
        q_norm = norm.reference(request.q_norm(), weight=weight, eps=eps)
    rotate_q = None
    if request.num_heads:
        rotate_q = rope.reference(request.q_rope(), cos_sin_cache=cos_sin_cache)
    rotate_row = rope.reference(request.row_rope(), cos_sin_cache=cos_sin_cache)
    write = kv_write.reference(request.kv_write())

    def kernel(
        q: torch.Tensor | None,
        rows: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor | None:
        own = rows.clone(memory_format=torch.contiguous_format)
        if row_norm is not None:
            own[:, : request.norm_dim] = row_norm(rows[:, : request.norm_dim])
        rotate_row(own, None, positions)
        write(own, cache, slot_mapping)
        if q is None or rotate_q is None:
            return q
        if q_norm is not None:
            q = q_norm(q)
        rotate_q(q, None, positions)
        return q

    return kernel


def _required(name: str, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        raise ValueError(f"latent_kv_write: required {name} for a norm, found None")
    return weight


def _norm_flops(request: RmsNormRequest | LayerNormRequest, tokens: int) -> float:
    if isinstance(request, LayerNormRequest):
        return layer_norm.flops(request, tokens)
    return norm.flops(request, tokens)


def flops(request: LatentKvWriteRequest, tokens: int) -> float:
    total = rope.flops(request.row_rope(), tokens)
    if request.norm_dim:
        total += _norm_flops(request.row_norm(), tokens)
    if request.num_heads:
        total += rope.flops(request.q_rope(), tokens)
    if request.has_q_norm:
        total += norm.flops(request.q_norm(), tokens)
    return total


def bytes_moved(request: LatentKvWriteRequest, tokens: int) -> float:
    """Queries read and written, as far as they change, rows read, their rows of the cache written,
    the table's rows, positions and the norms' weights read."""
    wide = DTYPE_BYTES[request.dtype]
    values = request.head_dim if request.has_q_norm else request.rotary_dim
    queries = 2 * request.num_heads * values * wide
    table = request.rotary_dim * 4 + 8  # with the positions
    row = request.norm_dim * (2 if request.row_norm_kind == "layer" else 1)  # with the bias
    weights = (row + (request.head_dim if request.has_q_norm else 0)) * wide
    write = kv_write.bytes_moved(request.kv_write(), tokens)
    return float(tokens * (queries + table) + weights) + write


FAMILY = OpFamily(
    name="latent_kv_write",
    request_type=LatentKvWriteRequest,
    summary="Norms, rotary position embedding and write of one row a token as one call",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
