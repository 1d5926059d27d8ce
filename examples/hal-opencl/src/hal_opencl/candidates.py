"""What the plug-in offers for each op, and the limits of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hal.candidates import Bind, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.ops.attention import AttentionRequest
from hal.ops.embedding import EmbeddingRequest
from hal.ops.gemm import GemmRequest
from hal.ops.kv_write import KvWriteRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.rope import RopeRequest
from hal.ops.sampling import TopKTopPRequest
from hal.reasons import Reason
from hal_opencl.limits import features, gather, limit, scope, tier_of

_FLOAT = ("float32",)
_LANES = 16  # a vector of the attention kernel
_MAX_HEAD_DIM = 256  # its rows are in private memory

Reasons = Callable[[DeviceSpec], Callable[..., list[Reason]]]


def candidates_for(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """One candidate an op, for the ops of a decoder."""
    if op not in _OFFERS:
        return ()
    name, kernel, summary, reasons, load = _OFFERS[op]
    return (
        KernelCandidate(
            name=f"opencl.{op}.{name}",
            op=op,
            tier=tier_of(device),
            summary=summary,
            not_supported_reasons=reasons(device),
            load=lambda: load(device),
            leaf=(Leaf(kind="kernel", name=kernel),),
            distribution="hal-opencl",
        ),
    )


def _gemm(device: DeviceSpec) -> Callable[[GemmRequest], list[Reason]]:
    return lambda r: gather(
        scope("dtype", r.dtype, _FLOAT),
        scope("weight format", r.weight_format.name, _FLOAT),
        scope("out_dtype", r.out_dtype or r.dtype, _FLOAT),
    )


def _norm(device: DeviceSpec) -> Callable[[RmsNormRequest], list[Reason]]:
    return lambda r: gather(
        scope("dtype", r.dtype, _FLOAT), scope("quantize", r.quantize, ("none",))
    )


def _float(device: DeviceSpec) -> Callable[..., list[Reason]]:
    def reasons(request: RopeRequest | EmbeddingRequest | GatedActivationRequest) -> list[Reason]:
        return scope("dtype", request.dtype, _FLOAT)

    return reasons


def _kv_write(device: DeviceSpec) -> Callable[[KvWriteRequest], list[Reason]]:
    return lambda r: gather(
        scope("dtype", r.dtype, _FLOAT),
        scope("kv_dtype", r.kv_dtype, _FLOAT),
        scope("kv_format", r.kv_format, ("",)),
        # The cache is host memory: without sharing, all of it would travel for a few rows.
        features(device, "memory.shared"),
    )


def _attention(device: DeviceSpec) -> Callable[[AttentionRequest], list[Reason]]:
    return lambda r: gather(
        scope("phase", r.phase, ("prefill", "decode")),
        scope("dtype", r.dtype, _FLOAT),
        scope("kv_dtype", r.kv_dtype, _FLOAT),
        *(
            limit(
                what,
                size,
                f"a multiple of {_LANES}, at most {most}",
                is_met=size % _LANES == 0 and size <= most,
            )
            for what, size, most in (
                ("head_dim", r.head_dim, _MAX_HEAD_DIM),
                ("v_head_dim", r.v_head_dim, _MAX_HEAD_DIM),
            )
        ),
        limit(
            "block_size",
            r.block_size,
            f"a multiple of {_LANES}",
            is_met=r.block_size % _LANES == 0,
        ),
    )


def _top_k_top_p(device: DeviceSpec) -> Callable[[TopKTopPRequest], list[Reason]]:
    return lambda r: features(device, "fp64")


def _load_gemm(device: DeviceSpec) -> Bind:
    from hal_opencl.gemm import load_gemm

    return load_gemm(device)


def _load_attention(device: DeviceSpec) -> Bind:
    from hal_opencl.attention import load_attention

    return load_attention(device)


def _small(name: str) -> Callable[[DeviceSpec], Bind]:
    def load(device: DeviceSpec) -> Bind:
        from hal_opencl import small_ops

        bind: Bind = getattr(small_ops, name)(device)
        return bind

    return load


# op: implementation, kernel function, summary, limits, loader
_OFFERS: dict[str, tuple[str, str, str, Reasons, Callable[[DeviceSpec], Bind]]] = {
    "gemm": ("panels", "gemm", "panels of 32 columns, tiles in registers", _gemm, _load_gemm),
    "norm.rms": ("rows", "rms_norm", "residual added in the pass", _norm, _small("load_norm")),
    "rope": ("tokens", "rope", "in place on strided rows", _float, _small("load_rope")),
    "activation.gated": (
        "rows",
        "gated_activation",
        "exponential in vectors",
        _float,
        _small("load_activation"),
    ),
    "embedding": ("rows", "embedding", "whole rows", _float, _small("load_embedding")),
    "kv_write": (
        "rows",
        "kv_write",
        "whole rows to their slots",
        _kv_write,
        _small("load_kv_write"),
    ),
    "attention": (
        "paged",
        "attend",
        "online softmax, sixteen keys at a time, transposed in registers",
        _attention,
        _load_attention,
    ),
    "sample.top_k_top_p": (
        "counting",
        "top_k_top_p",
        "bounds by counting bytes of ordered keys, no sort",
        _top_k_top_p,
        _small("load_top_k_top_p"),
    ),
}
