"""The CPU's candidates: one file per op family. None of them imports torch before `load`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal_backends.cpu.candidates import (
    attention,
    collective,
    dense_attention,
    elementwise,
    embedding,
    gemm,
    products,
    rope_kv_write,
    sampling,
)

Offer = Callable[[DeviceSpec], Sequence[KernelCandidate]]

_OFFERS: Mapping[str, Offer] = MappingProxyType(
    {
        "attention": attention.candidates,
        "dense_attention": dense_attention.candidates,
        "gemm": gemm.candidates,
        "grouped_gemm": products.grouped_candidates,
        "batched_gemm": products.batched_candidates,
        "norm.rms": elementwise.norm_candidates,
        "layer_norm": elementwise.layer_norm_candidates,
        "rope": elementwise.rope_candidates,
        "kv_write": elementwise.kv_write_candidates,
        "rope_kv_write": rope_kv_write.candidates,
        "activation.gated": elementwise.activation_candidates,
        "embedding": embedding.candidates,
        "sample.top_k_top_p": sampling.candidates,
        "collective": collective.candidates,
    }
)


def candidates_for(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """Every implementation of `op` on this CPU; none for an op it has nothing for."""
    offer = _OFFERS.get(op)
    return () if offer is None else offer(device)
