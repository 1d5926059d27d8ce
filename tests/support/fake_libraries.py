"""Stand-ins for vendors' libraries: their signatures as documented, computed plainly.

They check the calls that candidates make, on a machine where no such library runs: names and order
of the arguments, layouts, index arithmetic. What they compute is written from the libraries'
documentation, not from this project's references.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def installed(**modules: dict[str, Any]) -> Iterator[None]:
    """Modules by name ("flash_attn", "flashinfer__gemm" for flashinfer.gemm) with attributes."""
    before = dict(sys.modules)
    for name, attributes in modules.items():
        parts = name.split("__")
        for depth in range(1, len(parts) + 1):
            full = ".".join(parts[:depth])
            module = sys.modules.get(full) if full not in before else None
            if module is None:
                module = types.ModuleType(full)
                module.__path__ = []  # type: ignore[attr-defined]
                sys.modules[full] = module
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        for key, value in attributes.items():
            setattr(sys.modules[".".join(parts)], key, value)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [Q, H, D] over k [S, Hk, D], v [S, Hk, Dv], mask aligned to the last key, in float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    at = torch.arange(k.shape[0])[None, :]
    hidden = torch.zeros_like(scores[0], dtype=torch.bool)
    if causal:
        hidden |= at > last
    if window[0] >= 0:
        hidden |= at < last - window[0]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def pages_of(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    size = cache.shape[1]
    return torch.cat([cache[int(b)] for b in table[: -(-length // size)]])[:length]


def _each(
    q: torch.Tensor,
    starts: torch.Tensor,
    lengths: list[int],
    keys: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    **how: Any,
) -> torch.Tensor:
    out = []
    for i, length in enumerate(lengths):
        rows = q[int(starts[i]) : int(starts[i + 1])]
        out.append(attend(rows, *keys(i, length), **how))
    return torch.cat(out)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn 2: pages of a multiple of 256 tokens."""
    assert block_table is not None
    assert softmax_scale is not None
    assert k.shape[1] % 256 == 0
    lengths = cu_seqlens_k.diff().tolist()
    assert max(lengths) == max_seqlen_k
    return _each(
        q,
        cu_seqlens_q,
        lengths,
        lambda i, n: (pages_of(k, block_table[i], n), pages_of(v, block_table[i], n)),
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """flash-attn 3 (hopper/flash_attn_interface.py)."""
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert cache_seqlens is not None
    assert softmax_scale is not None
    return _each(
        q,
        cu_seqlens_q,
        cache_seqlens.tolist(),
        lambda i, n: (pages_of(k_cache, page_table[i], n), pages_of(v_cache, page_table[i], n)),
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
    )


class PagedWrapper:
    """flashinfer's BatchDecode- and BatchPrefillWithPagedKVCacheWrapper."""

    has_queries = False

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_tensor_cores: bool = False
    ) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        self.plans = 0

    def _plan(
        self,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.plans += 1
        self.starts, self.indptr, self.indices, self.last = starts, indptr, indices, last_page_len
        self.page_size, self.causal, self.scale = page_size, causal, sm_scale
        self.window, self.softcap = window_left, logits_soft_cap or 0.0

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        pages = self.indptr.diff()
        lengths = ((pages - 1) * self.page_size + self.last).tolist()

        def keys(i: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
            own = self.indices[int(self.indptr[i]) : int(self.indptr[i + 1])]
            first, second = paged_kv_cache
            return pages_of(first, own, n).to(q.dtype), pages_of(second, own, n).to(q.dtype)

        return v_scale * _each(
            q,
            self.starts,
            lengths,
            keys,
            scale=self.scale * k_scale,
            causal=self.causal,
            window=(self.window, 0),
            softcap=self.softcap,
        )


class DecodeWrapper(PagedWrapper):
    def plan(self, indptr: torch.Tensor, *arguments: Any, **more: Any) -> None:
        starts = torch.arange(indptr.shape[0])
        self._plan(starts, indptr, *arguments, causal=True, **more)


class PrefillWrapper(PagedWrapper):
    def plan(self, qo_indptr: torch.Tensor, *arguments: Any, **more: Any) -> None:
        self._plan(qo_indptr, *arguments, **more)


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
) -> tuple[torch.Tensor, None]:
    """torch_npu 2.14: BSH over pages [blocks, block_size, H], or TND with running sums."""
    assert actual_seq_lengths_kv is not None
    if input_layout == "BSH":
        assert block_table is not None
        out = []
        for i, length in enumerate(actual_seq_lengths_kv):
            k, v = (
                pages_of(c, block_table[i], length).unflatten(-1, (num_key_value_heads, -1))
                for c in (key, value)
            )
            assert key.shape[1] == block_size
            rows = query[i].unflatten(-1, (num_heads, -1))
            out.append(attend(rows, k, v, scale, causal=False).flatten(1))
        return torch.stack(out), None
    assert input_layout == "TND"
    assert block_table is None, "TND takes no pages"
    assert actual_seq_lengths is not None
    if sparse_mode == 3:
        assert atten_mask is not None
        assert tuple(atten_mask.shape) == (2048, 2048)
    starts = torch.tensor([0, *actual_seq_lengths])
    ends = [0, *actual_seq_lengths_kv]
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    return (
        _each(
            query,
            starts,
            lengths,
            lambda i, n: (key[ends[i] : ends[i + 1]], value[ends[i] : ends[i + 1]]),
            scale=scale,
            causal=sparse_mode == 3,
        ),
        None,
    )
