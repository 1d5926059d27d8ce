"""The CPU's one-pass norm, rope and KV write against float64 torch, and against its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal_kernels.kv_write.cpu import bind_kv_write
from hal_kernels.norm.cpu import bind_rms_norm
from hal_kernels.rope.cpu import bind_rope
from hal_kernels.rope_kv_write.cpu import bind_rope_kv_write

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
EPS = 1e-6
POSITIONS, BLOCKS, BLOCK = 200, 9, 16


class Case:
    """Random rows, caches full of NaN, and distinct slots."""

    def __init__(
        self, tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype, rotary: int, *, norms: bool
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.rotary = 5, 2, 64, rotary
        self.dtype, self.kv_dtype = dtype, kv_dtype
        frequencies = 1e4 ** (-torch.arange(0, rotary, 2).double() / rotary)
        angles = torch.arange(POSITIONS).double()[:, None] * frequencies
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
        width = (self.heads + 2 * self.kv_heads) * self.dim
        self.rows = (torch.randn(tokens, width) * 3).to(dtype)
        self.positions = torch.randint(0, POSITIONS, (tokens,))
        self.slots = torch.randperm(BLOCKS * BLOCK)[:tokens]
        self.weights = [torch.rand(self.dim) + 0.5 for _ in range(2)] if norms else [None, None]

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        return rows.split(sizes, dim=1)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (BLOCKS, BLOCK, self.kv_heads, self.dim)
        return tuple(torch.full(shape, float("nan"), dtype=self.kv_dtype) for _ in range(2))

    def bind(self, **changes: Any) -> Any:
        q_weight, k_weight = self.weights
        static: dict[str, Any] = {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.dim,
            "v_head_dim": self.dim,
            "rotary_dim": self.rotary,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "cos_sin_cache": self.table,
            "q_weight": q_weight,
            "k_weight": k_weight,
            "eps": EPS,
        }
        return bind_rope_kv_write(**(static | changes))

    def exact(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Normed and rotated, in float64: [T, heads * dim]."""
        heads = x.double().view(x.shape[0], -1, self.dim)
        if weight is not None:
            mean = heads.square().mean(-1, keepdim=True)
            heads = heads / (mean + EPS).sqrt() * weight.double()
        half = self.rotary // 2
        table = self.table.double()[self.positions][:, None, :]
        cosine, sine = table[..., :half], table[..., half:]
        a, b, rest = heads[..., :half], heads[..., half : self.rotary], heads[..., self.rotary :]
        turned = (a * cosine - b * sine, b * cosine + a * sine, rest)
        return torch.cat(turned, dim=-1).flatten(1)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("tokens", "rotary"), [(1, 64), (3, 32), (70, 64)])
def test_rows_and_caches(
    tokens: int, rotary: int, dtype: torch.dtype, kv_dtype: torch.dtype, norms: bool
) -> None:
    case = Case(tokens, dtype, kv_dtype, rotary, norms=norms)
    rows = case.rows.clone()
    q, k, v = case.split(rows)
    k_cache, v_cache = case.caches()
    got = case.bind()(q, k, v, case.positions, k_cache, v_cache, case.slots)
    exact_q, exact_k = (
        case.exact(x, w) for x, w in zip(case.split(case.rows)[:2], case.weights, strict=True)
    )
    assert (got.double() - exact_q).abs().max() <= TOLERANCE[dtype] * exact_q.abs().max()
    written = k_cache.flatten(0, 1)[case.slots].flatten(1)
    worst = max(TOLERANCE[dtype], TOLERANCE[kv_dtype])
    assert (written.double() - exact_k).abs().max() <= worst * exact_k.abs().max()
    values = v_cache.flatten(0, 1)[case.slots].flatten(1)
    assert torch.equal(values, case.split(case.rows)[2].to(kv_dtype))
    others = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    others[case.slots] = False
    assert k_cache.flatten(0, 1)[others].isnan().all()
    assert v_cache.flatten(0, 1)[others].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_bits_are_those_of_the_calls_apart(dtype: torch.dtype) -> None:
    case = Case(11, dtype, dtype, 64, norms=True)
    rows, apart = case.rows.clone(), case.rows.clone()
    caches, other = case.caches(), case.caches()
    q, k, v = case.split(rows)
    got = case.bind()(q, k, v, case.positions, *caches, case.slots)
    q, k, v = case.split(apart)
    normed = []
    for x, weight in zip((q, k), case.weights, strict=True):
        assert weight is not None
        norm = bind_rms_norm(hidden_size=case.dim, dtype=dtype, weight=weight, eps=EPS)
        normed.append(norm(x.reshape(-1, case.dim)).view(11, -1))
    shape = {"num_kv_heads": case.kv_heads, "head_dim": case.dim, "dtype": dtype}
    bind_rope(num_heads=case.heads, rotary_dim=64, cos_sin_cache=case.table, **shape)(
        *normed, case.positions
    )
    bind_kv_write(**shape)(normed[1], v, *other, case.slots)
    assert torch.equal(got, normed[0])
    for one, two in zip(caches, other, strict=True):
        written = [c.flatten(0, 1)[case.slots] for c in (one, two)]
        assert torch.equal(*written)


@pytest.mark.parametrize(("positions", "slots"), [(-1, 0), (POSITIONS, 0), (0, BLOCKS * BLOCK)])
def test_an_index_outside_is_an_error_and_writes_nothing(positions: int, slots: int) -> None:
    case = Case(3, torch.float32, torch.float32, 64, norms=False)
    case.positions[1], case.slots[1] = positions, slots
    caches = case.caches()
    with pytest.raises(IndexError, match="token 1 of a step"):
        case.bind()(*case.split(case.rows.clone()), case.positions, *caches, case.slots)
    assert sum(int((~c.isnan()).any(-1).any(-1).sum()) for c in caches) == 4  # tokens 0 and 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"head_dim": 72}, "head_dim a multiple of 16"),
        ({"rotary_dim": 48}, "rotary_dim a multiple of 32"),
        ({"v_head_dim": 8}, "v_head_dim a multiple of 16"),
        ({"q_weight": torch.ones(64)}, "both norm weights"),
        ({"q_weight": torch.ones(8), "k_weight": torch.ones(64)}, "norm weight needs shape"),
        ({"cos_sin_cache": torch.ones(4, 32)}, "cos_sin_cache needs shape"),
    ],
)
def test_what_it_does_not_support_is_refused(changes: dict[str, Any], what: str) -> None:
    case = Case(1, torch.float32, torch.float32, 64, norms=False)
    with pytest.raises(ValueError, match=what):
        case.bind(**changes)
